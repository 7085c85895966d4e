"""NVIDIA GPUs: their device, kernels in Triton, CUDA graphs, products and memory that processes
share. Only :func:`paceline.device.device_of` imports it by itself, when a GPU is used."""

from paceline.cuda.device import CudaDevice, find_device
from paceline.cuda.kernels import load_kernels
from paceline.kernels import devices

__all__ = ["CudaDevice", "find_device"]
devices.LOADERS["cuda"] = load_kernels
