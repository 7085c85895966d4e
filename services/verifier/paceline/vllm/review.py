"""Which drafters can draft for vLLM."""

from __future__ import annotations

import logging

from paceline.service import ServiceError
from paceline.v1 import drafter_pb2, exchange_pb2

_log = logging.getLogger(__name__)


def review(digest: str, drafters: exchange_pb2.DrafterList) -> None:
    """Leave out drafters that vLLM cannot use; ``digest`` is its tokenizer's digest. Raises
    ``ServiceError`` if the default is one of them, or all are."""
    usable, reasons = [], {}
    for drafter in drafters.drafters:
        if (error := _fault_of(digest, drafter)) is None:
            usable.append(drafter)
        else:
            reasons[drafter.name] = error
    if drafters.default_drafter in reasons or (reasons and not usable):
        raise reasons.get(drafters.default_drafter) or next(iter(reasons.values()))
    for error in reasons.values():
        _log.warning("a drafter is not used: %s", error.message)
    del drafters.drafters[:]
    drafters.drafters.extend(usable)


def _fault_of(digest: str, drafter: drafter_pb2.DrafterInfo) -> ServiceError | None:
    """Return why a drafter cannot be used; None if it can."""
    name = drafter.name
    if digest and drafter.tokenizer_digest and drafter.tokenizer_digest != digest:
        return ServiceError.failed_precondition(
            "TOKENIZER_MISMATCH",
            f"drafter {name!r} has the tokenizer {drafter.tokenizer_digest[:80]}, the model of "
            f"this vLLM has {digest}; choose a drafter with the model's tokenizer",
        )
    reads = "hidden states" if drafter.hidden_state_layers else ""
    reads = "KV" if drafter.reads_kv or drafter.kv_policy else reads
    if reads:
        return ServiceError.failed_precondition(
            "TOKENS_ONLY",
            f"drafter {name!r} ({drafter.method[:80]}) reads the target's {reads}, and vLLM "
            "gives a proposer tokens alone; use a method such as lm or ngram",
        )
    return None
