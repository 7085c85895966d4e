"""`paceline drafters`: manages the drafters of a running drafter service, inspects folders."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from google.protobuf.message import Message
from rich.table import Table

from paceline.cli.command import CommandError, exit_with, refuse_options
from paceline.cli.connection import add_connection_arguments, client_of, tls_of, verifier_address
from paceline.cli.output import WIDE, Output
from paceline.cli.progress import waiting
from paceline.client import (
    Client,
    Connections,
    DraftOptions,
    PacelineError,
    RetryOptions,
    RoundStats,
    UnavailableError,
    addresses_of,
    parse_addresses,
    rpc_errors,
)
from paceline.harness import read_prompts
from paceline.harness.models import MODEL, is_model_name, local_model, model_path
from paceline.service.options import OptionsError, read_token
from paceline.tokens import is_local
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

_CHECK_TOKENS = 32  # new tokens of each prompt of a check

_CHECK_TIMEOUT = 30.0  # maximum wait for a tree in a check, in seconds; speed is not judged

Call = Callable[[str, Message], Awaitable[Any]]  # the registry's RPC of a name, with a request


def drafter_address() -> str:
    return os.environ.get("PACELINE_DRAFTER_ADDRESS") or "127.0.0.1:7432"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="ACTION", required=True)

    _add(commands, "list", "show all loaded versions, and the verifiers joined", _list)

    load = _add(commands, "load", "load a version next to those that are loaded", _load)
    load.add_argument("name", help="name that clients ask for")
    load.add_argument("method", help="drafting method, such as ngram, lm or dspark")
    load.add_argument("folder", nargs="?", default="", help="model folder on the service's machine")
    load.add_argument(
        "--version", default="", help="name of the version (default: the service numbers it)"
    )
    load.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="setting of the method; repeatable",
    )
    load.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help='first generate for these prompts, JSON lines with "prompt" or "text", with this '
        "version and the verifier; unload it if it fails",
    )
    load.add_argument(
        "--verifier-address",
        default=verifier_address(),
        metavar="A",
        help="address of the verifier for --check (default: %(default)s)",
    )
    load.add_argument("--activate", action="store_true", help="send all new generations to it")

    activate = _add(commands, "activate", "send new generations to a version", _activate)
    activate.add_argument("name", help="name of the drafter")
    activate.add_argument("version", help="version that gets new generations")
    activate.add_argument(
        "--share",
        type=float,
        default=1.0,
        metavar="S",
        help="share of new generations that it gets, in (0, 1]",
    )

    help = "undo the last activation; a second call undoes the first"
    rollback = _add(commands, "rollback", help, _rollback)
    rollback.add_argument("name", help="name of the drafter")

    help = "remove a version once its generations have ended"
    unload = _add(commands, "unload", help, _unload, prints=False)
    unload.add_argument("name", help="name of the drafter")
    unload.add_argument("version", nargs="?", default="", help="version to remove (default: all)")
    unload.add_argument("--force", action="store_true", help="do not wait for its generations")

    help = "tell what a drafter's folder is, and whether it fits a target; needs no service"
    inspect = commands.add_parser("inspect", help=help, description=help)
    help = f"folder of a drafter, or a small model: {MODEL}"
    inspect.add_argument("folder", type=model_path, metavar="FOLDER", help=help)
    inspect.add_argument("--target", type=local_model, metavar="MODEL", help=MODEL)
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.set_defaults(action=None)


def run(args: argparse.Namespace) -> int:
    """Call every registry; fails with code 1 if one refuses, 2 for bad arguments."""
    if args.action is None:
        return _inspect(args)
    if getattr(args, "check", None) is None:
        refuse_options(args, "without --check", ("verifier_address",))
    with exit_with(2, OptionsError, PacelineError):
        asyncio.run(_call_all(args))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    """Print facts about a folder, and what is wrong with it; returns 1 if anything is."""
    from paceline.drafter.inspection import inspect_drafter

    if not (args.folder.is_file() or (args.folder / "config.json").is_file()):
        what = "it has no config.json" if args.folder.is_dir() else "there is no such path"
        raise CommandError(
            f"{args.folder} is no drafter: {what}; give a drafter's folder, or a {MODEL}"
        )
    with exit_with(2, OSError, ValueError), waiting(lambda: f"reading {args.folder}"):
        inspection = inspect_drafter(args.folder, args.target)
    if args.json:
        print(json.dumps({**inspection.facts, "problems": inspection.problems}, indent=2))
        return int(bool(inspection.problems))
    table = Table(show_header=False, box=None)
    for name, value in inspection.facts.items():
        table.add_row(name, value)
    Output(width=WIDE).print(table)  # paths are not cut
    for problem in inspection.problems:
        print(f"does not fit: {problem}")
    return int(bool(inspection.problems))


async def _call_all(args: argparse.Namespace) -> None:
    """Run the action with the service at each address of the list."""
    connections = Connections(read_token(args.token_file), tls_of(args))
    with exit_with(1, OSError):
        resolved = [await addresses_of(entry) for entry in parse_addresses(args.address, "drafter")]
    services = {address: name for names in resolved for address, name in names.items()}
    for address in services:
        connections.check(address)
    failures = []
    for address, name in services.items():
        if len(services) > 1:
            print(f"{address}:", flush=True)
        service_args = argparse.Namespace(**{**vars(args), "address": address})
        try:
            async with connections.channel(address, name) as channel:
                metadata = connections.metadata(address)
                await args.action(service_args, partial(_call, channel, metadata, service_args))
        except CommandError as error:
            failures.append(error)
        except PacelineError as error:
            reason = f" [{error.reason}]" if error.reason else ""
            failures.append(CommandError(f"{address}: {error.message}{reason}", 1))
    if failures:
        raise CommandError("\n".join(map(str, failures)), failures[0].code)


async def _call(
    channel: Any, metadata: Any, args: argparse.Namespace, rpc: str, request: Message
) -> Any:
    with rpc_errors("drafter", args.address):
        method = getattr(drafter_pb2_grpc.DrafterRegistryServiceStub(channel), rpc)
        return await method(request, metadata=metadata, timeout=args.timeout)


def _add(
    commands: Any,
    name: str,
    help: str,
    action: Callable[..., Awaitable[None]],
    *,
    prints: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.add_argument(
        "--address",
        default=drafter_address(),
        help="address of the drafter service, or of several: a list with commas, or "
        "dns:///name:port for all addresses of a name (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="maximum wait for an answer (default: %(default)s)",
    )
    add_connection_arguments(parser)
    if prints:
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(action=action)
    return parser


async def _list(args: argparse.Namespace, call: Call) -> None:
    try:
        listed = await call("ListDrafters", drafter_pb2.ListDraftersRequest())
    except UnavailableError:
        if args.address != drafter_address() or not (sources := await _local_sources(args)):
            raise
        if args.json:
            print(json.dumps({"drafters": [], "local_sources": sources}, indent=2))
        else:
            print(
                f"no drafter service at {args.address}; the verifier at {verifier_address()} "
                f"drafts by itself: {', '.join(sources)}"
            )
        return
    show_list(listed, args)


async def _local_sources(args: argparse.Namespace) -> list[str]:
    """Return the local sources of the verifier at the default address; none without an answer."""
    token, retry = read_token(args.token_file), RetryOptions(budget=0.0)
    try:
        async with Client(verifier_address(), token=token, tls=tls_of(args), retry=retry) as client:
            return list((await client.model()).facts.local_sources)
    except PacelineError:
        return []


async def _load(args: argparse.Namespace, call: Call) -> None:
    folder, options = args.folder, dict(args.option)
    if is_local(args.address):  # its working folder is another
        folder = _absolute(folder, is_path=folder != "")
        options = {key: _absolute(text, is_path="/" in text) for key, text in options.items()}
    request = drafter_pb2.LoadDrafterRequest(
        name=args.name,
        version=args.version,
        method=args.method,
        folder=folder,
        options=options,
        activate=args.activate and args.check is None,
    )
    with exit_with(2, OSError, ValueError):
        prompts = [] if args.check is None else read_prompts(args.check)
    with waiting(lambda: f"loading {args.name}"):
        info = (await call("LoadDrafter", request)).drafter
    checked: dict[str, float] = {}
    if args.check is not None:
        which = {"name": info.name, "version": info.version}
        try:
            checked = await _check(args, f"{info.name}@{info.version}", prompts)
        except (CommandError, PacelineError):
            await call("UnloadDrafter", drafter_pb2.UnloadDrafterRequest(**which, force=True))
            raise
        if args.activate:
            activate = drafter_pb2.ActivateDrafterRequest(**which, traffic_share=1.0)
            info = (await call("ActivateDrafter", activate)).drafter
    show([info], args, check=checked)


async def _check(
    args: argparse.Namespace, drafter: str, prompts: list[str | list[int]]
) -> dict[str, float]:
    """Generate greedily for every prompt with a loaded version, `NAME@VERSION`, of a drafter.
    Returns texts, drafted rounds, accepted length and draft time by name. Raises CommandError if
    the version failed, timed out, or drafted an invalid tree or none."""
    services = argparse.Namespace(**vars(args), retry_seconds=args.timeout)
    # Isolated: what the verifier remembers of equal texts would draft them without the version.
    drafting = DraftOptions(timeout=_CHECK_TIMEOUT, adaptive=False, isolated=True)
    rounds, why = list[RoundStats](), "it drafted no tree"
    async with client_of(services, drafting=drafting) as client:
        for prompt in prompts:
            result = await client.generate(
                prompt, max_new_tokens=_CHECK_TOKENS, drafter=drafter, deadline=args.timeout
            )
            drafted = [entry for entry in result.stats.rounds if entry.drafted]
            rounds += [e for e in drafted if f"{e.drafter}@{e.version}" == drafter]
            if result.stats.fallbacks:
                rounds, why = [], f"failures while drafting: {dict(result.stats.fallbacks)}"
                break
    if not rounds:
        raise CommandError(f"{drafter} was loaded, failed the check and was unloaded: {why}", 1)
    return {
        "texts": len(prompts),
        "rounds": len(rounds),
        "accepted_length": fmean(entry.emitted for entry in rounds),
        "draft_ms": fmean(entry.draft_ms for entry in rounds),
    }


async def _activate(args: argparse.Namespace, call: Call) -> None:
    request = drafter_pb2.ActivateDrafterRequest(
        name=args.name, version=args.version, traffic_share=args.share
    )
    show([(await call("ActivateDrafter", request)).drafter], args)


async def _rollback(args: argparse.Namespace, call: Call) -> None:
    request = drafter_pb2.RollbackDrafterRequest(name=args.name)
    show((await call("RollbackDrafter", request)).drafters, args)


async def _unload(args: argparse.Namespace, call: Call) -> None:
    request = drafter_pb2.UnloadDrafterRequest(
        name=args.name, version=args.version, force=args.force
    )
    gone = (await call("UnloadDrafter", request)).unloaded
    print("unloaded" if gone else "draining: it is freed when its last generation has ended")


def _absolute(text: str, *, is_path: bool) -> str:
    """Return the path of a model's name, the absolute one of a path, or another text as it is.
    Raises CommandError if the named model has not been fetched."""
    is_path |= is_model_name(text) or text.startswith("~")
    with exit_with(2, argparse.ArgumentTypeError):
        return os.path.abspath(model_path(text)) if is_path else text


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def show(
    drafters: Sequence[drafter_pb2.DrafterInfo],
    args: argparse.Namespace,
    default: str = "",
    check: Mapping[str, float] | None = None,
) -> None:
    """Print versions of drafters, and the check of a loaded one.

    `args` has the arguments of `_add`; `default` is the name of the default drafter.
    """
    if args.json:
        checked = {"check": check} if check else {}
        print(json.dumps([{**_as_dict(info), **checked} for info in drafters], indent=2))
        return
    table = Table(
        *("name", "version", "share", "texts", "rounds", "accepted length", "draft", "state"),
        box=None,
        pad_edge=False,
    )
    for info in drafters:
        table.add_row(
            info.name,
            info.version,
            f"{info.traffic_share:.0%}",
            str(info.active_streams),
            str(info.rounds),
            f"{info.accepted_length:.2f}" if info.rounds else "-",
            f"{info.draft_us / 1e3:.2f} ms" if info.rounds else "-",
            _state(info) + (", default" if info.name == default else ""),
        )
    Output(soft_wrap=False).print(table)
    if check:
        print(
            f"The check passed: a round emitted {check['accepted_length']:.2f} tokens on average, "
            f"and a draft took {check['draft_ms']:.2f} ms."
        )


def _state(info: drafter_pb2.DrafterInfo) -> str:
    if info.draining:
        return "draining"
    if info.traffic_share:
        return "active"
    if info.failing:
        return f"failing: {info.failing}"
    return "replaced" if info.previous_share else "idle"


def show_list(response: drafter_pb2.ListDraftersResponse, args: argparse.Namespace) -> None:
    """Print all versions, and the verifiers that were joined; `args` are `_add`'s."""
    if args.json:
        listing = {
            "drafters": [_as_dict(info) for info in response.drafters],
            "default_drafter": response.default_drafter,
            "verifiers": [_as_dict(link) for link in response.verifiers],
        }
        print(json.dumps(listing, indent=2))
        return
    show(response.drafters, args, response.default_drafter)
    if response.verifiers:
        print()
        table = Table("verifier", "carrier", "texts", "state", box=None, pad_edge=False)
        for link in response.verifiers:
            state = f"not joined: {link.error}" if link.error else "joined"
            table.add_row(link.address, link.carrier or "-", str(link.sequences), state)
        Output(soft_wrap=False).print(table)


def _as_dict(message: Message) -> dict[str, object]:
    """Return fields by name, JSON-ready: messages and maps as dicts, repeated numbers as lists."""
    fields: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            fields[field.name] = _as_dict(value)
        elif isinstance(value, Mapping):
            fields[field.name] = dict(value)
        else:
            fields[field.name] = list(value) if field.is_repeated else value
    return fields
