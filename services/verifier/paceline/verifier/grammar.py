"""Grammars of constrained texts: the tokens that may come next.

Whatever somebody writes as a constraint, its cost is bounded. It is compiled first in a process of
its own (``grammar_check.py``) with limits of time and memory, which is killed with its request,
and then here. Few are compiled at a time. The limits are in :mod:`paceline.service.limits`. The
library bounds the work for a mask, at some tenths of a second; where masks are dear, the engine
does not wait for them (``engine/masks.py``).

What compiling needs of the tokenizer is made while the verifier starts (`Grammars.prepare`), and
verifiers run without the grammar library until there is a constraint.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import json_schema
from paceline.service import limits
from paceline.service.tasks import in_thread
from paceline.sources.grammar import TokenForms
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# What a constraint is written as: its field of the sampling parameters.
Kind = Literal["json_schema", "regex", "grammar"]
_NAMES: dict[Kind, str] = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
}

_CHECK = Path(__file__).with_name("grammar_check.py")
_RECENT = 16
_SMALL_BYTES = 8 << 20
# Masks that a text keeps, of a drafted path and of the newest tokens: each has a bit a token.
_MASKS = 40
_NEWEST = 0.25  # weight of the newest mask in the mean time of a grammar's masks


class GrammarError(ValueError):
    """A constraint is not supported, too complex, or a text does not match its constraint. The
    message has no part of the text."""


class GrammarsBusy(Exception):
    """Too many constraints are compiled or in use; the same one may be taken later."""


class Grammars:
    """Compiles grammars for the tokens of one model. Used on the event loop.

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
        self._places = asyncio.Semaphore(limits.CONSTRAINTS_COMPILING)
        self._waiting = 0
        self._live_bytes = 0
        self._live: weakref.WeakValueDictionary[tuple[Kind, str], Grammar] = (
            weakref.WeakValueDictionary()
        )
        self._recent: deque[Grammar] = deque(maxlen=_RECENT)

    def prepare(self) -> None:
        """Make what compiling needs of the tokenizer. Of a large one it takes a second, in which no
        other thread runs: call it before texts are served."""
        if self._tokenizer_json and self._eos_token_ids:
            with suppress(Exception):  # whoever sends a constraint is told what is wrong
                self._forms  # noqa: B018 - it is kept

    async def compile(self, kind: Kind, source: str) -> Grammar:
        """Compile a constraint, or take it from those in use. Cancellation ends it at once.

        References of a schema to other documents are not resolved. A grammar is in Lark's notation,
        with the extensions of llguidance, or in llama.cpp's GBNF, which has ``::=``. Raises
        ``GrammarError`` if the source is invalid, unsatisfiable, too complex or uses an unsupported
        feature; or the model has no tokenizer, or no end-of-sequence token, and ``GrammarsBusy`` if
        too many are compiled or in use.
        """
        what = _NAMES[kind]
        if not self._tokenizer_json or not self._eos_token_ids:
            raise GrammarError(
                f"a {what} needs a model with a tokenizer and an end-of-sequence token"
            )
        if self._waiting >= limits.CONSTRAINTS_WAITING:
            raise GrammarsBusy(f"{self._waiting} constraints wait to be compiled")
        self._waiting += 1
        try:
            async with self._places:
                if kind == "json_schema":
                    source = await in_thread(partial(json_schema.without_annotations, source))
                try:
                    size = len(source.encode())
                except UnicodeEncodeError:
                    raise GrammarError(f"the {what} has half a surrogate pair") from None
                if size > limits.CONSTRAINT_BYTES:
                    raise GrammarError(
                        f"the {what} has {size} bytes, expected at most {limits.CONSTRAINT_BYTES}"
                    )
                known = self._live.get((kind, source))
                if known is not None and not known.lexer.failed:
                    return known
                return await self._compile(kind, source)
        finally:
            self._waiting -= 1

    async def _compile(self, kind: Kind, source: str) -> Grammar:
        prepared, size = await _check(kind, source)
        if self._live_bytes + size > limits.CONSTRAINTS_LIVE_BYTES:
            self._recent.clear()
        if self._live_bytes + size > limits.CONSTRAINTS_LIVE_BYTES:
            raise GrammarsBusy(f"constraints in use take {self._live_bytes} bytes")
        matcher = await in_thread(lambda: self._matcher(prepared))
        await in_thread(lambda: self._forms)
        if matcher.is_error():
            raise GrammarError(f"the {_NAMES[kind]} is not supported: {matcher.get_error()}")
        try:
            grammar = await in_thread(partial(Grammar, matcher, self._forms))
        except GrammarError as error:
            raise GrammarError(f"no token can begin the {_NAMES[kind]}: {error}") from None
        self._live[kind, source] = grammar
        self._live_bytes += size
        weakref.finalize(grammar, self._freed, size).atexit = False
        if size <= _SMALL_BYTES:
            self._recent.append(grammar)
        return grammar

    def _freed(self, size: int) -> None:
        self._live_bytes -= size

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        bounds = LLParserLimits(verbose_errors=False, max_lexer_states=limits.CONSTRAINT_STATES)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=bounds)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )

    @cached_property
    def _forms(self) -> TokenForms:
        tokenizer = self._tokenizer
        return TokenForms([tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)])


async def _check(kind: Kind, source: str) -> tuple[str, int]:
    """Compile a constraint in a process of its own; returns what the library reads, and the memory
    that it took. Raises ``GrammarError`` if it cannot be compiled within the limits;
    ``GrammarsBusy``: the machine had no time for it."""
    what = _NAMES[kind]
    request = {
        "kind": kind,
        "source": source,
        "overrides": {"whitespace_pattern": json_schema.WHITESPACE},
        "seconds": limits.CONSTRAINT_SECONDS,
        "memory": limits.CONSTRAINT_MEMORY,
        "states": limits.CONSTRAINT_STATES,
    }
    process = _start(what)
    try:
        written = await in_thread(partial(_answer, process, json.dumps(request).encode()))
    except subprocess.TimeoutExpired:
        raise GrammarsBusy(
            f"the {what} was not compiled within {limits.CONSTRAINT_WAIT_SECONDS:g} s"
        ) from None
    finally:
        process.kill()  # it has no effect on one that has ended
    if process.returncode != 0:
        raise GrammarError(
            f"the {what} takes more than {limits.CONSTRAINT_SECONDS} s or "
            f"{limits.CONSTRAINT_MEMORY >> 20} MiB to compile; make it simpler, such as by smaller "
            "numbers in multipleOf and in repetitions"
        )
    answer = json.loads(written)
    if "error" in answer:
        raise GrammarError(f"the {what} {answer['error']}")
    return answer["grammar"], answer["bytes"]


def _start(what: str) -> subprocess.Popen[bytes]:
    """Start a process that compiles a constraint. Raises ``GrammarsBusy`` if there is none.

    It is no subprocess of asyncio: where the start of one is cancelled, it may wait for its pipes
    for ever.
    """
    from llguidance import _lib

    try:
        return subprocess.Popen(
            (sys.executable, "-I", "-S", str(_CHECK), str(_lib.__file__), json_schema.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"RUST_BACKTRACE": "0"},
        )
    except OSError as error:
        raise GrammarsBusy(f"no process can be started to compile the {what}: {error}") from error


def _answer(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Return what a process writes after a request; it has ended then. Blocks. Raises
    ``TimeoutExpired``: it takes too long."""
    with process:
        try:
            return process.communicate(request, limits.CONSTRAINT_WAIT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def is_allowed(allowed: NDArray[np.uint8], token: int) -> bool:
    """Tell whether a token is allowed, by the bits of :meth:`Guide.allowed`."""
    return bool(allowed[token >> 3] >> (token & 7) & 1)


def masked(logits: Tensor, allowed: NDArray[np.uint8]) -> Tensor:
    """Return a copy of logits ``[V]``, on the CPU, in float32, with -inf for every token that is
    not allowed.

    NumPy computes it: PyTorch would wake a team of threads of its own for a row this long, and the
    threads of the next step would wait for these.
    """
    bits = np.unpackbits(allowed, count=len(logits), bitorder="little")
    return torch.from_numpy(np.where(bits, logits.float().numpy(), np.float32(-np.inf)))


class Allowance:
    """The processor time that the engine's thread may still spend on masks in this step."""

    left = math.inf  # unit: seconds


class _Lexer:
    """What all texts of a constraint share in the library."""

    def __init__(self) -> None:
        # Held by the thread that uses it. The library waits for another one while it holds the
        # interpreter's lock, so that every thread would wait with it.
        self.lock = Lock()
        self.seconds = 0.0  # mean processor time of the newest masks. Unit: seconds.
        self.failed = False  # whether it has too many states for any text of it


class Grammar:
    """A compiled constraint, at its beginning or after some tokens. Immutable."""

    def __init__(
        self, matcher: LLMatcher, forms: TokenForms, origin: Grammar | None = None
    ) -> None:
        """Compute the first mask, which takes a while: make it in a thread. ``origin`` is the same
        constraint at its beginning, which is counted while it is used. Raises ``GrammarError`` if
        the constraint is not supported, or too complex."""
        self._matcher = matcher
        self._origin = origin
        self.forms = forms
        self.lexer: _Lexer = _Lexer() if origin is None else origin.lexer
        self.first: NDArray[np.uint8] | None = None  # the mask of its first token
        guide = Guide(self)
        guide.prepare()
        guide.check()
        self.first = guide.allowed()

    def begin(self) -> Guide:
        """Begin one text."""
        return Guide(self)

    def copied(self) -> LLMatcher:
        """Return the state of the library for one text."""
        return self._matcher.deep_copy()

    def after(self, output: Sequence[int]) -> Grammar:
        """Return the constraint of what follows ``output``. A long one takes a while: call it in a
        thread. Raises ``GrammarError``: ``output`` begins no text of this grammar."""
        matcher = self.copied()
        with self.lexer.lock:
            matcher.consume_tokens(list(output))
        return Grammar(matcher, self.forms, self)


class Guide:
    """The state of a grammar after the tokens of one text. One thread at a time may use it.

    It keeps the newest masks: the same places are asked for when a text is drafted, when a token is
    chosen, and when sources learn from it. Those behind the present place are kept for as long as
    the same tokens lead there.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._lexer = grammar.lexer
        self._matcher = grammar.copied()
        self.forms = grammar.forms  # of the vocabulary
        self.allowance = Allowance()  # of the engine that uses it
        # Tokens that were appended, and behind them those that were removed last.
        self._path: list[int] = []
        self._length = 0  # tokens of the path that are not removed
        # By the number of tokens before it, those asked for last.
        self._masks = {} if grammar.first is None else {0: grammar.first}
        # Where the library found no mask, as the number of tokens before it, and why.
        self._failed: tuple[int, str] | None = None

    @property
    def seconds(self) -> float:
        """Mean time of the newest masks of its grammar. Unit: seconds."""
        return self._lexer.seconds

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Use it on the engine's thread. Yields whether that is possible now: not while another
        thread computes a mask of the grammar, or when the time for masks is over."""
        if self.allowance.left <= 0 or not self._lexer.lock.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            self._lexer.lock.release()

    def allowed(self) -> NDArray[np.uint8] | None:
        """Return tokens that may come next, 8 a byte, the lowest id in the lowest bit; None if
        there are none, see :meth:`check`, or it would take too long now, see :meth:`prepare`."""
        cheap = self._lexer.seconds <= limits.MASK_SECONDS and self.allowance.left > 0
        if cheap and self._unknown:
            began = thread_time()
            self._compute()
            self.allowance.left -= thread_time() - began
        return self._masks.get(self._length)

    def check(self) -> None:
        """Raises ``GrammarError`` if no token may come next, or the constraint is too complex for
        the library. This depends on the text alone, not on what was asked for."""
        if self._failed is not None and self._failed[0] == self._length:
            raise GrammarError(self._failed[1])

    def prepare(self) -> None:
        """Compute what :meth:`allowed` returns, on another thread than the engine's."""
        with self._lexer.lock:
            if self._unknown:
                self._compute()

    @property
    def _unknown(self) -> bool:
        failed = self._failed is not None and self._failed[0] == self._length
        return self._length not in self._masks and not failed

    def _compute(self) -> None:
        began = thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._lexer.seconds += _NEWEST * (thread_time() - began - self._lexer.seconds)
        try:
            self._check()
        except GrammarError as error:
            self._failed = self._length, str(error)
            return
        self._masks[self._length] = bits
        if len(self._masks) > _MASKS:
            del self._masks[next(iter(self._masks))]

    def accepted_nodes(self, tree: TokenTree) -> list[int]:
        """Return the nodes of a tree whose paths may come next, in order."""
        if tree.is_chain:
            return list(range(self.accepts(tree.tokens)))
        inner = set(tree.parents)
        accepted: set[int] = set()
        for leaf in range(len(tree)):
            if leaf in inner:
                continue
            path = self.accepts(tree.path(leaf))
            node = leaf
            for _ in range(tree.depths[leaf] - path):
                node = tree.parents[node]
            while node >= 0:
                accepted.add(node)
                node = tree.parents[node]
        return sorted(accepted)

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def push(self, token: int) -> None:
        """Append an emitted token. Raises ``GrammarError`` if the token may not come next."""
        began = thread_time()
        self._matcher.consume_token(token)
        self.allowance.left -= thread_time() - began
        self._check()
        if self._length < len(self._path) and self._path[self._length] != token:
            del self._path[self._length :]
            for place in [place for place in self._masks if place > self._length]:
                del self._masks[place]
            if self._failed is not None and self._failed[0] > self._length:
                self._failed = None
        if self._length == len(self._path):
            self._path.append(token)
        self._length += 1

    def pop(self, tokens: int) -> None:
        """Remove the newest tokens."""
        self._length -= tokens
        if not self._matcher.rollback(tokens):
            self._restore()

    def _restore(self) -> None:
        """Begin again after an error, which the library would report from now on, also at places
        that it can compute."""
        self._matcher = self._grammar.copied()
        self._matcher.consume_tokens(self._path[: self._length])

    def _check(self) -> None:
        """Check the library. Raises ``GrammarError`` if it has failed; the text is as before."""
        if self._matcher.is_error():
            why = self._matcher.get_error()
            self._lexer.failed |= why.startswith("lexer")
            self._restore()
            raise GrammarError(
                "the text does not match its constraint, or the constraint is too complex: " + why
            )
