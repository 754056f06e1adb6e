"""Which modules pytest leaves out when it collects doctests."""

from __future__ import annotations

from importlib.util import find_spec

WITH_TORCH = [
    "collectives/backends/torch/*",
    "collectives/examples/train_*.py",
    "collectives/torch/*",
    "*/torch_arrays.py",
    "*/torch_entry_arrays.py",
]
collect_ignore_glob = [] if find_spec("torch") else WITH_TORCH
