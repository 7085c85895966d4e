"""Step times of a tiny target."""

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.step import measure


def test_contexts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = measure(tmp_path, "float32", rows=(1, 8), contexts=(32, 60), prefills=(16, 65))
    assert {context: list(rows) for context, rows in found["step_ms"].items()} == {"32": ["1", "8"]}
    assert list(found["prefill_ms"]) == ["16"]
    assert all(ms > 0 for ms in found["step_ms"]["32"].values())
