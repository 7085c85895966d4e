"""From runs to the rows of a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.baseline import MODES
from paceline.bench.served import Sample

PLAIN = "paceline none"


def decode_rate(sample: Sample) -> float:
    """Tokens per second after the first token and after the first drafted round, if that is first.

    In it a drafter reads the prompt, as in the first step of an assistant of transformers, which is
    left out as well.
    """
    stats = sample.stats
    tokens, milliseconds = len(sample.tokens) - 1, stats.total_ms - stats.first_token_ms
    if stats.rounds[0].drafted and len(stats.rounds) > 1:
        tokens -= stats.rounds[0].emitted
        milliseconds -= stats.rounds[0].round_ms
    return tokens / milliseconds * 1e3


@dataclass
class Turn:
    """One prompt, once through everybody: rates in tokens per second, by row."""

    rates: dict[str, float] = field(default_factory=dict)
    paced: dict[str, Sample] = field(default_factory=dict)
    """Paceline's rows, a client deciding where to draft."""
    always: dict[str, Sample] = field(default_factory=dict)
    """Those with a drafter, every round drafted."""

    @property
    def identical(self) -> bool:
        """Whether all of Paceline's rows wrote the same."""
        texts = [sample.tokens for sample in (*self.paced.values(), *self.always.values())]
        return all(text == texts[0] for text in texts)


def rows(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Medians over prompts and passes, ratios taken within each; accepted length over all rounds.

    `always` is the rate of the runs in which every round drafts, against plain decoding.
    """
    found = {}
    for name in turns[0].rates:
        figures = {
            "tokens_per_second": _median([turn.rates[name] for turn in turns]),
            "against_none": _median([turn.rates[name] / turn.rates[PLAIN] for turn in turns]),
            "against_transformers": _median(
                [turn.rates[name] / turn.rates[MODES[0]] for turn in turns]
            ),
            "against_transformers_best": _median(
                [
                    turn.rates[name] / max(turn.rates[mode] for mode in MODES if mode in turn.rates)
                    for turn in turns
                ]
            ),
        }
        if name in turns[0].always:
            drafted = [turn.always[name] for turn in turns]
            rounds = [entry for sample in drafted for entry in sample.stats.rounds if entry.drafted]
            figures["always"] = _median(
                [decode_rate(turn.always[name]) / turn.rates[PLAIN] for turn in turns]
            )
            figures["drafted_rounds"] = len(rounds)
            if rounds:
                length = sum(entry.emitted for entry in rounds) / len(rounds)
                figures["accepted_length"] = length
                figures["accepted_length_without_bonus"] = length - 1
                figures["draft_ms"] = _median([entry.draft_ms for entry in rounds])
                figures["verify_ms"] = _median([entry.verify_ms for entry in rounds])
                first = [sample.stats.rounds[0].round_ms for sample in drafted]
                figures["first_round_ms"] = _median(first)
        found[name] = figures
    return found


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def identical(turns: Sequence[Turn]) -> bool:
    """Whether no row of any turn wrote another text."""
    return all(turn.identical for turn in turns)


def described(turns: Sequence[Turn]) -> dict[str, Any]:
    """A cell's figures, as JSON."""
    return {"runs": len(turns), "identical": identical(turns), "rows": rows(turns)}
