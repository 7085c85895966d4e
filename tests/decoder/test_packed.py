"""Packed models: the same bits as in memory, kept in the cache folder, made again if damaged."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import pytest
import torch
from decoder_cases import FAMILIES, logits
from gguf_files import write_gguf
from tiny_models import write_target

from paceline.bench.reference import rotated_rows
from paceline.convert import convert, open_model, prepare, sandbox, store
from paceline.convert.sandbox import Progress, run_in_child
from paceline.convert.weights import plain
from paceline.decoder import LocalCache, UnsupportedModelError, read_converted
from paceline.decoder.linear import Linear
from paceline.decoder.packed import PackedWeights, PackedWriter, new_memory
from paceline.decoder.remembered import cache_folder
from paceline.kernels import Executor, Heads, Pass, QueryBlock, Recorder, plan_trees
from paceline.kernels.rotated import RotatedMatrix


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tied embedding and a tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, ["a few words for a tokenizer"])
    return folder


@pytest.fixture(autouse=True)
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entries, which is empty."""
    kernels, home = cache_folder("kernels"), tmp_path / "cache" / "paceline"
    home.mkdir(parents=True)
    (home / "kernels").symlink_to(kernels)  # to compile them takes longer than all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent))
    store._sweep.cache_clear()
    return home / "packed"


def entry_of(packed: Path) -> Path:
    (entry,) = packed.iterdir()
    return entry


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_model_has_the_bits_of_one_packed_in_memory(
    models: dict[str, Path], name: str
) -> None:
    for weights in ("bfloat16", "int8"):
        expected = logits(models[name], weights)
        assert logits(prepare(models[name], weights).decoder()).equal(expected), weights


def test_a_packed_model_says_what_its_files_say(
    models: dict[str, Path], tmp_path: Path, target: Path
) -> None:
    for path in (target, write_gguf(tmp_path / "model.gguf", models["llama"])):
        for model in (prepare(path), prepare(path)):  # made, then read
            source, found = open_model(path), model.description
            assert found.config == source.config()
            assert (found.name, found.fingerprint) == (source.name, source.fingerprint())
            assert (model.tokenizer, found.tokenizer_digest) == (
                source.tokenizer, source.tokenizer_digest,
            )  # fmt: skip
            assert found.special_tokens == source.special_tokens
            assert found.chat_templates == source.chat_templates
            assert found.architectures == source.architectures
            assert found.source_bytes == source.weight_bytes


def test_a_second_start_reads_the_entry(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    reached: list[tuple[int, int]] = []
    expected = logits(prepare(target, progress=lambda *each: reached.append(each)).decoder())
    layers = prepare(target).description.config.layers
    assert reached == [(count, layers) for count in range(1, layers + 1)]
    monkeypatch.setattr(store, "_pack_in_child", None)
    assert logits(prepare(target).decoder()).equal(expected)


def cut(entry: Path, name: str) -> None:
    os.truncate(entry / name, (entry / name).stat().st_size - 100)


def flip(entry: Path, name: str) -> None:
    content = bytearray((entry / name).read_bytes())
    content[-100] ^= 1  # of weights.bin in the header, before digest and length
    (entry / name).write_bytes(content)


def remove(entry: Path, name: str) -> None:
    (entry / name).unlink()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((cut, "weights.bin"), (flip, "weights.bin"), (remove, "tokenizer.json")),
        *((flip, "tokenizer.json"), (cut, "model.json"), (remove, "model.json")),
    ],
)
def test_a_damaged_entry_is_made_again(
    packed: Path, name: str, damage: Callable[[Path, str], None], target: Path
) -> None:
    expected = logits(prepare(target).decoder())
    damage(entry_of(packed), name)
    made: list[int] = []
    assert logits(prepare(target, progress=lambda *_: made.append(0)).decoder()).equal(expected)
    assert made
    assert (entry_of(packed) / name).is_file()


def test_entries_of_changed_models_and_killed_processes_leave(
    models: dict[str, Path], packed: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(models["llama"], tmp_path / "model")
    first = logits(prepare(folder).decoder())
    old = entry_of(packed)
    shutil.copy(models["yarn"] / "config.json", folder / "config.json")
    (killed := packed / "x.partial").mkdir()
    (killed / "lock").touch()
    store._sweep.cache_clear()
    with pytest.raises(UnsupportedModelError):
        prepare(folder)  # the weights are of another family
    assert not list(packed.iterdir())
    shutil.copy(models["llama"] / "config.json", folder / "config.json")
    assert logits(prepare(folder).decoder()).equal(first)
    assert entry_of(packed).name != old.name, "the file has another time"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_cannot_be_written_costs_nothing(
    packed: Path, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    target: Path,
) -> None:  # fmt: skip
    expected = logits(target)
    pack = store._pack_in_child

    def refuse(path: Path, weights: str, lora: str, file: BinaryIO, say: Progress) -> object:
        if str(packed) in str(file.name):
            raise OSError(error, os.strerror(error))
        return pack(path, weights, lora, file, say)

    monkeypatch.setattr(store, "_pack_in_child", refuse)
    assert logits(prepare(target).decoder()).equal(expected)
    assert "make room" in caplog.text
    assert not list(packed.iterdir())
    shutil.rmtree(packed)
    packed.touch()  # no folder can be made there
    assert logits(prepare(target).decoder()).equal(expected)


def test_two_processes_make_one_entry(packed: Path, target: Path) -> None:
    script = "import sys; from paceline.convert import prepare; made = []\n"
    script += "prepare(sys.argv[1], progress=lambda *_: made.append(0)); print(len(made))"
    both = [
        subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    counts = sorted(int(each.communicate()[0]) for each in both)
    assert counts == [0, prepare(target).description.config.layers]
    assert entry_of(packed)


@pytest.mark.parametrize("share", [False, True])
def test_an_entry_is_removed_while_it_is_used(packed: Path, share: bool, target: Path) -> None:
    model, expected = prepare(target), logits(target)
    running = model.decoder(share=share)
    assert running.mapped_bytes or not share
    shutil.rmtree(entry_of(packed))
    assert not store.packed_models()
    assert logits(running).equal(expected)
    assert logits(model.decoder()).equal(expected), "its file is still open"


def test_entries_are_listed_with_the_one_used_last_first(target: Path) -> None:
    for weights in ("float32", "int8"):
        prepare(target, weights)
    for entry in store.packed_models():
        os.utime(entry.folder / "model.json", (1e9, 1e9))
    prepare(target, "float32")
    first, second = store.packed_models()
    assert (first.description.requested, second.description.requested) == ("float32", "int8")
    assert first.description.source == str(target.resolve())
    assert first.size == sum(file.stat().st_size for file in first.folder.iterdir())
    assert first.used > second.used


def test_a_converted_folder_is_a_model(packed: Path, tmp_path: Path, target: Path) -> None:
    convert(target, tmp_path / "made", "int8")
    assert not packed.exists()
    expected = logits(target, "int8")
    for weights in ("auto", "int8"):
        assert logits(read_converted(tmp_path / "made", weights).decoder()).equal(expected)
    with pytest.raises(UnsupportedModelError, match="packed as 'int8', and is asked for as 'int4'"):
        read_converted(tmp_path / "made", "int4")
    with pytest.raises(FileExistsError):
        convert(target, tmp_path / "made")
    cut(tmp_path / "made", "weights.bin")
    with pytest.raises(UnsupportedModelError, match="cut off; make it again with `paceline conv"):
        read_converted(tmp_path / "made")


def test_other_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = new_memory()
    with pytest.raises(ValueError, match="cut off"):
        PackedWeights(file)
    PackedWriter(file).finish()
    PackedWeights(file)
    monkeypatch.setattr("paceline.decoder.packed.LAYOUT", "another")
    with pytest.raises(ValueError, match="same version"):
        PackedWeights(file)
    os.close(file)


def fail(how: str, _: Progress) -> object:
    while how == "for ever":
        pass
    if how == "by a signal":
        os.kill(os.getpid(), 9)
    return bytearray(2 << 30) if how == "of memory" else 1 // 0


@pytest.mark.parametrize(
    ("how", "seconds", "error", "message"),
    [
        ("for ever", 1, UnsupportedModelError, "it takes more than 1 s"),
        ("of memory", 60, UnsupportedModelError, "takes more than 1 GB of memory"),
        ("by a signal", 60, UnsupportedModelError, "it ended by signal 9"),
        ("by an error", 60, ZeroDivisionError, "by zero"),
    ],
)
def test_a_child_that_takes_too_much_is_ended(
    how: str, seconds: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_in_child(partial(fail, how), "it", seconds=seconds, memory=1 << 30)


_held = Lock()


def say_what_is_there(say: Progress) -> str | None:
    logging.getLogger("paceline").warning("said by %s", "a child")
    say(1, 2)
    with _held:  # a fork of the caller would wait for it for ever
        return os.environ.get("PACELINE_SAID")


def test_a_child_has_no_locks_of_its_caller_but_its_environment_and_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "START_METHOD", None)
    monkeypatch.setenv("PACELINE_SAID", "yes")
    reached: list[tuple[int, int]] = []
    with _held, ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        said = run_in_child(
            say_what_is_there, "it", seconds=60, memory=1 << 30,
            progress=lambda *each: reached.append(each),
        )  # fmt: skip
    assert (said, reached) == ("yes", [(1, 2)])
    assert caplog.messages == ["said by a child"]


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_tied_embedding_is_in_memory_once(weights: str, target: Path) -> None:
    """Rows for the lookup come from the packed head, in calls and in programs."""
    model = prepare(target, weights)
    assert model.file is not None
    parts, decoder = PackedWeights(model.file.fileno()).outer(), model.decoder()
    assert "embedding" not in parts
    stored = open_model(target).weights(decoder.config)["model.embed_tokens.weight"]
    tokens = torch.tensor([0, 9, decoder.config.vocab_size - 1])
    expected = plain(stored, torch.float32)
    if weights == "int8":
        expected = rotated_rows(RotatedMatrix.of(expected), tokens)
        assert (expected - plain(stored, torch.float32)[tokens]).abs().max() < 0.01
    else:
        expected = expected[tokens]
    assert decoder.embed(tokens).equal(expected)
    config = decoder.config
    program = Recorder(Heads(config.q_heads, config.kv_heads, config.head_dim), torch.float32)
    x = program.embed(Linear(parts["head"]).weight)
    program.multiply(program.select(x), Linear(torch.eye(config.hidden)))
    plan, cache = plan_trees([QueryBlock(0, 0, None, 3)]), LocalCache(decoder.config)
    table = torch.zeros(4, config.head_dim)
    found = Executor(program.finish()).run(Pass(tokens, plan, [cache], table)).logits
    torch.testing.assert_close(found, expected)
