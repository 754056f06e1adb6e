"""CUDA kernels: their sources, compilation by NVRTC, and launches."""
