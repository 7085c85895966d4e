"""Compiles the kernels of a verifier's warm-up for GPUs that are not there.

    python -m paceline.verifier.compile_ahead 80 90 100 [--model FOLDER ...] [--weights FORMAT ...]

It fills Triton's cache with what a first start on such a GPU looks up, for models of the shapes
below or of the config.json in each folder, in bfloat16 and int8. Images for GPUs are built with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.decoder import Decoder, GraphRunner
from paceline.decoder.config import decoder_config
from paceline.kernels import SamplingParams, register_backend
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool

_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072}

MODELS: tuple[dict[str, Any], ...] = (
    {  # Llama 3 8B
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    {  # Llama 3 70B
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    {  # Qwen3 8B
        "model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    {  # SmolLM2 135M
        **_LLAMA, "vocab_size": 49_152, "max_position_embeddings": 8192,
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
)  # fmt: skip

_META = torch.device("meta")
_KV_BYTES = 1 << 40  # of memory that is not there


def compile_for(capability: int, folders: Sequence[Path], formats: Sequence[str]) -> int:
    """Compile what models in some formats of weights need on a GPU of a compute capability; returns
    the number of kernels."""
    import triton

    from paceline.kernels._triton.ahead import compile_only
    from paceline.kernels._triton.backend import TritonBackend

    compiled: set[str] = set()

    def note(*, metadata: dict[str, Any], **_: object) -> None:
        compiled.add(metadata["hash"])

    triton.knobs.compilation.listener = note
    compile_only(capability)
    register_backend("meta", TritonBackend)
    configs = [AutoConfig.from_pretrained(folder) for folder in folders]
    for hf in configs or [AutoConfig.for_model(**shape) for shape in MODELS]:
        with _META:
            model = AutoModelForCausalLM.from_config(hf).bfloat16()
        for each in formats:
            _warm_up(Decoder(decoder_config(hf, (), each), model.state_dict(), _META))
    return len(compiled)


def _warm_up(decoder: Decoder) -> None:
    """Launch what a verifier launches before it is ready."""
    from paceline.kernels._triton.backend import perturbed

    config = decoder.config
    layout, longest = KvLayout.of(config), config.max_position
    pool = PagePool(layout, _META, kv_bytes=_KV_BYTES, max_sequences=1, max_context=longest)
    for _ in GraphRunner(decoder, pool).warm_up():
        pass
    row = torch.empty(1, config.vocab_size, dtype=config.dtype, device=_META)
    perturbed(row, [SamplingParams(top_k=1)], [0])  # all kernels


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("capabilities", type=int, nargs="+", help="such as 90 for sm_90")
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="with a config.json")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int8"], help="bfloat16, int8")
    args = parser.parse_args()
    # A process each: Triton keeps the target of a kernel's first launch.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        compile_models = partial(compile_for, folders=args.model, formats=args.weights)
        counts = pool.map(compile_models, args.capabilities)
        for capability, count in zip(args.capabilities, counts, strict=True):
            print(f"sm_{capability}: {count} kernels", flush=True)


if __name__ == "__main__":
    main()
