"""Training runs of a LongSpec layer on a tiny target, from the command line to the drafter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.decoder import Decoder
from paceline.kernels import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.corpus import Corpus
from paceline.train.longspec import run as longspec_run
from paceline.train.longspec.preset import LongSpecPreset, Stage
from paceline.train.longspec.run import train_longspec
from paceline.train.loop import Run
from paceline.train.own_text import authored_texts

_STAGES = (
    Stage("short", 0.6, rows=4, length=48, rate=1.0, offset=True),
    Stage("long", 0.2, rows=1, length=192, rate=0.5),
    Stage("fine", 0.2, rows=4, length=48, rate=0.5, own=True),
)
SMALL = LongSpecPreset(
    _STAGES, minutes=60, steps=40, muon_rate=0.02, adamw_rate=3e-3, lags=3, window=32,
    files=4, own_texts=4,
)  # fmt: skip


def _run(folder: Path, steps: int, **options: object) -> Run:
    return Run(folder, minutes=60, steps=steps, log_steps=4, bf16=False, **options)  # type: ignore[arg-type]


def test_the_loss_falls_and_the_folder_says_what_was_done(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    train_longspec(target, corpus, SMALL, _run(work, 40), out)
    log = torch.load(work / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    said = json.loads((out / "config.json").read_text())
    assert said["paceline"]["training"]["steps"] == 40
    assert said["paceline"]["training"]["own_texts"] == 4
    assert [row["heldout"] for row in log if "heldout" in row][-1] >= 1
    card = (out / "README.md").read_text()
    assert "lags 1 to 5, 3 of them in each step" in card
    assert "| held-out files, prompts of (tokens) |" in card


def test_an_interrupted_run_goes_on_bit_for_bit(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longspec_run, "Heldout", _NoHeldout)
    train_longspec(target, corpus, SMALL, _run(tmp_path / "straight", 12), tmp_path / "a")
    work = tmp_path / "interrupted"
    monkeypatch.setattr(longspec_run.LaggedLoss, "__call__", _stopping(at_call=7))
    with pytest.raises(KeyboardInterrupt, match="stopped at step 7"):
        train_longspec(target, corpus, SMALL, _run(work, 12), tmp_path / "b")
    train_longspec(target, corpus, SMALL, _run(work, 12), tmp_path / "b")
    _assert_equal_weights(tmp_path / "a", tmp_path / "b", exact=True)


def test_parts_of_a_batch_add_up_to_it(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longspec_run, "Heldout", _NoHeldout)
    plain = replace(SMALL, muon_rate=None, lags=5, offset=False)
    train_longspec(target, corpus, plain, _run(tmp_path / "1", 4), tmp_path / "a")
    train_longspec(target, corpus, plain, _run(tmp_path / "2", 4, accumulate=2), tmp_path / "b")
    _assert_equal_weights(tmp_path / "a", tmp_path / "b", exact=False)


@pytest.mark.slow
def test_two_processes_train_as_one(target: Path, folder: Path, tmp_path: Path) -> None:
    """Real processes, started as `accelerate launch` starts them; gradients meet over gloo."""
    command = [
        "-m", "tests_longspec_small", "--target", str(target), "--data", str(folder),
        "--steps", "4", "--device", "cpu",
    ]  # fmt: skip
    program = tmp_path / "tests_longspec_small.py"
    program.write_text(_PROGRAM.format(preset=SMALL))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for processes in ("1", "2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes]
        launch += ["--standalone", *command, "--work", str(tmp_path / f"work{processes}")]
        launch += ["--out", str(tmp_path / processes)]
        done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    _assert_equal_weights(tmp_path / "1", tmp_path / "2", exact=False)


def test_authored_texts_are_what_the_target_says_alone(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Whatever else is written at the same time."""
    decoder = Decoder.load(target)
    documents = [list(range(1, 201))]
    texts = authored_texts(decoder, documents, 6, 0, tmp_path / "own.safetensors")
    for number, text in enumerate(texts):
        task = Task(text[:128], SamplingParams(temperature=number % 2, seed=number), 384)
        [(_, alone)] = write_texts(decoder, [task], stop=0)
        assert text[128:] == [token for token in alone if token]
    assert authored_texts(decoder, [], 6, 0, tmp_path / "own.safetensors") == texts


_PROGRAM = """
from paceline.train import cli
from paceline.train.longspec.preset import LongSpecPreset, Stage
from dataclasses import replace
import argparse
cli._HELDOUT_FILES = 2
cli.LONGSPEC_PRESETS["cpu"] = replace({preset}, muon_rate=None, lags=5, offset=False, own_texts=0,
    stages=(Stage("short", 1.0, rows=4, length=48, rate=1.0),))
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
raise SystemExit(cli.run(parser.parse_args(["longspec", *__import__("sys").argv[1:]])))
"""


class _NoHeldout:
    """Measures nothing: held-out accepted length is tested elsewhere and takes its time."""

    def __init__(self, *_: object) -> None: ...

    def mean(self, model: object) -> float:
        return 1.0

    def measure(self, model: object) -> dict[tuple[str, float], list[int]]:
        return {("1", 0.0): [0]}


def _stopping(at_call: int):  # type: ignore[no-untyped-def]
    import signal

    calls = 0
    plain = longspec_run.LaggedLoss.__call__

    def call(self, forward, places, done):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, forward, places, done)

    return call


def _assert_equal_weights(a: Path, b: Path, *, exact: bool) -> None:
    ours, theirs = (load_file(each / "model.safetensors") for each in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if exact:
            assert torch.equal(tensor, theirs[name]), name
        else:
            torch.testing.assert_close(tensor, theirs[name], rtol=2e-2, atol=2e-3)
