# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Blocks of minibatches: what they estimate, for sizes that divide by nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows import Group
from numpyro_sgmcmc.gradients.blocks import blocks_of

RNG = np.random.default_rng(0)

#: Sub-batches of each stratum, and the number of rows of the minibatch.
CASES = {
    "two rows": ([Group(0, 2, 1.0)], 2),
    "ten of fifty": ([Group(0, 10, 0.9)], 500),
    "a prime number": ([Group(0, 131, 0.5)], 131),
    "23 of two": ([Group(0, 23, 0.9)], 46),
    "strata": ([Group(0, 3, 0.0), Group(3, 7, 0.5), Group(7, 10, 0.9)], 30),
    "strata of single rows": (
        [Group(0, 5, 0.0), Group(5, 45, 0.9), Group(45, 48, 0.5), Group(48, 127, 0.2)],
        127,
    ),
    "a large stratum and many small ones": (
        [*(Group(2 * k, 2 * k + 2, 0.9) for k in range(40)), Group(80, 127, 0.9)],
        127,
    ),
    "strata of eight and a large one": (
        [*(Group(8 * k, 8 * k + 8, 0.9) for k in range(10)), Group(80, 131, 0.9)],
        131,
    ),
}


def gradients_of(blocks, rows, values):
    """Gradients of blocks of rows whose own gradients are ``values``."""
    drawn = blocks.of(DrawnRows(jnp.arange(rows)))
    weights = 1.0 if drawn.weights is None else np.asarray(drawn.weights)
    return np.mean(weights * values[np.asarray(drawn.numbers)], axis=1)


@pytest.mark.parametrize("case", CASES)
def test_the_mean_is_that_of_the_rows(case):
    strata, rows = CASES[case]
    blocks, values = blocks_of(strata, rows), RNG.standard_normal(rows)
    found = blocks.shares @ gradients_of(blocks, rows, values)
    assert found == pytest.approx(values.mean(), abs=1e-6)
    assert sorted(set(blocks.places.ravel())) == list(range(rows))
    assert len(blocks.places) <= (127 if "many small" in case else 32)
    assert blocks.places.size <= 1.25 * rows
    # a constant has no noise
    assert np.allclose(blocks.deviations.sum(1), 0)


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_the_variance_is_unbiased(case):
    """Mean over orders of the rows within strata, and the variance of the mean by its formula."""
    strata, rows = CASES[case]
    blocks, each = blocks_of(strata, rows), rows // strata[-1].stop
    values = RNG.standard_normal(rows) * (1 + np.arange(rows) / rows)
    own = [slice(each * start, each * stop) for start, stop, _ in strata]
    expected = sum(
        factor * np.var(values[s], ddof=1) * len(values[s]) / rows**2
        for s, (_, _, factor) in zip(own, strata, strict=True)
        if factor > 0
    )
    found = []
    for _ in range(4_000):
        shuffled = np.concatenate([RNG.permutation(values[s]) for s in own])
        deviations = blocks.deviations @ gradients_of(blocks, rows, shuffled)
        found.append(np.sum(deviations**2))
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - expected) < 4 * error + 1e-6 * expected
    assert error < 0.02 * expected


def test_weights_of_rows_are_kept():
    """Weights of strata, or of clusters."""
    strata, rows = CASES["a prime number"]
    blocks, weights = blocks_of(strata, rows), RNG.random(rows)
    drawn = blocks.of(DrawnRows(jnp.arange(rows), weights=jnp.asarray(weights)))
    sums = np.asarray(drawn.weights).mean(1) @ blocks.shares
    assert sums == pytest.approx(weights.mean(), rel=1e-5)


@pytest.mark.parametrize(("case", "rank"), [("ten of fifty", 9), ("a prime number", 18)])
def test_rank(case, rank):
    assert blocks_of(*CASES[case]).rank == rank
