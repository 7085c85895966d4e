"""`paceline bench`: side-by-side measurements on this machine."""

import argparse
import os
from pathlib import Path

from paceline.harness import PROMPT_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline bench`."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("measure", "report", "docs"),
        default="measure",
        help="measure (the default); report: make one HTML file of what was recorded; docs: write "
        "the recorded figures into README and docs",
    )
    parser.add_argument(
        "--check", action="store_true", help="with docs: change nothing, fail where figures differ"
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=(
            *("table", "comparison", "stretched", "acceptance", "coupling", "draft", "reach"),
            *("heads", "selfspec", "collection", "costs", "budgets", "remote", "replay", "server"),
            *("load", "load-copying", "load-longspec"),
        ),
        help="measure only this part (repeatable), and keep the others of its file; default: all",
    )
    parser.add_argument(
        "--set",
        action="append",
        help="measure only this set of prompts, this loop of the load, or this group of the table "
        "(repeatable)",
    )
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="demo models")
    parser.add_argument(
        "--longspec", type=Path, help="LongSpec drafter of the target; default: MODELS/longspec"
    )
    parser.add_argument(
        "--dflash", type=Path, help="for heads: the demo's DSpark drafter trained without them"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the target: bfloat16 or float32")
    parser.add_argument(
        "--tokens", type=int, help="new tokens a prompt (default: 64 for the table, else 256)"
    )
    parser.add_argument("--repeats", type=int, help="passes over the prompts (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="window of each open loop of the load"
    )
    parser.add_argument(
        "--texts", type=int, help="most long prompts of each set and context length (default: 4)"
    )
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=DIR",
        help="another drafter of the target, longspec or lm, for the part `budgets` (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, action="append", default=[], metavar="FILE",
        help=f"for the table, prompts of your own (repeatable): {PROMPT_FILE}",
    )  # fmt: skip
    parser.add_argument(
        "--package", metavar="NAME",
        help="for the table, make long prompts of this installed package's source",
    )  # fmt: skip
    parser.add_argument(
        "--server", metavar="URL",
        help="measure the server with OpenAI's interface at this address, such as "
        "http://127.0.0.1:8000/v1, beside Paceline (the part `server`, by itself unless others are "
        "named)",
    )  # fmt: skip
    parser.add_argument("--server-model", metavar="NAME", help="default: the first that it lists")
    parser.add_argument("--server-key-file", type=Path, metavar="FILE", help="holds its API key")
    parser.add_argument("--work", type=Path, help="keep the made-up large targets here")
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file (default: one for each topic in bench/results), or of report the HTML file",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or write what was measured; 0 when all is well."""
    if args.action == "docs":
        from paceline.bench.docs.run import run as write

        return write(Path(), check=args.check)
    if args.action == "report":
        from paceline.bench.page.write import report

        return report(Path(), args.output or Path("bench-report.html"))
    # Models that run in this process get huge pages, as in the services.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from paceline.bench.run import run as measure

    return measure(args)
