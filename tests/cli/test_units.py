import argparse
from pathlib import Path

import pytest

from paceline.cli.serve import BackOff
from paceline.service.arguments import add_options, byte_count, given_options, to_words
from paceline.verifier import VerifierOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("512MiB", 1 << 29), ("1.5gib", 3 << 29), ("2 KiB", 2048)],
)
def test_byte_counts(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1GB", "x", "1e3", "0.1", "MiB", "٣"])
def test_invalid_byte_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        byte_count(text)


def test_back_off_doubles_up_to_its_limit_and_starts_again_after_a_steady_life() -> None:
    back_off = BackOff(first=0.5, longest=3.0, steady=60.0)
    assert [back_off.delay(uptime=1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert back_off.delay(uptime=60.0) == 0.5
    assert back_off.delay(uptime=1.0) == 1.0


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, VerifierOptions)
    return parser.parse_args(words)


def test_options_become_arguments_and_a_command_line_again() -> None:
    words = ["--weights=int8", "--kv-bytes=1024", "--no-prefix-caching", "--share-weights"]
    args = parse("--socket-dir=/x", *words[::-1])
    assert to_words(args, VerifierOptions) == [*words, "--socket-dir=/x"]
    given = given_options(args, VerifierOptions)
    assert given == {
        "weights": "int8",
        "kv_bytes": 1024,
        "prefix_caching": False,
        "share_weights": True,
        "socket_dir": Path("/x"),
    }
    assert VerifierOptions(**given).socket_dir == Path("/x")


def test_arguments_that_are_not_given_leave_the_defaults() -> None:
    assert VerifierOptions(**given_options(parse(), VerifierOptions)) == VerifierOptions()
    assert to_words(parse(), VerifierOptions) == []
