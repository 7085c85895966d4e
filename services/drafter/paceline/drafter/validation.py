"""Checks of the messages of a Draft stream, before any method sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.drafter.registry import Version
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2, sampling_pb2

_NAMES = ("drafter", "version", "target_fingerprint", "tokenizer_digest", "verifier_address")
_MAX_NAME_CHARS = 4096
_MAX_BIASES = 4096


def check_attach(attach: drafter_pb2.DraftAttach, max_context: int) -> None:
    """Check an attach by itself.

    Raises:
        ServiceError: INVALID_ARGUMENT with EMPTY_TEXT, TEXT_TOO_LONG, INVALID_VOCABULARY,
            INVALID_PROMPT_LENGTH, NAME_TOO_LONG or INVALID_SAMPLING.
    """
    if attach.vocab_size == 0:
        raise ServiceError.invalid_argument(
            "INVALID_VOCABULARY", "vocab_size is 0; send the target's, from GetModel"
        )
    if not attach.tokens:
        raise ServiceError.invalid_argument(
            "EMPTY_TEXT", "attach has no tokens; send the prompt and the tokens emitted so far"
        )
    check_length(len(attach.tokens), max_context)
    if attach.prompt_length > len(attach.tokens):
        raise ServiceError.invalid_argument(
            "INVALID_PROMPT_LENGTH",
            f"prompt_length is {attach.prompt_length}, but there are {len(attach.tokens)} tokens; "
            "send the number of prompt tokens among them",
        )
    for field in _NAMES:
        if len(getattr(attach, field)) > _MAX_NAME_CHARS:
            raise ServiceError.invalid_argument(
                "NAME_TOO_LONG", f"{field} is longer than {_MAX_NAME_CHARS} characters"
            )
    _check_sampling(attach.sampling, attach.vocab_size)


def check_tokens(field: str, tokens: Sequence[int], vocab_size: int, version: Version) -> None:
    """Raise TOKEN_OUT_OF_VOCABULARY unless target and drafter know every token id."""
    limit = min(vocab_size, version.drafter.fit.vocab_size or vocab_size)
    if tokens and max(tokens) >= limit:
        raise ServiceError.invalid_argument(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{field} holds the id {max(tokens)}, expected ids below {limit}",
        )


def check_length(length: int, max_context: int) -> None:
    """Raise TEXT_TOO_LONG for a text longer than the service's maximum."""
    if length > max_context:
        raise ServiceError.invalid_argument(
            "TEXT_TOO_LONG",
            f"the text has {length} tokens, this drafter service accepts at most {max_context}; "
            "generate without a drafter",
        )


def check_fit(
    attach: drafter_pb2.DraftAttach,
    tokens: Sequence[int],
    version: Version,
    before: Version | None = None,
) -> None:
    """Check that a drafter fits the target and the text so far.

    The tokenizer's digest decides; the vocabulary size only where a digest is missing, since models
    of one family pad their embeddings differently.

    Args:
        attach: Of the stream; its tokens are ignored.
        tokens: The text so far.
        version: The drafter.
        before: The version that it replaces. Both must read the same hidden states, because the
            cache was created to keep those.

    Raises:
        ServiceError: FAILED_PRECONDITION with TARGET_MISMATCH, TOKENIZER_MISMATCH, KV_NOT_SHARED or
            HIDDEN_STATES_MISMATCH; INVALID_ARGUMENT with TOKEN_OUT_OF_VOCABULARY.
    """
    fit, needs, name = version.drafter.fit, version.drafter.needs, version.spec.name
    if fit.target_fingerprint and fit.target_fingerprint != attach.target_fingerprint:
        raise ServiceError.failed_precondition(
            "TARGET_MISMATCH",
            f"drafter {name!r} was trained for the target {fit.target_fingerprint}, this one is "
            f"{attach.target_fingerprint[:80] or 'unnamed'}; choose a drafter trained for it",
            expected=fit.target_fingerprint,
            found=attach.target_fingerprint,
        )
    if fit.tokenizer_digest and attach.tokenizer_digest:
        if fit.tokenizer_digest != attach.tokenizer_digest:
            raise ServiceError.failed_precondition(
                "TOKENIZER_MISMATCH",
                f"drafter {name!r} has the tokenizer {fit.tokenizer_digest}, the target has "
                f"{attach.tokenizer_digest[:80]}; choose a drafter with the target's tokenizer",
                expected=fit.tokenizer_digest,
                found=attach.tokenizer_digest,
            )
    elif fit.vocab_size and fit.vocab_size != attach.vocab_size:
        raise ServiceError.failed_precondition(
            "TOKENIZER_MISMATCH",
            f"drafter {name!r} (tokenizer {fit.tokenizer_digest or 'unknown'}) has "
            f"{fit.vocab_size} token ids, the target (tokenizer "
            f"{attach.tokenizer_digest[:80] or 'unknown'}) has {attach.vocab_size}; "
            "choose a drafter with the target's tokenizer",
            expected=str(fit.vocab_size),
            found=str(attach.vocab_size),
        )
    if needs.kv_layers and not (attach.read_grant and attach.verifier_address):
        raise ServiceError.failed_precondition(
            "KV_NOT_SHARED",
            f"drafter {name!r} reads the target's KV; attach with read_grant and verifier_address",
        )
    if before is not None:
        old = before.drafter.needs
        if (old.hidden_state_layers, old.hidden_state_window) != (
            needs.hidden_state_layers,
            needs.hidden_state_window,
        ):
            raise ServiceError.failed_precondition(
                "HIDDEN_STATES_MISMATCH", f"drafter {name!r} reads other hidden states"
            )
    check_tokens("tokens", tokens, attach.vocab_size, version)


def _check_sampling(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    """Check what the verifier checks too, so that no method fails on it later."""
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
    )
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            raise ServiceError.invalid_argument(
                "INVALID_SAMPLING", f"{name} is {value}, expected a number from {low} to {high}"
            )
    if len(sampling.logit_bias) > _MAX_BIASES:
        raise ServiceError.invalid_argument(
            "INVALID_SAMPLING",
            f"logit_bias has {len(sampling.logit_bias)} tokens, expected at most {_MAX_BIASES}",
        )
    for token, bias in sampling.logit_bias.items():
        if token >= vocab_size or math.isnan(bias) or bias == math.inf:
            raise ServiceError.invalid_argument(
                "INVALID_SAMPLING",
                f"logit_bias of token {token} is {bias}, expected a number or -inf for an id "
                f"below {vocab_size}",
            )
