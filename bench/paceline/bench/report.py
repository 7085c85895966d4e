"""Tables of a run for the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench import accepted, budget_report
from paceline.bench.table.show import show as show_table


def show(results: dict[str, Any], console: Console) -> None:
    """Print what `paceline bench` wrote as JSON."""
    if "table" in results:
        show_table(results["table"], console)
    for part, title in (("comparison", "prompts: {}"), ("stretched", "stretched target, {}")):
        if part in results:
            for name, modes in results[part].items():
                console.print(_comparison(title.format(name), modes))
            console.print(_rounds(results[part], results))
    if "stretched" in results:
        console.print(_STRETCHED)
    if "acceptance" in results:
        console.print(accepted.lengths(results["acceptance"]))
        console.print(accepted.positions(results["acceptance"]))
    if "coupling" in results:
        console.print(accepted.coupling(results["coupling"]))
    if "heads" in results:
        console.print(accepted.lengths(results["heads"]["sets"]))
        console.print(accepted.conditional(results["heads"]["sets"]))
    if "reach" in results:
        console.print(accepted.lengths(results["reach"]))
    if "selfspec" in results:
        console.print(accepted.policies(results["selfspec"]))
    if "collection" in results:
        console.print(_collection(results["collection"]))
    if "budgets" in results:
        console.print(budget_report.table(results["budgets"]["rows"]))
    if "remote" in results:
        console.print(budget_report.remote_table(results["remote"]))
    if "replay" in results:
        console.print(_replay(results["replay"]))
    if "draft" in results:
        console.print(_draft_by_context(results["draft"]))
        console.print(_draft_by_tree(results["draft"]))
    if results.get("longspec") is None:
        console.print("There is no LongSpec drafter here: its rows and tables are left out.")


_STRETCHED = (
    "A stretched target is the demo target with added layers and feed-forward columns whose output "
    "weights are zero: it computes\nthe same function, so it writes the same text and accepts the "
    "same trees, at what a step of a 0.4B model costs.\n"
)


def _comparison(title: str, modes: dict[str, Any]) -> Table:
    table = Table(title=title)
    if not any(mode.startswith("transformers") for mode in modes):
        table.caption = "sampled: transformers, with other noise, would write another text"
    for heading in (
        *("mode", "tokens/s", "x transformers", "x plain", "while drafting"),
        *("rounds with a tree", "accepted", "drafted", "identical"),
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, figures in modes.items():
        against, drafting, length = (
            f"{figures[key]:.{digits}f}" if key in figures else ""
            for key, digits in (
                ("against_transformers_greedy", 2),
                ("tokens_per_second_while_drafting", 1),
                ("accepted_length", 2),
            )
        )
        served = mode.startswith("paceline")
        table.add_row(
            mode,
            f"{figures['tokens_per_second']:.1f}",
            against,
            f"{figures['against_paceline_none']:.2f}",
            drafting,
            f"{figures['drafted_rounds']} of {figures['rounds']}" if served else "",
            length,
            f"{figures['drafted_share']:.0%}" if served else "",
            ("yes" if figures["identical_to_paceline_none"] else "NO") if served else "",
        )
    return table


def _rounds(part: dict[str, Any], results: dict[str, Any]) -> Table:
    echo = results["echo_us"]["median"] / 1e3
    cold = results["echo_between_steps_us"]["median"] / 1e3
    table = Table(
        title=f"one drafted round, median ms (a bare echo: {echo:.3f} ms back to back, "
        f"{cold:.3f} ms between steps)",
        caption="round = draft + queue + verify + transport; client: its own time between rounds",
    )
    columns = ("draft_ms", "queue_ms", "verify_ms", "transport_ms", "client_ms", "round_ms")
    table.add_column("prompts")
    table.add_column("drafter")
    for column in (*columns, "overhead_ms", "overhead / 2 echoes"):
        table.add_column(column.removesuffix("_ms"), justify="right")
    for name, modes in part.items():
        for mode, figures in modes.items():
            if "round" in figures:
                split = figures["round"]
                cells = [f"{split[column]:.3f}" for column in (*columns, "overhead_ms")]
                table.add_row(name, mode, *cells, f"{split['overhead_ms'] / (2 * echo):.2f}")
    return table


def _replay(figures: dict[str, Any]) -> Table:
    table = Table(title="the system apart from any drafter: 0.5B shape, bf16, replayed text")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        table.add_row(
            key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value)
        )
    return table


def _collection(figures: dict[str, Any]) -> Table:
    rows, attention = figures["collection"], figures["attention"]
    table = Table(
        title=f"what noting scores adds to a verification of {figures['drafted'] + 1} rows, "
        f"processor time, {figures['threads']} threads",
        caption=f"a drafted token's attention at {attention['context']:,} tokens: "
        f"{attention['positions']} positions take {attention['share']:.1%} of all",
    )
    names = [name for name in rows[0] if name not in ("context", "verify_ms")]
    for heading in ("context", "verify ms", *names):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{row[name]:+.1%}" for name in names)
        table.add_row(f"{row['context']:,}", f"{row['verify_ms']:.2f}", *shares)
    return table


def _draft_by_context(figures: dict[str, Any]) -> Table:
    rows = figures["by_context"]
    table = Table(
        title=f"longspec by context, {rows[0]['nodes']} nodes, {figures['threads']} threads, "
        "median ms, no services between"
    )
    for heading in ("context", "draft", "reading all", "target", "settle"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = ("draft_ms", "draft_all_ms", "target_ms", "settle_ms")
        table.add_row(f"{row['context']:,}", *(f"{row[name]:.2f}" for name in times))
    return table


def _draft_by_tree(figures: dict[str, Any]) -> Table:
    table = Table(title="longspec by tree, mean ms, no services between")
    for heading in ("T", "prompts", "widths"):
        table.add_column(heading)
    for heading in ("most nodes", "accepted", "draft", "target", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in figures["by_tree"]:
        table.add_row(
            row["temperature"],
            row["prompts"],
            row["widths"],
            str(row["max_nodes"]),
            *(f"{row[name]:.2f}" for name in ("accepted_length", "draft_ms", "target_ms")),
            f"{row['tokens_per_second']:.1f}",
        )
    return table
