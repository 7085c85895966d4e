"""Receipts: a text's tokens and all that they depend on, for anybody with the model to check."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from paceline.checks import ParameterError, checked, items
from paceline.sampling import token_ids
from paceline.v1 import verifier_pb2

from ._errors import InvalidRequestError
from ._options import GenerationOptions, invalid_requests

FORMAT = "paceline receipt 1"
_MAX_RULES = 4096
_FIELDS = (
    *("format", "model", "numerics", "prompt", "sampling", "seed", "tokens", "finish_reason"),
    "drafts",
)
_NEVER = "-inf"  # a bias that excludes a token
_INTEGER = re.compile("[0-9]{1,10}")
_ENDS = ("stop", "length", "cancelled")
# Options that do not shape the text. All others are in a receipt; rejection sampling gives none.
_SHAPELESS = (
    *("acceptance", "logprobs", "prompt_logprobs", "drafter", "isolated", "user", "deadline"),
    *("max_nodes", "parent", "keep_cache", "on_prefill", "seed"),
)
_SHAPING = tuple(field.name for field in fields(GenerationOptions) if field.name not in _SHAPELESS)


class NumericsRule(NamedTuple):
    """How one part of a step is computed, as far as its bits depend on it."""

    region: str
    """The part, such as "linear layer"; the implementation of "numerics" is the name of all."""
    case: str
    """Which of them, such as the format of its weights; empty: all."""
    implementation: str
    """How it is computed, such as the order of sums."""
    constants: Mapping[str, str]
    """Numbers and digests that fix the rest."""

    def __str__(self) -> str:
        constants = (f"{name} {value[:16]}" for name, value in sorted(self.constants.items()))
        return ", ".join(filter(None, (self.case, self.implementation, *constants)))


Numerics = Sequence[NumericsRule]


def numerics_of(facts: verifier_pb2.GetModelResponse) -> Numerics:
    """Return what the bits of a verifier's tokens depend on; empty if it promises nothing."""
    return [
        NumericsRule(
            rule.region, rule.case, rule.implementation, dict(sorted(rule.constants.items()))
        )
        for rule in facts.numerics
    ]


def numerics_digest(numerics: Numerics) -> str:
    """Return the SHA-256 (hex) of rules, equal where texts have equal tokens; empty without any."""
    written = json.dumps(numerics, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest() if numerics else ""


def differing(one: Numerics, other: Numerics) -> list[str]:
    """Return the regions in which rules differ, with both. What was measured is named only where
    all that is described is equal."""
    differences = {}
    for region in dict.fromkeys(rule.region for rule in (*one, *other)):
        sides = [
            sorted((e for e in rules if e.region == region), key=repr) for rules in (one, other)
        ]
        left, right = ("; ".join(map(str, side)) or "nothing" for side in sides)
        if sides[0] != sides[1]:
            differences[region] = f"{region}: {left}, here {right}"
    if len(differences) > 1:
        differences.pop("check", None)
    return list(differences.values())


@dataclass(frozen=True)
class Receipt:
    """A text's tokens and all that they depend on. `Client.check` generates them again."""

    model: str
    """Name of the model, for display."""
    fingerprint: str
    """SHA-256 of its configuration and weights."""
    tokenizer: str
    """SHA-256 of its tokenizer; empty without one."""
    numerics: Numerics
    """What the bits depend on besides; empty: the verifiers promised nothing, or several that
    differ wrote the text."""
    prompt: Sequence[int]
    """Token ids of the prompt."""
    options: GenerationOptions
    """Of these, what shapes the text is written."""
    token_ids: Sequence[int]
    """Emitted tokens."""
    finish_reason: str
    """As of `GenerationResult`."""
    drafts: bool
    """Whether drafting was on."""

    MAX_CHARACTERS: ClassVar = 64 << 20  # maximum length of one that is read

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values in a fixed order."""
        return {
            "format": FORMAT,
            "model": {
                "name": self.model,
                "fingerprint": self.fingerprint,
                "tokenizer": self.tokenizer,
            },
            "numerics": {
                "digest": numerics_digest(self.numerics),
                "rules": [rule._asdict() for rule in self.numerics],
            },
            "prompt": list(self.prompt),
            "sampling": {name: _plain(value) for name, value in self.shaping().items()},
            "seed": self.options.key,
            "tokens": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "drafts": self.drafts,
        }

    def to_text(self) -> str:
        """Return the receipt as JSON, a line for each field."""
        lines = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in self.to_json().items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def limit(self) -> int:
        """Return how many tokens to generate for a check: one more than the receipt has, if its
        text may be longer, to see whether it ends there."""
        count, cut = len(self.token_ids), self.finish_reason == "cancelled"
        return min(self.options.max_new_tokens, count if cut else count + 1)

    def shaping(self) -> dict[str, Any]:
        """Return the options that shape the text, but the seed."""
        return {name: getattr(self.options, name) for name in _SHAPING}

    @classmethod
    def of(cls, facts: verifier_pb2.GetModelResponse, *rest: Any) -> Receipt:
        """Return the receipt of a text of a model; `rest` are the fields from `numerics` on."""
        return cls(facts.name, facts.target_fingerprint, facts.tokenizer_digest, *rest)

    @classmethod
    def from_text(cls, text: str) -> Receipt:
        """Return a receipt as `to_text` or a gateway has written it. Raises InvalidRequestError,
        which says what is wrong, if it is none."""
        if len(text) > cls.MAX_CHARACTERS:
            raise InvalidRequestError(
                f"it has {len(text)} characters, at most {cls.MAX_CHARACTERS}"
            )
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"it is no JSON: {error}") from None
        with invalid_requests():
            return _read(value)


class ReceiptCheck(NamedTuple):
    """What came of the check of a receipt."""

    outcome: Literal["equal", "different", "model", "numerics"]
    """"equal": the tokens are the same. "different": one is not. "model", "numerics": they cannot
    be compared here, since these differ."""
    message: str
    """The outcome in words, with the first token that differs, or what of model or numerics."""


def not_comparable(
    receipt: Receipt, facts: verifier_pb2.GetModelResponse, numerics: Numerics
) -> ReceiptCheck | None:
    """Return why a verifier cannot check a receipt; None if it can."""
    for what, one, other in (
        ("model", receipt.fingerprint, facts.target_fingerprint),
        ("tokenizer", receipt.tokenizer, facts.tokenizer_digest),
    ):
        if one != other:
            of = f"{what} of the receipt ({receipt.model}) has the digest {one or 'of nothing'}"
            return ReceiptCheck("model", f"the {of}, that of {facts.name} here {other}")
    if not receipt.numerics:
        return ReceiptCheck(
            "numerics",
            "the receipt has no numerics: its verifier promised none, or the text moved between "
            "verifiers that differ",
        )
    if differences := differing(receipt.numerics, numerics):
        return ReceiptCheck("numerics", f"numerics differ: {'; '.join(differences)}")
    return None


def compared(receipt: Receipt, again: Receipt) -> ReceiptCheck:
    """Return what came of a text that was generated again."""
    said, one, other = "", list(receipt.token_ids), list(again.token_ids)
    at = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), -1
    )
    if at >= 0:
        said = f"token {at} is {one[at]} in the receipt, and {other[at]} here"
    elif len(one) > len(other):
        said = f"the text here ends after {len(other)} tokens, and the receipt goes on"
    elif len(one) < len(other):
        said = f"the receipt ends after {len(one)} tokens, and the text here goes on"
    elif receipt.finish_reason not in ("cancelled", again.finish_reason):
        ends = receipt.finish_reason, again.finish_reason
        said = "tokens are equal; the end in the receipt is {!r}, and {!r} here".format(*ends)
    if said:
        return ReceiptCheck("different", f"different: {said}")
    return ReceiptCheck("equal", f"equal: {len(one)} tokens")


def _plain(value: Any) -> Any:
    """Return an option as JSON has it: minus infinity, a bias that excludes a token, is a text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return _NEVER if value == -math.inf else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}")


def _read(value: object) -> Receipt:
    """Return a receipt of parsed JSON. Raises ParameterError if it is none."""
    top = _fields("the receipt", value, _FIELDS)
    checked("format", top["format"], str, repr(FORMAT), FORMAT.__eq__)
    name, fingerprint, tokenizer = _texts(
        "model", top["model"], ("name", "fingerprint", "tokenizer")
    )
    numerics = _fields("numerics", top["numerics"], ("digest", "rules"))
    listed = items("numerics.rules", numerics["rules"], "a list of rules", _MAX_RULES)
    rules = [_rule(f"numerics.rules[{index}]", rule) for index, rule in enumerate(listed)]
    digest = numerics_digest(rules)
    checked(
        "numerics.digest", numerics["digest"], str, f"{digest!r}, that of the rules", digest.__eq__
    )
    prompt, tokens = (token_ids(name, top[name], "token ids") for name in ("prompt", "tokens"))
    for key, ids in (("prompt", prompt), ("tokens", tokens)):
        if not ids:
            raise ParameterError.unexpected(key, "a non-empty list of token ids", ids)
    reason = checked(
        "finish_reason", top["finish_reason"], str, " or ".join(_ENDS), _ENDS.__contains__
    )
    drafts = checked("drafts", top["drafts"], bool, "true or false")
    sampling = _fields("sampling", top["sampling"], _SHAPING, missing=True)
    if isinstance(biases := sampling.get("logit_bias"), dict):
        excluded = {token: -math.inf for token, bias in biases.items() if bias == _NEVER}
        sampling["logit_bias"] = {
            int(token) if _INTEGER.fullmatch(token) else token: bias
            for token, bias in (biases | excluded).items()
        }
    seed = checked("seed", top["seed"], int, "an integer")
    options = GenerationOptions(**sampling, seed=seed)
    return Receipt(name, fingerprint, tokenizer, rules, prompt, options, tokens, reason, drafts)


def _rule(name: str, value: object) -> NumericsRule:
    fields = _fields(name, value, NumericsRule._fields)
    constants = fields.pop("constants")
    region, case, implementation = _texts(name, fields, NumericsRule._fields[:3])
    names = sorted(constants) if isinstance(constants, dict) else []
    texts = _texts(f"{name}.constants", constants, names)
    return NumericsRule(region, case, implementation, dict(zip(names, texts, strict=True)))


def _texts(name: str, value: object, names: Collection[str]) -> list[str]:
    """Return the texts of an object with these fields, in their order."""
    fields = _fields(name, value, names)
    return [checked(f"{name}.{field}", fields[field], str, "a text") for field in names]


def _fields(
    name: str, value: object, names: Collection[str], *, missing: bool = False
) -> dict[str, Any]:
    """Return an object with these fields, of which some may be missing if `missing`."""
    if not isinstance(value, dict):
        raise ParameterError.unexpected(name, "an object", value)
    for wrong, keys in (("unknown", value.keys() - names), ("missing", set(names) - value.keys())):
        if keys and not (missing and wrong == "missing"):
            raise ParameterError(name, f"{name} has the {wrong} field {min(keys)[:60]!r}")
    return dict(value)
