"""Each call of the client library. Run `paceline serve` first; give its verifier's address."""

import asyncio
import sys

from paceline.client import Client, InvalidRequestError, SyncClient

PROMPT = "import asyncio"
MESSAGES = [{"role": "user", "content": "What is a drafter?"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


async def main(address: str) -> None:
    async with Client(address) as client:
        model = await client.model()
        print(model, client.verifiers(), await client.drafters())

        result = await client.generate(PROMPT, max_new_tokens=32, temperature=0.7, seed=1)
        print(result.text, result.finish_reason, result.usage, result.stats.explain(), sep="\n")

        if result.receipt is not None:
            print((await client.check(result.receipt)).message)

        async for chunk in client.generate(PROMPT, max_new_tokens=8, drafter="none", logprobs=True):
            print(chunk.text, end="", flush=True)

        answer = await client.chat(MESSAGES, chat_template=TEMPLATE, max_new_tokens=16)
        print(answer.text)

        parent = client.generate(PROMPT, max_new_tokens=8, keep_cache=True)
        first = await parent
        child = client.generate(PROMPT + first.text, max_new_tokens=8, parent=parent)
        print((await child).text)
        await parent.aclose()

        client.set_verifiers(address)
        try:
            await client.generate(PROMPT, top_k=-1)
        except InvalidRequestError as error:
            print(error)


def synchronous(address: str) -> None:
    with SyncClient(address) as client:
        print(client.model(), client.verifiers(), client.drafters())
        result = client.generate(PROMPT, max_new_tokens=8)
        print(result.text, result.receipt and client.check(result.receipt).outcome)
        for chunk in client.stream(PROMPT, max_new_tokens=8):
            print(chunk.text, end="", flush=True)
        print(client.chat(MESSAGES, chat_template=TEMPLATE, max_new_tokens=8).text)
        for chunk in client.stream_chat(MESSAGES, chat_template=TEMPLATE, max_new_tokens=8):
            print(chunk.text, end="", flush=True)
        client.set_verifiers(address)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7431"
    asyncio.run(main(address))
    synchronous(address)
