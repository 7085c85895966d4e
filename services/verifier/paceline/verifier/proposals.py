"""What drafted tokens were drawn from, checked: the REJECTION mode's part of a tree."""

from __future__ import annotations

from paceline.kernels import Proposal, SamplingParams
from paceline.service import ServiceError
from paceline.v1 import tree_pb2

MAX_LISTED = 4096
"""Most tokens that one node's distribution may list."""

_invalid = ServiceError.invalid_argument


def read_proposals(
    message: tree_pb2.TokenTree, vocab_size: int, sampling: SamplingParams, position: int
) -> list[Proposal]:
    """The distributions of a chain's nodes.

    Rejection sampling keeps the target's distribution only if every token is a sample of its q. So
    it must be the one that q and the draws of its position give: a drafter may be wrong about q as
    it likes, but not say one thing and do another. A chain without distributions is one of
    certainties, which any tokens are.

    Args:
        message: A tree whose tokens and parents were checked.
        vocab_size: Number of token ids.
        sampling: The generation's.
        position: Absolute position of the first drafted token.

    Raises:
        ServiceError: INVALID_ARGUMENT: it is no chain, a distribution is none, or a token is not
            the sample of its distribution.
    """
    nodes = len(message.tokens)
    if list(message.parents) != list(range(-1, nodes - 1)):
        raise _invalid("BAD_TREE", "with REJECTION a tree must be a chain; draft one token a level")
    if len(message.distributions) not in (0, nodes):
        raise _invalid(
            "BAD_TREE",
            f"the chain has {nodes} tokens but {len(message.distributions)} distributions; send "
            "none, or one a node",
        )
    proposals = []
    for node, listed in enumerate(message.distributions):
        proposal = _read(node, listed, vocab_size)
        drawn = proposal.draw(sampling.seed, position + node)
        if drawn != message.tokens[node]:
            raise _invalid(
                "NOT_A_SAMPLE",
                f"node {node} holds token {message.tokens[node]}, but the draw of its position "
                f"takes {drawn} from its distribution; is the drafter's text another one?",
            )
        proposals.append(proposal)
    return proposals


def _read(node: int, listed: tree_pb2.NodeDistribution, vocab_size: int) -> Proposal:
    if len(listed.tokens) > MAX_LISTED:
        raise _invalid(
            "BAD_DISTRIBUTION",
            f"the distribution of node {node} lists {len(listed.tokens)} tokens, expected at most "
            f"{MAX_LISTED}; send the likeliest",
        )
    if len(listed.tokens) and max(listed.tokens) >= vocab_size:
        raise _invalid(
            "TOKEN_OUT_OF_VOCABULARY",
            f"the distribution of node {node} lists token {max(listed.tokens)}, but the model has "
            f"{vocab_size} token ids, counted from 0",
        )
    try:
        return Proposal.checked(listed.tokens, listed.probabilities)
    except ValueError as error:
        raise _invalid(
            "BAD_DISTRIBUTION", f"the distribution of node {node} is none: {error}"
        ) from error
