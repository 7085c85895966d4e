"""Result files: what a run measured, together with what earlier runs did of the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

BY_SET = (
    *("comparison", "stretched", "acceptance", "coupling", "reach", "selfspec"),
    *("load", "load-copying", "load-longspec"),
)
"""Parts that are measured set by set: those that a run leaves out stay."""


class Book:
    """One result file. `head` says what all its figures are of: machine, dtype, drafters."""

    def __init__(self, file: Path, head: dict[str, Any]) -> None:
        self.file = file
        self._head = head

    def add(self, part: str, found: Any) -> None:
        """Write a part down."""
        results = with_earlier({**self._head, part: found}, self.file)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(results, indent=1) + "\n")

    def earlier(self, part: str) -> Any:
        """What the file holds of a part measured under the same head; None: nothing."""
        return with_earlier(dict(self._head), self.file).get(part)


def digest(folder: Path | None) -> str | None:
    """SHA-256 of a drafter's weights: which one the figures are of."""
    if folder is None:
        return None
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def with_earlier(results: dict[str, Any], output: Path) -> dict[str, Any]:
    """With the parts and prompt sets that this run left out, if the file has them for the same."""
    if not output.exists():
        return results
    earlier = json.loads(output.read_text())
    if any(earlier.get(key) != results[key] for key in ("machine", "dtype")):
        return results
    others = earlier.get("dspark") not in (None, results["dspark"])
    if others or earlier.get("longspec") != results["longspec"]:
        earlier = {key: value for key, value in earlier.items() if key == "replay"}
    merged = {k: {**earlier.get(k, {}), **results[k]} for k in BY_SET if k in results}
    return {**earlier, **results, **merged}
