"""What a step copies, launches and waits for beside its CUDA graph, in order, on a GPU that is not
there: its tensors have no memory, and the host gets made-up tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from launches import Launches

from paceline.bench.gpu.cases import EIGHT_BILLION
from paceline.decoder import Decoder, ForwardResult, GraphRunner
from paceline.decoder import device as device_module
from paceline.decoder.graphs import Pass
from paceline.kernels import SamplingParams
from paceline.kernels import sampling as sampling_module
from paceline.kernels.triton.backend import perturbed
from paceline.kernels.triton.plan import GraphPlan
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.drafted import LOCAL, Draft
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import CachedSequence, Decode, Prefill, Request
from paceline.verifier.kv import pool as pool_module
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.pool import PagePool

TOKEN = 5  # what the made-up target chooses at every position
# What the made-up drafter drafts, the likeliest first, as drafters do. Three nodes are right.
TREE = TokenTree(
    (TOKEN, TOKEN, 6, TOKEN, 7, 8, 9, 6), (-1, 0, -1, 1, 0, 3, 2, 1),
    (0.7, 0.7, 0.25, 0.5, 0.3, 0.7, 0.6, 0.3),
)  # fmt: skip
META = torch.device("meta")  # PyTorch's device whose tensors have no memory
TARGET = replace(
    EIGHT_BILLION, layers=1, hidden=64, q_heads=4, kv_heads=1, vocab_size=64, windows=(None,)
)  # a target whose steps have as many work items as those of 8B

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"sampling": SamplingParams(temperature=0.8, top_p=0.9)},
    "states": {"taps": Taps((0,))},
}  # what is different in the generations of a case


class NoGraphs(GraphRunner):
    """Graphs that compute nothing, of a model on `META`."""

    def __init__(self, pool: PagePool, replay: Callable[[], None]) -> None:
        super().__init__(model(), pool)
        self._replay = replay

    def capture(self, plan: GraphPlan, taps: Items[int], layers: Items[int]) -> Pass:
        logits = torch.empty(plan.rows, TARGET.vocab_size, dtype=TARGET.dtype, device=META)
        states = torch.empty(len(taps), plan.rows, TARGET.hidden, device=META)

        def run() -> ForwardResult:
            self._replay()
            return ForwardResult(logits, tuple(states))

        return run


def model() -> Decoder:
    """A model of which there is nothing but what the engine asks for."""
    fields = {"config": TARGET, "device": META, "products": object(), "lost": lambda: None}
    return cast(Decoder, SimpleNamespace(**fields))


@pytest.mark.parametrize("tree", [EMPTY, TREE], ids=["plain", "trees"])
@pytest.mark.parametrize("kind", FIELDS)
def test_a_step_launches_the_same_for_any_number_of_texts(
    kind: str, tree: TokenTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "perturbed_logits", perturbed)
    found = []
    for texts in (1, 3, 8):
        launched = Launches("meta", received=TOKEN)
        for module in (device_module, pool_module):
            monkeypatch.setattr(module, "wait_for", lambda _, to=launched.names: to.append("wait"))
        emitted = step(texts, tree, FIELDS[kind], launched)
        assert emitted == [[TOKEN] * (4 if len(tree) else 1)] * texts
        found.append(launched.names)
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == ["to device", "replay"]
    assert found[0][-2:] == ["to host", "wait"]
    assert [found[0].count(name) for name in ("replay", "to host", "wait")] == [1, 1, 1]


def step(
    texts: int, tree: TokenTree, fields: dict[str, Any], launched: Launches
) -> list[list[int]]:
    """Runs a step, whose launches alone are noted; returns what each text emits."""
    layout = KvLayout.of(TARGET)
    pool = PagePool(
        layout, META, kv_bytes=texts * 1024 * layout.token_bytes, max_sequences=texts,
        max_context=512,
    )  # fmt: skip
    wanted: Taps | None = fields.get("taps")
    sampling = fields.get("sampling", SamplingParams(temperature=0.0))
    taps = None if wanted is None else TapLayout.of(wanted, layout, 512)
    graphs = NoGraphs(pool, lambda: launched.names.append("replay"))
    assert list(graphs.warm_up(() if wanted is None else wanted.layers))
    engine = Engine(model(), graphs=graphs)
    requests = [
        Request(Text((3, 1, 4), limit=50, sampling=sampling), taps=wanted) for _ in range(texts)
    ]
    sequences = [CachedSequence(each, pool.allocate(512, taps)) for each in requests]
    with torch.inference_mode(), launched:
        for sequence in sequences:
            engine.prefill(Prefill(sequence))
        engine._thread.run_commands(0.0)
        engine._step()
        jobs = [Decode(sequence, credits=1) for sequence in sequences]
        for job in jobs:
            if len(tree):
                job.set_draft(Draft(tree, LOCAL))
            engine.decode(job)
        engine._thread.run_commands(0.0)
        launched.names.clear()
        engine._step()
    for sequence in sequences:
        sequence.kv.close()
    pool.check_integrity()
    return [report.output.tokens for job in jobs for report in job.reports]
