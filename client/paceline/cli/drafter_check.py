"""Tries a loaded version of a drafter out, through the verifier, before it gets traffic.

This is for methods of every kind. A drafter service can check on its own, by texts it has recorded
(`paceline drafter --recordings`), but not those methods that read the target's KV or hidden states.
"""

import argparse
import asyncio
from pathlib import Path

from paceline.cli.connection import tls_of
from paceline.cli.prompts import read_prompts
from paceline.client import Client, DraftOptions, PacelineError
from paceline.service.options import OptionsError, read_token
from paceline.v1 import drafter_pb2

_TOKENS = 32
"""New ones of each prompt."""

_PATIENCE = 30.0
"""Longest wait for a tree: only a canary compares draft times. Unit: seconds."""


class CheckFailedError(PacelineError):
    """The version did not draft, or drafted what the verifier refused."""


def checked_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a file.

    Raises:
        OptionsError: The file cannot be read, has no line, or one of another form.
    """
    try:
        return read_prompts(path)
    except (OSError, ValueError) as error:
        raise OptionsError(f"cannot read prompts from {path}: {error}") from error


def check(
    args: argparse.Namespace, drafter: str, prompts: list[str | list[int]]
) -> drafter_pb2.DrafterCheck:
    """Generate for every prompt with one version of a drafter, and tell how it did.

    Args:
        args: Of the command: addresses, TLS and token.
        drafter: `NAME@VERSION`.
        prompts: To go on with, greedily.

    Raises:
        CheckFailedError: The drafter was lost, refused to attach, drew a bad tree, or none in time.
        PacelineError: The verifier cannot be reached or refuses a prompt.
    """
    return asyncio.run(_check(args, drafter, prompts))


async def _check(
    args: argparse.Namespace, drafter: str, prompts: list[str | list[int]]
) -> drafter_pb2.DrafterCheck:
    rounds, accepted, draft_ms = 0, 0, 0.0
    async with Client(
        args.verifier_address,
        drafter=args.address,
        token=read_token(args.token_file),
        tls=tls_of(args),
        drafting=DraftOptions(timeout=_PATIENCE, adaptive=False),
    ) as client:
        for prompt in prompts:
            result = await client.generate(
                prompt, max_new_tokens=_TOKENS, drafter=drafter, deadline=args.timeout
            )
            stats = result.stats
            if stats.fallbacks:
                raise _failed(drafter, f"trouble while it drafted: {dict(stats.fallbacks)}")
            rounds += stats.drafted_rounds
            accepted += stats.accepted
            draft_ms += stats.draft_ms
    if not rounds:
        raise _failed(drafter, "it drew no tree")
    return drafter_pb2.DrafterCheck(
        texts=len(prompts),
        rounds=rounds,
        accepted_length=accepted / rounds,
        draft_us=round(draft_ms / rounds * 1e3),
    )


def _failed(drafter: str, why: str) -> CheckFailedError:
    return CheckFailedError(f"{drafter} was loaded but failed the check, and is gone again: {why}")
