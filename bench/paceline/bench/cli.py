"""Options of `paceline bench`; each sub-command is a module with `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from paceline.cli.command import CommandError, refuse_options
from paceline.formats import WEIGHTS
from paceline.harness import PROMPT_FILE
from paceline.harness.models import model_path

_MODULES = {
    "acceptance": "paceline.bench.acceptance",
    "papers": "paceline.bench.papers",
    "table": "paceline.bench.table.run",
    "replay": "paceline.bench.replay.run",
    "step": "paceline.bench.step.run",
    "quality": "paceline.bench.quality",
    "calls": "paceline.bench.calls",
    "drills": "paceline.bench.drills.run",
}
_WEIGHTS = WEIGHTS[1:]  # all but auto
# Options of `papers` that all experiments read, and those that one reads.
_OF_ALL_EXPERIMENTS = ("models", "target", "output", "weights", "texts")
_TEXTS = ("tokens", "temperature", "prompts")
_OF_EXPERIMENTS = {
    "table": (*_TEXTS, "contexts", "drafter", "speed"),
    "attention": ("contexts", "rows"),
    "dspark": (*_TEXTS, "drafter"),
    "load": (*_TEXTS, "drafter", "users"),
    "selection": (*_TEXTS, "contexts", "policies", "ratios"),
    "budget": ("tokens", "prompts", "contexts", "drafter", "policies", "budgets"),
    "triforce": ("tokens", "prompts", "contexts", "drafter", "policies", "budgets", "ratios"),
}
_LLAMA_PROGRAMS = ("llama_server", "llama_bench", "llama_perplexity")
_PARTS = {
    "llama_model": (*_LLAMA_PROGRAMS, "llama_modes", "llama_draft"),
    "openvino_model": ("openvino_python",),
}  # options that have no effect without another one
# Options of `step` about other engines.
_OF_RIVALS = ("llama_model", *_LLAMA_PROGRAMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")

    def add(name: str, text: str, tokens: int = 0, repeats: int = 0) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        option, folder = sub.add_argument, "folder of a target and of prompts"
        option("--models", type=Path, default=Path("models/demo"), help=folder)
        option("--target", type=model_path, help="target, a path or name; default: MODELS/target")
        file = f"result file; default: bench/results/MACHINE-{name}.json"
        option("--output", type=Path, help=file)
        if tokens:
            option("--tokens", type=int, default=tokens, help="new tokens after each prompt")
        if repeats:
            option("--repeats", type=int, default=repeats, help="how often everything is measured")
        return option

    _add_table(add("table", "measure drafters beside other engines, by category of prompts", 128))
    text = "measure the accepted length of drafters on prompts, without services"
    option = add("acceptance", text, 128)
    _add_weights(option, "int8")
    option("--count", type=int, default=8, help="prompts of each category")
    _add_temperatures(option, [0.0, 0.7])
    _add_prompts(option)
    _add_drafter(option, "measure", required=True)
    _add_papers(add("papers", "repeat what the papers measured, by experiment", 128))
    _add_replay(add("replay", "record rounds, and judge the scheduler's rules on them", 128))
    text = "measure a decoder step by rows and context"
    option = add("step", text, repeats=5)
    _add_weights(option, "bfloat16")
    option("--rows", type=_numbers, default="1,8,33,64,256", help="rows of a step")
    option("--contexts", type=_numbers, default="128,2048,6144", help="tokens before the step")
    text = "measure behind random KV in place of prompts, in contexts longer than the model's too"
    option("--synthetic", action="store_true", help=text)
    option("--profile", action="store_true", help="measure the parts of a step instead")
    option("--rivals", action="store_true", help="measure other engines in the same run")
    option("--llama-bench", metavar="PROGRAM", help="llama-bench; default: that in PATH")
    _add_llama_models(option)
    text = "measure what quantised weights and KV change in a model's predictions"
    option = add("quality", text)
    _add_weights(option, "int8,int4")
    option(
        "--kv-cache-dtype", nargs="*", default=["int8"], choices=("float32", "int8"),
        help="types of KV to measure, with weights in bfloat16",
    )  # fmt: skip
    option("--windows", type=int, default=8, help="number of texts of 1,024 tokens")
    option("--gguf", type=Path, nargs="*", default=[], help="GGUF files to measure too")
    text = "llama-perplexity; default: that in PATH"
    option("--llama-perplexity", metavar="PROGRAM", help=text)
    _add_llama_models(option)
    option = add("calls", "share of a model's answers that are valid calls of ten tools")
    option("--weights", default="auto", choices=WEIGHTS, help="weights of target and drafter")
    option("--drafter", type=model_path, help="a small model that drafts; default: none")
    option("--every", type=int, default=1, metavar="N", help="ask each Nth of the 200 prompts")
    option = add("drills", "inject faults under load and check what must hold")
    text = "name of a drill, in quotes; default: all of them"
    option("drill", nargs="*", metavar="DRILL", help=text)
    option("--short", action="store_true", help="run smaller drills, which take minutes")


def _add_table(option: Any) -> None:
    _add_weights(option, "int8,bfloat16")
    text = "minutes after which no measurement begins; default: %(default)g"
    option("--minutes", type=float, default=40.0, help=text)
    text = "keep the samples of the file, and measure what it lacks"
    option("--resume", action="store_true", help=text)
    option("--categories", nargs="+", default=[], metavar="NAME", help="categories; default: all")
    text = "measure only engines with one of these texts in their name, such as 'paceline int8'"
    option("--contestants", nargs="+", default=[], metavar="TEXT", help=text)
    _add_temperatures(option, [0.0, 0.7])
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="requests at a time")
    _add_prompts(option)
    _add_drafter(option, "measure", "those that ship, ngram, and selfspec in 4 bits")
    text = "measure each drafter also with a tree in every round"
    option("--always", action="store_true", help=text)
    text = "--sources of the verifier; none: drafters alone; default: as of `paceline verifier`"
    option("--sources", metavar="NAMES", help=text)
    option(
        "--apart", action="store_true",
        help="run verifier and drafter on a core each, as on two devices, with a tree in every "
        "round: drafted after the step, and ahead, while the verifier works; needs taskset",
    )  # fmt: skip
    option("--llama-server", metavar="PROGRAM", help="llama-server; default: that in PATH")
    text = "model that llama.cpp runs"
    option("--llama-model", type=Path, nargs="*", default=[], metavar="GGUF", help=text)
    text = "types of llama.cpp's speculation; default: ngram-mod"
    option("--llama-modes", nargs="*", default=["ngram-mod"], metavar="TYPE", help=text)
    text = "smaller model that drafts for llama.cpp, 4 tokens at a time"
    option("--llama-draft", type=Path, metavar="GGUF", help=text)
    option("--openvino-python", metavar="PROGRAM", help="a Python that has openvino-genai")
    option("--openvino-model", type=Path, metavar="GGUF", help="model that OpenVINO runs")
    option(
        "--server", type=_server, action="append", default=[], metavar="NAME[:MODE]=URL",
        help="a server with OpenAI's interface, such as vllm=http://127.0.0.1:8000/v1; repeatable. "
        "Servers of one name are modes of one engine; without MODE it is none. Keys are read from "
        "OPENAI_API_KEY",
    )  # fmt: skip


def _add_replay(option: Any) -> None:
    text = "files to judge; default: record new ones"
    option("traces", nargs="*", type=Path, help=text)
    _add_weights(option, "int4")
    option("--count", type=int, default=6, help="prompts of each category")
    _add_temperatures(option, [0.0])
    option("--nodes", type=int, default=16, help="maximum of drafted tokens in a tree")
    text = "--sources of the verifier, separated by commas"
    option("--sources", default="ngram,grammar", help=text)
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="texts at a time")
    option("--label", help="size of the target in the names of files; default: 135m")
    option("--folder", type=Path, default=Path("bench/traces"), help="folder of the recorded files")
    _add_prompts(option)
    _add_drafter(option, "record", "those that ship for the target")


def _add_papers(option: Any) -> None:
    text = "name of the experiment, as docs/evidence.md tells"
    option("experiment", choices=list(_OF_EXPERIMENTS), help=text)
    _add_weights(option, "int8")
    option("--texts", type=int, default=12, metavar="N", help="number of texts, or of repeats")
    option("--contexts", type=_numbers, default="512,1024,2048,4096,7500", help="tokens of context")
    option("--temperature", type=float, default=0.0, metavar="T", help="temperature")
    _add_prompts(option)
    _add_drafter(option, "measure", "those of the experiment, for SmolLM2")
    option("--speed", action="store_true", help="measure speeds with services too, for `table`")
    text = "KV policies; `selection` has all and quest, `budget` chunk_topk, `triforce` verified"
    option("--policies", nargs="+", default=[], metavar="NAME", help=text)
    option(
        "--ratios", nargs="+", type=float, default=[0.02, 0.07, 0.15], metavar="SHARE",
        help="shares of the KV that a draft reads, for `selection` and `triforce`",
    )  # fmt: skip
    text = "positions that a small model keeps of a prompt, for `budget` and `triforce`"
    option("--budgets", type=_numbers, default="64,256,512,1024,2048", help=text)
    option("--rows", type=_numbers, default="8,33,64", help="rows of a step, for `attention`")
    option("--users", type=_numbers, default="1,2,4,8,16", help="requests at a time, for `load`")


def _add_temperatures(option: Any, default: list[float]) -> None:
    option(
        "--temperature", type=float, nargs="+", default=default, metavar="T", help="temperatures"
    )


def _add_prompts(option: Any) -> None:
    text = f"prompts of your own, a category a file: {PROMPT_FILE}"
    option("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help=text)


def _add_drafter(option: Any, verb: str, default: str = "", required: bool = False) -> None:
    option(
        "--drafter", action="append", required=required, default=None if required else [],
        metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help=f"drafter to {verb}; repeatable" + (f"; default: {default}" if default else ""),
    )  # fmt: skip


def _add_llama_models(option: Any) -> None:
    text = "model that llama.cpp runs; `quality` compares with the first"
    option("--llama-model", type=Path, nargs="*", default=[], metavar="GGUF", help=text)
    option("--label", help="name of the entry in the result file; default: that of the target")


def _add_weights(option: Any, default: str) -> None:
    text = f"formats of weights, separated by commas: {', '.join(_WEIGHTS)}"
    option("--weights", type=_names, default=default, help=text)


def _server(text: str) -> tuple[str, str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=http://HOST:PORT/v1")
    name, _, mode = name.partition(":")
    return name, mode or "none", url


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_WEIGHTS):
        raise argparse.ArgumentTypeError(f"unknown weights {', '.join(sorted(unknown))}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _check_options(args: argparse.Namespace) -> None:
    """Raises CommandError: an option has no effect beside the other ones, or lacks another one."""
    command = args.bench_command
    if command != "drills" and getattr(args, "target", None) is not None:
        refuse_options(args, "with --target: this command reads no prompts of it", ("models",))
    if command == "replay" and args.traces:
        refuse_options(args, "on files that are recorded already", but=("users", "output"))
    elif command == "papers":
        options = _OF_EXPERIMENTS[args.experiment]
        refuse_options(args, f"on {args.experiment}", but=(*_OF_ALL_EXPERIMENTS, *options))
    elif command == "step":
        _check_step(args)
    for needed, names in _PARTS.items():
        if not getattr(args, needed, True):
            refuse_options(args, f"without --{needed.replace('_', '-')}", names)
    programs = [name for name in _LLAMA_PROGRAMS if hasattr(args, name)]
    if getattr(args, "llama_model", None) and not any(
        getattr(args, name) or shutil.which(name.replace("_", "-")) for name in programs
    ):
        flags = " or ".join(f"--{name.replace('_', '-')}" for name in programs)
        raise CommandError(f"--llama-model needs a program of llama.cpp, and none is here: {flags}")


def _check_step(args: argparse.Namespace) -> None:
    if args.profile:
        whole = ("repeats", "synthetic", "rivals")
        refuse_options(args, "with --profile", (*whole, *_OF_RIVALS))
    if not args.rivals:
        refuse_options(args, "without --rivals", _OF_RIVALS)


def run(args: argparse.Namespace) -> int:
    # Models that run in this process get huge pages, as in the services.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _check_options(args)
    module = importlib.import_module(_MODULES[args.bench_command])
    return int(module.run(args))
