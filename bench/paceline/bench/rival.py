"""Any server with OpenAI's interface beside Paceline: the same prompts, in turn, streamed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.served import Services
from paceline.client import Client

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SERVER = "server"
TEMPERATURES = (0.0, 1.0)

_WARM = 8  # tokens


@dataclass(frozen=True)
class Answer:
    """What the caller of one streamed completion saw; seconds count from the call."""

    tokens: int
    first_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's reading included."""
        return self.tokens / self.seconds


async def ask(
    server: AsyncOpenAI, model: str, prompt: str, tokens: int, temperature: float, seed: int
) -> Answer:
    """Stream a completion of at most `tokens` tokens.

    Raises:
        openai.OpenAIError: The server cannot be reached, or refuses.
        ValueError: It streams no text, or does not tell how many tokens that was.
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
    """The same through Paceline's own client."""
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


async def measure(
    url: str,
    key: str,
    model: str | None,
    target: Path,
    drafters: dict[str, str],
    prompts: Sequence[str],
    *,
    dtype: str,
    tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """:func:`compare` with services of one's own; `drafters` are specifications by name.

    Raises:
        openai.OpenAIError: The server at `url` cannot be reached, or refuses.
    """
    from openai import AsyncOpenAI

    with Services(target, [f"{name}={spec}" for name, spec in drafters.items()], dtype) as services:
        async with services.client() as client, AsyncOpenAI(base_url=url, api_key=key) as server:
            return await compare(
                server,
                model,
                client,
                ["none", *drafters],
                prompts,
                tokens=tokens,
                repeats=repeats,
                progress=progress,
            )


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
) -> dict[str, Any]:
    """Medians by temperature and row, `SERVER` and one for each drafter; ratios within a prompt.

    Texts end where models end them, so rows may differ in tokens; rates are of all that came.

    Args:
        server: Client of the other server.
        model: Its model's name; None: the first that it lists.
        client: Of Paceline.
        drafters: Names, "none" among them.
        prompts: Texts.
        tokens: Most new tokens of each.
        repeats: Passes over the prompts.
        progress: Told what is under way.
    """
    if model is None:
        model = (await server.models.list()).data[0].id
    answers: dict[float, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    await ask(server, model, prompts[0], _WARM, 0.0, 0)
    for drafter in drafters:
        await generate(client, drafter, prompts[0], _WARM, 0.0, 0)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            for heat in TEMPERATURES:
                found = answers[heat]
                found[SERVER].append(await ask(server, model, prompt, tokens, heat, index))
                for drafter in drafters:
                    answer = await generate(client, drafter, prompt, tokens, heat, index)
                    found[f"paceline {drafter}"].append(answer)
            progress(f"prompt {index + 1} of {len(prompts)}, pass {repeat + 1}")
    return {
        "model": model,
        "prompts": len(prompts),
        "temperatures": {f"{heat:g}": _summary(rows) for heat, rows in answers.items()},
    }


def _summary(rows: dict[str, list[Answer]]) -> dict[str, dict[str, float]]:
    theirs = rows[SERVER]
    return {
        name: {
            "runs": len(answers),
            "tokens": sum(answer.tokens for answer in answers),
            "tokens_per_second": statistics.median(answer.rate for answer in answers),
            "first_token_ms": statistics.median(answer.first_seconds for answer in answers) * 1e3,
            "against_server": statistics.median(
                ours.rate / server.rate for ours, server in zip(answers, theirs, strict=True)
            ),
        }
        for name, answers in rows.items()
    }
