"""Chat templates: from messages to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import ParameterError, as_json, checked, exactly, items
from paceline.sampling import MAX_TOKEN_IDS

from ._errors import InvalidRequestError
from ._options import invalid_requests
from ._templates import Conversation, Prompt, TemplateRefusal
from ._text import Model


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as `render_chat` takes them. Raises InvalidRequestError if they are not a sequence
    of mappings with a role, whose values are those of JSON."""
    expected = "a message: a mapping with the text role, and content, a text or a list of parts"
    with invalid_requests():
        found = items("messages", messages, "a list of messages", MAX_TOKEN_IDS)
        if not found:
            raise ParameterError.unexpected("messages", "at least one message", messages)
        for index, message in enumerate(found):
            at = f"[{index}]"
            if not isinstance(message, Mapping) or exactly(message.get("role"), str) is None:
                raise ParameterError.unexpected("messages", expected, message, at)
            for text in _texts(message):
                if exactly(text, str) is None:
                    raise ParameterError.unexpected("messages", expected, message, at)
                checked("messages", text, str, "text", at=at)
        as_json("messages", found)
    return [dict(message) for message in found]


def _texts(message: Mapping[str, Any]) -> list[Any]:
    """What must be texts in a message: its role and its content, which calls may replace."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return [message["role"]]
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text", "") if isinstance(part, Mapping) else part for part in parts]
    return [message["role"], *texts]


def conversation(
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
    """The prompt of a conversation, with its special tokens as text, for `Model.encode_rendered`.

    It is that of transformers' `apply_chat_template`. What the template does not show becomes text
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
    asked = conversation(
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
        raise refused(refusal) from None


def refused(refusal: TemplateRefusal) -> InvalidRequestError:
    return InvalidRequestError(str(refusal), metadata={"param": refusal.param})


def _special_tokens(model: Model) -> dict[str, str]:
    """Variables of a template. A verifier that serves no tokenizer's names has two of them."""
    facts, codec = model.facts, model.codec
    if facts.special_tokens:
        return dict(facts.special_tokens)
    tokens = {"bos_token": "", "eos_token": ""}
    if codec is not None and facts.HasField("bos_token_id"):
        tokens["bos_token"] = codec.token_text(facts.bos_token_id)
    if codec is not None and facts.eos_token_ids:
        tokens["eos_token"] = codec.token_text(facts.eos_token_ids[0])
    return tokens
