"""What is read from a model folder, what is refused, and the choice of a device."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from decoder_cases import changed
from gguf import GGUFWriter
from gguf_files import write
from tiny_models import LLAMA3_ROPE

from paceline.convert import load_config, load_decoder, weights_fingerprint
from paceline.decoder import UnsupportedModelError
from paceline.device import DriverError, find_device


def test_shapes_and_constants(models: dict[str, Path]) -> None:
    config = load_config(models["mistral"])
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (2, 6, 2, 32)
    assert config.group == 3
    assert config.windows == (50, 50)
    assert config.eos_token_ids == (2,)
    assert config.dtype == torch.float32
    assert config.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert load_config(models["qwen2-window"]).windows == (None, 300)
    assert load_config(models["mistral-full"]).windows == (None, None)
    assert load_config(models["llama-tied"]).tied
    assert load_config(models["llama"], torch.bfloat16).dtype == torch.bfloat16


def test_types_and_devices_that_are_not_supported_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="float16"):
        load_config(models["llama"], torch.float16)
    with pytest.raises(UnsupportedModelError, match="soft cap, which is supported on the CPU"):
        load_decoder(models["gemma2"], device="cuda")
    with pytest.raises(UnsupportedModelError, match="heads that differ by layer are supported on"):
        load_decoder(models["gemma4"], device="cuda")
    wide = changed(models["llama"], tmp_path / "wide", head_dim=512)
    with pytest.raises(UnsupportedModelError, match="heads have 512 elements, expected at most"):
        load_decoder(wide, device="cuda")


def test_a_folder_without_a_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_decoder(tmp_path)
    shutil.copy(models["llama"] / "config.json", tmp_path)
    with pytest.raises(UnsupportedModelError, match="only safetensors"):
        load_decoder(tmp_path)


def test_a_configuration_is_read_again_by_other_code(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_config(models["mistral"])
    monkeypatch.setattr("paceline.convert.sources.decoder_config", lambda *_: 1 / 0)
    assert load_config(models["mistral"]) == first
    monkeypatch.setattr("paceline.convert.model_source.code_digest", lambda: "other code")
    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError"):
        load_config(models["mistral"])


def test_fingerprints_tell_models_apart(models: dict[str, Path], tmp_path: Path) -> None:
    prints = {name: weights_fingerprint(folder) for name, folder in models.items()}
    assert len(set(prints.values())) == len(prints)
    assert all(len(value) == 64 for value in prints.values())
    copy = changed(models["llama"], tmp_path / "copy", transformers_version="0.0")
    assert weights_fingerprint(copy) == prints["llama"]
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert weights_fingerprint(copy) != prints["llama"]


def with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    reach: Callable[[int, int], bool] = lambda gpu, other: True,
) -> None:
    """So many GPUs, each of which reads the memory of others as ``reach`` says."""
    monkeypatch.setattr("paceline.cuda.device.cuda_driver", lambda: SimpleNamespace(reach=reach))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr("paceline.device.has_driver", lambda: count > 0)


NO_DRIVER = DriverError("cuInit: unknown error (999)")


@pytest.mark.parametrize(
    ("count", "answer", "verifier", "drafter", "why"),
    [
        (0, True, "cpu", "cpu", ""),
        (1, True, "cuda:0", "cuda:0", ""),
        (8, True, "cuda:0", "cuda:1", ""),
        (2, False, "cuda:0", "cuda:0", "cuda:1 has no peer access"),
        (2, NO_DRIVER, "cuda:0", "cuda:0", "cuInit: unknown error"),
    ],
)
def test_auto_takes_gpus_apart_where_one_can_read_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int,
    answer: bool | DriverError, verifier: str, drafter: str, why: str,
) -> None:  # fmt: skip
    """Else KV and hidden states would be copied over gRPC; a GPU that is named is taken."""
    reach = Mock(side_effect=[answer])
    with_gpus(monkeypatch, count, reach)
    caplog.set_level(logging.INFO, "paceline.device")
    assert str(find_device("auto")) == verifier
    assert str(find_device("auto", preferred=1)) == drafter
    assert [tuple(call.args) for call in reach.mock_calls] == [(1, 0)] * (count > 1)
    for device in {verifier, drafter}:
        assert f"device auto: using {device.replace('cpu', 'the CPU')}," in caplog.text
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == bool(why)
    assert why in "".join(warnings)
    if count > 1:
        assert str(find_device("cuda:1", preferred=1)) == "cuda:1"
    if not count:  # a driver without a GPU
        monkeypatch.setattr("paceline.device.has_driver", lambda: True)
        assert str(find_device("auto", preferred=1)) == "cpu"


def test_named_devices_are_those_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    for name, device in {"cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}.items():
        assert str(find_device(name)) == device
    problems = {"cuda:2": "one of the 2", "tpu": "expected auto, cpu, cuda or cuda:N"}
    for name, problem in problems.items():
        with pytest.raises(ValueError, match=problem):
            find_device(name)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """PyTorch counts the GPUs of such a driver."""
    with_gpus(monkeypatch, 1)

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ValueError, match=r"too old \(found version 12020\).*update the NVIDIA"):
        find_device(name)


YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({**YARN, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}, 512),
        ({"type": "linear", "factor": 2.5}, 640),
        ({"rope_type": "default"}, 256),
        (LLAMA3_ROPE, 256),
        (None, 256),
    ],
)
def test_scaled_frequencies_make_the_context_longer(
    scaling: dict[str, Any] | None, context: int, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(
        models["llama"], tmp_path / "model", max_position_embeddings=256, rope_scaling=scaling
    )
    described = json.loads((folder / "config.json").read_text())
    described.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(described))
    assert load_config(folder).max_position == context


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("deepseek_v3", {"kv_lora_rank": 512}, "needs multi-head latent attention"),
        ("falcon_h1", {"mamba_d_ssm": 64}, "needs state-space layers"),
        ("gemma3n", {"text_config": {"model_type": "gemma3n_text", "altup_num_inputs": 4}},
         "'gemma3n_text' needs several residual streams"),
        ("of-tomorrow", {"kv_lora_rank": None}, "'of-tomorrow' is not supported, expected one of"),
    ],
)  # fmt: skip
def test_what_another_type_needs_is_said_before_anything_else_is_read(
    tmp_path: Path, model_type: str, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    with pytest.raises(
        UnsupportedModelError, match=rf"config\.json: model type .*{message}"
    ) as why:
        load_config(tmp_path)
    assert "\n" not in str(why.value)


def test_what_another_architecture_needs_is_said(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "deepseek2")
    writer.add_kv_lora_rank(512)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    write(writer)
    with pytest.raises(
        UnsupportedModelError, match="architecture 'deepseek2' needs multi-head lat"
    ):
        load_config(tmp_path / "model.gguf")
