"""Loads a drafter from a folder that is allowed, and checks it along recorded texts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from paceline.drafter.calibration import FILE, Calibration
from paceline.drafter.methods import CALIBRATION, LOOKUP, method_class, path_options
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    GenerationInfo,
    LoadError,
    Resources,
    Update,
    accepted_tokens,
    parse_options,
)
from paceline.drafter.methods.lookup import LookupDrafter, LookupOptions
from paceline.drafter.recordings import Recording
from paceline.drafter.session import Drafted, DraftStatistics, Session
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.worker import SLICE, DraftWorker
from paceline.service.runtime import available_memory, trim
from paceline.v1 import drafter_pb2

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""Reason of a LoadError."""


class Loader:
    """Loads one drafter at a time, from allowed folders only.

    Each load has a daemon thread: a service that stops does not wait for it.
    """

    def __init__(self, roots: Roots, resources: Resources) -> None:
        self._roots = roots
        self._resources = resources
        self._loading = asyncio.Lock()

    async def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter that a spec describes, with its calibration if it has one.

        The calibration is the file of the option ``calibration``, or the one in its folder.

        Raises:
            LoadError: The method, a folder or an option is wrong.
        """
        async with self._loading:
            return await _in_thread(lambda: self._load(spec))

    def is_short_of_memory(self, spec: DrafterSpec) -> bool:
        """Whether the files of a drafter for the CPU are larger than the free memory."""
        if self._resources.device != "cpu" or spec.folder is None:
            return False
        try:
            folder = self._roots.check(spec.folder)
            files = [folder] if folder.is_file() else [*folder.iterdir()]
            return sum(file.stat().st_size for file in files) > available_memory()
        except (LoadError, OSError):  # the load has the better message
            return False

    def _load(self, spec: DrafterSpec) -> Drafter:
        folder = self._roots.check(spec.folder) if spec.folder else None
        folders = path_options(spec.method)
        options = {
            name: str(self._roots.check(Path(text))) if name in folders and text else text
            for name, text in spec.options.items()
        }
        calibration = options.pop(CALIBRATION, "")
        lookup = {LOOKUP: options.pop(LOOKUP)} if LOOKUP in options else {}
        if not calibration and folder is not None and (folder / FILE).is_file():
            calibration = str(folder / FILE)
        try:
            wanted = parse_options(LookupOptions, lookup).lookup
            drafter = method_class(spec.method).load(folder, options, self._resources)
            if calibration:
                drafter.calibration = Calibration.read(Path(calibration), spec.method)
        except LoadError as error:
            raise LoadError(error.reason, f"drafter {spec.name!r}: {error}") from error
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is the latter
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            why = f"drafter {spec.name!r} does not fit into memory: {error}; unload another version"
            raise LoadError(OUT_OF_MEMORY, why) from error
        trim()  # what was used to load it
        return LookupDrafter(drafter) if wanted else drafter


async def _in_thread(load: Callable[[], Drafter]) -> Drafter:
    """The result of a function on a daemon thread; dropped if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Drafter] = loop.create_future()

    def run() -> None:
        try:
            result, error = load(), None
        except BaseException as raised:
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed: the service has stopped
            loop.call_soon_threadsafe(finish, result, error)

    def finish(result: Drafter | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if result is not None:
            done.set_result(result)
        elif error is not None:
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done


CHECK_NODES = 16
"""Node budget of a round."""

CHECK_SECONDS = 60.0
"""A version that needs longer for all texts fails."""


class LoadCheck:
    """Drafts along recordings as for a verifier, between the rounds of generations.

    A version passes if it raises nothing and its trees are valid. Accepted length and draft time
    are reported, not judged. Methods that read the target's KV or hidden states
    are not checked, because they cannot draft without a verifier.
    """

    def __init__(self, recordings: Sequence[Recording], worker: DraftWorker) -> None:
        self._recordings = recordings
        self._worker = worker

    async def __call__(
        self, spec: DrafterSpec, drafter: Drafter
    ) -> drafter_pb2.DrafterCheck | None:
        """Check a version. Returns its statistics; None if it cannot be checked.

        Raises:
            LoadError: CHECK_FAILED.
        """
        if drafter.needs.kv_layers or drafter.needs.hidden_state_layers:
            return None
        total = DraftStatistics()
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                for recording in self._recordings:
                    await self._draft_along(recording, drafter, total)
        except TimeoutError as error:
            raise _failed(spec, f"it needed more than {CHECK_SECONDS:g} s for the texts") from error
        except Exception as error:
            raise _failed(spec, f"{type(error).__name__}: {error}") from error
        return drafter_pb2.DrafterCheck(
            texts=len(self._recordings),
            rounds=total.rounds,
            accepted_length=total.accepted_length,
            draft_us=total.draft_us,
        )

    async def _draft_along(
        self, recording: Recording, drafter: Drafter, total: DraftStatistics
    ) -> None:
        tokens = recording.tokens
        largest = max((*recording.prompt, *tokens))
        vocab_size = drafter.fit.vocab_size or largest + 1
        if largest >= vocab_size:
            raise ValueError(
                f"a recorded text holds the token {largest}, but the drafter's vocabulary has "
                f"{vocab_size}: the texts are of another tokenizer"
            )
        generation = GenerationInfo(
            tokens=[*recording.prompt, tokens[0]],  # the first recorded token is the anchor
            prompt_length=len(recording.prompt),
            vocab_size=vocab_size,
            sampling=recording.sampling,
        )
        session = Session(drafter, generation, statistics=total)
        run = self._worker.run
        try:
            nodes = min(CHECK_NODES, drafter.max_nodes)
            length = 1
            emitted: tuple[int, ...] = ()
            while length < len(tokens):
                await run(partial(session.extend, Update(emitted)))
                while session.sequence.backlog > SLICE:
                    await run(partial(session.sequence.warm, SLICE))
                budget = Budget(nodes, min(drafter.max_depth, len(tokens) - length))
                tree = (await run(partial(_draft, session, budget))).tree
                if len(tree) > nodes:
                    raise ValueError(f"a tree of {len(tree)} nodes, expected at most {nodes}")
                tree.check(vocab_size)
                end = length + accepted_tokens(tree, tokens[length:]) + 1
                emitted, length = tokens[length:end], end
            await run(partial(session.extend, Update(emitted)))
        finally:
            self._worker.post(session.close)


def _draft(session: Session, budget: Budget) -> Drafted:
    begun = time.monotonic()
    (tree,) = session.drafter.draft_many([(session.sequence, budget)])
    return session.finish(Drafted(tree, time.monotonic() - begun, 0.0))


def _failed(spec: DrafterSpec, why: str) -> LoadError:
    return LoadError(
        "CHECK_FAILED",
        f"drafter {spec.name!r} was loaded but failed on the recorded texts and was unloaded: "
        f"{why}",
    )
