"""The model card of a drafter trained further on recorded texts, written from measured numbers."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.online.heldout import OLD, RECORDED, Measured
from paceline.train.online.preset import OnlinePreset


def online_card(
    method: str,
    facts: Mapping[str, str | int],
    corpus: Corpus,
    preset: OnlinePreset,
    progress: Progress,
    before: Measured,
    after: Measured,
) -> str:
    """The README.md of its folder; `facts` say from which drafter and how much text."""
    source = corpus.source
    names = {RECORDED: "recorded", OLD: f"by the target, after files of the {source}"}
    rows = "\n".join(
        f"| {names[kind]} | {value:.2f} | {after[kind]:.2f} |" for kind, value in before.items()
    )
    return f"""# Paceline drafter, trained further on recorded texts

Drafter method `{method}`, trained from `{facts["from"]}` on; it drafts for the same targets. It has
read what was recorded where it drafted: pass it on only to who may know those texts.

## Training

{progress.step:,} steps, {progress.elapsed / 60:.1f} minutes; Muon {preset.muon_rate[method]:g} for
matrices, AdamW {preset.adamw_rate[method]:g} for the rest. Data: {facts["recorded_texts"]:,}
recorded texts, {facts["recorded_tokens"]:,} tokens with their prompts, and
{facts["old_tokens"]:,} tokens of others, by the target itself and from files of the {source}.

## Measured

Accepted length, bonus included, before training and after.

| held-out texts | before | after |
| --- | --- | --- |
{rows}
"""
