"""`paceline tune` through real services, and serving what it wrote."""

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from system_support import EAGER, make_prompts

from paceline.cli.command import expand_config
from paceline.cli.main import main
from paceline.client import Client
from paceline.harness import ServiceProcess, read_prompts


@pytest.mark.slow
async def test_a_tuned_drafter_is_served(models: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(str(prompt * 4) for prompt in make_prompts(2)))
    output = tmp_path / "tuned.toml"
    script = (
        "from paceline.cli import tune\n"
        "tune.RATIOS, tune.DEPTHS, tune.NEIGHBOURS = (0.3, 0.9), (2, 4), (1.0,)\n"
        "import sys; from paceline.cli.main import main; sys.exit(main())\n"
    )
    words = ["tune", "--target", str(models["llama"]), "--tokens", "16"]
    words += ["--drafter", f"mine=selfspec:{models['llama']},kv_policy=verified"]
    words += ["--prompts", str(prompts), "--output", str(output)]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "sparse ratio, refined" in done.stdout
    assert done.stdout.count("chosen") == 3
    (load,) = tomllib.loads(output.read_text())["drafter"]["load"]
    assert load.startswith(f"mine=selfspec:{models['llama']},kv_policy=verified,ratio=")

    def arguments(kind: str) -> list[str]:
        return expand_config([kind, f"--config={output}"])[1:]

    with (
        ServiceProcess("verifier", arguments("verifier")) as verifier,
        ServiceProcess(
            "drafter", [*arguments("drafter"), f"--verifier={verifier.address}"]
        ) as drafter,
    ):
        async with Client(
            verifier.address, drafter_address=drafter.address, drafting=EAGER
        ) as client:
            text = await client.generate(make_prompts(1)[0] * 4, max_new_tokens=32)
    assert text.stats.drafter_versions == ["mine@1"]


@pytest.mark.parametrize(
    ("drafter", "prompts", "says"),
    [
        ("ngram", '"x"', "METHOD:DIR of selfspec"),
        ("selfspec", '"x"', "METHOD:DIR of selfspec"),
        ("selfspec:d", "7", "line 1"),
        ("selfspec:d", "", "no prompt"),
        ("selfspec:d", "[[", "Expecting"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    drafter: str, prompts: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(prompts)
    words = ["tune", "--target", str(tmp_path), "--drafter", drafter, "--prompts", str(file)]
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_prompts_are_texts_or_tokens(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"a"\n\n[1, 2]\n{"prompt": "b"}\n{"text": [3]}\n')
    assert read_prompts(file) == ["a", [1, 2], "b", [3]]
    file = tmp_path / "p.txt"
    file.write_text("one\nprompt\n")
    assert read_prompts(file) == ["one\nprompt\n"]
