"""The thread that owns the device, and the work it is given."""
