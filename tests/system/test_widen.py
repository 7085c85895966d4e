"""`paceline bench widen`: wider models give the same tokens and drafts."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from system_support import EAGER, THREADS, make_prompts, write_block, write_layer, write_states
from transformers import AutoModelForCausalLM

from paceline.cli.main import main
from paceline.client import Client
from paceline.harness import local_services
from paceline.train.blocks import store_blocks

TOKENS = 24


def widen(target: Path, output: Path, *drafters: Path) -> None:
    words = ["bench", "widen", "--target", str(target), "--output", str(output), "--factor", "4"]
    assert main([*words, *(f"--drafter={folder}" for folder in drafters)]) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_wide_target_has_the_same_logits(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    widen(models[family], tmp_path)
    tokens = torch.tensor([make_prompts(1)[0]])
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (models[family], tmp_path / "target")
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    narrow, wide = (
        json.loads((folder / "config.json").read_text())
        for folder in (models[family], tmp_path / "target")
    )
    assert wide["hidden_size"] == 4 * narrow["hidden_size"]


async def outputs(folders: dict[str, Path]) -> dict[str, list[tuple[object, ...]]]:
    """Tokens and trees of a few texts by drafter."""
    target = folders["target"]
    arguments = ["--target", str(target), "--weights", "float32", "--schedule", "off"]
    loads = [
        f"--load=lm=lm:{folders['lm']}",
        f"--load=layer=longspec:{folders['layer']},target={target}",
        f"--load=states=eagle3:{folders['states']},target={target}",
        *(
            f"--load={n}=dspark:{folders[n]},target={target},weights=bfloat16"
            for n in ("block", "input")
        ),
    ]
    found: dict[str, list[tuple[object, ...]]] = {}
    with local_services(arguments, loads, THREADS) as (verifier, _):
        async with Client(verifier.address, drafting=EAGER) as client:
            for name, prompt in product(folders.keys() - {"target"}, make_prompts(2, seed=4)):
                text = client.generate(prompt, max_new_tokens=TOKENS, drafter=name, ignore_eos=True)
                trees = [(each.tree.tokens, each.tree.parents) async for each in text if each.tree]
                found.setdefault(name, []).append(((await text).token_ids, trees))
    return found


async def test_wide_models_have_the_same_tokens_and_drafts(
    models: dict[str, Path], tmp_path: Path
) -> None:
    target = models["qwen3"]
    folders = {"target": target, "lm": models["small"]}
    folders["layer"] = write_layer(target, tmp_path / "layer")
    folders["states"] = write_states(target, tmp_path / "states")
    for name in ("block", "input"):
        folders[name] = write_block(target, tmp_path / name, state_input=name == "input")
    store_blocks(folders["input"], ["markov_head.", ".mlp."])
    drafters = {name: folder for name, folder in folders.items() if name != "target"}
    widen(target, tmp_path / "wide", *drafters.values())
    wide = {name: tmp_path / "wide" / folder.name for name, folder in drafters.items()}
    narrow = await outputs(folders)
    assert all(trees for texts in narrow.values() for _, trees in texts)
    assert await outputs({"target": tmp_path / "wide" / "target", **wide}) == narrow


def test_a_drafter_of_another_target_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = write_layer(models["llama"], tmp_path / "layer")
    words = ["bench", "widen", "--target", str(models["mistral"]), "--output", str(tmp_path)]
    assert main([*words, f"--drafter={layer}"]) == 2
    assert "was made for a target" in capsys.readouterr().err
