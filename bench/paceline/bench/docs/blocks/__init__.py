"""What documents may hold, by name: each block is made of recorded results alone."""

from collections.abc import Callable

from paceline.bench.docs.blocks import dspark, load, longspec, sparse, table, training
from paceline.bench.docs.results import Results

BLOCKS: dict[str, Callable[[Results], str]] = {
    "machine": table.machine,
    "table": table.whole,
    "table-summary": table.summary,
    "load-facts": load.facts,
    "load-closed": load.closed,
    "load-window": load.window,
    "load-paying": load.paying,
    "load-open": load.opened,
    "calibration": dspark.calibration,
    "heads": dspark.heads,
    "longspec-accepted": longspec.accepted,
    "longspec-coupling": longspec.coupling,
    "longspec-stretched": longspec.stretched,
    "longspec-round": longspec.stretched_round,
    "longspec-demo": longspec.demo,
    "longspec-demo-round": longspec.demo_round,
    "collection": sparse.collection,
    "selection": sparse.selection,
    "two-rows": sparse.two_rows,
    "policies": sparse.policies,
    "budgets": sparse.budgets,
    "flatness": sparse.flatness,
    "remote": sparse.remote,
    "budget-training": training.budgets,
    "online": training.online,
    "online-run": training.online_run,
    "telemetry-cost": training.telemetry,
}
