"""`paceline verifier`, `drafter` and `gateway`: serve a target, drafters, and OpenAI's HTTP API."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.command import refuse_options
from paceline.cli.connection import add_service_arguments, client_of, verifier_address
from paceline.cli.progress import described, waiting
from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    VERIFIER_ADDRESS,
    add_config_argument,
    add_log_arguments,
    add_process_arguments,
    add_readiness_arguments,
    raise_file_limit,
    refuse,
    run_async,
    run_service,
    stop_with_stdin,
    write_ready,
)
from paceline.client import Client, PacelineError
from paceline.formats import WEIGHTS
from paceline.harness import local_services
from paceline.harness.models import MODEL, drafter_spec, local_model, model_path, name_of
from paceline.service import Service, configure_logging
from paceline.service.files import read_text
from paceline.service.options import (
    OptionsError,
    add_options,
    given_options,
    read_secret,
    read_token,
)
from paceline.telemetry.exporters import traced
from paceline.verifier import VerifierOptions

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from paceline.gateway import GatewayOptions

KEY_VARIABLE = "PACELINE_API_KEY"
KEY_FILE_VARIABLE = "PACELINE_API_KEY_FILE"
ON_CPU = "--device=cpu"  # argument of both services: on the CPU, tokens are bit-identical


def add_verifier_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add_verifier_options(parser)
    add_process_arguments(parser, VERIFIER_ADDRESS)


def add_verifier_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verifier")
    add_options(group, VerifierOptions)
    group.set_defaults(device="auto")


def run_verifier(args: argparse.Namespace) -> int:
    return run_service("verifier", args, lambda metrics: _build_verifier(args, metrics))


def _build_verifier(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.verifier import build_service

    given = given_options(args, VerifierOptions)
    given.setdefault("model_name", name_of(args.target))
    needs_token = read_token(args.token_file) is not None
    common = {"threads": args.threads, "metrics": metrics, "needs_token": needs_token}
    return build_service(args.target, **common, **given)


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    from paceline.drafter.options import DrafterOptions

    group = parser.add_argument_group("drafter")
    add = group.add_argument
    add(
        "--load",
        type=drafter_spec,
        action="append",
        default=[],
        metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load at start; repeatable, the first is the default one",
    )
    add(
        "--target",
        type=model_path,
        metavar="MODEL",
        help="target to draft for where --load is not given: the drafters that ship for it and "
        "ngram are loaded; where there are none, ngram and selfspec; on a CPU, selfspec first for "
        "bfloat16 and float32",
    )
    add(
        "--target-weights",
        choices=WEIGHTS,
        default="auto",
        help="--weights of the verifier, on which the choice for --target depends",
    )
    add(
        "--target-lora",
        type=Path,
        metavar="DIR",
        help="--lora of the verifier, for the drafters that --target chooses",
    )
    add(
        "--root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder below which clients may load drafters; repeatable (default: the folders of "
        "--load and their parents)",
    )
    add_options(group, DrafterOptions)
    group.set_defaults(device="auto")
    add(
        "--verifier",
        action="append",
        metavar="ADDRESS",
        help="verifier to join and draft for, host:port or unix:/path; repeatable (default: "
        f"{VERIFIER_ADDRESS}, or PACELINE_VERIFIER_ADDRESS)",
    )
    add(
        "--verifier-tls-ca",
        type=Path,
        metavar="PEM",
        help="use TLS with verifiers and trust these roots; --tls-cert is the client certificate",
    )
    add_process_arguments(parser, DRAFTER_ADDRESS)


def load_arguments(
    specs: Iterable[str], model: Path, weights: str, lora: Path | None = None
) -> list[str]:
    """Return the arguments of `paceline drafter` that load drafters as of `--load`; if there are
    none, what suits a verifier with this target, `--weights` and `--lora`. A drafter that reads a
    target and names neither folder nor target, as `mtp` can, reads this one."""
    loads = [f"--load={_with_target(spec, model, lora)}" for spec in specs]
    adapter = [f"--target-lora={lora}"] if lora else []
    return loads or [f"--target={model}", f"--target-weights={weights}", *adapter]


def _with_target(text: str, model: Path, lora: Path | None) -> str:
    from paceline.drafter import DrafterSpec, LoadError
    from paceline.drafter.methods import method_class

    try:
        spec = DrafterSpec.parse(text)
        reads = "target" in method_class(spec.method).path_options
    except LoadError:  # the service says what is wrong
        return text
    if not reads or spec.folder is not None or "target" in spec.options:
        return text
    return f"{text},target={model}" + (f",lora={lora}" if lora else "")


def add_model_arguments(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the model of a command that starts services of its own, its weights, and drafters."""
    add = parser.add_argument
    add("model", nargs="?", type=local_model, metavar="MODEL", help=help)
    add("--weights", choices=WEIGHTS, default="auto", help="format of MODEL's weights")
    add(
        "--load",
        action="append",
        default=[],
        type=drafter_spec,
        metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load beside MODEL; repeatable (default: as of `paceline serve`)",
    )


@contextmanager
def own_services(
    target: Path, weights: str, drafters: Iterable[str], *common: str
) -> Iterator[str]:
    """Run a verifier beside a drafter for the length of the block, and yield its address.

    Drafters are as of `load_arguments`; `common` are arguments of both services. Raises
    ProcessFailed if one of them does not start.
    """
    verifier = [f"--target={target}", f"--weights={weights}", *common]
    drafter = [*load_arguments(drafters, target, weights), *common]
    with ExitStack() as stack:
        with waiting(lambda: f"loading {described(target)}"):
            served, _ = stack.enter_context(local_services(verifier, drafter))
        yield served.address


def run_drafter(args: argparse.Namespace) -> int:
    # Imports no torch: torch must be imported after the thread settings.
    from paceline.drafter import LoadError

    chosen_for = ("target", "target_weights", "target_lora")
    if args.load:
        refuse_options(args, "with --load, which says what is loaded", chosen_for)
    elif args.target is None:
        refuse_options(args, "without --target", chosen_for)

    try:
        return run_service("drafter", args, lambda metrics: _build_drafter(args, metrics))
    except LoadError as error:
        return refuse(error)


def _build_drafter(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.cli.shipped import drafters_for
    from paceline.device import find_device
    from paceline.drafter import DrafterSpec
    from paceline.drafter.kv.exchange import VerifierAccess
    from paceline.drafter.options import DrafterOptions
    from paceline.drafter.service import build_service

    options = given_options(args, DrafterOptions)
    load = args.load
    if not load and args.target is not None:
        device = str(find_device(args.device, preferred=1))
        load = drafters_for(args.target, device, args.target_weights, args.target_lora)

    access = VerifierAccess(
        token=read_token(args.token_file),
        tls_ca=args.verifier_tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )
    return build_service(
        [DrafterSpec.parse(text) for text in load],
        verifiers=args.verifier or verifier_address().split(","),
        roots=args.root,
        threads=args.threads,
        access=access,
        metrics=metrics,
        **options,
    )


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the HTTP server, its security, and the services."""
    add_gateway_options(parser.add_argument_group("gateway"))
    add_readiness_arguments(parser)
    services = add_service_arguments(parser)
    services.add_argument(
        "--models-socket",
        type=Path,
        metavar="FILE",
        help="socket of `paceline serve`, which loads several models, in place of a verifier",
    )
    group = parser.add_argument_group("process")
    add_config_argument(group)
    add_log_arguments(group)


def add_gateway_options(group: argparse._ArgumentGroup, without: Collection[str] = ()) -> None:
    """Add the options of a gateway, but for those `without`, and the files that it reads."""
    from paceline.gateway import GatewayOptions

    add_options(group, GatewayOptions, without)
    add = group.add_argument
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template instead of that of the tokenizer",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that requests must carry as a bearer token (or set {KEY_VARIABLE} "
        f"or {KEY_FILE_VARIABLE})",
    )


def gateway_options(args: argparse.Namespace) -> GatewayOptions:
    """Return the options in the arguments of `add_gateway_options`. Raises OptionsError if they
    contradict each other, or the key cannot be read; OSError, ValueError: the template cannot
    be."""
    from paceline.gateway import GatewayOptions

    template = args.chat_template
    return GatewayOptions(
        api_key=read_secret("API key", args.api_key_file, KEY_VARIABLE, KEY_FILE_VARIABLE),
        chat_template=template and read_text(template),
        **given_options(args, GatewayOptions),
    )


def run_gateway(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after a drain, 2 for options that cannot be served."""
    configure_logging(args.log_format, args.log_level, "gateway")
    with traced("paceline-gateway"):
        try:
            options = gateway_options(args)
            if args.stop_with_stdin:
                stop_with_stdin()
            raise_file_limit()
            run_async(_serve_gateway(args, options))
        except (OptionsError, PacelineError, ValueError, OSError) as error:
            return refuse(error)
    return 0


async def _serve_gateway(args: argparse.Namespace, options: GatewayOptions) -> None:
    from paceline.gateway import ManagedModels, OneModel, run_gateway

    ready = partial(write_ready, args)
    if args.models_socket is None:
        async with client_of(args) as client:
            await run_gateway(OneModel(client, options.model_name), options, on_ready=ready)
        return

    def client_at(address: str) -> Client:
        return client_of(argparse.Namespace(**{**vars(args), "verifier_address": address}))

    async with ManagedModels(args.models_socket, client_at) as models:
        await run_gateway(models, options, on_ready=ready)
