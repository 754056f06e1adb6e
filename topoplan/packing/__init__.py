"""Packing trees into links, with proof."""

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.packing.exact import pack_exact
from topoplan.packing.mwu import pack_mwu
from topoplan.packing.planner import plan

__all__ = ["best_bound", "pack_exact", "pack_mwu", "plan"]
