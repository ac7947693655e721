# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Pictures: that they show the right numbers, and that all of their texts can be read."""

from itertools import pairwise
import subprocess
import sys

import arviz as az
from generations import FIRST_GENERATION, arviz_marks
import matplotlib.pyplot as plt
from matplotlib.text import Text
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from runs import run_mcmc
from scipy import stats
import xarray as xr

from numpyro_sgmcmc import (
    CCAdL,
    plot_stein,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics.runs import group

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


@pytest.fixture(scope="module")
def mcmc():
    kernel = CCAdL(model, step_size=0.03, friction=5.0, steps_per_sample=5)
    fields = ("thermostat", "kinetic_temperature")
    return run_mcmc(kernel, Y, samples=400, chains=2, fields=fields)


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


@pytest.mark.nightly
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
    with pytest.raises(
        ValueError,
        match=r"\['nu'\], which are no latent sites; the latent sites are \['level', 'mu'",
    ):
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


def test_stein_of_a_run_that_has_none():
    with pytest.raises(ValueError, match="no group `stein`.*`to_arviz"):
        plot_stein(of_groups())
    with pytest.raises(TypeError, match="an `MCMC` object after its run, or an ArviZ object"):
        plot_stein({"a": 1})


STYLES = ["arviz-white", "arviz-darkgrid"] if FIRST_GENERATION else ["arviz-variat", "arviz-tumma"]


@pytest.mark.parametrize("style", STYLES)
def test_pictures_follow_the_style(mcmc, style, tmp_path):
    with plt.style.context(style):
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        ax = plot_stein(mcmc)
        assert ax.lines[-1].get_color() in ("C0", *colors)
        check_readable(ax)
        ax.figure.savefig(tmp_path / "picture.png")


@pytest.mark.nightly
def test_matplotlib_is_imported_when_it_is_needed():
    code = "import sys, numpyro_sgmcmc.plots; assert not {'arviz', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
