"""The load check: a version drafts along recorded texts before it is listed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from paceline.drafter.methods.base import Budget, Drafter, GenerationInfo, LoadError, Update
from paceline.drafter.recordings import Recording
from paceline.drafter.session import Drafted, Session
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.statistics import DraftStatistics, accepted_tokens
from paceline.drafter.worker import SLICE, DraftWorker
from paceline.v1 import drafter_pb2

NODES = 16
"""Node budget of a round."""

SECONDS = 60.0
"""A version that needs longer for all texts fails."""


class LoadCheck:
    """Drafts along recordings as for a verifier, between the rounds of generations.

    A version passes if it raises nothing and its trees are valid. Accepted length and draft time
    are reported, not judged. Methods that read the target's KV or hidden states
    are not checked, because they cannot draft without a verifier.
    """

    def __init__(self, recordings: Sequence[Recording], worker: DraftWorker) -> None:
        self._recordings = recordings
        self._worker = worker

    async def __call__(
        self, spec: DrafterSpec, drafter: Drafter
    ) -> drafter_pb2.DrafterCheck | None:
        """Check a version. Returns its statistics; None if it cannot be checked.

        Raises:
            LoadError: CHECK_FAILED.
        """
        if drafter.needs.kv_layers or drafter.needs.hidden_state_layers:
            return None
        total = DraftStatistics()
        try:
            async with asyncio.timeout(SECONDS):
                for recording in self._recordings:
                    await self._draft_along(recording, drafter, total)
        except TimeoutError as error:
            raise _failed(spec, f"it needed more than {SECONDS:g} s for the texts") from error
        except Exception as error:
            raise _failed(spec, f"{type(error).__name__}: {error}") from error
        return drafter_pb2.DrafterCheck(
            texts=len(self._recordings),
            rounds=total.rounds,
            accepted_length=total.accepted_length,
            draft_us=total.draft_us,
        )

    async def _draft_along(
        self, recording: Recording, drafter: Drafter, total: DraftStatistics
    ) -> None:
        tokens = recording.tokens
        largest = max((*recording.prompt, *tokens))
        vocab_size = drafter.fit.vocab_size or largest + 1
        if largest >= vocab_size:
            raise ValueError(
                f"a recorded text holds the token {largest}, but the drafter's vocabulary has "
                f"{vocab_size}: the texts are of another tokenizer"
            )
        generation = GenerationInfo(
            tokens=[*recording.prompt, tokens[0]],  # the first recorded token is the anchor
            prompt_length=len(recording.prompt),
            vocab_size=vocab_size,
            sampling=recording.sampling,
        )
        session = Session(drafter, generation, statistics=total)
        run = self._worker.run
        try:
            nodes = min(NODES, drafter.max_nodes)
            length = 1
            emitted: tuple[int, ...] = ()
            while length < len(tokens):
                await run(partial(session.extend, Update(emitted)))
                while session.sequence.backlog > SLICE:
                    await run(partial(session.sequence.warm, SLICE))
                budget = Budget(nodes, min(drafter.max_depth, len(tokens) - length))
                tree = (await run(partial(_draft, session, budget))).tree
                if len(tree) > nodes:
                    raise ValueError(f"a tree of {len(tree)} nodes, expected at most {nodes}")
                tree.check(vocab_size)
                end = length + accepted_tokens(tree, tokens[length:]) + 1
                emitted, length = tokens[length:end], end
            await run(partial(session.extend, Update(emitted)))
        finally:
            self._worker.post(session.close)


def _draft(session: Session, budget: Budget) -> Drafted:
    begun = time.monotonic()
    (tree,) = session.drafter.draft_many([(session.sequence, budget)])
    return session.finish(Drafted(tree, time.monotonic() - begun, 0.0))


def _failed(spec: DrafterSpec, why: str) -> LoadError:
    return LoadError(
        "CHECK_FAILED",
        f"drafter {spec.name!r} was loaded but failed on the recorded texts and was unloaded: "
        f"{why}",
    )
