"""Training further on recorded texts: which are read, what is learnt, runs of all drafters."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.decoder import weights_fingerprint
from paceline.drafter import Resources
from paceline.drafter.methods import method_class
from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel, save_dspark
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)
from paceline.drafter.recordings import Recording
from paceline.train.checkpoint import save_model
from paceline.train.corpus import Corpus
from paceline.train.loop import Run
from paceline.train.model import build_model
from paceline.train.online import heldout
from paceline.train.online.preset import OnlinePreset
from paceline.train.online.run import first_tokens, train_online
from paceline.train.online.texts import recorded_texts
from paceline.train.preset import Preset
from paceline.train.tokenizer import load_tokenizer

METHODS = ("dspark", "longspec", "lm")
SMALL = OnlinePreset(
    minutes=60, steps=20, length=48, rows=dict.fromkeys(METHODS, 2),
    muon_rate=dict.fromkeys(METHODS, 0.02), adamw_rate=dict.fromkeys(METHODS, 6e-3),
    old_texts=2, warm_up=2,
)  # fmt: skip


def write(file: Path, texts: list[Recording]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(text.to_json() + "\n" for text in texts))
    return file.parent


@pytest.fixture
def recordings(target: Path, tmp_path: Path) -> Path:
    """Texts of one kind, that are easily learnt."""
    texts = [
        Recording((40, 41, 42, 43, 40 + n), tuple([50, 60, 70, 80 + n % 4] * 16), seed=n)
        for n in range(24)
    ]
    return write(tmp_path / "texts" / "texts-1.jsonl", texts)


@pytest.fixture
def drafters(target: Path, preset: Preset, tmp_path: Path) -> dict[str, Path]:
    """A folder of each method, of random weights."""
    torch.manual_seed(1)
    folders = {method: tmp_path / method for method in METHODS}
    ref = TargetRef.of(target)
    layer = LongSpecConfig.for_target(target, window=32)
    save_longspec(folders["longspec"], layer, LongSpecModel(layer).state_dict(), ref, levels=3)
    block = DSparkConfig.for_target(
        target, taps=(0, -1), block=3, mask_token=0, layers=1, window=16, markov_rank=8
    )
    save_dspark(folders["dspark"], block, DSparkModel(block).state_dict(), ref)
    tokenizer = load_tokenizer(target)
    small = replace(preset, context=512, width=32, layers=1, ff=48)
    save_model(folders["lm"], build_model(small, tokenizer.eos_token_id, seed=1), tokenizer)
    return folders


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_each_drafter(
    method: str, drafters: dict[str, Path], target: Path, recordings: Path, corpus: Corpus,
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(heldout, "_TEXTS", 2)
    monkeypatch.setattr(heldout, "_WRITTEN", 16)
    run, out = make_run("work", 20), tmp_path / "out"
    start = drafters[method]
    train_online(target, start, recordings, corpus, SMALL, run, out)
    log = torch.load(run.work / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]
    before, after = (load_file(folder / "model.safetensors") for folder in (start, out))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert {t.dtype for t in before.values()} == {t.dtype for t in after.values()}
    notes = json.loads((out / "config.json").read_text())["paceline"]["training"]
    assert (notes["from"], notes["steps"]) == (method, 20)
    assert abs(notes["old_tokens"] - notes["recorded_tokens"]) <= 1
    options = {} if method == "lm" else {"target": str(target)}
    method_class(method).load(out, options, Resources()).close()
    assert f"`{method}`" in (out / "README.md").read_text()
    with pytest.raises(ValueError, match="another folder"):
        train_online(target, start, recordings, corpus, SMALL, run, start)


def test_what_is_read(target: Path, tmp_path: Path) -> None:
    mine = weights_fingerprint(target)
    whole = [Recording((1, 2, n), tuple(range(9)), target=mine) for n in range(60)]
    broken_off = Recording((1, 2, 7), (0, 1, 2), target=mine)
    once_more = Recording((1, 2, 8), (0, 1, 9), temperature=1, target=mine)
    foreign = Recording((3, 3, 3), (4,), target="f" * 64)
    folder = write(tmp_path / "texts" / "a.jsonl", [broken_off, foreign, *whole, once_more])
    work = tmp_path / "work"
    texts = recorded_texts(folder, target, work)
    every = [*texts.trained, *texts.heldout]
    assert len(every) == 61
    assert set(every) == {*whole, once_more}
    assert not {t.prompt for t in texts.trained} & {t.prompt for t in texts.heldout}
    assert {stat.S_IMODE(file.stat().st_mode) for file in work.iterdir()} == {0o600}
    # A run that goes on reads what it began with; another one holds the same texts out.
    more = [Recording((5, n), (1,), target=mine) for n in range(20)]
    write(folder / "b.jsonl", more)
    assert recorded_texts(folder, target, work) == texts
    later = recorded_texts(folder, target, tmp_path / "later")
    assert set(texts.heldout) == set(later.heldout) - set(more)


def test_too_little_is_told(target: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "texts" / "a.jsonl", [Recording((1,), (2,), target="f" * 64)])
    with pytest.raises(ValueError, match="0 texts by this target"):
        recorded_texts(folder, target, tmp_path / "work")
    with pytest.raises(ValueError, match="nowhere"):
        recorded_texts(tmp_path / "nowhere", target, tmp_path / "work")


def test_so_many_tokens_are_taken() -> None:
    assert first_tokens([[1, 2, 3], [4, 5], [6]], 4) == [[1, 2, 3], [4]]
    assert first_tokens([[1, 2]], 0) == []
    assert first_tokens([[1, 2]], 9) == [[1, 2]]
