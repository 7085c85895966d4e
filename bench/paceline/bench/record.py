"""Result files: the kind of machine, what was measured on it, and entries by name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.output import Output
from paceline.kernels import processor

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "triton")

RESULTS = Path("bench/results")

_FOLDERS = re.compile(r"(^|[=:,])/(?!/)(?:[^/=,]+/)*")
"""Of an absolute path, or of one behind `key=` or `method:`; not of a URL."""

_WIDTH = 170  # columns, where there is no terminal


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


class Results:
    """One result file, written after every entry.

    Args:
        topic: The command; the default file is ``bench/results/MACHINE-TOPIC.json``.
        output: Another file.
        head: What all entries have in common besides the machine, such as the data type. Entries of
            the file are kept if its head is the same.
    """

    def __init__(self, topic: str, output: Path | None = None, **head: Any) -> None:
        described = describe()
        self.file = output or RESULTS / f"{described['kind']}-{topic}.json"
        self.entries: dict[str, Any] = {}
        self._head = json.loads(json.dumps({"machine": described, **head}))
        if self.file.exists():
            earlier = json.loads(self.file.read_text())
            if all(earlier.get(key) == value for key, value in self._head.items()):
                self.entries = earlier.get("results", {})

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Add or replace an entry, with the command that measured it, and replace the file."""
        # Of absolute paths only the name: the rest is about one machine.
        words = [_FOLDERS.sub(r"\1", word) for word in sys.argv[1:]]
        self.entries[name] = {"command": shlex.join(["paceline", *words]), **entry}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(_lines({**self._head, "results": self.entries}) + "\n")
        unfinished.replace(self.file)


def make_console() -> Console:
    """A console that shows the widest table whole in a file."""
    console = Output(soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    return console


def digest(folder: Path) -> str:
    """SHA-256 over the safetensors files of a model folder."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _lines(value: Any, indent: int = 1) -> str:
    """JSON with innermost lists and objects on one line each."""
    if not isinstance(value, dict | list):
        return json.dumps(value)
    values = list(value.values()) if isinstance(value, dict) else value
    if not any(isinstance(each, dict | list) for each in values):
        return json.dumps(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    keys = [f"{json.dumps(key)}: " if begin == "{" else "" for key in value]
    lines = [
        " " * indent + key + _lines(each, indent + 1)
        for key, each in zip(keys, values, strict=True)
    ]
    return "\n".join([begin, ",\n".join(lines), " " * (indent - 1) + end])
