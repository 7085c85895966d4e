"""The model card of a LongSpec drafter, written from measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.longspec.heldout import MAX_NODES, WIDTHS, Measured
from paceline.train.longspec.preset import LongSpecPreset


def longspec_card(
    config: LongSpecConfig,
    corpus: Corpus,
    preset: LongSpecPreset,
    progress: Progress,
    parameters: int,
    own_texts: int,
    measured: Mapping[str, Measured],
) -> str:
    """The README.md of a drafter's folder; `measured` has the groups of one split of files each."""
    shape = (
        f"- {parameters / 1e6:.1f} M parameters, bf16: one layer of width {config.hidden}, "
        f"{config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim}, "
        f"feed-forward {config.intermediate}, window {config.window}\n"
        f"- reads keys and values of target layer {config.target_layer} (0 is the first of "
        f"{config.target_layers}); embedding and LM head are the target's and not in this folder\n"
    )
    tables = "\n".join(_tables(split, each, preset.levels) for split, each in measured.items())
    return f"""# Paceline demo drafter: LongSpec layer

Guesses what the demo target says next (drafter method `longspec`; LongSpec, section 3). Of no use
with any other model: `config.json` holds the target's fingerprint.

{shape}
## Data

{len(corpus.train[: preset.files])} files of the {corpus.source} and {own_texts:,} texts that the
target wrote after 128 tokens from anywhere in {len(corpus.train)} such files, half of them greedy,
half at temperature 1. The target was trained on few of these files and the drafter on none of the
{len(corpus.heldout)} that are held out from both.

## Training

{progress.step:,} steps, {progress.tokens / 1e6:.1f} M tokens, {progress.elapsed / 60:.0f} minutes.
KL divergence from the target's distribution; {_optimizer(preset)}.
{_noise(preset)}

{_stages(preset)}

## Measured

Accepted length is the mean number of tokens of a round, the verifier's own included; trees of
{preset.levels} levels and widths {WIDTHS} (the last for all deeper levels), at most {MAX_NODES}
nodes. Texts are the target's own, after the beginnings of files. Level columns: share of rounds in
which a node of that level was accepted.

{tables}"""


def _optimizer(preset: LongSpecPreset) -> str:
    rate = f"AdamW {preset.adamw_rate:g}"
    if preset.muon_rate is None:
        return rate
    return f"Muon {preset.muon_rate:g} for matrices, {rate} for norms"


def _noise(preset: LongSpecPreset) -> str:
    lags = preset.trained_lags
    if len(lags) == 1:
        return "Without flash noisy training: lag 1 alone."
    return (
        f"Flash noisy training with lags 1 to {lags[-1]}, {preset.lags} of them in each step, each "
        f"weighing {preset.lag_decay:g} of the one before."
    )


def _stages(preset: LongSpecPreset) -> str:
    rows = [
        f"| {s.name} | {s.share:.0%} | {s.rows} x {s.length} | {s.rate:g} | "
        f"{'anchor-offset' if s.offset and preset.offset else 'plain'} | "
        f"{'own texts' if s.own else 'files and own texts'} |"
        for s in preset.stages
    ]
    head = (
        "| stage | share of the time | tokens a step | rate | positions | text |\n" + "| --- " * 6
    )
    return f"{head}|\n" + "\n".join(rows)


def _tables(split: str, measured: Measured, levels: int) -> str:
    depths = range(1, levels + 1)
    lines = [
        f"| {split}, prompts of (tokens) | temperature | rounds | accepted length | "
        + " | ".join(f"level {depth}" for depth in depths)
        + " |",
        "| --- " * (4 + levels) + "|",
    ]
    lines += [_row(group, heat, found, depths) for (group, heat), found in measured.items()]
    for heat in sorted({heat for _, heat in measured}):
        every = [found for (_, h), part in measured.items() if h == heat for found in part]
        lines.append(_row("all", heat, every, depths))
    return "\n".join(lines) + "\n"


def _row(group: str, heat: float, found: Sequence[int], depths: range) -> str:
    shares = " | ".join(f"{mean(each >= depth for each in found):.2f}" for depth in depths)
    return f"| {group} | {heat:g} | {len(found):,} | **{1 + mean(found):.2f}** | {shares} |"
