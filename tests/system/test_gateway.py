"""The official `openai` client against a gateway before a real verifier and drafter."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from calls import eventually
from openai import AsyncOpenAI
from system_support import wait_joined

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
