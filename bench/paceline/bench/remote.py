"""A LongSpec drafter that follows the target's KV over gRPC, beside one that maps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from paceline.bench.served import Services
from paceline.decoder import load_config
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_SETTLE = 2.0
"""Time between attaching and the first round, so that the first selection has come. Unit: s."""


@dataclass(frozen=True)
class Round:
    """One round, each with a tree: tokens that came out, and KV that came over the wire for it."""

    emitted: int
    kv_bytes: int


def measure(
    target: Path,
    layer: Path,
    prompts: Sequence[Sequence[int]],
    options: str,
    *,
    dtype: str,
    tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Accepted length and bytes by way; services are processes of their own, greedy texts.

    `options` are the tree's. `kv_share` is what comes over the wire a round after the first, as a
    share of the exported layer's keys and values. Every round drafts.
    """
    base = f"longspec:{layer},target={target},{options}"
    ways = {
        "map, all": f"{base},kv=map,context=0",
        "map, B = 1024": f"{base},kv=map,context=1024",
        "follow, B = 1024, streaming": f"{base},kv=follow,context=1024",
        "follow, B = 1024, verified": f"{base},kv=follow,context=1024,kv_policy=verified",
    }
    names = {f"d{number}": way for number, way in enumerate(ways)}
    load = [f"{name}={ways[way]}" for name, way in names.items()]
    config = load_config(target, dtype)
    layer_bytes = config.kv_bytes_per_token // config.layers
    found: dict[str, Any] = {}
    with Services(target, load, dtype) as services:
        for name, way in names.items():
            texts = [list(_generate(services, name, prompt, tokens)) for prompt in prompts]
            rounds = [each for text in texts for each in text]
            later = [each for text in texts for each in text[1:]]
            context = sum(map(len, prompts)) / len(prompts)
            wire = sum(each.kv_bytes for each in later) / len(later)
            found[way] = {
                "texts": len(texts),
                "rounds": len(rounds),
                "accepted_length": sum(each.emitted for each in rounds) / len(rounds),
                "first_kv_bytes": sum(text[0].kv_bytes for text in texts) / len(texts),
                "kv_bytes_a_round": wire,
                "kv_share": wire / (layer_bytes * context),
            }
            progress(f"{way}: {found[way]['accepted_length']:.2f}, {wire:.0f} bytes a round")
    for figures in found.values():
        whole = found["map, all"]["accepted_length"]
        figures["share_of_map_all"] = figures["accepted_length"] / whole
    return found


def _generate(
    services: Services, drafter: str, prompt: Sequence[int], tokens: int
) -> Iterator[Round]:
    """Rounds until `tokens` tokens were written; the client would draft only where that pays."""
    verifier_address, drafter_address = services.addresses
    with (
        grpc.insecure_channel(verifier_address) as to_verifier,
        grpc.insecure_channel(drafter_address) as to_drafter,
    ):
        verifier = verifier_pb2_grpc.VerifierServiceStub(to_verifier)
        facts = verifier.GetModel(verifier_pb2.GetModelRequest())
        asked = verifier_pb2.CreateCacheRequest(
            prompt_tokens=prompt, max_new_tokens=tokens + 64, ignore_eos=True
        )
        *_, last = verifier.CreateCache(asked)
        cache = last.created
        verify, drafts = (
            _Calls(verifier.Verify),
            _Calls(drafter_pb2_grpc.DrafterServiceStub(to_drafter).Draft),
        )
        new, written = list(cache.first.tokens), 0
        attach = drafter_pb2.DraftAttach(
            drafter=drafter,
            target_fingerprint=facts.target_fingerprint,
            tokenizer_digest=facts.tokenizer_digest,
            vocab_size=facts.vocab_size,
            tokens=[*prompt, *new],
            prompt_length=len(prompt),
            read_grant=cache.read_grant,
            verifier_address=verifier_address,
        )
        drafts.ask(drafter_pb2.DraftRequest(attach=attach))
        time.sleep(_SETTLE)
        length, committed, new = len(prompt) + len(new), len(prompt), []
        number = 0
        while written < tokens:
            number += 1
            round_ = drafter_pb2.DraftRound(
                round_id=number,
                new_tokens=new,
                node_budget=facts.max_tree_nodes,
                committed_length=committed,
                total_length=length,
            )
            drafted = drafts.ask(drafter_pb2.DraftRequest(round=round_)).tree
            result = verify.ask(
                verifier_pb2.VerifyRequest(handle=cache.handle, round_id=number, tree=drafted.tree)
            ).result
            new, committed = list(result.tokens), result.committed_length
            length += len(new)
            written += len(new)
            yield Round(len(new), drafted.kv_bytes)
        drafts.end()
        verify.end()
        verifier.ReleaseCache(verifier_pb2.ReleaseCacheRequest(handle=cache.handle))


class _Calls:
    """A bidirectional stream, one answer to each request."""

    def __init__(self, method: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._responses = method(iter(self._requests.get, None))

    def ask(self, request: Any) -> Any:
        self._requests.put(request)
        return next(self._responses)

    def end(self) -> None:
        self._requests.put(None)
