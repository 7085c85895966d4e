"""A gateway process before a verifier made of memory, which takes its time for each token.

Prints its URL, and serves until its standard input ends.
"""

import asyncio
import sys

from fakes.transport import MockTransport

from gateway.conftest import serve_gateway

TEXT = "The quick brown fox jumps over the lazy dog. "
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)
SECONDS = 0.002  # time for each token


async def _main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, stop.set)
    transport = MockTransport(TEXT)
    transport.merged, transport.step_seconds = 1, SECONDS
    async with serve_gateway(transport, chat_template=TEMPLATE, access_log=False) as served:
        print(served.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main())
    sys.exit(0)
