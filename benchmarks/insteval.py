# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Students and the lecturers whom they rate, against the exact law: students latent, 1,128 lecturers
and four more parameters sampled, by both integrators of ``CCAdL``.

    python benchmarks/insteval.py --data FOLDER

Ratings are normal, and so are all effects: given the three scales students and lecturers are
integrated out by algebra, and the scales on a grid of Gauss and Hermite.
"""

import argparse
from itertools import product
import time
import warnings

from groups_and_nuts import real, run
import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
from numpyro.diagnostics import effective_sample_size
from scipy import linalg, optimize, sparse

from numpyro_sgmcmc import CCAdL

SCALES = ("of_lecturers", "of_students", "sd")
#: Nodes in each of the three directions.
_NODES = 5


class Marginal:
    """The density of the scales, and the law of level and lecturers given them."""

    def __init__(self, rating: np.ndarray, lecturer: np.ndarray, student: np.ndarray) -> None:
        y, rows = rating.astype(float), np.arange(len(rating))
        ones = np.ones(len(y))
        of_student = sparse.csr_matrix((ones, (rows, student)))
        x = sparse.hstack([ones[:, None], sparse.csr_matrix((ones, (rows, lecturer)))]).tocsr()
        self.rows, self.ratings = len(y), np.bincount(student).astype(float)
        self.xx, self.sx = (x.T @ x).toarray(), (of_student.T @ x).toarray()
        self.xy, self.sy, self.yy = x.T @ y, of_student.T @ y, y @ y
        self.size = x.shape[1]

    def crossed(self, ratio: float) -> np.ndarray:
        """Products of the columns, weighted by how well the effects of students are known."""
        return self.sx.T @ (self.sx / (ratio + self.ratings)[:, None])

    def given(self, logs: np.ndarray) -> tuple[float, np.ndarray, tuple]:
        """Log density of the logarithms of the scales; mean and factor of the precision."""
        lecturers, students, sd = np.exp(logs)
        ratio = (sd / students) ** 2
        shrunk = 1 / (ratio + self.ratings)
        precision = (self.xx - self.crossed(ratio)) / sd**2
        linear = (self.xy - self.sx.T @ (shrunk * self.sy)) / sd**2
        square = (self.yy - np.sum(shrunk * self.sy**2)) / sd**2
        prior = np.append(1 / 4, np.full(self.size - 1, lecturers**-2))
        precision[np.diag_indices(self.size)] += prior
        linear[0] += 3 / 4
        factor = linalg.cho_factor(precision, lower=True)
        mean = linalg.cho_solve(factor, linear)
        log_det = 2 * self.rows * logs[2] + np.sum(np.log1p(self.ratings * (students / sd) ** 2))
        log_density = (linear @ mean - square - log_det + np.sum(np.log(prior))) / 2
        log_density -= np.sum(np.log(np.diag(factor[0])))
        half_normal = (lecturers**2 + students**2 + (sd / 2) ** 2) / 2
        return log_density - half_normal + np.sum(logs), mean, factor


def exact(law: Marginal, start: list[float], count: int = _NODES) -> tuple[np.ndarray, np.ndarray]:
    """
    Means and standard deviations of level, lecturers and the three scales.

    :param start: the scales at which the search for the mode begins.
    :param count: number of nodes in each direction.
    """

    def potential(logs):
        return -law.given(logs)[0]

    mode = optimize.minimize(potential, np.log(start), options={"gtol": 1e-3}).x
    steps = 0.01 * np.eye(3)
    hessian = [
        [
            sum(
                sign * other * potential(mode + sign * a + other * b)
                for sign, other in product((1, -1), repeat=2)
            )
            / (4 * 0.01**2)
            for b in steps
        ]
        for a in steps
    ]
    root = np.linalg.cholesky(np.linalg.inv(np.array(hessian)))
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    logs, means, variances = [], [], []
    for chosen in product(range(count), repeat=3):
        z = nodes[list(chosen)]
        at = mode + root @ z
        log_density, mean, factor = law.given(at)
        logs.append(log_density + z @ z / 2 + np.sum(np.log(weights[list(chosen)])))
        means.append(np.append(mean, np.exp(at)))
        inverse = np.diag(linalg.lapack.dpotri(factor[0], lower=1)[0])
        variances.append(np.append(inverse, np.zeros(3)))
    share = np.exp(np.array(logs) - max(logs))
    share /= share.sum()
    mean = share @ np.array(means)
    return mean, np.sqrt(share @ (np.array(variances) + (np.array(means) - mean) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder of the real data")
    parser.add_argument("--draws", type=int, default=400, help="of each of four chains")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    model, _, data, batch, by_row = real("insteval", options.data)
    mean, sd = exact(Marginal(*by_row), [0.5, 0.3, 1.2])
    data = (*(jnp.asarray(x) for x in data), batch)
    start = time.perf_counter()
    tuning = CCAdL(model, progress_bar=False).tune(random.key(0), *data)
    tuned = time.perf_counter() - start
    lines = []
    for integrator in ("auto", "nogin"):
        kernel = CCAdL(model, tuning=tuning, integrator=integrator, progress_bar=False)
        draws, mcmc, seconds = run(kernel, data, 200, options.draws, random.key(1))
        parts = [draws[name] for name in ("mu", "b", *SCALES)]
        flat = np.concatenate(
            [np.asarray(x, float).reshape(4, options.draws, -1) for x in parts], -1
        )
        size = effective_sample_size(flat)
        away, ratio = (flat.mean((0, 1)) - mean) / sd, flat.std((0, 1)) / sd
        z = (away * np.sqrt(size))[: -len(SCALES)]
        name = mcmc.last_state.fixed.layout.integrator
        scales = [f"{away[k]:+.2f} ± {size[k] ** -0.5:.2f}" for k in range(-3, 0)]
        lines.append([
            f'"{name}"', *scales, f"{ratio[-3:].min():.2f} to {ratio[-3:].max():.2f}",
            f"{np.sqrt(np.mean(z**2)):.2f}, {np.abs(z).max():.1f}", f"{ratio[:-3].mean():.3f}",
            f"{size.min():,.0f} in {tuned + seconds:.0f} s",
        ])  # fmt: skip
        jax.clear_caches()
    header = [
        "integrator", *(f"mean of {name}, sd" for name in SCALES), "sds of scales",
        "z-scores of level and lecturers, rms and largest", "their sds", "least ESS",
    ]  # fmt: skip
    print(table(header, lines))


if __name__ == "__main__":
    main()
