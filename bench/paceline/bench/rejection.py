"""Chain rejection sampling with a LongSpec layer: what the shared noise is measured against.

After Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023: the
drafter samples a chain from its own distribution q, each token is accepted with probability
min(1, p / q), and the first rejected one is replaced by a sample of norm(max(p - q, 0)), the
residual. Lossless in distribution, but the text depends on the drafter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.decoder import Decoder
from paceline.drafter import Budget, Generation, Update
from paceline.drafter.acceptance import RecordedKv, Recording
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.drafter.methods.longspec.sequence import LongSpecSequence
from paceline.kernels import TreeSegment, plan_trees
from paceline.v1 import sampling_pb2


def accepted_lengths(
    target: Decoder, drafter: LongSpecDrafter, recording: Recording, seed: int
) -> list[int]:
    """Accepted drafted tokens of each round of a text sampled at temperature 1.

    The text is as long as the recording, whose prompt it continues and whose cache it overwrites.

    Args:
        target: The model that made the recording.
        drafter: Must draft one path, every token of the vocabulary among its candidates.
        recording: Sampled at temperature 1.
        seed: Of all draws. Must not be the recording's.
    """
    draws = torch.Generator().manual_seed(seed)
    depth, length = drafter.max_depth, recording.prompt_length
    text = recording.tokens[: length + 1]
    cache, kv = recording.cache, RecordedKv(recording.cache)
    cache.truncate(length)
    kv.committed = length
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=seed)
    sequence = drafter.start(Generation(text, length, recording.vocab_size, sampling, kv=kv))
    accepted = []
    while len(text) + depth <= len(recording.tokens):
        drafted, theirs = _draft(drafter, sequence)
        fed = [text[-1], *drafted]
        cache.reserve(len(fed))
        plan = plan_trees([TreeSegment(0, len(cache), None, len(fed))])
        logits = target.forward(torch.tensor(fed), plan, [cache], logit_rows=None).logits
        emitted = settle(logits.float().softmax(-1), theirs, drafted, draws)
        cache.commit(range(len(emitted)))
        text += emitted
        accepted.append(len(emitted) - 1)
        kv.committed = len(cache)
        sequence.extend(Update(emitted, committed_length=kv.committed))
    sequence.close()
    return accepted


def settle(
    ours: Tensor, theirs: Tensor, drafted: Sequence[int], draws: torch.Generator
) -> list[int]:
    """Tokens that a round emits: the accepted ones and one more.

    Args:
        ours: The target's distributions p, of the anchor and of each drafted token, ``[n + 1, V]``.
        theirs: The drafter's distributions q, each drafted token's own, ``[n, V]``.
        drafted: Samples of q.
        draws: Where chance comes from.
    """
    for index, token in enumerate(drafted):
        p, q = ours[index], theirs[index]
        if float(torch.rand((), generator=draws)) * float(q[token]) >= float(p[token]):
            residual = (p - q).clamp(min=0)
            return [*drafted[:index], int(torch.multinomial(residual, 1, generator=draws))]
    return [*drafted, int(torch.multinomial(ours[len(drafted)], 1, generator=draws))]


def _draft(drafter: LongSpecDrafter, sequence: LongSpecSequence) -> tuple[list[int], Tensor]:
    """A chain, and the distribution that each of its tokens is a sample of, ``[n, V]``.

    The drafter's ranking takes the largest of logits and Gumbel noise: that is a sample of q. No
    position's noise decides twice, since what stands below a rejected token was never looked at.
    """
    sequence.begin(Budget(drafter.max_nodes, drafter.max_depth))
    rows = []
    while sequence.tree.grows:
        logits = drafter.layer.forward([sequence.step()])
        rows.append(logits[0].float().softmax(-1))
        sequence.add_level(logits)
    sequence.finish()
    return list(sequence.tree.tree().tokens), torch.stack(rows)
