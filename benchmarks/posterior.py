# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The same posterior from NUTS and from minibatches, as a picture and as a table.

    python benchmarks/posterior.py [--picture PATH]

Logistic regression of 100,000 rows on 20 covariates, that of ``benchmarks/speed.py``; minibatches
of 500. Seconds are those to 10,000 effective samples of the worst parameter: before the first draw,
plus the number divided by the rate.
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib
from measure import table
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS
from speed import data, logistic, timed

from numpyro_sgmcmc import CCAdL, full_data

matplotlib.use("Agg")

ROWS, COLUMNS, ASKED, SHOWN = 100_000, 20, 10_000, (0, 1, 2, 3)


def picture(path: Path, found: dict[str, tuple[np.ndarray, float]]) -> None:
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    fig, axes = plt.subplots(1, len(SHOWN), figsize=(10, 2.8), layout="constrained")
    for k, axis in zip(SHOWN, axes, strict=True):
        for (name, (w, seconds)), color in zip(found.items(), ("0.75", "C0"), strict=True):
            draws = w[..., k].ravel()
            grid = np.linspace(draws.mean() - 4 * draws.std(), draws.mean() + 4 * draws.std(), 200)
            density = gaussian_kde(draws)(grid)
            label = f"{name}: {seconds:.0f} s"
            if color == "C0":
                axis.plot(grid, density, color=color, label=label)
            else:
                axis.fill_between(grid, density, color=color, linewidth=0, label=label)
        axis.set(title=f"w[{k}]", yticks=[])
        axis.spines[["left", "right", "top"]].set_visible(False)
        axis.locator_params(axis="x", nbins=3)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    fig.suptitle(f"Logistic regression, {ROWS:,} rows; time to {ASKED:,} effective samples")
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    x, y = data(ROWS, COLUMNS)
    ways = {
        "NUTS, all rows": (partial(NUTS, full_data(logistic)), 500, 1_500, 1),
        "CCAdL(model), minibatches of 500": (
            partial(CCAdL, logistic, progress_bar=False), 500, 2_500, 4,
        ),
    }  # fmt: skip
    found, lines = {}, []
    for name, (make, warmup, draws, chains) in ways.items():
        total, drawing, w = timed(make, (x, y), warmup, draws, chains)
        size = float(np.min(effective_sample_size(w)))
        before = total - drawing
        seconds = before + ASKED * drawing / size
        found[name] = (w, seconds)
        lines.append([name, f"{before:.1f}", f"{size / drawing:,.0f}", f"{seconds:.0f}"])
    (one, _), (other, _) = found.values()
    one, other = (w.reshape(-1, COLUMNS) for w in (one, other))
    away = np.abs(other.mean(0) - one.mean(0)) / one.std(0)
    ratio = other.std(0) / one.std(0)
    header = ["", "seconds before the first draw", "ESS a second, then", f"seconds to {ASKED:,}"]
    print(table(header, lines))
    print(
        f"Means differ by at most {away.max():.3f} standard deviations, which have ratios from"
        f" {ratio.min():.3f} to {ratio.max():.3f}, over {COLUMNS} parameters."
    )
    if options.picture:
        picture(options.picture, found)


if __name__ == "__main__":
    main()
