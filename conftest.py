"""Which modules pytest leaves out when it collects doctests."""

from __future__ import annotations

from importlib.util import find_spec

# Commands, some of which need libraries that a plain installation does not bring.
collect_ignore_glob = ["tests/bench/*", "tests/faults/*"]
if not find_spec("torch"):
    collect_ignore_glob += [
        "collectives/backends/torch/*",
        "collectives/examples/train_*.py",
        "collectives/torch/*",
        "*/torch_arrays.py",
        "*/torch_entry_arrays.py",
    ]
