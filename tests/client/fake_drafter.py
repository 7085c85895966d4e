"""A drafter with faults for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.v1 import drafter_pb2, drafter_pb2_grpc, tree_pb2

from .fake_target import continuation
from .statuses import status


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts with the fake target's function; `mode` selects a fault."""

    def __init__(self) -> None:
        self.mode = "good"
        self.may_attach, self.may_draft = asyncio.Event(), asyncio.Event()
        self.may_attach.set()
        self.may_draft.set()
        self.attaches: list[drafter_pb2.DraftAttach] = []
        self.rounds: list[drafter_pb2.DraftRound] = []
        self.asked = 0
        self.out_of_step = 0

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        text: list[int] = []
        seed = 0
        async for request in requests:
            if request.HasField("attach"):
                self.attaches.append(request.attach)
                if self.mode == "refusing":
                    await context.abort_with_status(
                        status(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TARGET", "not for it")
                    )
                text = list(request.attach.tokens)
                seed = request.attach.sampling.seed
                name = request.attach.drafter or "fake"
                await self.may_attach.wait()
                yield drafter_pb2.DraftResponse(
                    attached=drafter_pb2.DraftAttached(drafter=name, version="1", max_nodes=32)
                )
                continue
            self.asked += 1
            self.rounds.append(request.round)
            ask = request.round
            text.extend(ask.new_tokens)
            self.out_of_step += len(text) != ask.total_length
            if self.mode == "dying" and self.asked % 3 == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
            if self.mode == "silent":
                continue
            await self.may_draft.wait()
            if self.mode == "stray":
                stray = tree_pb2.TokenTree(tokens=[1, 2], parents=[-1])
                yield drafter_pb2.DraftResponse(
                    tree=drafter_pb2.DraftTree(round_id=ask.round_id + 100, tree=stray)
                )
            tree = self.tree(text, seed, ask.node_budget)
            yield drafter_pb2.DraftResponse(
                tree=drafter_pb2.DraftTree(
                    round_id=ask.round_id, tree=tree, draft_us=10, version="1"
                )
            )

    def tree(self, text: list[int], seed: int, budget: int) -> tree_pb2.TokenTree:
        """A chain of 4 correct tokens, each with a wrong sibling, or a tree of the mode."""
        chain = continuation(text, 4, seed)
        match self.mode:
            case "empty":
                return tree_pb2.TokenTree()
            case "wrong":
                return tree_pb2.TokenTree(tokens=[1] * 8, parents=[-1] * 8)
            case "huge":
                return tree_pb2.TokenTree(tokens=[1] * 10_000, parents=[-1] * 10_000)
            case "lengths":
                return tree_pb2.TokenTree(tokens=chain, parents=[-1])
            case "forward":
                return tree_pb2.TokenTree(tokens=chain, parents=[1, 2, 3, 4])
        tokens, parents, last = [], [], -1
        for token in chain:
            tokens += [255, token]
            parents += [last, last]
            last = len(tokens) - 1
        return tree_pb2.TokenTree(tokens=tokens[:budget], parents=parents[:budget])
