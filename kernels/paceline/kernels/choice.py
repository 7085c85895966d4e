"""Choice of the attention backend of a GPU, from the environment or a measurement."""

from __future__ import annotations

import json
import os
from pathlib import Path

BACKENDS = ("triton", "flash_attn", "dense")
VARIABLE = "PACELINE_ATTENTION"


def preferred_backend(device_name: str) -> str:
    """The backend of a kind of GPU: ``PACELINE_ATTENTION``, else the fastest measured, else triton.

    Args:
        device_name: PyTorch's name of the GPU.

    Raises:
        RuntimeError: ``PACELINE_ATTENTION`` is not the name of a backend.
    """
    requested = os.environ.get(VARIABLE, "")
    if requested and requested not in BACKENDS:
        raise RuntimeError(f"{VARIABLE} is {requested!r}, expected one of {', '.join(BACKENDS)}")
    measured = _measured().get(device_name, "")
    return requested or (measured if measured in BACKENDS else BACKENDS[0])


def remember_backend(device_name: str, backend: str) -> Path:
    """Store the fastest backend of a kind of GPU for later starts; returns the file."""
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_measured() | {device_name: backend}, indent=1) + "\n")
    return path


def _measured() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline" / "attention.json"
