"""Options of `paceline bench`; each sub-command is a module with `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from paceline.harness import PROMPT_FILE
from paceline.harness.models import model_path

_MODULES = {
    "table": "paceline.bench.table.run",
    "server": "paceline.bench.server",
    "load": "paceline.bench.load.run",
    "controller": "paceline.bench.controller",
    "replay": "paceline.bench.replay",
    "step": "paceline.bench.step.run",
    "quality": "paceline.bench.quality",
    "drills": "paceline.bench.drills.run",
}

_WEIGHTS = ("float32", "bfloat16", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")

    def add(name: str, text: str, tokens: int = 0, repeats: int = 0) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        option = sub.add_argument
        option("--models", type=Path, default=Path("models/demo"), help="drafters and prompts")
        option("--target", type=model_path, help="model or its name; default: MODELS/target")
        option("--output", type=Path, help=f"default: bench/results/MACHINE-{name}.json")
        if tokens:
            option("--tokens", type=int, default=tokens, help="new tokens a prompt")
        if repeats:
            option("--repeats", type=int, default=repeats, help="times that all is measured")
        return sub

    def add_dtype(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))

    table = add("table", "decoding speed of all drafters beside transformers", 64, 1)
    add_dtype(table)
    _add_prompts(table, texts=3)
    table.add_argument(
        "--context", type=int, nargs="+", default=[1024, 4096, 16_384], metavar="N",
        help="tokens of prompt and text; a longer context than the target's scales RoPE by YaRN",
    )  # fmt: skip
    server = add("server", "whole requests beside a server with OpenAI's interface", 256, 1)
    add_dtype(server)
    _add_prompts(server, texts=8)
    server.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    server.add_argument("--label", default="server", help="its name in the results")
    server.add_argument("--server-model", metavar="NAME", help="default: the first that it lists")
    server.add_argument("--key-file", type=Path, metavar="FILE", help="holds its API key")
    load = add("load", "many requests at once, with the scheduler and without", repeats=3)
    _add_format(load)
    load.add_argument("--drafter", default="ngram", help="name of a drafter of MODELS")
    load.add_argument(
        "--set", nargs="+", default=["heldout", "trained", "copying"], help="prompt sets, in turn"
    )
    load.add_argument(
        "--concurrency", type=int, nargs="*", default=[1, 4, 16, 64], help="requests at a time"
    )
    load.add_argument(
        "--request-rate",
        type=float,
        nargs="*",
        default=[],
        help="requests a second, at random times",
    )
    load.add_argument("--requests", type=int, default=12, help="of a window at a concurrency")
    load.add_argument("--seconds", type=float, default=8.0, help="of a window at a request rate")
    controller = add("controller", "whether the verifier finds where drafting pays", 192, 3)
    _add_format(controller)
    controller.add_argument("--drafter", default="ngram", help="METHOD[:DIR][,KEY=VALUE...]")
    controller.add_argument(
        "--users", type=int, nargs="+", default=[1, 8], help="generations at a time"
    )
    replay = add("replay", "the services apart from any drafter", 256)
    _add_format(replay)
    replay.add_argument("--acceptance", type=float, default=0.8, help="of each drafted token")
    replay.add_argument("--nodes", type=int, default=8, help="nodes of a tree")
    replay.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    step = add("step", "a decoder step by rows and context beside its roofline", repeats=5)
    _add_weights(step, "bfloat16")
    step.add_argument("--rows", type=_numbers, default="1,8,33,64,256", help="rows of a step")
    step.add_argument("--contexts", type=_numbers, default="128,2048,6144", help="tokens before it")
    step.add_argument("--rivals", action="store_true", help="other engines in the same run")
    step.add_argument("--llama-bench", metavar="PROGRAM", help="default: from PATH")
    step.add_argument("--openvino-python", metavar="PROGRAM", help="Python with openvino-genai")
    step.add_argument("--openvino-model", type=Path, metavar="GGUF", help="for OpenVINO")
    quality = add("quality", "what quantised weights and KV change in a model's predictions")
    _add_weights(quality, "int8,int4")
    quality.add_argument(
        "--kv-cache-dtype", nargs="*", default=["int8"], choices=("float32", "int8"),
        help="types of KV, behind weights in bfloat16",
    )  # fmt: skip
    quality.add_argument("--windows", type=int, default=8, help="pieces of text")
    quality.add_argument("--gguf", type=Path, nargs="*", default=[], help="targets to measure too")
    quality.add_argument("--llama-perplexity", metavar="PROGRAM", help="default: from PATH")
    for sub in (step, quality):
        sub.add_argument("--label", help="the entry of the result file; default: the target's name")
        sub.add_argument(
            "--llama-model", type=Path, nargs="*", default=[], metavar="GGUF",
            help="for llama.cpp; `quality` compares with the first",
        )  # fmt: skip
    drills = add("drills", "inject faults under load and check what must hold")
    drills.add_argument("drill", nargs="*", metavar="DRILL", help="name, in quotes; default: all")
    drills.add_argument("--short", action="store_true", help="fewer and smaller: minutes")


def _add_prompts(parser: argparse.ArgumentParser, texts: int) -> None:
    parser.add_argument("--texts", type=int, default=texts, help="prompts of each file or length")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help=f"prompts of your own: {PROMPT_FILE}",
    )  # fmt: skip


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="bfloat16", choices=_WEIGHTS, help="of the target")


def _add_weights(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--weights", type=_names, default=default, help=f"{', '.join(_WEIGHTS)}; by commas"
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_WEIGHTS):
        raise argparse.ArgumentTypeError(f"unknown weights {', '.join(sorted(unknown))}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns its exit code."""
    # Models that run in this process get huge pages, as in the services.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    module = importlib.import_module(_MODULES[args.bench_command])
    return int(module.run(args))
