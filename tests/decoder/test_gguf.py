"""Models in GGUF files: those of the folders that they were written from."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from decoder_cases import extend, random_tokens, save_model
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from paceline.decoder import (
    Decoder,
    LocalCache,
    UnsupportedModelError,
    load_config,
    open_model,
    weights_fingerprint,
)
from paceline.decoder.weights import Weight, plain
from paceline.kernels.blocks import Blocks, quantise

NAMES = (
    "llama", "llama-tied", "llama-bias", "llama-linear", "llama3", "mistral-full", "qwen2", "qwen3",
    "yarn",
)  # fmt: skip


def all_weights(path: Path, weights: str = "auto") -> dict[str, Weight]:
    source = open_model(path)
    return dict(source.weights(source.config(weights)))


def logits(decoder: Decoder) -> torch.Tensor:
    return extend(decoder, LocalCache(decoder.config), random_tokens(80))


@pytest.mark.parametrize("name", NAMES)
def test_a_float_file_is_the_folder(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", models[name])
    mine, folder = asdict(load_config(file)), asdict(load_config(models[name]))
    same_family = {"mistral-full": "llama"}.get(name, folder["model_type"])
    assert mine.pop("norm_eps") == pytest.approx(folder.pop("norm_eps"))  # a float32 in the file
    assert mine == folder | {"model_type": same_family}
    found, expected = all_weights(file), all_weights(models[name])
    assert found.keys() - {"rope_freqs.weight"} == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(plain(found[key], torch.float32), plain(weight, torch.float32)), key
    torch.testing.assert_close(logits(Decoder.load(file)), logits(Decoder.load(models[name])))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_files_are_loaded_as_bfloat16(
    kind: Kind, models: dict[str, Path], tmp_path: Path
) -> None:
    config = load_config(write_gguf(tmp_path / "model.gguf", models["llama"], kind))
    assert (config.dtype, config.weights) == (torch.bfloat16, "bfloat16")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_quantised_files_keep_their_values(
    name: str, kind: Kind, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", models[name], kind)
    assert (load_config(file).weights, load_config(file).dtype) == ("gguf", torch.bfloat16)
    found = all_weights(file)
    hf = all_weights(models[name], "float32")
    for key, weight in found.items():
        if len(weight.shape) == 1:
            assert plain(weight, torch.float32).equal(plain(hf[key], torch.float32))
            continue
        assert isinstance(weight, Blocks)
        assert weight.bits == (8 if kind == Kind.Q8_0 else 4)
        error = (weight.dequantise() - plain(hf[key], torch.float32)).abs().max()
        assert error < (0.01 if kind == Kind.Q8_0 else 0.1), key
    quantised = plain(found["model.layers.0.self_attn.q_proj.weight"], torch.float32)
    as_floats = all_weights(file, "float32")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(quantised, plain(as_floats, torch.float32))


def test_a_file_of_several_formats(models: dict[str, Path], tmp_path: Path) -> None:
    kinds = {"blk.0.attn_v.weight": Kind.Q8_0, "blk.1.attn_k.weight": Kind.F16}
    file = write_gguf(tmp_path / "model.gguf", models["llama"], Kind.Q4_1, kinds)
    plain_copy = Decoder.load(file, "float32")
    reference = logits(plain_copy)
    error = (logits(Decoder.load(file)).float() - reference).std() / reference.std()
    assert error < 0.05


def test_converted_formats_are_logged(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_gguf(tmp_path / "model.gguf", models["llama"], Kind.Q5_1)
    with caplog.at_level(logging.INFO):
        Decoder.load(file)
    assert "16 matrices of format Q5_1 are converted to 8 bits" in caplog.text


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("of_file", [False, True])
def test_quantising_at_load(
    weights: str, of_file: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["llama"]
    if of_file:
        path = write_gguf(tmp_path / "model.gguf", path)
    config = load_config(path, weights)
    assert (config.weights, config.dtype) == (weights, torch.float32)
    exact = all_weights(models["llama"])
    for key, weight in all_weights(path, weights).items():
        expected = plain(exact[key], torch.float32)
        if expected.dim() == 2:
            vocabulary = key in ("model.embed_tokens.weight", "lm_head.weight")
            blocks = quantise(expected, 8 if vocabulary or weights == "int8" else 4)
            assert isinstance(weight, Blocks)
            assert weight.bits == blocks.bits
            expected = blocks.dequantise()
        assert torch.equal(plain(weight, torch.float32), expected), key
    reference = logits(Decoder.load(models["llama"]))
    error = (logits(Decoder.load(path, weights)) - reference).std() / reference.std()
    assert 0 < error < (0.08 if weights == "int8" else 0.5)


def test_blocks_are_not_made_larger(models: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", models["llama"], Kind.Q4_1)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = all_weights(file)[name]
    for weights in ("int8", "int4"):
        found = all_weights(file, weights)[name]
        assert isinstance(found, Blocks)
        assert torch.equal(plain(found, torch.float32), plain(stored, torch.float32))


def test_a_matrix_without_whole_blocks(models: dict[str, Path], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", intermediate_size=80)
    with pytest.raises(UnsupportedModelError, match=r"down_proj.*80 inputs are not a multiple"):
        Decoder.load(folder, "int8")
    with pytest.raises(UnsupportedModelError, match="'int7', expected one of auto, float32"):
        load_config(models["llama"], "int7")


def test_end_tokens_and_fingerprint(models: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", models["llama"])
    assert load_config(file).eos_token_ids == (2,)
    raw = file.read_bytes()
    key = b"tokenizer.ggml.bos_token_id"
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw.replace(key, b"tokenizer.ggml.eot_token_id"))
    assert load_config(changed).eos_token_ids == (2, 1)
    assert load_config(changed).bos_token_id is None
    assert weights_fingerprint(changed) != weights_fingerprint(file)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(raw)
    assert weights_fingerprint(copy) == weights_fingerprint(file)


TEXTS = [
    "Hello, world! The quick brown fox.",
    "def f(x):\n    return x ** 2  # squared\n",
    "  spaces   and\ttabs\n\n",
    "naïve café – ünïcode 12345 3.14 ☃",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|><|im_end|>",
    "",
]


def test_the_tokenizer_is_that_of_the_folder(models: dict[str, Path], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "folder", "llama", vocab_size=300)
    original = Tokenizer(tokenizer_models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    original.decoder = decoders.ByteLevel()
    original.train_from_iterator(
        TEXTS[:4],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    original.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    source = open_model(write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0))
    found = Tokenizer.from_str(source.tokenizer.decode())
    assert found.get_vocab() == original.get_vocab()
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )
    assert source.chat_template == template
    assert len(source.tokenizer_digest) == 64
    assert json.loads(source.tokenizer)["model"]["type"] == "BPE"


def test_a_file_without_a_tokenizer(models: dict[str, Path], tmp_path: Path) -> None:
    source = open_model(write_gguf(tmp_path / "model.gguf", models["llama"]))
    assert source.chat_template == ""
    assert (source.tokenizer, source.tokenizer_digest) == (b"", "")
