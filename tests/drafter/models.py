"""Random tiny models, and dense references of their trees."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.decoder import Decoder, LocalCache
from paceline.decoder.sampling import sampling_params
from paceline.drafter.methods.base import GenerationInfo, Resources
from paceline.drafter.methods.lm import LmDrafter, LmSequence
from paceline.drafter.methods.slots import chain_segments
from paceline.kernels import History, choose_token, filter_logits, gumbel_noise, plan_trees
from paceline.train.acceptance import RecordedKv
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2

VOCAB = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # the compiled kernels take multiples of 16
    "max_position_embeddings": 2048,
    # Sharper than the usual initialisation, so that choices differ clearly.
    "initializer_range": 0.3,
}

GREEDY = sampling_pb2.SamplingParams()
SAMPLINGS = {
    "greedy": GREEDY,
    "T=1": sampling_pb2.SamplingParams(temperature=1.0, seed=2**63 + 5),
    "filtered": sampling_pb2.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=3
    ),
    "penalised": sampling_pb2.SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={4: 2.0, 5: -3.0}, seed=9,
    ),
    "greedy penalised": sampling_pb2.SamplingParams(repetition_penalty=1.5, logit_bias={7: 1.0}),
}  # fmt: skip


def write_model(folder: Path, family: str = "llama", seed: int = 0, **shape: Any) -> Path:
    """Save a random model in fp32, with a tokenizer; the same arguments give the same weights."""
    torch.manual_seed(seed)
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    model(config(**{**_SHAPE, **shape})).save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Rewrite fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def load(folder: Path, **options: str) -> LmDrafter:
    """The method `lm` on a model."""
    return LmDrafter.load(folder, options, Resources())


def start(
    drafter: LmDrafter, text: Sequence[int], sampling: sampling_pb2.SamplingParams = GREEDY
) -> LmSequence:
    """Starts a generation of a prompt."""
    return drafter.start(GenerationInfo(text, len(text), VOCAB, sampling))


def text_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    draws = random.Random(seed)
    return [draws.randrange(VOCAB) for _ in range(length)]


def forward(
    decoder: Decoder, text: Sequence[int], room: int = 0
) -> tuple[torch.Tensor, LocalCache]:
    """Logits after the text, and its KV with room for more, by one pass over all of it."""
    cache = LocalCache(decoder.config)
    cache.reserve(len(text) + room)
    plan = plan_trees(chain_segments(0, 0, len(text)))
    last = torch.tensor([len(text) - 1])
    logits = decoder.forward(torch.tensor(text), plan, [cache], logit_rows=last).logits
    return logits[0], cache


@torch.inference_mode()
def greedy(
    folder: Path, text: Sequence[int], rounds: Sequence[tuple[int, Sequence[int]]], count: int
) -> list[int]:
    """Tokens that transformers writes after `text`.

    `rounds` are, of each round, where it began to feed tokens and what it saw of those before.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(text)
    for _ in range(count):
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for begin, chosen in rounds:
            seen[begin:, :begin] = False
            seen[begin:, list(chosen)] = True
        mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
        logits = model(torch.tensor([tokens]), attention_mask=mask).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(text) :]


def recorded_kv(decoder: Decoder, text: Sequence[int], committed: int) -> RecordedKv:
    """All layers of a target's KV of a text, up to a committed length."""
    kv = RecordedKv(forward(decoder, text)[1])
    kv.committed = committed
    return kv


class Oracle:
    """The model as the target: one token at a time, each by a forward pass over the whole text."""

    def __init__(
        self, drafter: LmDrafter, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams
    ) -> None:
        self.text = list(prompt)
        self._prompt = len(prompt)
        self._drafter = drafter
        self._params = sampling_params(sampling)

    def next_token(self, beyond: Sequence[int] = ()) -> int:
        text = [*self.text, *beyond]
        logits, _ = forward(self._drafter.decoder, text)
        history = History(text[: self._prompt], text[self._prompt :])
        return choose_token(logits, self._params, len(text), history)

    def verify(self, tree: TokenTree) -> list[int]:
        """Appends and returns the tokens that a verifier would emit for this tree."""
        node, emitted = -1, []
        while True:
            token = self.next_token(emitted)
            emitted.append(token)
            right = [child for child in tree.children(node) if tree.tokens[child] == token]
            if not right:
                break
            node = right[0]
        self.text += emitted
        return emitted


LogitsAfter = Callable[[tuple[int, ...]], torch.Tensor]
"""Logits ``[V]`` after a drafted path."""

Adjustment = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""Changes the logs of confidences after a path, ``[V]``."""


def beam_search(
    text: list[int],
    sampling: sampling_pb2.SamplingParams,
    widths: Sequence[int],
    logits_after: LogitsAfter,
    adjust: Adjustment = lambda path, logs: logs,
) -> dict[tuple[int, ...], float]:
    """Beam search that runs every path alone: path to log survival."""
    params = sampling_params(sampling)
    tree: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for level, width in enumerate(widths):
        found: dict[tuple[int, ...], float] = {}
        for path, score in frontier.items():
            scores = filter_logits(logits_after(path), params, History(text, path))
            if not params.greedy:
                scores = scores + gumbel_noise(params.seed, len(text) + level, VOCAB)
            logs = adjust(path, scores.log_softmax(0))
            for token in logs.topk(width).indices.tolist():
                if logs[token] > -torch.inf:
                    found[(*path, token)] = score + float(logs[token])
        best = sorted(found, key=lambda path: -found[path])[:width]
        frontier = {path: found[path] for path in best}
        tree |= frontier
    return tree


def check_tree(tree: TokenTree, expected: dict[tuple[int, ...], float]) -> None:
    """The tree has the paths of a beam search, with their survival."""
    tree.check(VOCAB)
    assert {tree.path(node) for node in range(len(tree))} == set(expected)
    for node in range(len(tree)):
        survival = math.exp(expected[tree.path(node)])
        assert tree.survivals[node] == pytest.approx(survival, rel=2e-3, abs=1e-6)
