# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Latent variables of groups by twelve laws, most of them skewed: against their marginal laws."""

from latent_laws import LAWS, RULES, SEEN, errors, prepared
import pytest

#: Most of the time goes into compiling.
COMPILE_QUICKLY = True


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAWS)
def test_what_is_said_is_true(name):
    """Errors of few nodes and of more, with and without an anchor, and what the tuning says."""
    found = errors(prepared(LAWS[name], 300), RULES)
    for (rule, controlled), (true, said) in found.items():
        assert said > true / 3 - 1e-3
        assert not 0.05 < true < SEEN or true / 2 < said < 2 * true
        assert rule == "few" or true < (0.02 if controlled else 0.1)
