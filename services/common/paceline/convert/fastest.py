"""The faster format of a GGUF file's matrices on this processor: its blocks, or 8 bits."""

from __future__ import annotations

from time import perf_counter

import torch

from paceline.convert.model_source import ModelSource
from paceline.convert.pack import Packer
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.device import CPU, available_memory
from paceline.kernels.linear import PackedMatrix, multiply

BLOCKS = "gguf"  # the format of a file whose matrices are in blocks
_SMALL = 50 << 20  # bytes of a file below which nothing is measured
_SAMPLE = 128 << 20  # bytes of matrices in 8 bits that are measured
_GAIN = 0.95  # of the time of blocks that 8 bits may take
# A request: so many passes of so many rows. A prompt in two chunks, then tokens one at a time and
# in drafted rounds.
_REQUEST = {256: 2, 1: 64, 8: 64}
_TRIES = 3


def faster_weights(source: ModelSource, config: DecoderConfig, cores: int) -> str:
    """Return the format in which a request takes less time: ``config``'s, or "int8".

    Layers are packed in both and multiplied on all cores. A small file stays in its blocks, as does
    one whose 8 bits are more than twice the file or do not fit the memory that is free, and a
    mixture of experts.
    """
    weights = config.layer_weights
    if config.weights != BLOCKS or config.experts or source.weight_bytes < _SMALL:
        return config.weights
    if weights > 2 * source.weight_bytes or 2 * weights > available_memory():
        return config.weights
    layers = max(1, min(config.layers, _SAMPLE * config.layers // weights))
    formats = {"int8": source.config("int8"), config.weights: config}
    try:
        matrices = {name: _matrices(source, form, layers, cores) for name, form in formats.items()}
    except UnsupportedModelError:  # matrices of these shapes have no form in 8 bits
        return config.weights
    times = dict.fromkeys(formats, 0.0)
    for rows, passes in _REQUEST.items():
        tries = [
            {name: _pass(matrices[name], rows, cores) for name in formats} for _ in range(_TRIES)
        ]
        for name in formats:
            times[name] += passes * min(seconds[name] for seconds in tries)
    return "int8" if times["int8"] < _GAIN * times[config.weights] else config.weights


def _matrices(
    source: ModelSource, config: DecoderConfig, layers: int, cores: int
) -> list[PackedMatrix]:
    packer = Packer(config, source.weights(config, "cpu"), "cpu")
    parts = CPU.map(packer.layer, range(layers), cores)
    values = [part for layer in parts for part in layer.values()]
    return [part for part in values if isinstance(part, PackedMatrix)]


def _pass(matrices: list[PackedMatrix], rows: int, cores: int) -> float:
    """Return the time of one pass of some rows through matrices. Unit: seconds."""
    inputs = {matrix.ins: torch.randn(rows, matrix.ins) for matrix in matrices}

    def run(core: int) -> None:
        for matrix in matrices[core::cores]:
            multiply(inputs[matrix.ins], matrix)

    began = perf_counter()
    CPU.map(run, range(cores), cores)
    return perf_counter() - began
