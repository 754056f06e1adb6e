"""NCCL's two files: the topology that it reads, and the graph of channels that it runs."""
