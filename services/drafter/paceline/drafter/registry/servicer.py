"""DrafterRegistryService: the registry over gRPC."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from paceline.drafter.methods.base import LoadError
from paceline.drafter.recordings import Recorder
from paceline.drafter.registry.canary import CanarySettings
from paceline.drafter.registry.registry import Registry
from paceline.drafter.spec import DrafterSpec
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

logger = logging.getLogger("paceline.drafter")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DrafterRegistryServicer(drafter_pb2_grpc.DrafterRegistryServiceServicer):
    """Lists, loads, activates and unloads versions while generations run.

    A change is on disk before its response is sent.
    """

    def __init__(self, registry: Registry, recorder: Recorder | None = None) -> None:
        self._registry = registry
        self._recorder = recorder

    async def ListDrafters(
        self, request: drafter_pb2.ListDraftersRequest, context: Context
    ) -> drafter_pb2.ListDraftersResponse:
        """Lists all versions and canaries."""
        return drafter_pb2.ListDraftersResponse(
            drafters=[version.info() for version in self._registry.versions()],
            default_drafter=self._registry.default_name,
            canaries=self._registry.canaries(),
            records_texts=self._recorder is not None and self._recorder.recording,
        )

    async def LoadDrafter(
        self, request: drafter_pb2.LoadDrafterRequest, context: Context
    ) -> drafter_pb2.LoadDrafterResponse:
        """Loads a version; responds when it can be used."""
        try:
            spec = DrafterSpec(
                name=request.name,
                method=request.method,
                folder=Path(request.folder) if request.folder else None,
                options=dict(request.options),
                version=request.version,
            )
            version = await self._registry.load(spec, activate=request.activate)
        except LoadError as error:
            raise ServiceError.invalid_argument(error.reason, str(error)) from error
        await self._registry.saved()
        logger.info(
            "drafter loaded",
            extra={"drafter": spec.name, "version": version.version, "method": spec.method},
        )
        return drafter_pb2.LoadDrafterResponse(drafter=version.info())

    async def ActivateDrafter(
        self, request: drafter_pb2.ActivateDrafterRequest, context: Context
    ) -> drafter_pb2.ActivateDrafterResponse:
        """Gives a version a share of new generations, for a canary too."""
        canary = None
        if request.HasField("canary"):
            try:  # zeros stand for the defaults
                canary = CanarySettings(**{f.name: v for f, v in request.canary.ListFields()})
            except ValueError as error:
                raise ServiceError.invalid_argument("INVALID_CANARY", str(error)) from error
        share = request.traffic_share or 1.0
        version = self._registry.activate(request.name, request.version, share, canary)
        await self._registry.saved()
        logger.info(
            "drafter activated",
            extra={
                "drafter": request.name,
                "version": version.version,
                "share": version.share,
                "canary": version.canary,
            },
        )
        return drafter_pb2.ActivateDrafterResponse(drafter=version.info())

    async def UnloadDrafter(
        self, request: drafter_pb2.UnloadDrafterRequest, context: Context
    ) -> drafter_pb2.UnloadDrafterResponse:
        """Removes versions; those in use are freed with their last stream."""
        unloaded = self._registry.unload(request.name, request.version, force=request.force)
        await self._registry.saved()
        logger.info(
            "drafter unloading",
            extra={"drafter": request.name, "version": request.version, "done": unloaded},
        )
        return drafter_pb2.UnloadDrafterResponse(unloaded=unloaded)
