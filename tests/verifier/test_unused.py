"""A drafter that hardly drafts is named once for each reason, in the log and in the metrics."""

import logging
from typing import Any

import drafters
import pytest
from verifier_support import Client

from paceline.verifier.engine.drafted import NoDraft
from paceline.verifier.engine.drafting import DrafterUse

PROMPT = [3, 1, 4, 1, 5]
FIELDS: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("no_delays")


async def unused(client: Client, caplog: pytest.LogCaptureFixture, **start: Any) -> list[str]:
    """What two texts have logged of their drafter."""
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            created = await client.create(PROMPT, **FIELDS)
            await client.responses(created.handle, **start)
    return [text for text in caplog.messages if text.startswith("the drafter")]


async def test_a_drafter_that_is_always_late(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.new_drafter_service() as service:
        name = await service.add(drafters.random_tree)
        service.paused = []
        late: list[str] = []
        while not late:  # on a busy machine it may not be ready for whole texts
            said = await unused(client, caplog, drafter=name, draft_timeout_ms=1)
            late = [text for text in said if text.endswith(": its trees come too late")]
        (only,) = late
        assert only.startswith(f"the drafter {name} drafted in 0 of ")
        assert client.service.engine.unused_drafters == [(name, "late")]


async def test_a_drafter_that_nobody_offers(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = await unused(client, caplog, drafter="missing")
    assert said.endswith("asked in 0: no drafter service that has joined offers it")
    assert client.service.engine.unused_drafters == [("missing", "not_ready")]


async def test_a_drafter_that_drafts_or_has_nothing_to_say_is_not_named(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    for draw in (drafters.wrong(plain, len(PROMPT)), drafters.nothing):
        async with client.new_drafter_service() as service:
            name = await service.add(draw)
            assert not await unused(client, caplog, drafter=name)
    assert not await unused(client, caplog, drafter="local")
    assert not await unused(client, caplog, drafter="none")
    assert not client.service.engine.unused_drafters


def test_by_its_recent_steps() -> None:
    """The reason is the most frequent one; a drafter that drafts again is unused no more."""
    use = DrafterUse()
    for step in range(47):
        use.note(NoDraft.LATE if step % 3 else NoDraft.NOT_READY)
        assert use.unused is None
    use.note(NoDraft.NOT_READY)
    assert use.unused is NoDraft.LATE
    for _ in range(3):
        use.note(None)
    assert use.unused is None
    for _ in range(10_000):
        use.note(None)
    for _ in range(20_000):
        use.note(NoDraft.NODE_BUDGET)
    assert use.unused is NoDraft.NODE_BUDGET
