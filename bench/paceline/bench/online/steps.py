"""The steps of the loop, by the commands that a user would give."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.served import Services
from paceline.bench.texts import Text
from paceline.client import DraftOptions
from paceline.v1 import drafter_pb2

HEATS = (0.0, 1.0)
"""Temperatures that prompts get in turns."""

_AT_ONCE = 8
"""Generations in flight."""


@dataclass(frozen=True)
class Loop:
    """One drafter that learns, its services and its folders."""

    services: Services
    method: str
    target: Path
    start: Path
    """The drafter's folder."""
    work: Path
    say: Callable[[str], None]

    @property
    def recordings(self) -> Path:
        """Where its texts are recorded."""
        return self.work / "texts"

    @property
    def out(self) -> Path:
        """The folder of the version to come."""
        return self.work / f"{self.method}-2"

    @property
    def heldout(self) -> Path:
        """Recorded texts that were not learnt from."""
        return self.work / "run" / "heldout.jsonl"

    def generate(
        self, prompts: Sequence[Text], tokens: int, drafter: str, seed: int = 0
    ) -> list[tuple[list[int], list[int]]]:
        """A text for each prompt, at the temperatures in turns.

        Returns its tokens, and how many drafted ones stood in each of its rounds.
        """
        return asyncio.run(self._generate(prompts, tokens, drafter, seed))

    async def _generate(
        self, prompts: Sequence[Text], tokens: int, drafter: str, seed: int
    ) -> list[tuple[list[int], list[int]]]:
        room = asyncio.Semaphore(_AT_ONCE)
        async with self.services.client(DraftOptions(timeout=60, adaptive=False)) as client:

            async def one(number: int, prompt: Text) -> tuple[list[int], list[int]]:
                async with room:
                    result = await client.generate(
                        prompt.tokens,
                        max_new_tokens=tokens,
                        temperature=HEATS[number % len(HEATS)],
                        seed=seed + number,
                        drafter=drafter,
                    )
                rounds = [each.accepted for each in result.stats.rounds if each.drafted]
                return result.token_ids, rounds

            return await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts)))

    def train(self, minutes: float) -> None:
        """Train a new version on what was recorded."""
        self._paceline(
            *("train", "online", "--target", self.target, "--from", self.start),
            *("--from-recordings", self.recordings, "--minutes", minutes),
            *("--work", self.work / "run", "--out", self.out, "--force"),
        )

    def calibrate(self) -> None:
        """Let its confidences mean what they say."""
        options = "" if self.method == "lm" else f",target={self.target}"
        self._paceline(
            *("calibrate", f"{self.method}:{self.out}{options}", "--target", self.target),
            *("--recordings", self.heldout),
        )

    def load(self) -> None:
        """Load the version beside the one that drafts, and check that it can."""
        verifier, drafter = self.services.addresses
        option = [] if self.method == "lm" else ["--option", f"target={self.target}"]
        self._paceline(
            *("drafters", "load", self.method, self.method, self.out, *option),
            *("--check", self.heldout, "--address", drafter, "--verifier-address", verifier),
        )

    def try_out(self, share: float) -> None:
        """Give it a share of new generations, on trial."""
        self._paceline(
            *("drafters", "try", self.method, "2", "--share", share, "--confidence", 0.95),
            *("--address", self.services.addresses[1]),
        )

    def trial(self) -> dict[str, Any]:
        """Where the trial stands."""
        listed = self._paceline(
            "drafters", "trials", "--json", "--address", self.services.addresses[1], told=True
        )
        found: dict[str, Any] = json.loads(listed)[0]
        state = drafter_pb2.TrialState.Name(found["state"])
        return {**found, "state": state.removeprefix("TRIAL_STATE_").lower()}

    def _paceline(self, *words: object, told: bool = False) -> str:
        """Give a command; what it printed, if that is to be `told` and not shown.

        Raises RuntimeError where it fails.
        """
        command = [str(word) for word in words]
        if not told:
            self.say("paceline " + " ".join(command))
        done = subprocess.run(
            [sys.executable, "-m", "paceline.cli.main", *command],
            check=False,
            stdout=subprocess.PIPE if told else None,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"`paceline {' '.join(command)}` failed with code {done.returncode}")
        return done.stdout or ""
