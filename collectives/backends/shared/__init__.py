"""Ranks of one host in shared memory, however their processes were started."""
