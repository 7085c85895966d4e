"""GPU memory shared by two real processes, and what becomes of one when the other is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch

from paceline.bench.gpu.checking import arguments, finish, report, require

SIZE = 64 << 20


def share() -> None:
    """A process that owns memory: tells how to map it, then does as it is told."""
    from paceline.kv.cuda_driver import cuda_driver
    from paceline.kv.cuda_memory import ExportedMemory

    owned = ExportedMemory(cuda_driver(), 0, SIZE)
    owned.bytes.copy_(torch.arange(SIZE, device="cuda") % 251)
    torch.cuda.synchronize()
    print(owned.device_uuid.hex(), owned.handle.hex(), flush=True)
    for line in sys.stdin:
        if line.startswith("write"):
            owned.bytes[:1000] = int(line.split()[1])
            torch.cuda.synchronize()
            print("written", flush=True)
        elif line.startswith("free"):
            owned.close()
            print("freed", flush=True)


def read(uuid: str, handle: str) -> None:
    """A process that maps it and tells what it reads, as often as it is asked."""
    from paceline.kv.cuda_driver import cuda_driver
    from paceline.kv.cuda_memory import MappedMemory

    torch.zeros(1, device="cuda")
    mapped = MappedMemory(cuda_driver(), 0, bytes.fromhex(uuid), bytes.fromhex(handle), 0, SIZE)
    for line in sys.stdin:
        if line.startswith("sum"):
            print(int(mapped.bytes[:1000].long().sum()), flush=True)
        elif line.startswith("check"):
            right = torch.arange(SIZE, device="cuda") % 251
            print(bool((mapped.bytes == right.to(torch.uint8)).all()), flush=True)
        elif line.startswith("close"):
            mapped.close()
            print(int(torch.ones(10, device="cuda").sum()), flush=True)


class Peer:
    """One of the processes."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.bench.gpu.ipc", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, line: str = "") -> str:
        """Its answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """As the kernel would, for want of memory."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def main() -> None:
    """Read, write, kill the reader, kill the owner, and count the memory that came back."""
    device, _ = arguments()
    if device.type == "cpu":
        report("skipped", "there is no CUDA IPC on a CPU")
        finish()
    from paceline.kv.cuda_driver import cuda_driver

    report("devices", cuda_driver().devices())
    torch.zeros(1, device=device)
    free_before = torch.cuda.mem_get_info()[0]
    owner = Peer("share")
    uuid, handle = owner.ask().split()
    first, second = Peer("read", uuid, handle), Peer("read", uuid, handle)
    require(first.ask("check") == "True", "the reader sees other bytes than the owner wrote")
    require(second.ask("sum") == first.ask("sum"), "two readers see different bytes")
    owner.ask("write 3")
    require(first.ask("sum") == "3000", "the reader does not see what was written later")
    first.kill()
    owner.ask("write 5")
    require(second.ask("sum") == "5000", "a killed reader took owner or other readers with it")
    owner.kill()
    # What reading gives now is not defined; letting go must work, and the context must live.
    survived = second.ask("close")
    report("reader_survives_the_owner", survived == "10")
    require(survived == "10", "a reader that lets go of a dead owner's memory cannot go on")
    second.kill()
    lost = free_before - torch.cuda.mem_get_info()[0]
    report("bytes_lost", lost)
    require(lost < SIZE // 2, f"{lost} bytes of GPU memory did not come back")
    finish()


if __name__ == "__main__":
    if sys.argv[1] == "share":
        share()
    elif sys.argv[1] == "read":
        read(*sys.argv[2:])
    else:
        main()
