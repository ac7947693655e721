# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What one step costs: each kernel against the same step written by hand in one ``lax.scan``, on
three models; and its growth with the number of rows and of parameters.

    python benchmarks/step_cost.py [--rounds 15] [--largest 100000000]

Everything is measured in one process, interleaved, every position is kept, data are arguments
of the programs. A kernel runs in the loop of NumPyro's ``MCMC`` without a progress bar, which
keeps three more numbers of each sample. The step by hand has the rows, the update and the noise and
nothing else: no running sums, no guard against steps that are not finite. A ratio is the median
over the rounds of the ratio within a round, with quartiles.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from measure import interleaved, ratio, table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.util import fori_collect
from workloads import Workload, logistic, logistic_data, workloads

from numpyro_sgmcmc import SGHMC, SGLD, SGMCLMC, SGNHT, CCAdL
from numpyro_sgmcmc.data.subsampling import without_replacement

PARTS = ("by_hand", "rows", "parameters")

FRICTION = 10.0
#: Methods that are written by hand; the others are compared with SGHMC by hand.
BY_HAND = ("SGLD", "SGHMC", "SGNHT")
#: Chains in one program, and a step of each of them against one by itself.
MEMBERS = 4
#: The largest number of parameters whose noise covariance a method is to hold in full.
FULL = 100


def kernels(workload: Workload) -> dict[str, Callable]:
    h = workload.step_size
    momentum = {"step_size": h, "friction": FRICTION}
    found = {
        "SGLD": partial(SGLD, step_size=h * h),
        "SGHMC": partial(SGHMC, integrator="euler", **momentum),
        "SGNHT": partial(SGNHT, integrator="euler", **momentum),
        "SGHMC aboba": partial(SGHMC, **momentum),
        "SGNHT badodab": partial(SGNHT, **momentum),
        "SGMCLMC": partial(SGMCLMC, **momentum),
        "CCAdL euler diagonal": partial(
            CCAdL, integrator="euler", noise="diagonal", **momentum
        ),
        "CCAdL diagonal": partial(CCAdL, noise="diagonal", **momentum),
        "CCAdL full": partial(CCAdL, noise="full", **momentum),
        "CCAdL diagonal, control variate": partial(
            CCAdL, noise="diagonal", gradient="control_variate", metric="identity",
            progress_bar=False, **momentum,
        ),
    }  # fmt: skip
    if sum(x.size for x in jax.tree.leaves(started(found["SGLD"], workload)[1].z)) > FULL:
        del found["CCAdL full"]
    return found


def bound(workload: Workload) -> Callable:
    return partial(workload.model, batch_size=workload.batch_size)


def started(make: Callable, workload: Workload, chains: int = 1):
    kernel, key = make(bound(workload)), random.key(0)
    keys = key if chains == 1 else random.split(key, chains)
    state = kernel.init(keys, 0, None, model_args=workload.data, model_kwargs={})
    return kernel, state


def by_hand(method: str, workload: Workload, z: dict[str, Array], key: Array, data: tuple):
    """The methods as somebody would write them for this model, on one flat vector."""
    h, n = workload.step_size, workload.batch_size
    start, unravel = ravel_pytree(z)

    def gradient(w: Array, rows: Array) -> Array:
        return ravel_pytree(jax.grad(workload.potential)(unravel(w), rows, *data))[0]

    def step(carry, i):
        w, p, xi = carry
        rows_key, noise_key = random.split(random.fold_in(key, i))
        rows = without_replacement(rows_key, i, len(data[0]), n)
        noise = random.normal(noise_key, w.shape)
        if method == "SGLD":
            w = w - h * h * gradient(w, rows) + jnp.sqrt(2 * h * h) * noise
        elif method == "SGHMC":
            w = w + h * p
            p = p - h * gradient(w, rows) - h * FRICTION * p + jnp.sqrt(2 * h * FRICTION) * noise
        else:
            p = p - h * gradient(w, rows) - h * xi * p + jnp.sqrt(2 * h * FRICTION) * noise
            w = w + h * p
            xi = xi + h * (jnp.mean(p**2) - 1)
        return (w, p, xi), unravel(w)

    carry = (start, random.normal(key, start.shape), jnp.float32(FRICTION))
    return lax.scan(step, carry, jnp.arange(workload.steps))[1]


def collected(make: Callable, workload: Workload, chains: int = 1) -> Callable:
    """
    A program of the kernel's steps in the loop of ``MCMC`` without a progress bar, of one chain or
    of several vectorized ones.
    """
    kernel, state = started(make, workload, chains)

    def steps(state, data):
        constrain = kernel.postprocess_fn(data, {})
        constrain = constrain if chains == 1 else jax.vmap(constrain)

        def kept(states):
            state, others = states[0], kernel.default_fields[1:]
            return constrain(state.z), *(state[name] for name in others)

        def step(states):
            return (kernel.sample(states[0], data, {}),)

        return fori_collect(0, workload.steps, step, (state,), transform=kept, progbar=False)

    program = jax.jit(steps)
    return lambda: program(state, workload.data)


def against_by_hand(workload: Workload, rounds: int) -> str:
    programs, found = {}, kernels(workload)
    z = started(found["SGLD"], workload)[1].z
    for name, make in found.items():
        programs[name] = collected(make, workload)
        if name in BY_HAND:
            hand = jax.jit(partial(by_hand, name, workload))
            programs[f"{name} by hand"] = partial(hand, z, random.key(0), workload.data)
    programs["together"] = collected(found["SGMCLMC"], workload, MEMBERS)
    seconds = interleaved(programs, rounds)
    rows = []
    for name in found:
        hand = f"{name} by hand" if name in BY_HAND else "SGHMC"
        each = [f"{1e6 * np.median(seconds[key]) / workload.steps:.1f}" for key in (name, hand)]
        against = "by hand" if name in BY_HAND else "SGHMC"
        rows.append([name, *each, against, ratio(seconds[name], seconds[hand])])
    one, together = seconds["SGMCLMC"], seconds["together"] / MEMBERS
    each = [f"{1e6 * np.median(x) / workload.steps:.1f}" for x in (together, one)]
    rows.append([f"SGMCLMC, each of {MEMBERS} together", *each, "SGMCLMC", ratio(together, one)])
    header = ["kernel", "us a step", "that of", "which is", "ratio"]
    return f"Model: {workload.name}\n\n{table(header, rows)}"


def growth(title: str, column: str, programs: dict[int, tuple[Callable, int]], rounds: int) -> str:
    """
    :param programs: for each size the program and its number of steps.
    """
    seconds = interleaved({str(size): run for size, (run, _) in programs.items()}, rounds)
    each = {size: seconds[str(size)] / steps for size, (_, steps) in programs.items()}
    smallest = each[min(each)]
    rows = [
        [f"{size:,}", f"{1e6 * np.median(one):.1f}", ratio(one, smallest)]
        for size, one in each.items()
    ]
    return f"{title}\n\n{table([column, 'us a step', 'ratio to the first'], rows)}"


def of_rows(size: int) -> tuple[Callable, int]:
    """SGHMC on logistic regression with this many rows of eight bits."""
    data = logistic_data(size, 20, np.int8)
    workload = Workload("", logistic, lambda: None, data, 500, 1e-3, 2_000)
    make = partial(SGHMC, step_size=1e-6, friction=FRICTION)
    return collected(make, workload), workload.steps


def intercepts(group: Array, y: Array, batch_size: int, groups: int) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1).expand([groups]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])


def of_parameters(size: int) -> tuple[Callable, int]:
    """SGHMC on as many random intercepts."""
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.integers(0, size, 100_000)), jnp.asarray(rng.standard_normal(100_000))
    steps = max(10, min(2_000, 2_000_000 // size))
    model = partial(intercepts, groups=size)
    workload = Workload("", model, lambda: None, data, 500, 1e-3, steps)
    return collected(partial(SGHMC, step_size=1e-4, friction=FRICTION), workload), steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=10**8, help="most rows: 21 bytes each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if "by_hand" in options.only:
        for workload in workloads():
            print(against_by_hand(workload, options.rounds), flush=True)
    if "rows" in options.only:
        sizes = [size for size in (10**k for k in range(4, 9)) if size <= options.largest]
        title = "SGHMC, logistic regression on covariates of eight bits, d = 20, n = 500"
        programs = {size: of_rows(size) for size in sizes}
        print(growth(title, "N", programs, options.rounds), flush=True)
    if "parameters" in options.only:
        programs = {size: of_parameters(size) for size in (10, 10**3, 10**4, 10**5, 10**6)}
        title = "SGHMC, random intercepts, N = 100,000, n = 500"
        print(growth(title, "d", programs, options.rounds), flush=True)


if __name__ == "__main__":
    main()
