"""The client without an event loop."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from inspect import signature

import pytest
from fakes.transport import MockTransport

from paceline.client import Client, ClientClosedError, InvalidRequestError, SyncClient
from paceline.client._transport import Connections


def test_generate_and_stream() -> None:
    transport = MockTransport("Hello there.")
    with SyncClient(transport=transport) as client:
        assert client.generate("Hi").text == "Hello there."
        assert "".join(chunk.text for chunk in client.stream("Hi")) == "Hello there."
        assert client.model().facts.name == "mock"
        with pytest.raises(InvalidRequestError):
            client.generate("")
        with pytest.raises(InvalidRequestError):
            client.generate("Hi", top_p=2.0)
    assert transport.open_caches == 0


def test_chat_and_the_other_calls() -> None:
    with SyncClient(transport=MockTransport(lambda prompt: prompt.upper())) as client:
        messages = [{"role": "user", "content": "hi"}]
        template = "{{ messages[0].content }}!"
        assert client.chat(messages, chat_template=template).text == "HI!"
        chunks = client.stream_chat(messages, chat_template=template)
        assert "".join(chunk.text for chunk in chunks) == "HI!"
        with pytest.raises(InvalidRequestError, match="chat template"):
            client.chat(messages)
        assert client.drafters() == ()
        assert [each.state for each in client.verifiers()] == ["serving"]
        assert repr(client).startswith("<SyncClient of ")


def test_signatures_name_every_argument() -> None:
    assert [*signature(SyncClient).parameters] == [*signature(Client).parameters]
    for name in ("generate", "chat"):
        own, other = signature(getattr(SyncClient, name)), signature(getattr(Client, name))
        assert own.parameters == other.parameters
        assert "temperature" in own.parameters


def test_leaving_the_stream_frees_the_cache() -> None:
    transport = MockTransport("x" * 10_000)
    with SyncClient(transport=transport) as client:
        for _ in client.stream("Hi", max_new_tokens=10_000):
            break
        assert transport.open_caches == 0


def test_several_threads_share_one_client() -> None:
    with SyncClient(transport=MockTransport(lambda prompt: prompt.upper())) as client:
        texts: dict[str, str] = {}

        def work(prompt: str) -> None:
            texts[prompt] = client.generate(prompt).text

        threads = [threading.Thread(target=work, args=(word,)) for word in ("ab", "cd", "ef")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {"ab": "AB", "cd": "CD", "ef": "EF"}


def test_after_close() -> None:
    client = SyncClient(transport=MockTransport(""))
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        client.generate("Hi")
    assert not any(thread.name == "paceline-client" for thread in threading.enumerate())


def in_a_fork(work: Callable[[], object]) -> str:
    """What a function returns or raises in a fork of this process. One that hangs is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            said = f"{type(work()).__name__}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connections, "pid", None)
    client = SyncClient(transport=MockTransport("Hello there."))
    stream = client.stream("Hi")
    next(stream)
    async_client = Client(transport=MockTransport("Hello there."))
    asyncio.run(async_client.model())
    refused = "ClientClosedError: this process is a fork of one that used a client"
    for call in (
        lambda: client.generate("Hi"),
        lambda: [*client.stream("Hi")],
        lambda: next(stream),
        lambda: client.model(),
        lambda: client.set_verifiers("127.0.0.1:1"),
        lambda: async_client.generate("Hi"),
        lambda: asyncio.run(async_client.model()),
    ):
        assert in_a_fork(call).startswith(refused)
    assert in_a_fork(lambda: (client.close(), stream.close())) == "tuple"
    assert in_a_fork(lambda: asyncio.run(async_client.aclose())) == "NoneType"

    def with_its_own() -> object:
        with SyncClient(transport=MockTransport("Hello there.")) as own:
            return own.generate("Hi")

    assert in_a_fork(with_its_own) == "GenerationResult"
    monkeypatch.setattr(Connections, "pid", os.getpid())
    assert in_a_fork(with_its_own).startswith(refused), "gRPC was used before"
    assert client.generate("Hi").text == "Hello there."
    client.close()
