"""A proxy that delays and drops connections, as a network does."""

import asyncio
from pathlib import Path
from typing import Self


class Proxy:
    """Forwards connections to `target` ("unix:path"); `cut` breaks what is connected.

    It listens on a port of the loopback, or on the socket `path` (a file), which processes in other
    network namespaces can open too.
    """

    def __init__(self, target: str, delay: float = 0.0, path: Path | None = None) -> None:
        self._target = target.removeprefix("unix:")
        self._path = path
        self.delay = delay  # of everything that is sent, one way. Unit: seconds.
        self.down = False  # whether new connections are refused
        self.connections = 0  # number of connections that were accepted
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        if self._path is not None:
            return f"unix:{self._path}"
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection, without a word of goodbye."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await delayed.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        sending = asyncio.create_task(send())
        # The other direction ends with its source, and this one with its own.
        sending.add_done_callback(lambda _: sink.transport.abort())
        try:
            data = b"-"
            while data:
                data = await source.read(65536)
                delayed.put_nowait((clock() + self.delay, data))
            await sending
        except OSError:
            pass
        finally:
            sending.cancel()
            self._writers.discard(sink)
            sink.transport.abort()
