# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Simulated ratings of items by users, up to 25 million: users latent, in tables by their number of
ratings, items and the scales sampled.

    python benchmarks/ratings.py [--ratings 25_000_000 --users 162_000 --items 59_000]

Ratings and effects are normal. Users have 20 to some thousand ratings, and the popularity of items
falls as in MovieLens. The truth is known: the last columns have the share of effects within their
95 % intervals.
"""

import argparse
from functools import partial
import resource
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL, group_rows, local_draws

TRUTH = {"level": 3.5, "sd_item": 0.5, "sd_user": 0.4, "noise": 0.85}
SCALES = ("sd_item", "sd_user", "noise")
SEEN = 2_000  #: effects of each factor that are compared with the truth
LOCAL = 200  #: draws of users of each chain


def simulated(
    ratings: int, users: int, items: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """
    Ratings in the order of users, with their items and users, and the true effects.

    :return: ratings, items, users and effects by site.
    """
    rng = np.random.default_rng(seed)
    # of 20 ratings and more, with a long tail
    more = np.exp(1.25 * rng.normal(size=users))
    more = np.minimum(more * (ratings / users - 20) / more.mean(), items / 4)
    sizes = (20 + more * (ratings / users - 20) / more.mean()).astype(int)
    rank = np.arange(items)
    popular = np.exp(-rank / (items / 7.4)) / (rank + items / 590)
    bounds = np.cumsum(popular) / popular.sum()
    # no item without a rating, and nobody rates an item twice
    pair = np.unique(rng.choice(users, items) * items + rank)
    for _ in range(4):
        left = np.repeat(np.arange(users), missing(sizes, pair // items))
        item = np.searchsorted(bounds, rng.random(len(left))).clip(max=items - 1)
        pair = np.union1d(pair, left * items + item)
    user, item = (pair // items).astype(np.int32), (pair % items).astype(np.int32)
    effects = {
        "item": TRUTH["sd_item"] * rng.normal(size=items),
        "user": TRUTH["sd_user"] * rng.normal(size=users),
    }
    noise = TRUTH["noise"] * rng.normal(size=len(user))
    rating = TRUTH["level"] + effects["item"][item] + effects["user"][user] + noise
    return rating.astype(np.float32), item, user, effects


def missing(sizes: np.ndarray, user: np.ndarray) -> np.ndarray:
    """How many ratings each user still lacks."""
    return np.maximum(sizes - np.bincount(user, minlength=len(sizes)), 0)


def model(rating, item, tables, items, share):
    level = numpyro.sample("level", dist.Normal(3, 2))
    sd_item = numpyro.sample("sd_item", dist.HalfNormal(1))
    sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("items", items):
        of_item = numpyro.sample("item", dist.Normal(0, sd_item))
    for k, (members, observed, _) in enumerate(tables):
        users, most = members.shape
        size = min(users, max(4, int(share * users)))
        with numpyro.plate(f"users {k}", users, subsample_size=size, dim=-2) as g:
            of_user = numpyro.sample(f"user {k}", dist.Normal(0, sd_user))
            with numpyro.plate(f"ratings {k}", most, dim=-1):
                row = members[g]
                law = dist.Normal(level + of_item[item[row]] + of_user, noise)
                numpyro.sample(f"rating {k}", law.mask(observed[g]), obs=rating[row])


def inside(draws: np.ndarray, truth: np.ndarray) -> float:
    """Percentage of effects within their 95 % intervals; draws have shape (draws, effects)."""
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return 100 * float(np.mean((low < truth) & (truth < high)))


def of_users(
    mcmc: MCMC, tables: tuple, users: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the effects of some users, shape (draws, users), and the true effects."""
    places = {k: np.flatnonzero(np.isin(t.groups, users)) for k, t in enumerate(tables)}
    places = {k: numbers for k, numbers in places.items() if len(numbers)}
    chosen = {f"users {k}": numbers for k, numbers in places.items()}
    found = local_draws(mcmc, chosen, num_draws=LOCAL)
    draws = [found[f"user {k}"].values.reshape(-1, len(p)) for k, p in places.items()]
    order = [np.asarray(tables[k].groups)[p] for k, p in places.items()]
    return np.concatenate(draws, axis=1), truth[np.concatenate(order)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--ratings", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=6_500)
    parser.add_argument("--items", type=int, default=2_400)
    parser.add_argument("--draws", type=int, default=1_000, help="of each chain")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.03, help="of the users in a minibatch")
    parser.add_argument("--buckets", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rating, item, user, effects = simulated(options.ratings, options.users, options.items)
    start = time.perf_counter()
    tables = group_rows(user, buckets=options.buckets)
    bound = partial(model, items=options.items, share=options.share)
    kernel = CCAdL(bound, progress_bar=False)
    data = jax.tree.map(jnp.asarray, (rating, item, tables))
    tuning = kernel.tune(random.key(0), *data)
    tuned = time.perf_counter()
    print(tuning, flush=True)
    mcmc = MCMC(
        kernel,
        num_warmup=50,
        num_samples=options.draws,
        num_chains=options.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *data)
    draws = {k: np.asarray(x) for k, x in mcmc.get_samples(group_by_chain=True).items()}
    done = time.perf_counter()
    rng = np.random.default_rng(1)
    items = rng.choice(options.items, min(SEEN, options.items), replace=False)
    users = rng.choice(options.users, min(SEEN, options.users), replace=False)
    known = [
        inside(draws["item"][:, :, items].reshape(-1, len(items)), effects["item"][items]),
        inside(*of_users(mcmc, tables, users, effects["user"])),
    ]
    sizes = [float(effective_sample_size(draws[name])) for name in ("level", *SCALES)]
    r_hats = [float(split_gelman_rubin(draws[name])) for name in ("level", *SCALES)]
    away = [(TRUTH[k] - draws[k].mean()) / draws[k].std() for k in ("level", *SCALES)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(table(
        [
            "ratings", "tuning", "draws", "ESS of level and scales", "largest R-hat of them",
            "truth, posterior sds from the mean", "items in 95 % intervals, %", "users, %",
            "memory, GB",
        ],
        [[
            f"{len(rating):,}",
            f"{sum(tuning.passes.values()):,.0f} passes, {tuned - start:.0f} s",
            f"{options.chains} x {options.draws}, {done - tuned:.0f} s",
            ", ".join(f"{x:,.0f}" for x in sizes), f"{max(r_hats):.2f}",
            ", ".join(f"{x:+.1f}" for x in away), *(f"{x:.1f}" for x in known), f"{memory:.1f}",
        ]],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
