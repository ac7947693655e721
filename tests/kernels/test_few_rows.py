# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Minibatches that have all rows, because a control variate would evaluate as many."""

from functools import partial

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
import pytest
from runs import run_mcmc
from small_models import mean

from numpyro_sgmcmc import SGHMC, CCAdL, GrowingRows, RowsOnDisk

COMPILE_QUICKLY = True
RNG = np.random.default_rng(0)


def data(size):
    return 3 + RNG.normal(size=size).astype(np.float32)


def rows_of(kernel, *args):
    """The size of the minibatches of each plate."""
    args, kwargs = kernel.runtime.trimmed(kernel.method.model, args, {})
    plates = kernel.runtime.read(kernel.method, args, kwargs).model.plates
    return [plate.subsample_size for plate in plates]


def is_right(draws, mean, variance):
    """True if mean and variance of the draws, shape (1, draws), are within 4 standard errors."""
    size, spread = float(effective_sample_size(draws)), (draws - draws.mean()) ** 2
    error = (2 / float(effective_sample_size(spread))) ** 0.5
    off = abs(draws.mean() - mean) / (variance / size) ** 0.5
    return off < 4 and abs(draws.var() / variance - 1) < 4 * error < 0.05


@pytest.mark.slow
def test_draws_are_those_of_a_model_without_minibatches():
    y = data(150)
    few, all_rows = (
        run_mcmc(CCAdL(partial(mean, batch_size=n), progress_bar=False), y, samples=40_000)
        for n in (75, 150)
    )
    tuning, draws = few.sampler.tuning, np.asarray(few.get_samples()["mu"], float)
    np.testing.assert_array_equal(draws, all_rows.get_samples()["mu"])
    assert tuning.anchor is None and tuning.noise.mean == 0
    assert few.sampler.run_info["batch_size_rows"] == 150
    assert "a step takes all rows" in str(tuning)
    variance = 1 / (150 + 1 / 100)
    law, draws = (variance * y.sum(), variance), draws[None]
    assert is_right(draws, *law)
    # draws that are 5 % too wide are wrong, and so are those of as long steps on minibatches
    assert not is_right(draws.mean() + 1.05 * (draws - draws.mean()), *law)
    rates = {"step_size": tuning.step_size, "friction": tuning.friction}
    noisy = CCAdL(partial(mean, batch_size=20), metric=np.array([variance]), **rates)
    start = {"mu": jnp.float32(law[0])}
    wrong = run_mcmc(noisy, y, samples=40_000, start=start).get_samples()["mu"]
    assert not is_right(np.asarray(wrong, float)[None], *law)


@pytest.mark.parametrize("size, rows", [(150, 150), (151, 75)])
def test_twice_a_minibatch_is_the_most(size, rows):
    assert rows_of(CCAdL(partial(mean, batch_size=75)), data(size)) == [rows]


def test_all_plates_have_few_rows():
    def model(x, y, batch_size=75):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        for name, values in (("one", x), ("other", y)):
            with numpyro.plate(name, len(values), subsample_size=batch_size) as i:
                numpyro.sample(f"of {name}", dist.Normal(mu, 1), obs=values[i])

    assert rows_of(CCAdL(model), data(150), data(100)) == [150, 100]
    assert rows_of(CCAdL(model), data(151), data(100)) == [75, 75]


@pytest.mark.parametrize(
    "settings",
    [
        {"step_size": 0.01, "friction": 1.0},
        {"gradient": "minibatch"},
        {"gradient": "control_variate"},
        {"subsampling": "without_replacement"},
        {"subsampling": np.arange(150) // 50},
    ],
    ids=["rates", "minibatch", "control variate", "without replacement", "strata"],
)
def test_minibatches_that_were_asked_for(settings):
    assert rows_of(SGHMC(partial(mean, batch_size=75), **settings), data(150)) == [75]


def test_rows_that_are_not_in_memory_or_not_complete(tmp_path):
    np.save(tmp_path / "y.npy", data(150))
    for y in (RowsOnDisk(tmp_path / "y.npy"), *GrowingRows(data(150))):
        assert rows_of(CCAdL(partial(mean, batch_size=75)), y) == [75]


def test_a_shorter_step_keeps_all_rows():
    kernel, y = CCAdL(partial(mean, batch_size=75), progress_bar=False), data(150)
    kernel.tune(random.key(0), y)
    assert rows_of(kernel.with_step_size(0.1), y) == [150]


def test_its_tuning_is_for_no_minibatches():
    kernel, y = CCAdL(partial(mean, batch_size=75), progress_bar=False), data(1_000)
    tuning = kernel.tune(random.key(0), y[:150])
    kernel = CCAdL(kernel.method.model, tuning=tuning)
    assert run_mcmc(kernel, y[150:290], samples=1).sampler.tuning.step_size == tuning.step_size
    smaller = CCAdL(partial(mean, batch_size=20), tuning=tuning)
    plain = CCAdL(kernel.method.model, gradient="minibatch", tuning=tuning)
    for other, rows in ((kernel, y), (smaller, y[:150]), (plain, y[:150])):
        with pytest.raises(ValueError, match="with all rows in each step"):
            run_mcmc(other, rows, samples=1)
