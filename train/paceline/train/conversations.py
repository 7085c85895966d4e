"""Conversations that an instruct model writes alone, for training its drafters.

After Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing": given the head of a user's turn, the model writes the question, then answers it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingRules
from paceline.train.acceptance import Recording
from paceline.train.corpus import Corpus, EncodedDocuments, load_tokenizer
from paceline.train.own_text import Task, write_texts
from paceline.train.phases import Phase
from paceline.train.run import WRITING, Run

# Beginnings of questions by kind, system prompts, and functions to call.
_WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("openings.json").read_text())
_FREE_OPENINGS = ("",)  # half of the chats begin with nothing: the target chooses the subject
_FIRST, _TOGETHER = 8, 64  # conversations before the file grows, at first and at most
_SHARES = {
    "chat": 0.18, "system": 0.12, "turns": 0.15, "code": 0.15, "mathematics": 0.13, "edit": 0.13,
    "document": 0.06, "json": 0.05, "tools": 0.03,
}  # fmt: skip
KINDS = tuple(_SHARES)  # of conversations
_QUESTION, _ANSWER = 128, 320  # maximum of tokens that the target writes
_BEFORE = 1200  # maximum of tokens before a later turn
_EDIT = (100, 500)  # tokens of a text to edit
_DOCUMENT = (800, 7000)  # tokens of a document
_DOCUMENT_ANSWER = 160
_HEATS = (0.0, 0.7)
_MARK = "QUESTION"
_HELD_OUT = 17  # one conversation in so many: odd, as temperatures alternate
_TOKENS = 128  # of an answer that are measured


@dataclass(frozen=True)
class TokenizedConversation:
    """One question with its answer, as token ids in the target's chat template."""

    # `chat`, `system` (behind a system prompt), `turns` (a later turn), `code`, `mathematics`,
    # `edit`, `document`, `json` or `tools` (functions to call).
    kind: str
    temperature: float  # of the answer; 0: greedy
    seed: int  # of the answer's noise
    prompt: tuple[int, ...]  # everything before the answer
    # What the target wrote, its end-of-turn token included if it came to that.
    answer: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


def read_conversations(path: Path) -> list[TokenizedConversation]:
    """Read a file of conversations; a last line that was cut off while writing is left out. Raises
    ``ValueError`` if another line is no conversation."""
    lines = path.read_bytes().split(b"\n")
    conversations = []
    for number, line in enumerate(lines[:-1], 1):  # each line ends with a newline
        try:
            row = json.loads(line)
            row["prompt"], row["answer"] = tuple(row["prompt"]), tuple(row["answer"])
            conversations.append(TokenizedConversation(**row))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no conversation: {error!r}; expected a file of "
                "`paceline train own-text`"
            ) from error
    return conversations


def _append(path: Path, conversations: Iterable[TokenizedConversation]) -> None:
    """Add lines to the file, in one write."""
    text = "".join(json.dumps(asdict(conversation)) + "\n" for conversation in conversations)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Question:
    """A user's turn; `open` if the target is to write the rest of it."""

    kind: str
    text: str
    open: bool
    system: str | None = None  # system prompt; None: what the template has by default
    # Token ids of the conversation so far, up to the end of the target's turn.
    before: tuple[int, ...] = ()


class Template:
    """The target's chat template around a question."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Split the template at the question.

        Raises ValueError if the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError("the target has no chat template: own text needs an instruct model")
        self._tokenizer = tokenizer
        _, self._tail = self._around(None)
        self.stop = self._encode(self._tail)[0]  # the token that ends a turn
        turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": _MARK}]
        turns.append({"role": "user", "content": "B"})
        self._between = self._render(turns).split(_MARK)[1].rsplit("B", 1)[0]

    def head(self, question: Question) -> list[int]:
        """Return token ids up to the end of the question's text."""
        if question.before:
            # The text before ends with the stop token, which `_between` begins with.
            return [*question.before, *self._encode(self._between + question.text)[1:]]
        return self._encode(self._around(question.system)[0] + question.text)

    def whole(self, question: Question) -> list[int]:
        text = question.text + self._tail
        return self.head(replace(question, text=text))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the template's."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _around(self, system: str | None) -> tuple[str, str]:
        """Return what stands before and behind the text of the first question."""
        turns = [{"role": "system", "content": system}] if system is not None else []
        before, behind = self._render([*turns, {"role": "user", "content": _MARK}]).split(_MARK)
        return before, behind

    def _render(self, turns: list[dict[str, str]]) -> str:
        render = self._tokenizer.apply_chat_template
        return str(render(turns, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def write_conversations(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Sequence[int]],
    count: int,
    path: Path,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
    until: float = math.inf,
) -> list[TokenizedConversation]:
    """Append conversations that the target writes to `path` until it holds `count` or more.

    Questions of the kinds chat, system, turns, code and mathematics are the target's own from their
    first words on; edits and documents are about its own answers and about pieces of `documents`.
    Every other answer is greedy, the others have temperature 0.7, as a verifier would write them.

    Args:
        kinds: Those of :data:`KINDS` that are written, at their shares of a mixture of all.

    Raises ``ValueError`` if there is no chat template, a kind is unknown, or the file is damaged.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"no kinds of conversations: {unknown}; expected some of {KINDS}")
    shares = np.array([_SHARES[kind] for kind in kinds])
    template = Template(tokenizer)
    written = read_conversations(path) if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    phase = Phase("writing conversations", count, len(written), until)
    while len(written) < count and not phase.over:
        draw = np.random.default_rng((seed, len(written)))
        size = min(_TOGETHER, max(_FIRST, len(written)))
        questions = [
            _question(kind, template, documents, written, draw)
            for kind in draw.choice(list(kinds), size, p=shares / shares.sum())
        ]
        complete = _complete(decoder, template, questions, draw, phase)
        new = _answer(decoder, template, complete, draw, phase)
        _append(path, new)
        written += new
    return written


def _question(
    kind: str,
    template: Template,
    documents: Sequence[Sequence[int]],
    written: Sequence[TokenizedConversation],
    draw: np.random.Generator,
) -> Question:
    def one_of(texts: Sequence[str]) -> str:
        return texts[int(draw.integers(len(texts)))]

    def piece(lengths: tuple[int, int]) -> str:
        ids = documents[int(draw.integers(len(documents)))]
        length = int(np.exp(draw.uniform(*np.log(lengths))))
        start = int(draw.integers(max(0, len(ids) - length) + 1))
        return template.text(ids[start : start + length])

    if kind == "chat":
        return Question(
            kind, one_of(_FREE_OPENINGS if draw.random() < 0.5 else _WORDS["chat"]), True
        )
    if kind == "system":
        openings = _WORDS["chat"] + _WORDS["code"] + _WORDS["mathematics"]
        return Question(kind, one_of(openings), True, system=one_of(_WORDS["system"]))
    if kind == "turns":
        ended = [
            conversation.tokens
            for conversation in written
            if conversation.answer[-1] == template.stop and len(conversation.tokens) <= _BEFORE
        ]
        if ended:
            before = tuple(ended[int(draw.integers(len(ended)))])
            return Question(kind, one_of(_WORDS["further"]), True, before=before)
        kind = "code"
    if kind == "code":
        return Question(kind, one_of(_WORDS["code"]), True)
    if kind == "mathematics":
        return Question(kind, one_of(_WORDS["mathematics"]), True)
    if kind == "json":
        system = _WORDS["json_system"][int(draw.integers(len(_WORDS["json_system"])))]
        return Question(kind, one_of(_WORDS["json"]), True, system)
    if kind == "tools":
        return Question(kind, one_of(_WORDS["tools"]), True, system=_tools_prompt(draw))
    if kind == "edit":
        editable = [earlier for earlier in written if earlier.kind in ("chat", "mathematics")]
        if editable and draw.random() < 0.6:
            text = template.text(editable[draw.integers(len(editable))].answer)
            return Question(kind, f"{one_of(_WORDS['edit'])}\n\n{text}", False)
        text = f"{one_of(_WORDS['edit_code'])}\n```\n{piece(_EDIT)}\n```"
        return Question(kind, text, False)
    return Question(kind, f"{piece(_DOCUMENT)}\n\n{one_of(_WORDS['document'])}", False)


def _tools_prompt(draw: np.random.Generator) -> str:
    """Return a system prompt that offers one to four functions."""
    chosen = draw.choice(len(_WORDS["functions"]), int(draw.integers(1, 5)), replace=False)
    functions = [
        {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"} for parameter in parameters},
                "required": parameters,
            },
        }
        for name, *parameters in (_WORDS["functions"][index] for index in chosen)
    ]
    return (
        "You can call the functions below. Answer a question that one of them can answer with "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else.\n'
        + json.dumps(functions)
    )


def _complete(
    decoder: Decoder,
    template: Template,
    questions: list[Question],
    draw: np.random.Generator,
    phase: Phase,
) -> list[Question]:
    """Return the questions, open ones written to their end before the phase's time is over."""
    numbers = [number for number, question in enumerate(questions) if question.open]
    tasks = [
        Task(
            template.head(questions[number]),
            SamplingRules(temperature=1.0, min_p=0.02, seed=seed),
            _QUESTION,
        )
        for number, seed in zip(numbers, _seeds(draw, len(numbers)), strict=True)
    ]
    for index, tokens in write_texts(decoder, tasks, template.stop):
        number = numbers[index]
        text = questions[number].text + template.text(tokens)
        questions[number] = replace(questions[number], text=text.strip(), open=False)
        if phase.late:
            break
    return [question for question in questions if not question.open]


def _answer(
    decoder: Decoder,
    template: Template,
    questions: Sequence[Question],
    draw: np.random.Generator,
    phase: Phase,
) -> list[TokenizedConversation]:
    """Conversations of the answers that are finished before the time of the phase is over."""
    seeds = _seeds(draw, len(questions))
    tasks = []
    for number, (question, seed) in enumerate(zip(questions, seeds, strict=True)):
        params = SamplingRules(temperature=_HEATS[number % 2], seed=seed)
        length = _DOCUMENT_ANSWER if question.kind == "document" else _ANSWER
        tasks.append(Task(template.whole(question), params, length))
    answers = sorted(phase.take(write_texts(decoder, tasks, template.stop)))
    return [
        TokenizedConversation(
            questions[number].kind,
            tasks[number].params.temperature,
            tasks[number].params.seed,
            tuple(tasks[number].prompt),
            tuple(answer),
        )
        for number, answer in answers
    ]


def _seeds(draw: np.random.Generator, count: int) -> list[int]:
    return [int(seed) for seed in draw.integers(1 << 62, size=count)]


@dataclass(frozen=True)
class OwnTexts:
    """Conversations that an instruct model wrote, as the text for its drafters."""

    trained: Sequence[TokenizedConversation]
    heldout: Sequence[TokenizedConversation]

    @classmethod
    def load(
        cls,
        decoder: Decoder,
        target: Path,
        corpus: Corpus,
        count: int,
        run: Run,
        files: Sequence[Path] = (),
    ) -> OwnTexts:
        """Read the conversations `own-*.jsonl` in `run.work`, after these are complete.

        Several processes share the writing: each has a file and a seed of its own.

        Args:
            files: Conversations that were written before. They are copied, and none is written.

        Raises what `write_conversations` and `read_conversations` raise.
        """
        state = PartialState(cpu=True)
        if files:
            if state.is_main_process:
                _copy(files, run.work)
        else:
            share = -(-count // state.num_processes)
            path = run.work / f"own-{state.process_index}.jsonl"
            whole = path.with_suffix(".whole")
            if not whole.is_file():
                tokenizer = load_tokenizer(target)
                documents = EncodedDocuments(tokenizer, corpus.train)
                seed = state.process_index
                until = run.until(WRITING)
                write_conversations(decoder, tokenizer, documents, share, path, seed, until=until)
                whole.touch()  # a run that goes on reads the texts that it began with
        state.wait_for_everyone()
        texts = [text for path in _files(run.work) for text in read_conversations(path)]
        trained = [text for number, text in enumerate(texts) if number % _HELD_OUT]
        if not trained:
            raise ValueError(
                f"there are {len(texts)} conversations to train on and hold out: give more "
                "--minutes to write them in, or files of `paceline train own-text` as --own-text"
            )
        return cls(trained, texts[::_HELD_OUT])

    def frequent(self, count: int) -> Tensor:
        """Return the `count` most frequent tokens, rising, int64; one of a prompt, where none is
        drafted, counts a twentieth.

        Where there are too few different ones, the first tokens of the vocabulary fill up.
        """
        counts = Counter(range(count))  # each token once
        for text in self.trained:
            counts.update(text.prompt)
            counts.update({token: 20 * count for token, count in Counter(text.answer).items()})
        tokens = [token for token, _ in counts.most_common(count)]
        return torch.tensor(sorted(tokens), dtype=torch.int64)

    def recordings(self, count: int, depth: int) -> Mapping[str, Sequence[Recording]]:
        """At most `count` held-out texts of each kind and temperature, with room for a draft.

        Args:
            depth: Longest path that is drafted. Unit: tokens.
        """
        groups: defaultdict[str, list[Recording]] = defaultdict(list)
        for text in self.heldout:
            group = groups[f"{text.kind}, temperature {text.temperature:g}"]
            if len(group) < count and len(text.answer) > depth + 1:
                answer = text.answer[:_TOKENS]
                group.append(Recording(text.prompt, answer, text.temperature, text.seed))
        return dict(sorted(groups.items()))

    def card_section(self) -> str:
        """Return the section of a model card about these texts."""
        counts = Counter(text.kind for text in self.trained)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
        tokens = sum(len(text.tokens) for text in self.trained)
        return f"""## Data

{len(self.trained):,} conversations, {tokens / 1e3:,.0f} thousand tokens, that the target wrote
itself ({kinds}). One in {_HELD_OUT} of all is held out."""


def _files(work: Path) -> list[Path]:
    return sorted(work.glob("own-*.jsonl"))


def _copy(files: Sequence[Path], work: Path) -> None:
    """Copy files to `work`, unless an earlier call did: they may have grown since."""
    for number, file in enumerate(files):
        path = work / f"own-{number}.jsonl"
        if not path.is_file():
            partial = path.with_suffix(".partial")
            shutil.copyfile(file, partial)
            partial.replace(path)
