# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Effects with a local scale each: what is recognised, exact integrals over scales, and the law."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from runs import target_of
from scipy.special import logsumexp
from scipy.stats import kstest, norm

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior import scale_mixture
from numpyro_sgmcmc.posterior.coordinates import mixtures_of
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.tuning.find_reparam import non_centred

GROUPS, EACH = 6, 40
RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(GROUPS), EACH)
MEANS = np.array([0.0, 0.05, -0.1, 0.4, 3.0, -1.0])
Y = MEANS[GROUP] + RNG.standard_normal(len(GROUP))
DATA = jnp.asarray(GROUP), jnp.asarray(Y, jnp.float32)


def model_of(effects):
    def model(group, y):
        tau = numpyro.sample("tau", dist.HalfCauchy(0.5))
        x = effects(tau)
        with numpyro.plate("rows", len(y), subsample_size=40) as i:
            numpyro.sample("y", dist.Normal(x[group[i]], 1), obs=y[i])

    return model


def each(law):
    return law.expand([GROUPS]).to_event(1)


def local(law=None):
    return numpyro.sample("local", each(law or dist.HalfCauchy(1.0)))


def standard():
    return numpyro.sample("z", each(dist.Normal(0, 1)))


def regularised(tau):
    scale = tau * local()
    return standard() * scale / jnp.sqrt(1 + scale**2 / 4)


def in_a_plate(tau):
    with numpyro.plate("effects", GROUPS):
        scale = numpyro.sample("local", dist.HalfCauchy(tau))
        return numpyro.sample("z", dist.Normal(0, scale))


def tails_of_degrees(tau):
    return standard() * tau * local(dist.TruncatedDistribution(dist.StudentT(3.0), low=0.0))


FAMILIES = {
    "half-Cauchy": lambda tau: standard() * tau * local(),
    "regularised": regularised,
    "centred": lambda tau: numpyro.sample("z", dist.Normal(0, tau * local()).to_event(1)),
    "in a plate": in_a_plate,
    "with a mean": lambda tau: 0.5 - tau * local() * standard(),
    "half-normal": lambda tau: standard() * tau * local(dist.HalfNormal(2.0)),
    "half-t": tails_of_degrees,
    "narrow": lambda tau: standard() * tau * local(dist.LogNormal(0.0, 0.1)),
    "precisions": lambda tau: standard() * tau / jnp.sqrt(local(dist.Gamma(0.5, 0.5))),
    "Laplace": lambda tau: standard() * tau * jnp.sqrt(2 * local(dist.Exponential(1.0))),
    "Student's t": lambda tau: standard() * tau * jnp.sqrt(local(dist.InverseGamma(2.0, 2.0))),
}


def r2d2(tau):
    """The shares of a Dirichlet distribution times a Gamma variable are independent."""
    rate = numpyro.sample("rate", dist.Gamma(0.5, 1.0))
    return standard() * tau * jnp.sqrt(local(dist.Gamma(0.5, rate)))


FAMILIES["R2-D2"] = r2d2


def mixture_of(scales):
    share = numpyro.sample("share", dist.Beta(1.0, 4.0))
    weights = dist.Categorical(probs=jnp.stack([1 - share, share]))
    return dist.MixtureSameFamily(weights, dist.Normal(0.0, scales))


def spike_and_slab(tau):
    return numpyro.sample("z", each(mixture_of(jnp.stack([0.05 * tau, tau]))))


def times_its_scale(tau):
    return 0.5 - tau * numpyro.sample(
        "z",
        each(
            mixture_of(
                jnp.array(
                    [
                        0.1,
                        1.0,
                    ]
                )
            )
        ),
    )


def one_by_one(tau):
    weights, parts = dist.Categorical(probs=jnp.array([0.5, 0.5])), [0.2 * tau, 5 * tau]
    law = dist.MixtureGeneral(weights, [dist.Normal(0.0, scale) for scale in parts])
    with numpyro.plate("effects", GROUPS):
        return numpyro.sample("z", law)


#: Effects whose scale has been summed out.
MIXTURES = {
    "spike and slab": spike_and_slab,
    "times its scale": times_its_scale,
    "one by one": one_by_one,
}


def other_locations(tau):
    weights = dist.Categorical(probs=jnp.array([0.5, 0.5]))
    parts = dist.Normal(jnp.array([-1.0, 1.0]), jnp.array([0.1, 1.0]))
    return tau * numpyro.sample("z", each(dist.MixtureSameFamily(weights, parts)))


def heavy_mixture(tau):
    weights = dist.Categorical(probs=jnp.array([0.5, 0.5]))
    parts = dist.StudentT(4.0, 0.0, jnp.stack([0.1 * tau, tau]))
    return numpyro.sample("z", each(dist.MixtureSameFamily(weights, parts)))


def level_above_a_mixture(tau):
    w = spike_and_slab(tau)
    return numpyro.sample("u", dist.Normal(w, 1).to_event(1))


def used_by_another_site(tau):
    scale = local()
    numpyro.sample("other", dist.Normal(scale[0], 1))
    return standard() * tau * scale


def used_by_a_factor(tau):
    scale = local()
    numpyro.factor("other", -jnp.sum(scale))
    return standard() * tau * scale


def used_by_the_rows(tau):
    scale = local()
    return standard() * tau * scale + 0.01 * scale


def of_neighbours(tau):
    return standard() * tau * jnp.roll(local(), 1)


def normalised(tau):
    scale = local()
    return standard() * tau * scale / jnp.sum(scale)


def location(tau):
    scale = local()
    return numpyro.sample("z", dist.Normal(scale, tau * scale).to_event(1))


def heavy(tau):
    return numpyro.sample("z", dist.StudentT(4, 0, tau * local()).to_event(1))


def shared(tau):
    scale = local()
    u = numpyro.sample("u", each(dist.Normal(0, 1)))
    return standard() * tau * scale + u * scale


def any_sign(tau):
    return standard() * tau * (local() - 1)


def of_its_effect(tau):
    z = standard()
    return z * tau * numpyro.sample("local", dist.HalfCauchy(jnp.exp(z)).to_event(1))


def of_another_effect(tau):
    above = numpyro.sample("above", dist.LogNormal(0, tau))
    return standard() * local(dist.HalfCauchy(above))


def counted_twice(tau):
    with numpyro.handlers.scale(scale=2.0):
        scale = local()
    return standard() * tau * scale


def masked(tau):
    with numpyro.handlers.mask(mask=jnp.arange(GROUPS) < 3):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(GROUPS), 1))
    return z * tau * local()


def level_above(tau):
    w = standard() * tau * local()
    return numpyro.sample("u", dist.Normal(w, 1).to_event(1))


OTHERS = {
    "other locations": other_locations,
    "a mixture with heavy tails": heavy_mixture,
    "a level above a mixture": level_above_a_mixture,
    "a level above": level_above,
    "another sign": lambda tau: standard() * tau * (3_000 - local()),
    "steep": lambda tau: numpyro.sample(
        "z", dist.Normal(0, tau * jnp.exp(local(dist.HalfNormal(3.0)))).to_event(1)
    ),
    "vague": lambda tau: standard() * tau * local(dist.Gamma(1e-3, 1e-3)),
    "of its effect": of_its_effect,
    "of another effect": of_another_effect,
    "counted twice": counted_twice,
    "masked": masked,
    "used by another site": used_by_another_site,
    "used by a factor": used_by_a_factor,
    "used by the rows": used_by_the_rows,
    "of neighbours": of_neighbours,
    "normalised": normalised,
    "location": location,
    "Student's t": heavy,
    "two effects": shared,
    "any sign": any_sign,
    "one scale": lambda tau: standard() * tau * numpyro.sample("local", dist.HalfCauchy(1.0)),
}


def read(effects):
    return non_centred(target_of(model_of(effects), *DATA))


@pytest.mark.one_case
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_what_is_recognised(family):
    target = read((FAMILIES | MIXTURES)[family])
    assert set(target.centring) == {"z"} and mixtures_of(target.centring) == ["z"]
    # of 40 rows with standard deviation 1
    np.testing.assert_allclose(target.centring["z"].error, EACH**-0.5, rtol=0.5)


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not(case):
    assert not mixtures_of(read(OTHERS[case]).centring)


def points_of(target, number=4):
    """Points in the coordinates, whose effects differ in size."""
    for k in range(number):
        values = target.unravel(random.normal(random.key(k), (target.model.dimension,)))
        yield values | {"z": 3.0**k / 3 * values["z"]}


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_there_and_back(family):
    target = read((FAMILIES | MIXTURES)[family])
    for values in points_of(target):
        back = target.to_internal(target.from_internal(values))
        for name in values:
            np.testing.assert_allclose(back[name], values[name], rtol=1e-3, atol=1e-3)


def a_scale_for_each(tau):
    """Effects below more values than have derivatives of their own."""
    scales = numpyro.sample("scales", dist.HalfNormal(jnp.ones((2, GROUPS))).to_event(2))
    return standard() * tau * scales.sum(0) * local()


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, "a scale for each"])
def test_gradients(family):
    """The quick gradients of blocks of rows are those of the potential."""
    target = read((FAMILIES | MIXTURES | {"a scale for each": a_scale_for_each})[family])
    key, rows = random.key(0), {"rows": jnp.arange(80).reshape(2, 40)}
    somewhere = target.unravel(0.3 * random.normal(key, (target.model.dimension,)))
    for anchor in (None, target.anchor(target.written(somewhere).effects)):
        potential = target.potential(IdentityMetric(), anchor)

        @jax.jit
        def compared(values, potential=potential):
            quick, whole = potential.value_and_gradient, jax.value_and_grad(potential)
            of_blocks = jax.vmap(lambda i: quick(values, {"rows": i}, key))(rows["rows"])
            right = jax.lax.map(lambda i: whole(values, {"rows": i}, key), rows["rows"])
            return of_blocks, right

        for values in points_of(target):
            (energies, found), (expected, right) = compared(values)
            np.testing.assert_allclose(energies, expected, rtol=1e-5)
            found, right = (ravel_pytree(x)[0] for x in (found, right))
            np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-4 * np.abs(right).max())


@pytest.mark.nightly
def test_derivatives_of_gradients():
    target, key = read(FAMILIES["half-Cauchy"]), random.key(0)
    potential, rows = target.potential(IdentityMetric()), {"rows": jnp.arange(40)}

    @jax.jit
    def compared(values, along):
        quick, whole = (
            jax.jvp(lambda x, f=f: f(x, rows, key), (values,), (along,))[1]
            for f in (lambda *x: potential.value_and_gradient(*x)[1], jax.grad(potential))
        )
        return ravel_pytree(quick)[0], ravel_pytree(whole)[0]

    *points, along = points_of(target)
    for values in points:
        found, right = compared(values, along)
        np.testing.assert_allclose(found, right, rtol=2e-3, atol=1e-4 * np.abs(right).max())


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_integral_over_scales(family):
    """The potential is that of the model, integrated numerically over the local scales."""
    target = read(FAMILIES[family])
    rows, key, spacing = target.model.first_rows(), random.key(0), 0.02
    written = target._replace(centring={}).potential(IdentityMetric())
    centred = target.centred

    @jax.jit
    def compared(values):
        found = target.potential(IdentityMetric())(values, rows, key)
        found = found + jnp.sum(dist.Normal(0, 1).log_prob(values["local"]))
        effects = centred.to_internal(target.from_internal(values))

        def joint(logarithms):
            """The potential of effects and local scales."""
            given = effects | {"local": logarithms}
            slope = jax.jacobian(lambda x: centred.from_internal(given | {"z": x})["z"])
            log_det = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(slope(effects["z"])))))
            return written(centred.from_internal(given), rows, key) - log_det

        def moved(logarithm):
            """The change of the potential if one of the scales is another one."""
            others = jnp.where(jnp.eye(GROUPS, dtype=bool), logarithm, effects["local"])
            return jax.vmap(joint)(others) - joint(effects["local"])

        ratios = jnp.exp(-jax.lax.map(moved, jnp.arange(-25.0, 25.0, spacing))).sum(0) * spacing
        derivative = jax.jacobian(
            lambda y: centred.to_internal(target.from_internal(values | {"z": y}))["z"]
        )
        log_det = jnp.sum(jnp.log(jnp.diagonal(derivative(values["z"]))))
        return found, joint(effects["local"]) - jnp.sum(jnp.log(ratios)) - log_det

    for values in points_of(target):
        found, expected = compared(values)
        np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.one_case
@pytest.mark.parametrize("family", MIXTURES)
def test_the_potential_of_a_mixture(family):
    """The potential of the coordinates is that of the model, with the determinant of the map."""
    target = read(MIXTURES[family])
    rows, key = target.model.first_rows(), random.key(0)
    written = target._replace(centring={}).potential(IdentityMetric())

    @jax.jit
    def compared(values):
        found = target.potential(IdentityMetric())(values, rows, key)
        slope = jax.jacobian(lambda y: target.from_internal(values | {"z": y})["z"])(values["z"])
        log_det = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(slope))))
        return found, written(target.from_internal(values), rows, key) - log_det

    for values in points_of(target):
        found, expected = compared(values)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["half-Cauchy", "half-t", "half-normal"])
def test_the_law_of_local_scales(family):
    """Given effects, a local scale is drawn from its conditional distribution."""
    target = read(FAMILIES[family])
    values = next(points_of(target))
    tau = float(jnp.exp(values["tau"]))
    v = random.normal(random.key(3), (20_000, GROUPS))
    draws = jax.jit(jax.vmap(lambda v: target.from_internal(values | {"local": v})))(v)
    logs = np.asarray(draws["local"])
    x = float(draws["z"][0, 0] * tau * jnp.exp(draws["local"][0, 0]))
    law = {
        "half-Cauchy": dist.HalfCauchy(1.0),
        "half-normal": dist.HalfNormal(2.0),
        "half-t": dist.TruncatedDistribution(dist.StudentT(3.0), low=0.0),
    }[family]
    grid = np.arange(-30, 25, 0.01)
    log_p = np.asarray(law.log_prob(np.exp(grid)), float) + grid
    log_p += norm.logpdf(x, 0, tau * np.exp(grid))
    p = np.exp(log_p - log_p.max())
    cdf = np.cumsum(p) / p.sum()
    assert kstest(logs[:, 0], lambda t: np.interp(t, grid, cdf)).pvalue > 1e-3
    # the distribution without what the effect says is another one
    alone = np.exp(np.asarray(law.log_prob(np.exp(grid)), float) + grid)
    alone = np.cumsum(alone) / alone.sum()
    assert kstest(logs[:, 0], lambda t: np.interp(t, grid, alone)).pvalue < 1e-3


@pytest.mark.nightly
def test_derivatives():
    """Of the inverse, by differences; and none is lost at zero or far out."""
    target = read(FAMILIES["regularised"])
    potential, rows = target.potential(IdentityMetric()), target.model.first_rows()

    def energy(values):
        return potential(values, rows, random.key(0))

    for values in points_of(target):
        flat, unravel = ravel_pytree(values)
        step = random.normal(random.key(9), flat.shape)
        slope = jax.jit(jax.grad(lambda x: energy(unravel(x))))
        up, down = (energy(unravel(flat + h * step)) for h in (1e-2, -1e-2))
        np.testing.assert_allclose((up - down) / 2e-2, slope(flat) @ step, rtol=2e-2, atol=0.5)
        _, product = jax.jvp(slope, (flat,), (step,))
        ahead, behind = (slope(flat + h * step) for h in (1e-2, -1e-2))
        scale = float(jnp.abs(product).max())
        np.testing.assert_allclose((ahead - behind) / 2e-2, product, atol=0.03 * scale)
    for size in (0.0, 1e-6, 1e3):
        values = {k: jnp.full_like(x, size) for k, x in values.items()} | {"tau": jnp.array(-3.0)}
        assert all(bool(jnp.isfinite(x).all()) for x in jax.grad(energy)(values).values())


@pytest.mark.nightly
def test_the_gradient_of_the_effects_is_one_of_the_coordinates():
    target = read(FAMILIES["regularised"])
    rows, key = target.model.first_rows(), random.key(0)
    for values in points_of(target):
        effects = target.written(values).effects
        there = jax.grad(target.whole_potential)(effects, rows, key)
        found = target.from_effects(values, there)
        expected = jax.grad(target.potential(IdentityMetric()))(values, rows, key)
        for name in values:
            scale = float(jnp.abs(expected[name]).max()) + 1
            np.testing.assert_allclose(found[name], expected[name], atol=2e-3 * scale)


def moments():
    """Of log tau and of the effects, by a grid of tau: effects are independent given it."""
    means = Y.reshape(GROUPS, EACH).mean(1)
    log_tau, log_scale = np.arange(-12, 6, 0.02), np.arange(-20, 20, 0.02)
    tau = np.exp(log_tau)[:, None]
    weights = np.log(2 / np.pi) + log_scale - np.log1p(np.exp(2 * log_scale))
    variance = (tau * np.exp(log_scale)) ** 2
    log_p = np.log(2 / np.pi) + log_tau - np.log1p((np.exp(log_tau) / 0.5) ** 2)
    each_mean, each_square = [], []
    for mean in means:
        log_terms = weights + norm.logpdf(mean, 0, np.sqrt(variance + 1 / EACH))
        total = logsumexp(log_terms, axis=1)
        shares = np.exp(log_terms - total[:, None])
        part = variance / (variance + 1 / EACH)
        each_mean.append((shares * part * mean).sum(1))
        each_square.append((shares * (part / EACH + (part * mean) ** 2)).sum(1))
        log_p = log_p + total
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = np.array([p @ log_tau, *(p @ m for m in each_mean)])
    square = np.array([p @ log_tau**2, *(p @ s for s in each_square)])
    return mean, np.sqrt(square - mean**2)


def defects(seed=0):
    """Means in standard errors, ratios of standard deviations and their errors."""
    kernel = CCAdL(model_of(FAMILIES["half-Cauchy"]), progress_bar=False)
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=200, num_samples=1_000, **options)
    mcmc.run(random.key(seed), *DATA)
    found = mcmc.get_samples(group_by_chain=True)
    x = found["z"] * (found["tau"][..., None] * found["local"])
    draws = np.concatenate([np.log(found["tau"])[..., None], x], axis=-1)
    mean, sd = moments()
    size = effective_sample_size(draws)
    error = (draws.mean((0, 1)) - mean) / (sd / np.sqrt(size))
    return error, draws.std((0, 1)) / sd, size


@pytest.mark.nightly
def test_law_of_a_horseshoe():
    error, ratio, size = defects()
    assert size.min() > 1_000
    assert np.abs(error).max() < 4
    assert np.abs(ratio - 1).max() < 0.05


@pytest.mark.nightly
def test_a_wrong_density_has_another_law(monkeypatch):
    """Scales that are 1.6 times too large."""
    right = scale_mixture.Mixture.log_density

    def log_density(mixture, log_distance):
        return right(mixture._replace(log_scales=mixture.log_scales + 0.5), log_distance)

    monkeypatch.setattr(scale_mixture.Mixture, "log_density", log_density)
    error, _, _ = defects()
    assert np.abs(error).max() > 10


def moments_of_spikes():
    """Of log tau and of the effects, by a grid of tau and of the share of slabs."""
    means = Y.reshape(GROUPS, EACH).mean(1)
    log_tau, share = np.arange(-8, 6, 0.02)[:, None], np.linspace(0, 1, 402)[1:-1]
    tau = np.exp(log_tau)
    log_p = log_tau - np.log1p((tau / 0.5) ** 2) + 3 * np.log1p(-share)
    weights, scales = (1 - share, share), (0.05 * tau, tau)
    firsts, seconds = [], []
    for mean in means:
        parts = [
            weight * norm.pdf(mean, 0, np.sqrt(scale**2 + 1 / EACH))
            for weight, scale in zip(weights, scales, strict=True)
        ]
        total, first, second = sum(parts), 0.0, 0.0
        for part, scale in zip(parts, scales, strict=True):
            known = scale**2 / (scale**2 + 1 / EACH)
            first = first + part / total * known * mean
            second = second + part / total * (known / EACH + (known * mean) ** 2)
        firsts.append(first)
        seconds.append(second)
        log_p = log_p + np.log(total)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = np.array([(p * x).sum() for x in (log_tau, *firsts)])
    square = np.array([(p * x).sum() for x in (log_tau**2, *seconds)])
    return mean, np.sqrt(square - mean**2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:NUTS is likely to be quicker")
def test_law_of_spike_and_slab():
    kernel = CCAdL(model_of(spike_and_slab), progress_bar=False)
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=200, num_samples=1_000, **options)
    mcmc.run(random.key(0), *DATA)
    found = mcmc.get_samples(group_by_chain=True)
    draws = np.concatenate([np.log(found["tau"])[..., None], found["z"]], axis=-1)
    mean, sd = moments_of_spikes()
    size = effective_sample_size(draws)
    error = (draws.mean((0, 1)) - mean) / (sd / np.sqrt(size))
    assert mixtures_of(kernel.tuning.centring) == ["z"]
    assert size.min() > 1_000
    assert np.abs(error).max() < 4
    assert (np.abs(draws.std((0, 1)) / sd - 1) < 4 / (2 * size) ** 0.5).all()
