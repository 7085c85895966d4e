"""Sampling parameters for the kernels. Torch is imported on use: not every service needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.sampling import Sampling
from paceline.v1 import sampling_pb2

if TYPE_CHECKING:
    from paceline.kernels import SamplingParams


def rejects(message: sampling_pb2.SamplingParams) -> bool:
    """Whether rejection sampling decides acceptance; at temperature 0 both modes are equal."""
    return message.temperature > 0 and message.mode == sampling_pb2.ACCEPTANCE_MODE_REJECTION


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Check and convert a message for the kernels.

    Shared by verifier and drafter, since both must sample alike.

    Raises:
        SamplingError: A value is out of range.
    """
    from paceline.kernels import SamplingParams

    checked = Sampling.from_proto(message)
    return SamplingParams(
        temperature=checked.temperature,
        top_k=checked.top_k,
        top_p=checked.top_p,
        min_p=checked.min_p,
        repetition_penalty=checked.repetition_penalty,
        presence_penalty=checked.presence_penalty,
        frequency_penalty=checked.frequency_penalty,
        logit_bias=tuple(sorted((checked.logit_bias or {}).items())),
        seed=checked.key,
        rejection=rejects(message),
    )
