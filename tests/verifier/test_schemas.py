"""Schemas: as tools they mean what they mean as a response format, and annotations mean nothing."""

import asyncio
import json
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from test_grammar import GRAMMARS, allowed, of

from paceline.gateway.requests import Function, Tool, ToolUse
from paceline.gateway.tool_schemas import closed
from paceline.sampling.json_schema import SchemaTooComplex, without_annotations
from paceline.verifier.grammar import Grammar, GrammarError

DRAFT4 = "http://json-schema.org/draft-04/schema#"
DRAFT7 = "http://json-schema.org/draft-07/schema#"
INT = {"type": "integer"}
# A schema, an instance and one that is none.
REFERENCES: dict[str, Any] = {
    "pointer": {"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": INT}},
    "escaped pointer": {
        "properties": {"x": {"$ref": "#/$defs/a~1b~0c%20d"}}, "$defs": {"a/b~c d": INT},
    },
    "pointer elsewhere": {
        "properties": {"x": {"$ref": "#/components/schemas/n"}},
        "components": {"schemas": {"n": {"$ref": "#/components/schemas/m"}, "m": INT}},
    },
    "$id": {
        "$id": "https://example.com/a.json",
        "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": INT},
    },
    "absolute": {
        "$id": "https://example.com/a.json",
        "properties": {"x": {"$ref": "https://example.com/a.json#/$defs/n"}}, "$defs": {"n": INT},
    },
    "relative": {
        "$id": "https://example.com/a.json",
        "properties": {"x": {"$ref": "b.json"}}, "$defs": {"n": {"$id": "b.json", **INT}},
    },
    "nested base": {
        "$id": "https://example.com/a.json",
        "properties": {"x": {"$ref": "b.json#/$defs/m"}},
        "$defs": {"n": {"$id": "b.json", "$defs": {"m": {"$ref": "#/$defs/k"}, "k": INT}}},
    },
    "urn": {
        "$id": "urn:uuid:deadbeef-1234-0000-0000-4321feebdaed",
        "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": INT},
    },
    "anchor": {"properties": {"x": {"$ref": "#n"}}, "$defs": {"m": {"$anchor": "n", **INT}}},
    "anchor of draft 7": {
        "$schema": DRAFT7,
        "properties": {"x": {"$ref": "#n"}}, "definitions": {"m": {"$id": "#n", **INT}},
    },
    "id of draft 4": {
        "$schema": DRAFT4, "id": "http://example.com/a",
        "properties": {"x": {"$ref": "#/definitions/n"}}, "definitions": {"n": INT},
    },
    "anchor of draft 4": {
        "$schema": DRAFT4,
        "properties": {"x": {"$ref": "#n"}}, "definitions": {"m": {"id": "#n", **INT}},
    },
    "property named $ref": {
        "properties": {"x": INT, "$ref": {"type": "string"}, "$id": {"type": "string"}},
    },
    "reference in data": {"properties": {"x": {"enum": [1, {"$ref": "#/a"}]}}},
}  # fmt: skip


def use(schema: Any, mode: Any) -> ToolUse:
    tools = [Tool(function=Function(name=name, parameters=schema)) for name in ("f", "g")]
    return ToolUse(tools, mode, name="f")


@pytest.mark.parametrize("name", REFERENCES)
def test_references_lead_where_they_led(name: str) -> None:
    schema = {"type": "object", "required": ["x"], **REFERENCES[name]}
    modes = [("required", '[{"name":"g","arguments":%s}]')]
    if name != "nested base":  # the grammar library follows none of a part with its own address
        modes.append(("named" if name == "pointer" else "", "%s"))
    for mode, around in modes:
        grammar = of("json_schema", json.dumps(use(schema, mode).schema() if mode else schema))
        assert "<end>" in allowed(grammar, around % '{"x":1}')
        assert "a" not in allowed(grammar, around.partition("%s")[0] + '{"x":')


def test_a_recursive_schema_is_that_of_its_tool() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}
    grammar = of("json_schema", json.dumps(use(schema, "required").schema()))
    assert "<end>" in allowed(grammar, '[{"name":"f","arguments":{"x":{"x":{}}}}]')


LONG = "é" * 100_000
BOMBS: dict[str, Any] = {
    "references to a long name": {
        "properties": {LONG: {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"}] * 300,
    },
    "many parts of a long name": {"properties": {LONG: {"anyOf": [{}] * 300}}},
    "relative addresses of a long one": {
        "$id": f"http://a/{LONG}/", "anyOf": [{"$id": "a"}] * 300,
    },
    "nested long names": json.loads(
        f'{{"properties":{{"{LONG[:2000]}":' * 150 + "{}" + "}}" * 150
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_names_of_parts_take_no_more_than_a_schema_may(name: str) -> None:
    """They have those of the parts around them before them: kilobytes could become gigabytes."""
    source = json.dumps(BOMBS[name])
    tracemalloc.start()
    try:
        without_annotations(source)
        with suppress(SchemaTooComplex):
            written = json.dumps(use(BOMBS[name], "required").schema())
            assert len(written) < 4 * len(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


TEXT = {"type": "string"}
ANNOTATIONS: list[tuple[Any, dict[str, Any]]] = [
    *((TEXT, {"format": name}) for name in (
        *("password", "path", "file-path", "binary", "byte", "base64", "uri-reference", "url"),
        *("int64", "idn-email", "regex", "json-pointer", "iri", "made up", "color"),
    )),
    (INT, {"format": "int64"}), ({"type": "number"}, {"format": "float"}),
    ({"type": "array", "items": TEXT}, {"uniqueItems": False}),
    (TEXT, {"title": "t", "description": "d", "$comment": "c", "default": "x", "examples": [1]}),
    (TEXT, {"deprecated": True, "readOnly": True, "writeOnly": False, "example": {"$ref": "#/no"}}),
    (TEXT, {"contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {"not": 5}}),
    (TEXT, {"nullable": False, "x-order": 1, "discriminator": {"propertyName": "a"}}),
    (INT, {"if": {"minimum": 5}}), (INT, {"then": False}), (INT, {"not": False}),
    ({"type": "array"}, {"minContains": 1, "unevaluatedItems": True}),
    ({"type": "object"}, {"dependentRequired": {}, "propertyNames": True, "minProperties": 0}),
    ({"type": "object"}, {"required": None, "properties": None, "$defs": None, "format": None}),
]  # fmt: skip


def test_annotations_are_no_constraints() -> None:
    """One schema with all of them; the grammar library refuses those that it cannot enforce."""
    parts = {f"a{at}": {**schema, **more} for at, (schema, more) in enumerate(ANNOTATIONS)}
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    assert "{" in allowed(of("json_schema", json.dumps(schema)), "")


# What pydantic and zod write: a schema, JSON that is an instance, and JSON that is none.
LIBRARIES: dict[str, tuple[Any, list[str], list[str]]] = {
    "names of an enumeration": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        ["{}", '{"a": 1}', '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "x"}'],
    ),
    "a constant name": (
        {"type": "object", "propertyNames": {"type": "string", "const": "a"}, "required": ["a"]},
        ['{"a": 1}'], ["{}", '{"b": 1}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INT},
        ["{}", '{"xa": 1}'], ['{"a": 1}', '{"xa": "x"}'],
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}, "minProperties": 0},
        ["{}", '{"a": 1}', '{"ab": 1}'], ['{"": 1}', '{"abc": 1}'],
    ),
    "decimal": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"1"', '"-1.5"', '".5"'], ['"-"', '"."', '""', '"a"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_schemas_of_libraries(name: str) -> None:
    schema, right, wrong = LIBRARIES[name]
    grammar = of("json_schema", json.dumps({"type": "array", "items": schema}))
    assert [text for text in [*right, *wrong] if is_item(grammar, text)] == right


def is_item(grammar: Grammar, text: str) -> bool:
    try:
        return "]" in allowed(grammar, f"[{text}")
    except GrammarError:
        return False


def test_look_ahead_that_a_format_has_is_left_out() -> None:
    pattern = r"^(?!\.)(?!.*\.\.)([a-z.]*)@([a-z]+\.)+$"
    schema = {"pattern": pattern, "format": "email"}
    found = json.loads(without_annotations(json.dumps(schema)))
    assert found == {**schema, "pattern": r"^([a-z.]*)@([a-z]+\.)+$"}
    other = json.dumps({"pattern": pattern, "format": "date"})
    assert json.loads(without_annotations(other)) == json.loads(other)


def test_only_annotations_are_left_out() -> None:
    kept = {
        "properties": {"title": INT, "default": TEXT, "format": {"const": {"title": 1}}},
        "patternProperties": {"^description$": {"enum": [{"default": 1}]}},
        "items": [{"format": "date"}, True], "uniqueItems": True, "minItems": 1,
        "if": {"minProperties": 1}, "then": {"maxProperties": 2}, "not": {"required": ["x"]},
        "x-own": {"description": "unknown keywords may be the target of a reference"},
    }  # fmt: skip
    assert json.loads(without_annotations(json.dumps(kept))) == kept
    for text in ("", "{", "[1,", "nonsense", '{"minimum": 1e999}', "true"):
        assert without_annotations(text) == text


def test_descriptions_do_not_count_for_the_limit() -> None:
    names = [f"p{index}" for index in range(170)]
    properties = {name: {"type": "string", "description": "x" * 600} for name in names}
    asyncio.run(GRAMMARS.compile("json_schema", json.dumps({"properties": properties})))
    properties = {name + "x" * 600: {"type": "string"} for name in names}
    with pytest.raises(GrammarError, match="expected at most 65536"):
        asyncio.run(GRAMMARS.compile("json_schema", json.dumps({"properties": properties})))


def test_half_a_surrogate_pair_is_refused() -> None:
    for schema in (
        {"enum": ["\ud800"]}, {"type": "string", "pattern": "a\udfff"},
        {"properties": {"\ud83d": INT}}, {"items": {"properties": {"a": {"const": ["\udc00"]}}}},
    ):  # fmt: skip
        with pytest.raises(GrammarError, match="half a surrogate pair"):
            of("json_schema", json.dumps(schema))


NAMED = {"type": "object", "properties": {"a": INT}}
SHUT = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, SHUT),
        ({**NAMED, "required": ["a"]}, {**SHUT, "required": ["a"]}),
        ({**NAMED, "required": ["b"]}, None),
        ({**NAMED, "minProperties": 2}, None),
        ({**NAMED, "patternProperties": {"^x": INT}}, None),
        ({**NAMED, "additionalProperties": INT}, None),
        ({**NAMED, "unevaluatedProperties": False}, None),
        ({**NAMED, "propertyNames": {"maxLength": 3}}, None),
        ({**NAMED, "if": NAMED, "then": {"required": ["b"]}}, None),
        ({**NAMED, "not": {"required": ["b"]}}, None),
        ({**NAMED, "dependentSchemas": {"a": {"required": ["b"]}}}, None),
        ({**NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, None),
        ({**NAMED, "$ref": "#/$defs/b", "$defs": {"b": NAMED}}, None),
        ({"allOf": [{"$ref": "#/$defs/b"}, NAMED], "$defs": {"b": NAMED}}, None),
        ({"allOf": [NAMED]}, {"allOf": [SHUT]}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$ref": "#/$defs/b", "$defs": {"b": NAMED}}, {"$ref": "#/$defs/b", "$defs": {"b": SHUT}}),
        ({"items": NAMED}, {"items": SHUT}),
        ({"const": NAMED}, None),
        ({"enum": [NAMED]}, None),
        ({"default": NAMED, "examples": [NAMED]}, None),
    ],
)  # fmt: skip
def test_closing_an_object_contradicts_nothing(schema: Any, expected: Any) -> None:
    assert closed(schema) == (schema if expected is None else expected)


def test_an_object_that_needs_more_than_it_names_can_be_written() -> None:
    schema = {**NAMED, "required": ["a", "b"]}
    grammar = of("json_schema", json.dumps(use(schema, "required").schema()))
    assert "<end>" in allowed(grammar, '[{"name":"f","arguments":{"a":1,"b":2}}]')


NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
LIST = {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}
SHUT_INT = {**SHUT, "required": ["a"]}
ENDING: list[Any] = [
    {**SHUT_INT, "patternProperties": {"^a$": INT}},
    {**SHUT_INT, "patternProperties": {"^(a|b)$": INT}, "required": ["b"]},
    {**SHUT, "properties": {}, "patternProperties": {"^[a-c]$": INT}, "required": ["a", "b", "c"]},
    {**SHUT, "patternProperties": {"^a$": INT, "^b$": INT}, "required": ["b"]},
    {**SHUT_INT, "patternProperties": {"^a$": {"maximum": 5, "minimum": 4}}},
    {"anyOf": [{**LIST, "items": {**SHUT, "patternProperties": {"^a$": INT}}}, INT]},
    {**SHUT, "properties": {"a": INT, "n": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}},
    {"anyOf": [{"$ref": "#/$defs/n"}, INT], "$defs": {"n": LIST}},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
]


@pytest.mark.parametrize("schema", ENDING)
def test_each_text_of_a_schema_can_end(schema: Any) -> None:
    """Whatever is chosen, some token may follow. Of 20 texts each, chosen by chance."""
    schema = json.loads(json.dumps(schema).replace('{"type": "integer"}', '{"enum": [4, 5]}'))
    grammar = of("json_schema", json.dumps(schema))
    for seed in range(20):
        guide, draws, token = grammar.begin(), random.Random(seed), -1
        while token != 0:
            guide.prepare()
            found = guide.allowed()
            guide.check()
            assert found is not None
            bits = np.unpackbits(found, bitorder="little")
            token = draws.choice(np.flatnonzero(bits).tolist())
            guide.push(token)


@pytest.mark.parametrize("schema", [NODE, LIST, {"$ref": "#/$defs/n"}])
def test_a_schema_whose_values_have_no_end_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="Unsatisfiable"):
        of("json_schema", json.dumps({**schema, "$defs": {"n": {"anyOf": [NODE, LIST]}}}))


@pytest.mark.parametrize(
    ("grammar", "name"),
    [
        ('start: "x" | a\na: "y" a', "a"),
        ('start: "x" a?\na: "y" b | b "y"\nb: "z" (a | b){1,2}', "b"),
        ('start: "q" (A | "x")\nA: /a+/ & /b+/', "A"),
        ('start: "q" A\nA: B & ~B\nB: /a/', "A"),
        ('root ::= "(" root ")"', "start"),
        ('root ::= "a" | x\nx ::= [b] x # "x"', "x"),
        ('start: "x"\n  | a // "a"\na: ("y" | b) a ~ 2\nb: "z"', "a"),
    ],
)
def test_a_rule_that_no_text_completes_is_refused(grammar: str, name: str) -> None:
    with pytest.raises(GrammarError, match=f"no text completes {name}$"):
        of("grammar", grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "x" | a\na: "y" a? | "y" a "z"',
        'start: "x" a{0,2} b ~ 0..1 [a]\na: "y" start*\nb: "a: b a"',
        'root ::= "[" (root ("," root)*)? "]" # root ::= root',
        'start: A\nA: /[ab]+/ & ~/a+/\nb: "//" A // b: b',
        'start: "x" j\nj: %json {"type": "boolean"}',
    ],
)
def test_rules_that_texts_complete_are_taken(grammar: str) -> None:
    of("grammar", grammar)
