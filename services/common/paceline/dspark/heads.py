"""The two small heads on the backbone: what comes after what, and how likely it is to stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """What is added to the logits of a place because of the tokens before it in the block.

    The bias of a place is W2 of some features, which :meth:`step` makes from the token before it,
    the backbone's state of the place, and in the RNN what the places before left (DSpark,
    section 3.1, equations 5 and 6). The gated kind weighs W1's features by the sigmoid of a linear
    layer over hidden state and features.
    """

    def __init__(self, config: DSparkConfig) -> None:
        """Make one that changes nothing yet: W2 is 0."""
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)

    def begin(self, hidden: Tensor) -> Tensor:
        """State before the first place, ``[..., r]``, for hidden states ``[..., hidden]``."""
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w1.embedding_dim)

    def step(self, state: Tensor, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One place.

        Args:
            state: What the places before left, ``[..., r]``.
            before: W1's row of the token before, ``[..., r]``.
            hidden: The backbone's state of the place, ``[..., hidden]``.

        Returns:
            State for the next place, and the features, both ``[..., r]``.
        """
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], dim=-1)))
            return state, gate * before
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, before, hidden], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return state, before

    def forward(self, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """All places of blocks whose tokens are known.

        Args:
            before: For each place the token before it, int64 ``[N, places]``.
            hidden: The backbone's states, ``[N, places, hidden]``.

        Returns:
            The bias, ``[N, places, V]``, and W1's rows, ``[N, places, r]``.
        """
        rows = self.markov_w1(before)
        if self.kind == "rnn":
            state, features = self.begin(hidden[:, 0]), []
            for place in range(before.shape[1]):
                state, found = self.step(state, rows[:, place], hidden[:, place])
                features.append(found)
            return self.markov_w2(torch.stack(features, dim=1)), rows
        return self.markov_w2(self.step(rows, rows, hidden)[1]), rows


class ConfidenceHead(nn.Module):
    """Logit of the chance that a place's token is accepted if those before it are (equation 7)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_markov else 0
        self.proj = nn.Linear(config.hidden + rank, 1)

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """``[..., hidden]`` and, where the head sees it, W1's rows ``[..., r]`` to ``[...]``."""
        wide = self.proj.in_features > hidden.shape[-1]
        features = torch.cat([hidden, before], dim=-1) if wide and before is not None else hidden
        logit: Tensor = self.proj(features).squeeze(-1)
        return logit
