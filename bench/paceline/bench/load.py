"""Many generations at once: throughput and what each user sees, with the scheduler and without."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paceline.bench.prompts import Prompt
from paceline.bench.served import Services
from paceline.client import Client, DraftOptions, RoundStats

LENGTHS = (32, 96, 192, 384)
"""Prompt lengths, in turns. Unit: tokens."""

TOKENS = 128
"""New tokens of a generation."""

LOOPS = ("closed", "open")
"""So many users who ask again and again; users who come at random times."""

MODES = ("plain", "fixed", "scheduled")
"""No speculation; a tree of `FIXED_NODES`, checked whole, in every round; the scheduler."""

FIXED_NODES = 8


@dataclass(frozen=True)
class Workload:
    """What is asked for, who drafts for it, and how much of it at a time.

    Attributes:
        drafter: Name of the drafter.
        sets: Sets of prompts, in turn.
        users: Generations at a time of the closed loop.
        arrivals: Generations that begin in the open loop. Unit: per second.
    """

    drafter: str
    sets: tuple[str, ...]
    users: tuple[int, ...]
    arrivals: tuple[float, ...] = ()


_MIXED = ("heldout", "trained", "copying")

WORKLOADS = {
    "load": Workload("ngram", _MIXED, (1, 2, 4, 8, 16, 32, 64), (1.0, 2.0, 4.0)),
    "load-copying": Workload("ngram", ("copying",), (1, 4, 16)),
    "load-longspec": Workload("longspec", ("copying",), (1, 4, 16)),
}
"""By the name of the part. Prompt lookup costs least beside the target; it hardly pays but where
texts repeat themselves."""

_PROMPTS_A_TURN = 37  # each turn begins with other prompts, the same in all modes
_FINDING_OUT_SECONDS = 3.0  # under each load, for the scheduler: its like run for days
_WARM_SECONDS, _WARM_SECONDS_A_USER = 1.0, 0.04


@dataclass
class User:
    """What one generation's user saw inside the window. Times in milliseconds."""

    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Between messages."""
    tokens: int = 0
    """After the first message."""
    rounds: Sequence[RoundStats] = ()

    @property
    def per_second(self) -> float | None:
        """Tokens per second after the first message."""
        return self.tokens / sum(self.gaps) * 1e3 if sum(self.gaps) else None


@dataclass
class Window:
    """Tokens that came out between two times (time.perf_counter)."""

    begin: float
    end: float
    tokens: int = 0
    users: list[User] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """JSON-ready figures."""
        users = [user for user in self.users if user.gaps]
        rounds = [entry for user in users for entry in user.rounds]
        drafted = [entry for entry in rounds if entry.drafted]
        emitted = sum(entry.emitted for entry in rounds)
        return {
            "tokens_per_second": self.tokens / (self.end - self.begin),
            "generations": len(users),
            "user_tokens_per_second": _spread([u.per_second for u in users if u.per_second]),
            "first_token_ms": _spread([u.first_token for u in users if u.first_token is not None]),
            "between_messages_ms": _spread([gap for user in users for gap in user.gaps]),
            "per_token_ms": _spread([1e3 / u.per_second for u in users if u.per_second]),
            "drafted_share": sum(entry.emitted for entry in drafted) / max(1, emitted),
            "accepted_length": fmean(e.emitted for e in drafted) if drafted else None,
            "drafted_nodes": fmean(e.drafted for e in drafted) if drafted else None,
            "checked_nodes": fmean(e.checked for e in drafted) if drafted else None,
            "node_budget": fmean(e.node_budget for e in rounds) if rounds else None,
            "budget_0_share": fmean(e.node_budget == 0 for e in rounds) if rounds else None,
        }


class Load:
    """Generations against running services, prompt after prompt."""

    def __init__(self, client: Client, prompts: Sequence[Prompt], drafter: str, **options: Any):
        self._client = client
        self._prompts = prompts
        self._drafter = drafter
        self._options = options
        self._next = count()

    def begin_with(self, prompt: int) -> None:
        """Go on with this prompt, by its number."""
        self._next = count(prompt)

    async def closed(self, users: int, seconds: float) -> Window:
        """So many users, each of whom asks again as soon as a generation ends."""
        warm = _WARM_SECONDS + _WARM_SECONDS_A_USER * users
        return await self._measure(warm, seconds, lambda window: self._crowd(users, window))

    async def opened(self, rate: float, seconds: float) -> Window:
        """Users who come at random times, `rate` a second on average, whoever waits."""
        return await self._measure(
            _WARM_SECONDS, seconds, lambda window: self._arrivals(rate, window)
        )

    async def _measure(self, warm: float, seconds: float, work: Callable[[Window], Any]) -> Window:
        begin = time.perf_counter() + warm
        window = Window(begin, begin + seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(warm + seconds):
                await work(window)
        return window

    async def _crowd(self, users: int, window: Window) -> None:
        async def user(index: int) -> None:
            # The first generations differ in length, or all would take in prompts at the same time.
            await self._generate(window, TOKENS * (index + 1) // users or 1)
            while True:
                await self._generate(window, TOKENS)

        async with asyncio.TaskGroup() as group:
            for index in range(users):
                group.create_task(user(index))

    async def _arrivals(self, rate: float, window: Window) -> None:
        chance = random.Random(1)  # the same times for all modes
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._generate(window, TOKENS))
                await asyncio.sleep(chance.expovariate(rate))

    async def _generate(self, window: Window, tokens: int) -> None:
        number = next(self._next)
        prompt = self._prompts[number % len(self._prompts)]
        began = time.perf_counter()
        generation = self._client.generate(
            prompt.tokens[-LENGTHS[number % len(LENGTHS)] :],
            max_new_tokens=tokens,
            drafter=self._drafter,
            ignore_eos=True,
            **self._options,
        )
        user = User(rounds=generation.stats.rounds)
        window.users.append(user)
        last = None
        async for chunk in generation:
            now = time.perf_counter()
            if now >= window.begin:
                window.tokens += len(chunk.token_ids)
                if last is None:
                    user.first_token = (now - began) * 1e3
                else:
                    user.tokens += len(chunk.token_ids)
                    user.gaps.append((now - last) * 1e3)
            last = now


async def measure(
    workload: Workload,
    prompts: Sequence[Prompt],
    target: Path,
    drafter: str,
    *,
    dtype: str,
    loops: Sequence[str],
    seconds: float,
    repeats: int,
    progress: Callable[[str], object],
) -> dict[str, Any]:
    """Closed and open loops of all modes, `repeats` turns of them.

    Plain decoding and fixed trees have a verifier without a scheduler. Each turn has processes of
    its own: of two that are alike one may be a few percent faster as long as it lives.

    Args:
        workload: How much at a time.
        prompts: What to ask for, in turn.
        target: Model folder.
        drafter: Specification, METHOD[:DIR][,key=value...], under the name "load".
        dtype: Of the target.
        loops: Which of `LOOPS`.
        seconds: Length of each window.
        repeats: Windows of each point.
        progress: Told what is under way.
    """
    points = [("closed", float(users)) for users in workload.users if "closed" in loops]
    points += [("open", rate) for rate in workload.arrivals if "open" in loops]
    windows: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {
        point: {mode: [] for mode in MODES} for point in points
    }
    order = random.Random(1)
    for turn in range(repeats):
        async with _running(prompts, target, drafter, dtype, again=turn == 0) as loads:
            for loop, size in points:
                if loop == "closed":
                    await loads["scheduled"].closed(int(size), _FINDING_OUT_SECONDS)
                # A machine's speed drifts: no mode may always be the last.
                for mode in order.sample(MODES, len(MODES)):
                    load = loads[mode]
                    load.begin_with(turn * _PROMPTS_A_TURN)
                    if loop == "closed":
                        window = await load.closed(int(size), seconds)
                    else:
                        window = await load.opened(size, seconds)
                    windows[loop, size][mode].append(window.summary())
                rates = {mode: _middle(runs) for mode, runs in windows[loop, size].items()}
                progress(
                    f"turn {turn + 1} of {repeats}, {loop} {size:g}: "
                    + ", ".join(f"{m} {rates[m]['tokens_per_second']:.0f}/s" for m in MODES)
                    + f"; scheduled over plain {against(rates, 'scheduled', 'plain'):.2f}"
                )
    found: dict[str, Any] = {"drafter": drafter, "tokens": TOKENS, "prompt_lengths": LENGTHS}
    for (loop, size), modes in windows.items():
        cells = found.setdefault(loop, {})
        cells[f"{size:g}"] = {mode: _middle(runs) for mode, runs in modes.items()}
    return found


@asynccontextmanager
async def _running(
    prompts: Sequence[Prompt], target: Path, drafter: str, dtype: str, *, again: bool
) -> AsyncIterator[dict[str, Load]]:
    """The loads of all modes, against services that run meanwhile; `again`: costs are measured."""
    with ExitStack() as running:
        schedule = f"--schedule={'profile' if again else 'auto'}"
        scheduled = Services(target, [f"load={drafter}"], dtype, verifier=[schedule])
        services = running.enter_context(scheduled)
        unscheduled = Services(target, [f"load={drafter}"], dtype, verifier=["--schedule=off"])
        running.enter_context(unscheduled)
        async with (
            services.client() as client,
            unscheduled.client(drafting=DraftOptions(adaptive=False)) as eager,
        ):
            loads = {
                "plain": Load(eager, prompts, "none"),
                "fixed": Load(eager, prompts, "load", max_nodes=FIXED_NODES),
                "scheduled": Load(client, prompts, "load"),
            }
            for load in loads.values():
                await load.closed(2, 1.0)  # warm
            yield loads


def against(modes: Mapping[str, Any], mode: str, other: str, quantile: float = 0.5) -> float:
    """Throughput of a mode over that of another: the median of the turns' quotients, or another
    quantile."""
    return float(np.quantile(quotients(modes, mode, other), quantile))


def quotients(modes: Mapping[str, Any], mode: str, other: str) -> list[float]:
    """Throughput of a mode over that of another, turn by turn."""
    pairs = zip(modes[mode]["runs"], modes[other]["runs"], strict=True)
    return [own / its for own, its in pairs]


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median throughput, and the throughput of all, turn by turn."""
    ordered = sorted(runs, key=lambda run: float(run["tokens_per_second"]))
    return {**ordered[len(ordered) // 2], "runs": [run["tokens_per_second"] for run in runs]}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
