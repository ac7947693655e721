# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
One million ratings of 3,706 movies by 6,040 users: users latent, in three tables by their number of
ratings, movies and the scales sampled.

    python benchmarks/movielens.py --data FOLDER [--liking]

Ratings and effects are normal. The exact law is computed as in ``insteval.py``, with products of
movies by users that are interpolated in the ratio of two scales. With ``--liking`` the outcome is
whether the rating is 4 or 5, with a logit link. NUTS samples users, movies and scales together for
comparison, from all ratings.
"""

import argparse
from functools import partial
import time
import warnings

from insteval import Marginal, exact
import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_value
from scipy import interpolate

from numpyro_sgmcmc import CCAdL, group_rows

SCALES = ("sd_movie", "sd_user", "noise")
#: Logarithms of the ratio of variances, of a rating to a user, between which products are known.
_RATIOS = np.linspace(np.log(3.0), np.log(12.0), 12)


class Interpolated(Marginal):
    """Of so many users and movies that a product takes seconds."""

    def __init__(self, rating: np.ndarray, movie: np.ndarray, user: np.ndarray) -> None:
        super().__init__(rating, movie, user)
        products = [super(Interpolated, self).crossed(ratio) for ratio in np.exp(_RATIOS)]
        self.products = interpolate.BarycentricInterpolator(_RATIOS, np.eye(len(_RATIOS)))
        self.known = np.stack(products)

    def crossed(self, ratio: float) -> np.ndarray:
        return np.tensordot(self.products(np.log(ratio)), self.known, 1)


def model(outcome, movie, tables, movies, share, liking=False):
    level = numpyro.sample("level", dist.Normal(0 if liking else 3, 2))
    sd_movie = numpyro.sample("sd_movie", dist.HalfNormal(1))
    sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
    noise = None if liking else numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("movies", movies):
        of_movie = numpyro.sample("movie", dist.Normal(0, sd_movie))
    for k, (members, observed, _) in enumerate(tables):
        number, most = members.shape
        with numpyro.plate(f"users {k}", number, subsample_size=max(8, int(share * number))) as g:
            of_user = numpyro.sample(f"user {k}", dist.Normal(0, sd_user))
            with numpyro.plate(f"ratings {k}", most):
                row = members[g].T
                mean = level + of_movie[movie[row]] + of_user
                law = dist.Bernoulli(logits=mean) if liking else dist.Normal(mean, noise)
                numpyro.sample(f"outcome {k}", law.mask(observed[g].T), obs=outcome[row])


def ratings(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The movie, the user and the stars of each rating of MovieLens-1M."""
    with np.load(f"{folder}/movielens_1m.npz", allow_pickle=False) as file:
        movie, user = (np.unique(file[key], return_inverse=True)[1] for key in ("item", "user"))
        return movie, user, file["rating"].astype(np.float32)


def by_nuts(
    liked: np.ndarray, movie: np.ndarray, user: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means, standard deviations and effective sample sizes of level, movies and scales."""
    of_movies, of_users = (np.bincount(x, liked) for x in (movie, user))

    def joint(movie, user, of_movies, of_users):
        level = numpyro.sample("level", dist.Normal(0, 2))
        sd_movie = numpyro.sample("sd_movie", dist.HalfNormal(1))
        sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
        # hierarchical centring: level and movies are less correlated
        with numpyro.plate("movies", len(of_movies)):
            m = numpyro.sample("movie", dist.Normal(level, sd_movie))
        with numpyro.plate("users", len(of_users)):
            u = numpyro.sample("user", dist.Normal(0, sd_user))
        logits = m.astype(jnp.float32)[movie] + u.astype(jnp.float32)[user]
        likelihood = of_movies @ m + of_users @ u - jnp.sum(jax.nn.softplus(logits), dtype=m.dtype)
        numpyro.factor("liked", likelihood)

    with jax.enable_x64(True):
        values = {"sd_movie": 0.8, "sd_user": 0.8}
        kernel = NUTS(joint, max_tree_depth=8, init_strategy=init_to_value(values=values))
        mcmc = MCMC(kernel, num_warmup=200, num_samples=number, progress_bar=False)
        mcmc.run(random.key(0), *map(jnp.asarray, (movie, user, of_movies, of_users)))
        draws = {name: np.asarray(x, float) for name, x in mcmc.get_samples().items()}
    level = draws["level"][:, None]
    scales = [draws[name][:, None] for name in SCALES if name in draws]
    flat = np.concatenate([level, draws["movie"] - level, *scales], axis=1)
    return flat.mean(0), flat.std(0), effective_sample_size(flat[None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder of the real data")
    parser.add_argument("--draws", type=int, default=300, help="of each of two chains")
    parser.add_argument("--share", type=float, default=0.03, help="of the users in a minibatch")
    parser.add_argument("--liking", action="store_true", help="4 and 5 against the rest")
    parser.add_argument("--draws-of-nuts", type=int, default=400)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    movie, user, rating = ratings(options.data)
    outcome = (rating >= 4).astype(np.float32) if options.liking else rating
    tables = group_rows(user, buckets=3)

    bound = partial(model, movies=1 + int(movie.max()), share=options.share, liking=options.liking)
    kernel = CCAdL(bound, progress_bar=False)
    start = time.perf_counter()
    data = jnp.asarray(outcome), movie, tables
    tuning = kernel.tune(random.key(0), *data)
    tuned = time.perf_counter() - start
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=options.draws,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *data)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - start
    scales = [name for name in SCALES if name in draws]
    flat = np.concatenate(
        [
            np.asarray(draws[k], float).reshape(2, options.draws, -1)
            for k in ("level", "movie", *scales)
        ],
        axis=-1,
    )
    size = effective_sample_size(flat)
    if options.liking:
        mean, sd, others = by_nuts(outcome, movie, user, options.draws_of_nuts)
    else:
        mean, sd = exact(Interpolated(rating, movie, user), [0.6, 0.36, 0.9], 3)
        others = np.full(len(mean), np.inf)
    away, ratio = (flat.mean((0, 1)) - mean) / sd, flat.std((0, 1)) / sd
    error = np.sqrt(1 / size + 1 / others)
    count = len(scales)
    z = (away / error)[:-count]
    off = [f"{away[k]:+.2f} ± {error[k]:.2f}" for k in range(-count, 0)]
    passes = sum(tuning.passes.values())
    print(table(
        [
            "tuning", *(f"mean of {name}, sd" for name in scales), "sds of scales",
            "z-scores of level and movies, rms and largest", "their sds", "least ESS",
        ],
        [[
            f"{passes:,.0f} passes, {tuned:.0f} s", *off,
            f"{ratio[-count:].min():.2f} to {ratio[-count:].max():.2f}",
            f"{np.sqrt(np.mean(z**2)):.2f}, {np.abs(z).max():.1f}",
            f"{ratio[:-count].mean():.3f}",
            f"{size.min():,.0f} in {seconds:.0f} s",
        ]],
    ))  # fmt: skip
    if options.liking:
        print(f"\nNUTS: least ESS {others.min():,.0f} in {options.draws_of_nuts:,} draws.")


if __name__ == "__main__":
    main()
