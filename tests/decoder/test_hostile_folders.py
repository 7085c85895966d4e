"""Folders that nobody's converter writes end in one line that names the folder.

``make fuzz`` draws such folders at random.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoder_cases import changed, save_model
from safetensors.torch import load_file, save_file

from paceline.convert import load_decoder, open_model, weights_fingerprint
from paceline.decoder import UnsupportedModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("good") / "model", "llama")


def content(name: str, raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(raw) and None


def fields(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        found = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(found | values))

    return change


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def header(size: int | None = None, **change: Any) -> Callable[[Path], None]:
    """Change a tensor's entry in the header of the weights, or the header's size."""

    def write(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        found = json.loads(raw[8 : 8 + length])
        found["model.norm.weight"] |= change
        text = json.dumps(found).encode()
        start = struct.pack("<Q", len(text) if size is None else size)
        (folder / WEIGHTS).write_bytes(start + text + raw[8 + length :])

    return write


def cut(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS)


def value(field: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "generation_config.json").unlink(missing_ok=True)  # its end tokens come first
        fields("config.json", **{field: value})(folder)

    return change


VALUES: list[tuple[str, Any]] = [
    ("num_hidden_layers", -1), ("num_hidden_layers", "2"), ("num_hidden_layers", 10**9),
    ("hidden_size", 1 << 40), ("hidden_size", 8.5), ("vocab_size", True),
    ("max_position_embeddings", None), ("max_position_embeddings", 0),
    ("rms_norm_eps", float("nan")), ("rms_norm_eps", "1e-5"), ("head_dim", []),
    ("eos_token_id", "a"), ("eos_token_id", [1, -1]), ("eos_token_id", True),
    ("num_key_value_heads", 0), ("hidden_act", []), ("hidden_act", 3), ("rope_scaling", 7),
    ("rope_scaling", {"rope_type": "yarn", "factor": -2}),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ("head_dim", 3), ("rope_parameters", {"rope_type": "default", "rope_theta": None}),
    ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": -1}),
    ("tie_word_embeddings", "no"), ("dtype", "float99"), ("dtype", 3), ("layer_types", "x"),
]  # fmt: skip
NAMED = {"head_dim": "", "rope_parameters": "", "rope_scaling": "rope", "layer_types": "layer"}

FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no JSON": (content("config.json", b"{"), "config.json"),
    "a list": (content("config.json", b"[1]"), "config.json"),
    "not UTF-8": (content("config.json", b'{"a": "\xff"}'), "config.json"),
    "byte order mark": (content("config.json", b"\xef\xbb\xbf{}"), "config.json"),
    "gzip": (content("config.json", b"\x1f\x8b\x08" + b"\0" * 20), "config.json"),
    "deep": (content("config.json", b"[" * 100_000), "config.json"),
    "long number": (content("config.json", b'{"a": ' + b"9" * 5000 + b"}"), "config.json"),
    "no model type": (content("config.json", b"{}"), "config.json"),
    "no file": (replaced("config.json", Path.mkdir), "config.json"),
    "more layers": (fields("config.json", num_hidden_layers=4000), "lacks tensor 'model.layers.2"),
    "type": (fields("config.json", model_type="gpt2"), "model type 'gpt2'"),
    "unknown type": (fields("config.json", model_type="no-such-model"), "no-such-model"),
    "gelu": (fields("config.json", hidden_act="gelu"), "activation 'gelu'"),
    "fp8": (fields("config.json", quantization_config={"quant_method": "fp8"}), "quantised"),
    "width": (fields("config.json", intermediate_size=99), "expected (99, 96)"),
    "phi3": (fields("config.json", model_type="phi3"), "mlp.gate_proj.weight' is not part of"),
    "scaling": (fields("config.json", rope_parameters={"rope_type": "yarn"}), "rope"),
    "wide": (fields("config.json", hidden_size=6 << 16), "expected (393216,) by the config"),
    "ends": (fields("generation_config.json", eos_token_id=["x"]), "eos_token_id"),
    "ends true": (fields("generation_config.json", eos_token_id=True), "eos_token_id"),
    "generation": (content("generation_config.json", b"\0"), "generation_config.json"),
    "a cycle": (
        replaced("generation_config.json", lambda file: file.symlink_to(file.name)),
        "generation_config.json",
    ),
    "a pipe": (replaced("tokenizer.json", os.mkfifo), "tokenizer.json"),
    "a device": (
        replaced("tokenizer_config.json", lambda file: file.symlink_to("/dev/zero")),
        "tokenizer_config.json",
    ),
    "empty weights": (content(WEIGHTS, b""), WEIGHTS),
    "cut weights": (cut, WEIGHTS),
    "a tensor less": (without_a_tensor, "lacks tensor 'model.layers.1.mlp.up_proj.weight'"),
    "large header": (header(1 << 62), WEIGHTS),
    "offset": (header(data_offsets=[0, 1 << 60]), WEIGHTS),
    "negative": (header(data_offsets=[-1, 5]), WEIGHTS),
    "shape": (header(shape=[1 << 40, 1 << 40]), WEIGHTS),
    "tensor type": (header(dtype="F99"), WEIGHTS),
    "no weights": (replaced(WEIGHTS, Path.mkdir), WEIGHTS),
    "outside": (content(INDEX, b'{"weight_map": {"a": "../a"}}'), f"{INDEX} names '../a'"),
    "root": (content(INDEX, b'{"weight_map": {"a": "/etc/passwd"}}'), f"{INDEX} names '/etc"),
    "no map": (content(INDEX, b"{}"), f"{INDEX}: weight_map"),
    "no names": (content(INDEX, b'{"weight_map": {"a": 1}}'), f"{INDEX}: weight_map"),
    "itself": (content(INDEX, b'{"weight_map": {"a": "config.json"}}'), "config.json"),
    "vocabulary": (content("vocab.json", b"[]"), "merges.txt"),
    "template": (content("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    **{f"{n}={v!r}": (value(n, v), NAMED.get(n, n)) for n, v in VALUES},
}


def read(folder: Path) -> None:
    source = open_model(folder)
    source.config()
    _ = source.tokenizer, source.chat_templates
    load_decoder(source)
    weights_fingerprint(source)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "field", "of"),
    [
        ("ministral3", "rope_parameters", "llama_4_scaling_beta"),
        ("glm4-moe", "routed_scaling_factor", ""),
        ("granite", "embedding_multiplier", ""),
        ("hunyuan", "rope_parameters", "alpha"),
    ],
)
def test_constants_are_finite(
    name: str, field: str, of: str, number: float, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(models[name], tmp_path / "model")
    found = json.loads((folder / "config.json").read_text())
    fields("config.json", **{field: found[field] | {of: number} if of else number})(folder)
    with pytest.raises(UnsupportedModelError, match=r"expected (a )?finite"):
        read(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_refused_in_one_line_that_names_it(
    name: str, good: Path, tmp_path: Path
) -> None:
    change, message = FOLDERS[name]
    folder = shutil.copytree(good, tmp_path / "model")
    change(folder)
    with pytest.raises((ValueError, OSError)) as error:
        read(folder)
    said = str(error.value)
    assert str(folder) in said
    assert message in said
    assert "\n" not in said
