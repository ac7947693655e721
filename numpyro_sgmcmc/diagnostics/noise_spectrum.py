# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The noise of the gradient that a run has seen."""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.data.converters import random_key, whole
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.diagnostics._scores import check_rows_of, positions_of
from numpyro_sgmcmc.gradients.covariance import Full
from numpyro_sgmcmc.gradients.estimators import per_example_gradient, sub_batch_gradient
from numpyro_sgmcmc.results.inference_data import arguments_of
from numpyro_sgmcmc.results.kept_draws import kept_draws
from numpyro_sgmcmc.results.run_data import check_data, target_of
from numpyro_sgmcmc.target.handlers import Plate
from numpyro_sgmcmc.target.potential import ravel
from numpyro_sgmcmc.target.target import Target

#: The matrix of eigenvectors of so many parameters takes a second.
_LARGEST_SPECTRUM = 500

#: Stratified minibatches of which each shows a part of the noise within the strata.
_MINIBATCHES = 500


def gradient_noise(
    mcmc: MCMC, *, max_rows: int = 5_000, rng_key: Array | None = None
) -> xr.Dataset:
    """
    The spectrum of the noise that the sampler sees.

    It is that of the covariance of the minibatch gradient

    .. math:: V = f \\, \\frac{N^2}{n} S^2, \\qquad f = 1 - n / N \\text{ or } 1,

    with :math:`S^2` the covariance of the gradients of the single rows, at the mean of the
    unconstrained draws, in the coordinates of the kernel's metric and with its control variate.
    Of several plates the noises are added up.

    :param mcmc: an ``MCMC`` object of a kernel of this package, after its run.
    :param int max_rows: with more rows than this, :math:`S^2` is estimated from so many of them;
        of stratified minibatches it is estimated from 500.
    :param rng_key: random key of their choice, and of a likelihood that is itself random.
    :return: a dataset with the variable ``eigenvalue``, from the largest to the smallest, and
        the attributes ``mean``, ``step_size`` and, where minibatches are independent,
        ``balance``: for methods with friction :math:`4 T \\tanh(A h / 2) / h^2`, where the noise
        is as large as what the friction dissipates, and for SGLD :math:`2 T / h`, where it is as
        large as the noise that is added.
    :raises ValueError: if there are no draws, no minibatches, or more than 500 parameters.
    :raises TypeError: if it is not an ``MCMC`` object with a kernel of this package.

    **Example:** the gradient of the mean of a Gaussian has noise of the variance of the data.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD
        >>> from numpyro_sgmcmc import gradient_noise

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100,))
        >>> mcmc = MCMC(SGLD(model, step_size=1e-3), num_warmup=10, num_samples=10,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> noise = float(gradient_noise(mcmc)["eigenvalue"][0])
        >>> bool(abs(noise / (100**2 / 20 * (1 - 20 / 100) * y.var(ddof=1)) - 1) < 1e-4)
        True
    """
    settings, state = _settings_and_state(mcmc)
    max_rows, key = whole("max_rows", max_rows, least=2), random_key(rng_key)
    check_rows_of(mcmc)
    target = target_of(mcmc.sampler.model, *arguments_of(mcmc))
    check_data(mcmc, "Look at", target)
    target = target._replace(scheme=SCHEMES[settings["subsampling"]])
    plates, size = target.view.plates, target.view.dimension
    if not plates:
        raise ValueError("No plate of the model has a `subsample_size`: its gradient has no noise.")
    if size > _LARGEST_SPECTRUM:
        raise ValueError(
            f"The model has {size:,} parameters, and the spectrum is for at most"
            f" {_LARGEST_SPECTRUM}: it needs a matrix of {size:,} x {size:,}. The mean of the"
            " eigenvalues is `to_arviz(mcmc).attrs['noise_variance']` of a tuned run."
        )
    rows_key, model_key = random.split(key)
    rows = _some_rows(target, rows_key, max_rows)
    # the oracle is for a minibatch of these rows, the sampler has another
    factors = {
        plate.name: _variance_factor(settings["subsampling"], plate) * len(rows[plate.name])
        for plate in plates
    }

    draws = {
        name: x for name, x in kept_draws(mcmc).get_samples().items() if name in target.view.latents
    }
    draws = {name: x[None] for name, x in draws.items()}
    mean = jnp.asarray(positions_of(target, draws).mean(axis=(0, 1)))

    def covariance(target: Target, mean: Array, metric: Any, anchor: Any, rows: Any) -> Array:
        potential = target.potential(metric, anchor)
        at = metric.coordinates(ravel(target.in_coordinates(target.unravel(mean))))
        if not target.strata:
            return per_example_gradient(potential, rows, model_key, factors, Full(size))(at).noise

        def added(total: Array, key: Array) -> tuple[Array, None]:
            options = target.factors, Full(size), target.groups
            seen = sub_batch_gradient(potential, target.rows(key), model_key, *options)(at)
            return total + seen.noise / _MINIBATCHES, None

        keys = random.split(rows_key, _MINIBATCHES)
        return lax.scan(added, jnp.zeros((size, size), at.dtype), keys)[0]

    target = target.tuned(state.fixed)
    matrix = target.compiled(covariance)(mean, state.fixed.metric, state.fixed.anchor, rows)
    attrs = {
        "algorithm": settings["algorithm"],
        "step_size": float(state.step_size),
        **{f"batch_size_{plate.name}": plate.subsample_size for plate in plates},
        **_balance(settings, float(state.step_size)),
    }
    return _spectrum(np.asarray(matrix), attrs)


def _settings_and_state(mcmc: MCMC) -> tuple[dict[str, Any], Any]:
    """
    The settings of the kernel, and the state of its first chain.

    :raises ValueError: if there are no draws.
    :raises TypeError: if it is of another package.
    """
    kernel: Any = getattr(mcmc, "sampler", None)
    if not isinstance(mcmc, MCMC) or not hasattr(kernel, "settings"):
        found = type(mcmc if kernel is None else kernel).__name__
        raise TypeError(
            "The noise of the gradient is that of a kernel of this package, such as CCAdL, in an"
            f" `MCMC` object after its run; got {found}, whose gradients have no such noise or do"
            " not say it."
        )
    arguments_of(mcmc)  # checks that there are draws
    state = mcmc.last_state
    if np.ndim(state.i) == 0:
        return kernel.settings, state
    fixed = state.fixed
    if np.ndim(fixed.step_size):  # of chains one after the other, or on devices
        fixed = jax.tree.map(lambda x: x[0], fixed)
    elif fixed.anchor is not None and np.ndim(fixed.anchor.potential):
        fixed = fixed._replace(anchor=jax.tree.map(lambda x: x[0], fixed.anchor))
    return kernel.settings, state._replace(step_size=state.step_size[0], fixed=fixed)


def _some_rows(target: Target, rng_key: Array, max_rows: int) -> dict[str, Array]:
    """All rows of each plate, or some; of several plates few, as each meets all others."""
    plates = target.view.plates
    found = {}
    for k, plate in enumerate(plates):
        most = max_rows if len(plates) == 1 else max(plate.subsample_size, math.isqrt(max_rows))
        rows = jnp.arange(plate.size)
        if most < plate.size:
            rows = random.choice(random.fold_in(rng_key, k), rows, (max(most, 2),), replace=False)
        found[plate.name] = rows
    return found


def _variance_factor(subsampling: str, plate: Plate) -> float:
    """:math:`f / n`, for the covariance of all rows with denominator :math:`N - 1`."""
    size, batch_size = plate.size, plate.subsample_size
    if not SCHEMES[subsampling].distinct:
        return (size - 1) / size / batch_size
    # a single minibatch of an epoch, too, is drawn without replacement
    return (1 - batch_size / size) / batch_size


def _balance(settings: Mapping[str, Any], h: float) -> dict[str, float | str]:
    """The noise that is as large as what the method sets against it, and what that is."""
    temperature = settings["temperature"]
    if not SCHEMES[settings["subsampling"]].independent:
        return {}  # the noises of several steps cancel
    if "friction" in settings:
        balance = 4 * temperature * math.tanh(settings["friction"] * h / 2) / h**2
        return {"balance": balance, "balance_with": "what the friction dissipates"}
    if settings["algorithm"] == "SGLD":
        return {"balance": 2 * temperature / h, "balance_with": "the noise that SGLD adds"}
    return {}


def _spectrum(matrix: np.ndarray, attrs: Mapping[str, Any]) -> xr.Dataset:
    """
    :raises ValueError: if the matrix is not finite.
    """
    if not np.all(np.isfinite(matrix)):
        raise ValueError(
            "The gradients of single rows are not finite at the mean of the draws: the run has"
            " diverged, or a draw is on the boundary of its support."
        )
    values = np.linalg.eigvalsh(matrix.astype(np.float64))[::-1]
    rounding = len(values) * np.finfo(matrix.dtype).eps * abs(values[0])
    values = np.where(values > rounding, values, 0.0)
    rank = np.arange(1, len(values) + 1)
    attrs = {"mean": float(values.mean()), **attrs}
    return xr.Dataset({"eigenvalue": ("rank", values)}, {"rank": rank}, attrs)
