"""The compiled CPU kernels in ``native/``: from the wheel, or compiled at the first start.

A platform wheel contains them for all levels of x86-64. A source install compiles them with gcc
into the user's cache folder, once, in some seconds; they need no headers of Python or torch.

Before a level is used, its linear layers and its dot product of bfloat16 are compared with plain C
on random data, bit by bit. The next level replaces one that differs.

``PACELINE_CPU_LEVEL`` selects a level instead of the fastest: amx, avx512bf16, avx512vnni, avx512,
avxvnni, avx2, generic (on ARM: dotprod, generic).
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import tempfile
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from paceline.kernels import _compile

VARIABLE = "PACELINE_CPU_LEVEL"
NUMERICS = ("auto", "portable", "avx512_bf16", "amx")  # choices of `choose_numerics`

# Numerics that levels have beside "portable", fastest first.
_OWN_NUMERICS = {"amx": ("amx", "avx512_bf16"), "avx512bf16": ("avx512_bf16",)}
_loading = Lock()
_AT, _COUNT, _KEY = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
# Types of the result and the arguments of each function.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "paceline_linear_check": (_COUNT,),
    "paceline_dot_check": (_COUNT,),
    "paceline_linear_scratch": (_COUNT, _AT, _COUNT),
    "paceline_linear": (None, _AT, _AT, _COUNT, _AT, _AT),
    "paceline_rows": (None, _AT, _AT, _COUNT, _AT),
    "paceline_quantise_rows": (None, _AT, _COUNT, _COUNT, _COUNT, _AT, _AT),
    "paceline_program_bytes": (_COUNT, _AT, _AT),
    "paceline_run_program": (_COUNT, _AT, _AT),
    "paceline_draft": (_COUNT, _AT, _AT, _COUNT, _AT, _COUNT, _COUNT, _COUNT),
    "paceline_gumbel": (None, _KEY, _KEY, _AT, _COUNT, _AT),
    "paceline_weights": (_COUNT, _AT, _COUNT, _AT),
    "paceline_choose": (_COUNT, _AT, _COUNT, _FLOAT, _FLOAT, _COUNT, _DOUBLE, _KEY, _KEY),
    "paceline_logsumexp": (_DOUBLE, _AT, _COUNT, _AT),
    "paceline_candidates": (None, _AT, *[_COUNT] * 4, _FLOAT, _AT, _AT, _AT),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuKernels:
    """The CPU kernels of this process."""

    level: str  # the level they are compiled for
    library: ctypes.CDLL  # the loaded kernels
    origin: str  # where they come from
    file: str  # path of the library; its name has a digest of sources and flags


class KernelsError(OSError):
    """The compiled CPU kernels cannot be used on this machine; nothing runs without them."""


def address(tensor: Tensor, name: str) -> int:
    """Return the address of a tensor for a native call. Raises ``ValueError``: it is not on the
    CPU. C would read an address of another device."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, expected the CPU for compiled CPU kernels")
    return tensor.data_ptr()


def library() -> ctypes.CDLL:
    """Return the loaded kernels. Raises ``KernelsError`` as :func:`cpu_kernels` does."""
    return cpu_kernels().library


def cpu_kernels() -> CpuKernels:
    """Load the kernels, compiled first if necessary; any thread may call first. Raises
    ``KernelsError``: they cannot be compiled or loaded, or this processor does not have the level
    in ``PACELINE_CPU_LEVEL``."""
    with _loading:  # a level is compared with plain C in memory that is not a thread's own
        return _load_kernels()


@cache
def _load_kernels() -> CpuKernels:
    levels = _levels()
    if not _share_openmp():
        raise KernelsError(
            "the CPU kernels need the GNU OpenMP runtime, which this build of torch does not load: "
            "install PyTorch for Linux from its own wheels"
        )
    for level in levels:
        kernels = load(level)
        if (wrong := _wrong_format(kernels.library)) is None:
            return kernels
        _log.warning("CPU kernels of level %s are not used: %s differs from plain C", level, wrong)
    raise KernelsError("the CPU kernels of every level differ from plain C: report this processor")


def load(level: str) -> CpuKernels:
    """Load the kernels of a level. Raises ``KernelsError`` if they cannot be compiled."""
    ahead = _compile.PREBUILT / _compile.file_name(level)
    with suppress(OSError):  # missing, or built for a newer C library than this machine's
        return CpuKernels(level, _open(ahead), "the wheel", str(ahead))
    try:
        made = _compile.build(level, _folder())
        if made.stat().st_uid not in (0, os.getuid()):
            made.unlink()
            made = _compile.build(level, made.parent)
        return CpuKernels(level, _open(made), "compiled on this machine", str(made))
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsError(
            f"the CPU kernels are not compiled: {error}. Install gcc, or name a C compiler in CC; "
            "or install a wheel of paceline for x86-64 Linux, which contains them"
        ) from error


def _open(path: Path) -> ctypes.CDLL:
    """Load a library and set the types of its functions. Raises ``OSError`` if it cannot be
    loaded."""
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _levels() -> tuple[str, ...]:
    """Return the requested level and those below it, or all of this processor."""
    here = _compile.levels_here()
    requested = os.environ.get(VARIABLE, "")
    if requested and requested not in here:
        raise KernelsError(f"{VARIABLE} is {requested!r}, expected one of {', '.join(here)}")
    return here[here.index(requested) :] if requested else here


def _wrong_format(library: ctypes.CDLL) -> str | None:
    """Return what has other bits than plain C: the first such format of linear layers, or the dot
    product of bfloat16; None: nothing."""
    failed: int = library.paceline_linear_check()
    names = ("float32", "bfloat16", "8-bit blocks", "4-bit blocks", "rotated")
    if failed:
        return names[failed - 1]
    return "the dot product of bfloat16" if library.paceline_dot_check() else None


def _share_openmp() -> bool:
    """Export the symbols of the OpenMP runtime that torch has loaded. Return whether there is one.

    The kernels are not linked to a runtime of their own: a second team of threads would compete
    with torch's for the cores.
    """
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    runtimes = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    if len(runtimes) != 1:
        return False
    ctypes.CDLL(runtimes.pop(), mode=ctypes.RTLD_GLOBAL)
    return True


def _folder() -> Path:
    """Return the user's folder of libraries; a new temporary one if there is none that this user
    alone can write to: what lies there is loaded into this process."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "paceline", "kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _own(folder) and os.access(folder, os.W_OK):
            return folder
        _log.warning("%s is not used: others can write to it", folder)
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="paceline-kernels-"))


def _own(folder: Path) -> bool:
    """Return whether a folder is of this user or of root, and no other user can write to it."""
    status = folder.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def choose_numerics(requested: str, multiplied: Container[str] = NUMERICS) -> str:
    """Choose how a program multiplies bfloat16 weights and caches.

    "portable" gives the same bits on every machine. "amx" multiplies both in tiles, "avx512_bf16"
    queries and weights of attention with caches by the dot product of that name: they are faster
    and have the bits of processors with these instructions. "auto" takes the fastest that the level
    in use has, among those in ``multiplied``.

    Return "portable", "avx512_bf16" or "amx", for :class:`~paceline.kernels.Recorder`. Raises
    ``ValueError`` if the name is unknown or the level in use does not have its instructions.
    """
    level_numerics = _OWN_NUMERICS.get(cpu_kernels().level, ())
    supported = [name for name in NUMERICS if name in ("auto", "portable", *level_numerics)]
    if requested not in supported:
        raise ValueError(f"numerics is {requested!r}, expected one of {supported}")
    if requested == "auto":
        return next((name for name in level_numerics if name in multiplied), "portable")
    return requested
