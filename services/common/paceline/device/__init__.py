"""The device that a service computes on: one object, chosen when it starts, which answers all in
which a CPU and a GPU differ.

:class:`Device` is the CPU. ``paceline.cuda`` has the device for NVIDIA GPUs, imported when one is
used. Imports nothing of the project, and no torch, which drafters without weights do not need.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch as pytorch
    from torch import Tensor

    from paceline.kernels import Rule

T = TypeVar("T")
_log = logging.getLogger("paceline.device")

# Packages of devices besides the CPU by their type in PyTorch, each with its subclass of `Device`;
# they have `find_device` too.
PACKAGES = {"cuda": ("paceline.cuda", "CudaDevice")}

# Packed rows that CUDA graphs of a step are made for. Larger batches, such as prefills, gain
# nothing by them.
SHAPES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class DeviceLost(Exception):
    """The device fails every call; only a new process can use it again."""


class DriverError(Exception):
    """A call of a GPU's driver failed."""


class NotMappable(Exception):
    """Memory of another process cannot be read on this device; the message gives the reason."""


class Device:
    """The CPU. Other devices override what they answer differently."""

    packs = True  # whether compiled kernels run packed weights, over caches in one piece each
    graphs = False  # whether passes are captured as CUDA graphs; their bits are checked as served
    runs_beside = False  # whether it computes while the host goes on
    max_seconds = math.inf  # work that takes longer never ends
    out_of_memory_hint = ""  # what to do besides unloading a drafter

    def __init__(self, name: str = "cpu") -> None:
        """Take a device by its name in PyTorch; it is not used yet."""
        self.name = name

    def __str__(self) -> str:
        return self.name

    @property
    def torch(self) -> pytorch.device:
        """Where its tensors are."""
        import torch

        return torch.device(self.name)

    @property
    def product_name(self) -> str:
        """What it is called by its maker, for the log."""
        return self.name

    def use(self) -> None:
        """Make it the calling thread's current one, on which kernels are launched."""

    def wait(self) -> None:
        """Wait until it has done what the calling thread asked it to do."""

    def lost(self) -> DeviceLost | None:
        """Return the error if it fails every call, as a GPU does after a fault in a kernel."""
        return None

    def receive(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to main memory, after one wait for all that the device was asked to do."""
        return list(tensors)

    def event(self) -> pytorch.Event | None:
        """Return what its current work can be waited by; None if nothing runs beside the host."""
        return None

    def stream(self) -> AbstractContextManager[object]:
        """Return a context whose work does not wait for other work of the device."""
        return nullcontext()

    def host_zeros(self, *size: int, dtype: pytorch.dtype) -> Tensor:
        """Main memory that the device can write to without the host."""
        import torch

        return torch.zeros(*size, dtype=dtype)

    def map(
        self, work: Callable[[int], T], numbers: Iterable[int], cores: int | None = None
    ) -> list[T]:
        """Return the results of work, most of which runs on one thread, for some numbers: one on
        each core, as many as this process has threads for a step unless ``cores`` are given."""
        import torch

        threads = torch.get_num_threads()
        count = cores or threads
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = list(pool.map(work, numbers))
        torch.set_num_threads(threads)  # later threads begin with the newest setting of any
        return results

    def free_memory(self) -> float:
        """Return memory for drafters, in bytes; infinite where allocations fail without harm."""
        return available_memory()

    def kv_bytes(self, share: float, mapped: int) -> int:
        """Return KV memory for a verifier with loaded weights: half of what is free but those that
        are ``mapped`` from a file's cache; ``share`` is of a GPU's memory. Unit: bytes."""
        return max(0, available_memory() - mapped) // 2

    def warn_of_little_room(self, kv_bytes: int, max_tokens: int, max_context: int) -> None:
        """Warn if so many bytes of KV, which are not taken yet, have no room for texts of
        ``max_context`` tokens but only for ``max_tokens``, or if a GPU has little else than KV."""
        if max_tokens < max_context:
            _log.warning("%d bytes of KV hold texts of %d tokens at most", kv_bytes, max_tokens)

    def check_numerics(self, numerics: str) -> None:
        """Raise ``ValueError`` for numerics that it does not have."""
        if numerics == "fast":
            raise ValueError(
                "numerics is 'fast', which is for GPUs; on a CPU auto is the fastest way"
            )

    def check_model(self, config: Any, kv_cache_dtype: str) -> None:
        """Raise ``UnsupportedModelError`` if it lacks what a model needs, ``ValueError`` if it has
        no such type of caches."""

    def prepare(self, decoder: Any, numerics: str) -> None:
        """Make a decoder that was just built ready to serve with these numerics."""

    def rules(self, decoder: Any) -> list[Rule]:
        """Return what the bits of tokens depend on besides weights and text, equal for verifiers
        that continue each other's texts; empty if no promise holds."""
        rules: list[Rule] = decoder.rules()
        return rules

    def step_graphs(self, decoder: Any, pool: Any, *, required: bool) -> Any:
        """Return a :class:`~paceline.cuda.graphs.GraphRunner` of steps over a pool of pages; None
        without graphs. Raises ``ValueError`` if they are required nevertheless."""
        if required:
            raise ValueError("cuda_graphs is 'on', and there is no GPU here: expected auto or off")

    def export_memory(self, byte_size: int) -> Any:
        """Return a new :class:`~paceline.cuda.memory.ExportedMemory`; None if it has none. Raises
        ``DriverError`` if there is too little memory."""

    def map_memory(
        self, device_uuid: bytes, handle: bytes, begin: int, byte_size: int, file: int
    ) -> Any:
        """Return a part of another process's memory, a :class:`~paceline.cuda.memory.MappedMemory`.
        Raises ``NotMappable`` if it cannot be read on this device."""
        raise NotMappable(
            f"the verifier's KV is on a GPU, and this drafter runs on {self}; run it on that GPU, "
            "or let it follow the cache"
        )

    def close_unused(self) -> None:
        """Unmap the memory of other processes that nobody in this one uses."""


CPU = Device()
DEVICES: dict[str, Device] = {"cpu": CPU}  # those in use, by name in PyTorch


def device_of(place: pytorch.device | str) -> Device:
    """Return the device of tensors, by their device in PyTorch."""
    name = str(place)
    if name not in DEVICES:
        package, kind = PACKAGES[name.partition(":")[0]]
        DEVICES[name] = getattr(import_module(package), kind)(name)
    return DEVICES[name]


def find_device(name: str, *, preferred: int = 0) -> Device:
    """Return the device of a name, auto, cpu, cuda or cuda:N, with its number. auto is a GPU if
    PyTorch finds one, otherwise the CPU, and the choice is logged; it takes the ``preferred`` GPU
    if there are as many, and if that can read the memory of the first one. Raises ``ValueError`` if
    the name is unknown, there is no such device, or the driver is too old for it."""
    if name == "cpu":
        return CPU
    if name == "auto" and not has_driver():
        _log.info("device auto: using the CPU, since there is no NVIDIA driver")
        return CPU
    kind = "cuda" if name == "auto" else name.partition(":")[0]
    if kind not in PACKAGES or not re.fullmatch(r"[a-z]+(:\d+)?", name):
        expected = ", ".join(["auto", "cpu", *(f"{kind} or {kind}:N" for kind in PACKAGES)])
        raise ValueError(f"device is {name!r}, expected {expected}")
    return device_of(import_module(PACKAGES[kind][0]).find_device(name, preferred))


def has_driver() -> bool:
    """Return whether there is an NVIDIA driver; it is not started."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def available_memory() -> int:
    """Main memory that this process can still take: the machine's, or less in a container. Unit:
    bytes."""
    available = _fields("/proc/meminfo")["MemAvailable"] << 10
    # Of both versions of control groups; page caches are given up when memory is needed.
    for folder, names in (
        ("/sys/fs/cgroup", ("memory.max", "memory.current", "file", "shmem")),
        (
            "/sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
        ),
    ):
        # Unlimited is the word max, or a file is missing, as in the group of the whole machine.
        with suppress(OSError, ValueError, KeyError):
            limit, used = (int(Path(folder, name).read_text()) for name in names[:2])
            kinds = _fields(f"{folder}/memory.stat")
            available = min(available, limit - (used - kinds[names[2]] + kinds[names[3]]))
    return max(0, available)


def _fields(path: str) -> dict[str, int]:
    """Return the first number of each line of a file, by the line's name."""
    words = (line.split() for line in Path(path).read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 1}
