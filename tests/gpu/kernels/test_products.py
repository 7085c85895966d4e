"""Bits of rows on a GPU: of products, and of the steps that a verifier serves."""

from dataclasses import replace

import pytest
import torch

from paceline.bench.gpu.cases import EIGHT_BILLION, SMALL, RandomWeights
from paceline.convert import Packer
from paceline.cuda.graphs import GraphRunner
from paceline.cuda.products import describe_device, fix_decoder, use_library_without_splits
from paceline.decoder import Decoder, DecoderConfig
from paceline.device import device_of
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.served import check_states, check_steps

pytestmark = pytest.mark.gpu

MIXTURE = replace(
    SMALL, model_type="qwen3_moe", layers=2, windows=(None, None), intermediate=256, experts=16,
    experts_per_token=4, qk_norm=True, norm_topk_prob=True,
)  # fmt: skip
CONFIGS = {
    "8B in int8": replace(EIGHT_BILLION, layers=2, windows=(None, None), weights="int8"),
    "mixture": replace(
        MIXTURE, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, weights="bfloat16"
    ),
    "mixture in float32": MIXTURE,
    "8B": replace(EIGHT_BILLION, layers=2, windows=(None, None)),
    "float32": replace(SMALL, layers=2, windows=(None, 300)),
    "bfloat16": replace(
        SMALL, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, weights="bfloat16"
    ),
}  # fmt: skip


def fixed(config: DecoderConfig, device: torch.device) -> Decoder:
    use_library_without_splits(fixed=True)
    decoder = Decoder(config, Packer(config, RandomWeights(config, device, 0), device), device)
    fix_decoder(decoder)
    return decoder


@pytest.mark.parametrize("name", CONFIGS)
def test_products_keep_the_bits_of_rows(device: torch.device, name: str) -> None:
    found = fixed(CONFIGS[name], device).products
    assert found is not None
    print(f"{describe_device(device)}, {found}")
    assert not found.differs


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_keep_the_bits_of_rows(device: torch.device, name: str) -> None:
    """In trees and chains, beside other texts, behind prompts in any parts and behind a resume, and
    where hidden states are recorded."""
    config = CONFIGS[name]
    decoder = fixed(config, device)
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.kv_dtype)
    pool = PagePool(layout, device_of(device), kv_bytes=1 << 28, max_sequences=4, max_context=2048)
    graphs = GraphRunner(decoder, pool, required=True)
    with torch.inference_mode():
        found = check_steps(decoder, graphs, pool)
        cache = pool.allocate(graphs.shapes[-1], None)
        cache.reserve(cache.capacity)
        taps = (0, config.layers - 1)
        differs = [check_states(decoder, graphs, cache, taps, rows) for rows in graphs.shapes]
    cache.close()
    pool.close()
    assert (found.reason, "".join(differs)) == ("", "")
