# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Programs that JAX's compilation cache keeps for the next process."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


def process(folder, bar="no"):
    """How many programs were there, how many were not, and the sum of the draws."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "kept_programs.py", bar]
    done = subprocess.run(command, cwd=SUPPORT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hits, misses, draws = done.stdout.split()
    return int(hits), int(misses), float(draws)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    return folder, process(folder)


@pytest.mark.nightly
def test_another_process_compiles_nothing(kept):
    """Nothing in a program depends on a process: no address, no number of an object."""
    folder, (_, misses, draws) = kept
    again = process(folder)
    assert misses > 0
    assert again[1:] == (0, draws)


@pytest.mark.nightly
def test_nor_does_one_with_a_progress_bar(kept):
    """Its loop is NumPyro's, in Python: one call of a sample is a program of its own."""
    folder, (_, _, draws) = kept
    first, again = process(folder, "bar"), process(folder, "bar")
    assert first[1] < 5
    assert again[1:] == (0, pytest.approx(draws, rel=1e-4))


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["damaged", "a file", "not to be written"])
def test_a_cache_that_is_of_no_use_stops_nothing(kept, folder, tmp_path):
    _, (_, _, draws) = kept
    where = tmp_path / "cache"
    if folder == "damaged":
        where.mkdir()
        for entry in kept[0].iterdir():
            (where / entry.name).write_bytes(entry.read_bytes()[:50])
    elif folder == "a file":
        where.touch()
    else:
        where = Path("/proc/nowhere")
    assert process(where)[2] == draws
