"""Logs of NCCL_DEBUG=INFO: what an independent writer put in comes back."""

from __future__ import annotations

import random

import pytest

from tests.support.nccl_debug_logs import DGX1_RINGS, DebugLog, healthy, over_sockets, without_peers
from topoplan.reading.nccl.debug_log import (
    AlgorithmChoice,
    LoggedCommunicator,
    NcclLog,
    parse_nccl_log,
    via_kind,
)


def read(log: DebugLog | str) -> NcclLog:
    found = parse_nccl_log(log if isinstance(log, str) else log.text())
    assert found is not None
    return found


@pytest.mark.parametrize("make", [healthy, without_peers, over_sockets])
def test_ranks_rings_trees_and_ways_come_back(make: type[DebugLog]) -> None:
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


def test_the_order_of_the_ranks_lines_does_not_matter() -> None:
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
    found = read(over_sockets())
    assert found.settings == (("NCCL_IB_DISABLE", "1"),)
    assert [(told.kind, told.text) for told in found.statements] == [
        ("network", "Socket"),
        ("no nvls", "NVLS multicast support is not available on dev 0"),
    ]
    assert found.communicators[0].choices == [
        AlgorithmChoice("AllReduce", 1024, "tree", "ll"),
        AlgorithmChoice("AllReduce", 65536, "tree", "ll"),
        AlgorithmChoice("AllReduce", 67108864, "ring", "simple"),
    ]
    older = "n:1:2 [0] NCCL INFO AllReduce: 8 Bytes -> Algo 1 proto 0 time 15.2"
    assert read(older).communicators[0].choices == [AlgorithmChoice("AllReduce", 8, "ring", "ll")]


@pytest.mark.parametrize("before", ["", "[1,0]<stdout>:", "[2026-01-02 03:04:05] "])
@pytest.mark.parametrize(
    ("way", "via"),
    [
        ("Ring 00 : 0[0] -> 1[1] via P2P/IPC", "P2P"),
        ("Ring 00 : 0 -> 1 [send] via NET/Socket/0", "NET/Socket"),
        ("Channel 00 : 0[7000] -> 1[f000] via P2P/IPC", "P2P"),
        ("Channel 01 : 0[7000] -> 1[f000] via direct shared memory", "SHM"),
        ("Channel 01/0 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P"),
        ("Channel 01/0 : 0[0] -> 1[1] via P2P/indirect/3[3]", "P2P"),
        ("Channel 01/0 : 0[0] -> 1[0] [receive] via NET/IB/0(1)/GDRDMA/Shared", "NET/IB"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/1", "NET/AWS Libfabric"),
    ],
)
def test_ways_of_many_releases(way: str, via: str, before: str) -> None:
    """From 2.4 on, with what launchers and NCCL put before a line."""
    ((joined, count),) = read(f"{before}n:1:2 [0] NCCL INFO {way}").communicators[0].joined()
    assert (joined.source, joined.target, via_kind(joined.via), count) == (0, 1, via, 1)


OLDER = """ip-a:21:86 [0] NCCL INFO NCCL version 2.9.9+cuda11.0
ip-a:22:80 [1] NCCL INFO Channel 01 : 9[101d0] -> 8[101c0] via SHM/direct/direct
ip-a:21:86 [0] NCCL INFO Channel 01 : 8[101c0] -> 9[101d0] via SHM/direct/direct
ip-a:22:80 [1] NCCL INFO Channel 01 : 9[101d0] -> 0[101c0] [send] via NET/Socket/0
ip-a:21:86 [0] NCCL INFO 2 coll channels, 2 p2p channels, 1 p2p channels per peer
ip-a:21:86 [0] NCCL INFO comm 0x7fdc rank 8 nranks 16 cudaDev 0 busId 101c0 - Init COMPLETE
ip-a:22:80 [1] NCCL INFO comm 0x7f17 rank 9 nranks 16 cudaDev 1 busId 101d0 - Init COMPLETE
"""
"""Two of sixteen ranks, as releases before 2.19 print them: the line of the communicator comes last."""

LABELS = (
    *("", "0: ", "[0] ", "> ", "n1: ", "nccl-1  | ", "[default0]:", "[rank0]: "),
    "[1,mpirank:0,algo-1]<stdout>:",
    *("[prterun-n1-3215@1,0]<stdout>: ", "[1,0]<stderr>:", "[pod/nccl-1/main] ", "pod/nccl-1 ", "\x1b[32m"),
    *("2026-11-02T10:00:00.123456Z ", "[2026-11-02 10:00:00] ", "Nov  2 10:00:00 n1 nccl[17]: ", "\ufeff"),
)
"""What launchers, terminals and collectors of logs put before a line."""


def test_lines_before_the_line_of_a_communicator_are_its_own() -> None:
    """One communicator of sixteen ranks, not a second one of ten."""
    (one,) = read(OLDER).communicators
    assert (one.size, one.channels, sorted(one.ranks)) == (16, 2, [8, 9])
    assert [(joined.source, joined.target) for joined, _ in one.joined()] == [(8, 9), (9, 0), (9, 8)]


def test_communicators_of_one_size_are_kept_apart_by_their_processes() -> None:
    """Opened one after another, the same ranks or other ones; their processes' lines in any order."""
    opened = [
        f"n:{process}:1 [{process}] NCCL INFO comm 0x{process}{turn} rank {rank} nranks 2 cudaDev {process} - Init "
        "COMPLETE"
        for turn, ranks in enumerate(((0, 1), (1, 0)))
        for process, rank in enumerate(ranks)
    ]
    found = read("\n".join(opened))
    devices = [{rank: at.device for rank, at in one.ranks.items()} for one in found.communicators]
    assert devices == [{0: 0, 1: 1}, {1: 0, 0: 1}]


RING, WAY = "Channel 00/02 :    0   1   2", "Channel 00/0 : 0[0] -> {0}[{0}] via P2P/CUMEM"


@pytest.mark.parametrize(
    ("lines", "size", "rings"),
    [
        ((f"{RING}   3", WAY.format(1)), 4, {0: (0, 1, 2, 3)}),
        ((WAY.format(5),), 0, {}),
        ((f"{RING} ...", WAY.format(5)), 0, {}),
        ((WAY.format(5), RING), 0, {}),
    ],
)
def test_the_number_of_ranks_is_never_that_of_the_largest_rank(
    lines: tuple[str, ...], size: int, rings: dict[int, tuple[int, ...]]
) -> None:
    """It is that of a whole ring, or unknown: the log is cut."""
    (one,) = read("\n".join(f"h:1:2 [0] NCCL INFO {line}" for line in lines)).communicators
    assert (one.size, one.rings) == (size, rings)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_labels_colours_and_line_ends_change_nothing(label: str, end: str) -> None:
    text = end.join(label + line for line in OLDER.splitlines()) + end
    assert read(text) == read(OLDER)


@pytest.mark.parametrize("label", LABELS)
def test_lines_without_host_and_process_are_told_apart_by_their_device(label: str) -> None:
    """The ranks of both devices, and what joins them, in one communicator."""
    bare = "\n".join(label + line.partition(" ")[2] for line in OLDER.splitlines())
    (one,), (whole,) = read(bare).communicators, read(OLDER).communicators
    assert [joined.via for joined, _ in one.joined()] == [joined.via for joined, _ in whole.joined()]
    assert {rank: (at.host, at.device) for rank, at in one.ranks.items()} == {8: ("", 0), 9: ("", 1)}
    none = "\n".join(line.partition("] ")[2] for line in OLDER.splitlines())
    assert [len(found.ranks) for found in read(none).communicators] == [2]


def test_lines_that_ran_into_one_are_two() -> None:
    lines = OLDER.splitlines()
    found = read("\n".join(["".join(lines[1:3]), lines[0], *lines[3:]])).communicators[0]
    ways = [(way.source, way.target, way.via) for way, _ in found.joined()]
    assert ways[:2] == [(8, 9, "SHM/direct/direct"), (9, 0, "NET/Socket/0")]
    assert len(found.connections) == 3


def test_a_text_in_which_nccl_says_nothing_is_no_log() -> None:
    assert parse_nccl_log("roses are red\n") is None
    assert read("n:1:2 [0] NCCL INFO Bootstrap: Using eth0") == NcclLog("", (), (), ())


def test_warnings_are_kept() -> None:
    (one,) = read("\nn:1:2 [0] enqueue.cc:10 NCCL WARN Cuda failure 'out of memory'").statements
    assert (one.kind, one.line, one.text) == ("warning", 2, "Cuda failure 'out of memory'")


def test_a_cut_log_has_what_it_has() -> None:
    text = healthy().text()
    for end in range(0, len(text), 997):
        found = parse_nccl_log(text[:end])
        assert found is None or all(isinstance(one, LoggedCommunicator) for one in found.communicators)
