"""One group of prompts: all rows take turns prompt by prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

from paceline.bench.baseline import Transformers
from paceline.bench.models import Models
from paceline.bench.services import ALWAYS, Sample, generate, services
from paceline.bench.table.rows import PLAIN, Turn, decode_rate, summary
from paceline.client import Client

TEMPERATURES = (0.0, 1.0)

_WARM_UP = 24  # tokens
_LEARN = 128  # tokens in which verifier and client measure what rounds cost
_LEASE = "--lease-seconds=7200"


async def measure(
    models: Models,
    prompts: Sequence[list[int]],
    *,
    dtype: str,
    tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[float, dict[str, Any]]:
    """A cell for each temperature.

    Every prompt is prefilled once on either side, and each run begins with a copy of that KV: rates
    are of decoding, prefill is reported by itself. Accepted lengths come from runs of their own in
    which every round drafts; in the others drafting is adaptive.

    Args:
        models: The target, its drafters, and the assistant of transformers.
        prompts: Token ids.
        dtype: float32 or bfloat16.
        tokens: New tokens of each run.
        repeats: Passes over the prompts.
        progress: Called after every prompt.
    """
    baseline = Transformers(models.target, models.trained.get("lm"), dtype)
    turns: dict[float, list[Turn]] = {temperature: [] for temperature in TEMPERATURES}
    prefill: dict[str, list[float]] = {"paceline": [], "transformers": []}
    # Caches with hidden states serve every drafter, those without serve all but DSpark.
    richest = "dspark" if "dspark" in models.drafters else "ngram"
    running = services(models.target, models.drafters, dtype, verifier=["--share-weights", _LEASE])
    with running as pair:
        async with pair.client() as adaptive, pair.client(ALWAYS) as always:
            rows = _Rows(baseline, adaptive, always, tuple(models.drafters), tokens)
            await rows.warm_up(prompts[0][-64:])
            for index, prompt in enumerate(prompts):
                cache, seconds = baseline.prefill(prompt)
                prefill["transformers"].append(seconds)
                parent = always.generate(
                    prompt, max_new_tokens=2, drafter=richest, ignore_eos=True, keep_cache=True
                )
                prefill["paceline"].append((await parent).stats.first_token_ms / 1e3)
                for repeat in range(repeats):
                    for temperature, found in turns.items():
                        how = {"temperature": temperature, "seed": index + 1}
                        first = index + repeat
                        found.append(await rows.turn(prompt, cache, parent.handle, how, first))
                await parent.aclose()
                progress(f"prompt {index + 1} of {len(prompts)}")
    return {
        temperature: {
            "temperature": temperature,
            "prompts": len(prompts),
            "prompt_tokens": median(map(len, prompts)),
            "prefill_seconds": {name: median(times) for name, times in prefill.items()},
            **summary(found),
        }
        for temperature, found in turns.items()
    }


class _Rows:
    """Transformers' modes, plain decoding and every drafter, on one prompt at a time."""

    def __init__(
        self,
        baseline: Transformers,
        adaptive: Client,
        always: Client,
        drafters: Sequence[str],
        tokens: int,
    ) -> None:
        self._baseline = baseline
        self._adaptive, self._always = adaptive, always
        self._drafters = drafters
        self._tokens = tokens

    async def warm_up(self, prompt: list[int]) -> None:
        """Run every row once."""
        cache, _ = self._baseline.prefill(prompt)
        for mode in self._baseline.modes():
            self._baseline.decode(mode, prompt, cache, _WARM_UP, temperature=0.0, seed=0)
        for drafter in ("none", *self._drafters):
            await generate(self._adaptive, prompt, _LEARN, drafter)
        for drafter in self._drafters:
            await generate(self._always, prompt, _WARM_UP, drafter)

    async def turn(
        self, prompt: list[int], cache: Any, parent: bytes, how: dict[str, Any], first: int
    ) -> Turn:
        """Run every row, beginning with another one each time.

        Plain decoding, which all rows are compared with, runs several times; its median counts.
        """
        turn = Turn()
        plain: list[float] = []

        async def transformers(mode: str) -> None:
            _, turn.rates[mode] = self._baseline.decode(mode, prompt, cache, self._tokens, **how)

        async def paceline(drafter: str) -> None:
            name = f"paceline {drafter}"
            sample = await self._generate(self._adaptive, prompt, drafter, parent, how)
            turn.adaptive[name] = sample
            turn.rates[name] = decode_rate(sample)
            if drafter == "none":
                plain.append(turn.rates[name])
                turn.rates[name] = median(plain)
            else:
                turn.always[name] = await self._generate(self._always, prompt, drafter, parent, how)

        steps: list[tuple[Callable[[str], Awaitable[None]], str]]
        steps = [(transformers, mode) for mode in self._baseline.modes()]
        for place, drafter in enumerate(self._drafters):
            steps += [(paceline, "none")] if place % 2 == 0 else []
            steps.append((paceline, drafter))
        first %= len(steps)
        for step, name in steps[first:] + steps[:first]:
            await step(name)
        order = [*self._baseline.modes(), PLAIN, *(f"paceline {name}" for name in self._drafters)]
        turn.rates = {name: turn.rates[name] for name in order}
        return turn

    async def _generate(
        self, client: Client, prompt: list[int], drafter: str, parent: bytes, how: dict[str, Any]
    ) -> Sample:
        return await generate(client, prompt, self._tokens, drafter, parent=parent, **how)
