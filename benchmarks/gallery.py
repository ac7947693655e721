# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A page of the gallery: its picture, and ``CCAdL`` beside NUTS on its model.

    python benchmarks/gallery.py NAME

Runs the block of ``docs/models/NAME.md`` in an empty folder, copies its picture, and runs NUTS on
``model`` with ``batch_size=None``. Seconds are those of the processor, over all cores: those of
``mcmc.run``, less those of the draws, are before the first draw.
"""

from contextlib import chdir, redirect_stdout
from functools import partial
from pathlib import Path
import re
import sys
from tempfile import TemporaryDirectory
import time
from types import SimpleNamespace

import jax
import matplotlib
from measure import seconds_of_draws, table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from PIL import Image

from numpyro_sgmcmc import summary

matplotlib.use("Agg")
PAGES = Path(__file__).parents[1] / "docs" / "models"
#: Pages where NUTS is slow, and has fewer steps.
SLOW = "random_intercepts", "random_slopes", "crossed_effects", "survival"
SLOW += "item_response", "choices", "smooth_functions", "network"
#: What is compared where it is not all sites: of a network its predictions.
SITES = {"network": ["curve"]}
CHAINS, ASKED = 2, 400
HEADER = "", "first draw, s", f"to {ASKED} ESS, s", "ESS", "means off, sd", "ratios of sd"


class Timed(MCMC):
    def run(self, *args, **options):
        start = time.process_time()
        super().run(*args, **options)
        jax.block_until_ready(self.get_samples())
        self.seconds = time.process_time() - start


def of_page(name):
    """What the block of a page defines, after its picture is kept."""
    code = re.search(r"^```python\n(.*?)^```", (PAGES / f"{name}.md").read_text(), re.M | re.S)[1]
    numpyro.infer.MCMC, found = Timed, {}
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(sys.stderr):
        exec(compile(code, f"{name}.md", "exec"), found)
        with Image.open(f"{name}.png") as picture:  # 64 colours, a third of the bytes
            picture.convert("RGB").quantize(64).save(PAGES / f"{name}.png", optimize=True)
    return found


def main(name) -> None:
    page = of_page(name)
    ours, data, number = page["mcmc"], page["data"], 200 if name in SLOW else 500
    nuts = Timed(
        NUTS(partial(page["model"], batch_size=None)), num_warmup=number, num_samples=number,
        num_chains=CHAINS, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    nuts.run(jax.random.key(1), *data)
    last = jax.tree.map(lambda x: x[0], nuts.last_state)
    one = SimpleNamespace(sampler=nuts.sampler, last_state=last)
    cost = partial(seconds_of_draws, args=data, rounds=1, clock=time.process_time)
    drawing = cost(ours, draws=ours.num_samples), cost(one, draws=50) * CHAINS * number / 50
    draws = [mcmc.get_samples(group_by_chain=True) for mcmc in (ours, nuts)]
    both = [site for site in draws[0] if site in draws[1]]
    names, rows, moments = SITES.get(name, both), [], []
    for mcmc, found, seconds in zip((ours, nuts), draws, drawing, strict=True):
        found = [np.asarray(found[site], float) for site in names]
        found = np.concatenate([x.reshape(*x.shape[:2], -1) for x in found], axis=-1)
        moments += [found.mean((0, 1)), found.std((0, 1))]
        vary = moments[1] > 1e-6 * (1 + abs(moments[0]))
        size, before = effective_sample_size(found[..., vary]).min(), mcmc.seconds - seconds
        rows.append([f"{before:.1f}", f"{before + ASKED * seconds / size:.1f}", f"{size:,.0f}"])
    mean, sd, right, right_sd = (x[vary] for x in moments)
    off, ratio = (abs(mean - right) / right_sd).max(), sd / right_sd
    kernel = type(ours.sampler).__name__
    compared = f"{off:.2f}", f"{ratio.min():.2f} to {ratio.max():.2f}"
    print(table(HEADER, [[kernel, *rows[0], *compared], ["NUTS", *rows[1], "", ""]]))
    print(f"Seconds of the processor. NUTS: {CHAINS} chains of {number} + {number} steps.")
    print(f"{mean.size} numbers are compared. The verdict on {kernel}: {summary(ours).verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:])
