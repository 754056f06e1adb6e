"""Double binary trees: the shape that the paper asks for, and plans that verify on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations

import pytest

import topoplan
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.verify import verify
from topoplan.schedules.binary_trees import double_binary_tree, in_order_tree, rooted_trees, two_trees


def depth(tree: Mapping[int, int], rank: int) -> int:
    return 1 + depth(tree, tree[rank]) if rank in tree else 0


def height(tree: Mapping[int, int], size: int) -> int:
    """Height of a tree that is checked to span the ranks from one root."""
    assert len(tree) == size - 1
    return max(depth(tree, rank) for rank in range(size))


def most_children(tree: Mapping[int, int]) -> int:
    parents = list(tree.values())
    return max((parents.count(parent) for parent in parents), default=0)


@pytest.mark.parametrize("size", [*range(2, 34), 63, 64, 65, 100])
def test_both_trees_are_binary_and_low_and_no_rank_is_inner_in_both(size: int) -> None:
    first, second = two_trees(range(size))
    for tree in (first, second):
        assert height(tree, size) == size.bit_length() - 1
        assert most_children(tree) <= 2
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize("size", [*range(3, 34), 64, 65])
@pytest.mark.parametrize("root", [0, 1, 2])
def test_a_root_stands_above_both_trees_and_no_other_rank_is_inner_in_both(size: int, root: int) -> None:
    first, second = rooted_trees(size, root)
    for tree in (first, second):
        assert root not in tree
        assert height(tree, size) == (size - 1).bit_length()
        assert most_children(tree) <= 2
        assert list(tree.values()).count(root) == 1
    assert set(first.values()) & set(second.values()) == {root}


def test_the_tree_numbers_its_positions_in_order() -> None:
    """Every position lies between those of its left and its right subtree (Sanders, Speck, Träff 2009, section 3)."""
    for size in range(1, 40):
        tree = in_order_tree(size)
        for child, parent in tree.items():
            ancestor = parent
            while ancestor in tree:
                above = tree[ancestor]
                assert (child < above) == (ancestor < above)
                ancestor = above


@pytest.mark.parametrize("name", ["dgx-1p", "dgx-1v", "dgx-2", "dgx-a100", "pcie-x8", "v100x4", "mi250x"])
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce"])
def test_the_plan_verifies_on_library_machines_with_half_the_buffer_on_each_tree(
    name: str, collective: str
) -> None:
    plan = double_binary_tree(topoplan.load(name), collective)
    report = verify(plan)
    assert plan.schedule == "double binary tree"
    assert [shard.share for shard in plan.shards] == [Fraction(1, 2)] * 2
    assert report.exact_rate is not None
    assert plan.height <= len(plan.ranks).bit_length()


def test_behind_a_switch_every_gpu_sends_at_most_twice_the_buffer() -> None:
    """An inner rank forwards two halves down and one up, a leaf one half up: half of the port rate on 16 GPUs."""
    assert verify(double_binary_tree(topoplan.load("dgx-2"))).exact_rate == 75
    assert verify(double_binary_tree(topoplan.load("dgx-2"), "broadcast", root=3)).exact_rate == 150


def test_all_allocations_of_a_dgx1v_and_all_roots_verify() -> None:
    machine = topoplan.load("dgx-1v")
    for size in (2, 3, 5, 7):
        for gpus in combinations(range(8), size):
            verify(double_binary_tree(machine, gpus=gpus))
    for root in range(8):
        plan = double_binary_tree(machine, "broadcast", root=root)
        verify(plan)
        assert plan.root == root


def test_a_hop_without_a_direct_link_is_relayed_over_the_fewest_links() -> None:
    """GPUs 3, 5 and 7 are a path with 7 in the middle: 3 to 5 passes 7, up and down."""
    plan = double_binary_tree(topoplan.load("dgx-1v"), gpus=[3, 5, 7])
    routes = {edge.route for shard in plan.shards for stage in shard.stages for edge in stage.edges}
    assert ("gpu3", "gpu5") not in routes
    assert any(len(route) == 3 and route[1] == "gpu7" for route in routes)
    assert "relayed" in plan.notes[0]


def test_a_reduce_follows_one_way_links_in_the_direction_of_the_data() -> None:
    devices = tuple(Device(f"gpu{i}", "gpu") for i in range(4))
    links = tuple(Link(f"gpu{i}", f"gpu{(i + 1) % 4}", "nvlink", 6.0) for i in range(4))
    for collective in ("allreduce", "broadcast", "reduce"):
        verify(double_binary_tree(Topology("one way", devices, links), collective))


def test_channels_are_chosen_as_for_packed_trees() -> None:
    machine = topoplan.load("dgx-1v")
    assert double_binary_tree(machine).channels == ("nvlink",)
    assert double_binary_tree(machine, channels="pcie").channels == ("pcie",)
    assert double_binary_tree(machine, gpus=[0, 5]).channels == ("pcie",)
    with pytest.raises(InfeasibleError, match="no NVLink path leads from"):
        double_binary_tree(machine, gpus=[0, 5], channels="nvlink")


def test_one_gpu_is_a_trivial_plan() -> None:
    assert verify(double_binary_tree(topoplan.load("dgx-1v"), gpus=[2])).exact_rate is None


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_other_collectives_are_refused_with_a_remedy(collective: str) -> None:
    with pytest.raises(UsageError, match=f"do not do {collective}; use allreduce, broadcast or reduce"):
        double_binary_tree(topoplan.load("dgx-1v"), collective)
