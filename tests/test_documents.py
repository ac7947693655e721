# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The code in the documents runs as it is printed."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest
import report

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["README.md", "docs/adding_a_kernel.md", "docs/many_devices.md"])
def test_code_blocks(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    # one after the other, as they are read
    text = "\n".join(blocks)
    subprocess.run([sys.executable, "-c", text], check=True, env=os.environ, timeout=300)


def test_numbers_come_from_benchmarks():
    shown = {}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        for part, block in re.findall(r"<!-- bench (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL):
            assert part in report.PARTS
            script = report.PARTS[part].split()[0]
            assert re.search(rf"\n\*`python {script}.*`: Python .* JAX .* 20\d\d.*\*\n$", block), (
                part
            )
            assert shown.setdefault(part, block) == block, f"{part} differs between documents"
        others = re.sub(r"<!-- bench \w+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
        for row in re.findall(r"^\|.*\|$", others, re.MULTILINE):
            assert not re.search(r"\| *[\d.,]+ *\|", row), f"{path.name}: {row}"
    assert set(shown) == set(report.PARTS) - {"pictures"}


def test_report_replaces_a_block():
    text = "a\n<!-- bench one -->\nold\n<!-- end -->\n<!-- bench two -->\nkept\n<!-- end -->\n"
    assert report.replaced(text, "one", "new") == text.replace("old", "new")


NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))


def cells(notebook):
    return [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


def printed(notebook):
    """All text that the cells of a notebook have put out."""
    found = []
    for output in (output for cell in cells(notebook) for output in cell["outputs"]):
        found += output.get("text", [])
        found += output.get("data", {}).get("text/plain", [])
    return "".join(found)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_as_they_ran(notebook):
    code = cells(notebook)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output["text"]
    for line in printed(notebook).splitlines():
        # the one data set that is not to be had
        assert "digits stand in" not in line or line.startswith("SensIT Vehicle (acoustic)")
    assert not re.search("/(root|home|Users|tmp)/", notebook.read_text())  # of one machine


def test_figures_of_the_papers_come_from_notebooks():
    """Each number that is said to be ours is printed by the notebook of its row."""
    text = (ROOT / "docs" / "reproducing.md").read_text()
    used = set()
    for row in re.findall(r"^\| .*\|$", text, re.MULTILINE):
        *_, ours, _, source = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"<papers/(\w+)>`", source):
            used.add(name)
            shown = printed(ROOT / "notebooks" / "papers" / f"{name}.ipynb")
            for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", ours):
                whole = rf"(?<![\d.])(?<!\d,){number}(?!\d|,\d{{3}})"
                assert re.search(whole, shown), f"{name}: {number}"
    assert used == {path.stem for path in NOTEBOOKS if path.parent.name == "papers"}
