"""GPU memory shared by processes, and what happens when one of them is killed."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

SIZE = 64 << 20


def share(connection: str) -> None:
    """Own memory, pass and print how to map it, and obey lines of standard input."""
    from paceline.cuda.memory import ExportedMemory, cuda_driver

    owned = ExportedMemory(cuda_driver(), 0, SIZE)
    owned.bytes.copy_(torch.arange(SIZE, device="cuda") % 251)
    torch.cuda.synchronize()
    with socket.socket(fileno=int(connection)) as own:
        socket.send_fds(own, [b"1"], [owned.file] if owned.file >= 0 else [])
    print(owned.device_uuid.hex(), owned.handle.hex(), flush=True)
    for line in sys.stdin:
        owned.bytes[:1000] = int(line)
        torch.cuda.synchronize()
        print("written", flush=True)


def read(uuid: str, handle: str, file: str) -> None:
    """Map the memory, and answer lines of standard input."""
    from paceline.cuda.memory import MappedMemory, cuda_driver

    torch.zeros(1, device="cuda")
    names = (bytes.fromhex(uuid), bytes.fromhex(handle))
    mapped = MappedMemory(cuda_driver(), 0, *names, 0, SIZE, int(file))
    for line in sys.stdin:
        if line.startswith("sum"):
            print(int(mapped.bytes[:1000].long().sum()), flush=True)
        elif line.startswith("check"):
            right = torch.arange(SIZE, device="cuda") % 251
            print(bool((mapped.bytes == right.to(torch.uint8)).all()), flush=True)
        elif line.startswith("close"):
            mapped.close()
            print(int(torch.ones(10, device="cuda").sum()), flush=True)


class Process:
    def __init__(self, *words: str, files: list[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=files,
        )

    def answer(self, line: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_memory_is_shared_and_survives_deaths(device: torch.device) -> None:
    torch.zeros(1, device=device)
    free = torch.cuda.mem_get_info()[0]
    ours, theirs = socket.socketpair()
    owner = Process("share", str(theirs.fileno()), files=[theirs.fileno()])
    _, files, _, _ = socket.recv_fds(ours, 1, 1)
    words = ("read", *owner.answer().split(), str(files[0] if files else -1))
    first, second = Process(*words, files=files), Process(*words, files=files)
    for file in files:
        os.close(file)
    try:
        assert first.answer("check") == "True"
        assert second.answer("sum") == first.answer("sum")
        owner.answer("3")
        assert first.answer("sum") == "3000"
        first.kill()
        owner.answer("5")
        assert second.answer("sum") == "5000"
        owner.kill()
        if files:
            assert second.answer("sum") == "5000"
        # By a handle of CUDA IPC, reading is undefined from here on; closing must work, and the
        # context must live.
        assert second.answer("close") == "10"
    finally:
        for process in (owner, first, second):
            process.kill()
        ours.close()
        theirs.close()
    assert free - torch.cuda.mem_get_info()[0] < SIZE // 2, "GPU memory was not freed"


if __name__ == "__main__":
    {"share": share, "read": read}[sys.argv[1]](*sys.argv[2:])
