"""Result files: the kind of machine, what was measured on it, and entries by name.

Every entry names the command that measured it, the commit of the code, and the weights of model and
drafters by digest.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.output import Output
from paceline.convert import open_model
from paceline.convert.weights import fingerprint_files
from paceline.drafter import DrafterSpec
from paceline.kernels import processor
from paceline.service.cpus import usable_cpus

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "triton")
RESULTS = Path("bench/results")
_CODE = ("bench/paceline", "client", "kernels", "models", "protos", "services", "train")
# Of an absolute path, or of one behind `key=` or `method:`; not of a URL.
_FOLDERS = re.compile(r"(^|[=:,])/(?!/)(?:[^/=,]+/)*")
_WIDTH = 170  # columns, where there is no terminal


def describe() -> dict[str, object]:
    """Return processor, memory and package versions as a JSON-ready dictionary.

    `kind` names the sort of machine by processor, its family and model (`cpu-2x-amd-epyc-25-17`).
    """
    fields = processor()
    model, flags = fields.get("model name", platform.machine()), fields.get("flags", "").split()
    number = [fields[name] for name in ("cpu family", "model") if name in fields]
    cores = usable_cpus()
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", model.lower()))
    return {
        "kind": "-".join(["cpu", f"{cores}x", *words[:3], *number]),
        "processor": model,
        "cores": cores,
        "isa": sorted({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile"} & set(flags)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _installed(name))},
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class Results:
    """One result file, written after every entry.

    Args:
        target: Model folder or file that is measured; None only to find or replay a file.
        head: What all entries have in common besides the machine, such as the data type. Entries of
            the file are kept if its head is the same.
    """

    def __init__(
        self, topic: str, output: Path | None = None, target: Path | None = None, **head: Any
    ) -> None:
        if target is not None:
            head = {"target": open_model(target).fingerprint(), **head}
        described = describe()
        self.file = output or RESULTS / f"{described['kind']}-{topic}.json"
        self.entries: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._commit = commit()
        self._head = json.loads(json.dumps({"machine": described, **head}))
        if self.file.exists():
            earlier = json.loads(self.file.read_text())
            if all(earlier.get(key) == value for key, value in self._head.items()):
                self.entries = earlier.get("results", {})

    def uses(self, drafters: Mapping[str, str]) -> None:
        """Name the weights of drafters in the entries that follow.

        Args:
            drafters: METHOD[:DIR][,KEY=VALUE...] by name; those without weights have no digest.
        """
        folders = {
            name: DrafterSpec.parse(f"drafter={spec}").folder for name, spec in drafters.items()
        }
        digests = {name: digest(folder) for name, folder in folders.items() if folder is not None}
        self._digests = {**self._digests, **digests}

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Add or replace an entry, with what measured it, and replace the file."""
        # Of absolute paths only the name: the rest is about one machine.
        words = [_FOLDERS.sub(r"\1", word) for word in sys.argv[1:]]
        made = {"command": shlex.join(["paceline", *words]), "commit": self._commit}
        weights = {"digests": self._digests} if self._digests else {}
        self.entries[name] = {**made, **weights, **entry}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(_lines({**self._head, "results": self.entries}) + "\n")
        unfinished.replace(self.file)


def make_console() -> Console:
    """Return a console that shows the widest table whole in a file."""
    console = Output(soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    return console


def digest(weights: Path) -> str:
    """Return the SHA-256 of a file, or of the safetensors files of a folder."""
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    return fingerprint_files(b"", files)


def commit() -> str | None:
    """Return the commit of the code, with `-dirty` if code differs from it; None outside of git."""
    git = ["git", "-C", str(Path(__file__).parents[3])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *_CODE], check=False)
    return head.stdout.decode().strip() + ("-dirty" if same.returncode else "")


def _lines(value: Any, indent: int = 1) -> str:
    """Return JSON with innermost lists and objects on one line each."""
    if not isinstance(value, dict | list):
        return json.dumps(value)
    values = list(value.values()) if isinstance(value, dict) else value
    if not any(isinstance(item, dict | list) for item in values):
        return json.dumps(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    keys = [f"{json.dumps(key)}: " if begin == "{" else "" for key in value]
    lines = [
        " " * indent + key + _lines(item, indent + 1)
        for key, item in zip(keys, values, strict=True)
    ]
    return "\n".join([begin, ",\n".join(lines), " " * (indent - 1) + end])
