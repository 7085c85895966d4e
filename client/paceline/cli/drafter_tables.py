"""Tables of `paceline drafters`, or JSON in their place."""

from __future__ import annotations

import json
from collections.abc import Sequence

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from paceline.v1 import drafter_pb2


def show(drafters: Sequence[drafter_pb2.DrafterInfo], default: str, as_json: bool) -> None:
    """Print versions of drafters; `default` is the name of the default drafter."""
    if as_json:
        print(json.dumps([_as_dict(info) for info in drafters], indent=2))
        return
    table = Table(
        "name", "version", "method", "share", "streams", "weights", "check", "state", box=None
    )
    for info in drafters:
        table.add_row(
            info.name + (" (default)" if info.name == default else ""),
            info.version,
            info.method,
            f"{info.traffic_share:.0%}",
            str(info.active_streams),
            f"{info.weight_bytes / 2**20:.1f} MiB" if info.weight_bytes else "-",
            f"{info.check.accepted_length:.2f} accepted, {info.check.draft_us / 1e3:.2f} ms"
            if info.HasField("check")
            else "-",
            "draining" if info.draining else "active" if info.traffic_share else "idle",
        )
    Console(highlight=False).print(table)


def show_canaries(canaries: Sequence[drafter_pb2.DrafterCanary], as_json: bool) -> None:
    """Print canaries and what they are compared with."""
    if as_json:
        print(json.dumps([_as_dict(canary) for canary in canaries], indent=2))
        return
    table = Table(
        "name", "canary", "baseline", "generations", "accepted", "draft", "state", box=None
    )
    for each in canaries:
        new, old = each.canary_statistics, each.baseline_statistics
        state = drafter_pb2.CanaryState.Name(each.state).removeprefix("CANARY_STATE_").lower()
        table.add_row(
            each.name,
            each.canary,
            each.baseline,
            f"{new.generations} / {old.generations}",
            f"{new.accepted_length:.2f} / {old.accepted_length:.2f}",
            f"{new.draft_us / 1e3:.2f} / {old.draft_us / 1e3:.2f} ms",
            state.replace("_", " ") + (f": {each.reason}" if each.reason else ""),
        )
    Console(highlight=False).print(table)


def _as_dict(message: Message) -> dict[str, object]:
    """Fields by name, JSON-ready: messages as dicts, repeated numbers as lists."""
    found: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            found[field.name] = _as_dict(value)
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found
