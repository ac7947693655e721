# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
One million ratings of 3,706 movies by 6,040 users, against the exact law: users latent, in three
tables by their number of ratings, movies and four more parameters sampled.

    python benchmarks/movielens.py --data FOLDER

Ratings and effects are normal. The law is computed as in ``insteval.py``, with products of movies
by users that are interpolated in the ratio of two scales.
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
from numpyro.infer import MCMC
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


def model(rating, movie, tables, movies, share):
    level = numpyro.sample("level", dist.Normal(3, 2))
    sd_movie = numpyro.sample("sd_movie", dist.HalfNormal(1))
    sd_user = numpyro.sample("sd_user", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("movies", movies):
        of_movie = numpyro.sample("movie", dist.Normal(0, sd_movie))
    for k, (members, observed, _) in enumerate(tables):
        number, most = members.shape
        with numpyro.plate(f"users {k}", number, subsample_size=max(8, int(share * number))) as g:
            of_user = numpyro.sample(f"user {k}", dist.Normal(0, sd_user))
            with numpyro.plate(f"ratings {k}", most):
                row = members[g].T
                law = dist.Normal(level + of_movie[movie[row]] + of_user, noise)
                numpyro.sample(f"rating {k}", law.mask(observed[g].T), obs=rating[row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder of the real data")
    parser.add_argument("--draws", type=int, default=300, help="of each of two chains")
    parser.add_argument("--share", type=float, default=0.03, help="of the users in a minibatch")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with np.load(f"{options.data}/movielens_1m.npz", allow_pickle=False) as file:
        movie, user = (np.unique(file[key], return_inverse=True)[1] for key in ("item", "user"))
        rating = file["rating"].astype(np.float32)
    tables = group_rows(user, buckets=3)

    bound = partial(model, movies=1 + int(movie.max()), share=options.share)
    kernel = CCAdL(bound, progress_bar=False)
    start = time.perf_counter()
    data = jnp.asarray(rating), movie, tables
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
    names = ("level", "movie", *SCALES)
    flat = np.concatenate(
        [np.asarray(draws[k], float).reshape(2, options.draws, -1) for k in names], -1
    )
    size = effective_sample_size(flat)
    mean, sd = exact(Interpolated(rating, movie, user), [0.6, 0.36, 0.9], 3)
    away, ratio = (flat.mean((0, 1)) - mean) / sd, flat.std((0, 1)) / sd
    z = (away * np.sqrt(size))[: -len(SCALES)]
    scales = [f"{away[k]:+.2f} ± {size[k] ** -0.5:.2f}" for k in range(-3, 0)]
    passes = sum(tuning.passes.values())
    print(table(
        [
            "tuning", *(f"mean of {name}, sd" for name in SCALES), "sds of scales",
            "z-scores of level and movies, rms and largest", "their sds", "least ESS",
        ],
        [[
            f"{passes:,.0f} passes, {tuned:.0f} s", *scales,
            f"{ratio[-3:].min():.2f} to {ratio[-3:].max():.2f}",
            f"{np.sqrt(np.mean(z**2)):.2f}, {np.abs(z).max():.1f}", f"{ratio[:-3].mean():.3f}",
            f"{size.min():,.0f} in {seconds:.0f} s",
        ]],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
