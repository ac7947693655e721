# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of Student's t, fitted to draws by EM, from which others are drawn."""

from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

#: Degrees of freedom and numbers of components that are tried, of which each component needs so
#: many draws for each coordinate.
_DEGREES, _COMPONENTS, _DRAWS_EACH = (4.0, 10.0, 30.0, 100.0, 1e4), (1, 2, 4, 8), 10

#: Steps of EM at most, and the gain of the log likelihood of a draw below which they end.
_STEPS, _GAIN = 100, 1e-3

#: As much of each covariance is that of all draws, in units of draws for each coordinate.
_SHRUNK = 1.0

#: The part that is wider than what was fitted, its factor and its degrees of freedom: where the
#: draws have not been the weights stay bounded.
_WIDE, _FACTOR, _FEW = 0.1, 1.3, 5.0


class Mixture(NamedTuple):
    """
    - **weights** - of the components, shape (K,).
    - **means** - shape (K, d).
    - **factors** - :math:`L` with the scale matrix :math:`L L^\\top`, shape (K, d, d).
    - **degrees** - degrees of freedom, shape (K,).
    """

    weights: np.ndarray
    means: np.ndarray
    factors: np.ndarray
    degrees: np.ndarray

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """Of each component with its weight, shape (n, K)."""
        return np.log(self.weights) + self._densities(x)[0]

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Shape (n,)."""
        return logsumexp(self.log_densities(x), axis=1)

    def draw(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """Shape (number, d); of each component as many as its weight says, up to one."""
        d, parts = self.means.shape[1], []
        for count, mean, factor, degrees in zip(
            _shares(self.weights, number, rng), self.means, self.factors, self.degrees, strict=True
        ):
            normal = rng.standard_normal((count, d)) @ factor.T
            parts.append(mean + normal / np.sqrt(rng.chisquare(degrees, (count, 1)) / degrees))
        return np.concatenate(parts)

    def _densities(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log densities and squared distances, of each component."""
        d, logs, far = x.shape[1], [], []
        for mean, factor, nu in zip(self.means, self.factors, self.degrees, strict=True):
            # much faster than to solve for thousands of draws, and well conditioned
            square = np.sum(((x - mean) @ np.linalg.inv(factor).T) ** 2, axis=1)
            constant = gammaln((nu + d) / 2) - gammaln(nu / 2) - d / 2 * np.log(nu * np.pi)
            constant -= np.sum(np.log(np.diagonal(factor)))
            logs.append(constant - (nu + d) / 2 * np.log1p(square / nu))
            far.append(square)
        return np.stack(logs, axis=1), np.stack(far, axis=1)

    def improved(self, x: np.ndarray) -> tuple["Mixture", float]:
        """
        A step of EM, and the log likelihood of a draw before it: with responsibilities
        :math:`r_{ik}` and :math:`u_{ik} = (\\nu + d) / (\\nu + \\delta_{ik}^2)`,

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
        """The same with a part that is wider."""
        return Mixture(
            np.concatenate([(1 - _WIDE) * self.weights, _WIDE * self.weights]),
            np.concatenate([self.means, self.means]),
            np.concatenate([self.factors, _FACTOR * self.factors]),
            np.concatenate([self.degrees, np.minimum(self.degrees, _FEW)]),
        )


def fitted(chains: np.ndarray, rng: np.random.Generator) -> Mixture:
    """
    Of all numbers of components and degrees of freedom the mixture that says most of draws that it
    has not seen: of the second half of each chain.

    :param chains: about standardised draws, shape (chains, draws, d).
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
            break  # more of them would not be better either
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
    """Some of the draws, each with a probability in proportion to its distance to the others."""
    centers = [x[rng.integers(len(x))]]
    while len(centers) < number:
        distance = np.min([np.sum((x - y) ** 2, axis=1) for y in centers], axis=0)
        centers.append(x[rng.choice(len(x), p=distance / distance.sum())])
    return np.stack(centers)


def _shares(weights: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers with this mean and the sum."""
    ends = np.floor(np.cumsum(weights) / weights.sum() * number + rng.uniform()).astype(int)
    ends[-1] = number
    return np.diff(np.minimum(ends, number), prepend=0)
