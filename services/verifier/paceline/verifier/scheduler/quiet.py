"""Steps in which nobody drafts, booked some at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.output import FinishReason, StepOutput
from paceline.verifier.engine.sequence import Sequence
from paceline.verifier.scheduler.admission import Step

_MOST = 8  # steps that are booked together
_STRANGE = 5.0  # a step this many times longer than those before it is booked by itself


@dataclass(frozen=True, slots=True)
class Served:
    """A round that a step served: what was checked of its tree, and what came out."""

    round: Round
    tree: TokenTree
    output: StepOutput


class QuietRun:
    """Steps of the same rounds without trees, one right after the other: booked as a long one.

    What Python does once a step, between two passes through the model, takes several times as long
    as the same in a row: booked one by one, steps of 3 ms would take three percent longer.

    Attributes:
        rounds: Whose steps they are.
        step: The first.
        asked: When it was decided on (time.perf_counter), when it
        began: began, and when the last of them
        ended: ended.
    """

    def __init__(self, rounds: Items[Round], step: Step, asked: float, began: float) -> None:
        self.rounds = rounds
        self.step = step
        self.asked = asked
        self.began = began
        self.ended = began
        self._served: list[Items[Served]] = []

    def __len__(self) -> int:
        return len(self._served)

    @property
    def full(self) -> bool:
        """Whether it is to be booked now."""
        return len(self._served) >= _MOST

    def goes_on(self, rounds: Items[Round], step: Step, ended: float) -> bool:
        """Whether a step that ended now is another of them."""
        usual = (self.ended - self.began) / len(self._served)
        return (
            ended - self.ended < _STRANGE * usual
            and step.tokens == self.step.tokens
            and rounds == self.rounds
        )

    def add(self, ended: float, served: Items[Served]) -> None:
        """Take in a step."""
        self.ended = ended
        self._served.append(served)

    def served(self) -> list[Served]:
        """What came of all of them, round by round."""
        came: dict[Sequence, tuple[Round, list[int], FinishReason | None]] = {}
        for served in self._served:
            for each in served:
                sequence, output = each.round.sequence, each.output
                before = came[sequence][1] if sequence in came else []
                came[sequence] = each.round, before + output.tokens, output.finish
        return [
            Served(round_, EMPTY, StepOutput(tokens, finish=finish))
            for round_, tokens, finish in came.values()
        ]
