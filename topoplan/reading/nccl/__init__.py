"""Read what NCCL writes: topology XML, debug logs, and the results of nccl-tests."""
