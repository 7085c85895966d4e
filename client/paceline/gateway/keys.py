"""API keys and their limits."""

from __future__ import annotations

import hmac
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.service.options import OptionsError

from .errors import ApiError


class ApiKey(BaseModel):
    """A key and its limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    """Name in the access log."""
    key: str = Field(min_length=1, repr=False)
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Generating requests; None: no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Tokens of prompts and texts; None: no limit."""
    priority: Literal["normal", "low"] = "normal"
    """"low" is refused while half of `--max-requests` are in flight."""

    @field_validator("key")
    @classmethod
    def _fits_a_header(cls, key: str) -> str:
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key has characters that are invalid in HTTP headers")
        return key


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Keys of a JSON file: an array of objects with the fields of `ApiKey`.

    Raises:
        OptionsError: The file is not that, or a key occurs twice.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise OptionsError(f"{path} must contain an array of keys, such as [{{...}}]")
        keys = tuple(ApiKey.model_validate(entry) for entry in entries)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise OptionsError(f"{path}: {where}: {found['msg']}") from None
    except (OSError, ValueError) as error:
        raise OptionsError(f"cannot read API keys from {path}: {error}") from None
    if not keys or len({each.key for each in keys}) < len(keys):
        raise OptionsError(f"{path} must contain at least one key, and none of them twice")
    return keys


@dataclass
class _Bucket:
    """A token bucket of one minute. It may be overdrawn, since a text's length is not known."""

    per_minute: float
    clock: Callable[[], float]
    level: float = field(init=False)
    seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.seen = self.per_minute, self.clock()

    def wait(self) -> float:
        """Time until something may be taken. Unit: seconds."""
        now = self.clock()
        self.level = min(self.per_minute, self.level + (now - self.seen) * self.per_minute / 60)
        self.seen = now
        return max(0.0, (min(1.0, self.per_minute) - self.level) * 60 / self.per_minute)


class Caller:
    """The holder of a key, and what is left of its limits.

    Args:
        key: The key; None: everybody, without limits.
        clock: Seconds, never going backwards.
    """

    def __init__(self, key: ApiKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name if key is not None else "-"
        self._low = key is not None and key.priority == "low"
        limits = {
            "requests": key.requests_per_minute if key is not None else None,
            "tokens": key.tokens_per_minute if key is not None else None,
        }
        self._buckets = {
            what: _Bucket(limit, clock) for what, limit in limits.items() if limit is not None
        }

    def admit(self, in_flight: int, places: int) -> None:
        """Takes a request from its limits.

        Args:
            in_flight: Requests of all callers in flight.
            places: Most requests in flight.

        Raises:
            ApiError: A limit is reached, or the gateway is full.
        """
        if in_flight >= (places / 2 if self._low else places):
            raise _too_many(f"{in_flight} requests are in flight", 1.0)
        for what, bucket in self._buckets.items():
            wait = bucket.wait()
            if wait > 0:
                limit = f"the limit of this key is {bucket.per_minute:g} {what} a minute"
                raise _too_many(limit, wait)
        if "requests" in self._buckets:
            self._buckets["requests"].level -= 1

    def spend(self, tokens: int) -> None:
        """Takes tokens from its limits."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].level -= tokens


def _too_many(reason: str, wait: float) -> ApiError:
    seconds = math.ceil(wait)
    return ApiError(
        429,
        f"{reason}: retry in {seconds} s",
        kind="rate_limit_error",
        code="too_many_requests",
        headers={"Retry-After": str(seconds)},
    )


class Keyring:
    """Finds the caller of a request by its `Authorization` header.

    Args:
        keys: All keys; empty: no key is needed.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._callers = {f"Bearer {each.key}".encode(): Caller(each) for each in keys}
        self._anybody = Caller(None)

    def find(self, authorization: str) -> Caller:
        """The caller.

        Raises:
            ApiError: The key is missing or wrong.
        """
        if not self._callers:
            return self._anybody
        given = authorization.encode(errors="replace")
        # All are compared, so that the time tells nothing about them.
        found = [caller for key, caller in self._callers.items() if hmac.compare_digest(given, key)]
        if not found:
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[0]
