"""The tcp back end: the same results as loopback, bit for bit, one clear error on every rank, and its footprint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, lower
from collectives.backends.tcp import compiled_exchange as machine
from collectives.backends.tcp import tcp_backend
from collectives.backends.tcp.chunk_order import footprint, orders
from collectives.backends.tcp.collective_state import TcpProgram
from collectives.backends.tcp.connections import (
    PACING,
    arrivals,
    base_queue,
    connection_rates,
    link_rates,
    numbered,
    parse_wires,
    wires_of,
)
from collectives.backends.tcp.link_probe import PROBE_ANSWER_SECONDS, LinkEnds, LinkProbes
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.lab.testbed.network import crossed_links, lay_out_network, wires_file
from collectives.peers.rendezvous import Rendezvous
from collectives.training.exchange_settings import TopK
from collectives.training.gradient_synchronizer import GradientSynchronizer
from tests.support.hand_plans import SHAPES, forest_plan, plan_of, three_phase_plan
from tests.support.job_meeting import as_threads
from tests.support.tcp_jobs import (
    SECONDS,
    backends_in_threads,
    call,
    given_to,
    in_threads,
    ring_wires,
    seal,
)
from topoplan import PlanByKind, cluster_by_kind, plan_by_kind
from topoplan.errors import BackendError, InfeasibleError, PlanError, RefusedError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.plans.plan import ALL_COLLECTIVES, COLLECTIVES, ROOTED, Plan
from topoplan.plans.shards import Edge, Shard, Stage

Array = NDArray[Any]


def on_loopback(plan: Plan, arrays: list[Array], chunk_bytes: int = 1 << 16, **options: Any) -> list[Any]:
    with Communicator(plan, chunk_bytes=chunk_bytes) as comm:
        results: list[Any] = call(comm, plan.collective, arrays, **options)
    return results


def seals(results: list[Any]) -> list[str | None]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [seal(result) for result in results]


@pytest.mark.thorough
@given(
    st.integers(1, 5),
    st.sampled_from(ALL_COLLECTIVES),
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 1600),
    st.sampled_from([1, 200, 1600, 1 << 20]),
    st.sampled_from([1, 64, 4 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_any_size_chunk_and_window_gives_the_bits_of_loopback(
    size: int, collective: str, shape: str, count: int, chunk_bytes: int, flight_bytes: int
) -> None:
    plan = forest_plan(size, collective, shape, root=size - 1)
    arrays = [given_to(rank, size, collective, count) for rank in range(size)]
    results = in_threads(
        plan,
        lambda comm, rank: call(comm, collective, arrays[rank]),
        chunk_bytes=chunk_bytes,
        flight_bytes=flight_bytes,
    )
    assert seals(results) == seals(on_loopback(plan, arrays, chunk_bytes))


@pytest.mark.parametrize("servers", [[[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5, 6, 7]], [[0], [1, 2, 3]]])
def test_three_phases_with_narrow_windows_give_the_bits_of_loopback(servers: list[list[int]]) -> None:
    plan = three_phase_plan(servers)
    arrays = [given_to(rank, len(plan.ranks), "allreduce", 5003) for rank in range(len(plan.ranks))]
    results = in_threads(
        plan, lambda comm, rank: comm.all_reduce(arrays[rank]), chunk_bytes=256, flight_bytes=1
    )
    assert seals(results) == seals(on_loopback(plan, arrays))


def test_results_in_place_in_strides_and_in_the_background_come_in_order() -> None:
    plan = forest_plan(3, "allreduce", "star")

    def body(comm: Communicator, rank: int) -> list[float]:
        same, wide = np.full(1000, rank + 1.0), np.zeros((1000, 2))
        first = comm.all_reduce(same, out=same, async_op=True)
        second = comm.all_reduce(np.full(1000, 2.0 * rank), out=wide[:, 1], async_op=True)
        third = comm.broadcast(np.full(3, rank, ">f4"), root=2)
        assert first.wait() is same
        assert first.done()
        return [*np.unique(same), *np.unique(second.wait()), *np.unique(wide), *np.unique(third)]

    assert in_threads(plan, body) == [[6.0, 6.0, 0.0, 6.0, 2.0]] * 3


def test_the_largest_value_is_known_everywhere_between_collectives() -> None:
    plan = forest_plan(3, "allreduce", "chain")

    def body(backend: TcpBackend, rank: int) -> list[float]:
        with Communicator(plan, backend) as comm:
            return [backend.largest(rank / 4), float(comm.all_reduce(np.ones(1))[0]), backend.largest(-rank)]

    assert backends_in_threads(3, body) == [[0.5, 3.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda comm: "closed", "rank 1 has closed its communicator"),
        (lambda comm: comm.all_reduce([1.0]), "rank 1 has a list instead of a numpy array"),
        (lambda comm: comm._open().backend.largest(1.0), "do different things"),
    ],
)
def test_a_rank_that_does_not_come_is_named_at_once(body: Callable[[Any], Any], message: str) -> None:
    def second(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(np.ones(3))
        return body(comm) if rank == 1 else comm.all_reduce(np.ones(3))

    errors = in_threads(forest_plan(3, "allreduce", "chain"), second)
    for rank in (0, 2):
        assert isinstance(errors[rank], BackendError)
        assert message in str(errors[rank])


def test_abort_ends_what_ranks_wait_for_and_all_that_comes() -> None:
    def body(comm: Communicator, rank: int) -> str:
        comm.all_reduce(np.ones(3))
        if rank == 0:
            waits = comm.all_reduce(np.ones(3), async_op=True)
            comm.abort("enough")
            with pytest.raises(BackendError, match="aborted the communicator: enough"):
                waits.wait()
            with pytest.raises(BackendError, match="aborted the communicator: enough"):
                comm.all_reduce(np.ones(3))
        else:
            with pytest.raises(BackendError, match="rank 0 aborted the communicator: enough"):
                comm._gather_texts("")
        return "ended"

    assert in_threads(forest_plan(2, "allreduce", "star"), body) == ["ended"] * 2


def test_a_schedule_of_density_that_raises_on_one_rank_is_an_error_on_all() -> None:
    def density(rank: int) -> Callable[[int], float]:
        return lambda step: 0.5 if step == 0 or rank != 1 else 1 // 0

    def body(backend: TcpBackend, rank: int) -> str:
        weights = [np.zeros(8, np.float32)]
        plan = forest_plan(3, "allreduce", "star")
        with GradientSynchronizer(
            weights, plan, backend=backend, compression=TopK(density(rank))
        ) as synchronizer:
            synchronizer.step([np.ones(8, np.float32)])
            with pytest.raises(UsageError) as raised:
                synchronizer.step([np.ones(8, np.float32)])
        return str(raised.value)

    found = backends_in_threads(3, body)
    assert found[0] == found[1] == found[2]
    assert str(found[0]).startswith(
        "training step 1, bucket 0 of 1: rank 1 refused the collective: density(1) raised Zero"
    )


def test_a_failed_communicator_stays_failed_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def body(comm: Communicator, rank: int) -> str:
        out = np.full(4, -1.0)
        with pytest.raises(RefusedError):
            comm.all_reduce(np.zeros(4 + rank), out=out if rank == 0 else None)
        assert (out == -1).all()
        assert comm.all_reduce(np.ones(4)).tolist() == [3.0] * 4
        with pytest.raises(BackendError):
            comm._open().backend.largest(1.0) if rank else comm.all_reduce(np.zeros(4))
        with pytest.raises(BackendError, match=r"make a new one|has ended"):
            comm.all_reduce(np.zeros(4))
        return "ended"

    assert in_threads(forest_plan(3, "allreduce", "star"), body) == ["ended"] * 3
    assert set(threading.enumerate()) <= before


def test_a_rank_that_does_not_call_is_named_after_the_timeout() -> None:
    done = threading.Event()

    def body(comm: Communicator, rank: int) -> Any:
        if rank == 2:
            return done.wait(20)
        try:
            return comm.all_reduce(np.zeros(5))
        finally:
            done.set()

    errors = in_threads(forest_plan(4, "allreduce", "chain"), body, timeout=2.0)
    assert errors[2] is True
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], BackendError)
        assert errors[rank].peer == 2
        assert "has not called this collective" in str(errors[rank])


def test_links_of_a_wires_file_leave_from_and_reach_its_addresses(tmp_path: Path) -> None:
    plan = forest_plan(3, "broadcast", "chain", root=0)
    wire = {"source": 0, "destination": 1, "channel": "nvlink", "from": "127.0.1.1", "to": "127.0.1.2"}
    path = tmp_path / "wires.json"
    path.write_text(json.dumps({"format": "topoplan.wires/1", "wires": [wire]}))

    def body(backend: TcpBackend, rank: int) -> dict[Any, tuple[str, str]]:
        with Communicator(plan, backend) as comm:
            assert comm.broadcast(np.arange(5) * (rank == 0)).tolist() == [0, 1, 2, 3, 4]
            return {
                queue: (link.getsockname()[0], link.getpeername()[0])
                for queue, link in backend._network.outgoing.items()
            }

    assert backends_in_threads(3, body, wires=path) == [
        {(0, 1, "nvlink"): ("127.0.1.1", "127.0.1.2")},
        {(1, 2, "nvlink"): ("127.0.0.1", "127.0.0.1")},
        {},
    ]


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def looks(
    probes: LinkProbes, clock: Clock, *, every: float, until: float, answer: float = 0.0
) -> float | None:
    """The seconds until the cable is said not to answer, when it is looked at so often."""
    began = clock.now
    while clock.now < began + until:
        if probes.unanswered({"cable": answer}):
            return clock.now - began
        clock.now += every
    return None


def test_a_link_answers_whatever_the_process_at_its_other_end_does() -> None:
    """The system takes connections that a stopped process does not."""
    asked, clock = [], Clock()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def ends_of(cable: str) -> LinkEnds:
            asked.append(round(clock.now - 100.0, 3))
            return "127.0.0.9", listener.getsockname()

        probes = LinkProbes(ends_of, clock)
        assert looks(probes, clock, every=0.01, until=4.0) is None
        probes.close()
    pauses = np.diff(asked)
    assert asked[0] == 0.0
    assert [round(float(one), 2) for one in pauses[:5]] == [0.06, 0.11, 0.21, 0.41, 0.81]
    assert pauses.max() < 1.02


def test_a_connection_knows_when_its_last_packet_came() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
        with one, other:
            time.sleep(0.3)
            began = time.monotonic()
            before = arrivals(other)
            one.sendall(b"data")
            assert other.recv(4) == b"data"
            after = arrivals(other)
            took = time.monotonic() - began
    assert (before is None) == (after is None) == (sys.platform != "linux")
    if before is not None and after is not None:
        assert before.since > 0.25
        assert after.since <= took + 0.02  # the packet came since, to a tick of the system's clock
        assert after.answer < 1.0


NOBODY: dict[str, LinkEnds] = {
    "an address that has gone with its interface": ("192.0.2.1", ("127.0.0.1", 9)),
    "nothing leads there": (None, ("255.255.255.255", 9)),
}


@pytest.mark.parametrize("ends", NOBODY.values(), ids=NOBODY)
def test_a_link_without_an_answer_is_lost_soon(ends: LinkEnds) -> None:
    clock = Clock()
    probes = LinkProbes(lambda cable: ends, clock)
    found = looks(probes, clock, every=0.02, until=1.0)
    assert found is not None
    assert PROBE_ANSWER_SECONDS <= found < PROBE_ANSWER_SECONDS + 0.03
    probes.close()
    found = looks(probes, clock, every=0.02, until=1.0, answer=0.5)
    assert found is not None
    assert 0.5 <= found < 0.53
    probes.close()


def test_time_in_which_a_rank_did_not_run_is_not_time_without_an_answer() -> None:
    clock = Clock()
    probes = LinkProbes(lambda cable: NOBODY["nothing leads there"], clock)
    assert probes.unanswered({"cable": 0.0}) == []
    clock.now += 60.0
    assert probes.unanswered({"cable": 0.0}) == []
    assert probes.unanswered({}) == []  # it moves again: the next silence counts from its own beginning
    found = looks(probes, clock, every=0.02, until=1.0)
    assert found is not None
    assert found >= PROBE_ANSWER_SECONDS
    probes.close()


def arrived(backend: TcpBackend) -> int:
    """The bytes that have come to a rank over all its links."""
    return sum(one.data for one in backend._link_counts() if one.link[1] == backend.rank)


def sent(backend: TcpBackend) -> int:
    """The bytes that a rank has sent over all its links, and expects to be read."""
    return sum(one.data for one in backend._link_counts() if one.link[0] == backend.rank)


@pytest.mark.parametrize("wires", [None, wires_of(ring_wires(3))], ids=["barrier", "rendezvous"])
def test_chunks_over_open_links_move_before_the_last_rank_has_come(wires: Any) -> None:
    """Rank 2 begins once rank 0 has bytes of rank 1 in this call, and all results are right.

    Until then rank 0 counts nothing that it sends in this call: bytes that rank 2 does not read yet are not missing.
    """
    plan = topoplan.plan("dgx-spark-x3")
    moved = threading.Event()

    def body(backend: TcpBackend, rank: int) -> list[float]:
        with Communicator(plan, backend, chunk_bytes=1 << 12) as comm:
            given = np.full(1 << 14, rank + 1.0)
            comm.all_reduce(given)
            comm._gather_texts("all links are open")
            before, had_sent = arrived(backend), sent(backend)
            if rank == 2:
                assert moved.wait(SECONDS)
                return [*np.unique(comm.all_reduce(given))]
            handle = comm.all_reduce(given, async_op=True)
            if rank == 0:
                while arrived(backend) == before and not handle.done():
                    time.sleep(0.001)
                assert not handle.done()
                assert sent(backend) == had_sent
                moved.set()
            found = np.unique(handle.wait())
            assert sent(backend) > had_sent
            return [*found]

    assert backends_in_threads(3, body, wires=wires) == [[6.0]] * 3


def test_chunks_that_must_wait_at_their_destination_do_not_run_ahead() -> None:
    """Rank 1 is late, and the root adds its chunks before those of rank 2, of which it gets no more than at first."""
    star = (Edge(0, 1, ("gpu0", "gpu1"), "nvlink"), Edge(0, 2, ("gpu0", "gpu2"), "nvlink"))
    stages = (Stage("reduce", 0, star), Stage("broadcast", 0, star))
    plan = plan_of(3, "allreduce", [Shard(Fraction(1), stages)])
    chunk, came = 1 << 16, threading.Event()

    def body(backend: TcpBackend, rank: int) -> list[float]:
        with Communicator(plan, backend, chunk_bytes=chunk) as comm:
            comm.all_reduce(np.ones(1 << 14))
            comm._gather_texts("all links are open")
            before, given = arrived(backend), np.full(1 << 18, rank + 1.0)
            if rank == 1:
                assert came.wait(SECONDS)
                return [*np.unique(comm.all_reduce(given))]
            handle = comm.all_reduce(given, async_op=True)
            while rank == 0 and arrived(backend) < before + machine.OPENING_BYTES and not handle.done():
                time.sleep(0.001)
            if rank == 0:
                time.sleep(0.2)
                chunks = machine.OPENING_BYTES // chunk
                assert arrived(backend) == before + chunks * (chunk + machine.HEADER_BYTES)
                came.set()
            return [*np.unique(handle.wait())]

    assert backends_in_threads(3, body) == [[6.0]] * 3


@pytest.mark.parametrize("wires", [None, wires_of(ring_wires(3))], ids=["barrier", "rendezvous"])
def test_chunks_of_a_refused_call_are_dropped(wires: Any) -> None:
    """Ranks 0 and 1 have exchanged some when rank 2 calls another reduction: all raise, and later calls are right."""
    plan = topoplan.plan("dgx-spark-x3")
    moved = [threading.Event() for _ in range(3)]

    def body(backend: TcpBackend, rank: int) -> list[Any]:
        found: list[Any] = []
        with Communicator(plan, backend, chunk_bytes=1 << 12) as comm:
            given = np.full(1 << 14, rank + 1.0)
            for turn in range(3):
                comm.all_reduce(given)
                comm._gather_texts("all links are open")
                before, out = arrived(backend), np.zeros_like(given)
                if rank == 2:
                    assert moved[turn].wait(SECONDS)
                handle = comm.all_reduce(given, op="max" if rank == 2 else "sum", out=out, async_op=True)
                if rank == 0:
                    while arrived(backend) == before and not handle.done():
                        time.sleep(0.001)
                    moved[turn].set()
                with pytest.raises(RefusedError, match="rank 2 runs another collective: op 'max'"):
                    handle.wait()
                found += [*np.unique(out), *np.unique(comm.all_reduce(given))]
            comm._gather_texts("all have ended")
            return [found, {one.link: one.data for one in backend._link_counts()}]

    results = backends_in_threads(3, body, wires=wires)
    assert [one[0] for one in results] == [[0.0, 6.0] * 3] * 3
    for link in results[0][1]:
        assert results[link[0]][1][link] == results[link[1]][1][link]


def test_ranks_count_the_bytes_of_both_ends_of_their_links() -> None:
    """They are equal once a collective has ended, whatever ran before, and whatever state was dropped."""
    plan = topoplan.plan("dgx-spark-x3")

    def body(backend: TcpBackend, rank: int) -> dict[Any, int]:
        with Communicator(plan, backend, chunk_bytes=1 << 12) as comm:
            for count in (1 << 14, 3 << 14, *range(100, 170)):
                comm.all_reduce(np.ones(count))
            comm._gather_texts("all have ended")
            return {one.link: one.data for one in backend._link_counts()}

    found = backends_in_threads(3, body, wires=wires_of(ring_wires(3)))
    for link in found[0].keys() | found[1].keys() | found[2].keys():
        assert found[link[0]][link] == found[link[1]][link] > 1 << 14
    assert len(found[0]) == 4


@pytest.mark.parametrize(
    ("make", "on_failure"),
    [(topoplan.plan, "raise"), (topoplan.plan, "shrink"), (topoplan.plan_survival, "shrink")],
)
def test_ranks_go_on_without_a_link_that_a_failure_names(
    make: Callable[[str], Plan], on_failure: str
) -> None:
    """Over the cables that are left, one of which the first plan may leave idle; all ranks stay."""
    plan, together = make("dgx-spark-x3"), threading.Barrier(3)
    sums = [np.full(1 << 14, 6.0)] * 2

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(plan, backend, chunk_bytes=1 << 12, on_failure=on_failure) as comm:
            mine = np.full(1 << 14, rank + 1.0)
            first = comm.all_reduce(mine)
            together.wait(60.0)  # a rank that still ran the first one would fail in it
            if rank == 1:
                backend._world.tell(BackendError("the link is cut", peer=0, links=((0, 1, "network"),)))
            if on_failure == "raise":
                with pytest.raises(BackendError, match="the link is cut") as raised:
                    comm.all_reduce(mine)
                assert raised.value.links == ((0, 1, "network"),)
                comm.shrink()
            handle = comm.all_reduce(mine, async_op=True)
            second = handle.wait()
            assert np.array_equal([first, second], sums)
            machine = comm._members.membership.change.without_links
            return comm.size, comm.epoch, machine, float(comm.plan.rate), comm.notes[-1], handle.without

    found = backends_in_threads(3, body, wires=wires_of(ring_wires(3)))
    note = "epoch 1: without link s0-s1: 3 ranks (s0.gpu0 s1.gpu0 s2.gpu0) at 12.5 GB/s, before 18.75"
    assert found == [(3, 1, ("s0-s1",), 12.5, note, ())] * 3


def test_a_failed_link_without_which_the_ranks_are_not_joined_is_an_error() -> None:
    chain = topoplan.plan(topoplan.without_links("dgx-spark-x3", ["s2-s0"]))
    wires = [one for one in ring_wires(3) if {one["source"], one["destination"]} != {0, 2}]

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(chain, backend, on_failure="shrink") as comm:
            assert backend._probes is None  # none to do without, so none is given up early
            if rank == 1:
                backend._world.tell(BackendError("the link is cut", peer=0, links=((0, 1, "network"),)))
            return comm.all_reduce(np.ones(1 << 14))

    for error in backends_in_threads(3, body, wires=wires_of(wires)):
        assert isinstance(error, BackendError)
        assert "the link is cut" in str(error)
        assert isinstance(error.__cause__, InfeasibleError)


def test_a_plan_with_two_routes_between_two_ranks_uses_the_wire_of_each(tmp_path: Path) -> None:
    """As relaying rings do: GPU 1 sends to GPU 0 directly, and over GPU 2."""
    edges = [
        (Edge(1, 0, ("gpu1", "gpu0"), "nvlink"), Edge(0, 2, ("gpu0", "gpu2"), "nvlink")),
        (Edge(1, 0, ("gpu1", "gpu2", "gpu0"), "nvlink"), Edge(0, 2, ("gpu0", "gpu2"), "nvlink")),
    ]
    shards = [Shard(Fraction(1, 2), (Stage("broadcast", 1, tree),)) for tree in edges]
    plan = plan_of(3, "broadcast", shards, root=1)
    wires = [
        {"source": 1, "destination": 0, "channel": "nvlink", "from": f, "to": t, "route": route}
        for f, t, route in (
            ("127.0.1.1", "127.0.1.2", ["gpu1", "gpu2", "gpu0"]),
            ("127.0.2.1", "127.0.2.2", ["gpu1", "gpu0"]),
        )
    ]
    path = tmp_path / "wires.json"
    path.write_text(json.dumps({"format": "topoplan.wires/1", "wires": wires}))

    def body(backend: TcpBackend, rank: int) -> dict[Any, str]:
        with Communicator(plan, backend) as comm:
            assert comm.broadcast(np.arange(1000) * (rank == 1)).tolist() == list(range(1000))
            links = backend._network.outgoing
            return {queue: link.getpeername()[0] for queue, link in links.items()}

    found = backends_in_threads(3, body, wires=path)
    assert found[1] == {(1, 0, "nvlink"): "127.0.1.2", (1, 0, "nvlink#1"): "127.0.2.2"}


BAD_WIRES = [
    ("{", "is not JSON"),
    ("[" * 100_000, "nested too deep"),
    ('{"format": ' + "9" * 5000 + "}", "an integer has too many digits"),
    ('{"format": "topoplan.plan/1"}', "its format must be 'topoplan.wires/1'"),
    ('{"format": "topoplan.wires/1"}', "wires must be a list"),
    ([7], "wire 0 must be an object"),
    ([{"source": 0, "destination": 0}], "joins rank 0 to itself"),
    ([{"source": -1}], "source -1; give a rank"),
    ([{"source": 0, "destination": 1}], "channel None"),
    (
        [{"source": 0, "destination": 1, "channel": "nvlink", "from": "here"}],
        "from 'here'; give an IP address",
    ),
    (
        [{"source": 0, "destination": 1, "channel": "nvlink", "from": "::1", "to": "::1"}] * 2,
        "repeats the link",
    ),
    (
        [{"source": 0, "destination": 1, "channel": "nvlink", "from": "::1", "to": "::1", "route": "gpu0"}],
        "route 'gpu0'; give a list of devices",
    ),
    (
        [{"source": 1, "destination": 0, "channel": "nvlink", "from": "::1", "to": "192.0.2.1"}],
        "cannot listen at",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD_WIRES)
def test_a_wrong_wires_file_is_refused(content: str | list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "wires.json"
    text = (
        content if isinstance(content, str) else json.dumps({"format": "topoplan.wires/1", "wires": content})
    )
    path.write_text(text)
    with Rendezvous("127.0.0.1:0", 1) as meeting, pytest.raises(UsageError, match=message):
        TcpBackend(0, 1, rendezvous=meeting.address, wires=path)


def test_paced_links_get_their_part_of_the_planned_bandwidth_and_the_right_result() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2, 3])
    rates = link_rates(plan)

    def body(backend: TcpBackend, rank: int) -> dict[Any, int]:
        with Communicator(plan, backend) as comm:
            assert comm.all_reduce(np.ones(1007))[1006] == 4
            links = backend._network.outgoing
            return {queue: link.getsockopt(socket.SOL_SOCKET, PACING) for queue, link in links.items()}

    found = {queue: pace for one in backends_in_threads(4, body, pace=1e-3) for queue, pace in one.items()}
    assert found == {queue: round(rate * 1e-3) for queue, rate in rates.items()}
    assert set(rates.values()) == {25e9, 50e9}


def test_connections_of_several_routes_between_two_ranks_are_paced_each_for_its_own() -> None:
    """A relaying ring and a tree cross links together; all lanes of a queue make up its rate, none has all of it."""
    plan = topoplan.ring_plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7], kind="relay")
    crossed = crossed_links(plan)
    network = lay_out_network(crossed, plan.topology.links, 0.0005)
    wires = parse_wires(json.dumps(wires_file(network, crossed)), "wires")
    rates, whole = connection_rates(plan, wires), link_rates(plan)
    several = [queue for queue in whole if numbered(queue, 1) in wires]
    assert several
    for queue in several:
        lanes = [lane for lane in wires if base_queue(lane) == queue]
        assert sum(rates[lane] for lane in lanes) == pytest.approx(whole[queue])
        assert max(rates[lane] for lane in lanes) < whole[queue]


@pytest.mark.thorough
def test_a_link_that_the_system_does_not_pace_is_paced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_backend, "set_pace", lambda connection, rate: False)
    plan = forest_plan(2, "allreduce", "star")
    rates = link_rates(plan)
    least = 300_000 / (
        max(rates.values()) * 1e-4
    )  # of the bytes that each link carries beyond its first chunk

    def body(opened: TcpBackend, rank: int) -> float:
        with Communicator(plan, opened, chunk_bytes=1 << 14) as comm:
            comm.all_reduce(np.ones(8))
            began = time.monotonic()
            assert (comm.all_reduce(np.full(100_000, rank + 1.0, np.float32)) == 3).all()
            return time.monotonic() - began

    found = backends_in_threads(2, body, pace=1e-4)
    assert min(found) > least, found


def test_a_chunk_that_is_not_expected_is_named_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    of = TcpProgram.of

    def numbered_otherwise(call: Any, rank: int, *rest: Any) -> TcpProgram:
        program = of(call, rank, *rest)
        program.streams["number"] += 10 * (rank == 0)
        return program

    monkeypatch.setattr(TcpProgram, "of", numbered_otherwise)
    plan = forest_plan(2, "reduce", "star")
    first, second = in_threads(plan, lambda comm, rank: comm.reduce(np.ones(100_000), root=1))
    text = "rank 0 sent chunk 0 of stream 10 of collective 0 with 65536 bytes, which is not expected now"
    assert text in str(second)
    assert isinstance(first, BackendError)


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter", "allreduce"])
def test_partial_sums_are_kept_only_where_a_rank_gets_no_result(collective: str) -> None:
    plan = forest_plan(6, collective, "chain")
    for order in orders(lower(plan, 9600, chunk_elements=160), collective, plan.root):
        stream = order.stream
        gets = collective == "allreduce" or stream.destination == (plan.root or stream.shard)
        if plan.root is not None:
            gets = stream.destination == plan.root
        assert (order.slots > 0) == (not gets)
        assert order.slots <= 3


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield two ends of a connection over which a byte has come."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        near.sendall(b"1")
        assert far.recv(1) == b"1"
        yield near, far


@pytest.mark.parametrize(
    ("shut", "left_ago", "credited", "limits"),
    [
        (1, 0, 3, [4, 8, 12]),  # the window is 12
        (1, 0, 2, [2, 2, 2]),  # of an earlier chunk
        (1, 3600, 3, [2, 2, 2]),  # it waited for its join, or in a queue
        (0, 0, 3, [2, 2, 2]),  # nothing was held back
    ],
)
def test_more_chunks_of_a_stream_are_under_way_if_its_credits_are_prompt(
    shut: int, left_ago: int, credited: int, limits: list[int]
) -> None:
    streams, progress = np.zeros(1, machine.STREAM), np.zeros(1, machine.PROGRESS)
    links, frame = np.zeros(1, machine.LINK), np.zeros(1, machine.EXCHANGE)
    streams["window"], progress["limit"], found = 12, 2, []
    with tcp_pair() as (near, _):
        links["descriptor"] = near.fileno()
        for _ in limits:
            progress["timed"], progress["shut"], progress["credited"] = 3, shut, credited
            # a clock that may run for seconds until the call counts as prompt
            progress["timed_at"] = time.monotonic_ns() + (60 - left_ago) * 10**9
            machine._widen(streams, links, progress, frame, 0, 0)
            found.append(int(progress["limit"][0]))
            assert progress["timed"][0] == (3 if credited < 3 else 0)
    assert found == limits


def test_the_system_knows_the_round_trip_of_a_connection_alone() -> None:
    """Nothing is known of a descriptor that is not a connection."""
    frame = np.zeros(1, machine.EXCHANGE)
    with tcp_pair() as (near, _), open(os.devnull) as other:
        known = machine._round_trip(frame, near.fileno())
        if machine.MEASURES:
            info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
            assert 0 < known == 1000 * int.from_bytes(info[148:], "little") < 60 * 10**9
        assert machine._round_trip(frame, other.fileno()) == 0


def test_a_forked_child_that_ends_does_not_close_the_communicator_of_its_parent() -> None:
    plan = forest_plan(2, "allreduce", "star")

    def body(backend: TcpBackend, rank: int) -> list[int]:
        with Communicator(plan, backend) as comm:
            comm.all_reduce(np.ones(1))
            child = os.fork()
            if child == 0:
                backend.close()
                os._exit(0)
            os.waitpid(child, 0)
            total: list[int] = comm.all_reduce(np.arange(3)).tolist()
            return total

    assert backends_in_threads(2, body) == [[0, 2, 4]] * 2


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_scratch_is_at_most_fan_in_times_depth(collective: str, shape: str) -> None:
    """Two chunks for each joining stream and one for every level it waits; partial sums are no more than that again."""
    plan = forest_plan(8, collective, shape)
    found = footprint(plan)
    assert max(found.scratch) <= 2 * found.fan_in * (plan.depth + 2)
    if collective in ("broadcast", "allgather"):
        assert max(found.scratch) == 0


def test_memory_does_not_grow_with_the_number_of_chunks_a_chain_holds() -> None:
    """In a chain a rank joins one child: nothing has to wait for a sibling."""
    found = footprint(forest_plan(8, "allreduce", "chain"))
    assert set(found.scratch) == set(found.held) == {0}


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (forest_plan(8, "allreduce", "chain"), 14),
        (forest_plan(8, "allreduce", "star"), 2),
        (three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]), 8),
    ],
)
def test_a_chunk_takes_a_step_for_every_hop_of_its_longest_way(plan: Plan, steps: int) -> None:
    assert footprint(plan).steps == steps


@pytest.mark.thorough
def test_plans_of_a_million_edges_are_refused() -> None:
    plan = topoplan.plan(cluster([Server(topoplan.load("dgx-a100"), count=128)], nic_gbps=200), "allgather")
    with pytest.raises(UsageError, match=f"at most 200000 tree edges .*, got {1024 * 1023};"):
        footprint(plan)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_an_all_to_all_keeps_chunks_only_of_blocks_that_it_relays(shape: str) -> None:
    """Two for each such block and one for every level; along stars, where nothing is relayed, none."""
    plan = forest_plan(8, "alltoall", shape)
    relayed = [0] * 8
    for shard in plan.shards:
        for edge in shard.stages[0].top_down()[:-1]:
            relayed[edge.child] += 1
    for chunks, blocks in zip(footprint(plan).scratch, relayed, strict=True):
        assert chunks <= 2 * blocks * (plan.depth + 2)
    assert (max(relayed) == 0) == (shape == "star")


@pytest.fixture(scope="module")
def few_servers() -> PlanByKind:
    """Two kinds of servers, five GPUs; ranks that get no result of a reduce keep partial sums."""
    servers = [Server("v100x4", [0, 1], count=2), Server("v100x4", [0])]
    return plan_by_kind(cluster_by_kind(servers, nic_gbps=100), "allreduce")


def test_ranks_run_a_plan_by_kind_by_their_own_parts_with_the_bits_of_the_listed_plan(
    few_servers: PlanByKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 plans further collectives by kind too; nothing is listed."""
    size = few_servers.size
    kinds: dict[str, Any] = {
        one: {"root": 4} if one in ROOTED else {} for one in COLLECTIVES if one != "alltoall"
    }
    given = {one: [given_to(rank, size, one, 40_000) for rank in range(size)] for one in kinds}
    expected = {}
    for one, options in kinds.items():
        plan = plan_by_kind(few_servers.cluster, one, **options)
        with Communicator(plan, chunk_bytes=16_000) as comm:  # loopback lists it
            expected[one] = [seal(array) for array in call(comm, one, given[one], **options)]
    monkeypatch.setattr(PlanByKind, "listed", None)

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(few_servers, backend, chunk_bytes=16_000) as comm:
            results = {one: seal(call(comm, one, given[one][rank], **kinds[one])) for one in kinds}
            again = seal(call(comm, "allreduce", given["allreduce"][rank]))
            return results, again, comm.bytes_sent

    for rank, (results, again, _) in enumerate(backends_in_threads(size, body)):
        assert results == {one: expected[one][rank] for one in kinds}
        assert again == results["allreduce"]


@pytest.mark.thorough
def test_what_needs_the_list_of_a_plan_by_kind_lists_it(few_servers: PlanByKind) -> None:
    """Small arrays, which the barrier carries, blocks to all, and entries."""
    size = few_servers.size

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(few_servers, backend) as comm:
            small = comm.all_reduce(np.arange(3.0))
            blocks = comm.all_to_all(np.arange(size) + 10 * rank)
            entries = comm.sparse_all_reduce(np.arange(5000.0), density=0.001)
            return small, blocks, entries

    for rank, (small, blocks, entries) in enumerate(backends_in_threads(size, body)):
        assert small.tolist() == [0, size, 2 * size]
        assert blocks.tolist() == [10 * other + rank for other in range(size)]
        assert entries[-1] == size * 4999.0


def test_a_rank_with_a_pace_runs_a_plan_by_kind_as_the_others_do(few_servers: PlanByKind) -> None:
    size = few_servers.size
    given = np.arange(40_000.0)

    def body(rank: int) -> Any:
        pace = 1.0 if rank == 1 else None
        backend = TcpBackend(rank, size, rendezvous=meeting.address, pace=pace)
        with Communicator(few_servers, backend) as comm:
            return np.array_equal(comm.all_reduce(given), size * given)

    with Rendezvous("127.0.0.1:0", size) as meeting:
        assert as_threads(size, body) == [True] * size


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_what_a_torus_has_no_plan_by_kind_of_is_listed(collective: str, tmp_path: Path) -> None:
    servers = [Server("v100x4", [0, 1], count=4)]
    torus = cluster_by_kind(servers, nic_gbps=100, nics=4, network="torus", sides=[2, 2])
    file = tmp_path / "plan.json"
    file.write_text(plan_by_kind(torus, "allreduce").to_json(), encoding="utf-8")
    with Communicator(file) as comm:
        found = getattr(comm, collective)([np.full(480, rank + 1.0) for rank in range(8)], root=1)
    assert found[1].tolist() == [2.0 if collective == "broadcast" else 36.0] * 480


@pytest.mark.parametrize("kind", ["another collective", "another cluster", "another rate", "the list"])
def test_ranks_with_other_plans_by_kind_are_refused(few_servers: PlanByKind, kind: str) -> None:
    """All ranks raise the same error, also for the list of the same plan, and for a changed file of one rank."""
    other: Any = plan_by_kind(few_servers.cluster, "allgather")
    if kind == "another cluster":
        other = plan_by_kind(cluster_by_kind([Server("v100x4", [0], count=5)], nic_gbps=100), "allreduce")
    elif kind == "another rate":
        other = replace(few_servers, rate=2 * few_servers.rate)
    elif kind == "the list":
        other = few_servers.listed()

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(other if rank == 2 else few_servers, backend) as comm:
            return comm.all_reduce(np.ones(50_000))

    errors = backends_in_threads(few_servers.size, body, timeout=10)
    assert len(set(map(str, errors))) == 1
    assert all(isinstance(error, UsageError) for error in errors), errors
    if kind == "the list":
        assert "rank 2 runs another collective: collective 'allreduce' instead of 'plan from a" in str(
            errors[0]
        )
        return
    words = f"rank 2 has plan .* and rank 0 plan {few_servers.digest}; give all ranks the same plan"
    if kind != "another collective":
        assert re.fullmatch(words, str(errors[0])), errors[0]


def test_a_file_by_kind_that_was_changed_for_all_ranks_is_refused(few_servers: PlanByKind) -> None:
    wrong = replace(few_servers, rate=2 * few_servers.rate)

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(wrong, backend) as comm:
            return comm.all_reduce(np.ones(50_000))

    for error in backends_in_threads(few_servers.size, body, timeout=10):
        assert isinstance(error, PlanError)
        assert "claims a rate of" in str(error)


def test_barriers_and_any_root_need_no_list_of_a_plan_by_kind(
    few_servers: PlanByKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanByKind, "listed", None)

    def body(backend: TcpBackend, rank: int) -> Any:
        found = []
        with Communicator(few_servers, backend) as comm:
            comm.barrier()
            for root in (4, 0, 3):
                sent = comm.broadcast(np.full(50_000, float(rank)), root=root)
                total = comm.reduce(np.full(50_000, float(rank)), root=root)
                comm.barrier()
                found.append((set(sent), None if total is None else set(total)))
        return found

    for rank, found in enumerate(backends_in_threads(few_servers.size, body)):
        assert found == [({float(root)}, {10.0} if rank == root else None) for root in (4, 0, 3)]


def test_a_rank_that_leaves_a_plan_by_kind_is_named(
    few_servers: PlanByKind,
) -> None:
    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(few_servers, backend) as comm:
            comm.all_reduce(np.ones(50_000))
            if rank == 3:
                raise RuntimeError("stops here")
            return comm.all_reduce(np.ones(50_000))

    errors = backends_in_threads(few_servers.size, body)
    for rank, error in enumerate(errors):
        if rank != 3:
            assert isinstance(error, BackendError)
            assert error.peer == 3 or error.rank == 3, error
