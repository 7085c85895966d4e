"""`paceline trace`: the rounds of a text."""

import asyncio
import re
from typing import Any

import pytest
from fakes.verifier import World

from paceline.cli.main import main
from paceline.cli.trace import WIDTH, timeline
from paceline.client import RoundStats

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
