"""Kernels for NVIDIA GPUs in Triton. Imported only where they run or are compiled."""
