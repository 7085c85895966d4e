"""Conversations as coding agents send them, recorded with invented texts: all of it is shown to
the model, and each prompt goes on where the one before it ended, so that its KV is found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.transport import MockTransport

from .conftest import Serve

FOLDER = Path(__file__).parent / "recorded"
RECORDED = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
TEMPLATE = (
    "{% for t in tools or () %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}{% endfor %}<assistant>"
)


def words(value: Any, name: str = "") -> Iterator[str]:
    """The texts that a model must see: contents, and arguments and results of calls."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("content", "text", "output", "system"):
                yield from words(each, key)
            elif key in ("arguments", "input") and value.get("type") != "message":
                given = json.loads(each) if isinstance(each, str) else each
                yield from (json.dumps(v)[1:-1] for v in given.values() if isinstance(v, str))
    elif isinstance(value, list):
        for each in value:
            yield from words(each, name)
    elif isinstance(value, str) and name:
        yield value


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["client"])
async def test_a_recorded_conversation(serve: Serve, recorded: dict[str, Any]) -> None:
    prompts: list[str] = []
    async with serve(MockTransport("ok"), chat_template=TEMPLATE) as served:
        for body, warning in zip(recorded["requests"], recorded["warnings"], strict=True):
            sent = {**body, "stream": False}
            status, headers, answer = await served.post(recorded["path"], **sent)
            assert status == 200, answer
            told = headers.get("x-paceline-warning", "").split("; ")
            told = [each for each in told if each and "answers for" not in each]
            assert told == ([f"ignored unknown fields: {warning}"] if warning else [])
            prompts.append(bytes(served.transport.requests[-1].prompt_tokens).decode())
            items = [body.get("system", ""), *body.get("messages", []), *body.get("input", [])]
            for word in words({"content": items}):
                left_out = word.startswith("x-anthropic-billing-header")
                assert (word in prompts[-1]) != left_out, word
            for tool in body.get("tools", ()):
                name = tool.get("function", tool).get("name", "")
                if tool.get("type", "custom") in ("function", "custom"):
                    assert name in prompts[-1]
    *_, first, last = prompts
    assert last.startswith(first.removesuffix("<assistant>"))
