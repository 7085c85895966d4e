"""How drafted tokens are accepted, as the wire says it. Imports no torch."""

from paceline.v1 import sampling_pb2


def rejects(message: sampling_pb2.SamplingParams) -> bool:
    """Whether rejection sampling decides; at temperature 0 both modes are one."""
    return message.temperature > 0 and message.mode == sampling_pb2.ACCEPTANCE_MODE_REJECTION
