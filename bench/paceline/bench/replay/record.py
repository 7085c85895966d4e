"""Recording: a verifier in this process whose scheduler notes every round and cuts no tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.bench.prompts import Prompt
from paceline.bench.replay.traces import Round, Text, Traces
from paceline.bench.services import ALWAYS, serving
from paceline.client import Client
from paceline.tree import TokenTree
from paceline.verifier import build_service
from paceline.verifier.engine.drafted import DraftedText
from paceline.verifier.engine.report import LOCAL, NONE, StepOutput
from paceline.verifier.scheduler.scheduler import Scheduler

_WARM_UP = 48  # tokens


class _Recorder(Scheduler):
    """A scheduler that admits every node, and notes what came of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.costs.profiled, 255)
        # Rounds by text, in the order in which the texts began.
        self.texts: dict[object, list[Round]] = {}
        self._jobs: Sequence[DraftedText] = ()
        self._trees: Sequence[TokenTree] = ()
        self._last = 0.0

    def admit(
        self,
        jobs: Sequence[DraftedText],
        trees: Sequence[TokenTree],
        tokens: int,
        attended: int,
        away: int,
    ) -> list[TokenTree]:
        super().admit(jobs, trees, tokens, attended, away)
        self._jobs, self._trees = jobs, trees
        return list(trees)

    def stepped(
        self,
        began: float,
        ended: float,
        outputs: Sequence[StepOutput | None] = (),
        waited: Mapping[DraftedText, str] | None = None,
    ) -> int:
        plain_us = super().stepped(began, ended, outputs, waited)
        before, self._last = began - self._last, ended
        for job, tree, output in zip(self._jobs, self._trees, outputs, strict=False):
            if output is None:
                continue
            rounds = self.texts.setdefault(job.text, [])
            rounds.append(
                Round(
                    len(output.tokens),
                    before if rounds else 0.0,
                    ended - began,
                    tree.parents,
                    tree.acceptance_probabilities if len(tree) else (),
                    tuple(output.accepted),
                )
            )
        self._jobs = self._trees = ()
        return plain_us


async def record(
    target: Path,
    weights: str,
    drafters: Mapping[str, str],
    prompts: Sequence[tuple[str, Prompt]],
    tokens: int,
    temperature: float,
    nodes: int,
) -> list[Traces]:
    """Record texts, each in plain decoding and with a tree of each drafter in every round.

    Args:
        drafters: Specifications by name; ``local`` has the verifier's own sources.

    Returns the traces of each drafter. Raises ``RuntimeError`` if a text differs between the modes.
    """
    sources = [source for source in drafters.get(LOCAL.name, "").split(",") if source]
    service = build_service(
        target, weights=weights, device="cpu", sources=sources, node_budget=nodes
    )
    engine: Any = service.engine
    recorder = _Recorder(engine._scheduler)
    engine._scheduler = recorder
    loads = {name: spec for name, spec in drafters.items() if name != LOCAL.name}
    async with serving(service, loads) as (address, _), Client(address, drafting=ALWAYS) as client:
        by_drafter: dict[str, list[Text]] = {drafter: [] for drafter in (NONE, *drafters)}
        for place, (category, prompt) in enumerate([("", prompts[0][1]), *prompts]):
            texts = []
            for drafter in by_drafter:
                recorder.texts.clear()
                result = await client.generate(
                    prompt.ids,
                    json_schema=prompt.json_schema or None,
                    max_new_tokens=tokens if place else _WARM_UP,
                    temperature=temperature,
                    seed=place,
                    drafter=drafter,
                    isolated=True,
                )
                texts.append(result.token_ids)
                if place and recorder.texts:
                    [rounds] = recorder.texts.values()
                    by_drafter[drafter].append(Text(category, len(prompt.ids), rounds))
            if any(text != texts[0] for text in texts):
                raise RuntimeError(f"the texts of prompt {place} differ between the modes")
    table = asdict(recorder.costs.profiled)
    return [Traces(name, table, by_drafter[NONE], by_drafter[name]) for name in drafters]
