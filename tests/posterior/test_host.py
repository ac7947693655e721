# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
NumPyro's private names that ``posterior/numpyro_private.py`` uses: a version of NumPyro that
changes one of them is to be noticed here.
"""

import inspect
from pathlib import Path
import re

from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from runs import run_mcmc
from small_models import mean as model

import numpyro_sgmcmc
from numpyro_sgmcmc import SGLD, CCAdL
from numpyro_sgmcmc.kernels import runtime
from numpyro_sgmcmc.posterior import numpyro_private

COMPILE_QUICKLY = True

PRIVATE = re.compile(r"(?:mcmc|run|view|sampler|kernel|self)\._([a-z]\w*)")


Y = jnp.ones(40)


@pytest.fixture(scope="module")
def mcmc():
    return run_mcmc(SGLD(model, step_size=1e-3), Y, warmup=2, samples=3)


def test_arguments(mcmc):
    (y,), kwargs = numpyro_private.arguments(mcmc)
    assert np.array_equal(y, Y) and kwargs == {}


@pytest.mark.slow
def test_programs_of_earlier_kernels_are_freed(monkeypatch):
    """Thousands of them exhaust the memory maps of a process, as in a study of simulated data."""
    monkeypatch.setattr(runtime, "_MOST_KERNELS", 1)
    maps, kernels = [], []
    for k in range(4):
        kernels.append(CCAdL(model, progress_bar=False))
        run_mcmc(kernels[-1], Y + k, warmup=2, samples=3)
        maps.append(len(Path("/proc/self/maps").read_text().splitlines()))
    assert [bool(kernel.runtime.programs) for kernel in kernels] == [False, False, False, True]
    assert abs(maps[3] - maps[1]) < 100 < maps[0]
    # an earlier kernel compiles what it needs
    run_mcmc(kernels[0], Y, warmup=2, samples=3)
    assert kernels[0].runtime.programs and not kernels[3].runtime.programs


@pytest.mark.parametrize("traced", [False, True])
def test_jit_model_args(traced):
    kernel = SGLD(model, step_size=1e-3)
    made = MCMC(kernel, num_warmup=0, num_samples=1, jit_model_args=traced)
    assert numpyro_private.has_traced_arguments(made) == traced


def test_view_of_a_run(mcmc):
    view = numpyro_private.view_of(
        mcmc, max, {"nu": jnp.arange(6.0).reshape(1, 6)}, (1,), {"two": 2}
    )
    assert view.sampler.model is max and numpyro_private.arguments(view) == ((1,), {"two": 2})
    assert view.get_samples()["nu"].shape == (6,) and "diverging" in view.get_extra_fields()
    assert set(mcmc.get_samples()) == {"mu"} and mcmc.sampler.model is not max


@pytest.mark.parametrize(
    "fn, expected",
    [
        (dist.Normal(0, 1), True),
        (dist.Normal(0, 1).mask(False), False),
        (dist.Normal(jnp.zeros(2), 1).mask(jnp.array([True, False])), [True, False]),
        (dist.Normal(0, 1).expand([3, 2]).mask(jnp.array([True, False])), [[True, False]] * 3),
        (dist.Normal(0, 1).mask(jnp.array([[True], [False]])).expand([2, 2]).to_event(1),
         [[True] * 2, [False] * 2]),
        (dist.Normal(0, 1).mask(jnp.array([True, False])).expand([3, 2]), [[True, False]] * 3),
        (dist.Normal(0, 1).expand([2, 2]).to_event(1).mask(jnp.array([True, False])).expand([2, 2]),
         [[[True] * 2, [False] * 2]] * 2),
        (dist.Normal(0, 1).expand([2, 3]).to_event(1).mask(jnp.array([True, False])),
         [[True] * 3, [False] * 3]),
    ],
)  # fmt: skip
def test_masked_values(fn, expected):
    assert numpyro_private.is_seen({"fn": fn}).tolist() == expected


def test_a_kernel_is_initialised_once(mcmc, monkeypatch):
    """``MCMC`` asks for ``_sample_fn``, and where it is None calls ``init`` at each run."""
    calls = []
    init = SGLD.init
    monkeypatch.setattr(SGLD, "init", lambda *a, **k: calls.append(0) or init(*a, **k))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), Y)
    assert not calls and numpyro_private.is_initialised(mcmc.sampler)
    monkeypatch.setattr(SGLD, "_sample_fn", None)
    mcmc.run(random.key(1), Y)
    assert calls
    mcmc.post_warmup_state = None


def test_tree_depth():
    """ArviZ reads it of the sampler of a run, ours and NUTS."""
    kernel = NUTS(model, max_tree_depth=7)
    made = MCMC(kernel, num_warmup=0, num_samples=1)
    made._states = {made._sample_field: {}}
    assert (
        numpyro_private.view_of(made, model, {}, (), {}).sampler._max_tree_depth
        == kernel._max_tree_depth
    )


class Kept(numpyro_private.HostedRun):
    """A run whose loop is that of ``MCMC``, and whose draws are doubled."""

    def stored_draws(self):
        return self.__dict__.get("kept")


def test_hosted_run():
    made = Kept(SGLD(model, step_size=1e-3), num_warmup=2, num_samples=3, progress_bar=False)
    sample, others = made.fields
    assert sample == "z" and set(others) == set(made.sampler.default_fields)
    assert not made.only_warms_up
    made.run(random.key(0), Y)
    draws = made._states
    made.begin((Y,), {})
    assert numpyro_private.arguments(made) == ((Y,), {})
    made.kept = {**draws, "z": {"mu": 2 * draws["z"]["mu"]}}
    np.testing.assert_array_equal(made.get_samples()["mu"], 2 * draws["z"]["mu"][0])
    assert made.get_samples(group_by_chain=True)["mu"].shape == (1, 3)
    state = made.last_state._replace(i=jnp.asarray(17))
    made.end(state)
    assert made.last_state.i == 17 and not made.only_warms_up
    phases = []
    made.__class__ = type("Seen", (Kept,), {"run": lambda self, *a, **k: phases.append(
        (self.only_warms_up, self.warmup_bounds))})  # fmt: skip
    made.warmup(random.key(0), Y)
    assert phases == [(True, (2, 2))]


def test_no_other_module_uses_private_names():
    """Whatever ``MCMC`` and ``MCMCKernel`` have with an underscore stands in one module."""
    source = inspect.getsource(MCMC)
    hidden = set(PRIVATE.findall(source)) | {"_sample_fn"}
    hidden = {f"_{name.strip('_')}" for name in hidden}
    package = Path(numpyro_sgmcmc.__file__).parent
    for file in sorted(package.rglob("*.py")):
        if file.name != "numpyro_private.py":
            used = {
                f"_{n}" for n in re.findall(r"(?:mcmc|run|view|self)\._(\w+)", file.read_text())
            }
            assert not used & (hidden - {"_cache"}), file
