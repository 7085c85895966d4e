"""Self-check that logits have the same bits in every batch and tree."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.decoder.cache import LocalCache
from paceline.decoder.model import Decoder, bits_of
from paceline.kernels import (
    CHUNK,
    MAX_TREE_NODES,
    Executor,
    LayerTable,
    Pass,
    QueryBlock,
    Recorder,
    plan_trees,
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


@dataclass(frozen=True)
class BatchInvariance:
    """Whether the logits of a token have the same bits in every batch and tree."""

    holds: bool  # whether they have
    reason: str = ""  # what differs and what to do about it; empty if nothing differs
    # SHA-256 (hex) of the logits that were compared, the same wherever bits are equal; empty: none.
    bits: str = ""


def check_batch_invariance(decoder: Decoder) -> BatchInvariance:
    """Check on this CPU that logits have the same bits in a tree as token by token.

    First, every shape of linear layer is run with several numbers of rows: if a product is split
    differently, few values change, and few of those reach a logit. Then a short prompt and one tree
    run through one layer of each kind, packed with another sequence, and every node is
    compared with its path decoded alone. Last, the attention of each kind of layer runs over the
    largest trees, behind its window.
    """
    rows = _rows_that_differ(decoder)
    tree, bits = _tree_that_differs(decoder)
    differs = rows or tree or _attention_that_differs(decoder)
    return BatchInvariance(not differs, differs, bits)


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


def _tree_that_differs(decoder: Decoder) -> tuple[str, str]:
    """Return what differs, and the digest of the tree's logits."""
    config = decoder.config
    indices, ropes = range(config.layers), config.ropes or (0,) * config.layers
    others = [(at in config.delta_layers, at in config.shared_layers) for at in indices]
    kinds = list(zip(config.windows, ropes, others, strict=True))
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
    differs = ""
    for leaf in sorted(set(range(len(_PARENTS))) - set(_PARENTS)):
        for node in _path(leaf):
            logits = _append(decoder, alone, tree[node : node + 1])
            if not torch.equal(logits[0], together[node]):
                differs = (
                    "attention or a row operation gives other bits in a tree than token by token"
                )
        alone.truncate(_PREFIX)
    return differs, bits_of(together)


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
        """Return the attention of blocks over these keys and values."""
        caches = [self] * len(blocks)
        call = Pass(None, plan_trees(blocks), caches, self._unrotated, taps=(0,), inputs=q)
        return self._executor.run(call).taps[0]

    def alone(self, block: QueryBlock, nodes: Sequence[int], q: Tensor) -> Tensor:
        """Return the attention of some nodes, each as the only row behind its own path."""
        text, outputs = copy(self), []
        text._planes = self._planes.clone()
        for node in nodes:
            path = torch.from_numpy(block.ancestors()[node]).nonzero()[:, 0]
            stop = block.start + len(path)
            text._planes[:, :, block.start : stop] = self._planes[:, :, block.start + path]
            single = QueryBlock(0, stop - 1, None, 1)
            outputs.append(text.together([single], q[node : node + 1]))
        return torch.cat(outputs)


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
        for block, queries, outputs in zip(blocks, q.split(lengths), packed, strict=True):
            nodes = [0, 1, block.length // 2, block.length - 1]
            same = torch.equal(attention.alone(block, nodes, queries), outputs[nodes])
            if same and block.length < MAX_TREE_NODES:
                single = attention.together([replace(block, sequence=0)], queries)
                same = torch.equal(single, outputs)
            if not same:
                where = f" behind a window of {window}" if window else ""
                return (
                    f"attention gives other bits in a tree of {block.length} rows from position "
                    f"{block.start} on{where} than token by token"
                )
    return ""


def _deep_tree(nodes: int) -> tuple[int, ...]:
    """Return the parents of a path with a wrong node beside every fourth."""
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
