"""The Paceline client: generates text with a verifier and a drafter. Needs no torch."""

from ._client import Client
from ._errors import (
    AuthError,
    CapacityError,
    ClientClosedError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PreconditionError,
    ServerError,
    TargetChangedError,
    UnavailableError,
    UnimplementedError,
)
from ._generation import Generation, GenerationResult
from ._members import VerifierStatus
from ._mock import MockTransport
from ._model import Model
from ._options import DraftOptions, RetryOptions, TlsOptions, user_cache_dir
from ._output import Chunk, TokenLogprob, VerifiedTree
from ._stats import RoundStats, Stats, Usage
from ._sync import SyncClient
from ._text import Detokenizer, TextCodec
from ._transport import Stream, Transport

__all__ = [
    "AuthError",
    "CapacityError",
    "Chunk",
    "Client",
    "ClientClosedError",
    "DeadlineError",
    "Detokenizer",
    "DraftOptions",
    "Generation",
    "GenerationResult",
    "InvalidRequestError",
    "MockTransport",
    "Model",
    "NotFoundError",
    "PacelineError",
    "PreconditionError",
    "RetryOptions",
    "RoundStats",
    "ServerError",
    "Stats",
    "Stream",
    "SyncClient",
    "TargetChangedError",
    "TextCodec",
    "TlsOptions",
    "TokenLogprob",
    "Transport",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "VerifiedTree",
    "VerifierStatus",
    "user_cache_dir",
]
