"""Networks by parameters and schedules dimension by dimension: rates of the papers' formulas, proved, and the sums."""

from __future__ import annotations

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from topoplan.errors import InfeasibleError, UsageError
from topoplan.model.closed_form import clock
from topoplan.schedules.hierarchical import bml, hierarchical, hips_ring, two_level


@pytest.mark.parametrize(
    ("name", "ports", "levels"),
    [("bcube:2,2", 2, 2), ("bcube:4,2", 4, 2), ("bcube:2,3", 2, 3), ("bcube:3,3", 3, 3)],
)
def test_bcubes_reach_the_rate_of_bml(name: str, ports: int, levels: int) -> None:
    """k B N / (2 (N - 1)): k times a ring on one port; the packer proves that nothing is faster."""
    hosts = ports**levels
    packed, made = topoplan.plan(f"{name}@10"), bml(f"{name}@10")
    assert packed.rate == pytest.approx(levels * 10 * hosts / (2 * (hosts - 1)))
    assert (made.rate, made.gap, made.height) == (packed.rate, 0, levels)
    assert topoplan.verify(made).optimal


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("torus:3,3", 22.5),
        ("torus:4,4", 64 / 3),
        ("torus:2,2,2", 240 / 7),
        ("torus:3,3,3", 405 / 13),
        ("fat-tree:4", 16 / 3),
    ],
)
def test_tori_and_fat_trees_reach_the_bound_of_their_ports(name: str, rate: float) -> None:
    packed = topoplan.plan(f"{name}@10")
    assert packed.rate == pytest.approx(rate)
    assert topoplan.verify(packed).optimal
    if name.startswith("torus"):
        assert hips_ring(f"{name}@10").rate == pytest.approx(rate)


def test_bytes_of_each_port_are_equal() -> None:
    """2 (N - 1) / N of the buffer over k ports, into and out of every host."""
    timeline = clock(bml("bcube:4,2@10"))(1 << 20)
    assert len(timeline.link_bytes) == 64
    assert set(timeline.link_bytes.values()) == {2 * 15 / 16 / 2 * (1 << 20)}


def test_two_levels_send_one_buffer_from_each_server() -> None:
    """Eight GPUs add up first: 2 (S - 1) / S buffers leave a server of S, not eight times as many."""
    boxes = [topoplan.Server("dgx-a100", count=2)]
    pair = topoplan.cluster(boxes, nics=1, nic_gbps=200, nic_access="direct")
    sent = clock(two_level(pair))(1 << 20).link_bytes
    leaving = [size for (src, dst), size in sent.items() if "nic" in src and "switch" in dst]
    assert leaving == [1 << 20, 1 << 20]


@pytest.mark.parametrize("levels", [("mesh",), ("ring",), ("mesh", "ps"), ("ps", "ring")])
def test_sums_are_right_on_every_rank(levels: tuple[str, ...]) -> None:
    made = hierarchical("bcube:3,2", levels=levels)
    assert topoplan.verify(made).rate == made.rate
    values = [np.arange(1000, dtype=np.float64) * (rank + 1) for rank in range(9)]
    with Communicator(made) as comm:
        for result in comm.all_reduce(values):
            np.testing.assert_array_equal(result, np.arange(1000) * 45.0)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allgather", "reduce_scatter"])
def test_other_collectives_are_verified(collective: str) -> None:
    for make in (bml, hips_ring):
        made = make("torus:3,3", collective)
        assert topoplan.verify(made).rate == made.rate > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bcube:1,2", "give switches of 2 ports or more"),
        ("bcube:4,0", "1 level or more"),
        ("bcube:4", "'bcube:4' is not a network"),
        ("torus:3,1", "give sides of 2 or more"),
        ("torus:99,99", "has more than 4096 hosts"),
        ("torus:" + ",".join(["2"] * 9999), "has more than 4096 hosts"),
        ("bcube:10,9999", "has more than 4096 hosts"),
        ("bcube:99999999,99999999", "has more than 4096 hosts"),
        ("fat-tree:99999998", "has more than 4096 hosts"),
        ("bcube:" + "9" * 5000 + ",2", "has a number of more than 9 digits"),
        ("torus:3,3@" + "9" * 5000, "has a number of more than 9 digits"),
        ("fat-tree:3", "an even number of ports"),
        ("ring:8", "use bcube:N,K, torus:A,B,…, fat-tree:K"),
        ("torus:3,3@0", "bandwidth of a port must be above 0 GB/s"),
    ],
)
def test_networks_that_are_none(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        topoplan.load(name)


def test_schedules_that_do_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="are not a grid"):
        bml("torus:4,4")
    with pytest.raises(UsageError, match="level 'star' is unknown"):
        hierarchical("torus:3,3", levels=("star",))
    with pytest.raises(UsageError, match="3 levels do not fit 2 dimensions"):
        hierarchical(topoplan.nvswitch_cluster(2), levels=("mesh",) * 3)
    with pytest.raises(UsageError, match="a level of ps has one"):
        hierarchical("torus:3,3", "allgather", levels=("ps",))
