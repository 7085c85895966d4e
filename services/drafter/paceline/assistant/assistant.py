"""The decoding loop that transformers calls instead of its own (``custom_generate``).

The sampling contract is that of the services: the token at position t is the argmax of
transformers' processed scores, plus noise keyed by seed and t if it samples. A drafted chain is
verified in one forward pass and accepted as far as it holds these tokens, so no drafter can change
them. The logits are those of the given model: if their bits depend on the number of tokens in a
pass, ties within rounding may be decided differently.
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
from paceline.v1 import sampling_pb2


@dataclass
class AssistantStats:
    """Statistics of the last ``generate``."""

    rounds: int = 0
    """Forward passes."""
    drafted: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Accepted draft tokens."""
    emitted: int = 0
    """Generated tokens."""


class PacelineAssistant:
    """Speculative decoding for transformers; pass it as ``custom_generate``.

    Works for one sequence at a time with models whose cache can be cropped, and with methods that
    read tokens only (``ngram``, ``lm``); the other methods need the services.

    Args:
        method: Drafting method.
        folder: Folder of its weights; None for methods without weights.
        options: Its options, as text.
        nodes: Maximum number of drafted tokens per round.
        device: Device of a method with weights: auto, cpu, cuda or cuda:N.

    Attributes:
        stats: Statistics of the last call.

    Raises:
        LoadError: There is no such method, or its folder or options are wrong.
        ValueError: The method reads the target's KV or hidden states, or there is no such device.
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
                "provide; use ngram or lm here, or the services"
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
        """Run the decoding loop, with the arguments that transformers passes.

        Args:
            model: A decoder-only model.
            input_ids: int64 ``[1, prompt]``.
            logits_processor: Maps ids and scores ``[1, V]`` to scores, temperature and filters
                included.
            stopping_criteria: Evaluated after each token.
            generation_config: Sampling settings.
            synced_gpus: Not supported: every GPU would have to run the same number of passes.
            streamer: Receives each token.
            model_kwargs: ``past_key_values`` is the cache to use.

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
        """Draft a chain, verify it in one pass, append the accepted tokens and one more."""
        chain = sequence.draft(Budget(self._nodes, self._nodes)).best_chain().tokens
        cached = cache.get_seq_length()
        fed = torch.cat([ids, torch.tensor([chain], dtype=ids.dtype, device=ids.device)], dim=1)
        output = model(input_ids=fed[:, cached:], past_key_values=cache, use_cache=True)
        scores = output.logits[:, -1 - len(chain) :].float()
        self.stats.rounds += 1
        self.stats.drafted += len(chain)
        for depth in range(len(chain) + 1):
            row = process(ids, scores[:, depth].to(ids.device))
            token = _choose(row[0], sampling, ids.shape[1])
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
            self.stats.emitted += 1
            accepted = depth < len(chain) and chain[depth] == token
            self.stats.accepted += accepted
            done = bool(stop(ids, row).all())
            if done or not accepted:
                break
        if rejected := fed.shape[1] - (ids.shape[1] - 1):
            cache.crop(-rejected)
        return ids, done


def _sampling(config: Any) -> sampling_pb2.SamplingParams:
    """The sampling parameters for the drafter; the seed is drawn, so torch.manual_seed fixes it."""
    if not config.do_sample:
        return sampling_pb2.SamplingParams()
    return sampling_pb2.SamplingParams(
        temperature=config.temperature or 1.0,
        top_k=config.top_k or 0,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
        seed=int(torch.randint(2**62, (1,))),
    )


def _choose(scores: Tensor, sampling: sampling_pb2.SamplingParams, position: int) -> int:
    if sampling.temperature == 0:
        return int(scores.argmax())
    noise = gumbel_noise(sampling.seed, position, scores.numel())
    return int((scores.cpu() + noise).argmax())
