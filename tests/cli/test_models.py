"""`paceline convert` and `paceline models`."""

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.convert import prepare
from paceline.decoder import read_converted
from paceline.decoder.remembered import cache_folder

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"


def test_packed_models_are_made_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home := tmp_path / "paceline").mkdir()
    (home / "kernels").symlink_to(cache_folder("kernels"))  # to compile them takes long
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["convert", str(TARGET), str(tmp_path / "made"), "--weights", "int8"]) == 0
    assert read_converted(tmp_path / "made").description.config.weights == "int8"
    assert main(["convert", str(TARGET), str(tmp_path / "made")]) == 1
    prepare(TARGET)
    (entry,) = (home / "packed").iterdir()
    capsys.readouterr()
    assert main(["models"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert entry.name in line
    assert str(TARGET.resolve()) in line
    assert main(["models", "--remove", entry.name]) == 0
    assert not entry.exists()
    assert main(["models", "--remove", entry.name]) == 2
    assert "`paceline models` lists them" in capsys.readouterr().err
