# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions for new rows, of known and of new groups."""

import arviz as az
from generations import FIRST_GENERATION
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import init_to_value
from numpyro.infer.reparam import LocScaleReparam
import pytest
from runs import run_mcmc, with_draws
import xarray as xr

from numpyro_sgmcmc import SGHMC, RowsOnDisk, full_data, group_rows, predict
from numpyro_sgmcmc.results import new_rows

COMPILE_QUICKLY = True

RNG = np.random.default_rng(0)
N = 60
X = RNG.normal(size=(N, 2)).astype(np.float32)
SLOPES = RNG.normal([1.0, -2.0], 0.3, (2, 300, 2))  # draws of two chains
EFFECTS = RNG.normal(size=(2, 300, 5)) * 0.1 + 10.0 * np.arange(5)


def rows(x, y=None, noise=0.5, sites=dist.Normal):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=7) as i:
        mean = numpyro.deterministic("mean", x[i] @ w)
        obs = None if y is None else y[i]
        numpyro.sample("y", sites(mean, noise), obs=obs)


def grouped(group, y=None, groups=5):
    """Effects of groups that are sampled."""
    tau = numpyro.sample("tau", dist.HalfNormal(5))
    with numpyro.plate("groups", groups):
        a = numpyro.sample("a", dist.Normal(0, tau))
    with numpyro.plate("rows", len(group), subsample_size=4) as i:
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(a[group[i]], 0.01), obs=obs)


def hidden(members, observed, y=None, prior=3.0):
    """Effects of groups that are integrated out."""
    mu = numpyro.sample("mu", dist.Normal(0, 1e-3))
    with numpyro.plate("groups", len(members), subsample_size=4) as g:
        a = numpyro.sample("a", dist.Normal(mu, prior))
        with numpyro.plate("within", members.shape[1]):
            law = dist.Normal(a, 1).expand(members[g].T.shape).mask(observed[g].T)
            numpyro.sample("y", law, obs=None if y is None else y[members[g].T])


@pytest.fixture(scope="module")
def of_rows():
    return with_draws(rows, (X, X @ np.array([1.0, -2.0], np.float32)), {"w": SLOPES})


@pytest.fixture(scope="module")
def of_groups():
    group = np.repeat(np.arange(5), 4)
    tau = np.full((2, 300), 5.0)
    return with_draws(grouped, (group, 10.0 * group), {"tau": tau, "a": EFFECTS})


#: Groups of 3, 1, 2, ... rows, each with all of its rows at one value.
GROUP = np.repeat(np.arange(40), 1 + np.arange(40) % 3)
VALUES = (3 * np.sin(np.arange(40.0)))[GROUP].astype(np.float32)


@pytest.fixture(scope="module")
def of_hidden():
    start = init_to_value(values={"mu": 0.0})
    kernel = SGHMC(hidden, step_size=1e-5, friction=10.0, init_strategy=start)
    return run_mcmc(kernel, *group_rows(GROUP), VALUES, warmup=0, samples=400, chains=2)


@pytest.mark.nightly
def test_each_row_has_its_own_law(of_rows):
    new = RNG.normal(size=(123, 2)).astype(np.float32)
    found = predict(of_rows, new, num_draws=300)["y"]
    assert found.dims == ("chain", "draw", "rows") and found.shape == (2, 300, 123)
    means = SLOPES.reshape(-1, 2) @ new.T
    sd = np.sqrt(means.var(0) + 0.5**2)
    flat = found.values.reshape(-1, 123)
    z = (flat.mean(0) - means.mean(0)) / (0.5 / 600**0.5)
    assert abs(z).max() < 4.5 and 0.7 < z.std() < 1.3
    assert np.allclose(flat.std(0) / sd, 1, atol=4.5 / 1_200**0.5)
    # noise of one row is not that of another one
    noise = (flat - means).T
    assert abs(np.corrcoef(noise) - np.eye(123)).max() < 5 / 600**0.5


@pytest.mark.parametrize("chunk", [1, 50, 123])
def test_parts_are_of_any_length(of_rows, monkeypatch, chunk):
    monkeypatch.setattr(new_rows, "MOST_ROWS", chunk)
    new = np.arange(246, dtype=np.float32).reshape(123, 2)
    found = predict(of_rows, new, num_draws=3, var_names="mean")["mean"]
    assert found.shape == (2, 3, 123)
    assert np.allclose(found, SLOPES[:, found.coords["draw"].values] @ new.T, rtol=1e-4)


def test_summary_is_that_of_the_draws(of_rows, tmp_path):
    levels = [0.05, 0.5, 0.9]
    draws = predict(of_rows, X, num_draws=40)["y"]
    found = predict(of_rows, X, num_draws=40, quantiles=levels)["y"]
    assert found.coords["statistic"].values.tolist() == ["mean", "sd", "0.05", "0.5", "0.9"]
    flat = draws.values.reshape(-1, N)
    known = [flat.mean(0), flat.std(0), *np.quantile(flat, levels, axis=0)]
    assert np.allclose(found, known, atol=1e-4)


def test_store_has_the_draws(of_rows, tmp_path):
    pytest.importorskip("zarr")
    draws = predict(of_rows, X, num_draws=40)
    assert predict(of_rows, X, num_draws=40, store=tmp_path / "draws.zarr").equals(draws)
    assert xr.open_zarr(tmp_path / "draws.zarr", chunks=None).equals(draws)
    with pytest.raises(ValueError, match="`store` is for draws"):
        predict(of_rows, X, quantiles=[0.5], store=tmp_path / "other.zarr")


def test_observations_make_no_difference(of_rows):
    one, other = predict(of_rows, X), predict(of_rows, X, np.full(N, 1e6, np.float32))
    assert one.equals(other) and one["y"].values.std() < 10


def test_rows_on_disk(of_rows, tmp_path):
    np.save(tmp_path / "x.npy", X)
    found = predict(of_rows, RowsOnDisk(tmp_path / "x.npy"))
    assert np.allclose(found["y"], predict(of_rows, X)["y"], atol=1e-5)


def test_weights_do_not_change_predictions():
    def weighted(x, y=None):
        with numpyro.handlers.scale(scale=100.0), numpyro.handlers.mask(mask=False):
            rows(x, y)

    run = with_draws(weighted, (X, X[:, 0]), {"w": SLOPES})
    found = predict(run, X, quantiles=[0.5])["y"].sel(statistic="mean")
    assert np.allclose(found, X @ SLOPES.mean((0, 1)), atol=0.3)


@pytest.mark.nightly
def test_effects_are_those_of_the_groups(of_groups):
    group = np.array([4, 0, 0, 3])
    found = predict(of_groups, group, num_draws=300)["y"]
    assert np.allclose(found, EFFECTS[:, :, group], atol=0.06)
    # group 0 of the new rows is group 4 of the run, group 1 is new, and group 2 is group 1
    own, numbers = np.array([0, 1, 2, 0]), np.array([4, -1, 1])
    found = predict(of_groups, own, known_groups=numbers, num_draws=300, groups=3)["y"]
    assert np.allclose(found[..., [0, 2, 3]], EFFECTS[:, :, [4, 1, 4]], atol=0.06)
    assert abs(found.values[..., 1].std() / 5 - 1) < 4.5 / 1_200**0.5
    named = {"groups": numbers}
    assert predict(of_groups, own, known_groups=named, num_draws=300, groups=3)["y"].equals(found)


@pytest.mark.nightly
def test_local_effects_of_known_groups(of_hidden):
    chosen = np.array([7, 2, 39])
    members, observed = group_rows(np.array([0, 0, 1, 2]))
    found = predict(of_hidden, members, observed, known_groups=chosen, num_draws=400)["y"]
    assert found.dims == ("chain", "draw", "within", "groups")
    draws = found.values.reshape(800, 2, 3)
    count, value = 1 + chosen % 3, 3 * np.sin(chosen)
    variance = 1 / (1 / 9 + count)
    mean, sd = variance * count * value, np.sqrt(variance + 1)
    assert np.all(abs(draws.mean(0) - mean) < 4.5 * sd / 800**0.5)
    assert np.allclose(draws.std(0) / sd, 1, atol=4.5 / 1_600**0.5)
    # both rows of a group have its effect
    pair = np.corrcoef(draws[:, :, 0].T)[0, 1]
    assert abs(pair - variance[0] / sd[0] ** 2) < 4.5 / 800**0.5


def test_local_effects_of_new_groups(of_hidden):
    table = group_rows(np.array([0, 0, 1, 2]))
    for given, is_new in ((-1, [True] * 3), ([-1, 5, -1], [True, False, True])):
        found = predict(of_hidden, *table, known_groups=given, num_draws=400)["y"]
        sd = found.values.reshape(800, 2, 3).std(0)
        assert np.allclose(sd[:, is_new] / 10**0.5, 1, atol=4.5 / 1_600**0.5)
        assert np.all(sd[:, ~np.array(is_new)] < 1.3)


def test_a_new_group_has_one_effect_in_all_parts(of_groups, monkeypatch):
    monkeypatch.setattr(new_rows, "MOST_ROWS", 8)
    found = predict(of_groups, np.zeros(40, int), known_groups=-1, groups=1, num_draws=300)["y"]
    assert np.allclose(found[..., 0], found[..., 39], atol=0.1)
    assert abs(found.mean("rows").values.std() / 5 - 1) < 4.5 / 1_200**0.5
    # the noise of rows differs between parts
    noise = found.values - found.values.mean(-1, keepdims=True)
    assert abs(np.corrcoef(noise[..., 0].ravel(), noise[..., 8].ravel())[0, 1]) < 0.2


@pytest.mark.arviz
@pytest.mark.parametrize(
    "which, args, options",
    [
        ("of_rows", (X,), {}),
        ("of_groups", (np.array([0, 1, 0]),), {"known_groups": [4, -1], "groups": 2}),
        ("of_hidden", group_rows([0, 0, 1]), {"known_groups": [3, -1]}),
    ],
    ids=["rows", "sampled groups", "integrated groups"],
)
def test_arviz_takes_the_predictions(which, args, options, request):
    found = predict(request.getfixturevalue(which), *args, num_draws=200, **options)
    prob = {"hdi_prob" if FIRST_GENERATION else "prob": 0.8}
    bounds = az.hdi(found, **prob)["y"]
    low, high = bounds.min(bounds.dims[-1]), bounds.max(bounds.dims[-1])
    inside = ((low <= found["y"]) & (found["y"] <= high)).mean(("chain", "draw"))
    assert abs(inside - 0.8).max() < 0.05
    assert len(az.summary(found, kind="stats")) == found["y"][0, 0].size


def test_a_group_that_is_given_twice(of_hidden):
    with pytest.raises(ValueError, match="Group 3 of the run is given 2 times in plate 'groups'"):
        predict(of_hidden, *group_rows([0, 1, 2]), known_groups=[3, 3, 5])


def of_each_row(x, y=None):
    with numpyro.plate("rows", len(x), subsample_size=3) as i:
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(a + x[i], 0.01), obs=None if y is None else y[i])


@pytest.mark.nightly
def test_effects_of_rows_are_not_those_of_other_rows():
    effects = RNG.normal(size=(1, 400, 9))
    run = with_draws(full_data(of_each_row), (X[:9, 0], X[:9, 0]), {"a": effects})
    with pytest.raises(ValueError, match="Plate 'rows' has latent sites, 9 members in the run"):
        predict(run, X[:9, 1])
    found = predict(run, X[:9, 1], known_groups=-1, num_draws=400)["y"]
    assert abs((found - X[:9, 1]).values.std() - 1) < 4.5 / 7_200**0.5
    found = predict(run, X[:2, 1], known_groups=[8, 8], num_draws=400)["y"]
    assert np.allclose(found - X[:2, 1], effects[:, :, [8, 8]], atol=0.06)


def odd(x, y=None):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
    with numpyro.plate("rows", len(x), subsample_size=3) as i:
        mean = x[i] @ w
        numpyro.deterministic("scalar", w.sum())
        numpyro.deterministic("pair", jnp.stack([mean, -mean], -1))
        numpyro.deterministic("turned", (x[i] * w).T)
        numpyro.factor("penalty", -mean)
        numpyro.sample("y", dist.Normal(mean, 0.01), obs=None if y is None else y[i])


def test_deterministic_sites_of_any_shape(monkeypatch):
    monkeypatch.setattr(new_rows, "MOST_ROWS", 4)
    x, w = X[:11], SLOPES[:, :10]
    run = with_draws(full_data(odd), (X[:9], X[:9, 0]), {"w": w})
    found = predict(run, x, var_names=["scalar", "pair", "turned"], num_draws=10)
    mean = w @ x.T
    assert found["scalar"].dims == ("chain", "draw")
    assert found["pair"].dims[:3] == ("chain", "draw", "rows")
    assert found["turned"].dims[2:] == ("turned_dim_0", "turned_dim_1")
    assert np.allclose(found["scalar"], w.sum(-1), atol=1e-4)
    assert np.allclose(found["pair"], np.stack([mean, -mean], -1), atol=1e-4)
    assert np.allclose(found["turned"], (x * w[..., None, :]).swapaxes(-1, -2), atol=1e-4)
    assert list(predict(run, x).data_vars) == ["y"]


def test_deterministic_sites_among_the_draws_are_those_of_the_new_rows():
    draws = {"w": SLOPES, "mean": np.zeros((2, 300, N))}
    run = with_draws(full_data(rows), (X, X[:, 0]), draws)
    found = predict(run, X[:5], num_draws=300, var_names="mean")["mean"]
    assert np.allclose(found, SLOPES @ X[:5].T, atol=1e-4)


def series(x, y=None):
    """A latent path of all rows, in a loop of its own."""

    def step(state, _):
        state = numpyro.sample("state", dist.Normal(state, 1))
        return state, state

    _, path = scan(step, 0.0, jnp.arange(3))
    with numpyro.plate("rows", len(x), subsample_size=2) as i:
        mean = path[x[i]]
        numpyro.sample("y", dist.Normal(mean, 0.01), obs=None if y is None else y[i])


def test_sites_of_a_scan_have_their_draws():
    path = RNG.normal(size=(1, 60, 3)) * 5
    x = np.array([0, 1, 2, 2])
    run = with_draws(full_data(series), (x, x * 1.0), {"state": path})
    found = predict(run, x[::-1].copy(), num_draws=60)["y"]
    assert np.allclose(found, path[..., x[::-1]], atol=0.06)


def panel(x, y=None, series=2):
    """A latent path for each of some series, in a loop inside of their plate."""

    def step(state, _):
        with numpyro.plate("series", series):
            state = numpyro.sample("state", dist.Normal(state, 1))
        return state, state

    _, path = scan(step, jnp.zeros(series), jnp.arange(3))
    with numpyro.plate("rows", len(x), subsample_size=2) as i:
        mean = path[x[i] // series, x[i] % series]
        numpyro.sample("y", dist.Normal(mean, 0.01), obs=None if y is None else y[i])


@pytest.mark.nightly
def test_sites_of_a_scan_inside_of_a_plate():
    path = RNG.normal(size=(1, 60, 3, 2)) * 5
    x = np.arange(6)
    run = with_draws(full_data(panel), (x, x * 1.0), {"state": path})
    found = predict(run, x[::-1].copy(), num_draws=60)["y"]
    assert np.allclose(found, path.reshape(1, 60, 6)[..., ::-1], atol=0.06)
    swapped = predict(run, x, num_draws=60, known_groups=[1, 0])["y"]
    assert np.allclose(swapped, path[..., ::-1].reshape(1, 60, 6), atol=0.06)
    with pytest.raises(ValueError, match="'state' is inside of a `scan`.*plate 'series'"):
        predict(run, x, known_groups=[1, -1])


def test_what_does_not_fit_the_model_is_explained(of_rows):
    with pytest.raises((TypeError, ValueError), match="list"):
        predict(of_rows, X.tolist())


def counts(n, y=None):
    numpyro.sample("unused", dist.Normal(0, 1))
    with numpyro.plate("rows", len(n), subsample_size=3) as i:
        numpyro.sample("y", dist.Poisson(n[i]), obs=None if y is None else y[i])


def test_digits_of_a_summary_of_counts():
    run = with_draws(counts, (np.ones(5), np.ones(5, int)), {"unused": np.zeros((1, 20))})
    n = np.full(3, 2.0e8, np.float32)
    draws, found = predict(run, n), predict(run, n, quantiles=[0.5])
    right = np.median(draws["y"].values[0].astype(float), axis=0)
    assert np.array_equal(found["y"].sel(statistic="0.5"), right)


def test_reparametrised_effects_of_new_groups(of_groups):
    def model(group, y=None, groups=5):
        reparam(grouped, config={"a": LocScaleReparam(0)})(group, y, groups)

    group = np.repeat(np.arange(5), 4)
    draws = {"tau": np.full((2, 300), 5.0), "a_decentered": EFFECTS / 5}
    run = with_draws(model, (group, 10.0 * group), draws)
    found = predict(run, np.array([0, 1]), known_groups=[3, -1], num_draws=300, groups=2)["y"]
    assert np.allclose(found[..., 0], EFFECTS[:, :, 3], atol=0.06)
    assert abs(found.values[..., 1].std() / 5 - 1) < 4.5 / 1_200**0.5


def crossed(x, y=None, t=None):
    """Sites of three shapes: rows, rows by columns in two plates, and events."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("columns", x.shape[1], dim=-2, subsample_size=2) as j:
        with numpyro.plate("rows", x.shape[0], dim=-1, subsample_size=3) as i:
            mean = w * x[i][:, j].T
            numpyro.sample("y", dist.Normal(mean, 0.01), obs=None if y is None else y[i][:, j].T)
    with numpyro.plate("vectors", x.shape[0], subsample_size=2) as i:
        law = dist.Normal(w * x[i], 0.01).to_event(1)
        numpyro.sample("vector", law, obs=None if y is None else y[i])
    numpyro.sample("t", dist.Poisson(jnp.exp(jnp.ones(3))).to_event(1), obs=t)


@pytest.mark.nightly
def test_sites_of_any_shape(monkeypatch):
    monkeypatch.setattr(new_rows, "MOST_ROWS", 4)
    w = 1 + 0.1 * RNG.normal(size=(1, 50))
    run = with_draws(crossed, (X[:9], X[:9], jnp.ones(3)), {"w": w})
    found = predict(run, X[:11], num_draws=50)
    assert found["y"].dims == ("chain", "draw", "columns", "rows")
    assert found["vector"].dims == ("chain", "draw", "vectors", "vector_dim_0")
    assert np.allclose(found["y"], w[..., None, None] * X[:11].T, atol=0.06)
    assert np.allclose(found["vector"], w[..., None, None] * X[:11], atol=0.06)
    assert found["t"].shape == (1, 50, 3) and found["t"].dtype.kind == "i"


def complete(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ w, 0.01), obs=y)


def test_model_without_minibatches():
    run = with_draws(complete, (X, X[:, 0]), {"w": SLOPES})
    found = predict(run, X[:5], num_draws=300)["y"]
    assert np.allclose(found, SLOPES @ X[:5].T, atol=0.06)


def only_observed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=5) as i:
        if y is not None:
            numpyro.sample("y", dist.Normal(x[i] @ w, 0.01), obs=y[i])


@pytest.mark.parametrize(
    "which, args, options, match",
    [
        ("of_rows", (X[:, :1],), {}, "Site 'w' has shape .1,. .* had shape .2,.* columns"),
        ("of_rows", (X,), {"var_names": "mu"}, "'mu'.*predicts .'mean', 'y'."),
        ("of_rows", (X,), {"max_values": 100}, r"12,000 values, .*quantiles=.*store="),
        ("of_rows", (X,), {"quantiles": [0.5, 95]}, "`quantiles` must be .* 0 and 1; got .*95"),
        ("of_rows", (X,), {"known_groups": [1]}, "no plate has latent sites. Leave it out"),
        ("of_groups", ([0],), {"groups": 1}, "Plate 'groups' .* 5 members .* 1 with.*or -1"),
        ("of_groups", ([0],), {"groups": 1, "known_groups": [5]}, "first is 5. .* 0 to 4"),
        ("of_groups", ([0],), {"groups": 1, "known_groups": [0.5]}, "vector of 1 .* float64"),
        ("of_groups", ([0],), {"known_groups": {"a": [0]}}, "names .'a'., but .* .'groups'."),
        ("of_hidden", group_rows([0, 1]), {}, "'groups' has effects .* 40 members .* 2 with"),
        ("of_hidden", group_rows([0, 1]), {"known_groups": [3]}, "vector of 2 .* 0 to 39"),
    ],
)  # fmt: skip
def test_what_is_refused(which, args, options, match, request):
    args = (np.asarray(x) if isinstance(x, list) else x for x in args)
    with pytest.raises(ValueError, match=match):
        predict(request.getfixturevalue(which), *args, **options)


@pytest.mark.nightly
def test_site_that_does_not_exist_without_observations():
    run = with_draws(only_observed, (X, X[:, 0]), {"w": SLOPES})
    with pytest.raises(ValueError, match="none of the observed sites.*obs=None if y is None"):
        predict(run, X, None)
