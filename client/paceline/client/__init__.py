"""The Paceline client: generates text with verifiers and drafter services. Needs no torch."""

import os
from dataclasses import is_dataclass

# Before gRPC is imported: its own handlers of forks, which do not know asyncio, end some of them by
# SIGSEGV. A fork of a process that used a client gets an error of its calls instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from ._chat import TemplateProcess, render_chat
from ._client import Client, SyncClient
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
    rpc_errors,
)
from ._fleet import VerifierStatus
from ._generation import Generation, GenerationResult
from ._options import (
    ChatOptions,
    DraftOptions,
    GenerationOptions,
    RetryOptions,
    TlsOptions,
    add_field_docs,
    checked_prompt,
    field_docs,
    user_cache_dir,
)
from ._receipt import NumericsRule, Receipt, ReceiptCheck
from ._stats import RoundStats, SourceStats, Stats, Usage
from ._templates import Prompt
from ._text import Chunk, Detokenizer, Model, TextCodec, TokenLogprob, VerifiedTree, undecided
from ._transport import Connections, addresses_of, parse_addresses

__all__ = [
    "AuthError",
    "CapacityError",
    "ChatOptions",
    "Chunk",
    "Client",
    "ClientClosedError",
    "Connections",
    "DeadlineError",
    "Detokenizer",
    "DraftOptions",
    "Generation",
    "GenerationOptions",
    "GenerationResult",
    "InvalidRequestError",
    "Model",
    "NotFoundError",
    "NumericsRule",
    "PacelineError",
    "PreconditionError",
    "Prompt",
    "Receipt",
    "ReceiptCheck",
    "RetryOptions",
    "RoundStats",
    "ServerError",
    "SourceStats",
    "Stats",
    "SyncClient",
    "TargetChangedError",
    "TemplateProcess",
    "TextCodec",
    "TlsOptions",
    "TokenLogprob",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "VerifiedTree",
    "VerifierStatus",
    "addresses_of",
    "checked_prompt",
    "field_docs",
    "parse_addresses",
    "render_chat",
    "rpc_errors",
    "undecided",
    "user_cache_dir",
]

for _exported in [globals()[name] for name in __all__]:
    if isinstance(_exported, type) and is_dataclass(_exported):
        add_field_docs(_exported)
del add_field_docs, is_dataclass


def __dir__() -> list[str]:
    return __all__
