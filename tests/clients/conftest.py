"""A gateway process before a real verifier, for the client libraries of other projects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from tiny_models import write_ending_model

from paceline.harness import ServiceProcess, local_services

MODEL = "ending"
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or () %}"
    "{{ call.function.name }} {{ call.function.arguments.gear }}{% endfor %}{{ m.content }}"
    "{% endfor %}<assistant>"
)


class Ride(BaseModel, extra="forbid"):
    """A ride. Every text of this form is short, whatever a random model writes."""

    gear: Literal["road", "track", "gravel"]
    laps: int = Field(ge=0, le=999)


SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 1, "max_tokens": 1500}
"""A random model's likeliest JSON would be white space without end."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "ride",
        "description": "Ride some laps",
        "parameters": Ride.model_json_schema(),
    },
}


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the gateway's API."""
    folder: Path = tmp_path_factory.mktemp("clients")
    write_ending_model(folder / MODEL)
    (folder / "template").write_text(TEMPLATE)
    target = ["--target", str(folder / MODEL), "--weights", "float32"]
    with (
        local_services(target, ["--load=ngram"]) as (verifier, _),
        ServiceProcess(
            "gateway",
            [
                *("--verifier-address", verifier.address),
                *("--chat-template", str(folder / "template")),
            ],
        ) as gateway,
    ):
        yield f"http://{gateway.address}/v1"
