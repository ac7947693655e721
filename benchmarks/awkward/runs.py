# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels, runs, starts and processes, used as nobody had in mind."""

import copy
import os
import pickle
import signal
import threading
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import (
    MCMC,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_value,
)  # fmt: skip
import optax
import pandas as pd

from numpyro_sgmcmc import SGHMC, SGLD, CCAdL

from .cases import (
    LABELS,
    N,
    Right,
    X,
    Y,
    case,
    coefficients,
    exact,
    exact_mean,
    full,
    given,
    logistic,
    mean_of,
    nuts,
    regression,
    rows,
)  # fmt: skip
from .cases import (
    STEP_SIZE as H,
)
from .cases import (
    run as run_kernel,
)

THREADS, KERNELS, STARTS = "threads", "kernel", "start"
RUNS, STEPS, CELLS = "run", "step size", "session"

X2 = np.random.default_rng(7).standard_normal((N, 3)).astype(np.float32)
# other rows with the same coefficients, and with others
Y3 = (X2 @ [1.0, -1.0, 0.5] + np.random.default_rng(9).standard_normal(N)).astype(np.float32)
Y2 = (3 * X2[:, 0] + np.random.default_rng(8).standard_normal(N)).astype(np.float32)


def sgld(model, step_size=H, **options):
    return SGLD(model, step_size, **({"steps_per_sample": 25} | options))


def kernel_of(run, model, **options):
    """The kernel that is meant by a runner."""
    return sgld(model, **options) if run is given else CCAdL(model, progress_bar=False, **options)


def in_threads(*functions):
    """What each gave, or the first error."""
    found, errors = [None] * len(functions), []

    def call(k):
        try:
            found[k] = functions[k]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def both(one, other, name="w"):
    """Draws of two runs side by side, against two right ones."""
    (a, right_a), (b, right_b) = one, other
    draws = {"a": a.get_samples(True)[name], "b": b.get_samples(True)[name]}
    draws = {k: np.asarray(v) for k, v in draws.items()}
    return draws, Right(
        {"a": right_a.mean[name], "b": right_b.mean[name]},
        {"a": right_a.sd[name], "b": right_b.sd[name]},
    )


@case(THREADS, "one kernel in two threads, the same data", "given tuned")
def one_kernel(run):
    kernel = kernel_of(run, regression)
    a, b = in_threads(*2 * [lambda: run_kernel(kernel, X, Y)])
    return both((a, exact(X, Y)), (b, exact(X, Y)))


@case(THREADS, "one kernel in two threads, other data", "given tuned")
def one_kernel_other_data(run):
    kernel = kernel_of(run, regression)
    a, b = in_threads(lambda: run_kernel(kernel, X, Y), lambda: run_kernel(kernel, X2, Y2))
    return both((a, exact(X, Y)), (b, exact(X2, Y2)))


@case(THREADS, "two kernels in two threads", "given tuned")
def two_kernels(run):
    a, b = in_threads(lambda: run(regression, X, Y), lambda: run(regression, X2, Y2))
    return both((a, exact(X, Y)), (b, exact(X2, Y2)))


@case(THREADS, "one `MCMC` in two threads", "given")
def one_mcmc(run):
    mcmc = MCMC(
        sgld(regression), num_warmup=100, num_samples=500, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    in_threads(*2 * [lambda: mcmc.run(random.key(1), X, Y)])
    return mcmc, exact(X, Y)


@case(THREADS, "NUTS in another thread", "tuned")
def beside_nuts(run):
    mcmc, _ = in_threads(lambda: run(regression, X, Y), lambda: nuts(full(regression), X, Y))
    return mcmc, exact(X, Y)


@case(KERNELS, "pickled and loaded before the run")
def pickled(run):
    kernel = pickle.loads(pickle.dumps(kernel_of(run, regression)))
    return run_kernel(kernel, X, Y), exact(X, Y)


@case(KERNELS, "pickled after the run, used on other data", "given tuned")
def pickled_after(run):
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    return run_kernel(pickle.loads(pickle.dumps(kernel)), X2, Y2), exact(X2, Y2)


@case(KERNELS, "`MCMC` pickled after the run, run again on other data", "given tuned")
def mcmc_pickled(run):
    mcmc = pickle.loads(pickle.dumps(run(regression, X, Y)))
    mcmc.run(random.key(3), X2, Y2)
    return mcmc, exact(X2, Y2)


@case(KERNELS, "a lambda as model, pickled")
def pickled_lambda(run):
    kernel = pickle.loads(pickle.dumps(sgld(lambda x, y: regression(x, y))))
    return run_kernel(kernel, X, Y), exact(X, Y)


@case(KERNELS, "copied and deep-copied")
def copied(run):
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    a = run_kernel(copy.copy(kernel), X2, Y2)
    b = run_kernel(copy.deepcopy(kernel), X, Y)
    return both((a, exact(X2, Y2)), (b, exact(X, Y)))


@case(KERNELS, "used on other data of the same shape", "given tuned")
def other_data(run):
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    return run_kernel(kernel, X2, Y2), exact(X2, Y2)


@case(KERNELS, "used on data of another shape", "given tuned")
def other_shape(run):
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    return run_kernel(kernel, X2[:200, :2], Y2[:200]), exact(X2[:200, :2], Y2[:200])


@case(KERNELS, "used on data changed in place", "given tuned")
def changed_in_place(run):
    kernel, x, y = kernel_of(run, regression), X.copy(), Y.copy()
    run_kernel(kernel, x, y)
    x[:], y[:] = X2, Y2
    return run_kernel(kernel, x, y), exact(X2, Y2)


@case(KERNELS, "data in a closure changed between runs, middle rows", "given tuned")
def closure_changed(run):
    data = {"x": jnp.asarray(X), "y": jnp.asarray(Y)}

    def model():
        regression(data["x"], data["y"])

    kernel = kernel_of(run, model)
    run_kernel(kernel)
    y = Y.copy()
    y[100:300] += 3
    data["y"] = jnp.asarray(y)
    return run_kernel(kernel), exact(X, y)


@case(KERNELS, "data in `self` changed between runs, middle rows", "given tuned")
def attribute_changed(run):
    class Model:
        x, y = jnp.asarray(X), jnp.asarray(Y)

        def __call__(self):
            regression(self.x, self.y)

    model = Model()
    kernel = kernel_of(run, model)
    run_kernel(kernel)
    y = Y.copy()
    y[100:300] += 3
    model.y = jnp.asarray(y)
    return run_kernel(kernel), exact(X, y)


@case(KERNELS, "two `MCMC` objects of one kernel, the first continued")
def continued(run):
    kernel = kernel_of(run, regression)
    first = run_kernel(kernel, X, Y)
    run_kernel(kernel, X2, Y2)
    first.post_warmup_state = first.last_state
    first.run(first.post_warmup_state.rng_key, X, Y)
    return first, exact(X, Y)


@case(KERNELS, "a state of other data continued", "given tuned")
def foreign_state(run):
    first = run(regression, X, Y)
    second = run(regression, X2, Y3)
    second.post_warmup_state = first.last_state
    second.run(second.post_warmup_state.rng_key, X2, Y3)
    return second, exact(X2, Y3)


@case(KERNELS, "the tuning of another model with as many parameters", "tuned")
def foreign_tuning(run):
    tuning = CCAdL(regression, progress_bar=False).tune(random.key(0), X, Y)
    return run(logistic, X, LABELS, settings={"tuning": tuning}), nuts(full(logistic), X, LABELS)


@case(KERNELS, "the tuning of the same model on other data", "tuned")
def tuning_of_other_data(run):
    tuning = CCAdL(regression, progress_bar=False).tune(random.key(0), X, Y)
    return run(regression, X2, Y2, settings={"tuning": tuning}), exact(X2, Y2)


@case(KERNELS, "the tuning of another number of parameters", "tuned")
def tuning_of_other_shape(run):
    tuning = CCAdL(regression, progress_bar=False).tune(random.key(0), X[:, :2], Y)
    return run(regression, X, Y, settings={"tuning": tuning}), exact(X, Y)


@case(KERNELS, "the tuning of another likelihood on the same rows", "tuned")
def tuning_of_other_likelihood(run):
    def wide(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 3), obs=y[i])

    tuning = CCAdL(wide, progress_bar=False).tune(random.key(0), X, Y)
    return run(regression, X, Y, settings={"tuning": tuning}), exact(X, Y)


@case(KERNELS, "no arguments: `CCAdL()`")
def no_arguments(run):
    return run_kernel(CCAdL(), X, Y), exact(X, Y)


@case(KERNELS, "NUTS's arguments: `target_accept_prob`")
def arguments_of_nuts(run):
    return run_kernel(CCAdL(regression, target_accept_prob=0.9), X, Y), exact(X, Y)


@case(KERNELS, "the model given again to `run`")
def model_twice(run):
    return run_kernel(sgld(regression), regression, X, Y), exact(X, Y)


@case(KERNELS, "`MCMC(model)` without a kernel")
def no_kernel(run):
    return run_kernel(regression, X, Y), exact(X, Y)


@case(KERNELS, "the class in the place of a kernel: `MCMC(CCAdL)`")
def class_itself(run):
    return run_kernel(CCAdL, X, Y), exact(X, Y)


@case(STARTS, "`init_params` of lists")
def of_lists(run):
    return run(regression, X, Y, init_params={"w": [0.0] * 3}), exact(X, Y)


@case(STARTS, "`init_params` of one value for four chains", "given tuned")
def one_for_all(run):
    return run(regression, X, Y, init_params={"w": jnp.zeros(3)}), exact(X, Y)


@case(STARTS, "`init_params` of NumPy in double precision")
def doubles(run):
    return run(regression, X, Y, init_params={"w": np.zeros((4, 3))}), exact(X, Y)


@case(STARTS, "`init_params` of NumPy scalars, one chain")
def numpy_scalars(run):
    return run(
        mean_of, Y, init_params={"mu": np.float64(0.5)}, chains=1, samples=4_000
    ), exact_mean(Y)


@case(STARTS, "`init_params` without one of the sites")
def missing_site(run):
    def model(x, y):
        w = coefficients(3)
        b = numpyro.sample("b", dist.Normal(0, 1e-3))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w + b, 1), obs=y[i])

    return run(model, X, Y, init_params={"w": jnp.zeros((4, 3))}), exact(X, Y)


@case(STARTS, "`init_params` with a site that is not there")
def extra_site(run):
    start = {"w": jnp.zeros((4, 3)), "v": jnp.zeros((4, 3))}
    return run(regression, X, Y, init_params=start), exact(X, Y)


@case(STARTS, "`init_params` as an array")
def an_array(run):
    return run(regression, X, Y, init_params=jnp.zeros((4, 3))), exact(X, Y)


@case(STARTS, "`init_params` with NaN")
def with_nan(run):
    return run(regression, X, Y, init_params={"w": jnp.full((4, 3), jnp.nan)}), exact(X, Y)


@case(STARTS, "`init_params` on the support, a negative number's logarithm", "given")
def constrained_start(run):
    def model(y):
        sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(0, sigma), obs=y[i])

    def right(y):
        sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(0, sigma), obs=y)

    return run(model, Y, init_params={"sigma": jnp.full(4, -5.0)}), nuts(right, Y)


def init(strategy, name, kernels="given tuned"):
    @case(STARTS, name, kernels)
    def started(run):
        return run(regression, X, Y, settings={"init_strategy": strategy}), exact(X, Y)


init(init_to_median, "`init_to_median`, not called")
init(init_to_mean(), "`init_to_mean()`", "given")
init(init_to_sample(), "`init_to_sample()`")
init(init_to_feasible(), "`init_to_feasible()`", "given")
init(init_to_value(values={"w": np.zeros(3)}), "`init_to_value` with double precision", "given")
init(init_to_value(values={"w": np.zeros(4)}), "`init_to_value` with a wrong shape")
init(init_to_value(values={"w": [0.0, 0.0, 0.0]}), "`init_to_value` with a list", "given")
init(init_to_value(values={"w": 0.0}), "`init_to_value` with a number for a vector")
init(init_to_value(values={"v": np.zeros(3)}), "`init_to_value` of another site", "given")
init(init_to_value(values={"w": np.full(3, np.nan)}), "`init_to_value` with NaN", "given")
init({"w": np.zeros(3)}, "a bare dictionary as strategy")
init("median", "a word as strategy", "given")


@case(STARTS, "`init_to_sample()` with an improper prior", "given tuned")
def improper(run):
    def model(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return run(model, Y, settings={"init_strategy": init_to_sample()}), Right(
        {"mu": Y.mean()}, {"mu": np.float64(1 / np.sqrt(N))}
    )


def with_options(subject, title, kernels="given", **options):
    @case(subject, title, kernels)
    def with_these(run):
        return run(regression, X, Y, options=options), exact(X, Y)


with_options(RUNS, "`num_samples=0`", num_samples=0)
with_options(RUNS, "`num_samples=1`", num_samples=1)
with_options(RUNS, "`num_warmup=0`", "given tuned", num_warmup=0, num_samples=2_000)
with_options(RUNS, "`num_samples=1e3`", num_samples=1e3)
with_options(RUNS, "more parallel chains than devices", chain_method="parallel")
with_options(RUNS, "a typo in `chain_method`", chain_method="vectorised")
with_options(RUNS, "sequential chains", chain_method="sequential")
with_options(RUNS, "thinning by 3", thinning=3)
with_options(RUNS, "`jit_model_args=True`", "given tuned", jit_model_args=True)
with_options(RUNS, "with a progress bar", "given tuned", progress_bar=True)
with_options(RUNS, "one chain, vectorized", num_chains=1, num_samples=4_000)


def with_fields(title, fields, kernels="given tuned"):
    @case(RUNS, title, kernels)
    def collected(run):
        kernel = kernel_of(run, regression)
        mcmc = MCMC(
            kernel, num_warmup=100, num_samples=500, num_chains=4, chain_method="vectorized",
            progress_bar=False,
        )  # fmt: skip
        mcmc.run(random.key(1), X, Y, extra_fields=fields)
        return mcmc, exact(X, Y)


with_fields("unknown `extra_fields`", ("energy",))
with_fields("`extra_fields` of NUTS", ("num_steps", "accept_prob"), "given")
with_fields("`extra_fields` as a word", "potential_energy", "given")
with_fields("`extra_fields=('step_size',)`", ("step_size",), "given")
with_fields("`extra_fields=('z',)`, twice the draws", ("z",), "given")


@case(RUNS, "an old key: `random.PRNGKey(0)`")
def old_key(run):
    mcmc = MCMC(
        kernel_of(run, regression), num_warmup=100, num_samples=500, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.PRNGKey(0), X, Y)
    return mcmc, exact(X, Y)


@case(RUNS, "an integer as key")
def integer_key(run):
    mcmc = MCMC(sgld(regression), num_warmup=100, num_samples=500, progress_bar=False)
    mcmc.run(0, X, Y)
    return mcmc, exact(X, Y)


@case(RUNS, "four keys for four chains")
def four_keys(run):
    mcmc = MCMC(
        sgld(regression), num_warmup=100, num_samples=500, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.split(random.key(0), 4), X, Y)
    return mcmc, exact(X, Y)


@case(RUNS, "`warmup` and `run` on other data")
def warmup_elsewhere(run):
    mcmc = MCMC(
        kernel_of(run, regression), num_warmup=100, num_samples=500, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.warmup(random.key(1), X, Y)
    mcmc.run(random.key(1), X2, Y3)
    return mcmc, exact(X2, Y3)


@case(RUNS, "an argument forgotten")
def forgotten(run):
    return run(regression, X), exact(X, Y)


@case(RUNS, "an argument of another name")
def misnamed(run):
    return run(regression, X, labels=Y), exact(X, Y)


@case(RUNS, "the model traced first by `Predictive`")
def after_predictive(run):
    from numpyro.infer import Predictive

    Predictive(regression, num_samples=3)(random.key(0), jnp.asarray(X), jnp.asarray(Y))
    return run(regression, X, Y), exact(X, Y)


@case(RUNS, "inside of `jax.jit`")
def inside_jit(run):
    @jax.jit
    def draws(key):
        mcmc = MCMC(sgld(regression), num_warmup=100, num_samples=500, progress_bar=False)
        mcmc.run(key, X, Y)
        return mcmc.get_samples(True)

    return draws(random.key(0)), exact(X, Y)


@case(RUNS, "`jax.disable_jit()` around it", "given")
def without_jit(run):
    with jax.disable_jit():
        mcmc = MCMC(sgld(regression), num_warmup=1, num_samples=2, progress_bar=False)
        mcmc.run(random.key(0), X, Y)
    return "right: it runs"


@case(RUNS, "`jax_debug_nans`", "given tuned")
def debug_nans(run):
    jax.config.update("jax_debug_nans", True)
    return run(regression, X, Y), exact(X, Y)


@case(RUNS, "`jax_numpy_dtype_promotion='strict'`")
def strict_promotion(run):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    return run(regression, X, Y), exact(X, Y)


@case(RUNS, "`jax_check_tracer_leaks`", "given tuned")
def tracer_leaks(run):
    jax.config.update("jax_check_tracer_leaks", True)
    return run(regression, X, Y), exact(X, Y)


@case(RUNS, "`jax_numpy_rank_promotion='raise'`", "given")
def rank_promotion(run):
    jax.config.update("jax_numpy_rank_promotion", "raise")
    return run(regression, X, Y), exact(X, Y)


def step(title, step_size, stands_still=False):
    @case(STEPS, title)
    def stepped(run):
        kernel = SGLD(regression, step_size, steps_per_sample=25)
        mcmc = run_kernel(kernel, X, Y)
        if stands_still:
            return "WRONG, SILENT: chains stood still or ran away half way"
        return mcmc, exact(X, Y)


step("0", 0)
step("negative", -1e-5)
step("infinite", float("inf"))
step("NaN", float("nan"))
step("a word that is a number", "1e-5")
step("an array of one", np.array([H]))
step("an array of no dimensions", np.array(H))
step("an array of a value for each parameter", np.full(3, H))
step("a NumPy number", np.float64(H))
step("True", True)
step("a dictionary by site", {"w": H})
step("a thousand times too large", 1000 * H)
step("slightly beyond stability", 2.2 / N)
step("a schedule, `optax.exponential_decay`", optax.exponential_decay(H, 100_000, 0.9))
step("a schedule, `optax.constant_schedule`", optax.constant_schedule(H))
step("a schedule that turns negative", lambda t: H * (1 - t / 4_000), True)
step("a schedule that turns to zero", optax.linear_schedule(H, 0.0, 5_000), True)
step("a schedule that turns NaN", lambda t: H * jnp.where(t < 4_000, 1, jnp.nan), True)
step("a schedule that turns infinite", lambda t: H * jnp.where(t < 4_000, 1, jnp.inf), True)
step("a schedule of `np` functions", lambda t: H * np.exp(-t / 1e6))
step("a schedule with an `if`", lambda t: H if t < 4_000 else H / 2)
step("a schedule that gives an array of one", lambda t: jnp.array([H]))
step("a schedule that gives None", lambda t: None)
step("a schedule of two arguments", lambda t, u: H)
step("an optimiser in the place of a schedule", optax.adam(1e-3))


@case(STEPS, "SGHMC's friction 0")
def frictionless(run):
    return run_kernel(SGHMC(regression, 1e-3, 0.0), X, Y), exact(X, Y)


@case(STEPS, "SGHMC with a step size of NUTS, 0.1")
def of_nuts(run):
    return run_kernel(SGHMC(regression, 0.1, 1.0), X, Y), exact(X, Y)


@case(STEPS, "learning rate of Adam, 1e-3, for SGLD")
def of_adam(run):
    return run_kernel(SGLD(regression, 1e-3), X, Y), exact(X, Y)


@case(CELLS, "the same cell run thrice", "given tuned")
def thrice(run):
    kernel = kernel_of(run, regression)
    mcmc = MCMC(
        kernel, num_warmup=100, num_samples=500, num_chains=4, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    for _ in range(3):
        mcmc.run(random.key(1), X, Y)
    return mcmc, exact(X, Y)


@case(CELLS, "the model's cell edited under a kernel of its name", "given tuned")
def edited(run):
    cell = {}
    source = "def model(x, y):\n    return law(x, y)\n"
    cell["law"] = logistic
    exec(source, cell)
    kernel = kernel_of(run, cell["model"])
    run_kernel(kernel, X, LABELS)
    cell["law"] = regression
    return run_kernel(kernel, X, LABELS.astype(np.float32)), exact(X, LABELS)


@case(CELLS, "an edited global number, `prior_sd`, between runs of one kernel", "given tuned")
def edited_number(run):
    cell = {"sd": 1.0}

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, cell["sd"]))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    kernel = kernel_of(run, model)
    run_kernel(kernel, Y + 1)
    cell["sd"] = 0.05
    precision = N + 1 / 0.05**2
    found = Right(
        {"mu": np.float64(np.sum(Y + 1.0) / precision)}, {"mu": np.float64(precision**-0.5)}
    )
    return run_kernel(kernel, Y + 1), found


@case(CELLS, "x64 turned on between runs of one kernel", "given tuned")
def x64_on(run):
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    numpyro.enable_x64()
    return run_kernel(kernel, X, Y), exact(X, Y)


@case(CELLS, "x64 turned off between runs of one kernel")
def x64_off(run):
    numpyro.enable_x64()
    kernel = kernel_of(run, regression)
    run_kernel(kernel, X, Y)
    numpyro.enable_x64(False)
    return run_kernel(kernel, X, Y), exact(X, Y)


@case(CELLS, "x64 turned on between `warmup` and `run`", "given tuned")
def x64_midway(run):
    mcmc = MCMC(
        kernel_of(run, regression), num_warmup=100, num_samples=500, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.warmup(random.key(1), X, Y)
    numpyro.enable_x64()
    mcmc.run(random.key(1), X, Y)
    return mcmc, exact(X, Y)


@case(CELLS, "x64 from the beginning", "given tuned")
def x64(run):
    numpyro.enable_x64()
    return run(regression, X, Y), exact(X, Y)


@case(CELLS, "interrupted in the middle and run again", "given tuned")
def interrupted(run):
    kernel = kernel_of(run, regression)
    mcmc = MCMC(
        kernel, num_warmup=100, num_samples=500, num_chains=4, chain_method="vectorized",
        progress_bar=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        for _ in range(100):
            mcmc.run(random.key(1), X, Y)
    except KeyboardInterrupt:
        pass
    else:
        return "right: not interrupted in time"
    mcmc.run(random.key(1), X, Y)
    return mcmc, exact(X, Y)


@case(CELLS, "warnings as errors", "given tuned")
def strict_warnings(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(regression, X, Y), exact(X, Y)


@case(CELLS, "`numpyro.set_host_device_count` after JAX has started", "given")
def late_devices(run):
    jnp.zeros(3)
    numpyro.set_host_device_count(4)
    return run(regression, X, Y, options={"chain_method": "parallel"}), exact(X, Y)


@case(CELLS, "in an event loop, as notebooks have one")
def event_loop(run):
    import asyncio

    async def cell():
        return run(regression, X, Y)

    return asyncio.run(cell()), exact(X, Y)


@case(CELLS, "run by `pandas.apply`, a fit for each group", "given")
def for_each_group(run):
    table = pd.DataFrame({"y": Y, "group": np.arange(N) % 2})
    found = table.groupby("group")["y"].apply(
        lambda y: run(mean_of, y.to_numpy(), samples=200).get_samples(True)["mu"]
    )
    right = [exact_mean(Y[k::2]) for k in range(2)]
    return {str(k): np.asarray(found[k]) for k in range(2)}, Right(
        {str(k): r.mean["mu"] for k, r in enumerate(right)},
        {str(k): r.sd["mu"] for k, r in enumerate(right)},
    )


@case(CELLS, "a run in a forked process", "given")
def forked(run):
    import multiprocessing

    run(regression, X, Y)
    here, there = multiprocessing.Pipe()

    def child():
        there.send(np.asarray(run(regression, X, Y).get_samples(True)["w"]))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    if not here.poll(40):
        process.kill()
        return "HANG: in a process forked after JAX has started (of JAX, not of this package)"
    return {"w": here.recv()}, exact(X, Y)
