# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The code in the documents runs as it is printed."""

import ast
import inspect
import json
import os
from pathlib import Path
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import report

import numpyro_sgmcmc

ROOT = Path(__file__).parents[2]


PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def without_blocks(path):
    text = (ROOT / path).read_text()
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(path):
    return re.findall(
        r"^```(\S*)[^\n]*\n(.*?)^```", (ROOT / path).read_text(), re.DOTALL | re.MULTILINE
    )


WITH_CODE = [path for path in PAGES if any(language == "python" for language, _ in blocks(path))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=() if Path(p).name == "README.md" else pytest.mark.nightly)
        for p in WITH_CODE
    ],
    ids=str,
)
def test_code_blocks(path, tmp_path):
    """One after the other, as they are read, in a folder of their own."""
    text = "\n".join(code for language, code in blocks(path) if language == "python")
    script = tmp_path / "page.py"
    script.write_text(text)
    subprocess.run([sys.executable, script.name], check=True, cwd=tmp_path, timeout=300)


@pytest.mark.nightly
def test_the_script_of_several_hosts(tmp_path):
    """On two of them, which are processes."""
    (script,) = [code for kind, code in blocks("docs/many_devices.md") if kind == "{code-block}"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        script = script.replace("host0:1234", f"localhost:{free.getsockname()[1]}")
    script = script.replace("num_processes=4", "num_processes=2")
    script = script.replace(
        "num_warmup=1_000, num_samples=2_000", "num_warmup=200, num_samples=500"
    )
    page = (ROOT / "docs" / "many_devices.md").read_text()
    code = re.search(r"def model.*?(?=\n\n\n)", page, re.DOTALL)[0]
    head = "import numpyro\nimport numpyro.distributions as dist\n\n\n"
    (tmp_path / "my_model.py").write_text(head + code)
    rng, started = np.random.default_rng(0), []
    for k in range(2):
        x = rng.standard_normal((1_000, 3), np.float32)
        np.save(tmp_path / f"X{k}.npy", x)
        np.save(tmp_path / f"y{k}.npy", x[:, 0] + rng.standard_normal(1_000, np.float32))
    environment = os.environ | {"XLA_FLAGS": "", "NPROC": "1"}
    for k in range(2):
        (tmp_path / f"script{k}.py").write_text(script.replace("PROCESS", str(k)))
        command = [sys.executable, f"script{k}.py"]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
    assert [process.wait(300) for process in started] == [0, 0]
    draws = np.load(tmp_path / "draws.npz")["w"]
    assert draws.shape == (2_000, 3)
    assert np.allclose(draws.mean(0), [1, 0, 0], atol=0.1)


def test_no_code_is_left_out():
    """Code that is not marked as Python would not be run."""
    for path in PAGES:
        for language, code in blocks(path):
            assert language or not re.search(r"^(import|from) |MCMC\(", code, re.MULTILINE), path
        others = re.sub(
            r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.DOTALL | re.MULTILINE
        )
        assert not re.search(r"^ {4,}(mcmc|import|from|kernel) ", others, re.MULTILINE), path


def test_links_between_pages():
    """Of files in the repository, with their headings."""
    for path in PAGES:
        text = without_blocks(path)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if "://" in target:
                continue
            assert ((ROOT / path).parent / target.split("#")[0]).exists(), f"{path}: {target}"


PUBLIC = [name for name in dir(numpyro_sgmcmc) if not name.startswith("_")]
PUBLIC = [name for name in PUBLIC if callable(getattr(numpyro_sgmcmc, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    """A summary, every parameter, errors, an example; of methods equations and sources."""
    public = getattr(numpyro_sgmcmc, name)
    text = inspect.getdoc(public)
    summary = text.split("\n\n")[0]
    assert "\n" not in summary and summary.endswith(".")
    if inspect.isclass(public) and issubclass(public, Exception):
        return
    for parameter in inspect.signature(public).parameters:
        entry = rf"^(:param [\w.| ]*\b{parameter}:|- .*\*\*{parameter}\*\*)"
        assert re.search(entry, text, re.MULTILINE), parameter
    assert hasattr(public, "_fields") or re.search("^:raises", text, re.MULTILINE)
    assert ">>> " in text
    if inspect.isclass(public) and issubclass(public, numpyro_sgmcmc.SGMCMCKernel):
        own = public is not numpyro_sgmcmc.SGMCMCKernel
        assert not own or (".. math::" in text and "**References:**" in text)


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.rst"))
    for name in PUBLIC:
        assert re.search(rf"^\.\. auto\w+:: {name}$", text, re.MULTILINE), name


#: Rooms in which a file is a question, a picture or a method, named for it.
NAMED_FOR_THEIR_FILES = ("diagnostics", "long_runs", "plots")


def test_summaries_have_a_head_noun():
    """The first line of a docstring can be read out of context."""
    headless = re.compile(r"(Of|What|Whether|The same|Where|Those|That of|How (far|many|much)) ")
    for path in (ROOT / "numpyro_sgmcmc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                summary = (ast.get_docstring(node) or "").strip()
                assert not headless.match(summary), (path.name, summary.split("\n")[0])


def test_the_code_map_has_the_files():
    """And every room is there; a method's file has its name."""
    text = (ROOT / "docs" / "code_map.md").read_text()
    package = ROOT / "numpyro_sgmcmc"
    methods = {
        Path(inspect.getfile(x)).name
        for x in vars(numpyro_sgmcmc).values()
        if inspect.isclass(x) and issubclass(x, numpyro_sgmcmc.SGMCMCKernel)
    }
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        assert room == path.name or f"{room}/" in text, room
        if path.stem != "__init__" and room not in NAMED_FOR_THEIR_FILES:
            known = re.search(rf"\b{path.name}\b", text) or path.name in methods
            assert known, path.name
    others = "__init__.py", "__pycache__", "py.typed"
    assert len([path for path in package.iterdir() if path.name not in others]) <= 12


def test_numbers_come_from_benchmarks():
    shown = {}
    for path in map(ROOT.joinpath, PAGES):
        text = path.read_text()
        for part, block in re.findall(
            r"<!-- bench ([\w:]+) -->\n(.*?)<!-- end -->", text, re.DOTALL
        ):
            assert part in report.PARTS
            script = report.PARTS[part].split()[0]
            assert re.search(rf"\n\*`python {script}.*`: Python .* JAX .* 20\d\d.*\*\n$", block), (
                part
            )
            assert shown.setdefault(part, block) == block, f"{part} differs between documents"
        # those of refusals are written by `python tests/bad_inputs.py`
        marks = r"<!-- (?:bench [\w:]+|seconds) -->.*?<!-- end -->"
        others = re.sub(marks, "", text, flags=re.DOTALL)
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
