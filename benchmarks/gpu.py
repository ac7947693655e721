# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Minibatches and all rows on the device that JAX finds: ``CCAdL`` with 4 and with 1,000 chains beside
NumPyro's NUTS and HMC, with 4 and with more chains, and BlackJAX's ChEES and MCLMC.

    python benchmarks/gpu.py [--quick] [--out FILE] [--profile FOLDER]

Three numbers of each: seconds to the first draw of a new run, with data on the device, compilation,
tuning and warm-up included; microseconds of a step of all chains, compiled before; effective
samples a second of the worst parameter, once it draws. A step has one gradient: of a minibatch for
``CCAdL``, of all rows for the others. Of chains side by side the one with the most steps counts.

It ends within eight minutes. A part has four times its share of the time that is left. One that
takes longer, fails or lacks its package is named below the table, and so is a case whose data do
not fit. The worst parameter of the network is one of its values at ten points, since its weights
may be permuted. In the hierarchy CCAdL integrates the effects of the groups out, the others sample
them, and the worst is their mean or their scale. BlackJAX's own tuning makes the data a constant of
its program, so it has up to a gigabyte of them. ``--profile`` keeps a trace of 200 steps of CCAdL.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
import json
from multiprocessing import get_context
import os
from pathlib import Path
import re
import sys
import time
from typing import Any, NamedTuple
import warnings

import alternatives
from groups import intercepts
import jax
from jax import Array, lax, random
import jax.numpy as jnp
from measure import machine, more_draws, seconds_of_draws, table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, NUTS
from speed import logistic

from numpyro_sgmcmc import CCAdL, full_data

#: Seconds for all, and the least of a part; copies of the data that must fit; bytes for BlackJAX.
BUDGET, LEAST, COPIES, CONSTANT = 460.0, 30.0, 2.5, 1e9
HEADER = ("", "chains", "seconds to first draw", "us a step", "steps a sample", "ESS a second")


class Case(NamedTuple):
    """Model, rows and how some of them are made on the device; sites that count; its methods."""

    name: str
    model: Callable
    rows: int
    block: Callable[[int, Array], tuple[Array, ...]]
    sites: tuple[str, ...]
    methods: list[tuple[str, int]]

    @property
    def bytes(self) -> float:
        shapes = jax.eval_shape(partial(self.block, 100), random.key(0))
        return self.rows / 100 * sum(4.0 * x.size for x in shapes)

    def data(self) -> tuple[Array, ...]:
        """The rows, made a hundredth at a time, which needs no memory beside them."""

        def made() -> tuple[Array, ...]:
            block = partial(self.block, self.rows // 100)
            found = lax.map(block, random.split(random.key(0), 100))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

        return jax.block_until_ready(jax.jit(made)())


def logistic_rows(d: int, count: int, key: Array) -> tuple[Array, Array]:
    w = random.normal(random.key(1), (d,)) / d**0.5
    x = random.normal(key, (count, d))
    return x, (x @ w + random.logistic(random.fold_in(key, 1), (count,)) > 0).astype(jnp.float32)


def network_rows(d: int, count: int, key: Array) -> tuple[Array, Array]:
    x = random.normal(key, (count, d))
    return x, jnp.tanh(x[:, 0] - x[:, 1]) + random.normal(random.fold_in(key, 1), (count,))


def group_rows(count: int, key: Array) -> tuple[Array]:
    effects = 0.5 + 1.5 * random.normal(key, (count, 1))
    uniform = random.uniform(random.fold_in(key, 1), (count, 4))
    return ((uniform < jax.nn.sigmoid(effects)).astype(jnp.float32),)


def network(hidden: int, batch_size: int, x: Array, y: Array) -> None:
    prior, d = dist.Normal(0, 1), x.shape[1]
    w1 = numpyro.sample("w1", prior.expand([d, hidden]).to_event(2))
    b1 = numpyro.sample("b1", prior.expand([hidden]).to_event(1))
    w2 = numpyro.sample("w2", prior.expand([hidden]).to_event(1))
    points = random.normal(random.key(2), (10, d))
    numpyro.deterministic("at_points", jnp.tanh(points @ w1 + b1) @ w2)
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size):
        mean = jnp.tanh(numpyro.subsample(x, event_dim=1) @ w1 + b1) @ w2
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))


def cases(quick: bool) -> list[Case]:
    if quick:
        sizes, groups, (rows, d, hidden, batch_size) = [(2_000, 3)], 2_000, (2_000, 2, 1, 200)
    else:
        sizes = [(10**5, 20), (10**5, 500), (10**7, 20), (10**7, 500)]
        groups, (rows, d, hidden, batch_size) = 10**6, (10**5, 10, 16, 500)

    def methods(on_all: int) -> list[tuple[str, int]]:
        if quick:
            few = {16: [], 64: [("NUTS", 4)], 1_000: [("CCAdL", 20), ("HMC", 10)]}
            return [("CCAdL", 4), *few[on_all]]
        return [("CCAdL", 4), ("CCAdL", 1_000), ("NUTS", 4), ("NUTS", on_all), ("HMC", on_all)]

    name = f"hierarchy, {groups:,} groups of 4"
    found = [Case(name, intercepts, groups, group_rows, ("mu", "tau"), methods(16))]
    name, model = f"network {d}-{hidden}-1, N = {rows:,}", partial(network, hidden, batch_size)
    found.append(Case(name, model, rows, partial(network_rows, d), ("at_points",), methods(64)))
    for n, k in sizes:
        name, small = f"logistic, N = {n:,}, d = {k}", 4.0 * n * k <= CONSTANT
        listed = methods(1_000 if n <= 10**5 else 64) + [("ChEES", 16), ("MCLMC", 1)] * small
        found.append(Case(name, logistic, n, partial(logistic_rows, k), ("w",), listed))
    return found


def measured(case: Case, data: tuple, method: str, chains: int, profile: str | None) -> dict:
    """The three numbers of a method, and how many steps a sample has."""
    if method in ("ChEES", "MCLMC"):
        run = {"ChEES": alternatives.chees, "MCLMC": alternatives.mclmc}[method](*data, 5.0)
        total, drawing = run.before + run.drawing, run.drawing
        draws, size = run.draws.shape[1], run.size()
        steps = 2.0 if method == "MCLMC" else None  # McLachlan's; trajectories of ChEES differ
    else:
        kernel: Any = CCAdL(case.model, progress_bar=False)
        if method == "NUTS":
            kernel = NUTS(full_data(case.model))
        elif method == "HMC":  # a quarter of the period of a normal law
            kernel = HMC(full_data(case.model), trajectory_length=np.pi / 2)
        draws, ours = 200 if chains == 4 else 50, method == "CCAdL"
        mcmc = MCMC(
            kernel, num_warmup=draws if ours else 200, num_samples=draws, num_chains=chains,
            chain_method="vectorized", progress_bar=False, jit_model_args=True,
        )  # fmt: skip
        start = time.perf_counter()
        mcmc.run(random.key(0), *data, extra_fields=() if ours else ("num_steps",))
        samples = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        total, drawing = time.perf_counter() - start, seconds_of_draws(mcmc, data, draws, 1)
        taken = None if ours else np.asarray(mcmc.get_extra_fields(True)["num_steps"])
        steps = float(kernel.steps_per_sample if ours else taken.max(0).mean())
        size = min(effective_sample_size(np.asarray(samples[k], float)).min() for k in case.sites)
        if ours and chains == 4 and profile:
            run = more_draws(mcmc, data, int(np.ceil(200 / steps)))
            jax.block_until_ready(run())
            with jax.profiler.trace(str(Path(profile) / re.sub(r"\W+", "_", case.name))):
                jax.block_until_ready(run())
    return {
        "seconds_to_first_draw": total - drawing,
        "microseconds_a_sample": 1e6 * drawing / draws,
        "steps_a_sample": steps,
        "ess_a_second": float(size / drawing),
    }


def in_child(case: Case, left: list, quick: bool, profile: str | None, to: Any) -> None:
    """Sends of each method its numbers, or a reason why there are none."""
    warnings.filterwarnings("ignore")
    stats = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    data = case.data() if COPIES * case.bytes <= memory else None
    jax.config.update("jax_enable_compilation_cache", quick)
    for method in left:
        try:
            if data is None:
                raise MemoryError(f"{case.bytes / 1e9:.0f} GB, of {memory / 1e9:.0f} in all")
            to.send(measured(case, data, *method, profile))
        except Exception as error:
            to.send(f"{type(error).__name__}: {error}".splitlines()[0][:100])
        jax.clear_caches()


def results(quick: bool, profile: str | None) -> Iterator[tuple[Case, str, int, Any]]:
    """Numbers or a reason of each method in each case; a process that takes too long is ended."""
    chosen, context = cases(quick), get_context("spawn")
    end = time.perf_counter() + (4 if quick else 1) * BUDGET
    waiting = sum(len(case.methods) for case in chosen)
    for case in chosen:
        left, goes_on = case.methods, False
        while left:
            if not goes_on:
                here, there = context.Pipe(duplex=False)
                child = partial(in_child, case, left, quick, profile, there)
                process = context.Process(target=child, daemon=True)
                process.start()
                there.close()
            rest = max(end - time.perf_counter(), 0.0)
            limit = min(rest, max(4 * rest / waiting, LEAST))
            found, goes_on = f"not done after {limit:.0f} s", here.poll(limit)
            try:
                found = here.recv() if goes_on else found
            except EOFError:
                found, goes_on = "its process died", False
            yield case, *left[0], found
            left, waiting = left[1:], waiting - 1
            if not (left and goes_on):
                process.join(10 if goes_on else 0)
                process.kill()
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    parser.add_argument("--out", help="a JSON file for the numbers")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    kept, rows, missing = [], [], []
    for case, method, chains, found in results(options.quick, options.profile):
        name = f"{case.name}: {method}"
        kept.append({"case": case.name, "method": method, "chains": chains})
        if isinstance(found, str):
            kept[-1]["left_out"] = found
            missing.append(f"{name}, {chains:,} chains ({found})")
        else:
            kept[-1] |= found
            first, sample, steps, rate = found.values()
            step = (f"{sample / steps:,.0f}", f"{steps:,.1f}") if steps else ("", "")
            rows.append((name, f"{chains:,}", f"{first:.1f}", *step, f"{rate:,.0f}"))
        print(kept[-1], file=sys.stderr, flush=True)
    print(table(HEADER, rows))
    if missing:
        print("Left out: " + "; ".join(missing) + ".\n")
    command = "python benchmarks/gpu.py" + " --quick" * options.quick
    about = {"command": command, "machine": machine()}
    print("*`{command}`: {machine}*".format(**about))
    if options.out:
        Path(options.out).write_text(json.dumps(about | {"results": kept}, indent=1))


if __name__ == "__main__":
    main()
