"""Folders with weights in blocks of 8 and 4 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from decoder_cases import expected_logits, logits, random_tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.convert import load_decoder, weights_fingerprint
from paceline.convert.weights import Checkpoint
from paceline.decoder import UnsupportedModelError
from paceline.kernels.quantised import quantise
from paceline.train.blocks import plain_folder, store_blocks

MATRIX = "model.layers.0.mlp.gate_proj.weight"
# Parts of the names of matrices in 4 bits, by the name of a folder.
INT4 = {"int8": (), "int4": ("",), "both": (".mlp.", "embed_tokens")}


@pytest.fixture(params=INT4)
def folder(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path) -> Path:
    copy: Path = tmp_path / request.param
    shutil.copytree(models["llama"], copy)
    store_blocks(copy, INT4[request.param])
    return copy


def test_matrices_keep_8_or_4_bits_and_float16_for_32_inputs(
    folder: Path, models: dict[str, Path]
) -> None:
    before = load_file(models["llama"] / "model.safetensors")
    stored, read = load_file(folder / "model.safetensors"), Checkpoint(folder, torch.float32)
    assert set(read) == set(before)
    assert read.bits == (4 if folder.name == "int4" else 8)
    for name, tensor in before.items():
        parts = {n for n in stored if n.startswith(f"{name}.")}
        assert read.shape(name) == tensor.shape
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            bits = 4 if any(part in name for part in INT4[folder.name]) else 8
            assert stored[name].nbytes == tensor.numel() * bits // 8
            assert stored[name].dtype == {4: torch.uint8, 8: torch.int8}[bits]
            assert parts == {f"{name}.scale"} | ({f"{name}.minimum"} if bits == 4 else set())
            assert {stored[n].dtype for n in parts} == {torch.float16}
            assert torch.equal(read[name], quantise(tensor, bits).dequantise().bfloat16().float())
        else:
            assert not parts
            assert torch.equal(stored[name], tensor.bfloat16())
            assert torch.equal(read[name], tensor.bfloat16().float())


def test_4_bits_lie_as_in_q4_1(folder: Path) -> None:
    file = folder / "model.safetensors"
    row = torch.cat([torch.arange(16), torch.arange(16).flip(0)])  # with scale 1 and minimum 0
    save_file({MATRIX: row.repeat(2, 1).float()}, file)
    store_blocks(folder, [MATRIX])
    low, high = row[:16], row[16:]
    assert load_file(file)[MATRIX].tolist() == [(low | high << 4).tolist()] * 2


def test_a_second_time_changes_nothing_but_roundings(folder: Path) -> None:
    before = dict(Checkpoint(folder, torch.float32))
    store_blocks(folder, INT4[folder.name])
    for name, tensor in Checkpoint(folder, torch.float32).items():
        torch.testing.assert_close(tensor, before[name], rtol=2**-7, atol=1e-3)


def test_transformers_reads_the_plain_folder(folder: Path, tmp_path: Path) -> None:
    plain = plain_folder(folder, tmp_path / "plain")
    assert plain_folder(plain, tmp_path / "unused") == plain
    assert not (tmp_path / "unused").exists()
    tokens = random_tokens(20)
    found = [logits(path, "float32", 20) for path in (folder, plain)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected_logits(plain, tokens), rtol=1e-3, atol=1e-3)
    assert weights_fingerprint(folder) != weights_fingerprint(plain)


def test_token_ids_keep_their_type(folder: Path, tmp_path: Path) -> None:
    ids = torch.tensor([1, 7, 1 << 40])
    save_file({"d2t": ids, MATRIX: torch.ones(2, 64)}, folder / "model.safetensors")
    store_blocks(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("d2t"), ids)
    plain = plain_folder(folder, tmp_path / "plain")
    assert torch.equal(load_file(plain / "model.safetensors")["d2t"], ids)


HALF = torch.float16
SCALES = torch.ones(160, 3, dtype=HALF)
BAD = {
    "inputs": torch.ones(160, 2, dtype=HALF),
    "outputs": torch.ones(159, 3, dtype=HALF),
    "dimensions": torch.ones(480, dtype=HALF),
    "type": torch.ones(160, 3),
    "infinite": torch.full((160, 3), torch.inf, dtype=HALF),
}


@pytest.mark.parametrize(
    ("folder", "part", "bad"),
    [*(("int8", "scale", bad) for bad in BAD), ("int4", "scale", "inputs"),
     ("int4", "minimum", "infinite"), ("int4", "minimum", "outputs")],
    indirect=["folder"],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(folder: Path, part: str, bad: str) -> None:
    _refused(folder, {f"{MATRIX}.{part}": BAD[bad]})


@pytest.mark.parametrize("folder", ["int8", "int4"], indirect=True)
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(160, 96),
        torch.zeros(160, 96, dtype=torch.int16),
        torch.zeros(160, 64, dtype=torch.uint8),
        torch.zeros(160, 47, dtype=torch.uint8),
        torch.zeros(160 * 48, dtype=torch.uint8),
        torch.zeros((), dtype=torch.uint8),
        torch.zeros(160, 48, dtype=torch.int8),
    ],
    ids=lambda values: f"{values.dtype} {tuple(values.shape)}",
)
def test_values_that_do_not_fit_are_refused(folder: Path, values: Tensor) -> None:
    _refused(folder, {MATRIX: values})


@pytest.mark.parametrize(
    ("folder", "changed"),
    [
        ("int8", {f"{MATRIX}.minimum": SCALES}),  # the format has none
        ("int8", {"model.unknown.scale": SCALES}),
        ("int4", {f"{MATRIX}.scale": None}),
        ("int4", {f"{MATRIX}.minimum": None}),
        ("int4", {MATRIX: None}),
        ("both", {"model.unknown.minimum": SCALES}),
    ],
    indirect=["folder"],
)
def test_matrices_with_other_parts_are_refused(
    folder: Path, changed: dict[str, Tensor | None]
) -> None:
    _refused(folder, changed, next(iter(changed)).removesuffix(".scale").removesuffix(".minimum"))


def _refused(folder: Path, changed: dict[str, Tensor | None], named: str = MATRIX) -> None:
    """The folder with changed or without some tensors is refused, by a tensor's name."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as before:
        metadata = before.metadata()
    stored = {n: t for n, t in (load_file(file) | changed).items() if t is not None}
    save_file(stored, file, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        load_decoder(folder)
