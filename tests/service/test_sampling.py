"""Sampling parameters from the wire."""

import math
from typing import Any

import pytest

from paceline.kernels import SamplingParams
from paceline.service.sampling import sampling_params
from paceline.v1 import sampling_pb2


def test_an_empty_message_is_greedy_with_everything_off() -> None:
    params = sampling_params(sampling_pb2.SamplingParams())
    assert params == SamplingParams(temperature=0.0)
    assert params.greedy
    assert not params.penalised


def test_every_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.125,
        "seed": 2**64 - 1,
    }
    message = sampling_pb2.SamplingParams(**fields, logit_bias={9: -2.0, 4: 0.5})
    expected = SamplingParams(**fields, logit_bias=((4, 0.5), (9, -2.0)))
    assert sampling_params(message) == expected
    assert sampling_params(sampling_pb2.SamplingParams.FromString(message.SerializeToString())) == (
        expected
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 1.5},
        {"min_p": -0.5},
        {"repetition_penalty": -1.0},
        {"presence_penalty": math.inf},
        {"logit_bias": {1: math.inf}},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        sampling_params(sampling_pb2.SamplingParams(**fields))
