# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
One of several processes that sample together: what ``test_devices.py`` starts, as
``python one_process.py process processes devices-of-each port chains where-to-write``.
"""

import os
import sys

PROCESS, PROCESSES, DEVICES, PORT, CHAINS = map(int, sys.argv[1:6])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, PROCESS)

from known_posterior import X, Y, sample  # noqa: E402
import numpy as np  # noqa: E402

from numpyro_sgmcmc import spread_rows  # noqa: E402
from numpyro_sgmcmc.kernels._arguments import fingerprint_of  # noqa: E402

shape, names = (PROCESSES * DEVICES // CHAINS,), ("rows",)
if CHAINS > 1:
    shape, names = (CHAINS, *shape), ("chains", *names)
mesh = jax.make_mesh(shape, names)
# the processes of one part of the chains hold all rows together
holders = PROCESSES // CHAINS if PROCESSES >= CHAINS else 1
part = len(X) // holders
here = slice(PROCESS % holders * part, (PROCESS % holders + 1) * part)
data = spread_rows(mesh, X[here], Y[here])
draws, state = sample(mesh, data)
parts = [np.asarray(shard.data) for shard in state.z["w"].addressable_shards]
np.savez(
    sys.argv[6],
    draws=draws,
    last=np.stack(parts),
    data=fingerprint_of(data, {}),
    rows=data[0].shape,
)
