"""Writing of conversations, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.conversations import openings
from paceline.train.conversations.file import Conversation, append, read_conversations

_TOGETHER = 64  # conversations that are written before the file grows
_SHARES = {"chat": 0.32, "code": 0.24, "mathematics": 0.2, "edit": 0.18, "document": 0.06}
_QUESTION, _ANSWER = 128, 320  # most tokens that the target writes
_EDIT = (100, 500)  # tokens of a text to edit
_DOCUMENT = (800, 7000)  # tokens of a document
_DOCUMENT_ANSWER = 160
_HEATS = (0.0, 0.7)
# Tokens far less likely than the best one make a small model's questions senseless.


@dataclass(frozen=True)
class _Question:
    """A user's turn; `open` if the target is to write the rest of it."""

    kind: str
    text: str
    open: bool


class Template:
    """The target's chat template around one question."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Split the template at the question.

        Raises ValueError if the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError("the target has no chat template: own text needs an instruct model")
        mark = "QUESTION"
        turn = [{"role": "user", "content": mark}]
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        self._head, self._tail = text.split(mark)
        self._tokenizer = tokenizer
        self.stop = self._encode(self._tail)[0]
        """The token that ends a turn."""

    def head(self, text: str) -> list[int]:
        """Token ids of the user's turn up to and including `text`."""
        return self._encode(self._head + text)

    def whole(self, question: str) -> list[int]:
        """Token ids of everything before the answer."""
        return self._encode(self._head + question + self._tail)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those of the template."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def write_conversations(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Sequence[int]],
    count: int,
    path: Path,
    seed: int = 0,
) -> list[Conversation]:
    """Conversations that the target writes, appended to `path` until it holds `count` or more.

    Questions of the kinds chat, code and mathematics are the target's own from their first words
    on; edits and documents are about its own answers and about pieces of `documents`. Every other
    answer is greedy, the others have temperature 0.7, as a verifier would write them.

    Args:
        decoder: The target.
        tokenizer: Its tokenizer, with a chat template.
        documents: Token ids of text files.
        count: Number of conversations.
        path: File to write, or to go on with.
        seed: Of all random choices. Files of different seeds have different conversations.

    Raises:
        ValueError: There is no chat template, or the file is damaged.
    """
    template = Template(tokenizer)
    written = read_conversations(path) if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ("own text", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=count, completed=len(written))
        while len(written) < count:
            draw = np.random.default_rng((seed, len(written)))
            questions = [
                _question(kind, template, documents, written, draw)
                for kind in draw.choice(list(_SHARES), _TOGETHER, p=list(_SHARES.values()))
            ]
            new = _answer(decoder, template, _complete(decoder, template, questions, draw), draw)
            append(path, new)
            written += new
            progress.update(bar, completed=len(written))
    return written


def _question(
    kind: str,
    template: Template,
    documents: Sequence[Sequence[int]],
    written: Sequence[Conversation],
    draw: np.random.Generator,
) -> _Question:
    def one_of(texts: Sequence[str]) -> str:
        return texts[int(draw.integers(len(texts)))]

    def piece(lengths: tuple[int, int], least: int = 0) -> str:
        ids = documents[int(draw.integers(len(documents)))]
        length = int(np.exp(draw.uniform(*np.log(lengths))))
        start = int(draw.integers(max(0, len(ids) - length) + 1))
        return template.text(ids[start : start + length])

    if kind == "chat":
        return _Question(
            kind, one_of(openings.FREE if draw.random() < 0.5 else openings.CHAT), True
        )
    if kind == "code":
        return _Question(kind, one_of(openings.CODE), True)
    if kind == "mathematics":
        return _Question(kind, one_of(openings.MATHEMATICS), True)
    if kind == "edit":
        own = [each for each in written if each.kind in ("chat", "mathematics")]
        if own and draw.random() < 0.6:
            text = template.text(own[draw.integers(len(own))].answer)
            return _Question(kind, f"{one_of(openings.EDIT)}\n\n{text}", False)
        text = f"{one_of(openings.EDIT_CODE)}\n```\n{piece(_EDIT)}\n```"
        return _Question(kind, text, False)
    return _Question(kind, f"{piece(_DOCUMENT)}\n\n{one_of(openings.DOCUMENT)}", False)


def _complete(
    decoder: Decoder, template: Template, questions: list[_Question], draw: np.random.Generator
) -> list[_Question]:
    """The questions, with the open ones written to their end."""
    numbers = [number for number, question in enumerate(questions) if question.open]
    tasks = [
        Task(
            template.head(questions[number].text),
            SamplingParams(temperature=1.0, min_p=0.02, seed=seed),
            _QUESTION,
        )
        for number, seed in zip(numbers, _seeds(draw, len(numbers)), strict=True)
    ]
    for index, tokens in write_texts(decoder, tasks, template.stop):
        number = numbers[index]
        text = questions[number].text + template.text(tokens)
        questions[number] = _Question(questions[number].kind, text.strip(), False)
    return questions


def _answer(
    decoder: Decoder, template: Template, questions: Sequence[_Question], draw: np.random.Generator
) -> list[Conversation]:
    seeds = _seeds(draw, len(questions))
    tasks = []
    for number, (question, seed) in enumerate(zip(questions, seeds, strict=True)):
        params = SamplingParams(temperature=_HEATS[number % 2], seed=seed)
        length = _DOCUMENT_ANSWER if question.kind == "document" else _ANSWER
        tasks.append(Task(template.whole(question.text), params, length))
    found = sorted(write_texts(decoder, tasks, template.stop))
    return [
        Conversation(
            questions[number].kind,
            tasks[number].params.temperature,
            tasks[number].params.seed,
            tuple(tasks[number].prompt),
            tuple(answer),
        )
        for number, answer in found
    ]


def _seeds(draw: np.random.Generator, count: int) -> list[int]:
    return [int(seed) for seed in draw.integers(1 << 62, size=count)]
