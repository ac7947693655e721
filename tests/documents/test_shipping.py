# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The conda recipe and the citation say what ``pyproject.toml`` says."""

from pathlib import Path
import re
import tomllib

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
RECIPE = (ROOT / "recipe" / "recipe.yaml").read_text()

#: What an extra of ArviZ needs, which conda has no extras for.
OF_EXTRAS = {"matplotlib": "matplotlib-base", "h5netcdf": "h5netcdf"}


def wanted(lines):
    """The sets of versions of each package, one for each line that names it."""
    found = {}
    for line in map(Requirement, lines):
        found.setdefault(line.name, set()).add(line.specifier)
        found |= {OF_EXTRAS[extra]: {SpecifierSet()} for extra in line.extras}
    return found


def in_recipe(section):
    """The same of a section of the recipe, without Python and pip."""
    text = re.search(rf"^  {section}:\n((?:    .*\n)+)", RECIPE, re.MULTILINE)[1]
    lines = re.findall(r"^    - ([\w-]+) ?(.*)$", text, re.MULTILINE)
    return {
        name: set(map(SpecifierSet, versions.split("|")))
        for name, versions in lines
        if name not in ("python", "pip")
    }


def value(text, key):
    found = re.search(rf'^ *{key}: "?([^"\n]*)"?$', text, re.MULTILINE)
    return found and found[1]


def test_the_recipe_has_the_requirements():
    assert in_recipe("run") == wanted(PROJECT["dependencies"])
    assert in_recipe("host") == wanted(BUILD["requires"])
    assert f">={value(RECIPE, 'python_min')}" == PROJECT["requires-python"]
    assert value(RECIPE, "summary") == PROJECT["description"]


def test_a_changed_requirement_is_seen():
    changed = [line.replace("numpyro>=0.22", "numpyro>=0.23") for line in PROJECT["dependencies"]]
    assert in_recipe("run") != wanted(changed)
    assert in_recipe("run") != wanted(PROJECT["dependencies"][:-1])


def test_the_citation_has_the_version_of_the_recipe():
    """And the day of its release; before the first release it has neither."""
    citation = (ROOT / "CITATION.cff").read_text()
    version, day = (value(citation, key) for key in ("version", "date-released"))
    assert (version is None) == (day is None)
    assert version in (None, value(RECIPE, "version"))
    assert value(citation, "license") == value(RECIPE, "license") == PROJECT["license"]
