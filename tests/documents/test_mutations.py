# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""That the errors of ``mutations.py`` can still be planted: its runs are nightly."""

from mutations import MUTATIONS, ROOT
import pytest


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_mutation_replaces_is_there_once(name):
    mutation = MUTATIONS[name]
    source = (ROOT / "numpyro_sgmcmc" / mutation.file).read_text()
    assert source.count(mutation.right) == 1
    assert mutation.wrong != mutation.right
