"""Several models in one `paceline serve`: when they are loaded, and what that costs others."""

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from calls import until
from tiny_models import write_model, write_tokenizer

from paceline.cli.main import main
from paceline.cli.serve_models import Manager, ServedModel
from paceline.device import available_memory
from paceline.gateway import ManagedModels
from paceline.gateway.errors import ApiError
from paceline.harness import ProcessFailed, ServiceProcess
from paceline.harness.models import model_bytes, models_in

from .test_serve import Serve, session_with


class FakeProcess:
    """The process of a model, which is ready at once, unless it has a `failure`."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log
        self.requested_address = f"unix:{name}"
        self.phase = ""
        self.failure: Exception | None = None
        self.returncode: int | None = None

    def spawn(self) -> None:
        self.returncode = None
        self._log.append(f"+{self.name}")

    def poll_ready(self) -> bool:
        if self.failure:
            raise self.failure
        return True

    def stop(self) -> None:
        if self.returncode is not None:  # a model that has ended is not served meanwhile
            assert threading.current_thread() is threading.main_thread()
        self._log.append(f"-{self.name}")


class FakeClient:
    """A client whose texts end where `failed` says why."""

    def __init__(self, address: str) -> None:
        self.address, self.failed, self.closed = address, "", False

    def fail(self, message: str) -> None:
        self.failed = message

    async def aclose(self) -> None:
        self.closed = True


class Managed:
    """A manager of models that take 1 each, and what a gateway sees of it."""

    def __init__(self, names: str, memory: int, keep: float) -> None:
        self.log: list[str] = []
        self.processes = {name: FakeProcess(name, self.log) for name in names}
        served = [
            ServedModel(name, Path(name), cast(ServiceProcess, process))
            for name, process in self.processes.items()
        ]
        self.manager = Manager(served, memory, lambda model: 1, keep)

    async def acquire(self, name: str, *, load: bool = True) -> ExitStack:
        """Hold a model."""
        hold = ExitStack()
        await self.models.acquire(name, hold, load=load)
        return hold

    async def states(self, expected: str) -> None:
        """Wait until the gateway knows which models are in which states."""
        await until(lambda: " ".join(self.models.states.values()) == expected)

    async def released(self, name: str, left: int) -> None:
        """Wait until a model is held by this number of connections."""
        await until(lambda: len(self.manager._models[name].holds) == left)


@contextlib.asynccontextmanager
async def managed(
    folder: Path, names: str, memory: int = 1, keep: float = 3600
) -> AsyncIterator[Managed]:
    it = Managed(names, memory, keep)
    socket = folder / "models"
    server = await asyncio.start_unix_server(it.manager.answer, socket)
    make_client: Any = FakeClient
    async with ManagedModels(socket, make_client) as models:
        it.models = models
        yield it
    server.close()


async def test_what_is_asked_for_together_is_loaded_once(short_folder: Path) -> None:
    async with managed(short_folder, "ab", memory=2) as it:
        assert await it.models.names() == ["a", "b"]
        assert it.models.states == {"a": "unloaded", "b": "unloaded"}
        assert not it.models.clients
        with pytest.raises(ApiError, match="it is not loaded"):
            await it.acquire("a", load=False)
        holds = await asyncio.gather(*(it.acquire(name) for name in "abba"))
        assert len(holds) == 4
        assert sorted(it.log) == ["+a", "+b"]
        await it.states("loaded loaded")
        assert len(it.models.clients) == 2


async def test_models_take_turns_and_none_is_unloaded_under_a_text(short_folder: Path) -> None:
    """The longest unused of those without a text makes room; one that has texts takes no new ones
    before the model that waits has had its turn."""
    async with managed(short_folder, "abc", memory=2) as it:
        (await it.acquire("a")).close()
        text = await it.acquire("b")
        first = await it.acquire("c")
        assert it.log == ["+a", "+b", "-a", "+c"]
        waiting = asyncio.create_task(it.acquire("a"))
        await it.states("unloaded unloading loaded")
        later = asyncio.create_task(it.acquire("b"))
        first.close()
        await it.released("c", 0)
        assert not waiting.done()
        assert not later.done()
        text.close()
        second = await waiting
        again = await later
        assert it.log[4:] == ["-b", "+a", "-c", "+b"]
        for hold in (second, again):
            hold.close()


async def test_who_no_longer_waits_has_nothing_loaded_or_unloaded(short_folder: Path) -> None:
    async with managed(short_folder, "ab") as it:
        text = await it.acquire("a")
        waiting = asyncio.create_task(it.acquire("b"))
        await it.states("unloading unloaded")
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        text.close()
        await it.states("unloaded unloaded")
        assert it.log == ["+a", "-a"]


async def test_what_nobody_asks_for_is_unloaded(short_folder: Path) -> None:
    """Who looks at a model does not keep it loaded."""
    async with managed(short_folder, "ab", memory=2, keep=0) as it:
        text, look = await it.acquire("a"), await it.acquire("a", load=False)
        other = await it.acquire("b")
        used = it.manager._models["a"].used
        for hold in (look, text):
            await it.manager.look_after()
            assert it.log == ["+a", "+b"]
            hold.close()
            await it.released("a", 1 if hold is look else 0)
            assert (it.manager._models["a"].used > used) is (hold is text)
        await it.manager.look_after()
        assert it.log == ["+a", "+b", "-a"]
        await it.states("unloaded loaded")
        other.close()


async def test_a_failure_is_that_of_one_model(short_folder: Path) -> None:
    """One that cannot be loaded, and one that ends under a text."""
    async with managed(short_folder, "ab", memory=2) as it:
        text = await it.acquire("b")
        for failure in (ProcessFailed, OSError, ValueError):
            it.processes["a"].failure = failure("no such\nfile")
            with pytest.raises(ApiError, match="a is not served: no such file") as caught:
                await it.acquire("a")
            assert caught.value.code == "model_not_loaded"
        it.processes["a"].failure = None
        ending = await it.acquire("a")
        a, b = (cast(FakeClient, client) for client in it.models._clients.values())
        it.processes["a"].phase, it.processes["a"].returncode = "it died 3 times", 1
        await it.manager.look_after()
        await until(lambda: a.closed)
        assert a.failed == "a is no longer served: it died 3 times"
        assert (b.failed, b.closed) == ("", False)
        assert it.models._clients["a"] is not a
        ending.close()
        (await it.acquire("a")).close()
        assert it.log == ["+b", *["+a", "-a"] * 4, "+a"]
        text.close()


def test_a_folder_of_models_is_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without drafters for one target, and with a split file once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    configs = {"one": "{}", "drafter": '{"paceline": {}}', "other": "no JSON", "other/one": "{}"}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "cache").mkdir()
    for name in ("x.gguf", "y-00001-of-00002.gguf", "y-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"123")
    found = models_in(tmp_path)
    assert [path.name for path in found] == ["one", "other", "x.gguf", "y-00001-of-00002.gguf"]
    assert [model_bytes(path, "auto") for path in found] == [5, 5, 3, 6]
    packed = tmp_path / "cache" / "paceline" / "packed" / "x"
    packed.mkdir(parents=True)
    made_of = {"model": {"source": str(tmp_path / "x.gguf"), "requested": "auto"}}
    (packed / "model.json").write_text(json.dumps(made_of))
    (packed / "weights.bin").write_bytes(bytes(1000))
    assert model_bytes(tmp_path / "x.gguf", "auto") > 1000
    assert model_bytes(tmp_path / "x.gguf", "int8") == 3
    assert models_in(tmp_path / "one") == []
    both = ["serve", str(tmp_path / "one"), str(tmp_path / "other")]
    for words, reason in (
        (["--gateway-address=none"], "several models are loaded by requests to the gateway"),
        (["--keep=-1"], "--keep is -1"),
        (["--model-name=x"], "--model-name has no effect with several models"),
        ([str(tmp_path / "other" / "one")], "several models have the name one"),
    ):
        assert main([*both, *words]) == 2
        assert reason in capsys.readouterr().err


@pytest.fixture
def serve(tmp_path: Path, short_folder: Path) -> Iterator[Serve]:
    """Two models and one that cannot be read, of which one at a time has room."""
    for name in ("qwen3", "small", "unreadable"):
        folder = tmp_path / name
        folder.mkdir()
        if name != "unreadable":
            write_model(name, folder)
            write_tokenizer(folder)
    (tmp_path / "unreadable" / "config.json").write_text("{}")
    kv = f"--kv-bytes={available_memory() * 6 // 10}"
    limits = ("--max-context=2048", "--drafter=none", "--keep-alive-seconds=0.1")
    running = Serve(short_folder, str(tmp_path), *limits, kv)
    yield running
    running.close()


@pytest.mark.slow
def test_models_are_served_by_name_and_end_together(serve: Serve) -> None:
    (gateway,) = serve.addresses()

    async def ask() -> None:
        async with session_with(gateway) as session:

            async def get(path: str) -> Any:
                async with session.get(path) as response:
                    return await response.json()

            async def text(model: str | None, **body: Any) -> tuple[int, str]:
                body = {"prompt": [5, 6, 7, 8], "ignore_eos": True, "model": model, **body}
                async with session.post("/v1/completions", json=body) as response:
                    return response.status, await response.text()

            cards = (await get("/v1/models"))["data"]
            assert [each["id"] for each in cards] == ["qwen3", "small", "unreadable"]
            assert {each["status"]["value"] for each in cards} == {"unloaded"}
            _, events = await text("unreadable", stream=True)
            assert events.startswith(": keep-alive\n\n")
            error = json.loads(events.rpartition("data: ")[2])["error"]
            assert error["code"] == "model_not_loaded"
            assert "Should have a `model_type` key in its config.json" in error["message"]
            assert (await text("other"))[0] == 404
            long = text("small", max_tokens=1500, stream=True), text("small", stream=True)
            streams = asyncio.gather(*long)
            while (await get("/health"))["models"]["small"] == "unloaded":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            status, whole = await text(None)
            streamed = await streams
            assert all(each.endswith("data: [DONE]\n\n") for _, each in streamed)
            small = json.loads(streamed[0][1].partition("data: ")[2].partition("\n")[0])
            qwen3 = json.loads(whole)
            assert (small["model"], qwen3["model"], status) == ("small", "qwen3", 200)
            assert small["system_fingerprint"] != qwen3["system_fingerprint"]
            cards = (await get("/v1/models"))["data"]
            known = [(each.get("max_model_len"), each.get("drafters")) for each in cards]
            assert known == [(2048, ["local"]), (2048, ["local"]), (None, None)]
            states = {"qwen3": "loaded", "small": "unloaded", "unreadable": "unloaded"}
            assert await get("/health") == {"status": "ok", "models": states}

    asyncio.run(ask())
    children = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(children) == 3  # the gateway, the command of a model, and its verifier
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(60) == 0
    assert not any(each.is_running() for each in children)
    log = serve.log.read_text()
    for name in ("qwen3", "small", "unreadable"):
        assert log.count(f"{name} is loading") == 1
    assert "unloading small: qwen3 needs its memory" in log
    assert all("unreadable" in line for line in log.splitlines() if "ERROR" in line)
