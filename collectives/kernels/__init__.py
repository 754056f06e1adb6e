"""CUDA kernels that join and copy many chunks in one launch, and the tables that tell them which."""

from collectives.kernels.launching import DeviceWork, Kernels
from collectives.kernels.source import kernel_names, kernel_source
from collectives.kernels.work import Chunks, Work, work_of

__all__ = ["Chunks", "DeviceWork", "Kernels", "Work", "kernel_names", "kernel_source", "work_of"]
