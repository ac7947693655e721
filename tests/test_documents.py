# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The code in the documents runs as it is printed."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest
import report

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["README.md", "docs/adding_a_kernel.md"])
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
