"""What kind of machine a result was measured on, without naming the machine."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "triton")


def describe() -> dict[str, object]:
    """Processor, memory and package versions as a JSON-ready dictionary.

    `kind` names the sort of machine (`cpu-2x-amd-epyc`), fit for a file name.
    """
    model, flags = _processor()
    cores = len(os.sched_getaffinity(0))
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", model.lower()))
    return {
        "kind": "-".join(["cpu", f"{cores}x", *words[:3]]),
        "processor": model,
        "cores": cores,
        "isa": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _installed(name))},
    }


def _processor() -> tuple[str, set[str]]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), set()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
