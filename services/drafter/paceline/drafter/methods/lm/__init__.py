"""The method ``lm``: a small language model with the target's tokenizer and its own KV cache."""
