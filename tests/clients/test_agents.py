"""Coding agents run a small task to its end: they write a file by the tool that they have for it.

What the model says is scripted, so that these tests are about requests and answers. `make clients`
installs them, from npm and the index of Python packages; those that cannot be had are left out.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.transport import MockTransport
from gateway.conftest import serve_gateway

PACKAGES = Path(__file__).parents[2] / ".make" / "clients"
PROGRAM = Path(__file__).with_name("agent.mjs")
TEMPLATE = (
    "{% for t in tools or () %}[tool {{ t.function.name }}"
    "{% for p in t.function.parameters.properties or () %} {{ p }}{% endfor %}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}{% endfor %}<assistant>"
)
TASK = "Write the file ride.txt with the text: three laps"
TEXT, DONE = "three laps\n", "The file is written."
SECONDS = 300  # for an agent's start and its whole task; the machine may be slow


def script(folder: Path) -> Callable[[str], str]:
    """What the model says to a prompt: a call of a tool that writes, then that it is done."""
    path, shell = str(folder / "ride.txt"), f"printf 'three laps\\n' > {folder / 'ride.txt'}"
    values = dict.fromkeys(("file_path", "filePath", "filepath"), path) | {"content": TEXT}
    writers = ("Write", "write", "write_file")
    shells: dict[str, Any] = {
        "exec_command": {"cmd": shell},
        "shell_command": {"command": shell},
        "shell": {"command": ["bash", "-c", shell]},
        "exec": {"input": f"text(await tools.exec_command({json.dumps({'cmd': shell})}))"},
    }

    def reply(prompt: str) -> str:
        tools = {
            name: words.split() for name, words in re.findall(r"\[tool ([\w-]+)(.*?)\]", prompt)
        }
        known = [name for name in (*writers, *shells) if name in tools]
        if "<tool>" in prompt:
            return DONE
        if not known:  # aider has no tools: files stand in the answer
            return f"{DONE}\n\nride.txt\n```\n{TEXT}```\n"
        chosen = {key: values[key] for key in tools[known[0]] if key in values}
        call = {"name": known[0], "arguments": shells.get(known[0], chosen)}
        return f"I write it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return reply


@dataclass(frozen=True)
class Agent:
    """A program of a package, or a library that `agent.mjs` uses."""

    name: str
    package: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)  # settings in its home folder, as JSON
    # {url} in all of these is where the gateway is, {folder} where it works.


LIBRARY = ["{url}", "{folder}/ride.txt", TASK]
CODEX = [
    *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    *("-c", 'model_provider="here"', "-c", 'model_providers.here.name="here"'),
    *("-c", 'model_providers.here.base_url="{url}/v1"'),
    *("-c", 'model_providers.here.wire_api="responses"', TASK),
]
AGENTS = [
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        ["-p", TASK, "--allowedTools", "Write"],
        {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "any"},
    ),
    Agent("codex", "@openai/codex", CODEX),  # asks for a model of its vendor, with custom tools
    Agent("codex", "@openai/codex", [*CODEX, "-m", "mock"]),
    Agent(
        "opencode",
        "opencode-ai",
        ["run", "-m", "here/mock", TASK],
        {},
        {
            ".config/opencode/opencode.json": {
                "provider": {
                    "here": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "{url}/v1"},
                        "models": {"mock": {}},
                    }
                }
            }
        },
    ),
    Agent(
        "qwen",
        "@qwen-code/qwen-code",
        ["--auth-type", "openai", "--yolo", "-p", TASK],
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": "mock"},
    ),
    Agent(
        "cn",
        "@continuedev/cli",
        ["--auto", "-p", TASK],
        {},
        {
            ".continue/config.yaml": {
                "name": "here",
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {
                        "name": "here",
                        "provider": "openai",
                        "model": "mock",
                        "apiBase": "{url}/v1",
                        "apiKey": "any",
                        "capabilities": ["tool_use"],
                    }
                ],
            }
        },
    ),
    Agent(
        "aider",
        "aider-chat",
        [
            *("--model", "openai/mock", "--openai-api-base", "{url}/v1", "--openai-api-key", "any"),
            *("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"),
            *("--analytics-disable", "--message", TASK),
        ],
    ),
    Agent("ai", "@ai-sdk/openai-compatible", LIBRARY),
    Agent("anthropic", "@anthropic-ai/sdk", LIBRARY),
]


def command(agent: Agent) -> list[str]:
    """The agent's program; skips the test where it is not installed."""
    node = PACKAGES / "node_modules"
    program, package = node / ".bin" / agent.name, node / agent.package
    if agent.name == "aider":
        program = package = PACKAGES / "aider" / "bin" / "aider"
    if not package.exists():
        pytest.skip(f"make clients installs {agent.package}, where it can be had")
    library = agent.arguments is LIBRARY
    return ["node", str(PROGRAM), str(PACKAGES), agent.name] if library else [str(program)]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_writes_a_file(agent: Agent, tmp_path: Path) -> None:
    program = command(agent)
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    async with serve_gateway(MockTransport(script(folder)), chat_template=TEMPLATE) as served:

        def told(text: str) -> str:
            return text.replace("{url}", served.url).replace("{folder}", str(folder))

        for name, content in agent.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(told(json.dumps(content)))
        process = await asyncio.create_subprocess_exec(
            *(*program, *map(told, agent.arguments)),
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                **{name: told(value) for name, value in agent.environment.items()},
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SECONDS):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, (output, errors)
    assert (folder / "ride.txt").read_text() == TEXT
    assert DONE in output.decode()
