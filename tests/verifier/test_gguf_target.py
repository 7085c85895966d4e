"""A verifier of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_gguf
from verifier_support import VOCAB, serving

from paceline.decoder import weights_fingerprint
from paceline.v1 import verifier_pb2
from paceline.verifier import build_service

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
async def test_it_serves_the_model_of_the_folder(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", models[family])
    texts = []
    for target in (models[family], file):
        async with serving(target, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
            got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
            texts.append(await client.generate(PROMPT, None, max_new_tokens=20, ignore_eos=True))
    assert texts[0] == texts[1]
    assert (got.name, got.architecture) == ("tiny", f"{family}ForCausalLM")
    assert (got.vocab_size, list(got.eos_token_ids), got.bos_token_id) == (VOCAB, [0], 1)
    assert (got.dtype, got.target_fingerprint) == ("float32", weights_fingerprint(file))


def test_a_damaged_file_is_refused_at_start(models: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", models["Llama"])
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"tiny\.gguf: tensor .* incomplete or damaged"):
        build_service(file)
