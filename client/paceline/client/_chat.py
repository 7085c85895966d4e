"""Chat templates: from messages to a prompt."""

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

from paceline.checks import ParameterError, as_json, checked, exactly, items
from paceline.sampling import MAX_TOKEN_IDS

from . import _templates
from ._errors import InvalidRequestError
from ._options import invalid_requests
from ._templates import HEAD, Conversation, Prompt, TemplateRefusal
from ._text import Model

_SECONDS = 5.0  # longest computation for one prompt, in seconds of processor time
_MEMORY = 1 << 30  # of the process that renders, in bytes


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages as `render_chat` takes them. Raises InvalidRequestError if they are not a
    sequence of mappings with a role and values of JSON."""
    expected = "a message: a mapping with the text role, and content, a text or a list of parts"
    with invalid_requests():
        listed = items("messages", messages, "a list of messages", MAX_TOKEN_IDS)
        if not listed:
            raise ParameterError.unexpected("messages", "at least one message", messages)
        for index, message in enumerate(listed):
            at = f"[{index}]"
            if not isinstance(message, Mapping) or exactly(message.get("role"), str) is None:
                raise ParameterError.unexpected("messages", expected, message, at)
            for text in _texts(message):
                if exactly(text, str) is None:
                    raise ParameterError.unexpected("messages", expected, message, at)
                checked("messages", text, str, "text", at=at)
        as_json("messages", listed)
    return [dict(message) for message in listed]


def _texts(message: Mapping[str, Any]) -> list[Any]:
    """Return what must be texts in a message: its role and its content, which calls may replace."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return [message["role"]]
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text", "") if isinstance(part, Mapping) else part for part in parts]
    return [message["role"], *texts]


def _conversation(
    model: Model, messages: Sequence[Mapping[str, Any]], **options: Any
) -> Conversation:
    """Return what `render_chat` renders. Raises InvalidRequestError if there is no template."""
    facts = model.facts
    templates = dict(facts.named_chat_templates)
    if facts.chat_template:
        templates["default"] = facts.chat_template
    if not (options.get("template") or templates):
        raise InvalidRequestError(
            f"{facts.name} has no chat template: give one (chat_template=, or "
            "--chat-template of the gateway), or give a prompt (generate, or /v1/completions)",
            reason="NO_CHAT_TEMPLATE",
            metadata={"param": "messages"},
        )
    return Conversation(templates, messages, special_tokens=_special_tokens(model), **options)


def render_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Prompt:
    """Return a conversation's prompt, with special tokens as text, for `Model.encode_rendered`.

    It is as from transformers' `apply_chat_template`. What the template does not show becomes text
    in the form of the Hermes models: tools, calls, their results. Role "developer" is the same as
    "system". Messages that the template refuses in their order, or leaves out, are arranged in
    other ways: system messages become a part of the first one, or turns of the user; turns are
    merged. The prompt's `changes` says so.

    A template is a program. Nothing limits its time and memory here; the gateway does.

    Args:
        model: model with its templates and special tokens.
        messages: in the form of OpenAI's API.
        tools: in the form of OpenAI's API.
        template: name of a template of the model, or a Jinja template; None: "tool_use" if the
            model has it and there are tools, or its usual one.
        documents: variable of templates that answer from documents.
        variables: more variables of the template.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: end the prompt with the text of the last message instead.

    Raises:
        InvalidRequestError: there is no template, or it refuses the messages. `metadata["param"]`
            is the argument at fault.
    """
    asked = _conversation(
        model,
        messages,
        tools=tools,
        template=template or None,
        documents=documents,
        variables=variables or {},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    try:
        return asked.render()
    except TemplateRefusal as refusal:
        raise _refused(str(refusal), refusal.param) from None


def _refused(why: str, param: str = "messages") -> InvalidRequestError:
    return InvalidRequestError(why, metadata={"param": param})


def _special_tokens(model: Model) -> dict[str, str]:
    """Return variables of a template. If a verifier serves no tokenizer's names, there are two."""
    facts, codec = model.facts, model.codec
    if facts.special_tokens:
        return dict(facts.special_tokens)
    tokens = {"bos_token": "", "eos_token": ""}
    if codec is not None and facts.HasField("bos_token_id"):
        tokens["bos_token"] = codec.token_text(facts.bos_token_id)
    if codec is not None and facts.eos_token_ids:
        tokens["eos_token"] = codec.token_text(facts.eos_token_ids[0])
    return tokens


class TemplateProcess:
    """Renders conversations one after the other, in a process with limits of time and memory. It
    starts with the first of them, and again after one that exceeded its limits.

    A template is a program that came with the model. Its sandbox keeps it from files and from the
    interpreter, but not from endless loops, nor from texts of any length, and nothing in a Python
    process ends them. The kernel ends another process.
    """

    def __init__(self, seconds: float = _SECONDS, memory: int = _MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"process {self._process.pid}"
        return f"<TemplateProcess {state}>"

    def render(self, model: Model, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Render as `render_chat`: call it in a thread. Raises InvalidRequestError also if the
        template exceeds its limits."""
        asked = vars(_conversation(model, messages, **options))
        try:
            request = json.dumps({**asked, "seconds": self._seconds}).encode()
        except RecursionError:
            raise _refused("a message or a tool is nested too deeply") from None
        with self._lock:
            response = self._answer(request)
        if response is None:
            raise _refused(
                f"the chat template computes for more than {self._seconds:g} s, or needs more than "
                f"{self._memory >> 20} MiB of memory"
            )
        if "error" in response:
            raise _refused(response["error"], response["param"])
        return Prompt(response["text"], response["changes"])

    def _answer(self, request: bytes) -> dict[str, str] | None:
        """Return the response to a request; None if the process has ended."""
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
        """End the process."""
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
