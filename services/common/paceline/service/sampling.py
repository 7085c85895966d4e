"""The sampling contract on the wire. Imports torch, unlike the rest of the package."""

from paceline.kernels import SamplingParams
from paceline.service.modes import rejects
from paceline.v1 import sampling_pb2


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """The message as the kernels take it; fields that are 0 where 0 means off are filled in.

    Verifier and drafter must read a message alike, or the drafter ranks for another contract.

    Raises:
        ValueError: A value is out of range.
    """
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
