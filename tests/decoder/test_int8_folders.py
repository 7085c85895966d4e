"""Folders with weights in 8-bit blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from decoder_cases import expected_logits, extend, random_tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.decoder import (
    Decoder,
    LocalCache,
    UnsupportedModelError,
    plain_folder,
    store_int8,
    weights_fingerprint,
)
from paceline.decoder.weights import Checkpoint
from paceline.kernels.quantised import quantise

MATRIX = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    """The Llama model in 8-bit blocks."""
    copy = tmp_path / "int8"
    shutil.copytree(models["llama"], copy)
    store_int8(copy)
    return copy


def test_matrices_keep_8_bits_and_one_float16_for_32_inputs(
    folder: Path, models: dict[str, Path]
) -> None:
    before = load_file(models["llama"] / "model.safetensors")
    stored, read = load_file(folder / "model.safetensors"), Checkpoint(folder, torch.float32)
    assert set(read) == set(before)
    for name, tensor in before.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            assert stored[name].dtype == torch.int8
            assert stored[f"{name}.scale"].dtype == torch.float16
            assert torch.equal(read[name], quantise(tensor, 8).dequantise().bfloat16().float())
        else:
            assert f"{name}.scale" not in stored
            assert torch.equal(stored[name], tensor.bfloat16())
            assert torch.equal(read[name], tensor.bfloat16().float())


def test_a_second_time_changes_nothing_but_roundings(folder: Path) -> None:
    before = dict(Checkpoint(folder, torch.float32))
    store_int8(folder)
    for name, tensor in Checkpoint(folder, torch.float32).items():
        torch.testing.assert_close(tensor, before[name], rtol=2**-7, atol=1e-4)


def test_transformers_reads_the_plain_folder(folder: Path, tmp_path: Path) -> None:
    plain = plain_folder(folder, tmp_path / "plain")
    assert plain_folder(plain, tmp_path / "unused") == plain
    assert not (tmp_path / "unused").exists()
    tokens = random_tokens(20)
    logits = []
    for path in (folder, plain):
        decoder = Decoder.load(path, torch.float32)
        logits.append(extend(decoder, LocalCache(decoder.config), tokens))
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], expected_logits(plain, tokens), rtol=1e-3, atol=1e-3)
    assert weights_fingerprint(folder) != weights_fingerprint(plain)


def test_token_ids_keep_their_type(folder: Path, tmp_path: Path) -> None:
    ids = torch.tensor([1, 7, 1 << 40])
    save_file({"d2t": ids, MATRIX: torch.ones(2, 64)}, folder / "model.safetensors")
    store_int8(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("d2t"), ids)
    plain = plain_folder(folder, tmp_path / "plain")
    assert torch.equal(load_file(plain / "model.safetensors")["d2t"], ids)


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(160, 2, dtype=torch.float16),
        torch.ones(159, 3, dtype=torch.float16),
        torch.ones(480, dtype=torch.float16),
        torch.ones(160, 3),
        torch.full((160, 3), torch.inf, dtype=torch.float16),
    ],
)
def test_scales_that_do_not_fit_are_refused(folder: Path, scale: Tensor) -> None:
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert stored[MATRIX].shape == (160, 96)
    save_file({**stored, f"{MATRIX}.scale": scale}, file, metadata={"format": "paceline-int8"})
    with pytest.raises(UnsupportedModelError, match=MATRIX):
        Decoder.load(folder)
