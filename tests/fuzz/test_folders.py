"""Model folders with random faults: each is read, or refused in one line that names the folder.

PACELINE_FUZZ_SECONDS is the duration; without it the test is skipped. PACELINE_FUZZ_SEED is the
seed.
"""

import json
import os
import random
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from mutations import mutated
from tiny_models import write_model, write_tokenizer

from paceline.convert import load_decoder, open_model

SECONDS = float(os.environ.get("PACELINE_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
MAX_SECONDS = 40  # of reading one folder
MEMORY = 1 << 30  # bytes that reading a folder of some KiB may take, besides the libraries

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**9, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "2",
    "float99", "../../etc/passwd", "x" * 9999, [], [1, 2], [None], ["a"], {}, [[[]]],
    {"rope_type": "yarn"}, {"factor": 0}, {"a": {"b": 1}},
)  # fmt: skip
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "model.safetensors", "model.safetensors.index.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
CONTENTS: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe{}", b"{}", b"\0" * 64, b"[" * 100_000,
    b'{"a":' * 50_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"eos_token_id": NaN}', b"\xed\xa0\x80",
    b'{"vocab": {}}', b'{"weight_map": {"a": "../x"}}', b'{"weight_map": {"a": "a\\u0000b"}}',
)  # fmt: skip


def damage(draws: random.Random, folder: Path) -> str:
    """Alter a good folder; returns what was done."""
    there = sorted(file for file in folder.iterdir())
    match draws.choice(("field", "field", "content", "kind", "bytes", "bytes")):
        case "field":
            file = draws.choice([each for each in there if each.suffix == ".json"])
            fields = json.loads(file.read_text())
            name, value = draws.choice([*fields, "quantization_config"]), draws.choice(VALUES)
            file.write_text(json.dumps({**fields, name: value}))
            return f"{file.name}: {name} is {value!r:.60}"
        case "content":
            name, content = draws.choice(FILES), draws.choice(CONTENTS)
            (folder / name).write_bytes(content)
            return f"{name} has the content {content[:20]!r}"
        case "kind":
            file = folder / draws.choice(FILES)
            file.unlink(missing_ok=True)
            kind = draws.choice(("missing", "folder", "nowhere", file.name, "/dev/zero", "fifo"))
            if kind == "folder":
                file.mkdir()
            elif kind == "fifo":
                os.mkfifo(file)
            elif kind != "missing":
                file.symlink_to(kind)
            return f"{file.name} is {kind}"
        case _:
            file = draws.choice(there)
            file.write_bytes(mutated(draws, file.read_bytes()))
            return f"bytes of {file.name} are changed"


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

    Raises ``AssertionError`` if it breaks them, or raises another error.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(MAX_SECONDS)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # processes of its own have their limits
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
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


@pytest.mark.skipif(not SECONDS, reason="PACELINE_FUZZ_SECONDS is not set")
def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # a fork has no other threads
    write_model("llama", good := tmp_path / "good")
    write_tokenizer(good)
    assert read_all(good) == ""  # which imports what the child processes need
    end, counts, draws = monotonic() + SECONDS, Counter[str](), random.Random(SEED)
    failed: list[str] = []
    while monotonic() < end:
        folder = shutil.copytree(good, tmp_path / "model")
        done = damage(draws, folder)
        try:
            counts["refused" if outcome(folder) else "read"] += 1
        except AssertionError as error:
            failed.append(f"{done}: {error}")
        shutil.rmtree(folder)
    print(f"{sum(counts.values())} folders: {dict(counts)}; {len(failed)} failed")
    assert not failed, "\n".join(failed)
