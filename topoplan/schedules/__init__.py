"""Schedules by construction, as plans like any other: rings, double binary trees, one hop, the lowest tree, three
phases over servers."""

from topoplan.schedules.binary_trees import double_binary_tree
from topoplan.schedules.hierarchical import three_phase
from topoplan.schedules.low_latency import lowest_tree, one_hop_plan
from topoplan.schedules.ring import RING_KINDS, ring_plan

__all__ = ["RING_KINDS", "double_binary_tree", "lowest_tree", "one_hop_plan", "ring_plan", "three_phase"]
