# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""How wrong the integrals over the latent variables of groups are, and what that does."""

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.target.potential import full_data_gradient, ravel
from numpyro_sgmcmc.target.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

#: Draws of the Gaussian at which it is looked.
_DRAWS = 4


def error_of_integrals(
    target: Target, rng_key: Array, gaussian: Gaussian, controlled: bool
) -> tuple[float, float]:
    """
    By how much the rule of a step moves the posterior, in its standard deviations: the largest
    entry of

    .. math:: L^\\top \\left( \\nabla U(\\theta) - \\nabla U_f(\\theta) \\right)

    at draws of the Gaussian, with :math:`U_f` by many more points; with a control variate that of
    its difference from the centre, since :math:`\\nabla U_f` there is what the anchor has.

    :param target: a model with latent sites inside of subsampled plates.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param bool controlled: whether the gradient has a control variate.
    :return: the error, and its cost in passes over the data.
    """
    fine = target._replace(view=target.view.fine)
    if fine.view is target.view:
        return 0.0, 0.0
    start = gaussian.metric

    def seen(target: Target, fine: Target, points: Array) -> Array:
        plates, key = target.view.plates, random.key(0)

        def at(point: Array) -> Array:
            values = target.unravel(point)
            coarse, exact = (
                full_data_gradient(x.potential(IdentityMetric()), plates, values, key)[1]
                for x in (target, fine)
            )
            return start.pullback(ravel(jax.tree.map(jnp.subtract, coarse, exact)))

        return target.mean(lax.map(at, points))

    normal = random.normal(rng_key, (_DRAWS, *start.center.shape), start.center.dtype)
    points = jnp.concatenate([start.center[None], jax.vmap(start.values)(normal)])
    # the same data, as arguments of the program
    view = fine.view
    found = target.compiled(lambda here, x: seen(here, here._replace(view=view), x))(points)
    found = found[1:] - found[0] if controlled else found
    return float(jnp.abs(found).max()), 2.0 * len(points)
