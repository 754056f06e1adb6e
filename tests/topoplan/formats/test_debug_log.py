"""Logs of NCCL_DEBUG=INFO: what an independent writer put in comes back."""

from __future__ import annotations

import random

import pytest

from tests.support.nccl_debug_logs import DGX1_RINGS, DebugLog, healthy, over_sockets, without_peers
from topoplan.formats.nccl_logs.debug_log import Choice, Communicator, NcclLog, parse_nccl_log, via_kind


def read(log: DebugLog | str) -> NcclLog:
    found = parse_nccl_log(log if isinstance(log, str) else log.text())
    assert found is not None
    return found


@pytest.mark.parametrize("make", [healthy, without_peers, over_sockets])
def test_ranks_rings_trees_and_ways_come_back(make: type[DebugLog]) -> None:
    """Each as it was written."""
    log = make()
    found = read(log)
    (one,) = found.communicators
    channels = [tuple(ring) for _ in range(log.repeat) for ring in log.rings]
    assert (found.version, one.size, one.channels) == (log.version, log.size, len(channels))
    assert one.rings == dict(enumerate(channels))
    assert {rank: (at.host, at.device) for rank, at in one.ranks.items()} == dict(
        enumerate((host, device) for host, count in log.hosts for device in range(count))
    )
    assert one.trees[0] == {rank: parent for parent, rank in zip(channels[0], channels[0][1:], strict=False)}
    for joined, count in one.joined():
        assert joined.via == log.via(joined.source, joined.target)
        hops = [(ring[place - 1], ring[place]) for ring in channels for place in range(len(ring))]
        assert count == hops.count((joined.source, joined.target))


def test_bus_ids_are_as_the_kernel_writes_them() -> None:
    """NCCL prints 6000 for 0000:06:00.0, and 10b000 for 0001:0b:00.0."""
    assert read(healthy()).communicators[0].ranks[0].busid == "0000:06:00.0"
    line = "n:1:2 [0] NCCL INFO comm 0x7f rank 0 nranks 2 cudaDev 0 busId 10b000 - Init COMPLETE"
    assert read(line).communicators[0].ranks[0].busid == "0001:0b:00.0"


def test_the_order_of_the_ranks_lines_does_not_matter() -> None:
    """They print at once; each rank keeps its own order."""
    lines = healthy().text().splitlines()
    whose = [line.split(" NCCL ")[0] for line in lines]
    turns = whose[:]
    random.Random(3).shuffle(turns)
    left = {name: [line for line, of in zip(lines, whose, strict=True) if of == name] for name in set(whose)}
    mixed = read("\n".join(left[name].pop(0) for name in turns)).communicators[0]
    plain = read(healthy()).communicators[0]
    assert (mixed.rings, mixed.trees, mixed.ranks) == (plain.rings, plain.trees, plain.ranks)


def test_rings_that_rank_0_did_not_print_are_closed_from_their_neighbours() -> None:
    """Of many ranks NCCL cuts the line of a ring; one rank alone closes none."""
    text = "\n".join(line for line in healthy().text().splitlines() if "/12 :" not in line)
    assert read(text).communicators[0].rings == read(healthy()).communicators[0].rings
    alone = "\n".join(line for line in text.splitlines() if "[0] NCCL" in line)
    assert read(alone).communicators[0].rings == {}
    cut = healthy().text().replace("Channel 00/12 : 0 3 2 1 5 6 7 4", "Channel 00/12 : 0 3 2 1 5 ...")
    assert read(cut).communicators[0].rings[0] == DGX1_RINGS[0]


def test_settings_choices_and_what_fell_back() -> None:
    """In the words of NCCL."""
    found = read(over_sockets())
    assert found.settings == (("NCCL_IB_DISABLE", "1"),)
    assert [(told.kind, told.text) for told in found.told] == [
        ("network", "Socket"),
        ("no nvls", "NVLS multicast support is not available on dev 0"),
    ]
    assert found.communicators[0].choices == [
        Choice("AllReduce", 1024, "tree", "ll"),
        Choice("AllReduce", 65536, "tree", "ll"),
        Choice("AllReduce", 67108864, "ring", "simple"),
    ]
    older = "n:1:2 [0] NCCL INFO AllReduce: 8 Bytes -> Algo 1 proto 0 time 15.2"
    assert read(older).communicators[0].choices == [Choice("AllReduce", 8, "ring", "ll")]


@pytest.mark.parametrize(
    ("line", "via"),
    [
        ("n:1:2 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/IPC", "P2P"),
        ("n:1:2 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0", "NET/Socket"),
        ("n:1:2 [0] NCCL INFO Channel 00 : 0[7000] -> 1[f000] via P2P/IPC", "P2P"),
        ("n:1:2 [0] NCCL INFO Channel 01 : 0[7000] -> 1[f000] via direct shared memory", "SHM"),
        ("n:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P"),
        ("n:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/indirect/3[3]", "P2P"),
        ("n:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [receive] via NET/IB/0(1)/GDRDMA/Shared", "NET/IB"),
        (
            "[1,0]<stdout>:n:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/1",
            "NET/AWS Libfabric",
        ),
        (
            "[2026-01-02 03:04:05] n:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
            "NET/Socket",
        ),
    ],
)
def test_ways_of_many_releases(line: str, via: str) -> None:
    """From 2.4 on, with what launchers and NCCL put before a line."""
    ((joined, count),) = read(line).communicators[0].joined()
    assert (joined.source, joined.target, via_kind(joined.via), count) == (0, 1, via, 1)


def test_communicators_are_kept_apart() -> None:
    """By their commId; the largest comes first."""
    small = DebugLog(hosts=(("node1", 2),), rings=[(0, 1)]).text().replace("1234abcd5678", "77")
    found = read(small + healthy().text())
    assert [one.size for one in found.communicators] == [8, 2]
    assert found.communicators[1].rings == {0: (0, 1), 1: (0, 1), 2: (0, 1)}


def test_a_text_in_which_nccl_says_nothing_is_no_log() -> None:
    """And one line of it is."""
    assert parse_nccl_log("roses are red\n") is None
    assert read("n:1:2 [0] NCCL INFO Bootstrap: Using eth0") == NcclLog("", (), (), ())


def test_warnings_are_kept() -> None:
    """Whole, with their line."""
    told = read("\nn:1:2 [0] enqueue.cc:10 NCCL WARN Cuda failure 'out of memory'").told
    assert [(one.kind, one.line, one.text) for one in told] == [
        ("warning", 2, "Cuda failure 'out of memory'")
    ]


def test_a_cut_log_has_what_it_has() -> None:
    """Cut anywhere, it is read without an error."""
    text = healthy().text()
    for end in range(0, len(text), 997):
        found = parse_nccl_log(text[:end])
        assert found is None or all(isinstance(one, Communicator) for one in found.communicators)
