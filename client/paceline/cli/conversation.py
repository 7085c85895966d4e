"""A conversation: its messages, and the prompt that the model's chat template makes of them."""

from __future__ import annotations

from typing import Literal

from paceline.client import Model
from paceline.gateway.chat import render
from paceline.gateway.messages import Message
from paceline.gateway.requests import ChatRequest


class TooLongError(ValueError):
    """The newest message alone leaves no room for an answer."""


class Conversation:
    """Messages of user and assistant in turns, after an optional system message."""

    def __init__(self) -> None:
        self.system = ""
        """System message; empty: none, or that of the template."""
        self.turns: list[Message] = []
        """Messages, oldest first."""

    def add(self, role: Literal["user", "assistant"], text: str) -> None:
        """Append a message."""
        self.turns.append(Message(role=role, content=text))

    @property
    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return [*system, *self.turns]

    async def prompt(self, model: Model, room: int) -> tuple[list[int], int]:
        """The prompt of the next answer. Forgets the oldest turns where the context is too short.

        Args:
            model: The model, with template and tokenizer.
            room: Tokens to leave for the answer; at most a quarter of the context is left.

        Returns:
            Token ids, and the number of turns forgotten: questions with their answers.

        Raises:
            TooLongError: The newest message does not fit. It is removed.
            ApiError: The template refuses the messages, or there is none.
        """
        room = min(room, model.facts.max_context // 4)
        forgotten = 0
        while True:
            asked = ChatRequest(messages=self.messages)
            tokens = await model.encode_rendered(render(model, None, asked))
            if len(tokens) + room <= model.facts.max_context:
                return tokens, forgotten
            if len(self.turns) == 1:
                self.turns.clear()
                raise TooLongError(
                    f"the message makes a prompt of {len(tokens)} tokens; with {room} for the "
                    f"answer, the context of {model.facts.max_context} tokens is too short: "
                    "shorten the message"
                )
            del self.turns[:2]
            forgotten += 1
