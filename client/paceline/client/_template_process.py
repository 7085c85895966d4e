"""Chat templates, rendered in a process with limits of time and memory.

A template is a program that came with the model. Its sandbox keeps it from files and from the
interpreter, but not from endless loops, nor from texts of any length, and nothing in a Python
process ends them. The kernel ends another process.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from . import _templates
from ._chat import conversation, refused
from ._templates import HEAD, Conversation, Prompt, TemplateRefusal
from ._text import Model

_SECONDS = 5.0
"""Longest computation for one prompt. Unit: seconds of processor time."""
_MEMORY = 1 << 30
"""Memory of the process. Unit: bytes."""


class TemplateProcess:
    """Renders conversations one after the other. The process starts with the first of them, and
    again after one that exceeded its limits."""

    def __init__(self, seconds: float = _SECONDS, memory: int = _MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"process {self._process.pid}"
        return f"<TemplateProcess {state}>"

    def render(self, model: Model, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """As `render_chat`: call it in a thread. Raises InvalidRequestError also if the template
        exceeds its limits."""
        try:
            return self._render(conversation(model, messages, **options))
        except TemplateRefusal as refusal:
            raise refused(refusal) from None

    def _render(self, conversation: Conversation) -> Prompt:
        try:
            request = json.dumps({**vars(conversation), "seconds": self._seconds}).encode()
        except RecursionError:
            raise TemplateRefusal("a message or a tool is nested too deeply") from None
        with self._lock:
            response = self._answer(request)
        if response is None:
            raise TemplateRefusal(
                f"the chat template computes for more than {self._seconds:g} s, or needs more than "
                f"{self._memory >> 20} MiB of memory"
            )
        if "error" in response:
            raise TemplateRefusal(response["error"], response["param"])
        return Prompt(response["text"], response["changes"])

    def _answer(self, request: bytes) -> dict[str, str] | None:
        """The response to a request; None: the process has ended."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(HEAD.pack(len(request)) + request)
            process.stdin.flush()
            (size,) = HEAD.unpack(process.stdout.read(HEAD.size))
            response: dict[str, str] = json.loads(process.stdout.read(size))
        except (OSError, ValueError, struct.error):
            self._end()
            return None
        return response

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(_templates.__file__)), str(self._memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()  # ends what it renders, and so the wait for the lock
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):
                process.communicate()
