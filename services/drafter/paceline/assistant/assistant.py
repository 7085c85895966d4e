"""The decoding loop that transformers calls instead of its own (``custom_generate``).

The sampling contract holds here too: the token at position t is the argmax of transformers'
processed scores, plus noise keyed by seed and t where it samples. A drafted chain is checked in one
forward pass and stands as far as it holds these tokens, so no drafter can change them. The logits
are those of the model at hand: where its bits depend on how many tokens a pass has, ties within
rounding may fall otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import find_device
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Generation,
    Resources,
    Update,
)
from paceline.kernels import gumbel_noise
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2


@dataclass
class AssistantStats:
    """What the last ``generate`` did."""

    rounds: int = 0
    """Forward passes."""
    drafted: int = 0
    """Drafted tokens that were checked."""
    accepted: int = 0
    """Those that stood."""
    emitted: int = 0
    """All tokens that came out."""


class PacelineAssistant:
    """Speculative decoding for transformers; give it as ``custom_generate``.

    Works for one sequence at a time with models whose cache can be cropped. Methods that read
    tokens only (``ngram``, ``lm``) can be used; for the others run the services.

    Args:
        method: Drafting method.
        folder: Folder of its weights; None for methods without.
        options: Its options, as text.
        nodes: Most tokens drafted a round.
        device: Where a method with weights computes: auto, cpu, cuda or cuda:N.

    Attributes:
        stats: Of the last call.

    Raises:
        LoadError: There is no such method, or its folder or options are wrong.
        ValueError: It reads the target's KV or hidden states, or there is no such device.
    """

    def __init__(
        self,
        method: str = "ngram",
        folder: str | Path | None = None,
        *,
        options: Mapping[str, str] | None = None,
        nodes: int = 16,
        device: str = "cpu",
    ) -> None:
        path = None if folder is None else Path(folder)
        resources = Resources(device=str(find_device(device)))
        self._drafter: Drafter = method_class(method).load(path, dict(options or {}), resources)
        needs = self._drafter.needs
        if needs.kv_layers or needs.hidden_state_layers:
            raise ValueError(
                f"{method} reads the target's KV or hidden states, which transformers does not "
                "hand out; use ngram or lm here, or the services"
            )
        self._nodes = nodes
        self.stats = AssistantStats()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The decoding loop, as transformers calls it.

        Args:
            model: A decoder-only model.
            input_ids: int64 ``[1, prompt]``.
            logits_processor: Maps ids and scores ``[1, V]`` to scores; temperature and filters too.
            stopping_criteria: Say after each token whether to stop.
            generation_config: ``do_sample`` and what it means.
            synced_gpus: Refused: every GPU would have to run the same number of passes.
            streamer: Gets each token.
            model_kwargs: ``past_key_values``: the cache that was prepared.

        Returns:
            int64 ``[1, prompt + output]``.

        Raises:
            ValueError: More than one sequence, a padded one, or ``synced_gpus``.
        """
        mask = model_kwargs.get("attention_mask")
        if input_ids.shape[0] != 1 or synced_gpus or (mask is not None and not bool(mask.all())):
            raise ValueError("PacelineAssistant takes one sequence without padding, on one process")
        self.stats = AssistantStats()
        sampling = _sampling(generation_config)
        sequence = self._drafter.start(
            Generation(
                tokens=input_ids[0].tolist(),
                prompt_length=input_ids.shape[1],
                vocab_size=model.config.get_text_config().vocab_size,
                sampling=sampling,
            )
        )
        cache = model_kwargs["past_key_values"]
        try:
            while True:
                ids, done = self._round(
                    model, input_ids, cache, sequence, sampling, logits_processor, stopping_criteria
                )
                new = ids[0, input_ids.shape[1] :]
                if streamer is not None:
                    for token in new:
                        streamer.put(token[None].cpu())
                if done:
                    break
                sequence.extend(Update(new.tolist()))
                input_ids = ids
        finally:
            sequence.close()
        if streamer is not None:
            streamer.end()
        return ids

    def _round(
        self,
        model: Any,
        ids: Tensor,
        cache: Any,
        sequence: DraftSequence,
        sampling: sampling_pb2.SamplingParams,
        process: Any,
        stop: Any,
    ) -> tuple[Tensor, bool]:
        """Draft a chain, check it in one pass, take what stands and one token more."""
        chain = _first_path(sequence.draft(Budget(self._nodes, self._nodes)))
        known = cache.get_seq_length()
        fed = torch.cat([ids, torch.tensor([chain], dtype=ids.dtype, device=ids.device)], dim=1)
        output = model(input_ids=fed[:, known:], past_key_values=cache, use_cache=True)
        scores = output.logits[:, -1 - len(chain) :].float()
        self.stats.rounds += 1
        self.stats.drafted += len(chain)
        for place in range(len(chain) + 1):
            row = process(ids, scores[:, place].to(ids.device))
            token = _choose(row[0], sampling, ids.shape[1])
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
            self.stats.emitted += 1
            stands = place < len(chain) and chain[place] == token
            self.stats.accepted += stands
            done = bool(stop(ids, row).all())
            if done or not stands:
                break
        if wrong := fed.shape[1] - (ids.shape[1] - 1):
            cache.crop(-wrong)
        return ids, done


def _sampling(config: Any) -> sampling_pb2.SamplingParams:
    """What a drafter should know of the choice: with transformers' own seed where it samples."""
    if not config.do_sample:
        return sampling_pb2.SamplingParams()
    return sampling_pb2.SamplingParams(
        temperature=config.temperature or 1.0,
        top_k=config.top_k or 0,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
        seed=int(torch.randint(2**62, (1,))),  # so that torch.manual_seed decides it
    )


def _choose(scores: Tensor, sampling: sampling_pb2.SamplingParams, position: int) -> int:
    if sampling.temperature == 0:
        return int(scores.argmax())
    noise = gumbel_noise(sampling.seed, position, scores.numel())
    return int((scores.cpu() + noise).argmax())


def _first_path(tree: TokenTree) -> list[int]:
    """From the anchor down, always to the first child: builders put the likeliest first."""
    path: list[int] = []
    node = -1
    while children := tree.children(node):
        node = children[0]
        path.append(tree.tokens[node])
    return path
