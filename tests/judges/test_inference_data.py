# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Results in ArviZ: right on the full data, on both of its generations."""

import subprocess
import sys

import arviz as az
from generations import FIRST_GENERATION, arviz_marks, saved
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, NUTS
from numpyro.infer.initialization import init_to_value
import pytest
from runs import run_mcmc
from scipy.special import expit

from numpyro_sgmcmc import SGHMC, SGLD, CCAdL, LongRun, full_data, summary, to_arviz
from numpyro_sgmcmc.diagnostics._posterior_score import RunModel, scores_of
from numpyro_sgmcmc.diagnostics.runs import group
from numpyro_sgmcmc.results.loo import loo
from numpyro_sgmcmc.results.row_subset import choose_rows, row_numbers

COMPILE_QUICKLY = True

pytestmark = arviz_marks(
    "Deterministic sites 'probability'",
    "Estimated shape parameter of Pareto",
    "look (binary|discrete)",
    "The log likelihood is that of",
)

N = 50
X = np.random.default_rng(0).standard_normal((N, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def model(x, y=None, batch_size=10):
    with numpyro.plate("groups", 2):
        numpyro.sample("level", dist.Normal(0, 1))
    w = numpyro.sample(
        "w", dist.Normal(0, 1).expand([3]).to_event(1), infer={"event_dims": ["feature"]}
    )
    numpyro.deterministic("length", jnp.sum(w**2))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        p = numpyro.deterministic("probability", 1 / (1 + jnp.exp(-x[i] @ w)))
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=None if y is None else y[i])


def names(data):
    return set(data.groups()) if FIRST_GENERATION else set(data.children)


@pytest.fixture(scope="module")
def mcmc():
    kernel = CCAdL(model, step_size=0.05, friction=2.0, steps_per_sample=5)
    return run_mcmc(
        kernel,
        X,
        Y,
        warmup=200,
        samples=300,
        chains=2,
        fields=("thermostat", "step_size", "minibatch_potential"),
    )


@pytest.fixture(scope="module")
def data(mcmc):
    return to_arviz(
        mcmc,
        log_likelihood=True,
        posterior_predictive=True,
        coords={"feature": ["a", "b", "c"]},
        sampling_time=1.5,
        attrs={"study": "test"},
    )


@pytest.mark.slow
def test_groups_and_shapes(data):
    assert names(data) == {
        "posterior", "sample_stats", "observed_data", "constant_data", "log_likelihood",
        "posterior_predictive", "stein",
    }  # fmt: skip
    posterior = group(data, "posterior")
    assert dict(posterior.sizes) == {"chain": 2, "draw": 300, "groups": 2, "feature": 3}
    assert set(posterior.data_vars) == {"w", "level", "length"}
    assert posterior["w"].coords["feature"].values.tolist() == ["a", "b", "c"]
    assert posterior.coords["draw"].values.tolist() == list(range(300))
    for name in ("log_likelihood", "posterior_predictive"):
        assert group(data, name)["y"].dims == ("chain", "draw", "rows")
        assert group(data, name)["y"].shape == (2, 300, N)
    np.testing.assert_array_equal(group(data, "observed_data")["y"], Y)
    constant = group(data, "constant_data")
    assert set(constant.data_vars) == {"x"} and constant["x"].dims == ("rows", "x_dim_1")


def test_log_likelihood_is_that_of_every_row(data):
    w = group(data, "posterior")["w"].values
    p = expit(np.einsum("cdk,nk->cdn", w, X))
    expected = np.where(Y == 1, np.log(p), np.log1p(-p))
    np.testing.assert_allclose(group(data, "log_likelihood")["y"], expected, atol=1e-5)


def test_posterior_predictive_is_that_of_every_row(data):
    w = group(data, "posterior")["w"].values
    p = expit(np.einsum("cdk,nk->cdn", w, X))
    found = group(data, "posterior_predictive")["y"].values
    assert set(np.unique(found)) == {0, 1}
    error = (p * (1 - p)).sum((0, 1)) ** 0.5 / 600
    assert np.all(np.abs((found - p).mean((0, 1))) < 4 * error)


def test_sample_stats_have_honest_names(data):
    stats = set(group(data, "sample_stats").data_vars)
    asked = {"thermostat", "step_size", "minibatch_potential"}
    assert stats == asked | {"diverging", "configurational_temperature"}


def test_attributes(data):
    found = data.attrs
    assert found["algorithm"] == "CCAdL" and found["batch_size_rows"] == 10
    assert found["step_size"] == 0.05 and found["friction"] == 2.0
    assert found["inference_library"] == "numpyro_sgmcmc"
    assert found["sampling_time"] == 1.5 and found["study"] == "test"


def test_dims_are_merged_with_the_inferred_ones(mcmc):
    posterior = group(to_arviz(mcmc, dims={"w": ["column"]}), "posterior")
    assert posterior["w"].dims == ("chain", "draw", "column")
    assert posterior["level"].dims == ("chain", "draw", "groups")


def test_plain_from_numpyro_is_right_too(mcmc, data):
    plain = az.from_numpyro(mcmc, log_likelihood=True)
    for name in ("w", "level", "length"):
        np.testing.assert_array_equal(
            group(plain, "posterior")[name], group(data, "posterior")[name]
        )
    np.testing.assert_array_equal(group(plain, "observed_data")["y"], Y)
    np.testing.assert_allclose(
        group(plain, "log_likelihood")["y"], group(data, "log_likelihood")["y"], atol=1e-6
    )
    az.from_numpyro(mcmc)


@pytest.mark.slow
def test_same_as_nuts_on_the_full_data(mcmc):
    """The layout does not differ from that of a kernel that has always been there."""
    nuts = run_mcmc(NUTS(full_data(model)), X, Y, warmup=100, samples=300, chains=2)
    theirs, ours = to_arviz(nuts), to_arviz(mcmc)
    assert group(theirs, "observed_data").equals(group(ours, "observed_data"))
    assert group(theirs, "posterior")["w"].dims == group(ours, "posterior")["w"].dims
    assert "diverging" in group(theirs, "sample_stats")


@pytest.mark.nightly
def test_slashes_in_the_names_of_sites(tmp_path):
    """As the sites of `flax_module` have them; "a/c" comes after "a.b" and before "a0"."""

    def model(y):
        b, c = numpyro.sample("a.b", dist.Normal(0, 1)), numpyro.sample("a/c", dist.Normal(0, 2))
        d = numpyro.sample("a0", dist.Normal(0, 4).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("net/y", dist.Normal(b + c + d[0], 20), obs=y[i])

    kernel = SGHMC(model, step_size=0.3, friction=0.5, steps_per_sample=20)
    mcmc = run_mcmc(
        kernel,
        X[:, 0],
        sampler=LongRun,
        warmup=200,
        samples=1_000,
        store=tmp_path / "run.zarr",
        chains=2,
    )
    options = {"log_likelihood": True, "posterior_predictive": True, "dims": {"net/y": ["row"]}}
    data = to_arviz(mcmc, **options)
    for name in ("observed_data", "posterior_predictive", "log_likelihood"):
        assert list(group(data, name).data_vars) == ["net.y"] and "row" in group(data, name).dims
    assert group(data, "stein")["parameter"].values.tolist() == ["a.b", "a.c", "a0[0]", "a0[1]"]
    draws = mcmc.get_samples(group_by_chain=True)
    assert np.array_equal(group(data, "posterior")["a.c"], draws["a/c"])
    assert list(summary(mcmc, var_names=["a/c"]).table.index) == ["a.c"]
    mean = float(mcmc.moments["a.c"].sel(statistic="mean"))
    assert mean == pytest.approx(float(draws["a/c"].mean()), abs=1e-4)
    positions = scores_of(data, RunModel(model, (X[:, 0],)), 2_000).positions
    assert np.array_equal(positions[..., 1], draws["a/c"])
    assert loo(mcmc).n_data_points == N


def test_size_guard(mcmc):
    for option in ("log_likelihood", "posterior_predictive"):
        with pytest.raises(
            ValueError, match=f"`{option}` would have 600 draws x 50 values = 30,000"
        ):
            to_arviz(mcmc, max_values=29_999, **{option: True})


@pytest.mark.parametrize("rows", [np.array([41, 3, 17]), 12])
def test_chosen_rows_are_those_of_the_whole(mcmc, data, rows):
    found = to_arviz(mcmc, log_likelihood=True, posterior_predictive=True, rows=rows)
    numbers = group(found, "observed_data").coords["rows"].values
    if np.ndim(rows):
        np.testing.assert_array_equal(numbers, rows)
    else:
        assert numbers.size == 12 and np.all(np.diff(numbers) > 0)
    for name in ("observed_data", "constant_data", "log_likelihood"):
        assert set(group(found, name)) == set(group(data, name))
        for variable, values in group(found, name).items():
            whole = group(data, name)[variable].isel(rows=numbers)
            np.testing.assert_array_equal(values.coords["rows"], numbers)
            np.testing.assert_allclose(values, whole, atol=1e-6)
    for variable, values in group(found, "posterior").items():
        np.testing.assert_array_equal(values, group(data, "posterior")[variable])
    p = expit(np.einsum("cdk,nk->cdn", group(data, "posterior")["w"].values, X[numbers]))
    drawn = group(found, "posterior_predictive")["y"]
    np.testing.assert_array_equal(drawn.coords["rows"], numbers)
    error = (p * (1 - p)).sum((0, 1)) ** 0.5 / 600
    assert np.all(np.abs((drawn.values - p).mean((0, 1))) < 4 * error)


def test_rows_are_drawn_by_the_key():
    def drawn(seed):
        return row_numbers("plate", 10, 50, random.key(seed))

    np.testing.assert_array_equal(drawn(0), drawn(0))
    counts = np.bincount(np.concatenate([drawn(k) for k in range(500)]), minlength=50)
    # each is there with probability 1 / 5
    assert np.all(np.abs(counts - 100) < 4.5 * (500 * 0.2 * 0.8) ** 0.5)


def test_labels_of_rows_follow_them(mcmc):
    labels = [f"day {k}" for k in range(N)]
    found = to_arviz(mcmc, rows=[7, 5], coords={"rows": labels})
    assert group(found, "observed_data").coords["rows"].values.tolist() == ["day 7", "day 5"]


#: Shapes of what the model computes: not of what is only traced.
SEEN = []


def two_plates(x, y, z, t):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("first", x.shape[0], subsample_size=10):
        mean = numpyro.subsample(x, event_dim=1) @ w
        jax.debug.callback(lambda mean: SEEN.append(mean.shape), mean)
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))
    with numpyro.plate("second", z.shape[0], subsample_size=5) as i:
        numpyro.sample("z", dist.Normal(w[0], 1), obs=z[i])
    numpyro.sample("t", dist.Normal(w[1], 1), obs=t)


TWO_PLATES = (X, X[:, 0], X[:30, 1], 0.5)


@pytest.fixture(scope="module")
def of_two_plates():
    return run_mcmc(SGLD(two_plates, step_size=1e-3), *TWO_PLATES, warmup=0, samples=20)


@pytest.mark.parametrize(
    "rows, first, second",
    [(8, 8, 8), ({"second": [4, 2]}, N, 2), ({"first": 3, "second": 30}, 3, 30)],
)
def test_rows_of_several_plates(of_two_plates, rows, first, second):
    found = to_arviz(of_two_plates, log_likelihood=True, rows=rows)
    observed, terms = group(found, "observed_data"), group(found, "log_likelihood")
    assert observed["y"].shape == (first,) and observed["z"].shape == (second,)
    assert terms["y"].shape == (1, 20, first) and terms["z"].shape == (1, 20, second)
    assert terms["t"].shape == (1, 20) and set(group(found, "constant_data")) == {"x"}
    z = TWO_PLATES[2][observed.coords["second"].values if second < 30 else slice(None)]
    np.testing.assert_array_equal(observed["z"], z)
    w = group(found, "posterior")["w"].values[..., :1]
    np.testing.assert_allclose(
        terms["z"], -((z - w) ** 2) / 2 - np.log(2 * np.pi) / 2, rtol=1e-5, atol=1e-6
    )


def test_other_rows_are_not_computed(of_two_plates):
    jax.effects_barrier()
    SEEN.clear()
    to_arviz(of_two_plates, log_likelihood=True, posterior_predictive=True, rows=7)
    jax.effects_barrier()
    assert set(SEEN) == {(7,), (10,)}  # a minibatch is looked at, to see that the data are the same


def test_rows_where_the_plate_has_latent_sites():
    """As HMC and NUTS allow: the posterior, too, then is that of the chosen rows."""

    def local(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
            mean = numpyro.deterministic("mean", x[i, 0] * w + z.sum(-1))
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    kernel = HMC(full_data(local), num_steps=3, adapt_step_size=False, step_size=0.1)
    mcmc = run_mcmc(kernel, X, X[:, 1], warmup=0, samples=20, fields=("num_steps",))
    rows = [30, 2]
    whole, found = (to_arviz(mcmc, log_likelihood=True, rows=r) for r in (None, rows))
    assert group(found, "posterior")["z"].shape == (1, 20, 2, 2)
    for name in ("posterior", "log_likelihood", "sample_stats"):
        for variable, values in group(found, name).items():
            expected = group(whole, name)[variable]
            expected = expected.isel(rows=rows) if "rows" in expected.dims else expected
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


def test_crossed_plates_choose_rows_and_columns():
    def crossed(table):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        down = numpyro.plate("down", table.shape[0], subsample_size=5, dim=-2)
        across = numpyro.plate("across", table.shape[1], subsample_size=4, dim=-1)
        with down as i, across as j:
            numpyro.sample("cell", dist.Normal(mu, 1), obs=table[i[:, None], j])

    table = X[:48].reshape(12, 12)[:, :9]
    mcmc = run_mcmc(SGLD(crossed, step_size=1e-3), table, warmup=0, samples=20)
    found = to_arviz(mcmc, log_likelihood=True, rows={"down": [8, 1], "across": [0, 5, 2]})
    assert group(found, "log_likelihood")["cell"].dims == ("chain", "draw", "down", "across")
    np.testing.assert_array_equal(
        group(found, "observed_data")["cell"], table[np.ix_([8, 1], [0, 5, 2])]
    )
    assert "constant_data" not in names(found)


@pytest.mark.parametrize(
    "rows, message",
    [
        (51, "51 rows of plate 'rows' were requested, and it has 50. Ask for 1 to 50"),
        (0, "0 rows of plate 'rows' were requested"),
        ([3, 50, -1], "2 of the 3 row numbers of plate 'rows' are out of range, the first is 50"),
        ([4, 9, 4, 4], "Row 4 of plate 'rows' is chosen 3 times, and 2 of the 4"),
        (2.5, r"The rows of plate 'rows' must be .* got dtype float64 and shape \(\)"),
        (np.ones(50, bool), r"dtype bool and shape \(50,\).*np.flatnonzero"),
        ([], r"shape \(0,\)"),
        ({"row": 3}, r"`rows` names \['row'\], but the subsampled plates .* 'rows' \(50 rows\)"),
    ],
)
def test_rows_that_are_refused(mcmc, rows, message):
    with pytest.raises(ValueError, match=message):
        to_arviz(mcmc, rows=rows)


def test_row_numbers_need_a_plate(of_two_plates):
    with pytest.raises(
        ValueError, match=r"several subsampled plates: 'first' \(50 rows\), 'second' \(30"
    ):
        to_arviz(of_two_plates, rows=[1, 2])
    with pytest.raises(ValueError, match="`rows=5` chooses from .* but the model has none"):
        choose_rows(5, (), random.key(0))


@pytest.mark.nightly
def test_likelihood_that_is_itself_random():
    def estimated(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            noise = random.normal(numpyro.prng_key(), (100, 1))
            terms = dist.Normal(mu + 0.1 * noise, 1).log_prob(y[i])
            numpyro.factor("term", jnp.log(jnp.mean(jnp.exp(terms), 0)))

    mcmc = run_mcmc(SGLD(estimated, step_size=1e-3), X[:, 0], warmup=0, samples=20)
    found = to_arviz(mcmc, log_likelihood=True)
    mu = group(found, "posterior")["mu"].values[..., None]
    exact = -((X[:, 0] - mu) ** 2) / 2 / 1.01 - np.log(2 * np.pi * 1.01) / 2
    difference = group(found, "log_likelihood")["term"] - exact
    # each of the 100 terms has a standard deviation of 0.1 times the residual
    assert np.all(np.abs(difference) < 4 * 0.01 * np.abs(X[:, 0] - mu) + 0.01)


def test_no_draws():
    with pytest.raises(ValueError, match="no draws yet"):
        to_arviz(MCMC(SGLD(model, step_size=0.1), num_warmup=1, num_samples=1))


def test_nonfinite_steps_are_reported():
    kernel = SGLD(
        model,
        step_size=lambda i: jnp.where(i < 5, 1e-3, 1e38),
        init_strategy=init_to_value(values={"w": np.ones(3), "level": np.zeros(2)}),
    )
    mcmc = run_mcmc(kernel, X, Y, warmup=0, samples=10, chains=2)
    with pytest.warns(
        UserWarning, match="10 of 20 steps were undone, at a step size of 1e.38: they were"
    ):
        found = to_arviz(mcmc)
    assert np.all(np.isfinite(group(found, "posterior")["w"]))
    assert group(found, "sample_stats")["diverging"].values[0, -5:].all()


def test_noise_beyond_the_friction_is_reported():
    """A friction that is enough at the start and not later, with a schedule of the step size."""
    kernel = SGHMC(
        model,
        step_size=lambda i: jnp.where(i < 20, 1e-4, 2e-2),
        friction=0.3,
        noise_variance="estimated",
        init_strategy=init_to_value(values={"w": np.ones(3), "level": np.zeros(2)}),
    )
    mcmc = run_mcmc(kernel, X, Y, warmup=0, samples=40)
    used = mcmc.get_extra_fields()["friction_used"]
    assert np.all(used[:20] < 1) and np.all(used[25:] > 1)
    assert "TIMES WHAT THE FRICTION" in kernel.get_diagnostics_str(mcmc.last_state)
    with pytest.warns(UserWarning, match="more than the friction can dissipate in 50.0% of"):
        to_arviz(mcmc)


def test_thinned_run():
    mcmc = run_mcmc(SGLD(model, step_size=1e-3), X, Y, warmup=0, samples=100, thinning=3)
    assert group(to_arviz(mcmc, log_likelihood=True), "log_likelihood").sizes["draw"] == 33


def test_round_trip_through_a_file(data, tmp_path):
    path = str(tmp_path / "run.nc")
    data.to_netcdf(path)
    back = az.from_netcdf(path)
    assert back.attrs["algorithm"] == "CCAdL"
    np.testing.assert_array_equal(group(back, "posterior")["w"], group(data, "posterior")["w"])


PLOTS = ["plot_trace", "plot_pair", "plot_ess", "plot_forest", "plot_rank"]
PLOTS += ["plot_posterior", "plot_ppc"] if FIRST_GENERATION else ["plot_dist", "plot_ppc_dist"]


@pytest.mark.parametrize("name", PLOTS)
def test_pictures(data, name, tmp_path):
    options = {} if "ppc" in name else {"var_names": ["w"]}
    picture = getattr(az, name)(data, **options)
    assert saved(picture, tmp_path / "picture.png") > 5_000


STATISTICS = ["ess", "rhat", "mcse", "summary", "loo", "hdi"] + (
    ["waic"] if FIRST_GENERATION else ["thin", "rhat_nested", "diagnose"]
)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(data, name):
    options = {"superchain_ids": [0, 1]} if name == "rhat_nested" else {}
    assert getattr(az, name)(data, **options) is not None


def test_statistics_have_values(data):
    summary = az.summary(data, var_names=["w"])
    assert list(summary.index) == ["w[a]", "w[b]", "w[c]"]
    assert np.all(summary["ess_bulk"].astype(float) > 50)


@pytest.mark.slow
def test_packages_for_results_are_imported_when_they_are_needed():
    """They would double the time of the import."""
    later = {"arviz", "pandas", "xarray", "matplotlib", "scipy.stats"}
    code = (
        f"import sys, numpyro_sgmcmc; assert not {later} & set(sys.modules)\n"
        "from numpyro_sgmcmc import summary; assert 'pandas' in sys.modules\n"
        "assert summary is numpyro_sgmcmc.summary and 'summary' in dir(numpyro_sgmcmc)\n"
        "assert not hasattr(numpyro_sgmcmc, 'sumary')\n"
        "del summary\nfrom numpyro_sgmcmc import *\nassert CCAdL and summary"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
