"""Receipts: what they say, what is refused, and what a check tells."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.verifier import World, continuation

from paceline.cli.main import main
from paceline.client import Client, InvalidRequestError, Receipt
from paceline.client._receipt import NumericsRule, differing

PROMPT = [104, 105, 106]
SHAPING = {
    "temperature": 0.7, "top_k": 9, "stop": ["never", "ever"], "stop_token_ids": [3],
    "logit_bias": {7: -math.inf, 8: 1.5}, "json_schema": {"type": "object"}, "ignore_eos": True,
}  # fmt: skip


async def receipt_of(client: Client, **options: Any) -> Receipt:
    result = await client.generate(PROMPT, **{"max_new_tokens": 20, "seed": 5, **options})
    assert result.receipt is not None
    return result.receipt


async def test_a_receipt_has_what_shapes_a_text_and_can_be_read_again(client: Client) -> None:
    receipt = await receipt_of(client, **SHAPING)
    written = json.loads(receipt.to_text(), parse_constant=pytest.fail)
    assert [*written] == [
        *("format", "model", "numerics", "prompt", "sampling", "seed", "tokens", "finish_reason"),
        "drafts",
    ]
    assert written["prompt"] == PROMPT
    assert written["tokens"] == continuation(PROMPT, 20, 5)
    assert (written["finish_reason"], written["drafts"], written["seed"]) == ("length", True, 5)
    kept = {**SHAPING, "max_new_tokens": 20, "logit_bias": {"7": "-inf", "8": 1.5}}
    assert {name: written["sampling"][name] for name in kept} == kept
    assert not written["sampling"].keys() & {"drafter", "user", "deadline", "logprobs"}
    again = Receipt.from_text(receipt.to_text())
    assert again.to_text() == receipt.to_text()
    assert again.options.logit_bias == SHAPING["logit_bias"]


async def test_rejection_sampling_has_none(client: Client) -> None:
    options = {"acceptance": "rejection", "temperature": 1.0, "max_new_tokens": 4}
    assert (await client.generate(PROMPT, **options)).receipt is None


def edit(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(written: Any) -> None:
        for name in path[:-1]:
            written = written[name]
        written[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("format", to=1), "format must be 'paceline receipt 1', not 1"),
        (edit("more", to=1), "the receipt has the unknown field 'more'"),
        (lambda written: written.pop("seed"), "the receipt has the missing field 'seed'"),
        (edit("model", to=[]), "model must be an object"),
        (edit("model", "name", to=1), "model.name must be a text"),
        (
            edit("numerics", "digest", to="0" * 64),
            "numerics.digest must be '.*', that of the rules",
        ),
        (edit("numerics", "rules", to=[1] * 5000), "rules must be a list of rules, at most 4096"),
        (edit("numerics", "rules", 0, "constants", to={"a": 1}), "constants.a must be a text"),
        (edit("numerics", "rules", 0, "constants", to=[]), "constants must be an object"),
        (edit("prompt", to=[]), "prompt must be a non-empty list of token ids"),
        (edit("prompt", to=[1, "2"]), r"prompt\[1\] must be a token id"),
        (edit("tokens", to=[-1]), r"tokens\[0\] must be a token id"),
        (edit("tokens", to={"0": 1}), "tokens must be token ids"),
        (edit("tokens", to=[2**70]), r"tokens\[0\] must be a token id"),
        (edit("seed", to=2**64), "seed must be an integer"),
        (edit("seed", to=None), "seed must be an integer"),
        (edit("drafts", to=1), "drafts must be true or false"),
        (edit("finish_reason", to="tired"), "finish_reason must be stop or length or cancelled"),
        (edit("sampling", "drafter", to="ngram"), "sampling has the unknown field 'drafter'"),
        (edit("sampling", "temperature", to="hot"), "temperature must be a finite number"),
        (edit("sampling", "logit_bias", to={"x": 1}), "logit_bias.* must be a token id"),
        (edit("sampling", "logit_bias", to={"1": [[]]}), r"logit_bias\[1\] must be a finite"),
        (edit("sampling", "stop", to=["x"] * 2000), "stop must be a text or texts, at most 1024"),
    ],
)
async def test_what_is_no_receipt_is_one_error(
    client: Client, change: Callable[[Any], None], message: str
) -> None:
    written = (await receipt_of(client)).to_json()
    change(written)
    with pytest.raises(InvalidRequestError, match=message):
        Receipt.from_text(json.dumps(written))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[NaN]", "9" * 5000, '"\\ud800"', "null"])
def test_what_is_no_json_is_one_error(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Receipt.from_text(text)


@pytest.mark.parametrize("end", ["length", "stop", "cancelled"])
async def test_a_check_generates_without_drafts_and_finds_what_was_changed(
    world: World, client: Client, end: str
) -> None:
    ends = {"stop": {"stop_token_ids": continuation(PROMPT, 20, 5)[-1:]}, "cancelled": {}}
    options = {"max_new_tokens": 20 if end == "length" else 300, **ends.get(end, {})}
    generation = client.generate(PROMPT, seed=5, **options)
    tokens: list[int] = []
    async for chunk in generation:
        tokens += chunk.token_ids
        if end == "cancelled" and len(tokens) > 5:
            generation.cancel()
    receipt = (await generation).receipt
    assert receipt is not None
    assert receipt.finish_reason == end
    count = len(receipt.token_ids)
    assert await client.check(receipt) == ("equal", f"equal: {count} tokens")
    assert world.verifier.starts[-1].drafter == "none"
    assert world.verifier.creates[-1].max_new_tokens <= count + 1, "a receipt bounds its check"

    changes = [
        (edit("tokens", 1, to=99), f"token 1 is 99 in the receipt, and {tokens[1]} here"),
        (edit("seed", to=6), "token 0 is "),
    ]
    if end != "cancelled":  # whose end is the caller's
        other = "stop" if end == "length" else "length"
        changes += [
            (edit("tokens", to=[*tokens, 9]), f"the text here ends after {count} tokens"),
            (
                edit("finish_reason", to=other),
                f"the end in the receipt is '{other}', and '{end}' here",
            ),
        ]
    if end == "stop":
        changes.append((edit("tokens", to=tokens[:-1]), "and the text here goes on"))
    for change, message in changes:
        written = receipt.to_json()
        change(written)
        found = await client.check(Receipt.from_text(json.dumps(written)))
        assert (found.outcome, message in found.message) == ("different", True), found


async def test_a_check_names_another_model_and_other_numerics(world: World, client: Client) -> None:
    receipt = await receipt_of(client)
    for change, outcome, message in (
        (edit("model", "fingerprint", to="0" * 64), "model", "digest 0000"),
        (edit("model", "tokenizer", to=""), "model", "tokenizer"),
        (edit("numerics", to={"digest": "", "rules": []}), "numerics", "promised none"),
    ):
        written = receipt.to_json()
        change(written)
        found = await client.check(Receipt.from_text(json.dumps(written)))
        assert found.outcome == outcome
        assert message in found.message
    written = receipt.to_json()
    rule = written["numerics"]["rules"][0]
    assert [*rule["constants"]] == ["hidden", "kv", "weights"]
    rule["constants"] = dict(reversed(rule["constants"].items()))
    assert (await client.check(Receipt.from_text(json.dumps(written)))).outcome == "equal"
    before = world.verifier.made
    world.verifier.numerics = "amx"
    async with Client(world.address, cache_dir=None) as other:
        found = await other.check(receipt)
    types = "hidden float32, kv float32, weights float32"
    said = f"numerics differ: numerics: portable, {types}, here amx, {types}"
    assert found == ("numerics", said)
    assert world.verifier.made == before, "nothing was generated"


def test_rules_that_are_written_alike_differ_too() -> None:
    """Digests are written in part."""
    one, other = (NumericsRule("check", "", "", {"logits": "0" * 63 + end}) for end in "12")
    assert differing([one], [other]) == [
        "check: logits 0000000000000000, here logits 0000000000000000"
    ]
    assert not differing([one, other], [other, one])


async def test_the_command_says_what_is_no_receipt(
    world: World, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"

    async def check(content: str) -> tuple[int, str, str]:
        file.write_text(content)
        words = ["check", str(file), "--verifier-address", world.address]
        return await asyncio.to_thread(main, words), *capsys.readouterr()

    receipt = await receipt_of(client)
    assert await check(receipt.to_text()) == (0, "equal: 20 tokens\n", "")
    other = replace(receipt, model="m\nequal: 20 tokens\x1b[A", fingerprint="0" * 64)
    code, out, error = await check(other.to_text())
    assert (code, out.count("\n"), "\x1b" in out, error) == (3, 1, False, "")
    for content, message in (("{}", "has the missing field 'drafts'"), ("[", "it is no JSON")):
        code, out, error = await check(content)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert f"{file} is no receipt: " in error
        assert message in error
