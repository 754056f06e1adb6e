"""Files that NCCL reads: topology, graph of channels, tuner table; and scripts for nccl-tests."""
