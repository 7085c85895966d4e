"""Chat templates: from messages to a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.client import Model

from .errors import bad_request
from .requests import Message


def render(
    model: Model, template: str | None, messages: Sequence[Message], variables: dict[str, Any]
) -> str:
    """The prompt of a conversation, with its special tokens as text.

    Args:
        model: Model with its template and special tokens.
        template: Jinja template; None: that of the model.
        messages: The conversation; role "developer" is the same as "system".
        variables: More variables of the template.

    Raises:
        ApiError: There is no template, or it refuses the messages.
    """
    source = template or model.facts.chat_template
    if not source:
        raise bad_request(
            f"{model.facts.name} has no chat template: use /v1/completions, or start the gateway "
            "with --chat-template",
            "messages",
            "no_chat_template",
        )
    values = {
        **_special_tokens(model),
        **variables,
        "messages": [_as_dict(message) for message in messages],
        "add_generation_prompt": True,
    }
    try:
        return _compiled(source).render(values)
    except TemplateError as error:
        raise bad_request(
            f"the chat template refuses these messages: {error}", "messages"
        ) from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compiles a template in a sandbox, with the settings of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _as_dict(message: Message) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.text, **named}


def _special_tokens(model: Model) -> dict[str, str]:
    facts, codec = model.facts, model.codec
    tokens = {"bos_token": "", "eos_token": ""}
    if codec is not None and facts.HasField("bos_token_id"):
        tokens["bos_token"] = codec.token_text(facts.bos_token_id)
    if codec is not None and facts.eos_token_ids:
        tokens["eos_token"] = codec.token_text(facts.eos_token_ids[0])
    return tokens


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
