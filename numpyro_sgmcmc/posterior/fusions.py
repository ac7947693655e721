# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Protection of programs from a fault of jaxlib 0.10.2 on CPUs.

It is the last jaxlib for Python 3.11. Some sums that it fuses with their terms end the process by a
segmentation fault, within programs and operation by operation. jaxlib 0.12 does not have the fault.
"""

from importlib.metadata import version
import os

#: XLA flags by which the library computes single products of matrices, and no sums. Without the
#: library several chains take four times as long for a product with one large matrix. Other
#: versions do not need the flags.
WITHOUT_FAULTY_FUSIONS = (
    {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    if version("jaxlib") == "0.10.2"
    else {}
)


def avoid_faulty_fusions() -> None:
    """
    Set the option for all programs of the process, including the programs of ``MCMC``.

    JAX reads the option when it starts. A value that the user has set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in WITHOUT_FAULTY_FUSIONS.items():
        if name not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()
