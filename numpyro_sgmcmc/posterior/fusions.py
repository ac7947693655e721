# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A fault of jaxlib 0.10.2 on CPUs, kept away from programs.

It is the last jaxlib for Python 3.11. Some sums that it fuses with their terms end the process by a
segmentation fault, within programs and operation by operation. Those of jaxlib 0.12 do not.
"""

from importlib.metadata import version
import os

#: The kinds of such fusions: none. Other versions have no need of it.
WITHOUT_FAULTY_FUSIONS = (
    {"xla_cpu_experimental_ynn_fusion_type": ""} if version("jaxlib") == "0.10.2" else {}
)


def avoid_faulty_fusions() -> None:
    """
    Set the option for all programs of the process, those of ``MCMC`` among them. JAX reads it when
    it starts; another value from the user stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in WITHOUT_FAULTY_FUSIONS.items():
        if name not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()
