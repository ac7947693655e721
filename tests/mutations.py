# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Samplers that are wrong in one place, and the tests that find each of them out.

    python tests/mutations.py [--only NAME ...]

copies the package and its tests, plants one error at a time, and runs the tests that are to
notice; an error that none notices is an error of the tests, and the script then ends with 1.
"""

import argparse
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    #: file of the package
    file: str
    #: what stands there once, and what is put in its place
    right: str
    wrong: str
    #: the tests that are to notice, as arguments of pytest in ``tests/``
    tests: str


ALGEBRA = "laws/test_algebra.py"

MUTATIONS = {
    "gradient at the old position (SGHMC, Euler)": Mutation(
        "methods/sghmc.py", "evaluation = gradient(position)", "evaluation = gradient(state.z)",
        f"{ALGEBRA} -k SGHMC",
    ),
    "gradient after the whole drift (ABOBA, NOGIN)": Mutation(
        "kernels/splittings.py", "partial(kicks_around, before=0.5)",
        "partial(kicks_around, before=1.0)", f"{ALGEBRA} -k CCAdL",
    ),
    "half a kick too little (BAOAB)": Mutation(
        "kernels/splittings.py", "kick(momentum, evaluation.gradient, h), kept",
        "kick(momentum, evaluation.gradient, h / 2), kept", f"{ALGEBRA} -k baoab",
    ),
    "half the added noise (SGLD)": Mutation(
        "kernels/integrators.py", "jnp.sqrt(2 * step_size * temperature) * noise",
        "jnp.sqrt(step_size * temperature) * noise", f"{ALGEBRA} -k SGLD",
    ),
    "noise of Euler's method in the exact map O": Mutation(
        "kernels/integrators.py", "jnp.sqrt(2 * step_size * diffusion * phi(x)) * noise",
        "jnp.sqrt(2 * step_size * diffusion) * noise", f"{ALGEBRA} -k badodab",
    ),
    "noise that is not taken out of the middle (CCAdL, symmetric)": Mutation(
        "kernels/integrators.py", "before, after = (1 + 4 * u / rest - delta) ** -0.5",
        "before, after = (1 + 3 * u / rest - delta) ** -0.5", f"{ALGEBRA} -k symmetric",
    ),
    "temperature left out of the added noise (SGHMC)": Mutation(
        "methods/sghmc.py", "kept = -given.temperature * xp.expm1", "kept = -1.0 * xp.expm1",
        f"{ALGEBRA} -k SGHMC",
    ),
    "thermostat driven by the old momentum (SGNHT, Euler)": Mutation(
        "methods/sgnht.py", "xi = adapted(xi, p, h)",
        "xi = adapted(xi, state.dynamics.momentum, h)", f"{ALGEBRA} -k thermostat",
    ),
    "noise of half a kick taken for heat (NOGIN)": Mutation(
        "methods/ccadl.py", "jnp.mean(p**2) - added", "jnp.mean(p**2)",
        f"{ALGEBRA} -k thermostat",
    ),
    "twice the covariance in the control (NOGIN)": Mutation(
        "methods/ccadl.py", "1 / (1 + damping + h**2 * v / (4 * temperature))",
        "1 / (1 + damping + h**2 * v / (2 * temperature))", f"{ALGEBRA} -k CCAdL",
    ),
    "metric at a member without the prior": Mutation(
        "tuning/ensemble.py", "jnp.maximum(variance, 0.0) + jnp.maximum(prior, 0.0)",
        "jnp.maximum(variance, 0.0)", "tuning/test_ensemble.py -k curvature",
    ),
    "chains with the metric of another": Mutation(
        "kernels/ensemble_start.py", "metric = DiagonalMetric(center, ",
        "metric = DiagonalMetric(center, jnp.roll(curvature, 1, axis=0) ** -0.5 + 0 * ",
        "tuning/test_ensemble.py -k curvature",
    ),
    "twice the correction (modified SGLD)": Mutation(
        "methods/sgld.py", "normal - h / (4 * temperature) * product",
        "normal - h / (2 * temperature) * product", f"{ALGEBRA} -k SGLD",
    ),
    "free flight without the drift of its noise (SMSUBU)": Mutation(
        "kernels/integrators.py", "+ jnp.tanh(y) / friction * kicked", "+ 0.0 * kicked",
        f"{ALGEBRA} -k SMSUBU",
    ),
    "unlagged covariance": Mutation(
        "gradients/noise_estimate.py",
        'return evaluation.noise if self.covariance == "matrix_free" else average',
        "return evaluation.noise", f"{ALGEBRA} -k CCAdL",
    ),
    "average of twice the window": Mutation(
        "gradients/noise_estimate.py", "jnp.minimum(count, int(self.window))",
        "jnp.minimum(count, 2 * int(self.window))", f"{ALGEBRA} -k average",
    ),
    "N for N - 1 (sub-batches)": Mutation(
        "gradients/estimators.py", "spread * jnp.sqrt(factors[name] / (count * (count - 1)))",
        "spread * jnp.sqrt(factors[name] / (count * count))",
        "posterior/test_gradients.py -k unbiased",
    ),
    "signs with a mean (two cotangents)": Mutation(
        "gradients/estimators.py", "scale * (sign - sign.mean())", "scale * sign",
        "posterior/test_gradients.py -k unbiased",
    ),
    "no finite-population factor": Mutation(
        "data/subsampling.py",
        "return 1.0 - batch_size / size if self.distinct and self.independent else 1.0",
        "return 1.0", "rows/test_subsampling.py",
    ),
    "index off by one": Mutation(
        "data/subsampling.py",
        "return permute(random.fold_in(key, step), jnp.arange(batch_size), size)",
        "return jnp.minimum(permute(random.fold_in(key, step), jnp.arange(batch_size), size) + 1,"
        " size - 1)", "rows/test_subsampling.py",
    ),
    "the same rows at every step": Mutation(
        "data/subsampling.py",
        "return permute(random.fold_in(key, step), jnp.arange(batch_size), size)",
        "return permute(key, jnp.arange(batch_size), size)", "rows/test_subsampling.py",
    ),
    "a straddling minibatch repeats its epoch": Mutation(
        "data/subsampling.py", "epoch + jnp.arange(2, dtype=jnp.uint32)",
        "epoch + jnp.zeros(2, jnp.uint32)",
        "rows/test_subsampling.py -k epoch",
    ),
    "sweeps that do not turn round": Mutation(
        "data/subsampling.py", "jnp.where(turn < batches, turn, 2 * batches - 1 - turn)",
        "jnp.where(turn < batches, turn, turn - batches)", "rows/test_subsampling.py -k sweep",
    ),
    "double scale of a minibatch": Mutation(
        "posterior/handlers.py", "self.missing[plate.name] = float(here * self.parts / plate.size)",
        "self.missing[plate.name] = float(2 * here * self.parts / plate.size)",
        f"{ALGEBRA} -k sample_is_a_step",
    ),
    "rows read ahead of another device": Mutation(
        "posterior/prefetch.py",
        "is_of_another = False if part is None else passed[0].part != part",
        "is_of_another = False", "rows/test_shards.py -k read_ahead",
    ),
    "a sample that is not like all rows": Mutation(
        "tuning/subsample.py", "NEAR, _MOST_PASSES = 0.5, 4", "NEAR, _MOST_PASSES = 1e9, 4",
        "rows/test_shards.py -k is_found_out",
    ),
    "the same normals at every step": Mutation(
        "kernels/transition.py", "(random.fold_in(key, i) for key in keys)",
        "(random.fold_in(key, 0) for key in keys)", f"{ALGEBRA} -k sample_is_a_step",
    ),
    "the metric for its transpose": Mutation(
        "posterior/metric.py", "return gradient @ self.factor", "return self.factor @ gradient",
        f"{ALGEBRA} posterior/test_metric.py -k 'sample_is_a_step or pullback or metric'",
    ),
    "a control variate without the gradient of all data": Mutation(
        "posterior/control_variate.py", "more = jax.tree.map(jnp.subtract, known_slope, slope)",
        "more = jax.tree.map(jnp.negative, slope)", "tuning/test_tuning.py -k control_variate",
    ),
    "an anchor of coordinates in the place of effects": Mutation(
        "posterior/target.py", "return self.centred.potential(IdentityMetric())",
        "return self.potential(IdentityMetric())", "tuning/test_centring.py -k bend",
    ),
    "an anchor that is not told of the rows that have come": Mutation(
        "posterior/growing.py", "jax.tree.map(jnp.add, total, change)", "total",
        "rows/test_growing.py -k sums_of_old",
    ),
    "old rows that are not forgotten": Mutation(
        "posterior/growing.py", "lambda x, p: p + left * (x - p)", "lambda x, p: x",
        "rows/test_growing.py -k sums_of_old",
    ),
    "rows read ahead before others came": Mutation(
        "kernels/growth.py", "jnp.where(has_changed, -1, prefetched.start)", "prefetched.start",
        "rows/test_growing.py -k on_disk_that_keep",
    ),
    "the work of half of the momentum": Mutation(
        "methods/amagold.py", "@ (p + new)", "@ (p + p)", "kernels/test_amagold.py -k reverse",
    ),
    "weights without the density of the mixture": Mutation(
        "diagnostics/certificate.py", "-differences - mixture.log_density(fresh)", "-differences",
        "judges/test_certificate.py -k too_wide",
    ),
    "noise of minibatches that stays": Mutation(
        "diagnostics/_coupled_chains.py",
        "momentum = damped(momentum, h * _together(seen))", "pass",
        "judges/test_debiased.py -k taken_out",
    ),
    "a short path that is not the long one": Mutation(
        "diagnostics/_coupled_chains.py", "quarter(noise[0], noise[1])", "noise[0] + noise[1]",
        "judges/test_debiased.py -k second_order",
    ),
    "noise with directions that is left to the momentum": Mutation(
        "methods/sgmclmc.py", "    taken = (h / temperature) ** 2\n", "    taken = 0 * h\n",
        "kernels/test_sgmclmc.py -k so_much_less",
    ),
    "exchanges without a penalty for their noise": Mutation(
        "kernels/replicas.py", "ratio = difference - penalty", "ratio = difference - 0 * penalty",
        "kernels/test_replicas.py -k balanced",
    ),
    "replicas whose noise is that of the chain": Mutation(
        "posterior/tempered.py", "return self.scale * self.potential.pullback(gradient)",
        "return self.potential.pullback(gradient)",
        "kernels/test_replicas.py -k law_of_their_temperature",
    ),
    "draws from the fall of a cycle": Mutation(
        "results/cycle_draws.py", "if used.all():", "if used.any():",
        "kernels/test_cyclical.py -k left_out",
    ),
    "minibatches that stand for the room, too": Mutation(
        "data/growing.py", "share = (jnp.maximum(count, size) / self.size)",
        "share = (1.0 + 0 * count)",
        "rows/test_growing.py -k sums_of_old",
    ),
    "coordinates whose mean moves with the location only": Mutation(
        "posterior/reparam.py", "far = there.estimate - there.degree * self.location",
        "far = -there.degree * self.location", "tuning/test_centring.py -k independent",
    ),
    "the last row of each cluster for their sum": Mutation(
        "diagnostics/_sandwich.py", "none.at[clusters[plate.name][numbers]].add(x.T)",
        "none.at[clusters[plate.name][numbers]].set(x.T)",
        "judges/test_calibrated.py -k the_sandwich",
    ),
    "a prior that is not seen": Mutation(
        "diagnostics/_sandwich.py", "self.unseen * found + self.prior", "self.unseen * found",
        "judges/test_calibrated.py -k prior",
    ),
    "an anchor that does not move": Mutation(
        "kernels/transition.py", "lambda z, _: move(z, centring),", "lambda _, anchor: anchor,",
        "tuning/test_tuning.py -k anchor_moves",
    ),
    "single-precision sum of rows one by one": Mutation(
        "posterior/potential.py", "_CHUNK, _FEWEST = 16_384, 64", "_CHUNK, _FEWEST = 16, 64",
        "posterior/test_gradients.py -k single_precision",
    ),
    "steps that are not finite are kept": Mutation(
        "kernels/transition.py", "lambda after, before: jnp.where(finite, after, before)",
        "lambda after, before: after", "kernels/test_kernels.py -k nonfinite",
    ),
    "a preconditioner that goes on to adapt": Mutation(
        "methods/psgld.py", "(state.i < state.fixed.warmup_steps) | (not self.method.frozen)",
        "state.i >= 0", f"{ALGEBRA} -k PSGLD",
    ),
    "the Stein matrix with the position of the other end": Mutation(
        "kernels/transition.py",
        "new.z if method.gradient_at_end(fixed.layout.integrator) else state.z",
        "state.z if method.gradient_at_end(fixed.layout.integrator) else new.z",
        "laws/test_exact_laws.py -k 'stationary_variance and SGLD'",
    ),
    "nodes that do not reach as far as a tail": Mutation(
        "posterior/quadrature.py", "return jnp.where(is_found | (least == 0), t, least)",
        "return jnp.full_like(t, math.sqrt(2 * fall))",
        "latents/test_local_latents.py -k skewed_integrals",
    ),
    "the noise of one device for that of the mean": Mutation(
        "gradients/estimators.py", "noise = jax.tree.map(lambda x: x / target.parts, noise)",
        "noise = noise", "rows/test_devices.py -k noise_of_the_devices",
    ),
}  # fmt: skip


def first_failure(root: Path, mutation: Mutation) -> str | None:
    """The first of the tests that fails with the error planted, or None if all pass."""
    file = root / "numpyro_sgmcmc" / mutation.file
    source = file.read_text()
    if source.count(mutation.right) != 1:
        raise SystemExit(
            f"{mutation.file} has {source.count(mutation.right)} times what a mutation replaces:"
            f" {mutation.right}"
        )
    file.write_text(source.replace(mutation.right, mutation.wrong))
    try:
        options = "-x -q -p no:cacheprovider -m 'not nightly'"
        command = f"cd tests && {sys.executable} -m pytest {options} {mutation.tests}"
        done = subprocess.run(command, cwd=root, shell=True, capture_output=True, text=True)
    finally:
        file.write_text(source)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3_000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+\])?)", done.stdout, re.MULTILINE)
    return found.group(1) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+", help="words in the names of mutations")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("numpyro_sgmcmc", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for name, mutation in MUTATIONS.items():
            if options.only and not any(word in name for word in options.only):
                continue
            found = first_failure(root, mutation)
            missed += found is None
            print(f"{name}: {found or 'NOT NOTICED'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
