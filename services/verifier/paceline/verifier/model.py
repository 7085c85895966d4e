"""Description of the served model, as GetModel returns it."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from paceline.decoder import Decoder, check_batch_invariance, weights_fingerprint
from paceline.tree import MAX_NODES
from paceline.v1 import verifier_pb2
from paceline.verifier.grammar import Grammars

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model.

    Attributes:
        message: The GetModel response without the tokenizer. Requests are checked against it.
        tokenizer_gzip: tokenizer.json, compressed; empty if the folder has none.
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
    folder: Path, decoder: Decoder, *, max_context: int | None, lease_seconds: float
) -> ModelInfo:
    """Describe a loaded model. Reads all weight files once for the fingerprint.

    Args:
        folder: The model folder.
        decoder: The model.
        max_context: Most tokens of prompt and output together; None: the model's own limit.
        lease_seconds: Lifetime of a cache without use.

    Raises:
        ValueError: ``max_context`` is more than the model's own limit, or less than 2.
    """
    config = decoder.config
    context = config.max_position if max_context is None else max_context
    if not 2 <= context <= config.max_position:
        raise ValueError(
            f"max_context is {context}, expected 2 to {config.max_position}, the model's own limit"
        )
    tokenizer = _read_bytes(folder / "tokenizer.json")
    invariance = check_batch_invariance(decoder)
    if not invariance.holds:
        _log.warning(
            "batch_invariant is false: the output may depend on the drafter at numeric ties: %s",
            invariance.reason,
        )
    message = verifier_pb2.GetModelResponse(
        name=folder.resolve().name,
        architecture=_architecture(folder),
        vocab_size=config.vocab_size,
        max_context=context,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=str(config.dtype).removeprefix("torch."),
        target_fingerprint=weights_fingerprint(folder),
        tokenizer_digest=hashlib.sha256(tokenizer).hexdigest() if tokenizer else "",
        chat_template=_chat_template(folder),
        max_tree_nodes=MAX_NODES,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden,
        instance_id=secrets.token_hex(16),
        batch_invariant=invariance.holds,
        batch_invariance_reason=invariance.reason,
        lease_ms=round(lease_seconds * 1000),
    )
    return ModelInfo(
        message=message,
        tokenizer_gzip=gzip.compress(tokenizer, mtime=0) if tokenizer else b"",
    )


def _read_bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _architecture(folder: Path) -> str:
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return str(names[0])


def _chat_template(folder: Path) -> str:
    """The template of chat_template.jinja, else of tokenizer_config.json, else empty."""
    own = _read_bytes(folder / "chat_template.jinja")
    if own:
        return own.decode()
    config = json.loads(_read_bytes(folder / "tokenizer_config.json") or b"{}")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)
