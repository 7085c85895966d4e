# ruff: noqa: E501
"""How often a model's answer is a valid call of a tool: read by its tags alone, and by the gateway.

Each prompt asks for one of ten tools, all of which are on offer. Both readings are of the same
answers. A call is valid if it is of a tool on offer, with arguments of its schema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from itertools import product
from typing import Any

import aiohttp

from paceline.client import Client
from paceline.gateway import GatewayOptions, OneModel, run_gateway
from paceline.gateway.tool_schemas import fits

from .record import Results
from .services import services

_TEXT, _NUMBER, _WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 1}
_TABLE: list[tuple[str, dict[str, Any], tuple[str, str]]] = [
    # A tool, its parameters, and two questions with a place.
    ("get_weather", {"city": _TEXT, "days": _WHOLE}, ("How will the weather be in {} for the next 3 days?", "Do I need an umbrella in {} tomorrow?")),
    ("get_time", {"city": _TEXT}, ("What time is it in {} now?", "Is it night in {}?")),
    ("find_trains", {"start": _TEXT, "destination": _TEXT, "passengers": _WHOLE}, ("Find a train from Bern to {} for 2 people.", "I want to go from {} to Lyon by train, alone.")),
    ("book_hotel", {"city": _TEXT, "nights": _WHOLE, "breakfast": {"type": "boolean"}}, ("Book me a hotel in {} for 4 nights with breakfast.", "I need a room in {} for 1 night, without breakfast.")),
    ("convert_money", {"amount": _NUMBER, "to": {"enum": ["EUR", "USD", "CHF"]}, "note": _TEXT}, ("My stay in {} cost 250.50 pounds: how many USD is that?", "Convert 80 pounds to CHF, with the note {}.")),
    ("send_mail", {"to": _TEXT, "subject": _TEXT, "text": _TEXT}, ("Write to mia@example.org that I am in {} until Friday.", "Ask leo@example.org whether he comes to {} on Monday.")),
    ("add_event", {"title": _TEXT, "date": _TEXT, "guests": {"type": "array", "items": _TEXT}}, ("Put a meeting in {} with Ann and Bo on 2027-03-04 into my calendar.", "Note for 2027-05-06: flight to {}, with Kim.")),
    ("search_files", {"words": {"type": "array", "items": _TEXT}, "folder": _TEXT}, ("Which files in /trips mention {}?", "Search /notes for the words {} and museum.")),
    ("measure_way", {"start": _TEXT, "end": _TEXT, "unit": {"enum": ["km", "mi"]}}, ("How many km is it from Rome to {}?", "What is the distance from {} to Oslo in miles?")),
    ("rate_place", {"place": _TEXT, "stars": {"type": "integer", "minimum": 1, "maximum": 5}}, ("I loved {}: give it 5 stars.", "Rate {} with 2 stars, it was too crowded.")),
]  # fmt: skip
_PLACES = ("Paris", "Tokyo", "Lima", "Cairo", "Vienna", "Quito", "Riga", "Osaka", "Porto", "Tunis")
_TAGS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def run(args: argparse.Namespace) -> int:
    """Serve a target with a drafter, ask, and write the shares of valid calls."""
    results = Results("calls", args.output, args.target, weights=args.weights)
    drafters = {"lm": f"lm:{args.drafter}"} if args.drafter else {}
    results.uses(drafters)
    with services(args.target, drafters, args.weights) as pair:
        answers = asyncio.run(_ask(pair.client(), _questions()[:: args.every]))
    count = len(answers)
    shares = {name: sum(answer[name] for answer in answers) / count for name in answers[0]}
    results.add("tools_10", {"prompts": count, "temperature": 0, "figures": shares})
    print(json.dumps(shares))
    return 0


def _questions() -> list[tuple[str, str]]:
    """Return a tool's name and a question that needs it."""
    pairs = product(_PLACES, _TABLE, (0, 1))
    return [(name, asked[number].format(place)) for place, (name, _, asked), number in pairs]


def _tools() -> dict[str, dict[str, Any]]:
    """Return the parameters of each tool."""
    return {
        name: {"type": "object", "properties": properties, "required": list(properties)}
        for name, properties, _ in _TABLE
    }


async def _ask(client: Client, questions: list[tuple[str, str]]) -> list[dict[str, bool]]:
    """Return whether each answer is valid calls, and a call of the tool that the question needs."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop, answers = asyncio.Event(), list[dict[str, bool]]()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in _tools().items()
    ]
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_rounds": True}}
    options |= {"tools": tools, "temperature": 0, "max_tokens": 200}
    async with client, aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        gateway = GatewayOptions(address="127.0.0.1:0")
        group.create_task(
            run_gateway(OneModel(client), gateway, on_ready=ready.set_result, stop_event=stop)
        )
        url = f"http://{await ready}/v1/chat/completions"
        for tool, question in questions:
            body = {"messages": [{"role": "user", "content": question}], **options}
            text, calls = "", list[Any]()
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    rounds = choice.get("rounds", ())
                    text += "".join(piece for entry in rounds for piece in entry["pieces"])
                    calls += choice["delta"].get("tool_calls", ())
            read = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            by_tags = [_call_of(block) for block in _TAGS.findall(text)]
            answers.append(
                {
                    "valid_by_tags": _are_valid(by_tags),
                    "valid": _are_valid(read),
                    "right_tool": [name for name, _ in read] == [tool],
                    "in_a_fence": text.lstrip().startswith("```"),
                }
            )
        stop.set()
    return answers


def _call_of(text: str) -> tuple[str, str]:
    """Return the name and arguments of an object in tags; empty if it is none."""
    try:
        value = json.loads(text)
        return value["name"], json.dumps(value["arguments"])
    except (ValueError, TypeError, KeyError):
        return "", ""


def _are_valid(calls: list[tuple[str, str]]) -> bool:
    tools = _tools()
    return bool(calls) and all(
        name in tools and fits(json.loads(arguments), tools[name]) for name, arguments in calls
    )
