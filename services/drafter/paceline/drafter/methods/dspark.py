"""The DSpark drafter: a block in one pass, a tree from the block by a small sequential head.

After Cheng et al., "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation", section 3. A folder without heads is DFlash. The backbone sees the target's hidden
states at all committed positions before the anchor, or at the last ``window``. Scores carry the
verifier's noise, and trees grow as in :mod:`paceline.drafter.methods.beam`; a level costs the
sequential head alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch

from paceline.decoder import load_config
from paceline.drafter.checkpoint import check_target, read_fit
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    Generation,
    LoadError,
    Needs,
    Resources,
)
from paceline.drafter.methods.dspark_backbone import DSparkBackbone
from paceline.drafter.methods.dspark_heads import DSparkHeads, Places, Verdict
from paceline.drafter.methods.dspark_options import DSparkOptions
from paceline.drafter.methods.dspark_sequence import DSparkSequence
from paceline.drafter.methods.growth import grow
from paceline.drafter.methods.loading import on_passing_thread
from paceline.drafter.methods.longspec_frozen import Frozen
from paceline.drafter.methods.options import parse_options
from paceline.drafter.tree import Tree
from paceline.dspark import read_dspark
from paceline.dspark.folder import load_weights


class DSparkDrafter(Drafter):
    """The method ``dspark``. All but :meth:`start` runs on one thread at a time."""

    method: ClassVar[str] = "dspark"

    def __init__(
        self,
        backbone: DSparkBackbone,
        heads: DSparkHeads,
        options: DSparkOptions,
        fit: Fit,
        weight_bytes: int,
    ) -> None:
        config = backbone.config
        self.backbone, self.heads, self.options = backbone, heads, options
        self.fit = fit
        self.needs = Needs(
            hidden_state_layers=config.taps,
            hidden_state_window=config.window,
            hidden_state_transport=options.states,
        )
        self.max_nodes = options.max_nodes
        self.max_depth = min(options.depth or config.levels, config.levels)
        self.weight_bytes = weight_bytes

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> DSparkDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "dspark needs its folder: dspark:DIR,target=DIR")
        parsed = parse_options(DSparkOptions, options)
        fit = read_fit(folder)
        try:
            return on_passing_thread(resources, _read, folder, fit, parsed, resources)
        except LoadError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise LoadError("UNREADABLE_MODEL", f"cannot load {folder}: {error}") from error

    def start(self, generation: Generation) -> DSparkSequence:
        """See :meth:`Drafter.start`.

        Raises:
            ValueError: The generation comes without the target's hidden states.
        """
        if generation.states is None:
            raise ValueError(
                f"dspark reads the outputs of target layers {list(self.needs.hidden_state_layers)},"
                " but the generation has none; attach with read_grant and verifier_address"
            )
        return DSparkSequence(self, generation, generation.states)

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[Tree]:
        own = cast(Sequence[tuple[DSparkSequence, Budget]], rounds)
        trees = grow(own, self._grow_level)
        for sequence, _ in own:
            sequence.end()
        return trees

    def _grow_level(self, growing: Sequence[DSparkSequence]) -> None:
        if all(sequence.at_root for sequence in growing):
            self._draft_blocks(growing)
        places = [sequence.places() for sequence in growing]
        verdict = self.heads.judge(_joined(places))
        done = 0
        for sequence, own in zip(growing, places, strict=True):
            rows = slice(done, done + len(own.before))
            sequence.add_level(own, _part(verdict, rows))
            done = rows.stop

    def _draft_blocks(self, growing: Sequence[DSparkSequence]) -> None:
        """The backbone's pass, after what is new of the contexts."""
        found = [(sequence.context, sequence.news()) for sequence in growing]
        if feeds := [(context, *news) for context, news in found if news is not None]:
            self.backbone.remember(feeds)
        blocks = [(sequence.context, sequence.anchor) for sequence in growing]
        for sequence, hidden, logits in zip(growing, *self.backbone.forward(blocks), strict=True):
            sequence.take_block(hidden, logits)


def _joined(places: Sequence[Places]) -> Places:
    states = [each.state for each in places if each.state is not None]
    return Places(
        torch.cat([each.hidden for each in places]),
        torch.cat([each.before for each in places]),
        torch.cat(states) if states else None,
    )


def _part(verdict: Verdict, rows: slice) -> Verdict:
    every = (verdict.bias, verdict.state, verdict.log_confidence)
    return Verdict(*(None if each is None else each[rows] for each in every))


def _read(folder: Path, fit: Fit, options: DSparkOptions, resources: Resources) -> DSparkDrafter:
    target = Path(options.target) if options.target else None
    config, dtype = read_dspark(folder, load_config(target).layers if target else 0)
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    if target is not None:
        check_target(folder, target, fit)
    device = resources.device
    pack_bytes = int(options.pack_head_mib * (1 << 20))
    frozen = Frozen.read(folder, target, config, dtype, device, pack_bytes)
    weights = load_weights(folder, config, dtype, device)
    with torch.inference_mode():
        backbone = DSparkBackbone(config, weights, frozen, dtype, device)
        heads = DSparkHeads(config, weights, dtype, device)
    own = sum(tensor.nbytes for tensor in weights.values())
    return DSparkDrafter(backbone, heads, options, fit, own + frozen.private_bytes)
