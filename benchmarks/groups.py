# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Latent variables of groups, integrated out: the time of a step for a thousand to a million groups,
the bias of a Laplace approximation and of few nodes, the bias of draws of 21 effects, and 100,000
groups of 10 rows with an intercept and 20 slopes of their own.

    python benchmarks/groups.py [flat] [laplace] [errors] [slopes] [--groups 100000]
"""

import argparse
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_uniform

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior import quadrature
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import full_data_gradient, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.hessians import whitened_hessian

#: Groups of the first table; rows of a group; slopes of a group, besides an intercept.
FLAT, ROWS, SLOPES = (1_000, 10_000, 100_000, 1_000_000), 4, 20

#: Nodes of the rules beside each other, of which one node is Laplace's, and of what they are
#: compared with; rows of a group in the last columns.
NODES, MANY_NODES, MORE_ROWS = (1, 3, 5, 7, 15), 61, (20, 100)


def intercepts(y, batch=200):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("groups", len(y), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Bernoulli(logits=a), obs=y[g].T)


def slopes(x, y, batch=50):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([x.shape[-1]]).to_event(1))
    with numpyro.plate("groups", len(y), subsample_size=batch) as g:
        b = numpyro.sample("b", dist.Normal(mu, tau).to_event(1))
        with numpyro.plate("members", y.shape[1]):
            logits = jnp.einsum("gmk,gk->mg", x[g], b)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[g].T)


def sampled(model, *data, samples=1_000, seed=1, again=False):
    """Draws, the kernel, and seconds: to the last draw of all, and of a second run."""
    kernel = CCAdL(model, progress_bar=False)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(random.key(seed), *data)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    first = time.perf_counter() - start
    start = time.perf_counter()
    if again:
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.last_state.rng_key, *data)
        jax.block_until_ready(mcmc.get_samples())
    return draws, kernel, first, time.perf_counter() - start


def least_size(draws):
    return min(float(np.min(effective_sample_size(np.asarray(x)))) for x in draws.values())


def simulated_intercepts(number, rows=ROWS):
    rng = np.random.default_rng(0)
    a = 0.5 + 1.5 * rng.standard_normal((number, 1))
    return rng.random((number, rows)) < 1 / (1 + np.exp(-a))


def flat():
    """Lines of the table of step times."""
    for number in FLAT:
        y = jnp.asarray(simulated_intercepts(number), jnp.float32)
        draws, kernel, first, second = sampled(intercepts, y, again=True)
        off = [
            f"{(float(draws[k].mean()) - truth) / float(draws[k].std()):+.1f}"
            for k, truth in (("mu", 0.5), ("tau", 1.5))
        ]
        step = second / 1_000 / kernel.steps_per_sample
        yield (
            f"{number:,}", f"{1e3 * step:.2f} ms", f"{first:.0f} s", f"{least_size(draws):,.0f}",
            ", ".join(off), f"{kernel.tuning.integrals:.1g}",
        )  # fmt: skip


def log_marginal(theta, ones, rows, nodes):
    """
    Of a group with so many ones among its rows, by adaptive quadrature: differentiated through the
    mode and the curvature there, as `lme4` and `glmmTMB` do. With one node it is Laplace's.
    """
    mu, tau = theta[0], jnp.exp(theta[1])

    def density(u):
        eta = mu + tau * u
        return ones * eta - rows * jax.nn.softplus(eta) - 0.5 * u**2

    def step(u, _):
        return u - jax.grad(density)(u) / jax.grad(jax.grad(density))(u), None

    # the density is concave, and Newton steps from zero are exact after less than this
    mode, _ = jax.lax.scan(step, jnp.zeros(()), length=12)
    scale = (-jax.grad(jax.grad(density))(mode)) ** -0.5
    x, weights = np.polynomial.hermite_e.hermegauss(nodes)
    terms = jnp.log(weights) + 0.5 * x**2 + jax.vmap(density)(mode + scale * x)
    return jax.nn.logsumexp(terms) + jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)


def log_posterior(theta, groups, nodes):
    """Of `mu` and `log tau`, for so many groups with 0, 1, ... ones."""
    rows = len(groups) - 1
    terms = jax.vmap(lambda ones: log_marginal(theta, ones, rows, nodes))(jnp.arange(rows + 1.0))
    prior = dist.Normal(0, 2).log_prob(theta[0]) + theta[1]
    return groups @ terms + prior + dist.HalfNormal(2).log_prob(jnp.exp(theta[1]))


def modes_of(all_groups, nodes):
    """The mode of each posterior of `mu` and `log tau`, and the standard deviations there."""
    gradient = jax.jit(jax.grad(lambda *given: log_posterior(*given, nodes)))
    curvature = jax.jit(jax.hessian(lambda *given: log_posterior(*given, nodes)))
    for groups in all_groups:
        theta = jnp.asarray([0.5, np.log(1.5)])
        for _ in range(20):
            theta = theta - jnp.linalg.solve(curvature(theta, groups), gradient(theta, groups))
        assert jnp.abs(gradient(theta, groups)).max() < 1e-9 * groups.sum()
        sds = np.sqrt(np.diag(np.linalg.inv(-np.asarray(curvature(theta, groups)))))
        yield np.asarray(theta), sds


def laplace():
    """Lines of the table of few nodes: all groups, and nothing is drawn."""
    posteriors = (*((number, ROWS) for number in FLAT[:-1]), *((FLAT[-2], n) for n in MORE_ROWS))
    counts = []
    for number, rows in posteriors:
        ones = simulated_intercepts(number, rows).sum(1)
        counts.append(jnp.asarray(np.bincount(ones, minlength=rows + 1), float))
    right = list(modes_of(counts, MANY_NODES))
    for nodes in NODES:
        found = [mode for mode, _ in modes_of(counts, nodes)]
        off = [(theta - mode) / sd for theta, (mode, sd) in zip(found, right, strict=True)]
        factor = np.expm1(found[2][1] - right[2][0][1])
        yield (
            "Laplace" if nodes == 1 else f"{nodes} nodes",
            *(f"{mu:+.2g}, {log_tau:+.2g}" for mu, log_tau in off), f"{100 * factor:+.2g} %",
        )  # fmt: skip


def errors(number, keys=6):
    """
    Lines of the table of the bias of draws: of the gradient of all groups at the truth, in
    posterior standard deviations of each parameter.
    """
    x, y, mu, tau = simulated_slopes(number, 0)
    point = jnp.asarray(np.concatenate([mu, np.log(tau)]), jnp.float32)

    def target_with(draws, towards_mean):
        # what a kernel reads of a model anew each time
        quadrature._DRAWS, quadrature._TOWARDS_MEAN = draws, towards_mean
        return Target(read_model(slopes, init_to_uniform, (x, y), {}), (x, y), {})

    def gradients(target, count, first=0):
        def at(target, key):
            potential, plates = target.potential(IdentityMetric()), target.model.plates
            return ravel(full_data_gradient(potential, plates, target.unravel(point), key)[1])

        compiled = target.compiled(at)
        return np.array([compiled(random.key(first + k)) for k in range(count)], np.float64)

    def information(target):
        def at(rows):
            unit = jnp.eye(len(point))
            return whitened_hessian(target, unit, point, rows, random.key(0))

        return over_all_data(at, target.model.plates)

    try:
        fine = target_with(2_048, quadrature._TOWARDS_MEAN)
        right = gradients(fine, 2, first=1_000).mean(0)
        cheap = target_with(32, quadrature._TOWARDS_MEAN)
        covariance = np.linalg.inv(np.asarray(cheap.compiled(information)(), np.float64))
        for around, towards_mean, draws in (
            *(("the mode", 0.0, k) for k in (16, 64, 256)),
            *(("the mean", 0.75, k) for k in (8, 16, 32, 1_024)),
        ):
            found = gradients(target_with(draws, towards_mean), keys)
            off = (found - right) @ covariance / np.sqrt(np.diag(covariance))
            bias, noise = off.mean(0), off.std(0, ddof=1)
            yield (
                around, f"{draws:,}", f"{np.abs(bias).max():.2f}",
                f"{np.sqrt((bias**2).mean()):.3f}",
                f"{np.sqrt((noise**2).mean() / keys):.3f}", f"{np.sqrt((noise**2).mean()):.2f}",
            )  # fmt: skip
    finally:
        quadrature._DRAWS, quadrature._TOWARDS_MEAN = 32, 0.75


def simulated_slopes(number, seed):
    rng = np.random.default_rng(seed)
    mu, tau = 0.5 * rng.standard_normal(SLOPES + 1), 0.3 + 0.4 * rng.random(SLOPES + 1)
    b = mu + tau * rng.standard_normal((number, SLOPES + 1))
    x = rng.standard_normal((number, 10, SLOPES + 1)).astype(np.float32)
    x[..., 0] = 1
    p = 1 / (1 + np.exp(-np.einsum("gmk,gk->gm", x, b)))
    y = jnp.asarray(rng.random(p.shape) < p, jnp.float32)
    return jnp.asarray(x), y, mu, tau


def many_slopes(number, seed, samples):
    """The lines of a report: z-scores of what the data were simulated with."""
    x, y, mu, tau = simulated_slopes(number, seed)
    draws, kernel, first, _ = sampled(slopes, x, y, samples=samples, seed=seed + 1)
    yield f"{number:,} groups, {first:.0f} s, least effective sample size {least_size(draws):,.0f}"
    inside = []
    for name, truth in (("mu", mu), ("tau", tau)):
        found = np.asarray(draws[name])
        z = (found.mean((0, 1)) - truth) / found.std((0, 1))
        inside.extend(np.abs(z) < 1.96)
        rms = np.sqrt((z**2).mean())
        yield f"z-scores of {name} at the truth: mean {z.mean():+.2f}, rms {rms:.2f}"
    yield f"in 95 % intervals: {np.mean(inside):.0%} of {len(inside)}"
    yield str(kernel.tuning)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parts = ["flat", "laplace", "errors", "slopes"]
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=500, help="of each of 4 chains, for slopes")
    options = parser.parse_args()
    if "flat" in options.parts:
        header = ["groups", "step of 4 chains", "to 4,000 draws", "least ESS", "mu, tau off, sd"]
        print(table([*header, "integrals off, sd"], list(flat())))
    if "laplace" in options.parts:
        header = ["mu, log tau off, sd", *(f"{number:,} groups" for number in FLAT[:-1])]
        header += [f"{FLAT[-2]:,} of {rows} rows" for rows in MORE_ROWS]
        header += [f"tau, {FLAT[-2]:,} of {ROWS} rows"]
        with jax.enable_x64(True):
            print(table(header, list(laplace())))
    if "errors" in options.parts:
        header = ["draws around", "number", "largest bias, sd", "rms", "its error", "noise of one"]
        print(table(header, list(errors(min(options.groups, 10_000)))))
    if "slopes" in options.parts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for line in many_slopes(options.groups, options.seed, options.samples):
                print(line, flush=True)
        for warning in caught:
            print(f"WARNING: {warning.message}")


if __name__ == "__main__":
    main()
