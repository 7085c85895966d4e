"""The first commands of README, Getting started and Your own model."""

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

from paceline.harness import with_port
from paceline.tokens import note_services

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/getting-started.md", "docs/own-model.md")


def commands(page: str, model: str) -> list[list[str]]:
    """What a page starts first, and the line that waits for it, with another model."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^paceline ((?:serve|health) .*?)(?: +#.*)?$", text, re.MULTILINE)
    start = next(line for line in found if line.endswith("&"))
    wait = next(line for line in found if line.startswith("health"))
    start = start.removesuffix("&").replace(start.split()[1], model)
    return [shlex.split(start), shlex.split(wait)]


def paceline(*words: str, **settings: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    return subprocess.Popen(command, text=True, **settings)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def environment(short_folder: Path) -> Mapping[str, str]:
    """Where commands find each other, apart from everything else."""
    short_folder.chmod(0o700)
    kept = {
        "XDG_RUNTIME_DIR": str(short_folder),
        "PACELINE_VERIFIER_ADDRESS": with_port("127.0.0.1:0"),
        "PACELINE_DRAFTER_ADDRESS": with_port("127.0.0.1:0"),
    }
    return {**os.environ, **kept}


def test_the_pages_say_the_same() -> None:
    lines = [commands(page, "MODEL") for page in PAGES]
    assert lines[0] == lines[1] == [["serve", "MODEL"], lines[2][1]]


@pytest.mark.parametrize("page", [pytest.param(PAGES[0], marks=pytest.mark.slow), PAGES[2]])
def test_what_serve_runs_is_waited_for_and_asked(
    page: str, target: Path, environment: Mapping[str, str]
) -> None:
    """No line but the text is printed: a drafter service that nobody named is not missed."""
    start, wait = commands(page, str(target))
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
