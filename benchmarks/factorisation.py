# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A factorisation of one million ratings with five latent numbers for each user and each movie, and
the calibration of its predictions for held-out ratings.

    python benchmarks/factorisation.py --data FOLDER

Users are integrated out, movies and the scales are sampled. The properties of five movies are
triangular, which fixes rotations and signs. A tenth of the ratings is held out.
The predictive law of a rating is the mixture of normal laws over draws, as wide as the noise of a
rating.
"""

import argparse
import resource
import time

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.linalg import qr
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds
from scipy.stats import norm

from numpyro_sgmcmc import CCAdL, group_rows, local_draws

KEPT = 100  #: draws of each of two chains that make predictions
LEVELS = 0.5, 0.8, 0.95  #: of the predictive intervals


def anchors_of(rating, item, user, K):
    """Movies with unlike properties, by a QR decomposition with pivots of the singular vectors."""
    away = rating - np.bincount(item, rating)[item] / np.bincount(item)[item]
    _, _, right = svds(csr_array((away, (user, item)), dtype=float), k=K)
    return qr(right, mode="r", pivoting=True)[1][:K]


def model(rating, item, tables, anchors, items, share):
    K = len(anchors)
    level = numpyro.sample("level", dist.Normal(3, 2))
    sd_item = numpyro.sample("sd_item", dist.HalfNormal(1))
    sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    first = numpyro.sample("first", dist.HalfNormal(1).expand([K]).to_event(1))
    with numpyro.plate("items", items):
        effect = numpyro.sample("item", dist.Normal(0, sd_item))
        properties = numpyro.sample("properties", dist.Normal(0, tau).expand([K]).to_event(1))
    # a triangle of a few movies fixes rotations and signs of all
    properties = fixed(properties, anchors, first)
    for k, (members, observed, _) in enumerate(tables):
        users, most = members.shape
        with numpyro.plate(f"users {k}", users, subsample_size=max(1, int(share * users))) as g:
            of_user = numpyro.sample(f"user {k}", dist.Normal(0, sd_user))
            taste = numpyro.sample(f"taste {k}", dist.Normal(0, 1).expand([K]).to_event(1))
            with numpyro.plate(f"ratings {k}", most):
                row = members[g].T
                i = item[row]
                mean = level + effect[i] + of_user + jnp.sum(properties[i] * taste, -1)
                law = dist.Normal(mean, noise).mask(observed[g].T)
                numpyro.sample(f"rating {k}", law, obs=rating[row])


def fixed(properties, anchors, first):
    """Properties whose rows of the anchors are lower triangular, with positive diagonals."""
    triangle = jnp.tril(properties[anchors], -1) + jnp.diag(first)
    return properties.at[anchors].set(triangle)


def predicted(mcmc, tables, anchors, item, user):
    """Means of ratings for each kept draw, shape (draws, ratings), and the standard deviations."""
    found = local_draws(mcmc, num_draws=KEPT)
    draws, chosen = mcmc.get_samples(group_by_chain=True), found.coords["draw"].values
    flat = {k: np.asarray(x)[:, chosen] for k, x in draws.items()}
    flat = {k: x.reshape(-1, *x.shape[2:]) for k, x in flat.items()}
    users = 1 + user.max()
    of_user = np.empty((len(flat["level"]), users), np.float32)
    taste = np.empty((*of_user.shape, len(anchors)), np.float32)
    for k, (_, _, groups) in enumerate(tables):
        one, other = (found[f"{name} {k}"].values for name in ("user", "taste"))
        of_user[:, groups] = one.reshape(len(of_user), -1)
        taste[:, groups] = other.reshape(len(of_user), -1, taste.shape[-1])

    def mean(values):
        level, effect, properties, first, of_user, taste = values
        properties = fixed(properties, anchors, first)
        return level + effect[item] + of_user[user] + jnp.sum(properties[item] * taste[user], -1)

    own = (flat[k] for k in ("level", "item", "properties", "first"))
    return np.asarray(jax.lax.map(mean, (*own, of_user, taste))), flat["noise"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder of the real data")
    parser.add_argument("--draws", type=int, default=200, help="of each of two chains")
    parser.add_argument("--numbers", type=int, default=5, help="latent numbers")
    parser.add_argument("--share", type=float, default=0.03, help="of the users in a minibatch")
    options = parser.parse_args()
    with np.load(f"{options.data}/movielens_1m.npz", allow_pickle=False) as file:
        item, user = (np.unique(file[key], return_inverse=True)[1] for key in ("item", "user"))
        rating = file["rating"].astype(np.float32)
    is_held = np.random.default_rng(0).random(len(rating)) < 0.1
    tables = group_rows(user[~is_held], buckets=3)
    seen = rating[~is_held], item[~is_held]
    anchors = anchors_of(*seen, user[~is_held], options.numbers)
    data = *map(jnp.asarray, seen), tables, anchors
    shape = {"items": 1 + int(item.max()), "share": options.share}
    start = time.perf_counter()
    kernel = CCAdL(model, progress_bar=False)
    tuning = kernel.tune(random.key(0), *data, **shape)
    print(tuning, flush=True)
    passes = sum(tuning.passes.values())
    tuned = time.perf_counter()
    setting = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=options.draws // 2, num_samples=options.draws, **setting)
    mcmc.run(random.key(1), *data, **shape)
    draws = {k: np.asarray(x) for k, x in mcmc.get_samples(group_by_chain=True).items()}
    done = time.perf_counter()
    means, noise = predicted(mcmc, tables, anchors, item[is_held], user[is_held])
    seen = rating[is_held]
    errors = (means.mean(0) - seen) ** 2
    rmse = np.sqrt(errors.mean())
    standard_error = errors.std() / len(errors) ** 0.5 / (2 * rmse)
    width = np.sqrt(means.var(0) + np.mean(noise**2))

    inside = [
        100 * np.mean(np.abs(means.mean(0) - seen) < norm.ppf(0.5 + q / 2) * width) for q in LEVELS
    ]
    halves = means.reshape(2, -1, means.shape[-1])
    alike = np.std(halves[0].mean(0) - halves[1].mean(0)) / np.mean(means.std(0))
    scales = ("level", "sd_item", "sd_user", "noise", "tau")
    sizes = [float(effective_sample_size(draws[k])) for k in scales]
    r_hats = [float(split_gelman_rubin(draws[k])) for k in scales]
    rows = [[
        f"{rmse:.4f} ± {standard_error:.4f}", *(f"{x:.1f}" for x in inside), f"{alike:.2f}",
        f"{min(sizes):,.0f}", f"{max(r_hats):.2f}",
        f"{passes:,.0f} passes, {tuned - start:.0f} s", f"{done - tuned:.0f} s",
    ]]  # fmt: skip
    heads = [
        "RMSE of held-out ratings", *(f"in {100 * q:.0f} % intervals, %" for q in LEVELS),
        "difference of two chains' predictions, in sds", "least ESS of the level and four scales",
        "largest R-hat", "tuning", "draws",
    ]  # fmt: skip
    print(table(heads, rows))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"R-hat of the properties: {np.quantile(split_gelman_rubin(draws['properties']), 0.99):.2f}"
        f" (99th percentile). {memory:.1f} GB."
    )


if __name__ == "__main__":
    main()
