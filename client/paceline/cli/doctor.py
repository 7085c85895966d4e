"""`paceline doctor`: what this machine and installation offer, and what is missing.

Works without torch, and then reports less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

from paceline.cli.connection import verifier_address
from paceline.cli.progress import waiting
from paceline.cli.service_process import set_torch_environment
from paceline.device import available_memory
from paceline.harness import NO_PROXY, model_of
from paceline.service.cpus import usable_cpus
from paceline.tokens import local_token

Facts = dict[str, Any]

_EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "server": (
        ("torch", "numpy", "safetensors", "transformers", "grpc_health", "llguidance"),
        "no verifier or drafter can run here, only the client",
    ),
    "gateway": (("aiohttp", "jinja2", "pydantic"), "no OpenAI interface"),
    "telemetry": (("opentelemetry.sdk", "prometheus_client"), "no traces and no metrics"),
    "cuda": (("triton",), "GPUs run plain PyTorch operations, several times slower"),
    "train": (("accelerate",), "no training of drafters"),
}  # for each extra, the modules that it installs, and what is missing without them
_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "tokenizers")
_VARIABLES = (
    *("PACELINE_CPU_LEVEL", "PACELINE_ATTENTION", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS"),
    *("MKL_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "CC"),
)  # environment variables that change how models are computed; none is a secret
_INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; always 0, whatever is missing."""
    with waiting(lambda: "examining this machine"):
        facts = examine()
    print(json.dumps(facts, indent=1) if args.json else _as_text(facts))
    return 0


def examine() -> Facts:
    """Return the report as JSON-ready values; sizes in bytes.

    `notes` lists what is missing, the effect, and what to do.
    """
    facts: Facts = {
        "paceline": _version("paceline"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "memory": _memory(),
        "settings": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "packages": {name: _version(name) for name in _PACKAGES},
        "missing": {
            extra: missing
            for extra, (modules, _) in _EXTRAS.items()
            if (missing := [name for name in modules if not _installed(name)])
        },
        "compiler": shutil.which(os.environ.get("CC", "gcc")),
        "gpu_driver": _read("/proc/driver/nvidia/version").partition("\n")[0],
    }
    if _installed("torch") and _installed("numpy"):
        facts |= _with_torch()
    facts["served"] = _served()
    facts["notes"] = _notes(facts)
    return facts


def _served() -> Facts | None:
    """Return what the verifier at the default address serves; None if none answers."""
    address = verifier_address()
    token = local_token(address)
    with grpc.insecure_channel(address, NO_PROXY) as channel:
        model = model_of(channel, [("authorization", f"Bearer {token}")] if token else [])
    if model is None:
        return None
    return {
        "model": model.name,
        "weights": model.weights,
        "drafters": [service.default_drafter for service in model.drafter_services],
        "local_sources": list(model.local_sources),
    }


def _with_torch() -> Facts:
    set_torch_environment(None)  # as many threads as a service has
    import torch

    from paceline.cuda.device import has_mps
    from paceline.kernels import KernelsError, cpu_kernels

    try:
        kernels = cpu_kernels()
        kernel_facts: Facts = {"level": kernels.level, "origin": kernels.origin, "error": ""}
    except KernelsError as error:
        kernel_facts = {"level": "", "origin": "", "error": str(error)}
    gpus, gpu_error = [], ""
    try:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # the driver is too old for this PyTorch
        gpu_error = str(error)
    return {
        "threads": torch.get_num_threads(),
        "kernels": kernel_facts,
        "cuda": torch.version.cuda,
        "gpus": [
            {
                "name": gpu.name,
                "memory": gpu.total_memory,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "attention": _attention(),
            }
            for gpu in gpus
        ],
        "gpu_error": gpu_error,
        "mps": bool(gpus) and has_mps(),
    }


def _attention() -> str:
    """Return what attends on GPUs."""
    from paceline.cuda.kernels import cuda_kernels, preferred_backend

    try:
        return cuda_kernels(preferred_backend()).name
    except RuntimeError as error:  # the environment names none, or Triton is missing
        return str(error)


def _processor() -> Facts:
    named: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        named.setdefault(name.strip(), value.strip())
    flags = named.get("flags", named.get("Features", "")).split()
    return {
        "name": named.get("model name") or platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "usable_cores": usable_cpus(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
    }


def _memory() -> Facts:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = Path("/proc/meminfo").exists()
    return {"total": total, "available": available_memory() if known else None}


def _notes(facts: Facts) -> list[str]:
    notes = [
        f"{', '.join(missing)} not installed: {_EXTRAS[extra][1]}; pip install 'paceline[{extra}]'"
        for extra, missing in facts["missing"].items()
        if extra != "cuda" or facts["gpu_driver"]
    ]
    kernels = facts.get("kernels")
    if kernels and kernels["error"]:
        notes.append(f"no service starts: {kernels['error']}")
    if facts.get("threads", 1) > facts["processor"]["usable_cores"]:
        notes.append("more threads than cores: set OMP_NUM_THREADS to the number of cores")
    if facts["gpu_driver"] and "gpus" in facts and not facts["gpus"]:
        notes.append(
            "an NVIDIA driver is installed, but torch can use no GPU: "
            + (facts["gpu_error"] or "install a CUDA build")
        )
    if len(facts.get("gpus", ())) == 1 and not facts["mps"]:
        notes.append(
            "one GPU without MPS: verifier and drafter take turns on it; start "
            "`nvidia-cuda-mps-control -d`"
        )
    return notes


def _as_text(facts: Facts) -> str:
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        if name not in ("missing", "notes"):
            values = value if isinstance(value, list) else [value]
            lines += [(name.replace("_", " "), text) for item in values if (text := _text(item))]
    lines += [("note", note) for note in facts["notes"]]
    return "\n".join(f"{label:<10} {text}" for label, text in lines)


def _text(value: Any) -> str:
    """Return a value of the report in one line; empty for what is not there."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / (1 << 30):.1f} GiB"
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, dict):
        pairs = ((key if key.isupper() else key.replace("_", " "), v) for key, v in value.items())
        return ", ".join(f"{key} {text}" for key, v in pairs if (text := _text(v)))
    return "" if value is None else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
