"""Networks by parameters and schedules dimension by dimension: rates of the papers' formulas, proved, and the sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import topoplan
from topoplan.errors import InfeasibleError, UsageError
from topoplan.model.closed_form import clock
from topoplan.plans.plan import Plan
from topoplan.schedules.hierarchical import bml, hierarchical, hips_ring, two_level


@pytest.mark.sampled
@pytest.mark.parametrize(("ports", "levels"), [(2, 2), (4, 2), (2, 3), (3, 3)])
def test_bcubes_reach_the_rate_of_bml(ports: int, levels: int) -> None:
    """k B N / (2 (N - 1)): k times a ring on one port; the packer proves that nothing is faster."""
    name, hosts = f"bcube:{ports},{levels}@10", ports**levels
    packed, made = topoplan.plan(name), bml(name)
    assert packed.rate == pytest.approx(levels * 10 * hosts / (2 * (hosts - 1)))
    assert (made.rate, made.gap, made.height) == (packed.rate, 0, levels)
    assert topoplan.verify(made).optimal


TORI = {"torus:3,3": 22.5, "torus:4,4": 64 / 3, "torus:2,2,2": 240 / 7, "torus:3,3,3": 405 / 13}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "rate"), [*TORI.items(), ("fat-tree:4", 16 / 3)])
def test_tori_and_fat_trees_reach_the_bound_of_their_ports(name: str, rate: float) -> None:
    packed = topoplan.plan(f"{name}@10")
    assert packed.rate == pytest.approx(rate)
    assert topoplan.verify(packed).optimal
    if name in TORI:
        assert hips_ring(f"{name}@10").rate == pytest.approx(rate)


def test_two_levels_send_one_buffer_from_each_server() -> None:
    """Eight GPUs add up first: 2 (S - 1) / S buffers leave a server of S, not eight times as many."""
    boxes = [topoplan.Server("dgx-a100", count=2)]
    pair = topoplan.cluster(boxes, nics=1, nic_gbps=200, nic_access="direct")
    sent = clock(two_level(pair))(1 << 20).link_bytes
    leaving = [size for (src, dst), size in sent.items() if "nic" in src and "switch" in dst]
    assert leaving == [1 << 20, 1 << 20]


@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(schedule, "torus:3,3", collective)
            for schedule in (bml, hips_ring)
            for collective in ("broadcast", "reduce", "allgather", "reduce_scatter")
        ),
        *(
            partial(hierarchical, "bcube:3,2", levels=levels)
            for levels in (("mesh",), ("ring",), ("mesh", "ps"), ("ps", "ring"))
        ),
    ],
)
def test_other_collectives_and_levels_are_verified(make: Callable[[], Plan]) -> None:
    made = make()
    assert topoplan.verify(made).rate == made.rate > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bcube:1,2", "give switches of 2 ports or more"),
        ("bcube:4,0", "1 level or more"),
        ("bcube:4", "'bcube:4' is not a network"),
        ("torus:3,1", "give sides of 2 or more"),
        ("torus:999,999", "has more than 65536 hosts"),
        ("torus:" + ",".join(["2"] * 9999), "has more than 65536 hosts"),
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


def test_refuses_schedules_that_do_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="are not a grid"):
        bml("torus:4,4")
    for machine, collective, levels, told in (
        ("torus:3,3", "allreduce", ("star",), "level 'star' is unknown"),
        (topoplan.nvswitch_cluster(2), "allreduce", ("mesh",) * 3, "3 levels do not fit 2 dimensions"),
        ("torus:3,3", "allgather", ("ps",), "a level of ps has one"),
    ):
        with pytest.raises(UsageError, match=told):
            hierarchical(machine, collective, levels=levels)
