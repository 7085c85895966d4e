"""A method with weights that another package adds: it states all that the project asks of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import write_target

from paceline.cli import shipped
from paceline.cli.main import main
from paceline.convert import weights_fingerprint
from paceline.convert.weights import Checkpoint
from paceline.drafter.methods import method_class, method_names
from paceline.drafter.methods.base import Budget, GenerationInfo, LoadError, Resources, Update

from .bigram_method import TABLE, write_bigram
from .models import GREEDY, VOCAB, write_model


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that registers the method, by its entry point."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bigram(tmp_path / "bigram", VOCAB)


def test_it_is_loaded_and_drafts_the_likeliest_path(folder: Path) -> None:
    assert "bigram" in method_names()
    drafter = method_class("bigram").load(folder, {"widths": "1,1,1"}, Resources())
    table = Checkpoint(folder, torch.float32)[TABLE]
    sequence = drafter.start(GenerationInfo([5, 7], 2, VOCAB, GREEDY))
    for newest in (7, 9):
        expected, token = [], newest
        for _ in range(3):
            token = int(table[token].argmax())
            expected.append(token)
        assert list(sequence.draft(Budget(8, 8)).tokens) == expected
        sequence.extend(Update([3, 9]))
    with pytest.raises(LoadError, match="widths"):
        method_class("bigram").load(folder, {"widths": "wide"}, Resources())


def test_its_folder_is_inspected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafters", "inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "method": "bigram", "name": "bigram table", "layout": "paceline",
        "vocabulary": f"{VOCAB} tokens", "problems": [],
    }  # fmt: skip
    target, other = write_model(tmp_path / "target"), write_model(tmp_path / "other", seed=1)
    write_bigram(folder, VOCAB, target_fingerprint=weights_fingerprint(target))
    assert main(["drafters", "inspect", str(folder), "--target", str(target)]) == 0
    assert main(["drafters", "inspect", str(folder), "--target", str(other)]) == 1
    assert "give the target it was trained for" in capsys.readouterr().out


def test_a_folder_of_a_method_that_is_not_installed_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = json.loads((folder / "config.json").read_text())
    described["paceline"]["method"] = "trigram"
    (folder / "config.json").write_text(json.dumps(described))
    assert main(["drafters", "inspect", str(folder)]) == 1
    assert "unknown method 'trigram'" in capsys.readouterr().out


def test_it_is_served_beside_its_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "models_folder", lambda: None)
    target = write_model(tmp_path / "target")
    assert f"bigram=bigram:{folder}" in shipped.drafters_for(target)
    shutil.rmtree(folder)
    assert not any("bigram" in spec for spec in shipped.drafters_for(target))


def test_it_is_trained_by_its_own_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`paceline train` learns of it by its class alone."""
    data, target, out = tmp_path / "data", tmp_path / "target", tmp_path / "out"
    data.mkdir()
    texts = [f"def add_{n}(a, b):\n    return a + b\n" * 150 for n in range(16)]
    for number, text in enumerate(texts):
        (data / f"file{number}.py").write_text(text)
    tokenizer = write_target(target, iter(texts))
    given = ["--target", str(target), "--data", str(data)]
    places = ["--out", str(out), "--work", str(tmp_path / "work")]
    assert main(["train", "bigram", *given, *places, "--smoothing", "0.5"]) == 0
    assert main(["drafters", "inspect", str(out), "--target", str(target)]) == 0
    assert Checkpoint(out, torch.float32)[TABLE].exp().min() == pytest.approx(0.5)
    drafter = method_class("bigram").load(out, {"widths": "1,1,1,1"}, Resources())
    ids = tokenizer.encode("    return a")
    sequence = drafter.start(GenerationInfo(ids, len(ids), 320, GREEDY))
    assert tokenizer.decode(sequence.draft(Budget(4, 4)).tokens).startswith(" + b\n")
    capsys.readouterr()
    assert main(["train", "bigram", *given, *places]) == 1
    assert "holds a model already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "bigram", *given, *places, "--smoothing", "much"])
    assert "--smoothing: invalid float value" in capsys.readouterr().err
