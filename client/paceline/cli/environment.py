"""What a command needs of its process, wherever it was started: standard streams, open files, no
proxy for this machine."""

from __future__ import annotations

import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.cli.command import CommandError

MIN_FILES = 64
"""Files that a command must be able to open: the event loop, gRPC and libraries need about 40. With
too few of them gRPC ends the process, or waits for ever."""

_STREAMS = ("stdin", "stdout", "stderr")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_DIRECT = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1")
"""Hosts of this machine, in the forms that libraries know."""


@contextmanager
def prepared() -> Iterator[None]:
    """A body whose standard streams are open and print any text, and without proxies for addresses
    of this machine. What it prints is flushed at the end. Raises BrokenPipeError if nobody reads it
    any more; OSError if it cannot be written."""
    _open_streams()
    _replace_characters()
    _bypass_proxies()
    _set_home()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # it is closed
                stream.flush()


def require_files() -> None:
    """Let this process open `MIN_FILES` files. Raises CommandError if its limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(MIN_FILES, hard), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        raise CommandError(
            f"this process may open {soft} files, and needs at least {MIN_FILES}: raise `ulimit -n`"
        )


def drop_output() -> None:
    """Drop what is not printed yet and cannot be: Python else tries again at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            try:
                stream.flush()
            except OSError:
                os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _open_streams() -> None:
    """Open the null device in place of closed standard streams. A file that is opened later would
    else get a stream's number: output would be written into it, and libuv aborts."""
    for number, name in enumerate(_STREAMS):
        file: int | str = number
        try:
            os.fstat(number)
            file = os.devnull  # another file, where Python has found the stream closed
        except OSError:
            # The lowest free number is the stream's, as those below are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode, owned = "w" if number else "r", file is not number
            stream = open(file, mode, encoding="utf-8", closefd=owned)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


def _replace_characters() -> None:
    """Print a question mark for a character that the encoding of the output lacks, and read one for
    bytes that are no character."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _set_home() -> None:
    """Give a user without a home folder one that cannot be made: nothing is cached then."""
    try:
        Path.home()
    except RuntimeError:  # no HOME, and no entry in the list of users, as in some containers
        os.environ["HOME"] = "/nonexistent"


def _bypass_proxies() -> None:
    """Let libraries use no proxy for addresses of this machine. Channels of this project do so by
    themselves: this is for exporters and HTTP clients."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    variables = {"no_proxy": given, **{k: v for k, v in os.environ.items() if k == "no_grpc_proxy"}}
    for name, value in variables.items():
        if "*" not in value:
            os.environ[name] = ",".join([*filter(None, [value]), *_DIRECT])
