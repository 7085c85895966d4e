"""Schemas of tools: the types of their arguments, what fits them, and objects that are closed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.sampling.json_schema import REFERENCES, Schema, schemas, value_at

TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}  # names of types in JSON
ANY_TYPE = frozenset(TYPES.values())
_MAX_DEPTH = 128  # deepest part of a schema in which types are looked for

_MAX_PAIRS = 10_000  # pairs of a value and a schema that are compared; more fit
_BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}  # keywords for the length of a value, or for the number that it is

_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"}
# Schemas that hold for the same value as the one that they are in.
_APPLIED = {"allOf", "anyOf", "oneOf", "dependencies", *REFERENCES}
_ALWAYS_COMBINED = {"not", "if", "dependentSchemas"}
# Keywords of objects, which a schema beside them may extend.
_OF_OBJECTS = _OPEN | {"properties", "required", "minProperties", "dependentRequired"}


def closed(schema: Schema) -> Schema:
    """Return a schema whose objects have only the properties that they name, as xgrammar has them.

    A model that may invent properties can write on for ever. An object stays as it is if it says
    which other properties it has, or needs more than those it names. So do all objects of a schema
    that combines several for one value, where one must not forbid the properties of another.
    """
    copied: Schema = json.loads(json.dumps(schema))
    parts = list(schemas(copied))
    if any(map(_combines, parts)):
        return schema
    for part in parts:
        names = part.get("properties")
        if isinstance(names, dict) and not part.keys() & _OPEN and _is_enough(part, set(names)):
            part["additionalProperties"] = False
    return copied


def _is_enough(schema: Schema, names: set[str]) -> bool:
    """Return whether an object with these properties alone may be an instance."""
    required, min_properties = schema.get("required"), schema.get("minProperties", 0)
    if isinstance(required, list) and not names.issuperset(map(str, required)):
        return False
    return not isinstance(min_properties, int | float) or min_properties <= len(names)


def _combines(schema: Schema) -> bool:
    """Return whether a schema and another one, or two others, hold for the same object."""
    applied = schema.keys() & _APPLIED
    parts = schema.get("allOf")
    return bool(
        schema.keys() & _ALWAYS_COMBINED
        or len(applied) > 1
        or (isinstance(parts, list) and len(parts) > 1)
        or (applied and schema.keys() & _OF_OBJECTS)
    )


def types_of(root: Schema, key: str) -> frozenset[str]:
    """Return the types of JSON that a schema allows for a property of its instances, an integer
    where it allows a number. Schemas that do not say so, or contradict themselves, allow all."""
    known: dict[tuple[int, bool], frozenset[str]] = {}

    def types(schema: Any, within: bool, depth: int) -> frozenset[str]:
        """Return the types of the property, or of the instance itself."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ANY_TYPE
        place = id(schema), within
        if place not in known:
            known[place] = ANY_TYPE  # of a schema that refers to itself
            known[place] = combined(schema, within, depth + 1)
        return known[place]

    def combined(schema: Schema, within: bool, depth: int) -> frozenset[str]:
        if within:
            named, other = schema.get("properties"), schema.get("additionalProperties")
            part = named.get(key, other) if isinstance(named, dict) else other
            allowed = types(part, False, depth)
        else:
            allowed = _own_types(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            allowed &= types(value_at(root, reference[1:]), within, depth)
        for subschema in _listed(schema, "allOf"):
            allowed &= types(subschema, within, depth)
        for name in ("anyOf", "oneOf"):
            kinds = {types(option, within, depth) for option in _listed(schema, name)} - {ANY_TYPE}
            allowed &= frozenset().union(*kinds) if kinds else ANY_TYPE
        return allowed or ANY_TYPE

    return types(root, True, 0)


def fits(root_value: Any, root: Schema) -> bool:
    """Return whether a value of JSON may be an instance of a schema: by types, listed values,
    bounds, properties and items, and references within it. Patterns, formats, `not` and conditions
    are not looked at."""
    known: dict[tuple[int, int], bool] = {}

    def matches(value: Any, schema: Any, depth: int) -> bool:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or len(known) > _MAX_PAIRS:
            return schema is not False
        pair = id(value), id(schema)
        if pair not in known:
            known[pair] = True  # of a schema that refers to itself
            known[pair] = all(checks(value, schema, depth + 1))
        return known[pair]

    def checks(value: Any, schema: Schema, depth: int) -> Iterator[bool]:
        kind = TYPES[type(value)]
        whole = isinstance(value, float) and value.is_integer()
        yield not _own_types(schema).isdisjoint({kind, "integer"} if whole else {kind})
        for name, values in (("enum", schema.get("enum")), ("const", [schema.get("const")])):
            yield name not in schema or not isinstance(values, list) or value in values
        size = len(value) if isinstance(value, str | list | dict) else value
        for name, sign in zip(_BOUNDS.get(kind, ()), (1, -1), strict=False):
            bound = schema.get(name)
            yield not isinstance(bound, int | float) or sign * size >= sign * bound
        if isinstance(value, dict):
            needed = {key for key in _listed(schema, "required") if isinstance(key, str)}
            yield value.keys() >= needed
            named = schema.get("properties")
            named = named if isinstance(named, dict) else {}
            other = "patternProperties" in schema or schema.get("additionalProperties")
            yield all(matches(item, named.get(key, other), depth) for key, item in value.items())
        if isinstance(value, list):
            first = _listed(schema, "prefixItems") or _listed(schema, "items")
            yield all(matches(*pair, depth) for pair in zip(value, first, strict=False))
            items = schema.get("items")
            yield all(matches(item, items, depth) for item in value[len(first) :])
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield matches(value, value_at(root, reference[1:]), depth)
        yield all(matches(value, subschema, depth) for subschema in _listed(schema, "allOf"))
        for name in ("anyOf", "oneOf"):
            parts = _listed(schema, name)
            yield not parts or any(matches(value, part, depth) for part in parts)

    return matches(root_value, root, 0)


def _own_types(schema: Schema) -> frozenset[str]:
    """Return types that `type`, `enum`, `const` and OpenAPI's `nullable` allow."""
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else _listed(schema, "type")
    allowed = ANY_TYPE.intersection(kind for kind in kinds if isinstance(kind, str)) or ANY_TYPE
    allowed |= {"integer"} if "number" in allowed else set()
    allowed |= {"null"} if schema.get("nullable") is True else set()
    values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
    return allowed.intersection(TYPES[type(value)] for value in values) if values else allowed


def _listed(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
