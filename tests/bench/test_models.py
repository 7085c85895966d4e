"""Targets of benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from tiny_models import write_model

from paceline.bench.models import Models
from paceline.cli.errors import CommandError


@pytest.mark.parametrize(("weights", "kept"), [(["int4"], True), (["bfloat16", "int8"], False)])
def test_4_bits_are_not_measured_as_8(weights: list[str], kept: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model("llama", folder)
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
