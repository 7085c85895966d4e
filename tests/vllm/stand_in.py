"""A stand-in for vLLM's side of a proposer, and drafter services that tests write."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np

from paceline.v1 import drafter_pb2, exchange_pb2, exchange_pb2_grpc, tree_pb2
from paceline.vllm import PacelineProposer

VOCAB = 1000
CONTEXT = 512

Target = Callable[[Sequence[int]], int]  # the target's next token of a text


def config(model: str = "missing", tokens: int = 8, rank: int = 0, ranks: int = 1) -> Any:
    """What the proposer reads of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(
            model=model, served_model_name="m", max_model_len=CONTEXT, get_vocab_size=lambda: VOCAB
        ),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks),
        device_config=SimpleNamespace(device_type="cuda"),
    )


def counting(text: Sequence[int]) -> int:
    """A target without repeats within a text: look-up finds nothing."""
    return (text[-1] * 7 + len(text) * 13 + 5) % VOCAB


def periodic(text: Sequence[int]) -> int:
    """A target that repeats itself after ten tokens: look-up finds all."""
    return (text[-1] // 10) * 10 + (text[-1] + 1) % 10


class Request:
    """One request: its tokens, and how many it generates."""

    def __init__(self, prompt: Sequence[int], new_tokens: int, chunks: int = 0) -> None:
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.end = len(prompt) + new_tokens
        self.chunks = chunks  # steps of its prompt before the first token
        self.drafts: list[int] = []
        self.accepted = self.drafted = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class Batch:
    """Steps of a batch as vLLM runs them: rows of ended requests are filled with the last ones."""

    def __init__(
        self, proposer: PacelineProposer, target: Target = periodic, step_seconds: float = 0.0
    ) -> None:
        self.proposer, self.target, self.step_seconds = proposer, target, step_seconds
        self.rows: list[Request] = []
        self.array = np.zeros((64, CONTEXT), np.int32)
        self.lengths = np.zeros(64, np.int32)
        self.steps: list[float] = []
        self._ended = time.perf_counter()

    def add(self, *requests: Request) -> None:
        self.rows += requests

    def step(self) -> None:
        """Run a step, and ask the proposer for the chains of the next one."""
        for index, request in reversed(list(enumerate(self.rows))):
            if len(request.tokens) >= request.end:
                last = self.rows.pop()
                if index < len(self.rows):
                    self.rows[index] = last
        if not self.rows:
            return
        time.sleep(self.step_seconds)
        sampled = [self._advance(request) for request in self.rows]
        self.array[:] = -1  # what is beyond a row's length is anything
        for row, request in enumerate(self.rows):
            self.array[row, : len(request.tokens)] = request.tokens
            self.lengths[row] = len(request.tokens)
        self.steps.append(time.perf_counter() - self._ended)
        chains = self.proposer.propose(sampled, self.lengths, self.array, slot_mappings=None)
        self._ended = time.perf_counter()
        assert len(chains) == len(self.rows)
        for request, chain in zip(self.rows, chains, strict=True):
            assert len(chain) <= 8
            assert all(0 <= token < VOCAB for token in chain)
            assert len(request.tokens) + len(chain) < CONTEXT or not chain
            request.drafts = chain

    def run(self, most: int = 2000) -> None:
        """Run steps until all requests have ended."""
        for _ in range(most):
            if not self.rows:
                return
            self.step()
        raise AssertionError(f"requests run after {most} steps")

    def _advance(self, request: Request) -> list[int]:
        if request.chunks:
            request.chunks -= 1
            return []
        request.drafted += len(request.drafts)
        new: list[int] = []
        for draft in [*request.drafts, None]:
            token = self.target([*request.tokens, *new])
            new.append(token)
            if token != draft:
                break
            request.accepted += 1
        new = new[: request.end - len(request.tokens)]
        request.tokens += new
        return new


def expected(target: Target, request: Request) -> list[int]:
    """The tokens of a request without any drafter."""
    text = request.tokens[: request.prompt]
    while len(text) < request.end:
        text.append(target(text))
    return text[request.prompt :]


# The tree for a text; None: the round is never answered.
Draft = Callable[[list[int], exchange_pb2.DraftRound], tree_pb2.TokenTree | None]


def chain(tokens: Sequence[int], confidence: float = 0.9) -> tree_pb2.TokenTree:
    return tree_pb2.TokenTree(
        tokens=tokens, parents=range(-1, len(tokens) - 1), confidences=[confidence] * len(tokens)
    )


def right(target: Target) -> Draft:
    """Drafts what the target will say, as a chain of the budget's length."""

    def draft(text: list[int], message: exchange_pb2.DraftRound) -> tree_pb2.TokenTree:
        ahead = list(text)
        for _ in range(message.node_budget):
            ahead.append(target(ahead))
        return chain(ahead[len(text) :])

    return draft


class Service:
    """A drafter service over the gRPC stream, on a thread of its own."""

    def __init__(
        self,
        address: str,
        draft: Draft,
        *drafters: drafter_pb2.DrafterInfo,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.draft = draft
        self.drafters = drafters or (drafter_pb2.DrafterInfo(name="d", version="1", method="lm"),)
        self.rounds = 0
        self.texts: dict[int, list[int]] = {}
        self.opened: list[exchange_pb2.OpenSequence] = []
        self.closed: set[int] = set()
        self.error: grpc.RpcError | None = None
        self.listed = threading.Event()
        self.ended = threading.Event()
        self._outgoing: queue.SimpleQueue[exchange_pb2.JoinRequest | None] = queue.SimpleQueue()
        self.announce(*self.drafters)
        self._outgoing.put(exchange_pb2.JoinRequest(use_stream=True))
        self._channel = grpc.insecure_channel(address)
        stub: Any = exchange_pb2_grpc.DraftExchangeServiceStub(self._channel)
        self._call = stub.Join(iter(self._outgoing.get, None), metadata=metadata)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Service:
        assert self.listed.wait(10), self.error
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def announce(self, *drafters: drafter_pb2.DrafterInfo) -> None:
        """Send a list of drafters; the first is the default."""
        listed = exchange_pb2.DrafterList(drafters=drafters, default_drafter=drafters[0].name)
        self._outgoing.put(exchange_pb2.JoinRequest(drafters=listed))

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()
        self.ended.wait(10)

    def _read(self) -> None:
        try:
            for message in self._call:
                for answer in self._answers(message):
                    self._outgoing.put(answer)
                if message.lists:
                    self.listed.set()
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()

    def _answers(self, message: exchange_pb2.JoinResponse) -> Iterator[exchange_pb2.JoinRequest]:
        for opening in message.open:
            self.opened.append(opening)
            self.texts[opening.sequence] = list(opening.tokens)
            answer = exchange_pb2.SequenceOpened(
                sequence=opening.sequence, drafter=opening.drafter, version="1", max_nodes=8
            )
            yield exchange_pb2.JoinRequest(opened=[answer])
        self.closed.update(message.closed)
        for asked in message.rounds:
            self.rounds += 1
            text = self.texts[asked.sequence]
            text += asked.new_tokens
            assert len(text) == asked.total_length
            tree = self.draft(text, asked)
            if tree is not None:
                drafted = exchange_pb2.DraftedTree(
                    sequence=asked.sequence, round=asked.round, tree=tree
                )
                yield exchange_pb2.JoinRequest(trees=[drafted])
