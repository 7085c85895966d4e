"""gpu-check runs on a machine whose packages somebody else chose, from the sources."""

from __future__ import annotations

import os
import subprocess
import sys

BLOCKER = """
import importlib.abc, importlib.metadata, sys

MISSING = {
    "accelerate", "aiohttp", "grpc_tools", "jinja2", "llguidance", "opentelemetry",
    "prometheus_client", "pydantic", "shtab", "uvloop",
}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
version = importlib.metadata.version
def no_paceline(name):
    if name == "paceline":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_paceline
"""

IMPORTS = """
import importlib, pkgutil
import paceline.bench.gpu as checks
from paceline.cli.main import COMMANDS, build_parser
from paceline.drafter.methods import method_class, method_names

for found in pkgutil.iter_modules(checks.__path__):
    importlib.import_module(f"paceline.bench.gpu.{found.name}")
build_parser([command for command in COMMANDS if command.name in ("verifier", "drafter")])
for name in ("verifier", "drafter", "client", "harness", "verifier.kv.pool"):
    importlib.import_module(f"paceline.{name}")
for name in method_names():
    method_class(name)
from paceline.bench.gpu.running import obstacle
print(obstacle())
"""


def test_what_it_runs_needs_neither_telemetry_nor_tools_nor_an_installation() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + IMPORTS],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "None\n"


def test_without_grpcs_packages_it_says_what_is_missing_and_where_to_get_it() -> None:
    """Beside the checks of kernels, which need none of them."""
    code = """
import sys
sys.modules["grpc_health"] = sys.modules["grpc_status"] = None
from paceline.bench.gpu.running import obstacle
print(obstacle())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("not installed: grpc_status, grpc_health;")
    assert "make gpu-packages" in done.stdout
