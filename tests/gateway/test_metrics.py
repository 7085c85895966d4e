"""Metrics of the gateway, and access to them."""

import asyncio

import aiohttp
import openai
import pytest
from calls import until
from documented_metrics import described, documented
from fakes.transport import MockTransport
from prometheus_client import CollectorRegistry

from paceline.gateway import GatewayOptions, server
from paceline.gateway.metrics import GatewayMetrics

from .conftest import Serve

PATH = "/v1/completions"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """What the gateways of a test count into; no endpoint is served."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    monkeypatch.setattr(server, "serve_gateway_metrics", lambda options: (metrics, None))
    return registry


async def test_requests_are_counted_as_they_end(serve: Serve, registry: CollectorRegistry) -> None:
    def count(status: int) -> float:
        labels = {"path": PATH, "status": str(status)}
        return registry.get_sample_value("specdec_gateway_requests_total", labels) or 0

    def value(name: str) -> float:
        return registry.get_sample_value(name) or 0

    transport = MockTransport(lambda prompt: prompt.upper())
    async with serve(transport, key="right", api_key="right") as served:
        await served.openai.completions.create(model="mock", prompt=["abc", "d"], n=2)
        stream = await served.openai.completions.create(model="mock", prompt="ab", stream=True)
        assert [event async for event in stream]
        with pytest.raises(openai.NotFoundError):
            await served.openai.completions.create(model="other", prompt="a")
        wrong = served.openai.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            await wrong.completions.create(model="mock", prompt="a")
        await served.openai.models.retrieve("mock")
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health"):
            pass
    assert (count(200), count(404), count(401)) == (2, 1, 1)
    one = {"path": "/v1/models/{name}", "status": "200"}
    assert registry.get_sample_value("specdec_gateway_requests_total", one) == 1
    assert value("specdec_gateway_prompt_tokens_total") == 3 + 3 + 1 + 1 + 2
    # Each text also ends with a token that is not shown.
    assert value("specdec_gateway_generation_tokens_total") == 4 + 4 + 2 + 2 + 3
    assert value("specdec_gateway_time_to_first_token_seconds_count") == 5
    assert value("specdec_gateway_requests_in_flight") == 0
    assert described(registry.collect()) == documented("Gateway")
    serving = {"verifier": "", "state": "serving"}
    assert registry.get_sample_value("specdec_gateway_verifier_state", serving) == 1
    assert (
        registry.get_sample_value("specdec_gateway_verifier_texts_running", {"verifier": ""}) == 0
    )


async def test_a_disconnect_is_counted_as_499(serve: Serve, registry: CollectorRegistry) -> None:
    def count(status: int) -> float | None:
        labels = {"path": PATH, "status": str(status)}
        return registry.get_sample_value("specdec_gateway_requests_total", labels)

    async with serve(MockTransport("x" * 50_000)) as served:
        body = {"model": "mock", "prompt": "a", "max_tokens": 50_000}
        async with aiohttp.ClientSession() as session:
            call = asyncio.create_task(session.post(f"{served.url}{PATH}", json=body))
            await until(lambda: served.transport.open_caches == 1)
            assert registry.get_sample_value("specdec_gateway_requests_in_flight") == 1
            call.cancel()
            await until(lambda: count(499) == 1)


async def test_the_endpoint_requires_the_key() -> None:
    options = {"metrics_address": "127.0.0.1:0", "api_key": "right"}
    metrics, endpoint = server.serve_gateway_metrics(GatewayOptions(**options))  # type: ignore[arg-type]
    assert endpoint is not None
    metrics.ended(PATH, 200, 0.1)
    try:
        async with aiohttp.ClientSession() as session:
            for key, status in (("wrong", 401), ("right", 200)):
                headers = {"authorization": f"Bearer {key}"}
                url = f"http://{endpoint.address}/metrics"
                async with session.get(url, headers=headers) as response:
                    assert response.status == status
                    text = await response.text()
    finally:
        await asyncio.to_thread(endpoint.close)
    assert f'specdec_gateway_requests_total{{path="{PATH}",status="200"}} 1.0' in text
    assert server.serve_gateway_metrics(GatewayOptions())[1] is None
    GatewayOptions(metrics_address="0.0.0.0:0", insecure_metrics=True)


@pytest.mark.parametrize(("key", "status"), [("right", 200), ("wrong", 401)])
async def test_metrics_are_on_the_gateways_port_too(serve: Serve, key: str, status: int) -> None:
    async with serve(MockTransport("x"), key="right", api_key="right") as served:
        await served.openai.completions.create(model="mock", prompt="a")
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{served.url}/metrics", headers=headers) as response:
                assert response.status == status
                text = await response.text()
    assert (f'path="{PATH}",status="200"}} 1.0' in text) == (status == 200)
