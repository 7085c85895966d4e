"""Compiles the CPU kernels in ``native/``, with the standard library alone.

The source is compiled once per level, a common set of instruction sets. The build of a wheel
imports this file by its path, without torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"  # folder of the libraries in a platform wheel
_AVX2 = ("avx2", "fma", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_X86 = platform.machine() in ("x86_64", "AMD64")

# Instruction sets of each level, fastest first, as in /proc/cpuinfo.
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512bf16": _BF16,
    "avx512vnni": _VNNI,
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "generic": (),
}
if not _X86:
    LEVELS = {"dotprod": ("asimddp",), "generic": ()}

# Variable with sanitizers, such as `address,undefined`: kernels are then compiled here with them
# and with the checks of `native/check.h`. `make sanitize` sets it and loads their runtimes.
SANITIZERS = "PACELINE_SANITIZE"

# No contraction: only explicit FMAs are fused, so that all levels and compilers give the same bits.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-std=gnu11", "-fopenmp")


def levels_here() -> tuple[str, ...]:
    """Return levels that this processor can run, fastest first."""
    here = (level for level, needed in LEVELS.items() if cpu_flags().issuperset(needed))
    return tuple(level for level in here if level != "amx" or _tiles_permitted())


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this processor as Linux names them; empty on other systems."""
    fields = processor()
    return frozenset(fields.get("flags", fields.get("Features", "")).split())


def processor() -> dict[str, str]:
    """Return the fields of this processor in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def processor_name() -> str:
    """Model of this processor, such as ``Intel(R) Xeon(R) Platinum 8488C``."""
    fields = processor()
    known = fields.get("model name") or fields.get("CPU part") or platform.processor()
    return known or platform.machine()


def _tiles_permitted() -> bool:
    """Ask Linux for tiles, once a process; older kernels list the instructions but refuse."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def file_name(level: str) -> str:
    """Return the file name of a level's library, with a digest of its sources and flags."""
    digest = hashlib.sha256(repr(compiler_flags(level)).encode())
    for source in _sources():
        digest.update(source.read_bytes())
    return f"paceline-kernels-{level}-{digest.hexdigest()[:16]}.so"


def build(level: str, folder: Path) -> Path:
    """Compile one level into ``folder``, unless it exists; returns the library's path. Raises
    ``OSError``: there is no compiler, it failed, or the folder cannot be written."""
    path = folder / file_name(level)
    if not path.is_file():
        _compile(_compiler(), compiler_flags(level), path)
    return path


def build_ahead(folder: Path) -> list[Path]:
    """Compile all levels but plain C, for a wheel; returns the libraries' paths. Raises
    ``OSError``: there is no compiler, it failed, or the folder cannot be written; ``ValueError``:
    this machine is not x86-64 Linux."""
    if not (_X86 and sys.platform == "linux"):
        here = f"{platform.machine()} {sys.platform}"
        raise ValueError(f"kernels are compiled ahead on x86-64 Linux only, not on {here}")
    folder.mkdir(parents=True, exist_ok=True)
    return [build(level, folder) for level in LEVELS if level != "generic"]


def compiler_flags(level: str) -> tuple[str, ...]:
    """Return the flags of a level for gcc."""
    common = (*_FLAGS, *_sanitizers())
    if level == "dotprod":
        return (*common, "-march=armv8.2-a+dotprod")
    # gcc writes amx-bf16 and avx512vnni for amx_bf16 and avx512_vnni.
    named = (name.replace("amx_", "amx-").replace("_", "") for name in LEVELS[level])
    return (*common, *(f"-m{name}" for name in named))


def _sanitizers() -> tuple[str, ...]:
    """Return the flags of a debug build; none without the variable."""
    names = os.environ.get(SANITIZERS, "")
    if not names:
        return ()
    stop = ("-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
    return (f"-fsanitize={names}", *stop, "-DPACELINE_CHECK")


def _compiler() -> str:
    name = os.environ.get("CC", "gcc")
    path = shutil.which(name)
    if path is None:
        raise OSError(f"there is no C compiler {name!r}")
    return path


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.[ch]"))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Write the library to ``path`` atomically: several processes may compile it. Sources are
    compiled side by side, since two of them take most of the time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work, ThreadPoolExecutor() as pool:

        def compiled(source: Path) -> str:
            result = str(Path(work, f"{source.stem}.o"))
            _run([compiler, *flags, "-c", str(source), "-o", result])
            return result

        objects = list(pool.map(compiled, (file for file in _sources() if file.suffix == ".c")))
        made = Path(work, path.name)
        # Not linked with -fopenmp: the kernels use the OpenMP runtime that torch has loaded.
        linked = [flag for flag in flags if flag.startswith("-fsanitize=")]
        _run([compiler, "-shared", *linked, *objects, "-lm", "-o", str(made)])
        os.replace(made, path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr[-2000:]}")
