"""The compiled CPU kernels in ``native/``: built once a machine, or known to be missing.

They need gcc at run time and nothing else: no headers of Python or torch. Where there is none, or
with ``PACELINE_NATIVE=0``, everything runs on torch operations instead, at about half the speed.

``python -m paceline.kernels.build FOLDER`` compiles them ahead, for machines without gcc. With
FOLDER in ``LD_LIBRARY_PATH`` the system's loader finds them, and picks the ones made for the newest
instructions that the processor has.
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
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

LANES = 16
"""Widths must be multiples of this."""

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "native"
# Contracting a * b + c is what makes the portable vector code as fast as the intrinsics.
_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-std=gnu11")
_LEVELS = ("x86-64-v3", "x86-64-v4")
"""What is compiled ahead: processors with AVX2, and those with AVX-512."""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, compiled first where no other process has; None where they can't be."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return None
    openmp = _share_openmp()
    if openmp:
        with suppress(OSError):
            return ctypes.CDLL(_prebuilt_name())
    compiler = _compiler()
    if compiler is None:
        _log.info("no C compiler: CPU kernels run on torch operations; install gcc to halve a step")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, openmp)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("CPU kernels run on torch operations, compiling failed: %s", error)
        return None


def build_ahead(folder: Path) -> list[Path]:
    """Compile the kernels into ``folder``, as glibc's loader looks for them; what was made.

    Raises:
        OSError: There is no compiler, it failed, or the folder cannot be written.
        ValueError: This machine is no x86-64: nothing is compiled ahead for others.
    """
    if platform.machine() != "x86_64":
        raise ValueError(f"kernels are compiled ahead for x86_64 only, not {platform.machine()}")
    compiler = _compiler()
    if compiler is None:
        raise OSError("there is no C compiler to build the kernels with: install gcc")
    made = []
    for level in _LEVELS:
        made.append(folder / "glibc-hwcaps" / level / _prebuilt_name())
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, (*_FLAGS, f"-march={level}", "-fopenmp"), made[-1])
    return made


def _prebuilt_name() -> str:
    """Name of a library compiled ahead. One of other sources has another name."""
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for source in _sources():
        digest.update(source.read_bytes())
    return f"libpaceline-kernels-{digest.hexdigest()[:16]}.so"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "gcc"))


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
    flags = (*_FLAGS, "-march=native", *(["-fopenmp"] if openmp else []))
    digest = hashlib.sha256(repr((compiler, flags, _processor())).encode())
    for source in _sources():
        digest.update(source.read_bytes())
    path = _folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not path.is_file():
        _compile(compiler, flags, path)
    return path


def _sources() -> list[Path]:
    return sorted(_SOURCES.glob("*.[ch]"))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Make the library at ``path``, all of it at once: other processes may be waiting for it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        objects = []
        for source in _sources():
            if source.suffix == ".c":
                objects.append(str(Path(work, f"{source.stem}.o")))
                _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        made = Path(work, path.name)
        # No -fopenmp: see _share_openmp.
        _run([compiler, "-shared", *objects, "-lm", "-o", str(made)])
        os.replace(made, path)


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
