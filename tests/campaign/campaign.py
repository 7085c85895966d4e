"""`make campaign`: random texts with drafts, and beside others, have the bits of texts alone.

A case is drawn from the seed and its number. A process runs the cases of a CPU level, and the next
one those of another, so that a crash is a difference too. What was counted is kept in
`bench/results`, from where the next run goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("campaign", "verifier", "decoder", "")]

from paceline.bench.record import Results, commit  # noqa: E402
from paceline.kernels._compile import levels_here  # noqa: E402
from paceline.kernels._native import VARIABLE  # noqa: E402

FOLDER = ROOT / ".make" / "campaign"

MODEL, PROCESS = 4, 48
"""Cases of a model, and of a process."""

_HUNG = 1800  # time after which a case never ends, in seconds
_CHECKPOINT = 30.0  # time between two writes of the results, in seconds
_KEPT = 20  # differences that the results list


def work(seed: int, cases: range, folder: Path) -> None:
    """Run cases; writes a line of JSON before each, and one with what it found."""
    from engine_texts import World, run_case

    from paceline.kernels import cpu_kernels

    models, world = folder / "models", None
    models.mkdir(parents=True, exist_ok=True)
    for case in cases:
        print(json.dumps({"case": case}), flush=True)
        faulthandler.dump_traceback_later(_HUNG, exit=True)
        began, texts = time.process_time(), 0
        axes: dict[str, Counter[str]] = defaultdict(Counter)
        different: list[str] = []
        try:
            if world is None:
                world = World(models, f"{seed}/{case // MODEL}")
            for drawn, differences in run_case(world, f"{seed}/{case // MODEL}/{case % MODEL}"):
                texts += 1
                for axis, value in {**drawn, "level": cpu_kernels().level}.items():
                    axes[axis][str(value)] += 1
                if differences:
                    different.append(f"{', '.join(differences)} of text {texts}: {drawn}")
            if case % MODEL == MODEL - 1:
                world.close()
                world = None
        except Exception:
            different.append(traceback.format_exc(limit=-4))
            world = None  # it may be in any state
        found = {"axes": axes, "differences": different, "seconds": time.process_time() - began}
        print(json.dumps({"case": case, "generations": texts, **found}), flush=True)
    if world is not None:
        world.close()
    faulthandler.cancel_dump_traceback_later()


class Campaign:
    """What a seed's cases have found so far."""

    def __init__(self, seed: int, folder: Path, output: Path | None) -> None:
        """Go on from what the results have of the seed; models are kept in the folder."""
        self.seed, self.folder = seed, folder
        self._results = Results("campaign", output, weights="random, by the seed")
        self.found: dict[str, Any] = {
            "next_case": 0, "generations": 0, "different_cases": 0, "cpu_seconds": 0.0,
            "commits": {}, "differences": [], "axes": {},
        }  # fmt: skip
        earlier = self._results.entries.get(f"seed {seed}", {})
        self.found |= {name: earlier[name] for name in self.found.keys() & earlier.keys()}
        self._commit, self._written = commit() or "", time.monotonic()

    def level(self, case: int) -> str:
        """The CPU level of a case, or the one in the environment."""
        drawn = Random(f"{self.seed}/level/{case // PROCESS}").choice(levels_here())
        return os.environ.get(VARIABLE, drawn)

    def again(self, case: int) -> str:
        """The command that runs a case again."""
        own = Path(sys.executable).is_relative_to(ROOT)
        python = str(Path(sys.executable).relative_to(ROOT)) if own else "python"
        words = [python, str(Path(__file__).relative_to(ROOT)), "--seed", str(self.seed)]
        words += ["--case", str(case)]
        return f"{VARIABLE}={self.level(case)} {shlex.join(words)}"

    def add(self, line: dict[str, Any]) -> None:
        """Count a case, and print its differences with the command that shows them again."""
        found, case, texts = self.found, line["case"], line["generations"]
        found["next_case"] = max(found["next_case"], case + 1)
        found["generations"] += texts
        found["cpu_seconds"] = round(found["cpu_seconds"] + line["seconds"], 1)
        found["commits"][self._commit] = found["commits"].get(self._commit, 0) + texts
        for axis, values in line["axes"].items():
            known = found["axes"].setdefault(axis, {})
            for value, count in values.items():
                known[value] = known.get(value, 0) + count
        if line["differences"]:
            command, first = self.again(case), line["differences"][0]
            found["different_cases"] += 1
            found["differences"] = [*found["differences"], f"{command}: {first}"][:_KEPT]
            print(f"case {case} has {len(line['differences'])} differences; the first: {first}")
            print(f"again:\n    {command}", flush=True)

    def save(self, *, now: bool = False) -> None:
        """Write what was found, if that is long ago."""
        if not now and time.monotonic() < self._written + _CHECKPOINT:
            return
        self._written = time.monotonic()
        axes = {a: dict(sorted(v.items())) for a, v in sorted(self.found["axes"].items())}
        command = f"python tests/campaign/campaign.py --seed {self.seed}"
        entry = {"command": command, **self.found, "axes": axes}
        self._results.add(f"seed {self.seed}", entry)


def run(campaign: Campaign, cases: range, worker: Sequence[str], *, kept: bool) -> None:
    """Run cases in a process, and count what they find; ``kept``: write it too."""
    words = [*worker, "--seed", str(campaign.seed), "--folder", str(campaign.folder)]
    words += ["--work", f"{cases.start}:{cases.stop}"]
    environment = {**os.environ, VARIABLE: campaign.level(cases.start)}
    # Threads that wait sleep: in the background they would spin for one that does not run.
    environment |= {"OMP_WAIT_POLICY": "passive", "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    running: int | None = None
    try:
        for text in process.stdout:
            if not text.startswith('{"case"'):
                continue  # of a library
            line = json.loads(text)
            running = line["case"] if len(line) == 1 else None
            if running is None:
                campaign.add(line)
                if kept:
                    campaign.save()
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if running is not None:
        ended = [f"the process ended with status {status}"]
        campaign.add(
            {"case": running, "generations": 0, "axes": {}, "seconds": 0, "differences": ended}
        )
    elif status:
        raise RuntimeError(f"the process ended with status {status} before its first case")


def main(
    arguments: Sequence[str] | None = None, worker: Sequence[str] = (sys.executable, __file__)
) -> int:
    """Run a campaign; 1 if anything ever differed, else 0. ``worker`` is the command of its
    processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, help="end after so long; else at Ctrl-C or SIGTERM"
    )
    parser.add_argument("--generations", type=int, help="end once the seed has so many")
    parser.add_argument("--case", type=int, help="run this case alone, and write nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the models")
    parser.add_argument("--output", type=Path, help="another file of results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cases = None if args.case is None else range(args.case, args.case + 1)
    if args.work:
        work(args.seed, range(*map(int, args.work.split(":"))), args.folder)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(args.seed, args.folder, args.output)
    found, began = campaign.found, time.monotonic()
    if cases is not None:
        found |= {"differences": [], "different_cases": 0}
        run(campaign, cases, worker, kept=False)
        return int(found["different_cases"] > 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while not _over(args, found, began):
            first = found["next_case"]
            run(campaign, range(first, (first // PROCESS + 1) * PROCESS), worker, kept=True)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        campaign.save(now=True)
    print(
        f"seed {args.seed}: {found['generations']} generations in {found['cpu_seconds']:.0f} s of "
        f"processor time, {found['different_cases']} cases with differences"
    )
    return int(found["different_cases"] > 0)


def _over(args: argparse.Namespace, found: dict[str, Any], began: float) -> bool:
    late = args.minutes is not None and time.monotonic() > began + 60 * args.minutes
    return late or (args.generations is not None and found["generations"] >= args.generations)


if __name__ == "__main__":
    sys.exit(main())
