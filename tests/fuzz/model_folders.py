"""Model folders with faults: values, files and weights that nobody's converter writes."""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutations import mutated

from paceline.convert import load_decoder, open_model

SECONDS = 40
MEMORY = 1 << 30
"""Memory that reading a folder of some KiB may take, besides that of the libraries. Unit: bytes."""

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "2", "float99", "../../etc/passwd", "x" * 9999, [], [1, 2], [None], ["a"], {},
    {"rope_type": "yarn"}, {"factor": 0}, [[[]]], {"a": {"b": 1}},
)  # fmt: skip
_FIELDS = (
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id", "bos_token_id",
    "torch_dtype", "dtype", "quantization_config", "sliding_window", "layer_types", "text_config",
    "num_experts", "auto_map", "pad_token_id", "transformers_version", "_name_or_path",
)  # fmt: skip
_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "model.safetensors",
    "model.safetensors.index.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "tokenizer.model",
)  # fmt: skip
_CONTENTS: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}", b"\0" * 64,
    b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"a": ' + b"9" * 5000 + b"}",
    gzip.compress(b"{}"), gzip.compress(b"a" * (64 << 20)), b'{"model_type": "llama"', b"NaN",
    b'{"eos_token_id": NaN}', "日本".encode("utf-16"), b"\xed\xa0\x80", b'{"vocab": {}}',
)  # fmt: skip


class FolderFuzzer:
    """Draws faults from a seeded generator. Each alters a copy of a good folder."""

    def __init__(self, seed: int, good: Path) -> None:
        self.draws, self.good = random.Random(seed), good

    def folder(self, path: Path) -> str:
        """Write a folder with a fault, and describe the fault."""
        shutil.copytree(self.good, path)
        kinds: list[Callable[[Path], str]] = [
            self.field, self.field, self.content, self.kind, self.header, self.index,
            self.tokenizer, self.some_bytes,
        ]  # fmt: skip
        return self.draws.choice(kinds)(path)

    def field(self, path: Path) -> str:
        name = self.draws.choice(
            ("config.json", "config.json", "generation_config.json", "tokenizer_config.json")
        )
        fields = {
            "generation_config.json": ("eos_token_id", "bos_token_id", "max_length", "x"),
            "tokenizer_config.json": (
                "tokenizer_class", "added_tokens_decoder", "eos_token", "bos_token",
                "chat_template", "extra_special_tokens", "add_bos_token",
            ),
        }.get(name, _FIELDS)  # fmt: skip
        field, value = self.draws.choice(fields), self.draws.choice(_VALUES)
        change_json(path / name, {field: value})
        return f"{name}: {field} is {value!r:.60}"

    def content(self, path: Path) -> str:
        name, content = self.draws.choice(_FILES), self.draws.choice(_CONTENTS)
        (path / name).write_bytes(content)
        return f"{name} has the content {content[:20]!r}"

    def kind(self, path: Path) -> str:
        name = self.draws.choice(_FILES)
        kind = self.draws.choice(("missing", "folder", "dangling", "cycle", "fifo", "device"))
        replace_by(path / name, kind)
        return f"{name} is {kind}"

    def header(self, path: Path) -> str:
        file = path / "model.safetensors"
        raw = file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        tensor = self.draws.choice([name for name in header if name != "__metadata__"])
        entry = header[tensor]
        change = self.draws.choice(
            (
                {"data_offsets": [0, 1 << 62]}, {"data_offsets": [-1, 5]}, {"data_offsets": [9, 3]},
                {"shape": [1 << 40, 1 << 40]}, {"shape": [-1]}, {"shape": []},
                {"shape": [10**9, 0]},
                {"dtype": "I64"}, {"dtype": "F99"}, {"dtype": "F8_E4M3"},
                {"shape": entry["shape"] * 9},
                {"data_offsets": [0, 0], "shape": [0]}, {"dtype": None}, {"shape": None},
            )
        )  # fmt: skip
        header[tensor] = entry | change
        text = json.dumps(header).encode()
        size = self.draws.choice((len(text), len(text), len(text), 0, 1 << 63, len(text) + 99))
        file.write_bytes(struct.pack("<Q", size) + text + raw[8 + length :])
        return f"tensor {tensor} has {change}, header of {size}"

    def index(self, path: Path) -> str:
        value = self.draws.choice(
            (
                {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x"}},
                {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": "."}},
                {"weight_map": {"a": ""}}, {"weight_map": {"a": "a\0b"}}, [],
                {"weight_map": {"a": "model.safetensors.index.json"}},
                {"weight_map": {"a": "config.json"}},
            )
        )  # fmt: skip
        (path / "model.safetensors.index.json").write_text(json.dumps(value))
        return f"the index is {value}"

    def tokenizer(self, path: Path) -> str:
        file = path / "tokenizer.json"
        found = json.loads(file.read_text())
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        grow = {"type": "Replace", "pattern": {"String": " "}, "content": "  "}
        change = self.draws.choice(
            (
                {"normalizer": {"type": "Sequence", "normalizers": [grow] * 40}},
                {"normalizer": {**grow, "pattern": {"Regex": ""}, "content": "x" * 10**6}},
                {"pre_tokenizer": {**split, "pattern": {"Regex": "(a|a)*(a|a)*$b"}}},
                {"pre_tokenizer": {**split, "pattern": {"Regex": "("}}},
                {"decoder": {"type": "Sequence", "decoders": [{**grow, "content": "y" * 10**5}]}},
                {"model": None}, {"model": {"type": "BPE"}}, {"model": {"type": "New"}},
                {"model": {**found["model"], "vocab": {"a": -1}}},
                {"model": {**found["model"], "vocab": {"a": 2**40}}},
                {"model": {**found["model"], "merges": [["a"]]}},
                {"model": {**found["model"], "merges": ["q q"]}},
                {"added_tokens": [{"id": 5}]}, {"added_tokens": 3}, {"truncation": "x"},
                {"post_processor": {"type": "TemplateProcessing"}},
            )
        )  # fmt: skip
        file.write_text(json.dumps(found | change))
        return f"tokenizer.json has {change!r:.80}"

    def some_bytes(self, path: Path) -> str:
        name = self.draws.choice([file.name for file in sorted(path.iterdir())])
        (path / name).write_bytes(mutated(self.draws, (path / name).read_bytes()))
        return f"bytes of {name} are changed"


def change_json(file: Path, change: dict[str, Any]) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | change))


def replace_by(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    match kind:
        case "folder":
            file.mkdir()
        case "dangling":
            file.symlink_to("nowhere")
        case "cycle":
            file.symlink_to(file.name)
        case "fifo":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")


def read_all(folder: Path) -> str:
    """Read all of a model folder. Returns the error's message, "" without one."""
    try:
        source = open_model(folder)
        source.config()
        _ = source.tokenizer, source.chat_templates, source.special_tokens, source.architectures
        load_decoder(folder)
        source.fingerprint()
    except (ValueError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def outcome(folder: Path) -> str:
    """What :func:`read_all` says in a process of its own, within bounds of time and memory.

    Raises ``AssertionError``: it breaks them, or raises another error.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
        try:
            os.write(writer, read_all(folder).encode(errors="replace")[:60_000])
            os._exit(0)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error!s:.500}".encode(errors="replace"))
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"ended by signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0, said
    assert "\n" not in said, said
    assert not said or str(folder) in said, said
    return said


def folders(seed: int, good: Path, under: Path) -> Iterator[tuple[str, Path]]:
    """Folders with faults without end, each removed before the next."""
    fuzzer = FolderFuzzer(seed, good)
    while True:
        folder = under / "model"
        described = fuzzer.folder(folder)
        yield described, folder
        shutil.rmtree(folder)
