"""The table: statistics, resumption, and a run with real services and a rival that is no engine."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from paceline.bench.cli import add_arguments
from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, chat_prompts
from paceline.bench.table.engines import Answer
from paceline.bench.table.figures import Cell, interval, sample, summarize
from paceline.bench.table.run import (
    BOUND,
    CATEGORIES,
    MIXED,
    SHORT,
    Phase,
    choose,
    contestants,
    run,
)
from paceline.client import RoundStats, Stats
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
    drafted = [RoundStats(1, 0, (tokens + n) // rounds, 9, 1, 6, 0) for n in range(rounds)]
    return Answer(tokens, first, ended, first, output, Stats(drafted))


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


@pytest.mark.slow
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
    assert set(choose(prompts, Phase(0.7, 1, 1.0), ["edit"])) == {"edit"}
    assert len(choose(prompts, Phase(0.0, 8, 1.0), [])[MIXED]) == 48
    assert set(choose(prompts, Phase(0.0, 8, 1.0), ["chat"])) == {"chat"}


@pytest.mark.parametrize(("wanted", "loaded"), [("default", "one"), ("two", "two")])
def test_a_request_without_a_name_has_the_first_drafter(wanted: str, loaded: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["table", "--weights", "bfloat16", "--drafter", "one=ngram", "--drafter", "two=ngram"]
    args = parser.parse_args([*words, "--contestants", f"bfloat16 {wanted}"])
    engines = contestants(args, Models(TARGET, TARGET), open_model(TARGET), Phase(0.0, 1, 1.0))
    assert next(engines).modes[-1] == loaded
