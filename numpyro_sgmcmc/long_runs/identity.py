# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Facts that identify a run in every process."""

from typing import Any

import jax

from numpyro_sgmcmc.data.fingerprint import are_same_densities, description_of, fingerprint_of


def of_run(
    kernel: Any,
    arguments: tuple[tuple, dict],
    samples: int,
    rng_key: Any,
    init_params: Any,
    start: Any,
) -> dict[str, Any]:
    """
    The facts that identify a run, as words and numbers by name.

    :param arguments: positional and keyword arguments of the model.
    :param int samples: number of samples, warm-up included, over which schedules are compared.
    :param start: the state from which a run without warm-up starts, or None.
    """
    facts: dict[str, Any] = {"kernel": type(kernel).__name__}
    if hasattr(kernel, "identity"):
        facts |= kernel.identity(*arguments, samples)
    else:
        # other kernels are identified by their attributes and the data
        for name, value in sorted(vars(kernel).items()):
            if isinstance(value, str | int | float | bool):
                facts[f"kernel's {name.strip('_')}"] = description_of(value)
        facts["data"] = fingerprint_of(*arguments) or ""
    facts["random key"] = fingerprint_of((rng_key,), {})
    facts["init_params"] = fingerprint_of((init_params,), {}) if init_params is not None else ""
    facts["post_warmup_state"] = fingerprint_of((jax.tree.leaves(start),), {}) if start else ""
    facts["jax_enable_x64"] = bool(jax.config.read("jax_enable_x64"))
    return facts


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """The differences between the facts of two runs, in words."""
    words = []
    for name in sorted(here.keys() | there.keys()):
        mine, its = here.get(name), there.get(name)
        if isinstance(mine, float) and isinstance(its, float):
            same = are_same_densities(mine, its)
        elif isinstance(mine, dict) and isinstance(its, dict):  # by shared facts
            same = all(mine[key] == its[key] for key in mine.keys() & its.keys())
        else:
            same = mine == its
        if not same:
            shown = len(f"{mine}{its}") < 200 and not _is_hash(mine) and not _is_hash(its)
            words.append(f"{name} is {mine} and was {its}" if shown else f"different {name}")
    return words


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 128
