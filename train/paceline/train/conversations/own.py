"""The conversations of a run: those of its work folder, some of them held out."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from paceline.decoder import Decoder
from paceline.drafter.recordings import Recording
from paceline.train.conversations.file import Conversation, read_conversations
from paceline.train.conversations.write import write_conversations
from paceline.train.corpus import Corpus
from paceline.train.loop import Run
from paceline.train.tokenizer import encode_all, load_tokenizer

_HELD_OUT = 17  # one conversation in so many: odd, as temperatures alternate
_TOKENS = 128  # of an answer that are measured


@dataclass(frozen=True)
class OwnTexts:
    """Conversations that an instruct model wrote, as the text for its drafters."""

    trained: Sequence[Conversation]
    heldout: Sequence[Conversation]

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
            decoder: The target.
            target: Its folder.
            corpus: Texts that conversations are about.
            count: Number of conversations.
            run: Has the folder.
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
            if not path.is_file() or len(read_conversations(path)) < share:
                tokenizer = load_tokenizer(target)
                documents = encode_all(tokenizer, corpus.train)
                seed = state.process_index
                write_conversations(decoder, tokenizer, documents, share, path, seed)
        state.wait_for_everyone()
        found = [each for path in _files(run.work) for each in read_conversations(path)]
        trained = [each for number, each in enumerate(found) if number % _HELD_OUT]
        return cls(trained, found[::_HELD_OUT])

    def frequent(self, count: int) -> Tensor:
        """The `count` most frequent tokens, rising, int64.

        Where there are too few different ones, the first tokens of the vocabulary fill up.
        """
        counts = Counter(range(count))  # each token once
        for each in self.trained:
            counts.update(each.tokens)
        found = [token for token, _ in counts.most_common(count)]
        return torch.tensor(sorted(found), dtype=torch.int64)

    def recordings(self, count: int, depth: int) -> Mapping[str, Sequence[Recording]]:
        """At most `count` held-out texts of each kind and temperature, with room for a draft.

        Args:
            count: Texts of a group.
            depth: Longest path that is drafted. Unit: tokens.
        """
        groups: defaultdict[str, list[Recording]] = defaultdict(list)
        for each in self.heldout:
            group = groups[f"{each.kind}, temperature {each.temperature:g}"]
            if len(group) < count and len(each.answer) > depth + 1:
                answer = each.answer[:_TOKENS]
                group.append(Recording(each.prompt, answer, each.temperature, each.seed))
        return dict(sorted(groups.items()))

    def card_section(self) -> str:
        """The section of a model card about these texts."""
        counts = Counter(each.kind for each in self.trained)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
        tokens = sum(len(each.tokens) for each in self.trained)
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
