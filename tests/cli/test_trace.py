"""`paceline trace` with spans as collectors write them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import trace
from paceline.cli.main import main
from paceline.client import RoundStats, Stats

MS = 1_000_000


def span(name: str, own: str, parent: str, began: float, ended: float, **facts: int) -> Any:
    """A span in OTLP's JSON; times in milliseconds."""
    return {
        "name": name,
        "traceId": "t1",
        "spanId": own,
        "parentSpanId": parent,
        "startTimeUnixNano": str(round(began * MS)),
        "endTimeUnixNano": str(round(ended * MS)),
        "attributes": [
            {"key": "specdec." + key.replace("__", "."), "value": _value(value)}
            for key, value in facts.items()
        ],
    }


def _value(value: float) -> dict[str, Any]:
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


ROUND = {
    "round__index": 1,
    "num_draft_tokens": 8,
    "num_accepted_draft_tokens": 3,
    "num_emitted_tokens": 4,
}
CLIENT = [
    span("text_completion <m>", "root", "", 0, 40),
    span("specdec.prefill", "p", "root", 1, 11, queue_duration=0.002, compute_duration=0.006),
    span("specdec.round", "r", "root", 12, 30, **ROUND),
    span("specdec.draft", "d", "r", 12, 18, queue_duration=0.001, compute_duration=0.003),
    span("specdec.verify", "v", "r", 19, 30, queue_duration=0.0005, compute_duration=0.0075),
    span("specdec.round", "cut", "root", 31, 33),
]
SERVICES = [span("specdec.verifier.round", "s", "v", 19.5, 28)]


def write(file: Path, *exports: list[Any]) -> Path:
    """One export a line, as by several processes."""
    lines = [json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": each}]}]}) for each in exports]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_time_is_split_into_parts(tmp_path: Path) -> None:
    found = trace.rows_of_spans(trace.read_spans(write(tmp_path / "f", CLIENT)))
    prefill, first, cut = found
    assert (prefill.label, first.label, cut.label) == ("prefill", "1", "cut short")
    assert prefill.parts == (("transport", 1), ("queue", 2), ("verify", 6), ("transport", 1))
    assert first.parts == (
        *(("transport", 1), ("queue", 1), ("draft", 3), ("transport", 1)),
        ("other", 1),
        *(("transport", 1.5), ("queue", 0.5), ("verify", 7.5), ("transport", 1.5)),
    )
    assert (first.begins, first.total, cut.total) == (12, 18, 2)
    assert (first.drafted, first.accepted, first.emitted) == (8, 3, 4)


def test_the_verifiers_times_do_as_well() -> None:
    stats = Stats(first_token_ms=8.0, prefill_ms=6.0)
    stats.rounds.append(RoundStats(8, 3, 4, round_ms=10, draft_ms=3, verify_ms=4, queue_ms=2))
    stats.rounds.append(RoundStats(0, 0, 5, 20, 0, 20, 0, steps=5, undrafted="late"))
    prefill, first, plain = trace.rows_of_stats(stats)
    assert prefill.parts == (("transport", 2), ("verify", 6))
    assert first.parts == (("draft", 3), ("transport", 1), ("queue", 2), ("verify", 4))
    assert plain.parts == (("verify", 20),)
    assert [row.begins for row in (prefill, first, plain)] == [0, 8, 18]
    assert [row.label for row in (prefill, first, plain)] == ["prefill", "1", "2 x5"]
    assert (first.drafted, first.accepted, first.emitted, plain.emitted) == (8, 3, 4, 5)
    assert (first.undrafted, plain.undrafted) == ("", "late")


def test_spans_of_services_split_the_transport_time(tmp_path: Path) -> None:
    spans = trace.read_spans(write(tmp_path / "f", SERVICES, CLIENT))
    _, first, _ = trace.rows_of_spans(spans)
    assert first.parts[-4:] == (
        *(("transport", 0.5), ("queue", 0.5), ("verify", 7.5), ("transport", 2.5)),
    )


def test_the_newest_generation_is_shown(tmp_path: Path) -> None:
    older = [dict(each, traceId="t0", startTimeUnixNano="-5") for each in CLIENT]
    spans = trace.read_spans(write(tmp_path / "f", CLIENT, older))
    assert len(trace.rows_of_spans(spans)) == 3


def test_terminal_and_page_show_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "page.html"
    file = write(tmp_path / "f", CLIENT)
    assert main(["trace", "--read", str(file), "--html", str(page)]) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r" t+q+d+t*\.?t+v+t+ 18\.0", shown), "a letter a phase"
    for part in ("18.0", "3.0", "7.5", "3/8", "cut short"):
        assert part in shown
        assert part in text
    assert "src=" not in text
    assert "http" not in text


@pytest.mark.parametrize("content", ["{", '{"resourceSpans": [{}]}', "[]", '{"resourceSpans": 3}'])
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "f"
    file.write_text(content)
    assert main(["trace", "--read", str(file)]) == 2
    assert "has no spans" in capsys.readouterr().err


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--read", str(write(tmp_path / "f", SERVICES))]) == 2
    assert "no generation among the spans" in capsys.readouterr().err
    assert main(["trace", "--read", str(tmp_path / "missing")]) == 2
    assert main(["trace"]) == 2
    assert "give either a prompt or --read FILE" in capsys.readouterr().err
