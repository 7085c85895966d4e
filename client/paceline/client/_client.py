"""The client of a verifier and a drafter."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._addresses import Pool, parse_addresses
from ._errors import InvalidRequestError
from ._fleet import Fleet, Verifier, VerifierStatus
from ._generation import Generation, Running
from ._options import (
    DraftOptions,
    GenerationOptions,
    RetryOptions,
    TlsOptions,
    schema_text,
    stop_strings,
    user_cache_dir,
)
from ._text import Model, TokenizerCache
from ._transport import (
    Connections,
    DrafterTransport,
    GrpcDrafterTransport,
    GrpcTransport,
    Transport,
)


class Client:
    """Generates text with a verifier, and the drafter services that have joined it.

    Connects with the first call.

        async with Client("127.0.0.1:7431", drafter="127.0.0.1:7432") as client:
            result = await client.generate("def main(", max_new_tokens=64)
            async for chunk in client.generate("import ", temperature=0.7, seed=1):
                print(chunk.text, end="")

    Use it in one event loop. Generations may run concurrently.

    Args:
        verifier_address: "host:port", "unix:/path", "dns:///name:port" for all addresses of a DNS
            name, or a list of these, separated by commas. Several verifiers serve one target;
            generations go to them by prefix, then by load, and move if one ends.
        drafter: address of a drafter service, or a list: asked to join the verifiers that lack a
            wanted drafter. None: drafters that have joined the verifiers by themselves are used.
        token: bearer token for all services. Requires `tls` beyond loopback.
        tls: TLS options; None: no TLS.
        retry: retries when all verifiers are unreachable or full.
        drafting: when the verifier drafts, and how long it waits for a tree.
        cache_dir: folder of cached tokenizers; None: cache in memory only. Default: the user's
            cache folder.
        unread_chunks: number of steps that the verifier may run ahead of a slow reader.
        max_message_bytes: longest message received or sent.
        transport: replaces gRPC: see `MockTransport`.

    Raises:
        InvalidRequestError: an argument is invalid, the token would be sent unencrypted, or a TLS
            file cannot be read.
    """

    def __init__(
        self,
        verifier_address: str | None = None,
        drafter: str | None = None,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        retry: RetryOptions | None = None,
        drafting: DraftOptions | None = None,
        cache_dir: Path | str | None = "",
        unread_chunks: int = 256,
        max_message_bytes: int = 64 << 20,
        transport: Transport | None = None,
    ) -> None:
        if (verifier_address is None) == (transport is None):
            raise InvalidRequestError("give either the verifier's address or a transport")
        if unread_chunks < 1:
            raise InvalidRequestError(f"unread_chunks must be >= 1, not {unread_chunks}")

        retry, drafting = retry or RetryOptions(), drafting or DraftOptions()
        self._connections = connections = Connections(token, tls, max_message_bytes)
        given = transport

        def verifier(address: str, name: str) -> Verifier:
            return Verifier(given or GrpcTransport(connections, address, name), retry)

        def drafter_service(address: str, name: str) -> DrafterTransport:
            return GrpcDrafterTransport(connections, address, name)

        folder = user_cache_dir() / "tokenizers" if cache_dir == "" else cache_dir
        verifiers = (transport.address,) if transport else self._addresses(verifier_address or "")
        drafters = self._addresses(drafter, "drafter service") if drafter else ()
        fleet = Fleet(
            Pool(verifier, verifiers),
            Pool(drafter_service, drafters),
            TokenizerCache(Path(folder) if folder is not None else None),
            retry,
        )
        self._running = Running(fleet, drafting, unread_chunks)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        acceptance: str = "invariant",
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str = "",
        grammar: str = "",
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: bool | int = False,
        prompt_logprobs: int | None = None,
        drafter: str | None = None,
        deadline: float | None = None,
        max_nodes: int | None = None,
        parent: Generation | bytes | None = None,
        keep_cache: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Continues a prompt. Await the generation for the whole result, or iterate to stream.

        The tokens are a function of model, prompt, sampling parameters and seed alone: drafters,
        crashes and restarts do not change them. With `acceptance="rejection"` this holds for their
        distribution only.

        Args:
            prompt: text, or token ids.
            max_new_tokens: most tokens to emit.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it.
            top_k: keep the k likeliest tokens; 0 keeps all.
            top_p: keep the smallest set of likeliest tokens of this probability, in (0, 1].
            min_p: keep tokens with at least this share of the highest probability, in [0, 1].
            repetition_penalty: scales down logits of tokens seen in prompt or output; 1 is off.
            presence_penalty: subtracted once for a token seen in the output; 0 is off.
            frequency_penalty: subtracted for each time a token was seen in the output; 0 is off.
            logit_bias: added to the logits of single tokens, by token id.
            seed: key of the sampling noise, 64 bits. None: a random one, reported in the result.
            acceptance: "invariant", or "rejection": rejection sampling of chains, whose tokens
                depend on the drafter, but not their distribution.
            json_schema: JSON schema of the text. The text may end early by max_new_tokens.
            regex: regular expression that the whole text matches, in the syntax of Rust's crate.
            grammar: context-free grammar of the text, in Lark's or in GBNF's notation.
            stop: strings that end the text; it ends before the first that is complete.
            stop_token_ids: tokens that end the generation, besides end-of-sequence.
            ignore_eos: continue after end-of-sequence tokens.
            logprobs: True returns each token's log-probability; n > 0 also the n likeliest tokens.
            prompt_logprobs: n >= 0 returns the log-probability of each prompt token but the first,
                and of the n likeliest tokens at its position.
            drafter: name of the drafter, or `NAME@VERSION` for a version, active or not; "none"
                turns drafting off. None: the verifier's default drafter.
            deadline: longest time for the whole generation. Unit: seconds.
            max_nodes: maximum number of drafted tokens per step. None: the limit of the services.
            parent: a generation (or its handle) with a cache: the common prefix of its text and
                this prompt is not computed again.
            keep_cache: keep the cache after the end, as a `parent`, until `aclose`.
            on_prefill: called with (tokens prefilled, all tokens) during the prefill.

        Raises:
            InvalidRequestError: a parameter is out of its range. Awaiting and iterating raise all
                other errors.
            ClientClosedError: the client is closed.
        """
        self._running.check_open()
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=dict(logit_bias or {}),
            seed=secrets.randbits(64) if seed is None else seed,
            acceptance=acceptance,
            json_schema=schema_text(json_schema),
            regex=regex,
            grammar=grammar,
            stop=stop_strings(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs is not False,
            top_logprobs=0 if isinstance(logprobs, bool) else logprobs,
            prompt_logprobs=prompt_logprobs,
            drafter=drafter,
            deadline=deadline,
            max_nodes=max_nodes,
            parent_handle=parent.handle if isinstance(parent, Generation) else parent or b"",
            on_prefill=on_prefill,
        )
        text = prompt if isinstance(prompt, str) else list(prompt)
        return Generation(self._running, text, options, keep_cache)

    async def model(self) -> Model:
        """The model of the verifiers, and its tokenizer."""
        self._running.check_open()
        return await self._running.fleet.model()

    def set_verifiers(self, addresses: str) -> None:
        """Replaces the list of verifiers. New generations go to those of the new list.

        Generations on a verifier that is not in it finish there.

        Raises:
            InvalidRequestError: the list is invalid, or the token would be sent unencrypted.
        """
        self._running.check_open()
        self._running.fleet.set_verifiers(self._addresses(addresses))

    def verifiers(self) -> tuple[VerifierStatus, ...]:
        """State of each verifier, as far as known: it is requested when generations start."""
        return self._running.fleet.status()

    async def drafters(self) -> tuple[str, ...]:
        """Names of drafters, the default one first; empty without a drafter service.

        They are those that have joined the verifiers; if there are none, those of the drafter
        services of the client's own list. Raises UnavailableError if none can be reached.
        """
        self._running.check_open()
        return await self._running.fleet.drafters()

    async def aclose(self) -> None:
        """Stops all generations, releases their caches and disconnects. Safe to call again."""
        await self._running.close()

    def _addresses(self, text: str, kind: str = "verifier") -> tuple[str, ...]:
        addresses = parse_addresses(text, kind)
        for address in addresses:
            self._connections.check(address)
        return addresses
