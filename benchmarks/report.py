# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Runs the benchmarks and puts their tables into the documents.

    python benchmarks/report.py [PART ...] [--data FOLDER] [--cache FOLDER]

A document has a block for each part that it shows, between ``<!-- bench PART -->`` and
``<!-- end -->``: what the part prints takes the place of what is there, with the command, the
machine, the versions and the date under it. Without names all parts are run; those on real data
need the folder with the data, and the suite one to keep its runs of NUTS in.
"""

import argparse
from pathlib import Path
import re
import subprocess
import sys

from measure import machine

ROOT = Path(__file__).parent.parent
PAGES = (
    "benchmarks",
    "benchmark_posteriors",
    "benchmark_steps",
    "benchmark_noise",
    "benchmark_runs",
    "benchmark_chains",
    "benchmark_long_runs",
    "diagnostics",
    "verdict_accuracy",
    "debiased",
    "certificate",
    "check_and_compare",
    "rows_on_disk",
    "many_devices",
    "internet_scale",
    "numpyro_examples",
    "rare_rows",
    "groups",
    "maps",
    "shrinkage",
    "panels",
    "group_integrals",
    "group_benchmarks",
    "calibrated",
    "calibrated_coverage",
    "network_benchmarks",
    "growing_rows",
    "modes",
    "step_sizes",
)
#: Pages of kinds of models, each of which has a part of its own.
GALLERY = [
    path.stem
    for path in sorted((ROOT / "docs" / "models").glob("*.md"))
    if f"<!-- bench gallery:{path.stem} -->" in path.read_text()
]
PAGES += tuple(f"models/{name}" for name in GALLERY)
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in PAGES))

#: The command of each part; a word in braces is an option of this script.
PARTS = {
    "posterior": "benchmarks/posterior.py --picture docs/nuts_and_minibatches.png",
    "too_wide": "examples/too_wide.py",
    "step_cost": "benchmarks/step_cost.py --only by_hand",
    "growth": "benchmarks/step_cost.py --only rows parameters",
    "bar": "benchmarks/running.py --only bar",
    "second": "benchmarks/running.py --only second",
    "first": "benchmarks/running.py --only first",
    "changed": "benchmarks/running.py --only changed",
    "chains": "benchmarks/running.py --only chains devices processes",
    "memory": "benchmarks/running.py --only memory",
    "disk": "benchmarks/disk.py",
    "scale_check": "benchmarks/scale.py --only check",
    "scale_clusters": "benchmarks/scale.py --only clusters",
    "overhead": "benchmarks/long_runs.py --only overhead",
    "long_runs": "benchmarks/long_runs.py --only disk",
    "kills": "benchmarks/long_runs.py --only kills",
    "tuning_cost": "benchmarks/tuning_cost.py",
    "peers": "benchmarks/peers.py",
    "speed": "benchmarks/speed.py",
    "alternatives": "benchmarks/alternatives.py --seconds 8 --cases rare 10000x20 100000x20",
    "alternatives_large": (
        "benchmarks/alternatives.py --seconds 8 --cases 10000x100 1000000x20 100000x100"
    ),
    "numpyro_examples": "benchmarks/numpyro_examples.py",
    "suite": "benchmarks/suite.py --data {data} --cache {cache}",
    "groups": "benchmarks/groups.py flat",
    "group_laplace": "benchmarks/groups.py laplace",
    "group_draws": "benchmarks/groups.py errors",
    "latent_laws": "benchmarks/latent_laws.py",
    "groups_and_nuts": (
        "benchmarks/groups_and_nuts.py --data {data} intercepts counts mixture verbagg"
    ),
    "covariances": "benchmarks/covariances.py --runs 122",
    "insteval": "benchmarks/insteval.py --data {data}",
    "movielens": "benchmarks/movielens.py --data {data}",
    "movielens_likes": "benchmarks/movielens.py --data {data} --liking",
    "factorisation": "benchmarks/factorisation.py --data {data}",
    "ratings": (
        "benchmarks/ratings.py --ratings 25000000 --users 162000 --items 59000 --share 0.01"
        " --buckets 3 --draws 600"
    ),
    "clicks": "benchmarks/clicks.py",
    "maps": "benchmarks/maps.py --picture docs/maps.png",
    "shrinkage": "benchmarks/shrinkage.py linear logistic",
    "panels": (
        "benchmarks/panels.py counts robust binary hidden bikes --data {data}"
        " --picture docs/panels.png"
    ),
    "panels_length": "benchmarks/panels.py length",
    "panels_many": "benchmarks/panels.py many",
    "after_a_run": "benchmarks/after_a_run.py",
    "matches": "benchmarks/matches.py",
    "growing": "benchmarks/growing.py --draws 2000 --picture docs/growing_rows.png",
    "coverage": "benchmarks/intervals.py",
    "calibrated_sandwich": "benchmarks/intervals.py sandwich",
    "calibrated_cost": "benchmarks/intervals.py cost",
    "calibrated_flights": (
        "benchmarks/intervals.py flights --data {data} --picture docs/plot_calibrated.png"
    ),
    "battery": "benchmarks/posterior_battery.py --data {data} --cache {cache}",
    "pictures": "benchmarks/pictures.py --folder docs",
    "diagnostics": "benchmarks/diagnostics.py --picture docs/step_sizes.png",
    "alarms": "benchmarks/alarms.py --only hurdle shape negative",
    "certificates": "benchmarks/certificates.py",
    "networks": "benchmarks/networks.py --data {data}",
    "ensembles": "benchmarks/ensembles.py --data {data}",
    "modes": "benchmarks/modes.py",
    "debiased": "benchmarks/debiased.py --only right steps cost --picture docs/debiased.png",
    "debiased_errors": "benchmarks/debiased.py --only errors",
    "debiased_suite": "benchmarks/debiased.py --only suite --data {data} --cache {cache}",
    "strata": "benchmarks/strata.py",
    "noise_estimates": "benchmarks/noise_estimates.py",
    "anisotropic_noise": "benchmarks/anisotropic_noise.py --picture docs/anisotropic_noise.png",
    "devices": "benchmarks/devices.py",
    "largest_step": (
        "benchmarks/largest_step.py --data {data}/mnist.npz --picture docs/largest_step.png"
    ),
} | {f"gallery:{name}": f"benchmarks/gallery.py {name}" for name in GALLERY}


def replaced(text: str, part: str, found: str) -> str:
    """A document with what a part has found in its block."""
    block = re.compile(rf"(<!-- bench {part} -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{found}\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--data")
    parser.add_argument("--cache")
    options = parser.parse_args()
    folders = {name: value for name in ("data", "cache") if (value := getattr(options, name))}
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    for part, command in PARTS.items():
        if options.parts and part not in options.parts:
            continue
        missing = [name for name in re.findall(r"{(\w+)}", command) if name not in folders]
        if missing:
            print(f"{part} is left out: it needs --{' and --'.join(missing)}", flush=True)
            continue
        script, *arguments = command.format(**folders).split()
        print(f"{part} ...", flush=True)
        done = subprocess.run(
            [sys.executable, script, *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        shown = command.format(data="FOLDER", cache="FOLDER")
        printed = done.stdout.strip()
        text = printed if "| ---" in printed else f"```\n{printed}\n```"
        found = f"{text}\n\n*`python {shown}`: {machine()}*"
        print(f"{found}\n", flush=True)
        for name in DOCUMENTS:
            document = ROOT / name
            document.write_text(replaced(document.read_text(), part, found))


if __name__ == "__main__":
    main()
