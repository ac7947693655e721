# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Latent variables of groups by twelve laws, most of them skewed: how far the rule of a step moves the
posterior, against closed marginal laws and a grid, and what the tuning says of it.

    python benchmarks/latent_laws.py [NAME ...] [--groups 500]
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import betaln, gammaln
from measure import table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy
from scipy.interpolate import CubicSpline

from numpyro_sgmcmc.posterior.metric import IdentityMetric, from_covariance
from numpyro_sgmcmc.posterior.model import read_model, unremarkable_values
from numpyro_sgmcmc.posterior.potential import full_data_gradient, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.quadrature_error import error_of_integrals

#: Directions in which gradients of the posterior are looked at; how far, in standard deviations,
#: and at how many points; and what is seen of a posterior that is moved.
ANGLES, FAR, SEEN = 12, (6.5, 40), 3

#: Of integrals that have no closed form: how far points reach, in standard deviations of a latent
#: variable, and their number.
REACH, POINTS = 9.0, 1_201

#: In the order of the columns.
RULES = ("few", "step")


class Law(NamedTuple):
    """
    A law of the latent variables of groups.

    - **truth** - of its parameters, one or two, which are positive.
    - **latent** - the law of the latent variables of a group, given these.
    - **rows** - the observed sites, given latent variables and the data of groups.
    - **marginal** - the log density of the data of each group, given the parameters.
    - **simulated** - the data of so many groups, arrays with a row for each.
    """

    truth: tuple
    latent: Callable
    rows: Callable
    marginal: Callable
    simulated: Callable


def parameters(truth):
    """Known from the data, and not from these priors."""
    return [
        numpyro.sample(name, dist.LogNormal(np.log(value), 1.0))
        for name, value in zip("ab", truth, strict=False)
    ]


def model_of(law):
    def model(*data, batch=50):
        given = parameters(law.truth)
        with numpyro.plate("groups", len(data[0]), subsample_size=batch) as g:
            z = numpyro.sample("z", law.latent(*given))
            law.rows(z, *(x[g] for x in data))

    return model


def marginal_of(law):
    def model(*data):
        given = parameters(law.truth)
        numpyro.factor("groups, marginal", law.marginal(*given, *data).sum())

    return model


def by_grid(density):
    """The log of the integral of the exponential of a log density, of standard coordinates."""
    x = jnp.linspace(-REACH, REACH, POINTS)
    return jax.nn.logsumexp(jax.vmap(density)(x), axis=0) + jnp.log(x[1] - x[0])


# --- binary rows of a group, of which there are between 1 and 50


def binary_rows(p, y, observed):
    with numpyro.plate("rows", y.shape[1], dim=-2):
        numpyro.sample("y", dist.Bernoulli(p).mask(observed.T), obs=y.T)


def some_binary_rows(draw):
    def simulated(rng, number, *truth):
        most = 50
        observed = np.arange(most) < rng.integers(1, most + 1, number)[:, None]
        p = draw(rng, number, *truth)
        return (rng.random((number, most)) < p[:, None]) * observed * 1.0, observed

    return simulated


def beta_bernoulli(a, b, y, observed):
    ones, rows = y.sum(1), observed.sum(1)
    return betaln(a + ones, b + rows - ones) - betaln(a, b)


def beta(truth):
    return Law(
        truth,
        lambda mean, kappa: dist.Beta(mean * kappa / (1 + mean), kappa / (1 + mean)),
        lambda z, *data: binary_rows(z, *data),
        lambda mean, kappa, *data: beta_bernoulli(
            mean * kappa / (1 + mean), kappa / (1 + mean), *data
        ),
        some_binary_rows(lambda rng, n, o, k: rng.beta(o * k / (1 + o), k / (1 + o), n)),
    )


def logit_normal_marginal(first, tau, y, observed):
    ones, rows = y.sum(1), observed.sum(1)

    def density(x):
        eta = jnp.log(first) + tau * x
        return ones * eta - rows * jax.nn.softplus(eta) + dist.Normal(0, 1).log_prob(x)

    return by_grid(density)


def logistic_rows(z, y, observed):
    with numpyro.plate("rows", y.shape[1], dim=-2):
        numpyro.sample("y", dist.Bernoulli(logits=z).mask(observed.T), obs=y.T)


# --- counts


def counts(rate, y):
    numpyro.sample("y", dist.Poisson(rate), obs=y)


def simulated_counts(draw):
    return lambda rng, n, *truth: (rng.poisson(draw(rng, n, *truth)).astype(float),)


def gamma(truth):
    return Law(
        truth,
        lambda shape, mean: dist.Gamma(shape, shape / mean),
        counts,
        lambda shape, mean, y: dist.GammaPoisson(shape, shape / mean).log_prob(y),
        simulated_counts(lambda rng, n, shape, mean: rng.gamma(shape, mean / shape, n)),
    )


def log_normal_marginal(median, tau, y):
    def density(x):
        eta = jnp.log(median) + tau * x
        return y * eta - jnp.exp(eta) - gammaln(y + 1) + dist.Normal(0, 1).log_prob(x)

    return by_grid(density)


def log_normal(truth):
    return Law(
        truth,
        lambda median, tau: dist.LogNormal(jnp.log(median), tau),
        counts,
        log_normal_marginal,
        simulated_counts(lambda rng, n, median, tau: median * np.exp(tau * rng.normal(size=n))),
    )


def half_normal_marginal(scale, y):
    def density(x):
        # of the logarithm, from -50 to 3
        u = (x - 8.0) * 5 / 1.7
        eta = jnp.log(scale) + u
        prior = np.log(2.0) + dist.Normal(0, 1).log_prob(jnp.exp(u)) + u
        return prior + y * eta - jnp.exp(eta) - gammaln(y + 1) + np.log(5 / 1.7)

    return by_grid(density)


# --- scales of normal rows


def normal_rows(variance, y):
    numpyro.sample("y", dist.Normal(0, jnp.sqrt(variance)), obs=y)


def dirichlet_marginal(odds, kappa, y):
    a = kappa * jnp.stack([odds, 1.0 + 0 * odds, 2.0 + 0 * odds]) / (3 + odds)
    return dist.DirichletMultinomial(a, total_count=y.sum(-1).astype(int)).log_prob(y)


LAWS = {
    "Beta, small": beta((0.15, 0.8)),
    "Beta, large": beta((0.6, 20.0)),
    "Gamma, small": gamma((0.15, 2.0)),
    "Gamma, large": gamma((8.0, 5.0)),
    "Exponential": Law(
        (1.5,),
        lambda mean: dist.Exponential(1 / mean),
        counts,
        lambda mean, y: dist.GammaPoisson(1.0, 1 / mean).log_prob(y),
        simulated_counts(lambda rng, n, mean: rng.exponential(mean, n)),
    ),
    "LogNormal, narrow": log_normal((3.0, 0.5)),
    "LogNormal, wide": log_normal((0.3, 2.0)),
    "HalfNormal": Law(
        (2.0,),
        dist.HalfNormal,
        counts,
        half_normal_marginal,
        simulated_counts(lambda rng, n, scale: scale * np.abs(rng.normal(size=n))),
    ),
    "Gamma, of precisions": Law(
        (1.5, 1.0),
        lambda shape, scale: dist.Gamma(shape, shape * scale**2),
        lambda z, y: normal_rows(1 / z, y),
        lambda shape, scale, y: dist.StudentT(2 * shape, 0.0, scale).log_prob(y),
        lambda rng, n, shape, scale: (scale * rng.standard_t(2 * shape, n),),
    ),
    "Exponential, of variances": Law(
        (1.3,),
        lambda scale: dist.Exponential(1 / (2 * scale**2)),
        normal_rows,
        lambda scale, y: dist.Laplace(0.0, scale).log_prob(y),
        lambda rng, n, scale: (rng.laplace(0.0, scale, n),),
    ),
    "Dirichlet": Law(
        (0.5, 1.5),
        lambda odds, kappa: dist.Dirichlet(
            kappa * jnp.stack([odds, 1.0 + 0 * odds, 2.0 + 0 * odds]) / (3 + odds)
        ),
        lambda z, y: numpyro.sample(
            "y",
            dist.Multinomial(probs=z, total_count=y.sum(-1).astype(int), total_count_max=10),
            obs=y,
        ),
        dirichlet_marginal,
        lambda rng, n, odds, kappa: (
            np.array(
                [
                    rng.multinomial(k, rng.dirichlet(kappa * np.array([odds, 1, 2]) / (3 + odds)))
                    for k in rng.integers(1, 11, n)
                ]
            ).astype(float),
        ),
    ),
    "Normal, of logits": Law(
        (1.5, 1.5),
        lambda odds, tau: dist.Normal(jnp.log(odds), tau),
        logistic_rows,
        logit_normal_marginal,
        some_binary_rows(
            lambda rng, n, odds, tau: 1 / (1 + np.exp(-tau * rng.normal(size=n)) / odds)
        ),
    ),
}


class Posterior(NamedTuple):
    """
    - **target** - the model with latent variables and its data.
    - **gaussian** - around the exact mode.
    - **exact** - the potential without latent variables, of unconstrained parameters.
    """

    target: Target
    gaussian: Gaussian
    exact: Callable


def prepared(law, number):
    """The posterior of simulated groups."""
    data = law.simulated(np.random.default_rng(0), number, *law.truth)
    data = tuple(jnp.asarray(x, None if x.dtype == bool else jnp.result_type(float)) for x in data)
    view = read_model(model_of(law), init_to_uniform, data, {})
    unflat = ravel_pytree(unremarkable_values(view))[1]

    def exact(x):
        return potential_energy(marginal_of(law), data, {}, unflat(x))

    x = jnp.log(jnp.asarray(law.truth))
    gradient, curvature = jax.jit(jax.grad(exact)), jax.jit(jax.hessian(exact))
    for _ in range(20):
        step = jnp.linalg.solve(curvature(x), gradient(x))
        x = x - step / jnp.maximum(1.0, jnp.abs(step).max())
    covariance = np.linalg.inv(np.asarray(curvature(x), float))
    metric = from_covariance(covariance, np.asarray(x), x.dtype)
    return Posterior(Target(view, data, {}), Gaussian(metric, 0.0), exact)


def polar(dimension):
    """Directions, shape (a, d), and radii, shape (r,)."""
    angles = np.array([[1.0], [-1.0]])
    if dimension == 2:
        t = 2 * np.pi * np.arange(ANGLES) / ANGLES
        angles = np.stack([np.cos(t), np.sin(t)], 1)
    return angles, np.linspace(0, *FAR)


def gradients(of_point, metric, angles, radii):
    """In the coordinates of the metric, at points in so many directions, shape (a, r, d)."""
    points = (angles[:, None] * radii[:, None]).reshape(-1, angles.shape[1])
    program = jax.jit(lambda x: lax.map(lambda z: metric.pullback(of_point(metric.values(z))), x))
    found = program(jnp.asarray(points, metric.center.dtype))
    return np.asarray(found, float).reshape(len(angles), len(radii), -1)


def moments(slopes, angles, radii):
    """
    Mean and covariance of the law whose potential has these gradients: integrated along each
    direction, since nodes that are held fixed give a gradient that is not quite that of a function.
    """
    along = np.einsum("ard,ad->ar", slopes, angles)
    energies = np.stack([CubicSpline(radii, x).antiderivative()(radii) for x in along])
    weights = np.exp(-energies) * radii ** (angles.shape[1] - 1)
    weights[:, 0] *= 0.5
    weights /= weights.sum()
    points = angles[:, None] * radii[:, None]
    mean = np.einsum("ar,ard->d", weights, points)
    second = np.einsum("ar,ard,are->de", weights, points, points)
    return mean, second - np.outer(mean, mean)


def gradient_by(target, rule):
    """That of all groups, of unconstrained parameters."""
    target = target._replace(model=target.model.with_rule(rule))
    potential, plates = target.potential(IdentityMetric()), target.model.plates
    return lambda x: ravel(
        full_data_gradient(potential, plates, target.unravel(x), random.key(0))[1]
    )


def errors(posterior, rules):
    """
    How far a rule moves the mean or a standard deviation, whichever is more, in the direction in
    which that is most and in posterior standard deviations; and what the tuning says of it. A chain
    with a control variate has the gradient of an anchor at the centre.

    :return: by rule and whether there is a control variate, the truth and what is said.
    """
    metric = posterior.gaussian.metric
    angles, radii = polar(len(metric.center))
    right = moments(gradients(jax.grad(posterior.exact), metric, angles, radii), angles, radii)
    root = np.linalg.inv(np.linalg.cholesky(right[1]))
    fine = gradient_by(posterior.target, "fine")
    anchor = gradients(fine, metric, angles[:1], radii[:1])[0, 0]
    found = {}
    for rule in rules:
        target = posterior.target._replace(model=posterior.target.model.with_rule(rule))
        slopes = gradients(gradient_by(target, rule), metric, angles, radii)
        for controlled in (True, False):
            used = slopes + (anchor - slopes[0, 0]) * controlled
            mean, covariance = moments(used, angles, radii)
            ratios = np.sqrt(np.linalg.eigvalsh(root @ covariance @ root.T))
            assert np.isfinite(ratios).all()
            true = max(np.linalg.norm(root @ (mean - right[0])), np.abs(ratios - 1).max())
            said, _ = error_of_integrals(target, random.key(0), posterior.gaussian, controlled)
            found[rule, controlled] = float(true), said
    return found


def line(name, groups):
    """Of the table."""
    found = errors(prepared(LAWS[name], groups), RULES)
    # farther away the gradients have not been looked at
    cells = (f"{f'{t:.1g}' if t < SEEN else f'> {SEEN}'}, {s:.1g}" for t, s in found.values())
    return name, *cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("names", nargs="*", default=list(LAWS))
    parser.add_argument("--groups", type=int, default=500)
    options = parser.parse_args()
    header = ["true, said", "5 nodes", "without an anchor", "11 nodes", "without an anchor"]
    print(table(header, [line(name, options.groups) for name in options.names]))


if __name__ == "__main__":
    main()
