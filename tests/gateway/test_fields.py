"""Fields of requests as clients send them: null, unknown, and those of other servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from paceline.client import MockTransport

from .conftest import Serve, Served

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(
        MockTransport(lambda prompt: prompt.upper()), chat_template=TEMPLATE
    ) as served:
        yield served


async def test_an_answer_can_be_sent_back(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = await served.openai.chat.completions.create(model="mock", messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "and"}]
    again = await served.openai.chat.completions.create(model="mock", messages=messages)
    assert again.choices[0].message.content == (
        "<USER>HI<ASSISTANT><USER>HI<ASSISTANT><USER>AND<ASSISTANT>"
    )


async def test_the_last_message_is_continued(serve: Serve) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    messages: list[Any] = [
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "Sure, "},
    ]
    async with serve(MockTransport(lambda prompt: prompt), chat_template=template) as served:
        create = served.openai.chat.completions.create
        more = {"continue_final_message": True}
        answer = await create(model="mock", messages=messages, extra_body=more)
        assert answer.choices[0].message.content == "<user>sure?</><assistant>Sure,"
        messages[1]["content"] = " "
        with pytest.raises(openai.BadRequestError) as raised:
            await create(model="mock", messages=messages, extra_body=more)
        assert raised.value.param == "continue_final_message"


async def test_every_optional_field_may_be_null(served: Served) -> None:
    names = (
        *("model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "stop", "stream", "stream_options", "top_k", "min_p"),
        *("repetition_penalty", "stop_token_ids", "ignore_eos", "drafter", "user", "metadata"),
        *("store", "response_format", "structured_outputs", "guided_json", "guided_regex"),
        *("guided_choice", "guided_grammar", "json_schema", "grammar", "max_tokens", "logprobs"),
        *("service_tier", "prompt_cache_key", "never_heard_of"),
    )
    nulls: dict[str, Any] = dict.fromkeys(names)
    for path, body in (
        ("/completions", {"prompt": "a", "echo": None}),
        (
            "/chat/completions",
            {
                "messages": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
                **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "top_logprobs")),
                **dict.fromkeys(("max_completion_tokens", "modalities", "chat_template_kwargs")),
            },
        ),
        ("/responses", {"input": "a", **dict.fromkeys(("instructions", "text", "reasoning"))}),
    ):
        status, headers, answer = await served.post(f"/v1{path}", **nulls, **body)
        assert status == 200, answer
        assert "x-paceline-warning" not in headers


async def test_fields_of_other_servers_mean_something(served: Served) -> None:
    await served.openai.completions.create(
        model="mock",
        prompt="a",
        extra_body={
            "top_k": -1,
            "min_p": 0.5,
            "store": True,
            "metadata": {"a": 1},
            "user": "u",
            "logit_bias": {"7": 1},
        },
    )
    sampling = served.transport.requests[-1].sampling
    assert (sampling.top_k, sampling.min_p, dict(sampling.logit_bias)) == (0, 0.5, {7: 1.0})


async def test_unknown_fields_are_named_in_a_header(served: Served) -> None:
    raw = await served.openai.chat.completions.with_raw_response.create(
        model="mock",
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True, "odd": 1},  # type: ignore[typeddict-unknown-key]
        extra_body={"best_of": 3, "b\n\u00e4d": 1},
    )
    assert raw.headers["x-paceline-warning"] == (
        "ignored unknown fields: best_of, b??d, stream_options.odd"
    )


async def test_unknown_fields_are_refused_if_strict(serve: Serve) -> None:
    async with serve(MockTransport("x"), strict=True) as served:
        with pytest.raises(openai.BadRequestError, match="unrecognized") as raised:
            await served.openai.completions.create(
                model="mock", prompt="a", extra_body={"best_of": 3}
            )
        assert raised.value.param == "best_of"


@pytest.mark.parametrize(
    ("asked", "kind", "source"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b."]}}, "regex", r"a|b\."),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
        ({"structured_outputs": {"json": {"const": 1}}}, "json_schema", '{"const": 1}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "regex", "a"),
        ({"guided_json": {"const": 1}}, "json_schema", '{"const": 1}'),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": {"const": 1}}, "json_schema", '{"const": 1}'),
        (
            {"response_format": {"type": "json_object", "schema": {"const": 1}}},
            "json_schema",
            '{"const": 1}',
        ),
    ],
)
async def test_constraints_of_other_servers(
    served: Served, asked: dict[str, Any], kind: str, source: str
) -> None:
    await served.openai.completions.create(model="mock", prompt="a", extra_body=asked)
    sampling = served.transport.requests[-1].sampling
    given = {name: getattr(sampling, name) for name in ("json_schema", "regex", "grammar")}
    assert {name: value for name, value in given.items() if value} == {kind: source}


async def test_an_echoed_prompt_has_logprobs(served: Served) -> None:
    answer = await served.openai.completions.create(
        model="mock", prompt=["abc", "de"], max_tokens=1, logprobs=0, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == "abcA"
    assert logprobs.tokens == ["a", "b", "c", "A"]
    assert logprobs.token_logprobs == [None, 0.0, 0.0, 0.0]
    assert logprobs.text_offset == [0, 1, 2, 3]
    stream = await served.openai.completions.create(
        model="mock", prompt="abc", max_tokens=1, logprobs=0, echo=True, stream=True
    )
    events = [event.choices[0] async for event in stream]
    tokens = [token for event in events if event.logprobs for token in event.logprobs.tokens or ()]
    assert tokens == logprobs.tokens


async def test_no_tokens_with_an_echo(served: Served) -> None:
    answer = await served.openai.completions.create(
        model="mock", prompt="abc", max_tokens=0, logprobs=0, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (answer.choices[0].text, logprobs.tokens) == ("abc", ["a", "b", "c"])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_many_prompts_in_one_request(served: Served) -> None:
    prompts = [f"prompt {index}" for index in range(300)]
    answer = await served.openai.completions.create(model="mock", prompt=prompts)
    assert [choice.text for choice in answer.choices] == [text.upper() for text in prompts]
    assert served.transport.open_caches == 0


async def test_tokens_of_texts_and_chats(served: Served) -> None:
    async def post(path: str, **body: Any) -> Any:
        status, _, answer = await served.post(path, **body)
        assert status == 200
        return answer

    assert (await post("/tokenize", prompt="abc"))["tokens"] == [97, 98, 99]
    assert (await post("/tokenize", content="a", return_token_strs=True))["token_strs"] == ["a"]
    pieces = (await post("/tokenize", content="ab", with_pieces=True))["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    messages = [{"role": "user", "content": "hi"}]
    chat = await post("/tokenize", messages=messages)
    assert chat["count"] == len("<user>hi<assistant>")
    chat = await post("/tokenize", messages=messages, add_generation_prompt=False)
    assert chat["count"] == len("<user>hi")
    assert await post("/detokenize", tokens=[97, 98]) == {"prompt": "ab", "content": "ab"}
    for body, message in (({}, "send one of"), ({"messages": []}, "at least 1 item")):
        status, _, answer = await served.post("/tokenize", **body)
        assert status == 400
        assert message in answer["error"]["message"]
