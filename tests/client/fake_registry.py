"""The registry of a drafter service with faults for tests."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from paceline.v1 import drafter_pb2, drafter_pb2_grpc

from .fake_verifier import FakeVerifier, joined
from .statuses import status


class FakeRegistry(drafter_pb2_grpc.DrafterRegistryServiceServicer):
    """Joins fake verifiers when it is asked to; `mode` selects a fault.

    Args:
        verifiers: The verifiers that can be joined, by address.
    """

    def __init__(self, verifiers: dict[str, FakeVerifier]) -> None:
        self._verifiers = verifiers
        self.mode = "good"
        self.names = ["fake"]
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ListDrafters(self, request: Any, context: Any) -> Any:
        return drafter_pb2.ListDraftersResponse(
            drafters=[drafter_pb2.DrafterInfo(name=name, version="1") for name in self.names],
            default_drafter=self.names[0],
        )

    async def JoinVerifier(self, request: Any, context: Any) -> Any:
        self.asked.append(request.address)
        await self.may_answer.wait()
        if self.mode == "refusing":
            await context.abort_with_status(
                status(grpc.StatusCode.FAILED_PRECONDITION, "VERIFIER_NOT_ALLOWED", "not allowed")
            )
        self._verifiers[request.address].joined.append(joined(*self.names))
        link = drafter_pb2.VerifierLink(address=request.address, carrier="socket")
        return drafter_pb2.JoinVerifierResponse(verifier=link)
