"""A stretched target is the same function, and a drafter goes with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.stretch import fit_drafter, stretch
from paceline.decoder import Decoder
from paceline.drafter import LoadError, Resources
from paceline.drafter.acceptance import accepted_lengths, record
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"


@pytest.fixture(scope="module")
def demo_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A little stretched demo target, and a random layer for the demo target."""
    work = tmp_path_factory.mktemp("stretch")
    stretch(DEMO, work / "large", layers=10, intermediate=2560)
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(DEMO)
    weights = LongSpecModel(config).state_dict()
    save_longspec(work / "layer", config, weights, TargetRef.of(DEMO))
    return work / "large", work / "layer"


def load(layer: Path, target: Path) -> LongSpecDrafter:
    return LongSpecDrafter.load(layer, {"target": str(target)}, Resources())


def test_the_demo_target_stretched_has_the_same_bits(demo_pair: tuple[Path, Path]) -> None:
    prompt = list(range(5, 400))
    small, large = (
        record(Decoder.load(folder, torch.bfloat16), prompt, 16) for folder in (DEMO, demo_pair[0])
    )
    assert large.tokens == small.tokens
    for ours, theirs in zip(large.cache.layer(9), small.cache.layer(7), strict=True):
        assert torch.equal(ours, theirs)


def test_its_drafter_drafts_as_before(demo_pair: tuple[Path, Path], tmp_path: Path) -> None:
    large, layer = demo_pair
    with pytest.raises(LoadError, match="made for a target with weights"):
        load(layer, large)
    fit_drafter(layer, large, tmp_path / "fitted")
    lengths = [
        accepted_lengths(load(folder, target), record(Decoder.load(target, "bfloat16"), [1, 2], 40))
        for folder, target in ((layer, DEMO), (tmp_path / "fitted", large))
    ]
    assert lengths[0] == lengths[1]


def test_added_layers_have_no_outputs_and_the_last_stays_last(demo_pair: tuple[Path, Path]) -> None:
    small, large = (load_file(folder / "model.safetensors") for folder in (DEMO, demo_pair[0]))
    for layer in (7, 8):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert not large[f"model.layers.{layer}.{name}.weight"].any()
            assert small[f"model.layers.7.{name}.weight"].any()
    name = "self_attn.q_proj.weight"
    assert torch.equal(large[f"model.layers.9.{name}"], small[f"model.layers.7.{name}"])


def test_what_cannot_be_stretched_is_refused(demo_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot have 4"):
        stretch(DEMO, tmp_path / "less", layers=4)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, vocab_size=32, num_attention_heads=2, mlp_bias=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="no Llama-type model"):
        stretch(tmp_path / "biased", tmp_path / "large")
    torch.manual_seed(0)
    first = LongSpecConfig.for_target(DEMO, layer=0)
    save_longspec(tmp_path / "first", first, LongSpecModel(first).state_dict(), TargetRef.of(DEMO))
    with pytest.raises(ValueError, match="expected the last"):
        fit_drafter(tmp_path / "first", demo_pair[0], tmp_path / "fitted")
