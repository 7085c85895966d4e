"""Grammars of constrained texts: the tokens that may come next.

The grammar library is imported with the first constraint, so that verifiers without any run
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 64 << 10

Kind = Literal["json_schema", "regex", "grammar"]
"""What a constraint is written as: its field of the sampling parameters."""
_NAMES: dict[Kind, str] = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
}

# White space between two parts of a text: as much as people write, but not without limit.
_WHITESPACE = r"[ \n\r\t]{0,32}"


class GrammarError(ValueError):
    """A constraint is not supported, or a text does not match its constraint."""


class Grammars:
    """Compiles grammars for the tokens of one model. Thread-safe.

    Args:
        tokenizer_json: The model's tokenizer.json; empty: it has none.
        vocab_size: Width of the logits. Ids that the tokenizer lacks are never allowed.
        eos_token_ids: Tokens that end a text; they are allowed where the text is complete.
    """

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def compile(self, kind: Kind, source: str) -> Grammar:
        """Compile a constraint. May take a second: call it in a thread.

        References of a schema to other documents are not resolved. A grammar is in Lark's notation,
        with the extensions of llguidance, or in llama.cpp's GBNF, which has ``::=``.

        Raises:
            GrammarError: The source is invalid, unsatisfiable, too complex or uses an unsupported
                feature; or the model has no tokenizer, or no end-of-sequence token.
        """
        what = _NAMES[kind]
        if not self._tokenizer_json or not self._eos_token_ids:
            raise GrammarError(
                f"a {what} needs a model with a tokenizer and an end-of-sequence token"
            )
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(
                    source, overrides={"whitespace_pattern": _WHITESPACE}
                )
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(source)
            else:
                grammar = LLMatcher.grammar_from_lark(any_to_lark(source))
        except (ValueError, RecursionError, GbnfToLarkError) as error:
            raise GrammarError(f"the {what} cannot be read: {error}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the {what} is not supported: {matcher.get_error()}")
        return Grammar(matcher, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class Grammar:
    """A compiled constraint. Immutable."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self, output: Sequence[int] = ()) -> Guide:
        """Begin one text after ``output``. Raises ``GrammarError``: ``output`` is not the beginning
        of a text of this grammar."""
        guide = Guide(self._matcher.deep_copy(), self._vocab_size)
        for token in output:
            guide.push(token)
        return guide


class Guide:
    """The state of a grammar after the tokens of one text. One thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of logits ``[V]``, on the CPU, with -inf for every token that may not come next.
        Raises ``GrammarError``: the constraint is too complex for the library."""
        allowed = np.unpackbits(self.allowed(), count=self._vocab_size, bitorder="little")
        return logits.masked_fill(torch.from_numpy(allowed == 0), -torch.inf)

    def allowed(self) -> NDArray[np.uint8]:
        """Tokens that may come next, 8 a byte, the lowest id in the lowest bit. Raises
        ``GrammarError``: the constraint is too complex for the library."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def push(self, token: int) -> None:
        """Append an emitted token. Raises ``GrammarError``: the token may not come next."""
        self._matcher.consume_token(token)
        self._check()

    def pop(self, tokens: int) -> None:
        """Remove the newest tokens."""
        self._matcher.rollback(tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"the text does not match its constraint: {self._matcher.get_error()}"
            )
