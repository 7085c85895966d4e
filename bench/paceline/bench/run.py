"""One run of the benchmark: measure, print, record."""

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console

from paceline.bench import (
    acceptance,
    budget_report,
    budgets,
    comparison,
    costs,
    coupling,
    draft,
    echo,
    load,
    load_report,
    longer,
    machine,
    prompts,
    remote,
    replay,
    report,
    selfspec,
    stretched,
    texts,
)

_WIDTH = 170  # columns where there is no terminal to ask: the widest table is shown whole


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for; write JSON to `args.output` and print tables."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    described = machine.describe()
    output: Path = args.output or Path("bench/results") / f"{described['kind']}.json"
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        bench = Bench(args, Path(scratch), console)
        results: dict[str, Any] = {
            "machine": described,
            "dtype": args.dtype,
            "longspec": digest(bench.longspec),
            "dspark": digest(bench.dspark),
            "echo_us": _spread(echo.echo_times(bench.work)),
            "echo_between_steps_us": _spread(echo.echo_times(bench.work, 200, between_steps=True)),
        }
        for part in args.part or PARTS:
            console.log(f"part {part}")
            found = PARTS[part](bench)
            if found is not None:
                results[part] = found
    report.show(results, console)
    if "load" in results:
        load_report.show(results["load"], console)
    if args.part:
        results = _with_earlier(results, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    if "load" in results:
        load_report.draw(results["load"], output.with_suffix(".svg"))
    console.print(f"written to {output}")
    if "budgets" in results:
        figure = output.with_name(f"{output.stem.removesuffix('-budgets')}-budgets.svg")
        budget_report.plot(results["budgets"]["rows"], figure)
        console.print(f"plotted to {figure}")
    return 0


@dataclass
class Bench:
    """What all parts of a run share."""

    args: argparse.Namespace
    work: Path
    console: Console

    @property
    def target(self) -> Path:
        """The demo target."""
        return Path(self.args.models) / "target"

    @property
    def small(self) -> Path | None:
        """A small model of the target's text, if there is one."""
        folder = Path(self.args.models) / "lm"
        return folder if (folder / "config.json").exists() else None

    @property
    def longspec(self) -> Path | None:
        """The LongSpec drafter, if there is one."""
        folder: Path = self.args.longspec or Path(self.args.models) / "longspec"
        return folder if (folder / "config.json").exists() else None

    @property
    def dspark(self) -> Path | None:
        """The DSpark drafter, if there is one."""
        folder = Path(self.args.models) / "dspark"
        return folder if (folder / "config.json").exists() else None

    def drafters(self) -> dict[str, str]:
        """Specifications, METHOD[:DIR][,key=value...], by name."""
        found = {"ngram": "ngram"}
        if self.small is not None:
            found["lm"] = f"lm:{self.small}"
        if self.longspec is not None:
            found["longspec"] = f"longspec:{self.longspec},target={self.target}"
        if self.dspark is not None:
            found["dspark"] = f"dspark:{self.dspark},target={self.target}"
        return found

    def wanted(self, name: str) -> bool:
        """Whether to measure this set of prompts."""
        return not self.args.set or name in self.args.set

    def texts(self) -> list[texts.Text]:
        """Long prompts of the sets asked for."""
        sets = [name for name in texts.SETS if self.wanted(name)]
        return texts.load(self.args.models, self.args.texts, sets=sets)

    def every_prompt(self) -> list[prompts.Prompt]:
        """Short prompts of all sets."""
        return prompts.load(Path(self.args.models) / "prompts", self.target)

    def prompts(self) -> list[prompts.Prompt]:
        """Those of the sets asked for."""
        return [prompt for prompt in self.every_prompt() if self.wanted(prompt.set)]


def _comparison(bench: Bench) -> dict[str, Any]:
    return _wait(
        comparison.compare(
            bench.prompts(),
            bench.target,
            bench.small,
            bench.drafters(),
            dtype=bench.args.dtype,
            tokens=bench.args.tokens,
            repeats=bench.args.repeats,
            progress=bench.console.log,
        )
    )


def _stretched(bench: Bench) -> dict[str, Any]:
    return _wait(
        stretched.measure(
            [prompt for prompt in bench.prompts() if prompt.set in stretched.SETS],
            bench.target,
            bench.longspec,
            bench.args.work or bench.work,
            tokens=bench.args.tokens,
            progress=bench.console.log,
        )
    )


def _acceptance(bench: Bench) -> dict[str, Any]:
    specs = bench.drafters()
    if "longspec" in specs:
        wide = f"widths={coupling.WIDTHS},max_nodes={coupling.NODES}"
        specs[f"longspec, {coupling.NODES} nodes"] = f"{specs['longspec']},{wide}"
    return acceptance.measure(
        bench.target,
        bench.texts(),
        specs,
        dtype=bench.args.dtype,
        tokens=texts.WRITTEN,
        progress=bench.console.log,
    )


def _coupling(bench: Bench) -> dict[str, Any] | None:
    if bench.longspec is None:
        return None
    return coupling.measure(
        bench.target,
        bench.longspec,
        bench.texts(),
        dtype=bench.args.dtype,
        tokens=texts.WRITTEN,
        progress=bench.console.log,
    )


def _draft(bench: Bench) -> dict[str, Any] | None:
    if bench.longspec is None:
        return None
    dtype, pair = bench.args.dtype, (bench.target, bench.longspec)
    contexts = draft.by_context(*pair, bench.work, dtype, repeats=bench.args.repeats)
    chosen = [prompt for prompt in bench.prompts() if prompt.set in draft.PROMPT_SETS]
    trees = draft.by_tree(*pair, chosen, dtype, progress=bench.console.log)
    return {"threads": torch.get_num_threads(), "by_context": contexts, "by_tree": trees}


def _reach(bench: Bench) -> dict[str, Any] | None:
    """What a LongSpec drafter loses, or gains, by reading a part of the target's KV."""
    if bench.longspec is None:
        return None
    spec = bench.drafters()["longspec"]
    return acceptance.measure(
        bench.target,
        bench.texts(),
        {f"reads {n or 'all'}": f"{spec},context={n}" for n in draft.REACHES},
        dtype=bench.args.dtype,
        tokens=bench.args.tokens,
        progress=bench.console.log,
    )


def _lengthened(bench: Bench) -> Path:
    return selfspec.lengthened(bench.target, bench.work / "lengthened", selfspec.CONTEXT)


def _selfspec(bench: Bench) -> dict[str, Any]:
    """Policies that choose what the target sees of itself."""
    sets = [name for name in texts.SETS if bench.wanted(name)]
    length = selfspec.CONTEXT - texts.WRITTEN
    return selfspec.accepted(
        _lengthened(bench),
        texts.load(bench.args.models, bench.args.texts, contexts=(length,), sets=sets),
        dtype=bench.args.dtype,
        tokens=texts.WRITTEN,
        progress=bench.console.log,
    )


def _collection(bench: Bench) -> dict[str, Any]:
    return selfspec.costs(_lengthened(bench), bench.args.dtype)


def _budgets(bench: Bench) -> dict[str, Any] | None:
    """What a KV budget costs, and what training under budgets gives."""
    if bench.longspec is None:
        return None
    models, dtype, work = Path(bench.args.models), bench.args.dtype, bench.args.work or bench.work
    extra = dict(spec.split("=", 1) for spec in bench.args.also)
    measured = budgets.subjects(models, {name: Path(folder) for name, folder in extra.items()})
    rows = budgets.measure(
        models, measured, work, dtype=dtype, count=bench.args.texts, progress=bench.console.log
    )
    return {"rows": rows, "spreads": budgets.spreads(rows)}


def _remote(bench: Bench) -> dict[str, Any] | None:
    """LongSpec over KV that is mapped and KV that is followed, through services."""
    if bench.longspec is None:
        return None
    models, work = Path(bench.args.models), bench.args.work or bench.work
    context = 8192
    target = longer.lengthen(models / "target", work / "remote-target", 2)
    layer = longer.lengthen(bench.longspec, work / "remote-layer", 2, target)
    return remote.measure(
        target,
        layer,
        texts.joined(models, context - 2 * budgets.WRITTEN, bench.args.texts),
        ",".join(f"{key}={value}" for key, value in budgets.TREE.items()),
        dtype=bench.args.dtype,
        tokens=budgets.WRITTEN,
        progress=bench.console.log,
    )


def _replay(bench: Bench) -> dict[str, Any]:
    return _wait(replay.measure(bench.args.work or bench.work))


def _heads(bench: Bench) -> dict[str, Any] | None:
    """Chains of a DSpark drafter and of one trained alike without heads, place by place; trees."""
    plain: Path | None = bench.args.dflash
    if bench.dspark is None or plain is None:
        return None
    folders = {"dspark": bench.dspark, "dflash": plain}
    specs = {n: f"dspark:{f},target={bench.target},widths=1" for n, f in folders.items()}
    found = acceptance.measure(
        bench.target,
        bench.texts(),
        {**specs, "dspark, trees": bench.drafters()["dspark"]},
        dtype=bench.args.dtype,
        tokens=texts.WRITTEN,
        progress=bench.console.log,
    )
    return {"weights": {name: digest(folder) for name, folder in folders.items()}, "sets": found}


def _load(bench: Bench) -> dict[str, Any]:
    """Many generations at once, drafted for by prompt lookup: it costs least beside the target."""
    wanted = [name for name in load.LOOPS if bench.wanted(name)]
    prompts_ = [prompt for prompt in bench.every_prompt() if prompt.set in load.PROMPT_SETS]
    return _wait(
        load.measure(
            prompts_,
            bench.target,
            "ngram",
            dtype=bench.args.dtype,
            loops=wanted,
            seconds=bench.args.seconds,
            repeats=bench.args.repeats,
            progress=bench.console.log,
        )
    )


def _costs(bench: Bench) -> dict[str, Any]:
    return costs.measure(bench.target, bench.args.dtype)


PARTS = {
    "echo": lambda bench: None,  # measured in every run
    "comparison": _comparison,
    "stretched": _stretched,
    "replay": _replay,
    "draft": _draft,
    "acceptance": _acceptance,
    "coupling": _coupling,
    "reach": _reach,
    "heads": _heads,
    "selfspec": _selfspec,
    "collection": _collection,
    "costs": _costs,
    "load": _load,
    "budgets": _budgets,
    "remote": _remote,
}


def _wait(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = uvloop.run(measuring)
    return found


def digest(folder: Path | None) -> str | None:
    """SHA-256 of a drafter's weights: which one the figures are of."""
    if folder is None:
        return None
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _with_earlier(results: dict[str, Any], output: Path) -> dict[str, Any]:
    """With the parts and prompt sets that this run left out, if the file has them for the same."""
    if not output.exists():
        return results
    earlier = json.loads(output.read_text())
    if any(earlier.get(key) != results[key] for key in ("machine", "dtype")):
        return results
    others = earlier.get("dspark") not in (None, results["dspark"])
    if others or earlier.get("longspec") != results["longspec"]:
        earlier = {key: value for key, value in earlier.items() if key == "replay"}
    by_set = (
        *("comparison", "stretched", "acceptance", "coupling", "reach", "selfspec"),
        "load",
    )
    merged = {k: {**earlier.get(k, {}), **results[k]} for k in by_set if k in results}
    return {**earlier, **results, **merged}


def _spread(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {
        "median": statistics.median(times),
        "p10": times[len(times) // 10],
        "p90": times[9 * len(times) // 10],
    }
