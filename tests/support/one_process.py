# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
One of several processes that sample together, with a store for ever: what ``test_devices.py``
starts as ``python one_process.py process processes port devices-of-each chains where-to-write
[store]``; with ``ROWS_ON_DISK`` in the environment their rows stay where they are.
"""

import os
import sys

PROCESS, PROCESSES, PORT, DEVICES, CHAINS = map(int, sys.argv[1:6])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, PROCESS, heartbeat_timeout_seconds=20)

from known_posterior import X, Y, sample  # noqa: E402
import numpy as np  # noqa: E402

from numpyro_sgmcmc import LongRun, RowsOnDisk, spread_rows  # noqa: E402
from numpyro_sgmcmc.data.fingerprint import fingerprint_of  # noqa: E402

shape, names = (PROCESSES * DEVICES // CHAINS,), ("rows",)
if CHAINS > 1:
    shape, names = (CHAINS, *shape), ("chains", *names)
mesh = jax.make_mesh(shape, names)
# the processes of one part of the chains hold all rows together
holders = PROCESSES // CHAINS if PROCESSES >= CHAINS else 1
part = len(X) // holders
here = slice(PROCESS % holders * part, (PROCESS % holders + 1) * part)
rows = X[here], Y[here]
if "ROWS_ON_DISK" in os.environ:
    rows = tuple(map(RowsOnDisk, rows))
data = spread_rows(mesh, *rows)
draws, state = sample(mesh, data)
parts = [np.asarray(shard.data) for shard in state.z["w"].addressable_shards]
found = {"draws": draws, "last": np.stack(parts), "rows": data[0].shape}
np.savez(f"{sys.argv[6]}.npz", data=fingerprint_of(data, {}), **found)
os.replace(f"{sys.argv[6]}.npz", sys.argv[6])  # whole when it is there
while len(sys.argv) > 7:
    for samples in (100, 300):  # the second time from the end of the first
        draws, _ = sample(mesh, data, samples, LongRun, store=sys.argv[7])
        assert np.array_equal(draws, found["draws"][:, :samples])
    open(f"{sys.argv[6]}.long", "w").close()
    sample(mesh, data, 10**9)
