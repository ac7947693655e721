# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The arguments of a kernel, checked once and frozen."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
import inspect
import math
import re
from typing import Any, Self, TypeVar

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from numpyro_sgmcmc.data.converters import instance, one_of, positive, shown, truth, whole
from numpyro_sgmcmc.data.fingerprint import description_of
from numpyro_sgmcmc.gradients.noise_estimate import COVARIANCES, NoiseEstimate
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.replicas import checked_replicas
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS
from numpyro_sgmcmc.posterior.handlers import Model
from numpyro_sgmcmc.tuning.ensemble import checked_start
from numpyro_sgmcmc.tuning.strata import STRATIFIED, checked_subsampling
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.user_metric import checked_metric, checked_tuning

#: A positive number, or a function of the number of steps taken, such as an optax schedule.
StepSize = float | Callable[[Array], Array | float]

Bound = TypeVar("Bound", bound="Settings")

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

    :param model: a model with NumPyro primitives. A minibatch has ``subsample_size`` rows of each
        plate that says so; without such a plate every step uses all data. Predict with
        :class:`~numpyro_sgmcmc.full_data`.
    :param step_size: step size :math:`h`, in units of the metric: of a posterior standard
        deviation if that is tuned. A positive number, or a function of the number of steps taken,
        such as an ``optax`` schedule or :func:`~numpyro_sgmcmc.cyclical`. None is tuned.
    :param metric: an estimate of the posterior covariance of the unconstrained parameters:
        variances, shape ``(d,)``, a matrix, ``(d, d)``, or a fitted autoguide ``(guide, params)``.
        ``"diagonal"``, ``"low_rank"`` and ``"dense"`` are tuned. None is ``"dense"`` up to 2,000
        parameters, ``"low_rank"`` up to 20,000, ``"diagonal"`` above, and ``"identity"`` if step
        size and friction are given.
    :param gradient: the estimate of the gradient. ``"minibatch"`` is the plain one,
        ``"control_variate"`` has less noise and costs more
        (:class:`~numpyro_sgmcmc.posterior.control_variate.ControlVariate`),
        ``"second_order_control_variate"`` has the least, for up to 2,000 parameters. ``"auto"``,
        the default, takes one where it pays. ``("control_variate", passes)`` moves the anchor to
        the current position every so many passes over the data.
    :param Tuning tuning: the result of :meth:`~numpyro_sgmcmc.SGMCMCKernel.tune`, used again. A
        control variate gets a new anchor if the data are others.
    :param float temperature: :math:`T` of the target :math:`\\propto \\exp(-U / T)`. 1, the
        default, is the posterior.
    :param subsampling: the scheme by which rows are drawn. ``"auto"``, the default, is without
        replacement, from strata where few minibatches have some rows
        (:mod:`~numpyro_sgmcmc.tuning.rare_rows`). Strata of your own are the number of the stratum
        of each row, an array, or a dictionary by plate. Others are ``"without_replacement"``,
        ``"with_replacement"``, ``"epochs"``, ``"symmetric_sweeps"``, and ``"blocks"`` of
        neighbouring rows, for rows on disk (:mod:`~numpyro_sgmcmc.data.subsampling`).
    :param bool reparametrise: whether the tuning chooses coordinates between centred and
        non-centred ones for hierarchies (:mod:`~numpyro_sgmcmc.posterior.reparam`). Draws are those
        of the sites as written either way.
    :param int steps_per_sample: number of steps between two samples; ``MCMC`` counts samples. None
        is twice the relaxation time with a tuned step size, so that samples are almost
        independent; a cycle of a cyclical one; and else 1.
    :param start: ``"ensemble"`` or an :class:`~numpyro_sgmcmc.Ensemble`, for networks: each chain
        starts at an optimum of its own. Then only the step size of
        :class:`~numpyro_sgmcmc.SGMCLMC` is tuned, and ``metric="diagonal"``, one for each chain.
    :param replicas: :class:`~numpyro_sgmcmc.Replicas` of each chain at higher temperatures, for
        posteriors with several modes.
    :param init_strategy: a per-site initialization function of NumPyro, for the initial values.
    :param str on_failure: ``"raise"``, the default, refuses a run whose samples would take more
        than 1,000 steps. ``"warn"`` goes on with 1,000 steps a sample.
    :param bool progress_bar: whether to show progress bars of the tuning and of an ensemble.
    """

    model: Model = field(metadata=_UNIMPORTANT)
    step_size: StepSize | None = None
    _: KW_ONLY
    metric: Any = None
    gradient: Any = "auto"
    tuning: Tuning | None = None
    temperature: float = recorded(1.0)
    subsampling: Any = "auto"
    reparametrise: bool = True
    steps_per_sample: int | None = None
    start: Any = None
    replicas: Any = None
    init_strategy: Callable = init_to_uniform
    on_failure: str = field(default="raise", metadata=_UNIMPORTANT)
    progress_bar: bool = field(default=True, metadata=_UNIMPORTANT)

    def __post_init__(self) -> None:
        if self.step_size is not None and not callable(self.step_size):
            self.set(step_size=positive("step_size", self.step_size))
        example = "one of NumPyro's functions, such as `numpyro.infer.init_to_value(values={...})`"
        instance("init_strategy", self.init_strategy, Callable, example)
        for one in fields(self):
            if isinstance(one.default, bool):
                self.set(**{one.name: truth(one.name, getattr(self, one.name))})
        one_of("on_failure", self.on_failure, ("raise", "warn"))
        if self.steps_per_sample is not None:
            self.set(steps_per_sample=whole("steps_per_sample", self.steps_per_sample))
        self.set(
            gradient=_checked_gradient(self.gradient),
            subsampling=checked_subsampling(self.subsampling),
            temperature=positive("temperature", self.temperature),
            metric=checked_metric(self.metric),
        )
        self.set(
            tuning=checked_tuning(self.tuning, self.metric, self.oracle, self.strata),
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
        if self.start is not None and self.oracle not in ("auto", "minibatch"):
            raise ValueError(
                "`start` is for chains around optima of their own, for which no anchor of a control"
                f" variate is found: use gradient='minibatch', and not {self.gradient!r}."
            )

    def set(self, **values: Any) -> None:
        """Puts values that were checked in the place of those that were given."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_values(self, **values: Any) -> Self:
        """A copy of the settings with other values of some arguments."""
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
        """True if step size and friction are given."""
        return self.step_size is not None and getattr(self, "friction", 0.0) is not None

    @property
    def oracle(self) -> str:
        """The word for the gradient."""
        return self.gradient if isinstance(self.gradient, str) else self.gradient[0]

    @property
    def anchor_moves_every(self) -> float | None:
        """After how many passes the anchor of the control variate moves; None if it does not."""
        return None if isinstance(self.gradient, str) else self.gradient[1]

    @property
    def scheme(self) -> str:
        """The word for the scheme by which rows are drawn, within strata too."""
        return STRATIFIED if self.strata is not None else self.subsampling

    @property
    def strata(self) -> Any:
        """Strata by plate; ``"auto"`` if they are tuned; None if there are none."""
        is_given = self.subsampling == "auto" or not isinstance(self.subsampling, str)
        return self.subsampling if is_given else None

    @property
    def can_stratify(self) -> bool:
        """True if these settings allow stratified minibatches."""
        noise = getattr(self, "noise", None)
        return self.strata is not None and (noise is None or noise.can_stratify)

    @property
    def record(self) -> dict[str, Any]:
        """The settings that go into the record of a run."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if "recorded" in f.metadata}
        return {"subsampling": self.scheme} | kept

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


def _checked_gradient(gradient: Any) -> Any:
    """
    :raises ValueError: if it is neither a word nor a control variate with a number of passes.
    """
    words = ("auto", *GRADIENTS)
    if isinstance(gradient, tuple) and len(gradient) == 2 and gradient[0] == "control_variate":
        return "control_variate", positive("gradient[1]", gradient[1])
    if not isinstance(gradient, str):
        raise ValueError(
            f"`gradient` must be one of {', '.join(map(repr, words))}, or"
            f" ('control_variate', passes) for an anchor that moves; got {shown(gradient)}."
        )
    return one_of("gradient", gradient, words)


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


def checked_noise(noise: Any, used: bool = True, remedy: str = "") -> NoiseEstimate | None:
    """
    The estimate that ``noise`` asks for, a :class:`NoiseEstimate` or the word for its covariance.

    :param bool used: whether the method makes use of one.
    :param str remedy: what to do where it does not.
    :raises ValueError: if it would be ignored.
    """
    if isinstance(noise, str):
        noise = NoiseEstimate(one_of("noise", noise, COVARIANCES))
    example = "a `NoiseEstimate`, or the word for its covariance, such as 'full'"
    instance("noise", noise, NoiseEstimate | None, example)
    if used:
        return noise or NoiseEstimate()
    if noise is not None:
        raise ValueError(
            "`noise` says how the noise of the gradient is estimated, which it is not: "
            f"{remedy}, or leave `noise` out."
        )
    return None


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
_MOVED = dict.fromkeys(("estimator", "window", "rank"), "noise=NoiseEstimate({}=...)") | {
    "covariance": "noise='full', or another word for the covariance",
    "refresh_every": "gradient=('control_variate', passes)",
    "strata": "subsampling=strata, or subsampling='without_replacement' for none",
    "mesh": "no mesh: `spread_rows(mesh, ...)` puts the data on it",
}


def signature_of(settings: type[Settings]) -> inspect.Signature:
    """The arguments in an order for readers: those of the method before those of all kernels."""
    parameters = inspect.signature(settings).parameters.values()
    shared = inspect.signature(Settings).parameters
    return inspect.Signature(
        sorted(parameters, key=lambda p: (p.kind, p.kind == p.KEYWORD_ONLY and p.name in shared))
    )


def bound(kernel: str, settings: type[Bound], args: tuple, kwargs: dict) -> Bound:
    """
    The settings with these arguments.

    :param kernel: its name, for errors.

    :raises TypeError: if there is no such argument, in the name of the kernel.
    :raises ValueError: if an argument has no meaning.
    """
    try:
        model = signature_of(settings).bind(*args, **kwargs).arguments["model"]
    except TypeError as error:
        names = ", ".join(signature_of(settings).parameters)
        moved = [_MOVED[name].format(name) for name in kwargs if name in _MOVED]
        remedy = f"write {', '.join(moved)}" if moved else f"the arguments are {names}"
        raise TypeError(f"{kernel}: {error}; {remedy}.") from None
    if not callable(model):
        raise ValueError(
            f"{kernel} needs a model, a function with NumPyro primitives; got {shown(model)}."
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
