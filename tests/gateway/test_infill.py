"""Texts in the middle: `/infill` as of llama.cpp's server, and `suffix` of completions."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.transport import MockTransport

from .conftest import Serve, Served

MARKS = {"prefix": "PRE", "suffix": "SUF", "middle": "MID", "repo": "REPO", "file": "FILE"}
TOKENS = {f"fim_{name}_token": f"<{mark}>" for name, mark in MARKS.items()}
EXTRA = [{"filename": "a.py", "text": "one"}, {"text": "two"}]
SNIPPET = "\n\n--- snippet ---\n\n"


class Coder(MockTransport):
    """A model that has some of the tokens."""

    def __init__(self, names: Any = TOKENS, reply: str = "mid\ndle") -> None:
        super().__init__(reply)
        self.special_tokens = {"bos_token": "<end>", **{name: TOKENS[name] for name in names}}
        self.tokenizer.add_special_tokens(list(self.special_tokens.values()))
        self.json = self.tokenizer.to_str().encode()

    def prompt(self) -> str:
        tokens = list(self.requests[-1].prompt_tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(Coder()) as served:
        yield served


NEEDED = list(TOKENS)[:3]
PROMPTS: list[tuple[list[str], dict[str, Any], str]] = [
    (NEEDED, {"input_prefix": "a", "input_suffix": "b"}, "<PRE>a<SUF>b<MID>"),
    (NEEDED, {"input_prefix": "a"}, "<PRE>a<SUF><MID>"),
    (NEEDED, {"input_prefix": "a", "prompt": "c", "input_suffix": "b"}, "<PRE>ac<SUF>b<MID>"),
    (NEEDED, {"input_extra": EXTRA}, f"{SNIPPET}one{SNIPPET}two<PRE><SUF><MID>"),
    (
        list(TOKENS),
        {"input_prefix": "a", "input_extra": EXTRA},
        "<REPO>project\n<FILE>a.py\none<FILE>tmp\ntwo<FILE>file\n<PRE>a<SUF><MID>",
    ),
    (list(TOKENS), {"input_prefix": "a", "input_extra": []}, "<PRE>a<SUF><MID>"),
]


@pytest.mark.parametrize(("names", "body", "prompt"), PROMPTS)
async def test_prompts(serve: Serve, names: list[str], body: Any, prompt: str) -> None:
    async with serve(Coder(names)) as served:
        status, _, answer = await served.post("/infill", **body)
        transport: Any = served.transport
        assert (status, transport.prompt()) == (200, prompt)
        assert answer["content"] == "mid\ndle"
        if not body.get("input_extra"):
            asked = {"prompt": body.get("input_prefix", "") + body.get("prompt", "")}
            suffix = body.get("input_suffix", "")
            _, _, plain = await served.post("/v1/completions", **asked, suffix=suffix)
            assert plain["choices"][0]["text"] == "mid\ndle"
            # An empty suffix asks for nothing there, as for OpenAI.
            assert transport.prompt() == (prompt if suffix else asked["prompt"])
        ends = {transport.tokenizer.token_to_id(TOKENS[name]) for name in names}
        creates = [create for create in transport.requests if "<PRE>" in prompt]
        assert ends <= set(creates[0].stop_token_ids)


async def test_the_answer_has_the_fields_of_llama_cpp(served: Served) -> None:
    _, _, answer = await served.post("/infill", input_prefix="a", n_predict=64)
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "eos", False)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (8, 4)
    assert answer["has_new_line"] is True
    assert answer["generation_settings"]["n_ctx"] == 1 << 20
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (4, 8)
    assert {f"{name}_{what}" for name in ("prompt", "predicted") for what in (
        "n", "ms", "per_token_ms", "per_second"
    )} == timings.keys()  # fmt: skip
    _, _, cut = await served.post("/infill", input_prefix="a", n_predict=3)
    assert (cut["content"], cut["stop_type"]) == ("mid", "limit")
    _, _, stopped = await served.post("/infill", input_prefix="a", stop=["\n"])
    assert (stopped["content"], stopped["stop_type"]) == ("mid", "word")
    assert stopped["stopping_word"] == "\n"
    _, _, read = await served.post("/infill", input_prefix="a", n_predict=0, samplers=[])
    assert (read["content"], read["tokens_predicted"]) == ("", 0)
    paths = ["content", "timings/prompt_n", "truncated", "timings/none", "content/x"]
    _, _, few = await served.post("/infill", input_prefix="a", response_fields=paths)
    assert few == {"content": "mid\ndle", "timings/prompt_n": 4, "truncated": False}


async def test_it_is_greedy_unless_told(served: Served) -> None:
    for given, wanted in (({}, 0), ({"temperature": 0.5}, 0.5)):
        await served.post("/infill", input_prefix="a", **given)
        assert served.transport.requests[-1].sampling.temperature == wanted


async def test_a_stream(served: Served) -> None:
    for predict, text in ((-1, "mid\ndle"), (0, "")):
        body = {"input_prefix": "a", "stream": True, "n_predict": predict}
        _, _, told = await served.ask("POST", "/infill", json=body)
        events = [json.loads(each.removeprefix("data: ")) for each in told.split("\n\n")[:-1]]
        assert "".join(event["content"] for event in events) == text
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert "timings" in events[-1]


@pytest.mark.parametrize("missing", NEEDED)
async def test_a_model_without_one_of_the_tokens_says_so(serve: Serve, missing: str) -> None:
    async with serve(Coder(TOKENS.keys() - {missing})) as served:
        for path, body in (
            ("/infill", {"input_prefix": "a"}),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ):
            status, _, answer = await served.post(path, **body)
            assert (status, answer["error"]["code"]) == (400, "no_fim_tokens")
            assert "mock has no tokens for texts in the middle" in answer["error"]["message"]


async def test_suffixes_that_have_no_place(served: Served) -> None:
    for body in ({"prompt": [97]}, {"prompt": [[97], [98]]}, {"prompt": "a", "echo": True}):
        status, _, answer = await served.post("/v1/completions", **body, suffix="b")
        assert (status, answer["error"]["param"]) == (400, "suffix")
    _, _, answer = await served.post("/v1/completions", prompt=["a", "b"], suffix="c", n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["mid\ndle"] * 4


async def test_fields_that_need_another_form_of_answer_are_refused(served: Served) -> None:
    for name, value in (("n", 2), ("receipt", True)):
        status, _, answer = await served.post("/infill", input_prefix="a", **{name: value})
        assert (status, answer["error"]["param"]) == (400, name)
