"""Description of the served model, as GetModel returns it."""

from __future__ import annotations

import gzip
import logging
import secrets
from dataclasses import asdict, dataclass

import torch

from paceline.decoder import BatchInvariance, Decoder, ModelSource, check_batch_invariance
from paceline.decoder.model_source import remembered
from paceline.kernels import cpu_kernels, get_numerics, processor_name
from paceline.tree import MAX_NODES
from paceline.v1 import verifier_pb2
from paceline.verifier.grammar import Grammars

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model.

    Attributes:
        message: The GetModel response without the tokenizer. Requests are checked against it.
        tokenizer_gzip: tokenizer.json, compressed; empty if the model has none.
    """

    message: verifier_pb2.GetModelResponse
    tokenizer_gzip: bytes

    def grammars(self) -> Grammars:
        """A compiler of grammars for the model's tokens."""
        tokenizer = gzip.decompress(self.tokenizer_gzip) if self.tokenizer_gzip else b""
        return Grammars(tokenizer, self.message.vocab_size, self.message.eos_token_ids)

    def response(self, request: verifier_pb2.GetModelRequest) -> verifier_pb2.GetModelResponse:
        """The response to one request, with the tokenizer if the client lacks it."""
        response = verifier_pb2.GetModelResponse()
        response.CopyFrom(self.message)
        known = request.known_tokenizer_digest == self.message.tokenizer_digest
        if not (known or request.omit_tokenizer):
            response.tokenizer_gzip = self.tokenizer_gzip
        return response


def read_model_info(
    source: ModelSource, decoder: Decoder, *, max_context: int | None, lease_seconds: float
) -> ModelInfo:
    """Describe a loaded model. Reads all weight files once for the fingerprint.

    ``max_context`` is the maximum length of prompt and output together; None: the model's own
    limit. Raises ``ValueError``: it is more than that limit, or less than 2.
    """
    config = decoder.config
    context = config.max_position if max_context is None else max_context
    if not 2 <= context <= config.max_position:
        raise ValueError(
            f"max_context is {context}, expected 2 to {config.max_position}, the model's own limit"
        )
    tokenizer = source.tokenizer
    invariance = _batch_invariance(decoder)
    promised = decoder.device.type == "cpu" and cpu_kernels().library is not None
    if not invariance.holds:
        _log.warning(
            "batch_invariant is false: the output may depend on the drafter at numeric ties: %s",
            invariance.reason,
        )
    message = verifier_pb2.GetModelResponse(
        name=source.name,
        protocol_version=verifier_pb2.PROTOCOL_VERSION_1,
        architecture="".join(source.architectures[:1]),
        vocab_size=config.vocab_size,
        max_context=context,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=str(config.dtype).removeprefix("torch."),
        target_fingerprint=source.fingerprint(),
        tokenizer_digest=source.tokenizer_digest,
        chat_template=source.chat_template,
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
        batch_invariant=invariance.holds,
        batch_invariance_reason=invariance.reason,
        lease_ms=round(lease_seconds * 1000),
        numerics=get_numerics() if promised else "",
        weights=config.weights,
        kv_cache_dtype=str(config.kv_dtype).removeprefix("torch."),
    )
    return ModelInfo(
        message=message,
        tokenizer_gzip=gzip.compress(tokenizer, compresslevel=3, mtime=0) if tokenizer else b"",
    )


def _batch_invariance(decoder: Decoder) -> BatchInvariance:
    """Result of the self-check; on a CPU the one of an earlier process with the same kernels."""
    kernels = cpu_kernels()
    if decoder.device.type != "cpu" or kernels.library is None:
        return check_batch_invariance(decoder)
    machine = kernels.file, processor_name(), torch.__version__, torch.get_num_threads()
    facts = ("batch invariance", decoder.config, *machine)
    return BatchInvariance(**remembered(facts, lambda: asdict(check_batch_invariance(decoder))))
