# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Models and arguments that are refused, and how.

    python tests/bad_inputs.py

writes what is said of each into ``docs/errors.md``; the tests see that it is still said.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
import re
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGLD, SMSUBU, CCAdL, NoiseEstimate, RowsOnDisk

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"

N = 40
X = np.random.default_rng(0).standard_normal((N, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def run(kernel, *args, init_params=None, **kwargs):
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, init_params=init_params, **kwargs)
    return mcmc


def regression(x, y, batch_size=10):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def subsampled_regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10):
        mean = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))


def local_latent(x, y):
    with numpyro.plate("rows", N, subsample_size=10) as i:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def masked_observation(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i], obs_mask=x[i, 0] > 0)


def discrete_latent(x, y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(k, 1), obs=y[i])


def delta_latent(x, y):
    mu = numpyro.sample("mu", dist.Delta(1.0))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def outside_the_plate(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        batch = y[i]
    numpyro.sample("y", dist.Normal(mu, 1).expand([10]).to_event(1), obs=batch)


def observations_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def predictors_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y[i])


def one_row_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=1) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def given_minibatches(x, y):
    """As for SVI: a plate of N rows around data of a minibatch."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 1000, subsample_size=x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def half_given(x, y):
    """Predictors indexed by the plate, observations passed in as a minibatch."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def plate_in_scan(x, y):
    phi = numpyro.sample("phi", dist.Normal(0, 1))

    def step(previous, t):
        with numpyro.plate("rows", N, subsample_size=10) as i:
            numpyro.sample("x", dist.Normal(phi, 1), obs=x[i, t])
        return previous, None

    scan(step, 0.0, jnp.arange(3))


def no_latent(x, y):
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(0, 1), obs=y[i])


def no_subsampling(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def wrong_support(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Gamma(2, jnp.exp(mu)), obs=y[i])


def closes_over_numpy(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def wide(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1001]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i, 0] * w.sum(), 1), obs=y[i])


def sgld(model, **options):
    return SGLD(model, **({"step_size": 1e-3} | options))


def ccadl(model, **options):
    return CCAdL(model, **({"step_size": 1e-2, "friction": 1.0} | options))


WITH_NAN = X.copy()
WITH_NAN[7, 2] = np.nan


BAD_MODELS = {
    "a latent site of each row": (
        local_latent,
        (X, Y),
        "Latent site 'z' is inside the subsampled plate 'rows'",
    ),
    "`obs_mask`": (masked_observation, (X, Y), "'y' has an `obs_mask`.*handlers.mask"),
    "a discrete latent site": (discrete_latent, (X, Y), "'k' is discrete.*MixtureSameFamily"),
    "a latent site with a Delta distribution": (
        delta_latent,
        (X, Y),
        "'mu' has a Delta.*numpyro.deterministic",
    ),
    "an observed site outside of its plate": (
        outside_the_plate,
        (X, Y),
        "'y' depends on the minibatch of plate 'rows'.*outside",
    ),
    "observations that are not indexed": (
        observations_not_indexed,
        (X, Y),
        "'y' are not indexed by the plate: .* 40",
    ),
    "predictors that are not indexed": (
        predictors_not_indexed,
        (X, Y),
        r"minibatch: .*index it with the plate's",
    ),
    "observations that are not indexed, by minibatches of one row": (
        one_row_not_indexed,
        (X, Y),
        "'y' are not indexed by the plate: .* 40 rows",
    ),
    "minibatches as arguments, as for SVI": (
        given_minibatches,
        (X[:10], Y[:10]),
        "does not use its indices.*as for SVI",
    ),
    "observations of a minibatch, predictors of all rows": (
        half_given,
        (X, Y[:10]),
        "observations of site 'y' .*without the plate's",
    ),
    "a subsampled plate inside `scan`": (
        plate_in_scan,
        (X, Y),
        "plate 'rows', which is subsampled inside `scan`",
    ),
    "no latent sites": (no_latent, (X, Y), "no latent sites"),
    "a minibatch of no rows": (
        partial(regression, batch_size=0),
        (X, Y),
        "subsample_size=0.*from 1 to its size 40",
    ),
    "a negative minibatch size": (partial(regression, batch_size=-3), (X, Y), "subsample_size=-3"),
    "a minibatch of more rows than there are": (
        partial(regression, batch_size=41),
        (X, Y),
        "subsample_size=41.*size 40",
    ),
    "a minibatch size that is not a whole number": (
        partial(regression, batch_size=2.5),
        (X, Y),
        "both must be Python integers",
    ),
    "predictors shorter than the plate": (
        regression,
        (X[:30], Y),
        r"argument 'x' of shape \(30, 3\), which has 30 rows",
    ),
    "observations longer than the plate": (
        regression,
        (X, np.append(Y, Y)),
        r"argument 'y' of shape \(80,\)",
    ),
    "`subsample` of data shorter than the plate": (
        subsampled_regression,
        (X, Y[:30]),
        r"numpyro.plate\(rows, 40.*\(30,\)",
    ),
    "data with NaN": (
        regression,
        (WITH_NAN, Y),
        r"Argument 'x'.*1 entries.*first at index \(7, 2\)",
    ),
    "infinite data": (regression, (X, np.full(N, np.inf)), "Argument 'y'"),
    "observations outside of the support": (
        wrong_support,
        (X, Y),
        "not finite at site 'y' .values from 0 to 1",
    ),
    "data that are not an argument": (
        closes_over_numpy,
        (Y,),
        "NumPy array that is not one of its arguments",
    ),
}


def chain_of(kernel, *args, init_params=None):
    return partial(run, kernel, *args, init_params=init_params)


#: Kernels and starts: how they come to be, and what is said.
BAD_ARGUMENTS = {
    "no model": (partial(SGLD, None, 0.1), "SGLD needs a model"),
    "a step size that is not positive": (
        partial(sgld, regression, step_size=-1.0),
        "`step_size` must be a positive finite number; got -1.0",
    ),
    "a step size schedule that is not positive": (
        chain_of(sgld(regression, step_size=lambda i: 0.0), X, Y),
        "step size schedule gives .* at step 0",
    ),
    "an unknown word": (
        partial(ccadl, regression, covariance="complete"),
        "`covariance` must be one of 'diagonal', 'full', 'low_rank', 'matrix_free'",
    ),
    "options that do not go together": (
        partial(ccadl, regression, integrator="symmetric", covariance="matrix_free"),
        "integrator='nogin'",
    ),
    "a noise estimate that nothing asks for": (
        partial(SGHMC, regression, 0.1, 1.0, covariance="full"),
        "`covariance` says how the noise of the gradient is estimated, which it is not",
    ),
    "a rank of a matrix that has none": (
        partial(NoiseEstimate, covariance="full", rank=3),
        "`rank=3` is the number of directions of covariance='low_rank'",
    ),
    "shuffled passes with a method that corrects for the noise": (
        chain_of(ccadl(regression, subsampling="epochs"), X, Y),
        "anti-correlated.*without_replacement",
    ),
    "a method that needs minibatches, on a model without": (
        chain_of(ccadl(no_subsampling), X, Y),
        "no plate of the model has a `subsample_size`",
    ),
    "noise beyond the friction": (
        chain_of(SGHMC(regression, 0.1, 1.0, noise_variance=300.0), X, Y),
        "friction of at least 19.46",
    ),
    "noise that does not fit the sites": (
        chain_of(SGHMC(regression, 0.01, 10.0, noise_variance={"v": 1.0}), X, Y),
        r"entry for each latent site \['w'\]; found \['v'\]",
    ),
    "a noise estimate from single rows": (
        chain_of(ccadl(partial(regression, batch_size=1)), X, Y),
        "subsample_size` of at least 2",
    ),
    "a full covariance of many parameters": (
        chain_of(ccadl(wide, covariance="full"), X, Y),
        "at most 1,000 parameters, but the model has 1,001",
    ),
    "a partition that does not come out even": (
        chain_of(SMSUBU(partial(regression, batch_size=11), 0.01, 1.0), X, Y),
        "divides the 40 rows .* 11 does not",
    ),
    "initial values that are whole numbers": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.zeros(3, int)}),
        "has dtype int32.*1.0 instead of 1",
    ),
    "initial values of another shape": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.zeros(4)}),
        r"has shape \(4,\).*has shape \(3,\)",
    ),
    "initial values where the density is zero": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.full(3, 1e30)}),
        "potential at `init_params` is inf",
    ),
    "a file that is not of rows": (partial(RowsOnDisk, "rows.parquet"), "is not a .npy file"),
    "rows that are not numbers": (
        partial(RowsOnDisk, np.array(["a", "b"])),
        "rows must be numbers or truth values",
    ),
}


def bad_inputs() -> dict[str, tuple[Callable, str]]:
    """All of them: what raises a ``ValueError``, and a pattern of what it says."""
    models = {
        title: (chain_of(sgld(model), *args), message)
        for title, (model, args, message) in BAD_MODELS.items()
    }
    return models | BAD_ARGUMENTS


def said_of(refused: Callable) -> str:
    """What the error says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was said")


def section(title: str, message: str) -> str:
    """Of the page, between its ends."""
    return f"**{title[0].upper()}{title[1:]}**\n\n```text\nValueError: {message}\n```\n"


if __name__ == "__main__":
    sections = [section(title, said_of(raises)) for title, (raises, _) in bad_inputs().items()]
    page = PAGE.read_text()
    begin, end = "<!-- messages -->\n", "<!-- end -->"
    pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
    text = begin + "\n".join(sections) + end
    PAGE.write_text(pattern.sub(lambda _: text, page))
