# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How often a tuning is wrong, or says so of what is right: a hundred of ``CCAdL(model)`` with nothing
set, each with a key and data of its own, on four posteriors of the battery, against NUTS in double
precision on the same data.

    python benchmarks/seeds.py [--seeds 25] [--first 0] [--only WORD ...] [--processes 2]
"""

import argparse
from collections import Counter
import time
import zlib

from jax import random
import numpy as np
from posterior_battery import LIMIT, POSTERIORS, beyond, both, reference, run, words
from verdicts import each_in_a_process, verdict_of

from numpyro_sgmcmc import CCAdL

TITLES = (
    "logistic, raw units",
    "radon, centred",
    "negative binomial",
    "robust regression",
)


def outcome_of(item):
    posterior, seed = item
    taken = []

    def compared():
        rng = np.random.default_rng((zlib.crc32(posterior.title.encode()), seed))
        data = posterior.data(rng, None)
        right, seconds = reference(posterior, data, None, None)

        def model(*args):
            return posterior.model(*args, batch=posterior.batch)

        kernel = CCAdL(model, progress_bar=False)
        start = time.perf_counter()
        kernel.tune(random.key(seed), *data)
        tuned = time.perf_counter() - start
        draws, own, rate = run(kernel, posterior, data, 1_000, seed)
        taken.extend([tuned + own, seconds, rate])
        return both(draws, right)

    verdict, said = verdict_of(compared, beyond, 1.0)
    return verdict, said, taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seeds", type=int, default=25, help="of each posterior")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--only", nargs="*", default=TITLES, help="titles of the battery")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    chosen = [p for p in POSTERIORS if p.title in options.only]
    items = [
        (p, seed) for seed in range(options.first, options.first + options.seeds) for p in chosen
    ]
    found = {p.title: Counter() for p in chosen}
    for (posterior, seed), outcome, _ in each_in_a_process(
        outcome_of, items, options.processes, LIMIT
    ):
        verdict, said, taken = (*outcome, [])[:3]
        found[posterior.title][verdict] += 1
        print(seed, *words(posterior, verdict, said, taken), sep=" | ", flush=True)
    for title, counts in found.items():
        print(f"{title}:", ", ".join(f"{verdict} {n}" for verdict, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
