# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The benchmark for GPUs runs on whatever device there is."""

import json
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_quick_run_has_numbers_and_a_table(tmp_path):
    out, traces = tmp_path / "found.json", tmp_path / "traces"
    command = [sys.executable, "benchmarks/gpu.py", "--quick"]
    command += ["--out", str(out), "--profile", str(traces)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(out.read_text())
    assert found["machine"] in done.stdout
    kept = [one for one in found["results"] if one["method"] not in ("ChEES", "MCLMC")]
    assert {one["case"].split()[0] for one in kept} == {"logistic,", "network", "hierarchy,"}
    for one in kept:
        assert "left_out" not in one, one
        for key in ("seconds_to_first_draw", "microseconds_a_sample", "ess_a_second"):
            assert np.isfinite(one[key]) and one[key] > 0, one
        assert f"| {one['case']}: {one['method']} | {one['chains']} |" in done.stdout
    assert len(list(traces.rglob("*.xplane.pb"))) == 3
