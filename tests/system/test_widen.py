"""`paceline bench widen`: wider models give the same tokens and drafts."""

import json
from pathlib import Path

import pytest
import torch
from system_support import make_prompts
from transformers import AutoModelForCausalLM

from paceline.cli.main import main


def widen(target: Path, output: Path, *drafters: Path) -> None:
    words = ["bench", "widen", "--target", str(target), "--output", str(output), "--factor", "4"]
    assert main([*words, *(f"--drafter={folder}" for folder in drafters)]) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_wide_target_has_the_same_logits(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    widen(models[family], tmp_path)
    tokens = torch.tensor([make_prompts(1)[0]])
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (models[family], tmp_path / "target")
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    narrow, wide = (
        json.loads((folder / "config.json").read_text())
        for folder in (models[family], tmp_path / "target")
    )
    assert wide["hidden_size"] == 4 * narrow["hidden_size"]
