"""JSON schemas as data: the schemas within a schema, and what of it constrains nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

Schema = dict[str, Any]

_SCHEMAS = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
        *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords whose value is a schema; that of `items` may be a list of them."""
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(
    (
        *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"),
        "properties",
    )
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
"""Keywords that stand for another schema."""

_ANNOTATIONS = frozenset(
    (
        *("$comment", "contentEncoding", "contentMediaType", "contentSchema", "default"),
        *("deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly"),
    )
)
FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri"),
        "uuid",
    )
)
"""Formats of texts that are enforced. Any other is an annotation."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "$recursiveAnchor": (False,),
}
"""Values of keywords that allow everything."""
_NEEDED = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
"""Keywords that constrain nothing without another one."""


@dataclass(frozen=True)
class Place:
    """A schema within a schema.

    Attributes:
        schema: The object; not copied.
        pointer: Where it is, as the fragment of a reference: "" or "/properties/a".
        base: Address that its references are relative to, without a fragment; "": none.
    """

    schema: Schema
    pointer: str
    base: str


def places(root: Any) -> Iterator[Place]:
    """All schemas within a schema, itself the first: under the keywords of JSON Schema, and where
    its references lead. Values that are data, such as those of `const`, are none."""
    names = _id_names(root)
    waiting: list[tuple[Any, str, str]] = [(root, "", "")]
    seen: set[int] = set()
    while waiting:
        schema, pointer, base = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        for name in names:
            own = schema.get(name)
            if isinstance(own, str) and not own.startswith("#"):
                base = urldefrag(urljoin(base, own))[0]
        yield Place(schema, pointer, base)
        for name, value in schema.items():
            here = f"{pointer}/{_escaped(name)}"
            if name in _MAPS and isinstance(value, dict):
                waiting += [(each, f"{here}/{_escaped(key)}", base) for key, each in value.items()]
            elif name in _LISTS and isinstance(value, list):
                waiting += [(each, f"{here}/{index}", base) for index, each in enumerate(value)]
            elif name in _SCHEMAS:
                waiting.append((value, here, base))
            elif name in REFERENCES and isinstance(value, str) and value.startswith("#/"):
                waiting.append((_at(root, value[1:]), value[1:], base))


def _id_names(root: Any) -> tuple[str, ...]:
    """Keywords for the address of a schema: `id` in drafts 3 and 4 alone."""
    draft = str(root.get("$schema")) if isinstance(root, dict) else ""
    return ("$id", "id") if "draft-03" in draft or "draft-04" in draft else ("$id",)


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def _at(root: Any, pointer: str) -> Any:
    """The value at a place; None: there is none."""
    value = root
    for word in unquote(pointer).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(word)
        elif isinstance(value, list) and word.isdecimal() and int(word) < len(value):
            value = value[int(word)]
        else:
            return None
    return value


def without_annotations(source: str) -> str:
    """A schema, as JSON, without what constrains nothing: texts for people, formats that are not
    enforced, keywords whose value allows everything. A text that is no JSON stays as it is."""
    try:
        root = json.loads(source)
        for place in list(places(root)):
            _strip(place.schema)
        return json.dumps(root, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return source


def _strip(schema: Schema) -> None:
    for name, value in list(schema.items()):
        if (
            name in _ANNOTATIONS
            or (name == "format" and value not in FORMATS)
            or any(
                value == each and type(value) is type(each)
                for each in _WITHOUT_EFFECT.get(name, ())
            )
            or (name in _NEEDED and not schema.keys() & set(_NEEDED[name]))
        ):
            del schema[name]


def embedded(root: Schema, prefix: str) -> Schema:
    """A schema as the part at `prefix`, such as "#/$defs/a", of another one.

    Its references lead where they led before. The names of its parts ($id, $anchor), by which they
    may do so, are left out: they could be those of other parts.
    """
    copied: Schema = json.loads(json.dumps(root))
    found = list(places(copied))
    targets: dict[tuple[str, str], str] = {("", ""): ""}
    addresses = _id_names(root)
    for place in reversed(found):
        for name in addresses:
            own = place.schema.get(name)
            if isinstance(own, str) and not own.startswith("#"):
                targets[place.base, ""] = place.pointer
        for name in (*addresses, "$anchor", "$dynamicAnchor"):
            if isinstance(own := place.schema.get(name), str):
                targets[place.base, own.removeprefix("#")] = place.pointer
    for place in found:
        for name in REFERENCES:
            if isinstance(reference := place.schema.get(name), str):
                pointer = _pointer(reference, place.base, targets)
                place.schema[name] = reference if pointer is None else prefix + pointer
    for place in found:
        for name in (*addresses, "$anchor", "$schema"):
            if isinstance(place.schema.get(name), str):
                del place.schema[name]
    return copied


def _pointer(reference: str, base: str, targets: dict[tuple[str, str], str]) -> str | None:
    """Where a reference leads; None: to another document."""
    address, fragment = urldefrag(reference)
    address = urldefrag(urljoin(base, address))[0] if address else base
    if fragment.startswith("/"):
        resource = targets.get((address, ""), None if address else "")
        return None if resource is None else resource + fragment
    return targets.get((address, unquote(fragment)))
