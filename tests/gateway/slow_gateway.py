"""A gateway process before a verifier made of memory, which takes its time for each token.

Prints its address, and serves until its standard input ends.
"""

import asyncio
import sys

from fakes.transport import MockTransport

from paceline.client import Client, RetryOptions
from paceline.gateway import GatewayOptions, OneModel, run_gateway

TEXT = "The quick brown fox jumps over the lazy dog. "
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)
SECONDS = 0.002  # time for each token


async def _main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, stop.set)
    options = GatewayOptions(address="127.0.0.1:0", chat_template=TEMPLATE, access_log=False)
    transport = MockTransport(TEXT)
    transport.merged, transport.step_seconds = 1, SECONDS
    retry = RetryOptions(budget=0)
    async with Client(transport=transport, cache_dir=None, retry=retry) as client:
        await run_gateway(
            OneModel(client),
            options,
            on_ready=lambda address: print(address, flush=True),
            stop_event=stop,
        )


if __name__ == "__main__":
    asyncio.run(_main())
    sys.exit(0)
