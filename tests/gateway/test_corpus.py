"""Requests as clients of OpenAI, vLLM and llama.cpp send them: the table of docs/gateway.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from paceline.client import MockTransport

from .conftest import Serve, Served

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
USER: Any = {"role": "user", "content": "a"}
ASSISTANT: Any = {"role": "assistant", "content": "b"}
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IGNORED = (
    *("best_of", "suffix", "use_beam_search", "min_tokens", "bad_words", "allowed_token_ids"),
    *("length_penalty", "truncate_prompt_tokens", "add_special_tokens", "skip_special_tokens"),
    *("include_stop_str_in_output", "priority", "cache_salt", "chat_template", "documents"),
    *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "kv_transfer_params"),
    *("n_predict", "mirostat", "dry_multiplier", "xtc_probability", "typical_p", "dynatemp_range"),
    *("cache_prompt", "id_slot", "lora", "n_probs", "return_tokens", "response_fields"),
    *("timings_per_token", "return_progress", "samplers", "post_sampling_probs"),
    *("reasoning_effort", "verbosity", "prediction", "web_search_options", "functions"),
    *("function_call", "include_reasoning", "request_id", "mm_processor_kwargs"),
)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(MockTransport("x"), chat_template=TEMPLATE) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [USER]})],
)
async def test_fields_that_are_ignored_are_named(
    served: Served, path: str, asked: dict[str, Any]
) -> None:
    for name in IGNORED:
        status, headers, _ = await served.post(f"/v1/{path}", **asked, **{name: 1})
        assert status == 200, name
        assert headers["x-paceline-warning"].endswith(f": {name}")


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (200, {"messages": [USER]}),
        (200, {"messages": [{"role": "developer", "content": "a"}, USER]}),
        (200, {"messages": [{**USER, "content": [{"type": "text", "text": "a"}]}]}),
        (200, {"messages": [{**USER, "name": "bob"}, ASSISTANT, USER]}),
        (200, {"messages": [USER, ASSISTANT]}),
        (200, {"messages": [USER, ASSISTANT, ASSISTANT]}),
        (200, {"messages": [USER], "stream_options": {"include_usage": True}}),
        (200, {"messages": [USER], "stop": ["a"] * 16}),
        (200, {"messages": [USER], "logprobs": True, "top_logprobs": 20}),
        (200, {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}),
        (200, {"messages": [USER], "tools": [], "tool_choice": None}),
        (200, {"messages": [USER], "response_format": {"type": "text"}}),
        (400, {"messages": []}),
        (400, {"messages": None}),
        (400, {"messages": "a"}),
        (400, {"messages": [1]}),
        (400, {"messages": [{}]}),
        (400, {"messages": [{"content": "a"}]}),
        (400, {"messages": [{"role": "robot", "content": "a"}]}),
        (400, {"messages": [{**USER, "content": 1}]}),
        (400, {"messages": [{**USER, "content": [IMAGE]}]}),
        (400, {"messages": [USER], "stop": ["a"] * 17}),
        (400, {"messages": [USER], "max_tokens": -1}),
        (400, {"messages": [USER], "top_logprobs": 3}),
        (400, {"messages": [USER], "logprobs": True, "top_logprobs": 21}),
        (400, {"messages": [USER], "logit_bias": [[1, 2.0]]}),
        (400, {"messages": [USER], "logit_bias": {"text": 1}}),
        (400, {"messages": [USER], "response_format": {"type": "sound"}}),
        (400, {"messages": [USER], "response_format": {"type": "json_object", "schema": 1}}),
        (400, {"messages": [USER], "response_format": {"type": "json_schema"}}),
        (400, {"messages": [USER], "modalities": ["audio"]}),
        (404, {"messages": [USER], "model": "gpt-4"}),
    ],
)
async def test_chats(served: Served, status: int, asked: dict[str, Any]) -> None:
    got, _, answer = await served.post("/v1/chat/completions", **asked)
    assert got == status, answer
    assert ("error" in answer) == (status != 200)


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (200, {"prompt": [97, 98]}),
        (200, {"prompt": [[97], [98, 99]]}),
        (200, {"prompt": ["a", "b"], "echo": True, "logprobs": 0}),
        (200, {"prompt": "a", "logprobs": 20}),
        (200, {"prompt": "a", "logit_bias": {"97": -100}}),
        (400, {}),
        (400, {"prompt": None}),
        (400, {"prompt": ""}),
        (400, {"prompt": []}),
        (400, {"prompt": [[]]}),
        (400, {"prompt": ["a", ""]}),
        (400, {"prompt": ["a", [97]]}),
        (400, {"prompt": [97, "a"]}),
        (400, {"prompt": [-1]}),
        (400, {"prompt": "a", "logprobs": 21}),
        (400, {"prompt": "a", "n": 0}),
        (400, {"prompt": "a", "temperature": -1}),
        (400, {"prompt": "a", "top_p": 1.1}),
        (400, {"prompt": "a", "seed": 1 << 64}),
        (400, {"prompt": "a", "guided_regex": "a", "guided_json": {}}),
    ],
)
async def test_completions(served: Served, status: int, asked: dict[str, Any]) -> None:
    got, _, answer = await served.post("/v1/completions", **asked)
    assert got == status, answer
    assert ("error" in answer) == (status != 200)


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (200, {"input": "a"}),
        (200, {"input": [USER], "instructions": "b", "truncation": "disabled"}),
        (200, {"input": [{"type": "reasoning", "id": "r", "summary": []}, USER]}),
        (200, {"input": "a", "text": {"format": {"type": "json_object"}}}),
        (200, {"input": [{**USER, "type": None}]}),
        (400, {"input": []}),
        (400, {"input": [{**USER, "type": {}}]}),
        (400, {"input": [{"type": "item_reference", "id": "x"}]}),
        (400, {"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}),
        (400, {"input": "a", "previous_response_id": "resp_1"}),
        (400, {"input": "a", "background": True}),
        (400, {"input": "a", "tools": [{"type": "web_search"}]}),
        (400, {"input": "a", "truncation": "auto"}),
    ],
)
async def test_responses(served: Served, status: int, asked: dict[str, Any]) -> None:
    got, _, answer = await served.post("/v1/responses", **asked)
    assert got == status, answer
    assert bool(answer.get("error")) == (status != 200)


async def test_paths_of_other_servers(served: Served) -> None:
    async with aiohttp.ClientSession() as session:
        for path in (
            *("/v1/embeddings", "/rerank", "/infill", "/slots", "/v1/messages", "/completion"),
            *("/chat/completions", "/apply-template", "/props", "/tokenizer_info", "/ping"),
            *("/load", "/metrics", "/models"),
        ):
            for method in ("GET", "POST"):
                async with session.request(method, f"{served.url}{path}", json={}) as response:
                    assert response.status == 404, path
                    assert (await response.json())["error"]["code"] == "unknown_url"
