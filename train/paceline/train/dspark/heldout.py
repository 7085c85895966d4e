"""What chains a drafter would get accepted on texts that its target wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.methods.dspark import DSparkModel
from paceline.kernels import SamplingParams, gumbel_noise
from paceline.train.author import Task, write_texts
from paceline.train.dspark.blocks import Blocks
from paceline.train.dspark.target import TappedTarget

TEMPERATURES = (0.0, 1.0)
_WRITTEN = 128  # tokens after a prompt

Measured = Mapping[float, Sequence[int]]
"""Drafted tokens accepted in each round, by temperature."""


@dataclass(frozen=True)
class _Text:
    """A text of the target's, from `start` on its own, and its hidden states `[S, taps * hidden]`.

    `noise`, fp32 `[S, V]`, is what the verifier adds to the logits of each position, None where it
    adds nothing.
    """

    tokens: Tensor
    start: int
    taps: Tensor
    noise: Tensor | None


class Heldout:
    """Texts by the target after prompts, and how much of them a drafter's chains get right.

    What the target emits does not depend on drafts, so a round is: draft, and count how far the
    chain is the text. At temperature 1 the drafter adds the verifier's noise (coupling).
    """

    def __init__(self, target: TappedTarget, prompts: Sequence[Sequence[int]], stop: int) -> None:
        """Let the target write behind each prompt, up to the token `stop`."""
        self._target = target
        self._texts: dict[float, list[_Text]] = {}
        for heat in TEMPERATURES:
            tasks = [
                Task(prompt, SamplingParams(temperature=heat, seed=seed), _WRITTEN)
                for seed, prompt in enumerate(prompts)
            ]
            written = dict(write_texts(target.decoder, tasks, stop))
            self._texts[heat] = [self._read(task, written[i]) for i, task in enumerate(tasks)]

    def measure(self, model: DSparkModel) -> Measured:
        """What is accepted of a drafter's chains."""
        return {
            heat: [found for text in texts for found in self._accepted(model, text)]
            for heat, texts in self._texts.items()
        }

    def log(self, model: DSparkModel) -> dict[str, float]:
        """Accepted length, and acceptance of each place given those before: a row of a log."""
        rounds = [found for part in self.measure(model).values() for found in part]
        places = range(1, model.config.levels + 1)
        shares = {f"place_{place}": conditional(rounds, place) for place in places}
        return {"heldout": accepted_length(rounds), **shares}

    def _read(self, task: Task, written: Sequence[int]) -> _Text:
        head = self._target.head
        tokens = torch.tensor([*task.prompt, *written], device=head.device)
        taps, _ = self._target.read(tokens[None], tokens[:1] * 0)
        params, noise = task.params, None
        if params.temperature:
            rows = [gumbel_noise(params.seed, i, len(head)) for i in range(len(tokens))]
            noise = torch.stack(rows).to(head.device)
        return _Text(tokens, len(task.prompt), taps, noise)

    @torch.no_grad()
    def _accepted(self, model: DSparkModel, text: _Text) -> list[int]:
        levels, found = model.config.levels, list[int]()
        places = range(text.start, len(text.tokens) - levels)
        if not places:
            return found
        stands = self._stands(model, text, torch.tensor(places, device=text.tokens.device))
        place = places.start
        while place in places:
            depth = int(stands[place - places.start])
            found.append(depth)
            place += depth + 1
        return found

    def _stands(self, model: DSparkModel, text: _Text, anchors: Tensor) -> Tensor:
        """How many tokens of the chain behind each anchor the text has too, int64 `[N]`."""
        target, tokens = self._target, text.tokens
        blocks = Blocks.at(model.config, tokens[None], torch.zeros_like(anchors), anchors)
        hidden = model.eval()(
            target.embed(blocks.fed),
            anchors,
            text.taps[blocks.used].float(),
            blocks.used,
            blocks.seen,
        )
        logits = F.linear(hidden.to(target.head.dtype), target.head).float()
        chains = draft_chains(model, hidden, logits, tokens[anchors], anchors, text.noise)
        return (chains == blocks.wanted).cumprod(1).sum(1)


def accepted_length(rounds: Sequence[int]) -> float:
    """Mean tokens of a round, the verifier's own included."""
    return 1 + sum(rounds) / max(1, len(rounds))


def conditional(rounds: Sequence[int], place: int) -> float:
    """Share of rounds in which a place was accepted, of those in which all before it were."""
    tried = sum(found >= place - 1 for found in rounds)
    return sum(found >= place for found in rounds) / max(1, tried)


def draft_chains(
    model: DSparkModel,
    hidden: Tensor,
    logits: Tensor,
    before: Tensor,
    anchors: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """The likeliest chain of each block, token after token (equation 4).

    Args:
        model: The drafter.
        hidden: The backbone's states, `[N, levels, hidden]`.
        logits: The LM head's, `[N, levels, V]`.
        before: The anchors' tokens, int64 `[N]`.
        anchors: Their positions, int64 `[N]`.
        noise: Added to the logits of a position, `[S, V]`; None: nothing.

    Returns:
        int64 `[N, levels]`.
    """
    head = model.markov_head
    state = head.begin(hidden[:, 0]) if head is not None else hidden
    chain = []
    for place in range(hidden.shape[1]):
        scores = logits[:, place]
        if head is not None:
            state, features = head.step(state, head.markov_w1(before), hidden[:, place])
            scores = scores + head.markov_w2(features)
        if noise is not None:
            scores = scores + noise[anchors + 1 + place]
        before = scores.argmax(-1)
        chain.append(before)
    return torch.stack(chain, dim=1)
