# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The arguments of a kernel, checked once and frozen."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
import inspect
import math
from os import PathLike
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

#: Largest number of steps, evenly spaced in a run, at which two schedules are compared.
_MOST_STEPS_COMPARED = 100_000

#: Mark of settings that do not change the law of a run; a model is identified by its densities.
_UNIMPORTANT = {"law": False}


def _word(value: Any) -> str:
    """The text of a number or a word; for other values their name, or the name of their class."""
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def recorded(default: Any) -> Any:
    """A field for a setting, a word or a number, that goes into the record of a run."""
    return field(default=default, metadata={"recorded": True})


@dataclass(frozen=True, eq=False)
class Settings:
    """
    The arguments of all kernels; a method adds its own arguments in a subclass.

    Equality, pickles, copies with another step size, the identity of a run and its record all
    follow from the fields. The docstrings of the kernels take their descriptions from here.

    :param model: a model with NumPyro primitives. A minibatch has ``subsample_size`` rows of each
        plate that says so. It has all rows if these are at most twice as many, and if gradient,
        subsampling and rates are tuned: a control variate would evaluate as many. Predict with
        :class:`~numpyro_sgmcmc.full_data`.
    :param step_size: step size :math:`h`, in units of the metric: of a posterior standard
        deviation if that is tuned. A positive number, or a function of the number of steps taken,
        such as an ``optax`` schedule or :func:`~numpyro_sgmcmc.cyclical`. None is tuned.
    :param metric: an estimate of the posterior covariance of the unconstrained parameters:
        variances, shape ``(d,)``, a matrix, ``(d, d)``, or a fitted autoguide ``(guide, params)``.
        ``"diagonal"``, ``"low_rank"`` and ``"dense"`` are tuned. None is ``"dense"`` up to 2,000
        parameters, ``"low_rank"`` up to 200,000, ``"diagonal"`` above, and ``"identity"`` if step
        size and friction are given.
    :param gradient: the estimate of the gradient. ``"minibatch"`` is the plain estimate,
        ``"control_variate"`` has less noise and costs more
        (:class:`~numpyro_sgmcmc.posterior.control_variate.ControlVariate`),
        ``"second_order_control_variate"`` has the least, for up to 2,000 parameters. ``"auto"``,
        the default, takes one where it pays. ``("control_variate", passes)`` moves the anchor to
        the current position every ``passes`` passes over the data.
    :param tuning: a :class:`~numpyro_sgmcmc.Tuning`, the result of
        :meth:`~numpyro_sgmcmc.SGMCMCKernel.tune`, used again. A control variate gets a new anchor
        for other data. Or the path of a folder of tunings: a kernel with the same model and data
        takes its tuning from there, without checking the rows again, and another kernel tunes
        itself and adds its tuning. With other data of the same shape the search starts at the
        latest centre.
    :param float temperature: :math:`T` of the target :math:`\\propto \\exp(-U / T)`. 1, the
        default, is the posterior.
    :param subsampling: the scheme by which rows are drawn. ``"auto"``, the default, is without
        replacement, from strata where few minibatches have some rows
        (:mod:`~numpyro_sgmcmc.tuning.rare_rows`). Strata of your own are the number of the stratum
        of each row, an array, or a dictionary by plate. Other words are ``"without_replacement"``,
        ``"with_replacement"``, ``"epochs"``, ``"symmetric_sweeps"``, and ``"blocks"`` of
        neighbouring rows, for rows on disk (:mod:`~numpyro_sgmcmc.data.subsampling`).
    :param bool reparametrise: whether the tuning chooses coordinates between centred and
        non-centred ones for hierarchies (:mod:`~numpyro_sgmcmc.posterior.reparam`). Draws have the
        sites of the model either way.
    :param int steps_per_sample: number of steps between two samples; ``MCMC`` counts samples. None
        is twice the relaxation time with a tuned step size, so that samples are almost
        independent; one cycle with a cyclical step size; and otherwise 1.
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
    tuning: Tuning | str | PathLike | None = None
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
                "`start` puts each chain at an optimum of its own, so that no `metric` or `tuning`"
                " fits all chains. Leave these out, or give metric='diagonal', which is tuned for"
                " each chain."
            )
        if self.start is not None and self.oracle not in ("auto", "minibatch"):
            raise ValueError(
                "`start` puts each chain at an optimum of its own, without the anchor of a control"
                f" variate that gradient={self.gradient!r} needs. Use gradient='minibatch'."
            )

    def set(self, **values: Any) -> None:
        """Replace given values by checked ones."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_values(self, **values: Any) -> Self:
        """A copy of the settings with other values of some arguments."""
        return replace(self, **values)

    @property
    def first_step_size(self) -> float | None:
        """
        The step size of the first step, if it is given.

        :raises ValueError: if a schedule gives no positive number for it.
        """
        if not callable(self.step_size):
            return self.step_size
        step_size = float(schedule_values(self.step_size, 1)[1][0])
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(
                f"The step size schedule gives {step_size} at step 0, and must be positive."
            )
        return step_size

    @property
    def rates_are_given(self) -> bool:
        """True if step size and friction are given."""
        return self.step_size is not None and getattr(self, "friction", 0.0) is not None

    @property
    def may_take_all_rows(self) -> bool:
        """True if a step may take all rows where these are few."""
        is_tuned = isinstance(self.tuning, Tuning) or not self.rates_are_given
        is_free = self.start is None and self.replicas is None
        return is_tuned and is_free and self.gradient == self.subsampling == "auto"

    @property
    def oracle(self) -> str:
        """The word for the gradient."""
        return self.gradient if isinstance(self.gradient, str) else self.gradient[0]

    @property
    def anchor_moves_every(self) -> float | None:
        """The number of passes after which the anchor moves, or None if it does not."""
        return None if isinstance(self.gradient, str) else self.gradient[1]

    @property
    def scheme(self) -> str:
        """The word for the scheme that draws the rows, within strata too."""
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
        """The arguments that decide the law of a run, without defaults."""
        usual = type(self)(self.model).described()
        others = [name for name, words in self.described().items() if words != usual[name]]
        return ", ".join([_word(self.model), *(f"{k}={_word(getattr(self, k))}" for k in others)])

    def described(self, num_steps: int = 1) -> dict[str, str]:
        """
        The settings as words that are equal in every process; schedules by their values.

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
    Check the argument ``gradient`` of a kernel.

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
    Check the step sizes of a schedule.

    :raises ValueError: if a step size of the run is not positive.
    """
    steps, values = schedule_values(schedule, num_steps)
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        k = int(np.argmax(wrong))
        raise ValueError(
            f"The step size schedule gives {values[k]:g} at step {steps[k]:,} of {num_steps:,},"
            " and must be positive. Let it end in a small positive number, or run fewer steps."
        )


def schedule_values(schedule: Callable, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """All steps of a run, or 100,000 evenly spaced steps, and their sizes."""
    count = min(max(1, num_steps), _MOST_STEPS_COMPARED)
    steps = np.unique(np.linspace(0, max(0, num_steps - 1), count).astype(np.int32))
    with jax.ensure_compile_time_eval():
        try:
            return steps, np.asarray(jax.vmap(lambda i: _scalar(schedule(i)))(steps))
        except (TypeError, ValueError, AttributeError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                "`step_size` must be a function that JAX can trace, from the number of a step to a"
                f" number: {str(error).splitlines()[0]} Write `jnp.where` for an `if`, and"
                " `jax.numpy` for NumPy; or take a schedule of optax."
            ) from error


def _scalar(value: Any) -> jax.Array:
    value = jnp.asarray(value, float)
    if value.shape:
        raise ValueError(f"It gives an array of shape {value.shape}.")
    return value


def checked_noise(noise: Any, used: bool = True, remedy: str = "") -> NoiseEstimate | None:
    """
    The noise estimate of the argument ``noise``: an estimate, or the word for its covariance.

    :param bool used: whether the method uses an estimate.
    :param str remedy: the argument with which it would, for the error.
    :raises ValueError: if the estimate would be ignored.
    """
    if isinstance(noise, str):
        noise = NoiseEstimate(one_of("noise", noise, COVARIANCES))
    example = "a `NoiseEstimate`, or the word for its covariance, such as 'full'"
    instance("noise", noise, NoiseEstimate | None, example)
    if used:
        return noise or NoiseEstimate()
    if noise is not None:
        raise ValueError(
            "`noise` would be ignored, because these arguments estimate no noise of the gradient."
            f" Give {remedy}, or leave `noise` out."
        )
    return None


def check_not_matrix_free(noise: NoiseEstimate | None, integrator: str, instead: str) -> None:
    """
    Check that the covariance of the noise is known before the gradient.

    :raises ValueError: if it is known only after the gradient.
    """
    if noise is not None and noise.covariance == "matrix_free":
        raise ValueError(
            f"integrator='{integrator}' needs the covariance of the noise before the gradient, and"
            f" covariance='matrix_free' knows it only afterwards. Use integrator='{instead}'."
        )


#: Arguments of earlier versions, with their replacements.
_MOVED = dict.fromkeys(("estimator", "window", "rank"), "noise=NoiseEstimate({}=...)") | {
    "covariance": "noise='full', or another word for the covariance",
    "refresh_every": "gradient=('control_variate', passes)",
    "strata": "subsampling=strata, or subsampling='without_replacement' for none",
    "mesh": "no mesh: `spread_rows(mesh, ...)` puts the data on it",
}


def signature_of(settings: type[Settings]) -> inspect.Signature:
    """The signature for readers: arguments of the method, then arguments of all kernels."""
    parameters = inspect.signature(settings).parameters.values()
    shared = inspect.signature(Settings).parameters
    return inspect.Signature(
        sorted(parameters, key=lambda p: (p.kind, p.kind == p.KEYWORD_ONLY and p.name in shared))
    )


def bound(kernel: str, settings: type[Bound], args: tuple, kwargs: dict) -> Bound:
    """
    The settings with these arguments.

    :param kernel: the name of the kernel, for errors.

    :raises TypeError: if an argument does not exist. The message names the kernel.
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

    :param doc: the docstring, with some of the blocks.
    :param known: docstrings with the other blocks, the nearest first.
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
