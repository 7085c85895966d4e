"""Config files."""

from pathlib import Path

import pytest

from paceline.cli.command import CommandError, expand_config
from paceline.cli.main import main

FILE = """
[verifier]
target = "a b"
kv-bytes = "1GiB"
lease-seconds = 2.5
share-weights = true
[drafter]
load = ["x=ngram", "y=lm:d,depth=3"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    return path


VERIFIER = ["--target=a b", "--kv-bytes=1GiB", "--lease-seconds=2.5", "--share-weights"]


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["serve"], ["serve", *VERIFIER, "--drafter=x=ngram", "--drafter=y=lm:d,depth=3"]),
        (["verifier"], ["verifier", *VERIFIER]),
        (["drafter"], ["drafter", "--load=x=ngram", "--load=y=lm:d,depth=3"]),
    ],
)
def test_tables_become_arguments(words: list[str], becomes: list[str], config: Path) -> None:
    assert expand_config([*words, "--config", str(config)]) == becomes
    assert expand_config([words[0], f"--config={config}", "--threads=1"]) == [
        *becomes,
        "--threads=1",
    ]


def test_the_command_line_overrides_the_file(config: Path) -> None:
    words = ["serve", "--target", "t", "--config", str(config), "--drafter=ngram"]
    assert expand_config(words) == ["serve", *VERIFIER[1:], "--target", "t", "--drafter=ngram"]


def test_other_commands_read_no_file(config: Path) -> None:
    words = ["generate", "--config", str(config)]
    assert expand_config(words) == words
    assert expand_config(["serve", "--target=t"]) == ["serve", "--target=t"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[other]\n", "'other'"),
        ("verifier = 3\n", "'verifier'"),
        ("[verifier\n", "cannot read"),
        ("[verifier]\ntarget = {a = 1}\n", "target"),
        ("[drafter]\nmax-streams = 3\n", "max-streams"),
    ],
)
def test_invalid_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        expand_config(["serve", "--config", str(path)])


def test_a_missing_file_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verifier", "--config", "/nowhere.toml"]) == 2
    assert "/nowhere.toml" in capsys.readouterr().err
    assert main(["verifier", "--config"]) == 2
