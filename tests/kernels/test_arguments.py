# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Whatever is given as an argument is used as what it is, or refused by its name."""

from collections import Counter
import datetime
from decimal import Decimal
from fractions import Fraction
from functools import partial
import inspect
import math
from pathlib import Path
import traceback
import warnings

import jax
from jax.experimental.sparse import BCOO, BCSR
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, BarkerMH, Predictive
import pandas as pd
import pytest
import scipy.sparse
from small_models import mean

import numpyro_sgmcmc
from numpyro_sgmcmc import (
    AMAGOLD,
    PSGLD,
    SGFS,
    SGHMC,
    SGLD,
    SGMCLMC,
    SGNHT,
    SMSUBU,
    ApproximateScaleAdaptedSGHMC,
    CCAdL,
    Ensemble,
    GrowingRows,
    LongRun,
    NoiseEstimate,
    Replicas,
    RowsOnDisk,
    calibrated,
    certify,
    compare,
    cyclical,
    debiased,
    group_rows,
    growth,
    kernel_stein_discrepancy,
    kinetic_temperature,
    local_draws,
    loo,
    moments,
    plot_calibrated,
    plot_stein,
    predictive_scores,
    spread_rows,
    stein_matrix,
    summary,
    to_arviz,
)
from numpyro_sgmcmc.data.converters import MOST, positive, truth, whole

COMPILE_QUICKLY = True

PACKAGE = Path(numpyro_sgmcmc.__file__).parent


class NoRepr:
    def __repr__(self):
        raise RuntimeError("It has none.")


def anything():
    """Values by a name, most of which are wrong wherever they are given."""
    numbers = [0, 1, 3, -1, 1.5, -0.5, 10**20, 10**400, 2**40, 1e39, 1e-300]
    numbers += [math.nan, math.inf, -math.inf, 1 + 2j, Fraction(1, 2), Decimal("0.5")]
    numbers += [np.int64(3), np.uint8(2), np.float32(0.5), np.float64("nan")]
    numbers += [jnp.asarray(3), jnp.asarray(0.5), jnp.asarray(0.5, jnp.bfloat16), np.array(2.0)]
    arrays = [np.array([2.0]), np.array([2]), np.eye(3), np.array([]), np.array([None, "a"])]
    arrays += [np.array(["a"]), np.array([np.nan, 1.0]), np.ma.masked_array([1.0, 2.0], [1, 0])]
    arrays += [np.ma.masked, pd.DataFrame({"a": [1, 2]}), pd.Series([1, 2]), [[1], [1, 2]]]
    dates = [datetime.datetime(2020, 1, 1), np.datetime64("2020-01-01"), np.timedelta64(3, "D")]
    keys = [jax.random.key(0), jax.random.PRNGKey(0)]
    words = ["auto", "False", "", "3", b"abc", Path("nowhere")]
    truths = [None, True, False, np.bool_(True), jnp.asarray(True)]
    holders = [[1, 2], [], ["a", "b"], (1.0, 2.0), (), {"a": 1}, {}, {1, 2}, range(3), iter([1])]
    others = [lambda x: x, lambda: None, int, math, ..., NotImplemented, ValueError("x"), NoRepr()]
    every = [*numbers, *arrays, *dates, *keys, *words, *truths, *holders, *others]
    return {f"{k} {type(x).__name__}": x for k, x in enumerate(every)}


model = partial(mean, batch_size=20)


KERNELS = (AMAGOLD, PSGLD, SGFS, SGHMC, SGLD, SGMCLMC, SGNHT, SMSUBU, CCAdL)
KERNELS += (ApproximateScaleAdaptedSGHMC,)
MCMC_ARGUMENTS = ["num_chains", "thinning", "chain_method", "progress_bar"]

#: What is called, its arguments, and those that are attacked: all of them if None.
CONSTRUCTORS = {
    **{kernel.__name__: (kernel, {"model": model}, None) for kernel in KERNELS},
    "Replicas": (Replicas, {"temperatures": [1, 2]}, None),
    "NoiseEstimate": (partial(NoiseEstimate, covariance="low_rank"), {}, None),
    "Ensemble": (Ensemble, {}, None),
    "cyclical": (cyclical, {"largest": 0.1, "smallest": 0.01, "steps": 100}, None),
    "group_rows": (group_rows, {"group": [0, 1, 1]}, None),
    "from_learning_rate": (
        partial(SGHMC.from_learning_rate, model),
        {"learning_rate": 0.1, "momentum_decay": 0.1},
        ["learning_rate", "momentum_decay"],
    ),
    "with_step_size": (CCAdL(model, 0.1, 1.0).with_step_size, {"step_size": 0.1}, None),
    "LongRun": (
        LongRun,
        {"sampler": CCAdL(model), "num_warmup": 10, "num_samples": 10},
        [*(k for k in inspect.signature(LongRun).parameters if k != "mcmc"), *MCMC_ARGUMENTS],
    ),
}


def spread(arrays):
    return spread_rows(jax.make_mesh((1,), ("rows",)), arrays)


#: Of a single argument, whose message need not name it.
UNNAMED = {"RowsOnDisk": (RowsOnDisk, "source"), "spread_rows": (spread, "arrays")}


def outcome(function, arguments, name):
    """What comes of it: "used", "refused", or what is wrong with the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
    except (ValueError, TypeError, numpyro_sgmcmc.UnreadableRows) as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if PACKAGE not in last.parents:
            return f"raised by {last}: {error}"
        is_named = name.lower().rstrip("s") in str(error).lower()
        return "refused" if is_named else f"does not name it: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "used"


def attacked(function, valid, names):
    names = names or list(inspect.signature(function).parameters)
    found = {
        (name, label): outcome(function, valid | {name: value}, name)
        for name in names
        for label, value in anything().items()
    }
    return {k: x for k, x in found.items() if x not in ("used", "refused")}, Counter(found.values())


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructors_use_or_refuse_whatever_they_are_given(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong, counts = attacked(*CONSTRUCTORS[case])
    assert not wrong
    assert counts["refused"] > counts["used"]


@pytest.mark.parametrize("case", UNNAMED)
def test_rows_of_another_kind_are_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, name = UNNAMED[case]
    wrong, _ = attacked(function, {}, [name])
    assert not {k: x for k, x in wrong.items() if not x.startswith("does not name it")}


def test_numbers_are_those_of_any_package():
    three = (3, np.int64(3), np.uint8(3), jnp.asarray(3), np.array(3))
    for value in three:
        kernel = CCAdL(model, value, 1.0, steps_per_sample=value)
        assert kernel.method.steps_per_sample == 3 and type(kernel.method.steps_per_sample) is int
        assert kernel.method.step_size == 3.0 and type(kernel.method.step_size) is float
        assert Replicas([1, 2], minibatches=value) == Replicas([1, 2], minibatches=3)
        assert Ensemble(steps=value) == Ensemble(steps=3)
        assert cyclical(1.0, 0.1, value) == cyclical(1.0, 0.1, 3)
    half = Fraction(1, 2), np.float32(0.5), jnp.asarray(0.5), jnp.asarray(0.5, jnp.bfloat16)
    assert {positive("x", value) for value in half} == {0.5}
    assert whole("x", MOST) == MOST and truth("x", np.bool_(False)) is False
    assert SGLD(model, modified=np.bool_(True)).method.modified is True


@pytest.mark.parametrize("value", [True, np.bool_(True), jnp.asarray(True), "1", 1 + 0j])
def test_a_truth_value_or_a_word_is_no_number(value):
    for check in (positive, whole):
        with pytest.raises(ValueError, match="`x` must be a positive"):
            check("x", value)


@pytest.mark.parametrize("value", [10**20, 2**31, np.uint64(2**63)])
def test_what_jax_cannot_count_is_refused(value):
    with pytest.raises(ValueError, match="`steps_per_sample` must be at most 2,147,483,647"):
        CCAdL(model, steps_per_sample=value)


@pytest.mark.parametrize("value", [1e39, 1e-300, np.float64(1e300)])
def test_what_is_infinite_or_zero_in_single_precision_is_refused(value):
    with pytest.raises(ValueError, match="positive finite .*, beyond the range of float32"):
        CCAdL(model, step_size=value)


@pytest.mark.parametrize("value", [None, 5, np.int64(5), "a", np.array([1, 2]), 1.0])
@pytest.mark.parametrize("kind", [MCMC, LongRun])
def test_what_is_no_random_key_is_refused(kind, value):
    mcmc = kind(CCAdL(model, 0.05, 10.0), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="`rng_key` must be a random key, such as"):
        mcmc.run(value, np.zeros(40, np.float32))
    with pytest.raises(ValueError, match="`rng_key` must be a random key, such as"):
        CCAdL(model).tune(value, np.zeros(40, np.float32))


def test_keys_of_chains_are_as_many_as_these():
    mcmc = LongRun(CCAdL(model, 0.05, 10.0), num_warmup=1, num_samples=1, num_chains=2)
    with pytest.raises(ValueError, match="or one for each of 2 chains; got"):
        mcmc.run(jax.random.split(jax.random.key(0), 3), np.zeros(40, np.float32))


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x["x"][i] @ w, 1), obs=y[i])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "made",
    [
        BCOO.fromdense,
        BCSR.fromdense,
        lambda x: BCOO.fromdense(x, n_batch=1),
        scipy.sparse.csr_matrix,
        scipy.sparse.coo_array,
        scipy.sparse.dok_matrix,
    ],
)
def test_sparse_matrices_are_refused_before_anything_is_compiled(made):
    x, y = np.eye(3, dtype=np.float32)[np.arange(40) % 3], np.zeros(40, np.float32)
    for kind in (MCMC, LongRun):
        mcmc = kind(CCAdL(regression), num_warmup=1, num_samples=1, progress_bar=False)
        with pytest.raises(ValueError, match=r"Argument 'x\['x'\]' .* sparse matrix.* `.todense"):
            mcmc.run(jax.random.key(0), {"x": made(x)}, y)
    with pytest.raises(ValueError, match=r"`arrays\[0\]` must be"):
        spread_rows(jax.make_mesh((1,), ("rows",)), made(x))
    with pytest.raises(TypeError, match="is a sparse matrix"):
        RowsOnDisk(made(x))


def of_shape(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def of_mean(y):
    numpyro.sample("mu", dist.Normal(y.mean(), 10))


def of_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", 150) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.parametrize("own", [of_shape, of_mean, of_rows])
def test_growing_rows_say_what_other_samplers_take(own):
    rows = GrowingRows(np.zeros(150, np.float32))
    for kernel in (NUTS(own), BarkerMH(own)):
        mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
        with pytest.raises((AttributeError, TypeError), match=r"is no array, .*\*rows\.arrays"):
            mcmc.run(jax.random.key(0), *rows)
    with pytest.raises((AttributeError, TypeError), match=r"is no array, .*\*rows\.arrays"):
        Predictive(own, num_samples=1)(jax.random.key(0), *rows)
    Predictive(own, num_samples=1)(jax.random.key(0), *rows.arrays)


def effects(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=20) as g:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(a, 1), obs=y[g])


def a_run(of, **options):
    mcmc = MCMC(
        CCAdL(of, step_size=0.05, friction=10.0, progress_bar=False),
        num_warmup=100,
        num_samples=200,
        progress_bar=False,
    )
    y = np.random.default_rng(0).normal(size=200).astype(np.float32)
    mcmc.run(jax.random.key(0), y, **options)
    return mcmc


def functions():
    """Functions of a run, with arguments that are right."""
    mcmc = a_run(model, extra_fields=("kinetic_temperature", "thermostat"))
    data = to_arviz(mcmc)

    def scores(mcmc, var_name=None, rng_key=None):
        return predictive_scores(mcmc, np.zeros(20), var_name=var_name, rng_key=rng_key)

    of_data = (kinetic_temperature, moments, plot_stein)
    found = {f.__name__: (f, {"run": data}) for f in (*of_data, stein_matrix, summary)}
    of_run = (calibrated, debiased, growth, loo, to_arviz)
    found |= {f.__name__: (f, {"mcmc": mcmc}) for f in of_run}
    return found | {
        "certify": (certify, {"mcmc": mcmc, "num_draws": 100}),
        "compare": (compare, {"runs": {"a": mcmc}, "reference": data}),
        "kernel_stein_discrepancy": (kernel_stein_discrepancy, {"run": mcmc}),
        "local_draws": (local_draws, {"mcmc": a_run(effects)}),
        "plot_calibrated": (plot_calibrated, {"found": calibrated(mcmc)}),
        "predictive_scores": (scores, {"mcmc": mcmc}),
        "stein_matrix": (stein_matrix, {"run": mcmc}),
    }


#: Whose names are those of what they must be: "A run must be an `MCMC` object ...".
RUNS = ("run", "runs", "reference", "mcmc")


@pytest.mark.nightly
def test_functions_of_a_run_use_or_refuse_whatever_they_are_given(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    for case, (function, valid) in functions().items():
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
        wrong, _ = attacked(function, valid, names)
        plt.close("all")
        wrong = {
            (name, label): said
            for (name, label), said in wrong.items()
            if not (name in RUNS and said.startswith("does not name it"))
            # a model that raises is the user's
            and not (name == "model" and "lambda" in said)
        }
        assert not wrong, case
