# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""How wrong the integrals over the latent variables of groups are, and what that does."""

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.target.potential import full_data_gradient, ravel, rows_in
from numpyro_sgmcmc.target.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

#: Power steps for the direction in which it matters most.
_POWER_STEPS = 4

#: Few nodes are enough if they move the draws by no more than this, in standard deviations.
_ENOUGH = 0.02


def rule_of_steps(
    target: Target, rng_key: Array, gaussian: Gaussian, controlled: bool
) -> tuple[str, float, float]:
    """
    The rule with the fewest points by which the integrals of a step are good enough, or else the
    one with the most. Parameters are those of :func:`error_of_integrals`.

    :return: the rule, its error in standard deviations, and the cost in passes over the data.
    """
    few, step = (target._replace(view=target.view.with_rule(rule)) for rule in ("few", "step"))
    cost = 0.0
    if few.view.plates != step.view.plates:
        error, cost = error_of_integrals(few, rng_key, gaussian, controlled)
        if error <= _ENOUGH:
            return "few", error, cost
    error, more = error_of_integrals(step, rng_key, gaussian, controlled)
    return "step", error, cost + more


def error_of_integrals(
    target: Target, rng_key: Array, gaussian: Gaussian, controlled: bool
) -> tuple[float, float]:
    """
    By how much the rule of a step moves the posterior, in its standard deviations. With

    .. math::

        e(\\zeta) = L^\\top \\left( \\nabla U(c + L \\zeta) - \\nabla U_r(c + L \\zeta) \\right)

    for a rule :math:`r` that is closer to the truth
    (:func:`~numpyro_sgmcmc.target.inner_rules.log_integral`), it is what :math:`e` changes by
    within a standard deviation of the centre :math:`c`, in the direction in which that is most
    (power steps with differences),

    .. math:: \\max_{|v| = 1} \\left| \\tfrac12 \\left[ e(v) - e(-v) \\right] \\right| ,

    since an anchor has the gradient at the centre by many more points. Without a control variate
    what they have in common, :math:`\\tfrac12 \\left| e(v) + e(-v) \\right|`, counts as well.

    :param target: a model with latent sites inside of subsampled plates.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param bool controlled: whether the gradient has a control variate.
    :return: the error, and its cost in passes over the data.
    """
    view = target.view
    check = view.with_rule("check")
    if check.plates == view.plates and not view.drawn_plates:
        return 0.0, 0.0  # nothing is integrated, or only summed
    start = gaussian.metric

    def errors(target: Target, direction: Array) -> tuple[Array, Array]:
        rules = [target._replace(view=view.sketch) for view in (target.view, check)]

        def wrong(zeta: Array) -> Array:
            values = target.unravel(start.values(zeta))
            step, right = (
                full_data_gradient(
                    x.potential(IdentityMetric()), x.view.plates, values, random.key(0)
                )[1]
                for x in rules
            )
            return start.pullback(ravel(jax.tree.map(jnp.subtract, step, right)))

        def power_step(direction: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
            ends = lax.map(wrong, jnp.stack([direction, -direction]))
            change, common = target.mean(((ends[0] - ends[1]) / 2, (ends[0] + ends[1]) / 2))
            size = jnp.linalg.norm(change)
            return change / jnp.maximum(size, 1e-30), (size, jnp.linalg.norm(common))

        first = direction / jnp.linalg.norm(direction)
        _, (changes, common) = lax.scan(power_step, first, None, length=_POWER_STEPS)
        return changes.max(), common.max()

    direction = random.normal(rng_key, start.center.shape, start.center.dtype)
    change, common = (float(x) for x in target.compiled(errors)(direction))
    seen = max(rows_in(plate) / plate.size for plate in view.sketch.plates)
    return (change if controlled else max(common, change)), 4.0 * _POWER_STEPS * seen
