"""Requests as clients of OpenAI, vLLM and llama.cpp send them: the tables of docs/http.md."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fakes.transport import MockTransport

from paceline.gateway.bodies import Body, parse_request
from paceline.gateway.errors import ApiError
from paceline.gateway.requests import ChatRequest, CompletionRequest, Message, Tool
from paceline.gateway.responses_api import ResponsesRequest

from .conftest import Serve, Served

REPLY = str.upper
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER: Any = {"role": "user", "content": "a"}
ASSISTANT: Any = {"role": "assistant", "content": "b"}
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


VALID: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
}
KINDS: dict[str, type[Body]] = {
    "chat/completions": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
}
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {"messages": [USER]},
        {"messages": [{"role": "developer", "content": "a"}, USER]},
        {"messages": [{**USER, "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{**USER, "name": "bob"}, ASSISTANT, USER]},
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT, ASSISTANT]},
        {"messages": [USER], "stream_options": {"include_usage": True}},
        {"messages": [USER], "stop": ["a"] * 16},
        {"messages": [USER], "logprobs": True, "top_logprobs": 20},
        {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4},
        {"messages": [USER], "tools": [], "tool_choice": None},
        {"messages": [USER], "response_format": {"type": "text"}},
        {"messages": [USER], "functions": [], "function_call": ""},
    ],
    "completions": [
        {"prompt": [97, 98]},
        {"prompt": [[97], [98, 99]]},
        {"prompt": ["a", "b"], "echo": True, "logprobs": 0},
        {"prompt": "a", "logit_bias": {"97": -100}},
        {"prompt": "a", "suffix": ""},
    ],
    "responses": [
        {"input": "a"},
        {"input": [USER], "instructions": "b", "truncation": "disabled"},
        {"input": [{"type": "reasoning", "id": "r", "summary": []}, USER]},
        {"input": [{**USER, "type": None}]},
        {"input": "a", "truncation": "auto", "previous_response_id": "", "background": False},
        {"input": "a", "reasoning": {"effort": "high"}},
    ],
}


@pytest.mark.parametrize("path", ACCEPTED)
async def test_requests_that_are_served(served: Served, path: str) -> None:
    for body in ACCEPTED[path]:
        status, _, answer = await served.post(f"/v1/{path}", **body)
        assert status == 200, (body, answer)
        assert not answer.get("error")


TEXT = {"type": "text", "text": "a"}
OTHER_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "input_audio", "input_audio": {}},
    {"type": "file", "file": {}},
    {"type": "thinking", "thinking": "x"},
]
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "chat/completions": [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "a"}, "messages", "list"),
        ({"messages": [1]}, "messages.0", "valid object"),
        ({"messages": [{}]}, "messages.0.role", "required"),
        ({"messages": [{**USER, "content": [IMAGE]}]}, "messages.0.content.0", "'image_url'"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"guided_json": ""}, "guided_json", "at least 1 character"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logit_bias": [[1, 2.0]]}, "logit_bias", "valid object"),
        ({"logit_bias": {"text": 1}}, "logit_bias", "pattern"),
        ({"response_format": {"type": "sound"}}, "response_format", "'json_schema'"),
        (
            {"response_format": {"type": "json_object", "schema": 1}},
            "response_format",
            "valid object",
        ),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [CLOCK], "tool_choice": {**CLOCK, "function": {"name": "x"}}},
            "tool_choice",
            "no function 'x'",
        ),
        (
            {"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "constrained text",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        *(
            ({"messages": [{"role": role, "content": [TEXT, part]}]}, "messages.0.content.1", kind)
            for role in ("system", "developer", "user", "assistant")
            for kind, part in ((repr(part["type"]), part) for part in OTHER_PARTS)
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages.0", "required"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role", "'developer', 'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string, or"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0", "valid object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.custom.name", "required"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"tools": [{"type": "custom"}]}, "tools.0.function", "required"),
        ({"tool_choice": "must"}, "tool_choice", "'required', or: Input should be a valid object"),
        ({"tools": [{"function": {"name": "f", "parameters": 0}}]}, "tools.0", "valid object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": "json"}, "response_format", "valid object"),
        ({"functions": [CLOCK["function"]]}, "functions", "send tools"),
        ({"function_call": "auto"}, "function_call", "send tool_choice"),
        *(
            ({"messages": [{**ASSISTANT, name: {"a": "b"}}, USER]}, f"messages.0.{name}", why)
            for name, why in (("function_call", "send tool_calls"), ("audio", "transcript"))
        ),
    ],
    "completions": [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "valid string"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a", [97]]}, "prompt.1", "string"),
        ({"prompt": [97, "a"]}, "prompt.1", "valid integer"),
        ({"prompt": [-1]}, "prompt", "valid string"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "n": 65}, "n", "64"),
        ({"prompt": "a", "guided_regex": "a", "guided_json": {}}, "response_format", "one"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n", "2000 texts"),
        ({"prompt": "a", "temperature": -1}, "temperature", ">= 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
        ({"prompt": "a", "top_p": 1.1}, "top_p", "in (0, 1]"),
        ({"prompt": "a", "seed": 1 << 64}, "seed", "less than"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options", "boolean"),
        ({"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "no tokens"),
    ],
    "responses": [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{**USER, "type": {}}]}, "input.0", "not supported"),
        ({"input": [{"id": "x"}]}, "input.0", "'item_reference'"),
        ({"input": [{**USER, "content": 1}]}, "input.0.content", "input.0.content: Input"),
        (
            {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "input.0.content.0: a part of type 'input_image'",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "needs a schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stored"),
        ({"background": True}, "background", "stored"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stored"),
        ({"truncation": "some"}, "truncation", "'disabled'"),
        ({"temperature": -1}, "temperature", ">= 0"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
async def test_requests_that_are_refused_name_the_parameter(served: Served, path: str) -> None:
    for body, param, message in REFUSED[path]:
        asked = {**VALID[path], **body} if body else {}
        status, _, answer = await served.post(f"/v1/{path}", **asked)
        assert status == 400, body
        error = answer["error"]
        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").startswith(param), (body, error)
        assert message in error["message"], (body, error)


async def test_paths_of_other_servers(served: Served) -> None:
    for path in (
        *("/v1/embeddings", "/rerank", "/slots", "/completion"),
        *("/chat/completions", "/apply-template", "/props", "/tokenizer_info", "/ping"),
        *("/load", "/models", "/tokenize"),
    ):
        for method in ("GET", "POST"):
            status, _, text = await served.ask(method, path, json={})
            assert (status, json.loads(text)["error"]["code"]) == (404, "unknown_url"), path


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
        assert answer.choices[0].message.content == "<user>sure?</><assistant>Sure, "
        del messages[1]["content"]
        with pytest.raises(openai.BadRequestError) as raised:
            await create(model="mock", messages=messages, extra_body=more)
        assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize("path", KINDS)
async def test_every_optional_field_may_be_null(served: Served, path: str) -> None:
    nulls = dict.fromkeys([*KINDS[path].model_fields, "never_heard_of"])
    status, headers, answer = await served.post(f"/v1/{path}", **{**nulls, **VALID[path]})
    assert status == 200, answer
    assert "x-paceline-warning" not in headers
    if path == "chat/completions":
        message = {**USER, "name": None, "tool_calls": None}
        assert (await served.post(f"/v1/{path}", messages=[message]))[0] == 200


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
    many = {f"odd{index}": 1 for index in range(100)}
    _, headers, _ = await served.post("/v1/completions", prompt="a", **many)
    assert headers["x-paceline-warning"].endswith(", odd31 and 68 more")


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
        ({"structured_outputs": {"choice": ["a", "b."]}}, "regex", r"(?:a|b\.)"),
        ({"structured_outputs": {"choice": [""]}}, "regex", "(?:)"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
        ({"structured_outputs": {"json": {"const": 1}}}, "json_schema", '{"const": 1}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "regex", "(?:a)"),
        ({"guided_json": {"const": 1}}, "json_schema", '{"const": 1}'),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": {"const": 1}}, "json_schema", '{"const": 1}'),
        ({"response_format": {"type": "text"}}, "", ""),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_object", "schema": {"const": 1}}},
            "json_schema",
            '{"const": 1}',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}},
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
    assert {name: value for name, value in given.items() if value} == (
        {kind: source} if kind else {}
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("limit", [0, 1])
async def test_an_echoed_prompt_has_logprobs(served: Served, n: int, limit: int) -> None:
    """Also one of a single token, whose log-probability is the null of each first token."""
    asked: dict[str, Any] = {"prompt": ["abc", "d"], "max_tokens": limit, "n": n}
    asked |= {"model": "mock", "logprobs": 0, "echo": True}
    create = served.openai.completions.create
    answer = await create(**asked)
    events = [event async for event in await create(**asked, stream=True)]
    for choice in answer.choices:
        text = ["abcA", "dD"][choice.index // n][: None if limit else -1]
        streamed = [e.choices[0].logprobs for e in events if e.choices[0].index == choice.index]
        logprobs = choice.logprobs
        assert logprobs is not None
        assert (choice.text, "".join(logprobs.tokens or ())) == (text, text)
        assert logprobs.token_logprobs == [None, *[0.0] * (len(text) - 1)]
        assert logprobs.top_logprobs == [None, *({token: 0.0} for token in text[1:])]
        assert logprobs.text_offset == [*range(len(text))]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(each, name) for each in streamed if each is not None]
            assert [each for part in parts for each in part] == getattr(logprobs, name)


async def test_integers_in_the_form_of_floats(served: Served) -> None:
    """In each field, at any depth. Numbers with a fraction, and what is no number, are refused."""
    given: dict[str, Any] = {"seed": 7.0, "top_k": 3.0, "n": 2.0, "stop_token_ids": [66.0, 67]}
    for path, more in (
        ("completions", {"prompt": [97.0, 98], "max_tokens": 4.0, "logprobs": 1.0, **given}),
        ("completions", {"prompt": [[97.0], [98]], "max_tokens": 1e0, "temperature": -0.0}),
        ("chat/completions", {"max_completion_tokens": 4.0, "max_tokens": 2.0, **given}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2.0}),
        ("responses", {"max_output_tokens": 4.0, "seed": 7.0}),
    ):
        status, headers, answer = await served.post(f"/v1/{path}", **{**VALID[path], **more})
        assert (status, headers.get("x-paceline-warning")) == (200, None), answer
    for value in (4.5, "4", True, [4.0], 1e300):
        for path, name in (
            ("completions", "n"),
            ("chat/completions", "seed"),
            ("responses", "seed"),
        ):
            status, _, answer = await served.post(f"/v1/{path}", **VALID[path], **{name: value})
            assert (status, answer["error"]["param"]) == (400, name)
    schema = {"const": 1.0, "enum": [2.0]}  # a schema stays as it is
    await served.post("/v1/completions", prompt="a", json_schema=schema)
    assert served.transport.requests[-1].sampling.json_schema == '{"const": 1.0, "enum": [2.0]}'


CALL: Any = {"id": "a", "type": "function", "function": {"name": "f"}}
PART: Any = {"type": "text", "text": ""}
LISTS: list[tuple[str, str, Any, int]] = [
    ("chat/completions", "messages", USER, 4096),
    ("chat/completions", "messages.0.content", PART, 4096),
    ("chat/completions", "messages.0.tool_calls", CALL, 4096),
    ("chat/completions", "tools", CLOCK, 4096),
    ("chat/completions", "guided_choice", "a", 4096),
    ("chat/completions", "stop", "a", 16),
    ("chat/completions", "stop_token_ids", 1, 1024),
    ("completions", "prompt", "a", 1024),
    ("completions", "prompt", [97], 1024),
    ("responses", "input", USER, 4096),
    ("responses", "input.0.content", {"type": "input_text", "text": ""}, 4096),
    ("responses", "tools", {"type": "function", "name": "f"}, 4096),
]


@pytest.mark.parametrize(("path", "field", "item", "limit"), LISTS)
async def test_lists_have_a_limit(
    served: Served, path: str, field: str, item: Any, limit: int
) -> None:
    """One error tells it, however many items there are and whatever is wrong with them."""
    outer, _, inner = field.partition(".0.")
    for items in ([item] * (limit + 1), [{"a": []}] * (20 * limit)):
        body = {"max_tokens": 1} if path != "responses" else {}
        body |= VALID[path]
        body[outer] = [{"role": "assistant", inner: items}] if inner else items
        status, _, answer = await served.post(f"/v1/{path}", **body)
        error = answer["error"]
        assert status == 400
        assert len(error["message"]) < 1000
        if items[0] is item:
            assert error["param"].startswith(field)
            assert str(limit) in error["message"]


async def test_a_body_has_a_limit_of_values_and_depth(served: Served) -> None:
    for value, status in (
        ({"a": ["x"] * 131_000}, 200),
        ({"a": ["x"] * 132_000}, 400),
        ({"a": [{}] * 132_000}, 400),
        ({"a": [1] * 200_000}, 200),
        ({f"u{index}": 1 for index in range(132_000)}, 400),
        ({"a": '"[{' * 140_000}, 200),  # inside of a text, nothing counts
        ({"a": json.loads("[" * 120 + "]" * 120)}, 200),
        ({"a": json.loads("[" * 130 + "]" * 130)}, 400),
        ({"a": "[" * 9999}, 200),
    ):
        found, _, answer = await served.post(
            "/v1/completions", prompt="a", max_tokens=1, metadata=value
        )
        assert found == status
        if status == 400:
            assert answer["error"]["code"] == "request_too_complex"


def places(value: Any, half: str) -> Iterator[Any]:
    """Copies of a value, with each of its texts and names in turn followed by `half`."""
    if isinstance(value, str):
        yield value + half
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from ([*value[:index], new, *value[index + 1 :]] for new in places(each, half))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from ({**value, name: new} for new in places(each, half))
            yield {**value, name + half: each}


@pytest.mark.parametrize("encoding", ["escaped", "utf-8", "utf-16", "utf-32-be"])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(encoding: str) -> None:
    more = {"user": "a", "stop": ["a"], "tools": [CLOCK], "guided_json": {"enum": ["a"]}}
    for path, kind in KINDS.items():
        for body in (*ACCEPTED[path], more):
            for half in ("\ud83d", "\udfff"):
                for changed in places(body, half):
                    if encoding == "escaped":
                        content = json.dumps(changed).encode()
                    else:
                        written = json.dumps(changed, ensure_ascii=False)
                        content = written.encode(encoding, "surrogatepass")
                    with pytest.raises(ApiError) as raised:
                        parse_request(content, kind, strict=False)
                    assert raised.value.status == 400
                    if encoding == "escaped":
                        (wrong,) = [k for k in changed if k not in body or changed[k] != body[k]]
                        assert raised.value.param == wrong.encode(errors="replace").decode()


@pytest.mark.parametrize("fields", [{}, {"description": None, "strict": None}])
def test_a_template_is_given_tools_as_they_were_sent(fields: dict[str, Any]) -> None:
    """In their order, and with the nulls of their schemas, which mean something."""
    schema = {
        "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
        "additionalProperties": {"enum": [None]},
        "type": "object",
        "default": None,
    }
    function = {"parameters": schema, "strict": True, "name": "f"}
    tool = Tool.model_validate({"function": {**function, **fields}, "type": "function"})
    wanted = {name: value for name, value in {**function, **fields}.items() if value is not None}
    found = tool.for_template()
    assert found == {"type": "function", "function": wanted}
    assert json.dumps(found["function"]) == json.dumps(wanted)


@pytest.mark.parametrize("named", [{}, {"id": ""}, {"id": None}, {"id": "abcdefgh1"}])
def test_a_call_without_an_id_has_none_in_a_template(named: dict[str, Any]) -> None:
    call = {**named, "function": {"name": "f", "arguments": "{}"}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()
    assert ("id" in message["tool_calls"][0]) is bool(named.get("id"))
