"""The first commands of README, Getting started and Your own model, for each kind of model."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from calls import eventually
from gguf_files import write_gguf
from tiny_models import write_model, write_tokenizer

from paceline.client import user_cache_dir
from paceline.harness import with_port
from paceline.harness.models import MODELS
from paceline.tokens import note_services

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/getting-started.md", "docs/own-model.md")


def commands(page: str, model: str) -> list[list[str]]:
    """What a page starts first, and the line that waits for it, with another model."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^paceline ((?:serve|health) .*?)(?: +#.*)?$", text, re.MULTILINE)
    start = next(line for line in found if line.endswith("&"))
    wait = next(line for line in found if line.startswith("health"))
    return [shlex.split(start.removesuffix("&").replace(_model(start), model)), shlex.split(wait)]


def _model(line: str) -> str:
    return line.split()[1]


def paceline(*words: str, **settings: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    return subprocess.Popen(command, text=True, **settings)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ways to name a tiny target: a folder, a GGUF file, a name that was fetched."""
    target, cache = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("cache")
    write_model("small", target)
    write_tokenizer(target)
    named = cache / "paceline/models" / MODELS["smollm2"].file
    named.parent.mkdir(parents=True)
    for folder in user_cache_dir().iterdir():  # compiled kernels
        if folder.name != "models":
            (cache / "paceline" / folder.name).symlink_to(folder)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "bos_token_id": 0, "eos_token_id": 1})
    )
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    tokens["ab"] = tokens.pop("<spare256>")  # a GGUF file has merges
    tokenizer["model"]["merges"] = [["a", "b"]]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_gguf(named, target)
    return {"folder": str(target), "file": str(named), "name": "smollm2"}


@pytest.fixture
def environment(models: dict[str, str], short_folder: Path) -> Mapping[str, str]:
    """Where commands find each other and the model, apart from everything else."""
    short_folder.chmod(0o700)
    kept = {
        "XDG_CACHE_HOME": str(Path(models["file"]).parents[2]),
        "XDG_RUNTIME_DIR": str(short_folder),
        "PACELINE_VERIFIER_ADDRESS": with_port("127.0.0.1:0"),
        "PACELINE_DRAFTER_ADDRESS": with_port("127.0.0.1:0"),
    }
    return {**os.environ, **kept}


def test_the_pages_say_the_same() -> None:
    lines = [commands(page, "MODEL") for page in PAGES]
    assert lines[0] == lines[1] == [["serve", "MODEL"], lines[2][1]]


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip(PAGES, ("file", "name"))),  # noqa: B905
        (PAGES[2], "folder"),
    ],
)
def test_what_serve_runs_is_waited_for_and_asked(
    page: str, kind: str, models: dict[str, str], environment: Mapping[str, str]
) -> None:
    """No line but the text is printed: a drafter service that nobody named is not missed."""
    start, wait = commands(page, models[kind])
    addresses = [
        f"--{each}-address={environment[f'PACELINE_{each.upper()}_ADDRESS']}"
        for each in ("verifier", "drafter")
    ]
    words = (*start, *addresses, "--gateway-address=none", "--kv-bytes=64MiB")
    serving = paceline(*words, env=environment, stdout=subprocess.DEVNULL)
    try:
        assert paceline(*wait, env=environment, stdout=subprocess.DEVNULL).wait(300) == 0
        words = ("generate", "Hello", "--max-tokens=4")
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        asked = paceline(*words, env=environment, **pipes)
        assert asked.communicate()[1] == ""
        assert asked.returncode == 0
        if page == PAGES[2]:
            load = ("drafters", "load", "more", "ngram")
            assert paceline(*load, env=environment, stdout=subprocess.DEVNULL).wait(300) == 0
        else:
            words = ("health", "--wait=300", environment["PACELINE_DRAFTER_ADDRESS"])
            missing = paceline(*words, env=environment, stderr=subprocess.PIPE)
            assert "its verifier drafts by itself" in missing.communicate()[1]
            assert missing.returncode == 1
    finally:
        serving.terminate()
        serving.wait(60)


@pytest.mark.slow
def test_the_wait_ends_with_the_command_that_starts(environment: Mapping[str, str]) -> None:
    address = environment["PACELINE_VERIFIER_ADDRESS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
        with note_services([address], ""):
            waiting = paceline("health", "--wait=300", env=environment, stderr=subprocess.PIPE)
            eventually(lambda: waiting.poll() is None, "it waits")
            time.sleep(2)  # until it has read the note
    assert "has ended: it said why" in waiting.communicate()[1]
    assert waiting.returncode == 1
