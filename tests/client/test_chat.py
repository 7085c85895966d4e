"""`paceline chat`: the conversation with a mock of the verifier, the terminal with both fakes."""

import asyncio
import codecs
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.transport import MockTransport
from fakes.verifier import World, continuation
from rich.console import Console

from paceline.cli.chat import Chat
from paceline.cli.main import main
from paceline.client import Client

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CONTEXT = 400
READ_SECONDS = 60.0


async def converse(
    *lines: str, reply: Any = "fine", system: str = "", max_new_tokens: int = 64
) -> tuple[list[str], str]:
    """Prompts that reached the verifier, and the screen after these lines."""
    transport = MockTransport(reply, CONTEXT)
    transport.chat_template = TEMPLATE
    screen = io.StringIO()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "drafter": None}
    async with Client(transport=transport, cache_dir=None) as client:
        chat = Chat(client, Console(file=screen, width=200), options, system)
        await chat.connect()
        for line in lines:
            await chat.handle(line)
    return [bytes(request.prompt_tokens).decode() for request in transport.requests], (
        screen.getvalue()
    )


async def test_the_prompt_is_the_whole_conversation_in_the_models_template() -> None:
    prompts, screen = await converse("hello", "/system be brief", "and?", "/clear", "new")
    assert prompts == [
        "<user>hello<assistant>",
        "<system>be brief<user>hello<assistant>fine<user>and?<assistant>",
        "<system>be brief<user>new<assistant>",
    ]
    assert screen == "fine\n" * 3


async def test_the_oldest_turns_make_room_and_that_is_said() -> None:
    """A turn takes 101 tokens, and an answer may take 64."""
    prompts, screen = await converse(*(letter * 80 for letter in "abcd"))
    assert "a" * 80 in prompts[2]
    assert "<user>aaa" not in prompts[3]
    assert prompts[3].startswith("<user>bbb")
    assert screen.count("the oldest turn is forgotten") == 1
    assert all(len(prompt) + 64 <= CONTEXT for prompt in prompts)


async def test_a_message_that_never_fits_is_dropped() -> None:
    prompts, screen = await converse("x" * CONTEXT, "y")
    assert prompts == ["<user>y<assistant>"]
    assert "shorten the message" in screen


async def test_a_cut_answer_is_kept_and_said() -> None:
    prompts, screen = await converse("a", "b", reply="z" * 100)
    assert prompts[1] == f"<user>a<assistant>{'z' * 64}<user>b<assistant>"
    assert "ended after 64 tokens: --max-new-tokens allows longer answers" in screen


async def test_an_answer_that_fills_the_context_is_not_the_limit_s_fault() -> None:
    _, screen = await converse("a", reply="z" * CONTEXT, max_new_tokens=1000)
    left = CONTEXT - len("<user>a<assistant>")
    assert f"ended after {left} tokens: the context is full, /clear begins" in screen
    assert "--max-new-tokens" not in screen


@pytest.mark.parametrize(
    ("reply", "shown", "thought"),
    [
        ("<think>\nwhy not\n</think>\n\nfine", "why not\n\nfine\n", "why not"),
        ("<think>cut", "cut\n", "cut"),
        ("a <think> of mine", "a <think> of mine\n", ""),
    ],
)
async def test_thoughts_are_apart_from_the_answer(
    reply: str, shown: str, thought: str, tmp_path: Path
) -> None:
    """On the screen and in the conversation, without their marks."""
    file = tmp_path / "chat.json"
    _, screen = await converse("a", f"/save {file}", reply=reply)
    assert screen.startswith(shown)
    message = json.loads(file.read_text())["messages"][-1]
    assert message.get("reasoning_content", "") == thought
    assert message["content"] == shown.removeprefix(thought).strip()


async def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    _, screen = await converse(
        *("/stats", "hi", "/stats", f"/save {file}", "/save /nowhere/x", "/drafter x", "/what"),
        "/help",
        system="short",
    )
    assert json.loads(file.read_text()) == {
        "messages": [
            {"role": "system", "content": "short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "fine"},
        ]
    }
    for said in (
        *("no answer yet", "all: 5 tokens", "saved 3 messages", "cannot save"),
        *("no drafter x", "no command /what", "/quit"),
    ):
        assert said in screen
    assert "\ndrafters: none (chosen)\n" in screen


async def test_a_model_without_a_template_is_said() -> None:
    screen = io.StringIO()
    async with Client(transport=MockTransport("x"), cache_dir=None) as client:
        await Chat(client, Console(file=screen), {"max_new_tokens": 9, "drafter": None}).handle("a")
    assert "has no chat template" in screen.getvalue()


def services(world: World) -> list[str]:
    world.verifier.chat_template = TEMPLATE
    return ["chat", "--verifier-address", world.address, "--seed", "5"]


@pytest.mark.parametrize("end", ["/quit", "/exit", "/bye"])
async def test_lines_of_a_pipe_are_answered(
    end: str, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without control codes, prompts or statistics."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hi\n\n{end}\nnever\n"))
    words = [*services(world), "--max-new-tokens", "40"]
    assert await asyncio.to_thread(main, words) == 0
    answer = bytes(continuation([*b"<user>hi<assistant>"], 40, 5)).decode()
    shown = capsys.readouterr().out
    assert shown.startswith(f"{answer}\n(ended after 40 tokens")
    assert "\x1b" not in shown
    assert ">>>" not in shown
    await world.verifier.all_released()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""one\ntwo\n"""\n', "one\ntwo"),
        ('"""\none\n\n  two"""\n', "one\n\n  two"),
        ('"""one"""\n', "one"),
        ('one "two"\n', 'one "two"'),
    ],
)
async def test_a_message_of_several_lines(
    typed: str, message: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{typed}/quit\n"))
    assert await asyncio.to_thread(main, [*services(world), "--max-new-tokens", "4"]) == 0
    (created,) = world.verifier.creates
    assert bytes(created.prompt_tokens).decode() == f"<user>{message}<assistant>"


class Terminal:
    def __init__(self, words: list[str], home: Path) -> None:
        self.master, slave = pty.openpty()
        # A shell starts background jobs with SIGINT ignored, and processes inherit that.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli.main", *words],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env={**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(home)},
            )
        finally:
            signal.signal(signal.SIGINT, handler)
        os.close(slave)
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.screen = ""

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_to(self, end: str, seconds: float = READ_SECONDS) -> str:
        """The screen up to and with `end`.

        Raises:
            TimeoutError: It did not come within this time.
        """
        while end not in self.screen:
            if not select.select([self.master], [], [], seconds)[0]:
                raise TimeoutError(f"no {end!r} within {seconds} s after {self.screen!r}")
            self.screen += self.decoder.decode(os.read(self.master, 4096))
        shown, _, self.screen = self.screen.partition(end)
        return shown + end

    def interrupt_until(self, end: str) -> None:
        """Interrupt an `input` until the screen shows `end`.

        Python misses a signal that comes after the prompt is shown and before it waits for a key.
        """
        while True:
            self.process.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                self.read_to(end, seconds=5)
                return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


async def test_a_terminal_has_colours_history_and_ctrl_c(world: World, tmp_path: Path) -> None:
    terminal = Terminal([*services(world), "--draft-always", "--draft-timeout", "60"], tmp_path)

    loop = asyncio.get_running_loop()

    def talk() -> None:
        assert "drafters:" in terminal.read_to(">>> ")
        terminal.write("hi\n")
        answer = terminal.read_to("tokens/s")
        assert "\x1b[1;32m" in answer
        terminal.read_to(">>> ")
        world.verifier.step_seconds = 0.2
        steps = world.verifier.steps
        terminal.write("\x1b[A\n")  # the line before
        terminal.read_to("hi\r\n")
        stepped = world.verifier.wait_for(lambda: world.verifier.steps > steps)
        asyncio.run_coroutine_threadsafe(stepped, loop).result()
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_to("(stopped)")
        terminal.read_to(">>> ")
        terminal.interrupt_until("ends the chat")
        terminal.read_to(">>> ")
        terminal.write("/quit\n")
        assert terminal.process.wait(60) == 0

    try:
        await asyncio.wait_for(asyncio.to_thread(talk), 300)
    finally:
        terminal.close()
    await world.verifier.all_released()
    second = bytes(world.verifier.creates[1].prompt_tokens).decode()
    assert second.startswith("<user>hi<assistant>")
    assert second.endswith("<user>hi<assistant>")
