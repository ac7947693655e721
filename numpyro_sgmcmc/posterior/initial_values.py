# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Initial values of chains."""

from collections.abc import Callable
from functools import partial
import math

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import initialize_model
from numpyro.util import is_prng_key

from numpyro_sgmcmc.posterior.checks.exceptions import one_at_a_time
from numpyro_sgmcmc.posterior.handlers import first_rows_of
from numpyro_sgmcmc.posterior.metric import GaussianMetric
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values
from numpyro_sgmcmc.posterior.target import Target


def initial_values(
    view: MinibatchModel, rng_key: Array, init_strategy: Callable, args: tuple, kwargs: dict
) -> tuple[Values, Array]:
    """
    Find unconstrained initial values with a finite potential by a strategy of NumPyro.

    :param view: the model.
    :param rng_key: a key, or a batch with a key for each chain.
    :param init_strategy: a per-site initialization function of NumPyro.
    :return: values by site, with a leading axis for the chains if ``rng_key`` has one, and
        whether the potential and its gradient are finite there.
    """
    single = is_prng_key(rng_key)
    # under `jit` NumPyro does not raise, and a batch of keys needs one program
    find = jax.jit(
        lambda keys: (
            initialize_model(
                keys,
                first_rows_of(view.model),
                init_strategy=_in_arrays(init_strategy),
                model_args=args,
                model_kwargs=kwargs,
            ).param_info
        )
    )
    with one_at_a_time:
        info = find(rng_key[None] if single else rng_key)
    seen = jax.tree.leaves((info.potential_energy, info.z_grad))
    is_finite = jnp.isfinite(sum(jnp.sum(x) for x in seen))
    return jax.tree.map(lambda x: x[0], info.z) if single else info.z, is_finite


def _in_arrays(init_strategy: Callable) -> Callable:
    """Return a strategy whose values are arrays of JAX, which traced rows can index."""
    if not isinstance(init_strategy, partial):
        return init_strategy  # NumPyro calls it for one with values
    given = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, init_strategy.keywords
    )
    return partial(init_strategy.func, *init_strategy.args, **given)


def no_initial_values(
    view: MinibatchModel, rng_key: Array, init_strategy: Callable, args: tuple, kwargs: dict
) -> ValueError:
    """Return the error of a model without finite initial values, which names the sites."""
    key = rng_key if is_prng_key(rng_key) else rng_key[0]
    start = substitute(seed(first_rows_of(view.model), key), substitute_fn=init_strategy)
    sites = trace(start).get_trace(*args, **kwargs)
    return ValueError(_no_finite_start(_nonfinite_sites(sites)))


def draw_from(
    gaussian: GaussianMetric, target: Target, temperature: float, rng_key: Array
) -> Values:
    """
    Draw initial values from a Gaussian, or take its centre if their potential is not finite.

    :param gaussian: the Gaussian, in the coordinates of the target.
    :param temperature: factor of the covariance.
    :param rng_key: a key, or a batch with a key for each chain.
    """
    view = target.model

    def draw(rng_key: Array) -> Values:
        normal = random.normal(rng_key, gaussian.center.shape, gaussian.center.dtype)
        drawn = target.from_internal(
            target.unravel(gaussian.values(math.sqrt(temperature) * normal))
        )
        rows, key = view.first_rows(), random.key(0)
        energy = target.mean(view.potential(drawn, rows, key, target.args, target.kwargs))
        center = target.from_internal(target.unravel(gaussian.center))
        return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(energy), x, y), drawn, center)

    return draw(rng_key) if is_prng_key(rng_key) else jax.vmap(draw)(rng_key)


def check_initial_values(
    view: MinibatchModel, z: Values, chains: int | None, potential: Callable[[Values], Array]
) -> None:
    """
    Check initial values that a user has chosen.

    :param view: the model.
    :param z: unconstrained values, with a leading axis of length ``chains`` unless that
        is ``None``.
    :param potential: the potential of such values, on a minibatch.
    :raises ValueError: if names, shapes or dtypes do not fit the model, or if the potential is not
        finite. The message names the site.
    """
    if not isinstance(z, dict) or set(z) != set(view.latents):
        given = sorted(z) if isinstance(z, dict) else f"a {type(z).__name__}"
        raise ValueError(
            "`init_params` must be a dict of unconstrained values for the latent sites"
            f" {sorted(view.latents)}; got {given}."
        )
    batch = () if chains is None else (chains,)
    for name, latent in view.latents.items():
        if not isinstance(z[name], jax.Array | float | int):
            raise ValueError(
                f"`init_params['{name}']` is a {type(z[name]).__name__}. Give an array,"
                " `jnp.asarray(...)`."
            )
        if not jnp.issubdtype(jnp.result_type(z[name]), jnp.floating):
            raise ValueError(
                f"`init_params['{name}']` has dtype {jnp.result_type(z[name])}, but gradients need"
                " floating point values. Write 1.0 instead of 1."
            )
        if jnp.shape(z[name]) != batch + latent.shape:
            raise ValueError(
                f"`init_params['{name}']` has shape {jnp.shape(z[name])}, but the unconstrained"
                f" value of site '{name}' has shape {batch + latent.shape}"
                + (" (chains first)." if batch else ".")
            )
        if not isinstance(z[name], jax.core.Tracer) and not np.all(np.isfinite(z[name])):
            raise ValueError(
                f"`init_params['{name}']` has entries that are NaN or infinite. Give finite values."
            )

    energy = potential(z)
    if not isinstance(energy, jax.core.Tracer) and not np.all(np.isfinite(energy)):
        raise ValueError(
            f"The potential at `init_params` is {np.asarray(energy)}. Choose values with a finite"
            " density, or leave `init_params` out."
        )


def _nonfinite_sites(sites: dict[str, dict]) -> list[str]:
    """Return the sites whose log density is not finite, with the range of their values."""
    texts = []
    for name, site in sites.items():
        if site["type"] == "sample":
            value = jnp.asarray(site["value"])
            if not bool(jnp.all(jnp.isfinite(site["fn"].log_prob(value)))):
                texts.append(
                    f"'{name}' (values from {value.min():.4g} to {value.max():.4g})"
                    if value.size
                    else f"'{name}'"
                )
    return texts


def _no_finite_start(sites: list[str]) -> str:
    where = (
        f"The log density is not finite at site {', '.join(sites)}."
        if sites
        else "The gradient is not finite, although the density of every site is finite."
    )
    return (
        "No initial values with a finite potential and gradient were found in 100 attempts."
        f" {where} Check that the data lie in the support of the distribution and that its"
        " parameters are finite, or start elsewhere with `init_strategy=init_to_value(...)`."
    )
