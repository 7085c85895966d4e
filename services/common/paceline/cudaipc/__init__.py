"""Memory on a GPU that another process may map: allocated plainly, exported once."""

from paceline.cudaipc.driver import HANDLE_BYTES, UUID_BYTES, Driver, DriverError, cuda_driver
from paceline.cudaipc.memory import ExportedMemory, MappedMemory, NotMappable

__all__ = [
    "HANDLE_BYTES",
    "UUID_BYTES",
    "Driver",
    "DriverError",
    "ExportedMemory",
    "MappedMemory",
    "NotMappable",
    "cuda_driver",
]
