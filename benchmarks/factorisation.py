# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A factorisation of one million ratings of movies: tastes of users integrated out, properties of
movies sampled, a fifth of the ratings held out.

    python benchmarks/factorisation.py --data FOLDER [--properties 5]

The split is that of the first fold of the notebook ``papers/matrix_factorisation``. The error is
that of the mean prediction of all draws. A predictive interval has the noise of a rating in it.
"""

import argparse
from functools import partial
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
from movielens import ratings
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL, group_rows, local_draws

SCALES = ("level", "sd_item", "sd_user", "noise")
LOCAL = 100  #: draws of users of each chain
LEVELS = 0.5, 0.9  #: of predictive intervals


def model(rating, item, tables, items, properties, share):
    level = numpyro.sample("level", dist.Normal(3, 2))
    sd_item = numpyro.sample("sd_item", dist.HalfNormal(1))
    sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5).expand([properties]).to_event(1))
    with numpyro.plate("items", items):
        effect = numpyro.sample("item", dist.Normal(0, sd_item))
        of_item = numpyro.sample("properties", dist.Normal(0, tau).to_event(1))
    for k, (members, observed, _) in enumerate(tables):
        users, most = members.shape
        size = min(users, max(8, int(share * users)))
        with numpyro.plate(f"users {k}", users, subsample_size=size) as g:
            of_user = numpyro.sample(f"user {k}", dist.Normal(0, sd_user))
            taste = numpyro.sample(f"taste {k}", dist.Normal(0, 1).expand([properties]).to_event(1))
            with numpyro.plate(f"ratings {k}", most):
                row = members[g].T
                i = item[row]
                mean = level + effect[i] + of_user + jnp.sum(of_item[i] * taste, -1)
                law = dist.Normal(mean, noise).mask(observed[g].T)
                numpyro.sample(f"rating {k}", law, obs=rating[row])


def predictions(
    mcmc: MCMC, tables: tuple, users: int, pairs: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """
    Draw the mean of a rating for pairs of user and item.

    :return: draws of shape (draws, pairs), and the standard deviation of a rating in each draw.
    """
    local = local_draws(mcmc, num_draws=LOCAL)
    kept = mcmc.get_samples(group_by_chain=True)
    kept = {k: np.asarray(x)[:, local.draw.values] for k, x in kept.items()}
    kept = {k: x.reshape(-1, *x.shape[2:]) for k, x in kept.items()}
    count = len(kept["level"])
    of_user = np.zeros((count, users), np.float32)
    tastes = np.zeros((count, users, kept["tau"].shape[-1]), np.float32)
    for k, (_, _, groups) in enumerate(tables):
        own = np.asarray(groups)
        of_user[:, own] = local[f"user {k}"].values.reshape(count, len(own))
        tastes[:, own] = local[f"taste {k}"].values.reshape(count, len(own), -1)
    user, item = pairs
    means = np.stack([
        kept["level"][s] + kept["item"][s][item] + of_user[s][user]
        + np.sum(kept["properties"][s][item] * tastes[s][user], -1)
        for s in range(count)
    ])  # fmt: skip
    return means, kept["noise"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder of the real data")
    parser.add_argument("--properties", type=int, default=5)
    parser.add_argument("--draws", type=int, default=300, help="of each of two chains")
    parser.add_argument("--share", type=float, default=0.03, help="of the users in a minibatch")
    parser.add_argument("--buckets", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    item, user, rating = ratings(options.data)
    held_out, train = np.split(
        np.random.default_rng(2014).permutation(len(rating)), [len(rating) // 5]
    )
    tables = group_rows(user[train], buckets=options.buckets)
    bound = partial(
        model, items=1 + int(item.max()), properties=options.properties, share=options.share
    )
    kernel = CCAdL(bound, progress_bar=False)
    start = time.perf_counter()
    data = jax.tree.map(jnp.asarray, (rating[train], item[train], tables))
    tuning = kernel.tune(random.key(0), *data)
    tuned = time.perf_counter()
    print(tuning, flush=True)
    mcmc = MCMC(
        kernel, num_warmup=100, num_samples=options.draws,
        num_chains=2, chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.key(1), *data)
    draws = {k: np.asarray(x) for k, x in mcmc.get_samples(group_by_chain=True).items()}
    done = time.perf_counter()
    pairs = user[held_out], item[held_out]
    means, noise = predictions(mcmc, tables, 1 + int(user.max()), pairs)
    truth = rating[held_out]
    squares = (means.mean(0) - truth) ** 2
    error = np.sqrt(squares.mean())
    rng = np.random.default_rng(0)
    new = means + noise[:, None] * rng.normal(size=means.shape).astype(np.float32)
    cells = []
    for level in LEVELS:
        low, high = np.quantile(new, [(1 - level) / 2, (1 + level) / 2], axis=0)
        cells.append(f"{100 * np.mean((low < truth) & (truth < high)):.1f}")
    some = means.reshape(2, -1, means.shape[1])[:, :, :: max(1, means.shape[1] // 500)]
    print(table(
        [
            "properties", "tuning", "draws", "ESS of level and scales", "ESS of 500 predictions",
            "largest R-hat of them", "RMSE of held-out ratings",
            *(f"ratings in {100 * level:.0f} % intervals" for level in LEVELS),
        ],
        [[
            options.properties,
            f"{sum(tuning.passes.values()):,.0f} passes, {tuned - start:.0f} s",
            f"2 x {options.draws}, {done - tuned:.0f} s",
            ", ".join(f"{effective_sample_size(draws[k]):,.0f}" for k in SCALES),
            f"{np.median(effective_sample_size(some)):,.0f} (median)",
            f"{split_gelman_rubin(some).max():.2f}",
            f"{error:.4f} ± {squares.std() / len(squares) ** 0.5 / (2 * error):.4f}",
            *cells,
        ]],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
