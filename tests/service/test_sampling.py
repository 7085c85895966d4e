"""Sampling parameters: their ranges, their message, and what the kernels get."""

import json
import math
from typing import Any

import pytest

from paceline.checks import ParameterError
from paceline.kernels import SamplingRules
from paceline.sampling import Sampling
from paceline.text import sampling_rules
from paceline.v1 import sampling_pb2

# Exact in float32, the type of the message.
FIELDS: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5,
    "presence_penalty": -0.5, "frequency_penalty": 0.125, "seed": 2**64 - 1,
}  # fmt: skip


def test_an_empty_message_is_greedy_with_everything_off() -> None:
    params = sampling_rules(Sampling.from_proto(sampling_pb2.SamplingParams()))
    assert params == SamplingRules(temperature=0.0)
    assert params.greedy
    assert not params.penalised


def test_every_parameter_arrives() -> None:
    sent = Sampling(**FIELDS, logit_bias={9: -2.0, 4: 0.5}, acceptance="rejection", regex="a")
    message = sampling_pb2.SamplingParams.FromString(sent.to_proto().SerializeToString())
    received = Sampling.from_proto(message)
    assert received == Sampling(**{**vars(sent), "json_schema": "", "grammar": ""})
    bias = ((4, 0.5), (9, -2.0))
    assert sampling_rules(Sampling.from_proto(message)) == SamplingRules(
        **FIELDS, logit_bias=bias, rejection=True
    )


def test_a_seed_that_is_not_given_is_random() -> None:
    first, second = Sampling(), Sampling()
    assert first.key != second.key
    assert first.to_proto().seed == first.seed


def test_a_schema_is_text_or_an_object() -> None:
    schema = {"const": 1}
    for given in (schema, json.dumps(schema)):
        assert json.loads(Sampling(json_schema=given).to_proto().json_schema) == schema


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("temperature", -0.1, "must be a finite number >= 0, not -0.1"),
        ("temperature", math.inf, "finite"),
        ("top_k", -1, ">= 0"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("min_p", 1.5, r"in \[0, 1\]"),
        ("repetition_penalty", 0.0, "> 0"),
        ("repetition_penalty", 1e39, "finite"),  # the message has numbers of 32 bits
        ("temperature", 1e39, "finite"),
        ("presence_penalty", -1e39, "finite"),
        ("frequency_penalty", math.nan, "finite"),
        ("logit_bias", {-1: 1.0}, "token id"),
        ("logit_bias", {1: math.inf}, "a finite number, or -inf"),
        ("logit_bias", {1: math.nan}, "a finite number, or -inf"),
        ("logit_bias", dict.fromkeys(range(4097), 1.0), "at most 4096"),
        ("seed", -1, "in"),
        ("seed", 2**64, "in"),
        ("acceptance", "maybe", "invariant or rejection"),
        ("json_schema", {"a": object()}, "JSON"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(parameter: str, value: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=f"{parameter}.*{message}") as raised:
        Sampling(**{parameter: value})
    assert raised.value.parameter == parameter


@pytest.mark.parametrize("value", [5e-324, 1e-50, 1e-45, 1e-38, 1e-19])
def test_the_smallest_values_stay_what_they_mean_in_the_message(value: float) -> None:
    """And do not become 0, which means unset."""
    given = Sampling(temperature=value, top_p=value, repetition_penalty=value, min_p=value)
    message = given.to_proto()
    assert given.temperature == message.temperature == 0.0
    assert 0 < message.top_p < 1e-18
    assert 0 < message.repetition_penalty < 1e-18
    assert Sampling.from_proto(message).top_p == message.top_p


def test_rejection_at_the_lowest_temperatures_is_greedy() -> None:
    message = Sampling(acceptance="rejection").to_proto()
    for temperature, rejects in ((1e-38, False), (0.1, True)):
        message.temperature = temperature
        params = sampling_rules(Sampling.from_proto(message))
        assert (params.rejection, params.greedy) == (rejects, not rejects)


@pytest.mark.parametrize(
    "fields", [{"mode": 77}, {"temperature": -1.0}, {"top_p": 1.5}, {"regex": "a", "grammar": "b"}]
)
def test_a_message_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        Sampling.from_proto(sampling_pb2.SamplingParams(**fields))
