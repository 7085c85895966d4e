"""`paceline serve`: a verifier, a gateway, and a drafter where there is something better than what
the verifier guesses by itself, as child processes of one command."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import shlex
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from paceline.cli.command import CommandError, added_by, exit_with, refuse_options
from paceline.cli.fetch import FetchError, fetch
from paceline.cli.main import main
from paceline.cli.progress import described, waiting
from paceline.cli.serve_models import Manager, ServedModel, memory_for, serve_models
from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    VERIFIER_ADDRESS,
    add_shared_arguments,
    run_async,
    set_torch_environment,
    stop_with_stdin,
    write_phases,
    write_ready,
)
from paceline.cli.services import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    add_gateway_options,
    add_verifier_options,
    gateway_options,
    load_arguments,
)
from paceline.cli.shipped import models_folder, only_looks_up, smaller_model
from paceline.cli.supervisor import Supervisor
from paceline.client import InvalidRequestError, TlsOptions
from paceline.device import has_driver
from paceline.drafter import DrafterSpec, LoadError
from paceline.harness import (
    NO_PROXY,
    Kind,
    ServiceProcess,
    has_drafter,
    model_of,
    with_port,
)
from paceline.harness.models import (
    MODEL,
    MODELS,
    drafter_spec,
    local_model,
    models_in,
    name_of,
)
from paceline.service import ServerOptions, check_address, configure_logging
from paceline.service.files import user_path
from paceline.service.options import (
    OptionsError,
    given_options,
    read_token,
    socket_path_of,
    stays_on_this_machine,
    to_words,
    words_of,
)
from paceline.service.phases import phases
from paceline.service.runtime import trim
from paceline.tokens import TokenError, certified_name, note_services, own_token
from paceline.v1 import verifier_pb2
from paceline.verifier import VerifierOptions

logger = logging.getLogger("paceline.cli")

GATEWAY_ADDRESS = "127.0.0.1:8080"
_METRICS = ("metrics_address", "insecure_metrics")
_OF_ALL = ("address", "model_name", "drain_seconds", *_METRICS)
"""Options of a gateway that `serve` gives all its services."""
_SHARED_MODULES = ("paceline.verifier.service", "paceline.drafter.service", "paceline.decoder")
"""What verifier and drafter import."""

_RESTART_SECONDS = 600.0  # maximum wait of a text for a verifier that is restarted
_KEEP_SECONDS = 300.0  # for which one of several models stays loaded without a request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several = f"{MODEL}; or a folder of several. Several are loaded when they are asked for"
    add("model", nargs="*", type=_model, default=[], metavar="MODEL", help=several)
    # What a config file gives as the verifier's target.
    add("--target", type=_model, help=argparse.SUPPRESS)
    add(
        "--keep",
        type=float,
        metavar="SECONDS",
        help="unload a model after this time without a request for it (default: 300 with several "
        "models; the only one stays)",
    )
    add("--open", action="store_true", help="open the gateway's page in a browser")
    add(
        "--verifier-address",
        default=VERIFIER_ADDRESS,
        metavar="A",
        help="where the verifier listens (default: %(default)s)",
    )
    add(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write the addresses of verifier, drafter and gateway, a line each, as far as they "
        "run, once calls are answered",
    )
    add_verifier_options(parser)
    _add_drafter_arguments(parser)
    _add_gateway_arguments(parser)
    parser.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    add_shared_arguments(parser)
    parser.set_defaults(log_level=None)


def _model(text: str) -> Path:
    """Type of an argument that takes a model, as `local_model`, or a folder of several; a named one
    is fetched later."""
    if text in MODELS:
        return MODELS[text].path
    path = user_path(text)
    return path if models_in(path) else local_model(text)


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("drafter").add_argument
    add(
        "--drafter-address",
        default=DRAFTER_ADDRESS,
        metavar="A",
        help="where the drafter listens, if one is started (default: %(default)s)",
    )
    add(
        "--drafter",
        action="append",
        type=drafter_spec,
        metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load; repeatable, the first is the default one (default: those that ship "
        "for MODEL and ngram, or a smaller model with its tokenizer: that of its name, or one "
        "beside it; where there are none, selfspec and ngram on a CPU in bfloat16 and float32, and "
        "else no drafter service: the verifier looks up by itself). Its name is that of the method "
        "unless given. none: start no drafter service",
    )
    add(
        "--drafter-device",
        metavar="D",
        help="device of drafters with weights: auto, cpu, cuda or cuda:N, as of `paceline drafter` "
        "(default: cpu with --device cpu or --share-weights, else auto)",
    )
    add(
        "--root",
        action="append",
        type=Path,
        metavar="DIR",
        help="folder below which `paceline drafters load` may load drafters; repeatable (default: "
        "the working folder, and the folders beside MODEL and the loaded drafters)",
    )


def _add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gateway")
    group.add_argument(
        "--gateway-address",
        default=GATEWAY_ADDRESS,
        metavar="A",
        help="where the gateway serves OpenAI's HTTP interface; none: start no gateway (default: "
        "%(default)s)",
    )
    if find_spec("aiohttp") is not None:
        add_gateway_options(group, _OF_ALL)


def run(args: argparse.Namespace) -> int:
    """Run all as of `_run_model`, or several models as of `_run_models`. Without a token they get
    one that only commands of this user find."""
    write_phases(args)
    if args.stop_with_stdin:
        stop_with_stdin()
    try:
        with exit_with(2, OptionsError, TokenError), ExitStack() as stack:
            for name in ("verifier_address", "drafter_address"):
                setattr(args, name, with_port(getattr(args, name)))
            addresses = (args.verifier_address, args.drafter_address)
            if read_token(args.token_file) is None and all(map(stays_on_this_machine, addresses)):
                args.token_file = stack.enter_context(own_token(addresses))
                # Who reads metrics on this machine needs no token, as with services that have none.
                if args.metrics_address and stays_on_this_machine(args.metrics_address):
                    args.insecure_metrics = True
            return _run(args)
    except CommandError as error:
        phases.on_change(str(error))
        raise


def _run(args: argparse.Namespace) -> int:
    given = args.model or filter(None, [args.target])
    models = list(dict.fromkeys(model for path in given for model in models_in(path) or [path]))
    if not models:
        raise CommandError(f"which model? Give a {MODEL}")
    if args.gateway_address == "none":
        unused = {"open", *added_by(_add_gateway_arguments)}
        refuse_options(args, "with --gateway-address none", unused, but=("gateway_address",))
    if args.drafter == ["none"]:
        refuse_options(args, "with --drafter none", {"drafter_device", "root"})
    if args.log_level is None:
        on_terminal = sys.stderr.isatty() and args.log_format != "json"
        args.log_level = "warning" if on_terminal else "info"
    configure_logging(args.log_format, args.log_level, "serve")
    # Chosen beforehand, so that all start side by side.
    args.gateway_address = with_port(args.gateway_address)
    if len(models) == 1 and args.keep is None:
        return _run_model(args, models[0])
    return _run_models(args, models)


def _run_models(args: argparse.Namespace, models: Sequence[Path]) -> int:
    """Run a gateway, and models while they are asked for, as of `serve_models`."""
    refuse_options(args, "with several models or --keep", {"model_name", "lora", "draft_socket"})
    if args.gateway_address == "none" or find_spec("aiohttp") is None:
        raise CommandError(
            "several models are loaded by requests to the gateway: install it with pip install "
            "'paceline[gateway]', and give it an address"
        )
    keep = _KEEP_SECONDS if args.keep is None else args.keep
    if not keep >= 0:
        raise CommandError(f"--keep is {keep:g}, expected seconds, 0 or more")
    names = [name_of(path) or path.name.removesuffix(".gguf") for path in models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise CommandError(f"several models have the name {min(twice)}: rename a file or folder")
    _check_options(args)
    for path in models:
        try:
            _fetch(path, with_drafter=not args.drafter)
        except CommandError as error:
            logger.warning("%s; it is tried again when %s is asked for", error, path)
    memory, memory_of, show = memory_for(args, len(models))
    with TemporaryDirectory(prefix="paceline-models-") as folder:
        socket = Path(folder, "models")
        served = [
            ServedModel(name, path, _service_of_model(args, index, name, path, folder))
            for index, (name, path) in enumerate(zip(names, models, strict=True))
        ]
        words = [f"--models-socket={socket}", f"--retry-seconds={_RESTART_SECONDS:g}"]
        gateway = _service("gateway", args.gateway_address, [*words, *_gateway_arguments(args)])

        def ready() -> None:
            print(
                f"serving {', '.join(names)}: each is loaded when it is asked for, and unloaded "
                f"after {keep:g} s without a request, or for another one: of {show(memory)} they "
                f"take up to {', '.join(show(memory_of(model)) for model in served)}\n"
                f"gateway   {_url(gateway, args)}\n"
                f"try       {_request(gateway, names[0], args, chat=True)}\nCtrl-C stops all",
                flush=True,
            )
            _note_ready(args, [gateway])

        manager = Manager(served, memory, memory_of, keep)
        return run_async(serve_models(manager, gateway, socket, ready))


def _service_of_model(
    args: argparse.Namespace, index: int, name: str, path: Path, folder: str
) -> ServiceProcess:
    """Return `paceline serve` of one of several models. The first one has the given addresses."""
    addresses = args.verifier_address, args.drafter_address
    verifier, drafter = (
        addresses if not index else (f"unix:{folder}/{index}v", f"unix:{folder}/{index}d")
    )
    return ServiceProcess(
        "serve",
        [
            *(name if name in MODELS else str(path), f"--model-name={name}"),
            *("--gateway-address=none", f"--drafter-address={drafter}"),
            *to_words(args, VerifierOptions, ("model_name", "lora")),
            *words_of(args, ("drafter", "drafter_device", "root")),
            *_common(args, 3 * index),  # ports for metrics: its own, its drafter's, the gateway's
        ],
        address=verifier,
        show_log=True,
        ready_seconds=float("inf"),
    )


def _run_model(args: argparse.Namespace, model: Path) -> int:
    """Run a model until a signal; 0 after a drain, 1 if the verifier dies at each start, 2 if a
    service does not start.

    SIGTERM and SIGINT are forwarded to all services: the first drains, a second ends at once.
    """
    _fetch(model, with_drafter=not args.drafter)
    print(
        f"loading {described(model)}; the first start on a machine also measures its steps and "
        "compiles kernels, and keeps both",
        flush=True,
    )
    began = time.monotonic()
    with waiting(lambda: "reading the model", logger.info):
        _check(args, model)
        needs_drafter = _needs_drafter(args, model)
        with exit_with(2, OSError, LoadError):
            chosen = needs_drafter and not args.drafter
            smaller = smaller_model(model, args.lora) if chosen else None
    if smaller is not None:
        print(
            f"drafting with {described(smaller)}, which has its tokenizer; --drafter none turns it "
            "off",
            flush=True,
        )
    verifier, drafter = args.verifier_address, args.drafter_address
    target = [f"--target={model}", *to_words(args, VerifierOptions), *_common(args, 0)]
    processes = [_service("verifier", verifier, target)]
    if needs_drafter:
        arguments = [*_drafter_arguments(args, model), f"--verifier={verifier}"]
        processes.append(_service("drafter", drafter, arguments))
    drafts = len(processes) > 1
    unused_address = "" if drafts else args.drafter_address
    if args.gateway_address != "none":
        if find_spec("aiohttp") is None:
            logger.warning("the gateway is not installed: run pip install 'paceline[gateway]'")
        else:
            # A dead verifier is restarted, or the gateway is told to end: texts wait until then.
            services = [f"--verifier-address={verifier}", f"--retry-seconds={_RESTART_SECONDS:g}"]
            arguments = [*services, *_gateway_arguments(args)]
            processes.append(_service("gateway", args.gateway_address, arguments))
    with exit_with(2, OptionsError, InvalidRequestError):
        token = read_token(args.token_file)
    metadata = [("authorization", f"Bearer {token}")] if token else []

    def joined() -> bool:
        return not drafts or has_drafter(channel(), metadata)

    def ready() -> None:
        note_ready()
        spent = (f"{process.kind}: {process.phase}" for process in processes if process.phase)
        print(f"ready after {time.monotonic() - began:.0f} s; {'; '.join(spent)}".rstrip("; "))
        if not args.stop_with_stdin:
            print(_announcement(model_of(channel(), metadata), processes, args), flush=True)
        _note_ready(args, processes)

    with ExitStack() as stack:
        noted = note_services([verifier, drafter] if drafts else [verifier], unused_address)
        note_ready = stack.enter_context(noted)
        # Its threads start with its first use, when the services have been forked.
        channel = cache(lambda: stack.enter_context(_channel(verifier, args)))
        return Supervisor(processes, joined, ready).run()


def _note_ready(args: argparse.Namespace, processes: Sequence[ServiceProcess]) -> None:
    """Write the addresses of services that are ready, and open the page of the last one."""
    write_ready(args, "".join(f"{process.address}\n" for process in processes))
    if args.open and (url := _url(processes[-1], args)).startswith("http"):
        webbrowser.open(url)


def _fetch(model: Path, *, with_drafter: bool) -> None:
    """Fetch a named model that is not there, and the drafter that is known for it. Raises
    CommandError if there is no model then; without the drafter a warning is logged."""
    named = MODELS.get(name_of(model) or "")
    if named is None or model != named.path:
        return
    with exit_with(2, FetchError, OSError):
        fetch(named)
    if with_drafter and named.drafter is not None:
        try:
            fetch(MODELS[named.drafter])
        except (FetchError, OSError) as error:
            logger.warning("serving without the drafter %s: %s", named.drafter, error)


def _check_options(args: argparse.Namespace) -> None:
    """Raises CommandError for options that a service would refuse, before anything starts."""
    with exit_with(2, OptionsError, ValueError, OSError):
        servers = [
            ServerOptions.from_args(_at(_shifted(args, offset), address))
            for offset, address in enumerate((args.verifier_address, args.drafter_address))
        ]
        addresses = [(server.address, server.metrics_address) for server in servers]
        if args.gateway_address != "none" and find_spec("aiohttp") is not None:
            gateway = gateway_options(_of_gateway(args))
            addresses.append((gateway.address, gateway.metrics_address))
        for address in (part for pair in addresses for part in pair if part):
            check_address(address)
        VerifierOptions(**given_options(args, VerifierOptions), threads=args.threads)
        set_torch_environment(args.threads)


def _check(args: argparse.Namespace, model: Path) -> None:
    """Check the same for a model and its drafters."""
    _check_options(args)
    with exit_with(2, OptionsError, ValueError, OSError, LoadError):
        _import_once()
        # They import torch, which reads the environment.
        from paceline.convert import open_model
        from paceline.drafter.methods.checkpoint import read_fit

        target = open_model(model, args.lora)
        target.config()
        for text in () if args.drafter == ["none"] else args.drafter or ():
            spec = DrafterSpec.parse(text)
            if missing := [str(folder) for folder in spec.folders if not folder.exists()]:
                raise OptionsError(f"--drafter {text}: there is no {missing[0]}")
            if spec.method == "lm" and spec.folder is not None:
                digests = {read_fit(spec.folder).tokenizer_digest, target.tokenizer_digest}
                if len(digests - {""}) > 1:
                    raise OptionsError(
                        f"--drafter {text}: its tokenizer is not that of {model}; a small model "
                        "drafts for targets with its own"
                    )


def _needs_drafter(args: argparse.Namespace, model: Path) -> bool:
    """Return whether a drafter service has something to do: it was asked for, or there is something
    better than what the verifier guesses by itself. Raises CommandError if a drafter that ships is
    damaged."""
    if args.drafter == ["none"]:
        return False
    if any((args.drafter, args.drafter_device, args.root)):
        return True
    if "ngram" not in VerifierOptions(**given_options(args, VerifierOptions)).sources:
        return True
    on_gpu = args.device != "cpu" and has_driver()
    with exit_with(2, OSError, LoadError):
        weights = args.weights or "auto"
        return not only_looks_up(model, on_gpu=on_gpu, weights=weights, lora=args.lora)


def _at(args: argparse.Namespace, address: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "address": address})


def _of_gateway(args: argparse.Namespace) -> argparse.Namespace:
    """Return the gateway's arguments. Without a certificate it serves with the services' one."""
    gateway_args = _at(_shifted(args, 2), args.gateway_address)
    gateway_args.http_tls_cert, gateway_args.http_tls_key = _gateway_tls(args)
    return gateway_args


def _gateway_tls(args: argparse.Namespace) -> tuple[Path | None, Path | None]:
    given = args.http_tls_cert, args.http_tls_key
    return given if any(given) else (args.tls_cert, args.tls_key)


def _announcement(
    model: verifier_pb2.GetModelResponse | None,
    processes: Sequence[ServiceProcess],
    args: argparse.Namespace,
) -> str:
    """Return what is served, where, and how to ask it for a first text."""
    services = model.drafter_services if model is not None else ()
    drafters = list(dict.fromkeys(info.name for service in services for info in service.drafters))
    if model is not None and model.local_sources:
        drafters.append(f"local ({', '.join(model.local_sources)})")
    name = model.name if model is not None else "the model"
    lines = [
        f"serving {name}, drafters: {', '.join(drafters) or 'none has joined yet'}",
        *(f"{process.kind:9} {_url(process, args)}" for process in processes),
    ]
    if processes[-1].kind == "gateway":
        chat = model is not None and bool(model.chat_template)
        lines.append(f"try       {_request(processes[-1], name, args, chat=chat)}")
    return "\n".join([*lines, "Ctrl-C stops all"])


def _request(gateway: ServiceProcess, model: str, args: argparse.Namespace, *, chat: bool) -> str:
    """Return a command line that asks the gateway for a text."""
    url, (cert, _) = _url(gateway, args), _gateway_tls(args)
    words = ["curl"] if cert is None else ["curl", "--cacert", str(cert)]
    if url.startswith("unix:"):
        words += ["--unix-socket", str(socket_path_of(url))]
        url = f"{'http' if cert is None else 'https'}://localhost/"
    path, prompt = "completions", dict[str, Any](prompt="Hello")
    if chat:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({"model": model, **prompt})
    words += [f"{url}v1/{path}", "-H", "Content-Type: application/json", "-d", body]
    line = shlex.join(words)
    file = args.api_key_file or os.environ.get(KEY_FILE_VARIABLE)
    if args.api_key_file is None and os.environ.get(KEY_VARIABLE):
        return f'{line} -H "Authorization: Bearer ${KEY_VARIABLE}"'
    if file:
        return f'{line} -H "Authorization: Bearer $(cat {shlex.quote(str(file))})"'
    return line


def _channel(address: str, args: argparse.Namespace) -> grpc.Channel:
    """Return a channel to the verifier, which trusts its certificate as the gateway does."""
    if args.tls_cert is None:
        return grpc.insecure_channel(address, NO_PROXY)
    mutual = args.tls_client_ca is not None
    tls = TlsOptions(args.tls_cert, *((args.tls_cert, args.tls_key) if mutual else (None, None)))
    options = list[tuple[str, Any]](NO_PROXY)
    if name := certified_name(address):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, tls.credentials(), options)


def _service(kind: Kind, address: str, arguments: Sequence[str]) -> ServiceProcess:
    unlimited = float("inf")
    return ServiceProcess(
        kind,
        arguments,
        address=address,
        show_log=True,
        ready_seconds=unlimited,
        main=None if kind == "gateway" else main,
    )


def _import_once() -> None:
    """Import what verifier and drafter need before they load models.

    Their processes, forks of this one, share its memory, some 150 MiB, and start sooner.
    """
    for module in _SHARED_MODULES:
        importlib.import_module(module)
    gc.freeze()  # a collection would write to all objects, and so copy their pages
    trim()


def _drafter_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    device = args.drafter_device
    if device is None:
        device = "cpu" if args.share_weights or args.device == "cpu" else "auto"
    loads = load_arguments(args.drafter or (), model, args.weights or "auto", args.lora)
    roots = args.root or _roots(args, model)
    arguments = [
        *(*loads, f"--device={device}", *(f"--root={root}" for root in roots)),
        *_common(args, 1),
    ]
    if args.tls_cert is not None:
        # Both serve with this certificate: the drafter trusts it when it joins the verifier.
        arguments.append(f"--verifier-tls-ca={args.tls_cert}")
    return arguments


def _roots(args: argparse.Namespace, model: Path) -> list[Path]:
    """Return where the user who starts the services has drafters: the working folder, but not the
    whole machine, and the folders beside the model and the drafters that are loaded."""
    here = Path.cwd()
    specs = (DrafterSpec.parse(text) for text in args.drafter or ())
    beside = [model.resolve(), *(folder.resolve() for spec in specs for folder in spec.folders)]
    shipped = models_folder()
    return list(
        dict.fromkeys(
            [
                *([here] if here != Path(here.anchor) else []),
                *([shipped] if shipped is not None else []),
                *(folder.parent for folder in beside),
            ]
        )
    )


def _gateway_arguments(args: argparse.Namespace) -> list[str]:
    """Return arguments of the gateway: it trusts the same certificate as the drafter."""
    from paceline.gateway import GatewayOptions

    names = ("token_file", "log_format", "log_level", "api_key_file", "chat_template")
    without = ("address", "model_name")  # the verifier tells the name
    arguments = [*words_of(args, names), *to_words(_of_gateway(args), GatewayOptions, without)]
    if args.tls_cert is not None:
        arguments.append(f"--tls-ca={args.tls_cert}")
    if args.tls_client_ca is not None:
        arguments += [f"--tls-cert={args.tls_cert}", f"--tls-key={args.tls_key}"]
    return arguments


def _url(process: ServiceProcess, args: argparse.Namespace) -> str:
    """Return the address of a service; for a gateway, the URL of its page."""
    if process.kind != "gateway" or process.address.startswith("unix:"):
        return process.address
    return f"{'http' if _gateway_tls(args)[0] is None else 'https'}://{process.address}/"


def _common(args: argparse.Namespace, offset: int) -> list[str]:
    """Return the arguments of verifier and drafter; secrets stay in files or the environment."""
    names = ("token_file", "max_message_mib", "threads", "log_format", "log_level")
    return [*to_words(_shifted(args, offset), ServerOptions), *words_of(args, names)]


def _shifted(args: argparse.Namespace, offset: int) -> argparse.Namespace:
    """Return arguments with a port for metrics that is `offset` above the given one."""
    host, colon, port = (args.metrics_address or "").rpartition(":")
    if not (port.isdecimal() and int(port)):
        return args
    address = f"{host}{colon}{int(port) + offset}"
    return argparse.Namespace(**{**vars(args), "metrics_address": address})
