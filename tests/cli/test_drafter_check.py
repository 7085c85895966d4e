"""`paceline drafters load --check` tries a version out through the verifier."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.harness import local_services

HELPERS = Path(__file__).parents[1] / "drafter"


@pytest.fixture(scope="module")
def services(target: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a verifier, and of a drafter with methods that read KV, or fail."""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HELPERS)]))
    arguments = [f"--target={target}"], ["--load=main=ngram"]
    with local_services(*arguments, {"PYTHONPATH": paths}) as (verifier, drafter):
        yield verifier.address, drafter.address


def load(services: tuple[str, str], prompts: Path, *words: str) -> int:
    verifier, drafter = services
    where = ("--address", drafter, "--verifier-address", verifier, "--check", str(prompts))
    return main(["drafters", "load", *where, *words])


def listed(services: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["drafters", "list", "--address", services[1], "--json"]) == 0
    infos = json.loads(capsys.readouterr().out)["drafters"]
    return {f"{info['name']}@{info['version']}": info["traffic_share"] for info in infos}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2, 3, 1, 2, 3, 1, 2]}\n{"prompt": [9, 8, 7]}\n')
    return path


def test_one_that_reads_kv_is_checked_and_takes_over(
    services: tuple[str, str], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        load(services, prompts, "main", "kv-reader", "--version", "7", "--activate", "--json") == 0
    )
    (info,) = json.loads(capsys.readouterr().out)
    assert info["check"]["texts"] == 2
    assert info["check"]["rounds"] > 0
    assert listed(services, capsys) == {"main@1": 0.0, "main@7": 1.0}
    assert main(["drafters", "unload", "main", "7", "--address", services[1]]) == 0


def test_one_that_fails_is_gone_again(
    services: tuple[str, str], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(services, prompts, "main", "failing", "--activate") == 1
    assert "failed the check and was unloaded" in capsys.readouterr().err
    assert listed(services, capsys) == {"main@1": 1.0}
    assert load(services, prompts, "main", "ngram", "--json") == 0
    version = json.loads(capsys.readouterr().out)[0]["version"]
    assert main(["drafters", "unload", "main", version, "--address", services[1]]) == 0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"prompt": []}', '{"prompt": [-1]}', '{"x": 1}'])
def test_a_file_of_another_form_loads_nothing(
    services: tuple[str, str], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert load(services, path, "main", "ngram") == 2
    assert str(path) in capsys.readouterr().err
    assert listed(services, capsys) == {"main@1": 1.0}
