"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from rich.console import Console

from paceline.cli.command import added_by, exit_with, refuse_options
from paceline.cli.connection import add_connection_arguments
from paceline.cli.generate import (
    add_client_arguments,
    add_generation_arguments,
    generation_arguments,
    new_client,
    refuse_without_sampling,
    speed,
    summary,
)
from paceline.cli.output import AnswerPrinter, Output
from paceline.cli.service_process import new_runner
from paceline.cli.services import add_model_arguments, own_services
from paceline.client import (
    Client,
    Generation,
    GenerationResult,
    InvalidRequestError,
    Model,
    PacelineError,
    Stats,
    render_chat,
)
from paceline.harness import ProcessFailed
from paceline.harness.models import MODEL
from paceline.service.files import user_path
from paceline.service.options import OptionsError
from paceline.telemetry.names import Span

QUOTES = '"""'  # what a message of several lines lies between, as in Ollama

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, f"start services for it: {MODEL}; default: use running services")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="print speed and drafting of each answer (default: on a terminal)",
    )
    add_generation_arguments(parser)
    parser.set_defaults(max_new_tokens=1024)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Converse until the end of the input; fails with code 1 if the services do not start."""
    import_module("paceline.gateway.channels")  # a missing extra is told before services start
    console = Output()
    if args.model is None:
        refuse_options(args, "without MODEL, for which services are started", ("weights", "load"))
    else:
        unused = {"verifier_address", *added_by(add_connection_arguments)}
        refuse_options(args, "on services that are started for MODEL", unused)
    with exit_with(2, OptionsError, OSError, ValueError):
        options = generation_arguments(args)
    refuse_without_sampling(args)
    with exit_with(1, ProcessFailed, PacelineError), _services(args):
        with exit_with(2, OptionsError, ValueError):
            client = new_client(args)
        with new_runner() as runner:
            chat = Chat(client, console, options, args.system, args.stats)
            try:
                runner.run(chat.connect())
                _converse(chat, runner)
            finally:
                runner.run(client.aclose())
    return 0


@contextmanager
def _services(args: argparse.Namespace) -> Iterator[None]:
    """Run MODEL's services for the length of the block, with the verifier's address in `args`."""
    if args.model is None:
        yield
        return
    with own_services(args.model, args.weights, args.load) as args.verifier_address:
        yield


def _converse(chat: Chat, runner: asyncio.Runner) -> None:
    """Answer messages until the input ends or /quit. A message is a line, or lines between two
    :data:`QUOTES`."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and editing
    terminal = sys.stdin.isatty()
    while True:
        try:
            line = _message(terminal)
        except EOFError:
            return
        except KeyboardInterrupt:
            chat.notice("\n/quit or Ctrl-D ends the chat")
            continue
        if line in ("/quit", "/exit", "/bye"):  # as Ollama and others name it
            return
        if not line:
            continue
        with suppress(KeyboardInterrupt):
            runner.run(chat.handle(line))


def _message(terminal: bool) -> str:
    """Return the next line, or the lines from one that begins with quotes up to the next quotes.
    Raises EOFError if the input ends."""
    line = input(">>> " if terminal else "").strip()
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    while QUOTES not in lines[-1]:
        lines.append(input("... " if terminal else ""))
    lines[-1] = lines[-1].partition(QUOTES)[0]
    return "\n".join(lines).strip()


class Chat:
    """A conversation with the model of running services, printed to a console.

    `stats` tells whether speed and drafting of each answer are printed; None: on a terminal.
    """

    def __init__(
        self,
        client: Client,
        console: Console,
        options: dict[str, Any],
        system: str = "",
        stats: bool | None = None,
    ) -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._client = client
        self._console = console
        self._options = options
        self._shows_stats = console.is_terminal if stats is None else stats
        self._drafters: tuple[str, ...] = ()
        self._results: list[GenerationResult] = []

    def notice(self, text: str) -> None:
        """Print a line that is no part of an answer."""
        self._console.print(text, style="dim")

    async def connect(self) -> None:
        """Ask the services for model and drafters, and greet on a terminal. Raises PacelineError if
        the verifier cannot be reached."""
        model = await self._client.model()
        with suppress(PacelineError):  # answers come without drafts then
            self._drafters = await self._client.drafters()
        if self._console.is_terminal:
            self.notice(f"{model.facts.name}, {model.facts.max_context} tokens of context")
            self._list_drafters()
            self.notice("/help lists commands")

    async def handle(self, line: str) -> None:
        if not line.startswith("/"):
            await self._answer(line)
            return
        name, _, argument = line.partition(" ")
        if name in _COMMANDS:
            _COMMANDS[name][0](self, argument.strip())
        else:
            self.notice(f"there is no command {name}; /help lists them")

    async def _answer(self, text: str) -> None:
        """Stream the answer to a message. A failed one is removed from the conversation."""
        from paceline.gateway.channels import marks_of
        from paceline.gateway.requests import ToolUse
        from paceline.gateway.tool_calls import end_of_open_thought

        self._turns.append({"role": "user", "content": text})
        printer: AnswerPrinter | None = None
        try:
            model = await self._client.model()
            limit = self._options["max_new_tokens"]
            rendered, prompt = await self._prompt(model, limit)
            left = model.facts.max_context - len(prompt)
            marks = marks_of(model.codec, ToolUse([], "none"))
            options = {**self._options, "max_new_tokens": min(limit, left)}
            generation = self._client.generate(prompt, special_tokens=sorted(marks), **options)
            generation.operation = Span.CHAT
            style = self._style(self._options["drafter"])
            printer = AnswerPrinter(self._console, style, marks, end_of_open_thought(rendered))
            await self._stream(generation, printer, full=left < limit)
        except PacelineError as error:
            begun = printer is not None and printer.begun
            self.notice(f"the answer broke off: {error}" if begun else f"no answer: {error}")
        except asyncio.CancelledError:
            self.notice("(stopped)")
            raise
        finally:
            if printer is not None and printer.begun:
                thoughts = {"reasoning_content": printer.thoughts} if printer.thoughts else {}
                self._turns.append({"role": "assistant", "content": printer.text, **thoughts})
            else:
                self._turns.pop()

    def _messages(self) -> list[dict[str, str]]:
        """Return all messages, the system message first."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    async def _prompt(self, model: Model, room: int) -> tuple[str, list[int]]:
        """Return the prompt of the next answer and its tokens, with room for `room` more, or a
        quarter of the context. Forgets the oldest turns where the context is too short. Raises
        InvalidRequestError if the newest message does not fit; or the template refuses the
        messages, or there is none."""
        context, forgotten = model.facts.max_context, 0
        room = min(room, context // 4)
        while True:
            rendered = render_chat(model, self._messages())
            tokens = await model.encode_rendered(rendered)
            if len(tokens) + room <= context:
                break
            if len(self._turns) == 1:
                raise InvalidRequestError(
                    f"the message makes a prompt of {len(tokens)} tokens; with {room} for the "
                    f"answer, the context of {context} tokens is too short: shorten the message"
                )
            del self._turns[:2]
            forgotten += 1
        if forgotten:
            turns = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            self.notice(f"(the context is full: the oldest {turns} forgotten)")
        return rendered, tokens

    async def _stream(self, generation: Generation, printer: AnswerPrinter, *, full: bool) -> None:
        """Print an answer; ``full``: its limit is the end of the context."""
        try:
            async for chunk in generation:
                printer.push(chunk)
        finally:
            printer.end()
        result = await generation
        self._results.append(result)
        if result.finish_reason == "length":
            count = len(result.token_ids)
            why = "--max-new-tokens allows longer answers"
            if full:
                why = "the context is full, /clear begins a new conversation"
            self.notice(f"(ended after {count} tokens: {why})")
        if self._shows_stats:
            self.notice(summary(result))
        elif unused := result.stats.unused(self._options["drafter"]):
            self.notice(f"({unused})")

    def _style(self, drafter: str | None) -> str:
        """Return the style of tokens of a drafter; None for the default one."""
        place = self._drafters.index(drafter) if drafter in self._drafters else 0
        return f"bold {_COLOURS[place % len(_COLOURS)]}"

    def _list_drafters(self) -> None:
        chosen = self._options["drafter"] or next(iter(self._drafters), "none")
        self._console.print("drafters:", style="dim", end="")
        for name in (*self._drafters, "none"):
            style = "dim" if name == "none" else self._style(name)
            mark = " (chosen)" if name == chosen else ""
            self._console.print(f" {name}{mark}", style=style, end="")
        self._console.print()

    def _choose(self, name: str) -> None:
        if name in (*self._drafters, "none"):
            self._options["drafter"] = name
        elif name:
            self.notice(f"there is no drafter {name}")
        self._list_drafters()

    def _statistics(self, _: str) -> None:
        if not self._results:
            self.notice("there is no answer yet")
            return
        for title, results in (("last answer", self._results[-1:]), ("all", self._results)):
            stats, tokens = Stats(), sum(len(result.token_ids) for result in results)
            for result in results:
                stats.merge(result.stats)
            self.notice(f"{title}: {speed(tokens, stats)}. {stats.explain()}")

    def _set_system(self, text: str) -> None:
        self._system = text

    def _save(self, file: str) -> None:
        messages = self._messages()
        try:
            user_path(file).write_text(
                json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n",
                encoding="utf-8",
            )
        except OSError as error:
            self.notice(f"cannot save: {error}; give /save a file")
        else:
            self.notice(f"saved {len(messages)} messages in {file}")

    def _clear(self, _: str) -> None:
        self._turns.clear()

    def _help(self, _: str) -> None:
        for name, (_method, text) in _COMMANDS.items():
            self.notice(f"{name:9} {text}")
        self.notice("/quit     end; so does Ctrl-D. Ctrl-C stops an answer")
        self.notice(f"{QUOTES}       begin a message of several lines, up to {QUOTES}")


_COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "/drafter": (
        Chat._choose,
        "NAME: draft with NAME from now on, or none; without NAME: list drafters",
    ),
    "/stats": (Chat._statistics, "speed and drafting of the last answer and of all"),
    "/system": (Chat._set_system, "TEXT: set the system message; without TEXT: remove it"),
    "/save": (Chat._save, "FILE: write the messages as JSON, in the form of OpenAI's API"),
    "/clear": (Chat._clear, "forget the conversation"),
    "/help": (Chat._help, "this list"),
}
