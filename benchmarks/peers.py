# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The same posterior by everything that installs today: the time of a step, and effective samples
a second together with the errors.

    python benchmarks/peers.py [--steps 40000]

Logistic regression, N = 12,214, d = 20, n = 500, one chain, compilation and warm-up not counted;
the reference is NUTS on all rows. A step is one gradient: of a minibatch, or of all rows in a
leapfrog step of NUTS. The kernels of this package and NUTS tune themselves, and HMCECS is given the
mode; BlackJAX and posteriors (PyTorch) are given the posterior mean and the best step size of a
grid of powers of 2 (see ``speed.py``). Effective samples and errors are those of the worst
parameter, with the standard error of the two runs for a parameter, and the root mean square of
the z-scores of all standard deviations.

    pip install blackjax posteriors
"""

import argparse
from importlib.metadata import version
from importlib.util import find_spec
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import seconds_of_draws, table
import numpy as np
from numpyro.infer import HMCECS, MCMC, NUTS
from speed import best_of_grid, blackjax_runs, data, logistic

from numpyro_sgmcmc import SGHMC, SGLD, SGNHT, CCAdL, full_data
from numpyro_sgmcmc.diagnostics.comparison import errors_of, moments_of

SIZE, PARAMETERS, BATCH = 12_214, 20, 500


LABELS = [str(k) for k in range(PARAMETERS)]


def reference(args):
    """Mean, standard deviation and covariance, and the moments with their errors."""
    mcmc = MCMC(
        NUTS(full_data(logistic)), num_warmup=500, num_samples=10_000, num_chains=2,
        chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.key(9), *args)
    w = np.asarray(mcmc.get_samples(True)["w"], np.float64)
    exact = w.mean((0, 1)), w.std((0, 1)), np.cov(w.reshape(-1, PARAMETERS).T)
    return exact, moments_of(w, LABELS)


def by_mcmc(kernel, args, warmup, draws, steps_of=None):
    """Seconds for the draws, the draws, and the number of steps."""
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
    fields = () if steps_of is None else (steps_of,)
    mcmc.run(random.key(0), *args, extra_fields=fields)

    steps = draws if steps_of is None else int(np.sum(mcmc.get_extra_fields()[steps_of]))
    w = np.asarray(mcmc.get_samples(True)["w"], np.float64)
    return seconds_of_draws(mcmc, args, draws), w, steps


def posteriors_runs(args, exact, steps):
    import posteriors.sgmcmc as sgmcmc
    import torch

    x, y = (torch.tensor(np.asarray(a)) for a in args)
    scale = float(np.linalg.eigvalsh(exact[2])[0]) ** 0.5

    def log_posterior(w, batch):
        logits = batch[0] @ w
        terms = batch[1] * logits - torch.nn.functional.softplus(logits)
        return SIZE / BATCH * terms.sum() - 0.5 * (w**2).sum(), torch.zeros(())

    methods = {
        "SGLD": (sgmcmc.sgld, {}, scale**2),
        "SGHMC": (sgmcmc.sghmc, {"alpha": 1 / scale}, scale),
        "SGNHT": (sgmcmc.sgnht, {"alpha": 1 / scale}, scale),
    }
    for name, (method, options, unit) in methods.items():

        def run(h, method=method, options=options):
            torch.manual_seed(0)
            transform = method.build(log_posterior, lr=h, **options)
            state = transform.init(torch.tensor(exact[0], dtype=torch.float32))
            draws = torch.empty(steps, PARAMETERS)
            for k in range(steps):
                rows = torch.randint(SIZE, (BATCH,))
                state, _ = transform.update(state, (x[rows], y[rows]))
                draws[k] = state.params
            return draws.numpy()

        draws, seconds, _ = best_of_grid(run, unit, exact)
        yield f"posteriors {name}", (seconds, draws, steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--steps", type=int, default=40_000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    args, rows = data(SIZE, PARAMETERS), []
    exact, right = reference(args)

    def report(name, seconds, w, steps):
        found = moments_of(w, LABELS)
        errors = errors_of(found, right)
        rows.append(
            [name, f"{1e6 * seconds / steps:,.1f}", f"{found.mean_size.min() / seconds:,.0f}"]
            + [
                f"{errors[key]:.3f} ± {errors[key + '_se']:.3f}"
                for key in ("mean_error", "sd_ratio")
            ]
            + [f"{errors['sd_z']:.2f}"]
        )

    for kernel in (CCAdL, SGHMC, SGNHT, SGLD):
        tuned = kernel(logistic, steps_per_sample=1, progress_bar=False)
        report(f"`{kernel.__name__}(model)`", *by_mcmc(tuned, args, 1_000, options.steps))
        jax.clear_caches()
    report("NUTS", *by_mcmc(NUTS(full_data(logistic)), args, 500, 10_000, "num_steps"))
    proxy = HMCECS.taylor_proxy({"w": jnp.asarray(exact[0], jnp.float32)})
    kernel = HMCECS(NUTS(logistic), num_blocks=10, proxy=proxy)
    report("HMCECS, Taylor proxy", *by_mcmc(kernel, args, 500, 10_000, "hmc_state.num_steps"))
    jax.clear_caches()
    try:
        for name, (_, seconds, draws) in blackjax_runs(*args, exact, BATCH, options.steps):
            report(name, seconds, draws, options.steps)
    except ImportError:
        rows.append(["BlackJAX is not installed"])
    try:
        for name, found in posteriors_runs(args, exact, options.steps // 4):
            report(name, *found)
    except ImportError:
        rows.append(["posteriors is not installed"])
    header = ["sampler", "us a step", "ESS a second", "worst mean, sd", "worst sd ratio", "rms z"]
    print(table(header, rows))
    found = [name for name in ("blackjax", "posteriors", "torch") if find_spec(name)]
    print(", ".join(f"{name} {version(name)}" for name in found))


if __name__ == "__main__":
    main()
