"""The byte-level BPE tokenizer that all demo models share."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.train.corpus import Document

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `vocabulary` tokens from `texts`.

    Every text round-trips. Id 0 is `<|endoftext|>`, which both opens and ends
    a document; `encode` adds no special token by itself. `context` (tokens) is only recorded.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a model folder.

    Raises FileNotFoundError if the folder holds no tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer.json: give a model folder")
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def encode_all(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]
) -> list[list[int]]:
    """Token ids of each document, whole and without special tokens."""
    # The Rust tokenizer below does not warn that a file is longer than the context.
    inner = tokenizer.backend_tokenizer
    return [e.ids for e in inner.encode_batch([d.text for d in documents])]
