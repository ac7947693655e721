# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""That the errors of ``mutations.py`` can still be planted: its runs are nightly."""

import ast

from mutations import MUTATIONS, ROOT, planted
import pytest


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_error_can_be_planted(name):
    _, right, wrong = planted(MUTATIONS[name], ROOT)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(right))
