# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Hierarchies of a model: its effects, with their locations and scales.

A model without its likelihood is read as a program of JAX, in which location and scale are computed
from other sites.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Literal
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.handlers import substitute, trace

from numpyro_sgmcmc.posterior.checks.exceptions import explained
from numpyro_sgmcmc.posterior.handlers import Indices, log_density, without_wrappers
from numpyro_sgmcmc.posterior.jaxpr import reached_by
from numpyro_sgmcmc.posterior.local_scales import (
    LocalScale,
    is_plain,
    law_of_scale,
    mixture_of_site,
)
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values

#: The largest matrix by which effects are multiplied.
_LARGEST = 8

_WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


class Hierarchy(NamedTuple):
    """
    Locations and scales of the sites of a model whose scale depends on other sites.

    They are functions of the unconstrained values of the other sites.

    - **program** - the model as a program of the unconstrained values, a jaxpr.
    - **constants** - constants of the program.
    - **names** - names of the arguments of the program.
    - **sites** - location, scale and steps of each site, in an order in which they can be computed.
    - **local** - the local scale of normal effects that may have one, by site.
    """

    program: Any
    constants: Any
    names: tuple[str, ...]
    sites: dict[str, "Site"]
    local: dict[str, LocalScale]


class Site(NamedTuple):
    """
    Location and scale of a site, and the operations on its value.

    - **location**, **scale** - variables of the program: :math:`m` and :math:`s`.
    - **steps** - the operations of the model from the value to :math:`x`.
    """

    location: Any
    scale: Any
    steps: "tuple[Step, ...]"

    @property
    def variables(self) -> list[Any]:
        others = (step.operand for step in self.steps if step.operand is not None)
        return [self.location, self.scale, *others]

    @property
    def factors(self) -> list[Any]:
        return [step.operand for step in self.steps if step.is_factor]


class Step(NamedTuple):
    """
    An operation on a value.

    - **kind** - the name of the operation, after an "r" if the value is the second operand.
    - **operand** - the variable of the other operand, or None.
    - **result** - the variable of the result.
    - **axes** - of a product with a matrix: the axes of the value and of the matrix that are summed
      over.
    """

    kind: str
    operand: Any
    result: Any
    axes: tuple[int, int] | None = None

    @property
    def is_factor(self) -> bool:
        return self.axes is not None or "mul" in self.kind or "div" in self.kind


def hierarchy_of(
    view: MinibatchModel, values: Values, rows: Indices, rng_key: Array, args: tuple, kwargs: dict
) -> Hierarchy:
    """
    Read the hierarchy of a model.

    Parameters are as in :meth:`~numpyro_sgmcmc.posterior.model.MinibatchModel.potential`.

    :raises ValueError: if an argument that the model needs in Python is traced.
    """
    data = values, rows, rng_key, args, kwargs
    program, constants, names, read = _read(view, data)
    own, laws = read.locations_and_scales, read.laws_of_scales
    needs = _needs(program)
    effects: dict[str, Site] = {}
    for k, name in enumerate(names):
        if name not in own:
            continue
        is_standard = not _needed(needs, own[name][1])
        steps = _steps(program, program.invars[k], needs, k, is_standard)
        # if two sites need each other, the operations on the value are left out
        location, scale = own[name]
        for site in (Site(location, scale, steps), Site(location, scale, ())):
            if name not in read.mixtures and not _union(needs, [site.scale, *site.factors]):
                break
            needed = _union(needs, site.variables)
            if not needed & {k} and not any(
                name in _reached(effects, names[j], names, needs) for j in needed
            ):
                effects[name] = site
                break
    shapes = {name: x.shape for name, x in values.items()}
    local = {}
    for name in sorted(effects.keys() & (read.normal | read.mixtures.keys())):
        site = effects[name]
        scaled_by = {names[k] for k in _union(needs, [site.scale, *site.factors])}
        found = [x for x in sorted(scaled_by & laws.keys()) if shapes[x] == shapes[name]]
        if any(step.axes for step in site.steps):
            continue  # effects of a group are no independent mixtures
        if name in read.mixtures:
            local[name] = LocalScale(None, *read.mixtures[name])
            continue
        # its distribution is evaluated before effects are moved
        if len(found) == 1 and not {names[k] for k in _union(needs, laws[found[0]])} & {*effects}:
            local[name] = LocalScale(found[0], *laws[found[0]])
    return Hierarchy(program, constants, names, _ordered(effects, names, needs), local)


def is_alone(
    view: MinibatchModel, data: tuple, effect: str, scale: str | None, is_followed: bool
) -> bool:
    """
    Return True if only an effect depends on its local scale, and only rows depend on the effect.

    :param data: the other arguments of :func:`hierarchy_of`.
    :param effect: the site of the effect.
    :param scale: the site of its local scale, or None if it has none.
    :param bool is_followed: whether the effect has :attr:`Site.steps` in the hierarchy.
    """
    without = frozenset((effect,) if scale is None else (effect, scale))
    program, _, names, read = _read(view, data, without)
    k = names.index(effect)
    needs, scale_of_effect = _needs(program), read.locations_and_scales[effect][1]
    is_standard = not _needed(needs, scale_of_effect)
    steps = _steps(program, program.invars[k], needs, k, is_standard) if is_followed else ()
    by_scale: Any = ()
    if scale is not None:
        argument = program.invars[names.index(scale)]
        by_scale = reached_by(program, argument, {step.result for step in steps})
    by_effect = reached_by(program, program.invars[k], ())
    densities = {name: x for name, x in read.densities.items() if not isinstance(x, Literal)}
    return not any(
        x in by_scale or (x in by_effect and name not in read.of_rows)
        for name, x in densities.items()
    )


class _Reading(NamedTuple):
    """
    Variables of a model's program by site.

    - **locations_and_scales** - of the unconstrained values.
    - **laws_of_scales** - as :func:`~.local_scales.law_of_scale` returns them.
    - **mixtures** - scales and weights, as :func:`~.local_scales.mixture_of_site` returns them.
    - **densities** - the log density of sites, or nothing.
    - **normal** - the names of sites with normal distributions.
    - **of_rows** - the names of sites in subsampled plates.
    """

    locations_and_scales: dict[str, tuple[Any, Any]]
    laws_of_scales: dict[str, tuple[Any, Any]]
    mixtures: dict[str, tuple[Any, Any]]
    densities: dict[str, Any]
    normal: frozenset[str]
    of_rows: frozenset[str]


def _read(
    view: MinibatchModel, data: tuple, without: frozenset[str] | None = None
) -> tuple[Any, Any, tuple[str, ...], _Reading]:
    """
    Return the program of a model, its constants, the names of its arguments, and its variables.

    :param data: the other arguments of :func:`hierarchy_of`.
    :param without: the sites whose densities are no part of the program, or None for all.
    """
    # integrals over latent variables of groups are no part of a hierarchy, and take long to trace
    values, rows, rng_key, args, kwargs = data
    view = view.with_rule("none" if without is None else view.search_rule)
    model, (args, kwargs) = view.prepared(rows, rng_key, args, kwargs)

    def run(values: Values) -> tuple[dict, dict, dict, dict]:
        def given(site: dict) -> Any:
            if site["name"] not in values or site["type"] != "sample":
                return None
            return biject_to(site["fn"].support)(values[site["name"]])

        with explained(view.model, args, kwargs):
            sites = trace(substitute(model, substitute_fn=given)).get_trace(*args, **kwargs)
        pairs = {name: _location_and_scale(sites[name]["fn"]) for name in sorted(values)}
        own = {
            name: (
                jnp.broadcast_to(both[0], values[name].shape),
                jnp.broadcast_to(both[1], values[name].shape),
            )
            for name, both in pairs.items()
            if both is not None
        }
        plain = {name: site for name, site in sites.items() if is_plain(site)}
        found = {k: mixture_of_site(plain[k]["fn"], x) for k, x in values.items() if k in plain}
        mixtures = {k: x for k, x in found.items() if x is not None}
        own |= {k: (x[0], jnp.ones_like(x[0])) for k, x in mixtures.items()}
        laws = {k: law_of_scale(plain[k]["fn"], x) for k, x in values.items() if k in plain}
        normal.update(k for k in plain if type(without_wrappers(plain[k]["fn"])) is dist.Normal)
        plates = {plate.name for plate in view.plates}
        of_rows.update(
            k for k, x in sites.items() if plates & {y.name for y in x.get("cond_indep_stack", ())}
        )
        inside = {k: x for k, x in sites.items() if x["type"] == "sample" and without is not None}
        densities = {k: log_density(x) for k, x in inside.items() if k not in (without or ())}
        laws = {k: law for k, law in laws.items() if law is not None}
        return own, laws, {k: x[1:] for k, x in mixtures.items()}, densities

    normal: set[str] = set()
    of_rows: set[str] = set()
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(values)
    variables = closed.jaxpr.outvars
    own, laws, mixtures, densities = jax.tree.unflatten(jax.tree.structure(shapes), variables)
    return (
        closed.jaxpr,
        closed.consts,
        tuple(sorted(values)),
        _Reading(own, laws, mixtures, densities, frozenset(normal), frozenset(of_rows)),
    )


def _steps(
    program: Any, variable: Any, needs: Mapping[Any, frozenset[int]], k: int, is_standard: bool
) -> tuple[Step, ...]:
    """
    Return the operations on an argument before its other uses.

    They end with the first term after a factor that depends on other arguments. Without such a
    factor there are none.

    :param bool is_standard: whether the scale of the argument is known. Only then this factor may
        be a small matrix, or come after other terms than constants.
    """
    steps: list[Step] = []
    shape, is_scaled, is_shifted = variable.aval.shape, False, False
    while not is_shifted:
        uses = [e for e in program.eqns if any(x is variable for x in e.invars)]
        if len(uses) != 1 or any(x is variable for x in program.outvars):
            break
        (equation,) = uses
        name, operands = equation.primitive.name, equation.invars
        if name not in ("mul", "div", "add", "sub", "neg", "dot_general"):
            break
        is_first = operands[0] is variable
        others = [x for x in operands if x is not variable]
        if len(others) != len(operands) - 1 or equation.outvars[0].aval.shape != shape:
            break  # a square of the value, or a broadcast to several entries
        if any(k in _needed(needs, x) for x in others) or (name == "div" and not is_first):
            break
        before, axes = others[0] if others else None, None
        if name == "dot_general":
            axes = _axes_of_product(equation, is_first)
            if axes is None or is_scaled or not (is_standard and _needed(needs, before)):
                break
        (variable,) = equation.outvars
        steps.append(Step(name if is_first else f"r{name}", before, variable, axes))
        is_scaled |= steps[-1].is_factor and bool(_needed(needs, before))
        # LocScaleReparam subtracts a multiple of the location first, which may be 0
        is_first_term = is_standard or not _needed(needs, before)
        is_shifted = name in ("add", "sub") and (is_scaled or not is_first_term)
    return tuple(steps) if is_scaled else ()


def _axes_of_product(equation: Any, is_first: bool) -> tuple[int, int] | None:
    """The axes over which a product of values and a small square matrix sums, or None."""
    summed, batch = equation.params["dimension_numbers"]
    ranks = [len(x.aval.shape) for x in equation.invars]
    value, matrix = (0, 1) if is_first else (1, 0)
    if any(batch) or len(summed[0]) != 1 or ranks[matrix] != 2:
        return None
    axis, size = summed[value][0], equation.invars[matrix].aval.shape
    # the result has the new axis where the value had the old one
    stays = axis == (ranks[value] - 1 if is_first else 0)
    return (axis, summed[matrix][0]) if stays and size[0] == size[1] <= _LARGEST else None


def _needs(program: Any) -> dict[Any, frozenset[int]]:
    """Return the numbers of the arguments that each variable of a program depends on."""
    needs: dict[Any, frozenset[int]] = {x: frozenset({k}) for k, x in enumerate(program.invars)}
    for equation in program.eqns:
        inputs = _union(needs, equation.invars)
        needs |= dict.fromkeys(equation.outvars, inputs)
    return needs


def _needed(needs: Mapping[Any, frozenset[int]], variable: Any) -> frozenset[int]:
    return frozenset() if isinstance(variable, Literal) else needs.get(variable, frozenset())


def _union(needs: Mapping[Any, frozenset[int]], variables: Iterable[Any]) -> frozenset[int]:
    return frozenset().union(*(_needed(needs, x) for x in variables))


def _reached(
    found: Mapping[str, Site], name: str, names: tuple[str, ...], needs: Mapping[Any, Any]
) -> set[str]:
    """Return a site and all sites that its location and scale depend on, directly or not."""
    reached, new = set(), {name}
    while new:
        reached |= new
        sites = [found[x] for x in new if x in found]
        new = {names[j] for site in sites for j in _union(needs, site.variables)} - reached
    return reached


def _ordered(
    found: dict[str, Site], names: tuple[str, ...], needs: Mapping[Any, Any]
) -> dict[str, Site]:
    """Order sites such that each comes after the sites that it depends on."""
    ordered: dict[str, Site] = {}
    while len(ordered) < len(found):
        for name, site in found.items():
            before = {names[j] for j in _union(needs, site.variables)} & found.keys()
            if name not in ordered and before <= ordered.keys():
                ordered[name] = site
    return ordered


def _location_and_scale(fn: Any) -> tuple[Array, Array] | None:
    """
    Return location and scale of the unconstrained value of a site, or None.

    **Example:**

    .. doctest::

        >>> import numpyro.distributions as dist
        >>> from numpyro_sgmcmc.posterior.hierarchy import _location_and_scale
        >>> _location_and_scale(dist.LogNormal(1.0, 2.0).expand([3]).to_event(1))
        (1.0, 2.0)
        >>> _location_and_scale(dist.Gamma(1.0, 2.0)) is None
        True
    """
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    if isinstance(fn, dist.MultivariateNormal | dist.MultivariateStudentT):
        return fn.loc, jnp.sqrt(jnp.sum(fn.scale_tril**2, axis=-1))
    if {"loc", "scale"} <= fn.arg_constraints.keys():
        if fn.support is constraints.real or isinstance(fn, dist.LogNormal):
            return fn.loc, fn.scale
        return None
    if not isinstance(fn, dist.TransformedDistribution):
        return None
    base = _location_and_scale(fn.base_dist)
    if base is None:
        return None
    location, scale = base
    for k, transform in enumerate(fn.transforms):
        if isinstance(transform, transforms.AffineTransform):
            location, scale = transform.loc + transform.scale * location, transform.scale * scale
        elif not isinstance(transform, transforms.ExpTransform) or k + 1 < len(fn.transforms):
            return None
    return location, scale
