"""Online learning: texts are recorded, a drafter is trained on them, and replaces the old one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from calls import eventually
from system_support import EAGER, make_prompts
from tiny_models import VOCABULARY

from paceline.cli.main import main
from paceline.client import Client, GenerationResult
from paceline.drafter import LoadError
from paceline.drafter.recordings import read_recordings
from paceline.harness import ServiceProcess
from paceline.train import drafters as drafter_training

PROMPTS = make_prompts(28, seed=5)
TOKENS = 72


@pytest.fixture
def folders(models: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies of a target and a drafter whose last token parts texts, and files to train on."""
    found = {}
    for name, source in (("target", models["llama"]), ("lm", models["small"])):
        found[name] = tmp_path / name
        shutil.copytree(source, found[name])
        settings = found[name] / "tokenizer_config.json"
        end = {"eos_token": f"<spare{VOCABULARY - 1}>"}
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **end}))
    found["data"] = tmp_path / "data"
    found["data"].mkdir()
    for number in range(14):
        (found["data"] / f"{number}.txt").write_text(f"round {number} and on and " * 300)
    return found


def paceline(*words: object) -> None:
    """Give a command, in this process: it has torch already."""
    assert main([str(word) for word in words]) == 0


def generate(verifier: ServiceProcess, drafter: ServiceProcess) -> list[GenerationResult]:
    async def all_at_once() -> list[GenerationResult]:
        async with Client(
            verifier.address, drafter_address=drafter.address, drafting=EAGER
        ) as client:
            options: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
            asked = [client.generate(p, drafter="lm", **options) for p in PROMPTS]
            return await asyncio.gather(*asked)

    return asyncio.run(all_at_once())


Kept = dict[tuple[int, ...], tuple[int, ...]]


def recorded(folder: Path, enough: Callable[[Kept], bool]) -> Kept:
    """Tokens by prompt of what is on the disk, once that is enough."""
    kept: Kept = {}

    def complete() -> bool:
        with suppress(LoadError):  # There is none yet.
            kept.update({text.prompt: text.tokens for text in read_recordings(folder)})
            return enough(kept)
        return False

    eventually(complete, "enough texts are recorded")
    return kept


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.slow
def test_a_drafter_learns_from_what_it_drafted(
    folders: dict[str, Path], sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_training, "TEXTS", 2)
    monkeypatch.setattr(drafter_training, "TOKENS", 16)
    texts, work, out = tmp_path / "texts", tmp_path / "work", tmp_path / "lm-2"
    target = ["--target", str(folders["target"]), "--weights", "float32"]
    load = ["--load", f"lm=lm:{folders['lm']}", "--record", str(texts)]
    with (
        ServiceProcess("verifier", target) as verifier,
        ServiceProcess("drafter", load, address=f"unix:{sockets}/online") as drafter,
    ):
        first = generate(verifier, drafter)
        # No text has its last round.
        kept = recorded(texts, lambda tokens: len(tokens) == len(PROMPTS))
        drafter.kill()
        for prompt, result in zip(PROMPTS, first, strict=True):
            tokens = kept.get(tuple(prompt), ())
            assert tokens == tuple(result.token_ids[: len(tokens)])
        assert min(map(len, kept.values())) > TOKENS // 2

        drafter.start()
        training = [
            *("--target", folders["target"], "--from", folders["lm"], "--data", folders["data"]),
            *("--from-recordings", texts, "--work", work, "--out", out),
        ]
        paceline("train", "online", *training, "--steps", 2, "--old-share", 0)
        assert json.loads((out / "config.json").read_text())["paceline"]["training"]["steps"] == 2

        where = ("--address", drafter.address)
        check = ("--check", work / "heldout.jsonl", "--verifier-address", verifier.address)
        paceline("drafters", "load", "lm", "lm", out, *check, *where)
        paceline("drafters", "activate", "lm", 2, "--share", 0.5, *where)
        tried = generate(verifier, drafter)
        assert {v for r in tried for v in r.stats.drafter_versions} == {"lm@1", "lm@2"}
        paceline("drafters", "activate", "lm", 2, *where)
        last = generate(verifier, drafter)
        assert {tuple(r.stats.drafter_versions) for r in last} == {("lm@2",)}
        assert tokens_of(first) == tokens_of(tried) == tokens_of(last)
        recorded(texts, lambda _: len(read_recordings(texts)) > 2 * len(PROMPTS))
