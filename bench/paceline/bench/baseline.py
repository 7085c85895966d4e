"""The same prompts on transformers' own generate: greedy, prompt lookup and assisted."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

_CHUNK = 2048  # tokens of a prefill that go through at once

MODES = ("transformers greedy", "transformers prompt lookup", "transformers assisted")


@dataclass
class Transformers:
    """A target loaded by transformers, in the dtype that Paceline serves it in.

    `assistant` is the folder of a small model with the same tokenizer, or None.
    """

    target: Path
    assistant: Path | None
    dtype: str
    _models: dict[str, Any] = field(default_factory=dict)

    def modes(self) -> tuple[str, ...]:
        """Assisted generation needs an assistant."""
        return MODES if self.assistant else MODES[:2]

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> tuple[DynamicCache, float]:
        """The KV of all of a prompt but its last token, and the seconds it took."""
        model, cache = self._load(self.target), DynamicCache()
        start = time.perf_counter()
        for first in range(0, len(prompt) - 1, _CHUNK):
            piece = torch.tensor([prompt[first : min(first + _CHUNK, len(prompt) - 1)]])
            model.model(piece, past_key_values=cache, use_cache=True)
        return cache, time.perf_counter() - start

    @torch.inference_mode()
    def step(self, tokens: list[int], cache: DynamicCache) -> None:
        """Logits of a chain of tokens behind a cache, which stays as it is."""
        self._load(self.target)(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache.crop(-len(tokens))

    def decode(
        self,
        mode: str,
        prompt: list[int],
        cache: DynamicCache,
        tokens: int,
        *,
        temperature: float,
        seed: int,
    ) -> tuple[list[int], float]:
        """New token ids behind a prompt whose KV is in `cache`, which stays, and tokens per second.

        The first step is not counted: an assistant reads the prompt in it.
        """
        model, clock = self._load(self.target), _Clock()
        inputs, own = torch.tensor([prompt]), copy.deepcopy(cache)
        torch.manual_seed(seed)
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                past_key_values=own,
                max_new_tokens=tokens,
                pad_token_id=0,
                streamer=clock,
                **(sampled if temperature else {"do_sample": False}),
                **self._options(mode),
            )
        return output[0, len(prompt) :].tolist(), clock.rate()

    def _options(self, mode: str) -> dict[str, Any]:
        if mode == MODES[1]:
            return {"prompt_lookup_num_tokens": 10}
        return {"assistant_model": self._load(self.assistant)} if mode == MODES[2] else {}

    def _load(self, folder: Path | None) -> Any:
        key = str(folder)
        if key not in self._models:
            logging.set_verbosity_error()
            logging.disable_progress_bar()
            model: Any = AutoModelForCausalLM.from_pretrained(key, dtype=getattr(torch, self.dtype))
            model.generation_config.eos_token_id = None  # every run has the same length
            model.eval()
            model.prepare_inputs_for_generation = _continuing(model.prepare_inputs_for_generation)
            self._models[key] = model
        return self._models[key]


def _continuing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the preparation of a step so that tokens whose KV is in the cache are not read again.

    The first step of transformers' assisted generation would read the whole prompt again.
    """

    @wraps(prepare)  # transformers inspects the signature
    def prepared(ids: Tensor, next_sequence_length: int | None = None, **more: Any) -> Any:
        past = more.get("past_key_values")
        if next_sequence_length is None and past is not None and past.get_seq_length():
            next_sequence_length = ids.shape[1] - past.get_seq_length()
        return prepare(ids, next_sequence_length=next_sequence_length, **more)

    return prepared


class _Clock(BaseStreamer):
    """Records when tokens come."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, int]] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if not self._prompt:  # what comes first is the prompt
            self._steps.append((time.perf_counter(), value.numel()))
        self._prompt = False

    def end(self) -> None:
        """Required by transformers; does nothing."""

    def rate(self) -> float:
        """Tokens per second after the first step."""
        (begin, _), *later = self._steps
        return sum(count for _, count in later) / (later[-1][0] - begin)
