"""The gRPC status of each exception of the verifier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.service import ServiceError
from paceline.verifier.engine.job import SequenceClosed, StepFailed
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.store import CacheNotFound, StoreFull

RETRY_SECONDS = 0.5
"""Delay that clients are advised to wait for KV memory. Generations take seconds."""


@contextmanager
def as_service_errors() -> Iterator[None]:
    """Convert exceptions of the store and the engine to errors of an RPC."""
    try:
        yield
    except (CacheNotFound, SequenceClosed) as error:
        raise cache_not_found() from error
    except StoreFull as error:
        retry = None if error.forever else RETRY_SECONDS
        raise ServiceError.resource_exhausted("KV_FULL", str(error), retry) from error
    except OutOfMemory as error:
        raise ServiceError.resource_exhausted("KV_FULL", str(error), RETRY_SECONDS) from error
    except StepFailed as error:
        raise ServiceError.internal("STEP_FAILED", str(error)) from error


def grant_not_found() -> ServiceError:
    """The same error for unknown, expired and released grants."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "no cache has this read grant: it was released, its lease expired, or the verifier was "
        "restarted; attach again with the grant of the cache in use",
    )


def cache_not_found() -> ServiceError:
    """The same error for unknown, expired and released handles, and those of other clients."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "you have no cache with this handle: it was released, its lease expired, or the verifier "
        "was restarted; create one with the prompt and the tokens emitted so far",
    )
