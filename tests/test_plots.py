# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Pictures: that they show the right numbers, and that all of their texts can be read."""

from itertools import pairwise
import math
import pickle
import subprocess
import sys

import arviz as az
from generations import FIRST_GENERATION, arviz_marks
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.text import Text
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from scipy import stats
import xarray as xr

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    CCAdL,
    full_data,
    gradient_noise,
    plot_bias,
    plot_noise_spectrum,
    plot_stein,
    plot_temperature,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics.runs import group
from numpyro_sgmcmc.target.control_variate import Anchor
from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.tuning.tuning import Tuning

COMPILE_QUICKLY = True

pytestmark = arviz_marks("The draws do not have the law")

N, BATCH = 200, 20
SCALES = np.array([2.0, 1.0, 0.5, 0.1])
Y = (np.random.default_rng(0).standard_normal((N, 4)) * SCALES).astype(np.float32)


def model(y):
    """The means of Gaussians: the noise of the gradient does not depend on them."""
    level = numpyro.sample("level", dist.Normal(0, 10))
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i, 1:])
        numpyro.sample("x", dist.Normal(level, 1), obs=y[i, 0])


def run(
    kernel, fields=(), num_samples=400, num_chains=2, chain_method="vectorized", num_warmup=100
):
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains,
                chain_method=chain_method, progress_bar=False)  # fmt: skip
    mcmc.run(random.key(0), Y, extra_fields=fields)
    return mcmc


@pytest.fixture(scope="module")
def mcmc():
    kernel = CCAdL(model, step_size=0.03, friction=5.0, steps_per_sample=5)
    return run(kernel, ("thermostat", "kinetic_temperature"))


@pytest.fixture(scope="module", params=["an MCMC object", "an ArviZ object", "a file"])
def source(request, mcmc, tmp_path_factory):
    """The same run in all the forms that a picture takes."""
    if request.param == "an MCMC object":
        return mcmc
    data = to_arviz(mcmc)
    if request.param == "an ArviZ object":
        return data
    path = str(tmp_path_factory.mktemp("runs") / "run.nc")
    data.to_netcdf(path)
    return az.from_netcdf(path)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def of_groups(attrs=None, **groups):
    """An ArviZ object of datasets, with a posterior."""
    draws = np.random.default_rng(0).standard_normal((2, 100))
    posterior = xr.Dataset({"a": (("chain", "draw"), draws)})
    groups = {"posterior": posterior} | groups
    if FIRST_GENERATION:
        return az.InferenceData(attrs=attrs or {}, **groups)
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attrs or {})} | groups)


def stein_group(names, sites, **variables):
    return xr.Dataset(
        {name: ("parameter", np.asarray(x, float)) for name, x in variables.items()},
        {"parameter": names, "site": ("parameter", sites)},
        {"temperature": 1.02, "temperature_error": 0.013, "samples": 1_000},
    )


def check_readable(ax):
    """No text is cut off, and no tick labels of an axis are on top of each other."""
    figure = np.ravel(ax)[0].figure
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    for text in figure.findobj(lambda x: isinstance(x, Text) and x.get_visible()):
        if text.get_text().strip() and text.axes is not None:
            box = text.get_window_extent()
            within = box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1
            assert within, text
    for one in figure.axes:
        for axis in (one.xaxis, one.yaxis):
            labels = [x for x in axis.get_ticklabels() if x.get_text() and x.get_visible()]
            boxes = [x.get_window_extent() for x in labels]
            for (first, here), (second, there) in pairwise(zip(labels, boxes, strict=True)):
                assert not here.overlaps(there), (first, second)


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def points_of(ax):
    """All points that are drawn, of lines without a line."""
    lines = [line for line in ax.lines if line.get_linestyle() == "None"]
    return np.concatenate([np.column_stack(line.get_data()) for line in lines])


def edges_of(band):
    x = band.get_paths()[0].vertices[:, 0]
    return x.min(), x.max()


def test_stein(source):
    ax = plot_stein(source)
    check_readable(ax)
    assert ax.get_xlabel() == "eigenvalue of the Stein matrix"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["level", "mu"]
    title = ax.get_legend().get_title().get_text()
    assert title.startswith("configurational temperature") and "±" in title
    points = points_of(ax)
    assert len(points) == 4
    assert np.all(np.diff(points[np.abs(points[:, 1] - 1) < 0.5, 0]) > 0)


def test_stein_has_the_band_of_theory(mcmc):
    stein = group(to_arviz(mcmc), "stein")
    errors = stein["variance_ratio_error"].values
    expected = [3 * errors[0], 1.5 * 2 * np.median(errors) + 3 * np.median(errors[1:])]
    ax = plot_stein(mcmc)
    for band, half in zip(ax.collections, expected, strict=True):
        np.testing.assert_allclose(edges_of(band), [1 - half, 1 + half])
    assert sorted(points_of(ax)[:, 0]) == pytest.approx(sorted(stein["eigenvalue"].values))


def test_stein_of_chosen_sites_in_given_axes(mcmc):
    _, ax = plt.subplots()
    assert plot_stein(mcmc, "level", ax=ax) is ax
    assert len(points_of(ax)) == 1
    assert len(plot_stein(mcmc, ["mu"], figsize=(4, 3)).get_yticks()) == 1
    with pytest.raises(ValueError, match=r"sites are \['level', 'mu'\]; there are no \['nu'"):
        plot_stein(mcmc, ["nu"])


@pytest.mark.parametrize("sites", [1, 50, 400])
def test_stein_of_many_sites_with_long_names(sites):
    names = [f"hierarchy_of_regions_{k}_interaction_of_age_and_income_{k}" for k in range(sites)]
    values = np.where(np.arange(sites) % 10 == 1, 1.5, 1.0)
    stein = stein_group(
        names, names, variance_ratio=values, variance_ratio_error=np.full(sites, 0.1),
        eigenvalue=values, eigenvalue_spread=np.zeros(sites),
    )  # fmt: skip
    ax = plot_stein(of_groups(stein=stein))
    check_readable(ax)
    assert ax.figure.get_figheight() <= 30
    assert len(points_of(ax)) == sites
    bad = int(np.sum(values == 1.5))
    assert legend_of(ax) == ["correct draws", f"within: {sites - bad}"] + (
        [f"beyond: {bad}"] if bad else []
    )
    assert max(len(label.get_text()) for label in ax.get_yticklabels()) <= 32
    if sites <= 50:
        assert len(ax.get_yticks()) == sites
    assert ax.get_legend().get_title().get_text() == "configurational temperature 1.02 ± 0.013"


def test_stein_without_eigenvalues():
    ratios, errors = np.array([1.0, 0.7, 2.0]), np.array([0.1, 0.07, 0.1])
    stein = stein_group(
        ["a[0]", "a[1]", "b"], ["a", "a", "b"], variance_ratio=ratios, variance_ratio_error=errors
    )
    ax = plot_stein(of_groups(stein=stein))
    check_readable(ax)
    assert ax.get_xlabel() == "variance ratio (no eigenvalues above 100 parameters)"
    quantile = stats.t.isf(stats.norm.sf(3) / 3, 19)
    np.testing.assert_allclose(
        edges_of(ax.collections[1]), [1 - 0.1 * quantile, 1 + 0.1 * quantile]
    )
    assert legend_of(ax) == ["correct draws", "within: 2", "beyond: 1"]


def test_stein_of_a_run_without_errors():
    """Too short for a standard error: no band, and nothing that would be beyond it."""
    unknown = np.full(2, np.inf)
    stein = stein_group(
        ["a", "b"], ["a", "b"], variance_ratio=[1.0, 3.0], variance_ratio_error=unknown,
        eigenvalue=[1.0, 3.0], eigenvalue_spread=unknown,
    ).assign_attrs(temperature_error=np.inf)  # fmt: skip
    ax = plot_stein(of_groups(stein=stein))
    check_readable(ax)
    assert not ax.collections and legend_of(ax) == ["no band yet"]
    assert "too few samples for an error" in ax.get_legend().get_title().get_text()
    bias = plot_bias([of_groups({"step_size": h}, stein=stein) for h in (0.1, 0.2)])
    check_readable(bias)
    assert legend_of(bias[0])[-1] == "hollow: might be 0"


def test_stein_of_a_run_that_has_none():
    with pytest.raises(ValueError, match="no group `stein`.*`to_arviz"):
        plot_stein(of_groups())
    with pytest.raises(TypeError, match="an `MCMC` object after its run, or an ArviZ object"):
        plot_stein({"a": 1})


def test_temperature(source):
    axes = plot_temperature(source)
    check_readable(axes)
    found = [ax.get_ylabel().replace("\n", " ") for ax in axes]
    assert found == ["configurational temperature", "kinetic temperature", "thermostat"]
    assert axes[-1].get_xlabel() == "draw"
    assert legend_of(axes[0]) == [
        "chain 0", "chain 1", "correct draws\n(2 standard errors)", "mean of the chains",
    ]  # fmt: skip
    assert legend_of(axes[1])[0] == "99 % of draws" and legend_of(axes[1])[1].startswith("mean ")
    assert legend_of(axes[2]) == ["friction 5"]
    styles = [line.get_linestyle() for line in axes[2].lines[:2]]
    assert len(set(styles)) == 2


def test_temperature_has_the_numbers_of_theory(mcmc):
    axes = plot_temperature(mcmc)
    values = group(to_arviz(mcmc), "sample_stats")["configurational_temperature"]
    count = np.arange(1, 401)
    for line, chain in zip(axes[0].lines, values.values.astype(float), strict=False):
        np.testing.assert_allclose(line.get_ydata(), np.cumsum(chain) / count)
    size = float(az.ess(values.to_dataset(name="x"), method="mean")["x"])
    band = axes[0].collections[0].get_paths()[0].vertices
    half = 2 * float(values.std()) * math.sqrt(800 / size / 400)
    np.testing.assert_allclose(edges_of_last(band), [1 - half, 1 + half], rtol=1e-5)
    low, high = stats.chi2.ppf([0.005, 0.995], 4) / 4
    np.testing.assert_allclose(axes[1].patches[0].get_y(), low)
    np.testing.assert_allclose(axes[1].patches[0].get_height(), high - low)
    assert axes[2].lines[-1].get_ydata()[0] == 5.0


def edges_of_last(vertices):
    last = vertices[vertices[:, 0] == vertices[:, 0].max(), 1]
    return last.min(), last.max()


def first_chain(mcmc):
    data = to_arviz(mcmc)
    names = ("posterior", "sample_stats", "stein")
    groups = {name: group(data, name) for name in names}
    groups = {name: x.isel(chain=[0]) if "chain" in x.dims else x for name, x in groups.items()}
    return of_groups(dict(data.attrs), **groups)


def test_temperature_of_one_chain_in_given_axes(runs):
    single = first_chain(runs[0])
    _, ax = plt.subplots()
    (found,) = plot_temperature(single, axes=[ax])
    check_readable(found)
    assert found is ax and "mean of the chains" not in legend_of(ax)
    with pytest.raises(ValueError, match="has 2 axes, but 1 are needed.*configurational"):
        plot_temperature(single, axes=[ax, ax])


def test_temperature_with_several_thermostats():
    """And another temperature."""
    draws = np.random.default_rng(0).standard_normal((2, 100, 3))
    found = xr.Dataset(
        {
            "kinetic_temperature": (("chain", "draw"), 2 + 0.1 * draws[..., 0]),
            "thermostat": (("chain", "draw", "thermostat_dim_0"), 5 + draws),
        }
    )
    attrs = {"temperature": 2.0, "friction": 5.0, "dimension": 4}
    axes = plot_temperature(of_groups(attrs, sample_stats=found))
    check_readable(axes)
    assert axes[1].get_ylabel() == "thermostat\n(mean of several)"
    assert legend_of(axes[1]) == ["range of all", "friction 5"]
    np.testing.assert_allclose(axes[1].lines[0].get_ydata(), 5 + draws[0].mean(axis=1))
    assert edges_of_last(axes[1].collections[0].get_paths()[0].vertices) == (
        pytest.approx(5 + draws[:, -1].min()),
        pytest.approx(5 + draws[:, -1].max()),
    )
    low, _ = stats.chi2.ppf([0.005, 0.995], 4) / 4
    assert axes[0].patches[0].get_y() == pytest.approx(2 * low)


def test_temperature_of_many_draws_and_chains():
    """As many points as a picture can show, and no list of all chains."""
    draws = np.random.default_rng(0).standard_normal((12, 20_000)) + 1
    found = xr.Dataset({"configurational_temperature": (("chain", "draw"), draws)})
    (ax,) = plot_temperature(of_groups(sample_stats=found))
    check_readable(ax)
    assert len(ax.lines[0].get_xdata()) <= 2_000 and ax.lines[0].get_xdata()[-1] == 19_999
    assert legend_of(ax) == ["correct draws\n(2 standard errors)", "mean of the chains"]


@pytest.fixture(scope="module")
def epochs():
    kernel = SGHMC(model, step_size=0.01, friction=3.0, subsampling="epochs")
    return run(kernel, ("kinetic_temperature",), num_samples=20)


def test_temperature_that_is_not_known(epochs):
    (ax,) = plot_temperature(epochs)
    assert ax.get_ylabel() == "kinetic\ntemperature"
    nothing = group(to_arviz(epochs), "sample_stats")[["configurational_temperature"]]
    missing = r'mcmc.run\(..., extra_fields=\("thermostat", "kinetic_temperature"\)\)'
    for stats_of_run in (nothing, nothing[[]]):
        with pytest.raises(ValueError, match=missing):
            plot_temperature(of_groups(sample_stats=stats_of_run))


STEP_SIZES = (1e-3, 4e-3)


@pytest.fixture(scope="module")
def runs():
    """SGLD, whose draws are too wide by a factor that is known."""
    return [run(SGLD(model, step_size=h), num_samples=2_000) for h in STEP_SIZES]


@pytest.fixture(scope="module")
def reference():
    return run(NUTS(full_data(model)), num_samples=2_000)


def widening(h):
    """Relative errors of the variances of SGLD, (1 + h v / 2) / (1 - h lambda / 2) - 1."""
    v = N**2 / BATCH * (1 - BATCH / N) * Y.var(axis=0, ddof=1)
    precision = N + 0.01
    return (1 + h * v / 2) / (1 - h * precision / 2) - 1


def test_bias(runs):
    # in any order, of any kind
    mixed = {"last": runs[1], "first": to_arviz(runs[0])}
    axes = plot_bias(mixed)
    check_readable(axes)
    assert axes[0].get_ylabel() == "relative error of the variance"
    assert axes[1].get_ylabel() == "ESS / draws\n(worst)"
    assert axes[2].get_ylabel() == "R-hat - 1\n(worst)" and axes[2].get_xlabel() == "step size"
    assert [label.get_text() for label in axes[2].get_xticklabels()] == ["0.001", "0.004"]
    assert legend_of(axes[0]) == [
        "Stein matrix, mean", "Stein matrix, worst", "hollow: might be 0",
        "slope 1, the order of the method", "slope 2",
    ]  # fmt: skip
    mean = curve(axes[0], "Stein matrix, mean")
    temperatures = [group(to_arviz(mcmc), "stein").attrs["temperature"] for mcmc in runs]
    np.testing.assert_allclose(mean, np.abs(np.array(temperatures) - 1))
    np.testing.assert_allclose(mean, [widening(h).mean() for h in STEP_SIZES], rtol=0.2)
    # the wider the draws, the more of them count as independent
    assert np.all(np.diff(axes[1].lines[0].get_ydata()) > 0)


def curve(ax, label):
    (line,) = (line for line in ax.lines if line.get_label() == label)
    return line.get_ydata()


@pytest.mark.slow
def test_bias_against_a_reference(runs, reference):
    axes = plot_bias(runs, reference)
    check_readable(axes)
    found = curve(axes[0], "reference, root mean square")
    np.testing.assert_allclose(
        found, [np.sqrt(np.mean(widening(h) ** 2)) for h in STEP_SIZES], rtol=0.25
    )
    worst = curve(axes[0], "reference, worst")
    np.testing.assert_allclose(worst, [widening(h).max() for h in STEP_SIZES], rtol=0.25)
    chosen = curve(plot_bias(runs, reference, ["mu"])[0], "reference, worst")
    np.testing.assert_allclose(chosen, [widening(h)[1] for h in STEP_SIZES], rtol=0.25)


def test_bias_that_might_be_zero_is_hollow(reference):
    """Draws without an error, by their own standard errors; no slope goes through noise."""
    posterior = group(to_arviz(reference), "posterior")
    right = [of_groups({"step_size": h}, posterior=posterior.isel(draw=part)) for h, part in
             [(0.1, slice(0, 900)), (0.2, slice(900, 2_000))]]  # fmt: skip
    axes = plot_bias(right, reference)
    check_readable(axes)
    assert legend_of(axes[0]) == [
        "reference, root mean square", "reference, worst", "hollow: might be 0",
    ]  # fmt: skip
    hollow = [line for line in axes[0].lines if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in hollow) == 4


def test_bias_of_single_chains_in_given_axes(runs):
    single = [first_chain(mcmc) for mcmc in runs]
    axes = plot_bias(single)
    check_readable(axes)
    assert axes[2].texts[0].get_text() == "not known: a single chain"
    _, given = plt.subplots(3)
    assert np.all(plot_bias(single, axes=given) == given)


def test_bias_of_a_run_that_does_not_move(runs):
    stuck = group(to_arviz(runs[1]), "posterior")
    stuck = of_groups({"step_size": 1.0}, posterior=stuck * 0)
    check_readable(plot_bias([*runs, stuck], runs[1]))


def test_bias_names_what_is_wrong(runs, reference):
    with pytest.raises(TypeError, match="`runs` is a single run"):
        plot_bias(runs[0])
    with pytest.raises(TypeError, match="`runs` is a single run"):
        plot_bias(to_arviz(runs[0]))
    with pytest.raises(ValueError, match="two different ones at least"):
        plot_bias([runs[0], runs[0]])
    with pytest.raises(ValueError, match="Run 'nuts' does not say its step size"):
        plot_bias({"sgld": runs[0], "nuts": reference})
    with pytest.raises(ValueError, match="no variables"):
        plot_bias(runs, var_names=["nu"])
    unknown = [of_groups({"step_size": h}) for h in (1.0, 2.0)]
    with pytest.raises(ValueError, match="No error is known.*Give a `reference`"):
        plot_bias(unknown)
    with pytest.raises(ValueError, match="no variable in common"):
        plot_bias(unknown, reference)


EXACT = N**2 / BATCH * np.cov(Y.T.astype(float))


def test_gradient_noise_is_exact(runs):
    noise = gradient_noise(runs[0])
    expected = (1 - BATCH / N) * np.linalg.eigvalsh(EXACT)[::-1]
    np.testing.assert_allclose(noise["eigenvalue"], expected, rtol=1e-3)
    np.testing.assert_allclose(noise.attrs["mean"], expected.mean(), rtol=1e-3)
    assert noise.attrs["balance"] == pytest.approx(2 / 1e-3)
    assert noise.attrs["batch_size_rows"] == BATCH and noise["rank"].values.tolist() == [1, 2, 3, 4]


@pytest.mark.nightly
def test_gradient_noise_of_rows_with_replacement_and_sequential_chains():
    kernel = SGHMC(model, step_size=0.01, friction=3.0, subsampling="with_replacement")
    noise = gradient_noise(run(kernel, num_samples=5, num_warmup=5, chain_method="sequential"))
    expected = (1 - 1 / N) * np.linalg.eigvalsh(EXACT)[::-1]
    np.testing.assert_allclose(noise["eigenvalue"], expected, rtol=1e-3)
    assert noise.attrs["balance"] == pytest.approx(4 * math.tanh(3 * 0.01 / 2) / 0.01**2)


def test_gradient_noise_in_the_coordinates_of_a_metric():
    """And of some rows only, by a kernel that has been in a file."""
    metric = np.diag([1.0, 2.0, 3.0, 4.0]) + 0.5
    kernel = SGLD(model, step_size=1e-3, metric=metric)
    mcmc = pickle.loads(pickle.dumps(run(kernel, num_samples=5, num_warmup=5, num_chains=1)))
    expected = (1 - BATCH / N) * np.linalg.eigvals(metric @ EXACT)
    exact = gradient_noise(mcmc)
    np.testing.assert_allclose(exact["eigenvalue"], np.sort(expected.real)[::-1], rtol=1e-3)
    some = gradient_noise(mcmc, max_rows=100, rng_key=random.key(1))
    np.testing.assert_allclose(some["eigenvalue"], exact["eigenvalue"], rtol=0.5)
    assert not np.allclose(some["eigenvalue"], exact["eigenvalue"], rtol=1e-3)


@pytest.mark.nightly
def test_gradient_noise_with_a_control_variate():
    """None at all, where the likelihood is quadratic."""
    values = {"level": jnp.zeros(()), "mu": jnp.ones(3)}
    tuning = Tuning(0.01, 3.0, IdentityMetric(), anchor=Anchor(values, 0.0, values), data="others")
    mcmc = run(SGHMC(model, tuning=tuning), num_samples=5, num_warmup=5)
    noise = gradient_noise(mcmc)
    assert np.all(noise["eigenvalue"] < 1e-6 * EXACT.max())
    check_readable(plot_noise_spectrum(noise))


def two_plates(y):
    level = numpyro.sample("level", dist.Normal(0, 10))
    for name, rows in (("a", 80), ("b", 120)):
        known = y[:rows, 0]
        with numpyro.plate(name, rows, subsample_size=10) as i:
            numpyro.sample(f"y_{name}", dist.Normal(level, 1), obs=known[i])


@pytest.mark.nightly
def test_gradient_noise_of_several_plates_adds_up():
    mcmc = run(SGLD(two_plates, step_size=1e-3), num_samples=5, num_warmup=5, num_chains=1)
    y = Y[:, 0]
    expected = sum(n**2 / 10 * (1 - 10 / n) * y[:n].var(ddof=1) for n in (80, 120))
    found = gradient_noise(mcmc, max_rows=120**2)["eigenvalue"]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_gradient_noise_of_minibatches_that_are_not_independent(epochs):
    """What a single one has; nothing to compare it with, since the noises cancel."""
    noise = gradient_noise(epochs)
    np.testing.assert_allclose(
        noise["eigenvalue"], (1 - BATCH / N) * np.linalg.eigvalsh(EXACT)[::-1], rtol=1e-3
    )
    assert "balance" not in noise.attrs
    ax = plot_noise_spectrum(noise)
    check_readable(ax)
    assert len(legend_of(ax)) == 2


def test_noise_spectrum(mcmc):
    ax = plot_noise_spectrum(mcmc)
    check_readable(ax)
    assert ax.get_xlabel() == "rank" and ax.get_ylabel() == "variance of the gradient's noise"
    noise = gradient_noise(mcmc)
    balance, mean = 4 * math.tanh(5 * 0.03 / 2) / 0.03**2, noise.attrs["mean"]
    above = int(np.sum(noise["eigenvalue"] > balance))
    assert 0 < above < 4
    assert legend_of(ax) == [
        "eigenvalues",
        f"above the line: {above} of 4 ({above / 4:.0%})",
        f"mean {float(f'{mean:.3g}'):,g}",
        "as large as what the friction dissipates, 333",
    ]
    assert len(points_of(ax)) == 4 and ax.lines[-1].get_ydata()[0] == pytest.approx(balance)


def test_noise_spectrum_with_zeros_in_given_axes():
    values = np.append(1 / np.arange(1, 200.0) ** 2, np.zeros(101))
    noise = xr.Dataset({"eigenvalue": ("rank", values)}, {"rank": np.arange(1, 301)}, {"mean": 0.1})
    _, ax = plt.subplots(layout="constrained")
    assert plot_noise_spectrum(noise, ax=ax) is ax
    check_readable(ax)
    assert len(points_of(ax)) == 199 and "not drawn: 101 that are 0" in legend_of(ax)
    check_readable(plot_noise_spectrum(xr.zeros_like(noise).assign_attrs(mean=0.0)))


def test_gradient_noise_names_what_is_wrong(reference, mcmc, monkeypatch):
    with pytest.raises(TypeError, match="kernel of this package.*got NUTS"):
        gradient_noise(reference)
    with pytest.raises(TypeError, match="got"):
        plot_noise_spectrum(to_arviz(mcmc))
    with pytest.raises(ValueError, match="no draws yet"):
        gradient_noise(MCMC(SGLD(model, step_size=0.1), num_warmup=1, num_samples=1))
    monkeypatch.setattr("numpyro_sgmcmc.diagnostics.noise_spectrum._LARGEST_SPECTRUM", 3)
    with pytest.raises(ValueError, match="has 4 parameters.*at most 3"):
        gradient_noise(mcmc)


@pytest.mark.filterwarnings("ignore:No plate of the model")
def test_gradient_without_noise():
    def whole(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 10)), 1), obs=y)

    with pytest.raises(ValueError, match="No plate.*has no noise"):
        gradient_noise(run(SGLD(whole, step_size=1e-3), num_samples=5, num_warmup=5))


STYLES = ["arviz-white", "arviz-darkgrid"] if FIRST_GENERATION else ["arviz-variat", "arviz-tumma"]


@pytest.mark.parametrize("style", STYLES)
def test_pictures_follow_the_style(mcmc, style, tmp_path):
    with plt.style.context(style):
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        axes = plot_temperature(mcmc)
        assert [line.get_color() for line in axes[2].lines[:2]] == ["C0", "C1"] and colors
        for picture in (axes, plot_stein(mcmc)):
            check_readable(picture)
            np.ravel(picture)[0].figure.savefig(tmp_path / "picture.png")


def test_matplotlib_is_imported_when_it_is_needed():
    code = "import sys, numpyro_sgmcmc.plots; assert not {'arviz', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
