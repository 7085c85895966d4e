"""Chat templates: from messages to a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.sampling import MAX_TOKEN_IDS, SamplingError, checked, exactly, items

from ._errors import InvalidRequestError
from ._options import invalid_requests
from ._text import Model

if TYPE_CHECKING:
    from jinja2 import Template

# The form of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling), which
# many models were trained with.
_HERMES_TOOLS = """You may call functions. Their signatures, as JSON, are inside <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and arguments inside tags:
<tool_call>
{{"name": <function name>, "arguments": <object>}}
</tool_call>"""


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as `render_chat` takes them. Raises InvalidRequestError: they are not a sequence of
    mappings with the texts role and content."""
    expected = "a message: a mapping with the texts role and content"
    with invalid_requests():
        found = items("messages", messages, "a list of messages", MAX_TOKEN_IDS)
        if not found:
            raise SamplingError.unexpected("messages", "at least one message", messages)
        for index, message in enumerate(found):
            texts = (
                [message.get(key) for key in ("role", "content")]
                if isinstance(message, Mapping)
                else [None]
            )
            for text in texts:
                if exactly(text, str) is None:
                    raise SamplingError.unexpected("messages", expected, message, f"[{index}]")
                checked("messages", text, str, "text", at=f"[{index}]")
    return [dict(message) for message in found]


def render_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The prompt of a conversation, with its special tokens as text, for `Model.encode_rendered`.

    A template that does not know tools gets them, their calls and their results as text in the form
    of the Hermes models. Role "developer" is the same as "system".

    Args:
        model: model with its template and special tokens.
        messages: in the form of OpenAI's API, with `content` as text.
        tools: in the form of OpenAI's API.
        template: Jinja template; None: that of the model.
        variables: more variables of the template.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: end the prompt with the text of the last message instead.

    Raises:
        InvalidRequestError: there is no template, or it refuses the messages. `metadata["param"]`
            is the argument at fault.
    """
    from jinja2 import TemplateError

    source = template or model.facts.chat_template
    if not source:
        raise InvalidRequestError(
            f"{model.facts.name} has no chat template: give one (chat_template=, or "
            "--chat-template of the gateway), or give a prompt (generate, or /v1/completions)",
            reason="NO_CHAT_TEMPLATE",
            metadata={"param": "messages"},
        )
    try:
        conversation = [_for_template(message) for message in messages]
        if "tools" not in source:
            conversation = _in_hermes_form(conversation, tools)
        values = {
            **_special_tokens(model),
            **(variables or {}),
            "messages": conversation,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _compiled(source).render(values)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidRequestError(
            f"the chat template refuses these messages: {error}", metadata={"param": "messages"}
        ) from None
    return _up_to(text, messages[-1]["content"]) if continue_final_message else text


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: arguments of calls are parsed, if they are an object."""
    fields = dict(message)
    if fields["role"] == "developer":
        fields["role"] = "system"
    if "tool_calls" in fields:
        fields["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"])}}
            for call in fields["tool_calls"]
        ]
    return fields


def _parsed(function: Mapping[str, Any]) -> Any:
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        return function["arguments"]
    return value if isinstance(value, dict) else function["arguments"]


def _in_hermes_form(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages with tools, calls and results as text. Results have the role "user"."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", ())
        texts = [message["content"]] if message["content"] else []
        texts += [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
        message["content"] = "\n".join(texts)
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1]["role"] == "user" and "<tool_response>" in plain[-1]["content"]:
                plain[-1]["content"] += f"\n{answer}"
                continue
            message = {"role": "user", "content": answer}
        plain.append(message)
    if tools:
        text = _HERMES_TOOLS.format(tools="\n".join(map(json.dumps, tools)))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{text}"
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _up_to(text: str, message: str) -> str:
    """A rendered conversation up to the end of its last message's text."""
    message = message.strip()  # as many templates do
    start = text.rfind(message)
    if not message or start < 0:
        raise InvalidRequestError(
            "the last message cannot be continued: it is empty, or not in the template's text",
            metadata={"param": "continue_final_message"},
        )
    return text[: start + len(message)]


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compiles a template in a sandbox, with the settings of transformers."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _special_tokens(model: Model) -> dict[str, str]:
    facts, codec = model.facts, model.codec
    tokens = {"bos_token": "", "eos_token": ""}
    if codec is not None and facts.HasField("bos_token_id"):
        tokens["bos_token"] = codec.token_text(facts.bos_token_id)
    if codec is not None and facts.eos_token_ids:
        tokens["eos_token"] = codec.token_text(facts.eos_token_ids[0])
    return tokens
