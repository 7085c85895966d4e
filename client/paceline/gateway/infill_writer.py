"""The answers of `/infill`, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.client import Chunk, GenerationResult, TokenLogprob

from .generation import GenerationJob
from .infill import InfillRequest, selected
from .writers import GeneratedText, Json, Writer, usage


class InfillWriter(Writer):
    """`/infill`, in the form of llama.cpp's server."""

    def __init__(self, job: GenerationJob, body: InfillRequest) -> None:
        self._job, self._fields = job, body.response_fields

    def whole(self, texts: Sequence[GeneratedText]) -> Json:
        (text,) = texts
        assert text.result is not None
        return self._last(text.result, text.result.text)

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        return []

    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        text = "".join(chunk.text for chunk in chunks)
        return [{"index": 0, "content": text, "tokens": [], "stop": False}] if text else []

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        return [self._last(result, "")]

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        return []  # the last event has it

    def _last(self, result: GenerationResult, content: str) -> Json:
        used = usage(self._job, [result])
        cached = used["prompt_tokens_details"]["cached_tokens"]
        prompt, predicted = used["prompt_tokens"], used["completion_tokens"]
        reading, total = result.stats.first_token_ms, result.stats.total_ms
        stop = "limit" if result.finish_reason == "length" else "eos"
        answer = {
            "index": 0,
            "content": content,
            "tokens": [],
            "stop": True,
            "model": self._job.model_name,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt,
            "tokens_cached": cached,
            "truncated": False,
            "has_new_line": "\n" in result.text,
            "stop_type": stop if result.stop_string is None else "word",
            "stopping_word": result.stop_string or "",
            "generation_settings": {
                "n_ctx": self._job.model.facts.max_context,
                "seed": result.seed,
            },
            "timings": {
                **_timing("prompt", prompt - cached, reading),
                **_timing("predicted", predicted, total - reading),
            },
            "speculation": used["speculation"],
        }
        return selected(answer, self._fields)


def _timing(name: str, count: int, milliseconds: float) -> Json:
    """Return tokens and their time, in the form of llama.cpp."""
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(1, count),
        f"{name}_per_second": 1000 * count / max(1e-6, milliseconds),
    }
