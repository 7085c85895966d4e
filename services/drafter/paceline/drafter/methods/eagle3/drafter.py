"""The EAGLE-3 drafter: a tree by one layer that reads its own hidden states level by level.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3. A position's input is the token there and the hidden state of the
position before it: of the text the target's, outputs of a low, a middle and a high layer fused; of
a drafted token the layer's own output at its parent. Trees grow as in
:mod:`paceline.drafter.methods.feedback`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.decoder import DecoderConfig
from paceline.decoder.linear import Linear
from paceline.drafter.methods.eagle3.config import Eagle3Config
from paceline.drafter.methods.feedback import FeedbackDrafter, FeedbackLayers
from paceline.drafter.methods.layers import LayerWeights, linear
from paceline.kernels import Program, send


class Eagle3Layer(FeedbackLayers):
    config: Eagle3Config

    def record(self, tensors: LayerWeights) -> list[Program]:
        """Return what writes keys and values, what reads a text, and what drafts.

        The second reads :meth:`states`, the last reads outputs of the layer at the positions
        before; tap 0 of both are these outputs.
        """
        self._norms = _state_norms(self.config, tensors.tensors)
        qkv = [tensors.tensors[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
        halves = torch.cat(qkv).chunk(2, dim=1)
        products = [linear([half.contiguous()], self.bits) for half in halves]
        record = partial(_record, self, tensors, products)
        return [record(fused=True, outputs=False), record(fused=True), record(fused=False)]

    def states(self, states: Tensor) -> Tensor:
        """Return the target's states ``[n, states]`` as inputs: normalised if the layer does so."""
        if self._norms is None:
            return super().states(states)
        wide = send(states, self.device).float().unflatten(1, (len(self._norms), -1))
        scale = (wide.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        normed: Tensor = wide * scale * self._norms
        return normed.flatten(1).to(self.dtype)


def _state_norms(config: Eagle3Config, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weights of the norms of the target's states, float32 ``[norms, width]``."""
    names = [f"fc_norm.{index}.weight" for index in range(len(config.taps) * config.fc_norm)]
    names += ["input_norm.weight"] * config.norm_before_fc
    return torch.stack([weights[name].float() for name in names]) if names else None


def _record(
    layer: Eagle3Layer,
    tensors: LayerWeights,
    qkv: Sequence[Linear],
    *,
    fused: bool,
    outputs: bool = True,
) -> Program:
    """Tokens and hidden states to logits.

    ``qkv`` are the products of both halves of the layer's input, embedding and hidden state. The
    hidden states are the target's if ``fused``, else own outputs. Without ``outputs``, the program
    ends with keys and values.
    """
    config, embedding, base = layer.config, layer.embedding, "layers.0."
    program = tensors.recorder(layer.dtype)
    embedded = program.embed(embedding.embedding)
    x = program.input(config.states if fused else config.hidden)
    if fused:
        x = program.multiply(x, tensors.matrix("fc"))
    inputs = program.add_norm(embedded, 0, tensors.norm(f"{base}input_layernorm"))
    hidden = program.add_norm(x, 0, tensors.norm(f"{base}hidden_norm"))
    heads = program.multiply(hidden, qkv[1])
    program.add(heads, program.multiply(inputs, qkv[0]))
    q = program.rotate(heads, tensors.head_norms(base) if config.qk_norm else None, 0)
    if not outputs:
        return program.finish()
    x = program.keep_all(hidden if config.norm_before_residual else x)
    attended = program.attend(q, 0, config.window or None)
    delta = program.multiply(attended, tensors.matrix(f"{base}self_attn.o_proj"))
    program.add(x, tensors.feed_forward(program, x, delta, base))
    x = program.select(x)
    final = program.add_norm(x, 0, tensors.norm("norm"))
    program.tap(final if config.norm_output else x, 0)
    program.multiply(final, embedding.head)
    return program.finish()


class Eagle3Drafter(FeedbackDrafter):
    method: ClassVar[str] = "eagle3"
    label: ClassVar[str] = "EAGLE-3"
    recipe: ClassVar[str] = "paceline.train.recipes.eagle3:Eagle3Recipe"
    layer_type = Eagle3Layer
    shape_type = Eagle3Config

    @classmethod
    def read_config(
        cls, folder: Path, target: DecoderConfig | None
    ) -> tuple[Eagle3Config, torch.dtype]:
        config, dtype = super().read_config(folder, target)
        longrope = config.rope_parameters.get("rope_type") == "longrope"  # depends on the length
        if target is not None and not longrope:  # published ones name their training length
            longest = max(config.max_position, target.max_position)
            config = replace(config, max_position=longest)
        return config, dtype
