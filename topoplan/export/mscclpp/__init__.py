"""Execution plans of MSCCL++: how shares become chunks, what each rank does in a tree, and the file."""
