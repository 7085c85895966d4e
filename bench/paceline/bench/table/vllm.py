"""vLLM as an engine of the table: alone, with its own n-gram drafts, and with Paceline's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from paceline.bench.table.engines import NONE, Server, free_port
from paceline.harness import ServiceProcess
from paceline.service.cpus import usable_cpus

NGRAM = "n-gram"  # its own drafts, by the settings of its documentation
LOOKUP = "paceline look-up"  # Paceline's proposer without a drafter service
_TOKENS = 8  # of a chain
_CONTEXT = 8192
_NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_PROPOSER = {"method": "custom_class", "model": "paceline.vllm.PacelineProposer"}


class Vllm(Server):
    """vLLM's server for CPUs in bfloat16, one process for each mode.

    Prompts are read anew each time. Each server takes about 4 GB of memory.

    Args:
        python: Path of a Python with vLLM and ``paceline[vllm]``.
        drafters: Specifications METHOD[:DIR][,KEY=VALUE...] by name, for modes of their own.
        modes: Those to start: NONE, NGRAM, LOOKUP, or the name of a drafter after "paceline ".
    """

    def __init__(
        self,
        python: str,
        model: Path,
        drafters: Mapping[str, str],
        modes: Sequence[str],
        users: int,
        every: int = 1,
    ) -> None:
        self._addresses = {mode: f"127.0.0.1:{free_port()}" for mode in modes}
        self._drafters = {f"paceline {name}": spec for name, spec in drafters.items()}
        binding = f"VLLM_CPU_OMP_THREADS_BIND=0-{usable_cpus() - 1}"
        plain = [
            *("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", binding, python),
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
            *("--max-model-len", str(_CONTEXT), "--max-num-seqs", str(users)),
            "--no-enable-prefix-caching",
        ]

        self._plain = plain
        super().__init__(
            "vllm bfloat16",
            {mode: self.command(mode) for mode in modes},
            every,
            lambda schema: {"structured_outputs": {"json": schema}},
        )

    def command(self, mode: str) -> list[str]:
        """The command line of the server of a mode; its port is ``{port}``."""
        if mode == NONE:
            return ["env", *self._plain]
        drafts = {**(_NGRAM if mode == NGRAM else _PROPOSER), "num_speculative_tokens": _TOKENS}
        served = [f"PACELINE_VLLM_ADDRESS={self._addresses[mode]}"] * (mode in self._drafters)
        return ["env", *served, *self._plain, "--speculative-config", json.dumps(drafts)]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await super().__aenter__()
            stack.push_async_callback(super().__aexit__, None, None, None)
            for mode, spec in self._drafters.items():
                if mode not in self.modes:
                    continue
                words = ["--device=cpu", "--load", spec, "--verifier", self._addresses[mode]]
                await stack.enter_async_context(ServiceProcess("drafter", words))
            self._joined = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._joined.aclose()
