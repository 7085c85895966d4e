"""Prompts: the demo's, long ones, bound ones, and the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from paceline.client import Model, render_chat
from paceline.convert import ModelSource, open_model
from paceline.harness import read_prompts
from paceline.service.files import read_text
from paceline.v1 import verifier_pb2

FREE = ("chat", "code", "mathematics", "edit", "long")  # categories whose answers are free
PROMPTS = Path(__file__).parents[2] / "prompts"  # a file for each category
_NAMES = (
    "Amber", "Birch", "Cedar", "Delta", "Ember", "Falcon", "Garnet", "Harbor", "Indigo", "Jasper",
    "Koala", "Lotus", "Maple", "Nickel", "Onyx", "Pearl", "Quartz", "Raven", "Saffron", "Tulip",
    "Umber", "Velvet", "Willow", "Zephyr",
)  # fmt: skip
# Keys of a line whose answer is bound, as in a chat request. A call of a tool is required.
_BINDING = ("json_schema", "tools")


@dataclass(frozen=True)
class Prompt:
    """A prompt of the table."""

    ids: list[int]  # its token ids, those of the chat template included
    json_schema: str = ""  # JSON schema of the answer; empty: the answer is free


def chat_prompts(path: Path, source: ModelSource) -> list[Prompt]:
    """Return the prompts of a file, with what binds their answers: a line may have a
    ``json_schema``, or ``tools``. Raises ``OSError`` if the file cannot be read, and ``ValueError``
    if it has no prompt, or a line that is not a prompt."""
    encoded = chat_encoder(source)
    return [
        Prompt(encoded(prompt, fields.get("tools", ())), _schema(fields))
        for prompt, fields in zip(read_prompts(path), _bindings(path), strict=True)
    ]


def read(files: list[Path], source: ModelSource, tokens: int) -> dict[str, list[Prompt]]:
    """Return prompts in the target's chat template, by category, which is the name of a file.

    Prompts that do not fit the target's context with their answers are left out.
    """
    room = source.config().max_position - tokens
    return {
        file.stem: [prompt for prompt in chat_prompts(file, source) if len(prompt.ids) <= room]
        for file in files
    }


def chat_encoder(
    source: ModelSource,
) -> Callable[[str | list[int], Sequence[dict[str, Any]]], list[int]]:
    """Return what gives the token ids of a user turn with tools, in the target's chat template.

    Token ids stay as they are. Without a template, so do texts.
    """
    encoder = Tokenizer.from_str(source.tokenizer.decode())
    template = source.chat_template
    model = Model(verifier_pb2.GetModelResponse(chat_template=template or ""), None)

    def encoded(prompt: str | list[int], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if not template:
            return list(encoder.encode(prompt).ids)
        rendered = render_chat(model, [{"role": "user", "content": prompt}], tools=tools)
        return list(encoder.encode(rendered, add_special_tokens=False).ids)

    return encoded


def _bindings(path: Path) -> list[dict[str, Any]]:
    """Yield, for each prompt of a file, the fields that bind its answer."""
    if path.suffix not in (".jsonl", ".json"):
        return [{}]
    lines = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
    return [
        {name: line[name] for name in _BINDING if name in line} if isinstance(line, dict) else {}
        for line in lines
    ]


def _schema(fields: dict[str, Any]) -> str:
    """Return the schema to which the gateway binds the answer of a request with these fields."""
    if not fields:
        return ""
    choice = {"tool_choice": "required"} if "tools" in fields else {}
    messages = [{"role": "user", "content": "Hello"}]
    from paceline.gateway.requests import ChatRequest  # its libraries are not on a GPU machine

    request = ChatRequest.model_validate({"messages": messages, **fields, **choice})
    return json.dumps(request.constraint()["json_schema"])


def tokenizer(target: Path) -> Tokenizer:
    """Return the target's tokenizer. Raises ``ValueError`` if the target has none."""
    content = open_model(target).tokenizer
    if content is None:
        raise ValueError(f"{target} has no tokenizer: give a model with one")
    return Tokenizer.from_buffer(content)


def encode(prompts: Sequence[str | list[int]], target: Path) -> list[list[int]]:
    """Return token ids of texts; token ids stay as they are."""
    encoder = tokenizer(target)
    return [text if isinstance(text, list) else encoder.encode(text).ids for text in prompts]


def demo_prompts(folder: Path, target: Path) -> list[list[int]]:
    """Return beginnings of files: first those that the demo target was not trained on."""
    files = (folder / f"{name}.jsonl" for name in ("heldout", "trained"))
    return encode([text for file in files for text in read_prompts(file)], target)


def needle_prompts(texts: Sequence[list[int]], target: Path) -> list[list[int]]:
    """Return long texts with a table of random numbers near the beginning, begun again at the end.

    How the second table goes on is only in the first: a drafter under a KV budget finds it if the
    budget contains the right lines.

    Args:
        texts: Token ids around the table, at least 1,024 each; their lengths are kept.

    Raises ``ValueError`` if a text is too short.
    """
    prompts = []
    for seed, text in enumerate(texts):
        draw = Random(seed)
        names = draw.sample(_NAMES, len(_NAMES))
        lines = [f"{name}: {draw.randrange(10**6):06}\n" for name in names]
        needle, again = encode(
            [f"\n\nThe codes:\n{''.join(lines)}\n", f"\n\nThe codes:\n{''.join(lines[:3])}"], target
        )
        room = len(text) - len(needle) - len(again)
        if room < len(needle):
            raise ValueError(f"a text has {len(text)} tokens, expected at least {3 * len(needle)}")
        prompts.append([*text[: room // 8], *needle, *text[room // 8 : room], *again])
    return prompts
