"""A driver whose GPUs are pieces of main memory, for one process that plays both sides."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kv.cuda import HANDLE_BYTES, CudaDriver, DriverError


class FakeDriver(CudaDriver):
    """See :class:`CudaDriver`.

    Attributes:
        uuids: Of its devices.
        linked: Pairs (reader, other) that can reach each other.
        opened: Addresses that are open, each only once, as with the real one.
    """

    def __init__(self, uuids: tuple[bytes, ...] = (b"A" * 16, b"B" * 16)) -> None:
        self.uuids = uuids
        self.linked: set[tuple[int, int]] = set()
        self.memory: dict[int, Tensor] = {}
        self.opened: dict[int, Tensor] = {}
        self._next = 4096

    def devices(self) -> int:
        return len(self.uuids)

    def uuid(self, device: int) -> bytes:
        return self.uuids[device]

    def allocate(self, device: int, byte_size: int) -> int:
        if byte_size > 1 << 30:
            raise DriverError("out of memory")
        self._next += 4096
        self.memory[self._next] = torch.zeros(byte_size, dtype=torch.uint8)
        return self._next

    def free(self, device: int, address: int) -> None:
        del self.memory[address]

    def export(self, device: int, address: int) -> bytes:
        return bytes([device]) + address.to_bytes(8, "little") + bytes(HANDLE_BYTES - 9)

    def open(self, device: int, handle: bytes) -> int:
        address = int.from_bytes(handle[1:9], "little")
        if address not in self.memory or handle[0] != device or -address in self.opened:
            raise DriverError("invalid resource handle")
        self.opened[-address] = self.memory[address]
        return -address

    def size(self, device: int, address: int) -> int:
        return self._at(address).numel()

    def close(self, device: int, address: int) -> None:
        del self.opened[address]

    def reach(self, device: int, other: int) -> bool:
        return device == other or (device, other) in self.linked

    def view(self, device: int, address: int, byte_size: int) -> Tensor:
        for start, memory in (self.memory | self.opened).items():
            if start <= address and address + byte_size <= start + memory.numel():
                return memory[address - start : address - start + byte_size]
        raise DriverError("invalid address")

    def _at(self, address: int) -> Tensor:
        return (self.memory | self.opened)[address]
