"""Errors that end a command with a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """Ends a command: `main` prints the message and returns `code`.

    Attributes:
        code: Exit code; 2 for bad arguments, 1 for a service that failed.
    """

    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(str(message))
        self.code = code


@contextmanager
def exit_with(code: int, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into a CommandError with this exit code."""
    try:
        yield
    except errors as error:
        raise CommandError(error, code) from error
