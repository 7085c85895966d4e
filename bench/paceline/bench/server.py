"""`paceline bench server`: whole requests beside any server with OpenAI's completions endpoint."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import uvloop
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import tokenizer
from paceline.bench.record import Results, make_console
from paceline.bench.services import services
from paceline.client import Client
from paceline.harness import read_prompts

SERVER = "server"
TEMPERATURES = (0.0, 1.0)

_WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Answer:
    """A streamed completion. Seconds count from the call."""

    tokens: int
    first_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


async def complete(
    server: AsyncOpenAI, model: str, prompt: str, tokens: int, temperature: float, seed: int
) -> Answer:
    """Stream a completion of at most `tokens` tokens.

    Raises:
        openai.OpenAIError: The server cannot be reached, or refuses.
        ValueError: The stream has no text, or no usage at its end.
    """
    begin = time.perf_counter()
    stream = await server.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=temperature,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, count = None, 0
    async for event in stream:
        if first is None and event.choices and event.choices[0].text:
            first = time.perf_counter() - begin
        if event.usage is not None:
            count = event.usage.completion_tokens
    if first is None or not count:
        raise ValueError(
            f"the server streamed {count} tokens: expected text, and usage at the end of the stream"
        )
    return Answer(count, first, time.perf_counter() - begin)


async def generate(
    client: Client, drafter: str, prompt: str, tokens: int, temperature: float, seed: int
) -> Answer:
    """Stream the same through Paceline's client."""
    begin = time.perf_counter()
    first, count = None, 0
    async for chunk in client.generate(
        prompt, max_new_tokens=tokens, temperature=temperature, seed=seed, drafter=drafter
    ):
        if first is None and chunk.text:
            first = time.perf_counter() - begin
        count += len(chunk.token_ids)
    seconds = time.perf_counter() - begin
    return Answer(count, seconds if first is None else first, seconds)


async def compare(
    server: AsyncOpenAI,
    model: str | None,
    client: Client,
    drafters: Sequence[str],
    prompts: Sequence[str],
    *,
    tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by temperature and row, `SERVER` and one for each drafter; ratios within a prompt.

    Texts end where a model ends them, so rows may differ in tokens; rates are of all that came.

    Args:
        server: Client of the other server.
        model: Name of its model; None: the first that it lists.
        client: Client of Paceline.
        drafters: Names, "none" among them.
        prompts: Texts.
        tokens: Most new tokens of each.
        repeats: Passes over the prompts.
        progress: Called after every prompt.

    Raises:
        openai.OpenAIError: The server cannot be reached, or refuses.
    """
    model = model or (await server.models.list()).data[0].id
    answers: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    await complete(server, model, prompts[0], _WARM_UP, 0.0, 0)
    for drafter in drafters:
        await generate(client, drafter, prompts[0], _WARM_UP, 0.0, 0)
    for index, prompt in enumerate([*prompts] * repeats):
        for temperature in TEMPERATURES:
            rows = answers[f"T = {temperature:g}"]
            how = (prompt, tokens, temperature, index)
            rows[SERVER].append(await complete(server, model, *how))
            for drafter in drafters:
                rows[f"paceline {drafter}"].append(await generate(client, drafter, *how))
        progress(f"prompt {index + 1} of {len(prompts) * repeats}")
    return {heat: _summary(rows) for heat, rows in answers.items()}


def _summary(rows: dict[str, list[Answer]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "runs": len(answers),
            "tokens": sum(answer.tokens for answer in answers),
            "tokens_per_second": median(answer.rate for answer in answers),
            "first_token_ms": median(answer.first_seconds for answer in answers) * 1e3,
            "against_server": median(
                ours.rate / theirs.rate for ours, theirs in zip(answers, rows[SERVER], strict=True)
            ),
        }
        for name, answers in rows.items()
    }


async def _measure(args: argparse.Namespace, models: Models, console: Console) -> dict[str, Any]:
    key = args.key_file.read_text(encoding="utf-8").strip() if args.key_file else "none"
    files = args.prompts or [models.prompts / "heldout.jsonl"]
    decode = tokenizer(models.target).decode
    prompts = [
        each if isinstance(each, str) else decode(each)
        for file in files
        for each in read_prompts(file)[: args.texts]
    ]
    with services(models.target, models.drafters, args.dtype, verifier=["--share-weights"]) as pair:
        async with pair.client() as client, AsyncOpenAI(base_url=args.url, api_key=key) as server:
            return await compare(
                server,
                args.server_model,
                client,
                ["none", *models.drafters],
                prompts,
                tokens=args.tokens,
                repeats=args.repeats,
                progress=console.log,
            )


def run(args: argparse.Namespace) -> int:
    """Measure the server at `args.url` beside Paceline."""
    console = make_console()
    models = Models.of(args)
    results = Results("server", args.output, dtype=args.dtype, tokens=args.tokens)
    for name, rows in uvloop.run(_measure(args, models, console)).items():
        results.add(f"{args.label}, {name}", {"rows": rows})
        table = Table("", "tokens/s", "first token ms", "x server", title=f"{args.label}, {name}")
        for row, figures in rows.items():
            keys = ("tokens_per_second", "first_token_ms", "against_server")
            table.add_row(row, *(f"{figures[key]:.2f}" for key in keys))
        console.print(table)
    console.print(f"written to {results.file}")
    return 0
