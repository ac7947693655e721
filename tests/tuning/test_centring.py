# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Coordinates of hierarchies: a change of variables, whatever the model, and the right law."""

import warnings

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform, ExpTransform
from numpyro.handlers import reparam as reparam_handler
from numpyro.infer import MCMC, init_to_uniform
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
import pytest
from runs import run_mcmc, target_of

from numpyro_sgmcmc import SGHMC, CCAdL
from numpyro_sgmcmc.diagnostics.comparison import variance_of
from numpyro_sgmcmc.diagnostics.runs import effective_sizes
from numpyro_sgmcmc.posterior import coordinates, reparam
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.stein import stein_report
from numpyro_sgmcmc.tuning.center import search_center
from numpyro_sgmcmc.tuning.find_reparam import _is_shared, find_centring, non_centred

COMPILE_QUICKLY = True

GROUPS, EACH = 6, 40
RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(GROUPS), EACH)
Y = (1 + 0.5 * RNG.standard_normal(GROUPS))[GROUP] + RNG.standard_normal(len(GROUP))
FREQUENCIES = np.array([0.1, 0.5, 2.0, 10.0, 50.0, 200.0])
DATA = jnp.asarray(GROUP), jnp.asarray(Y, jnp.float32)


def hierarchy(effects):
    """Group means, with effects of some kind."""

    def model(group, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        x = effects(mu, tau)
        with numpyro.plate("rows", len(y), subsample_size=40) as i:
            numpyro.sample("y", dist.Normal(x[group[i]], 1), obs=y[i])

    return model


def effects_of(law):
    def effects(mu, tau):
        with numpyro.plate("groups", GROUPS):
            return numpyro.sample("x", law(mu, tau))

    return effects


def standard():
    return numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS]).to_event(1))


def correlated(mu, tau):
    factor = jnp.linalg.cholesky(jnp.eye(GROUPS) + 0.5)
    return numpyro.sample("x", dist.MultivariateNormal(mu, scale_tril=tau * factor))


def nested(mu, tau):
    above = numpyro.sample("above", dist.Normal(mu, tau).expand([2]).to_event(1))
    tau2 = numpyro.sample("tau2", dist.HalfNormal(1))
    return jnp.repeat(above, 3) + tau2 * standard()


def shrunk(mu, tau):
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([GROUPS]).to_event(1))
    return mu + standard() * tau * local


def scaled_twice(mu, tau):
    """Its own scale, and another one in the model."""
    z = numpyro.sample("z", dist.Laplace(0, tau).expand([GROUPS]).to_event(1))
    return mu - z / (1 + tau)


def transformed(mu, tau):
    base = dist.Normal(jnp.zeros(GROUPS), 1)
    law = dist.TransformedDistribution(base, [AffineTransform(mu, tau), ExpTransform()])
    return jnp.log(numpyro.sample("x", law.to_event(1)))


def correlations(size=3):
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([size]).to_event(1))
    return sd, numpyro.sample("root", dist.LKJCholesky(size, 1.0))


def standard_pairs(shape):
    return numpyro.sample("z", dist.Normal(0, 1).expand(shape).to_event(2))


def slopes_of(mu, tau):
    """Correlated effects of two groups with three each, by a Cholesky factor."""
    sd, root = correlations()
    return mu + (standard_pairs([2, 3]) @ (sd[:, None] * root).T).ravel()


def slopes_of_columns(mu, tau):
    """The same in columns, with scales after the product."""
    sd, root = correlations()
    return (mu - sd[:, None] * (root @ standard_pairs([3, 2]))).T.ravel()


def reparametrised(strategy):
    def effects(mu, tau):
        with reparam_handler(config={"x": strategy}):
            return effects_of(dist.Normal)(mu, tau)

    return effects


def affine(mu, tau):
    law = dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(mu, tau))
    with reparam_handler(config={"x": TransformReparam()}), numpyro.plate("groups", GROUPS):
        return numpyro.sample("x", law)


def spectral(mu, tau):
    """The scales of a smooth process, which underflow for high frequencies."""
    return mu * 0 + jnp.exp(-((tau * FREQUENCIES) ** 2)) * standard()


CASES = {
    "centred": (effects_of(dist.Normal), {"x": []}),
    "heavy tails": (effects_of(lambda mu, tau: dist.StudentT(4, mu, tau)), {"x": []}),
    "positive": (lambda *a: jnp.log(effects_of(dist.LogNormal)(*a)), {"x": []}),
    "transformed": (transformed, {"x": []}),
    "correlated": (correlated, {"x": []}),
    "by hand": (lambda mu, tau: mu + tau * standard(), {"z": ["rmul", "radd"]}),
    "by hand, other order": (lambda mu, tau: -(standard() * tau - mu), {"z": ["mul", "sub"]}),
    "nested": (nested, {"above": [], "z": ["rmul", "radd"]}),
    "shrunk": (shrunk, {"z": ["mul", "mul", "radd"]}),
    "scaled twice": (scaled_twice, {"z": ["div", "rsub"]}),
    "LocScaleReparam": (
        reparametrised(LocScaleReparam(0)),
        {"x_decentered": ["sub", "rmul", "radd"]},
    ),
    "LocScaleReparam, halfway": (
        reparametrised(LocScaleReparam(0.5)),
        {"x_decentered": []},  # its own scale depends on tau
    ),
    "a Cholesky factor": (slopes_of, {"z": ["dot_general"]}),
    "its columns": (slopes_of_columns, {"z": ["rdot_general", "rmul", "rsub"]}),
    "TransformReparam": (affine, {"x_base": ["rmul", "radd"]}),
    "spectral": (spectral, {"z": ["rmul", "radd"]}),
}

#: Hierarchies that these coordinates do not know.
OTHERS = {
    "a known matrix": lambda mu, tau: mu + (0.9 * jnp.eye(GROUPS) + 0.1) @ standard(),
    "known scale": lambda mu, tau: effects_of(lambda mu, tau: dist.Normal(mu, 1))(mu, tau) * 1,
    "known factor": lambda mu, tau: mu + tau + 2.0 * standard(),
}


def read(effects):
    return target_of(hierarchy(effects), *DATA)


def point_of(target):
    return target.unravel(0.4 * random.normal(random.key(1), (target.model.dimension,)))


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_what_is_recognised(case):
    effects, expected = CASES[case]
    target = read(effects)
    found = target.hierarchy(point_of(target)).sites
    assert {name: [kind for kind, *_ in site.steps] for name, site in found.items()} == expected
    assert set(non_centred(target).centring) == set(expected)


@pytest.mark.parametrize("double", [False, True])
def test_numbers_of_the_precision_of_the_model(double):
    """NumPyro's map to a Cholesky factor takes no others."""

    def with_correlations(mu, tau):
        numpyro.sample("root", dist.LKJCholesky(3, 1.0))
        return effects_of(dist.Normal)(mu, tau)

    with jax.enable_x64(double):
        assert set(non_centred(read(with_correlations)).centring) == {"x"}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not(case):
    target = read(OTHERS[case])
    assert not target.hierarchy(point_of(target)).sites
    assert not non_centred(target).centring


def two_uses(mu, tau):
    z = standard()
    return mu + tau * z + z**2


def test_a_value_that_is_used_twice_is_not_followed():
    target = read(two_uses)
    assert not target.hierarchy(point_of(target)).sites


def test_a_factor_of_either_sign_is_no_scale():
    """Coordinates would be parted where it is zero; a factor that is negative is minus a scale."""

    def product(mu, tau):
        return numpyro.sample("slope", dist.Normal(0, 1)) * standard()

    def negative(mu, tau):
        return mu - tau * standard()

    def turned(mu, tau):
        root = jnp.array([[jnp.cos(tau), -jnp.sin(tau)], [jnp.sin(tau), jnp.cos(tau)]])
        return mu + (root @ standard_pairs([2, 3])).ravel()

    def full(mu, tau):
        return mu + (tau * (0.9 * jnp.eye(GROUPS) + 0.1)) @ standard()

    def cut_off(mu, tau):
        return mu + jax.nn.relu(tau - 1) * standard()

    def cut_off_alone(mu, tau):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
        return mu + jax.nn.relu(a) * standard()

    assert not non_centred(read(cut_off_alone)).centring
    assert not non_centred(read(product)).centring
    assert not non_centred(read(cut_off)).centring
    assert not non_centred(read(turned)).centring
    assert not non_centred(read(full)).centring
    assert set(non_centred(read(negative)).centring) == {"z"}


def test_what_comes_after_a_scale_does_not_matter():
    """Neither a matrix without an order, nor a sum with a factor of either sign."""

    def loaded(mu, tau):
        loadings = numpyro.sample("loadings", dist.Normal(0, 1).expand([6, 6]).to_event(2))
        return loadings @ effects_of(dist.Normal)(0.0, tau)

    def turned(mu, tau):
        return (loadings := jnp.eye(GROUPS) + mu) @ (tau * standard()) + loadings[0]

    def sloped(mu, tau):
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
        means = numpyro.sample("means", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
        return slope * (means + effects_of(dist.Normal)(0.0, tau))

    found = [set(non_centred(read(case)).centring) for case in (loaded, turned, sloped)]
    assert found == [{"x"}, {"z"}, {"x"}]


def test_a_factor_of_zero_next_to_a_location():
    """The effect still says what the value is."""

    def masked(mu, tau):
        return 3.0 + mu + tau * np.array([1.0, 1, 1, 1, 1, 0]) * standard()

    target = non_centred(read(masked))
    assert set(target.centring) == {"z"}
    values = point_of(target) | {"z": jnp.full(GROUPS, 0.5)}
    anchor = target.expansion(target.written(values).effects)
    gradient = target.from_effects(values, anchor.gradient)
    assert abs(gradient["z"][-1] - 0.5) < 0.02


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        (lambda tau: tau * np.arange(1, 9), True),
        (lambda tau: np.where(np.arange(5) == 0, 10.0, tau), True),
        (lambda tau: np.tile(np.concatenate([tau, tau**2], 1), 6), True),
        (lambda tau: np.exp(-((tau * np.arange(1, 9)) ** 2)), False),
        (lambda tau: np.exp(-((tau * np.arange(1, 9).repeat(2)) ** 2)), False),
        (lambda tau: np.sqrt(1 + tau * np.linspace(0.1, 3, 3_000)), False),
        (lambda tau: np.where(tau > np.median(tau), np.inf, tau) * np.ones(8), True),
    ],
)
def test_scales_that_effects_share(scales, expected):
    """A scale, two scales of six effects each; a process, one in pairs, a map; an overflow."""
    tau = np.exp(np.random.default_rng(0).standard_normal((16, 1)))
    with np.errstate(under="ignore"):
        assert _is_shared(scales(tau)) is expected


def test_effects_that_scale_each_other():
    """Of two coordinates that would need each other, one is left out."""

    def effects(mu, tau):
        z, u = (numpyro.sample(k, dist.Normal(0, 1).expand([GROUPS]).to_event(1)) for k in "zu")
        return mu + z * jnp.exp(u)

    def circle(mu, tau):
        z, u = (numpyro.sample(k, dist.Normal(0, 1).expand([GROUPS]).to_event(1)) for k in "zu")
        x, v = z * tau, u * tau
        return mu + x * jnp.exp(v)

    target = read(effects)
    assert set(target.hierarchy(point_of(target)).sites) == {"z"}
    target = read(circle)
    sites = target.hierarchy(point_of(target)).sites
    assert set(sites) == {"u", "z"}
    assert [kind for kind, *_ in sites["u"].steps] == ["mul"]


def with_degrees(target):
    """Some coordinates for each entry."""
    values = point_of(target)
    names = target.hierarchy(values).sites

    def some(shape):
        degree, scale, estimate = random.uniform(random.key(2), (3, *shape))
        return coordinates.Coordinates(degree, 0.5 + scale, estimate - 0.5)

    return target._replace(centring={name: some(values[name].shape) for name in names})


def density_defect(target):
    """How far the potential in the coordinates is from a change of variables."""
    written = target._replace(centring={})
    z, rows, key = point_of(target), target.model.first_rows(), random.key(0)
    y, unravel = ravel_pytree(target.to_internal(z))
    jacobian = jax.jacobian(lambda y: ravel_pytree(target.from_internal(unravel(y)))[0])(y)
    here, there = (t.potential(IdentityMetric()) for t in (target, written))
    expected = there(z, rows, key) - jnp.linalg.slogdet(jacobian)[1]
    return float(jnp.abs(here(unravel(y), rows, key) - expected))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_change_of_variables(case):
    target = with_degrees(read(CASES[case][0]))
    z = point_of(target)
    back = target.from_internal(target.to_internal(z))
    for name in z:
        np.testing.assert_allclose(back[name], z[name], atol=2e-5)
    assert density_defect(target) < 2e-3
    # row by row, and by value and gradient, it is the same potential
    y, rows, key = target.to_internal(z), target.model.first_rows(), random.key(0)
    potential = target.potential(IdentityMetric())
    energy, gradient = potential.value_and_gradient(y, rows, key)
    whole, terms = potential.with_row_terms(y, rows, key)
    np.testing.assert_allclose(whole, energy, rtol=1e-5)
    assert terms["rows"].shape == (40,) and set(gradient) == set(z)
    for name, slope in jax.grad(potential)(y, rows, key).items():
        np.testing.assert_allclose(gradient[name], slope, rtol=1e-3, atol=1e-3)


def test_a_forgotten_determinant_is_noticed(monkeypatch):
    target = with_degrees(read(CASES["centred"][0]))
    from numpyro_sgmcmc.posterior import potential

    whole = reparam.from_internal
    monkeypatch.setattr(
        potential, "from_internal", lambda *a, **b: whole(*a, **b)._replace(log_det=0.0)
    )
    assert density_defect(target) > 0.05


def slopes(target, anchor, y):
    """The gradient on each of the minibatches that all rows make."""
    potential, key = target.potential(IdentityMetric(), anchor), random.key(0)
    rows = jnp.arange(len(Y)).reshape(-1, 40)
    gradient = jax.jit(jax.vmap(lambda i: potential.value_and_gradient(y, {"rows": i}, key)[1]))
    return np.stack(
        [ravel_pytree(jax.tree.map(lambda x: x[k], gradient(rows)))[0] for k in range(6)]
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "order"),
    [("centred", 2), ("by hand", 1), ("nested", 2), ("its columns", 2)],
)
def test_a_control_variate_in_coordinates_that_bend(case, order):
    """Its mean is the gradient of all data; and normal rows are quadratic in effects."""
    target = with_degrees(read(CASES[case][0]))
    z = point_of(target)

    @jax.jit
    def places(z):
        away = jax.tree.map(lambda x: x + 0.3, z)
        effects = target.centred.to_internal(z)
        return target.anchor(effects, order), target.to_internal(away)

    anchor, y = places(z)
    plain, controlled = (slopes(target, kind, y) for kind in (None, anchor))
    np.testing.assert_allclose(controlled.mean(0), plain.mean(0), rtol=1e-4, atol=5e-3)
    noise = [np.abs(x - x.mean(0)).max() for x in (plain, controlled)]
    assert noise[0] > 10
    assert order == 1 or noise[1] < 1e-3 * noise[0]
    # and what is differentiated is what is said, also row by row
    potential, rows = target.potential(IdentityMetric(), anchor), {"rows": jnp.arange(40)}
    at = jax.jit(lambda y: jax.value_and_grad(potential)(y, rows, random.key(0)))
    energy, slope = at(y)
    expected = ravel_pytree(slope)[0]
    np.testing.assert_allclose(controlled[0], expected, rtol=1e-3, atol=5e-3)
    whole, terms = jax.jit(lambda y: potential.with_row_terms(y, rows, random.key(0)))(y)
    np.testing.assert_allclose(whole, energy, rtol=1e-4)
    assert terms["rows"].shape == (40,)


def test_coordinates_in_which_effects_and_scale_are_independent():
    """Of normal effects with normal rows: the same law of y for any scale, which x has not."""
    precision, estimate, mu = 3.0, 1.4, 0.5
    law = []
    for scale in (0.05, 0.5, 5.0):
        variance = 1 / (scale**-2 + precision)
        mean = variance * (mu * scale**-2 + precision * estimate)
        around = coordinates.Around(0.0, 1.0, mu, scale, scale)
        degree = precision / (precision + 0.5**-2)
        there = coordinates.Coordinates(degree, 0.5, degree * estimate)
        ends = [(mean + k * variance**0.5 - mu) / scale for k in (-1, 1)]
        law.append([float(around.coordinate(u, there)) for u in ends])
    np.testing.assert_allclose(law, np.tile([-1, 1], (3, 1)) * (1 - degree) ** 0.5, atol=1e-5)


@pytest.mark.nightly
def test_degrees_are_those_of_the_rows():
    """The part of a group's precision that comes from its rows, here of 4 to 1,000."""
    sizes = np.array([4, 10, 30, 100, 300, 1_000])
    group = np.repeat(np.arange(GROUPS), sizes)
    y = RNG.standard_normal(len(group)) + 0.5 * RNG.standard_normal(GROUPS)[group]

    def model(group, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.LogNormal(np.log(0.3), 0.01))
        x = effects_of(dist.Normal)(mu, tau)
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[group[i]], 1), obs=y[i])

    data = jnp.asarray(group), jnp.asarray(y, jnp.float32)
    target = non_centred(target_of(model, *data))
    target, _ = find_centring(target, search_center(target, random.key(0), init_to_uniform))
    known = 0.3**2 * sizes
    expected = np.where(known < 4, known / (1 + known), 1.0)
    np.testing.assert_allclose(target.centring["x"].degree, expected, atol=0.1)


def _moments(y=Y):
    """Of mu and tau, by a grid: the group means have a Gaussian law given both."""
    mu, t = np.meshgrid(np.linspace(-1, 3, 400), np.linspace(-9, 1.5, 1_000), indexing="ij")
    tau = np.exp(t)
    means = y.reshape(GROUPS, EACH).mean(1)
    variance = tau[..., None] ** 2 + 1 / EACH
    log_p = -0.5 * ((means - mu[..., None]) ** 2 / variance + np.log(variance)).sum(-1)
    log_p += -0.5 * (mu / 2) ** 2 - 0.5 * tau**2 + t
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    found = {}
    for name, x in (("mu", mu), ("tau", tau)):
        mean = (p * x).sum()
        found[name] = mean, np.sqrt((p * (x - mean) ** 2).sum())
    return found


EXPECTED = _moments()


def run(case, samples=1_500, kernel=CCAdL, **options):
    mcmc = MCMC(
        kernel(hierarchy(CASES[case][0]), progress_bar=False, **options),
        num_warmup=300,
        num_samples=samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mcmc.run(random.key(1), *DATA)
    return mcmc


@pytest.fixture(scope="module")
def by_hand():
    return run("by hand")


def check_moments(draws, expected=EXPECTED, least=1_000):
    """Within 3.5 standard errors, and 2 % for the error of the step size, of second order."""
    for name, (mean, sd) in expected.items():
        x = np.asarray(draws[name], float)[..., None]
        variance, error = variance_of(x)
        size = effective_sizes(x)
        assert size > least
        assert abs(x.mean() - mean) / sd < 3.5 / size**0.5 + 0.02
        assert abs(variance**0.5 / sd - 1) < 3.5 * error / 2 + 0.02


def check_law(mcmc, names):
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == names
    assert stein_report(mcmc.last_state.monitor.stein).problem() is None
    check_moments(draws, least=1_500)


@pytest.mark.slow
def test_exact_law(by_hand):
    """The draws have the moments of a grid."""
    check_law(by_hand, {"mu", "tau", "z"})
    assert "coordinates of 'z': centred by" in str(by_hand.sampler.tuning)


@pytest.mark.nightly
def test_effects_are_reported_as_written(by_hand):
    """Draws of effects go with those of location and scale, through the sites of the model."""
    centred = run("centred")
    check_law(centred, {"mu", "tau", "x"})
    draws = by_hand.get_samples(group_by_chain=True)
    found = np.asarray(centred.get_samples(group_by_chain=True)["x"], float)
    other = np.asarray(draws["mu"][..., None] + draws["tau"][..., None] * draws["z"], float)
    scale, size = found.std((0, 1)), np.minimum(effective_sizes(found), effective_sizes(other))
    off = np.abs(found.mean((0, 1)) - other.mean((0, 1))) / scale
    assert (off < 3.5 * (2 / size) ** 0.5 + 0.02).all()
    errors = np.hypot(variance_of(found)[1], variance_of(other)[1]) / 2
    assert (np.abs(scale / other.std((0, 1)) - 1) < 3.5 * errors + 0.02).all()


@pytest.mark.nightly
def test_an_anchor_that_moves():
    """It is made of the draws as written, and belongs to the coordinates."""
    mcmc = run("by hand", 1_000, SGHMC, gradient=("control_variate", 5))
    check_moments(mcmc.get_samples(group_by_chain=True))


@pytest.mark.nightly
def test_a_tuning_is_used_again(by_hand):
    """By another kernel, with other data: the coordinates are part of it."""
    tuning = by_hand.sampler.tuning
    others = DATA[0], DATA[1] + 0.1
    kernel = CCAdL(hierarchy(CASES["by hand"][0]), tuning=tuning, progress_bar=False)
    mcmc = run_mcmc(kernel, *others, key=1, warmup=100, samples=2_000)
    assert stein_report(mcmc.last_state.monitor.stein).problem() is None
    used = mcmc.last_state.fixed.centring["z"]
    for found, expected in zip(used, tuning.centring["z"], strict=True):
        np.testing.assert_array_equal(found, expected)
    check_moments(mcmc.get_samples(group_by_chain=True), _moments(Y + 0.1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{"metric": np.full(GROUPS + 2, 0.05, np.float32)}, {"reparametrise": False}]
)
def test_coordinates_as_written(options):
    """Where they are asked for, and where a metric is given, which is one of them."""
    kernel = CCAdL(hierarchy(CASES["centred"][0]), progress_bar=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not kernel.tune(random.key(0), *DATA).centring
