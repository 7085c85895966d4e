"""Texts that a target writes itself, token for token as a verifier would emit them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.convert import prepare
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import QueryBlock, plan_trees
from paceline.kernels.sampling import History, SamplingRules, choose_token
from paceline.kernels.trees import MAX_TREE_NODES
from paceline.train.corpus import Documents
from paceline.train.phases import Phase

_TOGETHER = 48  # sequences a step: linear layers read their weights once for all
PROMPT = 128  # tokens of a random prompt
_LENGTH = 512  # tokens of a whole text


def load_target(target: Path, weights: str) -> Decoder:
    """The target on the CPU, packed in the user's cache the first time."""

    def say(count: int, total: int) -> None:
        print(f"packing the target, once: {count} of {total} layers", flush=True)

    return prepare(target, weights, progress=say).decoder()


@dataclass(frozen=True)
class Task:
    """A text to generate: prompt, sampling parameters, and number of tokens to add."""

    prompt: Sequence[int]
    params: SamplingRules
    count: int


class _Writing:
    """A text being written."""

    def __init__(self, number: int, task: Task, cache: LocalCache) -> None:
        self.number, self.task, self.cache = number, task, cache
        self.tokens = list(task.prompt)
        self.history = History(task.prompt)

    def add(self, logits: Tensor) -> int:
        """Append the token that the sampling contract determines."""
        token = choose_token(logits, self.task.params, len(self.tokens), self.history)
        self.tokens.append(token)
        self.history.push(token)
        return token

    @property
    def written(self) -> list[int]:
        return self.tokens[len(self.task.prompt) :]


def write_texts(
    decoder: Decoder, tasks: Iterable[Task], stop: int | None, together: int = _TOGETHER
) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of the task, the tokens added) as texts are finished, in any order.

    A text ends at its count or with the token `stop`, which is included. So many are written
    `together`.
    """
    waiting = enumerate(tasks)
    active: list[_Writing] = []
    for number, task in waiting:
        writing = _Writing(number, task, LocalCache(decoder.config))
        writing.add(_read_prompt(decoder, writing))
        active.append(writing)
        while len(active) == together:
            yield from _finished(active, stop)
            if len(active) == together:
                _step(decoder, active)
    while active:
        yield from _finished(active, stop)
        if active:
            _step(decoder, active)


def _finished(active: list[_Writing], stop: int | None) -> Iterator[tuple[int, list[int]]]:
    for writing in list(active):
        if len(writing.written) >= writing.task.count or writing.tokens[-1] == stop:
            active.remove(writing)
            yield writing.number, writing.written


def _read_prompt(decoder: Decoder, writing: _Writing) -> Tensor:
    """Prefill the prompt; returns the logits of its last token, [vocabulary]."""
    prompt, cache = writing.tokens, writing.cache
    cache.reserve(len(prompt))
    for start in range(0, len(prompt), MAX_TREE_NODES):
        part = torch.tensor(prompt[start : start + MAX_TREE_NODES])
        plan = plan_trees([QueryBlock(0, start, None, len(part))])
        last = torch.tensor([len(part) - 1])
        logits = decoder.forward(part, plan, [cache], logit_rows=last).logits[0]
        cache.commit(range(len(part)))
    return logits


def _step(decoder: Decoder, active: Sequence[_Writing]) -> None:
    for writing in active:
        writing.cache.reserve(1)
    blocks = [QueryBlock(i, len(w.cache), None, 1) for i, w in enumerate(active)]
    tokens = torch.tensor([writing.tokens[-1] for writing in active])
    caches = [writing.cache for writing in active]
    logits = decoder.forward(tokens, plan_trees(blocks), caches, logit_rows=None).logits
    for writing, row in zip(active, logits, strict=True):
        writing.cache.commit([0])
        writing.add(row)


def own_texts(
    decoder: Decoder,
    documents: Documents,
    count: int,
    separator: int,
    path: Path,
    end: float = math.inf,
) -> list[list[int]]:
    """Token ids of `count` texts: 128 tokens from `documents`, and what the target writes after.

    Every other text is greedy, the rest is sampled at temperature 1, each with a seed of its own:
    the tokens are those that a verifier would emit. A text ends at 512 tokens or where the target
    ends it with `separator`. The texts are written to `path` and read from there next time; after
    `end`, on the clock `time.monotonic`, those that are not finished are left out.

    Raises ValueError if no document is as long as a prompt.
    """
    if count == 0:
        return []
    if not path.is_file():
        draw = np.random.default_rng(0)
        tasks = [
            Task(ids, SamplingRules(temperature=number % 2, seed=number), _LENGTH - PROMPT)
            for number, ids in enumerate(random_prompts(documents, count, draw))
        ]
        phase = Phase("writing the target's own texts", count, until=end)
        written = sorted(phase.take(write_texts(decoder, tasks, separator)))
        rows = torch.full((len(written), _LENGTH), separator, dtype=torch.int32)
        for row, (number, text) in zip(rows, written, strict=True):
            ids = torch.tensor([*tasks[number].prompt, *text], dtype=torch.int32)
            row[: len(ids)] = ids
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({"tokens": rows}, partial)
        os.replace(partial, path)
    texts: list[list[int]] = load_file(path)["tokens"].tolist()
    return [until(separator, text) for text in texts]


def random_prompts(
    documents: Documents, count: int, draw: np.random.Generator, length: int = PROMPT
) -> list[Sequence[int]]:
    """`count` windows of `length` tokens from random positions of random documents.

    Raises ValueError if no document is as long as a window.
    """
    long = [ids for ids in documents if len(ids) >= length]
    if not long:
        raise ValueError(
            f"no document has {length:,} tokens to start a text with: give longer ones"
        )
    prompts = []
    for _ in range(count):
        ids = long[draw.integers(len(long))]
        start = int(draw.integers(len(ids) - length + 1))
        prompts.append(ids[start : start + length])
    return prompts


def until(separator: int, text: list[int]) -> list[int]:
    return text[: text.index(separator)] if separator in text else text
