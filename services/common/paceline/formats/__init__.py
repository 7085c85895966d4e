"""Names of number formats that can be asked for. Imports nothing, so that options know them without
torch."""

FLOATS = ("float32", "bfloat16")
"""Types of hidden states, and of weights and caches that are not quantised."""

WEIGHTS = ("auto", "stored", *FLOATS, "int8", "int4")
"""Formats of a model's weights. stored: as they are, bfloat16 for float16. auto: the same, or int8
for a GGUF file in blocks that is faster in int8 on this processor."""

KV_CACHE_DTYPES = ("auto", *FLOATS, "int8")
"""Types of caches. auto: that of hidden states. int8: with a scale a row."""

SECTION = "paceline"  # section of config.json in the drafters' folders of this project
