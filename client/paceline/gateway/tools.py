"""Functions that a model may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from .body import Body

_NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Function(Body):
    """A function."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] = _NO_ARGUMENTS
    """JSON schema of its arguments."""
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request, and how they may be called."""

    tools: Sequence[Tool]
    mode: Literal["none", "auto", "required", "named"]
    """"auto" leaves the choice to the model; "required" and "named" enforce calls."""
    parallel: bool = True
    """Whether there may be several calls."""
    name: str = ""
    """Function to be called, in mode "named"."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all functions."""
        return frozenset(tool.function.name for tool in self.tools)

    def schema(self) -> dict[str, Any] | None:
        """JSON schema of a text that is the enforced calls; None: none are.

        A named function's text is its arguments, other calls are an array of objects with `name`
        and `arguments`.
        """
        functions = {tool.function.name: tool.function.parameters for tool in self.tools}
        if self.mode == "named":
            return functions[self.name]
        if self.mode != "required":
            return None
        calls, definitions = [], {}
        for index, (name, parameters) in enumerate(functions.items()):
            definitions[f"arguments{index}"] = _moved(parameters, f"#/$defs/arguments{index}")
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": name},
                        "arguments": {"$ref": f"#/$defs/arguments{index}"},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        most = {} if self.parallel else {"maxItems": 1}
        return {
            "type": "array",
            "items": {"anyOf": calls},
            "minItems": 1,
            **most,
            "$defs": definitions,
        }


def _moved(schema: Any, root: str) -> Any:
    """A schema as a part of another one: its references begin at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for name, value in schema.items()
    }
