# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The record of a run in words and numbers, and the facts that identify it."""

from typing import Any

import jax
import numpyro

from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.kernels.settings import check_schedule
from numpyro_sgmcmc.posterior.checks.all_rows import densities_of, program_of
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS, GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.metric import name_of
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning


def run_info(method: Method, runtime: Runtime) -> dict[str, str | int | float]:
    """The settings of a kernel as words and numbers: given, tuned, and taken from the model."""
    info: dict[str, str | int | float]
    info = {"algorithm": runtime.name, "steps_per_sample": runtime.samples_every(method)}
    info |= method.record
    if isinstance(cycle := method.step_size, Cyclical):
        info |= {"cycle_steps": cycle.steps, "cycle_step_size": cycle.smallest}
    if method.replicas is not None:
        info["temperatures"] = ", ".join(f"{t:.6g}" for t in method.replicas.temperatures)
    friction = getattr(method, "friction", None)
    if runtime.tuning is not None:
        friction = runtime.tuning.friction
        info |= _of_tuning(method, runtime.tuning)
    if friction is not None:
        info["friction"] = friction
    return info if runtime.model is None else info | _of_model(method, runtime)


def _of_tuning(method: Method, tuning: Tuning) -> dict[str, str | int | float]:
    info: dict[str, str | int | float] = {}
    if not callable(method.step_size):
        info["step_size"] = tuning.step_size
    if integrator := method.integrator_for(tuning):
        info["integrator"] = integrator
    info["metric"] = name_of(tuning.metric)
    info["gradient"] = GRADIENTS[order_of(tuning.anchor)]
    if tuning.passes:
        info["tuning_passes"] = sum(tuning.passes.values())
    if tuning.strata:
        info["strata"] = "; ".join(map(str, tuning.strata.values()))
    if tuning.noise is not None:
        info["noise_variance"] = tuning.noise.mean
    return info


def _of_model(method: Method, runtime: Runtime) -> dict[str, str | int | float]:
    assert runtime.model is not None
    target, tuning = runtime.target(method), runtime.tuning
    # a moving anchor costs a pass at each move
    gradients = 1 if tuning is None else GRADIENTS_OF_A_STEP[order_of(tuning.anchor)]
    moves = 0 if method.anchor_moves_every is None else 1 / method.anchor_moves_every
    rows = runtime.samples_every(method) * target.minibatch_share
    # two potentials of all rows cost about as much as one gradient
    tests = 1 if method.traits.metropolis_corrected else 0
    passes = rows * (gradients + moves) + tests
    if (replicas := method.replicas) is not None:
        exchange = min(1.0, replicas.minibatches * target.minibatch_share) / 2
        passes = len(replicas.temperatures) * (passes + exchange)
    info: dict[str, str | int | float] = {"passes_per_sample": passes}
    for plate in runtime.model.plates:
        info[f"batch_size_{plate.name}"] = plate.subsample_size
    if tuning is not None and (noise := method.noise_estimator(target, tuning)) is not None:
        info["covariance"] = noise.covariance
    return info


def identity_of(method: Method, runtime: Runtime, target: Target, num_steps: int) -> dict[str, Any]:
    """
    The facts that determine the law of a run.

    They are those of :func:`facts_of_model`, the density of every site at some values and rows, and
    the fingerprints of the data.

    :param target: the model with its data.
    :param int num_steps: number of steps over which schedules are compared.
    """
    if callable(method.step_size):
        check_schedule(method.step_size, num_steps)
    identity = facts_of_model(method, runtime, target, num_steps)
    densities = densities_of(target, runtime.compiled)
    identity |= {f"log density of '{k}'": x for k, x in densities.items()}
    data = fingerprint_of(target.args, target.kwargs)
    identity["data"] = "" if data is None else data
    identity["data that are no arguments"] = target.model.captured
    return identity


def facts_of_model(
    method: Method, runtime: Runtime, target: Target, num_steps: int
) -> dict[str, Any]:
    """
    The facts that determine the law of a run, without the values of the data.

    They are the class of the kernel, its settings, the shapes of the latent sites, the fingerprint
    of the computation, and the devices. The arguments are those of :func:`identity_of`.
    """
    facts: dict[str, Any] = {"kernel": runtime.name}
    settings = method.described(num_steps)
    facts |= {f"kernel's {name}": words for name, words in settings.items()}
    latents = sorted(target.model.latents.items())
    facts["latent sites"] = ", ".join(f"{k}: {x.dtype}{list(x.shape)}" for k, x in latents)
    versions = f"JAX {jax.__version__}, NumPyro {numpyro.__version__}, {jax.default_backend()}"
    facts["program of the model"] = {versions: program_of(target)}
    # each device draws its own rows
    shards = runtime.shards
    facts["mesh"] = str(dict(shards.mesh.shape)) if shards else "none"
    return facts
