"""`/v1/responses` with the official client."""

from typing import Any

from fakes.transport import MockTransport

from .conftest import Serve
from .test_tools import PLAIN

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
