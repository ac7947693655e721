# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a kernel says of itself to others: a record of its run, and what tells it from another."""

from typing import TYPE_CHECKING, Any

import jax
import numpyro

from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.settings import check_schedule
from numpyro_sgmcmc.posterior.checks.all_rows import densities_of, program_of
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS, GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.metric import name_of
from numpyro_sgmcmc.posterior.target import Target

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel


def record_of(kernel: "SGMCMCKernel") -> dict[str, str | int | float]:
    """The settings of a kernel as words and numbers: those given, tuned, and of the model."""
    given, context, tuning = kernel.given, kernel.context, kernel.tuning
    record: dict[str, str | int | float] = {
        "algorithm": type(kernel).__name__,
        "steps_per_sample": kernel.steps_per_sample,
        "order": kernel.traits.order,
    }
    record |= given.record
    if isinstance(cycle := given.step_size, Cyclical):
        record |= {"cycle_steps": cycle.steps, "cycle_step_size": cycle.smallest}
    if given.replicas is not None:
        record["temperatures"] = ", ".join(f"{t:.6g}" for t in given.replicas.temperatures)
    friction = getattr(given, "friction", None)
    if tuning is not None:
        friction = tuning.friction
        if not callable(given.step_size):
            record["step_size"] = tuning.step_size
        if integrator := kernel.integrator(tuning):
            record["integrator"] = integrator
        record["metric"] = name_of(tuning.metric)
        record["gradient"] = GRADIENTS[order_of(tuning.anchor)]
        if tuning.passes:
            record["tuning_passes"] = sum(tuning.passes.values())
        if tuning.strata:
            record["strata"] = "; ".join(map(str, tuning.strata.values()))
        if tuning.noise is not None:
            record["noise_variance"] = tuning.noise.mean
    if friction is not None:
        record["friction"] = friction
    if context.model is not None:
        target = context.target(given)
        # the anchor of a control variate costs a pass where it moves
        gradients = 1 if tuning is None else GRADIENTS_OF_A_STEP[order_of(tuning.anchor)]
        moves = 0 if given.refresh_every is None else 1 / given.refresh_every
        rows = kernel.steps_per_sample * target.minibatch_share
        # two potentials of all rows are about as dear as one gradient
        tests = 1 if kernel.traits.tested else 0
        record["passes_per_sample"] = rows * (gradients + moves) + tests
        if (replicas := given.replicas) is not None:
            exchange = min(1.0, replicas.minibatches * target.minibatch_share) / 2
            each = float(record["passes_per_sample"]) + exchange
            record["passes_per_sample"] = len(replicas.temperatures) * each
        for plate in context.model.plates:
            record[f"batch_size_{plate.name}"] = plate.subsample_size
        if tuning is not None and (noise := kernel.noise(target, tuning)) is not None:
            record["covariance"] = noise.covariance
    return record


def identity_of(kernel: "SGMCMCKernel", target: Target, num_steps: int) -> dict[str, Any]:
    """
    What the law of a run depends on: the class of the kernel, its settings, the shapes of the
    latent sites, the density of every site at some values of them and rows all over the data, what
    the model computes (by the versions that tell it), a fingerprint of the data, and the devices.

    :param target: the model with its data.
    :param int num_steps: number of steps of the run, over which schedules are compared.
    """
    if callable(kernel.given.step_size):
        check_schedule(kernel.given.step_size, num_steps)
    identity: dict[str, Any] = {"kernel": type(kernel).__name__}
    settings = kernel.given.described(num_steps)
    identity |= {f"kernel's {name}": words for name, words in settings.items()}
    latents = sorted(target.model.latents.items())
    identity["latent sites"] = ", ".join(f"{k}: {x.dtype}{list(x.shape)}" for k, x in latents)

    found = densities_of(target, kernel.context.compiled)
    identity |= {f"log density of '{k}'": x for k, x in found.items()}
    versions = f"JAX {jax.__version__}, NumPyro {numpyro.__version__}, {jax.default_backend()}"
    identity["program of the model"] = {versions: program_of(target)}
    data = fingerprint_of(target.args, target.kwargs)
    identity["data"] = "" if data is None else data
    identity["data that are no arguments"] = target.model.captured
    # other devices draw other rows
    shards = kernel.context.shards
    identity["mesh"] = str(dict(shards.mesh.shape)) if shards else "none"
    return identity
