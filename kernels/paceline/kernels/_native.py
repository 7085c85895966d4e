"""The compiled CPU kernels in ``native/``: built once a machine, or known to be missing.

They need gcc at run time and nothing else: no headers of Python or torch. Where there is none, or
with ``PACELINE_NATIVE=0``, everything runs on torch operations instead, at about half the speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

LANES = 16
"""Widths must be multiples of this."""

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "native"
# Contracting a * b + c is what makes the portable vector code as fast as the intrinsics.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-std=gnu11")


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, compiled first where no other process has; None where they can't be."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return None
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        _log.info("no C compiler: CPU kernels run on torch operations; install gcc to halve a step")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, _share_openmp())))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("CPU kernels run on torch operations, compiling failed: %s", error)
        return None


def _share_openmp() -> bool:
    """Make the OpenMP runtime that torch has loaded visible to the kernels; whether there is one.

    The kernels are not linked to a runtime of their own: a second team of threads would fight
    with torch's over the cores.
    """
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    found = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    if len(found) != 1:
        return False
    ctypes.CDLL(found.pop(), mode=ctypes.RTLD_GLOBAL)
    return True


def _built(compiler: str, openmp: bool) -> Path:
    """Path of the shared library for this compiler and processor."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    flags = (*_FLAGS, "-fopenmp") if openmp else _FLAGS
    digest = hashlib.sha256(repr((compiler, flags, _processor())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = _folder()
    path = folder / f"kernels-{digest.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as work:
        objects = []
        for source in sources:
            if source.suffix == ".c":
                objects.append(str(Path(work, f"{source.stem}.o")))
                _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        made = Path(work, path.name)
        _run([compiler, "-shared", *objects, "-lm", "-o", str(made)])  # no -fopenmp: see above
        os.replace(made, path)
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr[-2000:]}")


def _processor() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return repr(sorted(set(named)))


def _folder() -> Path:
    """A folder of this user's for the library; a fresh one where home is not writable."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "paceline", "kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="paceline-kernels-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp())
