"""Targets with random heads for multi-token prediction in every layout, and a dense reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decoder_cases import save_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from .models import VOCAB, Dense, FakeStates

NAMES: dict[str, dict[str, str]] = {
    "qwen": {
        "layer": "mtp.layers.{head}.", "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight", "proj": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
    "mimo": {
        "layer": "model.mtp_layers.{head}.",
        "enorm": "model.mtp_layers.{head}.token_layernorm.weight",
        "hnorm": "model.mtp_layers.{head}.hidden_layernorm.weight",
        "proj": "model.mtp_layers.{head}.input_proj.weight",
        "norm": "model.mtp_layers.{head}.final_layernorm.weight",
    },
    "deepseek": {
        "layer": "model.layers.{layer}.", "enorm": "model.layers.{layer}.enorm.weight",
        "hnorm": "model.layers.{layer}.hnorm.weight", "proj": "model.layers.{layer}.eh_proj.weight",
        "norm": "model.layers.{layer}.shared_head.norm.weight",
    },
}  # fmt: skip
"""Names of the published checkpoints."""


@dataclass(frozen=True)
class Layout:
    """A target of a family with heads in a layout."""

    names: str
    family: str
    heads: int = 1
    model_type: str = ""
    own_head: bool = False
    shape: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "Qwen3.5": Layout("qwen", "qwen3-5"),
    "Qwen3.5, two heads": Layout("qwen", "qwen3-5", heads=2),
    "MiMo": Layout("mimo", "qwen2", model_type="mimo"),
    "MiMo, tied": Layout("mimo", "qwen2", model_type="mimo", shape={"tie_word_embeddings": True}),
    "DeepSeek, GLM-4": Layout("deepseek", "glm4"),
    "DeepSeek, own LM head": Layout("deepseek", "llama", own_head=True),
    "DeepSeek, three heads": Layout("deepseek", "qwen3", heads=3),
    "DeepSeek, experts": Layout("deepseek", "qwen3-moe"),
}


def write_target(folder: Path, name: str) -> Path:
    """Writes the target of a layout, with random weights."""
    layout = LAYOUTS[name]
    save_model(folder, layout.family, vocab_size=VOCAB, eos_token_id=None, **layout.shape)
    described = json.loads((folder / "config.json").read_text())
    file = folder / "model.safetensors"
    weights, layers = load_file(file), described["num_hidden_layers"]
    block = block_of(folder, described, seed=len(name))
    torch.manual_seed(3)
    hidden, names = described["hidden_size"], NAMES[layout.names]
    for head in range(layout.heads):
        at = {"head": head, "layer": layers + head}
        beginning = "model.layers.0."
        for part, tensor in block.items():
            if part.startswith(beginning):
                noise = 0.05 * torch.randn_like(tensor)
                stored = names["layer"].format(**at) + part.removeprefix(beginning)
                weights[stored] = tensor + noise
        for part in ("enorm", "hnorm", "norm"):
            weights[names[part].format(**at)] = 1 + 0.3 * torch.randn(hidden)
        projection = torch.randn(hidden, 2 * hidden) / hidden**0.5
        weights[names["proj"].format(**at)] = projection
        if layout.own_head:
            own = torch.randn(VOCAB, hidden) / 4
            weights[names["layer"].format(**at) + "shared_head.head.weight"] = own
    described["num_nextn_predict_layers"] = layout.heads
    if layout.model_type:
        described |= {"model_type": layout.model_type, "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def block_of(folder: Path, described: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights of a model of one layer with attention."""
    config = one_layer(folder, described)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15 if parameter.dim() > 1 else 0.1)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def one_layer(folder: Path, described: dict[str, Any]) -> Any:
    """The configuration of a target with one layer, which has attention."""
    change: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return AutoConfig.for_model(
        described["model_type"].replace("mimo", "qwen2"),
        **{k: v for k, v in (described | change).items() if k not in ("model_type", "auto_map")},
    )


class DenseMtp(Dense):
    """Heads as transformers and plain torch compute them: a model of one layer, whose final norm is
    the head's, over the projection of embeddings and hidden states."""

    def __init__(self, folder: Path, name: str) -> None:
        self.layout = LAYOUTS[name]
        described = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.layers, self.eps = described["num_hidden_layers"], described["rms_norm_eps"]
        self.hidden = described["hidden_size"]
        self.offset = float(self.layout.names == "qwen")  # weights of norms are 1 + w
        self.models = [self._model(folder, described, head) for head in range(self.layout.heads)]

    def _name(self, part: str, head: int) -> str:
        return NAMES[self.layout.names][part].format(head=head, layer=self.layers + head)

    def _model(self, folder: Path, described: dict[str, Any], head: int) -> Any:
        model = AutoModelForCausalLM.from_config(
            one_layer(folder, described), dtype=torch.float32
        ).eval()
        base = self._name("layer", head)
        state = {
            f"model.layers.0.{name.removeprefix(base)}": tensor
            for name, tensor in self.weights.items() if name.startswith(base)
        }  # fmt: skip
        table = self.weights["model.embed_tokens.weight"]
        lm_head = self.weights.get("lm_head.weight", table)
        state |= {
            "model.embed_tokens.weight": table,
            "model.norm.weight": self.weights[self._name("norm", head)],
            "lm_head.weight": self.weights.get(f"{base}shared_head.head.weight", lm_head),
        }
        experts = [n for n in model.state_dict() if ".experts." in n and n not in state]
        assert not experts, experts
        own = set(model.state_dict())
        model.load_state_dict({name: state[name] for name in own if name in state}, strict=True)
        return model

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled * (self.weights[name] + self.offset)

    def run(self, head: int, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the last token, and what the next level reads."""
        embedded = self.norm(
            self.weights["model.embed_tokens.weight"][torch.tensor(tokens)],
            self._name("enorm", head),
        )
        hidden = self.norm(hidden, self._name("hnorm", head))
        pair = [hidden, embedded] if self.layout.names == "mimo" else [embedded, hidden]
        x = torch.cat(pair, -1) @ self.weights[self._name("proj", head)].T
        model, before, after = self.models[head], [], []
        hooks = [
            model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0])),
            model.model.norm.register_forward_hook(lambda _, __, out: after.append(out)),
        ]
        logits = model(inputs_embeds=x[None]).logits[0, -1]
        for hook in hooks:
            hook.remove()
        again = (before if self.layout.names == "deepseek" else after)[0]
        return logits, again[0, -1]

    def after(self, text: Sequence[int], path: Sequence[int], states: FakeStates) -> Tensor:
        """Logits after a drafted path, ``[V]``: each level by its head over the whole text."""
        read = states.states[: len(text) - 1]
        if self.layout.names != "mimo":
            read = self.norm(read, "model.norm.weight")
        outputs: list[Tensor] = []
        for level in range(len(path) + 1):
            hidden = torch.cat([read, *(each[None] for each in outputs)])
            head = min(level, self.layout.heads - 1)
            logits, output = self.run(head, [*text[1:], *path[:level]], hidden)
            outputs.append(output)
        return logits
