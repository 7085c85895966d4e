"""Sampling parameters from the wire. Torch is imported on use: not every service needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.v1 import sampling_pb2

if TYPE_CHECKING:
    from paceline.kernels import SamplingParams


def rejects(message: sampling_pb2.SamplingParams) -> bool:
    """Whether rejection sampling decides acceptance; at temperature 0 both modes are equal."""
    return message.temperature > 0 and message.mode == sampling_pb2.ACCEPTANCE_MODE_REJECTION


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Convert a message for the kernels; 0 becomes 1 where the protocol defines 0 as unset.

    Shared by verifier and drafter, since both must sample alike.

    Raises:
        ValueError: A value is out of range.
    """
    from paceline.kernels import SamplingParams

    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        rejection=rejects(message),
    )
