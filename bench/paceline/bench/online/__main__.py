"""Learning from traffic on a new workload, measured.

    python -m paceline.bench.online

Prompts come from an installed package that neither target nor drafter was trained on. A drafter
service records what is generated for some of its files; the drafter is trained further on that,
loaded beside itself, tried out and promoted. Accepted length is measured before and after, on other
files of the package and on the old workload. Prints the commands as it goes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench import machine, texts
from paceline.bench.docs.markdown import interval
from paceline.bench.figures import accepted_length
from paceline.bench.online.steps import HEATS, Loop
from paceline.bench.online.workload import of_package
from paceline.bench.served import Services
from paceline.bench.texts import Text

_TRIAL_SHARE = 0.5
_TRIAL_BATCH = 16  # generations between two looks at the trial
_TRIAL_MOST = 512
_TRIAL_PROMPTS = 128  # that were not recorded


def main() -> int:
    """Run the loop; 0 when the new version was promoted."""
    args = _arguments()
    console = Console(soft_wrap=True, highlight=False)
    work = args.work.resolve()
    target, start = args.models / "target", args.models / args.method
    workload = of_package(
        args.package, args.files, target, args.texts + _TRIAL_PROMPTS, args.measured
    )
    old = texts.load(args.models, args.measured, (300,), ("heldout",))
    options = "" if args.method == "lm" else f",target={target}"
    load = [f"{args.method}={args.method}:{start}{options}"]
    recording = ["--record", str(work / "texts"), "--root", str(work), "--root", str(args.models)]
    with Services(target, load, "bfloat16", *recording) as services:
        loop = Loop(services, args.method, target, start, work, console.log)
        if _recorded(loop.recordings) < args.texts // 2:
            console.log(f"recording {args.texts} generations after prompts from {args.package}")
            loop.generate(workload.traffic[: args.texts], args.tokens, args.method)
        loop.train(args.minutes)
        loop.calibrate()
        loop.load()
        console.log("measuring both versions")
        measured = {
            kind: _compare(loop, prompts, args.tokens)
            for kind, prompts in ((args.package, workload.heldout), ("old workload", old))
        }
        loop.try_out(_TRIAL_SHARE)
        trial = _wait_for_verdict(loop, workload.traffic[args.texts :], args.tokens)
    run = {
        "package": args.package,
        "files": args.files,
        "prompt_tokens": len(workload.traffic[0].tokens),
        "new_tokens": args.tokens,
        "training": json.loads((loop.out / "config.json").read_text())["paceline"]["training"],
        "accepted_length": measured,
        "trial": trial,
    }
    output = _record(args.method, run, args.output)
    console.print(_table(measured))
    console.print(f"{_told(trial)}\nwritten to {output}")
    return 0 if trial["state"] == "promoted" else 1


def _record(method: str, run: dict[str, Any], output: Path | None) -> Path:
    """Write what a run found beside those of other drafters on this machine."""
    described = machine.describe()
    output = output or Path("bench/results") / f"{described['kind']}-online.json"
    earlier = json.loads(output.read_text()) if output.is_file() else {}
    drafters = earlier.get("drafters", {}) if earlier.get("machine") == described else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": described, "drafters": {**drafters, method: run}}
    output.write_text(json.dumps(results, indent=1) + "\n")
    return output


def _compare(loop: Loop, prompts: Sequence[Text], tokens: int) -> dict[str, Any]:
    """Figures of both versions on the same prompts, by temperature; texts must be the same."""
    versions = {
        name: loop.generate(prompts, tokens, f"{loop.method}@{version}")
        for name, version in (("before", "1"), ("after", "2"))
    }
    before, after = ([ids for ids, _ in found] for found in versions.values())
    if before != after:
        raise RuntimeError("two versions of a drafter gave different tokens")
    return {
        f"T={heat:g}": {
            name: accepted_length([rounds for _, rounds in found[place :: len(HEATS)]])
            for name, found in versions.items()
        }
        for place, heat in enumerate(HEATS)
    }


def _wait_for_verdict(loop: Loop, prompts: Sequence[Text], tokens: int) -> dict[str, Any]:
    """Generate until the trial of version 2 is over; where it stands then."""
    for begin in range(0, _TRIAL_MOST, _TRIAL_BATCH):
        batch = [prompts[(begin + n) % len(prompts)] for n in range(_TRIAL_BATCH)]
        loop.generate(batch, tokens, loop.method, seed=begin)
        trial = loop.trial()
        loop.say(_told(trial))
        if trial["state"] != "running":
            break
    return trial


def _told(trial: dict[str, Any]) -> str:
    new, old = trial["candidate_figures"], trial["baseline_figures"]
    return (
        f"trial {trial['state'].replace('_', ' ')}: {new['generations']} generations of the new "
        f"version and {old['generations']} of the old one, {new['accepted_length']:.2f} and "
        f"{old['accepted_length']:.2f} drafted tokens a round"
    )


def _recorded(folder: Path) -> int:
    """Texts that are there by now."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))


def _table(measured: dict[str, Any]) -> Table:
    table = Table(title="accepted length, bonus included (95% interval over texts)")
    for heading in ("prompts", "temperature", "before", "after"):
        table.add_column(heading)
    for kind, heats in measured.items():
        for heat, versions in heats.items():
            table.add_row(kind, heat.removeprefix("T="), *map(interval, versions.values()))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", type=Path, default=Path("models/demo"), help="demo models")
    add("--method", default="lm", choices=("longspec", "dspark", "lm"))
    add("--package", default="torch", help="installed, and not part of Python")
    add("--files", default="*.h", help="which of its files (default: %(default)s)")
    add("--texts", type=int, default=240, metavar="N", help="generations to record")
    add("--measured", type=int, default=32, metavar="N", help="prompts of each kind to measure on")
    add("--tokens", type=int, default=160, metavar="N", help="new tokens of each")
    add("--minutes", type=float, default=5.0, metavar="M", help="of training")
    add("--work", type=Path, required=True, help="folder for texts, training and the new version")
    add("--output", type=Path, help="default: bench/results/MACHINE-online.json")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
