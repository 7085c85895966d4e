"""Special tokens with which a model is asked for the middle between a prefix and a suffix, also
behind other files of a repository ("fill in the middle")."""

from __future__ import annotations

import json

FIM_TEXTS = {
    "fim_prefix_token": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suffix_token": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_middle_token": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    "fim_pad_token": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_repo_token": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_file_token": ("<|file_sep|>",),
}  # fmt: skip
"""Known texts of each, which different models have, by names as those of transformers."""


def fim_tokens(tokenizer: bytes) -> dict[str, str]:
    """Return the texts of the tokens that a tokenizer.json adds, by name."""
    added = json.loads(tokenizer or b"{}").get("added_tokens") or ()
    texts = {token["content"] for token in added}
    first = {name: next(filter(texts.__contains__, known), "") for name, known in FIM_TEXTS.items()}
    return {name: text for name, text in first.items() if text}
