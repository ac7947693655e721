# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

from importlib.metadata import version
import os
from pathlib import Path

import pytest

# Before JAX starts: devices for chain_method="parallel", and pictures without a screen.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Most programs are small: to compile them in parts, side by side, takes a fifth longer.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    # Most of the time goes into compiling; the later versions do not know the flag.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The same programs are compiled by several tests, processes and legs of CI.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["MPLBACKEND"] = "Agg"

#: Shared by the tests, or started by one as a process of its own.
collect_ignore = ["support"]


def pytest_configure(config):
    """ArviZ 0.23 writes a file at its first import of a day, where two processes are in each
    other's way: it has been read before the workers start."""
    if not hasattr(config, "workerinput"):
        import arviz  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Examples that run a chain are slow; of the cases of some tests only the first is quick."""
    seen = set()
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            if any(run in x.source for x in item.dtest.examples for run in (".run(", ".tune(")):
                item.add_marker("slow")
        elif item.get_closest_marker("one_case") and not item.get_closest_marker("nightly"):
            if item.function in seen:
                item.add_marker("nightly")
            seen.add(item.function)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """Where runs are short and programs many, most of the time goes into compiling them."""
    import jax

    quick = getattr(request.module, "COMPILE_QUICKLY", False)
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_finish(session):
    """A module's generator of random numbers, as it is once the module has been read."""
    modules = {item.module for item in session.items if hasattr(item, "module")}
    generators = {m: m.RNG for m in modules if hasattr(m, "RNG")}
    session.config.stash[GENERATORS] = {
        module: (rng, rng.bit_generator.state) for module, rng in generators.items()
    }


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The data of a test do not depend on which tests the same process has run before."""
    generators = item.config.stash[GENERATORS]
    if getattr(item, "module", None) in generators:
        rng, state = generators[item.module]
        rng.bit_generator.state = state


GENERATORS = pytest.StashKey[dict]()


@pytest.fixture(autouse=True)
def forget_programs(request):
    """Thousands of compiled programs in one process exhaust its memory maps: XLA then crashes."""
    yield
    import jax

    done = request.config.stash.get(DONE, 0) + 1
    request.config.stash[DONE] = done
    if done % 60 == 0:
        jax.clear_caches()


@pytest.fixture
def compiled():
    """The programs that XLA compiles from here on."""
    import jax

    seen = []

    def listen(event, _, **__):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


DONE = pytest.StashKey[int]()
