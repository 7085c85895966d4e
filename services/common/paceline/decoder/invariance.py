"""Self-check that logits have the same bits in every batch and tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.decoder.cache import LocalCache
from paceline.decoder.graphs import FIXED_SHAPES
from paceline.decoder.model import Decoder
from paceline.kernels import (
    CHUNK,
    MAX_TREE_NODES,
    Executor,
    LayerTable,
    Pass,
    QueryBlock,
    Recorder,
    plan_trees,
    why_bits_vary,
)
from paceline.kernels.caches import to_rows
from paceline.kernels.program import Kind, Operation, Program

_PREFIX = CHUNK - 3  # so that the tree crosses a chunk border
# Row counts of a linear layer that are compared: libraries choose kernels by the number of rows.
_ROWS = (*range(1, 18), 33, 49, 65, 129, 257)
_MAX_ROWS = 513
_PARENTS = (-1, 0, 0, 1, 1, 3, 2, 5, 7, 4, 8, 9)

# Trees over attention alone: the column of a chunk where the window of the root begins, or without
# one the tree, and the rows.
_DEEP_TREES = ((255, 32), (240, 64), (200, MAX_TREE_NODES), (0, 33))
_KEYS_REPEATED = 64  # random keys and values, again and again: they are quick to make

# Length that a text must be able to have for :func:`check_served`. Unit: tokens.
SERVED_TOKENS = 512

LONGEST_WINDOW = 1024  # longest sliding window that :func:`check_served` passes. Unit: tokens.

# Positions that are decoded, and where trees begin: their paths cross 192 and 256.
_FIRST, _LAST, _BORDERS = 180, 268, (188, 250)

_PATH, _TREE = 12, 23  # nodes of the path that is compared, and of its tree

_PAGE = 256


@dataclass(frozen=True)
class BatchInvariance:
    """Whether the logits of a token have the same bits in every batch and tree."""

    holds: bool  # whether they have
    reason: str = ""  # what differs and what to do about it; empty if nothing differs


def check_batch_invariance(decoder: Decoder) -> BatchInvariance:
    """Check on this machine that logits have the same bits in a tree as token by token.

    First, every shape of linear layer is run with several numbers of rows: if a product is split
    differently, few values change, and few of those reach a logit. Then a short prompt and one tree
    run through one layer of each kind, packed with another sequence, and every node is
    compared with its path decoded alone. Last, the attention of each kind of layer runs over the
    largest trees, behind its window. Where attention promises no equal bits
    (:func:`~paceline.kernels.why_bits_vary`), nothing is checked.
    """
    differs = why_bits_vary(decoder.device)
    for find in (_rows_that_differ, _tree_that_differs, _attention_that_differs):
        differs = differs or find(decoder)
    if differs and decoder.device.type != "cpu":
        differs += "; serve on the CPU if texts must be equal bit for bit"
    return BatchInvariance(not differs, differs)


class ServedForward(Protocol):
    """A pass as it is served, over the blocks of two texts, 0 and 1, that begin empty."""

    def __call__(
        self, tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        """Logits of all rows, ``[M, V]``, in memory that the next call may overwrite; ``prompt``:
        as a step that is mostly prompts."""
        ...


def window_to_pass(windows: Iterable[int | None], longest: int) -> int:
    """The longest window that :func:`check_served` can pass in a text of ``longest`` tokens; 0:
    there is none. ``windows``: of each layer, or None."""
    return max((w for w in windows if w and w <= min(LONGEST_WINDOW, longest - _TREE)), default=0)


def served_slots(window: int) -> tuple[int, int]:
    """Slots that :func:`check_served` needs of its two texts: whole pages."""
    slots = max(SERVED_TOKENS, window + _TREE)
    return -(-slots // _PAGE) * _PAGE, SERVED_TOKENS


@torch.inference_mode()
def check_served(forward: ServedForward, vocab_size: int, window: int = 0) -> BatchInvariance:
    """Check on the served model, by the passes that serve, that what is beside a row and how its
    text came to be change no bit of its logits.

    A text is decoded token by token across borders of 64 and of 256 positions, and where a window
    ends. Its rows are compared with those of trees and chains, with those of each number of rows
    that CUDA graphs have, with other texts beside them, and with those of prompts: cut in two, and
    of the text so far, as behind a resume.

    Args:
        forward: Runs a pass.
        vocab_size: Tokens of the model.
        window: The sliding window to pass; 0: none.
    """
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(vocab_size, (served_slots(window)[0],), generator=generator).tolist()
    other = torch.randint(vocab_size, (FIXED_SHAPES[-1],), generator=generator).tolist()

    def chain(start: int, stop: int, sequence: int = 0) -> QueryBlock:
        return QueryBlock(sequence, start, None, stop - start, final=start == 0)

    def decoded(position: int, sequence: int = 0) -> Tensor:
        at = chain(position, position + 1, sequence)
        return forward(text[position : position + 1], [at])[0].clone()

    def in_tree(start: int) -> Tensor:
        tokens, parents, path = _comb(text[start : start + _PATH], vocab_size)
        return forward(tokens, [QueryBlock(0, start, parents, len(tokens))])[path]

    prompt = forward(text[:_FIRST], [chain(0, _FIRST)], prompt=True).clone()
    plain = torch.stack([decoded(position) for position in range(_FIRST, _LAST)])

    def compare() -> Iterator[tuple[str, Tensor, Tensor]]:
        # From the last position on: what is before it is then as plain decoding has written it.
        if window > _BORDERS[-1]:  # else a tree is behind it
            yield from compare_behind(max(_LAST, window - _PATH // 2))
        for start in reversed(_BORDERS):
            border = (start // 64 + 1) * 64
            expected = plain[start - _FIRST :][:_PATH]
            yield f"a tree across position {border}", in_tree(start), expected
        for count in (9, *FIXED_SHAPES):
            own = min(count, _LAST - _FIRST)
            beside = count - own
            starts = range(0, beside, MAX_TREE_NODES)
            blocks = [chain(at, min(at + MAX_TREE_NODES, beside), 1) for at in starts]
            tokens = other[:beside] + text[_FIRST : _FIRST + own]
            rows = forward(tokens, [*blocks, chain(_FIRST, _FIRST + own)])[beside:]
            yield f"a step of {count} rows", rows, plain[:own]
        forward(text[:100], [chain(0, 100, 1)], prompt=True)
        rows = forward(text[100:_FIRST], [chain(100, _FIRST, 1)], prompt=True)
        yield "a prompt in two parts", rows, prompt[100:]
        yield "the token behind a prompt in two parts", decoded(_FIRST, 1)[None], plain[:1]
        rows = forward(text[:220], [chain(0, 220, 1)], prompt=True)[_FIRST:]
        yield "a prompt of the text so far, as behind a resume,", rows, plain[: 220 - _FIRST]
        yield "the token behind a resume", decoded(220, 1)[None], plain[220 - _FIRST :][:1]

    def compare_behind(start: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        for at in range(_LAST, start, MAX_TREE_NODES):
            stop = min(at + MAX_TREE_NODES, start)
            forward(text[at:stop], [chain(at, stop)])
        stop = start + _PATH
        expected = torch.stack([decoded(position) for position in range(start, stop)])
        where = f"where a window of {window} ends"
        yield f"a tree {where}", in_tree(start), expected
        yield f"a step {where}", forward(text[start:stop], [chain(start, stop)]), expected
        rows = forward(text[start:stop], [chain(start, stop)], prompt=True)
        yield f"a prompt {where}", rows, expected

    differs = [name for name, rows, expected in compare() if not torch.equal(rows, expected)]
    if not differs:
        return BatchInvariance(True)
    return BatchInvariance(False, f"other bits than token by token: {'; '.join(differs)}")


def _comb(tokens: Sequence[int], vocab_size: int) -> tuple[list[int], tuple[int, ...], list[int]]:
    """A tree whose path has these tokens, with a wrong node before each but the first; its tokens,
    parents, and the nodes of the path."""
    found, parents, path = [tokens[0]], [-1], [0]
    for token in tokens[1:]:
        found += [(token + 5) % vocab_size, token]
        parents += [path[-1], path[-1]]
        path.append(len(found) - 1)
    return found, tuple(parents), path


@torch.inference_mode()
def _rows_that_differ(decoder: Decoder) -> str:
    for layer in decoder.linears():
        ins, outs = layer.in_features, layer.out_features
        x = torch.randn(_MAX_ROWS, ins, generator=torch.Generator().manual_seed(ins))
        x = x.to(decoder.device, decoder.config.dtype)
        together = layer(x)
        for rows in _ROWS:
            if not torch.equal(layer(x[-rows:]), together[-rows:]):
                return (
                    f"a linear layer of {ins} to {outs} in {decoder.config.dtype} gives a row "
                    f"other bits in a batch of {rows} rows than in one of {_MAX_ROWS}"
                )
    return ""


def _tree_that_differs(decoder: Decoder) -> str:
    config = decoder.config
    delta = [index in config.delta_layers for index in range(config.layers)]
    ropes = config.ropes or (0,) * config.layers
    kinds = list(zip(config.windows, ropes, delta, strict=True))
    decoder = decoder.with_layers([kinds.index(kind) for kind in dict.fromkeys(kinds)])
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.config.vocab_size
    prompt = torch.randint(vocab, (_PREFIX,), generator=generator).to(decoder.device)
    tree = torch.randint(vocab, (len(_PARENTS),), generator=generator).to(decoder.device)

    packed, other, alone = (LocalCache(decoder.config, decoder.device) for _ in range(3))
    _append(decoder, alone, prompt)
    if alone.states is not None:
        alone.states.take_snapshot(_PREFIX)
    _append(decoder, packed, prompt[:100])
    _append(decoder, packed, prompt[100:])
    blocks = [QueryBlock(1, 0, None, 5), QueryBlock(0, _PREFIX, _PARENTS, len(_PARENTS))]
    packed.reserve(len(_PARENTS))
    together = decoder.forward(
        torch.cat([prompt[:5], tree]),
        plan_trees(blocks, device=decoder.device),
        [packed, other],
        logit_rows=None,
    ).logits[5:]
    for leaf in sorted(set(range(len(_PARENTS))) - set(_PARENTS)):
        for node in _path(leaf):
            logits = _append(decoder, alone, tree[node : node + 1])
            if not torch.equal(logits[0], together[node]):
                return "attention or a row operation gives other bits in a tree than token by token"
        alone.truncate(_PREFIX)
    return ""


class _Attention:
    """The attention of a kind of layer by its first kv head, over random keys and values."""

    def __init__(self, program: Program, op: Operation, kv_dtype: torch.dtype, slots: int) -> None:
        group, dim = program.heads.q_heads // program.heads.kv_heads, program.heads.dim
        heads = replace(program.heads, q_heads=group, kv_heads=1)
        recorder = Recorder(heads, torch.float32, numerics=program.numerics)
        self.width = group * dim
        q = recorder.rotate_queries(recorder.input(self.width))
        sinks = None if op.sinks is None else op.sinks[:group]
        recorder.tap(recorder.attend(q, 0, op.window or None, sinks), 0)
        self._executor = Executor(recorder.finish())
        self._unrotated = torch.tensor([1.0, 0.0]).repeat_interleave(dim // 2).repeat(slots, 1)
        self.generator = torch.Generator().manual_seed(0)
        some = torch.randn(2, 1, _KEYS_REPEATED, dim, generator=self.generator)
        self._planes = to_rows(some, kv_dtype).repeat(1, 1, -(-slots // _KEYS_REPEATED), 1)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """As a cache of a layer has them."""
        return self._planes[0], self._planes[1]

    @property
    def table(self) -> LayerTable:
        """As a cache of a layer has it."""
        return LayerTable([self.layer(0)])

    def together(self, blocks: Sequence[QueryBlock], q: Tensor) -> Tensor:
        """The attention of blocks over these keys and values."""
        caches = [self] * len(blocks)
        call = Pass(None, plan_trees(blocks), caches, self._unrotated, taps=(0,), inputs=q)
        return self._executor.run(call).taps[0]

    def alone(self, block: QueryBlock, nodes: Sequence[int], q: Tensor) -> Tensor:
        """That of some nodes, each as the only row behind its own path."""
        text, found = copy(self), []
        text._planes = self._planes.clone()
        for node in nodes:
            path = torch.from_numpy(block.ancestors()[node]).nonzero()[:, 0]
            stop = block.start + len(path)
            text._planes[:, :, block.start : stop] = self._planes[:, :, block.start + path]
            own = QueryBlock(0, stop - 1, None, 1)
            found.append(text.together([own], q[node : node + 1]))
        return torch.cat(found)


@torch.inference_mode()
def _attention_that_differs(decoder: Decoder) -> str:
    """Trees are compared with their nodes alone, and each tree by itself: on one thread, and with
    the chunks of few rows divided among all."""
    if decoder.native is None:
        return ""
    program, threads = decoder.native.program, torch.get_num_threads()
    kinds = {op.window: op for op in program.operations if op.kind is Kind.ATTEND}
    for window, op in kinds.items():
        blocks = [
            QueryBlock(index, max(0, window - 1) + column, _deep_tree(rows), rows)
            for index, (column, rows) in enumerate(_DEEP_TREES)
        ]
        slots, lengths = max(block.stop for block in blocks), [block.length for block in blocks]
        attention = _Attention(program, op, decoder.config.kv_dtype, slots)
        q = torch.randn(sum(lengths), attention.width, generator=attention.generator)
        torch.set_num_threads(1)
        try:
            packed = attention.together(blocks, q).split(lengths)
        finally:
            torch.set_num_threads(threads)
        for block, own, found in zip(blocks, q.split(lengths), packed, strict=True):
            nodes = [0, 1, block.length // 2, block.length - 1]
            same = torch.equal(attention.alone(block, nodes, own), found[nodes])
            if same and block.length < MAX_TREE_NODES:
                single = attention.together([replace(block, sequence=0)], own)
                same = torch.equal(single, found)
            if not same:
                where = f" behind a window of {window}" if window else ""
                return (
                    f"attention gives other bits in a tree of {block.length} rows from position "
                    f"{block.start} on{where} than token by token"
                )
    return ""


def _deep_tree(nodes: int) -> tuple[int, ...]:
    """Parents of a path with a wrong node beside every fourth."""
    parents, tip = [-1], 0
    while len(parents) < nodes:
        parents.append(tip)
        tip = tip if len(parents) % 4 == 2 else len(parents) - 1
    return tuple(parents)


def _path(leaf: int) -> list[int]:
    path = [leaf]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path


def _append(decoder: Decoder, cache: LocalCache, tokens: torch.Tensor) -> torch.Tensor:
    """Append a chain of tokens and return the logits of the last."""
    count = tokens.numel()
    cache.reserve(count)
    plan = plan_trees([QueryBlock(0, len(cache), None, count, final=True)], device=decoder.device)
    last = torch.tensor([count - 1], device=decoder.device)
    logits = decoder.forward(tokens, plan, [cache], logit_rows=last).logits
    cache.commit(range(count))
    return logits
