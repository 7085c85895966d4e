"""Folders of ``longspec``: written, read, checked; memory that is shared with the target."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from calls import refusal
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file

from paceline.convert import Origin, prepare, weights_fingerprint
from paceline.decoder import UnsupportedModelError
from paceline.device import Device
from paceline.drafter.methods.base import Budget, LoadError, Resources
from paceline.drafter.methods.checkpoint import (
    TargetEmbedding,
    TargetRef,
    load_weights,
    read_shape,
    save_drafter,
)
from paceline.drafter.methods.layers import LayerShape
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.train.modules import DSparkModel, Eagle3Model, LongSpecModel
from paceline.v1 import drafter_pb2

from . import models
from .conftest import drafting
from .models import (
    VOCAB,
    change_config,
    made_up_kv,
    start,
    text_of,
    write_longspec,
    write_model,
    write_tokenizer,
)
from .shapes import DSPARK, EAGLE3, LONGSPEC, randomised

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e5, "original_max_position_embeddings": 128,
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
REF = TargetRef("some-target", "f" * 64, "a" * 64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("longspec") / "target", num_hidden_layers=3)


@pytest.fixture
def folder(tmp_path: Path, target: Path) -> Path:
    return write_longspec(tmp_path / "drafter", target)


def load(folder: Path, target: Path, **options: Any) -> LongSpecDrafter:
    """The method `longspec` on a folder."""
    drafter: LongSpecDrafter = models.load("longspec", folder, target, **options)
    return drafter


def change_section(folder: Path, **fields: Any) -> None:
    """Rewrite fields of the section of config.json; those of `shape` that are None go."""
    section = json.loads((folder / "config.json").read_text())["paceline"]
    shape = fields.pop("shape", {})
    if isinstance(shape, dict):
        whole = {**section["shape"], **shape}
        shape = {name: value for name, value in whole.items() if value is not None}
    change_config(folder, paceline={**section, **fields, "shape": shape})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "dspark"}, "method 'dspark'"),
        ({"format": 1}, "format 1.*train it again"),
        ({"shape": 3}, "has the shape 3"),
        *(
            ({"shape": shape}, message)
            for shape, message in (
                ({"target_layer": None}, "target_layer"),
                ({"target_layer": 3}, "0 to 2"),
                ({"kv_heads": 3}, "multiple"),
                ({"hidden": 48}, "with hidden 48"),
                ({"hidden": 1 << 40}, "hidden is"),
                ({"window": None, "wide": 3}, "wide"),
                ({"norm_eps": "x"}, "norm_eps|could not convert"),
                ({"rope_parameters": {"rope_type": "new"}}, "cannot load"),
                ({"rope_parameters": 3}, "not iterable"),
            )
        ),
    ],
)
def test_folders_with_invalid_fields_are_refused(
    folder: Path, target: Path, fields: dict[str, Any], message: str
) -> None:
    change_section(folder, **fields)
    with pytest.raises(LoadError, match=message):
        load(folder, target)


def test_damaged_weights_are_refused(folder: Path, target: Path) -> None:
    weights = folder / "model.safetensors"
    whole = load_file(weights)
    for name in ("norm.weight", "layers.0.cross_attn.q_proj.weight"):
        save_file({k: v for k, v in whole.items() if k != name}, weights)
        with pytest.raises(LoadError, match=name):
            load(folder, target)
    with pytest.raises(LoadError, match="longspec:DIR"):
        LongSpecDrafter.load(None, {}, Resources())


@pytest.mark.parametrize(
    ("given", "message"), [("", "option target=PATH"), ("/nowhere", "cannot load")]
)
def test_the_target_s_folder_is_needed(folder: Path, given: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        LongSpecDrafter.load(folder, {"target": given}, Resources())


def test_it_fits_every_format_of_its_target(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", num_hidden_layers=3)
    (target / "tokenizer.json").unlink()
    folder = write_longspec(tmp_path / "drafter", target)
    for kind in (Kind.F32, Kind.Q8_0, Kind.Q4_1):
        file = write_gguf(tmp_path / f"{kind.name}.gguf", target, kind)
        assert load(folder, file).fit.target_fingerprint == weights_fingerprint(file)
    other = write_model(tmp_path / "other", seed=7, num_hidden_layers=3)
    (other / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match="made for a target with weights"):
        load(folder, write_gguf(tmp_path / "other.gguf", other))


@pytest.mark.parametrize("ids", [[3, 2], [-1, 2], [2, VOCAB], [1, 2, 3], None])
def test_invalid_drafted_tokens_are_refused(
    tmp_path: Path, target: Path, ids: list[int] | None
) -> None:
    folder = write_longspec(tmp_path / "drafter", target, draft_vocab_size=2)
    assert load(folder, target)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["d2t"]
    save_file(tensors if ids is None else {**tensors, "d2t": torch.tensor(ids)}, weights)
    with pytest.raises(LoadError, match="expected 2 rising token ids"):
        load(folder, target)


def test_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    assert str(tmp_path.parent) not in (folder / "config.json").read_text(), "it names no path"
    other = write_model(tmp_path / "other", seed=7, num_hidden_layers=3)
    with pytest.raises(LoadError, match="made for a target with weights") as error:
        load(folder, other)
    assert error.value.reason == "TARGET_MISMATCH"
    change_section(folder, target_fingerprint="")
    assert load(folder, other)
    write_tokenizer(other, "u")
    with pytest.raises(LoadError, match="made for a target with the tokenizer") as error:
        load(folder, other)
    assert error.value.reason == "TOKENIZER_MISMATCH"


def test_a_folder_with_its_own_embedding_needs_no_target(folder: Path, target: Path) -> None:
    expected = first_tree(load(folder, target))
    theirs, ours = load_file(target / "model.safetensors"), load_file(folder / "model.safetensors")
    ours["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    ours["lm_head.weight"] = theirs["lm_head.weight"]
    save_file(ours, folder / "model.safetensors")
    assert first_tree(LongSpecDrafter.load(folder, {}, Resources())) == expected


def test_the_embedding_stays_in_the_packed_file(folder: Path, target: Path) -> None:
    """The file is mapped, so processes that use one target share the memory."""
    config, dtype = read_shape(LongSpecConfig, folder)
    embedding = TargetEmbedding.read(folder, prepare(target), config, dtype, "cpu")
    spans = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("/weights.bin")
    ]
    assert isinstance(embedding.embedding, torch.Tensor)
    assert embedding.head.packed is not None
    for tensor in (embedding.embedding, embedding.head.packed.values):
        assert any(low <= tensor.data_ptr() < high for low, high in spans)
    assert embedding.private_bytes == 0
    assert load(folder, target).weight_bytes == (folder / "model.safetensors").stat().st_size


def first_tree(drafter: LongSpecDrafter) -> Any:
    text = text_of(40)
    return start(drafter, text, made_up_kv(drafter.shape, 39)).draft(Budget(16, 4))


async def test_the_target_must_be_below_a_root(folder: Path, target: Path, tmp_path: Path) -> None:
    async with drafting(f"longspec:{folder},target={target}") as service:
        listed = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
        assert listed.drafters[0].target_fingerprint
        other = write_model(tmp_path.parent / f"{tmp_path.name}-elsewhere")
        asked = drafter_pb2.LoadDrafterRequest(
            name="other", method="longspec", folder=str(folder), options={"target": str(other)}
        )
        outside = (grpc.StatusCode.INVALID_ARGUMENT, "FOLDER_NOT_ALLOWED")
        assert await refusal(service.registry.LoadDrafter(asked)) == outside


@pytest.mark.parametrize(
    "config",
    [
        replace(LONGSPEC, draft_vocab_size=9),
        replace(DSPARK, confidence_temperatures=(0.5, 1.0, 2.0, 1.25), window=32, state_input=True),
        replace(DSPARK, draft_vocab_size=9, windows=(3, 0), causal=(True, False), conv=(2, 8)),
        replace(DSPARK, markov_rank=0, confidence=False, confidence_markov=False),
        replace(EAGLE3, draft_vocab_size=9, window=30, qk_norm=True, fc_norm=True),
        replace(EAGLE3, rope_parameters=LLAMA3),
    ],
)
def test_what_is_written_is_read_back(tmp_path: Path, config: LayerShape) -> None:
    """With the target's name and digests, and none of its weights."""
    kind = {"longspec": LongSpecModel, "dspark": DSparkModel, "eagle3": Eagle3Model}[config.method]
    weights: dict[str, Any] = randomised(kind(config)).state_dict()  # type: ignore[arg-type]
    if config.draft_vocab_size:
        weights["d2t"] = torch.arange(3, 48, 5)
    save_drafter(tmp_path, config, weights, REF, dtype=torch.float32, notes={"steps": 3})
    assert read_shape(type(config), tmp_path) == (config, torch.float32)
    loaded = load_weights(tmp_path, config, torch.float32)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert load_file(tmp_path / "model.safetensors").keys() == weights.keys()
    section = json.loads((tmp_path / "config.json").read_text())["paceline"]
    assert (section["target"], section["target_fingerprint"]) == (REF.name, REF.fingerprint)
    assert section["training"] == {"steps": 3}


def test_other_layers_and_folders_are_refused(target: Path) -> None:
    for layer in (3, -4):
        with pytest.raises(UnsupportedModelError, match="0 to 2"):
            LongSpecConfig.for_target(target, target_layer=layer)
    with pytest.raises(UnsupportedModelError, match="a 'paceline' section"):
        read_shape(LongSpecConfig, target)


def test_tied_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU each would be a copy of its own."""
    target = write_model(tmp_path / "target", tie_word_embeddings=True)
    shape, _ = read_shape(LongSpecConfig, write_longspec(tmp_path / "drafter", target))
    monkeypatch.setattr(Device, "packs", False)
    folder = tmp_path / "drafter"
    found = TargetEmbedding.read(folder, prepare(target), shape, torch.bfloat16, "cpu")
    assert found.head.weight is found.embedding


def test_an_origin_is_recognised_before_and_after_it_is_stored() -> None:
    origin = Origin("a" * 64, (0.1, 0.2))
    described = asdict(origin)
    assert Origin.parse(described) == Origin.parse(json.loads(json.dumps(described))) == origin
