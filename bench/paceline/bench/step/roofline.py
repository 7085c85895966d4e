"""The shortest time of a step: its bytes over the bandwidth, its operations over the peaks.

``probe.c``, compiled here, measures both on as many threads as the decoder uses.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.step.engines import CHUNK, Figures
from paceline.decoder import DecoderConfig

PEAKS = {
    "amx": ("avx512", "amx_bf16", "amx_int8"),
    "avx512bf16": ("avx512", "avx512_bf16", "avx512_vnni"),
    "avx512vnni": ("avx512", "avx512", "avx512_vnni"),
    "avx512": ("avx512", "avx512", "avx512_int16"),
    "avxvnni": ("avx2", "avx2", "avx_vnni"),
    "avx2": ("avx2", "avx2", "avx2_int16"),
}  # by level of the CPU kernels: the probe for float32, for bfloat16 and for quantised products
# Of a weight: blocks of 32 have a float16 scale, those of int4 a float16 minimum too.
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 1 / 2 + 4 / 32}


class Roofline:
    """An engine that is as fast as the machine allows.

    Weights and KV are read once a step; the head stays in 8 bit under int4. Attention computes
    in float32, but with tiles or the dot product of AVX512_BF16 for models whose KV is bfloat16.
    Blocks of a GGUF file take its size. Figures contain the machine's rates too.
    """

    def __init__(
        self, config: DecoderConfig, weights: str, level: str, threads: int, target: Path
    ) -> None:
        self.name = f"roofline {weights}"
        weights = config.weights if weights == "stored" else weights
        self._config, self._threads = config, threads
        self._layers = config.layer_weights
        self._head = config.hidden * config.vocab_size
        if weights in _BYTES:
            head_bytes = _BYTES["int8" if weights == "int4" else weights]
            self._bytes = self._layers * _BYTES[weights] + self._head * head_bytes
        else:
            self._bytes = float(target.stat().st_size)
        floats, halves, blocks = PEAKS[level]
        linear = {"float32": floats, "bfloat16": halves}.get(weights, blocks)
        own = weights == "bfloat16" or (level in ("amx", "avx512bf16") and weights != "float32")
        attention = halves if own else floats
        self._probes = (f"read:{self._bytes:.0f}", linear, attention)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def measure(self, context: int, rows: Sequence[int]) -> Figures:
        """See :class:`StepEngine`. Raises OSError without a working C compiler."""
        rates = self._rates()
        chunks = ((min(CHUNK, context - start), start) for start in range(0, context, CHUNK))
        return {
            "prefill_s": sum(self._ms(rates, *chunk, logits=1) for chunk in chunks) / 1e3,
            "tokens_per_s": 1e3 / self._ms(rates, 1, context, 1),
            **{f"ms_{n}": self._ms(rates, n, context, n if n < CHUNK else 1) for n in rows},
            **dict(zip(("read_gb_s", "linear_gop_s", "attention_gop_s"), rates, strict=True)),
        }

    def _ms(self, rates: Sequence[float], rows: int, context: int, logits: int) -> float:
        """Of `rows` rows behind `context` positions, `logits` of them with logits."""
        config = self._config
        seen = sum(min(window or context, context) for window in config.windows)
        block = 1 if logits == rows else rows / 2  # rows of a tree see few others
        attention = config.q_heads * config.head_dim * rows * (seen + config.layers * block)
        computing = 2 * (rows * self._layers + logits * self._head) / rates[1]
        computing += 4 * attention / rates[2]
        data = self._bytes + seen * config.kv_bytes_per_token / config.layers
        return max(data / rates[0], computing) / 1e6

    def _rates(self) -> list[float]:
        """10^9 bytes per second; 10^9 operations per second of linear layers and attention."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        probe = [self._program(), *self._probes]
        output = subprocess.check_output(probe, env=environment, text=True)
        return [float(line.split()[1]) for line in output.splitlines()]

    def _program(self) -> str:
        """Path of the probe, compiled at the first call."""
        if self._folder is not None:
            return f"{self._folder.name}/probe"
        folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        source = str(Path(__file__).with_name("probe.c"))
        command = [os.environ.get("CC", "gcc"), "-O3", "-fopenmp", source, "-o"]
        made = subprocess.run(
            [*command, f"{folder.name}/probe"], stderr=subprocess.PIPE, text=True, check=False
        )
        if made.returncode:
            raise OSError(f"{' '.join(command)}: {made.stderr[-2000:]}")
        self._folder = folder
        return f"{folder.name}/probe"
