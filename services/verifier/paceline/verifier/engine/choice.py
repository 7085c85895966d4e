"""The model's own token behind each node of one block."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from paceline.kernels import Proposal, accept_or_resample, choose_token, raw_logprobs
from paceline.verifier.engine.sequence import Sequence
from paceline.verifier.engine.tree import NO_TREE, DraftTree


class Chooser:
    """Chooses tokens for one walk, and notes their log-probabilities where asked for.

    Every token it chooses is emitted, so it goes into the sequence's history at once. Under
    rejection sampling the token behind a node that has a child is the child's, accepted, or a
    replacement: the walk goes by equality in both modes.

    Attributes:
        logprobs: Raw log-probability of each chosen token; empty unless asked for.
        top_logprobs: Likeliest (token, log-probability) pairs at each position; likewise.
    """

    def __init__(
        self,
        sequence: Sequence,
        logits: Tensor,
        tree: DraftTree = NO_TREE,
        tokens: Items[int] | None = None,
    ) -> None:
        """Choose for a sequence.

        Args:
            sequence: Whose block it is.
            logits: Of the block's nodes, ``[nodes, V]``.
            tree: The block's tree.
            tokens: Tokens behind the nodes, where they are known already (``choose_ahead``).
        """
        self._sequence = sequence
        self._logits = logits
        self._tokens = tokens
        sampling = sequence.generation.sampling
        self._plain = sampling.greedy and not sampling.penalised
        self._chain = tree if sampling.rejection else NO_TREE
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []

    def __call__(self, node: int) -> int:
        """The token at the position behind ``node``."""
        generation, history = self._sequence.generation, self._sequence.history
        guide, row = self._sequence.guide, self._logits[node]
        raw = row
        if guide is not None:
            row = guide.mask(row.cpu())
        if self._tokens is not None:
            token = self._tokens[node]
        elif self._plain:
            # numpy's argmax takes the lowest of equal values too, and a twentieth of torch's time.
            token = int(row.float().cpu().numpy().argmax())
        elif node < len(self._chain.tokens):
            token = self._settled(node, row.cpu())
        else:
            token = choose_token(row.cpu(), generation.sampling, len(history), history)
        history.push(token)
        if guide is not None:
            guide.push(token)
        if generation.top_logprobs is not None:
            logprob, top = raw_logprobs(raw, token, generation.top_logprobs)
            self.logprobs.append(logprob)
            if generation.top_logprobs:
                self.top_logprobs.append(top)
        return token

    def _settled(self, node: int, row: Tensor) -> int:
        """The token at the position for which the node below ``node`` was drafted."""
        sampling, history = self._sequence.generation.sampling, self._sequence.history
        drafted = self._chain.tokens[node]
        given = self._chain.proposals
        proposal = given[node] if given else Proposal.certain(drafted)
        return accept_or_resample(row, sampling, len(history), history, drafted, proposal)
