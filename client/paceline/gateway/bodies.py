"""How the body of a request is read: JSON within limits, and what its objects do not know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import any_schema, no_info_plain_validator_function

from .errors import bad_request, from_validation

# Of a request, for the warning header: paths of fields that were ignored, and what was done to
# messages.
UNKNOWN_FIELDS = web.RequestKey("unknown_fields", list)
CHANGES = web.RequestKey("changes", str)

MAX_VALUES = 1 << 17  # maximum number of texts, names, arrays and objects in a request
MAX_DEPTH = 128  # maximum depth of arrays and objects in a request

# A text of JSON, or the rest of the body behind one that does not end.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# An escaped half of a character outside the basic plane.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Refused:
    """Marks a field that would change what an answer means, and that is not supported: with a value
    the request is a 400 with this reason. An empty or false value asks for nothing."""

    reason: str

    def _check(self, value: Any) -> None:
        if value:
            raise PydanticCustomError("refused", "{reason}", {"reason": self.reason})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_plain_validator_function(self._check, json_schema_input_schema=any_schema())


class Body(BaseModel):
    """An object of a request. A null field is an absent one, and an integer may have the form of a
    float, such as 4.0. Unknown fields are kept apart: they change no text's meaning."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _normal(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: _with_integers(value) for name, value in present(fields).items()}

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield the paths of fields that are ignored: the schema does not have them."""
        yield from (f"{path}{name}" for name in self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Body):
                    yield from item.unknown(f"{path}{name}.")


def present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _with_integers(value: Any) -> Any:
    """Return a value, or a list of them, where floats without a fraction are integers."""
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_with_integers(item) for item in value]
    return value


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_request(
    content: bytes, kind: type[AnyBody], *, strict: bool
) -> tuple[AnyBody, list[str]]:
    """Return a validated request, and the paths of its fields that are unknown and ignored.

    Takes long for long requests: call it in a thread. Raises ApiError if the content is not a
    request of this kind, or if `strict`, it has an unknown field.
    """
    try:
        body = kind.model_validate(_parsed(content))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise from_validation(error) from None
        raise bad_request(f"the body is not JSON: {error}", None) from None
    unknown = list(dict.fromkeys(body.unknown()))
    if unknown and strict:
        raise bad_request(f"unrecognized request argument: {unknown[0]}", unknown[0])
    return body, unknown


def _parsed(content: bytes) -> Any:
    """Return JSON without what Python reads beyond it, since answers repeat parts of requests.
    Raises ValueError if it is not that; and ApiError if it has too many values, is nested too deep,
    or has texts that UTF-8 cannot encode."""
    _check_shape(content)
    text = content.decode(json.detect_encoding(content))  # json.loads takes halves of pairs
    value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    if _SURROGATE.search(text):
        fields = value.items() if isinstance(value, dict) else [("the body", value)]
        for name, field in fields:
            try:
                json.dumps([name, field], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                field_name = name.encode(errors="replace").decode()
                message = f"{field_name} has half a surrogate pair, which UTF-8 cannot encode"
                raise bad_request(message, field_name) from None
    return value


def _check_shape(content: bytes) -> None:
    """Raise ApiError if JSON of this shape takes much more memory and time than its length. Numbers
    are not counted: a prompt may have as many as a body has room for."""
    opened = content.count(b"{") + content.count(b"[")
    if opened <= MAX_DEPTH and content.count(b'"') <= 2 * MAX_VALUES:
        return
    texts = sum(1 for _ in islice(_TEXT.finditer(content), MAX_VALUES + 1))
    brackets = b""
    if texts <= MAX_VALUES:
        brackets = _TEXT.sub(b"", content).translate(None, _NO_BRACKETS)
    if texts + brackets.count(b"{") + brackets.count(b"[") > MAX_VALUES:
        raise bad_request(
            f"the body has more than {MAX_VALUES} texts, names, arrays and objects: send several "
            "requests",
            None,
            "request_too_complex",
        )
    deepest = max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
    if deepest > MAX_DEPTH:
        raise bad_request(
            f"the body is nested {deepest} deep, expected at most {MAX_DEPTH}",
            None,
            "request_too_complex",
        )


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value
