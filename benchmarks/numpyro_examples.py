# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
NumPyro's own examples by ``CCAdL(model)`` with nothing set, against NUTS on all rows.

    python benchmarks/numpyro_examples.py [--only WORD ...] [--processes 2] [--write]

``--write`` puts the table into docs/numpyro_examples.md.
"""

import argparse
from collections import Counter
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
# most of the time would go into compiling the same programs
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from functools import partial  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import zlib  # noqa: E402

import jax  # noqa: E402
from jax import random  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from measure import machine  # noqa: E402
import numpy as np  # noqa: E402
from numpyro.infer import MCMC, NUTS, init_to_median  # noqa: E402
from numpyro_models import EXAMPLES  # noqa: E402
from report import replaced  # noqa: E402
from verdicts import each_in_a_process, moments_of, verdict_of  # noqa: E402

from numpyro_sgmcmc import CCAdL  # noqa: E402

#: Seconds of a processor for an example, NUTS among them.
LIMIT = 600.0

PAGE = ROOT / "docs" / "numpyro_examples.md"


def draws_of(example, kernel, data, samples, **options):
    mcmc = MCMC(
        kernel, num_warmup=500, num_samples=samples, progress_bar=False,
        **({"num_chains": 4, "chain_method": "vectorized"} | options),
    )  # fmt: skip
    mcmc.run(random.key(1), *data)
    draws = mcmc.get_samples(group_by_chain=True)
    return jax.vmap(jax.vmap(example.compared))(draws) if example.compared else draws


def compared(example):
    """Draws of CCAdL, and the moments of those of NUTS."""
    data = example.data(np.random.default_rng(zlib.crc32(example.title.encode())))
    model = partial(example.model, batch=example.batch)
    start = time.perf_counter()
    draws = draws_of(example, CCAdL(model, progress_bar=False), data, 1_000)
    seconds = time.perf_counter() - start
    # from far out the rates of deaths of `mortality` round to 0 and 1, where NUTS stays
    reference = NUTS(
        example.original or example.model, max_tree_depth=8, init_strategy=init_to_median
    )
    right = draws_of(example, reference, data, 1_000, num_chains=2, chain_method="sequential")
    return draws, moments_of({name: right[name] for name in right if name in draws}), seconds


def outcome_of(example):
    taken = []

    def run():
        draws, right, seconds = compared(example)
        taken.append(seconds)
        return {k: jnp.asarray(v) for k, v in draws.items()}, right

    return *verdict_of(run), taken


def words(example, verdict, said, seconds):
    """The cells of a line of the table."""
    verdict = {"raised": "refused"}.get(verdict, verdict)
    said = " ".join(said.split()).replace("|", "\\|")
    return example.title, example.change, verdict, f"{seconds:.0f}", said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of examples")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    examples = [e for e in EXAMPLES if not options.only or any(w in e.title for w in options.only)]
    lines = {}
    for example, found, seconds in each_in_a_process(
        outcome_of, examples, options.processes, LIMIT
    ):
        verdict, said, taken = (*found, [])[:3]
        line = words(example, verdict, said, taken[0] if taken else seconds)
        lines[example.model] = line
        print("| " + " | ".join(line) + " |", file=sys.stderr, flush=True)
    ordered = [lines[e.model] for e in examples]
    counts = Counter(line[2] for line in ordered)
    header = "| example | change | verdict | seconds | where it is worst, or what is said |"
    found = [header, "| --- | --- | --- | ---: | --- |"]
    found += ["| " + " | ".join(line) + " |" for line in ordered]
    found += [
        "",
        ", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())) + ".",
    ]
    print("\n".join(found))
    if options.write:
        source = f"*`python benchmarks/numpyro_examples.py`: {machine()}*"
        text = "\n".join([*found, "", source])
        PAGE.write_text(replaced(PAGE.read_text(), "numpyro_examples", text))


if __name__ == "__main__":
    main()
