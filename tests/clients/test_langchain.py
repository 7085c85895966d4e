"""LangChain's `ChatOpenAI` and `OpenAI`, which `make clients` installs."""

from typing import Any

import pytest

from .conftest import MODEL, SAMPLED, TOOL, Ride

langchain_openai = pytest.importorskip("langchain_openai", reason="make clients installs it")


@pytest.fixture
def chat(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=url, api_key="any", max_retries=0, **SAMPLED
    )


def test_completions(url: str) -> None:
    llm = langchain_openai.OpenAI(
        model=MODEL, base_url=url, api_key="any", max_retries=0, temperature=0, max_tokens=20
    )
    text = llm.invoke("on and ")
    assert text
    assert "".join(llm.stream("on and ")) == text
    assert llm.batch(["on and ", "a"])[0] == text


async def test_chats(chat: Any) -> None:
    answer = await chat.ainvoke("hi")
    assert answer.content
    assert answer.usage_metadata["input_tokens"] > 0
    pieces = [piece async for piece in chat.astream("hi")]
    assert "".join(piece.content for piece in pieces) == answer.content


def test_a_call_and_its_result(chat: Any) -> None:
    required = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    called = required.invoke("ride")
    (call,) = called.tool_calls
    Ride.model_validate(call["args"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    answer = chat.bind_tools([TOOL], tool_choice="none").invoke(
        [{"role": "user", "content": "ride"}, called, result]
    )
    assert answer.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: Any, method: str) -> None:
    if method == "json_mode":  # any object; the model is not told which
        found = chat.bind(response_format={"type": "json_object"}).invoke("ride").content
        assert found.lstrip().startswith("{")
        return
    assert isinstance(chat.with_structured_output(Ride, method=method).invoke("ride"), Ride)


def test_responses(url: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=url, api_key="any", max_retries=0, use_responses_api=True
    )
    assert chat.bind(max_output_tokens=20).invoke("hi").text
