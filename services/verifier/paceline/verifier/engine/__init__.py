"""The engine: the thread that owns the device, and its jobs."""
