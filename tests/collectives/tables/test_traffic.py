"""Bytes that the communicator counts: those of the plan, of the sockets, and of the formula of the sparse exchange."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.tcp.compiled_exchange import HEADER_BYTES
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.connections import _FRAME, _HELLO, _PROOF, encode_message
from collectives.sparse.codec import WireFormat
from tests.support.tcp_jobs import backends_in_threads
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.plans.shards import shard_bounds

Array = NDArray[Any]

DGX = topoplan.load("dgx-1v")
SIZE = 20_000


def servers_of(*gpus: int, gbps: float = 25) -> Topology:
    machines = [topoplan.Server(DGX, list(range(number))) for number in gpus]
    return topoplan.cluster(machines, nic_gbps=gbps, nics=1)


def gradients(ranks: int, size: int = SIZE) -> list[Array]:
    return [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(ranks)]


def left_first_server(comm: Communicator) -> int:
    home = FabricServers(Fabric(comm.plan.topology, comm.plan.channels)).of_rank
    return sum(
        nbytes for (rank, peer), nbytes in comm.bytes_sent().items() if home[rank] == 0 and home[peer] != 0
    )


def message_bytes(plan: Plan, density: float, wire: WireFormat | None) -> int:
    """The formula: bytes of what one owner of every part sends to one other server."""
    borders = shard_bounds((shard.share for shard in plan.shards), SIZE)
    owners = [tuple(s.root for s in shard.stages if s.op == "gather") for shard in plan.shards]
    ends = [0, *(borders[i] for i in range(1, len(owners)) if owners[i] != owners[i - 1]), SIZE]
    total = 0
    for start, stop in pairwise(ends):
        entries = round(density * (stop - start))
        length = 8 * entries if wire is None else wire.encoded_bytes_at_most(entries, stop - start, "float32")
        total += -(-length // 16) * 16
    return total


def test_an_allreduce_counts_every_chunk_on_every_edge() -> None:
    plan = topoplan.plan(DGX)
    with Communicator(plan) as comm:
        assert comm.bytes_sent() == {}
        comm.all_reduce(gradients(8, 1000))
        once = comm.bytes_sent()
        assert sum(once.values()) == 14 * 4000
        comm.all_reduce(gradients(8, 1000))
        assert comm.bytes_sent() == {pair: 2 * nbytes for pair, nbytes in once.items()}


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [(8, 8), (4, 4, 4, 4), (1, 3, 2), (1,) * 15 + (2,)], ids=len)
@pytest.mark.parametrize(
    "wire", [None, WireFormat(), WireFormat(values="float16")], ids=["pairs", "packed", "half"]
)
def test_bytes_over_nics_are_the_formulas(gpus: tuple[int, ...], wire: WireFormat | None) -> None:
    with Communicator(topoplan.three_phase(servers_of(*gpus))) as comm:
        given = gradients(comm.size)
        comm.sparse_all_reduce(given, density=0.02, exchange="servers", wire=wire)
        plan = comm.explain(given, density=0.02, exchange="servers", wire=wire).plan
        assert plan is not None
        assert left_first_server(comm) == (len(gpus) - 1) * message_bytes(plan, 0.02, wire)


def left(connection: socket.socket) -> int:
    about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    # it counts the beginning of a connection too
    acknowledged: int = struct.unpack_from("@Q", about, 120)[0] - 1
    waits: int = struct.unpack("@i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return acknowledged + waits


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of connections")
def test_sockets_carry_what_is_counted() -> None:
    plan = topoplan.three_phase(servers_of(2, 2))

    def body(backend: TcpBackend, rank: int) -> tuple[Any, Any]:
        with Communicator(plan, backend, chunk_bytes=1 << 14) as comm:
            comm.sparse_all_reduce(gradients(4)[rank], density=0.01, exchange="servers")
            comm.all_reduce(gradients(4)[rank])
            carried: Counter[tuple[int, int]] = Counter()
            for queue, link in backend._network.outgoing.items():
                first = encode_message({"type": "link", "link": queue})
                carried[queue[:2]] += left(link) - _HELLO.size - _PROOF - _FRAME.size - len(first)
            return comm.bytes_sent(), dict(sorted(carried.items()))

    counted = backends_in_threads(
        4, body, pace=1.0
    )  # so that small collectives use the links of the plan too
    for rank, (told, carried) in enumerate(counted):
        assert told.keys() == carried.keys()
        for pair, nbytes in told.items():
            headers = carried[pair] - nbytes
            assert headers % HEADER_BYTES == 0
            assert 0 < headers < 0.02 * nbytes
        assert {source for source, _ in told} == {rank}


@pytest.mark.thorough
@pytest.mark.parametrize(("servers", "border"), [(2, 0.5), (4, 0.25), (8, 0.125)])
def test_dense_above_the_border(servers: int, border: float) -> None:
    """2 b / (m (b + i)) with values and indices of 4 bytes, where the network is far slower than the servers."""
    assert border == 2 * 4 / (servers * 8)
    with Communicator(topoplan.three_phase(servers_of(*[8] * servers, gbps=1))) as comm:
        given = [np.zeros(1 << 24, np.float32)] * comm.size
        below, above = (comm.explain(given, density=density * border) for density in (0.95, 1.01))
        assert (below.exchange, above.exchange) == ("servers", "dense")
        assert below.seconds["servers"] < below.seconds["dense"] < above.seconds["servers"]
