"""The form of logs."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.service.runtime import JsonFormatter, TextFormatter, configure_logging, request_id

from .conftest import Serve
from .toy import ask


def record(**fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "paceline.x", "levelname": "INFO", "msg": "round %d", "args": (3,)}
    )
    vars(made).update(fields)
    return made


def test_json_holds_fields_and_request_id() -> None:
    token = request_id.set("r-1")
    entry = json.loads(JsonFormatter("verifier").format(record(round_id=7, text="zwei\nZeilen")))
    request_id.reset(token)
    del entry["time"]
    assert entry == {
        "level": "INFO", "logger": "paceline.x", "message": "round 3", "request_id": "r-1",
        "round_id": 7, "text": "zwei\nZeilen", "service": "verifier",
    }  # fmt: skip


def test_an_exception_stays_on_the_one_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonFormatter().format(record(exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["exception"]


HOSTILE = "a\n12:00:00.000 INFO forged\r\x1b[2J\x7f\x9b2J\u2028b\u202ec\ud800"


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("where", ["msg", "name", "model", "args", "exception"])
def test_nothing_forges_lines_or_controls_the_terminal(form: logging.Formatter, where: str) -> None:
    fields: dict[str, object] = {where: HOSTILE}
    if where == "args":
        fields = {"msg": "from %s", "args": (HOSTILE,)}
    elif where == "msg":
        fields["args"] = ()
    elif where == "exception":
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            fields = {"exc_info": sys.exc_info()}
    first, *others = form.format(record(**fields)).split("\n")
    assert all(line.isprintable() for line in (first, *others))
    assert all(line.startswith("  ") for line in others)
    assert where == "exception" or not others
    if isinstance(form, JsonFormatter):
        assert HOSTILE in json.loads(first).get("exception", str(json.loads(first)["message"])) or (
            HOSTILE in (json.loads(first)["logger"], json.loads(first).get("model"))
        )


@pytest.mark.parametrize(
    ("format", "json_lines"), [("auto", True), ("json", True), ("text", False)]
)
def test_auto_is_json_where_no_terminal_is(
    format: str, json_lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    try:
        root.handlers.clear()
        configure_logging(format, "warning")  # type: ignore[arg-type]
        logging.getLogger("paceline.x").info("too quiet")
        logging.getLogger("paceline.x").warning("hello", extra={"round_id": 1})
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("{") is json_lines


@contextmanager
def logged(level: int) -> Iterator[io.StringIO]:
    """What services log in the block, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("paceline.service")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(level)
    try:
        yield stream
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


async def test_one_line_at_start_and_none_for_a_call(serve: Serve) -> None:
    with logged(logging.INFO) as stream:
        served = await serve()
        async with served.channel() as channel:
            await ask(channel, "UnaryUnary", "hello")
        entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["message"] for entry in entries] == ["serving"]
    assert entries[0].items() >= {"address": served.address, "model": "toy"}.items()


async def test_a_calls_records_carry_the_callers_request_id(serve: Serve) -> None:
    with logged(logging.DEBUG) as stream:
        served = await serve()
        async with served.channel() as channel:
            for given in ("r-1", "not an id", "x" * 65):
                metadata = (("x-request-id", given),)
                await ask(channel, "UnaryUnary", "my prompt", metadata=metadata)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    ended = [entry for entry in entries if entry["message"] == "call ended"]
    assert [entry["code"] for entry in ended] == ["OK"] * 3
    ids = [entry["request_id"] for entry in ended]
    assert ids[0] == "r-1"
    assert "not an id" not in ids
    assert len(set(ids)) == 3
    assert "my prompt" not in stream.getvalue()
