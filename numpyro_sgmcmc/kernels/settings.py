# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a kernel was given: its arguments, checked once, and never changed."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
import inspect
import math
import re
from typing import Any, Self

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from numpyro_sgmcmc.data.converters import instance, one_of, positive, shown, truth, whole
from numpyro_sgmcmc.data.fingerprint import description_of
from numpyro_sgmcmc.data.sharding import checked_mesh
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.gradients.noise_estimate import NoiseEstimate
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.replicas import checked_replicas
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS
from numpyro_sgmcmc.posterior.handlers import Model
from numpyro_sgmcmc.tuning.ensemble import checked_start
from numpyro_sgmcmc.tuning.strata import STRATIFIED, checked_strata
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.user_metric import checked_metric, checked_tuning

#: A positive number, or a function of the number of steps taken, such as an optax schedule.
StepSize = float | Callable[[Array], Array | float]

#: Two schedules are told apart at every step of a run, or at so many evenly spaced ones.
_MOST_STEPS_COMPARED = 100_000

#: Not part of what the law of a run depends on; a model is known by its densities.
_UNIMPORTANT = {"law": False}


def _word(value: Any) -> str:
    """A number or a word as it is written, anything else by its name or that of its class."""
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def recorded(default: Any) -> Any:
    """A setting that goes into the record of a run, a word or a number."""
    return field(default=default, metadata={"recorded": True})


@dataclass(frozen=True, eq=False)
class Settings:
    """
    The arguments that all kernels have; a method adds its own in a subclass.

    Equality, pickles, copies with another step size, the identity of a run and its record all
    follow from the fields. The docstrings of the kernels have their descriptions from here.

    :param model: a model with NumPyro primitives. The plates that have a
        ``subsample_size`` say what a minibatch is; without any, every step uses all data. For
        predictions use :class:`~numpyro_sgmcmc.full_data`,
        ``Predictive(full_data(model), mcmc.get_samples())(rng_key, X_new)``; without it each draw
        predicts a minibatch of its own.
    :param step_size: step size :math:`h`, a positive number or a function of the number
        of steps taken (warm-up included), such as an ``optax`` schedule or
        :func:`~numpyro_sgmcmc.cyclical`; None is tuned. It is in units of the metric: with a tuned
        one, of a posterior standard deviation.
    :param metric: the covariance of the posterior of the unconstrained parameters, as far as
        it is known, in whose coordinates the sampler moves: an array of variances, shape
        ``(d,)``, or a matrix, ``(d, d)``; a fitted autoguide and its parameters,
        ``(guide, params)``; ``"diagonal"``, ``"low_rank"`` or ``"dense"`` to have it tuned;
        ``"identity"``. None is the identity if step size and friction are given, and else tuned: a
        matrix up to 2,000 parameters, variances and a low rank up to 20,000, variances above.
    :param str gradient: ``"minibatch"``; ``"control_variate"``, less noise for a dearer step,
        after a pass over all data
        (:class:`~numpyro_sgmcmc.posterior.control_variate.ControlVariate`);
        ``"second_order_control_variate"``, much less for a step that is dearer again, after as
        many passes as there are parameters, of which there may be 2,000; or ``"auto"``, a control
        variate if something is tuned and it at least halves the noise, of second order if that
        at least halves the steps of an effective sample.
    :param float refresh_every: move the anchor of the control variate to the current position
        every so many passes over the data; it stays at the centre if None.
    :param Tuning tuning: the result of :meth:`~numpyro_sgmcmc.SGMCMCKernel.tune`, instead of
        tuning anew: its metric, and its control variate, whose anchor is made anew where the data
        are others.
    :param float temperature: the target is :math:`\\propto \\exp(-U / T)`; 1 is the posterior.
    :param str subsampling: how the rows of a minibatch are drawn: ``"without_replacement"``
        within a minibatch and independently of other minibatches, ``"with_replacement"``,
        ``"epochs"``, in shuffled passes over the data, ``"symmetric_sweeps"``, forward
        and backward through random partitions of them, or ``"blocks"``, of neighbouring rows,
        which are read from disk much faster (:func:`~numpyro_sgmcmc.data.subsampling.blocks`).
    :param strata: strata of the rows, of each of which a minibatch has a number of its own: an
        array of whole numbers, the number of the stratum of each row, or a dictionary of them by
        the name of the plate; None for none; or ``"auto"``, strata that the tuning finds, where
        something is tuned and rows that few minibatches have would make the draws wrong
        (:mod:`~numpyro_sgmcmc.tuning.rare_rows`). They need
        ``subsampling="without_replacement"``.
    :param bool reparametrise: whether hierarchies are sampled in coordinates between centred and
        non-centred ones, which the tuning finds (:mod:`~numpyro_sgmcmc.posterior.reparam`); the
        draws are those of the sites as written either way.
    :param int steps_per_sample: number of steps between two samples that NumPyro's
        ``MCMC`` sees; ``num_warmup``, ``num_samples`` and ``thinning`` count samples. None is 1 if
        the step size is given, a cycle of a cyclical one, and else as many as a chain needs to
        forget most of where it was, :meth:`~numpyro_sgmcmc.SGMCMCKernel.relaxation_time` twice:
        samples are then almost independent, as those of NUTS.
    :param start: ``"ensemble"``, or an :class:`~numpyro_sgmcmc.Ensemble`, for networks: each chain
        starts at an optimum of its own, which is found first; nothing else is tuned but, where it
        is not given, the step size of :class:`~numpyro_sgmcmc.SGMCLMC`, and, with
        ``metric="diagonal"``, a metric for each chain, of the curvature that the gradients of
        minibatches show at its optimum. The descents begin within 0.3 of zero unless
        ``init_strategy`` says otherwise. None otherwise.
    :param replicas: :class:`~numpyro_sgmcmc.Replicas` of each chain at higher temperatures, with
        which it exchanges positions, for posteriors with several modes. None for none.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param str on_failure: what to do where the tuning has failed, and a sample would take more than
        1,000 steps: ``"raise"`` an error, or ``"warn"`` and go on with 1,000 steps for each.
    :param bool progress_bar: whether to show the phases of the tuning, and how far an ensemble has
        come.
    :param mesh: devices over which the rows of the data are spread
        (:func:`~numpyro_sgmcmc.spread_rows`); None is the mesh over which they are, if any.
    """

    model: Model = field(metadata=_UNIMPORTANT)
    step_size: StepSize | None = None
    _: KW_ONLY
    metric: Any = None
    gradient: str = "auto"
    refresh_every: float | None = None
    tuning: Tuning | None = None
    temperature: float = recorded(1.0)
    subsampling: str = recorded("without_replacement")
    strata: Any = "auto"
    reparametrise: bool = True
    steps_per_sample: int | None = None
    start: Any = None
    replicas: Any = None
    init_strategy: Callable = init_to_uniform
    on_failure: str = field(default="raise", metadata=_UNIMPORTANT)
    progress_bar: bool = field(default=True, metadata=_UNIMPORTANT)
    mesh: Mesh | None = field(default=None, metadata=_UNIMPORTANT)

    def __post_init__(self) -> None:
        if self.step_size is not None and not callable(self.step_size):
            self.set(step_size=positive("step_size", self.step_size))
        example = "one of NumPyro's functions, such as `numpyro.infer.init_to_value(values={...})`"
        instance("init_strategy", self.init_strategy, Callable, example)
        for one in fields(self):
            if isinstance(one.default, bool):
                self.set(**{one.name: truth(one.name, getattr(self, one.name))})
        # a word of earlier versions, refused by itself for one release
        if isinstance(self.subsampling, str) and self.subsampling == "importance":
            raise ValueError(
                "subsampling='importance' was taken out: leave `subsampling` out. Strata do the"
                " same, which the tuning finds by itself."
            )
        one_of("subsampling", self.subsampling, tuple(SCHEMES))
        one_of("on_failure", self.on_failure, ("raise", "warn"))
        one_of("gradient", self.gradient, ("auto", *GRADIENTS))
        for name, check in (("steps_per_sample", whole), ("refresh_every", positive)):
            if (value := getattr(self, name)) is not None:
                self.set(**{name: check(name, value)})
        self.set(
            temperature=positive("temperature", self.temperature),
            mesh=checked_mesh(self.mesh),
            metric=checked_metric(self.metric),
            tuning=checked_tuning(self.tuning, self.metric, self.gradient, self.strata),
            strata=checked_strata(self.strata, self.subsampling),
            start=checked_start(self.start),
            replicas=checked_replicas(self.replicas),
        )
        if isinstance(self.step_size, Cyclical) and self.steps_per_sample is not None:
            self.step_size.check(self.steps_per_sample)
        has_own = self.metric is None or isinstance(self.metric, str) and self.metric == "diagonal"
        if self.start is not None and (self.tuning is not None or not has_own):
            raise ValueError(
                "`start` is for chains around optima of their own, for which there is no common"
                " `metric` or `tuning`: leave these out, or give metric='diagonal', which is found"
                " for each chain."
            )
        if self.start is not None and self.gradient not in ("auto", "minibatch"):
            raise ValueError(
                "`start` is for chains around optima of their own, for which no anchor of a control"
                f" variate is found: use gradient='minibatch', and not {self.gradient!r}."
            )
        if self.refresh_every is not None and self.gradient != "control_variate":
            raise ValueError(
                "`refresh_every` moves the anchor of a control variate: it needs"
                f" gradient='control_variate', but gradient={self.gradient!r}."
            )

    def set(self, **values: Any) -> None:
        """Puts values that were checked in the place of those that were given."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_values(self, **values: Any) -> Self:
        """The same settings with other values of some of them."""
        return replace(self, **values)

    @property
    def first_step_size(self) -> float | None:
        """
        The step size of the first step, if it is given.

        :raises ValueError: if it is that of a schedule, and not a positive number.
        """
        if not callable(self.step_size):
            return self.step_size
        step_size = float(schedule_values(self.step_size, 1)[1][0])
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(
                f"The step size schedule gives {step_size} at step 0; it must be positive."
            )
        return step_size

    @property
    def rates_are_given(self) -> bool:
        """Whether step size and friction are given."""
        return self.step_size is not None and getattr(self, "friction", 0.0) is not None

    @property
    def can_stratify(self) -> bool:
        """Whether minibatches may be stratified, as far as these settings go."""
        noise = getattr(self, "noise", None)
        return self.subsampling == STRATIFIED and (noise is None or noise.can_stratify)

    @property
    def record(self) -> dict[str, Any]:
        """The settings that go into the record of a run."""
        return {f.name: getattr(self, f.name) for f in fields(self) if "recorded" in f.metadata}

    @property
    def as_given(self) -> str:
        """The arguments that decide the law of a run, without those that have their defaults."""
        usual = type(self)(self.model).described()
        others = [name for name, words in self.described().items() if words != usual[name]]
        return ", ".join([_word(self.model), *(f"{k}={_word(getattr(self, k))}" for k in others)])

    def described(self, num_steps: int = 1) -> dict[str, str]:
        """
        Each setting in a word that is the same in every process, of a schedule its values.

        :param int num_steps: number of steps of the run.
        """
        found = {}
        for one in fields(self):
            if one.metadata.get("law", True):
                value = getattr(self, one.name)
                if one.name == "step_size" and callable(value):
                    value = schedule_values(value, num_steps)[1].tolist()
                found[one.name] = description_of(value)
        return found

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, Settings)
            and self.model == other.model
            and self.described() == other.described()
        )

    def __hash__(self) -> int:
        return hash((type(self), self.model))


def check_schedule(schedule: Callable, num_steps: int) -> None:
    """
    :raises ValueError: if a step of a run would not be positive.
    """
    steps, values = schedule_values(schedule, num_steps)
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        k = int(np.argmax(wrong))
        raise ValueError(
            f"The step size schedule gives {values[k]:g} at step {steps[k]:,} of {num_steps:,}; it"
            " must be positive. Let it end in a small number, or run less."
        )


def schedule_values(schedule: Callable, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a run, every one or 100,000 of them, and their sizes."""
    count = min(max(1, num_steps), _MOST_STEPS_COMPARED)
    steps = np.unique(np.linspace(0, max(0, num_steps - 1), count).astype(np.int32))
    with jax.ensure_compile_time_eval():
        try:
            return steps, np.asarray(jax.vmap(lambda i: _scalar(schedule(i)))(steps))
        except (TypeError, ValueError, AttributeError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                "`step_size` is a function, but not one that gives a number for the number of a"
                f" step, which is traced: {str(error).splitlines()[0]} Write `jnp.where` for an"
                " `if`, the functions of `jax.numpy` for those of NumPy, or take one of optax."
            ) from error


def _scalar(value: Any) -> jax.Array:
    value = jnp.asarray(value, float)
    if value.shape:
        raise ValueError(f"It gives an array of shape {value.shape}.")
    return value


def covariance_settings(
    noise: NoiseEstimate | None, covariance: str | None, used: bool, remedy: str
) -> NoiseEstimate | None:
    """
    The estimate that ``noise`` or its short form ``covariance`` asks for.

    :param bool used: whether the method makes use of one.
    :param str remedy: what to do where it does not.
    :raises ValueError: if both are given, or one that would be ignored.
    """
    example = "a `NoiseEstimate`, such as `NoiseEstimate(covariance='full')`"
    instance("noise", noise, NoiseEstimate | None, example)
    if noise is not None and covariance is not None:
        raise ValueError(
            f"`covariance={shown(covariance)}` is short for `noise=NoiseEstimate(covariance="
            f"{shown(covariance)})`, and `noise` is given too: give one of them."
        )
    if not used and (noise is not None or covariance is not None):
        name = "noise" if covariance is None else "covariance"
        raise ValueError(
            f"`{name}` says how the noise of the gradient is estimated, which it is not: {remedy},"
            f" or leave `{name}` out."
        )
    if not used:
        return None
    return NoiseEstimate(covariance) if noise is None else noise


def check_not_matrix_free(noise: NoiseEstimate | None, integrator: str, instead: str) -> None:
    """
    :raises ValueError: if a covariance that is needed before the gradient is known only after it.
    """
    if noise is not None and noise.covariance == "matrix_free":
        raise ValueError(
            f"integrator='{integrator}' needs the covariance before the gradient, which"
            f" covariance='matrix_free' does not hold; use integrator='{instead}'."
        )


#: Arguments of earlier versions, and where they are now.
_MOVED = dict.fromkeys(("estimator", "window", "rank"), "noise=NoiseEstimate({}=...)")


def signature_of(settings: type[Settings]) -> inspect.Signature:
    """The arguments in an order for readers: those of the method before those of all kernels."""
    parameters = inspect.signature(settings).parameters.values()
    shared = inspect.signature(Settings).parameters
    return inspect.Signature(
        sorted(parameters, key=lambda p: (p.kind, p.kind == p.KEYWORD_ONLY and p.name in shared))
    )


def bound(kernel: type, settings: type[Settings], args: tuple, kwargs: dict) -> Settings:
    """
    The settings with these arguments.

    :raises TypeError: if there is no such argument, in the name of the kernel.
    :raises ValueError: if an argument has no meaning.
    """
    try:
        model = signature_of(settings).bind(*args, **kwargs).arguments["model"]
    except TypeError as error:
        names = ", ".join(signature_of(settings).parameters)
        moved = [_MOVED[name].format(name) for name in kwargs if name in _MOVED]
        remedy = f"write {', '.join(moved)}" if moved else f"the arguments are {names}"
        raise TypeError(f"{kernel.__name__}: {error}; {remedy}.") from None
    if not callable(model):
        raise ValueError(
            f"{kernel.__name__} needs a model, a function with NumPyro primitives; got"
            f" {shown(model)}."
        )
    return settings(*args, **kwargs)


def with_inherited_parameters(doc: str, known: list[str], signature: inspect.Signature) -> str:
    """
    A docstring with a ``:param`` block for each argument, in the order of the signature.

    :param doc: has some of them.
    :param known: docstrings that have the others, the nearest first.
    """
    block = re.compile(r"^    :(?:param|type)[^:\n]*?(\w+):.*(?:\n        .*)*\n", re.MULTILINE)
    found: dict[str, str] = {}
    for text in (doc, *known):
        for match in block.finditer(text):
            found.setdefault(match.group(1), match.group(0))
    blocks = [found[name] for name in signature.parameters if name in found]
    first = block.search(doc) or re.search("^    :raises", doc, re.MULTILINE)
    rest = block.sub("", doc)
    place = first.start() if first else len(rest)
    return rest[:place] + "".join(blocks) + rest[place:]
