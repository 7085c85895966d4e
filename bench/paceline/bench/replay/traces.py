"""Recorded rounds of texts, and the load that they make in a simulation."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.replay.simulation import Generation
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.report import LOCAL
from paceline.verifier.scheduler.costs import Costs, CostTable

_BATCHED = 0.1  # what one more text adds to a draft, as a part of the draft of one
_RIGHT, _WRONG = 1, 0  # tokens of nodes in a replay


@dataclass(frozen=True)
class Round:
    """One step of a text."""

    emitted: int  # its tokens
    before: float  # time from the end of the step before to its beginning. Unit: seconds.
    step: float  # its time. Unit: seconds.
    parents: Sequence[int] = ()  # of the nodes of its tree, of which all were checked
    confidences: Sequence[float] = ()  # of its nodes
    accepted: Sequence[int] = ()  # its accepted nodes, from the root down


@dataclass
class Text:
    """The rounds of one text in one mode."""

    category: str  # of its prompt
    prompt: int  # tokens of its prompt
    rounds: list[Round] = field(default_factory=list)  # from the first step behind the prompt on

    @property
    def tokens(self) -> int:
        return sum(entry.emitted for entry in self.rounds)


@dataclass
class Traces:
    """All texts of one drafter, with and without drafts, on one machine."""

    drafter: str  # its name; `local`: the verifier's own sources
    table: dict[str, Any]  # the cost table of the verifier, as JSON
    plain: list[Text]  # the texts in plain decoding
    drafted: list[Text]  # the same texts with a tree in every round

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_short(asdict(self)), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(text, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Traces:
        fields = json.loads(gzip.decompress(path.read_bytes()))
        for mode in ("plain", "drafted"):
            fields[mode] = [
                Text(text["category"], text["prompt"], [Round(**one) for one in text["rounds"]])
                for text in fields[mode]
            ]
        return cls(**fields)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class Replay:
    """A load of recorded texts, one after the other, each once.

    A plain step takes its recorded time, with the time before it. A step with a tree takes the
    recorded time of its round, scaled by the cost table to the admitted nodes. A tree is known
    where a recorded round began; inside a round's accepted tokens it is what was drafted below
    them, so that a rule that begins to draft there is judged rather too low. Steps of several users
    cost what the table says, corrected by the recorded steps of their texts.
    """

    def __init__(self, traces: Traces, texts: Sequence[int]) -> None:
        """Make the load of some texts, by their indices, in this order."""
        self.table = CostTable.from_json(traces.table)
        self.asked = traces.drafter != LOCAL.name
        self._costs = Costs(self.table)
        self._plain = [traces.plain[index] for index in texts]
        self._drafted = [traces.drafted[index] for index in texts]
        self._places = [list(_places(text)) for text in self._drafted]

    def length(self, number: int) -> int | None:
        return self._drafted[number - 1].tokens if number <= len(self._drafted) else None

    def context(self, generation: Generation) -> int:
        return self._plain[generation.number - 1].prompt + generation.got + 1

    def tree(self, generation: Generation) -> TokenTree:
        recorded, below = self._at(generation)
        count, accepted = len(recorded.parents), recorded.accepted
        right = set(accepted)
        tokens = tuple(_RIGHT if node in right else _WRONG for node in range(count))
        tree = TokenTree(tokens, tuple(recorded.parents), tuple(recorded.confidences))
        if below > len(accepted):
            return EMPTY
        order = sorted(range(count), key=lambda node: (-tree.survivals[node], node))
        if not below:
            return tree.subtree(order)
        root = accepted[below - 1]
        inside = {root}
        for node, parent in enumerate(recorded.parents):
            if parent in inside:
                inside.add(node)
        kept = [node for node in order if node in inside and node != root]
        new = {root: -1, **{node: place for place, node in enumerate(kept)}}
        return TokenTree(
            tuple(tokens[node] for node in kept),
            tuple(new[recorded.parents[node]] for node in kept),
            tuple(recorded.confidences[node] for node in kept) if recorded.confidences else (),
        )

    def accepted(self, generation: Generation, tree: TokenTree) -> int:
        return sum(token == _RIGHT for token in tree.tokens)

    def draft_seconds(self, drafted: Sequence[Generation]) -> float:
        slowest = max(self._at(generation)[0].before for generation in drafted)
        return slowest * (1 + _BATCHED * (len(drafted) - 1))

    def beside_seconds(self, generation: Generation) -> float:
        return 0.0  # it is a part of the recorded time before the step

    def step_seconds(
        self, here: Sequence[Generation], trees: Sequence[TokenTree], drafting: float
    ) -> float:
        ratios = []
        for generation, tree in zip(here, trees, strict=True):
            context, (recorded, _) = self.context(generation), self._at(generation)
            if len(tree):
                took = recorded.step + (0.0 if self.asked else recorded.before)
                known = self._costs.plain_seconds(1, 1 + len(recorded.parents), context)
            else:
                rounds = self._plain[generation.number - 1].rounds
                plain = rounds[min(generation.got, len(rounds) - 1)]
                took = plain.before + plain.step
                known = self._costs.plain_seconds(1, 1, context)
            ratios.append(took / known)
        rows = len(here) + sum(map(len, trees))
        mean = sum(map(self.context, here)) / len(here)
        return self._costs.plain_seconds(len(here), rows, mean) * sum(ratios) / len(ratios)

    def _at(self, generation: Generation) -> tuple[Round, int]:
        places = self._places[generation.number - 1]
        return places[min(generation.got, len(places) - 1)]


def _places(text: Text) -> Iterator[tuple[Round, int]]:
    """Yield for each token the round that emitted it, and the number of its tokens before."""
    for entry in text.rounds:
        yield from ((entry, below) for below in range(entry.emitted))
