"""The memory of KV caches: how it lies, and the shared segments that hold it."""
