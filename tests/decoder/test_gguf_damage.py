"""Damaged and unknown GGUF files give an error that names the file and what is wrong."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.decoder import Decoder, UnsupportedModelError, open_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("gguf")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(base / "folder")
    kinds = {"blk.0.ffn_down.weight": Kind.Q5_0, "blk.0.attn_q.weight": Kind.Q4_1}
    return write_gguf(base / "model.gguf", base / "folder", Kind.Q8_0, kinds)


def load_or_refuse(path: Path, content: bytes) -> None:
    """Load a file; the only error allowed is the clear one, with the file's name."""
    path.write_bytes(content)
    try:
        source = open_model(path)
        dict(source.weights(source.config()))
    except UnsupportedModelError as error:
        assert str(path) in str(error)  # noqa: PT017 - it may load as well


@settings(max_examples=150)
@given(data=st.data())
def test_any_cut(data: st.DataObject, file: Path) -> None:
    content = file.read_bytes()
    stop = data.draw(st.integers(0, len(content) - 1))
    cut = file.with_name("cut.gguf")
    cut.write_bytes(content[:stop])
    with pytest.raises(UnsupportedModelError, match=r"cut\.gguf"):
        dict(open_model(cut).weights(open_model(cut).config()))


@settings(max_examples=300)
@given(data=st.data())
def test_any_changed_bytes(data: st.DataObject, file: Path) -> None:
    content = bytearray(file.read_bytes())
    header = content.index(b"output_norm.weight") + 400
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, data.draw(st.sampled_from([40, header, len(content) - 1]))))
        content[at] = data.draw(st.one_of(st.sampled_from([0, 1, 127, 255]), st.integers(0, 255)))
    load_or_refuse(file.with_name("changed.gguf"), bytes(content))


def number(value: int | float) -> bytes:
    return (np.float32 if isinstance(value, float) else np.uint32)(value).tobytes()


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
        (
            b"llama.attention.head_count_kv\4\0\0\0" + number(1),
            b"llama.attention.head_count_kv\4\0\0\0" + number(3),
            "no multiple of 3",
        ),
        (
            b"llama.embedding_length\4\0\0\0" + number(32),
            b"llama.embedding_length\4\0\0\0" + number(64),
            r"has shape .*, expected .* by the metadata",
        ),
        (
            b"llama.block_count\4\0\0\0" + number(1),
            b"llama.block_count\4\0\0\0" + number(2),
            "lacks the tensor 'blk.1.",
        ),
        (
            b"llama.block_count\4\0\0\0" + number(1),
            b"llama.block_count\4\0\0\0" + number(2**31),
            "expected a number from 1",
        ),
        (
            b"tokenizer.ggml.eos_token_id\4\0\0\0" + number(2),
            b"tokenizer.ggml.eos_token_id\4\0\0\0" + number(40),
            "expected a token id",
        ),
    ],
)
def test_the_error_says_what_is_wrong(file: Path, old: bytes, new: bytes, message: str) -> None:
    content = file.read_bytes()
    assert content.count(old) >= 1
    changed = file.with_name("changed.gguf")
    changed.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        Decoder.load(changed)
    assert str(changed) in str(raised.value)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_model(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(UnsupportedModelError, match="is empty"):
        open_model(tmp_path / "empty.gguf")
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="one part of a split model"):
        open_model(tmp_path / "split.gguf")
