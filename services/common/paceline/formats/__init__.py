"""Names of number formats that can be asked for. Imports nothing, so that options know them without
torch."""

FLOATS = ("float32", "bfloat16")
"""Types of hidden states, and of weights and caches that are not quantised."""

WEIGHTS = ("auto", *FLOATS, "int8", "int4")
"""Formats of a model's weights. auto: as they are stored, bfloat16 for float16."""

KV_CACHE_DTYPES = ("auto", *FLOATS, "int8")
"""Types of caches. auto: that of hidden states. int8: with a scale a row."""
