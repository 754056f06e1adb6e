"""Packing trees into links, with proof."""

from topoplan.packing.bounds import best_bound
from topoplan.packing.exact import pack_exact
from topoplan.packing.mwu import pack_mwu
from topoplan.packing.planner import plan

__all__ = ["best_bound", "pack_exact", "pack_mwu", "plan"]
