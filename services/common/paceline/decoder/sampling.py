"""Sampling parameters for the kernels."""

from __future__ import annotations

from paceline.kernels import SamplingParams
from paceline.sampling import Sampling, rejects
from paceline.v1 import sampling_pb2


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Check and convert a message for the kernels.

    Shared by verifier and drafter, since both must sample alike. Raises ``ParameterError``: a value
    is out of range.
    """
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
