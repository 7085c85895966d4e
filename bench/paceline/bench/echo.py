"""The floor under every round: a bare bidirectional echo between two processes."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import uvloop

METHOD = "/paceline.bench.Echo/Echo"
PAYLOAD = bytes(160)  # about the size of a round's messages


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


async def _measure(address: str, rounds: int) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)()
        times = []
        for index in range(rounds + 50):
            start = time.perf_counter()
            await call.write(PAYLOAD)
            await call.read()
            if index >= 50:
                times.append((time.perf_counter() - start) * 1e6)
        await call.done_writing()
        return times


def echo_times(folder: Path, rounds: int = 1000) -> list[float]:
    """Round-trip times of `rounds` sequential echoes on one stream, in microseconds.

    The server is a process of its own. `folder` takes its ready file.
    """
    ready = folder / "echo.ready"
    server = subprocess.Popen([sys.executable, "-m", "paceline.bench.echo", "--ready", str(ready)])
    try:
        while not (ready.exists() and ready.read_text()):
            if server.poll() is not None:
                raise RuntimeError(f"the echo server ended with status {server.returncode}")
            time.sleep(0.02)
        return uvloop.run(_measure(ready.read_text(), rounds))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready", type=Path, required=True)
    uvloop.run(_serve(parser.parse_args().ready.write_text))
