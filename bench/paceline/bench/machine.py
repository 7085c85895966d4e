"""What kind of machine a result was measured on, without naming the machine."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version

from paceline.kernels import processor

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "triton")


def describe() -> dict[str, object]:
    """Processor, memory and package versions as a JSON-ready dictionary.

    `kind` names the sort of machine by processor, its family and model (`cpu-2x-amd-epyc-25-17`).
    """
    fields = processor()
    model, flags = fields.get("model name", platform.machine()), fields.get("flags", "").split()
    number = [fields[name] for name in ("cpu family", "model") if name in fields]
    cores = len(os.sched_getaffinity(0))
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", model.lower()))
    return {
        "kind": "-".join(["cpu", f"{cores}x", *words[:3], *number]),
        "processor": model,
        "cores": cores,
        "isa": sorted({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile"} & set(flags)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _installed(name))},
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
