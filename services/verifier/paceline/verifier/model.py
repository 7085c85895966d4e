"""Description of the served model, as GetModel returns it."""

from __future__ import annotations

import gzip
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from paceline.decoder import (
    BatchInvariance,
    Decoder,
    GraphRunner,
    PackedModel,
    check_batch_invariance,
    check_served,
)
from paceline.decoder.graphs import table_row
from paceline.decoder.invariance import SERVED_TOKENS, served_slots, window_to_pass
from paceline.decoder.products import describe_device, describe_kernels
from paceline.decoder.remembered import remembered
from paceline.kernels import (
    MAX_TREE_NODES,
    QueryBlock,
    cpu_kernels,
    plan_trees,
    processor_name,
    send,
    why_bits_vary,
)
from paceline.tree import MAX_NODES
from paceline.v1 import verifier_pb2
from paceline.verifier.grammar import Grammars
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.kv.pool import PAGE_TOKENS, PagedKv, PagePool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model."""

    # The GetModel response without the tokenizer. Requests are checked against it.
    message: verifier_pb2.GetModelResponse
    tokenizer_gzip: bytes  # tokenizer.json, compressed; empty if the model has none

    def grammars(self) -> Grammars:
        """A compiler of grammars for the model's tokens."""
        tokenizer = gzip.decompress(self.tokenizer_gzip) if self.tokenizer_gzip else b""
        return Grammars(tokenizer, self.message.vocab_size, self.message.eos_token_ids)

    def set_invariance(self, found: BatchInvariance, decoder: Decoder) -> None:
        """Say whether texts depend on drafts, and what their bits depend on."""
        if not found.holds:
            _log.warning(
                "batch_invariant is false: the output may depend on the drafter at numeric ties: "
                "%s",
                found.reason,
            )
        message = self.message
        message.batch_invariant = found.holds
        message.batch_invariance_reason = found.reason
        message.numerics = _numerics(decoder) if found.holds else ""

    def response(self, request: verifier_pb2.GetModelRequest) -> verifier_pb2.GetModelResponse:
        """The response to one request, with the tokenizer if the client lacks it."""
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
    if decoder.device.type != "cuda":  # there the passes that serve are checked, see check_steps
        info.set_invariance(_batch_invariance(decoder), decoder)
    return info


def check_steps(decoder: Decoder, graphs: GraphRunner | None, pool: PagePool) -> BatchInvariance:
    """Whether the steps of a model on a GPU keep the bits of rows; for the thread that runs them,
    while no text is served."""
    if decoder.products is None:
        return BatchInvariance(
            False,
            "numerics are 'fast': products add up in an order that depends on their rows; use "
            "--numerics auto if texts must not depend on drafts",
        )
    if differs := why_bits_vary(decoder.device) or decoder.products.differs:
        return BatchInvariance(False, differs)
    config = decoder.config
    if config.max_position < SERVED_TOKENS:
        return BatchInvariance(False, "the model's texts are too short for the check")
    longest = min(config.max_position, pool.tables.shape[1] * PAGE_TOKENS)
    window = window_to_pass(config.windows, longest)
    try:
        caches = [pool.allocate(slots, None) for slots in served_slots(window)]
    except OutOfMemory as error:
        return BatchInvariance(False, f"there is no memory to check it: {error}")

    def forward(
        tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        if graphs is not None and not prompt:
            rows = [table_row(cache) for cache in caches]
            if (found := graphs.forward(tokens, blocks, rows)) is not None:
                return found.logits
        plan = plan_trees(blocks, device=decoder.device)
        packed = send(torch.tensor(tokens), decoder.device)
        return decoder.forward(packed, plan, caches, logit_rows=None).logits

    try:
        for cache in caches:
            cache.reserve(cache.capacity)
        return check_served(forward, config.vocab_size, window)
    except OutOfMemory as error:
        return BatchInvariance(False, f"there is no memory to check it: {error}")
    finally:
        for cache in caches:
            cache.close()


def check_states(
    decoder: Decoder, graphs: GraphRunner, cache: PagedKv, layers: tuple[int, ...], rows: int
) -> str:
    """What the graph that returns hidden states changes, for a step of so many rows; for the thread
    that runs steps, between two of them.

    Its logits are compared with those of the graph without, which :func:`check_steps` has compared,
    and its hidden states with those of a pass kernel by kernel.

    Args:
        decoder: The model.
        graphs: Its graphs.
        cache: One that serves no text, with as many slots.
        layers: Layers whose outputs are returned.
        rows: Rows of the step.

    Returns:
        What differs; empty: nothing.
    """
    tokens = [token % decoder.config.vocab_size for token in range(rows)]
    starts = range(0, rows, MAX_TREE_NODES)
    blocks = [QueryBlock(0, at, None, min(MAX_TREE_NODES, rows - at)) for at in starts]
    without = graphs.forward(tokens, blocks, [table_row(cache)])
    expected = None if without is None else without.logits.clone()
    found = graphs.forward(tokens, blocks, [table_row(cache)], layers)
    if expected is None or found is None:
        return ""  # steps of so many rows run kernel by kernel
    plan = plan_trees(blocks, device=decoder.device)
    packed = send(torch.tensor(tokens), decoder.device)
    plain = decoder.forward(packed, plan, [cache], logit_rows=None, taps=layers)
    same = zip((found.logits, *found.taps), (expected, *plain.taps), strict=True)
    if all(torch.equal(*each) for each in same):
        return ""
    return f"a step of {rows} rows has other bits where hidden states are recorded"


def _numerics(decoder: Decoder) -> str:
    """What the bits of logits depend on besides model and formats, for a model that keeps the bits
    of rows: equal for verifiers that continue each other's texts. Empty: no promise holds."""
    if decoder.device.type == "cpu":
        return decoder.numerics
    if decoder.products is None:
        return ""
    return f"{describe_device(decoder.device)}, {describe_kernels()}, {decoder.products}"


def _batch_invariance(decoder: Decoder) -> BatchInvariance:
    """Result of the self-check; on a CPU the one of an earlier process with the same kernels."""
    if decoder.device.type != "cpu":
        return check_batch_invariance(decoder)
    machine = cpu_kernels().file, processor_name(), torch.__version__, torch.get_num_threads()
    facts = ("batch invariance", decoder.config, *machine)
    return BatchInvariance(**remembered(facts, lambda: asdict(check_batch_invariance(decoder))))
