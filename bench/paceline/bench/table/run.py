"""`paceline bench table`: Paceline's drafters beside other engines, by category of prompts."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product, zip_longest
from pathlib import Path

import uvloop
from openai import OpenAIError

from paceline.bench.models import Models
from paceline.bench.prompts import FREE, PROMPTS, Prompt, chat_encoder, read
from paceline.bench.record import Results, make_console
from paceline.bench.table.engines import (
    AHEAD,
    ALWAYS_END,
    DEFAULT,
    Answer,
    AnswerRequest,
    Contestant,
    LibraryProcess,
    PacelineServices,
    Server,
    llama_server,
)
from paceline.bench.table.figures import Sample, sample, summarize, table
from paceline.cli.shipped import drafters_for
from paceline.convert import ModelSource, open_model
from paceline.harness import ProcessFailed

_WARM_UP_TOKENS = 64  # tokens in which verifier and client measure what rounds cost
Prompts = Mapping[str, Sequence[Prompt]]  # prompts by category
# Categories whose answers are bound by a JSON schema: the prompt's own, or one for its calls.
BOUND = ("json", "tools")
CATEGORIES = (*FREE, *BOUND)
MIXED = "chat, code, mathematics"  # the category of several users: prompts of the three in turn
SHORT = FREE[:3]
_WARM_UP = "Name the months of the year."
_TURNS = 2  # prompts of each of several users, one after the other


@dataclass(frozen=True)
class Phase:
    """What all cells of one start of the engines have in common.

    An engine sees a prompt once in each mode of a phase: those that remember texts of earlier
    requests cannot know the answer.
    """

    temperature: float  # of the sampling
    users: int  # requests at a time
    share: float  # of the time, beside the shares of other phases

    @property
    def prompts(self) -> int:
        """Prompts of a sample: one, or several of each of several users."""
        return 1 if self.users == 1 else _TURNS * self.users

    def cell(self, category: str) -> str:
        users = "1 user" if self.users == 1 else f"{self.users} users"
        return f"{category}, T = {self.temperature:g}, {users}"


@dataclass(frozen=True)
class Limits:
    """What ends a measurement, and what is measured."""

    tokens: int  # maximum number of new tokens of an answer
    deadline: float  # value of time.monotonic
    wanted: Callable[[str], bool]  # whether a contestant takes part
    known: Callable[[str, str, str], bool]  # whether a sample exists: cell, contestant, group


async def measure(
    phase: Phase,
    engines: Sequence[Contestant],
    prompts: Prompts,
    warm_up: list[int],
    limits: Limits,
    record: Callable[[str, str, dict[str, Sample]], None],
    log: Callable[[str], None],
) -> bool:
    """Record a sample for each contestant and group of prompts.

    Categories take turns, and the contestants of a group begin with another one each time.

    Args:
        engines: Those that do not start are left out.
        warm_up: Token ids of a prompt for the first request in each mode.
        record: Called after every group with its cell, its number, and samples by contestant.

    Returns:
        Whether all was measured before the deadline.
    """
    async with AsyncExitStack() as stack:
        contestants: list[tuple[Contestant, str]] = []
        for engine in engines:
            modes = [mode for mode in engine.modes if limits.wanted(f"{engine.name} {mode}")]
            if not modes or (phase.users > 1 and not engine.concurrent):
                continue
            try:
                await stack.enter_async_context(engine)
            except (OSError, ProcessFailed, OpenAIError) as error:
                log(f"without {engine.name}: {error}")
                continue
            contestants += [(engine, mode) for mode in modes]
        for engine, mode in contestants:
            await engine.answer(mode, AnswerRequest(warm_up, _WARM_UP_TOKENS, phase.temperature, 0))
            log(f"{engine.name} {mode} is ready")
        for turn, (category, group, texts) in enumerate(_groups(prompts, phase.prompts)):
            cell, first = phase.cell(category), turn % max(1, len(contestants))
            bound = any(prompt.json_schema for prompt in texts)
            samples: dict[str, Sample] = {}
            for engine, mode in contestants[first:] + contestants[:first]:
                name = f"{engine.name} {mode}"
                if int(group) % engine.every or limits.known(cell, name, group):
                    continue
                if bound and not engine.constrained:
                    continue
                if time.monotonic() > limits.deadline:
                    record(cell, group, samples)
                    return False
                parts = [texts[at :: phase.users] for at in range(phase.users)]
                answered = await asyncio.gather(
                    *(
                        _answer(engine, mode, part, limits.tokens, phase, place, int(group) + 1)
                        for place, part in enumerate(parts)
                    )
                )
                answers = [answer for part in answered for answer in part]
                samples[name] = sample(answers, [prompt.ids for prompt in texts])
            record(cell, group, samples)
            log(f"{cell}: group {int(group) + 1} of {len(prompts[category]) // phase.prompts}")
    return True


async def _answer(
    engine: Contestant,
    mode: str,
    texts: Sequence[Prompt],
    tokens: int,
    phase: Phase,
    place: int,
    seed: int,
) -> list[Answer]:
    """Return the answers for one user, each after the one before.

    Of several users the first answers differ in length, or all texts would begin and end at the
    same times, and prompts would be read together; the last ones differ as much the other way, so
    that the users end together.
    """
    lengths = [tokens] * len(texts)
    if phase.users > 1:
        lengths[0] = -(-tokens * (place + 1) // phase.users)
        lengths[-1] = -(-tokens * (phase.users - place) // phase.users)
    requests = (
        AnswerRequest(text.ids, length, phase.temperature, seed, text.json_schema)
        for text, length in zip(texts, lengths, strict=True)
    )
    return [await engine.answer(mode, request) for request in requests]


def _groups(prompts: Prompts, size: int) -> Iterator[tuple[str, str, list[Prompt]]]:
    """Yield category, number, and prompts that are asked together; categories take turns."""
    columns = [
        [
            (category, str(number), list(texts[number * size : (number + 1) * size]))
            for number in range(len(texts) // size)
        ]
        for category, texts in prompts.items()
    ]
    yield from (group for row in zip_longest(*columns) for group in row if group is not None)


def run(args: argparse.Namespace) -> int:
    """Measure all phases until the time is over; print and record. Raises ``FileNotFoundError`` if
    there is no result file to print, and ``ValueError`` if the result file has nothing to print, or
    a prompt file has no prompt."""
    console = make_console()
    models = Models.of(args)
    source = open_model(models.target)
    files = args.prompts or [PROMPTS / f"{name}.jsonl" for name in CATEGORIES]
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    results = Results("table", args.output, models.target, tokens=args.tokens, prompts=content)
    for weights in args.weights:
        results.uses(dict(_drafters(args, models.target, weights)))
    cells = {name: entry["contestants"] for name, entry in results.entries.items()}
    prompts = read(files, source, args.tokens)
    fresh: set[tuple[str, str]] = set()

    def known(cell: str, name: str, group: str) -> bool:
        entry = cells.get(cell, {}).get(name, {"samples": {}})
        return args.resume and group in entry["samples"]

    def record(title: str, group: str, samples: dict[str, Sample]) -> None:
        cell = cells.setdefault(title, {})
        for name, measured in samples.items():
            if name not in cell or not (args.resume or (title, name) in fresh):
                cell[name] = {"samples": {}}
            fresh.add((title, name))
            cell[name]["samples"][group] = measured
        summarize(cell)
        results.add(title, {"contestants": cell})

    warm_up = chat_encoder(source)(_WARM_UP, ())
    end = time.monotonic() + 60 * args.minutes
    phases = [
        Phase(heat, users, 4.0 if (heat, users) == (0.0, 1) else 1.0)
        for users in args.users
        for heat in args.temperature
    ]
    for place, phase in enumerate(phases):
        began = time.monotonic()
        share = phase.share / sum(left.share for left in phases[place:])
        limits = Limits(args.tokens, began + share * (end - began), partial(_wanted, args), known)
        chosen = choose(prompts, phase, args.categories)
        engines = list(contestants(args, models, source, phase))
        whole = uvloop.run(measure(phase, engines, chosen, warm_up, limits, record, console.log))
        if not whole:
            console.log("the time of this phase is over; --resume goes on")
    for cell in dict.fromkeys(cell for cell, _ in fresh):
        console.print(table(cell, cells[cell]))
    console.print(f"written to {results.file}")
    return 0


def choose(prompts: Prompts, phase: Phase, wanted: list[str]) -> Prompts:
    """Return the prompts of the wanted categories. The default is all; above temperature 0 all but
    edits and long documents; for several users a mixture of short ones with free answers."""
    if not set(SHORT) <= prompts.keys():
        return prompts
    if phase.users > 1 and not wanted:
        mixture = [
            text for row in zip(*(prompts[name] for name in SHORT), strict=False) for text in row
        ]
        return {MIXED: mixture}
    names = wanted or ((*SHORT, *BOUND) if phase.temperature else tuple(prompts))
    return {name: prompts[name] for name in names if name in prompts}


def _wanted(args: argparse.Namespace, name: str) -> bool:
    return not args.contestants or any(word in name for word in args.contestants)


def _drafters(args: argparse.Namespace, target: Path, weights: str) -> Iterator[tuple[str, str]]:
    """Yield names and specifications of Paceline's drafters for a target in a format."""
    selfspec = f"selfspec=selfspec:{target},weights=int4"
    for given in args.drafter or [*drafters_for(target, "cpu", weights), selfspec]:
        name, _, spec = given.partition("=")
        yield name, spec


def contestants(
    args: argparse.Namespace, models: Models, source: ModelSource, phase: Phase
) -> Iterator[Contestant]:
    """Yield engines of a phase that are here. Slow ones answer fewer prompts, only greedily."""
    # Engines of their own for --always: drafters that remember texts have not seen the answers.
    kinds: tuple[tuple[bool, bool | None], ...] = ((False, None), (True, None))[: 1 + args.always]
    if args.apart:
        kinds = ((True, False), (True, True))
    for weights, (always, ahead) in product(args.weights, kinds):
        end = AHEAD if ahead else ALWAYS_END if always else ""
        # The first drafter is the one that requests have by default.
        default = not end and _wanted(args, f"paceline {weights} {DEFAULT}")
        loaded = {
            name: spec
            for place, (name, spec) in enumerate(_drafters(args, models.target, weights))
            if _wanted(args, f"paceline {weights} {name}{end}") or (default and place == 0)
        }
        yield PacelineServices(
            models.target,
            weights,
            loaded or {"ngram": "ngram"},  # the service needs one; its mode takes no part
            always=always,
            reuse=phase.users == 1,
            every=1 if weights == args.weights[0] else 2,
            verifier=[f"--sources={args.sources}"] if args.sources else [],
            ahead=ahead,
        )
    servers: dict[str, dict[str, str]] = {}
    for name, mode, url in args.server:
        servers.setdefault(name, {})[mode] = url
    yield from (Server(name, modes) for name, modes in servers.items())
    program = args.llama_server or shutil.which("llama-server")
    for place, file in enumerate(args.llama_model if program else ()):
        every = 1 if place == 0 else 2
        yield llama_server(
            str(program), file, args.llama_modes, phase.users, draft=args.llama_draft, every=every
        )
    if phase.temperature or phase.users > 1:
        return
    library = partial(LibraryProcess, eos=source.config().eos_token_ids)
    python = args.openvino_python or (find_spec("openvino_genai") and sys.executable)
    if python and args.openvino_model:
        yield library("openvino", python, args.openvino_model, every=2)
    yield library("transformers", sys.executable, models.target, every=4)
