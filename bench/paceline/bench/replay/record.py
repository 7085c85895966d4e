"""Recording: a verifier in this process whose scheduler notes every round and cuts no tree."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.bench.prompts import Prompt
from paceline.bench.replay.traces import Round, Text, Traces
from paceline.bench.services import ALWAYS
from paceline.client import Client
from paceline.harness import ServiceProcess
from paceline.service import ServerOptions, run_server
from paceline.tree import TokenTree
from paceline.verifier import build_service
from paceline.verifier.engine.job import LOCAL, NONE, CachedSequence, Decode, StepOutput
from paceline.verifier.scheduler.scheduler import Scheduler

_WARM_UP = 48  # tokens


class _Recorder(Scheduler):
    """A scheduler that admits every node, and notes what came of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.costs.profiled, 255)
        self.texts: dict[CachedSequence, list[Round]] = {}
        """Rounds by text, in the order in which the texts began."""
        self._jobs: Sequence[Decode] = ()
        self._trees: Sequence[TokenTree] = ()
        self._last = 0.0

    def admit(
        self,
        jobs: Sequence[Decode],
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
        waited: Mapping[CachedSequence, str] | None = None,
    ) -> None:
        super().stepped(began, ended, outputs, waited)
        before, self._last = began - self._last, ended
        for job, tree, output in zip(self._jobs, self._trees, outputs, strict=False):
            if output is None:
                continue
            rounds = self.texts.setdefault(job.sequence, [])
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
        target: The model.
        weights: Format of its weights.
        drafters: Specifications by name; of ``local`` it is the verifier's own sources.
        prompts: Each with its category.
        tokens: Maximum number of tokens of a text.
        temperature: Of the sampling.
        nodes: Maximum number of nodes of a tree.

    Returns:
        The traces of each drafter. A text of which a mode emitted other tokens is an error.

    Raises:
        RuntimeError: Texts differ.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    sources = [each for each in drafters.get(LOCAL.name, "").split(",") if each]
    service = build_service(
        target,
        weights=weights,
        device="cpu",
        sources=sources,
        node_budget=nodes,
    )
    engine: Any = service.engine
    recorder = _Recorder(engine._scheduler)
    engine._scheduler = recorder
    loads = {name: spec for name, spec in drafters.items() if name != LOCAL.name}
    ready: asyncio.Future[str] = loop.create_future()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pl"))
        address = f"unix:{folder}/v"
        options = ServerOptions(address=address, drain_seconds=10.0)
        server = asyncio.create_task(
            run_server(service, options, on_ready=ready.set_result, stop_event=stop)
        )
        starting: list[asyncio.Future[Any]] = [ready, server]
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        try:
            if loads:
                arguments = ["--device=cpu", f"--verifier={address}"]
                for name, spec in loads.items():
                    arguments += ["--load", f"{name}={spec}"]
                process = ServiceProcess("drafter", arguments)
                stack.callback(process.stop)
                await asyncio.to_thread(process.start)
                while not service.joined():  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
            client = await stack.enter_async_context(Client(address, drafting=ALWAYS))
            found: dict[str, list[Text]] = {drafter: [] for drafter in (NONE, *drafters)}
            for place, (category, prompt) in enumerate([("", prompts[0][1]), *prompts]):
                texts = []
                for drafter in found:
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
                        found[drafter].append(Text(category, len(prompt.ids), rounds))
                if any(text != texts[0] for text in texts):
                    raise RuntimeError(f"the texts of prompt {place} differ between the modes")
        finally:
            stop.set()
            await server
    table = asdict(recorder.costs.profiled)
    return [Traces(name, table, found[NONE], found[name]) for name in drafters]
