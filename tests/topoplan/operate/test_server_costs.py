"""``compare --without-each-server``: what each server of a cluster costs the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import topoplan
from tests.support.checkout import Done
from tests.topoplan.cli.conftest import Told
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.compare.costs import without_each_server


def hosts(gbps: Sequence[float], **network: object) -> Topology:
    """Servers of one GPU and a NIC of so many Gb/s each."""
    servers = [topoplan.Server("dgx-1v", [0], nic_gbps=rate) for rate in gbps]
    return topoplan.cluster(servers, nic_gbps=100, nics=1, nic_access="direct", **network)  # type: ignore[arg-type]


def test_the_slowest_server_is_the_one_that_costs() -> None:
    """An allreduce of N hosts of b GB/s does b N / (2 (N - 1)) beyond two, and the slowest NIC alone limits it."""
    found = without_each_server(hosts([100, 100, 100, 40, 100]))
    assert found.whole.rate == 5.0
    assert [(row.servers, row.rate) for row in found.rows] == [
        (("s3",), 12.5 * 4 / 6),
        (("s0", "s1", "s2", "s4"), 5.0),
    ]
    assert [row.servers for row in found.slow] == [("s3",)]
    assert found.gain(found.rows[0]) == pytest.approx(12.5 * 4 / 6 / 5)


def test_rates_are_those_of_plans_on_what_is_left() -> None:
    machine = hosts([100, 50, 100, 100, 100], network="fat-tree", leaf_size=2, oversubscription=2)
    found = without_each_server(machine, "allgather")
    assert sorted(name for row in found.rows for name in row.servers) == list(machine.servers)
    for row in found.rows:
        for name in row.servers:
            left = [number for number, server in enumerate(machine.servers) if server != name]
            assert topoplan.plan(machine, "allgather", gpus=left).rate == row.rate
            assert row.bus == pytest.approx(row.rate * 3 / 4)


def test_no_server_is_blamed_where_none_costs_by_itself() -> None:
    """Removing one of two equally slow servers leaves the other in; five alike do less than four for their number."""
    found = without_each_server(hosts([100, 40, 40, 100]))
    assert (found.slow, found.whole.rate) == ((), 5.0)
    found = without_each_server(hosts([100] * 5))
    assert found.gain(found.rows[0]) > 1
    assert found.slow == ()


def test_where_nothing_joins_what_is_left_there_is_no_rate() -> None:
    """A chain of three hosts without its middle; what is left of two servers is one, and moves nothing."""
    ends = [(f"gpu{n}", f"gpu{n + 1}") for n in range(2)]
    devices = tuple(topoplan.Device(f"gpu{n}", "gpu", f"s{n}") for n in range(3))
    links = tuple(topoplan.Link(*way, "network", 5.0) for a, b in ends for way in ((a, b), (b, a)))
    found = without_each_server(Topology("chain", devices, links))
    assert [row.rate for row in found.rows if row.servers == ("s1",)] == [0.0]
    with pytest.raises(UsageError, match="three servers or more"):
        without_each_server(hosts([100, 40]))
    with pytest.raises(UsageError, match="three servers or more, got 1"):
        without_each_server("dgx-1v")


def test_the_command_prints_a_row_for_each_kind_of_server(done: Done, told: Told) -> None:
    mixed = hosts([100, 100, 100, 25]).to_json()
    command = "compare - --without-each-server"
    lines = done(command, stdin=mixed).splitlines()
    assert lines[0].endswith(": s3 slows the others down")
    assert lines[1].startswith("without s3 algbw 9.375 GB/s, with it 3.125")
    assert lines[3:7] == [
        "servers              GPUs  algbw  busbw  of all",
        "all                     4  3.125  4.688",
        "all but s3              3  9.375   12.5   3.00x",
        "all but one of s0-2     3  3.125  4.167   1.00x",
    ]
    made = told(command, stdin=mixed)
    assert made["all"]["rate"] == 3.125
    rows = [(row["servers"], row["gain"]) for row in made["without"]]
    assert rows == [(["s3"], 3.0), (["s0", "s1", "s2"], 1.0)]
    assert done(f"{command} --csv", stdin=mixed).splitlines()[:3] == [
        "servers,gpus,rate,busbw,gap,gain",
        ",4,3.125,4.6875,0.0,1.0",
        "s3,3,9.375,12.5,0.0,3.0",
    ]


def test_servers_with_the_same_gpus_in_another_order_are_equivalent() -> None:
    machine = topoplan.cluster([topoplan.Server("v100x4", count=3)], nic_gbps=100)
    found = without_each_server(machine, gpus=[0, 1, 5, 4, 8, 9])
    assert [row.servers for row in found.rows] == [("s0", "s1", "s2")]
