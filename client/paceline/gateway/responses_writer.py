"""Responses of `/v1/responses`, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from paceline.client import Chunk, GenerationResult, TokenLogprob

from .calls import Call, CallParser
from .responses import ResponsesRequest
from .tools import ToolUse
from .writers import Asked, Json, Text, Writer, usage


class ResponsesWriter(Writer):
    """Formats one response: items that are a message or a call.

    Args:
        asked: The request.
        use: Its tools.
        body: The request, of which a response repeats some fields.
    """

    def __init__(self, asked: Asked, use: ToolUse, body: ResponsesRequest) -> None:
        self._asked = asked
        self._body = body
        self._parser = CallParser(use)
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = False
        self._events = 0

    def whole(self, texts: Sequence[Text]) -> Json:
        """The response as a whole."""
        (text,) = texts
        assert text.result is not None
        self._write(self._parser.push(text.result.text))
        self._write(self._parser.flush())
        self._close()
        return self._response(text.result)

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """The response without output."""
        return [
            self._event(f"response.{state}", response=self._response(None))
            for state in ("created", "in_progress")
        ]

    def chunk(self, index: int, chunk: Chunk) -> list[Json]:
        """Parts of items."""
        return self._write(self._parser.push(chunk.text))

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """The end of the last item, and the whole response."""
        events = self._write(self._parser.flush())
        if not self._output:
            events += self._begin_message()
        events += self._close()
        response = self._response(result)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        """Nothing: the last event has the usage."""
        return []

    def _write(self, parts: Sequence[str | Call]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if isinstance(part, Call):
                events += self._close() + self._call(part)
                continue
            if not self._open:
                events += self._begin_message()
            self._output[-1]["content"][0]["text"] += part
            events.append(self._part_event("output_text.delta", delta=part, logprobs=[]))
        return events

    def _begin_message(self) -> list[Json]:
        self._open = True
        message: Json = {
            "id": _new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._output.append(message)
        events = [self._item_event("added")]
        message["content"] = [{"type": "output_text", "text": "", "annotations": []}]
        return [*events, self._part_event("content_part.added", part=message["content"][0])]

    def _close(self) -> list[Json]:
        """Ends the open message."""
        if not self._open:
            return []
        self._open = False
        message = self._output[-1]
        message["status"] = "completed"
        part = message["content"][0]
        return [
            self._part_event("output_text.done", text=part["text"], logprobs=[]),
            self._part_event("content_part.done", part=part),
            self._item_event("done"),
        ]

    def _call(self, call: Call) -> list[Json]:
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._output.append(item)
        events = [self._item_event("added")]
        item |= {"status": "completed", "arguments": call.arguments}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        prefix = "response.function_call_arguments"
        return [
            *events,
            self._event(f"{prefix}.delta", **place, delta=call.arguments),
            self._event(f"{prefix}.done", **place, name=call.name, arguments=call.arguments),
            self._item_event("done"),
        ]

    def _item_event(self, what: str) -> Json:
        return self._event(
            f"response.output_item.{what}",
            output_index=len(self._output) - 1,
            item=dict(self._output[-1]),
        )

    def _part_event(self, what: str, **fields: object) -> Json:
        if "part" in fields:
            fields["part"] = dict(self._output[-1]["content"][0])
        return self._event(
            f"response.{what}",
            item_id=self._output[-1]["id"],
            output_index=len(self._output) - 1,
            content_index=0,
            **fields,
        )

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _response(self, result: GenerationResult | None) -> Json:
        body = self._body
        status, reason = "in_progress", None
        if result is not None:
            status = "incomplete" if result.finish_reason == "length" else "completed"
            reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "temperature", "top_p", "tools"),
                *("tool_choice", "parallel_tool_calls", "metadata", "text"),
            },
            by_alias=True,
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._asked.name,
            "output": [dict(item) for item in self._output],
            **repeated,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "store": False,
            "usage": None if result is None else self._usage(result),
            **({} if result is None else {"seed": result.seed}),
        }

    def _usage(self, result: GenerationResult) -> Json:
        counted = usage(self._asked, [result])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
            "speculation": counted["speculation"],
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
