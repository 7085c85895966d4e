"""A work folder belongs to one run, and no model is overwritten without --force."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_target

from paceline.train.corpus import Corpus, load_corpus
from paceline.train.recipes.longspec import LONGSPEC_PRESETS
from paceline.train.run import Run, begin_run, cleared

MakeRun = Callable[..., Run]
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
