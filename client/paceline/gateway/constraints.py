"""Constraints of the text: JSON schemas, regular expressions and grammars, in all their fields.

OpenAI has `response_format`; vLLM has `structured_outputs` and, before it, `guided_*`; llama.cpp
has `json_schema` and `grammar`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Body
from .errors import bad_request

_Choices = Annotated[list[str], Field(min_length=1)]


class FreeText(Body):
    """Any text."""

    type: Literal["text"]


class JsonObject(Body):
    """Any JSON object; with llama.cpp's `schema`, an instance of it."""

    type: Literal["json_object"]
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")


class NamedSchema(Body):
    """A JSON schema. It is always enforced, whatever `strict` is."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Body):
    """JSON that is an instance of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[FreeText | JsonObject | JsonSchema, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's form; one of its fields is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool = False

    def constraints(self) -> list[tuple[str, Any]]:
        """Arguments of `Client.generate` for the fields that are set."""
        found: list[tuple[str, Any]] = [
            ("json_schema", self.json_),
            ("regex", self.regex),
            ("regex", None if self.choice is None else "|".join(map(re.escape, self.choice))),
            ("grammar", self.grammar),
            ("json_schema", {"type": "object"} if self.json_object else None),
        ]
        return [(name, value) for name, value in found if value is not None]


class Constrained(Body):
    """The fields of a request that constrain its text."""

    response_format: ResponseFormat = FreeText(type="text")
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    """A grammar in llama.cpp's GBNF or in Lark's notation."""

    def constraint(self) -> dict[str, Any]:
        """The constraint, as an argument of `Client.generate`; empty: none.

        Raises:
            ApiError: There are several.
        """
        form = self.response_format
        found: list[tuple[str, Any]] = []
        if isinstance(form, JsonSchema):
            found.append(("json_schema", form.json_schema.schema_))
        elif isinstance(form, JsonObject):
            found.append(("json_schema", form.schema_))
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        llama = StructuredOutputs(json=self.json_schema, grammar=self.grammar)
        for each in (self.structured_outputs, guided, llama):
            found += each.constraints() if each is not None else []
        if len(found) > 1:
            raise bad_request(
                "a text can have one constraint: send one of response_format, structured_outputs, "
                "guided_*, json_schema and grammar",
                "response_format",
            )
        return dict(found)
