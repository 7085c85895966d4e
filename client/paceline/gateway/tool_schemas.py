"""Schemas of tools: objects whose other properties are left open are closed."""

from __future__ import annotations

import json

from paceline.sampling.json_schema import REFERENCES, Schema, schemas

_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"}
# Schemas that hold for the same value as the one that they are in.
_APPLIED = {"allOf", "anyOf", "oneOf", "dependencies", *REFERENCES}
_ALWAYS_COMBINED = {"not", "if", "dependentSchemas"}
# Keywords of objects, which a schema beside them may extend.
_OF_OBJECTS = _OPEN | {"properties", "required", "minProperties", "dependentRequired"}


def closed(schema: Schema) -> Schema:
    """A schema whose objects have no other properties than those they name, as xgrammar has them.

    A model that may invent properties can write on for ever. An object stays as it is if it says
    which other properties it has, or needs more than those it names. So do all objects of a schema
    that combines several for one value, where one must not forbid the properties of another.
    """
    copied: Schema = json.loads(json.dumps(schema))
    found = list(schemas(copied))
    if any(map(_combines, found)):
        return schema
    for each in found:
        names = each.get("properties")
        if isinstance(names, dict) and not each.keys() & _OPEN and _is_enough(each, set(names)):
            each["additionalProperties"] = False
    return copied


def _is_enough(schema: Schema, names: set[str]) -> bool:
    """Whether an object with these properties alone may be an instance."""
    required, least = schema.get("required"), schema.get("minProperties", 0)
    if isinstance(required, list) and not names.issuperset(map(str, required)):
        return False
    return not isinstance(least, int | float) or least <= len(names)


def _combines(schema: Schema) -> bool:
    """Whether a schema and another one, or two others, hold for the same object."""
    applied = schema.keys() & _APPLIED
    parts = schema.get("allOf")
    return bool(
        schema.keys() & _ALWAYS_COMBINED
        or len(applied) > 1
        or (isinstance(parts, list) and len(parts) > 1)
        or (applied and schema.keys() & _OF_OBJECTS)
    )
