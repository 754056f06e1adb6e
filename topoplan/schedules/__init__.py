"""Baselines that packed trees are compared with: rings and double binary trees, as plans like any other."""

from topoplan.schedules.double_binary_tree import double_binary_tree
from topoplan.schedules.ring import RING_KINDS, ring

__all__ = ["RING_KINDS", "double_binary_tree", "ring"]
