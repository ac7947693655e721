# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What was found for one model and its data is not used for others; a run does not wear out."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
import traceback
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_uniform
import optax
import pytest
from small_models import mean

from numpyro_sgmcmc import SGLD, LongRun
from numpyro_sgmcmc.posterior.checks.exceptions import one_at_a_time
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.variational import find_center

COMPILE_QUICKLY = True

N = 500
Y = 1 + np.random.default_rng(0).standard_normal(N).astype(np.float32)
CHANGED = np.where(np.arange(N) == 377, 500, Y).astype(np.float32)


normal = partial(mean, batch_size=50)


UNSEEN_BY_THE_LOCK = []


def watched(y):
    """The same model, which notes where another thread could come between."""

    def can_be_taken():
        if taken := one_at_a_time.acquire(blocking=False):
            one_at_a_time.release()
        return taken

    with ThreadPoolExecutor(1) as pool:
        if pool.submit(can_be_taken).result():
            UNSEEN_BY_THE_LOCK.append("".join(traceback.format_stack()))
    normal(y)


def student(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0], subsample_size=50) as i:
        numpyro.sample("y", dist.StudentT(3.0, mu, 5), obs=y[i])


class OwnData:
    """A model that has its data, and its prior's scale, as attributes."""

    def __init__(self, y, scale=10.0):
        self.y, self.scale = y, scale

    def __call__(self):
        mu = numpyro.sample("mu", dist.Normal(0, self.scale))
        with numpyro.plate("rows", N, subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.asarray(self.y)[i])


def controlled(model, **options):
    """With an anchor, and so without noise for this model; draws are correlated over 20 steps."""
    options = {"step_size": 1e-4, "gradient": "control_variate", "progress_bar": False} | options
    return SGLD(model, **options)


def chain(kernel, num_samples=300, **options):
    options = {"num_warmup": 100, "progress_bar": False} | options
    return MCMC(kernel, num_samples=num_samples, **options)


def mean_of(mcmc):
    return float(mcmc.get_samples()["mu"].mean())


@pytest.fixture(scope="module")
def tuned():
    kernel = controlled(watched)
    mcmc = chain(kernel)
    mcmc.run(random.key(0), Y)
    return kernel, mcmc


@pytest.mark.nightly
def test_models_take_turns(tuned):
    """NumPyro has one stack of handlers for all threads."""
    target = Target(
        read_model(watched, init_to_uniform, (jnp.asarray(Y),), {}), (jnp.asarray(Y),), {}
    )
    find_center(target, random.key(0), init_to_uniform)
    assert not UNSEEN_BY_THE_LOCK, UNSEEN_BY_THE_LOCK[0]


def test_the_tuning_of_another_model(tuned):
    kernel, _ = tuned
    with pytest.raises(ValueError, match="found for another model: the densities of 'y' differ"):
        chain(controlled(student, tuning=kernel.tuning)).run(random.key(0), Y)

    def other(y):
        nu = numpyro.sample("nu", dist.Normal(0, 10))
        with numpyro.plate("rows", N, subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(nu, 1), obs=y[i])

    with pytest.raises(ValueError, match="another model: the densities of 'mu', 'nu' differ"):
        chain(controlled(other, tuning=kernel.tuning)).run(random.key(0), Y + 1)


def test_the_tuning_of_other_data_gets_their_anchor(tuned):
    kernel, _ = tuned
    mcmc = chain(controlled(normal, tuning=kernel.tuning), num_samples=2_000)
    mcmc.run(random.key(0), CHANGED)
    # 100 independent draws of standard deviation N^-1/2
    assert abs(mean_of(mcmc) - CHANGED.mean()) < 5 * N**-0.5 / 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change", [pytest.param({"y": CHANGED}, marks=pytest.mark.nightly), {"scale": 0.05}]
)
def test_what_a_model_has_from_elsewhere_is_looked_at(change):
    """Rows of a closure, an attribute or a data frame; and a number that is written there."""
    model = OwnData(Y)
    kernel = controlled(model)
    mcmc = chain(kernel, num_samples=2_000)
    mcmc.run(random.key(0))
    before = kernel.tuning
    mcmc.run(random.key(0))
    assert kernel.tuning is before
    for name, value in change.items():
        setattr(model, name, value)
    mcmc.run(random.key(0))
    assert kernel.tuning is not before
    precision = N + model.scale**-2
    expected = float(np.sum(model.y)) / precision
    assert abs(mean_of(mcmc) - expected) < 5 * precision**-0.5 / 10


def test_a_long_run_looks_at_the_data_of_a_closure(tmp_path):
    model = OwnData(Y)
    options = {"num_warmup": 10, "store": tmp_path / "run.zarr", "progress_bar": False}
    LongRun(SGLD(model, 1e-4), num_samples=20, **options).run(random.key(0))
    model.y = CHANGED
    with pytest.raises(ValueError, match="data that are no arguments"):
        LongRun(SGLD(model, 1e-4), num_samples=40, **options).run(random.key(0))


@pytest.mark.slow
def test_one_kernel_of_two_runs(tuned):
    """The kernel was given other data since, of another length; the state has its own."""
    _, mcmc = tuned
    kernel = mcmc.sampler
    first = chain(kernel, num_samples=2_000)
    first.run(random.key(0), Y)
    state = first.last_state
    chain(kernel).run(random.key(0), Y[:300] + 5)
    first.post_warmup_state = state
    first.run(random.key(1), Y)
    assert abs(mean_of(first) - Y.mean()) < 5 * N**-0.5 / 10


@pytest.mark.slow
def test_a_state_of_other_data(tuned):
    _, mcmc = tuned
    kernel, state = mcmc.sampler, mcmc.last_state
    chain(kernel).run(random.key(0), CHANGED)
    for progress_bar in (False, True):
        other = chain(kernel, num_samples=20, progress_bar=progress_bar)
        other.progress_bar = progress_bar
        other.post_warmup_state = state
        if progress_bar:
            with pytest.raises(ValueError, match="belongs to other data"):
                other.run(random.key(0), CHANGED)
        else:
            other.run(random.key(0), CHANGED, extra_fields=("diverging",))
            assert other.get_extra_fields()["diverging"].all()


@pytest.mark.slow
def test_one_kernel_in_two_threads():
    kernel = controlled(normal)

    def run(k):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc = chain(kernel, num_samples=2_000)
            mcmc.run(random.key(k), Y + k)
        return mean_of(mcmc)

    with ThreadPoolExecutor(2) as pool:
        means = list(pool.map(run, range(2)))
    np.testing.assert_allclose(means, Y.mean() + np.arange(2), atol=5 * N**-0.5 / 10)


@pytest.mark.nightly
def test_the_counter_does_not_come_to_its_end():
    """Beyond 2**31 steps rows and noise are new, and the warm-up does not begin again."""
    mcmc = chain(SGLD(normal, 1e-4), num_samples=60, num_warmup=5)
    mcmc.run(random.key(0), Y)
    last = jnp.asarray(2**31 - 2**16 - 30, jnp.int32)
    states = [mcmc.last_state._replace(i=last)]
    states.append(states[0]._replace(i=last - 2**30))
    draws = []
    for state in states:
        mcmc.post_warmup_state = state
        mcmc.run(random.key(0), Y, extra_fields=("i",))
        draws.append(np.asarray(mcmc.get_samples()["mu"]))
    assert not np.isin(draws[0][1:], draws[1][1:]).any()
    mcmc.post_warmup_state = states[0]
    mcmc.run(random.key(0), Y, extra_fields=("i",))
    i = np.asarray(mcmc.get_extra_fields()["i"])
    assert (i > 2**30 - 2**17).all() and (np.diff(i) < 0).sum() == 1
    assert len(np.unique(draws[0])) == 60


@pytest.mark.one_case
@pytest.mark.parametrize(
    "schedule",
    [
        optax.linear_schedule(1e-4, -1e-4, 40),
        optax.cosine_decay_schedule(1e-4, 20),
        lambda i: jnp.where(i < 20, 1e-4, jnp.nan),
    ],
)
def test_schedules_that_end(schedule, tmp_path):
    kernel = SGLD(normal, schedule)
    with pytest.raises(ValueError, match=r"gives (-|0|nan).* at step 2\d of 51"):
        chain(kernel, num_warmup=50).run(random.key(0), Y)
    with pytest.raises(ValueError, match=r"gives (-|0|nan).* at step 2\d of 60"):
        options = {"store": tmp_path / "run.zarr", "progress_bar": False}
        LongRun(kernel, num_warmup=10, num_samples=50, **options).run(random.key(0), Y)
    mcmc = chain(kernel, num_samples=50, num_warmup=10)
    mcmc.run(random.key(0), Y, extra_fields=("diverging",))
    stands = np.asarray(mcmc.get_extra_fields()["diverging"])
    assert stands[-25:].all() and not stands[:5].any()
    assert np.isfinite(mcmc.get_samples()["mu"]).all()
    assert "the step size schedule is not positive" in kernel.get_diagnostics_str(mcmc.last_state)
