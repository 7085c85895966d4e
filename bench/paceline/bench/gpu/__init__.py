"""Speed on an NVIDIA GPU, measured by `make gpu-check` after the tests of ``tests/gpu``."""
