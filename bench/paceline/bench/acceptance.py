"""Accepted lengths by depth and by context length, of every drafter on the same recorded texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.figures import accepted_length
from paceline.bench.texts import Text
from paceline.decoder import Decoder
from paceline.drafter import Drafter, DrafterSpec, Resources
from paceline.drafter.acceptance import accepted_lengths, record
from paceline.drafter.methods import method_class
from paceline.train.evaluate import distinct_ngrams
from paceline.v1 import sampling_pb2

LOOPS_BELOW = 0.6
"""Share of distinct 4-grams under which a text counts as looping, as for the demo prompts."""

TEMPERATURES = (0.0, 1.0)


@dataclass
class Cell:
    """What was measured at one temperature on one set of texts."""

    contexts: list[int] = field(default_factory=list)
    """Prompt length of each text."""
    distinct: list[float] = field(default_factory=list)
    """Share of distinct 4-grams in each text."""
    rounds: dict[str, list[list[int]]] = field(default_factory=dict)
    """By drafter, accepted drafted tokens of each round of each text."""

    def summary(self) -> dict[str, Any]:
        """Figures of all texts, of those of each context length, and of those that do not loop."""
        every = range(len(self.contexts))
        parts = {"all": list(every)}
        for context in sorted(set(self.contexts)):
            parts[str(context)] = [i for i in every if self.contexts[i] == context]
        parts["not looping"] = [i for i in every if self.distinct[i] >= LOOPS_BELOW]
        return {
            "texts": len(self.contexts),
            "looping_texts": sum(share < LOOPS_BELOW for share in self.distinct),
            "median_distinct_4grams": median(self.distinct),
            "drafters": {
                name: {
                    part: accepted_length([texts[i] for i in chosen])
                    for part, chosen in parts.items()
                }
                for name, texts in self.rounds.items()
            },
        }


def load_drafters(specs: Mapping[str, str]) -> dict[str, Drafter]:
    """Drafters in this process; `specs` maps names to METHOD[:DIR][,key=value...].

    Raises LoadError where one cannot be loaded.
    """
    found = {}
    for name, text in specs.items():
        spec = DrafterSpec.parse(text)
        found[name] = method_class(spec.method).load(spec.folder, spec.options, Resources())
    return found


def measure(
    target: Path,
    texts: Sequence[Text],
    specs: Mapping[str, str],
    *,
    dtype: str,
    tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Summaries by set and temperature. `tokens` are written after each prompt."""
    decoder, drafters = Decoder.load(target, dtype), load_drafters(specs)
    layers = {n for drafter in drafters.values() for n in drafter.needs.hidden_state_layers}
    cells: dict[str, dict[str, Cell]] = {}
    for index, text in enumerate(texts):
        progress(f"{text.set} {text.file}, {len(text.tokens)} tokens")
        for temperature in TEMPERATURES:
            cell = cells.setdefault(text.set, {}).setdefault(f"T={temperature:g}", Cell())
            sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=index + 1)
            recording = record(decoder, text.tokens, tokens, sampling, layers)
            cell.contexts.append(len(text.tokens))
            cell.distinct.append(distinct_ngrams(recording.continuation))
            for name, drafter in drafters.items():
                rounds = accepted_lengths(drafter, recording)
                cell.rounds.setdefault(name, []).append(rounds)
    return {
        name: {heat: cell.summary() for heat, cell in part.items()} for name, part in cells.items()
    }
