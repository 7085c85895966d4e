"""The floor under every round: a bare bidirectional echo between two processes."""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import uvloop

METHOD = "/paceline.bench.Echo/Echo"
PAYLOAD = bytes(160)  # about the size of a round's messages
# Between two messages of a real round lies a step of some milliseconds that reads all weights.
_STEP_SECONDS = 0.005
_STEP_BYTES = 64 << 20


async def _serve(announce: Callable[[str], object]) -> None:
    async def echo(stream: object, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("paceline.bench.Echo", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce(f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def _measure(address: str, rounds: int, between_steps: bool) -> list[float]:
    weights = np.ones(_STEP_BYTES // 4 if between_steps else 0, np.float32)
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)()
        times = []
        for index in range(rounds + 50):
            if between_steps:
                weights.sum()
                await asyncio.sleep(_STEP_SECONDS)
            start = time.perf_counter()
            await call.write(PAYLOAD)
            await call.read()
            if index >= 50:
                times.append((time.perf_counter() - start) * 1e6)
        await call.done_writing()
        return times


def echo_times(folder: Path, rounds: int = 1000, *, between_steps: bool = False) -> list[float]:
    """Round-trip times of `rounds` sequential echoes on one stream, in microseconds.

    The server is a process of its own. `folder` takes its ready file. Back to back, or
    `between_steps`: after 5 ms of rest and a walk through 64 MiB, as in a round of generation, when
    caches are cold and processes asleep.
    """
    ready = folder / f"echo-{between_steps}.ready"
    server = subprocess.Popen([sys.executable, "-m", "paceline.bench.echo", "--ready", str(ready)])
    try:
        while not (ready.exists() and ready.read_text()):
            if server.poll() is not None:
                raise RuntimeError(f"the echo server ended with status {server.returncode}")
            time.sleep(0.02)
        return uvloop.run(_measure(ready.read_text(), rounds, between_steps))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready", type=Path, required=True)
    uvloop.run(_serve(parser.parse_args().ready.write_text))
