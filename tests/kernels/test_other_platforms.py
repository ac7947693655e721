# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Programs lower for GPUs and TPUs, which needs none of them."""

import re

import jax
from jax import export, random
import jax.numpy as jnp
from kernel_table import KERNELS, X, Y, make
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior import target

PLATFORMS = "cuda", "tpu"

#: The eigendecomposition of a small matrix, of the estimated noise. A GPU takes long for it, and
#: nothing else leaves the compiled program: no callback, no other factorisation.
EIGENVALUES = {"cusolver_syevd_ffi", "Eigh"}


def calls_of(function, *arguments, platforms=PLATFORMS):
    """The names of the library functions that a program calls on some platforms."""
    found = set()
    for platform in platforms:
        lowered = export.export(function, platforms=[platform])(*arguments)
        found |= set(re.findall(r"custom_call @(\w+)", lowered.mlir_module()))
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("name", KERNELS)
def test_a_sample_lowers(name):
    mcmc = make(name)
    kernel = mcmc.sampler
    state = kernel.init(random.key(0), 3, None, (X, Y), {})
    sample = jax.jit(lambda state: kernel.sample(state, (X, Y), {}))
    assert calls_of(sample, state) <= EIGENVALUES


def test_what_has_no_lowering_is_seen():
    with pytest.raises(NotImplementedError, match="eig"):
        calls_of(jax.jit(jnp.linalg.eig), jnp.eye(3), platforms=["tpu"])
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    by_host = jax.jit(lambda x: jax.pure_callback(np.sort, shape, x))
    with pytest.raises(ValueError, match="platform"):
        calls_of(by_host, jnp.zeros(3))
    assert calls_of(jax.jit(jnp.linalg.cholesky), jnp.eye(3)) - EIGENVALUES


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def effects(group, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    a = numpyro.sample("a", dist.Normal(0, tau).expand([2_100]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=400) as i:
        numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])


def latent(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", len(y), subsample_size=20) as i:
        a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("rows", 4):
            numpyro.sample("y", dist.Bernoulli(logits=a), obs=y[i].T)


RNG = np.random.default_rng(0)
GROUP = RNG.integers(2_100, size=8_000)
CASES = {
    "regression": (logistic, X, (Y > 0).astype(np.float32)),
    "many effects": (
        effects,
        GROUP,
        (RNG.standard_normal(2_100)[GROUP] + RNG.standard_normal(8_000)).astype(np.float32),
    ),
    "latent effects": (latent, (RNG.random((200, 4)) < 0.5).astype(np.float32)),
}


MARKS = {"many effects": pytest.mark.nightly, "latent effects": pytest.mark.slow}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", [pytest.param(k, marks=MARKS.get(k, ())) for k in CASES])
def test_programs_of_a_tuning_lower(case, monkeypatch):
    """All that a tuning runs: searches, metric, noise, rare rows and pilot."""
    called, run = {}, target.Quick.__call__

    def recorded(program, *arguments):
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
            called[id(program)] = program, arguments
        return run(program, *arguments)

    monkeypatch.setattr(target.Quick, "__call__", recorded)
    model, *data = CASES[case]
    CCAdL(model, progress_bar=False).tune(random.key(0), *data)
    assert len(called) >= 5
    for program, arguments in called.values():
        assert calls_of(program._inner, *arguments) <= EIGENVALUES
