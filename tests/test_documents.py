# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The code in the documents runs as it is printed."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["README.md", "docs/adding_a_kernel.md"])
def test_code_blocks(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    # one after the other, as they are read
    text = "\n".join(blocks)
    subprocess.run([sys.executable, "-c", text], check=True, env=os.environ, timeout=300)
