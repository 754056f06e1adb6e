"""Which modules pytest leaves out when it collects doctests."""

from __future__ import annotations

from importlib.util import find_spec

# These are nothing without torch, which a plain installation does not bring.
collect_ignore_glob = [] if find_spec("torch") else ["collectives/backends/torch/*", "*/torch_arrays.py"]
