"""The parts of the benchmark: what each measures, and which result file it belongs to."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop
from tokenizers import Tokenizer

from paceline.bench import (
    acceptance,
    budgets,
    comparison,
    costs,
    coupling,
    draft,
    longer,
    remote,
    replay,
    rival,
    selfspec,
    stretched,
    table,
    texts,
)
from paceline.bench.load import turns
from paceline.bench.load.workload import LOOPS, WORKLOADS, Workload
from paceline.bench.record import digest
from paceline.bench.setting import Bench
from paceline.harness import read_prompts


@dataclass(frozen=True)
class Part:
    """What a part measures (None: what it needs is not there), and its file's topic."""

    measure: Callable[[Bench], dict[str, Any] | None]
    topic: str


def _comparison(bench: Bench) -> dict[str, Any]:
    return _wait(
        comparison.compare(
            bench.prompts(),
            bench.target,
            bench.small,
            bench.drafters(),
            dtype=bench.args.dtype,
            tokens=bench.tokens,
            repeats=bench.repeats,
            progress=bench.console.log,
        )
    )


def _stretched(bench: Bench) -> dict[str, Any]:
    return _wait(
        stretched.measure(
            [prompt for prompt in bench.prompts() if prompt.set in stretched.SETS],
            bench.target,
            bench.longspec,
            bench.work,
            tokens=bench.tokens,
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
    contexts = draft.by_context(*pair, bench.work, dtype, repeats=bench.repeats)
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
        tokens=bench.tokens,
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
        texts.load(bench.models, bench.each, contexts=(length,), sets=sets),
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
    models, dtype, work = bench.models, bench.args.dtype, bench.work
    extra = dict(spec.split("=", 1) for spec in bench.args.also)
    measured = budgets.subjects(models, {name: Path(folder) for name, folder in extra.items()})
    rows = budgets.measure(
        models, measured, work, dtype=dtype, count=bench.each, progress=bench.console.log
    )
    return {"rows": rows, "spreads": budgets.spreads(rows)}


def _remote(bench: Bench) -> dict[str, Any] | None:
    """LongSpec over KV that is mapped and KV that is followed, through services."""
    if bench.longspec is None:
        return None
    models, work = bench.models, bench.work
    context = 8192
    target = longer.lengthen(models / "target", work / "remote-target", 2)
    layer = longer.lengthen(bench.longspec, work / "remote-layer", 2, target)
    return remote.measure(
        target,
        layer,
        texts.joined(models, context - 2 * budgets.WRITTEN, bench.each),
        ",".join(f"{key}={value}" for key, value in budgets.TREE.items()),
        dtype=bench.args.dtype,
        tokens=budgets.WRITTEN,
        progress=bench.console.log,
    )


def _replay(bench: Bench) -> dict[str, Any]:
    return _wait(replay.measure(bench.work))


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


def _load(workload: Workload, bench: Bench) -> dict[str, Any] | None:
    """Many generations at once."""
    if workload.drafter not in bench.drafters():
        return None
    return _wait(
        turns.measure(
            workload,
            [prompt for prompt in bench.every_prompt() if prompt.set in workload.sets],
            bench.target,
            bench.drafters()[workload.drafter],
            dtype=bench.args.dtype,
            loops=[name for name in LOOPS if bench.wanted(name)],
            seconds=bench.args.seconds,
            repeats=bench.repeats,
            progress=bench.console.log,
        )
    )


def _server(bench: Bench) -> dict[str, Any] | None:
    """Another server, if one is named."""
    if bench.args.server is None:
        return None
    file: Path | None = bench.args.server_key_file
    encoded = Tokenizer.from_file(str(bench.target / "tokenizer.json"))
    own = [entry for prompts in bench.args.prompts for entry in read_prompts(prompts)[: bench.each]]
    asked = own or [prompt.tokens for prompt in bench.prompts() if prompt.set == "heldout"]
    return _wait(
        rival.measure(
            bench.args.server,
            file.read_text(encoding="utf-8").strip() if file is not None else "none",
            bench.args.server_model,
            bench.target,
            bench.drafters(),
            [entry if isinstance(entry, str) else encoded.decode(entry) for entry in asked],
            dtype=bench.args.dtype,
            tokens=bench.tokens,
            repeats=bench.repeats,
            progress=bench.console.log,
        )
    )


def _costs(bench: Bench) -> dict[str, Any]:
    return costs.measure(bench.target, bench.args.dtype)


PARTS = {
    "table": Part(table.run, "table"),
    "comparison": Part(_comparison, "longspec"),
    "stretched": Part(_stretched, "longspec"),
    "acceptance": Part(_acceptance, "longspec"),
    "coupling": Part(_coupling, "longspec"),
    "draft": Part(_draft, "draft"),
    "reach": Part(_reach, "draft"),
    "heads": Part(_heads, "dspark"),
    "selfspec": Part(_selfspec, "selfspec"),
    "collection": Part(_collection, "selfspec"),
    "costs": Part(_costs, "load"),
    **{name: Part(partial(_load, each), "load") for name, each in WORKLOADS.items()},
    "budgets": Part(_budgets, "budgets"),
    "remote": Part(_remote, "budgets"),
    "replay": Part(_replay, ""),
    "server": Part(_server, "server"),
}


def _wait(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = uvloop.run(measuring)
    return found
