"""Serves a gateway until a signal, and drains."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from paceline.client import Client
from paceline.service.options import OptionsError, socket_path_of, split_address
from paceline.service.stopping import Stop

from .app import Gateway
from .options import GatewayOptions

if TYPE_CHECKING:
    from paceline.telemetry.endpoint import MetricsEndpoint

    from .metrics import GatewayMetrics

logger = logging.getLogger("paceline.gateway")

# A connection without a request, or with a part of its head only, is closed after this time. Longer
# than the 60 seconds after which load balancers usually close it. Unit: seconds.
_IDLE_SECONDS = 75.0
# Time before requests that outlast the drain are cancelled. Unit: seconds.
_CANCEL_GRACE = 0.5


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is not one of the caller's HTTP, which gets status 400."""
    broken = (HttpProcessingError, web.RequestPayloadError)
    return record.exc_info is None or not isinstance(record.exc_info[1], broken)


async def run_gateway(
    client: Client,
    options: GatewayOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop_event: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stop_event` is set.

    The first signal drains: health returns 503, new requests are refused, those in flight continue
    for at most `options.drain_seconds`. A second signal ends them at once, a third kills.

    Args:
        client: Client of the services; not closed.
        options: Options.
        on_ready: Called with the bound address ("127.0.0.1:41234") once requests are answered.
        stop_event: Drains like a signal.

    Raises:
        OptionsError: The address cannot be bound, or a TLS file is invalid.
        SystemExit: With 128 + signal number, after a second signal.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    stop = Stop(stop_event)
    context = _tls(options)
    metrics, endpoint = _metrics(options)
    gateway = Gateway(client, options, metrics)
    if metrics is not None:
        metrics.show(gateway.gate, client)
    runner = web.AppRunner(
        gateway.app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CANCEL_GRACE,
        keepalive_timeout=_IDLE_SECONDS,
    )
    with stop.on_signals():
        await runner.setup()
        try:
            address = await _listen(runner, options, context)
            logger.info("serving", extra={"address": address})
            if on_ready is not None:
                on_ready(address)
            await stop.soft.wait()
            logger.info("draining", extra={"drain_seconds": options.drain_seconds})
            gateway.gate.close()
            await stop.unless(stop.hard, _drain(gateway, options.drain_seconds))
        finally:
            await runner.cleanup()
            if endpoint is not None:
                await asyncio.to_thread(endpoint.close)
            logger.info("stopped")
    if stop.hard.is_set():
        raise SystemExit(128 + stop.signal)


async def _drain(gateway: Gateway, seconds: float) -> None:
    try:
        await asyncio.wait_for(gateway.gate.drained(), seconds)
    except TimeoutError:
        logger.warning("requests were still in flight after the drain time; cancelling them")


def _metrics(options: GatewayOptions) -> tuple[GatewayMetrics | None, MetricsEndpoint | None]:
    """Metrics and their endpoint; None without a metrics address."""
    if options.metrics_address is None:
        return None, None
    # Imported here because prometheus_client is needed for metrics only.
    from paceline.service.metrics import new_registry, serve_metrics

    from .metrics import GatewayMetrics

    registry = new_registry()
    return GatewayMetrics(registry), serve_metrics(options.metrics, registry)


async def _listen(
    runner: web.AppRunner, options: GatewayOptions, context: ssl.SSLContext | None
) -> str:
    """Binds; returns the address with the bound port."""
    path = socket_path_of(options.address)
    site: web.BaseSite
    if path is not None:
        site = web.UnixSite(runner, str(path), ssl_context=context)
    else:
        host, port = split_address(options.address)
        site = web.TCPSite(runner, host, port, ssl_context=context)
    try:
        await site.start()
    except OSError as error:
        raise OptionsError(f"cannot listen on {options.address}: {error.strerror}") from error
    if path is not None:
        # Only the user of this process may connect.
        path.chmod(0o600)
        return options.address
    return f"{options.address.rpartition(':')[0]}:{runner.addresses[0][1]}"


def _tls(options: GatewayOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=lambda: "")
    except OSError as error:
        raise OptionsError(
            f"the TLS files {options.tls_cert} and {options.tls_key} are not a PEM certificate "
            f"and its key without a passphrase: {error}"
        ) from error
    return context
