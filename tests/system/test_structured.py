"""JSON by a schema, through real processes: valid, and the same tokens whoever drafts."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, InvalidRequestError
from paceline.client._options import GenerationOptions
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

END = 300
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "gear": {"enum": ["road", "track", "gravel"]},
        "laps": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,4}$"},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["gear", "laps", "names"],
    "additionalProperties": False,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T1": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def verifier(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """The tiny model again, with a token that ends a text."""
    folder = tmp_path_factory.mktemp("ends") / "llama"
    shutil.copytree(models["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": END}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<spare{END}>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    arguments = ["--target", str(folder), "--dtype", "float32"]
    with ServiceProcess("verifier", arguments) as process:
        yield process


@pytest.fixture
async def client(verifier: ServiceProcess, drafter: ServiceProcess) -> AsyncIterator[Client]:
    async with Client(verifier.address, drafter=drafter.address, cache_dir=None) as client:
        yield client


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"gear", "laps", "names"}
    assert value["gear"] in ("road", "track", "gravel")
    assert 0 <= value["laps"] <= 999
    assert 1 <= len(value["names"]) <= 3
    assert all(name.isalpha() and len(name) <= 4 for name in value["names"])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_valid_and_identical_whoever_drafts(client: Client, sampling: dict[str, Any]) -> None:
    accepted = 0
    for seed in range(4):
        options = {"max_new_tokens": 400, "json_schema": SCHEMA, "seed": seed, **sampling}
        plain = await client.generate("a race: ", drafter="none", **options)
        assert plain.finish_reason == "stop"
        assert plain.token_ids[-1] == END
        check(plain.text)
        for name in ("lm", "ngram", "random-tree"):
            drafted = await client.generate("a race: ", drafter=name, **options)
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.accepted
    assert accepted > 0, "no draft was ever of use: the masks were not tried on a tree's path"


async def test_rejection_sampling_follows_the_schema_too(client: Client) -> None:
    for seed in range(3):
        result = await client.generate(
            "a race: ",
            drafter="lm",
            acceptance="rejection",
            temperature=1.0,
            max_new_tokens=400,
            json_schema=SCHEMA,
            seed=seed,
        )
        assert result.finish_reason == "stop"
        check(result.text)


async def test_a_text_goes_on_after_what_was_emitted(
    client: Client, verifier: ServiceProcess
) -> None:
    """As after a restart: where the text stands in its schema follows from its tokens."""
    options: dict[str, Any] = {"json_schema": SCHEMA, "temperature": 1.0, "seed": 3}
    whole = (await client.generate("a race: ", max_new_tokens=400, **options)).token_ids
    prompt = await (await client.model()).encode("a race: ")
    sampling = GenerationOptions(json_schema=json.dumps(SCHEMA), temperature=1.0, seed=3).sampling()
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]

        async def next_token(output: list[int]) -> int:
            request = verifier_pb2.CreateCacheRequest(
                prompt_tokens=prompt, output_tokens=output, sampling=sampling
            )
            answers = [answer async for answer in stub.CreateCache(request)]
            await stub.ReleaseCache(
                verifier_pb2.ReleaseCacheRequest(handle=answers[-1].created.handle)
            )
            return int(answers[-1].created.first.tokens[0])

        for cut in range(0, len(whole), 7):
            assert await next_token(whole[:cut]) == whole[cut]
        with pytest.raises(grpc.aio.AioRpcError, match="follow its schema"):
            await next_token([*whole[:5], whole[0]])


async def test_bad_schemas_are_the_callers_fault(client: Client) -> None:
    for schema in ({"type": "nonsense"}, "no json", {"not": {}}, {"enum": ["x" * 70_000]}):
        with pytest.raises(InvalidRequestError, match="schema"):
            await client.generate("a", json_schema=schema, max_new_tokens=4)


async def test_the_openai_client_gets_structured_output(
    verifier: ServiceProcess, drafter: ServiceProcess, tmp_path: Path
) -> None:
    (tmp_path / "template").write_text("{{ messages[-1].content }}")
    services = ["--verifier-address", verifier.address, "--drafter-address", drafter.address]
    template = ["--chat-template", str(tmp_path / "template")]
    async with ServiceProcess("gateway", [*services, *template]) as gateway:
        url = f"http://{gateway.address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as api:
            asked: dict[str, Any] = {
                "model": "llama",
                "messages": [{"role": "user", "content": "a race: "}],
                "seed": 5,
            }
            named = {"name": "race", "schema": SCHEMA, "strict": True}
            texts = set()
            for name in ("none", "ngram"):
                answer = await api.chat.completions.create(
                    **asked,
                    response_format={"type": "json_schema", "json_schema": named},  # type: ignore[typeddict-item]
                    extra_body={"drafter": name},
                )
                content = answer.choices[0].message.content or ""
                check(content)
                texts.add(content)
            assert len(texts) == 1
            free = await api.completions.create(
                model="llama",
                prompt="a",
                max_tokens=40,
                extra_body={"response_format": {"type": "json_object"}},
            )
            assert free.choices[0].text.startswith("{")
            wrong = {**named, "schema": {"type": "nonsense"}}
            with pytest.raises(openai.BadRequestError, match="nonsense") as raised:
                await api.chat.completions.create(
                    **asked,
                    response_format={"type": "json_schema", "json_schema": wrong},  # type: ignore[typeddict-item]
                )
            assert raised.value.code == "invalid_schema"
