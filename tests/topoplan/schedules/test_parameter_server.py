"""Parameter servers: the rates of the formulas, hashed parts, the ring of keys, sums over helpers, refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.closed_form import clock
from topoplan.schedules.parameter_server import KEYS, HashRing, parameter_server


def star(workers: int, helpers: int) -> Topology:
    """Ports of 10 GB/s behind one switch."""
    names = [f"gpu{n}" for n in range(workers)] + [f"helper{n}" for n in range(helpers)]
    devices = [Device(name, name.rstrip("0123456789")) for name in names] + [Device("switch0", "nvswitch")]
    ends = [pair for name in names for pair in ((name, "switch0"), ("switch0", name))]
    return Topology("star", tuple(devices), tuple(Link(a, b, "nvlink", 10.0) for a, b in ends))


@pytest.mark.parametrize(("workers", "helpers"), [(16, 1), (4, 1), (4, 2), (4, 4), (4, 6), (8, 3)])
def test_dedicated_servers_reach_a_part_of_a_port(workers: int, helpers: int) -> None:
    """B min(1, S / N): with one server it carries all buffers; every rank sends and takes one."""
    made = parameter_server(star(workers, helpers))
    assert made.rate == pytest.approx(10 * min(1, helpers / workers))
    assert topoplan.verify(made).rate == made.rate
    sent = clock(made)(1 << 20).link_bytes
    assert {sent[f"gpu{rank}", "switch0"] for rank in range(workers)} == {1 << 20}
    assert sent["helper0", "switch0"] == pytest.approx(workers / helpers * (1 << 20))


def test_ranks_as_servers_are_the_one_hop_plan() -> None:
    made, stars = parameter_server("dgx-2"), topoplan.one_hop("dgx-2")
    assert made.shards == stars.shards
    assert (made.rate, made.gap) == (80, 0)
    assert parameter_server(star(4, 1), servers=[f"gpu{n}" for n in range(4)]).rate == pytest.approx(20 / 3)


def test_hashed_parts_are_as_slow_as_the_fullest_server() -> None:
    names = [f"helper{n}" for n in range(4)]
    for points in (1, 128):
        loads = HashRing(tuple(names), points).loads(map(str, range(KEYS)))
        most = max(loads.values()) * 4 / KEYS
        made = parameter_server(star(4, 4), placement="hashed", points=points)
        assert made.rate == pytest.approx(10 / most)
        assert topoplan.verify(made).rate == made.rate


def test_helpers_add_up_what_ranks_push() -> None:
    values = [np.arange(500, dtype=np.float64) * (rank + 1) for rank in range(4)]
    with Communicator(parameter_server(star(4, 2), placement="hashed")) as comm:
        for result in comm.all_reduce(values):
            np.testing.assert_array_equal(result, np.arange(500) * 10.0)


@pytest.mark.parametrize(
    ("points", "load", "moved"),
    [
        (1, 2.21, 0.164),
        (16, 1.13, 0.130),
        pytest.param(128, 1.16, 0.129, marks=pytest.mark.thorough),
        pytest.param(1024, 1.04, 0.129, marks=pytest.mark.thorough),
    ],
)
def test_a_ring_of_eight_servers(points: int, load: float, moved: float) -> None:
    """Load of the fullest over the mean, and the part of 20,000 keys that moves when a server leaves: its own alone."""
    ring = HashRing(tuple(f"s{n}" for n in range(8)), points)
    keys = [f"k{n}" for n in range(20_000)]
    before = {key: ring.holders(key)[0] for key in keys}
    assert max(Counter(before.values()).values()) * 8 / len(keys) == pytest.approx(load, abs=0.005)
    gone = HashRing(tuple(f"s{n}" for n in range(8) if n != 3), points)
    changed = [key for key in keys if gone.holders(key)[0] != before[key]]
    assert {before[key] for key in changed} == {"s3"}
    assert len(changed) / len(keys) == pytest.approx(moved, abs=0.0005)
    for key in changed[:50]:
        assert gone.holders(key)[0] == ring.holders(key, replicas=2)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": ["gpu9"]}, "server 'gpu9' is not a rank or helper here"),
        ({"servers": ["gpu0", "gpu0"]}, "or stands twice"),
        ({"placement": "random"}, "placement 'random' is unknown"),
        ({"collective": "broadcast"}, "as an allreduce does, not broadcast"),
        ({"placement": "hashed", "points": 0}, "points 0 of a server"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parameter_server(star(4, 1), **options)


def test_a_server_behind_another_gpu_is_no_server() -> None:
    with pytest.raises(InfeasibleError, match="through another GPU"):
        parameter_server("dgx-1v", servers=["gpu0"])


@pytest.mark.parametrize(
    ("placement", "replicas"), [("equal", 1), ("equal", 2), ("hashed", 1), ("hashed", 2)]
)
def test_replicas_cost_one_copy_of_each_sum(placement: str, replicas: int) -> None:
    """A server with a part sends it to all ranks and its replicas; what replicas take is R buffers in all."""
    made = parameter_server(star(4, 3), placement=placement, replicas=replicas)
    alone = parameter_server(star(4, 3), placement=placement)
    assert topoplan.verify(made).rate == made.rate
    nbytes = 3 << 20
    sent, before = (clock(one)(nbytes).link_bytes for one in (made, alone))
    for server in ("helper0", "helper1", "helper2"):
        out = before[server, "switch0"] / 4
        assert sent[server, "switch0"] == pytest.approx(out * (4 + replicas))
    taken = sum(sent["switch0", f"helper{n}"] - before["switch0", f"helper{n}"] for n in range(3))
    assert taken == pytest.approx(replicas * nbytes)
    if placement == "equal":
        assert made.rate == pytest.approx(10 * 3 / (4 + replicas))


def test_replicas_need_helpers_and_other_servers() -> None:
    with pytest.raises(UsageError, match="replicas 2 must be a whole number from 0 to 1"):
        parameter_server(star(4, 2), replicas=2)
    with pytest.raises(UsageError, match="ranks get all sums and need no replicas"):
        parameter_server("dgx-2", replicas=1)
