"""Memory of KV caches: layouts, shared-memory segments, and pages of a GPU pool."""
