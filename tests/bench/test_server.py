"""Another server with OpenAI's interface beside Paceline: here Paceline's own gateway."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI, OpenAIError

from paceline.bench.server import SERVER, compare, complete
from paceline.client import Client, MockTransport
from paceline.gateway import GatewayOptions, run_gateway

PROMPTS = ["def one", "def two"]


async def test_a_server_is_measured_beside_paceline() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop, progress = asyncio.Event(), list[str]()
    async with (
        Client(transport=MockTransport(lambda prompt: prompt * 4), cache_dir=None) as behind,
        Client(transport=MockTransport(lambda prompt: prompt * 4), cache_dir=None) as client,
    ):
        options = GatewayOptions(address="127.0.0.1:0")
        serving = run_gateway(behind, options, on_ready=ready.set_result, stop_event=stop)
        running = asyncio.create_task(serving)
        url = f"http://{await ready}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as server:
            found = await compare(
                server,
                None,
                client,
                ["none"],
                PROMPTS,
                tokens=12,
                repeats=2,
                progress=progress.append,
            )
            with pytest.raises(OpenAIError, match="no_such_model"):
                await complete(server, "no_such_model", "x", 4, 0.0, 0)
        stop.set()
        await running
    assert len(progress) == 4
    assert set(found) == {"T = 0", "T = 1"}
    for rows in found.values():
        assert set(rows) == {SERVER, "paceline none"}
        for row in rows.values():
            assert row["runs"] == 4
            assert 0 < row["tokens"] <= 4 * 12
            assert row["first_token_ms"] > 0
        assert rows[SERVER]["against_server"] == 1.0
