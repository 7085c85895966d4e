"""Grammars: the mask leaves exactly the tokens that may come next."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.verifier.grammar import Grammar, GrammarError, Grammars

END = 256
VOCABULARY = 300
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end token; higher ids are unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER.to_str().encode(), VOCABULARY, [END])


def compiled(schema: Any = SCHEMA) -> Grammar:
    return GRAMMARS.compile("json_schema", json.dumps(schema))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(grammar: Grammar, text: str) -> set[str]:
    """The tokens that may come after a text."""
    masked = grammar.begin(ids(text)).mask(torch.zeros(VOCABULARY))
    assert set(masked.tolist()) <= {0.0, -torch.inf}
    found = masked.isfinite().nonzero()[:, 0].tolist()
    return {"<end>" if token == END else TOKENIZER.decode([token]) for token in found}


def test_the_mask_leaves_what_may_come_next() -> None:
    grammar = compiled()
    white = {" ", "\n", "\r", "\t"}
    assert allowed(grammar, "") == {"{"}
    assert allowed(grammar, '{"ok":') == {"t", "f"} | white
    assert allowed(grammar, '{"ok":true,"n":') == set("0123456789") | white
    assert allowed(grammar, '{"ok":true,"n":7}') == {"<end>"}
    assert allowed(grammar, '{"ok":' + " " * 32) == {"t", "f"}, "white space has an end"


def test_a_mask_changes_no_other_logits_and_not_its_argument() -> None:
    logits = torch.randn(VOCABULARY, dtype=torch.bfloat16)
    before = logits.clone()
    masked = compiled().begin().mask(logits)
    assert torch.equal(logits, before)
    brace = ids("{")[0]
    assert masked.isfinite().nonzero().tolist() == [[brace]]
    assert masked[brace] == logits[brace]


def test_pop_restores_a_guide() -> None:
    guide = compiled().begin(ids('{"ok":'))
    before = guide.mask(torch.zeros(VOCABULARY))
    for token in ids("true,"):
        guide.push(token)
    guide.pop(5)
    assert torch.equal(guide.mask(torch.zeros(VOCABULARY)), before)


@pytest.mark.parametrize("text", ["[", '{"ok":1', '{"ok":true,"n":7}x'])
def test_a_text_that_does_not_match_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        compiled().begin(ids(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "http://example.org/schema"},
        {"type": "string", "pattern": "("},
        {"not": {"type": "string"}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        [1],
        "text",
    ],
)
def test_an_unsupported_schema_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="schema"):
        compiled(schema)


def test_a_schema_needs_an_end_of_sequence_token() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        Grammars(TOKENIZER.to_str().encode(), VOCABULARY, []).compile("json_schema", "{}")


def test_regular_expressions_and_grammars() -> None:
    assert allowed(GRAMMARS.compile("regex", "[ab]c|d"), "") == {"a", "b", "d"}
    assert allowed(GRAMMARS.compile("regex", "[ab]c|d"), "ac") == {"<end>"}
    for source in ('start: "a" (B | "c")\nB: /[xy]/', 'root ::= "a" (b | "c")\nb ::= [xy]'):
        assert allowed(GRAMMARS.compile("grammar", source), "a") == {"x", "y", "c"}


@pytest.mark.parametrize(
    ("kind", "source"),
    [("regex", "("), ("regex", "(?=a)a"), ("grammar", "start: ("), ("grammar", "nonsense")],
)
def test_wrong_expressions_and_grammars_are_refused(kind: Any, source: str) -> None:
    with pytest.raises(GrammarError, match="regular expression" if kind == "regex" else "grammar"):
        GRAMMARS.compile(kind, source)
