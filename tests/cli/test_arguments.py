"""Config files, options as arguments, those without effect, and delays of restarts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import write_gguf

from paceline.cli.command import CommandError, expand_config
from paceline.cli.main import COMMANDS, build_parser, main
from paceline.cli.supervisor import Restarted
from paceline.harness import ServiceProcess
from paceline.harness.models import drafter_spec
from paceline.service.options import add_options, byte_count, given_options, read_token, to_words
from paceline.verifier import VerifierOptions

from .conftest import write_for_gguf

FILE = """
[verifier]
target = "a b"
kv-bytes = "1GiB"
lease-seconds = 2.5
share-weights = true
[drafter]
load = ["x=ngram", "y=lm:d,depth=3"]
device = "cpu"
overlap = false
[gateway]
address = "127.0.0.1:8081"
cors-origin = ["http://a", "http://b"]
access-log = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    return path


def expanded(*words: str) -> list[str]:
    """A command line with the arguments of its config file in place of `--config`."""
    (command,) = (each for each in COMMANDS if each.name == words[0])
    subparsers = build_parser([command])._actions[-1].choices
    return expand_config(words, dict(subparsers or {})[command.name])


VERIFIER = ["--target=a b", "--kv-bytes=1GiB", "--lease-seconds=2.5", "--share-weights"]


GATEWAY = ["--cors-origin=http://a", "--cors-origin=http://b", "--no-access-log"]


@pytest.mark.parametrize(
    ("command", "becomes"),
    [
        (
            "serve",
            [
                *(*VERIFIER, "--drafter=x=ngram", "--drafter=y=lm:d,depth=3"),
                *("--drafter-device=cpu", "--gateway-address=127.0.0.1:8081", *GATEWAY),
            ],
        ),
        ("verifier", VERIFIER),
        ("drafter", ["--load=x=ngram", "--load=y=lm:d,depth=3", "--device=cpu", "--no-overlap"]),
        ("gateway", ["--address=127.0.0.1:8081", *GATEWAY]),
    ],
)
def test_tables_become_arguments(command: str, becomes: list[str], config: Path) -> None:
    if command == "serve":  # it has no `overlap`
        config.write_text(config.read_text().replace("overlap = false\n", ""))
    assert expanded(command, "--config", str(config)) == [command, *becomes]
    assert expanded(command, f"--config={config}", "--log-level=error") == [
        *(command, *becomes, "--log-level=error")
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_of_windows_are_read(encoding: str, config: Path) -> None:
    config.write_bytes(FILE.replace("\n", "\r\n").encode(encoding))
    assert expanded("verifier", f"--config={config}") == ["verifier", *VERIFIER]


def test_the_command_line_overrides_the_file(config: Path) -> None:
    words = ("--target", "t", f"--config={config}", "--no-access-log", "--cors-origin=c")
    assert expanded("gateway", *words[2:]) == [
        *("gateway", "--address=127.0.0.1:8081", "--no-access-log", "--cors-origin=c")
    ]
    assert expanded("verifier", *words[:3]) == ["verifier", *VERIFIER[1:], "--target", "t"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[verifer]\n", r"c.toml has 'verifer', expected .*\[gateway\]; did you mean verifier\?"),
        ("verifier = 3\n", r"c.toml has verifier = 3, expected a table: \[verifier\]"),
        ("[verifier\n", "cannot read .*c.toml"),
        ("[verifier]\ntarget = {a = 1}\n", r"c.toml: \[verifier\] target = {'a': 1}: expected"),
        ("[verifier]\ntarget = true\n", r"c.toml: \[verifier\] target = True: expected a text"),
        ("[verifier]\nshare-weights = 1\n", r"\[verifier\] share-weights = 1: expected true or"),
        ("[verifier]\nkv-bytes = [1, 2]\n", r"\[verifier\] kv-bytes = .*expected one value"),
        ("[verifier]\nkv-byte = 1\n", r"\[verifier\] has no key 'kv-byte'; did you mean kv-bytes"),
        ("[verifier]\ncors-origin = '*'\n", r"\[verifier\] has no key 'cors-origin'"),
        ("[drafter]\nmax-streams = 3\n", r"\[drafter\] has no key 'max-streams'"),
        ("[gateway]\ncors-origins = []\n", r"\[gateway\] .*did you mean cors-origin\?"),
        ("[gateway]\nconfig = 'x'\n", r"\[gateway\] has no key 'config'"),
    ],
)
def test_invalid_files_are_refused(text: str, message: str, config: Path) -> None:
    """The error names file, table and key, and what was perhaps meant."""
    config.write_text(text)
    with pytest.raises(CommandError, match=message):
        expanded("serve", "--config", str(config))


@pytest.mark.parametrize("value", ["kv-bytes = 'much'", "max-context = 'x'", "weights = 'int5'"])
def test_values_are_checked_as_those_of_the_command_line(
    value: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"[verifier]\ntarget = '.'\n{value}\n")
    with pytest.raises(SystemExit):
        main(["verifier", f"--config={config}"])
    key, _, given = value.partition(" = ")
    said = capsys.readouterr().err
    assert f"argument --{key}: " in said
    assert given in said


def test_what_a_flag_turns_around_is_a_key_too(config: Path) -> None:
    for text, becomes in {
        "prefix-caching = false": ["--no-prefix-caching"],
        "no-prefix-caching = true": ["--no-prefix-caching"],
        "prefix-caching = true": [],
        "share-weights = false": [],
    }.items():
        config.write_text(f"[verifier]\n{text}\n")
        assert expanded("verifier", f"--config={config}") == ["verifier", *becomes]


@pytest.mark.parametrize("command", [each.name for each in COMMANDS])
def test_no_command_takes_abbreviations(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They would change their meaning with each new option."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--hel"])
    assert ended.value.code == 2
    assert "usage" not in capsys.readouterr().out


def test_a_missing_file_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verifier", "--config", "/nowhere.toml"]) == 2
    assert "/nowhere.toml" in capsys.readouterr().err
    assert main(["verifier", "--config"]) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("512MiB", 1 << 29), ("1.5gib", 3 << 29), ("2 KiB", 2048)],
)
def test_byte_counts(text: str, size: int) -> None:
    assert byte_count(text) == size
    for wrong in ("", "0", "-1", "1GB", "x", "1e3", "0.1", "MiB", "٣"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            byte_count(wrong)


def test_back_off_doubles_up_to_its_limit_and_starts_again_after_a_steady_life() -> None:
    back_off = Restarted(ServiceProcess("drafter"))
    assert [back_off.delay(uptime=1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert back_off.delay(uptime=60.0) == 0.5
    assert back_off.delay(uptime=1.0) == 1.0


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, VerifierOptions)
    return parser.parse_args(words)


def test_options_become_arguments_and_a_command_line_again() -> None:
    words = ["--weights=int8", "--kv-bytes=1024", "--no-prefix-caching", "--share-weights"]
    args = parse(*words[::-1])
    assert to_words(args, VerifierOptions) == words
    given = {"weights": "int8", "kv_bytes": 1024, "prefix_caching": False, "share_weights": True}
    assert given_options(args, VerifierOptions) == given
    assert given_options(parse(), VerifierOptions) == {}
    assert to_words(parse(), VerifierOptions) == []


@pytest.mark.parametrize(
    "word",
    [
        *("--sources=none", "--sources=grammar", "--sources=ngram,recycle"),
        *("--trace-rounds=100:10", "--trace-rounds=all"),
    ],
)
def test_lists_and_pairs_are_written_as_they_are_read(word: str) -> None:
    """`paceline serve` passes them on to the services that it starts."""
    args = parse(word)
    given = given_options(args, VerifierOptions)
    assert given
    assert given_options(parse(*to_words(args, VerifierOptions)), VerifierOptions) == given


TARGET = str(Path(__file__).parents[2] / "models" / "demo" / "target")
HERE = "--address=127.0.0.1:1"

LINES = [
    ("generate hello", "--tls-server-name=a --top-k=3 --top-p=0.9 --min-p=0.1"),
    ("generate hello --drafter none", "--draft-always --draft-timeout=1 --max-nodes=3 --isolated"),
    ("chat", "--top-k=3 --top-p=0.9"),
    ("health 127.0.0.1:1", "--tls-server-name=a"),
    ("gateway --address=127.0.0.1:0", "--tls-server-name=a"),
    ("chat", "--weights=int4 --load=ngram"),
    (f"chat {TARGET}", "--verifier-address=a:1 --tls --token-file=x --tls-server-name=x"),
    (f"drafters load a ngram {HERE}", "--verifier-address=a:1"),
    (f"serve {TARGET} --gateway-address none", "--open --strict --http-tls-cert=x --max-body=1MiB"),
    (f"drafter --load=a=ngram --target={TARGET}", ""),
    ("drafter --load=a=ngram", "--target-weights=int4"),
    ("drafter", "--target-weights=int4"),
    ("bench replay x.json.gz", "--count=2 --weights=int8 --label=x --nodes=3"),
    ("bench table", "--llama-server=x --openvino-python=x"),
    ("bench step", "--llama-model=x --llama-bench=x"),
    ("bench step --profile", "--repeats=3 --synthetic --rivals --llama-model=x"),
    (f"bench step --target={TARGET}", "--models=x"),
    ("bench papers attention", "--users=1 --speed --temperature=1"),
    ("bench papers load", "--contexts=5 --ratios=0.1 --rows=3 --policies=streaming"),
]


CASES = [(line, option) for line, options in LINES for option in options.split() or [""]]


@pytest.mark.parametrize(("line", "option"), CASES, ids=[" ".join(each) for each in CASES])
def test_an_option_without_effect_is_refused(
    line: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), *option.split()]) == 2
    said = capsys.readouterr().err
    assert " no effect " in said
    assert option.partition("=")[0] in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["--signals=x", "--vocabulary=9", "--no-card", "--contexts=0,64"])
def test_a_preset_on_files_reads_nothing_about_conversations(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "longspec", "--preset", "cpu", words]) == 1
    assert f"{words.partition('=')[0]}: no effect on the preset cpu" in capsys.readouterr().err


# Paths


PLACES = ("DIR", "FILE", "PEM", "PATH", "MODEL", "FOLDER")
"""What arguments with a path call it in their help."""


def actions(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """All arguments of a parser and of its commands, each with its parser."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for nested in {id(each): each for each in action.choices.values()}.values():
                yield from actions(nested)
        else:
            yield parser, action


def test_every_argument_with_a_path_expands_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    found = 0
    for parser, action in actions(build_parser(COMMANDS)):
        if action.nargs == 0 or action.dest == "config":  # which is expanded before it is parsed
            continue
        if action.metavar in PLACES or action.type is Path:
            value = parser._get_value(action, "~/x")
            assert str(value) == str(tmp_path / "x"), (parser.prog, action.option_strings)
            found += 1
        elif action.type is drafter_spec:
            value = parser._get_value(action, "a=lm:~/x,target=~/x")
            assert value == f"a=lm:{tmp_path}/x,target={tmp_path}/x"
            found += 1
    assert found > 30


def test_so_do_config_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.toml").write_text('[verifier]\ntarget = "~/missing"\n')
    with pytest.raises(SystemExit):
        main(["serve", "--config", "~/own.toml"])
    assert "there is no model at ~/missing" in capsys.readouterr().err
    (tmp_path / "token").write_text("secret")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "~/token")
    assert read_token(None) == "secret"


def test_a_drafter_without_a_method_is_advised() -> None:
    for text in ("models/demo/lm", "smollm2", "own=smollm2,weights=int8", "~/x"):
        with pytest.raises(argparse.ArgumentTypeError, match="no method: give lm:"):
            drafter_spec(text)
    for text in ("ngram", "own=ngram,shared_tokens=0", "lm:models/demo/lm"):
        assert drafter_spec(text) == text


def test_a_small_model_is_inspected_as_file_and_as_folder(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_for_gguf("small", tmp_path / "own")
    write_gguf(tmp_path / "own.gguf", folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/own", "~/own.gguf"):
        assert main(["drafters", "inspect", path, "--target", path]) == 0
        assert f"a model for lm: lm:{tmp_path}/own" in capsys.readouterr().out.replace("\n", "")
    demo = ["drafters", "inspect", "models/demo/lm", "--target", "models/demo/target"]
    assert main(demo) == 0
    assert "the tokenizers agree" in capsys.readouterr().out
    assert main([*demo[:-1], str(target)]) == 1
    assert "the tokenizers differ" in capsys.readouterr().out
