"""Verifier and selfspec drafter on one machine share one copy of the target's weights."""

from pathlib import Path

import pytest
import torch
from system_support import EAGER, make_prompts
from tiny_models import VOCABULARY, write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.client import Client
from paceline.harness import ServiceProcess

THREADS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to be seen beside a process's other memory: 40 MiB."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=4096, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def private_bytes(process: ServiceProcess) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def mapped_bytes(process: ServiceProcess, name: str) -> tuple[int, int]:
    """Resident memory of a mapped file, and how much of it is this process's alone."""
    resident = private = 0
    counts = False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            counts = name in line
        elif counts and first == "Rss:":
            resident += 1024 * int(line.split()[1])
        elif counts and first.startswith("Private_"):
            private += 1024 * int(line.split()[1])
    return resident, private


@pytest.mark.slow
async def test_there_is_one_copy_of_the_weights(target: Path) -> None:
    weights = (target / "model.safetensors").stat().st_size

    def drafting(share: str, verifier: str) -> ServiceProcess:
        load = f"selfspec=selfspec:{target},share_weights={share},kv=map,context=64"
        arguments = [f"--load={load}", f"--verifier={verifier}"]
        return ServiceProcess("drafter", arguments, environment=THREADS)

    (prompt,) = make_prompts(1)
    arguments = ["--target", str(target), "--share-weights", "--schedule", "off"]
    texts = []
    with drafting("auto", "127.0.0.1:9") as drafter:
        with_own_copy = private_bytes(drafter)
    with (
        ServiceProcess("verifier", arguments, environment=THREADS) as verifier,
        drafting("always", verifier.address) as drafter,
    ):
        assert with_own_copy - private_bytes(drafter) > 0.9 * weights
        async with Client(verifier.address, drafting=EAGER) as client:
            for name in ("none", "selfspec"):
                text = await client.generate(
                    prompt * 4, max_new_tokens=24, drafter=name, ignore_eos=True
                )
                texts.append(text.token_ids)
        assert text.stats.accepted > 0
        for process in (verifier, drafter):
            resident, alone = mapped_bytes(process, "weights.bin")
            assert resident > 0.95 * weights
            assert alone < 0.05 * weights, "rows of the embedding that nobody else has read"
        assert with_own_copy - private_bytes(drafter) > 0.9 * weights
        verifier.kill()
        resident, _ = mapped_bytes(drafter, "weights.bin")
        assert resident > 0.95 * weights, "the drafter keeps what it has mapped"
    assert texts[0] == texts[1]
