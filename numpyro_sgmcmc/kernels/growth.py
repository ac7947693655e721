# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Runs that go on after rows were added or removed: their constants and their chains.

Before the first step of a sample the chains know :math:`N` rows, and :math:`N'` rows exist. Then

- the **anchor** gets the contributions of the new rows to its sums; if known rows have changed, or
  count differently, it is computed by a pass over all rows;
- the **mode** of the posterior is about :math:`m' = \\hat\\theta - L' L'^\\top \\nabla
  U_{N'}(\\hat\\theta)`; if its root mean square distance to the anchor, over the coordinates, is
  more than half a standard deviation, the anchor moves to the mode, by a pass;
- the **metric** becomes narrower, :math:`L' = \\sqrt{N / N'} L`, and its centre moves along with
  the mode, :math:`c' = c + m' - m`;
- the **chains** stay where they are in its coordinates, :math:`\\theta' = c' + L' L^{-1} (\\theta -
  c)`: a draw of the old posterior becomes a draw of the new one, as far as both are Gaussian;
- the **Stein matrix** has only the draws after the change.

Where rows are forgotten, :math:`N` and :math:`N'` are the sums of the weights of the rows.

Step size, friction and, with a control variate, noise stay, because they belong to the coordinates.
Without a control variate the noise grows like :math:`N' / N`, and its running estimate follows. If
rows come evenly, the anchor moves about four times until their number has doubled.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.growing import (
    FEWEST_COUNTED,
    PaddedArray,
    growing_in,
    replaced,
    row_count_of,
)
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk
from numpyro_sgmcmc.kernels.chains import axes_of
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.state import ChainConstants, RowProgress, SGMCMCState
from numpyro_sgmcmc.posterior.control_variate import Anchor, order_of
from numpyro_sgmcmc.posterior.growing import with_new_rows
from numpyro_sgmcmc.posterior.metric import IdentityMetric, Metric
from numpyro_sgmcmc.posterior.model import Values, unremarkable_values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.stein import SteinSums

_FAR = 0.25  #: mean square of the distance to the mode at which an anchor moves, in variances
_MOVES = 3  #: the most moves of an anchor at once

#: Relative difference of log densities beyond rounding: it shows a model that looks at other rows.
_SAME = 1e-3


def with_rows_so_far(target: Target, state: SGMCMCState) -> SGMCMCState:
    """
    The state of one or several chains, updated to all rows that exist.

    :raises ValueError: if the run was begun with arrays and the target has growing rows, or the
        reverse.
    """
    known, now = state.fixed.known, target.known
    if (known is None) != (now is None):
        begun, here = ("arrays", "a `GrowingRows`")[:: 1 if known is None else -1]
        raise ValueError(
            f"The run was begun with {begun}, and cannot continue with {here}. Set"
            " `mcmc.post_warmup_state = None` to begin another run."
        )
    if known is None or now is None:
        return state
    several = jnp.ndim(state.i) > 0
    if several and axes_of(state).fixed.step_size == 0:
        return jax.vmap(partial(with_rows_so_far, target))(state)
    has_changed = jnp.any(now.digest != known.digest)

    def change(
        parts: tuple[ChainConstants, Values, SteinSums],
    ) -> tuple[ChainConstants, Values, SteinSums]:
        fixed, z, stein = parts
        new = _changed(target, fixed)

        def carried(z: Values) -> Values:
            there = fixed.metric.coordinates(ravel(z))
            return target.unravel(new.metric.values(there))

        moved = (jax.vmap(carried) if several else carried)(z)
        return new, moved, _reset(stein)

    layout, nothing = state.fixed.layout, None
    # the branches of a condition may return arrays only
    parts = state.fixed._replace(layout=nothing), state.z, state.monitor.stein  # type: ignore
    fixed, z, stein = lax.cond(has_changed, change, lambda parts: parts, parts)
    prefetched = state.prefetched
    if prefetched is not None:  # these rows were drawn before the change
        start = jnp.where(has_changed, -1, prefetched.start)
        prefetched = prefetched._replace(start=start)
    return state._replace(
        fixed=fixed._replace(layout=layout),
        z=z,
        monitor=state.monitor._replace(stein=stein),
        prefetched=prefetched,
    )


def _changed(target: Target, fixed: ChainConstants) -> ChainConstants:
    """The constants of the chains, updated to all rows that exist."""
    known, now, anchor = fixed.known, target.known, fixed.anchor
    assert known is not None and now is not None
    dtype = target.model.dtype
    worth = now.worth(dtype)
    growth = worth / known.worth
    none = jnp.zeros(target.model.dimension, dtype)
    metric, shift = fixed.metric.narrowed(growth**-0.5, none), jnp.full_like(none, jnp.nan)
    if anchor is not None:
        mode, anchor = _mode(fixed.metric, anchor), _anchor_of_all(target, metric, fixed)
        moved = _mode(metric, anchor) - mode
        metric = metric.narrowed(jnp.ones((), dtype), moved)
        if not isinstance(metric, IdentityMetric) and now.half_life is None:
            # the shift is defined only if rows were added and none removed or forgotten
            shift = metric.coordinates(metric.center + moved) / jnp.sqrt(growth - 1)
            has_more = now.begins_with(known.rows, known.digest)
            shift = jnp.where(has_more, shift, jnp.nan)
    return fixed._replace(
        metric=metric,
        variances=metric.variances(none),
        anchor=anchor,
        known=RowProgress(now.rows, now.digest, known.rows, shift, worth),
    )


def _anchor_of_all(target: Target, metric: Metric, fixed: ChainConstants) -> Anchor:
    """The anchor with all rows that exist, near their mode."""
    known, now, anchor = fixed.known, target.known, fixed.anchor
    assert known is not None and now is not None and anchor is not None
    has_other_rows = ~now.begins_with(known.rows, known.digest)
    # the old sums are of no use if known rows have changed
    anchor = with_new_rows(target, anchor, jnp.where(has_other_rows, now.rows, known.rows))
    can_move = not isinstance(metric, IdentityMetric)

    def is_due(run: tuple[Array, Array, Anchor]) -> Array:
        moves, is_of_others, anchor = run
        far = jnp.mean(metric.pullback(ravel(anchor.gradient)) ** 2) > _FAR
        return is_of_others | (far & (moves < _MOVES) & can_move)

    def move(run: tuple[Array, Array, Anchor]) -> tuple[Array, Array, Anchor]:
        moves, is_of_others, anchor = run
        there = jnp.where(is_of_others, ravel(anchor.values), _mode(metric, anchor))
        moved = target.anchor(target.unravel(there), order_of(anchor))
        moved = moved._replace(reach=anchor.reach)
        return moves + 1, jnp.zeros_like(is_of_others), moved

    return lax.while_loop(is_due, move, (jnp.zeros((), jnp.int32), has_other_rows, anchor))[2]


def _mode(metric: Metric, anchor: Anchor) -> Array:
    """The estimated mode, by a Newton step from the anchor."""
    step = metric.direction(metric.pullback(ravel(anchor.gradient)))
    return ravel(anchor.values) - step


def _reset(sums: SteinSums) -> SteinSums:
    """Empty sums around the old centre."""
    none = jax.tree.map(jnp.zeros_like, sums)
    return none._replace(center=sums.center, length=jnp.ones_like(sums.length))


def with_row_progress(
    method: Method, name: str, target: Target, fixed: ChainConstants, arguments: tuple[tuple, dict]
) -> ChainConstants:
    """
    The constants of chains, with the progress of growing rows if there are some.

    :param name: the name of the kernel.
    :param target: the model with the rows that exist, as arrays.
    :param arguments: the arguments of the model, with growing rows.
    :raises ValueError: if the rows of this model cannot grow.
    """
    if (known := row_count_of(arguments)) is None:
        return fixed
    check_growth(name, target, method, *arguments)
    dtype = target.model.dtype
    nothing, worth = jnp.zeros(target.model.dimension, dtype), known.rows.astype(dtype)
    # the tuning gives all rows one weight, and the first sample begins with the true weights
    digest = known.digest if known.half_life is None else jnp.zeros_like(known.digest)
    return fixed._replace(known=RowProgress(known.rows, digest, known.rows, nothing, worth))


def check_growth(
    kernel: str, whole: Target, method: Method, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """
    Check that a run of this model can go on when rows are added.

    :param kernel: the name of the kernel.
    :param whole: the model with the rows that there are, as arrays.
    :param args: arguments of the model, with growing rows.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: if the rows of this model cannot grow, or if this run cannot go on with more
        rows.
    """
    begin = f"{kernel} cannot go on when rows are added"
    if whole.scheme.draw_so_far is None:
        raise ValueError(
            f"{begin} with subsampling={method.scheme!r}, which needs a fixed number of rows. Use"
            " 'without_replacement' or 'with_replacement'."
        )
    if isinstance(method.strata, dict) or method.anchor_moves_every is not None:
        name = "gradient" if method.strata in ("auto", None) else "subsampling"
        raise ValueError(
            f"{begin} with this `{name}`, which is for a fixed number of rows. Leave `{name}` out."
        )
    if whole.strata or whole.centring:
        raise ValueError(
            f"{begin} with a `tuning` for arrays, which has strata or coordinates of a hierarchy."
            " Let the kernel tune itself on the `GrowingRows`."
        )
    growing = growing_in((args, kwargs))
    size = growing[0].known.rows
    names = [plate.name for plate in whole.model.plates]
    if len(names) != 1 or whole.model.plates[0].size != size:
        raise ValueError(
            "A model with a `GrowingRows` needs exactly one plate with a `subsample_size`,"
            " `numpyro.plate('rows', y.shape[0], subsample_size=...)`. Here the plates are"
            f" {', '.join(f'{p.name!r} of size {p.size:,}' for p in whole.model.plates) or 'none'},"
            f" and there are {int(size):,} rows."
        )
    worth = float(growing[0].known.worth(whole.model.dtype))
    counted = whole.model.plates[0].subsample_size * worth / int(size)
    if growing[0].known.half_life is not None and counted < FEWEST_COUNTED:
        raise ValueError(
            f"With half_life={float(growing[0].known.half_life):g} the {int(size):,} rows count as"
            f" {worth:,.0f}, and a minibatch of {whole.model.plates[0].subsample_size} as"
            f" {counted:.1f}; at least {FEWEST_COUNTED} are needed. Remove rows older than ten"
            " half-lives, `rows.remove(...)`, or give the plate a larger `subsample_size`."
        )
    others = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_has_rows) if _has_rows(x)]
    fixed = [x for x in others if not isinstance(x, PaddedArray) and x.shape[:1] == (int(size),)]
    if fixed:
        raise ValueError(
            f"An argument of the model has {int(size):,} rows, shape {tuple(fixed[0].shape)}, and"
            " is not in the `GrowingRows`. Put all arrays with a row for each row of the plate"
            " into it."
        )
    capacity = growing[0].values.shape[0]
    _check_rest(whole, capacity, *_with_other_room(args, kwargs))


def _has_rows(x: Any) -> bool:
    return isinstance(x, PaddedArray) or bool(getattr(x, "shape", ()))


def _with_other_room(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict]:
    """The arguments with the spare room filled with copies of one row."""

    def filled(x: PaddedArray) -> Any:
        if isinstance(x.values, RowsOnDisk):
            return x.values  # a model reads only the rows that it asks for
        return x.values[np.minimum(np.arange(len(x.values)), int(x.known.rows) - 1)]

    return replaced(filled, (args, dict(kwargs)))


def _check_rest(whole: Target, capacity: int, args: tuple, kwargs: dict) -> None:
    """
    Check that the contribution of a row does not depend on the other rows.

    :raises ValueError: if the contribution of a row depends on other rows, or on their number.
    """
    z = unremarkable_values(whole.model)
    plate = whole.model.plates[0]
    here = whole.model.log_densities(z, whole.args, whole.kwargs)
    there = whole.model.padded(capacity).log_densities(z, args, kwargs)
    for name, value in here.items():
        x, y = float(jnp.sum(value)), float(jnp.sum(there[name]))
        options = (x, x * capacity / plate.size)
        if not any(np.isclose(y, option, rtol=_SAME, atol=1e-6) for option in options):
            raise ValueError(
                f"The log density of rows at site '{name}' depends on the other rows, or on their"
                " number, but the arrays of a `GrowingRows` have room for more rows. Compute"
                " means, scales and numbers of rows before the run, and pass them as arguments. In"
                " the model read rows only by the indices of the plate."
            )
