"""The target drafts for itself, seeing few positions of its own KV.

After Yue et al., "SpecAttn: Co-Designing Sparse Attention with Self-Speculative Decoding"
(policy ``verified``), and Sadhukhan et al., "MagicDec" (``streaming``, ``quest``). The prefix that
the verifier has committed is sparse; tokens after it are dense: their keys and values are
computed here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, cast

import torch

from paceline.decoder import (
    Decoder,
    DecoderConfig,
    PackedWeights,
    load_config,
    packed_path,
    weights_fingerprint,
)
from paceline.drafter.checkpoint import read_fit
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
from paceline.drafter.methods.growth import grow
from paceline.drafter.methods.loading import on_passing_thread
from paceline.drafter.methods.options import parse_options
from paceline.drafter.methods.selfspec_options import SelfSpecOptions
from paceline.drafter.methods.selfspec_sequence import SelfSpecSequence
from paceline.drafter.tree import Tree
from paceline.kernels import TreePlan, TreeSegment

_PATIENCE = 60.0
"""How long the verifier's weights are waited for. Unit: seconds."""


class SelfSpecDrafter(Drafter):
    """The method ``selfspec``. All but :meth:`start` runs on one thread at a time."""

    method: ClassVar[str] = "selfspec"

    def __init__(
        self, decoder: Decoder, options: SelfSpecOptions, fit: Fit, weight_bytes: int
    ) -> None:
        self.decoder = decoder
        self.options = options
        self.fit = fit
        layers = tuple(range(decoder.config.layers))
        self.needs = Needs(layers, options, options.context, options.ratio)
        self.max_nodes = options.drafted
        self.max_depth = options.depth
        self.weight_bytes = weight_bytes

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> SelfSpecDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "selfspec needs the target's folder: selfspec:DIR")
        parsed = parse_options(SelfSpecOptions, options)
        fit = replace(read_fit(folder), target_fingerprint=weights_fingerprint(folder))
        dtype = parsed.dtype if parsed.dtype == "auto" else getattr(torch, parsed.dtype)
        try:
            config = load_config(folder, dtype)
            shared = _shared_weights(fit.target_fingerprint, config, parsed, resources.device)
            load = partial(Decoder.load, shared=shared)
            decoder = on_passing_thread(resources, load, folder, dtype, resources.device)
        except LoadError:
            raise
        except Exception as error:  # damaged files make the libraries raise anything
            raise LoadError("UNSUPPORTED_MODEL", f"cannot load {folder}: {error}") from error
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return cls(decoder, parsed, fit, 0 if shared is not None else weight_bytes)

    def start(self, generation: Generation) -> SelfSpecSequence:
        """See :meth:`Drafter.start`.

        Raises:
            ValueError: The generation comes without the target's KV.
        """
        if generation.kv is None:
            raise ValueError(
                "selfspec reads K and V of all target layers, but the generation has no kv; attach "
                "with read_grant and verifier_address"
            )
        return SelfSpecSequence(self, generation, generation.kv)

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[Tree]:
        own = cast(Sequence[tuple[SelfSpecSequence, Budget]], rounds)
        trees = grow(own, self._grow_level)
        for sequence, _ in own:
            sequence.kv.check()
        return trees

    def _grow_level(self, growing: Sequence[SelfSpecSequence]) -> None:
        """One forward pass over the frontiers of all, and one more level for each."""
        tokens: list[int] = []
        segments: list[TreeSegment] = []
        positions: list[int] = []
        rows: list[int] = []
        counts: list[int] = []
        for index, sequence in enumerate(growing):
            feed = sequence.feed(index)
            tokens += feed.tokens
            segments.append(feed.segment)
            positions += feed.positions
            rows += range(len(tokens) - feed.wanted, len(tokens))
            counts.append(feed.wanted)
        device = self.decoder.device
        plan = TreePlan(  # slots of the sparse cache say nothing about positions
            segments=tuple(segments),
            offsets=tuple(accumulate((segment.length for segment in segments), initial=0)),
            positions=torch.tensor(positions, device=device),
            longest=max(positions),
            device=device,
        )
        logits = self.decoder.forward(
            torch.tensor(tokens, device=device),
            plan,
            growing,
            logit_rows=torch.tensor(rows, device=device),
        ).logits
        for sequence, part in zip(growing, logits.split(counts), strict=True):
            sequence.add_level(part)


def _shared_weights(
    fingerprint: str, config: DecoderConfig, options: SelfSpecOptions, device: str
) -> PackedWeights | None:
    """The verifier's own, if they are wanted and there.

    Raises:
        LoadError: They are wanted and do not come, or could not be used.
    """
    if device != "cpu":
        if options.weights == "shared":
            raise LoadError(
                "INVALID_OPTION",
                f"weights are shared in main memory, and this drafter runs on {device}; say "
                "weights=own",
            )
        return None
    if options.weights == "own":
        return None
    path = packed_path(fingerprint, config.dtype)
    deadline = time.monotonic() + (_PATIENCE if options.weights == "shared" else 0.0)
    while (found := PackedWeights.open(path)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if found is None and options.weights == "shared":
        raise LoadError(
            "WEIGHTS_NOT_SHARED",
            f"no verifier on this machine shares weights of this model as {config.dtype}; start it "
            "with --share-weights, or say weights=own",
        )
    return found
