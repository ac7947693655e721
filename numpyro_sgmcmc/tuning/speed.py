# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A test of whether chains move fast enough for a run to be of use."""

import warnings

from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.tuning.tuning import Tuning, TuningFailed

#: Largest number of steps of a sample, for methods with very short steps.
MOST_STEPS_PER_SAMPLE = 1_000

#: Seconds of a draw beyond which the tuning warns.
_LONG = 0.5

#: Number of steps of a sample beyond which the tuning has failed.
_FAILED = MOST_STEPS_PER_SAMPLE

#: Number of steps beyond which it has failed, if the metric is diagonal.
_FAILED_WITHOUT_MATRIX = 10_000


def check_speed(
    name: str, tuning: Tuning, steps: int, without_noise: float, on_failure: str
) -> None:
    """
    Warn of chains with a long relaxation time.

    :param name: the name of the kernel.
    :param int steps: the steps of a sample.
    :param float without_noise: the steps of a sample if minibatches had no noise.
    :param on_failure: ``"raise"`` or ``"warn"``.

    :raises TuningFailed: if chains are too slow for any use, unless ``on_failure`` is ``"warn"``.
    """
    most = _FAILED_WITHOUT_MATRIX if isinstance(tuning.start, DiagonalMetric) else _FAILED
    # a wide margin, because noise always has some effect
    is_for_noise = without_noise <= most / 2
    has_failed = steps > most and not is_for_noise
    if not has_failed and tuning.seconds_per_sample <= _LONG:
        return
    problem, site = tuning.problem, tuning.slowest
    slowest = f", and the slowest site is '{site}'" if site else ""
    seen = (
        f"with a step size of {tuning.step_size:.2g} a chain needs {steps:,} steps,"
        f" {tuning.seconds_per_sample:.2g} s, for an independent"
        f" draw{slowest}{f' ({problem})' if problem else ''}. "
    )
    if steps > most and is_for_noise:
        seen += (
            "The cause is the noise of the minibatches. Use larger minibatches, or a method and a"
            " gradient that it affects less, such as CCAdL and gradient='auto'."
        )
    else:
        seen += (
            "The usual causes are columns that nearly depend on each other (standardise them, and"
            " drop one), effects of a hierarchy that the tuning does not recognise (write `x ="
            " numpyro.sample('x', dist.Normal(mu, tau))`), and digits beyond single precision"
            " (call `numpyro.enable_x64()`)."
        )
    if not has_failed or on_failure == "warn":
        warnings.warn(f"The sampler moves slowly: {seen}", stacklevel=2)
        return
    raise TuningFailed(
        f"The tuning has failed: {seen} `{name}(model, on_failure='warn')` goes on nevertheless,"
        f" with {MOST_STEPS_PER_SAMPLE:,} steps between two samples. `kernel.tuning` has the"
        " result, for `tuning=`.",
        tuning,
    )
