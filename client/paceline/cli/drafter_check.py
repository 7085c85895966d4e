"""Checks a loaded version of a drafter through the verifier, before it gets traffic.

It works for methods of every kind. The check of the drafter service (`paceline drafter
--recordings`) does not run methods that read the target's KV or hidden states.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from paceline.cli.connection import tls_of
from paceline.client import Client, DraftOptions, PacelineError
from paceline.harness import read_prompts
from paceline.service.options import OptionsError, read_token
from paceline.v1 import drafter_pb2

_TOKENS = 32
"""New tokens of each prompt."""

_TREE_TIMEOUT = 30.0
"""Longest wait for a tree. Speed is for a canary to judge. Unit: seconds."""


class CheckFailedError(PacelineError):
    """The version drafted nothing, or trees that the verifier refused."""


def checked_prompts(path: Path) -> list[str | list[int]]:
    """Reads a prompt file. Raises OptionsError if it cannot be read or is not one."""
    try:
        return read_prompts(path)
    except (OSError, ValueError) as error:
        raise OptionsError(f"cannot read prompts from {path}: {error}") from error


def check(
    args: argparse.Namespace, drafter: str, prompts: list[str | list[int]]
) -> drafter_pb2.DrafterCheck:
    """Generates greedily for every prompt with one version of a drafter.

    Args:
        args: Arguments of the command: addresses, TLS and token.
        drafter: `NAME@VERSION`.
        prompts: Text or token ids.

    Returns:
        Rounds, accepted length and draft time.

    Raises:
        CheckFailedError: The drafter failed, timed out, or drafted an invalid tree or none.
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
        drafting=DraftOptions(timeout=_TREE_TIMEOUT, adaptive=False),
    ) as client:
        for prompt in prompts:
            result = await client.generate(
                prompt, max_new_tokens=_TOKENS, drafter=drafter, deadline=args.timeout
            )
            stats = result.stats
            if stats.fallbacks:
                raise _failed(drafter, f"failures while drafting: {dict(stats.fallbacks)}")
            rounds += stats.drafted_rounds
            accepted += stats.accepted
            draft_ms += stats.draft_ms
    if not rounds:
        raise _failed(drafter, "it drafted no tree")
    return drafter_pb2.DrafterCheck(
        texts=len(prompts),
        rounds=rounds,
        accepted_length=accepted / rounds,
        draft_us=round(draft_ms / rounds * 1e3),
    )


def _failed(drafter: str, why: str) -> CheckFailedError:
    return CheckFailedError(f"{drafter} was loaded, failed the check and was unloaded: {why}")
