"""`paceline trace`: of a text that it generates, and of a trace that Jaeger has."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from fakes.verifier import World

from paceline.cli.main import main
from paceline.cli.trace import WIDTH, Round, timeline

ROUND = re.compile(r" *(\d+)(?:-(\d+))? +[\d.]+  +(?:(\d+) of (\d+))? +(\d+)  (\S.{0,9}) ?([dV.]*)")


def parsed(lines: list[str]) -> list[tuple[str | None, ...]]:
    found = [ROUND.fullmatch(line) for line in lines]
    return [match.groups() for match in found if match is not None]


async def test_the_rounds_of_a_new_text(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    verifier, drafter = world.addresses
    services = ["--verifier-address", verifier, "--drafter-address", drafter]
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
    rounds = [
        Round(1, 1, 0.0, 0.0, 0.0, 0, 0, 1, "- empty"),
        Round(2, 5, 25.0, 0.0, 20.0, 0, 0, 5, "- node_budget"),
        Round(7, 1, 9.0, 3.0, 6.5, 8, 2, 3, "a drafter with a long name"),
        Round(8, 1, 3.0, 1.0, 1.0, 2, 2, 3, "dspark"),
    ]
    lines = list(timeline(rounds))
    assert max(map(len, lines)) == WIDTH
    bars = [each[6] for each in parsed(lines[1:])]
    assert bars[0] == ""
    assert set(bars[1] or "") == {"V", "."}
    assert (bars[2] or "").startswith("d"), "drafted first, then verified"
    assert len(bars[3] or "") == round(len(bars[2] or "") / 3)


def span(name: str, number: str, parent: str, start: int, us: int, **tags: Any) -> dict[str, Any]:
    return {
        "spanID": number, "operationName": name, "startTime": start, "duration": us,
        "references": [{"refType": "CHILD_OF", "spanID": parent}],
        "tags": [{"key": f"specdec.{key.replace('__', '.')}", "value": value}
                 for key, value in tags.items()],
    }  # fmt: skip


SPANS = [
    span("specdec.verify", "v2", "r2", 7000, 2000, num_emitted_tokens=1),
    span("specdec.round", "r2", "g", 6000, 3000, round__index=2, num_emitted_tokens=1,
         no_draft="empty"),
    span("specdec.round", "r1", "g", 1000, 5000, round__index=1, num_emitted_tokens=3,
         num_draft_tokens=8, num_accepted_draft_tokens=2),
    span("specdec.draft", "d1", "r1", 1100, 900, drafter__name="dspark", compute_duration=0.0008),
    span("specdec.verify", "v1", "r1", 2000, 4000),
]  # fmt: skip


@pytest.fixture
def jaeger() -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/api/traces/abc": SPANS, "/api/traces/other": SPANS[:1]}.get(self.path)
            self.send_response(404 if known is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"spans": known}]}).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_rounds_of_a_recorded_trace(jaeger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--id", "abc", "--jaeger", jaeger]) == 0
    first, second = parsed(capsys.readouterr().out.splitlines()[1:])
    assert first[:5] == ("1", None, "2", "8", "3")
    assert (first[5] or "").strip() == "dspark"
    assert second[:5] == ("2", None, None, None, "1")
    assert (second[5] or "").strip() == "- empty"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--id", "unknown"], 1, "has no trace unknown"),
        (["--id", "other"], 1, "has no rounds"),
        (["--id", "abc", "a prompt"], 2, "either a prompt or --id"),
        (["--id", "abc", "--jaeger", "localhost:16686"], 2, "expected a URL such as http"),
        (["--id", "abc", "--jaeger", "http://127.0.0.1:1"], 1, "cannot read trace abc"),
    ],
)
def test_what_it_cannot_show_is_an_error(
    jaeger: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--jaeger" in arguments else [*arguments, "--jaeger", jaeger]
    assert main(["trace", *given]) == code
    assert words in capsys.readouterr().err
