"""The same prompts on transformers' own generate: greedy, prompt lookup and assisted."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
        """The modes this pair of models can run."""
        return MODES if self.assistant else MODES[:2]

    def generate(self, mode: str, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """New token ids of a greedy continuation of exactly `tokens`, and the seconds it took."""
        options: dict[str, Any] = {}
        if mode == MODES[1]:
            options["prompt_lookup_num_tokens"] = 10
        elif mode == MODES[2]:
            options["assistant_model"] = self._load(self.assistant)
        model = self._load(self.target)
        inputs = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return output[0, len(prompt) :].tolist(), time.perf_counter() - start

    def _load(self, folder: Path | None) -> Any:
        key = str(folder)
        if key not in self._models:
            model = AutoModelForCausalLM.from_pretrained(key, dtype=getattr(torch, self.dtype))
            model.generation_config.eos_token_id = None  # never stop early: every mode runs alike
            model.eval()
            self._models[key] = model
        return self._models[key]
