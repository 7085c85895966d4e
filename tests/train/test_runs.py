"""Runs that train each kind of drafter: their folders, their logs, how they go on, and whose."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_target
from torch import Tensor

from paceline.convert.weights import Checkpoint
from paceline.drafter import Resources
from paceline.drafter.methods import method_class
from paceline.train import cli
from paceline.train import drafters as training
from paceline.train.corpus import Corpus, load_corpus
from paceline.train.dspark import DSparkTrainer
from paceline.train.eagle3 import Eagle3Trainer
from paceline.train.lm import LmTrainer
from paceline.train.longspec import LongSpecTrainer
from paceline.train.loop import Clock
from paceline.train.mtp import MtpTrainer
from paceline.train.presets import Stage
from paceline.train.recipes.base import Recipe
from paceline.train.recipes.dspark import DSparkPreset
from paceline.train.recipes.eagle3 import Eagle3Preset
from paceline.train.recipes.lm import BudgetPreset
from paceline.train.recipes.longspec import LONGSPEC_PRESETS, LongSpecPreset
from paceline.train.recipes.mtp import MtpPreset
from paceline.train.run import Run, begin_run, cleared

MakeRun = Callable[..., Run]
Train = Callable[[Run, Path], object]

LONGSPEC = LongSpecPreset(
    stages=(
        Stage("short", 0.6, rows=4, length=48, rate=1.0, offset=True),
        Stage("long", 0.2, rows=1, length=192, rate=0.5),
        Stage("fine", 0.2, rows=4, length=48, rate=0.5, focus=True),
    ),
    minutes=60, steps=40, muon_rate=0.02, adamw_rate=3e-3, lags=3, window=32,
    files=4, own_texts=4,
)  # fmt: skip
DSPARK = DSparkPreset(
    taps=(0, -1), layers=1, block=3, markov_rank=8, minutes=60, steps=40, rows=2, length=48,
    anchors=12, muon_rate=0.02, adamw_rate=1e-2, window=16, own_texts=4, own_from=0.5, files=4,
)  # fmt: skip
METHODS = ("dspark", "eagle3", "lm", "longspec", "mtp")
EAGLE3 = Eagle3Preset(
    taps=(0, -1), levels=3, minutes=60, steps=40, rows=4, length=48, muon_rate=0.02,
    adamw_rate=1e-2, window=16, own_texts=4, own_from=0.5, files=4,
)  # fmt: skip
MTP = MtpPreset(
    levels=3, minutes=60, steps=40, rows=4, length=48, muon_rate=0.02, adamw_rate=1e-2, window=16,
    own_texts=4, own_from=0.5, files=4,
)  # fmt: skip
LM = BudgetPreset(
    minutes=60, steps=40, adamw_rate=1e-2, texts=3, prefix=90, continuation=16, budgets=(16, 24),
    warm_up=2,
)  # fmt: skip


@pytest.fixture
def trainers(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Train]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_target(tmp_path / "small", (document.text for document in corpus.train), seed=1)
    small = tmp_path / "small"
    updates = LmTrainer(target, replace(LM, rank=4))
    return {
        "lm": lambda run, out: LmTrainer(target, LM).train(corpus, run, out, small),
        "lm, rank 4": lambda run, out: updates.train(corpus, run, out, small),
        "longspec": lambda run, out: LongSpecTrainer(target, LONGSPEC).train(corpus, run, out),
        "dspark": lambda run, out: DSparkTrainer(target, DSPARK).train(corpus, run, out),
        "eagle3": lambda run, out: Eagle3Trainer(target, EAGLE3).train(corpus, run, out),
        "mtp": lambda run, out: MtpTrainer(target, MTP).train(corpus, run, out),
    }


@pytest.mark.parametrize("target", ["file"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_and_the_folder_is_a_drafter(
    method: str, trainers: dict[str, Train], target: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    out, run = tmp_path / "out", make_run("work", 24, log_steps=1)
    trainers[method](run, out)
    log = torch.load(run.work / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < 0.95 * losses[0]
    assert [row for row in log if "heldout" in row][-1]["heldout"] >= 1
    section = json.loads((out / "config.json").read_text())["paceline"]
    assert section["training"]["steps"] == 24
    temperatures = section.get("shape", {}).get("confidence_temperatures", [])
    assert len(temperatures) == (DSPARK.block if method == "dspark" else 0)
    assert all(each > 0 for each in temperatures)
    options = {} if method == "lm" else {"target": str(target)}
    method_class(method).load(out, options, Resources()).close()
    card = (out / "README.md").read_text()
    assert f"`{method}`" in card
    assert f"Mean losses of 1 steps each: {losses[0]:.3f} at first" in card
    expected = {
        "longspec": "lags 1 to 5, 3 of them in each step",
        "dspark": "| texts | rounds | accepted length | position 1 |",
        "eagle3": "at 3 depths, each weighted",
        "lm": "behind what a budget of\n16, 24 positions keeps of a piece. All weights",
        "mtp": "at 3 depths, each weighted",
    }
    assert expected[method] in card


@pytest.mark.parametrize("kind", ["dspark", "mtp"])
def test_a_run_whose_time_is_over_prepares_and_steps_as_little_as_it_can(
    kind: str, trainers: dict[str, Train], make_run: MakeRun, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, run = tmp_path / "out", make_run("work", 1000, minutes=1e-9)
    trainers[kind](run, out)
    assert torch.load(run.work / "run.pt", weights_only=True)["progress"]["step"] == 1
    assert (out / "config.json").is_file()
    said = capsys.readouterr().out
    assert re.search(r"own texts: \d of \d, where its share of --minutes is over", said)
    assert "reading held-out texts: 0 of " in said


@pytest.mark.parametrize(
    "kind", ["longspec", "dspark", pytest.param("lm, rank 4", marks=pytest.mark.slow)]
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    kind: str, trainers: dict[str, Train], make_run: MakeRun, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    trainers[kind](make_run("straight", 12), tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", _interrupted(at_step=7))
        with pytest.raises(KeyboardInterrupt, match="stopped at step 7, checkpoint written"):
            trainers[kind](make_run("parts", 12), tmp_path / "b")
    trainers[kind](make_run("parts", 12), tmp_path / "b")
    _assert_equal_weights(tmp_path / "a", tmp_path / "b", exact=True)
    log = torch.load(tmp_path / "parts" / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert 0 < losses[-1] < losses[0]


def test_what_is_measured_between_steps_changes_none(
    trainers: dict[str, Train], make_run: MakeRun, tmp_path: Path
) -> None:
    losses = []
    for name, seconds in (("often", 0.0), ("once", 1e6)):
        run = make_run(name, 6, every=seconds, measure=seconds, log_steps=1)
        trainers["dspark"](run, tmp_path / f"out of {name}")
        log = torch.load(run.work / "run.pt", weights_only=True)["progress"]["log"]
        losses.append([row["loss"] for row in log if "loss" in row])
    assert losses[0] == losses[1]


def test_parts_of_a_batch_add_up_to_it(
    target: Path, corpus: Corpus, make_run: MakeRun, tmp_path: Path
) -> None:
    plain = replace(LONGSPEC, muon_rate=None, lags=5, offset=False)
    LongSpecTrainer(target, plain).train(corpus, make_run("1", 4), tmp_path / "a")
    LongSpecTrainer(target, plain).train(corpus, make_run("2", 4, accumulate=2), tmp_path / "b")
    _assert_equal_weights(tmp_path / "a", tmp_path / "b", exact=False)


def test_the_weights_of_the_best_checkpoint_are_written(
    target: Path, corpus: Corpus, make_run: MakeRun, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lengths = iter([1.1, 1.5, 1.4, 1.2, 1.2])
    monkeypatch.setattr(training.Heldout, "log", lambda self: {"heldout": next(lengths)})
    run = make_run("work", 4, every=0.0, measure=0.0)
    out = tmp_path / "out"
    DSparkTrainer(target, DSPARK).train(corpus, run, out)
    assert json.loads((out / "config.json").read_text())["paceline"]["training"][
        training.ACCEPTED
    ] == pytest.approx(1.5)
    best, last = (torch.load(run.work / name, weights_only=True) for name in ("best.pt", "run.pt"))
    name = "norm.weight"  # not in 8-bit blocks
    written = Checkpoint(out, torch.float32)[name]
    assert torch.equal(written, best["model"][name].bfloat16().float())
    assert not torch.equal(best["model"][name], last["model"]["model." + name])


@pytest.fixture
def further(
    target: Path, drafters: dict[str, Path], tmp_path: Path
) -> Callable[[str], tuple[Recipe[Any], argparse.Namespace]]:
    """The recipe and the arguments of `METHOD OPTIONS`, begun with the drafter of that method."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)

    def parse(line: str) -> tuple[Recipe[Any], argparse.Namespace]:
        start = drafters[line.split()[0]]
        common = ["--target", str(target), "--from", str(start), "--preset", "smollm2"]
        args = parser.parse_args([*line.split(), *common, "--out", str(tmp_path / "out")])
        return args.recipe, args

    return parse


# Presets that have another shape than the drafters: all of the fields that these fix.
_OTHERS = {
    "dspark": replace(
        DSPARK, conversations=40, draft_vocab_size=99, taps=(1,), layers=3, block=7, markov_rank=2,
        window=5, confidence=False, state_input=True, mask_token=9,
    ),
    "longspec": replace(
        LONGSPEC, conversations=40, draft_vocab_size=99, window=5, intermediate=7, levels=7
    ),
    "eagle3": replace(
        EAGLE3, conversations=40, draft_vocab_size=99, taps=(1,), window=5, levels=7, fc_norm=True,
        norm_output=True,
    ),
    "mtp": replace(MTP, conversations=40, draft_vocab_size=99, window=5, levels=7),
}  # fmt: skip


@pytest.mark.parametrize("method", _OTHERS)
def test_a_drafter_that_is_trained_further_keeps_its_shape(
    method: str, further: Callable[[str], Any], drafters: dict[str, Path], target: Path
) -> None:
    recipe, args = further(method)
    trainer = recipe.load_trainer(target, recipe.vary(_OTHERS[method], args))
    made, begun = trainer.new_drafter(end=1), trainer.read(drafters[method], "cpu")
    assert (made.config, made.levels) == (begun.config, begun.levels)
    made.model.load_state_dict(begun.model.state_dict())


def test_an_option_that_contradicts_the_drafter_to_train_further_is_refused(
    further: Callable[[str], Any], drafters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a text is written or read."""
    vocabulary = "draft_vocab_size 99", "draft_vocab_size 0"
    for line, wanted, found in (
        *((f"{method} --vocabulary 99", *vocabulary) for method in _OTHERS),
        ("dspark --layers 2", "layers 2", "layers 1"),
        ("dspark --no-heads", "markov_rank 0", "markov_rank 8"),
        ("eagle3 --norms", "fc_norm True", "fc_norm False"),
    ):
        _, args = further(line)
        assert cli.run(args) == 1
        method, option = line.split()[:2]
        error = capsys.readouterr().err
        assert f"{option} asks for {wanted}, but {drafters[method]} has {found}, " in error
        assert not args.out.exists()


@pytest.mark.slow
def test_two_processes_train_as_one(target: Path, folder: Path, tmp_path: Path) -> None:
    """Processes started as `accelerate launch` starts them; gradients are reduced over gloo."""
    command = [
        "-m", "tests_longspec_small", "--target", str(target), "--data", str(folder),
        "--steps", "4", "--device", "cpu",
    ]  # fmt: skip
    program = tmp_path / "tests_longspec_small.py"
    program.write_text(_PROGRAM.format(preset=LONGSPEC))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for processes in ("1", "2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes]
        launch += ["--standalone", *command, "--work", str(tmp_path / f"work{processes}")]
        launch += ["--out", str(tmp_path / processes)]
        done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    _assert_equal_weights(tmp_path / "1", tmp_path / "2", exact=False)


def test_a_drafter_of_another_target_is_refused(target: Path, drafters: dict[str, Path]) -> None:
    path = drafters["longspec"] / "config.json"
    config = json.loads(path.read_text())
    config["paceline"]["target_fingerprint"] = "0" * 64
    config["paceline"].pop("target_origin", None)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="made for a target"):
        training.drafter_method(drafters["longspec"], target)


_PROGRAM = """
from paceline.train import cli
from paceline.train.presets import Stage
from paceline.train.recipes.longspec import LONGSPEC_PRESETS, LongSpecPreset
from dataclasses import replace
import argparse
cli._HELDOUT_FILES = 2
LONGSPEC_PRESETS["cpu"] = replace({preset}, muon_rate=None, lags=5, offset=False, own_texts=0,
    stages=(Stage("short", 1.0, rows=4, length=48, rate=1.0),))
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
raise SystemExit(cli.run(parser.parse_args(["longspec", *__import__("sys").argv[1:]])))
"""


def _interrupted(at_step: int) -> Callable[..., Any]:
    """The training loop, with a SIGTERM in one of its steps."""
    plain = training.train

    def train(module: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        calls = 0

        def counted(*given: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == at_step:
                os.kill(os.getpid(), signal.SIGTERM)
            result: Tensor = loss(*given)
            return result

        return plain(module, counted, *args, **kwargs)

    return train


def _assert_equal_weights(a: Path, b: Path, *, exact: bool) -> None:
    ours, theirs = (dict(Checkpoint(each, torch.float32)) for each in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if exact:
            assert torch.equal(tensor, theirs[name]), name
        else:
            torch.testing.assert_close(tensor, theirs[name], rtol=2e-2, atol=2e-3)


def test_a_pause_within_a_step_is_not_counted() -> None:
    clock = Clock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.elapsed == pytest.approx(11)


PRESET = LONGSPEC_PRESETS["cpu"]


@pytest.fixture
def begun(target: Path, corpus: Corpus, make_run: MakeRun, tmp_path: Path) -> Run:
    """A run of a drafter for `target` that has something in its folder."""
    run = make_run("work", steps=2)
    begin_run(run, tmp_path / "out", "lm", PRESET, corpus, target=target)
    (run.work / "own.safetensors").touch()
    return run


def test_the_same_run_goes_on_wherever_it_computes(
    begun: Run, target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    again = replace(begun, accumulate=2, every=1.0)
    shutil.copytree(target, tmp_path / "moved")
    before = (begun.work / "run.json").read_text()
    begin_run(again, tmp_path / "elsewhere", "lm", PRESET, corpus, target=tmp_path / "moved")
    assert (begun.work / "run.json").read_text() == before
    assert (begun.work / "own.safetensors").exists()


def test_another_run_is_refused_and_both_are_named(
    begun: Run, target: Path, corpus: Corpus, folder: Path, tmp_path: Path
) -> None:
    def refused(method: str = "lm", *, run: Run = begun, settings: Any = PRESET,
                text: Corpus = corpus, of: Path = target, **more: Path) -> str:  # fmt: skip
        with pytest.raises(ValueError, match="holds another run") as caught:
            begin_run(run, tmp_path / "out", method, settings, text, target=of, **more)
        lines = str(caught.value).splitlines()
        assert "give this run another --work, or remove" in lines[-1]
        (differing,) = lines[1:-1]
        return differing.strip()

    assert refused("dspark") == "method: found lm, this run has dspark"
    wider = replace(PRESET, window=99)
    assert refused(settings=wider) == f"preset.window: found {PRESET.window}, this run has 99"
    assert refused(run=replace(begun, steps=9)) == "steps: found 2, this run has 9"
    assert refused(run=replace(begun, minutes=9)).startswith("minutes: found 60")
    (folder / "part0" / "file0.py").write_text("x = 1\n" * 1000)
    changed = load_corpus(str(folder), 6, 2)
    assert refused(text=changed).startswith("data: found folder corpus, 8 files, SHA-256 ")
    other = tmp_path / "other"
    write_target(other, (document.text for document in corpus.train), seed=1)
    assert refused(of=other).startswith("target: found ")
    assert refused(start=other).startswith("start: found None")


def test_a_model_is_replaced_only_with_force(
    target: Path, corpus: Corpus, make_run: MakeRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = make_run("work", steps=1)
    shutil.copytree(target, out)
    (out / "notes.json").touch()
    (out / "kept").mkdir()
    with pytest.raises(FileExistsError, match="--force to replace it"):
        begin_run(run, out, "lm", PRESET, corpus, target=target)
    assert not run.work.exists()
    begin_run(replace(run, force=True), out, "lm", PRESET, corpus, target=target)
    cleared(out)
    assert not (out / "notes.json").exists(), "of the model that was there"
    assert (out / "kept").is_dir()


def test_what_is_no_model_is_never_replaced(
    target: Path, corpus: Corpus, make_run: MakeRun, tmp_path: Path
) -> None:
    run = replace(make_run("work", steps=1), force=True)
    with pytest.raises(FileExistsError, match="holds no model"):
        begin_run(run, tmp_path, "lm", PRESET, corpus)
    with pytest.raises(ValueError, match="a model that this run reads"):
        begin_run(run, target, "lm", PRESET, corpus, target=target)
    begin_run(run, cleared(tmp_path / "new"), "lm", PRESET, corpus)
