"""The command table, and what each command needs to be installed."""

import argparse
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import run_python

from paceline.cli.main import COMMANDS, build_parser, main
from paceline.harness.models import MODELS

# Runs the command line as on a machine where only `pip install paceline` was done.
CLIENT_ONLY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from paceline.cli.main import main
"""
OF_EXTRAS = [
    *("torch", "transformers", "numpy", "safetensors", "accelerate"),
    *("grpc_health", "grpc_reflection", "opentelemetry"),
]


def run_client_only(
    *words: str, absent: str = "", run: str = "sys.exit(main(sys.argv[1:]))"
) -> "subprocess.CompletedProcess[str]":
    script = CLIENT_ONLY.format(names={*OF_EXTRAS, absent}) + run
    return run_python("-c", script, *words)


def test_help_lists_all_commands_and_needs_no_extra() -> None:
    names = [command.name for command in COMMANDS if command.extra in (None, "server")]
    run = (
        "for words in [], *([name] for name in sys.argv[1:]):\n    try: main([*words, '--help'])\n"
    )
    done = run_client_only(*names, run=f"{run}    except SystemExit as end: print(end.code)\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("0") == 1 + len(names)
    assert all(command.name in done.stdout.split() for command in COMMANDS)
    assert all(f"usage: paceline {name}" in done.stdout for name in names)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("verifier --target x", "pip install 'paceline[server]'"),
        ("train dspark --work x", "pip install 'paceline[train]'"),
        ("bench", "checkout of the source"),
    ],
)
def test_a_missing_package_is_named(words: str, advice: str) -> None:
    done = run_client_only(*words.split(), absent="paceline.bench")
    assert done.returncode == 2
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(("", ""), ("nonsense", "nonsense"), ("drafters nonsense", "nonsense")),
        *(("verifier", "--target"), ("serve /nowhere/x", "there is no model at /nowhere/x")),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline")
    assert said in line
    assert "--help)" in line


def test_service_commands_set_threads_and_pages_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("main", "serve", "services", "drafters")
    script = "".join(f"import paceline.cli.{name}\n" for name in names)
    script += """
import os, sys
import paceline.drafter
assert "torch" not in sys.modules
from paceline.cli.service_process import set_torch_environment
set_torch_environment(1)
import torch
print(torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"], os.environ["KMP_BLOCKTIME"])
print(os.environ["THP_MEM_ALLOC_ENABLE"])
"""
    for name in [name for name in os.environ if "OMP" in name or "THP" in name]:
        monkeypatch.delenv(name)
    done = run_python("-c", script, environment={"KMP_BLOCKTIME": "7"})
    assert done.stdout.split() == ["1", "20000", "7", "1"]


ASK = {
    "bash": 'COMP_WORDS=(paceline gen); COMP_CWORD=1; _shtab_paceline; echo "${COMPREPLY[@]}"',
    "fish": "complete -C 'paceline gen' | string split \\t | head -1",
}  # shell commands that print how the word `gen` is completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_shell_completes_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command.name in script for command in COMMANDS)
    assert "max-new-tokens" in script
    if shell not in ASK or shutil.which(shell) is None:
        return
    asked = [shell, "-c", f"{script}\n{ASK[shell]}"]
    assert subprocess.check_output(asked, text=True, timeout=300).split() == ["generate"]


def test_names_that_other_tools_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for alias, same in {"run": "chat", "pull": "fetch", "ps": "drafters list"}.items():
        with pytest.raises(SystemExit) as ended:
            main([alias, "--help"])
        assert ended.value.code == 0
        assert f"usage: paceline {same}" in capsys.readouterr().out
    assert main(["serve", "--port", "8000"]) == 2
    assert "there is no --port: host and port are one argument" in capsys.readouterr().err
    for line, meant in {
        "generate hi --max-token 8": "--max-token; did you mean --max-tokens?",
        "drafters load a ngram --opton x=y": "--opton; did you mean --option?",
        "serve smollm2 --insecure-metric": "--insecure-metric; did you mean --insecure-metrics?",
    }.items():
        monkeypatch.setitem(MODELS, "smollm2", SimpleNamespace(path=Path(__file__)))
        with pytest.raises(SystemExit):
            main(line.split())
        assert f"there is no option {meant}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serv", "smollm2"])
    assert "there is no command 'serv'; did you mean serve?" in capsys.readouterr().err


def test_an_address_in_use_ends_the_start_before_a_model_loads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", str(tmp_path), "--gateway-address", address]) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err


FRAGMENT = re.compile(
    r"(of|for|the same|defaults?|repeatable|which|from|with|without|by|gets|its|their|more)\b"
)  # begins of helps that need the option's name to make sense


def test_each_help_says_what_an_option_is() -> None:
    fragments = []

    def look(parser: argparse.ArgumentParser, path: str) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, nested in action.choices.items():
                    look(nested, f"{path} {name}")
            elif not action.help or FRAGMENT.match(action.help):
                fragments.append((path, action.dest, action.help))

    look(build_parser(COMMANDS), "paceline")
    assert fragments == []
