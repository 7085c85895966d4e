"""Accepted length by KV budget on held-out text, measured with the drafter itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from paceline.decoder import Decoder
from paceline.drafter.acceptance import accepted_lengths, record
from paceline.train.budget.students import Student

BUDGETS = (64, 256, 1024, 0)
"""KV budgets that are measured; 0: all. Unit: tokens."""

_WRITTEN = 96  # tokens after a prompt

Measured = dict[tuple[str, int], float]
"""Mean accepted length, bonus included, by group of prompts and budget."""


class BudgetHeldout:
    """Texts that the target writes greedily after prompts, and how much of them a drafter guesses
    under each budget."""

    def __init__(self, student: Student, prompts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Let the target write; `prompts` are token ids by group."""
        self._student = student
        decoder = Decoder.load(student.trained.target)
        self._texts = {
            group: [record(decoder, prompt, _WRITTEN) for prompt in part]
            for group, part in prompts.items()
        }

    def measure(self, folder: Path) -> Measured:
        """Of the drafter in `folder`, by the policy `streaming`."""
        found: Measured = {}
        for budget in BUDGETS:
            drafter = self._student.drafter(folder, budget)
            for group, texts in self._texts.items():
                rounds = [n for text in texts for n in accepted_lengths(drafter, text)]
                found[group, budget] = 1 + mean(rounds)
        return found

    def log(self) -> dict[str, float]:
        """Of the student as it is: means over groups by budget, and over all."""
        with tempfile.TemporaryDirectory() as folder:
            self._student.trained.save(Path(folder))
            found = self.measure(Path(folder))
        by_budget = {
            f"accepted_{budget or 'all'}": mean(v for (_, b), v in found.items() if b == budget)
            for budget in BUDGETS
        }
        return {"heldout": mean(by_budget.values()), **by_budget}
