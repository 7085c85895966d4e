"""The model card of a drafter trained under KV budgets, written from measured numbers."""

from __future__ import annotations

from paceline.train.budget.heldout import BUDGETS, Measured
from paceline.train.budget.preset import BudgetPreset
from paceline.train.card import STDLIB_HEADER, STDLIB_LICENCE
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus


def budget_card(
    method: str,
    start: str,
    corpus: Corpus,
    preset: BudgetPreset,
    progress: Progress,
    own_texts: int,
    *,
    before: Measured,
    after: Measured,
) -> str:
    """The README.md of its folder; `before` is of the drafter it began as."""
    rate = f"AdamW {preset.adamw_rate:g}"
    if preset.muon_rate is not None:
        rate = f"Muon {preset.muon_rate:g} for matrices, {rate} for the rest"
    recites = method == "lm" and corpus.is_stdlib  # a layer without its target writes nothing
    return f"""{STDLIB_HEADER if recites else ""}# Paceline drafter for changing KV budgets

Drafter method `{method}`, trained from `{start}` on as BudgetDraft says (sections 3.3 and 3.4); it
drafts for the same targets.

## Training

{progress.step:,} steps, {progress.elapsed / 60:.0f} minutes; {rate}. Data:
{len(corpus.train[: preset.files])} files of the {corpus.source}, and {own_texts:,} texts that the
target wrote after 128 tokens from anywhere in such files.{f" {STDLIB_LICENCE}" if recites else ""}

Each step reads a row of {preset.length:,} tokens and lets the drafter continue it from \
{preset.segments} places, {preset.continuation} tokens
each, at their real positions; what stands before is read without gradient. Labels are the target's
greedy choices. {_loss(preset)}

## Measured

Accepted length, bonus included, of greedy texts that the target wrote after the beginnings of
held-out files; positions chosen by `streaming`. Before training and after.

{_table(before, after)}"""


def _loss(preset: BudgetPreset) -> str:
    if not preset.sparse_weight:
        return "Full-cache loss alone: every position before a token is seen."
    total = sum(preset.weights)
    shares = ", ".join(
        f"{budget} ({weight / total:.0%})"
        for budget, weight in zip(preset.budgets, preset.weights, strict=True)
    )
    return (
        f"Loss: full cache, and {preset.sparse_weight:g} times the same under a\nKV budget of "
        f"{shares} tokens, chosen by {' or '.join(f'`{name}`' for name in preset.policies)}."
    )


def _table(before: Measured, after: Measured) -> str:
    groups = sorted({group for group, _ in before}, key=int)
    names = [f"{budget:,}" if budget else "all" for budget in BUDGETS]
    lines = [
        "| prompt | " + " | ".join(f"B = {name}" for name in names) + " |",
        "| --- " * (1 + len(names)) + "|",
    ]
    for group in groups:
        cells = [f"{before[group, budget]:.2f} → {after[group, budget]:.2f}" for budget in BUDGETS]
        lines.append(f"| {int(group):,} tokens | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
