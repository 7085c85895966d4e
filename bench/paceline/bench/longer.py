"""Copies of models whose config says that their context is longer.

A demo target takes 4,096 tokens. With YaRN in its config it reads and writes longer texts, worse
than a model that was trained on such, but of its own: what it writes is what drafters must guess.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from paceline.decoder import weights_fingerprint

_CONFIG = "config.json"


def lengthen(folder: Path, copy: Path, factor: int, target: Path | None = None) -> Path:
    """Write a copy of a model folder for a context `factor` times as long; returns `copy`.

    `folder` holds a Hugging Face model, or a LongSpec drafter; then `target` is the lengthened
    target it is to fit. Raises ValueError where the folder's RoPE is scaled already.
    """
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / _CONFIG).read_text())
    shape: dict[str, Any] = config.get("transformer_layer_config", config)
    rope, context = shape["rope_parameters"], shape["max_position_embeddings"]
    if rope["rope_type"] != "default":
        raise ValueError(f"{folder} scales its RoPE already: {rope}")
    if factor > 1:
        shape["rope_parameters"] = {
            **rope,
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": context,
        }
        shape["max_position_embeddings"] = context * factor
    if target is not None:
        config["paceline"]["target_fingerprint"] = weights_fingerprint(target)
    (copy / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return copy
