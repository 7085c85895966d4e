"""Ranks: the processes of one tensor-parallel model, and what they send each other.

Every linear layer is split by its outputs and attention by kv heads. A rank computes its columns
over whole rows, and the columns of all ranks are gathered: no sum is split, so that all values have
the bits of one device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.device import DeviceLost
from paceline.decoder.families import FAMILIES

_JOIN_SECONDS = 1800.0  # until all ranks have come: machines fetch images and hash weights
_STEP = timedelta(seconds=120)  # longest wait for other ranks in a step
_IDLE = timedelta(days=1000)  # longest wait for a step
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 0.5


class RanksLost(DeviceLost):
    """Another rank has ended, or does not answer: the model can run no more steps."""


class RanksDiffer(ValueError):
    """Ranks have different weights or options."""


class Ranks:
    """The ranks of a model, seen from one of them. One thread at a time uses it.

    Messages are neither encrypted nor authenticated: ranks belong into a network of their own.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        facts: Mapping[str, str],
        *,
        local: bool = False,
        children: Sequence[BaseProcess] = (),
        folder: TemporaryDirectory[str] | None = None,
    ) -> None:
        """Wait for all ranks, and connect with them if they agree.

        Args:
            store: Where they meet.
            rank: This one.
            size: Number of ranks.
            device: Device of its part of the model.
            facts: What must be equal in all ranks.
            local: Whether all are on this machine.
            children: At rank 0, the others, if this process has started them.
            folder: Holds what the store needs; removed when all have loaded their parts.

        Raises:
            RanksDiffer: Their facts differ.
            RanksLost: One did not come, or cannot be reached.
        """
        self.rank = rank
        """This one, counted from 0. Rank 0 serves, and the others follow its steps."""
        self.size = size
        """Number of ranks."""
        self._device = device
        self._children, self._folder = children, folder
        self._error: RanksLost | None = None
        with self.together("ranks could not meet"):
            store.set(f"facts {rank}", json.dumps(dict(facts)))
            everyone = [self._facts(store, each) for each in range(size)]
        for other, found in enumerate(everyone):
            for name, value in everyone[0].items():
                if found.get(name) != value:
                    raise RanksDiffer(
                        f"rank {other} has {name} {found.get(name)!r}, and rank 0 has {value!r}: "
                        "start all ranks with the same target and options"
                    )
        with self.together("ranks could not connect"):
            self._control = _gloo(PrefixStore("control", store), rank, size, local)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _STEP
                nccl = PrefixStore("nccl", store)
                self._data: Any = dist.ProcessGroupNCCL(nccl, rank, size, options)
            else:
                self._data = _gloo(PrefixStore("data", store), rank, size, local)

    def _facts(self, store: Store, rank: int) -> dict[str, str]:
        began = time.monotonic()
        while not store.check([f"facts {rank}"]):
            if (lost := self.lost()) is not None:
                raise lost
            if time.monotonic() - began > _JOIN_SECONDS:
                raise RanksLost(f"rank {rank} has not come after {_JOIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        found: dict[str, str] = json.loads(store.get(f"facts {rank}"))
        return found

    def part(self, config: DecoderConfig) -> DecoderConfig:
        """A configuration with the heads of one rank."""
        heads = config.q_heads // self.size, config.kv_heads // self.size
        return replace(config, q_heads=heads[0], kv_heads=heads[1])

    def rows(self, *widths: int) -> Tensor:
        """This rank's rows of a matrix that consists of parts with so many rows, int64 ``[n]``."""
        parts = torch.arange(sum(widths)).split(widths)
        return torch.cat([part.chunk(self.size)[self.rank] for part in parts])

    def all_gather(self, columns: Tensor) -> Tensor:
        """The columns of all ranks: ``[rows, width]`` of each to ``[rows, size * width]``. Raises
        ``RanksLost``: another rank did not answer."""
        rows, width = columns.shape
        parts = columns.new_empty(self.size, rows, width)
        with self.together("a step ended"):
            self._data.allgather(list(parts), columns.contiguous()).wait()
        return parts.transpose(0, 1).reshape(rows, self.size * width)

    def collect(self, part: Tensor) -> list[Tensor]:
        """Tensors of one shape and type, one of each rank, at rank 0; nothing elsewhere. Raises
        ``RanksLost``: another rank did not answer."""
        parts = [] if self.rank else [torch.empty_like(part) for _ in range(self.size)]
        with self.together("a step ended"):
            self._data.gather(parts, part, 0, _STEP).wait()
        return parts

    def tell(self, message: object) -> None:
        """Send a message, of values that JSON has, from rank 0 to all others. Raises ``RanksLost``:
        another rank did not answer."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self.together("a step could not begin"):
            for each in (torch.tensor([len(data)]), data):
                self._control.broadcast(each, 0, _STEP).wait()

    def listen(self) -> Any:
        """The next message of rank 0. Raises ``RanksLost``: rank 0 has ended."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.together("rank 0 ended"):
            self._control.broadcast(length, 0, _IDLE).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            self._control.broadcast(data, 0, _STEP).wait()
        return json.loads(data.numpy().tobytes())

    def wait(self) -> None:
        """Wait until all ranks have loaded their parts. Raises ``RanksLost``: one has ended."""
        with self.together("a rank could not load its part of the model"):
            here = torch.zeros(1)
            everyone = [torch.zeros(1) for _ in range(self.size)]
            self._control.allgather(everyone, here, _IDLE).wait()
        if self._folder is not None:
            self._folder.cleanup()

    def lost(self) -> RanksLost | None:
        """Why no more steps can run, as far as it is known; None: they can."""
        for rank, child in enumerate(self._children, 1):
            if self._error is None and child.exitcode is not None:
                self._error = RanksLost(
                    f"rank {rank} of {self.size} has ended with exit status {child.exitcode}; "
                    "its log says why"
                )
        return self._error

    def stop(self) -> None:
        """At rank 0: end the other ranks after their last step."""
        with suppress(RanksLost):
            self.tell(None)
        end_all(self._children)

    def kill(self) -> None:
        """At rank 0: end the ranks that this process started, at once."""
        end_all(self._children, seconds=0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body on all ranks. Any error stops the group, since the ranks are no longer in
        step. Raises ``RanksLost``: this body failed, or an earlier one did."""
        if self._error is not None:
            raise RanksLost(str(self._error))
        try:
            yield
        except RanksLost:
            raise
        except Exception as error:
            for child in self._children:  # one that has died explains the error
                child.join(_GRACE_SECONDS / self.size)
            lost = self.lost()
            if lost is None:
                lost = self._error = RanksLost(f"{what}, rank {self.rank} of {self.size}: {error}")
            raise lost from error


def check_split(config: DecoderConfig, ranks: int) -> None:
    """Check that so many ranks can share a model. Raises ``UnsupportedModelError``: they cannot."""
    names = ("kv_heads", "hidden", "intermediate", "vocab_size")
    odd = [f"{name} ({getattr(config, name)})" for name in names if getattr(config, name) % ranks]
    if odd:
        raise UnsupportedModelError(
            f"tensor_parallel is {ranks}, which does not divide the model's {', '.join(odd)}"
        )
    if FAMILIES[config.model_type].qk_norm == "rows" or config.experts or config.delta_layers:
        raise UnsupportedModelError(
            f"tensor_parallel is {ranks}, which models of type {config.model_type!r} do not support"
            ": norms over all heads of a row, experts and recurrent states are not split"
        )


def end_all(children: Sequence[BaseProcess], seconds: float = 5.0) -> None:
    """Wait so long for processes that were told to end, and kill the others."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
    for child in children:
        child.join()


def _gloo(store: Store, rank: int, size: int, local: bool) -> Any:
    """Connections over TCP; on one machine over its loopback interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _STEP
    options._devices = [
        gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, rank, size, options)
