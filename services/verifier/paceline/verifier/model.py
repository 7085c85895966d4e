"""Description of the served model, as GetModel returns it."""

from __future__ import annotations

import gzip
import logging
import secrets
from dataclasses import asdict, dataclass

import torch

from paceline.decoder import BatchInvariance, Decoder, PackedModel, check_batch_invariance
from paceline.decoder.remembered import remembered
from paceline.device import device_of
from paceline.kernels import Rule, cpu_kernels, processor_name
from paceline.tree import MAX_NODES
from paceline.v1 import verifier_pb2
from paceline.verifier.grammar import Grammars

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model."""

    # The GetModel response without the tokenizer. Requests are checked against it.
    message: verifier_pb2.GetModelResponse
    tokenizer_gzip: bytes  # tokenizer.json, compressed; empty if the model has none

    def grammars(self) -> Grammars:
        """Return a compiler of grammars for the model's tokens."""
        tokenizer = gzip.decompress(self.tokenizer_gzip) if self.tokenizer_gzip else b""
        return Grammars(tokenizer, self.message.vocab_size, self.message.eos_token_ids)

    def set_invariance(self, invariance: BatchInvariance, decoder: Decoder) -> None:
        """Say whether texts depend on drafts, and what their bits depend on."""
        if not invariance.holds:
            _log.warning(
                "batch_invariant is false: the output may depend on the drafter at numeric ties: "
                "%s",
                invariance.reason,
            )
        message = self.message
        message.batch_invariant = invariance.holds
        message.batch_invariance_reason = invariance.reason
        rules = device_of(decoder.device).rules(decoder) if invariance.holds else []
        if rules and invariance.bits:
            rules.append(Rule("check", "", "logits of a tree", {"logits": invariance.bits}))
        fields = [rule._asdict() for rule in rules]
        message.ClearField("numerics")
        message.numerics.extend(verifier_pb2.RuleOfNumerics(**values) for values in fields)

    def response(self, request: verifier_pb2.GetModelRequest) -> verifier_pb2.GetModelResponse:
        """Return the response to a request, with the tokenizer if the client lacks it."""
        response = verifier_pb2.GetModelResponse()
        response.CopyFrom(self.message)
        known = request.known_tokenizer_digest == self.message.tokenizer_digest
        if not (known or request.omit_tokenizer):
            response.tokenizer_gzip = self.tokenizer_gzip
        return response


def read_model_info(
    model: PackedModel, decoder: Decoder, *, max_context: int | None, lease_seconds: float
) -> ModelInfo:
    """Describe a loaded model.

    ``max_context`` is the maximum length of prompt and output together; None: the model's own
    limit. Raises ``ValueError`` if it is more than that limit, or less than 2.
    """
    config = decoder.config
    context = config.max_position if max_context is None else max_context
    if not 2 <= context <= config.max_position:
        raise ValueError(
            f"max_context is {context}, expected 2 to {config.max_position}, the model's own limit"
        )
    source, tokenizer = model.description, model.tokenizer
    message = verifier_pb2.GetModelResponse(
        name=source.name,
        protocol_version=verifier_pb2.PROTOCOL_VERSION_1,
        architecture="".join(source.architectures[:1]),
        vocab_size=config.vocab_size,
        max_context=context,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=str(config.dtype).removeprefix("torch."),
        target_fingerprint=source.fingerprint,
        tokenizer_digest=source.tokenizer_digest,
        chat_template=source.chat_templates.get("default", ""),
        named_chat_templates={
            name: text for name, text in source.chat_templates.items() if name != "default"
        },
        special_tokens=source.special_tokens,
        max_tree_nodes=MAX_NODES,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden,
        instance_id=secrets.token_hex(16),
        lease_ms=round(lease_seconds * 1000),
        weights=config.weights,
        kv_cache_dtype=str(config.kv_dtype).removeprefix("torch."),
    )
    info = ModelInfo(
        message=message,
        tokenizer_gzip=gzip.compress(tokenizer, compresslevel=3, mtime=0) if tokenizer else b"",
    )
    if not device_of(decoder.device).graphs:  # there the passes that serve are checked
        info.set_invariance(_batch_invariance(decoder, source.fingerprint), decoder)
    return info


def _batch_invariance(decoder: Decoder, fingerprint: str) -> BatchInvariance:
    """Return the result of the self-check, which an earlier process with the same model and kernels
    may have stored."""
    machine = cpu_kernels().file, processor_name(), torch.__version__, torch.get_num_threads()
    facts = ("batch invariance", fingerprint, decoder.config, decoder.numerics, *machine)
    return BatchInvariance(**remembered(facts, lambda: asdict(check_batch_invariance(decoder))))
