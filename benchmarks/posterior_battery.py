# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Posteriors that others wrote, by ``CCAdL(model)`` with nothing set.

    python benchmarks/posterior_battery.py --data FOLDER [--cache FOLDER] [--only WORD ...]
        [--processes 2]

Against published moments where there are some, and else against NUTS in double precision on all
rows, whose moments are kept in the cache. Seconds are those to 1,000 effective samples of the worst
parameter, tuning and compilation included, of four chains.
"""

import argparse
from collections import Counter
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import pickle  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import zlib  # noqa: E402

from battery import POSTERIORS  # noqa: E402
import jax  # noqa: E402
from jax import random  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from measure import table  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
from numpyro.diagnostics import effective_sample_size  # noqa: E402
from numpyro.infer import MCMC, NUTS  # noqa: E402
from verdicts import Right, each_in_a_process, moments_of, verdict_of  # noqa: E402

from numpyro_sgmcmc import CCAdL  # noqa: E402

#: Letters of what is said of a posterior.
WORDS = 150

#: Parts of a run, of which the first is another one.
PARTS = 4

#: Seconds of a processor for a posterior, and effective samples.
LIMIT, ASKED = 1_800.0, 1_000

#: A mean may be off by so many standard deviations and a standard deviation by such a part of
#: itself, and by so many standard errors more.
MEAN, SD, ERRORS = 0.1, 0.05, 3.0


def published(name, folder):
    """Moments of 10,000 draws."""
    with np.load(folder / "posteriordb.npz", allow_pickle=True) as file:
        found = [
            {
                key.rpartition("/")[2]: np.atleast_1d(np.asarray(file[key], float))
                for key in file.files
                if key.startswith(f"{name}/{kind}/")
            }
            for kind in ("mean", "sd")
        ]
    mean, sd = found
    errors = {k: x / 100 for k, x in sd.items()}, {k: np.full_like(x, 0.007) for k, x in sd.items()}
    return Right(mean, sd, *errors)


def run(kernel, posterior, data, samples, seed=1, **options):
    """
    Draws by what is compared, seconds to as many effective samples of the worst, and effective
    samples a second after the first.
    """
    given = {"num_warmup": 100, "num_chains": 4, "chain_method": "vectorized"} | options
    mcmc = MCMC(kernel, num_samples=samples // PARTS, progress_bar=False, **given)
    key, parts, seconds = random.key(seed), [], []
    # the first part tunes and compiles
    for _ in range(1 + PARTS):
        start = time.perf_counter()
        mcmc.run(key, *data)
        parts.append(jax.block_until_ready(mcmc.get_samples(group_by_chain=True)))
        seconds.append(time.perf_counter() - start)
        mcmc.post_warmup_state, key = mcmc.last_state, mcmc.last_state.rng_key
    draws = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts[1:])
    compared = posterior.compared
    draws = jax.vmap(jax.vmap(compared))(draws) if compared else draws
    draws = {name: np.asarray(x) for name, x in draws.items()}
    size = min(float(np.min(effective_sample_size(np.asarray(x, float)))) for x in draws.values())
    rate = size / sum(seconds[1:])
    return draws, seconds[0] + ASKED / rate, rate


def reference(posterior, data, folder, cache):
    """Moments, and seconds of NUTS."""
    if posterior.reference is not None:
        return published(posterior.reference, folder), None
    kept = cache and cache / f"battery-{zlib.crc32(posterior.title.encode()):08x}.pickle"
    if kept and kept.exists():
        return pickle.loads(kept.read_bytes())
    numpyro.enable_x64()
    wide = [jnp.asarray(x, float if np.asarray(x).dtype.kind == "f" else int) for x in data]
    kernel = NUTS(posterior.original or posterior.model)
    draws, seconds, _ = run(
        kernel, posterior, wide, 1_000, num_warmup=500, num_chains=2, chain_method="sequential"
    )
    numpyro.enable_x64(False)
    found = moments_of(draws), seconds
    if kept:
        cache.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def outcome_of(item):
    posterior, folder, cache = item
    taken = []

    def compared():
        rng = np.random.default_rng(zlib.crc32(posterior.title.encode()))
        data = posterior.data(rng, folder)
        right, seconds = reference(posterior, data, folder, cache)

        def model(*args):
            return posterior.model(*args, batch=min(posterior.batch, posterior.rows))

        draws, own, rate = run(CCAdL(model, progress_bar=False), posterior, data, 1_000)
        taken.extend([own, seconds, rate])
        return both(draws, right)

    verdict, said = verdict_of(compared, beyond, 1.0)
    return verdict, said, taken


def both(draws, right):
    """What draws and moments have in common: NUTS may have had other coordinates."""
    names = [name for name in right.mean if name in draws]
    return {k: draws[k] for k in names}, Right(*({k: x[k] for k in names} for x in right))


def beyond(draws, right):
    """How far beyond what is allowed the worst moment is, in standard errors, in words."""
    found, worst = moments_of({k: draws[k] for k in right.mean}), (-np.inf, "")
    for name in right.mean:
        sd = right.sd[name]
        off = np.abs(found.mean[name] - right.mean[name]) / sd
        error = np.hypot(found.mean_error[name], right.mean_error[name]) / sd
        ratio = found.sd[name] / sd
        of_sd = np.hypot(found.sd_error[name], right.sd_error[name])
        for allowed, x, e, said in (
            (MEAN, off, error, f"mean of {name} off by {off.max():.2g} sd"),
            (
                SD,
                np.abs(ratio - 1),
                of_sd,
                f"sd of {name} is {ratio[np.abs(ratio - 1).argmax()]:.2f}",
            ),
        ):
            size = np.nan_to_num(
                (x / allowed - np.minimum(ERRORS * e / allowed, 10)).max(), nan=np.inf
            )
            worst = max(worst, (size, said), key=lambda one: one[0])
    return worst


def words(posterior, verdict, said, taken):
    """The cells of a line of the table."""
    own, nuts, rate = taken or (np.nan, None, np.nan)
    cells = [posterior.title, posterior.source, f"{posterior.rows:,}", verdict]
    cells += [f"{own:.0f}", "" if nuts is None else f"{nuts:.0f}", f"{rate:,.0f}"]
    said = " ".join(said.split()).replace("|", "\\|")
    return [*cells, said if len(said) <= WORDS else f"{said[:WORDS]}..."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words in the titles")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    chosen = [
        (p, options.data, options.cache)
        for p in POSTERIORS
        if not options.only or any(word in p.title for word in options.only)
    ]
    lines = {}
    for (posterior, *_), found, _ in each_in_a_process(
        outcome_of, chosen, options.processes, LIMIT
    ):
        verdict, said, taken = (*found, [])[:3]
        lines[posterior.title] = words(posterior, verdict, said, taken)
        print("| " + " | ".join(lines[posterior.title]) + " |", file=sys.stderr, flush=True)
    header = ["posterior", "of", "rows", "verdict", f"seconds to {ASKED:,}", "NUTS", "then ESS/s"]
    print(table([*header, "where it is worst"], [lines[p.title] for p, *_ in chosen]))
    counts = Counter(line[3] for line in lines.values())
    print("\n" + ", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())) + ".")


if __name__ == "__main__":
    main()
