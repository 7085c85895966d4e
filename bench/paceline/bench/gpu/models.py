"""Models with random weights, and paged KV for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from paceline.decoder import DecoderConfig
from paceline.kernels import PagedPlane

PAGE = 256

SMALL = DecoderConfig(
    model_type="llama", layers=4, hidden=512, intermediate=1280, q_heads=8, kv_heads=2,
    head_dim=64, vocab_size=4096, max_position=8192, norm_eps=1e-5,
    rope_inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)), rope_scaling=1.0,
    windows=(None, 300, None, None), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    tied=True, eos_token_ids=(), bos_token_id=None, dtype=torch.float32, kv_dtype=torch.float32,
    weights="float32",
)  # fmt: skip

EIGHT_BILLION = replace(
    SMALL, layers=32, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128,
    vocab_size=128_256, max_position=65_536, windows=(None,) * 32, tied=False,
    rope_inv_freq=tuple(500000.0 ** (-i / 64) for i in range(64)), dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16, weights="bfloat16",
)  # fmt: skip


class RandomWeights(Mapping[str, Tensor]):
    """Weights by their Hugging Face names, each drawn when it is read."""

    def __init__(self, config: DecoderConfig, device: torch.device, seed: int) -> None:
        self._config, self._device = config, device
        self._generator = torch.Generator(device).manual_seed(seed)
        width, dim = config.hidden, config.head_dim
        q, kv, wide = config.q_heads * dim, config.kv_heads * dim, config.intermediate
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, width),
            "lm_head.weight": (config.vocab_size, width),
            "model.norm.weight": (width,),
        }
        for layer in range(config.layers):
            base = f"model.layers.{layer}."
            self._shapes |= {
                f"{base}self_attn.q_proj.weight": (q, width),
                f"{base}self_attn.k_proj.weight": (kv, width),
                f"{base}self_attn.v_proj.weight": (kv, width),
                f"{base}self_attn.o_proj.weight": (width, q),
                f"{base}mlp.gate_proj.weight": (wide, width),
                f"{base}mlp.up_proj.weight": (wide, width),
                f"{base}mlp.down_proj.weight": (width, wide),
                f"{base}input_layernorm.weight": (width,),
                f"{base}post_attention_layernorm.weight": (width,),
            }

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        drawn = torch.empty(shape, dtype=self._config.dtype, device=self._device)
        drawn.normal_(generator=self._generator)
        return drawn.mul_(1.5 * shape[-1] ** -0.5) if len(shape) > 1 else drawn.mul_(0.2).add_(1.0)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Pages:
    """KV of one sequence in shuffled pages of a pool; a cache for the decoder."""

    table = None

    def __init__(self, config: DecoderConfig, device: torch.device, slots: int) -> None:
        count = -(-slots // PAGE)
        shape = (count, config.layers, 2, config.kv_heads, PAGE, config.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=config.dtype, device=device)
        tables = torch.randperm(count).int().to(device)[None]
        self._planes = [
            (
                PagedPlane(self.pool[:, layer, 0], tables, 0, count * PAGE),
                PagedPlane(self.pool[:, layer, 1], tables, 0, count * PAGE),
            )
            for layer in range(config.layers)
        ]

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        """Keys and values of a layer."""
        return self._planes[index]
