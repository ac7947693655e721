# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Bad input gets an error that names the site or the argument and the remedy, before sampling."""

from functools import partial
import re
import warnings

from bad_inputs import (
    PAGE,
    N,
    X,
    Y,
    bad_inputs,
    ccadl,
    no_subsampling,
    regression,
    run,
    said_of,
    section,
    sgld,
    subsampled_regression,
    wide,
)
from flax import linen
from jax import random
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro.contrib.module import flax_module
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_value
import pytest
from small_models import linear

from numpyro_sgmcmc import PSGLD, SGFS, SGHMC, SGLD, SGNHT, SMSUBU, CCAdL, NoiseEstimate

COMPILE_QUICKLY = True


@pytest.mark.parametrize("title", bad_inputs())
def test_bad_inputs_are_refused(title):
    """And the page of errors says what they say."""
    refused, message = bad_inputs()[title]
    said = said_of(refused)
    assert re.search(message, said)
    assert section(title, said) in PAGE.read_text(), "run `python tests/bad_inputs.py`"


@pytest.mark.parametrize("kernel", [SGLD, SGHMC, SGNHT, CCAdL])
@pytest.mark.parametrize("model", [None, "model"])
def test_no_model(kernel, model):
    with pytest.raises(ValueError, match=f"{kernel.__name__} needs a model"):
        kernel(model, 0.1, *([] if kernel is SGLD else [1.0]))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "0.1", True])
@pytest.mark.parametrize("name", ["step_size", "friction", "temperature", "thermal_mass"])
def test_numbers_must_be_positive(name, value):
    options = {"step_size": 0.1, "friction": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be a positive finite number; got"):
        SGNHT(regression, **options)


@pytest.mark.parametrize("value", [0, -1, 2.0, "3"])
@pytest.mark.parametrize("name", ["steps_per_sample", "window"])
def test_counts_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive integer"):
        if name == "window":
            NoiseEstimate(window=value)
        ccadl(regression, **{name: value})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        (
            "subsampling",
            "'auto', 'without_replacement', 'with_replacement', 'epochs', 'symmetric_sweeps'",
        ),
        ("noise", "'diagonal', 'full', 'low_rank', 'matrix_free'"),
        ("estimator", "'sub_batches', 'two_cotangents', 'per_example'"),
        ("integrator", "'auto', 'euler', 'symmetric', 'nogin', 'aboba', 'baoab', 'obabo'"),
    ],
)
def test_unknown_words_list_the_allowed_ones(name, allowed):
    with pytest.raises(ValueError, match=f"`{name}` must be one of {allowed}.*; got 'other'"):
        if name == "estimator":
            NoiseEstimate(estimator="other")
        ccadl(regression, **{name: "other"})


@pytest.mark.parametrize("schedule", [lambda i: -1.0, lambda i: jnp.nan, lambda i: 0.0])
def test_a_schedule_must_be_positive(schedule):
    with pytest.raises(ValueError, match="step size schedule gives .* at step 0"):
        run(sgld(regression, step_size=schedule), X, Y)


def test_noise_beyond_the_friction():
    """The remedies in the message are enough."""
    kernel = partial(SGHMC, regression, noise_variance=500.0, integrator="euler")
    with pytest.raises(
        ValueError, match=r"friction of at least 25, or a step size of at most 0.004"
    ):
        run(kernel(step_size=0.1, friction=1.0), X, Y)
    run(kernel(step_size=0.1, friction=25.0), X, Y)
    run(kernel(step_size=0.004, friction=1.0), X, Y)


@pytest.mark.one_case
@pytest.mark.parametrize("integrator", ["baoab", "aboba", "obabo"])
def test_noise_beyond_the_friction_of_symmetric_integrators(integrator):
    """(h^2 / 4) V <= T tanh(A h / 2), and no friction is enough from h^2 V = 4 T on."""
    kernel = partial(SGHMC, regression, integrator=integrator)
    message = r"friction of at least 19.46, or a step size of at most (\S+), or CCAdL"
    with pytest.raises(ValueError, match=message) as error:
        run(kernel(step_size=0.1, friction=1.0, noise_variance=300.0), X, Y)
    smaller = float(re.search(message, str(error.value)).group(1))
    run(kernel(step_size=0.1, friction=19.47, noise_variance=300.0), X, Y)
    run(kernel(step_size=0.999 * smaller, friction=1.0, noise_variance=300.0), X, Y)
    with pytest.raises(ValueError, match=r"which is 400. Use a step size of at most"):
        run(kernel(step_size=0.1, friction=1e3, noise_variance=500.0), X, Y)


@pytest.mark.one_case
@pytest.mark.parametrize("covariance", ["diagonal", "full", "low_rank", "matrix_free"])
def test_estimated_noise_beyond_the_friction(covariance):
    kernel = partial(
        SGHMC,
        regression,
        noise_variance="estimated",
        noise=covariance,
        init_strategy=init_to_value(values={"w": np.zeros(3)}),
    )
    message = r"friction of at least (\S+), or .*`init_strategy`"
    with pytest.raises(ValueError, match=message) as error:
        run(kernel(step_size=0.05, friction=0.1), X, Y)
    friction = float(re.search(message, str(error.value)).group(1))
    run(kernel(step_size=0.05, friction=1.01 * friction), X, Y)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (partial(ccadl, integrator="symmetric", noise="matrix_free"), "integrator='nogin'"),
        (
            partial(SGHMC, step_size=0.1, friction=1.0, integrator="baoab",
                    noise_variance="estimated", noise="matrix_free"),
            "integrator='aboba'",
        ),
        (partial(SGHMC, step_size=0.1, friction=1.0, noise_variance="other"), "'estimated'"),
        (lambda m: ccadl(m, noise=NoiseEstimate(window=0)), "`window` must be a positive integer"),
        (lambda m: NoiseEstimate("low_rank", rank=0.5), "`rank` must be a positive integer"),
        (partial(ccadl, thermal_mass=0.0), "`thermal_mass` must be a positive"),
        (partial(SGNHT, step_size=0.1, friction=1.0, thermostats="two"), "'site', 'coordinate'"),
        (partial(PSGLD, step_size=0.1, gamma_term=True), "Use frozen=False"),
        (partial(PSGLD, step_size=0.1, window=0), "`window` must be a positive integer"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(kernel, message):
    with pytest.raises(ValueError, match=message):
        kernel(regression)


full = NoiseEstimate("full")
langevin = partial(SGHMC, step_size=0.1, friction=1.0)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: langevin(regression, noise=full), "Give `noise_variance='estimated'`"),
        (lambda: langevin(regression, noise="full"), "`noise` would be ignored"),
        (lambda: sgld(regression, noise=full), "Give `modified=True`, or leave `noise` out"),
        (lambda: ccadl(regression, noise="ful"), "`noise` must be one of 'diagonal'"),
        (lambda: ccadl(regression, noise=3), "`noise` must be a `NoiseEstimate`"),
        (lambda: NoiseEstimate("full", rank=3), "`rank=3` is the number .*'low_rank', but"),
        (lambda: NoiseEstimate(rank=3), r"covariance=None\. Leave `rank` out"),
        (lambda: NoiseEstimate("matrix_free", "per_example"), "`estimator='per_example'` would"),
        (lambda: NoiseEstimate("matrix_free", window=5), "`window=5` would be ignored"),
    ],
)
def test_arguments_that_would_be_ignored(made, message):
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windw": 3}, r"CCAdL: .*'windw'; the arguments are model, step_size, friction, integ"),
        ({"window": 3}, r"CCAdL: .*'window'; write noise=NoiseEstimate\(window=...\)"),
        ({"covariance": "full"}, "write noise='full', or another word for the cov"),
        ({"refresh_every": 2}, r"write gradient=\('control_variate', passes\)"),
        ({"mesh": None}, r"write no mesh: `spread_rows\(mesh, ...\)` puts"),
        ({"rank": 3, "estimator": "x"}, r"NoiseEstimate\(rank=...\), noise=NoiseEstimate\(est"),
    ],
)
def test_unknown_arguments(options, message):
    with pytest.raises(TypeError, match=message):
        ccadl(regression, **options)
    with pytest.raises(TypeError, match="SGLD: missing a required argument: 'model'"):
        SGLD()


def test_settings_are_equal_by_their_values():
    one = ccadl(regression, metric=np.ones(3), noise="full").method
    assert one == ccadl(regression, metric=np.ones(3), noise=full).method
    assert one != ccadl(regression, metric=np.ones(3)).method
    assert one != ccadl(regression, metric=2 * np.ones(3), noise=full).method
    assert one != ccadl(subsampled_regression, metric=np.ones(3), noise=full).method


def test_frozen_preconditioner_needs_a_warmup():
    kernel = PSGLD(regression, step_size=0.1)
    with pytest.raises(ValueError, match="num_warmup=0. Use a warm-up, or frozen=False"):
        kernel.init(random.key(0), 0, None, (X, Y), {})


def test_sweeps_need_a_partition():
    with pytest.raises(ValueError, match=r"divides the 20 rows .* 11 does not\. Use 10"):
        run(SMSUBU(partial(linear, batch_size=11), 0.01, 1.0), X[:20], Y[:20])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"v": 1.0}, r"entry for each latent site \['w'\]; got \['v'\]"),
        ({"w": np.ones(2)}, r"noise_variance\['w'\]` has shape \(2,\)"),
        (np.ones(3), r"a number, a dict with an array for each latent site, .* got array"),
        (-1.0, "finite and not negative"),
        (np.nan, "finite and not negative"),
    ],
)
def test_noise_variance_fits_the_sites(value, message):
    with pytest.raises(ValueError, match=message):
        run(SGHMC(regression, 0.01, 10.0, noise_variance=value), X, Y)


@pytest.mark.parametrize(
    "kernel",
    [
        ccadl(regression, subsampling="epochs"),
        ccadl(regression, subsampling="symmetric_sweeps"),
        SGHMC(regression, 0.01, 1.0, noise_variance=1.0, subsampling="epochs"),
        SGHMC(regression, 0.01, 1.0, noise_variance="estimated", subsampling="epochs"),
        SGLD(regression, 0.01, modified=True, subsampling="epochs"),
        SGFS(regression, 0.01, subsampling="epochs"),
    ],
    ids=["CCAdL", "CCAdL sweeps", "SGHMC", "SGHMC estimated", "SGLD", "SGFS"],
)
def test_epochs_and_corrected_noise(kernel):
    with pytest.raises(ValueError, match="anti-correlated.*without_replacement"):
        run(kernel, X, Y)


def test_epochs_need_minibatches():
    with pytest.raises(ValueError, match="no plate of the model has a `subsample_size`"):
        run(sgld(no_subsampling, subsampling="epochs"), X, Y)


def test_without_minibatches_there_is_no_noise():
    """A model without a subsampled plate is that of a minibatch of all rows."""
    draws = []
    for kernel in (ccadl(no_subsampling), ccadl(partial(regression, batch_size=N))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draws.append(run(kernel, X, Y).get_samples()["w"])
    assert_allclose(*draws, rtol=1e-4)


@pytest.mark.parametrize("kernel", [sgld(no_subsampling), ccadl(no_subsampling)])
def test_full_gradients_are_warned_of(kernel):
    with pytest.warns(UserWarning, match="gradient on all data.*subsample_size"):
        run(kernel, X, Y)


def test_full_covariance_of_many_parameters():
    with pytest.raises(ValueError, match="at most 1,000 parameters, but the model has 1,001"):
        run(ccadl(wide, noise="full"), X, Y)
    run(ccadl(wide), X, Y)


def test_single_rows_have_no_noise_estimate():
    with pytest.raises(ValueError, match="subsample_size` of at least 2"):
        run(ccadl(partial(regression, batch_size=1)), X, Y)
    run(sgld(partial(regression, batch_size=1)), X, Y)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"w": jnp.zeros(3, int)}, "init_params.'w'.. has dtype int32.*1.0 instead of 1"),
        ({"w": jnp.zeros(4)}, r"has shape \(4,\).*has shape \(3,\)"),
        ({"v": jnp.zeros(3)}, r"latent sites \['w'\]; got \['v'\]"),
        ({"w": jnp.full(3, jnp.inf)}, "init_params.'w'.. has entries that are NaN or infinite"),
        ({"w": jnp.full(3, 1e30)}, "potential at `init_params` is inf"),
    ],
)
def test_bad_init_params(values, message):
    with pytest.raises(ValueError, match=message):
        run(sgld(regression), X, Y, init_params=values)


def test_init_params_of_chains():
    mcmc = MCMC(sgld(regression), num_warmup=1, num_samples=2, num_chains=2,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    with pytest.raises(ValueError, match=r"shape \(2, 4\).*\(2, 3\) \(chains first\)"):
        mcmc.run(random.key(0), X, Y, init_params={"w": jnp.zeros((2, 4))})


def test_unknown_extra_field():
    mcmc = MCMC(sgld(regression), num_warmup=1, num_samples=2, progress_bar=False)
    with pytest.raises(
        ValueError, match="no field 'thermostat'. It has z, step_size, minibatch_potential"
    ):
        mcmc.run(random.key(0), X, Y, extra_fields=("thermostat",))


def test_traced_subsample_size():
    """With jit_model_args every argument is traced: the remedy is `partial`."""
    mcmc = MCMC(
        sgld(regression), num_warmup=1, num_samples=2, progress_bar=False, jit_model_args=True
    )
    with pytest.raises(ValueError, match="functools.partial"):
        mcmc.run(random.key(0), X, Y, 10)


@pytest.mark.parametrize("jit_model_args", [False, True])
def test_value_of_the_data_in_python(jit_model_args):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([int(y.max()) + 1]))
        with numpyro.plate("rows", x.shape[0], subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(w[0], 1), obs=y[i])

    mcmc = MCMC(
        sgld(model), num_warmup=1, num_samples=2, progress_bar=False, jit_model_args=jit_model_args
    )
    with pytest.raises(ValueError, match=r"Compute the value before.*functools.partial"):
        mcmc.run(random.key(0), X, Y)


def test_data_of_another_length_after_warmup():
    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0], subsample_size=10) as i:
            numpyro.sample("x", dist.Normal(mu, 1), obs=x[i, 0])

    mcmc = MCMC(sgld(model), num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.warmup(random.key(0), X)
    with pytest.raises(ValueError, match="has size 30, but had size 40"):
        mcmc.run(random.key(0), X[:30])


def test_frozen_parameters_are_named():
    class Line(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(x)[..., 0]

    def model(x, y):
        line = flax_module("line", Line(), input_shape=(1, 3))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", N, subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(line(x[i]), scale), obs=y[i])

    with pytest.warns(
        UserWarning, match=r"'line\$params' is a `numpyro.param`.*random_flax_module"
    ):
        run(sgld(model, init_strategy=init_to_value(values={"scale": 1.0})), X, Y)


@pytest.mark.nightly
def test_derived_indices_are_not_refused():
    """Only the rows themselves must fit the length of the array: not what is computed of them."""

    def model(x, y, blocks):
        alpha = numpyro.sample("alpha", dist.Normal(0, 1).expand([4]).to_event(1))
        lag = numpyro.sample("lag", dist.Normal(0, 1))
        with numpyro.plate("rows", N, subsample_size=10) as i:
            mean = alpha[i // 10] + alpha[blocks[i]] + lag * x[i + 1, 0] + x[-i - 1, 1]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    longer = np.concatenate([X, X[:1]])
    run(sgld(model), longer, Y, np.arange(N) % 4)


def test_constant_observations_are_not_refused():
    """The zeros trick: the data are in the distribution, and nothing is observed."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=10) as i:
            numpyro.sample("zeros", dist.Poisson(0.1 + (y[i] - x[i] @ w) ** 2), obs=jnp.zeros(10))

    run(sgld(model), X, Y)
