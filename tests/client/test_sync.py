"""The client without an event loop."""

import threading
from inspect import signature

import pytest
from fakes.transport import MockTransport

from paceline.client import (
    Client,
    ClientClosedError,
    InvalidRequestError,
    SyncClient,
)


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
