"""Chat templates: from messages to a prompt."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.client import Model

from .errors import bad_request
from .hermes import in_hermes_form
from .messages import Message
from .requests import ChatRequest


def render(model: Model, template: str | None, body: ChatRequest) -> str:
    """The prompt of a conversation, with its special tokens as text.

    A template that does not know tools gets them, their calls and their results as text in
    Hermes's form. Role "developer" is the same as "system".

    Args:
        model: Model with its template and special tokens.
        template: Jinja template; None: that of the model.
        body: The request.

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
    shown = [tool.model_dump(exclude_none=True) for tool in body.tool_use().tools]
    conversation = [_as_dict(message) for message in body.messages]
    if "tools" not in source:
        conversation = in_hermes_form(conversation, shown)
    continued = body.continue_final_message
    values = {
        **_special_tokens(model),
        **body.chat_template_kwargs,
        "messages": conversation,
        "tools": shown or None,
        "add_generation_prompt": body.add_generation_prompt and not continued,
    }
    try:
        text = _compiled(source).render(values)
    except (TemplateError, TypeError, ValueError) as error:
        raise bad_request(
            f"the chat template refuses these messages: {error}", "messages"
        ) from None
    return _up_to(text, body.messages[-1].text) if continued else text


def _up_to(text: str, message: str) -> str:
    """A rendered conversation up to the end of its last message's text.

    Raises:
        ApiError: The template does not render this text as it is.
    """
    message = message.strip()  # as many templates do
    start = text.rfind(message)
    if not message or start < 0:
        raise bad_request(
            "the last message cannot be continued: it is empty, or not in the template's text",
            "continue_final_message",
        )
    return text[: start + len(message)]


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


def _as_dict(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _parsed(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _parsed(arguments: str) -> Any:
    """Arguments as templates expect them: parsed, if they are an object."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


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
