# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""NumPyro's contract: every kernel through the same laws."""

from itertools import pairwise
import os
from pathlib import Path
import pickle
import subprocess
import sys
import warnings

import jax
from jax import random
import jax.numpy as jnp
from kernel_table import CENTRE, KERNELS, X, Y, make, model, run
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_median, init_to_value
from numpyro.util import fori_collect
import optax
import pytest
from runs import go_on, run_mcmc

from numpyro_sgmcmc import SGHMC, SGLD, SGNHT, CCAdL, NoiseEstimate, to_arviz
from numpyro_sgmcmc.results.facts import attributes

#: The contract is met once, in the base class: of each kind one, and all in `make test-nightly`.
KINDS = ("SGLD epochs", "SGHMC", "CCAdL tuned")
LAWFUL = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.nightly) for name in KERNELS
]
each_kernel = pytest.mark.parametrize("name", LAWFUL)
# those that differ from another one in a word are left to the nightly tests
ALIKE = ("SGLD", "SGLD epochs", "SGLD modified", "SGHMC", "PSGLD", "SMSUBU", "CCAdL",
         "CCAdL euler", "CCAdL matrix free")  # fmt: skip
each_state = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n in ALIKE else ()) for n in KERNELS]
)
#: One, for what the base class does alike for all.
few_kernels = pytest.mark.parametrize(
    "name",
    [
        "CCAdL",
        *(pytest.param(k, marks=pytest.mark.nightly) for k in ("SGLD epochs", "SGHMC estimated")),
    ],
)
SUPPORT = Path(__file__).parents[1] / "support"
COMPILE_QUICKLY = True


def samples(mcmc):
    return jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))


def assert_same(found, expected, **tolerance):
    """Bit for bit, or up to the rounding of a differently compiled program."""
    assert found.keys() == expected.keys()
    for site in found:
        np.testing.assert_allclose(found[site], expected[site], **({"rtol": 0} | tolerance))


ROUNDING = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture
def progress_bar(monkeypatch):
    # NumPyro switches its bar off where these are set
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.one_case
@each_kernel
def test_collects_constrained_sites_and_deterministics(name):
    draws = samples(run(name))
    assert {k: v.shape for k, v in draws.items()} == {
        "w": (1, 6, 3),
        "scale": (1, 6),
        "precision": (1, 6),
    }
    assert np.all(draws["scale"] > 0)
    np.testing.assert_allclose(draws["precision"], draws["scale"] ** -2, rtol=1e-5)
    assert len(np.unique(draws["scale"])) == 6


@pytest.mark.nightly
@each_kernel
def test_chains_side_by_side_give_the_same_draws(name):
    expected = samples(run(name, num_chains=2, chain_method="sequential"))
    assert not np.array_equal(expected["w"][0], expected["w"][1])
    found = samples(run(name, num_chains=2, chain_method="vectorized"))
    assert_same(found, expected, **ROUNDING)


@pytest.mark.slow
@few_kernels
def test_chains_on_devices_and_alone_give_the_same_draws(name):
    expected = samples(run(name, num_chains=3, chain_method="vectorized"))
    found = samples(run(name, num_chains=3, chain_method="parallel"))
    assert_same(found, expected, **ROUNDING)
    alone = samples(run(name, key=random.split(random.key(0), 3)[1]))
    assert_same(alone, jax.tree.map(lambda x: x[1:2], expected), **ROUNDING)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # of NumPyro's own loop
def test_chain_method_may_be_a_function():
    expected = samples(run("CCAdL", num_chains=3, chain_method="sequential"))
    assert_same(samples(run("CCAdL", num_chains=3, chain_method=jax.vmap)), expected, **ROUNDING)


@pytest.mark.slow
def test_kernel_is_shared_by_chain_methods():
    """What a kernel remembers of one run does not change how another one goes on."""
    expected = samples(run("SGHMC", num_samples=12, num_chains=2, chain_method="vectorized"))
    mcmc = run("SGHMC", num_samples=6, num_chains=2, chain_method="vectorized")
    run_mcmc(mcmc.sampler, X, Y, key=5, warmup=0, samples=1)
    go_on(mcmc, X, Y)
    assert_same(samples(mcmc), jax.tree.map(lambda x: x[:, 6:], expected))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chain_method", ["parallel", pytest.param(jax.vmap, marks=pytest.mark.nightly)]
)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_data_on_the_device(chain_method):
    mcmc = make("SGLD", num_chains=2, chain_method=chain_method)
    mcmc.run(random.key(0), jnp.asarray(X), jnp.asarray(Y))
    assert_same(samples(mcmc), samples(run("SGLD", num_chains=2)), **ROUNDING)
    with pytest.raises(ValueError, match="NaN or infinite"):
        mcmc.run(random.key(0), jnp.asarray(X).at[3, 1].set(jnp.nan), jnp.asarray(Y))


@pytest.mark.nightly
def test_eight_devices():
    assert jax.local_device_count() == 8
    mcmc = run("CCAdL", num_chains=8, chain_method="parallel")
    assert len({d for leaf in jax.tree.leaves(mcmc.last_state.z) for d in leaf.devices()}) == 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "chains"),
    [("CCAdL", 1), ("SGLD", 2)]
    + [
        pytest.param(*x, marks=pytest.mark.nightly)
        for x in (("SGLD", 1), ("SGHMC estimated", 1), ("CCAdL", 2))
    ],
)
def test_progress_bar_changes_nothing(name, chains, progress_bar, capsys):
    options = {"num_chains": chains, "chain_method": "vectorized"}
    bare = samples(run(name, **options))
    shown = samples(run(name, progress_bar=True, **options))
    assert_same(shown, bare, **ROUNDING)
    if chains == 1:
        assert "step size" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "chains", "init_params"),
    [
        pytest.param("SGHMC", 1, False, marks=pytest.mark.nightly),
        ("CCAdL tuned", 2, False),
        ("CCAdL", 1, True),
    ],
)
def test_second_run_compiles_nothing(name, chains, init_params, progress_bar, compiled):
    z = {"w": jnp.ones(3), "scale": jnp.zeros(())} if init_params else None
    others = [tuple(np.roll(x, k, axis=0) for x in (X, Y)) for k in (1, 2)]
    for jit_model_args in (False, True):
        mcmc = make(
            name,
            progress_bar=True,
            num_chains=chains,
            chain_method="vectorized",
            jit_model_args=jit_model_args,
        )
        for k, data in enumerate([(X, Y), (X, Y), *others]):
            compiled.clear()
            mcmc.run(random.key(k), *data, init_params=z)
            if k == 0:
                assert compiled
            # of other data a control variate compiles its pass over them, once
            if k == 1 or (jit_model_args and k == 3):
                assert not compiled


@pytest.mark.nightly
@few_kernels
def test_thinning_and_steps_per_sample(name):
    every = samples(run(name, num_samples=12))
    thinned = samples(run(name, num_samples=12, thinning=3))
    assert_same(thinned, jax.tree.map(lambda x: x[:, 2::3], every), **ROUNDING)
    inner = run(name, num_warmup=1, num_samples=4, options={"steps_per_sample": 3})
    assert inner.last_state.i == 15
    assert_same(samples(inner), thinned, **ROUNDING)


@few_kernels
def test_jit_model_args_changes_nothing(name):
    assert_same(samples(run(name, jit_model_args=True)), samples(run(name)), **ROUNDING)


@few_kernels
def test_legacy_keys(name):
    assert_same(samples(run(name, key=random.PRNGKey(0))), samples(run(name)))


@pytest.mark.nightly
@few_kernels
def test_init_params_are_where_the_chain_starts(name):
    tiny = {"step_size": 1e-7}
    if name == "PSGLD":  # which has no preconditioner without a warm-up
        tiny |= {"frozen": False}
    start = {"w": jnp.array([1.0, 2.0, 3.0]), "scale": jnp.array(0.5)}
    mcmc = run(name, init_params=start, num_warmup=0, num_samples=1, options=tiny)
    np.testing.assert_allclose(samples(mcmc)["w"][0, 0], start["w"], atol=0.01)
    np.testing.assert_allclose(samples(mcmc)["scale"][0, 0], np.exp(0.5), atol=0.01)
    both = jax.tree.map(lambda x: jnp.stack([x, -x]), start)
    mcmc = run(name, init_params=both, num_warmup=0, num_samples=1, options=tiny,
               num_chains=2, chain_method="vectorized")  # fmt: skip
    np.testing.assert_allclose(samples(mcmc)["w"][:, 0], both["w"], atol=0.01)


@pytest.mark.parametrize("strategy", [init_to_median, init_to_value(values={"scale": 2.0})])
def test_init_strategies(strategy):
    options = {"step_size": 1e-9, "init_strategy": strategy}
    mcmc = run("SGLD", num_warmup=0, num_samples=1, options=options)
    if strategy is not init_to_median:
        np.testing.assert_allclose(samples(mcmc)["scale"], 2.0, rtol=1e-3)


@pytest.mark.parametrize("step_size", [None, 1e-9])
def test_initial_values_of_numpy_are_indexed_by_rows(step_size):
    def model(group, y):
        with numpyro.plate("groups", 4):
            level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(level[group[i]], 1), obs=y[i])

    strategy = init_to_value(values={"level": np.arange(4.0)})
    kernel = SGLD(model, step_size=step_size, init_strategy=strategy, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0), jnp.arange(40) % 4, jnp.arange(40.0) % 4)
    if step_size is not None:
        np.testing.assert_allclose(samples(mcmc)["level"][0, 0], np.arange(4.0), atol=1e-3)


@pytest.mark.slow
@few_kernels
def test_warmup_then_run(name):
    expected = samples(run(name))
    mcmc = make(name)
    mcmc.warmup(random.key(0), X, Y)
    assert mcmc.last_state.i == 3
    mcmc.run(mcmc.post_warmup_state.rng_key, X, Y)
    assert_same(samples(mcmc), expected)
    assert mcmc.last_state.i == 9


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "chain_method"),
    [pytest.param(*law.values, "vectorized", marks=law.marks) for law in LAWFUL]
    + [("CCAdL", None)]
    + [
        pytest.param(name, method, marks=pytest.mark.slow)
        for name in ("SGLD epochs", "CCAdL euler")
        for method in ("sequential", "parallel")
    ],
)
def test_resumed_run_is_one_long_run(name, chain_method):
    chains = {"num_chains": 2, "chain_method": chain_method} if chain_method else {}
    expected = samples(run(name, num_samples=12, **chains))
    mcmc = run(name, num_samples=6, **chains)
    first = samples(mcmc)
    go_on(mcmc, X, Y)
    both = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), first, samples(mcmc))
    assert_same(both, expected)


def python(*args, **environment):
    """Runs Python in a new process that sees the table of kernels."""
    subprocess.run(
        [sys.executable, *map(str, args)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)} | environment,
        timeout=300,
    )


CONTINUE = """
import pickle, sys
import jax, numpy as np
runs, data = pickle.load(open(sys.argv[1], "rb"))
found = {}
for name, mcmc in runs.items():
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *data)
    found[name] = jax.tree.map(np.asarray, mcmc.get_samples(True))
pickle.dump(found, open(sys.argv[2], "wb"))
"""


@pytest.mark.nightly
def test_pickled_runs_go_on_in_a_new_process(tmp_path):
    runs = {name: run(name) for name in KERNELS}
    pickled, found = tmp_path / "runs", tmp_path / "found"
    pickled.write_bytes(pickle.dumps((runs, (X, Y))))
    # compiled as in this process
    python("-c", CONTINUE, pickled, found, JAX_DISABLE_MOST_OPTIMIZATIONS="True")
    continued = pickle.loads(found.read_bytes())
    for name, mcmc in runs.items():
        go_on(mcmc, X, Y)
        expected = samples(mcmc)
        # a deterministic site is no part of the chain: another process may round it differently
        np.testing.assert_allclose(
            continued[name].pop("precision"), expected.pop("precision"), rtol=1e-6
        )
        assert_same(continued[name], expected, err_msg=name)


EVERY_KERNEL = """
import sys
import jax, jax.numpy as jnp
from kernel_table import KERNELS, run
for name in KERNELS:
    mcmc = run(name, num_chains=2, chain_method="vectorized")
    for leaf in jax.tree.leaves((mcmc.get_samples(), mcmc.last_state)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == sys.argv[1], (name, leaf.dtype)
"""


@pytest.mark.nightly
def test_dtype_and_tracer_leaks():
    """In double precision: without it JAX has nothing but single."""
    python("-c", EVERY_KERNEL, "float64", JAX_ENABLE_X64="true", JAX_CHECK_TRACER_LEAKS="1")


@pytest.mark.one_case
@each_state
def test_state_fields(name):
    fields = ["i", "step_size", "minibatch_potential", "nonfinite_steps", "diverging"]
    fields += ["configurational_temperature"]
    averaged = {"SGLD modified": (2, 4), "SGHMC estimated": (4, 4), "CCAdL": (4, 4)}
    averaged |= {"CCAdL euler": (4, 4)}
    momentum = name.startswith(("SGH", "SGN", "SGM", "CCA", "SMS", "AMA"))
    fields += ["kinetic_temperature", "momentum"] if momentum else []
    fields += ["thermostat"] if name.startswith(("SGNHT", "CCAdL")) else []
    fields += ["noise_covariance"] if name in averaged else []
    fields += ["score_covariance"] if name == "SGFS" else []
    fields += ["friction_used"] if name in ("SGHMC estimated", "SGMCLMC") else []
    fields += ["kinetic_energy"] if name == "SGMCLMC" else []
    fields += ["work", "accept_prob"] if name == "AMAGOLD" else []
    fields += ["exchange_prob"] if name == "SGLD replicas" else []
    for chains in (2,) if name in averaged else (1,):
        mcmc = run(name, extra_fields=fields, num_chains=chains, chain_method="vectorized")
        found = mcmc.get_extra_fields(group_by_chain=True)
        assert set(found) == set(fields)
        for field in set(fields) - {"noise_covariance"}:
            shapes = {"momentum": (4,), "score_covariance": (4,), "exchange_prob": (2,)}
            shapes["thermostat"] = (2,) if name == "SGNHT" else ()
            assert found[field].shape == (chains, 6, *shapes.get(field, ())), field
            unjudged = "SGLD epochs", "SMSUBU", "AMAGOLD"
            judged = name not in unjudged or field != "configurational_temperature"
            assert np.all(np.isfinite(found[field]) == judged), field
        assert found["i"][0].tolist() == [4, 5, 6, 7, 8, 9]
    if "kinetic_temperature" in fields:
        np.testing.assert_allclose(
            found["kinetic_temperature"], (found["momentum"] ** 2).mean(-1), rtol=1e-5
        )
    if name in averaged:
        first = jax.tree.leaves(found["noise_covariance"])[0]
        assert first.shape == (2, 6, *averaged[name])
        assert np.all(np.isfinite(first))


@few_kernels
def test_step_size_schedule(name):
    schedule = optax.exponential_decay(1e-4, transition_steps=1, decay_rate=0.9)
    mcmc = run(name, extra_fields=("step_size",), options={"step_size": schedule})
    found = mcmc.get_extra_fields()["step_size"]
    np.testing.assert_allclose(found, 1e-4 * 0.9 ** np.arange(3, 9), rtol=1e-5)


@pytest.mark.one_case
@each_kernel
def test_nonfinite_steps_are_undone_and_counted(name):
    """Steps of a size that no chain survives leave finite draws, the ones before included."""
    if name == "AMAGOLD":
        pytest.skip("takes no schedule, and has a test of its own")
    # there is no step size that is too large for SGFS
    large = jnp.nan if name == "SGFS" else jnp.inf
    schedule = lambda i: jnp.where(i < 6, 1e-4, large)  # noqa: E731
    calm = samples(run(name, options={"step_size": 1e-4}))
    mcmc = run(name, options={"step_size": schedule}, extra_fields=("nonfinite_steps",))
    draws, found = samples(mcmc), mcmc.get_extra_fields()
    undone = found["nonfinite_steps"]
    assert found["diverging"].tolist() == [False] * 3 + [True] * 3
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    assert undone.tolist() == [0, 0, 0, 1, 2, 3]
    assert_same(jax.tree.map(lambda x: x[:, :3], draws), jax.tree.map(lambda x: x[:, :3], calm),
                **ROUNDING)  # fmt: skip
    if name != "SGLD replicas":  # which still exchange what they have
        np.testing.assert_array_equal(draws["w"][0, 2], draws["w"][0, -1])
    assert mcmc.last_state.monitor.longest_stay == mcmc.last_state.monitor.stay == 3
    text = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert ("3 STEPS UNDONE" if name == "SGFS" else "3 NON-FINITE STEPS") in text


@pytest.mark.one_case
@each_kernel
def test_temperature_and_settings(name):
    mcmc = run(name, options={"temperature": 0.5}, num_warmup=1, num_samples=1)
    kernel, settings = mcmc.sampler, mcmc.sampler.run_info
    assert settings["temperature"] == 0.5 and settings["batch_size_rows"] == 20
    assert settings["algorithm"] == type(kernel).__name__
    # what netCDF can hold
    assert {type(x) for x in attributes(mcmc, None, None).values()} <= {str, int, float}
    other = kernel.with_step_size(settings["step_size"] / 2, 3)
    # on all rows, however many steps a sample has
    tests = {"AMAGOLD": 1, "SGLD replicas": 3 / 2}.get(name, 0)
    changed = {
        "step_size": settings["step_size"] / 2,
        "steps_per_sample": 3,
        "passes_per_sample": 3 * (settings["passes_per_sample"] - tests) + tests,
    }
    assert other.run_info == pytest.approx(settings | changed)
    assert kernel.run_info == settings


@pytest.mark.parametrize("kernel", [SGHMC, SGNHT, CCAdL])
def test_from_learning_rate(kernel):
    """eta = h^2 and alpha = h A, eq. (15) of Chen et al. (2014)."""
    made = kernel.from_learning_rate(model, learning_rate=1e-4, momentum_decay=0.1)
    given = kernel(model, step_size=1e-2, friction=10.0)
    assert made.run_info == pytest.approx(given.run_info)
    with pytest.raises(ValueError, match="`learning_rate` must be a positive"):
        kernel.from_learning_rate(
            model, learning_rate=optax.constant_schedule(1.0), momentum_decay=0.1
        )


def one_step(kernel, position, momentum=None, steps=1):
    """States before and after steps of a kernel on its own, for checking them by hand."""
    state = kernel.init(random.key(0), 0, None, model_args=(X, Y), model_kwargs={})
    if momentum is not None:
        state = state._replace(dynamics=state.dynamics._replace(momentum=momentum))
    state = state._replace(z={"w": position[1:], "scale": position[0]})
    states = [state]
    for _ in range(steps):
        states.append(kernel.sample(states[-1], (X, Y), {}))
    return states


def flat(state):
    return np.concatenate([np.atleast_1d(state.z["scale"]), state.z["w"]])


@pytest.mark.nightly
def test_order_of_drift_and_kick():
    """SGHMC and CCAdL drift on the old momentum, SGNHT on the new one: so the papers have it."""
    position, momentum = jnp.array([0.1, 1.0, -1.0, 0.5]), jnp.array([1.0, -2.0, 0.5, 3.0])
    for method in (SGHMC, CCAdL, SGNHT):
        kernel = method(model, step_size=3e-3, friction=30.0, integrator="euler")
        before, after = one_step(kernel, position, momentum)
        moved = (flat(after) - flat(before)) / 3e-3
        used = after.dynamics.momentum if method is SGNHT else momentum
        np.testing.assert_allclose(moved, used, atol=2e-4)


@pytest.mark.nightly
def test_momentum_is_resampled():
    """With a friction of nearly zero the momentum of a flat target only changes when redrawn."""
    kernel = SGHMC(model, step_size=1e-8, friction=1e-8, resample_momentum=3, temperature=4.0)
    states = one_step(kernel, jnp.zeros(4), steps=7)
    changed = [
        not np.allclose(a.dynamics.momentum, b.dynamics.momentum, atol=1e-2)
        for a, b in pairwise(states)
    ]
    assert changed == [True, False, False, True, False, False, True]


@pytest.mark.nightly
def test_running_average_of_the_noise():
    """kappa = 1/t for the first steps, then 1/window; the first step uses no estimate."""
    seen = []

    class Recorded(CCAdL):
        class Method(CCAdL.Method):
            def step(self, state, gradient, rng_key):
                def recorded(position):
                    evaluation = gradient(position)
                    seen.append(np.asarray(evaluation.noise))
                    return evaluation

                return super().step(state, recorded, rng_key)

    kernel = Recorded(
        model, step_size=1e-3, friction=1.0, noise=NoiseEstimate("diagonal", window=3)
    )
    states = one_step(kernel, jnp.zeros(4), steps=5)
    expected = np.zeros(4)
    for t, (noise, state) in enumerate(zip(seen, states[1:], strict=True), start=1):
        kappa = max(1 / t, 1 / 3)
        expected = (1 - kappa) * expected + kappa * noise
        np.testing.assert_allclose(state.dynamics.noise_covariance, expected, rtol=1e-4)
        assert state.dynamics.observations == t


def test_plates_draw_their_own_rows():
    """Independent rows for each plate: else the potential of nested plates is biased."""

    def two_plates(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        for name in ("a", "b"):
            with numpyro.plate(name, 80, subsample_size=20) as i:
                numpyro.sample(f"x_{name}", dist.Normal(mu, 1), obs=x[i, 0])

    kernel = SGLD(two_plates, step_size=1e-3)
    kernel.runtime.read(kernel.method, (jnp.asarray(X), jnp.asarray(Y)), {})
    target = kernel.runtime.target(kernel.method)
    drawn = jax.vmap(lambda i: target.rows(random.key(0), i))(jnp.arange(200))
    rows = {name: x.numbers for name, x in drawn.items()}
    assert set(rows) == {"a", "b"} and not np.array_equal(rows["a"][0], rows["b"][0])
    assert not np.array_equal(rows["a"][0], rows["a"][1])
    shared = [len(set(a) & set(b)) for a, b in zip(*map(np.asarray, rows.values()), strict=True)]
    # the hypergeometric law of the number of rows in common
    assert abs(np.mean(shared) - 5) < 4 * (5 * 0.75 * 60 / 79 / 200) ** 0.5


def test_sample_before_init():
    state = run("SGLD").last_state
    with pytest.raises(RuntimeError, match=r"Call `SGLD.init` first"):
        SGLD(model, step_size=0.1).sample(state, (X, Y), {})


def test_dropped_deterministics_are_named():
    def with_mean(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
            mean = numpyro.deterministic("mean", x[i] @ w)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    mcmc = MCMC(SGLD(with_mean, step_size=1e-3), num_warmup=1, num_samples=2, progress_bar=False)
    with pytest.warns(UserWarning, match="'mean' depend on the minibatch.*Predictive"):
        mcmc.run(random.key(0), X, Y)
    assert set(mcmc.get_samples()) == {"w"}


@pytest.mark.parametrize(("name", "chains"), [("SGLD", 1), ("CCAdL", 3)])
def test_loops_call_no_python(name, chains):
    """JAX's persistent compilation cache keeps no program that calls back."""
    kernel = KERNELS[name](model, init_strategy=CENTRE)
    keys = random.split(random.key(0), chains) if chains > 1 else random.key(0)
    data = jnp.asarray(X), jnp.asarray(Y)
    state = kernel.init(keys, 3, None, model_args=data, model_kwargs={})

    def loop(state, data):
        def sample(states):
            return (kernel.sample(states[0], data, {}),)

        def kept(states):
            return states[0].z, states[0]["diverging"]

        return fori_collect(2, 10, sample, (state,), transform=kept, progbar=False)

    text = jax.jit(loop).lower(state, data).as_text()
    assert "while" in text and "callback" not in text


@pytest.mark.nightly
def test_rejected_steps_are_divergences(capsys):
    """A sample in which a step was undone, and no other, for the host and for ArviZ."""
    schedule = lambda i: jnp.where(i == 7, jnp.inf, 1e-4)  # noqa: E731
    options = {"step_size": schedule, "steps_per_sample": 2}
    for chains, method in ((1, "vectorized"), (2, "vectorized"), (2, "sequential")):
        mcmc = run("SGLD", num_warmup=1, options=options, num_chains=chains, chain_method=method)
        found = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
        assert np.array_equal(found, [[False, False, True, False, False, False]] * chains)
        mcmc.print_summary()
        assert f"Number of divergences: {chains}" in capsys.readouterr().out
        assert int(to_arviz_quietly(mcmc)["sample_stats"]["diverging"].sum()) == chains


def to_arviz_quietly(mcmc):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return to_arviz(mcmc)
