"""Random tiny models and drafters, made-up data of the target, and dense references of trees."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import ask_tree
from longspec_masks import window_mask
from safetensors.torch import save_file
from tiny_models import make_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.convert import load_config, load_decoder
from paceline.convert.weights import Checkpoint
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.growth.sequence import chain_blocks
from paceline.drafter.kv import KvGone
from paceline.drafter.kv.reader import StreamingReader
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import Budget, GenerationInfo, Resources, Update
from paceline.drafter.methods.checkpoint import TargetRef, load_weights, read_shape, save_drafter
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.mtp import MtpConfig, save_mtp
from paceline.drafter.methods.mtp.config import load_mtp
from paceline.kernels import (
    History,
    filter_logits,
    gumbel_noise_at,
    plan_trees,
    streaming,
)
from paceline.sampling import Sampling
from paceline.text import sampling_rules
from paceline.train.acceptance import RecordedKv, RecordedStates
from paceline.train.modules import DSparkModel, Eagle3Model, LongSpecModel, MtpModel
from paceline.train.modules.layers import DraftModel
from paceline.tree import TokenTree

VOCAB = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,  # the compiled kernels take multiples of 16
    "initializer_range": 0.3,  # so that choices differ clearly
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GREEDY = Sampling()
SAMPLINGS = {
    "greedy": GREEDY,
    "T=1": Sampling(temperature=1.0, seed=2**63 + 5),
    "filtered": Sampling(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=3
    ),
    "penalised": Sampling(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={4: 2.0, 5: -3.0}, seed=9,
    ),
    "greedy penalised": Sampling(repetition_penalty=1.5, logit_bias={7: 1.0}),
}  # fmt: skip


def write_model(folder: Path, family: str = "llama", seed: int = 0, **shape: Any) -> Path:
    """Save a random model in fp32, with a tokenizer; the same arguments give the same weights."""
    make_model(folder, family.capitalize(), seed=seed, **_SHAPE | shape)
    write_tokenizer(folder, "t")
    return folder


def write_tokenizer(folder: Path, letter: str) -> None:
    """Save a tokenizer whose words are a letter and a number."""
    vocab = {f"{letter}{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token=f"{letter}0")).save(str(folder / "tokenizer.json"))


def write_folder(folder: Path, described: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write the folder of a drafter as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Rewrite fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


SHAPES: dict[str, Any] = {  # configuration, model and fields of each method's tiny drafter
    "longspec": (LongSpecConfig, LongSpecModel, save_drafter, {}),
    "dspark": (DSparkConfig, DSparkModel, save_drafter, {"block": 4, "mask_token": 3}),
    "eagle3": (Eagle3Config, Eagle3Model, save_drafter, {}),
    "mtp": (MtpConfig, MtpModel, save_mtp, {}),
}


def write_drafter(
    method: str, folder: Path, target: Path, seed: int = 0, dtype: Any = torch.float32, **shape: Any
) -> Path:
    """Save a random drafter of a method for a target."""
    kind, model, save, fields = SHAPES[method]
    taps = {"taps": (0, 1)} if method in ("dspark", "eagle3") else {}
    config = kind.for_target(target, **{**taps, **fields, **shape})
    weights = random_weights(model(config), seed)
    norm = [torch.ones(config.hidden)] if method == "mtp" else []  # the target's final norm
    save(folder, config, weights, TargetRef.of(target), *norm, dtype=dtype)
    return folder


write_longspec = partial(write_drafter, "longspec")


def random_weights(model: DraftModel, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if model.d2t is not None:
        model.d2t.copy_(torch.randperm(VOCAB)[: len(model.d2t)].sort().values)
    return model.state_dict()


def load(method: str, folder: Path | None, target: Path | None = None, **options: Any) -> Any:
    """A method on a folder; drafters of a target are loaded with it."""
    given = {name: str(value) for name, value in options.items()}
    if target is not None:
        given["target"] = str(target)
    return method_class(method).load(folder, given, Resources())


def start(
    drafter: Any, text: Sequence[int], source: Any = None, sampling: Sampling = GREEDY
) -> Any:
    """Starts a generation of a prompt; `source` is the target's KV, or its hidden states."""
    field = "states" if drafter.needs.hidden_state_layers else "kv"
    data = {} if source is None else {field: source}
    return drafter.start(GenerationInfo(text, len(text), VOCAB, sampling, **data))


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
    plan = plan_trees(chain_blocks(0, 0, len(text)))
    last = torch.tensor([len(text) - 1])
    logits = decoder.forward(torch.tensor(text), plan, [cache], logit_rows=last).logits
    return logits[0], cache


def verify(
    decoder: Decoder, cache: LocalCache, sequence: Any, anchor: int, budget: Budget
) -> list[int]:
    """Tokens that the target emits for a round's tree; the sequence gets them too."""
    tree = sequence.draft(budget)
    tokens, parents = [anchor, *tree.tokens], [-1, *(parent + 1 for parent in tree.parents)]
    choices = ask_tree(decoder, cache, torch.tensor(tokens), parents).argmax(-1).tolist()
    path, emitted = [0], [choices[0]]
    while child := next(
        (n for n, p in enumerate(parents) if p == path[-1] and tokens[n] == emitted[-1]), 0
    ):
        path.append(child)
        emitted.append(choices[child])
    cache.commit(path)
    sequence.extend(Update(emitted))
    return emitted


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


@dataclass
class FakeKv(StreamingReader):
    """A target's KV in memory."""

    keys: Tensor
    values: Tensor
    committed: int = 0
    gone: bool = False

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def check(self) -> None:
        if self.gone:
            raise KvGone("the cache is gone")

    def close(self) -> None:
        """Nothing to release."""

    def spoil(self, begin: int) -> None:
        """Makes positions from ``begin`` on unusable."""
        self.keys[:, begin:] = self.values[:, begin:] = torch.nan


class FakeStates(RecordedStates):
    """A target's hidden states, which can be lost."""

    gone = False

    def check(self) -> None:
        if self.gone:
            raise KvGone("the cache is gone")

    @property
    def states(self) -> Tensor:
        """All rows, ``[S, taps * hidden]``."""
        return self._states

    def spoil(self, begin: int, end: int | None = None) -> None:
        """Makes positions unusable."""
        self._states[begin:end] = torch.nan


def made_up_kv(config: Any, committed: int, seed: int = 0) -> FakeKv:
    """Random KV of ``committed`` positions."""
    draws = torch.Generator().manual_seed(seed)
    shape = (2, config.kv_heads, committed, config.head_dim)
    keys, values = torch.randn(shape, generator=draws)
    return FakeKv(keys, values, committed)


def made_up_states(
    config: DSparkConfig | Eagle3Config, committed: int, seed: int = 0, window: int = 0
) -> FakeStates:
    """Random states, which at a position do not depend on ``committed``."""
    draws = torch.Generator().manual_seed(seed)
    width = len(config.taps) * config.hidden
    states = FakeStates(torch.randn(1024, width, generator=draws), window)
    states.committed = committed
    return states


def target_kv(target: Path, config: LongSpecConfig, text: Sequence[int]) -> FakeKv:
    """KV of the target's layer when all but the newest token of a text is committed.

    Behind it lie numbers that must not be read.
    """
    _, cache = forward(load_decoder(target), text, 50)
    keys, values = (each.clone() for each in cache.layer(config.target_layer))
    kv = FakeKv(keys, values, len(text) - 1)
    kv.spoil(len(text) - 1)
    return kv


LogitsAfter = Callable[[tuple[int, ...]], torch.Tensor]  # logits ``[V]`` after a drafted path
Adjustment = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""Changes the logs of confidences after a path, ``[V]``."""


def beam_search(
    text: list[int],
    sampling: Sampling,
    widths: Sequence[int],
    logits_after: LogitsAfter,
    adjust: Adjustment = lambda path, logs: logs,
    nodes: int = 1 << 30,
    depth: int = 1 << 30,
    min_survival: float = 0.0,
    *,
    penalise_paths: bool = False,
) -> dict[tuple[int, ...], float]:
    """The reference of all growth, which runs every path alone: path to log survival.

    Each level keeps the likeliest paths over all its parents. Only nodes that could still be among
    the ``nodes`` best are expanded.
    """
    params = sampling_rules(sampling)
    tree: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for level, width in enumerate(widths[:depth]):
        found: dict[tuple[int, ...], float] = {}
        for path, score in frontier.items():
            history = History(text, path if penalise_paths else ())
            scores = filter_logits(logits_after(path), params, history)
            if not params.greedy:
                tokens = torch.arange(len(scores))
                scores = scores + gumbel_noise_at(params.seed, len(text) + level, tokens)
            logs = adjust(path, scores.log_softmax(0))
            for token in logs.topk(min(width, len(logs))).indices.tolist():
                if logs[token] > -torch.inf:
                    found[(*path, token)] = score + float(logs[token])
        likeliest = sorted(found, key=lambda path: -found[path])[:width]
        tree |= {path: found[path] for path in likeliest}
        worst = sorted(tree.values(), reverse=True)[nodes - 1 :][:1] or [-math.inf]
        floor = math.log(min_survival) if min_survival else -math.inf
        frontier = {
            path: tree[path] for path in likeliest if tree[path] > worst[0] and tree[path] >= floor
        }
    return dict(sorted(tree.items(), key=lambda item: -item[1])[:nodes])


def check_tree(tree: TokenTree, expected: dict[tuple[int, ...], float]) -> None:
    """The tree has the paths of a beam search, with their survival, the likeliest first."""
    tree.check(VOCAB)
    assert {tree.path(node) for node in range(len(tree))} == set(expected)
    for node in range(len(tree)):
        survival = math.exp(expected[tree.path(node)])
        assert tree.survivals[node] == pytest.approx(survival, rel=2e-3, abs=1e-6)
    assert list(tree.survivals) == pytest.approx(sorted(tree.survivals, reverse=True))


class Dense:
    """A drafter in plain dense PyTorch."""

    def source(self, text: Sequence[int], seed: int) -> Any:
        """What it reads of the target's, for a text."""

    def tree(
        self, text: list[int], source: Any, sampling: Sampling, widths: Sequence[int], **limits: Any
    ) -> dict[tuple[int, ...], float]:
        """See :func:`beam_search`."""
        with torch.inference_mode():
            return beam_search(text, sampling, widths, *self.rules(text, source, widths), **limits)

    def rules(
        self, text: list[int], source: Any, widths: Sequence[int]
    ) -> tuple[LogitsAfter] | tuple[LogitsAfter, Adjustment]:
        """Logits after a path and, with a confidence head, what it changes."""
        return (lambda path: self.after(text, path, source),)

    def after(self, text: Sequence[int], path: Sequence[int], source: Any) -> Tensor:
        """Logits after a drafted path, ``[V]``."""
        raise NotImplementedError


class DenseLm(Dense):
    """The model `lm` in transformers, whose chains have the penalties of their paths."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def tree(self, *args: Any, **limits: Any) -> dict[tuple[int, ...], float]:
        return super().tree(*args, penalise_paths=set(args[3]) == {1}, **limits)

    def after(self, text: Sequence[int], path: Sequence[int], source: Any) -> Tensor:
        logits: Tensor = self.model(torch.tensor([[*text, *path]])).logits[0, -1]
        return logits


class DenseDrafter(Dense):
    """A drafter with the target's embedding and head."""

    model: Any

    def __init__(self, model: Any, config: Any, dtype: Any, folder: Path, target: Path) -> None:
        self.config = config
        self._take(model(config), load_weights(folder, config, dtype), target)

    def _take(self, model: Any, tensors: dict[str, Tensor], target: Path) -> None:
        self.model, self.target = model, target
        self.model.load_state_dict(tensors)
        weights = Checkpoint(target, torch.float32)
        self.embedding = weights["model.embed_tokens.weight"]
        tied = load_config(target).tied
        self.head = self.embedding if tied else weights["lm_head.weight"]

    def source(self, text: Sequence[int], seed: int) -> Any:
        """Hidden states for a text."""
        return made_up_states(self.config, len(text) - 1, seed)

    def whole(self, scores: Tensor) -> Tensor:
        """Logits of drafted tokens as those of all, ``[V]``."""
        if self.model.d2t is None:
            return scores
        whole = torch.full((len(self.head),), -torch.inf)
        whole[self.model.d2t] = scores
        return whole


class DenseLongSpec(DenseDrafter):
    """LongSpec, reading ``context`` target positions."""

    def __init__(self, folder: Path, target: Path, context: int = 0) -> None:
        super().__init__(LongSpecModel, *read_shape(LongSpecConfig, folder), folder, target)
        self.context = context

    def source(self, text: Sequence[int], seed: int) -> FakeKv:
        """The target's KV of a text."""
        return target_kv(self.target, self.config, text)

    def after(self, text: Sequence[int], path: Sequence[int], kv: FakeKv) -> Tensor:
        tokens, committed = [*text, *path], min(kv.committed, len(text) - 1)
        read = torch.zeros(len(tokens), committed, dtype=torch.bool)
        for part in streaming(committed, self.context):
            read[:, part.start : part.stop] = True
        hidden = self.model(
            self.embedding[torch.tensor(tokens)][None],
            torch.arange(len(tokens)),
            window_mask(len(tokens), self.config.window),
            kv.keys[None, :, :committed],
            kv.values[None, :, :committed],
            read,
        )
        return self.whole(self.model.draft_head(self.head) @ hidden[0, -1])


class DenseDSpark(DenseDrafter):
    """DSpark and DFlash."""

    def __init__(self, folder: Path, target: Path) -> None:
        super().__init__(DSparkModel, *read_shape(DSparkConfig, folder), folder, target)

    def block(self, text: Sequence[int], states: FakeStates) -> Tensor:
        """Hidden states of the positions that predict, ``[levels, hidden]``."""
        end = min(states.committed, len(text) - 1)
        begin = max(0, end - self.config.window) if self.config.window else 0
        fed = [text[-1], *[self.config.mask_token] * (self.config.block - 1)]
        hidden: Tensor = self.model(
            self.embedding[torch.tensor(fed)][None, None],
            torch.tensor([[end]]),
            states.states[None, begin:end],
            torch.arange(begin, end)[None],
        )
        return hidden[0, 0]

    def at(self, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, float]:
        """Logits after the anchor and a path, and the log confidence of that position."""
        levels = len(tokens)
        own = self.model.draft_head(self.head) @ hidden[levels - 1] * self.config.logit_factor
        if cap := self.config.logit_cap:
            own = cap * (own / cap).tanh()
        scores, confidence, rows = own, 0.0, None
        if self.model.markov_head is not None:
            before = self.model.markov_rows(torch.tensor(tokens))[None]
            features, rows = self.model.markov_head(before, hidden[None, :levels])
            scores = scores + self.model.markov_head.markov_w2(features)[0, -1]
            if self.config.markov_best:
                best = own.topk(self.config.markov_best).indices
                scores = torch.full_like(scores, -torch.inf).scatter(0, best, scores[best])
        if self.model.confidence_head is not None:
            logit = self.model.confidence_head(
                hidden[levels - 1], None if rows is None else rows[0, -1]
            )
            temperatures = self.config.confidence_temperatures or (1.0,) * levels
            confidence = float(torch.nn.functional.logsigmoid(logit / temperatures[levels - 1]))
        return self.whole(scores), confidence

    def rules(
        self, text: list[int], source: FakeStates, widths: Sequence[int]
    ) -> tuple[LogitsAfter, Adjustment]:
        hidden, chain = self.block(text, source), set(widths) == {1}

        def adjust(path: tuple[int, ...], logs: Tensor) -> Tensor:
            if self.model.confidence_head is None:
                return logs
            change = self.at(hidden, [text[-1], *path])[1] - float(logs.max())
            return logs + (change if chain else min(0.0, change))

        return lambda path: self.at(hidden, [text[-1], *path])[0], adjust


class DenseFeedback(DenseDrafter):
    """A drafter whose levels read states: each path by itself, one token after the other."""

    def fused(self, states: Tensor) -> Tensor:
        """The target's states as inputs."""
        fused: Tensor = self.model.fuse(states)
        return fused

    def after(self, text: Sequence[int], path: Sequence[int], states: FakeStates) -> Tensor:
        """Logits after a drafted path, ``[V]``."""
        end, window = len(text) - 1, self.config.window or 1 << 30
        hidden = self.fused(states.states[None, :end])
        past, begin = None, 1
        for stop in range(end + 1, end + 2 + len(path)):
            tokens, places = torch.tensor([[*text, *path][begin:stop]]), torch.arange(begin, stop)
            apart = places[:, None] - torch.arange(1, stop)
            seen = (apart >= 0) & (apart < window)
            embedded = self.embedding[tokens]
            out, hidden, new = self.model(embedded, hidden, places[None], seen[None], past)
            if past is not None:
                pairs = zip(past, new, strict=True)
                new = tuple(torch.cat(pair, dim=2) for pair in pairs)
            past = new
            hidden, begin = hidden[:, -1:], stop
        return self.whole(self.model.draft_head(self.head) @ out[0, -1])


class DenseEagle3(DenseFeedback):
    """EAGLE-3."""

    def __init__(self, folder: Path, target: Path) -> None:
        layers = load_config(target).layers
        super().__init__(Eagle3Model, *read_shape(Eagle3Config, folder, layers), folder, target)


class DenseMtp(DenseFeedback):
    """A trained head for multi-token prediction."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config, weights = load_mtp(folder)
        super()._take(MtpModel(self.config), weights, target)

    def fused(self, states: Tensor) -> Tensor:
        norm = Checkpoint(self.target, torch.float32)["model.norm.weight"]
        return torch.nn.functional.rms_norm(states, norm.shape, norm, self.config.norm_eps)


DENSE = {
    "longspec": DenseLongSpec, "dspark": DenseDSpark, "eagle3": DenseEagle3, "mtp": DenseMtp
}  # fmt: skip
