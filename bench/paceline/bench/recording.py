"""The recording of README: `kill -9` of drafter and verifier in the middle of a text, and the same
text as without. ``paceline bench recording`` makes it again, from real processes."""

from __future__ import annotations

import argparse
import asyncio
import html
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.models import Models
from paceline.cli.shipped import drafters_for
from paceline.client import Client
from paceline.harness import ServiceProcess

_PROMPT = "Explain in a few sentences how a hash table works."
_TOKENS = 120
_COLUMNS, _LINE, _LEFT = 88, 20, 16
_STYLE = """<style>
text { font: 13px ui-monospace, monospace; fill: #e6edf3; white-space: pre } .card { fill: #0d1117 }
.command { fill: #7ee787 } .kill { fill: #ff7b72 } .note { fill: #8b949e }
@keyframes show { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: no-preference) {
.line { opacity: 0; animation: show .01s forwards } }
</style>"""


@dataclass
class Recording:
    """Lines of a terminal and when they appeared."""

    lines: list[tuple[float, str, str]] = field(default_factory=list)
    """Seconds from the beginning, class and text of each line."""
    _began: float = field(default_factory=time.monotonic)

    def add(self, kind: str, text: str) -> None:
        """Add a text that appears now; it is wrapped."""
        now = time.monotonic() - self._began
        for line in textwrap.wrap(text, _COLUMNS) or [""]:
            self.lines.append((now, kind, line))

    def svg(self) -> str:
        """The lines, each of which appears at its time, at once where motion is not wanted."""
        height = _LINE * (len(self.lines) + 1) + _LEFT
        width = int(_COLUMNS * 7.85) + 2 * _LEFT
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            _STYLE,
            '<rect class="card" width="100%" height="100%" rx="8"/>',
        ]
        for place, (seconds, kind, text) in enumerate(self.lines):
            parts.append(
                f'<text class="line {kind}" style="animation-delay: {seconds:.2f}s" x="{_LEFT}" '
                f'y="{_LINE * (place + 1) + 8}">{html.escape(text)}</text>'
            )
        return "\n".join([*parts, "</svg>\n"])


async def record(target: Path, prompt: str = _PROMPT, tokens: int = _TOKENS) -> Recording:
    """Generate a text undisturbed, then again while drafter and verifier are killed.

    Args:
        target: Folder or GGUF file of a chat model.
        prompt: Message of the user.
        tokens: Length of the text in tokens.

    Raises:
        AssertionError: The texts differ.
    """
    shown = Recording()
    messages = [{"role": "user", "content": prompt}]
    loads = [f"--load={spec}" for spec in drafters_for(target)]
    verifier = ServiceProcess("verifier", ["--target", str(target)])
    async with verifier:
        drafter = ServiceProcess("drafter", ["--verifier", verifier.address, *loads])
        async with drafter, Client(verifier.address) as client:
            settings: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.7, "seed": 1}
            await client.chat(messages, **settings)  # the services are warm then
            shown.add("command", "$ paceline generate PROMPT --temperature 0.7 --seed 1")
            first = (await client.chat(messages, **settings)).text
            for paragraph in first.splitlines():
                shown.add("", paragraph)
            shown.add("", "")
            shown.add("command", "$ paceline generate PROMPT --temperature 0.7 --seed 1")
            second, seen, line = "", 0, ""
            async for chunk in client.chat(messages, **settings):
                before, seen = seen, seen + len(chunk.token_ids)
                second += chunk.text
                line += chunk.text
                while len(line) > _COLUMNS or "\n" in line:
                    head, _, rest = line.partition("\n")
                    if len(head) > _COLUMNS:
                        head = textwrap.wrap(head, _COLUMNS)[0]
                        rest = line[len(head) :].lstrip(" ")
                    shown.add("", head)
                    line = rest
                for victim, at in ((drafter, tokens // 4), (verifier, tokens // 2)):
                    if before < at <= seen:
                        shown.add("kill", f"# kill -9 of the {victim.kind}, and its restart")
                        await asyncio.to_thread(victim.kill)
                        await asyncio.to_thread(victim.start)
            shown.add("", line)
    assert first == second, "the texts differ"
    shown.add("", "")
    shown.add("note", "# both texts are the same: yes")
    return shown


def run(args: argparse.Namespace) -> int:
    """Record, and write the picture."""
    models = Models.of(args)
    shown = asyncio.run(record(models.target))
    args.output.write_text(shown.svg())
    print("\n".join(text for _, _, text in shown.lines))
    return 0
