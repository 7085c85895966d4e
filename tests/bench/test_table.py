"""The table: statistics, resumption, and a run with real services and a rival that is no engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import pytest
from tokenizers import Tokenizer

from paceline.bench.cli import add_arguments
from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, chat_prompts
from paceline.bench.table.engines import (
    NONE,
    Answer,
    AnswerRequest,
    LibraryProcess,
    Server,
    llama_server,
)
from paceline.bench.table.figures import Cell, interval, sample, summarize
from paceline.bench.table.run import (
    BOUND,
    CATEGORIES,
    MIXED,
    SHORT,
    Limits,
    Phase,
    _answer,
    choose,
    contestants,
    measure,
    run,
)
from paceline.bench.table.vllm import LOOKUP, NGRAM, Vllm
from paceline.convert import open_model
from paceline.harness import read_prompts

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "demo" / "target"
GREEDY = "chat, T = 0, 1 user"

RIVAL = f"""#!{sys.executable}
import json
import re, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Rival(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("application/json", json.dumps({{"data": [{{"id": "rival"}}]}}))

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = {{"index": 0, "text": "word ", "finish_reason": None}}
        events = [{{"id": "1", "choices": [choice]}}] * request["max_tokens"]
        usage = {{"prompt_tokens": 1, "completion_tokens": request["max_tokens"]}}
        events.append({{"id": "1", "choices": [], "usage": usage}})
        lines = [json.dumps(event) for event in events] + ["[DONE]"]
        body = "".join(f"data: {{line}}\\n\\n" for line in lines)
        self.answer("text/event-stream", body if request.get("stream") else lines[0])

    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_): pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Rival).serve_forever()
"""


def answer(tokens: int, first: float, ended: float, output: str = "x", rounds: int = 0) -> Answer:
    return Answer(tokens, first, ended, first, output, rounds, tokens if rounds else 0)


def cell_of(**rates: tuple[float, ...]) -> Cell:
    """Contestants by name, "_" for a space, with a rate for each prompt."""
    cell: Cell = {}
    for name, found in rates.items():
        samples = {
            str(number): sample([answer(11, 0.5, 0.5 + 10 / rate, rounds=5)], [[1] * 1000])
            for number, rate in enumerate(found)
        }
        cell[name.replace("_", " ").replace("cpp", ".cpp")] = {"samples": samples}
    summarize(cell)
    return cell


class Fake:
    """Answers at once, and notes what it was asked."""

    concurrent = True

    def __init__(
        self, name: str, every: int = 1, fails: bool = False, constrained: bool = True
    ) -> None:
        self.name, self.every, self.fails = name, every, fails
        self.constrained = constrained
        self.modes = ("none", "ngram")
        self.asked: list[tuple[str, list[int], int]] = []
        self.schemas: list[str] = []

    async def __aenter__(self) -> Self:
        if self.fails:
            raise OSError("no such program")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        self.asked.append((mode, request.prompt, request.seed))
        self.schemas.append(request.json_schema)
        now = time.perf_counter()
        return answer(3, now, now + 1.0, "same")


def test_a_group_counts_tokens_after_the_first_until_the_last() -> None:
    both = sample([answer(11, 1.0, 3.0, "a"), answer(21, 2.0, 6.0, "b", rounds=7)], [[1], [1] * 3])
    assert both["rate"] == pytest.approx(31 / 5.0)
    assert (both["tokens"], both["prompt_tokens"], both["first_s"]) == (32, 2, 1.5)
    assert (both["rounds"], both["drafted"]) == (7, 21)
    one = sample([answer(1, 1.0, 1.0, "a")], [[1]])
    assert one["rate"] is None, "one token has no rate"
    assert one["output"] != both["output"]


def test_ratios_are_within_a_prompt_and_have_intervals() -> None:
    speed = (1.0, 2.0, 4.0)  # of the machine, which drifts
    cell = cell_of(
        paceline_int8_none=tuple(10 * each for each in speed),
        paceline_int8_ngram=tuple(15 * each for each in speed),
        llamacpp_Q8_0_none=tuple(12 * each for each in speed[:2]),
    )
    assert cell["paceline int8 ngram"]["figures"]["over_none"] == [1.5, 1.5, 1.5]
    assert cell["paceline int8 ngram"]["figures"]["accepted_length"] == pytest.approx(11 / 5)
    assert cell["paceline int8 ngram"]["figures"]["same_output"] == 3
    low, middle, high = cell["paceline int8 none"]["figures"]["tokens_per_second"]
    assert (low, middle, high) == (10.0, 20.0, 40.0)
    assert interval([]) is None
    narrow = interval([1.0, 2.0, 3.0] * 100)
    assert narrow == [2.0, 2.0, 2.0]


async def test_contestants_take_turns_and_the_deadline_ends_a_phase() -> None:
    first, slow = Fake("one"), Fake("two", every=2)
    prompts = {"a": [Prompt([1]), Prompt([2]), Prompt([3])], "b": [Prompt([4])]}
    found: list[tuple[str, str, list[str]]] = []
    messages: list[str] = []

    async def take(deadline: float, known: object = None) -> bool:
        found.clear()
        return await measure(
            Phase(0.0, 1, 1.0),
            [first, slow, Fake("broken", fails=True)],
            prompts,
            [9],
            Limits(8, deadline, lambda name: "two ngram" not in name, lambda *key: key == known),
            lambda cell, group, samples: found.append((cell, group, list(samples))),
            messages.append,
        )

    assert await take(time.monotonic() + 60)
    assert [(cell[0], group) for cell, group, _ in found] == [
        ("a", "0"),
        ("b", "0"),
        ("a", "1"),
        ("a", "2"),
    ]
    assert found[0][2] == ["one none", "one ngram", "two none"]
    assert found[1][2] == ["one ngram", "two none", "one none"], (
        "the next prompt begins with another"
    )
    assert found[2][2] == ["one none", "one ngram"], "a slow engine answers every second prompt"
    assert any("without broken: no such program" in message for message in messages)
    assert ("none", [3], 3) in first.asked
    assert await take(time.monotonic() + 60, ("a, T = 0, 1 user", "one none", "0"))
    assert found[0][2] == ["one ngram", "two none"], "what is known is not measured again"
    assert not await take(time.monotonic() - 1)
    assert found == [("a, T = 0, 1 user", "0", [])]


async def test_bound_answers_are_of_engines_that_can_bind_them() -> None:
    able, unable = Fake("able"), Fake("unable", constrained=False)
    prompts = {"chat": [Prompt([1])], "json": [Prompt([2], '{"type": "object"}')]}
    found: dict[str, list[str]] = {}
    await measure(
        Phase(0.0, 1, 1.0),
        [able, unable],
        prompts,
        [9],
        Limits(8, time.monotonic() + 60, lambda name: "none" in name, lambda *key: False),
        lambda cell, group, samples: found.update({cell.partition(",")[0]: sorted(samples)}),
        lambda message: None,
    )
    assert found == {"chat": ["able none", "unable none"], "json": ["able none"]}
    assert able.schemas == ["", "", '{"type": "object"}']
    assert unable.schemas == ["", ""]


@pytest.mark.parametrize("prompt", BOUND)
def test_bound_prompts_have_the_schema_of_their_answers(prompt: str) -> None:
    file = ROOT / "bench" / "prompts" / f"{prompt}.jsonl"
    found = chat_prompts(file, open_model(TARGET))
    assert len({each.json_schema for each in found}) == len(found)
    for each, line in zip(found, file.read_text().splitlines(), strict=True):
        fields, schema = json.loads(line), json.loads(each.json_schema)
        if prompt == "json":
            assert schema == fields["json_schema"]
            continue
        names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
        assert names == [tool["function"]["name"] for tool in fields["tools"]]
        assert 1 <= len(names) <= 3


def test_tools_are_in_the_prompt(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "tell_time", "parameters": {}}}
    file = tmp_path / "tools.jsonl"
    file.write_text(json.dumps({"prompt": "Hello", "tools": [tool]}))
    template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    tokenizer = open_model(TARGET).tokenizer
    [prompt] = chat_prompts(file, SimpleNamespace(tokenizer=tokenizer, chat_template=template))
    assert "tell_time" in Tokenizer.from_str(tokenizer.decode()).decode(prompt.ids)


async def test_a_server_that_is_started_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "rival"
    program.write_text(RIVAL)
    program.chmod(0o755)
    server = llama_server(str(program), Path("M.Q4_1.gguf"), ["ngram-mod"], 1)
    assert (server.name, server.modes) == ("llama.cpp Q4_1", ("none", "ngram-mod"))
    async with server:
        found = await server.answer("ngram-mod", AnswerRequest([1, 2], 5, 0.0, 1))
        assert (found.tokens, found.output) == (5, "word " * 5)
        assert found.first_seconds > 0
    with pytest.raises(OSError, match="No such file"):
        async with Server("x", {"none": [str(tmp_path / "missing")]}):
            pass


def test_running_servers_of_one_name_are_modes_of_one_engine() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    urls = [f"http://127.0.0.1:{port}/v1" for port in (1, 2, 3)]
    given = zip(("vllm", "vllm:n-gram", "other"), urls, strict=True)
    words = [word for name, url in given for word in ("--server", f"{name}={url}")]
    args = parser.parse_args(["table", "--target", str(TARGET), *words])
    found = contestants(args, Models.of(args), open_model(TARGET), Phase(0.7, 1, 1.0))
    servers = {each.name: each.modes for each in found if isinstance(each, Server)}
    assert servers == {"vllm": ("none", "n-gram"), "other": ("none",)}


def test_apart_every_round_drafts_after_the_step_and_ahead() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [*f"table --target {TARGET} --weights int8 --apart --drafter x=lm:m".split()]
    args = parser.parse_args(words)
    engines = contestants(args, Models.of(args), open_model(TARGET), Phase(0.7, 1, 1.0))
    modes = [each.modes for each in engines]
    assert modes == [("none", "local", "x always"), ("x ahead",)]


def test_drafting_ahead_is_compared_with_drafting_after_the_step() -> None:
    names = ("paceline int8 none", "paceline int8 x always", "paceline int8 x ahead")
    cell = {
        name: {"samples": {"0": {**sample([Answer(9, 0.0, end, 0.0, "a")], [[1]])}}}
        for name, end in zip(names, (4.0, 2.0, 1.0), strict=True)
    }
    summarize(cell)
    figures = cell[names[2]]["figures"]
    assert figures["over_none"] == [4.0, 4.0, 4.0]
    assert figures["over_after"] == [2.0, 2.0, 2.0]
    assert "over_after" not in cell[names[1]]["figures"]


async def test_vllm_is_started_in_each_mode(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(RIVAL)
    program.chmod(0o755)
    server = Vllm(str(program), tmp_path, {}, [NONE, NGRAM, LOOKUP], 8)
    assert (server.name, server.modes) == ("vllm bfloat16", ("none", "n-gram", "paceline look-up"))
    async with server:
        found = await server.answer(LOOKUP, AnswerRequest([1, 2], 5, 0.0, 1))
        assert (found.tokens, found.output) == (5, "word " * 5)
    assert not any("PACELINE" in word for word in server.command(LOOKUP))
    drafting = Vllm(str(program), tmp_path, {"lm": "lm:x"}, ["paceline lm"], 1)
    words = drafting.command("paceline lm")
    assert any(word.startswith("PACELINE_VLLM_ADDRESS=127.0.0.1:") for word in words)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["model"] == "paceline.vllm.PacelineProposer"


async def test_ik_llama_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ik_llama_cpp.py").write_text(
        "class IkLlama:\n"
        "    def __init__(self, path, **settings):\n"
        "        self._context = self\n"
        "    def sample(self, *arguments, **named):\n"
        "        return 7\n"
        "    def generate(self, tokens, *, max_tokens, **sampling):\n"
        "        return [self._context.sample(-1) for _ in range(max_tokens)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = LibraryProcess("ik_llama", sys.executable, Path("M.Q4_1.gguf"), [])
    assert (program.name, program.modes) == ("ik_llama Q4_1", ("none",))
    async with program:
        found = await program.answer("none", AnswerRequest([5, 6], 12, 0.0, 1))
    assert (found.tokens, found.output) == (12, json.dumps([7] * 12))
    assert found.first <= found.ended


async def test_transformers_answers_with_and_without_prompt_lookup() -> None:
    program = LibraryProcess("transformers", sys.executable, TARGET, [])
    assert program.name == "transformers bfloat16"
    async with program:
        plain, lookup = [
            await program.answer(mode, AnswerRequest([5, 6, 7, 8] * 8, 12, 0.0, 1))
            for mode in program.modes
        ]
    assert plain.tokens == lookup.tokens == 12
    assert len(json.loads(plain.output)) == 12
    assert plain.first < plain.ended
    broken = LibraryProcess("transformers", "false", TARGET, [])
    with pytest.raises(OSError, match="ended with code 1"):
        async with broken:
            pass


def test_a_run_records_resumes_and_replaces(tmp_path: Path) -> None:
    program, prompts, output = (tmp_path / name for name in ("rival", "chat.jsonl", "found.json"))
    program.write_text(RIVAL)
    program.chmod(0o755)
    bound = {"text": "def two", "json_schema": {"type": "array", "minItems": 9}}
    prompts.write_text(f'"def one"\n{json.dumps(bound)}\n')
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [
        "table", "--models", str(tmp_path), "--target", str(TARGET), "--output", str(output),
        "--tokens", "16", "--weights", "bfloat16", "--prompts", str(prompts), "--temperature", "0",
        "--users", "1", "--drafter", "ngram=ngram", "--llama-server", str(program),
        "--llama-model", "M-Q8_0.gguf",
    ]  # fmt: skip
    assert run(parser.parse_args([*words, "--contestants", "paceline", "llama.cpp"])) == 0
    first = json.loads(output.read_text())["results"][GREEDY]["contestants"]
    names = ["paceline bfloat16 none", "paceline bfloat16 ngram", "llama.cpp Q8_0 none"]
    modes = ("paceline bfloat16 local", "paceline bfloat16 default", "llama.cpp Q8_0 ngram-mod")
    assert set(first) == {*names, *modes}
    assert all(entry["figures"]["runs"] == 2 for entry in first.values())
    drafted = (names[1], *modes[:2])
    assert [first[name]["figures"]["same_output"] for name in drafted] == [2, 2, 2]

    assert run(parser.parse_args([*words, "--contestants", "llama.cpp", "--resume"])) == 0
    assert json.loads(output.read_text())["results"][GREEDY]["contestants"] == first
    assert run(parser.parse_args([*words, "--contestants", "llama.cpp Q8_0 none"])) == 0
    again = json.loads(output.read_text())["results"][GREEDY]["contestants"]
    assert again[names[0]] == first[names[0]]
    assert again[names[2]]["samples"] != first[names[2]]["samples"]


def test_prompts_of_the_repository() -> None:
    texts = {
        name: read_prompts(ROOT / "bench" / "prompts" / f"{name}.jsonl") for name in CATEGORIES
    }
    assert all(len(found) == len(set(map(str, found))) >= 16 for found in texts.values())
    prompts = {name: [Prompt([1])] * len(found) for name, found in texts.items()}
    assert set(choose(prompts, Phase(0.0, 1, 1.0), [])) == set(CATEGORIES)
    assert set(choose(prompts, Phase(0.7, 1, 1.0), [])) == {*SHORT, *BOUND}
    assert set(choose(prompts, Phase(0.0, 1, 1.0), ["edit"])) == {"edit"}
    assert len(choose(prompts, Phase(0.0, 8, 1.0), [])[MIXED]) == 48
    assert set(choose(prompts, Phase(0.0, 8, 1.0), ["chat"])) == {"chat"}


async def test_several_users_begin_at_different_times_and_end_together() -> None:
    asked: list[tuple[int, int]] = []

    class Engine:
        async def answer(self, mode: str, request: AnswerRequest) -> Answer:
            asked.append((request.prompt[0], request.tokens))
            await asyncio.sleep(0)
            return Answer(request.tokens, 0.0, 0.0, 0.0, "")

    phase = Phase(0.0, 4, 1.0)
    texts = [Prompt([number]) for number in range(phase.prompts)]
    answers = [
        await _answer(cast(Any, Engine()), NONE, texts[at::4], 100, phase, at, 1) for at in range(4)
    ]
    assert sorted(prompt for prompt, _ in asked) == list(range(8))
    assert len({found[0].tokens for found in answers}) == 4
    assert {sum(each.tokens for each in found) for found in answers} == {125}
