"""Presets of `paceline train target` and `paceline train lm`: model shapes and schedules."""

from dataclasses import dataclass


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
    # Schedule. From `focus_from` on (share of the run), only the first `focus_files` are read: a
    # small model writes better text after many epochs of few files than after one of many.
    minutes: float
    steps: int
    shapes: tuple[tuple[float, int, int], ...]
    """(share of the run it starts at, rows, length in tokens) of a step's batch, in order."""
    copy_share: float = 0.0
    """Share of rows that end with a second copy of a piece of themselves: trains copying."""
    focus_files: int | None = None
    focus_from: float = 1.0
    own_texts: int = 0  # texts that the target writes, as training text for a drafter
    unlikely_share: float = 0.0
    """Share of steps with the unlikelihood loss on repetitions in the model's own greedy text."""
    decay_from: float = 0.5  # share of the run after which the learning rates fall linearly
    final_rate: float = 0.03  # share of the learning rates at the end
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    wide: bool = False  # train on tests and long files too
    vocabulary: int = 4096
    rope_theta: float = 100_000.0
    head_width: int = 64

    def __post_init__(self) -> None:
        longest = max(length for _, _, length in self.shapes)
        if longest > self.context:
            raise ValueError(
                f"rows of {longest} tokens do not fit a context of {self.context}: "
                "lower the lengths in `shapes` or raise `context`"
            )
        if self.shapes[0][0] != 0:
            raise ValueError(f"the first shape must start at 0, not at {self.shapes[0][0]}")


PRESETS: dict[str, Preset] = {
    # 14.2 M parameters: writes fluent Python after 80 minutes on two CPU cores.
    "cpu": Preset(
        width=384, layers=8, heads=6, kv_heads=2, ff=1024, context=4096,
        files=120, heldout_files=12, focus_files=48, focus_from=0.4,
        minutes=80, steps=5000, copy_share=0.5,
        shapes=((0, 4, 512), (0.35, 1, 2048), (0.85, 1, 4096)),
    ),
    # A last run over the weights of "cpu": few steps at low rates, less looping.
    "cpu-polish": Preset(
        width=384, layers=8, heads=6, kv_heads=2, ff=1024, context=4096,
        files=120, heldout_files=12, focus_files=48, focus_from=0.0, unlikely_share=0.25,
        minutes=15, steps=5000, shapes=((0, 4, 512), (0.6, 1, 4096)),
        muon_rate=0.006, adamw_rate=1e-3, decay_from=0.2,
    ),
    # 1.1 M parameters: the drafter, distilled from the target above on the files of its last
    # stage and on texts that it wrote.
    "lm": Preset(
        width=128, layers=3, heads=2, kv_heads=1, ff=384, context=4096,
        files=120, heldout_files=12, focus_files=48, own_texts=256,
        minutes=9, steps=3000, shapes=((0, 4, 512), (0.9, 1, 4096)),
    ),
    # 25.7 M parameters on one H200 in under ten minutes, on the whole standard library.
    "gpu": Preset(
        width=512, layers=9, heads=8, kv_heads=2, ff=1280, context=8192,
        files=4000, heldout_files=12, wide=True,
        minutes=8, steps=6000, copy_share=0.15, shapes=((0, 16, 2048), (0.86, 4, 8192)),
    ),
}  # fmt: skip
