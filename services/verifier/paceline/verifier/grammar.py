"""Texts that are instances of a JSON schema: which tokens may come next.

The grammar library is imported when the first schema arrives: verifiers that never see one do
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 64 << 10

# White space between two parts of a text: as much as people write, but no endless run of it.
_WHITESPACE = r"[ \n\r\t]{0,32}"


class GrammarError(ValueError):
    """A schema that cannot be followed, or a text that does not follow one."""


class Grammars:
    """Makes grammars for the tokens of one model. Safe to use from several threads.

    Args:
        tokenizer_json: the model's tokenizer.json; empty: it has none.
        vocab_size: width of the logits; ids that the tokenizer does not know are never allowed.
        eos_token_ids: tokens that end a text; they may come where the schema is fulfilled.
    """

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def compile(self, schema: str) -> Grammar:
        """The grammar of a JSON schema. May take a second: call it in a thread.

        No reference to another document is followed.

        Raises:
            GrammarError: the schema is wrong, unsatisfiable, too complex or uses what is not
                understood; or the model has no tokenizer, or no end-of-sequence token.
        """
        if not self._tokenizer_json or not self._eos_token_ids:
            raise GrammarError(
                "the model has no tokenizer, or no end-of-sequence token: it cannot follow a schema"
            )
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _WHITESPACE}
            )
        except ValueError as error:
            raise GrammarError(f"the JSON schema is no JSON object: {error}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the JSON schema cannot be followed: {matcher.get_error()}")
        return Grammar(matcher, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class Grammar:
    """What every text of a schema may be; never changes."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self, output: Sequence[int] = ()) -> Guide:
        """Follow one text, which goes on after ``output``.

        Raises:
            GrammarError: ``output`` begins no text of this grammar.
        """
        guide = Guide(self._matcher.deep_copy(), self._vocab_size)
        for token in output:
            guide.push(token)
        return guide


class Guide:
    """Follows one text token by token. Belongs to one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of logits ``[V]``, on the CPU, with -inf for every token that may not come next.

        Raises:
            GrammarError: the library gave up on a schema that is too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return logits.masked_fill(torch.from_numpy(allowed == 0), -torch.inf)

    def push(self, token: int) -> None:
        """Go on past an emitted token.

        Raises:
            GrammarError: it may not come next.
        """
        self._matcher.consume_token(token)
        self._check()

    def pop(self, tokens: int) -> None:
        """Take back the newest tokens."""
        self._matcher.rollback(tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the text cannot follow its schema: {self._matcher.get_error()}")
