"""Settings for all tests."""

import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tiny models in many processes: a second thread in each only makes them wait for one another.
# Before anything imports torch, and inherited by every service process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Services take a GPU where there is one; tests compute where results are the same to the last bit.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Triton decides when it is imported whether its kernels are interpreted on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes depends on the machine: that is no failure. Each run draws others.
settings.register_profile(
    "paceline", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("paceline"), max_examples=20_000)
settings.load_profile("paceline")

# What packs models, as far as it takes long to import.
PACKING = ["paceline.convert.store", "transformers.models.llama.configuration_llama"]


def pytest_collection_finish() -> None:
    """Services, and children that pack tiny models, are forks of one process that has imported all.
    What only GPUs have, such as KV in pages, runs by the reference kernels on the CPU."""
    if sandbox := sys.modules.get("paceline.convert.sandbox"):
        sandbox.START_METHOD = "forkserver"
    if harness := sys.modules.get("paceline.harness"):
        import forked_services

        forkserver.set_forkserver_preload([*PACKING, *forked_services.PRELOADED])
        harness.subprocess = forked_services  # type: ignore[attr-defined]
    if "paceline.kernels" in sys.modules:
        from paceline.bench import reference

        reference.register()


def pytest_configure(config: pytest.Config) -> None:
    """Load the runtimes of sanitizers (`make sanitize`) into the processes that run tests alone.

    Those that tests start need none, and have not enough memory for one: compilers, and readers of
    tokenizers.
    """
    forkserver.set_forkserver_preload(PACKING)
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if os.environ.get("PACELINE_SANITIZE") and runs_tests:
        forkserver.ensure_running()  # its forks load kernels, within less memory than a runtime's
        os.environ.pop("LD_PRELOAD", None)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        yield Path(folder)
