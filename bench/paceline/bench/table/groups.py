"""What is measured together: one target, one set of prompts, and the drafters fitted to both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench import longer, texts
from paceline.bench.stretch import fit_drafter, stretch
from paceline.harness import read_prompts

LONGEST = 4096  # that the demo's models were trained for
FILES = "held-out files"
DEMO, STRETCHED = "demo", "stretched"

_SELFSPEC = "kv_policy=verified,ratio=0.07,context=64,weights=shared"


@dataclass(frozen=True)
class Group:
    """Prompts for one target.

    Attributes:
        target: `DEMO`, or `STRETCHED`: the same function at the cost of 0.4 billion parameters.
        set: Where prompts come from.
        context: Length of prompt and text; 0: as the prompts are. Unit: tokens.
        prompts: How many.
        repeats: Passes over them.
    """

    target: str
    set: str
    context: int
    prompts: int
    repeats: int

    @property
    def factor(self) -> int:
        """By how much the context is longer than the models were trained for."""
        return max(1, self.context // LONGEST)

    @property
    def name(self) -> str:
        """For people, and for the result file."""
        return f"{self.target}, {self.set}" + (f", {self.context:,}" if self.context else "")


def groups(source: str, files: Sequence[Path]) -> list[Group]:
    """What a whole run measures: the quickest first, sets of the user's own among them.

    Without those 18 minutes on two cores, and a minute more for each of them.

    Args:
        source: Name of the long prompts' source.
        files: Of prompts, see :func:`paceline.harness.read_prompts`.
    """
    return [
        *(Group(DEMO, file.stem, 0, 3, 1) for file in files),
        Group(DEMO, source, 1024, 4, 1),
        Group(DEMO, source, 4096, 3, 1),
        Group(STRETCHED, source, 1024, 2, 1),
        Group(STRETCHED, source, 4096, 1, 1),
        Group(DEMO, source, 16_384, 2, 2),
    ]


def prompts(
    group: Group, models: Path, package: str | None, files: Sequence[Path], tokens: int
) -> list[list[int]]:
    """Token ids of a group's prompts, cut to leave room for so many new tokens."""
    if group.context:
        length = group.context - tokens
        if package:
            return texts.packaged(models, package, length, group.prompts)
        return texts.joined(models, length, group.prompts)
    [file] = [file for file in files if file.stem == group.set]
    encode = texts.encoder(models)
    found = [entry if isinstance(entry, list) else encode(entry) for entry in read_prompts(file)]
    fitting = [ids for ids in found if 1 < len(ids) <= LONGEST - tokens]
    if not fitting:
        raise ValueError(f"{file}: expected prompts of 2 to {LONGEST - tokens} tokens")
    step = max(1, len(fitting) // group.prompts)
    return fitting[::step][: group.prompts]


@dataclass(frozen=True)
class Models:
    """A target, a small model for transformers' assisted generation, and drafters by name."""

    target: Path
    assistant: Path
    drafters: dict[str, str]


def fitted(group: Group, models: Path, work: Path) -> Models:
    """The demo's models made fit for a group; copies go to `work`."""
    lm, longspec, dspark = (models / name for name in ("lm", "longspec", "dspark"))
    target = models / "target"
    if group.target == STRETCHED:
        target = work / "stretched"
        if not (target / "tokenizer.json").exists():
            stretch(models / "target", target)
        for folder in (longspec, dspark):
            fit_drafter(folder, target, work / f"stretched-{folder.name}")
        longspec, dspark = (work / f"stretched-{name}" for name in ("longspec", "dspark"))
    elif group.factor > 1:
        copies = work / f"longer-{group.factor}"
        target = longer.lengthen(target, copies / "target", group.factor)
        lm = longer.lengthen(lm, copies / "lm", group.factor)
        longspec, dspark = (
            longer.lengthen(folder, copies / folder.name, group.factor, target)
            for folder in (longspec, dspark)
        )
    drafters = {
        "ngram": "ngram",
        "lm": f"lm:{lm}",
        "longspec": f"longspec:{longspec},target={target}",
        "dspark": f"dspark:{dspark},target={target}",
        "selfspec": f"selfspec:{target},{_SELFSPEC}",
    }
    return Models(target, lm, drafters)
