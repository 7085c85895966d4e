"""The two small heads on the backbone: one for the order of tokens, one for their confidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.convert.drafters import DRAFT_TOKENS
from paceline.device import device_of
from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.layers import draft_rows, linear
from paceline.kernels import send
from paceline.kernels.linear import PackedMatrix

NativeHead = tuple[Tensor, PackedMatrix]
Head = TypeVar("Head", bound=nn.Module)


class MarkovHead(nn.Module):
    """Bias of a position's logits that depends on the token before it in the block.

    The bias is W2 of features: W1's row of the token before (DSpark, section 3.1, equation 5), for
    ``product`` multiplied by a linear layer of the backbone's hidden state of the position
    (DFlash 2). With a reduced vocabulary W1 has rows for the drafted tokens and one for all others,
    since only an anchor can be another token, or rows for all tokens.
    """

    def __init__(self, config: DSparkConfig) -> None:
        """Create a head whose bias is 0, because W2 is."""
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden
        self.kind = config.markov_head
        rows = torch.empty(config.markov_rows, rank)
        self.markov_w1 = nn.Embedding.from_pretrained(rows, freeze=False)
        self.markov_w2 = nn.Linear(rank, config.drafted, bias=False)
        if self.kind == "product":
            self.gate_proj = nn.Linear(hidden, rank, bias=False)
        if not rows.is_meta:  # there, random numbers import torch's compiler: 1 s and 150 MiB
            nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)

    def features(self, before: Tensor, hidden: Tensor) -> Tensor:
        """Compute the features of positions, of which W2 makes the bias, ``[..., r]``, by W1's row
        of the token before each, ``[..., r]``, and hidden states, ``[..., hidden]``."""
        return self.gate_proj(hidden) * before if self.kind == "product" else before

    def forward(self, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features, of which W2 makes the bias, and W1's rows, both ``[N, S, r]``, of all
        positions of blocks: by W1's row number of the token before each, int64 ``[N, S]``, and the
        backbone's hidden states, ``[N, S, hidden]``."""
        rows = self.markov_w1(before)
        return self.features(rows, hidden), rows


class ConfidenceHead(nn.Module):
    """Logit of the probability that a token is accepted if those before it are (equation 7)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_markov else 0
        self.proj = nn.Linear(config.hidden + rank, 1)

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Map ``[..., hidden]`` and, if the head reads it, W1's row ``[..., r]`` to ``[...]``."""
        wide = self.proj.in_features > hidden.shape[-1]
        features = torch.cat([hidden, before], dim=-1) if wide and before is not None else hidden
        logit: Tensor = self.proj(features).squeeze(-1)
        return logit


class DSparkHeads:
    """The heads that a drafter has, with its weights. Used on one thread."""

    def __init__(
        self,
        config: DSparkConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int = 0,
    ) -> None:
        """Build the heads from the folder's tensors; ``bits`` of W2 on the CPU as for
        :func:`linear`.

        On the CPU they are float32, the type of the kernels' logits: sums of two types are slow.
        """
        self._device = torch.device(device)
        if device_of(self._device).packs:
            dtype = torch.float32
        self._dtype = dtype
        self._rows = torch.arange(config.vocab_size)  # row of W1 by token
        self._best = config.markov_best
        self._temperatures = config.confidence_temperatures or (1.0,) * config.levels
        drafted = weights[DRAFT_TOKENS].cpu() if DRAFT_TOKENS in weights else None
        if config.markov_all and drafted is not None:
            # The first rows belong to the logits, as in other drafters, the others to all tokens.
            self._rows = self._rows + len(drafted)
        elif drafted is not None:
            self._rows = draft_rows(drafted, self._rows)
        self._rows = send(self._rows, self._device)
        self._markov: MarkovHead | None = None
        if config.markov_rank:
            self._markov = _loaded(MarkovHead(config), "markov_head.", weights).to(device, dtype)
            self._w1 = self._markov.markov_w1.weight
            if config.markov_all and drafted is not None:
                self._w1 = torch.cat([self._w1[drafted.to(device)], self._w1]).detach()
            # Off the CPU it is one batched product with the logits, and small beside the LM head.
            w2_bits = bits if device_of(self._device).packs else 0
            self._w2 = linear([self._markov.markov_w2.weight], w2_bits)
        self._confidence: Tensor | None = None
        if config.confidence:
            head = _loaded(ConfidenceHead(config), "confidence_head.", weights).to(device, dtype)
            self._confidence = head.proj.weight[0, : config.hidden]
            # Offset of the confidence, by row of W1.
            self._offsets = head.proj.bias.detach().double().repeat(int(self._rows.max()) + 1)
            if config.confidence_markov:
                column = head.proj.weight[0, config.hidden :]
                self._offsets = (self._w1 @ column + head.proj.bias).detach().double()

    def native(self) -> tuple[NativeHead | None, tuple[Tensor, Tensor, Tensor] | None] | None:
        """Return the heads as :class:`~paceline.kernels.draft.DraftBlockModel` takes them: W1 in
        float32 with packed W2, and weights, offsets and temperatures of confidences. None if it
        cannot run them."""
        head = None
        if self._markov is not None:
            if self._markov.kind != "vanilla" or self._best or self._w2.packed is None:
                return None
            head = self._w1.detach(), self._w2.packed
        if self._confidence is None:
            return head, None
        temperatures = torch.tensor(self._temperatures, dtype=torch.float32)
        return head, (self._confidence.detach().contiguous(), self._offsets.float(), temperatures)

    def row(self, token: int) -> int:
        return int(self._rows[token])

    @torch.inference_mode()
    def forward(
        self, hidden: Tensor, logits: Tensor, before: Tensor, level: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the heads for a level (0: below the anchor) of S trees with F parents each, by the
        backbone's hidden states ``[S, hidden]``, the target's logits of them ``[S, V]`` or of
        drafted tokens alone, and the parents' tokens, int64 ``[S, F]``. Returns logits after each
        parent, ``[S, F, V]``, and log probabilities that a token of the level is accepted, float64
        ``[S, F]``, None without a confidence head."""
        hidden, logits = hidden.to(self._dtype), logits.to(self._dtype)[:, None]
        rows = self._rows[before]
        logs = None
        if self._confidence is not None:
            confidence = (hidden @ self._confidence)[:, None].double() + self._offsets[rows]
            logs = torch.nn.functional.logsigmoid(confidence / self._temperatures[level])
        if self._markov is None:
            return logits.expand(-1, before.shape[1], -1), logs
        features = self._markov.features(self._w1[rows], hidden[:, None])
        if self._w2.packed is not None:
            scores = torch.stack(list(map(self._w2, features, logits[:, 0])))
        else:
            weight = self._w2.weight
            assert isinstance(weight, Tensor)
            scores = torch.baddbmm(logits, features, weight.T.expand(len(rows), -1, -1))
        if 0 < self._best < logits.shape[2]:
            worst = logits.topk(self._best).values[..., -1:]
            scores = scores.masked_fill(logits < worst, -torch.inf)
        return scores, logs


def _loaded(head: Head, name: str, weights: Mapping[str, Tensor]) -> Head:
    """Load the tensors whose names begin with ``name`` into a head, and return it."""
    tensors = {n.removeprefix(name): t for n, t in weights.items() if n.startswith(name)}
    head.load_state_dict(tensors)
    return head
