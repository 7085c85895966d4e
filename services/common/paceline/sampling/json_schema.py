"""JSON schemas as data: the schemas within a schema, and what of it constrains nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

Schema = dict[str, Any]
WHITESPACE = r"[ \n\r\t]{0,32}"
"""White space between two parts of a text: as much as people write, but not without limit."""

# Keywords whose value is a schema; the value of `items` may be a list of them.
_SCHEMAS = frozenset((
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset((
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
))  # fmt: skip
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")  # keywords that stand for another schema
_ANNOTATIONS = frozenset((
    "$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "example", "examples", "readOnly", "title", "writeOnly",
))  # fmt: skip
# Formats of texts that are enforced. Any other is an annotation.
FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # values of keywords that allow everything
    "uniqueItems": (False,), "minItems": (0,), "minLength": (0,), "minProperties": (0,),
    "not": (False,), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}), "dependencies": ({},),
    "dependentRequired": ({},), "dependentSchemas": ({},), "$recursiveAnchor": (False,),
}  # fmt: skip
_NEEDED = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}  # keywords that constrain nothing without another one
# Longest schemas of properties that are written for rules of their names. Unit: characters.
_MAX_NAMED = 1 << 16
# Look-ahead at the start of patterns that pydantic and zod write: of decimal numbers, which are not
# signs and points alone, and of addresses, where the format "email" says the same.
_NO_NUMBER = "^(?!^[-+.]*$)"
_ADDRESS = r"^(?!\.)(?!.*\.\.)"
_INDEX = re.compile("[0-9]{1,9}")
_NAMES_CHARS = 1 << 24
"""Characters of the pointers and addresses of all schemas within one. Each has those of the schemas
around it before its own, so that they could take thousands of times the memory of the schema."""
_REFERENCES_CHARS = 1 << 16
"""Characters of the references of an embedded schema. No verifier takes a schema that is longer."""
_PASSES = 64  # passes over all schemas within one, to find those whose values have no end


class SchemaTooComplex(ValueError):
    """The names of the parts of a schema, or its references to them, are too long."""


@dataclass(frozen=True)
class SchemaPlace:
    """A schema within a schema."""

    schema: Schema  # the object; not copied
    pointer: str  # where it is, as the fragment of a reference: "" or "/properties/a"
    base: str  # address that its references are relative to, without a fragment; "": none


def schemas(root: Any) -> Iterator[Schema]:
    """Return all schemas within a schema, itself the first: under the keywords of JSON Schema, and
    where its references lead. Values that are data, such as those of `const`, are none."""
    return (place.schema for place in _places(root, named=False))


def _places(root: Any, *, named: bool = True) -> Iterator[SchemaPlace]:
    """Yield the schemas in a schema with their pointers and, if `named`, their addresses. Raises
    ``SchemaTooComplex`` if these are too long."""
    names = _id_names(root) if named else ()
    waiting: list[tuple[Any, str, str]] = [(root, "", "")]
    seen: set[int] = set()
    taken = 0

    def take(name: str) -> str:
        nonlocal taken
        taken += len(name)
        if taken > _NAMES_CHARS:
            raise SchemaTooComplex("the names of the schema's parts are too long: shorten them")
        return name

    def add(value: Any, base: str, above: str, *words: str) -> None:
        pointer = take("/".join((above, *map(_escaped, words)))) if named else ""
        waiting.append((value, pointer, base))

    while waiting:
        schema, pointer, base = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        for name in names:
            address = schema.get(name)
            if isinstance(address, str) and not address.startswith("#"):
                base = take(urldefrag(urljoin(base, address))[0])
        yield SchemaPlace(schema, pointer, base)
        for name, value in schema.items():
            if name in _MAPS and isinstance(value, dict):
                for key, part in value.items():
                    add(part, base, pointer, name, key)
            elif name in _LISTS and isinstance(value, list):
                for index, part in enumerate(value):
                    add(part, base, pointer, name, str(index))
            elif name in _SCHEMAS:
                add(value, base, pointer, name)
            elif name in REFERENCES and isinstance(value, str) and value.startswith("#/"):
                add(value_at(root, value[1:]), base, value[1:])


def _id_names(root: Any) -> tuple[str, ...]:
    """Return keywords for the address of a schema: `id` in drafts 3 and 4 alone."""
    draft = str(root.get("$schema")) if isinstance(root, dict) else ""
    return ("$id", "id") if "draft-03" in draft or "draft-04" in draft else ("$id",)


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def value_at(root: Any, pointer: str) -> Any:
    """Return the value at a place; None: there is none."""
    value = root
    for word in unquote(pointer).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(word)
        elif isinstance(value, list) and _INDEX.fullmatch(word) and int(word) < len(value):
            value = value[int(word)]
        else:
            return None
    return value


def without_annotations(source: str) -> str:
    """Return a schema, as JSON, without what constrains nothing: texts for people, formats that are
    not enforced, keywords whose value is null or allows everything. A text that is no JSON stays as
    it is. Names of properties and patterns are written in the forms that grammars have, and a
    schema whose values have no end as one that has none."""
    try:
        root = json.loads(source)
        room = _MAX_NAMED
        for schema in list(schemas(root)):
            _strip(schema)
            room -= _name_properties(schema, room)
            _look_ahead(schema)
        for schema in _endless(root):
            schema.clear()
            schema["enum"] = []
        return json.dumps(root, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return source


def _strip(schema: Schema) -> None:
    for name, value in list(schema.items()):
        if (
            name in _ANNOTATIONS
            or (value is None and name != "const")
            or (name == "format" and value not in FORMATS)
            or any(
                value == neutral and type(value) is type(neutral)
                for neutral in _WITHOUT_EFFECT.get(name, ())
            )
            or (name in _NEEDED and not schema.keys() & set(_NEEDED[name]))
        ):
            del schema[name]


def _name_properties(schema: Schema, room: int) -> int:
    """Write rules for all names of properties as properties, where no others are. Returns the
    length of their schemas, which is at most `room`; unit: characters."""
    names, other = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return 0
    written = 0
    rules = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    listed = rules.get("enum", [rules.get("const")])
    texts = isinstance(listed, list) and all(isinstance(text, str) for text in listed)
    if rules.keys() in ({"enum"}, {"const"}) and texts:
        # The schema of a property is written for each, so it must have no others within it.
        within = other.values() if isinstance(other, dict) else ()
        written = len(listed) * len(repr(other)) if not any(map(_is_nested, within)) else room + 1
        named = {"properties": dict.fromkeys(listed, other)}
    elif rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
        named = {"patternProperties": {rules["pattern"]: other}}
    elif rules.keys() <= {"minLength", "maxLength"} and all(type(n) is int for n in rules.values()):
        lengths = f"{rules.get('minLength', 0)},{rules.get('maxLength', '')}"
        named = {"patternProperties": {rf"^[\s\S]{{{lengths}}}$": other}}
    else:
        return 0
    if written > room:
        return 0
    del schema["propertyNames"]
    schema |= {**named, "additionalProperties": False}
    return written


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _look_ahead(schema: Schema) -> None:
    """Write known look-ahead of a pattern, which grammars do not have, without it."""
    pattern, parts = schema.get("pattern"), schema.get("allOf", [])
    if not isinstance(pattern, str) or not isinstance(parts, list):
        return
    if pattern.startswith(_NO_NUMBER):
        schema["pattern"] = "^" + pattern.removeprefix(_NO_NUMBER)
        schema["allOf"] = [*parts, {"pattern": "[^-+.]"}]
    elif pattern.startswith(_ADDRESS) and schema.get("format") == "email":
        schema["pattern"] = "^" + pattern.removeprefix(_ADDRESS)


def _endless(root: Any) -> list[Schema]:
    """Return schemas in a schema whose values have no end: each needs another of its kind."""
    left, finite = list(schemas(root)), set[int]()
    for _ in range(_PASSES):  # forwards and backwards, so that a chain of references takes two
        rest = [schema for schema in reversed(left) if not _ends(schema, root, finite)]
        if len(rest) == len(left):
            return left
        left = rest
    return []


def _ends(schema: Schema, root: Any, finite: set[int]) -> bool:
    """Return whether a value of a schema has an end, if values of the ``finite`` schemas have one.
    The schema joins these then."""
    needed: list[Any] = [*_listed(schema, "allOf")]
    reference, items, kind = schema.get("$ref"), schema.get("items"), schema.get("type")
    if isinstance(reference, str) and (reference + "/").startswith("#/"):
        needed.append(value_at(root, reference[1:]))
    if kind in ("object", ["object"]) and isinstance(named := schema.get("properties"), dict):
        needed += [named.get(name) for name in _listed(schema, "required") if isinstance(name, str)]
    if kind in ("array", ["array"]) and type(fewest := schema.get("minItems")) is int:
        first = _listed(schema, "items") or _listed(schema, "prefixItems")
        needed += [*first, *[items] * (fewest > len(first))][: max(0, fewest)]
    choices = [options for name in ("anyOf", "oneOf") if (options := _listed(schema, name))]

    def ends(value: Any) -> bool:
        return not isinstance(value, dict) or id(value) in finite

    has_end = all(map(ends, needed)) and all(any(map(ends, options)) for options in choices)
    if has_end:
        finite.add(id(schema))
    return has_end


def _listed(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def embedded(root: Schema, prefix: str) -> Schema:
    """Return a schema as the part at `prefix`, such as "#/$defs/a", of another one.

    Its references lead where they led before. The names of its parts ($id, $anchor), by which they
    may do so, are left out: other parts could have the same.

    Raises ``ValueError`` if names of its parts are malformed or too long (``SchemaTooComplex``).
    """
    copied: Schema = json.loads(json.dumps(root))
    places = list(_places(copied))
    written = 0
    targets: dict[tuple[str, str], str] = {("", ""): ""}
    addresses = _id_names(root)
    for place in reversed(places):
        for name in addresses:
            address = place.schema.get(name)
            if isinstance(address, str) and not address.startswith("#"):
                targets[place.base, ""] = place.pointer
        for name in (*addresses, "$anchor", "$dynamicAnchor"):
            if isinstance(identifier := place.schema.get(name), str):
                targets[place.base, identifier.removeprefix("#")] = place.pointer
    for place in places:
        for name in REFERENCES:
            if isinstance(reference := place.schema.get(name), str):
                pointer = _pointer(reference, place.base, targets)
                place.schema[name] = reference if pointer is None else prefix + pointer
                written += len(place.schema[name])
                if written > _REFERENCES_CHARS:
                    raise SchemaTooComplex("the schema's references are too long: name less in it")
    for place in places:
        for name in (*addresses, "$anchor", "$schema"):
            if isinstance(place.schema.get(name), str):
                del place.schema[name]
    return copied


def _pointer(reference: str, base: str, targets: dict[tuple[str, str], str]) -> str | None:
    """Return where a reference leads; None: to another document."""
    address, fragment = urldefrag(reference)
    address = urldefrag(urljoin(base, address))[0] if address else base
    if fragment.startswith("/"):
        resource = targets.get((address, ""), None if address else "")
        return None if resource is None else resource + fragment
    return targets.get((address, unquote(fragment)))
