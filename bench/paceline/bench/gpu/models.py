"""Random models, and texts through paged KV: plainly, in trees, and by CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from paceline.decoder import Decoder, DecoderConfig, GraphRunner
from paceline.kernels import PagedPlane, SamplingParams, TreeSegment, choose_tokens, plan_trees

PAGE = 256

SMALL = DecoderConfig(
    model_type="llama", layers=4, hidden=512, intermediate=1280, q_heads=8, kv_heads=2,
    head_dim=64, vocab_size=4096, max_position=8192, norm_eps=1e-5,
    rope_inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)), rope_scaling=1.0,
    windows=(None, 300, None, None), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    tied=True, eos_token_ids=(), bos_token_id=None, dtype=torch.float32,
)  # fmt: skip

EIGHT_BILLION = replace(
    SMALL, layers=32, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128,
    vocab_size=128_256, max_position=65_536, windows=(None,) * 32, tied=False,
    rope_inv_freq=tuple(500000.0 ** (-i / 64) for i in range(64)), dtype=torch.bfloat16,
)  # fmt: skip


class RandomWeights(Mapping[str, Tensor]):
    """Weights by their Hugging Face names, each drawn when asked for."""

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
    """KV of one sequence in shuffled pages of a pool; a cache as the decoder sees it."""

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


class Text:
    """One text, extended by trees whose right path is accepted."""

    def __init__(self, decoder: Decoder, sampling: SamplingParams, graphs: bool = False) -> None:
        self._decoder, self._sampling = decoder, sampling
        self._pages = Pages(decoder.config, decoder.device, 2048)
        self._graphs = GraphRunner(decoder, self._pages) if graphs else None
        self.tokens: list[int] = []

    def run(self, start: int, tokens: list[int], parents: tuple[int, ...] | None) -> list[int]:
        """Token behind each node of a block at ``start``."""
        segment = TreeSegment(0, start, parents, len(tokens))
        logits = None
        if self._graphs is not None:
            found = self._graphs.forward(tokens, [segment], [0])
            logits = None if found is None else found.logits
        if logits is None:
            device = self._decoder.device
            plan = plan_trees([segment], device=device)
            logits = self._decoder.forward(
                torch.tensor(tokens, device=device), plan, [self._pages], logit_rows=None
            ).logits
        positions = [start + depth + 1 for depth in segment.depths]
        return choose_tokens(logits, [self._sampling] * len(tokens), positions)

    def prefill(self, prompt: list[int]) -> None:
        """Put in a prompt of at most 256 tokens and choose the first token."""
        self.tokens = [*prompt, self.run(0, prompt, None)[-1]]

    def step(self, drafted: list[int]) -> int:
        """Verify a tree: a trunk of drafted tokens with a wrong sibling beside each.

        Returns the number of tokens emitted.
        """
        start, tokens, parents = len(self.tokens) - 1, [self.tokens[-1]], [-1]
        trunk = [0]
        for token in drafted:
            tokens += [(token + 1) % self._decoder.config.vocab_size, token]
            parents += [trunk[-1], trunk[-1]]
            trunk.append(len(tokens) - 1)
        behind = self.run(start, tokens, tuple(parents))
        emitted = []
        for at, node in enumerate(trunk):
            emitted.append(behind[node])
            if at == len(drafted) or behind[node] != drafted[at]:
                break
        self._keep([start + node for node in trunk[1 : len(emitted)]], start + 1)
        self.tokens += emitted
        return len(emitted)

    def _keep(self, slots: list[int], start: int) -> None:
        """Move accepted keys and values up behind the anchor's."""
        device = self._decoder.device
        there = torch.tensor(slots, dtype=torch.int64, device=device)
        goals = torch.arange(start, start + len(slots), device=device)
        for layer in range(self._decoder.config.layers):
            for plane in self._pages.layer(layer):
                plane.write(goals, plane.gather(there))
