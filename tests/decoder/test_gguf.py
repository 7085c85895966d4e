"""GGUF files: the models of their folders, the values of their blocks, damage, and their format."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from decoder_cases import FAMILIES, changed, logits, save_model
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import train_tokenizer
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.convert import (
    Packer,
    fastest,
    load_config,
    load_decoder,
    open_model,
    prepare,
    store,
    weights_fingerprint,
)
from paceline.convert.gguf import GgufModel
from paceline.convert.gguf_file import GgufFile, GgufTensor, converted_bits, decode, read_gguf
from paceline.convert.weights import Weight, in_columns, in_order, plain
from paceline.decoder import UnsupportedModelError
from paceline.kernels.linear import PackedMatrix, pack_rotated
from paceline.kernels.quantised import QuantisedMatrix, quantise
from paceline.kernels.rotated import DOWN_SIZE, RotatedMatrix

NOT_AS_FILES = (
    "mistral", "qwen2-window", "qwen3-moe-dense", "granite-swa", "qwen3-next", "olmo-hybrid",
    "ernie-moe-min",
)  # fmt: skip
NAMES = [name for name in FAMILIES if name not in NOT_AS_FILES]
# Fields that a file does not contain, as all models of the family have them.
UNKNOWN: dict[str, dict[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    "smollm3": {"no_rope_layer_interval": 4},
    "olmo3": {"layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None},
}


def all_weights(path: Path, weights: str = "auto") -> dict[str, Weight]:
    source = open_model(path)
    return dict(source.weights(source.config(weights)))


@pytest.mark.parametrize("name", NAMES)
def test_a_float_file_is_the_folder(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    source = models[name]
    if name in UNKNOWN:
        source = save_model(tmp_path / "folder", name, **UNKNOWN[name])
    file = write_gguf(tmp_path / "model.gguf", source)
    mine, folder = asdict(load_config(file)), asdict(load_config(source))
    norm_offset = folder.pop("norm_offset")
    assert mine.pop("norm_offset") == 0
    same_family = {"mistral-full": "llama"}.get(name, folder["model_type"])
    for key in ("norm_eps", "rope_scaling"):  # a float32 in the file
        assert mine.pop(key) == pytest.approx(folder.pop(key))
    assert mine == folder | {"model_type": same_family}
    found, expected = all_weights(file), all_weights(source)
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        values = plain(weight, torch.float32)
        if values.dim() == 1 and ".linear_attn." not in key:
            values = values + norm_offset
        bound = 1e-6 if key.endswith("A_log") else 0.0  # the file has its exponential
        assert torch.allclose(plain(found[key], torch.float32), values, rtol=bound, atol=0), key
    torch.testing.assert_close(logits(file, count=80), logits(source, count=80))


def test_a_file_of_qwen3_next_has_its_logits(models: dict[str, Path], tmp_path: Path) -> None:
    """It is read as the mixture of Qwen3.5, whose projections are apart."""
    file = write_gguf(tmp_path / "model.gguf", models["qwen3-next"])
    assert load_config(file).model_type == "qwen3_5_moe_text"
    found, expected = logits(file), logits(models["qwen3-next"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", Kind.Q8_0), ("llama-tied", Kind.Q4_1), ("qwen3", Kind.Q4_1)]
)
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
        assert isinstance(weight, QuantisedMatrix)
        assert weight.bits == (8 if kind == Kind.Q8_0 else 4)
        error = (weight.dequantise() - plain(hf[key], torch.float32)).abs().max()
        assert error < (0.01 if kind == Kind.Q8_0 else 0.1), key
    quantised = plain(found["model.layers.0.self_attn.q_proj.weight"], torch.float32)
    as_floats = all_weights(file, "float32")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(quantised, plain(as_floats, torch.float32))


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
        if expected.dim() == 2 and weights == "int4":
            vocabulary = key in ("model.embed_tokens.weight", "lm_head.weight")
            blocks = quantise(expected, 8 if vocabulary else 4)
            assert isinstance(weight, QuantisedMatrix)
            assert weight.bits == blocks.bits
            expected = blocks.dequantise()
        assert torch.equal(plain(weight, torch.float32), expected), key
    reference, decoder = logits(models["llama"]), load_decoder(path, weights)
    matrices = [each.packed for each in decoder.linears()]
    found = {each.format for each in matrices if each is not None}
    assert found == ({"rotated"} if weights == "int8" else {"int4", "int8"})
    error = (logits(decoder) - reference).std() / reference.std()
    assert 0 < error < (0.08 if weights == "int8" else 0.5)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_blocks_of_a_file_stay_blocks_but_in_int8(
    models: dict[str, Path], tmp_path: Path, kind: Kind
) -> None:
    """A matrix of blocks and plain rows becomes one of blocks. In int8 values are rotated, as those
    of a folder."""
    kinds = {"blk.0.attn_v.weight": Kind.F16, "blk.0.attn_output.weight": Kind.F32}
    file = write_gguf(tmp_path / "model.gguf", models["llama"], kind, kinds)
    name = "model.layers.0.mlp.down_proj.weight"
    stored = all_weights(file)[name]
    assert isinstance(stored, QuantisedMatrix)
    source = open_model(file)
    config = source.config("int8")
    parts = Packer(config, source.weights(config), "cpu").layer(0)
    packed = {name: each for name, each in parts.items() if isinstance(each, PackedMatrix)}
    assert {each.format for each in packed.values()} == {"rotated"}
    expected = pack_rotated(RotatedMatrix.of(stored.dequantise(), DOWN_SIZE))
    assert torch.equal(packed["down"].values, expected.values)


def test_blocks_are_not_made_larger(models: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", models["llama"], Kind.Q4_1)
    name = "model.layers.1.mlp.down_proj.weight"
    stored, found = all_weights(file)[name], all_weights(file, "int4")[name]
    assert isinstance(found, QuantisedMatrix)
    assert torch.equal(plain(found, torch.float32), plain(stored, torch.float32))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_columns_in_another_order_keep_their_values(width: int) -> None:
    """Also where heads are narrower than blocks."""
    blocks = quantise(torch.randn(8, 4 * width) * torch.rand(8, 1).exp(), 8)
    order = torch.arange(4 * width).view(2, 2, width).transpose(0, 1).flatten()
    found = plain(in_columns(blocks, order), torch.float32)
    assert torch.equal(found, plain(blocks, torch.float32)[:, order])


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_beside_blocks(bits: int) -> None:
    """Where heads are padded: zeros exactly, and the rest keeps its blocks."""
    blocks = quantise(torch.randn(8, 64) - 2, bits)
    exact = plain(blocks, torch.float32)
    places = torch.cat([torch.arange(32), torch.full((32,), -1), torch.arange(32, 64)])
    found = in_columns(blocks, places)
    assert isinstance(found, QuantisedMatrix)
    zeros = torch.zeros(8, 32)
    assert torch.equal(found.dequantise(), torch.cat([exact[:, :32], zeros, exact[:, 32:]], 1))
    found = plain(in_order(blocks, torch.tensor([3, -1, 5])), torch.float32)
    assert torch.equal(found, torch.stack([exact[3], torch.zeros(64), exact[5]]))


def test_a_matrix_without_whole_blocks(models: dict[str, Path], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", intermediate_size=84)
    with pytest.raises(UnsupportedModelError, match=r"down_proj.*84 inputs are not a multiple"):
        load_decoder(folder, "int4")
    with pytest.raises(UnsupportedModelError, match=r"down' cannot be in int8: it has 84 inputs"):
        load_decoder(folder, "int8")
    with pytest.raises(UnsupportedModelError, match="'int7', expected one of auto, stored"):
        load_config(models["llama"], "int7")


def test_end_tokens_types_and_fingerprint(models: dict[str, Path], tmp_path: Path) -> None:
    for kind in (Kind.F16, Kind.BF16):
        config = load_config(write_gguf(tmp_path / "half.gguf", models["llama"], kind))
        assert (config.dtype, config.weights) == (torch.bfloat16, "bfloat16")
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


def test_the_tokenizer_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "folder", "llama", vocab_size=302)
    train_tokenizer(TEXTS[:4], 300).save_pretrained(folder)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    original.add_special_tokens(["<|im_start|>", "<|im_end|>"])
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
            shown = original.decode(ids, skip_special_tokens=skip)
            assert found.decode(ids, skip_special_tokens=skip) == shown
    assert source.chat_template == template
    assert len(source.tokenizer_digest) == 64
    assert json.loads(source.tokenizer)["model"]["type"] == "BPE"


def test_a_file_without_a_tokenizer(models: dict[str, Path], tmp_path: Path) -> None:
    source = open_model(write_gguf(tmp_path / "model.gguf", models["llama"]))
    assert (source.chat_template, source.tokenizer, source.tokenizer_digest) == ("", b"", "")


EXACT = {Kind.Q8_0: 8, Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.MXFP4: 8}
CONVERTED = [Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL]
# Offsets of float16 numbers in a stored block.
HALVES = {
    Kind.Q8_0: [0], Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q4_K: [0, 2], Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2], Kind.Q2_K: [80, 82], Kind.Q3_K: [108], Kind.Q5_K: [0, 2], Kind.Q6_K: [208],
    Kind.IQ4_NL: [0], Kind.MXFP4: [],
}  # fmt: skip
FILE = GgufFile(Path("model.gguf"), {}, {})


def stored(kind: Kind, outs: int, blocks: int, seed: int) -> GgufTensor:
    """A matrix of any bytes, with finite scales."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (outs * blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0, 0.1, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8)
    if kind == Kind.MXFP4:
        raw[:, 0] = np.minimum(raw[:, 0], 200)  # an exponent
    return GgufTensor("blk.0.ffn_up.weight", (outs, blocks * values), kind, raw.reshape(-1))


def expected(tensor: GgufTensor) -> torch.Tensor:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return torch.from_numpy(gguf.quants.dequantize(rows, tensor.kind))


@example(kind=Kind.Q4_1, outs=600, blocks=80, seed=0)  # decoded in pieces
@given(
    kind=st.sampled_from(sorted(EXACT)),
    outs=st.integers(1, 7),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_blocks_have_the_bits_of_the_file(kind: Kind, outs: int, blocks: int, seed: int) -> None:
    tensor = stored(kind, outs, blocks, seed)
    found = decode(FILE, tensor)
    assert isinstance(found, QuantisedMatrix)
    assert not converted_bits(kind)
    assert found.bits == EXACT[kind]
    bits = found.dequantise().view(torch.int32)
    assert torch.equal(bits, expected(tensor).view(torch.int32))


@pytest.mark.parametrize("kind", CONVERTED)
def test_other_formats_become_blocks_of_about_their_size(kind: Kind) -> None:
    tensor = stored(kind, 5, 3, 1)
    found, weight = decode(FILE, tensor, small=True), expected(tensor)
    near = decode(FILE, tensor)
    assert isinstance(found, QuantisedMatrix)
    assert isinstance(near, QuantisedMatrix)
    assert near.bits == 8
    small = len(tensor.data) * 8 / weight.numel() < 4
    assert found.bits == converted_bits(kind) == (4 if small else 8)
    blocks, errors = (each.unflatten(1, (-1, 32)) for each in (weight, found.dequantise() - weight))
    if small:  # squares are least
        spread = blocks.amax(-1) - blocks.amin(-1)
        assert (errors.square().mean(-1).sqrt() <= spread * (0.5 / 15 + 0.002)).all()
    else:
        largest = blocks.abs().amax(-1, keepdim=True)
        assert (errors.abs() <= largest * (0.5 / 127 + 0.002)).all()


def test_floats_keep_their_type() -> None:
    weight = torch.randn(3, 4)
    types = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    for kind, dtype in types.items():
        raw = weight.to(dtype).view(torch.uint8).numpy().reshape(-1)
        found = decode(FILE, GgufTensor("output.weight", (3, 4), kind, raw))
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weight.to(dtype))


def test_a_quantised_vector_becomes_floats() -> None:
    matrix = stored(Kind.Q8_0, 1, 2, 0)
    found = decode(FILE, GgufTensor("output_norm.weight", (64,), Kind.Q8_0, matrix.data))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected(matrix)[0])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(kind: Kind, bad: float) -> None:
    tensor = stored(kind, 2, 2, 0)
    at = HALVES[kind][-1]
    tensor.data[at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(
        UnsupportedModelError, match=r"model.gguf.*'blk.0.ffn_up.weight' is damaged"
    ):
        decode(FILE, tensor)


def test_a_format_that_nothing_decodes() -> None:
    tensor = GgufTensor("output.weight", (2, 2), Kind.I32, np.zeros(16, np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"'output.weight' has the format I32.*Q4_K"):
        decode(FILE, tensor)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("gguf")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(base / "folder")
    tokenizer = Tokenizer(tokenizer_models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(base / "folder/tokenizer.json"))
    kinds = {"blk.0.ffn_down.weight": Kind.Q5_0, "blk.0.attn_q.weight": Kind.Q4_1}
    return write_gguf(base / "model.gguf", base / "folder", Kind.Q8_0, kinds)


def check_loaded_or_refused(path: Path, content: bytes) -> None:
    """Load a file; the only error allowed is the clear one, with the file's name."""
    path.write_bytes(content)
    try:
        source = open_model(path)
        dict(source.weights(source.config()))
        _ = source.tokenizer, source.special_tokens, source.chat_templates
    except UnsupportedModelError as error:
        assert str(path) in str(error)  # noqa: PT017 - it may load as well


@given(data=st.data())
def test_any_cut(data: st.DataObject, file: Path) -> None:
    content = file.read_bytes()
    stop = data.draw(st.integers(0, len(content) - 1))
    cut = file.with_name("cut.gguf")
    cut.write_bytes(content[:stop])
    with pytest.raises(UnsupportedModelError, match=r"cut\.gguf"):
        dict(open_model(cut).weights(open_model(cut).config()))


@settings(max_examples=120)
@given(data=st.data())
def test_any_changed_bytes(data: st.DataObject, file: Path) -> None:
    content = bytearray(file.read_bytes())
    header = content.index(b"output_norm.weight") + 400
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, data.draw(st.sampled_from([40, header, len(content) - 1]))))
        content[at] = data.draw(st.one_of(st.sampled_from([0, 1, 127, 255]), st.integers(0, 255)))
    check_loaded_or_refused(file.with_name("changed.gguf"), bytes(content))


def number(key: bytes, old: int, new: int, message: str) -> tuple[bytes, bytes, str]:
    """A changed number of the metadata."""
    return *(key + b"\4\0\0\0" + np.uint32(value).tobytes() for value in (old, new)), message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", "no GGUF file"),
        (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", "version 1, expected 2 or 3"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "little-endian"),
        (b"output_norm.weight", b"output_mean.weight", "'output_mean.weight' is not part of"),
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", "'blk.1.ffn_up.weight' is not part of"),
        (b"llama.block_count", b"llama.block_kount", "llama.block_count is None"),
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gpt-x", "architecture 'gpt-x'"),
        (b"llama.rope.freq_base\6\0\0\0", b"llama.rope.freq_base\4\0\0\0", "a finite number"),
        number(b"llama.attention.head_count_kv", 1, 3, "no multiple of 3"),
        number(b"llama.embedding_length", 32, 64, r"has shape .*, expected .* by the metadata"),
        number(b"llama.block_count", 1, 2, "lacks the tensor 'blk.1."),
        number(b"llama.block_count", 1, 2**31, "expected a number from 1"),
        number(b"tokenizer.ggml.eos_token_id", 2, 40, "expected a token id"),
    ],
)
def test_the_error_says_what_is_wrong(file: Path, old: bytes, new: bytes, message: str) -> None:
    content = file.read_bytes()
    assert content.count(old) >= 1
    changed = file.with_name("changed.gguf")
    changed.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        load_decoder(changed)
    assert str(changed) in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        number(
            b"gemma4.attention.value_length_swa", 16, 32, "swa differs from the width of keys, "
        ),
        number(b"gemma4.rope.dimension_count_swa", 16, 4, "swa differs from the width of keys, 16"),
        (b"gemma4.attention.key_length_swa", b"gemma4.attention.key_width__swa", "swa is None"),
        (b"\2\0\0\0\1\0\0\0", b"\7\0\0\0\1\0\0\0", r"has \[1, 7\], expected one number of he"),
        (
            np.float32(1e30).tobytes(),
            np.float32(2).tobytes(),
            "'rope_freqs.weight' are not 'propor",
        ),
    ],
)
def test_heads_of_gemma4_fit_together(
    old: bytes, new: bytes, message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", models["gemma4-keys"])
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UnsupportedModelError, match=message):
        load_decoder(file)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_model(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(UnsupportedModelError, match="is empty"):
        open_model(tmp_path / "empty.gguf")


def test_the_parts_of_a_split_file_are_one_model(models: dict[str, Path], tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", models["llama"])
    write_gguf(tmp_path / "model.gguf", models["llama"], part_tensors=9)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    model = prepare(first)
    assert model.description.name == "model"
    parts = first, second, third
    assert model.description.source_bytes == sum(each.stat().st_size for each in parts)
    assert torch.equal(logits(model.decoder()), logits(prepare(whole).decoder()))
    with pytest.raises(UnsupportedModelError, match="one of 3 parts of a model; give the first"):
        open_model(second)
    third.rename(tmp_path / "third.gguf")
    with pytest.raises(UnsupportedModelError, match=f"3 parts, and .*{third.name} does not exist"):
        open_model(first)
    shutil.copy(second, third)
    with pytest.raises(
        UnsupportedModelError, match="says that it is part 1 of 3, from 0; expected 2"
    ):
        open_model(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 7 experts"),
        ({"num_local_experts": 6}, r"ffn_gate_inp\.weight' has shape \(7, 96\), expected \(6,"),
        ({"moe_intermediate_size": 32}, r"ffn_gate_exps\.weight' .* expected \(7, 32, 96\)"),
        ({"num_local_experts": 0, "num_experts": 0}, "qwen3moe.expert_count is None, expected a"),
    ],
)
def test_experts_of_a_file_that_do_not_fit_are_named(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = changed(models["qwen3-moe"], tmp_path / "folder", **change)
    file = write_gguf(tmp_path / "model.gguf", folder)
    with pytest.raises(UnsupportedModelError, match=rf"model\.gguf: .*{message}"):
        load_config(file)


@pytest.mark.parametrize("name", ["ministral3", "ernie-moe", "glm4-moe", "qwen3-5-moe"])
def test_any_value_of_the_metadata_is_read_or_refused(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_gguf(write_gguf(tmp_path / "model.gguf", models[name]))
    architecture = f"{file.metadata['general.architecture']}."
    further = ("leading_dense_block_count", "interleave_moe_layer_step", "full_attention_interval")
    keys = {key for key in file.metadata if key.startswith(architecture)}
    for key in sorted(keys | {architecture + each for each in further}):
        for value in (None, -1, 0, 3, 1 << 31, False, "", "x", float("nan"), float("inf")):
            changed = replace(file, metadata={**file.metadata, key: value})
            monkeypatch.setattr("paceline.convert.gguf.read_gguf", lambda _, found=changed: found)
            with suppress(UnsupportedModelError):
                GgufModel(file.path).read_config("auto")


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", save_model(tmp_path / "model", "llama"), Kind.Q4_1)


def measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Passes take so long, by the format of the first matrix, here and not in a child."""
    monkeypatch.setattr(store, "run_in_child", lambda work, *_, progress, **__: work(progress))
    monkeypatch.setattr(fastest, "_SMALL", 0)
    monkeypatch.setattr(fastest, "_pass", lambda matrices, *_: seconds[matrices[0].format])


@pytest.mark.parametrize(("rotated", "expected"), [(0.9, "int8"), (0.97, "gguf"), (1.1, "gguf")])
def test_auto_takes_int8_where_it_is_faster_and_keeps_it(
    blocks: Path, monkeypatch: pytest.MonkeyPatch, rotated: float, expected: str
) -> None:
    measured(monkeypatch, {"int4": 1.0, "rotated": rotated})
    assert prepare(blocks).description.config.weights == expected
    assert prepare(blocks, "stored").description.config.weights == "gguf"
    measured(monkeypatch, {})  # to measure again would fail
    assert prepare(blocks).description.config.weights == expected


def test_nothing_is_measured_where_that_cannot_pay(
    blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a small file, without memory, and where 8 bits are more than twice the file."""
    assert prepare(blocks).description.config.weights == "gguf"
    measured(monkeypatch, {})  # to measure would fail
    half = load_config(blocks).layer_weights // 2
    for at, name, value in (
        (fastest, "available_memory", lambda: 0), (GgufModel, "weight_bytes", half - 1),
    ):  # fmt: skip
        blocks.touch()  # another entry
        with monkeypatch.context() as patch:
            patch.setattr(at, name, value)
            assert prepare(blocks).description.config.weights == "gguf"


def test_a_model_without_a_form_in_8_bits_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """84 inputs are no multiple of 8, and of no block either: that matrix is stored in floats."""
    folder = save_model(tmp_path / "model", "llama", intermediate_size=84)
    kinds = {f"blk.{layer}.ffn_down.weight": Kind.F32 for layer in range(4)}
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q4_1, kinds)
    monkeypatch.setattr(fastest, "_SMALL", 0)
    assert prepare(file).description.config.weights == "gguf"
