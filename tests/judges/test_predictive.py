# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Predictive accuracy and calibration from some of the rows, against all of them."""

import arviz as az
from generations import FIRST_GENERATION, arviz_marks, saved
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive
import pytest
from scipy import stats

from numpyro_sgmcmc import SGLD, full_data, to_arviz
from numpyro_sgmcmc.results import loo as predictive
from numpyro_sgmcmc.results.loo import loo

COMPILE_QUICKLY = True

pytestmark = arviz_marks("Estimated shape parameter of Pareto", "look (binary|discrete)")

second_generation = pytest.mark.skipif(FIRST_GENERATION, reason="ArviZ 0.x has no subsampled LOO")
N, CHOSEN = 2_000, 500
KEYS = random.split(random.key(0), 4)
X = random.normal(KEYS[0], (N, 3))
NUMBERS = 1 + X[:, 0] + random.normal(KEYS[1], (N,))

#: Rows in each evaluation of the model that is not only traced.
SEEN = []


def linear(x, y=None, noise=None):
    """With the noise of the data to be found, or assumed."""
    w = numpyro.sample("w", dist.Normal(0, 10).expand([4]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1)) if noise is None else noise
    with numpyro.plate("rows", x.shape[0], subsample_size=50) as i:
        mean = w[0] + x[i] @ w[1:]
        jax.debug.callback(lambda mean: SEEN.append(mean.shape[0]), mean)
        numpyro.sample("y", dist.Normal(mean, scale), obs=None if y is None else y[i])


def drawn(model, *args, **kwargs):
    kernel = NUTS(full_data(model))
    mcmc = MCMC(kernel, num_warmup=200, num_samples=250, num_chains=2,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(KEYS[3], *args, **kwargs)
    return mcmc


def quickly_drawn(model, *args):
    """The draws need not have the right law."""
    mcmc = MCMC(SGLD(model, step_size=1e-4), num_warmup=0, num_samples=40, num_chains=2,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(KEYS[3], *args)
    return mcmc


def values(data, group, name="y"):
    return data[group][name].values


def elpd(found):
    return found.elpd_loo if FIRST_GENERATION else found.elpd


def of_each(found):
    return (found.loo_i if FIRST_GENERATION else found.elpd_i).values


@pytest.fixture(scope="module")
def mcmc():
    return drawn(linear, X, NUMBERS)


@pytest.fixture(scope="module")
def whole(mcmc):
    return az.loo(to_arviz(mcmc, log_likelihood=True), pointwise=True)


def chosen(mcmc):
    return to_arviz(mcmc, log_likelihood=True, posterior_predictive=True, rows=CHOSEN)


@pytest.fixture(scope="module")
def too_sure():
    return drawn(linear, X, NUMBERS, noise=0.6)


@pytest.fixture(scope="module")
def numbers(mcmc, too_sure):
    return {True: chosen(mcmc), False: chosen(too_sure)}


@pytest.mark.slow
def test_loo_is_that_of_all_observations(mcmc, whole):
    found = loo(mcmc, observations=N)
    np.testing.assert_allclose(elpd(found), elpd(whole), rtol=1e-4)
    np.testing.assert_allclose(found.se, whole.se, rtol=1e-2)
    assert found.n_data_points == N


@pytest.mark.nightly
def test_loo_is_estimated_from_some_observations(mcmc, whole):
    found = loo(mcmc, 200, pointwise=True)
    assert abs(elpd(found) - elpd(whole)) < 4 * found.subsampling_se
    # without the log density at a point the error would be that of a sum
    terms = of_each(whole)
    without = N * np.std(terms) / 200**0.5
    assert 0 < found.subsampling_se < without / 20
    np.testing.assert_allclose(found.se, whole.se, rtol=0.2)
    known = np.flatnonzero(np.isfinite(found.pareto_k))
    assert known.size == 200
    np.testing.assert_allclose(of_each(found)[known], terms[known], rtol=1e-4, atol=1e-5)
    if FIRST_GENERATION:
        # those of the others make the sum right
        np.testing.assert_allclose(of_each(found).sum(), elpd(found), rtol=1e-6)


@pytest.mark.nightly
def test_error_of_the_estimated_loo_is_the_one_it_says(mcmc, whole):
    found = [loo(mcmc, 200, rng_key=random.key(k)) for k in range(8)]
    z = [(elpd(one) - elpd(whole)) / one.subsampling_se for one in found]
    # 0.1 % of the law of chi-square on either side, with room for errors in the errors
    assert 0.8 < np.sum(np.square(z)) < 35


@second_generation
@pytest.mark.parametrize("chunk", [10_000, 300])
def test_loo_is_from_the_log_density_at_one_point(mcmc, monkeypatch, chunk):
    monkeypatch.setattr(predictive, "_CHUNK", chunk)
    rows = np.array([1_999, 4, 17])
    found = loo(mcmc, rows, pointwise=True)
    draws = mcmc.get_samples()
    w, scale = np.mean(draws["w"], 0), np.exp(np.mean(np.log(draws["scale"])))
    expected = stats.norm.logpdf(NUMBERS, w[0] + X @ w[1:], scale)
    np.testing.assert_allclose(found.elpd_loo_approx, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.loo_subsample_observations, np.sort(rows))


def test_loo_evaluates_no_more_than_it_needs(mcmc, monkeypatch):
    monkeypatch.setattr(predictive, "_CHUNK", 300)
    jax.effects_barrier()
    SEEN.clear()
    loo(mcmc, 20)
    jax.effects_barrier()
    counts = dict(zip(*np.unique(SEEN, return_counts=True), strict=True))
    # the draws, in 32 parts of 16, and the observations; all rows in 7 chunks of 286
    assert counts == {1: 501, 20: 32 * 16 + 1, 286: 7}


def table(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("down", y.shape[0], subsample_size=10, dim=-2) as i:
        with numpyro.plate("across", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def vectors(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=10) as i:
        numpyro.sample("y", dist.MultivariateNormal(scale_tril=jnp.diag(scale)), obs=y[i])


def crossed(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    down = numpyro.plate("down", y.shape[0], subsample_size=10, dim=-2)
    with down as i, numpyro.plate("across", y.shape[1], subsample_size=2, dim=-1) as j:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i[:, None], j])


@pytest.mark.nightly
@pytest.mark.parametrize("model, count", [(table, 180), (vectors, 60), (crossed, 180)])
def test_loo_of_observations_of_several_dimensions(model, count):
    mcmc = quickly_drawn(model, X[:60])
    whole = az.loo(to_arviz(mcmc, log_likelihood=True))
    np.testing.assert_allclose(elpd(loo(mcmc, count)), elpd(whole), rtol=1e-4)
    found = loo(mcmc, count // 2)
    assert found.n_data_points == count
    assert abs(elpd(found) - elpd(whole)) < 4 * found.subsampling_se


def two_sites(x, y, t):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=10):
        mean = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))
    with numpyro.plate("others", t.shape[0]):
        numpyro.sample("t", dist.Normal(w[0], 1), obs=t)


@pytest.mark.nightly
def test_loo_of_one_of_several_sites():
    mcmc = quickly_drawn(two_sites, X[:80], NUMBERS[:80], X[:7, 1])
    whole = to_arviz(mcmc, log_likelihood=True)
    for name in ("y", "t"):
        found = loo(mcmc, var_name=name)
        expected = az.loo(whole, var_name=name)
        np.testing.assert_allclose(elpd(found), elpd(expected), rtol=1e-4)
    for name in (None, "w"):
        with pytest.raises(ValueError, match=rf"`var_name={name!r}` .* \['y', 't'\]"):
            loo(mcmc, var_name=name)
    with pytest.raises(ValueError, match=r"80 draws x 7 values = 560.*subsample_size"):
        loo(mcmc, var_name="t", max_values=559)


def test_loo_that_would_not_fit(mcmc):
    assert loo(mcmc, 100, max_values=500 * 100).subsample_size == 100
    with pytest.raises(ValueError, match="500 draws x 101 values"):
        loo(mcmc, 101, max_values=500 * 100)


def test_observations_that_are_refused(mcmc):
    with pytest.raises(ValueError, match="1 of the 2 row numbers of site 'y' are out of range"):
        loo(mcmc, [5, N])


def test_only_what_is_known_can_be_read():
    known = predictive._only_known(np.arange(6.0).reshape(2, 3), {1: np.array([2, 5, 6])}, (2, 9))
    xr = pytest.importorskip("xarray")
    array = xr.DataArray(known, dims=("draw", "rows"))
    assert array.shape == (2, 9)
    np.testing.assert_array_equal(array.isel(rows=[6, 2], draw=1), [5, 3])
    with pytest.raises(IndexError, match="computed for only 3 of 9 rows"):
        array.isel(rows=[2, 3]).load()


@pytest.mark.nightly
def test_models_are_compared_by_the_same_observations(mcmc, too_sure):
    def ranked(observations):
        models = {"right": mcmc, "too sure": too_sure}
        return az.compare({k: loo(v, observations, pointwise=True) for k, v in models.items()})

    found, expected = ranked(300), ranked(N)
    assert list(found.index) == ["right", "too sure"]
    difference = abs(found["elpd_diff"].iloc[1] - expected["elpd_diff"].iloc[1])
    if FIRST_GENERATION:
        one, other = (loo(x, 300, pointwise=True) for x in (mcmc, too_sure))
        assert difference < 4 * np.hypot(one.subsampling_se, other.subsampling_se)
        np.testing.assert_allclose(found["dse"].iloc[1], expected["dse"].iloc[1], rtol=0.05)
    else:
        assert difference < 4 * float(found["subsampling_dse"].iloc[1])


def uniform(pit):
    """Whether it may be, by the test of Kolmogorov and Smirnov at a level of 0.1 %."""
    return stats.kstest(np.ravel(pit), "uniform").statistic < 1.95 / np.size(pit) ** 0.5


@pytest.mark.nightly
def test_pit_of_a_right_model_is_uniform_and_of_a_wrong_one_not(numbers):
    for is_right, data in numbers.items():
        y, w = values(data, "observed_data"), values(data, "posterior", "w")
        noise = values(data, "posterior", "scale")[..., None] if is_right else 0.6
        rows = data["observed_data"].coords["rows"].values
        np.testing.assert_array_equal(y, NUMBERS[rows])
        mean = w[..., :1] + np.einsum("cdk,nk->cdn", w[..., 1:], X[rows])
        exact = stats.norm.cdf(y, mean, noise).mean((0, 1))
        pit = (values(data, "posterior_predictive") <= y).mean((0, 1))
        z = (pit - exact) / np.sqrt(exact * (1 - exact) / 500)
        # where nothing is expected below or above the error is not normal
        assert np.mean(z[(exact > 0.01) & (exact < 0.99)] ** 2) < 1.3
        assert uniform(pit) == uniform(exact) == is_right


def test_loo_pit_of_a_right_model_is_uniform_and_of_a_wrong_one_not(numbers):
    for is_right, data in numbers.items():
        pit = az.loo_pit(data, y="y") if FIRST_GENERATION else az.loo_pit(data)["y"]
        assert pit.shape == (CHOSEN,) and uniform(pit) == is_right


PICTURES = (
    [
        ("numbers", "plot_loo_pit", {"y": "y"}),
        ("numbers", "plot_loo_pit", {"y": "y", "ecdf": True}),
        ("numbers", "plot_bpv", {"kind": "u_value"}),
        ("numbers", "plot_ppc", {"num_pp_samples": 20}),
    ]
    if FIRST_GENERATION
    else [
        ("numbers", "plot_loo_pit", {}),
        ("numbers", "plot_ppc_pit", {}),
        ("numbers", "plot_ppc_tstat", {}),
    ]
)


@pytest.mark.parametrize("which, name, options", PICTURES)
def test_pictures(which, name, options, request, tmp_path):
    data = request.getfixturevalue(which)
    picture = getattr(az, name)(data[True], **options)
    assert saved(picture, tmp_path / "picture.png") > 2_500


def test_predictions_for_new_data(mcmc):
    """``Predictive`` over the full-data view: as many rows as the new data have."""
    new = jnp.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    found = Predictive(full_data(linear), mcmc.get_samples())(random.key(5), new)["y"]
    draws = mcmc.get_samples()
    assert found.shape == (500, 3)
    mean = np.asarray(draws["w"][:, :1] + draws["w"][:, 1:] @ new.T)
    z = (found - mean) / draws["scale"][:, None]
    assert np.all(np.abs(z.mean(0)) < 4 / 500**0.5)
    assert np.all(np.abs((z**2).mean(0) - 1) < 4 * (2 / 500) ** 0.5)
