"""Tries a loaded version out along recorded texts, before it gets traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.drafter.methods.base import Budget, Drafter, Generation, LoadError, Update
from paceline.drafter.recordings import Recording
from paceline.drafter.registry import Sample
from paceline.drafter.session import Session, agreement
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.worker import DraftWorker
from paceline.v1 import drafter_pb2

NODES = 16
"""Nodes asked for in a round of a check."""

SECONDS = 60.0
"""A version that needs longer for all texts fails."""

_MOST_TEXTS = 64


class LoadCheck:
    """Drafts along recordings as a client would, between the rounds of others.

    A version passes if it raises nothing and draws trees that the verifier would take. What it
    guessed is reported, not judged: that is what a trial is for. Methods that read the target's KV
    or hidden states cannot draft without a verifier and are not checked.
    """

    def __init__(self, recordings: Sequence[Recording], worker: DraftWorker) -> None:
        """Of at most 64 texts.

        Raises:
            LoadError: There are more.
        """
        if len(recordings) > _MOST_TEXTS:
            raise LoadError(
                "TOO_MANY_RECORDINGS",
                f"there are {len(recordings)} texts to check versions with, expected at most "
                f"{_MOST_TEXTS}",
            )
        self._recordings = recordings
        self._worker = worker

    async def __call__(
        self, spec: DrafterSpec, drafter: Drafter
    ) -> drafter_pb2.DrafterCheck | None:
        """What the version did.

        Raises:
            LoadError: CHECK_FAILED.
        """
        if drafter.needs.kv_layers or drafter.needs.hidden_state_layers:
            return None
        rounds, accepted, seconds = 0, 0, 0.0
        try:
            async with asyncio.timeout(SECONDS):
                for recording in self._recordings:
                    sample = await self._draft_along(recording, drafter)
                    rounds += sample.rounds
                    accepted += sample.accepted
                    seconds += sample.draft_seconds
        except TimeoutError as error:
            raise _failed(spec, f"it needed more than {SECONDS:g} s for the texts") from error
        except Exception as error:
            raise _failed(spec, f"{type(error).__name__}: {error}") from error
        return drafter_pb2.DrafterCheck(
            texts=len(self._recordings),
            rounds=rounds,
            accepted_length=accepted / rounds if rounds else 0.0,
            draft_us=round(seconds / rounds * 1e6) if rounds else 0,
        )

    async def _draft_along(self, recording: Recording, drafter: Drafter) -> Sample:
        tokens = recording.tokens
        known = max((*recording.prompt, *tokens)) + 1
        vocab_size = drafter.fit.vocab_size or known
        if known > vocab_size:
            raise ValueError(
                f"a recorded text holds the token {known - 1}, but the drafter knows {vocab_size}: "
                "the texts are of another tokenizer"
            )
        # The first recorded token is the anchor, as in a generation.
        generation = Generation(
            tokens=[*recording.prompt, tokens[0]],
            prompt_length=len(recording.prompt),
            vocab_size=vocab_size,
            sampling=recording.sampling,
        )
        session = Session(
            drafter, drafter.start(generation), self._worker, sampling=recording.sampling
        )
        try:
            await session.warm()
            nodes = min(NODES, drafter.max_nodes)
            at = 1
            news: tuple[int, ...] = ()
            while at < len(tokens):
                budget = Budget(nodes, min(drafter.max_depth, len(tokens) - at))
                drafted = await session.round(Update(news), budget)
                if len(drafted.tree) > nodes:
                    raise ValueError(f"a tree of {len(drafted.tree)} nodes, expected {nodes}")
                drafted.tree.check(vocab_size)
                end = at + agreement(drafted.tree, tokens[at:]) + 1
                news, at = tokens[at:end], end
            await session.round(Update(news), Budget(0, 0))
        finally:
            session.close()
        return session.sample


def _failed(spec: DrafterSpec, why: str) -> LoadError:
    return LoadError(
        "CHECK_FAILED",
        f"drafter {spec.name!r} was loaded but failed on the recorded texts, and is gone again: "
        f"{why}",
    )
