"""Streams, from rounds to bytes: what arrives together travels together; `/v1/responses`."""

import json
from typing import Any

import pytest
from fakes.transport import MockStream, MockTransport
from openai import APIError
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent

from paceline.client import (
    CapacityError,
    InvalidRequestError,
    Receipt,
    ServerError,
    UnavailableError,
)
from paceline.v1 import verifier_pb2

from .conftest import Serve
from .test_tools import PLAIN

ROUNDS = 3  # of a message


class SeveralRounds(MockTransport):
    """Sends rounds of one token each, some in a message, and fails after `messages` of them."""

    def __init__(
        self, reply: str, messages: int | None = None, error: Exception | None = None
    ) -> None:
        super().__init__(reply)
        self.merged = 1
        self.messages = messages
        self.error = error or ServerError("the mock fails")

    def generate(self) -> Any:
        return _Stream(self)


class _Stream(MockStream):
    def __init__(self, transport: SeveralRounds) -> None:
        super().__init__(transport)
        self.left = transport.messages
        self.error = transport.error

    async def read(self) -> verifier_pb2.GenerateResponse | None:
        if self.left == 0:
            raise self.error
        if self.left is not None:
            self.left -= 1
        response = await super().read()
        while response is not None and len(response.rounds) < ROUNDS and self.credits:
            if response.rounds[-1].result.finish_reason:
                break
            more = await super().read()
            response.rounds.extend(more.rounds if more is not None else ())
        return response


async def test_rounds_of_a_message_are_one_event(serve: Serve) -> None:
    async with serve(SeveralRounds("abcdefghij"), chat_template="{{ messages[0].content }}") as to:
        stream = await to.openai.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_rounds": True},  # type: ignore[typeddict-unknown-key]
        )
        events = [event.choices[0].model_dump() async for event in stream]
    rounds = [event["rounds"] for event in events if event.get("rounds")]
    assert max(map(len, rounds)) > 1
    told = [each for group in rounds for each in group]
    assert "".join(piece for each in told for piece in each["pieces"]) == "abcdefghij"
    assert [each["index"] for each in told] == [*range(len(told))]
    assert [each["tree"] for each in told] == [None] * len(told)
    assert {each["undrafted"] for each in told} == {None, "no_drafter"}
    assert {who for each in told for who in each["proposed_by"]} == {"verifier"}
    assert sum(each["steps"] for each in told) == 10, "all but the first token, the prefill's"
    tokens = [token for each in told for token in each["token_ids"]]
    assert tokens == [*b"abcdefghij", MockTransport.END]
    assert "".join(event["delta"].get("content") or "" for event in events) == "abcdefghij"


async def test_log_probabilities_of_rounds_are_joined(serve: Serve) -> None:
    async with serve(SeveralRounds("abcdefghij")) as to:
        stream = await to.openai.completions.create(
            model="mock", prompt="x", stream=True, logprobs=1
        )
        events = [event.choices[0] async for event in stream]
    found = [event.logprobs for event in events if event.logprobs and event.logprobs.tokens]
    assert max(len(each.tokens or []) for each in found) > 1
    offsets = [offset for each in found for offset in each.text_offset or []]
    assert offsets[:10] == [*range(10)]
    assert "".join(event.text for event in events) == "abcdefghij"


async def test_what_arrived_before_an_error_is_sent(serve: Serve) -> None:
    async with serve(SeveralRounds("abcdefghij", messages=1)) as to:
        body = {"model": "mock", "prompt": "x", "stream": True}
        _, _, text = await to.ask("POST", "/v1/completions", json=body)
    lines = text.splitlines()
    *events, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in events) == "abcd"  # a: the prompt's
    assert "the mock fails" in last["error"]["message"]


async def test_clients_raise_an_error_in_mid_stream(serve: Serve) -> None:
    failing = SeveralRounds("abcdefghij", messages=1)
    async with serve(failing, chat_template="{{ messages[0].content }}") as to:
        chat: Any = [{"role": "user", "content": "x"}]
        for stream in (
            await to.openai.completions.create(model="mock", prompt="x", n=2, stream=True),
            await to.openai.chat.completions.create(model="mock", messages=chat, stream=True),
        ):
            with pytest.raises(APIError, match="the mock fails") as raised:
                async for _ in stream:
                    pass
            assert raised.value.type == "server_error"


@pytest.mark.parametrize("helper", [False, True])
async def test_an_error_of_a_response_is_an_event_with_a_type(serve: Serve, helper: bool) -> None:
    failing = SeveralRounds("abcdefghij", messages=1)
    async with serve(failing, chat_template="{{ messages[0].content }}") as to:
        if helper:
            async with to.openai.responses.stream(model="mock", input="x") as stream:
                events: list[Any] = [event async for event in stream]
        else:
            plain = await to.openai.responses.create(model="mock", input="x", stream=True)
            events = [event async for event in plain]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == "abcd"
    error, failed = events[-2:]
    assert (error.type, failed.type) == ("error", "response.failed")
    assert isinstance(error, ResponseErrorEvent)
    assert isinstance(failed, ResponseFailedEvent)
    assert "the mock fails" in error.message
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert (failed.response.error.code, failed.response.error.message) == (
        "server_error",
        error.message,
    )
    assert [item.status for item in failed.response.output] == ["incomplete"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (CapacityError("full"), "rate_limit_exceeded", "capacity"),
        (UnavailableError("gone"), "server_error", "service_unavailable"),
        (InvalidRequestError("bad", metadata={"param": "messages"}), "invalid_prompt", None),
        (ValueError("a bug"), "server_error", None),
    ],
)
async def test_codes_of_the_errors_of_a_response(
    serve: Serve, error: Exception, code: str, told: str | None
) -> None:
    failing = SeveralRounds("abcdefghij", messages=1, error=error)
    async with serve(failing, chat_template="{{ messages[0].content }}") as to:
        stream = await to.openai.responses.create(model="mock", input="x", stream=True)
        *_, event, failed = [event async for event in stream]
    assert event.type == "error"
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert failed.response.error.code == code
    assert event.code == (told or code)
    assert event.param == ("input" if isinstance(error, InvalidRequestError) else None)
    assert "a bug" not in event.message


CALLING = 'Wait.<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


async def test_a_text(serve: Serve) -> None:
    async with serve(MockTransport(str.upper), chat_template=PLAIN) as served:
        create = served.openai.responses.create
        answer = await create(model="mock", input="hi", instructions="be kind")
        assert answer.output_text == "<SYSTEM>BE KIND<USER>HI<ASSISTANT>"
        assert answer.status == "completed"
        assert answer.usage is not None
        assert answer.usage.input_tokens == len("<system>be kind<user>hi<assistant>")
        # What came back can be sent again.
        items: list[Any] = [{"role": "user", "content": "hi"}, *answer.output]
        again = await create(model="mock", input=items, max_output_tokens=3)
        assert again.status == "incomplete"
        assert again.incomplete_details is not None
        assert again.incomplete_details.reason == "max_output_tokens"
        sent = bytes(served.transport.requests[-1].prompt_tokens).decode()
        assert sent == "<user>hi<assistant><SYSTEM>BE KIND<USER>HI<ASSISTANT><assistant>"


async def test_events(serve: Serve) -> None:
    async with serve(MockTransport(CALLING), chat_template=PLAIN) as served:
        stream = await served.openai.responses.create(
            model="mock", input="hi", tools=[WEATHER], stream=True
        )
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = dict.fromkeys(event.type for event in events)
    assert list(kinds) == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.completed",
    ]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "Wait."
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]
    assert last.response.output_text == "Wait."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_a_receipt_is_in_the_answer_or_its_last_event(
    serve: Serve, path: str, stream: bool
) -> None:
    text = {"completions": "prompt", "responses": "input"}
    body: Any = {text.get(path, "messages"): "hi", "seed": 3, "stream": stream}
    if path in ("chat/completions", "messages"):
        body["messages"] = [{"role": "user", "content": "hi"}]
    async with serve(MockTransport("Hello"), chat_template=PLAIN) as served:
        for asked in (True, False):
            url, given = f"/v1/{path}", {**body, "receipt": asked}
            _, headers, content = await served.ask("POST", url, json=given)
            assert "x-paceline-warning" not in headers
            lines = content.split("\n") if stream else [f"data: {content}"]
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            events = [event for event in events if event.get("type") != "message_stop"]
            choices = [event["choices"][0] for event in events if event.get("choices")]
            found = choices or [event.get("response", event) for event in events]
            assert ["receipt" in each for each in found] == [False] * (len(found) - 1) + [asked]
            if asked:
                receipt = Receipt.from_text(json.dumps(found[-1]["receipt"]))
                sent = served.transport.requests[-1]
                assert receipt.prompt == list(sent.prompt_tokens)
                assert bytes(receipt.token_ids[:5]) == b"Hello"
                assert receipt.options.key == sent.sampling.seed == 3
