"""Presets of `paceline train target` and `paceline train lm`: model shapes and schedules."""

from dataclasses import dataclass

from paceline.train.schedule import Plan, Stage


@dataclass(frozen=True)
class Preset:
    """One model shape with the schedule that trains it.

    Lengths are in tokens, `minutes` in minutes of stepping (pauses do not count), learning rates
    are per step. Training ends when either `minutes` or `steps` is used up, whichever is first.
    """

    # Shape of the Llama-type model; heads are 64 wide.
    width: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    context: int
    # Corpus: how many training files at most, and how many held out.
    files: int
    heldout_files: int
    # Schedule. Stages with `focus` read the first `focus_files` only: a small model writes better
    # text after many epochs of few files than after one of many.
    minutes: float
    steps: int
    stages: tuple[Stage, ...]
    copy_share: float = 0.0
    """Share of rows that end with a second copy of a piece of themselves: trains copying."""
    focus_files: int | None = None
    own_texts: int = 0  # texts that the target writes, as training text for a drafter
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    wide: bool = False  # train on tests and long files too
    vocabulary: int = 4096
    rope_theta: float = 100_000.0
    head_width: int = 64

    def __post_init__(self) -> None:
        longest = max(stage.length for stage in self.stages)
        if longest > self.context:
            raise ValueError(
                f"rows of {longest} tokens do not fit a context of {self.context}: "
                "lower the lengths in `stages` or raise `context`"
            )

    def plan(self, minutes: float, steps: int) -> Plan:
        """The plan of a run with these budgets."""
        return LmPlan(self.stages, minutes, steps, self.focus_files or 0, final_rate=0.03)


class LmPlan(Plan):
    """A plan whose learning rates are constant for half of the run and then fall linearly."""

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, constant, then a linear fall."""
        fall = max(0.0, 2 * progress - 1)
        return min(1.0, (step + 1) / self.warm_up) * (1 - (1 - self.final_rate) * fall)


PRESETS: dict[str, Preset] = {
    # 14.2 M parameters: writes fluent Python after 80 minutes on two CPU cores.
    "cpu": Preset(
        width=384, layers=8, heads=6, kv_heads=2, ff=1024, context=4096,
        files=120, heldout_files=12, focus_files=48, minutes=80, steps=5000, copy_share=0.5,
        stages=(
            Stage("short", 0.35, rows=4, length=512),
            Stage("middle", 0.05, rows=1, length=2048),
            Stage("middle", 0.45, rows=1, length=2048, focus=True),
            Stage("long", 0.15, rows=1, length=4096, focus=True),
        ),
    ),
    # 1.1 M parameters: the drafter, distilled from the target above on the files of its last
    # stage and on texts that it wrote.
    "lm": Preset(
        width=128, layers=3, heads=2, kv_heads=1, ff=384, context=4096,
        files=120, heldout_files=12, focus_files=48, own_texts=256,
        minutes=9, steps=3000,
        stages=(Stage("short", 0.9, rows=4, length=512), Stage("long", 0.1, rows=1, length=4096)),
    ),
    # 25.7 M parameters on one H200 in under ten minutes, on the whole standard library.
    "gpu": Preset(
        width=512, layers=9, heads=8, kv_heads=2, ff=1280, context=8192,
        files=4000, heldout_files=12, wide=True,
        minutes=8, steps=6000, copy_share=0.15,
        stages=(
            Stage("short", 0.86, rows=16, length=2048), Stage("long", 0.14, rows=4, length=8192),
        ),
    ),
}  # fmt: skip
