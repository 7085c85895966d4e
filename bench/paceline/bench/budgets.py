"""Accepted length by KV budget, context, selection policy, and how the drafter was trained."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench import longer, selected, texts
from paceline.bench.figures import accepted_length
from paceline.decoder import Decoder
from paceline.drafter import Drafter, Resources
from paceline.drafter.acceptance import Recording, accepted_lengths, record
from paceline.drafter.methods import method_class

CONTEXTS = (1024, 4096, 8192, 16_384)
"""Prompt and text. Unit: tokens."""

BUDGETS = (64, 256, 1024, 0)
"""Target positions, or an `lm`'s own, that a round may see; 0: all."""

WRITTEN = 96
"""Tokens that the target writes greedily after each prompt."""

TREE = {"widths": "4,8,8,8", "max_nodes": "16"}
"""Of a LongSpec drafter; an `lm` has its default."""

_CONFIG = "config.json"
_LENGTH = 4096  # that the demo models were trained for


@dataclass(frozen=True)
class Subject:
    """A drafter to be measured.

    Attributes:
        name: What it is called.
        method: `longspec` or `lm`.
        folder: Where it is.
        policies: By which it is given positions.
    """

    name: str
    method: str
    folder: Path
    policies: tuple[str, ...]

    def at(self, target: Path, work: Path, factor: int) -> Path:
        """Its folder for a target whose context is so much longer."""
        drafted_for = target if self.method == "longspec" else None
        copy = work / f"{self.name.replace(', ', '-')}-{factor}"
        return longer.lengthen(self.folder, copy, factor, drafted_for)

    def drafter(self, folder: Path, target: Path, policy: str, budget: int) -> Drafter:
        """Loaded; what a LongSpec layer gets is chosen outside of it."""
        options = {"context": str(budget)}
        if self.method == "longspec":
            options |= {"target": str(target), **TREE}
        else:
            options["kv_policy"] = policy
        return method_class(self.method).load(folder, options, Resources())


def subjects(models: Path, extra: Mapping[str, Path]) -> list[Subject]:
    """The demo drafters that are there, as trained first and under budgets, and others by name."""
    folders = {
        "plain": models / "longspec",
        "multi-budget": models / "longspec-budget",
        "lm, plain": models / "lm",
        "lm, multi-budget": models / "lm-budget",
        **extra,
    }
    return [
        _subject(name, folder, whole=name not in extra)
        for name, folder in folders.items()
        if (folder / _CONFIG).is_file()
    ]


def _subject(name: str, folder: Path, *, whole: bool) -> Subject:
    """With every policy if `whole`, else with those of an `lm` or, for a layer, `streaming`."""
    section = json.loads((folder / _CONFIG).read_text()).get("paceline", {})
    if section.get("method") != "longspec":
        return Subject(name, "lm", folder, ("streaming", "chunk_topk"))
    return Subject(name, "longspec", folder, ("streaming", *(selected.POLICIES if whole else ())))


def measure(
    models: Path,
    measured: Sequence[Subject],
    work: Path,
    *,
    dtype: str,
    count: int,
    progress: Callable[[str], None],
    contexts: Sequence[int] = CONTEXTS,
    budgets: Sequence[int] = BUDGETS,
) -> list[dict[str, Any]]:
    """A row for each context, drafter, policy and budget, on `count` texts of each context.

    Texts follow held-out files put one after the other. Beyond the demo target's 4,096 tokens its
    config, and those of its drafters, say that RoPE is scaled (`yarn`). A budget that covers the
    context is left out: it is what 0 measures.
    """
    rows: list[dict[str, Any]] = []
    for context in contexts:
        factor = max(1, context // _LENGTH)
        target = longer.lengthen(models / "target", work / f"target-{factor}", factor)
        decoder = Decoder.load(target, dtype)
        folders = {each.name: each.at(target, work, factor) for each in measured}
        prompts = texts.joined(models, context - WRITTEN, count)
        recordings = [record(decoder, prompt, WRITTEN) for prompt in prompts]
        progress(f"{context} tokens: {count} texts written")
        smaller = [budget for budget in budgets if budget < context]
        for subject, policy, budget in _cells(measured, smaller):
            drafter = subject.drafter(folders[subject.name], target, policy, budget)
            rounds = [
                _accepted(decoder, drafter, recording, policy, budget) for recording in recordings
            ]
            figures = accepted_length(rounds)
            progress(
                f"{context} tokens: {subject.name}, {policy}, {budget or 'all'}: "
                f"{figures['accepted_length']:.2f}"
            )
            rows.append(
                {
                    "context": context,
                    "rope": f"yarn x{factor}" if factor > 1 else "as trained",
                    "drafter": subject.name,
                    "policy": policy if budget else "all",
                    "budget": budget,
                    **figures,
                }
            )
    return rows


def _cells(
    measured: Sequence[Subject], budgets: Sequence[int]
) -> Iterator[tuple[Subject, str, int]]:
    for subject in measured:
        for policy in subject.policies:
            for budget in budgets:
                if budget or policy == subject.policies[0]:  # who sees all needs no policy
                    yield subject, policy, budget


def _accepted(
    target: Decoder, drafter: Drafter, recording: Recording, policy: str, budget: int
) -> list[int]:
    if policy not in selected.POLICIES or not budget or drafter.method != "longspec":
        return accepted_lengths(drafter, recording)
    [layer] = drafter.needs.kv_layers
    with selected.selected(target, recording) as segment:
        kv = selected.SelectedKv(target, recording, segment, layer, policy)
        return kv.accepted_lengths(drafter)


def spreads(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How flat a drafter is: by context and policy, the least and the most over budgets."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["budget"]:
            key = (row["context"], row["drafter"], row["policy"])
            groups.setdefault(key, []).append(row["accepted_length"])
    for row in rows:
        for (context, drafter, _), lengths in groups.items():
            if not row["budget"] and (context, drafter) == (row["context"], row["drafter"]):
                lengths.append(row["accepted_length"])
    return [
        {
            "context": context,
            "drafter": drafter,
            "policy": policy,
            "least": min(lengths),
            "most": max(lengths),
            "spread": 1 - min(lengths) / max(lengths),
        }
        for (context, drafter, policy), lengths in groups.items()
    ]
