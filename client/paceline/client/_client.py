"""The client of verifiers, for event loops and without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.checks import checked, require
from paceline.telemetry.names import Span

from ._chat import checked_messages, render_chat
from ._errors import ClientClosedError, InvalidRequestError
from ._fleet import Fleet, Pool, Verifier, VerifierStatus
from ._generation import ClientState, Generation, GenerationResult
from ._options import (
    ChatOptions,
    DraftOptions,
    GenerationOptions,
    RetryOptions,
    TlsOptions,
    checked_prompt,
    invalid_requests,
    takes,
    takes_all,
    user_cache_dir,
)
from ._receipt import Receipt, ReceiptCheck, compared, not_comparable, numerics_of
from ._text import Chunk, Model, TokenizerCache
from ._transport import Connections, Transport, parse_addresses

DEFAULT_ADDRESS = "127.0.0.1:7431"
"""Address of a verifier that is started without one."""

T = TypeVar("T")


class Client:
    """Generates text with a verifier, and the drafter services that have joined it.

    Connects with the first call.

        async with Client("127.0.0.1:7431") as client:
            result = await client.generate("def main(", max_new_tokens=64)
            async for chunk in client.generate("import ", drafter="ngram", temperature=0.7):
                print(chunk.text, end="")
            answer = await client.chat([{"role": "user", "content": "Hello"}])

    Use it in one event loop. Generations may run concurrently.

    Args:
        verifier_address: "host:port", "unix:/path", "dns:///name:port" for all addresses of a DNS
            name, or a list of these, separated by commas. Several verifiers serve one target;
            generations go to them by prefix, then by load, and move if one ends. None:
            "127.0.0.1:7431".
        token: bearer token for all verifiers. Requires `tls` beyond loopback.
        tls: TLS options; None: no TLS.
        retry: retries when all verifiers are unreachable or full.
        drafting: when the verifier drafts, and how long it waits for a tree.
        cache_dir: folder of cached tokenizers; None: cache in memory only. Default: the user's
            cache folder.
        unread_chunks: number of steps that the verifier may run ahead of a slow reader.
        max_message_bytes: longest message received or sent.
        transport: replaces gRPC in tests.

    Raises:
        InvalidRequestError: an argument is invalid, the token would be sent unencrypted, or a TLS
            file cannot be read.
    """

    def __init__(
        self,
        verifier_address: str | None = None,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        retry: RetryOptions | None = None,
        drafting: DraftOptions | None = None,
        cache_dir: Path | str | None = "",
        unread_chunks: int = 256,
        max_message_bytes: int = 64 << 20,
        transport: Any = None,
    ) -> None:
        if verifier_address is not None and transport is not None:
            raise InvalidRequestError("give either the verifier's address or a transport")
        with invalid_requests():
            size = "an integer in [1, 2**31)"
            checked("unread_chunks", unread_chunks, int, size, lambda x: 0 < x < 2**31)
            checked("max_message_bytes", max_message_bytes, int, size, lambda x: 0 < x < 2**31)
            require("tls", tls, TlsOptions | None, "TlsOptions")
            require("retry", retry, RetryOptions | None, "RetryOptions")
            require("drafting", drafting, DraftOptions | None, "DraftOptions")
            require("cache_dir", cache_dir, str | Path | None, "a folder's path, or None")
            printable = "printable ASCII text"
            text = "" if token is None else token
            checked("token", text, str, printable, lambda x: x.isascii() and x.isprintable())

        retry, drafting = retry or RetryOptions(), drafting or DraftOptions()
        self._connections = connections = Connections(token, tls, max_message_bytes)
        given = transport

        def verifier(address: str, name: str) -> Verifier:
            return Verifier(given or Transport(connections, address, name), retry)

        folder = user_cache_dir() / "tokenizers" if cache_dir == "" else cache_dir
        address = DEFAULT_ADDRESS if verifier_address is None else verifier_address
        verifiers = (transport.address,) if transport else self._addresses(address)
        fleet = Fleet(
            Pool(verifier, verifiers),
            TokenizerCache(Path(folder).expanduser() if folder is not None else None),
            retry,
        )
        self._state = ClientState(fleet, drafting, unread_chunks)

    def __repr__(self) -> str:
        addresses = ", ".join(verifier.address or "a transport" for verifier in self.verifiers())
        return f"<{type(self).__name__} of {addresses or 'no verifier yet'}>"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    @takes(GenerationOptions)
    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Continue a prompt. Await the generation for the whole result, or iterate to stream.

        The tokens are a function of model, prompt, sampling parameters and seed alone: drafters,
        crashes and restarts do not change them. With `acceptance="rejection"` this holds for their
        distribution only.

        Args:
            prompt: text, or token ids.
            options: see `GenerationOptions`.

        Raises:
            InvalidRequestError: a parameter is out of its range. Awaiting and iterating raise all
                other errors.
            ClientClosedError: the client is closed.
        """
        self._state.check_open()
        return Generation(self._state, checked_prompt(prompt), GenerationOptions(**options))

    @takes(ChatOptions)
    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a conversation, as `generate` continues a prompt. The template is the model's.

        Args:
            messages: in the form of OpenAI's API, oldest first.
            options: see `ChatOptions`.

        Raises:
            InvalidRequestError: a message or a parameter is invalid. Awaiting and iterating raise
                it if the model has no chat template, or its template refuses the messages.
            ClientClosedError: the client is closed.
        """
        self._state.check_open()
        conversation, chosen = checked_messages(messages), ChatOptions(**options)

        async def prompt(model: Model) -> list[int]:
            text = await asyncio.to_thread(
                render_chat, model, conversation, tools=chosen.tools, template=chosen.chat_template
            )
            return await model.encode_rendered(text)

        generation = Generation(self._state, prompt, chosen)
        generation.operation = Span.CHAT
        return generation

    async def model(self) -> Model:
        """Return the model of the verifiers, and its tokenizer."""
        self._state.check_open()
        return await self._state.fleet.model()

    async def check(self, receipt: Receipt) -> ReceiptCheck:
        """Generate the text of a receipt again, without drafts, and compare the tokens. Raises
        PacelineError if that fails."""
        facts = (await self.model()).facts
        if (check := not_comparable(receipt, facts, numerics_of(facts))) is not None:
            return check
        options = {**receipt.shaping(), "seed": receipt.options.key, "drafter": "none"}
        options["max_new_tokens"] = receipt.limit()
        result = await self.generate(receipt.prompt, **options)
        again = result.receipt
        assert again is not None, "there is a token"
        return not_comparable(receipt, facts, again.numerics) or compared(receipt, again)

    def set_verifiers(self, addresses: str) -> None:
        """Replace the list of verifiers. New generations go to the new ones.

        Generations on a verifier that is not in it finish there.

        Raises:
            InvalidRequestError: the list is invalid, or the token would be sent unencrypted.
        """
        self._state.check_open()
        self._state.fleet.verifiers.set(self._addresses(addresses))

    def verifiers(self) -> tuple[VerifierStatus, ...]:
        """Return the known state of each verifier: it is requested when generations start."""
        return tuple(member.status() for member in self._state.fleet.verifiers.members)

    async def drafters(self) -> tuple[str, ...]:
        """Return the names of joined drafters, the default one first, and `local` where verifiers
        guess by themselves. Raises UnavailableError if no verifier can be reached."""
        self._state.check_open()
        return await self._state.fleet.drafters()

    def fail(self, message: str) -> None:
        """Stop all generations, and wait for a verifier: they raise ClientClosedError with the
        message."""
        self._state.fleet.ended = message
        for generation in self._state.generations:
            generation.fail(message)

    async def aclose(self) -> None:
        """Stop all generations, release their caches and disconnect. Safe to call again."""
        if not self._state.forked:
            await self._state.close()

    def _addresses(self, text: str) -> tuple[str, ...]:
        addresses = parse_addresses(text, "verifier")
        for address in addresses:
            self._connections.check(address)
        return addresses


class SyncClient:
    """`Client` with blocking calls, which run in the event loop of a thread.

    Takes the same arguments as `Client`. Several threads may use it.

        with SyncClient("127.0.0.1:7431") as client:
            print(client.generate("def main(").text)
    """

    @takes_all(Client)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._client = Client(*args, **options)
        self._client._state.check_open()  # its thread is of this process
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="paceline-client", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return repr(self._client).replace("Client", "SyncClient", 1)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @takes(GenerationOptions)
    def generate(self, prompt: str | Sequence[int], **options: Any) -> GenerationResult:
        """Return the result of `Client.generate`."""
        generation = self._client.generate(prompt, **options)
        return self._wait_for(lambda: generation)

    @takes(GenerationOptions)
    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk]:
        """Return the chunks of `Client.generate`. Leaving the loop early releases the cache."""
        return self._chunks(self._client.generate(prompt, **options))

    @takes(ChatOptions)
    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GenerationResult:
        """Return the result of `Client.chat`."""
        generation = self._client.chat(messages, **options)
        return self._wait_for(lambda: generation)

    @takes(ChatOptions)
    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[Chunk]:
        """Return the chunks of `Client.chat`. Leaving the loop early releases the cache."""
        return self._chunks(self._client.chat(messages, **options))

    def model(self) -> Model:
        """As `Client.model`."""
        return self._wait_for(self._client.model)

    def check(self, receipt: Receipt) -> ReceiptCheck:
        """As `Client.check`."""
        return self._wait_for(lambda: self._client.check(receipt))

    def drafters(self) -> tuple[str, ...]:
        """As `Client.drafters`."""
        return self._wait_for(self._client.drafters)

    def verifiers(self) -> tuple[VerifierStatus, ...]:
        """As `Client.verifiers`."""
        return self._client.verifiers()

    def set_verifiers(self, addresses: str) -> None:
        """As `Client.set_verifiers`."""

        async def set_them() -> None:
            self._client.set_verifiers(addresses)

        self._wait_for(set_them)

    def close(self) -> None:
        """Stop all generations, disconnect, and end the thread. Safe to call again."""
        if self._loop.is_closed() or self._client._state.forked:
            return
        self._wait_for(self._client.aclose)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _chunks(self, generation: Generation) -> Iterator[Chunk]:
        chunks = aiter(generation)
        try:
            while (chunk := self._wait_for(lambda: anext(chunks, None))) is not None:
                yield chunk
        finally:
            if not (self._loop.is_closed() or self._client._state.forked):
                self._wait_for(chunks.aclose)

    def _wait_for(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call in the event loop."""

        async def work() -> T:
            return await call()

        if not self._client._state.closed:
            self._client._state.check_open()
        if self._loop.is_closed():
            raise ClientClosedError("the client is closed: create a new one")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # stops the work after a KeyboardInterrupt here
            raise
