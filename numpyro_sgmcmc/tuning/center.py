# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Search for the centre of a posterior, in any units, on few rows first and then on more."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.posterior.coordinates import Centring, MixtureCoordinates, mixtures_of
from numpyro_sgmcmc.posterior.initial_values import initial_values, no_initial_values
from numpyro_sgmcmc.posterior.metric import DenseMetric, from_covariance
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.find_reparam import between, way_between, with_errors
from numpyro_sgmcmc.tuning.gauss_newton import uses_gauss_newton
from numpyro_sgmcmc.tuning.gaussian import FAR_ABOVE, Gaussian, are_modes, draws_in
from numpyro_sgmcmc.tuning.hessians import DRAWS, draws_of, energies_at, evaluated
from numpyro_sgmcmc.tuning.newton import Fit, closest_gaussian, fit_of, has_converged

_STARTS = 6  #: starts of the search, one of them from zero
_FEWER_STARTS = 3  #: the same of many parameters
_MANY_PARAMETERS = 50  #: how many that is
_MANY_POINTS = 32  #: evaluations of a group beyond which there is one start

_WIDEST = 2.0  #: the largest width of starts in a parameter with bounds, such as a logarithm

#: Transforms of sites without bounds, whose parameters have units.
_LINEAR = dist.transforms.IdentityTransform, dist.transforms.ZeroSumTransform

_FEWEST_ROWS = 1_000  #: the fewest rows of the first search
_FEWEST_GROUPS = 200  #: the same of groups whose latent variables are integrated out by draws
_ROWS_FOR_EACH = 10  #: the fewest rows for each parameter
_GROWTH = 8  #: how many times more rows each search has than the one before

#: Searches that have ended so close to each other, in standard deviations, have found the same.
_SAME = 0.5

#: The part of the rows from which the next search may take all, where a step costs few passes.
_ENOUGH = 1 / 8

_SHORTEST = 0.4  #: length of a Gauss-Newton step at which a search ends

_STEPS = 60  #: Newton steps of a search
_FIRST_STEPS = 10  #: the same of a search for standard errors
_FEWER_STEPS = 20  #: the same of a search that begins where another one has ended


def search_center(
    target: Target, rng_key: Array, init_strategy: Callable, begin: Array | None = None
) -> Gaussian:
    """
    The Gaussian closest to the posterior of a part :math:`S` of the rows,

    .. math::

        \\min_{c, L} \\; \\mathrm{E}_{\\theta \\sim N(c, L L^\\top)} [U_S(\\theta)]
            - \\log |\\det L|, \\qquad
        U_S(\\theta) = -\\log p(\\theta) - \\sum_{i \\in S} \\log p(x_i \\mid \\theta)

    on few of them from several starts, and from the best of these on eight times as many, and
    again, until they are an eighth of all, or half of all where steps take Hessians. They are fewer
    of groups whose latent variables are integrated out by draws, and all where there seem to be
    several modes. The posterior of few rows is wide, and that of eight times as many lies within a
    few of its standard deviations, so that Newton's method
    (:func:`~numpyro_sgmcmc.tuning.gaussian.find_metric`) never has far to go.

    With NumPyro's default strategy the starts are the point zero of the unconstrained parameters
    and points around it, as far as the width that the Hessian there gives to the posterior of a
    single row, which is at most 2 in a parameter with bounds. All of it goes with the units of data
    and parameters: if a column of a regression is multiplied by a number, so is every step divided
    by it.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param init_strategy: where the searches start, a per-site initialization function.
    :param begin: where the first search starts, a point in the coordinates of the target, or None.
    :return: centre and factor in the units of the unconstrained parameters.
    :raises ValueError: if no search ends at finite values.

    **Example:** a mean that is a million away from where the search begins.

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Program, Target
        >>> from numpyro_sgmcmc.tuning.center import search_center

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1e8))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1e3), obs=y[i])

        >>> y = 1e6 + 1e3 * jax.random.normal(jax.random.key(0), (1_000,))
        >>> target = Target(read_model(model, init_to_uniform, (y,), {}), (y,), {})
        >>> found = search_center(target, jax.random.key(1), init_to_uniform)
        >>> bool(abs(found.metric.center[0] - y.mean()) < 5)
        True

    **References:**

    1. *The Variational Gaussian Approximation Revisited*, Manfred Opper and
       Cedric Archambeau (2009).
    """
    key, start_key = random.split(rng_key)
    search = _Search(target, key, begin)
    count = search.first_count
    fits = search.fits(start_key, init_strategy, count)
    if search.is_gauss_newton and not (fits and has_converged(fits[0], search.shortest)):
        # far from the mode the scores of a scale, say, vary much more than the Hessian says
        search.is_gauss_newton = False
        fits = search.fits(start_key, init_strategy, count)
    if not fits:
        raise _no_center("the potential is not finite wherever the search looks")
    others = [fit for fit in fits[1:] if fit.objective < fits[0].objective + FAR_ABOVE]
    fits = fits[:1] + search.modes(fits[0], others, count)[:1]
    while (more := count * _GROWTH) < search.most_minibatches or (
        len(fits) > 1 and count < search.all_minibatches
    ):
        # few rows may have a mode that more of them do not have
        count = min(more, math.ceil(search.all_minibatches))
        fits = [search.fit(fit.center, fit.factor, count, _FEWER_STEPS) or fit for fit in fits]
        fits = fits[:1] + search.modes(fits[0], fits[1:], count)
    best = min(fits, key=lambda fit: fit.objective)
    try:
        metric = from_covariance(best.factor @ best.factor.T, best.center, search.dtype)
    except ValueError as error:
        raise _no_center("the search has not come near the posterior") from error
    part = min(1.0, count / search.all_minibatches)
    several = len(fits) > 1
    return Gaussian(
        metric,
        search.passes,
        multimodal=several,
        part=part,
        is_rough=search.is_rough,
        is_gauss_newton=search.is_gauss_newton,
    )


def search_errors(
    target: Target, rng_key: Array, init_strategy: Callable
) -> tuple[Target, Array, float]:
    """
    The target with standard errors of effects, found near the posterior of few rows.

    :param target: the model with its data, with coordinates of scale mixtures.
    :param rng_key: a random key.
    :param init_strategy: as of :func:`search_center`.
    :return: the target, a point in its coordinates, and the cost in passes.
    """
    search = _Search(target, rng_key)
    count = search.first_count
    for x, scale in search.starts(rng_key, init_strategy, count):
        if (fit := search.fit(x, np.diag(scale), count, _FIRST_STEPS)) is not None:
            point = jnp.asarray(fit.center, search.dtype)
            part = min(1.0, count / search.all_minibatches)
            there = with_errors(target, point, part)
            products = sum(
                x.error.size for x in there.centring.values() if isinstance(x, MixtureCoordinates)
            )
            passes = search.passes + 2 * products * target.minibatch_share
            return there, _carried(target, there, point), passes
    raise _no_center("the potential is not finite wherever the search looks")


def _carried(target: Target, there: Target, point: Array) -> Array:
    """The point in the coordinates of another target, by one program."""

    def run(target: Target, centring: Centring, point: Array) -> Array:
        return between(target, target._replace(centring=centring), point)

    return target.compiled(run, "between")(dict(there.centring), point)


def search_near(target: Target, rng_key: Array, near: DenseMetric) -> Gaussian:
    """
    The Gaussian of :func:`search_center` on a part of the rows, from the one of other data.

    :param target: the model with its data, in the coordinates of the other Gaussian.
    :param near: the Gaussian closest to the posterior of other data of the same shape.
    :return: the Gaussian, without `converged` if the search has not ended.
    """
    search = _Search(target, rng_key)
    count = max(search.first_count, math.ceil(min(search.most_minibatches, search.all_minibatches)))
    part = min(1.0, count / search.all_minibatches)
    center, factor = (np.asarray(x, float) for x in (near.center, near.factor))
    fit = search.fit(center, factor * part**-0.5, count, _FEWER_STEPS)
    if fit is None or not has_converged(fit, search.shortest):
        return Gaussian(near, search.passes, converged=False)
    return Gaussian(
        from_covariance(fit.factor @ fit.factor.T, fit.center, search.dtype),
        search.passes,
        part=part,
        is_rough=search.is_rough,
        is_gauss_newton=search.is_gauss_newton,
    )


def _distance(one: Fit, other: Fit) -> float:
    """Between two centres, in standard deviations of the first, along the worst coordinate."""
    return float(np.max(np.abs(np.linalg.solve(one.factor, other.center - one.center))))


def _no_center(seen: str) -> ValueError:
    return ValueError(
        f"Tuning found no centre: {seen}. Start it near the posterior with"
        " `init_strategy=init_to_value(...)`, or give `step_size` and `friction` yourself."
    )


def origin_of(target: Target) -> np.ndarray:
    """
    The point zero of the unconstrained parameters.

    Effects with local scales are one standard deviation away from it: at zero no row has any
    influence on them.
    """
    mixtures, latents = mixtures_of(target.centring), target.model.latents
    return np.concatenate([np.full(latents[k].size, float(k in mixtures)) for k in sorted(latents)])


def _is_bounded(target: Target) -> np.ndarray:
    """Which coordinates are of sites with bounds, so that they have no units."""
    model, found = target.model.with_rule("none"), {}

    def read(target: Target, values: Values) -> Array:
        rows, key = model.first_rows(), random.key(0)
        energy, sites = model.potential_and_sites(values, rows, key, target.args, target.kwargs)
        for name in model.latents:
            link = dist.biject_to(sites[name]["fn"].support)
            link = getattr(link, "base_transform", link)  # of the entries of a vector
            found[name] = not isinstance(link, _LINEAR)
        return energy

    program, data, _ = target.program(read)
    jax.eval_shape(program, data, model.latents)
    each = (np.full(model.latents[k].size, found[k]) for k in sorted(found))
    return np.concatenate(list(each))


class _Search:
    """Searches on the rows of so many minibatches, each of which counts once."""

    def __init__(self, target: Target, rng_key: Array, begin: Array | None = None) -> None:
        self.begin = origin_of(target) if begin is None else np.asarray(begin, float)
        self.target = target = target.keeping_programs()  # many steps of one program
        self.rng_key = rng_key
        self.dimension = target.model.dimension
        self.dtype = target.model.dtype
        share = target.minibatch_share
        self.all_minibatches = 1 / share
        fewest = _FEWEST_GROUPS if target.model.drawn_plates else _FEWEST_ROWS
        rows = max(fewest, _ROWS_FOR_EACH * self.dimension)
        first = min(rows / target.effective_batch_size, self.all_minibatches)
        self.first_count = max(1, math.ceil(first))
        self.hessians = math.ceil(DRAWS / self.first_count)
        self.takes_long = any(
            # classes have modes of their own, their names exchanged
            p.points * (1 if target.model.has_classes else p.members) >= _MANY_POINTS
            for p in target.model.plates
        )
        self.passes = 0.0
        self.is_rough = False
        # integrals are, and what looks rough is the noise of draws far from the posterior
        self.is_smooth = bool(target.model.drawn_plates)
        self.is_gauss_newton = uses_gauss_newton(target)
        self.is_bounded = _is_bounded(target)
        self._energies = target.compiled(energies_at, "energies")
        self._way = target.compiled(way_between, "way")

    @property
    def most_minibatches(self) -> float:
        """Minibatches from which the next search may take all rows."""
        part = _ENOUGH if self.is_gauss_newton else draws_in(self.target) / DRAWS / 2
        return part * self.all_minibatches

    @property
    def shortest(self) -> float:
        """The length of a step at which a search ends."""
        return _SHORTEST if self.is_gauss_newton else 0.1

    def fits(self, rng_key: Array, init_strategy: Callable, count: int) -> list[Fit]:
        """
        The Gaussians that searches from several starts end at, the best first.

        One that has not converged is behind those that are nearly as good and have.
        """
        fits = []
        for x, scale in self.starts(rng_key, init_strategy, count):
            if (fit := self.fit(x, np.diag(scale), count, _STEPS)) is not None:
                fits.append(fit)
                if self.takes_long:
                    break
        return sorted(fits, key=lambda x: x.objective + (not has_converged(x, self.shortest)))

    def modes(self, best: Fit, others: list[Fit], count: int) -> list[Fit]:
        """
        The fits that a barrier divides from the best.

        The ways between are straight in non-centred and in centred coordinates, because a ridge
        may be straight in either.
        """
        others = [fit for fit in others if _distance(best, fit) > _SAME]
        if not others:
            return []
        centers = jnp.asarray(np.stack([best.center, *(fit.center for fit in others)]), self.dtype)
        apart = np.full(len(others), True)
        for degree in (0.0, 1.0) if self.target.centring else (0.0,):
            points = self._way(centers, 0, jnp.asarray(degree, self.dtype))
            points = points.reshape(-1, self.dimension)
            self.passes += len(points) * self._share(count)
            apart &= are_modes(
                np.asarray(self._energies(self.rng_key, points, count)).reshape(5, -1)[:, 1:]
            )
        return [fit for fit, is_mode in zip(others, apart, strict=True) if is_mode]

    def starts(
        self, rng_key: Array, init_strategy: Callable, count: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Points, and the width of the posterior there in each coordinate."""
        view, args, kwargs = self.target.model, self.target.args, self.target.kwargs
        number = _STARTS if self.dimension <= _MANY_PARAMETERS else _FEWER_STARTS
        zero = self.begin
        found: list[tuple[np.ndarray, np.ndarray | None]] = []
        # of a single row, where the search is wide enough to find what there is
        if init_strategy is init_to_uniform and (
            (wide := self._scale(zero, count, 1 / self.rows_in(count))) is not None
        ):
            # by NumPy: of JAX it would be one more program to compile
            generator = np.random.default_rng(np.asarray(random.key_data(rng_key)))
            away = generator.standard_normal((number - 1, self.dimension))
            points = [zero, *(zero + x * wide for x in away)]
            found = [(x, self._scale(x, count)) for x in points]
        if not found:
            keys = random.split(rng_key, number)
            values, finite = initial_values(view, keys, init_strategy, args, kwargs)
            if not finite:
                raise no_initial_values(view, keys, init_strategy, args, kwargs)

            def flat(target: Target, values: Values) -> Array:
                return jax.vmap(lambda x: ravel(target.to_internal(x)))(values)

            drawn = np.asarray(self.target.compiled(flat)(values), float)
            found = [(x, self._scale(x, count)) for x in drawn]
        return [(x, scale) for x, scale in found if scale is not None]

    def rows_in(self, count: int) -> int:
        """The rows of so many minibatches."""
        sizes = [p.subsample_size for p in self.target.model.plates]
        return count * max(sizes, default=1) * self.target.parts

    def _scale(self, point: Any, count: int, part: float = 1.0) -> np.ndarray | None:
        (energy, _, hessian), _ = self._look(False, point, np.eye(self.dimension), 0, count, part)
        diagonal = np.abs(np.diagonal(hessian).astype(np.float64))
        if not np.isfinite(energy) or not np.all(np.isfinite(diagonal)):
            return None
        known = diagonal > 0
        if not known.any():
            return np.ones(self.dimension)
        scale = np.where(known, diagonal, np.median(diagonal[known])) ** -0.5
        return np.where(self.is_bounded, np.minimum(scale, _WIDEST), scale)

    def _look(
        self,
        is_rough: bool,
        center: Any,
        factor: np.ndarray,
        reach: int,
        count: int,
        part: float = 1.0,
    ) -> Any:
        hessians = self.hessians if reach else 1
        # a Hessian-vector product counts as two gradients
        draws = draws_of(self.target, self.is_gauss_newton)
        columns = 1 if self.is_gauss_newton else 2 * self.dimension
        self.passes += (draws + columns * hessians) * self._share(count)
        at = self.target, self.rng_key, is_rough, self.is_gauss_newton, center, factor
        return evaluated(*at, count=count, hessians=hessians, reach=reach, part=part)

    def _share(self, count: int) -> float:
        return count * self.target.minibatch_share

    def fit(self, center: Any, factor: np.ndarray, count: int, steps: int) -> Fit | None:
        """Newton steps, to the last of those that were an advance."""

        def fitted(center: np.ndarray, factor: np.ndarray) -> Fit | None:
            found, rough = self._look(self.is_rough, center, factor, 1, count)
            if rough and not self.is_rough and not self.is_smooth:
                self.is_rough, self.is_gauss_newton = True, False
                return fitted(center, factor)
            return fit_of(center, factor, found, self.dtype)

        center = np.asarray(center, float)
        return closest_gaussian(fitted, center, factor, steps, self.shortest)
