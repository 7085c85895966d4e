"""The device object of an NVIDIA GPU, and which GPU a service takes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from paceline.cuda.memory import ExportedMemory, MappedMemory, close_unused, cuda_driver
from paceline.cuda.products import (
    describe_device,
    describe_kernels,
    fix_decoder,
    use_library_without_splits,
    why_no_integers,
)
from paceline.decoder import Decoder, DecoderConfig, UnsupportedModelError
from paceline.decoder.linear import is_rotated
from paceline.device import Device, DeviceLost, DriverError, NotMappable
from paceline.kernels import Rule, kernels_for
from paceline.kernels.caches import MAX_GPU_WIDTH

if TYPE_CHECKING:
    from paceline.cuda.graphs import GraphRunner
    from paceline.kernels import KVCacheView

T = TypeVar("T")
_log = logging.getLogger("paceline.device")

# How long a start waits for memory of a GPU that a process before it held.
_FREE_SECONDS, _FREE_POLL_SECONDS = 10.0, 0.25
_CONTEXTS = 0.05  # share of a GPU's memory that processes without tensors there may have

# Memory of a GPU beside weights and KV of which a start warns if there is less. Unit: bytes.
_REST = 2 << 30


class CudaDevice(Device):
    """An NVIDIA GPU."""

    packs = False
    graphs = runs_beside = True
    max_seconds = 120.0
    out_of_memory_hint = ", or give the verifier on this GPU a smaller --gpu-memory (default: 0.8)"

    @property
    def product_name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def use(self) -> None:
        torch.cuda.set_device(self.torch)

    def wait(self) -> None:
        torch.accelerator.current_stream(self.torch).synchronize()

    def lost(self) -> DeviceLost | None:
        """Wait for the calling thread's own stream: while another thread captures a graph, to wait
        for the whole device is an error, which breaks the capture too."""
        try:
            self.wait()
        except RuntimeError as error:
            return DeviceLost(f"{self} fails every call since an error in a kernel: {error}")
        return None

    def receive(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        self.wait()
        return copies

    def event(self) -> torch.Event:
        event: torch.Event = torch.cuda.Event()
        event.record()
        return event

    def stream(self) -> torch.Stream:
        return torch.Stream(self.torch)

    def host_zeros(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*size, dtype=dtype, pin_memory=True)

    def map(
        self, work: Callable[[int], T], numbers: Iterable[int], cores: int | None = None
    ) -> list[T]:
        """Return the results of work, one after the other: it launches kernels."""
        return list(map(work, numbers))

    def free_memory(self) -> float:
        return math.inf

    def kv_bytes(
        self,
        share: float,
        mapped: int,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> int:
        """Return what the weights leave of the share of its memory: a drafter finds the same rest
        whichever of both starts first. Of what is free a tenth is left in any case. A drafter may
        still map the KV of a verifier that has just ended: that memory is waited for."""
        deadline = clock() + _FREE_SECONDS
        while True:
            free, total = torch.cuda.mem_get_info(self.torch)
            reserved = torch.cuda.memory_reserved(self.torch)
            wanted, most = int(share * total - reserved), int(0.9 * free)
            others = total - free - reserved
            if most >= wanted or others < _CONTEXTS * total:
                return max(0, min(wanted, most))
            if clock() >= deadline:
                break
            sleep(_FREE_POLL_SECONDS)
        _log.warning(
            "KV on %s gets %.1f GB, not %.1f: other processes hold %.1f of its %.1f GB, such as a "
            "drafter that maps the KV of an earlier verifier; end them, or set --gpu-memory or "
            "--kv-bytes",
            self, most / 1e9, wanted / 1e9, others / 1e9, total / 1e9,
        )  # fmt: skip
        return most

    def warn_of_little_room(self, kv_bytes: int, max_tokens: int, max_context: int) -> None:
        weights = torch.cuda.memory_reserved(self.torch)
        _, total = torch.cuda.mem_get_info(self.torch)
        rest = total - weights - kv_bytes
        if max_tokens < max_context or rest < _REST:
            _log.warning(
                "of the %.1f GB of %s weights take %.1f and KV %.1f, for texts of %d tokens at "
                "most (of the model: %d), which leaves %.1f for CUDA graphs and drafters: "
                "--gpu-memory and --kv-bytes change KV's share, --weights int8 takes less for "
                "weights",
                total / 1e9, self, weights / 1e9, kv_bytes / 1e9, max_tokens, max_context,
                rest / 1e9,
            )  # fmt: skip

    def check_numerics(self, numerics: str) -> None:
        if numerics == "portable":
            raise ValueError(
                f"numerics is 'portable', and {self} has the bits of its kind of GPU and of its "
                "libraries: use auto, which gives the same text with any drafts, or --device cpu"
            )

    def check_model(self, config: DecoderConfig, kv_cache_dtype: str) -> None:
        if kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, which is supported on the CPU; with device "
                f"'{self}' use auto"
            )
        rotated, where = is_rotated(config.weights, self.torch), f"the device is '{self}'"
        if rotated and config.experts:
            raise UnsupportedModelError(
                "weights are 'int8', and routed experts have no products in 8 bits on a GPU: use "
                "bfloat16"
            )
        if rotated and (why := why_no_integers(self.torch)):
            raise UnsupportedModelError(
                f"weights are 'int8', and {self} refuses a product of 8-bit integers, expected one "
                f"that multiplies them: {why}; use bfloat16, or the CPU"
            )
        if config.delta_layers:
            raise UnsupportedModelError(
                f"layers with recurrent states are supported on the CPU; {where}"
            )
        if config.stored_heads:
            raise UnsupportedModelError(
                f"heads that differ by layer are supported on the CPU; {where}"
            )
        if config.attention_cap:
            raise UnsupportedModelError(
                f"its attention scores have a soft cap, which is supported on the CPU; {where}"
            )
        if config.head_dim > MAX_GPU_WIDTH:
            raise UnsupportedModelError(
                f"its heads have {config.head_dim} elements, expected at most {MAX_GPU_WIDTH} on a "
                f"GPU, whose shared memory holds no more; {where}: use the CPU"
            )

    def prepare(self, decoder: Decoder, numerics: str) -> None:
        """Have its products keep the bits of rows, whatever rows are beside them, unless numerics
        are fast."""
        fixed = numerics == "auto"
        use_library_without_splits(fixed=fixed)
        if fixed:
            fix_decoder(decoder)
        torch.cuda.empty_cache()  # KV gets what is left

    def rules(self, decoder: Decoder) -> list[Rule]:
        if decoder.products is None:
            return []
        config = decoder.config
        return [
            Rule("numerics", "", "GPU", {"hidden": str(config.dtype), "weights": config.weights}),
            Rule("device", "", describe_device(self.torch), {}),
            Rule("kernels", "", describe_kernels(), {}),
            Rule("linear layer", "", str(decoder.products), {}),
        ]

    def step_graphs(self, decoder: Decoder, pool: KVCacheView, *, required: bool) -> GraphRunner:
        kernels_for(self.name)  # or it says why there are none
        from paceline.cuda.graphs import GraphRunner

        return GraphRunner(decoder, pool, required=required)

    def export_memory(self, byte_size: int) -> ExportedMemory:
        return ExportedMemory(cuda_driver(), self.torch.index or 0, byte_size)

    def map_memory(
        self, device_uuid: bytes, handle: bytes, begin: int, byte_size: int, file: int
    ) -> MappedMemory:
        try:
            driver = cuda_driver()
        except DriverError as error:
            raise NotMappable(str(error)) from error
        reader = self.torch.index or 0
        return MappedMemory(driver, reader, device_uuid, handle, begin, byte_size, file)

    def close_unused(self) -> None:
        close_unused()


def find_device(name: str, preferred: int) -> str:
    """Return the device of a name, auto, cuda or cuda:N, as :func:`paceline.device.find_device` has
    it: its name in PyTorch, with its number."""
    count = torch.cuda.device_count()
    if name != "auto":
        number = int(name.partition(":")[2] or 0)
        if number >= count:
            raise ValueError(f"device is {name!r}, expected one of the {count} that PyTorch finds")
        return _usable(number)
    if not count:
        build = "" if torch.version.cuda else f", and {torch.__version__} is built without CUDA"
        _log.info("device auto: using the CPU, since PyTorch finds no GPU%s", build)
        return "cpu"
    number = min(preferred, count - 1)
    mps = "" if has_mps() else "; no MPS: services that share it take turns"
    _log.info("device auto: using cuda:%d, GPUs that PyTorch finds: %d%s", number, count, mps)
    if number and (why := _why_unread(number)):
        _log.warning(
            "device auto: using cuda:0 after all, since cuda:%d %s: KV and hidden states of a "
            "verifier on cuda:0 would be copied over gRPC; --device cuda:%d takes it anyway (of "
            "`paceline serve`: --drafter-device)",
            number, why, number,
        )  # fmt: skip
        number = 0
    return _usable(number)


def _usable(number: int) -> str:
    """Return the name of a GPU; GPUs are counted without the driver that is needed to compute on
    them. Raises ``ValueError`` if the driver is too old."""
    device = f"cuda:{number}"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise ValueError(
            f"{device} cannot be used: {error} PyTorch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}: update the NVIDIA driver, install PyTorch for an older CUDA "
            "(PIP_EXTRA_INDEX_URL with its index cu126), or use --device cpu"
        ) from error
    return device


def _why_unread(gpu: int) -> str:
    """Return why a GPU is not known to read the memory of the first one; empty if it can."""
    try:
        return "" if cuda_driver().reach(gpu, 0) else "has no peer access to its memory"
    except DriverError as error:
        return f"may have no peer access to its memory, which the driver does not tell: {error}"


def has_mps() -> bool:
    """Tell whether NVIDIA's multi-process service runs: else processes on one GPU take turns."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
