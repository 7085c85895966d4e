"""Failing steps, draining, the model's description."""

import asyncio
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import refusal
from gguf_files import write_gguf
from tokenizers import Tokenizer, models
from verifier_support import CONTEXT, PROMPT, VOCAB, Client, Serve, tokens_of

from paceline.convert import weights_fingerprint
from paceline.decoder import BatchInvariance
from paceline.v1 import verifier_pb2
from paceline.verifier import build_service

FIELDS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


async def test_draining_lets_generations_end(client: Client) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    request = verifier_pb2.GetModelRequest()
    told = await client.stub.GetModel(request)
    assert (told.draining, told.generations) == (False, 1)
    drain = asyncio.create_task(client.service.drain())
    await asyncio.sleep(0)
    told = await client.stub.GetModel(request)
    assert (told.draining, told.generations) == (True, 1)
    call = client.stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT))
    assert await refusal(call) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    tokens = [*created.first.tokens, *tokens_of(await client.steps(created.handle, 5))]
    assert not drain.done()
    tokens += await client.rest(created.handle, len(tokens))
    await drain
    assert tokens == plain
    assert (await client.stub.GetModel(request)).generations == 0


async def test_model(client: Client, model: Path) -> None:
    got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert got.name == "Llama"
    assert got.architecture == "LlamaForCausalLM"
    assert (got.vocab_size, got.max_context, got.max_tree_nodes) == (VOCAB, CONTEXT, 255)
    assert (got.layers, got.kv_heads, got.head_dim, got.hidden_size) == (2, 2, 16, 48)
    assert (list(got.eos_token_ids), got.bos_token_id) == ([0], 1)
    assert (got.dtype, got.weights) == ("float32", "float32")
    assert (got.batch_invariant, got.batch_invariance_reason) == (True, "")
    rules = {rule.region: rule for rule in got.numerics}
    assert rules["numerics"].implementation == "portable"  # float32, on every processor
    assert rules["linear layer"].implementation == "chain of FMAs"
    assert len(rules["check"].constants["logits"]) == 64
    assert got.target_fingerprint == weights_fingerprint(model)
    assert got.lease_ms == 30_000
    assert len(got.instance_id) == 32
    assert got.tokenizer_digest == ""
    assert got.chat_template == ""


async def test_a_lack_of_batch_invariance_is_reported_and_logged(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = BatchInvariance(False, "a layer of 8 to 9 differs; do this", "0" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the result is kept there
    monkeypatch.setattr("paceline.verifier.model.check_batch_invariance", lambda decoder: found)
    async with serve() as client:
        got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert (got.batch_invariant, got.batch_invariance_reason) == (False, found.reason)
    assert not got.numerics, "nothing is promised"
    assert found.reason in caplog.text


async def test_tokenizer(serve: Serve, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    raw = Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str().encode()
    (folder / "tokenizer.json").write_bytes(raw)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    digest = hashlib.sha256(raw).hexdigest()
    async with serve(folder) as client:
        for fields, sent in (
            ({}, True),
            ({"known_tokenizer_digest": "another"}, True),
            ({"known_tokenizer_digest": digest}, False),
            ({"omit_tokenizer": True}, False),
        ):
            got = await client.stub.GetModel(verifier_pb2.GetModelRequest(**fields))
            assert (got.tokenizer_digest, got.chat_template) == (digest, "{{ x }}")
            assert gzip.decompress(got.tokenizer_gzip) == (raw if sent else b"")


ON = "cuda_graphs is 'on', and .*{}.*: expected auto or"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"lease_seconds": value}, "expected") for value in (0, float("nan"))),
        *(({"max_context": value}, "expected") for value in (1, CONTEXT + 1)),
        *(({"device": value}, "expected") for value in ("cuda:99", "tpu")),
        *(({"kv_bytes": -1}, "expected"), ({"node_budget": 256}, "expected")),
        ({"weights": "int7"}, "expected"),
        ({"cuda_graphs": "on", "device": "cpu"}, ON.format("device is cpu")),
        ({"cuda_graphs": "on", "device": "auto"}, ON.format("there is no GPU here")),
        ({"paged_kv": True, "kv_cache_dtype": "int8"}, "'int8', expected auto: KV in pages"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_service(model, **options)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
async def test_a_gguf_file_serves_the_model_of_its_folder(
    serve: Serve, family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", models[family])
    texts = []
    for target in (models[family], file):
        async with serve(target) as client:
            got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
            texts.append(await client.generate(PROMPT, None, max_new_tokens=20, ignore_eos=True))
    assert texts[0] == texts[1]
    assert (got.name, got.architecture) == ("tiny", f"{family}ForCausalLM")
    assert (got.vocab_size, list(got.eos_token_ids), got.bos_token_id) == (VOCAB, [0], 1)
    assert (got.dtype, got.target_fingerprint) == ("float32", weights_fingerprint(file))
