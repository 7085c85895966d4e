"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.client import Detokenizer, TextCodec, TokenLogprob

Json = dict[str, Any]


def of_chat(entries: Sequence[TokenLogprob], codec: TextCodec) -> Json:
    """The form of chat completions."""

    def entry(token: int, logprob: float) -> Json:
        text, raw = codec.token_text(token), list(codec.token_bytes(token))
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {
            **entry(each.token_id, each.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in each.top],
        }
        for each in entries
    ]
    return {"content": content, "refusal": None}


def of_completion(
    entries: Sequence[TokenLogprob], pieces: Sequence[str], codec: TextCodec, offset: int
) -> Json:
    """The form of completions.

    Args:
        entries: One per token.
        pieces: Text of each token.
        codec: The tokenizer.
        offset: Characters before the first token.
    """

    def likeliest(each: TokenLogprob) -> dict[str, float]:
        # As in OpenAI's API, the token itself is always included. Among tokens with equal text, the
        # likeliest one is kept.
        own = {codec.token_text(each.token_id): each.logprob}
        return own | {codec.token_text(token): logprob for token, logprob in reversed(each.top)}

    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": [codec.token_text(each.token_id) for each in entries],
        "token_logprobs": [each.logprob for each in entries],
        "top_logprobs": [likeliest(each) for each in entries],
        "text_offset": offsets[: len(entries)],
    }


def of_prompt(tokens: Sequence[int], entries: Sequence[TokenLogprob], codec: TextCodec) -> Json:
    """The form of completions for an echoed prompt, whose first token has none.

    Args:
        tokens: The prompt.
        entries: One per token but the first.
        codec: The tokenizer.
    """
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in tokens]
    first = of_completion([TokenLogprob(tokens[0], 0.0)], pieces[:1], codec, 0)
    rest = of_completion(entries, pieces[1:], codec, len(pieces[0]))
    return {
        "tokens": first["tokens"] + rest["tokens"],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": first["text_offset"] + rest["text_offset"],
    }


def joined(parts: Sequence[Json]) -> Json:
    """Log-probabilities of consecutive parts of a text as one."""
    joined: Json = {}
    for part in parts:
        for key, value in part.items():
            joined[key] = joined[key] + value if isinstance(joined.get(key), list) else value
    return joined
