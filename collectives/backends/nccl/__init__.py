"""One rank per process and GPU, joined by NCCL."""
