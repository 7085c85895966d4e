"""The official `openai` client against a gateway before a real verifier and drafter."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from calls import eventually
from openai import AsyncOpenAI
from system_support import wait_joined
from tiny_models import write_ending_model

from paceline.client import Client
from paceline.harness import ServiceProcess

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
PROMPT = "the rider behind the leader and the rider behind "
SAMPLED: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.4, "frequency_penalty": 0.2,
}  # fmt: skip
OWN: dict[str, Any] = {"min_p": 0.01, "top_k": 40, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def verifier(verifiers: Callable[[str], ServiceProcess], drafter: ServiceProcess) -> ServiceProcess:
    served = verifiers("llama")
    wait_joined(served.address, name="lm")
    return served


def gateway_process(verifier: ServiceProcess, *more: str) -> ServiceProcess:
    return ServiceProcess("gateway", ["--verifier-address", verifier.address, *more])


@pytest.fixture(scope="module")
def gateway(
    verifier: ServiceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "key").write_text("secret\n")
    (folder / "template").write_text(TEMPLATE)
    arguments = ["--api-key-file", str(folder / "key"), "--chat-template", str(folder / "template")]
    with gateway_process(verifier, *arguments) as process:
        yield process


@pytest.fixture
async def api(gateway: ServiceProcess) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{gateway.address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as api:
        yield api


async def test_the_text_is_the_clients_with_any_drafter(
    api: AsyncOpenAI, verifier: ServiceProcess
) -> None:
    bias = {65: 3.0, 66: -100.0}
    async with Client(verifier.address, cache_dir=None) as client:
        expected = await client.generate(
            PROMPT, max_new_tokens=48, logit_bias=bias, **SAMPLED, **OWN
        )
    for name in ("none", "lm", "lm@1", "ngram", "random-tree"):
        answer = await api.completions.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=48,
            logit_bias={str(token): value for token, value in bias.items()},  # type: ignore[misc]
            extra_body={**OWN, "drafter": name},
            **SAMPLED,
        )
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 48
        speculation = answer.usage.model_dump()["speculation"]
        versions = {version.partition("@")[0] for version in speculation["drafter_versions"]}
        assert versions <= ({name.partition("@")[0], "local"} if name != "none" else set())
        assert (speculation["drafted"] > 0) == bool(versions)


async def test_choices_share_a_prompt_and_count_seeds_up(api: AsyncOpenAI) -> None:
    many = await api.completions.create(
        model="llama", prompt=[PROMPT, "on"], n=3, max_tokens=16, temperature=1.0, seed=2**64 - 2
    )
    alone = [
        await api.completions.create(
            model="llama", prompt=prompt, max_tokens=16, temperature=1.0, seed=seed
        )
        for prompt in (PROMPT, "on")
        for seed in (2**64 - 2, 2**64 - 1, 0)
    ]
    texts = [choice.text for choice in many.choices]
    assert texts == [answer.choices[0].text for answer in alone]
    assert len(set(texts)) == 6
    assert [choice.index for choice in many.choices] == list(range(6))


async def test_a_turn_reuses_the_prompt_of_the_one_before(api: AsyncOpenAI) -> None:
    """The fixture's tokenizer has a token for each byte; prefixes are whole chunks of 64 tokens."""
    first = "A prompt that no other test has, and that is long enough to be kept. " * 3
    cached = []
    for prompt in (first, first + "more"):
        answer = await api.completions.create(model="llama", prompt=prompt, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert 128 <= cached[1] < len(first) + 4


async def test_a_streamed_chat_is_the_whole_one(api: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "llama",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_completion_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        **SAMPLED,
    }
    whole = await api.chat.completions.create(**asked)
    stream = await api.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    events = [event async for event in stream]
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.usage is not None for event in events] == [False] * (len(events) - 1) + [True]
    choices = [event.choices[0] for event in events[:-1]]
    content = "".join(choice.delta.content or "" for choice in choices)
    assert content == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    noted = [n for c in choices if c.logprobs for n in c.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert noted == whole.choices[0].logprobs.content
    assert len(noted) == 24
    assert all(len(note.top_logprobs) == 3 for note in noted)
    raw = b"".join(bytes(note.bytes or ()) for note in noted)
    assert raw.decode(errors="replace") == content

    rendered = await api.completions.create(
        model="llama", prompt=f"[user]{PROMPT}[assistant]", max_tokens=24, **SAMPLED
    )
    assert rendered.choices[0].text == content
    assert events[-1].usage is not None
    assert rendered.usage is not None
    assert events[-1].usage.prompt_tokens == rendered.usage.prompt_tokens


async def test_an_echo_has_the_logprobs_of_the_generation(api: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "llama", "temperature": 0, "logprobs": 2}
    written = (await api.completions.create(**asked, prompt=PROMPT, max_tokens=16)).choices[0]
    whole = PROMPT + written.text
    answer = await api.completions.create(**asked, prompt=whole, max_tokens=0, echo=True)
    scored = answer.choices[0]
    assert written.logprobs is not None
    assert scored.logprobs is not None
    assert scored.text == whole
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    # Where the text is tokenized as it was written, its log-probabilities are those of then.
    tokens, again = written.logprobs.tokens or [], scored.logprobs.tokens or []
    if again[-len(tokens) :] == tokens:
        assert scored.logprobs.token_logprobs[-len(tokens) :] == pytest.approx(
            written.logprobs.token_logprobs, abs=1e-4
        )


async def test_errors_are_the_openai_clients(api: AsyncOpenAI, gateway: ServiceProcess) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await api.completions.create(model="llama", prompt=[1] * 2048)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="320 token ids"):
        await api.completions.create(model="llama", prompt=[320], stream=True)
    with pytest.raises(openai.NotFoundError, match="ngram") as unknown:
        await api.completions.create(model="llama", prompt="a", extra_body={"drafter": "nobody"})
    assert (unknown.value.code, unknown.value.param) == ("drafter_not_found", "drafter")
    with pytest.raises(openai.AuthenticationError):
        await api.with_options(api_key="wrong").models.list()
    card = (await api.models.list()).data[0].model_dump()
    assert (card["id"], card["max_model_len"]) == ("llama", 2048)
    assert {"lm", "ngram"} <= set(card["drafters"])


@pytest.mark.slow
async def test_json_by_a_schema_with_any_drafter(tmp_path: Path) -> None:
    """A model whose last token ends a text; it drafts for itself, so that much would stand."""
    folder = tmp_path / "ending"
    write_ending_model(folder)
    schema = {
        "type": "object",
        "properties": {
            "gear": {"enum": ["road", "track", "gravel"]},
            "laps": {"type": "integer", "minimum": 0, "maximum": 999},
            "rider": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        },
        "required": ["gear", "laps", "rider"],
        "additionalProperties": False,
    }
    texts = list[str]()
    load = ["--load", f"lm=lm:{folder}", "--load", "ngram=ngram"]
    # Drafting pays for no model so small: the scheduler would stop it.
    arguments = ["--target", str(folder), "--weights", "float32", "--schedule", "off"]
    async with (
        ServiceProcess("verifier", arguments) as verifier,
        ServiceProcess("drafter", [*load, f"--verifier={verifier.address}"]),
        gateway_process(verifier) as gateway,
        AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="any", max_retries=0) as api,
    ):

        async def drafted(name: str) -> bool:
            """Generate; returns whether the drafter was in time."""
            answer = await api.completions.create(
                model="ending",
                prompt=PROMPT,
                max_tokens=400,
                extra_body={
                    "drafter": name,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "ride", "schema": schema},
                    },
                },
                **SAMPLED,
            )
            assert answer.choices[0].finish_reason == "stop"
            texts.append(answer.choices[0].text)
            assert answer.usage is not None
            return bool(answer.usage.model_dump()["speculation"]["drafted"] > 0)

        assert not await drafted("none")
        await drafted("ngram")  # It may find nothing to look up.
        async with asyncio.timeout(300):
            while not await drafted("lm"):
                pass
    value = json.loads(texts[0])
    assert list(value) == ["gear", "laps", "rider"]
    assert value["gear"] in ("road", "track", "gravel")
    assert 0 <= value["laps"] <= 999
    assert len(set(texts)) == 1


async def test_a_signal_lets_streams_finish(verifier: ServiceProcess) -> None:
    async with gateway_process(verifier) as gateway:
        url = f"http://{gateway.address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as api:
            stream = await api.completions.create(
                model="llama", prompt=PROMPT, max_tokens=400, stream=True
            )
            events = [await anext(stream)]
            gateway.send_signal(signal.SIGTERM)
            events += [event async for event in stream]
        assert events[-1].choices[0].finish_reason == "length"
        await asyncio.to_thread(
            eventually, lambda: gateway.returncode is not None, "the gateway has ended"
        )
        assert gateway.returncode == 0
