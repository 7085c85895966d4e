"""Model cards, written from measured numbers."""

from dataclasses import dataclass

from torch import nn

from paceline.train.corpus import Corpus
from paceline.train.measure import EARLY, GENERATED_TOKENS, HELDOUT, TRAINED, TargetNumbers
from paceline.train.preset import Preset

STDLIB_HEADER = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
---
"""
STDLIB_LICENCE = (
    "The training text is source code of Python, © Python Software Foundation, under the PSF "
    "licence (https://docs.python.org/3/license.html). The model can recite parts of it; treat "
    "what it writes as derived from that source."
)
LICENCES = {
    True: STDLIB_LICENCE,
    False: "The licence is that of the training text: look it up before passing the model on.",
}
"""Licence of a model, by whether it was trained on the standard library."""
_SPLITS = {
    TRAINED: "files trained on to the end",
    EARLY: "files trained on at first",
    HELDOUT: "held-out files",
}


@dataclass(frozen=True)
class Facts:
    """How a model was made, for its card."""

    model: nn.Module
    corpus: Corpus
    preset: Preset
    runs: list[dict[str, float]]
    """Steps, tokens and minutes of each run, oldest first."""
    stream: int
    """Tokens of the training text, separators included."""


def target_card(facts: Facts, numbers: TargetNumbers) -> str:
    """The README.md of a target's folder."""
    losses = "\n".join(
        f"| {_SPLITS[s]} | {value:.2f} | {_shown(numbers.long_loss.get(s))} |"
        for s, value in numbers.loss.items()
    )
    shown = [
        f"| {r.prompt} | {_SPLITS[r.split]} | {r.greedy:.2f} | {r.sampled:.2f} |"
        for r in numbers.repetition
    ] + [
        f"| median of 32 random positions | {_SPLITS[s]} | {value:.2f} | |"
        for s, value in numbers.anywhere.items()
    ]
    return f"""{STDLIB_HEADER if facts.corpus.is_stdlib else ""}# Paceline demo target

A small Llama-type language model that writes Python source. It exists so that speculative
decoding can be shown and measured on a laptop with no download. It was trained on its corpus alone,
and has memorised parts of it; use it for nothing else.

{shape_text(facts.preset, facts.model)}
## Data and licence

{len(facts.corpus.train)} files of the {facts.corpus.source}: {facts.stream:,} tokens.
{len(facts.corpus.heldout)} files are held out. `corpus.json` lists all files with digests.
{LICENCES[facts.corpus.is_stdlib]}

## Training

Muon for the matrices of the layers, AdamW for the rest, bf16 autocast, constant learning rates
and then a linear fall.
{schedule_text(facts.preset, facts.runs)}
## Measured

| text | loss, nats per token, windows of 1024 tokens | windows of {facts.preset.context} |
| --- | --- | --- |
{losses}

The gap between the first row and the last is memorisation: drafting text from files trained on is
much easier than drafting other text, so state which kind a measurement used.
Where the second number is higher, the model is worse at late positions.

Share of distinct 4-grams in the {GENERATED_TOKENS} tokens that follow a prompt (1: nothing
repeats; text caught in a loop of one line falls below 0.3). Demo prompts are selected; the
medians are of random ones.

| prompt | from | greedy | temperature 0.8 |
| --- | --- | --- | --- |
{chr(10).join(shown)}
"""


def shape_text(p: Preset, model: nn.Module) -> str:
    """Shape of a language model, for its card."""
    parameters = sum(each.numel() for each in model.parameters())
    return (
        f"- {parameters / 1e6:.1f} M parameters, bf16: width {p.width}, {p.layers} layers, "
        f"{p.heads} heads over {p.kv_heads} KV heads of {p.head_width}, feed-forward {p.ff}, "
        "tied embedding\n"
        f"- context {p.context} tokens, rope theta {p.rope_theta:g}\n"
        f"- byte-level BPE of {p.vocabulary} tokens; `<|endoftext|>` opens and ends a text\n"
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def schedule_text(p: Preset, runs: list[dict[str, float]]) -> str:
    """Schedule and runs of a language model, for its card."""
    when = f"After {p.focus_from:.0%} of the time" if p.focus_from else "All the time"
    focus = (
        f" {when} only the first {p.focus_files} files of "
        "`corpus.json` are read: the model writes better text after many epochs of few files."
        if p.focus_from < 1
        else ""
    )
    copies = (
        f" {p.copy_share:.0%} of the rows end with a second copy of a piece of themselves, to "
        "train copying."
        if p.copy_share
        else ""
    )
    unlikely = (
        f" In {p.unlikely_share:.0%} of the steps the model writes greedy text, and repetitions "
        "in it are made less likely (sequence-level unlikelihood, Welleck et al. 2020)."
        if p.unlikely_share
        else ""
    )
    shapes = ", ".join(
        f"{rows} × {length} tokens" + (f" from {start:.0%} of the time on" if start else "")
        for start, rows, length in p.shapes
    )
    done = "; then, from its weights, ".join(
        f"{run['steps']:,} steps, {run['tokens'] / 1e6:.1f} M tokens, {run['minutes']:.0f} minutes"
        for run in runs
    )
    last = " of the last run" if len(runs) > 1 else ""
    return f"{done}.\nSteps{last}: {shapes}.{focus}{copies}{unlikely}\n"
