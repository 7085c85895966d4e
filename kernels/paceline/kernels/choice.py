"""Which attention backend a GPU uses: what was measured on it, unless the environment says."""

from __future__ import annotations

import json
import os
from pathlib import Path

BACKENDS = ("triton", "flash_attn", "dense")
VARIABLE = "PACELINE_ATTENTION"


def preferred_backend(device_name: str) -> str:
    """The backend of a kind of GPU: ``PACELINE_ATTENTION``, what was measured, or triton.

    Args:
        device_name: As PyTorch names it.

    Raises:
        RuntimeError: The environment names a backend that there is not.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in BACKENDS:
        raise RuntimeError(f"{VARIABLE} is {asked!r}, expected one of {', '.join(BACKENDS)}")
    measured = _measured().get(device_name, "")
    return asked or (measured if measured in BACKENDS else BACKENDS[0])


def remember_backend(device_name: str, backend: str) -> Path:
    """Note the fastest backend of a kind of GPU for all later starts; returns the file."""
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
