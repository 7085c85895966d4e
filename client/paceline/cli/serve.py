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
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

from paceline.cli.command import CommandError, added_by, exit_with, refuse_options
from paceline.cli.fetch import FetchError, fetch
from paceline.cli.main import main
from paceline.cli.progress import described, waiting
from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    VERIFIER_ADDRESS,
    add_shared_arguments,
    set_torch_environment,
    write_atomically,
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
from paceline.client import InvalidRequestError, TlsOptions
from paceline.drafter import DrafterSpec, LoadError
from paceline.harness import (
    JOIN_SECONDS,
    NO_PROXY,
    Kind,
    ProcessFailed,
    ServiceProcess,
    has_drafter,
    model_of,
    with_port,
)
from paceline.harness.models import MODEL, MODELS, drafter_spec, local_model, name_of
from paceline.service import ServerOptions, check_address, configure_logging
from paceline.service.options import (
    OptionsError,
    given_options,
    read_token,
    socket_path_of,
    stays_on_this_machine,
    to_words,
    words_of,
)
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

# Unit of all: seconds.
_POLL_INTERVAL = 0.05
_FIRST_DELAY = 0.5
_MAX_DELAY = 30.0
_STEADY = 60.0  # after this uptime the back-off starts again

_RESTART_SECONDS = 600.0  # maximum wait of a text for a verifier that is restarted

_MAX_UNREADY = 3  # how often a verifier may die in a row before it answers calls


class Restarted:
    """A service that is spawned again, with back-off, at the same address after it died."""

    def __init__(self, process: ServiceProcess) -> None:
        self._process = process
        self._next_delay = _FIRST_DELAY
        self._started, self._restart_at = time.monotonic(), 0.0
        self._unready = 0

    def delay(self, uptime: float) -> float:
        """The delay after a failure with this uptime: it doubles. Unit: seconds."""
        delay = _FIRST_DELAY if uptime >= _STEADY else self._next_delay
        self._next_delay = min(2 * delay, _MAX_DELAY)
        return delay

    def poll(self) -> None:
        """Restart the service if it died and the delay is over. Raises ProcessFailed if a verifier
        died `_MAX_UNREADY` times in a row before it answered calls."""
        now, kind = time.monotonic(), self._process.kind
        if self._process.returncode is None:
            return
        if not self._restart_at:
            self._unready = 0 if self._process.was_ready else self._unready + 1
            if kind == "verifier" and self._unready == _MAX_UNREADY:
                times = f"died {_MAX_UNREADY} times in a row before it answered calls"
                raise self._process.failed(f"{times}, with code {self._process.returncode}")
            delay = self.delay(now - self._started)
            self._restart_at = now + delay
            waits = "texts wait" if kind == "verifier" else "generations continue without it"
            logger.warning(
                "the %s died; %s until it is restarted",
                kind,
                waits,
                extra={"code": self._process.returncode, "restart_in_seconds": delay},
            )
        elif now >= self._restart_at:
            self._process.spawn()
            self._started, self._restart_at = now, 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", type=_model, metavar="MODEL", help=MODEL)
    # What a config file gives as the verifier's target.
    add("--target", type=_model, help=argparse.SUPPRESS)
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
    add_shared_arguments(parser)
    parser.set_defaults(log_level=None)


def _model(text: str) -> Path:
    """Type of an argument that takes a model, as `local_model`; a named one is fetched later."""
    return MODELS[text].path if text in MODELS else local_model(text)


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
    """Run all as of `_run`. Without a token they get one that only commands of this user find."""
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


def _run(args: argparse.Namespace) -> int:
    """Run all until a signal; 0 after a drain, 1 if the verifier dies at each start, 2 if one does
    not start.

    SIGTERM and SIGINT are forwarded to all services: the first drains, a second ends at once.
    """
    model = args.model or args.target
    if model is None:
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
    _fetch(model, with_drafter=not args.drafter)
    print(
        f"loading {described(model)}; the first start on a machine also measures its steps and "
        "compiles kernels, and keeps both",
        flush=True,
    )
    began = time.monotonic()
    # Chosen beforehand, so that all start side by side.
    args.gateway_address = with_port(args.gateway_address)
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
        spent = (f"{each.kind}: {each.phase}" for each in processes if each.phase)
        print(f"ready after {time.monotonic() - began:.0f} s; {'; '.join(spent)}".rstrip("; "))
        print(_announcement(model_of(channel(), metadata), processes, args), flush=True)
        if args.ready_file is not None:
            lines = (f"{process.address}\n" for process in processes)
            write_atomically(args.ready_file, "".join(lines))
        if args.open and (url := _url(processes[-1], args)).startswith("http"):
            webbrowser.open(url)

    with ExitStack() as stack:
        noted = note_services([verifier, drafter] if drafts else [verifier], unused_address)
        note_ready = stack.enter_context(noted)
        # Its threads start with its first use, when the services have been forked.
        channel = cache(lambda: stack.enter_context(_channel(verifier, args)))
        return Supervisor(processes, joined, ready).run()


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


def _check(args: argparse.Namespace, model: Path) -> None:
    """Raises CommandError for arguments that a service would refuse, before anything starts."""
    with exit_with(2, OptionsError, ValueError, OSError, LoadError):
        servers = [
            ServerOptions.from_args(_at(_shifted(args, offset), address))
            for offset, address in enumerate((args.verifier_address, args.drafter_address))
        ]
        addresses = [(each.address, each.metrics_address) for each in servers]
        if args.gateway_address != "none" and find_spec("aiohttp") is not None:
            gateway = gateway_options(_of_gateway(args))
            addresses.append((gateway.address, gateway.metrics_address))
        for address in (each for pair in addresses for each in pair if each):
            check_address(address)
        VerifierOptions(**given_options(args, VerifierOptions), threads=args.threads)
        set_torch_environment(args.threads)
        _import_once()
        # They import torch, which reads the environment.
        from paceline.convert import open_model
        from paceline.drafter.methods.checkpoint import read_fit

        target = open_model(model, args.lora)
        target.config()
        for text in () if args.drafter == ["none"] else args.drafter or ():
            spec = DrafterSpec.parse(text)
            if missing := [str(each) for each in spec.folders if not each.exists()]:
                raise OptionsError(f"--drafter {text}: there is no {missing[0]}")
            if spec.method == "lm" and spec.folder is not None:
                digests = {read_fit(spec.folder).tokenizer_digest, target.tokenizer_digest}
                if len(digests - {""}) > 1:
                    raise OptionsError(
                        f"--drafter {text}: its tokenizer is not that of {model}; a small model "
                        "drafts for targets with its own"
                    )


def _needs_drafter(args: argparse.Namespace, model: Path) -> bool:
    """Whether a drafter service has something to do: it was asked for, or there is something better
    than what the verifier guesses by itself. Raises CommandError if a drafter that ships is
    damaged."""
    if args.drafter == ["none"]:
        return False
    if any((args.drafter, args.drafter_device, args.root)):
        return True
    if "ngram" not in VerifierOptions(**given_options(args, VerifierOptions)).sources:
        return True
    from paceline.device import has_driver  # late: before the environment of torch is set

    on_gpu = args.device != "cpu" and has_driver()
    with exit_with(2, OSError, LoadError):
        weights = args.weights or "auto"
        return not only_looks_up(model, on_gpu=on_gpu, weights=weights, lora=args.lora)


def _at(args: argparse.Namespace, address: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "address": address})


def _of_gateway(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the gateway. It serves with the services' certificate if it has no own."""
    found = _at(_shifted(args, 2), args.gateway_address)
    found.http_tls_cert, found.http_tls_key = _gateway_tls(args)
    return found


def _gateway_tls(args: argparse.Namespace) -> tuple[Path | None, Path | None]:
    own = args.http_tls_cert, args.http_tls_key
    return own if any(own) else (args.tls_cert, args.tls_key)


def _announcement(
    model: verifier_pb2.GetModelResponse | None,
    processes: Sequence[ServiceProcess],
    args: argparse.Namespace,
) -> str:
    """What is served, where, and how to ask it for a first text."""
    services = model.drafter_services if model is not None else ()
    drafters = list(dict.fromkeys(each.name for service in services for each in service.drafters))
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
    """A command line that asks the gateway for a text."""
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
    """A channel to the verifier, which trusts its certificate as the gateway does."""
    if args.tls_cert is None:
        return grpc.insecure_channel(address, NO_PROXY)
    own = args.tls_client_ca is not None
    tls = TlsOptions(args.tls_cert, *((args.tls_cert, args.tls_key) if own else (None, None)))
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
    """Where the user who starts the services has drafters: the working folder, but not the whole
    machine, and the folders beside the model and the drafters that are loaded."""
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
    """The gateway trusts the services' certificate as the drafter does."""
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
    """The address of a service, for a gateway that of its page."""
    if process.kind != "gateway" or process.address.startswith("unix:"):
        return process.address
    return f"{'http' if _gateway_tls(args)[0] is None else 'https'}://{process.address}/"


def _common(args: argparse.Namespace, offset: int) -> list[str]:
    """Arguments that verifier and drafter share; secrets stay in files or the environment."""
    names = ("token_file", "max_message_mib", "threads", "log_format", "log_level")
    return [*to_words(_shifted(args, offset), ServerOptions), *words_of(args, names)]


def _shifted(args: argparse.Namespace, offset: int) -> argparse.Namespace:
    """Arguments with a port for metrics that is `offset` above the given one."""
    host, colon, port = (args.metrics_address or "").rpartition(":")
    if not (port.isdecimal() and int(port)):
        return args
    address = f"{host}{colon}{int(port) + offset}"
    return argparse.Namespace(**{**vars(args), "metrics_address": address})


class Supervisor:
    """A verifier and services beside it, not yet started, each of which is restarted when it dies.
    `on_ready` is called once when all answer calls and the drafter, if there is one, has joined."""

    def __init__(
        self,
        processes: Sequence[ServiceProcess],
        joined: Callable[[], bool],
        on_ready: Callable[[], None],
    ) -> None:
        self._verifier = processes[0]
        self._processes = processes
        self._joined = joined
        self._on_ready = on_ready
        # Signal handlers only append; the loops below react.
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until a signal or a failure; the exit code of `paceline serve`."""
        numbers = (signal.SIGTERM, signal.SIGINT)

        def record(number: int, _frame: object) -> None:
            self._signals.append(number)

        handlers = {number: signal.signal(number, record) for number in numbers}
        try:
            if not self._start():
                return self._drain()
            self._on_ready()
            return self._supervise()
        except ProcessFailed as failure:
            # A service that refuses to start has said why.
            if not any(process.returncode == 2 for process in self._processes):
                logger.error("cannot serve: %s", failure)
            return 2
        finally:
            for process in self._processes:
                process.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> bool:
        """Start all and wait until they answer; False: a signal came. Raises ProcessFailed if one
        does not start."""
        for process in self._processes:
            process.spawn()
        for process in self._processes:
            logger.debug("started: paceline %s", shlex.join((process.kind, *process.arguments)))
        with waiting(self._starting, logger.info):
            while not self._signals:
                ready = [each.poll_ready() for each in self._processes]  # each, as any may fail
                if all(ready):
                    break
                time.sleep(_POLL_INTERVAL)
            self._wait_joined()
        return not self._signals

    def _starting(self) -> str:
        """What does not answer yet, and what it is busy with."""
        found = [f"{each.kind} {each.phase}" for each in self._processes if not each.was_ready]
        return f"starting: {'; '.join(found) or 'the drafter joins'}"

    def _supervise(self) -> int:
        """Restart what dies, until a signal, or until the verifier cannot be restarted."""
        restarted = [Restarted(process) for process in self._processes]
        try:
            while not self._signals:
                time.sleep(_POLL_INTERVAL)
                for service in restarted:
                    service.poll()
        except ProcessFailed as failure:
            logger.error("cannot go on: %s; the log above says why", failure)
            # Twice: texts that wait for the verifier end now, and not with a drain.
            self._signals += [signal.SIGTERM, signal.SIGINT]
            self._drain()
            return 1
        return self._drain()

    def _wait_joined(self) -> None:
        """Wait until the drafter has joined, for a signal or for the end of a service."""
        deadline = time.monotonic() + JOIN_SECONDS
        while not (
            self._signals
            or self._joined()
            or any(process.returncode is not None for process in self._processes)
        ):
            if time.monotonic() > deadline:
                logger.error(
                    "the drafter has not joined the verifier within %g s: generations run without "
                    "drafts until it does; its log above says why",
                    JOIN_SECONDS,
                )
                return
            time.sleep(_POLL_INTERVAL)

    def _drain(self) -> int:
        dead = self._verifier.returncode is not None
        forwarded = 0
        while any(process.returncode is None for process in self._processes):
            while forwarded < len(self._signals):
                for process in self._processes:  # another signal: two equal ones may come as one
                    process.send_signal(signal.SIGINT if forwarded else signal.SIGTERM)
                forwarded += 1
            time.sleep(_POLL_INTERVAL)
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        # While it loads its model a verifier has no handler: the signal ends it.
        return 0 if dead or self._verifier.returncode in (0, -signal.SIGTERM) else 1
