"""Folders that nobody's converter writes end in one line that names the folder.

``make fuzz`` draws such folders at random.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import changed
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.convert import load_decoder, open_model, weights_fingerprint
from paceline.decoder import UnsupportedModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"
ONE_MORE = EXPERT.replace("4.up", "7.up")
SHARES = "model.layers.0.router.per_expert_scale"
OWN = "model.embed_tokens_per_layer.weight"
QUERY, STEPS = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.linear_attn.dt_bias"


def content(name: str, raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(raw) and None


def fields(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        found = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(found | values))

    return change


config = partial(fields, "config.json")


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


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return write


def value(field: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "generation_config.json").unlink(missing_ok=True)  # its end tokens come first
        config(**{field: value})(folder)

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
    "more layers": (config(num_hidden_layers=4000), "lacks tensor 'model.layers.2"),
    "type": (config(model_type="gpt2"), "model type 'gpt2'"),
    "unknown type": (config(model_type="no-such-model"), "no-such-model"),
    "gelu": (config(hidden_act="gelu"), "activation 'gelu'"),
    "fp8": (config(quantization_config={"quant_method": "fp8"}), "quantised"),
    "width": (config(intermediate_size=99), "expected (99, 96)"),
    "phi3": (config(model_type="phi3"), "mlp.gate_proj.weight' is not part of"),
    "scaling": (config(rope_parameters={"rope_type": "yarn"}), "rope"),
    "wide": (config(hidden_size=6 << 16), "expected (393216,) by the config"),
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
    "a tensor less": (tensors(lambda t: t.pop(UP)), f"lacks tensor '{UP}'"),
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
OTHERS: list[tuple[str, Callable[[Path], None], str]] = [
    ("qwen3", config(model_type="llama"), "_norm.weight' is not part of a"),
    ("qwen3-moe", tensors(lambda t: t.pop(EXPERT)), f"lacks tensor '{EXPERT}'"),
    ("qwen3-moe", tensors(lambda t: t.update({EXPERT: torch.zeros(64, 32)})),
     f"'{EXPERT}' has shape (64, 32), expected (64, 96)"),
    ("qwen3-moe", tensors(lambda t: t.update({ONE_MORE: torch.zeros(64, 96)})),
     f"'{ONE_MORE}' is not part of a model"),
    ("qwen3-moe", tensors(lambda t: t.pop("model.layers.0.mlp.gate.weight")), "mlp.router.weight'"),
    ("qwen3-moe", config(num_experts_per_tok=8), "num_experts_per_tok is 8 of 7 experts"),
    ("qwen3-moe", config(num_experts_per_tok=0), "num_experts_per_tok is 0"),
    ("qwen3-moe", config(mlp_only_layers=[0, 1]), "no layer of the mixture of experts has"),
    ("qwen3-moe", config(decoder_sparse_step=2), "' is not part of"),
    ("glm4-moe", config(n_group=5, topk_group=2), "n_group is 5, topk_group 2: expected 1"),
    ("ernie-moe", config(use_bias=True), "use_bias is true, expected false in a mixture"),
    ("lfm2-moe", config(use_expert_bias=False), "use_expert_bias is false, expected experts chos"),
    ("lfm2", config(layer_types=["conv", "full_attention", "linear_attention"]), "layer types ['c"),
    ("lfm2", config(conv_bias=True), "conv_bias is true, expected short convolutions without"),
    ("lfm2", config(conv_L_cache=9), "conv_L_cache is 9, expected 2 to 8"),
    ("lfm2", config(layer_types=["conv"] * 3), "layer_types are all conv, expected some full"),
    ("gemma4", config(hidden_size_per_layer_input=8), "layer_input is 262144, expected that of v"),
    ("gemma4", config(num_kv_shared_layers=1), "shared_layers is 1 of 2, expected layers of the"),
    ("gemma4", config(num_kv_shared_layers=-1), "shared_layers is -1 of 2, expected layers of t"),
    ("gemma4-small", tensors(lambda t: t.pop(OWN)), f"lacks tensor '{OWN}'"),
    ("gemma4-small", tensors(lambda t: t.update({OWN: torch.zeros(101, 16)})),
     f"'{OWN}' has shape (101, 16), expected (101, 160)"),
    ("gemma4-moe", config(top_k_experts=6), "num_experts_per_tok is 6 of 5 experts"),
    ("gemma4-moe", config(enable_moe_block=False), "is not part of a model of type 'gemma4_text'"),
    ("gemma4-moe", tensors(lambda t: t.pop(SHARES)), f"lacks tensor '{SHARES}'"),
    ("gemma4", config(attention_bias=True), "attention_bias is true, expected attention without"),
    ("gemma4", config(global_head_dim=1 << 40), "global_head_dim is 1099511627776, expected a num"),
    ("gemma4", config(num_global_key_value_heads=-1), "value_heads is -1, expected a number"),
    ("lfm2", config(block_ff_dim=-5), "block_ff_dim is -5, expected a number from 1"),
    ("gemma4", config(head_dim=48), "expected a number and a multiple of it"),
    ("gpt-oss", config(quantization_config={"quant_method": "gptq"}), "by 'gptq' are not"),
    ("gpt-oss", config(swiglu_alpha=2.0), "swiglu_alpha is 2.0, expected 1.702"),
    ("qwen3-5", tensors(lambda t: t.update({QUERY: torch.zeros(2, 2)})),
     f"tensor '{QUERY}' is not part of"),
    ("qwen3-5", tensors(lambda t: t.pop(STEPS)), f"lacks tensor '{STEPS}'"),
]  # fmt: skip
CASES = {name: ("llama", *case) for name, case in FOLDERS.items()} | {
    f"{case[0]}: {case[2]}": case for case in OTHERS
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
    config(**{field: found[field] | {of: number} if of else number})(folder)
    with pytest.raises(UnsupportedModelError, match=r"expected (a )?finite"):
        read(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_refused_in_one_line_that_names_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    of, change, message = CASES[name]
    folder = shutil.copytree(models[of], tmp_path / "model")
    change(folder)
    with pytest.raises((ValueError, OSError)) as error:
        read(folder)
    said = str(error.value)
    assert str(folder) in said
    assert message in said
    assert "\n" not in said
