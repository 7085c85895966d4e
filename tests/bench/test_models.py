"""Targets of benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.models import Models
from paceline.cli.command import CommandError


@pytest.mark.parametrize(("weights", "kept"), [(["int4"], True), (["bfloat16", "int8"], False)])
def test_4_bits_are_not_measured_as_8(weights: list[str], kept: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    args = argparse.Namespace(
        models=tmp_path, target=write_gguf(tmp_path / "m.gguf", folder, Kind.Q4_0), weights=weights
    )
    if kept:
        assert Models.of(args).target == args.target
    else:
        with pytest.raises(CommandError, match="4-bit weights"):
            Models.of(args)
    args.target = folder
    assert Models.of(args).target == folder
