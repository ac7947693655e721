# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Samplers that are wrong in one place, and the tests that find each of them out.

    python tests/mutations.py [--only NAME ...]

copies the package and its tests, plants one error at a time, and runs the tests that are to
notice; an error that none notices is an error of the tests, and the script then ends with 1.

A place is a function and a value in it, whatever the words of the value: what a name is assigned,
what is returned, the test of an `if`, an argument of a call.
"""

import argparse
import ast
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    #: file of the package, function or method (``-`` outside of all), and value: a name, which
    #: may be ``name#2`` for the second of its assignments; ``return``; ``if``; ``f(1)``, the
    #: second argument of the only call of ``f``
    place: str
    #: what is put there; RIGHT is what stands there
    wrong: str
    #: the tests that are to notice, as arguments of pytest in ``tests/``
    tests: str


ALGEBRA = "laws/test_algebra.py"
DRAWN = "rows/test_subsampling.py"

MUTATIONS = {
    "gradient at the old position (SGHMC, Euler)": Mutation(
        "methods/sghmc.py SGHMC.Method.step evaluation", "gradient(state.z)", f"{ALGEBRA} -k SGHMC",
    ),
    "gradient after the whole drift (ABOBA, NOGIN)": Mutation(
        "kernels/splittings.py - SPLITTINGS",
        'RIGHT | {"aboba": Splitting(partial(kicks_around, before=1.0), False, True)}',
        f"{ALGEBRA} -k CCAdL",
    ),
    "half a kick too little (BAOAB)": Mutation(
        "kernels/splittings.py drifts_around return",
        "position, kick(momentum, evaluation.gradient, h / 2), kept, evaluation",
        f"{ALGEBRA} -k baoab",
    ),
    "half the added noise (SGLD)": Mutation(
        "kernels/integrators.py langevin return",
        "position - step_size * gradient + jnp.sqrt(step_size * temperature) * noise",
        f"{ALGEBRA} -k SGLD",
    ),
    "noise of Euler's method in the exact map O": Mutation(
        "kernels/integrators.py ornstein_uhlenbeck return",
        "jnp.exp(-x) * momentum + jnp.sqrt(2 * step_size * diffusion) * noise",
        f"{ALGEBRA} -k badodab",
    ),
    "noise that is not taken out of the middle (CCAdL, symmetric)": Mutation(
        "kernels/integrators.py noise_controls before",
        "lax.rsqrt(1 + 3 * u / rest - delta), jnp.sqrt(1 - delta)", f"{ALGEBRA} -k symmetric",
    ),
    "temperature left out of the added noise (SGHMC)": Mutation(
        "methods/sghmc.py _balance kept", "-1.0 * xp.expm1(-2 * friction * h)",
        f"{ALGEBRA} -k SGHMC",
    ),
    "thermostat driven by the old momentum (SGNHT, Euler)": Mutation(
        "methods/sgnht.py SGNHT.Method.step xi", "adapted(xi, state.dynamics.momentum, h)",
        f"{ALGEBRA} -k thermostat",
    ),
    "noise of half a kick taken for heat (NOGIN)": Mutation(
        "methods/ccadl.py CCAdL.Method._nogin here",
        "self._adapted(here, jnp.mean(p**2), h, p.shape[0])",
        f"{ALGEBRA} -k thermostat",
    ),
    "twice the covariance in the control (NOGIN)": Mutation(
        "methods/ccadl.py CCAdL.Method._nogin.inverse return",
        "apply(covariance, lambda v: 1 / (1 + damping + h**2 * v / (2 * temperature)), x)",
        f"{ALGEBRA} -k CCAdL",
    ),
    "metric at a member without the prior": Mutation(
        "tuning/ensemble.py _curvature.both return", "size / factor * jnp.maximum(variance, 0.0)",
        "tuning/test_ensemble.py -k curvature",
    ),
    "chains with the metric of another": Mutation(
        "kernels/ensemble_start.py chain_starts metric#2",
        "DiagonalMetric(center, jnp.roll((RIGHT).scale, 1, axis=0))",
        "tuning/test_ensemble.py -k curvature",
    ),
    "twice the correction (modified SGLD)": Mutation(
        "methods/sgld.py SGLD.Method.step normal#2", "normal - h / (2 * temperature) * product",
        f"{ALGEBRA} -k SGLD",
    ),
    "free flight without the drift of its noise (SMSUBU)": Mutation(
        "kernels/integrators.py free_flight position",
        "(RIGHT) - jnp.tanh(y) / friction * kicked", f"{ALGEBRA} -k SMSUBU",
    ),
    "unlagged covariance": Mutation(
        "gradients/noise_estimate.py RunningCovariance.current return", "evaluation.noise",
        f"{ALGEBRA} -k CCAdL",
    ),
    "average of twice the window": Mutation(
        "gradients/noise_estimate.py RunningCovariance._updated window",
        "count if self.window == math.inf else jnp.minimum(count, 2 * int(self.window))",
        f"{ALGEBRA} -k average",
    ),
    "N for N - 1 (sub-batches)": Mutation(
        "gradients/blocks.py _blocks lengths",
        "(RIGHT) * np.sqrt((number - 1) / number)", "posterior/test_blocks.py -k unbiased",
    ),
    "signs with a mean (two cotangents)": Mutation(
        "gradients/estimators.py two_cotangent_gradient.gradient signs[name]", "scale * sign",
        "posterior/test_gradients.py -k unbiased",
    ),
    "no finite-population factor": Mutation(
        "data/subsampling.py Scheme.factor return", "1.0", DRAWN,
    ),
    "index off by one": Mutation(
        "data/subsampling.py without_replacement return#2", "jnp.minimum(RIGHT + 1, size - 1)",
        DRAWN,
    ),
    "the same rows at every step": Mutation(
        "data/subsampling.py without_replacement return#2",
        "permute(key, jnp.arange(batch_size), size)", DRAWN,
    ),
    "a straddling minibatch repeats its epoch": Mutation(
        "data/subsampling.py epochs keys",
        "jax.vmap(random.fold_in, (None, 0))(key, epoch + jnp.zeros(2, jnp.uint32))",
        f"{DRAWN} -k epoch",
    ),
    "sweeps that do not turn round": Mutation(
        "data/subsampling.py symmetric_sweeps batch",
        "jnp.where(turn < batches, turn, turn - batches)", f"{DRAWN} -k sweep",
    ),
    "double scale of a minibatch": Mutation(
        "posterior/handlers.py given_rows.rows self.missing[plate.name]", "2 * RIGHT",
        f"{ALGEBRA} -k sample_is_a_step",
    ),
    "rows read ahead of another device": Mutation(
        "posterior/prefetch.py _Ahead.kept_or_filled.is_needed is_of_another", "False",
        "rows/test_shards.py -k read_ahead",
    ),
    "a sample that is not like all rows": Mutation(
        "tuning/subsample.py - NEAR", "1e9, 4", "rows/test_shards.py -k is_found_out",
    ),
    "the same normals at every step": Mutation(
        "kernels/transition.py one_step noise_key", "(random.fold_in(key, 0) for key in keys)",
        f"{ALGEBRA} -k sample_is_a_step",
    ),
    "the metric for its transpose": Mutation(
        "posterior/metric.py DenseMetric.pullback return", "self.factor @ gradient",
        f"{ALGEBRA} posterior/test_metric.py -k 'sample_is_a_step or pullback or metric'",
    ),
    "a control variate without the gradient of all data": Mutation(
        "posterior/control_variate.py ControlVariate.value_and_gradient more",
        "jax.tree.map(jnp.negative, slope)", "tuning/test_tuning.py -k control_variate",
    ),
    "an anchor of coordinates in the place of effects": Mutation(
        "posterior/target.py Target.whole_potential return", "self.potential(IdentityMetric())",
        "tuning/test_centring.py -k bend",
    ),
    "an anchor that is not told of the rows that have come": Mutation(
        "posterior/growing.py with_new_rows.added return", "start + length, total",
        "rows/test_growing.py -k sums_of_old",
    ),
    "old rows that are not forgotten": Mutation(
        "posterior/growing.py with_new_rows total#2", "total",
        "rows/test_growing.py -k sums_of_old",
    ),
    "rows read ahead before others came": Mutation(
        "kernels/growth.py with_rows_so_far start", "prefetched.start",
        "rows/test_growing.py -k on_disk_that_keep",
    ),
    "the work of half of the momentum": Mutation(
        "methods/amagold.py AMAGOLD.Method.step work",
        "state.dynamics.work + h / 2 * evaluation.gradient @ (p + p)",
        "kernels/test_amagold.py -k reverse",
    ),
    "weights without the density of the mixture": Mutation(
        "diagnostics/certificate.py certify log_ratios#1", "-differences",
        "judges/test_certificate.py -k too_wide",
    ),
    "noise of minibatches that stays": Mutation(
        "diagnostics/_coupled_chains.py _kick momentum", "momentum",
        "judges/test_debiased.py -k taken_out",
    ),
    "a short path that is not the long one": Mutation(
        "diagnostics/_coupled_chains.py _pairs.step long",
        "jax.vmap(lambda noise: noise[0] + noise[1])(short)",
        "judges/test_debiased.py -k second_order",
    ),
    "noise with directions that is left to the momentum": Mutation(
        "methods/sgmclmc.py _random_force taken", "0 * h",
        "kernels/test_sgmclmc.py -k so_much_less",
    ),
    "exchanges without a penalty for their noise": Mutation(
        "kernels/exchange.py exchange_probability ratio", "difference",
        "kernels/test_replicas.py -k balanced",
    ),
    "replicas whose noise is that of the chain": Mutation(
        "posterior/tempered.py Tempered.pullback return", "self.potential.pullback(gradient)",
        "kernels/test_replicas.py -k law_of_their_temperature",
    ),
    "draws from the fall of a cycle": Mutation(
        "results/cycle_draws.py kept_draws if#3", "used.any()",
        "kernels/test_cyclical.py -k left_out",
    ),
    "minibatches that stand for the room, too": Mutation(
        "data/growing.py RowsSoFar.draw share", "0 * RIGHT + 1",
        "rows/test_growing.py -k sums_of_old",
    ),
    "coordinates whose mean moves with the location only": Mutation(
        "posterior/coordinates.py Around._moved far", "-there.degree * self.location",
        "tuning/test_centring.py -k independent",
    ),
    "the last row of each cluster for their sum": Mutation(
        "diagnostics/_sandwich.py _of_clusters.run.of_plate.of_rows z",
        "(none.at[clusters[plate.name][numbers]].set(x.T) for x in found)",
        "judges/test_calibrated.py -k the_sandwich",
    ),
    "a prior that is not seen": Mutation(
        "diagnostics/_sandwich.py Sandwich.meat return", "(RIGHT) - self.prior",
        "judges/test_calibrated.py -k prior",
    ),
    "an anchor that does not move": Mutation(
        "kernels/moving_anchor.py with_anchor_moved anchor", "state.fixed.anchor",
        "tuning/test_tuning.py -k anchor_moves",
    ),
    "single-precision sum of rows one by one": Mutation(
        "posterior/potential.py - _CHUNK", "16, 64",
        "posterior/test_gradients.py -k single_precision",
    ),
    "steps that are not finite are kept": Mutation(
        "kernels/transition.py one_step z", "moved", "kernels/test_kernels.py -k nonfinite",
    ),
    "a preconditioner that goes on to adapt": Mutation(
        "methods/psgld.py PSGLD.Method.step adapts", "state.i >= 0", f"{ALGEBRA} -k PSGLD",
    ),
    "the Stein matrix with the position of the other end": Mutation(
        "kernels/transition.py _watched add_to_sums(1)",
        "before.z if method.gradient_at_end(fixed.layout.integrator) else after.z",
        "laws/test_exact_laws.py -k 'stationary_variance and SGLD'",
    ),
    "nodes that do not reach as far as a tail": Mutation(
        "posterior/nodes.py reaches return", "jnp.full_like(t, math.sqrt(2 * fall))",
        "latents/test_local_latents.py -k skewed_integrals",
    ),
    "effects that do not move with the scales above": Mutation(
        "posterior/reparam.py LocalAround.log_distance._ moved", "jnp.zeros_like(y)",
        "tuning/test_scale_mixtures.py -k gradients",
    ),
    "a gradient without the determinant of the coordinates": Mutation(
        "posterior/potential.py ModelPotential.with_pullback.gradient return", "pulled",
        "tuning/test_scale_mixtures.py -k gradients",
    ),
    "the noise of one device for that of the mean": Mutation(
        "gradients/estimators.py over_devices.everywhere noise#3", "noise",
        "rows/test_devices.py -k noise_of_the_devices",
    ),
}  # fmt: skip


def value_at(tree: ast.Module, function: str, value: str) -> ast.expr:
    """
    The value of a place in a file.

    :raises LookupError: if the file has no such place.
    """
    where: ast.AST = tree
    for name in [] if function == "-" else function.split("."):
        defined = [x for x in _own(where) if getattr(x, "name", None) == name]
        if len(defined) != 1:
            raise LookupError(f"{name!r} is defined {len(defined)} times")
        (where,) = defined
    value, _, number = value.partition("#")
    called = re.fullmatch(r"(\w+)\((\d)\)", value)
    found = [x for node in _own(where) if (x := _value(node, value, called)) is not None]
    if len(found) < int(number or 1) or not number and len(found) > 1:
        raise LookupError(f"{value!r} is there {len(found)} times")
    return found[int(number or 1) - 1]


def _own(where: ast.AST):
    """What is in a function, in its order, and not in the functions in it."""
    for node in ast.iter_child_nodes(where):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own(node)


def _value(node: ast.AST, value: str, called: re.Match | None) -> ast.expr | None:
    if called:
        is_it = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == called[1]
        return node.args[int(called[2])] if is_it else None
    if isinstance(node, ast.Return) and value == "return":
        return node.value
    if isinstance(node, ast.If) and value == "if":
        return node.test
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        return node.value if ast.unparse(first) == value else None
    return None


def planted(mutation: Mutation, root: Path) -> tuple[Path, str, str]:
    """The file, its text, and its text with the error."""
    file, function, value = mutation.place.split()
    path = root / "numpyro_sgmcmc" / file
    text = path.read_text()
    try:
        node = value_at(ast.parse(text), function, value)
    except LookupError as error:
        raise LookupError(f"{mutation.place}: {error}") from None
    # columns are of bytes
    lines = text.encode().splitlines(keepends=True)
    start, end = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in (
            (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        )
    )  # fmt: skip
    content = text.encode()
    right = content[start:end].decode()
    wrong = mutation.wrong.replace("RIGHT", right)
    return path, text, (content[:start] + wrong.encode() + content[end:]).decode()


NO_TESTS = 5  #: the exit status of pytest that has found no tests


def first_failure(root: Path, mutation: Mutation) -> str | None:
    """The first of the tests that fails with the error planted, or None if all pass."""
    file, source, wrong = planted(mutation, root)
    file.write_text(wrong)
    # from where the package is found that has the error
    tests = re.sub(r"\S+\.py", r"tests/\g<0>", mutation.tests)
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {tests}"
    ended = set()
    try:
        for half in ("not nightly", "nightly"):  # the quick ones first
            done = subprocess.run(
                f"{command} -m '{half}'", cwd=root, shell=True, capture_output=True, text=True
            )
            ended.add(done.returncode)
            if found := re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+\])?)", done.stdout, re.MULTILINE):
                return found.group(1)
    finally:
        file.write_text(source)
    if ended not in ({0}, {0, NO_TESTS}):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3_000:]}")
    return None


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
