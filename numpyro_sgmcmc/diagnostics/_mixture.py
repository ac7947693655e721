# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of Student's t distributions, fitted to draws by EM, for independent draws."""

from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

#: Degrees of freedom to try, numbers of components to try, and the draws for each coordinate that a
#: component needs.
_DEGREES, _COMPONENTS, _DRAWS_EACH = (4.0, 10.0, 30.0, 100.0, 1e4), (1, 2, 4, 8), 10

#: The most steps of EM, and the gain of the log likelihood of a draw below which it ends.
_STEPS, _GAIN = 100, 1e-3

#: Weight of the covariance of all draws in each covariance, in draws for each coordinate.
_SHRUNK = 1.0

#: Weight of the wide part of a mixture, its scale factor and its degrees of freedom. It keeps
#: weights bounded where there are no draws.
_WIDE, _FACTOR, _FEW = 0.1, 1.3, 5.0


class Mixture(NamedTuple):
    """
    A mixture of multivariate Student's t distributions.

    - **weights** - weights of the components, shape (K,).
    - **means** - means of the components, shape (K, d).
    - **factors** - :math:`L` with the scale matrix :math:`L L^\\top`, shape (K, d, d).
    - **degrees** - degrees of freedom, shape (K,).
    """

    weights: np.ndarray
    means: np.ndarray
    factors: np.ndarray
    degrees: np.ndarray

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """Weighted log densities of each component, shape (n, K)."""
        return np.log(self.weights) + self._densities(x)[0]

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """The log density at points, shape (n,)."""
        return logsumexp(self.log_densities(x), axis=1)

    def draw(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """Draw points, shape (number, d), with stratified numbers for the components."""
        d, parts = self.means.shape[1], []
        for count, mean, factor, degrees in zip(
            _shares(self.weights, number, rng), self.means, self.factors, self.degrees, strict=True
        ):
            normal = rng.standard_normal((count, d)) @ factor.T
            parts.append(mean + normal / np.sqrt(rng.chisquare(degrees, (count, 1)) / degrees))
        return np.concatenate(parts)

    def _densities(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log densities and squared distances of each component."""
        d, logs, far = x.shape[1], [], []
        for mean, factor, nu in zip(self.means, self.factors, self.degrees, strict=True):
            # much faster than solving for thousands of draws, and well conditioned
            square = np.sum(((x - mean) @ np.linalg.inv(factor).T) ** 2, axis=1)
            constant = gammaln((nu + d) / 2) - gammaln(nu / 2) - d / 2 * np.log(nu * np.pi)
            constant -= np.sum(np.log(np.diagonal(factor)))
            logs.append(constant - (nu + d) / 2 * np.log1p(square / nu))
            far.append(square)
        return np.stack(logs, axis=1), np.stack(far, axis=1)

    def improved(self, x: np.ndarray) -> tuple["Mixture", float]:
        """
        The mixture after a step of EM, and the log likelihood of a draw before it.

        With responsibilities :math:`r_{ik}` and :math:`u_{ik} = (\\nu + d) / (\\nu +
        \\delta_{ik}^2)`,

        .. math:: \\mu_k = \\frac{\\sum_i r_{ik} u_{ik} x_i}{\\sum_i r_{ik} u_{ik}}, \\qquad
            \\Sigma_k = \\frac{\\sum_i r_{ik} u_{ik} (x_i - \\mu_k)(x_i - \\mu_k)^\\top + s I}
                {\\sum_i r_{ik} + s} .
        """
        n, d = x.shape
        densities, far = self._densities(x)
        logs = np.log(self.weights) + densities
        total = logsumexp(logs, axis=1)
        share = np.exp(logs - total[:, None])
        scaled = share * (self.degrees + d) / (self.degrees + far)
        means = scaled.T @ x / scaled.sum(axis=0)[:, None]
        factors = []
        for k, mean in enumerate(means):
            away = x - mean
            square = (scaled[:, k, None] * away).T @ away + _SHRUNK * d * np.eye(d)
            factors.append(np.linalg.cholesky(square / (share[:, k].sum() + _SHRUNK * d)))
        weights = (share.sum(axis=0) + 1) / (n + len(means))
        return Mixture(weights, means, np.stack(factors), self.degrees), float(total.mean())

    def with_wide_part(self) -> "Mixture":
        """The mixture with a wider part added."""
        return Mixture(
            np.concatenate([(1 - _WIDE) * self.weights, _WIDE * self.weights]),
            np.concatenate([self.means, self.means]),
            np.concatenate([self.factors, _FACTOR * self.factors]),
            np.concatenate([self.degrees, np.minimum(self.degrees, _FEW)]),
        )


def fitted(chains: np.ndarray, rng: np.random.Generator) -> Mixture:
    """
    The best mixture over numbers of components and degrees of freedom.

    The best one has the largest likelihood of held-out draws, the second half of each chain.

    :param chains: roughly standardised draws, shape (chains, draws, d).
    """
    half = chains.shape[1] // 2
    d = chains.shape[2]
    every = chains.reshape(-1, d)
    seen, unseen = (x.reshape(-1, d) for x in (chains[:, :half], chains[:, half:]))
    best: tuple[float, Mixture | None] = -np.inf, None
    for components in _COMPONENTS:
        if components > 1 and len(seen) < _DRAWS_EACH * components * d:
            break
        one, tried = _begun(seen, components, rng), []
        for degrees in _DEGREES:
            one = _grown(one._replace(degrees=np.full(components, degrees)), seen)
            tried.append((float(one.log_density(unseen).mean()), one))
        latest = max(tried, key=lambda pair: pair[0])
        if latest[0] <= best[0]:
            break  # more components would not be better either
        best = latest
    assert best[1] is not None
    return _grown(best[1], every).with_wide_part()


def _begun(x: np.ndarray, components: int, rng: np.random.Generator) -> Mixture:
    means = x.mean(axis=0)[None] if components == 1 else _far_apart(x, components, rng)
    return Mixture(
        np.full(components, 1 / components),
        means,
        np.tile(np.eye(x.shape[1]), (components, 1, 1)),
        np.full(components, _DEGREES[0]),
    )


def _grown(one: Mixture, x: np.ndarray) -> Mixture:
    before = -np.inf
    for _ in range(_STEPS):
        new, now = one.improved(x)
        if now - before < _GAIN:
            break
        one, before = new, now
    return one


def _far_apart(x: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Some of the draws, chosen with probabilities in proportion to squared distances."""
    centers = [x[rng.integers(len(x))]]
    while len(centers) < number:
        distance = np.min([np.sum((x - y) ** 2, axis=1) for y in centers], axis=0)
        centers.append(x[rng.choice(len(x), p=distance / distance.sum())])
    return np.stack(centers)


def _shares(weights: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Random whole numbers with this sum and with means in proportion to the weights."""
    ends = np.floor(np.cumsum(weights) / weights.sum() * number + rng.uniform()).astype(int)
    ends[-1] = number
    return np.diff(np.minimum(ends, number), prepend=0)
