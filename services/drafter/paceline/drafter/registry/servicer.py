"""The registry over gRPC."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from paceline.drafter.methods.base import LoadError
from paceline.drafter.recordings import Recorder
from paceline.drafter.registry.registry import Registry
from paceline.drafter.registry.trial import TrialSettings
from paceline.drafter.spec import DrafterSpec
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

logger = logging.getLogger("paceline.drafter")


class DrafterRegistryServicer(drafter_pb2_grpc.DrafterRegistryServiceServicer):
    """Lists, loads, activates and unloads versions while text streams."""

    def __init__(self, registry: Registry, recorder: Recorder | None = None) -> None:
        self._registry = registry
        self._recorder = recorder

    async def ListDrafters(
        self,
        request: drafter_pb2.ListDraftersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> drafter_pb2.ListDraftersResponse:
        """All versions, the default name, and the trials."""
        return drafter_pb2.ListDraftersResponse(
            drafters=[version.info() for version in self._registry.versions()],
            default_drafter=self._registry.default_name,
            trials=[trial.info(name) for name, trial in self._registry.trials()],
            records_texts=self._recorder is not None and self._recorder.recording,
        )

    async def LoadDrafter(
        self,
        request: drafter_pb2.LoadDrafterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> drafter_pb2.LoadDrafterResponse:
        """Loads in a thread; answers when the version can be used."""
        with _load_errors():
            spec = DrafterSpec(
                name=request.name,
                method=request.method,
                folder=Path(request.folder) if request.folder else None,
                options=dict(request.options),
                version=request.version,
            )
            version = await self._registry.load(spec, activate=request.activate)
        await self._registry.saved()
        logger.info(
            "drafter loaded",
            extra={"drafter": spec.name, "version": version.version, "method": spec.method},
        )
        return drafter_pb2.LoadDrafterResponse(drafter=version.info())

    async def ActivateDrafter(
        self,
        request: drafter_pb2.ActivateDrafterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> drafter_pb2.ActivateDrafterResponse:
        """Shifts new generations to a version, perhaps on trial."""
        # float32 on the wire: rounded, so that 0.1 is 0.1 again.
        share = round(request.traffic_share, 6) or 1.0
        trial = _trial_settings(request) if request.HasField("trial") else None
        version = self._registry.activate(request.name, request.version, share, trial)
        await self._registry.saved()
        logger.info(
            "drafter activated",
            extra={
                "drafter": request.name,
                "version": version.version,
                "share": version.share,
                "on_trial": version.on_trial,
            },
        )
        return drafter_pb2.ActivateDrafterResponse(drafter=version.info())

    async def UnloadDrafter(
        self,
        request: drafter_pb2.UnloadDrafterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> drafter_pb2.UnloadDrafterResponse:
        """Removes versions; those in use go with their last stream."""
        unloaded = self._registry.unload(request.name, request.version, force=request.force)
        await self._registry.saved()
        logger.info(
            "drafter unloading",
            extra={"drafter": request.name, "version": request.version, "done": unloaded},
        )
        return drafter_pb2.UnloadDrafterResponse(unloaded=unloaded)


def _trial_settings(request: drafter_pb2.ActivateDrafterRequest) -> TrialSettings:
    try:
        return TrialSettings.from_proto(request.trial)
    except ValueError as error:
        raise ServiceError.invalid_argument("INVALID_TRIAL", str(error)) from error


@contextmanager
def _load_errors() -> Iterator[None]:
    try:
        yield
    except LoadError as error:
        raise ServiceError.invalid_argument(error.reason, str(error)) from error
