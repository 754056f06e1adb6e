"""Schedules by construction, as plans like any other: rings, double binary trees, one hop, the lowest tree, three
phases over servers."""

from topoplan.schedules.double_binary_tree import double_binary_tree
from topoplan.schedules.lowest_tree import lowest_tree
from topoplan.schedules.one_hop import one_hop
from topoplan.schedules.rings.ring import RING_KINDS, ring
from topoplan.schedules.three_phase import three_phase

__all__ = ["RING_KINDS", "double_binary_tree", "lowest_tree", "one_hop", "ring", "three_phase"]
