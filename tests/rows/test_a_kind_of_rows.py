# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A new kind of rows is a class and a line in the table of schemes: here are two of them."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sgmcmc import CCAdL, certify, summary, to_arviz
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows import Rows
from numpyro_sgmcmc.data.subsampling import SCHEMES, DrawnAlike, Scheme

COMPILE_QUICKLY = True

N, BATCH = 2_000, 100
#: in their order, so that it matters which of them are drawn
Y = np.sort(3 + np.random.default_rng(0).standard_normal(N)).astype(np.float32)


class Twice(DrawnAlike):
    """Rows each of which counts twice in the posterior."""

    def counts(self, numbers):
        return jnp.full(numbers.shape, 2.0)


class Once(DrawnAlike):
    """The control: the same without what they count."""


class Ramp(Rows):
    """Rows of which the last is three times as likely to be drawn as the first, and counts less."""

    factor = 1.0

    def __init__(self, scheme, size, batch_size):
        self.size, self.batch_size = size, batch_size

    def draw(self, key, step):
        # the root of the uniform law has a density in proportion to its value
        u = random.uniform(random.fold_in(key, step), (self.batch_size,))
        place = jnp.sqrt(0.25 + 2 * u) - 0.5
        numbers = jnp.minimum((self.size * place).astype(jnp.int32), self.size - 1)
        return DrawnRows(numbers, weights=self.weights(numbers))

    def weights(self, numbers):
        return 1 / (0.5 + (numbers + 0.5) / self.size)


class RampWithoutWeights(Ramp):
    """The control: rows that are drawn more often count as the others."""

    def weights(self, numbers):
        return None


KINDS = {"twice": (Twice, 2), "ramp": (Ramp, 1)}
CONTROLS = {"twice": Once, "ramp": RampWithoutWeights}


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def run(monkeypatch, name, kind, gradient="auto"):
    scheme = SCHEMES["with_replacement"] if name == "ramp" else SCHEMES["without_replacement"]
    monkeypatch.setitem(SCHEMES, name, Scheme(scheme.draw, distinct=scheme.distinct, kind=kind))
    kernel = CCAdL(model, subsampling=name, gradient=gradient, progress_bar=False)
    mcmc = MCMC(
        kernel, num_warmup=300, num_samples=3_000, num_chains=2, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.key(0), jnp.asarray(Y))
    return mcmc


def away(mcmc, counts):
    """Mean and standard deviation of the draws from those of the posterior, in standard errors."""
    precision = 0.01 + counts * N
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    z = (mu - counts * np.sum(Y, dtype=float) / precision) * precision**0.5
    size = float(numpyro.diagnostics.effective_sample_size(z))
    spread = float(numpyro.diagnostics.effective_sample_size((z - z.mean()) ** 2))
    return np.array([z.mean() / z.std() * size**0.5, (z.std() - 1) * (2 * spread) ** 0.5])


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_rows(name, monkeypatch):
    """Tuned and judged like any other, it has its law."""
    kind, counts = KINDS[name]
    # without a control variate, which knows this posterior whatever rows are drawn
    mcmc = run(monkeypatch, name, kind, "minibatch")
    assert np.all(np.abs(away(mcmc, counts)) < 4)
    # and with one, whose anchor is that of all rows
    controlled = run(monkeypatch, name, kind)
    assert controlled.sampler.tuning.anchor is not None
    assert np.all(np.abs(away(controlled, counts)) < 4)
    assert certify(controlled).verdict.startswith("The run is right")
    table = summary(mcmc).table.loc["mu"]
    assert abs(table["mean"] - Y.mean()) < 0.1
    assert abs(table["variance_error"]) < 4 * table["mcse_variance_error"] + 0.05
    assert to_arviz(mcmc).attrs["subsampling"] == name


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_the_law_is_that_of_the_kind(name, monkeypatch):
    mcmc = run(monkeypatch, name, CONTROLS[name], "minibatch")
    assert np.max(np.abs(away(mcmc, KINDS[name][1]))) > 8
