"""LiteLLM's OpenAI provider, which `make clients` installs."""

from typing import Any

import pytest

from .conftest import MODEL, SAMPLED, TOOL, Ride

ASKED: list[Any] = [{"role": "user", "content": "ride"}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    # It would fetch a list of prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm", reason="make clients installs it")


@pytest.fixture
def asked(url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": url, "api_key": "any", **SAMPLED}


def test_completions_and_chats(litellm: Any, asked: dict[str, Any]) -> None:
    plain = asked | {"model": f"text-completion-openai/{MODEL}", "max_tokens": 20}
    text = litellm.text_completion(**plain, prompt="on and ").choices[0].text
    assert text
    pieces = litellm.text_completion(**plain, prompt="on and ", stream=True)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == text
    answer = litellm.completion(**asked, messages=ASKED).choices[0].message.content
    assert answer
    pieces = litellm.completion(**asked, messages=ASKED, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer


def test_a_call_and_its_result(litellm: Any, asked: dict[str, Any]) -> None:
    tools = {"tools": [TOOL], "parallel_tool_calls": False}
    called = litellm.completion(**asked, **tools, messages=ASKED, tool_choice="required")
    message = called.choices[0].message
    (call,) = message.tool_calls
    Ride.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*ASKED, message, result]
    answer = litellm.completion(**asked, **tools, messages=messages, tool_choice="none")
    assert answer.choices[0].message.content


def test_structured_output(litellm: Any, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, messages=ASKED, response_format=Ride)
    ride = Ride.model_validate_json(answer.choices[0].message.content)
    assert ride.model_fields_set == set(Ride.model_fields)
