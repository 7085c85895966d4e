"""One group: the contestants take turns prompt by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from paceline.bench.baseline import Transformers
from paceline.bench.served import Sample, Services, generate
from paceline.bench.table.cells import PLAIN, Turn, decode_rate, described
from paceline.bench.table.groups import Group, Models
from paceline.client import Client, DraftOptions

TEMPERATURES = (0.0, 1.0)

_WARM, _LEARN = 24, 128  # tokens
_LEASE = "--lease-seconds=7200"
_PATIENCE = 20.0  # for a tree, where every round is to draft. Unit: s


async def measure(
    group: Group,
    models: Models,
    prompts: Sequence[list[int]],
    *,
    dtype: str,
    tokens: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A cell for each temperature.

    Every prompt is prefilled once on either side, and each run begins with a copy of that KV: rates
    are of decoding, the time of prefills stands apart. Drafted tokens are counted in runs of their
    own in which every round drafts; in the others the client decides where that pays.
    """
    baseline = Transformers(models.target, models.assistant, dtype)
    load = [f"{name}={spec}" for name, spec in models.drafters.items()]
    extra = ["--share-weights", _LEASE]
    turns: dict[float, list[Turn]] = {temperature: [] for temperature in TEMPERATURES}
    theirs: list[float] = []
    ours: list[float] = []
    with Services(models.target, load, dtype, verifier=extra) as services:
        eager = DraftOptions(timeout=_PATIENCE, adaptive=False)
        async with services.client() as paced, services.client(eager) as always:
            crowd = _Crowd(baseline, paced, always, tuple(models.drafters), tokens)
            await crowd.warm_up(prompts[0][-64:])
            for index, prompt in enumerate(prompts):
                cache, seconds = baseline.prefill(prompt)
                theirs.append(seconds)
                # Drafted by the one who wants most: its copies serve all.
                parent = always.generate(
                    prompt, max_new_tokens=2, drafter="dspark", ignore_eos=True, keep_cache=True
                )
                ours.append((await parent).stats.first_token_ms / 1e3)
                for repeat in range(group.repeats):
                    for temperature in TEMPERATURES:
                        turn = await crowd.turn(
                            prompt, cache, parent.handle, temperature, index, repeat
                        )
                        turns[temperature].append(turn)
                    progress(f"{group.name}: prompt {index + 1}, pass {repeat + 1}")
                await parent.aclose()
    return [
        {
            "group": group.name,
            "target": group.target,
            "set": group.set,
            "context": group.context,
            "yarn": group.factor if group.factor > 1 else None,
            "temperature": temperature,
            "prompts": len(prompts),
            "prompt_tokens": statistics.median(map(len, prompts)),
            "prefill_seconds": {
                "paceline": statistics.median(ours),
                "transformers": statistics.median(theirs),
            },
            **described(found),
        }
        for temperature, found in turns.items()
    ]


class _Crowd:
    """All contestants."""

    def __init__(
        self,
        baseline: Transformers,
        paced: Client,
        always: Client,
        drafters: Sequence[str],
        tokens: int,
    ) -> None:
        self._baseline = baseline
        self._paced, self._always = paced, always
        self._drafters = drafters
        self._tokens = tokens

    async def warm_up(self, prompt: list[int]) -> None:
        """Let everybody write a little, client and verifier learn what rounds cost."""
        cache, _ = self._baseline.prefill(prompt)
        for mode in self._baseline.modes():
            self._baseline.decode(mode, prompt, cache, _WARM, temperature=0.0, seed=0)
        for drafter in ("none", *self._drafters):
            await generate(self._paced, prompt, _LEARN, drafter)
        for drafter in self._drafters:
            await generate(self._always, prompt, _WARM, drafter)

    async def turn(
        self,
        prompt: list[int],
        cache: Any,
        parent: bytes,
        temperature: float,
        index: int,
        repeat: int,
    ) -> Turn:
        """Everybody once, another one first each time.

        But for plain steps, which all others are held against: the median of several runs counts.
        """
        turn = Turn()
        plain: list[float] = []
        how: dict[str, Any] = {"temperature": temperature, "seed": index + 1}

        async def transformers(mode: str) -> None:
            _, rate = self._baseline.decode(mode, prompt, cache, self._tokens, **how)
            turn.rates[mode] = rate

        async def paceline(drafter: str) -> None:
            sample = await self._generate(self._paced, prompt, drafter, parent, how)
            turn.paced[f"paceline {drafter}"] = sample
            turn.rates[f"paceline {drafter}"] = decode_rate(sample)
            if drafter == "none":
                plain.append(decode_rate(sample))
                turn.rates[PLAIN] = statistics.median(plain)
            else:
                sample = await self._generate(self._always, prompt, drafter, parent, how)
                turn.always[f"paceline {drafter}"] = sample

        acts: list[tuple[Callable[[str], Awaitable[None]], str]]
        acts = [(transformers, mode) for mode in self._baseline.modes()]
        for place, drafter in enumerate(self._drafters):
            acts += [(paceline, "none")] if place % 2 == 0 else []
            acts.append((paceline, drafter))
        first = (index + repeat) % len(acts)
        for act, name in acts[first:] + acts[:first]:
            await act(name)
        order = [*self._baseline.modes(), PLAIN, *(f"paceline {name}" for name in self._drafters)]
        turn.rates = {name: turn.rates[name] for name in order}
        return turn

    async def _generate(
        self, client: Client, prompt: list[int], drafter: str, parent: bytes, how: dict[str, Any]
    ) -> Sample:
        return await generate(client, prompt, self._tokens, drafter, parent=parent, **how)
