"""Options, checked when they are created."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import grpc

from paceline.checks import Checked, ParameterError, as_json, checked, exactly, items, require
from paceline.sampling import Sampling, token_ids

from ._errors import InvalidRequestError

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


MAX_STOPS = 1024
"""Maximum number of stop strings, and of stop tokens."""

_FIELD = re.compile(r'^    (\w+): [^\n]*(?:\n    """(.*?)""")?$', re.MULTILINE | re.DOTALL)


@contextmanager
def invalid_requests() -> Iterator[None]:
    """Raises InvalidRequestError for an argument that is refused inside; `metadata["param"]`."""
    try:
        yield
    except ParameterError as error:
        param = {"param": error.parameter}
        raise InvalidRequestError(str(error), metadata=param) from None


def checked_prompt(prompt: object) -> str | list[int]:
    """Return a prompt as `Client.generate` takes it: text, or token ids, also of numpy or torch.
    Raises InvalidRequestError if it is of another type, or empty."""
    expected = "a non-empty text or token ids"
    with invalid_requests():
        if exactly(prompt, str) is not None:
            value: str | list[int] = checked("prompt", prompt, str, expected)
        else:
            value = token_ids("prompt", prompt, expected)
        if not value:
            raise ParameterError.unexpected("prompt", expected, prompt)
        return value


@dataclass(frozen=True)
class TlsOptions(Checked):
    """TLS for the connections to the services. Files are paths, as text or `Path`."""

    ca: Path | str | None = None
    """PEM file of the authority that signed the services' certificates; None: the system's."""
    cert: Path | str | None = None
    """PEM file of the client's own certificate, for mutual TLS."""
    key: Path | str | None = None
    """PEM file of the key of `cert`."""
    server_name: str | None = None
    """Expected name in the certificate, if it is not the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the channel credentials. Raises InvalidRequestError if a file cannot be read."""
        files = (self.ca, self.key, self.cert)
        try:
            contents = [Path(file).expanduser().read_bytes() if file else None for file in files]
        except (OSError, ValueError, RuntimeError) as error:  # of a user who is unknown
            raise InvalidRequestError(f"cannot read a TLS file: {error}") from error
        return grpc.ssl_channel_credentials(*contents)

    def __post_init__(self) -> None:
        with invalid_requests():
            for name in ("ca", "cert", "key"):
                require(name, getattr(self, name), Path | str | None, "the path of a PEM file")
            self._take("server_name", str, "a host's name", optional=True)
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError("mutual TLS needs both cert and key: give both, or neither")


@dataclass(frozen=True)
class RetryOptions(Checked):
    """How long and how often to try again when the verifier cannot be reached or is full."""

    budget: float = 30.0
    """Longest time without progress before the error is raised. Unit: seconds."""
    first_delay: float = 0.05
    """Delay before the second attempt; doubles with each attempt. Unit: seconds."""
    max_delay: float = 2.0
    """Longest delay between two attempts. Unit: seconds."""

    def __post_init__(self) -> None:
        seconds = "a finite number of seconds > 0"
        with invalid_requests():
            self._take("budget", float, "a number of seconds >= 0", lambda x: x >= 0)
            self._take("max_delay", float, seconds, lambda x: 0 < x < math.inf)
            upper = f"{seconds} and <= max_delay"
            self._take("first_delay", float, upper, lambda x: 0 < x <= self.max_delay)


@dataclass(frozen=True)
class DraftOptions(Checked):
    """When the verifier drafts, and how long it waits for a tree."""

    timeout: float | None = None
    """Longest wait for a tree. None: a multiple of the drafter's mean time, chosen by the verifier.
    Unit: seconds."""
    adaptive: bool = True
    """Draft only where that increases the speed. False: draft in every step, to measure drafting.
    """
    isolated: bool = False
    """Draft without earlier texts of the caller, and keep these out of later drafts. To measure
    drafting of texts that are new."""

    def __post_init__(self) -> None:
        expected = "a number of seconds > 0 and < 2**22"  # Milliseconds in 32 bits.
        with invalid_requests():
            self._take("timeout", float, expected, lambda x: 0 < x < 2**22, optional=True)
            self._take("adaptive", bool, "True or False")


class HasHandle(Protocol):
    """What has a cache, such as a `Generation`."""

    @property
    def handle(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampling):
    """The keyword arguments of `Client.generate`: sampling parameters, and these.

    Raises:
        InvalidRequestError: One is of another type or out of its range. `metadata["param"]` is it.
    """

    max_new_tokens: int = 256
    """Maximum number of tokens to emit."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, before the first one that is complete."""
    stop_token_ids: Sequence[int] = ()
    """Ids of tokens that end the generation, besides end-of-sequence tokens."""
    special_tokens: Sequence[str] = ()
    """Special tokens that the text has where they were emitted, such as "[TOOL_CALLS]"; all others
    are left out of it."""
    ignore_eos: bool = False
    """Continue after end-of-sequence tokens."""
    logprobs: bool | int = False
    """True returns each token's log-probability; n > 0 also the n likeliest tokens."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token but the first, and of the n likeliest tokens
    at its position, n >= 0."""
    drafter: str | None = None
    """Name of the drafter, or `NAME@VERSION` for a version, active or not; "none" turns drafting
    off; "local" is what the verifier guesses by itself. None: the verifier's default drafter, and
    its own guesses."""
    isolated: bool = False
    """Draft without other texts, and keep this one out of later drafts, to measure drafting."""
    user: str = ""
    """Whose text it is, if this client speaks for several users: KV and drafts of earlier texts are
    reused for the same user only. At most 256 characters; empty: the client's own."""
    deadline: float | None = None
    """Longest time for the whole generation. Unit: seconds."""
    max_nodes: int | None = None
    """Maximum number of drafted tokens per step. None: the limit of the services."""
    parent: HasHandle | bytes | None = None
    """A generation (or its handle) with a cache: the common prefix of its text and this prompt is
    not computed again."""
    keep_cache: bool = False
    """Keep the cache after the end, as a `parent`, until `aclose`."""
    on_prefill: Callable[[int, int], None] | None = None
    """Called with (tokens prefilled, all tokens) during the prefill."""

    def __post_init__(self) -> None:
        with invalid_requests():
            super().__post_init__()
            self._check()

    def _check(self) -> None:
        take, scores = self._take, "an integer in [0, 20]"
        take("max_new_tokens", int, "an integer in [1, 2**32)", lambda x: 0 < x < 2**32)
        take("max_nodes", int, "an integer in [1, 2**32)", lambda x: 0 < x < 2**32, optional=True)
        take("ignore_eos", bool, "True or False")
        take("keep_cache", bool, "True or False")
        take("isolated", bool, "True or False")
        take("user", str, "a text of at most 256 characters", lambda x: len(x) <= 256)
        flag = exactly(self.logprobs, bool)
        if flag is None:
            take("logprobs", int, f"True, False or {scores}", lambda x: 0 <= x <= 20)
        else:
            self._keep("logprobs", flag)
        take("prompt_logprobs", int, scores, lambda x: 0 <= x <= 20, optional=True)
        take("drafter", str, "the name of a drafter", lambda x: x != "", optional=True)
        seconds = "a finite number of seconds > 0"
        take("deadline", float, seconds, lambda x: 0 < x < math.inf, optional=True)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        texts = [
            checked("stop", stop, str, "a non-empty text", lambda x: x != "", f"[{index}]")
            for index, stop in enumerate(items("stop", stops, "a text or texts", MAX_STOPS))
        ]
        self._keep("stop", tuple(texts))
        given = items("special_tokens", self.special_tokens, "a list of texts", MAX_STOPS)
        names = [
            checked("special_tokens", name, str, "a text", at=f"[{index}]")
            for index, name in enumerate(given)
        ]
        self._keep("special_tokens", tuple(names))
        ids = token_ids("stop_token_ids", self.stop_token_ids, "token ids", MAX_STOPS)
        self._keep("stop_token_ids", ids)
        handle = getattr(self.parent, "handle", self.parent)
        require("parent", handle, bytes | None, "a generation or its handle")
        if not (self.on_prefill is None or callable(self.on_prefill)):
            raise ParameterError.unexpected("on_prefill", "a function", self.on_prefill)

    @property
    def parent_handle(self) -> bytes:
        """Handle of the parent's cache; empty: none."""
        if self.parent is None or isinstance(self.parent, bytes):
            return self.parent or b""
        return self.parent.handle


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    """The keyword arguments of `Client.chat`: `Client.generate`'s, and these."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call, in the form of OpenAI's API."""
    chat_template: str | None = None
    """Jinja template, or the name of one of the model's; None: the model's own."""

    def _check(self) -> None:
        super()._check()
        self._keep("tools", items("tools", self.tools, "a list of tools", MAX_STOPS))
        for index, tool in enumerate(self.tools):
            if not isinstance(tool, Mapping):
                expected = "a mapping in the form of OpenAI's API"
                raise ParameterError.unexpected("tools", expected, tool, f"[{index}]")
        as_json("tools", self.tools)
        self._take("chat_template", str, "a Jinja template", optional=True)


def takes(
    options: Callable[P, GenerationOptions],
) -> Callable[[Callable[Concatenate[Any, A, ...], T]], Callable[Concatenate[Any, A, P], T]]:
    """Decorate a method `(self, prompt, **options)` with the signature and the documentation of
    its options.

    Type checkers, editors and `help` show all of them, without a second list. An unknown one is a
    TypeError that names the method, and the option that was perhaps meant.
    """
    return lambda method: _with_parameters(method, 2, options)


def takes_all(
    of: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Decorate a method `(self, *args, **options)` with the signature of a class."""
    return lambda method: _with_parameters(method, 1, of)


def _with_parameters(method: Any, leading: int, options: Callable[..., Any]) -> Any:
    """Give the method a signature: its first `leading` parameters, then one for each option."""
    kept = list(signature(method).parameters.values())[:leading]
    parameters = [*kept, *signature(options).parameters.values()]
    names = [parameter.name for parameter in parameters]

    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        for name in given.keys() - set(names):
            close = get_close_matches(name, names, 1, cutoff=0.5)
            raise TypeError(
                f"{method.__qualname__}() got an unexpected keyword argument {name!r}"
                + (f"; did you mean {close[0]}?" if close else "")
            )
        return method(*args, **given)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    if isinstance(options, type) and is_dataclass(options):
        call.__doc__ = _with_fields(method.__doc__ or "", options)
    return call


def _with_fields(doc: str, kind: type) -> str:
    """Return a method's docstring with its options, a dataclass's fields, among the arguments."""
    types = {entry.name: entry.type for entry in fields(kind)}
    entries = "\n".join(
        fill(
            re.sub(r"\s+", " ", f"{name}: {types[name]}. {text}"),
            width=96,
            initial_indent="    ",
            subsequent_indent="        ",
        )
        for name, text in field_docs(kind).items()
    )
    text = inspect.cleandoc(doc)
    before, mark, after = text.partition(f"    options: see `{kind.__name__}`.")
    return f"{before}{entries}{after}" if mark else f"{text}\n\nArgs:\n{entries}"


def field_docs(kind: type) -> dict[str, str]:
    """Return what the source says under each field of a dataclass; empty where it says nothing."""
    texts = {entry.name: "" for entry in fields(kind)}
    for base in reversed(kind.__mro__):
        with suppress(OSError, TypeError, IndexError):  # no source, or built in
            source = inspect.getsource(sys.modules[base.__module__])
            body = re.split(rf"^class {base.__name__}\b", source, maxsplit=1, flags=re.M)[1]
            docs = _FIELD.findall(body.partition("\n\n\n")[0])
            texts |= {name: text for name, text in docs if name in texts}
    return texts


def add_field_docs(kind: type) -> None:
    """Add `field_docs` to the docstring of a dataclass, for `help`."""
    entries = [f"    {name}: {text}".rstrip() for name, text in field_docs(kind).items()]
    kind.__doc__ = "\n".join([f"{inspect.cleandoc(kind.__doc__ or '')}\n\nAttributes:", *entries])


def user_cache_dir() -> Path:
    """Return the user's cache folder of this project. Of a user without a home folder it is one
    that cannot be made."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no entry in the list of users, as in some containers
        home = Path("/nonexistent")
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "paceline"
