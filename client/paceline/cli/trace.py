"""`paceline trace`: the rounds of a text as a timeline in the terminal."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.cli.command import CommandError, refuse_options
from paceline.cli.generate import (
    add_client_arguments,
    add_generation_arguments,
    add_prompt_arguments,
    generated,
    summary,
)
from paceline.client import RoundStats
from paceline.telemetry.names import Attribute, Span

JAEGER = "http://127.0.0.1:16686"  # where compose files serve Jaeger

WIDTH = 80  # columns of a line

HEAD = "  round      ms  accepted  tokens  drafter    "
"""The line above the rounds, as far as the timeline."""

DRAFT, VERIFY, REST = "d", "V", "."  # marks of the timeline

SECONDS = 10.0  # maximum wait for Jaeger


class Round(NamedTuple):
    """A step with a tree, or neighbouring steps without one. Times in milliseconds."""

    first: int  # number of the first step, from 1
    steps: int
    ms: float
    draft_ms: float
    verify_ms: float
    drafted: int
    accepted: int
    emitted: int
    drafter: str  # its name, or why there is no tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt or the id of a trace, the parameters of the generation, and the services."""
    add_prompt_arguments(parser)
    parser.add_argument("--id", metavar="TRACE", help="show this recorded trace, not a new text")
    parser.add_argument(
        "--jaeger", metavar="URL", default=JAEGER,
        help="URL of the Jaeger that has the trace of --id (default: %(default)s)",
    )  # fmt: skip
    add_generation_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline; fails with code 1 when a service failed, 2 for bad arguments."""
    if args.id is not None:
        if args.prompt is not None:
            raise CommandError("give either a prompt or --id, not both")
        refuse_options(args, "with --id, which shows a text that exists", but=("id", "jaeger"))
        rounds = rounds_of_spans(fetch(args.jaeger, args.id))
        if not rounds:
            raise CommandError(
                f"trace {args.id} at {args.jaeger} has no rounds: give the id of a text's trace, "
                "which services with tracing recorded",
                1,
            )
        print("\n".join(timeline(rounds)))
        return 0
    refuse_options(args, "without --id, which names a trace that Jaeger has", ("jaeger",))
    result = generated(args, show=False)
    if not result.stats.rounds:
        print("The prefill emitted the whole text, so that there are no rounds.")
        return 0
    print("\n".join(timeline(rounds_of_stats(result.stats.rounds))))
    print(summary(result))
    return 0


def rounds_of_stats(entries: Iterable[RoundStats]) -> list[Round]:
    """The rounds of a text that this process has generated."""
    found, first = [], 1
    for each in entries:
        who = each.drafter if each.drafted else f"- {each.undrafted or 'unknown'}"
        found.append(
            Round(
                first, each.steps, each.round_ms, each.draft_ms, each.verify_ms, each.drafted,
                each.accepted, each.emitted, who,
            )
        )  # fmt: skip
        first += each.steps
    return found


def rounds_of_spans(spans: Sequence[Mapping[str, Any]]) -> list[Round]:
    """The rounds of a trace, of spans as Jaeger's API has them."""
    parts: dict[tuple[str, str], Mapping[str, Any]] = {}
    for span in spans:
        for reference in span.get("references", ()):
            parts[reference["spanID"], span["operationName"]] = span
    found: list[Round] = []
    for span in sorted(spans, key=lambda each: int(each["startTime"])):
        if span["operationName"] != Span.ROUND:
            continue
        draft = parts.get((span["spanID"], Span.DRAFT), {})
        verify = parts.get((span["spanID"], Span.VERIFY), {})
        tags = {**_tags(draft), **_tags(verify), **_tags(span)}
        drafted = int(tags.get(Attribute.NUM_DRAFT_TOKENS, 0))
        name = str(tags.get(Attribute.DRAFTER_NAME, ""))
        why = f"- {tags.get(Attribute.NO_DRAFT, 'unknown')}"
        found.append(
            Round(
                int(tags.get(Attribute.ROUND_INDEX, len(found) + 1)), 1, span["duration"] / 1e3,
                1e3 * float(_tags(draft).get(Attribute.COMPUTE_DURATION, 0)),
                verify.get("duration", 0) / 1e3, drafted,
                int(tags.get(Attribute.NUM_ACCEPTED, 0)), int(tags.get(Attribute.NUM_EMITTED, 0)),
                name if drafted else why,
            )
        )  # fmt: skip
    return found


def _tags(span: Mapping[str, Any]) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in span.get("tags", ())}


def fetch(jaeger: str, trace: str) -> list[Mapping[str, Any]]:
    """The spans of a trace. Raises CommandError: Jaeger cannot be reached, or has no such trace."""
    url = f"{jaeger.rstrip('/')}/api/traces/{trace}"
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--jaeger {jaeger} is no address: expected a URL such as {JAEGER}")
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            data = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise CommandError(f"{jaeger} has no trace {trace}: HTTP {error.code}", 1) from error
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"cannot read trace {trace} from {jaeger}: {error}", 1) from error
    return [span for each in data for span in each["spans"]]


def timeline(rounds: Sequence[Round]) -> Iterator[str]:
    """Lines of at most :data:`WIDTH` columns: one a round, whose timeline is as long as its share
    of the longest time of a step."""
    room = WIDTH - len(HEAD)
    longest = max(max(each.ms / each.steps for each in rounds), 1e-9)
    yield f"{HEAD}{DRAFT} draft, {VERIFY} verify, {REST} rest"
    for each in rounds:
        last = each.first + each.steps - 1
        number = str(each.first) if each.steps == 1 else f"{each.first}-{last}"
        accepted = f"{each.accepted} of {each.drafted}" if each.drafted else ""
        marks = round(each.ms / each.steps / longest * room)
        drafted, verified = (
            round(part / each.steps / longest * room) for part in (each.draft_ms, each.verify_ms)
        )
        bar = (DRAFT * drafted + VERIFY * verified)[:marks].ljust(marks, REST)
        yield (
            f"{number:>7} {each.ms:7.1f}  {accepted:>8}  {each.emitted:6}  "
            f"{each.drafter[:10]:10} {bar}"
        ).rstrip()
