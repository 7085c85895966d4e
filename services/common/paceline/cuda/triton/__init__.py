"""Kernels for NVIDIA GPUs in Triton. The modules are imported where they run or are compiled."""
