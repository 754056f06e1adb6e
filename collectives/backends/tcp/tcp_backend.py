"""Run one rank in this process, joined to the others by one TCP connection per directed link."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import (
    Backend,
    Call,
    CallArrivals,
    LinkShare,
    LinkUse,
    OneRank,
    PreparedRun,
    TraceEvent,
    group_of,
)
from collectives.backends.shared.compiled_program import FRAME
from collectives.backends.shared.compiled_program import compile_ahead as compile_joins_ahead
from collectives.backends.shared.host_program import EACH, host_program_of
from collectives.backends.shared.program_runner import (
    PreparedProgram,
    RankBuffers,
    RunMemory,
    execute_alone,
    memories_of,
    rank_buffers_of,
)
from collectives.backends.tcp.chunk_order import FLIGHT_BYTES
from collectives.backends.tcp.collective_state import (
    COMBINED_BYTES,
    MOST_RANKS,
    DisseminationBarrier,
    TcpCollective,
    TcpProgram,
    WakingCondition,
    barrier_distances,
)
from collectives.backends.tcp.compiled_exchange import DIFFERS, ENDED, WAITING, compile_ahead
from collectives.backends.tcp.connections import (
    LinkAddresses,
    LinkLostError,
    Queue,
    TcpConnections,
    among,
    connection_rates,
    connection_shares,
    connections_of,
    link_use,
    listed,
    read_wires,
    set_pace,
    wires_of,
)
from collectives.backends.tcp.link_probe import SILENT_SECONDS, LinkEnds, LinkProbes
from collectives.peers.address import parse_address
from collectives.peers.agreement import Gather
from collectives.peers.connections import Message
from collectives.peers.control_page import ScratchMemory
from collectives.peers.control_plane import LinkCount, Signature, Waiting
from collectives.peers.environment import read_rank_environment
from collectives.peers.membership_protocol import MembershipProtocol, can_reach_each_other
from collectives.peers.peer_watchdog import LOOK
from collectives.peers.rendezvous import meeting_key
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.numpy_arrays import ArrayLibrary, PooledArrays
from collectives.tables.transfer_table import longest_input, results_in
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan

KEPT_COLLECTIVES = 64
"""Kinds of collectives whose state is kept."""

REPORT_SECONDS, TRIES = 0.1, 3
"""Seconds between two reports of a link that does not answer, and for an answer to the opening of a watched link; how
many of these must fail."""

UNKNOWN_SECONDS = 1.0
"""Time for an answer over links of whose packets the system says nothing."""

SETTLED_COUNTS = 2
"""Calls of uneven blocks since ranks have last assumed different counts, after which chunks do not wait for the
barrier."""

LATE = 0.02
"""Seconds after which a rank that waits in the barrier notifies the rendezvous."""


class TcpBackend(OneRank):
    """`Backend` of one rank over TCP; the other ranks are processes on this machine or others.

    Ranks agree on their first collective over the rendezvous and on the others in a `DisseminationBarrier`, which also
    carries small inputs: every rank then adds them up by itself. Chunks over open links move while ranks are missing in
    the barrier; no rank has a result before all have come. A wires file says which connections are possible, so
    with one they always agree over the rendezvous; with it or a pace all data goes over the links of the plan.

    Helper ranks of a plan, devices that add and copy but have no arrays, are processes too, numbered behind the ranks.
    They `follow` the agreements of the ranks, which then are always over the rendezvous.

    - `rendezvous`: ``host:port`` or ``unix:/path``. Rank 0 listens there, unless a `Rendezvous` does.
    - `wires`: file with the addresses of each link (see `connections`), or its contents; other links use the address
      from which the rendezvous is reached, which for a Unix path is 127.0.0.1.
    - `pace`: limit each link to this times the bandwidth in the plan (see `connection_rates`).
    - `timeout`: seconds to wait for the next step of a collective.
    - `meeting_timeout`: seconds to wait for all ranks at the start; by default `timeout`.
    - `flight_bytes`: bytes under way, or waiting at the destination, of a stream that another may delay: the capacity
      of the network's queues, or it runs dry. The same on all ranks.
    - `arrays`: numpy by default; torch's for tensors on the CPU.
    - `survivors`: membership of an earlier back end, whose ranks recover here; closed with this one.

    >>> from collectives import Communicator
    >>> from collectives.peers.rendezvous import Rendezvous
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[3])
    >>> with Rendezvous("127.0.0.1:0", 1) as rendezvous:
    ...     with Communicator(plan, TcpBackend(0, 1, rendezvous=rendezvous.address)) as comm:
    ...         print(comm.all_reduce(np.arange(3)))
    [0 1 2]
    """

    _world: TcpControlPlane

    name = "tcp"
    direct = False
    averages = False
    helpers: int
    arrivals: CallArrivals

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        rendezvous: str,
        helpers: int = 0,
        wires: Path | str | Mapping[Queue, LinkAddresses] | None = None,
        pace: float | None = None,
        timeout: float = 30.0,
        meeting_timeout: float | None = None,
        flight_bytes: int = FLIGHT_BYTES,
        arrays: ArrayLibrary[Any] | None = None,
        survivors: MembershipProtocol | None = None,
    ) -> None:
        if pace is not None and not 0 < pace < inf:
            raise UsageError(
                f"pace must be above 0 and finite, got {pace}; give 1 for the plan's bandwidths, or less"
            )
        meeting_timeout = timeout if meeting_timeout is None else meeting_timeout
        if not min(timeout, meeting_timeout) > 0:
            least = min(timeout, meeting_timeout)
            raise UsageError(f"timeout must be above 0 s, got {least}")
        if flight_bytes < 1:
            raise UsageError(f"flight_bytes must be at least 1, got {flight_bytes}; give for example 4194304")
        self.size = size
        self.helpers = helpers
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self.arrays: ArrayLibrary[Any] = PooledArrays() if arrays is None else arrays
        self.on_close: list[Callable[[], None]] = []
        self.survivors = survivors
        self._timeout = timeout
        self._pace = pace
        self._flight_bytes = flight_bytes
        named = read_wires(wires) if isinstance(wires, Path | str) else wires or {}
        self._all_wires: Mapping[Queue, LinkAddresses] = named  # by original ranks
        self._wires = named if survivors is None else among(named, survivors.seats)
        self._rates: dict[str, Mapping[Queue, float]] = {}
        self._scratch, self._padded = ScratchMemory(), ScratchMemory()
        self._collectives: dict[tuple[object, ...], TcpCollective] = {}
        self._dropped: dict[Queue, tuple[int, int]] = {}  # bytes in collectives that are not kept any more
        self._cables: Mapping[Queue, str] = {}
        self._probes: LinkProbes | None = None  # of the cables that are watched
        self._ahead: TcpCollective | None = None  # the call at which not all ranks have arrived
        self._lost_at = 0.0  # when lost links were reported last
        self._barrier: DisseminationBarrier | None = None
        self._same_counts = 0
        """Calls of uneven blocks since ranks have last assumed different counts; the same on all ranks."""
        self._barrier_opened = False
        """Whether the barrier was opened: it is again after a collective was refused."""
        self._frame = np.zeros(FRAME, dtype=np.int64)
        self.arrivals = CallArrivals()
        self._steps: list[TraceEvent] | None = None
        self._closed = False
        self._process = os.getpid()
        compile_ahead()
        compile_joins_ahead()
        self._rendezvous(rendezvous, meeting_timeout)
        atexit.register(self.close)

    @classmethod
    def from_environment(
        cls,
        *,
        timeout: float = 30.0,
        pace: float | None = None,
        ranks: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> TcpBackend:
        """Return the back end of a process that a launcher started; ``TOPOPLAN_WIRES`` names a wires file.

        The first `ranks` processes are ranks, by default all; the others are helper ranks.
        """
        place = read_rank_environment(environment, cls.name, timeout=timeout)
        wires = environment.get("TOPOPLAN_WIRES") or None
        size = place.size if ranks is None else min(ranks, place.size)
        return cls(
            place.rank,
            size,
            helpers=place.size - size,
            rendezvous=place.rendezvous,
            wires=wires,
            pace=pace,
            timeout=timeout,
        )

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        if self._wires:
            raise UsageError("a job with a wires file cannot be split; leave TOPOPLAN_WIRES out")
        made = TcpBackend._of_group(
            self.gather_texts,
            group_of(groups, self.rank),
            rank=self.rank,
            local=self._world.control.local,
            pace=self._pace,
            timeout=self._timeout,
            flight_bytes=self._flight_bytes,
        )
        return [made]

    @classmethod
    def among(
        cls,
        gather: Gather,
        *,
        rank: int,
        size: int,
        survivors: MembershipProtocol,
        wires: list[Any] | None = None,
        **options: Any,
    ) -> TcpBackend:
        """Return the back end of a rank that survived in a job, or joined it; the lowest rank hosts the rendezvous.

        `gather` is an allgather of texts among these ranks. `wires` has the entries of a wires file, by original ranks.
        """
        return cls._of_group(
            gather,
            range(size),
            rank=rank,
            local=survivors.local,
            wires=wires_of(wires or []),
            survivors=survivors,
            **options,
        )

    @classmethod
    def _of_group(
        cls, gather: Gather, members: Sequence[int], *, rank: int, local: str, **options: Any
    ) -> TcpBackend:
        """Return the back end of a rank of a group, whose first member hosts the rendezvous."""
        address, place = rendezvous_within(gather, members, rank=rank, local=local)
        try:
            made = cls(members.index(rank), len(members), rendezvous=address, **options)
        except BaseException:
            if place is not None:
                place.close()
            raise
        if place is not None:
            made.on_close.append(place.close)
        return made

    @property
    def about(self) -> dict[str, Any]:
        wires = listed(self._all_wires)
        about = {"pace": self._pace, "flight_bytes": self._flight_bytes, "wires": wires}
        return {**about, "arrays": self.arrays.name}

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        survivors = self.survivors
        assert survivors is not None, "looked at before"
        self._leave()
        return TcpBackend.among(
            gather,
            rank=rank,
            size=size,
            survivors=survivors,
            timeout=self._timeout,
            **{**self.about, "arrays": self.arrays},
        )

    def follow(self) -> Signature | None:
        with self._reporting_failures():
            return self._world.follow()

    def run(self, call: Call[Any]) -> None:
        with self._reporting_failures():
            if self._barrier_opened and self._small(call):
                buffers = rank_buffers_of(call)
                ready = self._ready(call, buffers)
                self._run_small(call, ready, call.signature, buffers.source_at, buffers.result_at, buffers)
            else:
                self._run_over_links(call)
            self._same_counts += call.signature.counts > 0

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        buffers = rank_buffers_of(call, self.size)
        quick = buffers.aligned and buffers.arithmetic.quick(call.op)
        if not self._barrier_opened or not self._small(call) or not quick:
            return None
        ready = self._ready(call, buffers)
        (memory,) = call.memory
        # do not keep the arrays of this call
        call = replace(call, memory=(replace(memory, source=None, result=None),))

        def run(number: int, source: int, result: int) -> None:
            with self._reporting_failures():
                self._run_small(call, ready, call.signature.of_call(number), source, result)
                self._same_counts += call.signature.counts > 0

        return run

    def _ready(self, call: Call[Any], buffers: RankBuffers) -> PreparedProgram:
        """Return the program of a rank that has the inputs of all ranks."""
        about, (memory,) = call.signature, call.memory
        program = host_program_of(
            call.table,
            self.rank,
            given=memory.given,
            blocks=results_in(call.table, about.collective, about.root),
            itemsize=call.itemsize,
            block_bytes=COMBINED_BYTES,
            methods=(EACH,),
        )
        return PreparedProgram.of(program, buffers.arithmetic, aligned=buffers.aligned)

    def _run_small(
        self,
        like: Call[Any],
        ready: PreparedProgram,
        about: Signature,
        source: int,
        result: int,
        buffers: RankBuffers | None = None,
    ) -> None:
        """Run a collective whose inputs the barrier carries, on arrays at these addresses."""
        began, met = time.monotonic_ns(), 0
        if self._barrier is None:
            met = self._agree(about, lambda: self._collective_of(like))  # opens the barrier
        assert self._barrier is not None, "opened"
        (memory,) = like.memory
        own = (memory.given[1] - memory.given[0]) * like.itemsize
        nbytes = longest_input(like.table, memory.given) * like.itemsize
        if own < nbytes:  # the barrier carries as many bytes of each rank
            padded = self._padded.of(nbytes)
            ctypes.memmove(padded.address, source, own)
            source = padded.address
        carried = self._agree(about, lambda: self._collective_of(like), source, nbytes)
        met = met or carried
        self.arrivals.add(met - began)
        self._note_steps(like, began, met)
        scratch = self._scratch.of(ready.program.scratch_elements * like.itemsize)
        areas = scratch, scratch, self._barrier.shown
        work = None if buffers is None else RunMemory(buffers, areas)
        execute_alone(ready, memories_of(source, result, areas), self._frame, work)

    def _small(self, call: Call[Any]) -> bool:
        """Return whether the barrier carries the inputs."""
        (memory,) = call.memory
        if call.table.only is not None:
            return False  # every rank adds up the inputs of all by the rows of all
        return self._carries(longest_input(call.table, memory.given) * call.itemsize)

    def _carries(self, nbytes: int) -> bool:
        """Return whether the barrier carries inputs of so many bytes."""
        return self._pace is None and nbytes * self.size <= COMBINED_BYTES and self.size <= MOST_RANKS

    def takes_part(self, nbytes: int) -> bool:
        # the routes of a wires file are those of listed edges
        return not self._carries(nbytes) and not self._all_wires

    def _run_over_links(self, call: Call[Any]) -> None:
        """Run a collective over the links of the plan."""
        world, state = self._world, self._collective_of(call)
        about, network = call.signature, self._network

        def advance() -> None:
            if state.status == WAITING:
                state.connect(network.descriptor)
                state.go_on()
            if state.status == WAITING:
                self._wakeup.clear()
                if self._probes is not None:
                    self._report_lost(self._probes, state.silent(SILENT_SECONDS, began=met))
            elif state.status != ENDED:
                peer, message, lost = state.trouble()
                world.report(message, peer=peer, step=state.stops_at(peer), links=lost)

        state.begin(call, traced=self._steps is not None)
        state.connect(network.descriptor)
        # An open link was agreed on before: both ends know it, and nothing on it is older than the last refused call.
        # Ranks that assume counts for all may be wrong, and soon after a change they often are.
        new_counts = about.counts != 0 and self._same_counts < SETTLED_COUNTS
        at_once = state.connected and not self.helpers and not self.monitored and not new_counts
        try:
            with self._waiting(state.waiting, state.stops_at):
                began = time.monotonic_ns()
                if not at_once:
                    met = self._agree(about, lambda: state, helped=self.helpers > 0 and call.table.helped)
                state.pace(self._open(call, state))
                if at_once:
                    self._ahead = state
                    try:
                        met = self._agree(about, lambda: state, beside=state)
                    finally:
                        self._ahead = None
                self.arrivals.add(met - began)
                world.wait(
                    lambda: state.finished, timeout=self._timeout, moved=lambda: state.touched, pause=advance
                )
        finally:
            state.end()
            if self._probes is not None:
                self._probes.close()
        self._note_steps(call, began, met, state)

    def _collective_of(self, call: Call[Any]) -> TcpCollective:
        """Return the reset state of a collective over links."""
        about, (memory,) = call.signature, call.memory
        kind = (call.table, about.collective, about.root, memory.given, memory.block, call.itemsize)
        state = self._collectives.get(kind)
        if state is None:
            if len(self._collectives) == KEPT_COLLECTIVES:
                dropped = self._collectives.pop(next(iter(self._collectives)))
                for link, (data, back, _) in dropped.counts().items():
                    before = self._dropped.get(link, (0, 0))
                    self._dropped[link] = before[0] + data, before[1] + back

            def links_of(rows: NDArray[np.int64]) -> tuple[tuple[Queue, ...], NDArray[np.int64]]:
                return connections_of(rows, call.plan, call.table, self._wires)

            program = TcpProgram.of(call, self.rank, links_of, self._flight_bytes)
            state = self._collectives[kind] = TcpCollective(
                program, call.table, self._scratch, self._wakeup.descriptor
            )
        state.reset()
        return state

    def _link_counts(self) -> tuple[LinkCount, ...]:
        """Return the bytes of all links of this rank."""
        totals = {link: (*moved, False) for link, moved in list(self._dropped.items())}
        for state in list(self._collectives.values()):
            for link, (data, back, left) in state.counts(ahead=state is self._ahead).items():
                before = totals.get(link, (0, 0, False))
                totals[link] = before[0] + data, before[1] + back, before[2] or left
        return tuple(
            LinkCount(link, data, back if left or link[0] != self.rank else None)
            for link, (data, back, left) in sorted(totals.items())
        )

    @property
    def wires(self) -> Mapping[Queue, tuple[str, ...]]:
        return {link: wire.route for link, wire in self._wires.items()}

    def watch(self, cables: Mapping[Queue, str]) -> None:
        self._cables = cables
        self._probed: dict[str, tuple[Queue, LinkEnds]] = {}
        for link in sorted(link for link in cables if link[0] == self.rank):
            # other ranks may lack wires that no plan has used yet
            with contextlib.suppress(ConnectionError):
                self._probed.setdefault(cables[link], (link, self._network.ends_of(link)))
        self._probes = LinkProbes(lambda cable: self._probed[cable][1]) if self._probed else None

    def _report_lost(self, probes: LinkProbes, silent: Sequence[Queue]) -> None:
        """Report cables of silent links that do not answer, again and again: the other end may only be paused."""
        asked: dict[str, float] = {}
        for cable in sorted(
            {self._cables[link] for link in silent if link in self._cables} & self._probed.keys()
        ):
            came = self._network.arrivals([link for link in self._cables if self._cables[link] == cable])
            if all(one.since > SILENT_SECONDS for one in came):
                asked[cable] = max((one.answer for one in came), default=UNKNOWN_SECONDS)
        lost = probes.unanswered(asked)
        now = time.monotonic()
        if lost and now - self._lost_at > REPORT_SECONDS:
            self._lost_at = now
            self._world.report_lost([self._probed[cable][0] for cable in lost])

    def trace(self, steps: list[TraceEvent] | None) -> None:
        self._steps = steps

    @property
    def measures(self) -> bool:
        with socket.socket() as unconnected:
            return link_use(unconnected) is not None

    def link_uses(self) -> Mapping[Queue, LinkUse]:
        return self._network.uses()

    def link_shares(self, plan: Plan, machine: Topology) -> Mapping[Queue, LinkShare]:
        return connection_shares(plan, self._wires, machine)

    def _note_steps(self, call: Call[Any], began: int, met: int, state: TcpCollective | None = None) -> None:
        """Add the events of a collective to the trace, if there is one."""
        if self._steps is None:
            return
        self._steps.append(TraceEvent(f"rank {self.rank}", "meet", began, met))
        for link, stream, chunk, start, end in () if state is None else state.arrivals():
            source, destination = (call.plan.vertices[rank] for rank in link[:2])
            what = f"shard {stream.shard} chunk {chunk}"
            self._steps.append(TraceEvent(f"{source} -> {destination} ({link[2]})", what, start, end))

    @contextlib.contextmanager
    def _waiting(
        self, waiting: Callable[[], Waiting], step: Callable[[int | None], int | None]
    ) -> Iterator[None]:
        """Let reports of failures read what this rank waits for inside, and at which row it waits for a peer."""
        world = self._world
        with world.changed:
            before = world.waiting, world.step
            world.waiting, world.step = waiting, step
        try:
            yield
        finally:
            with world.changed:
                world.waiting, world.step = before

    def _agree(
        self,
        signature: Signature,
        state: Callable[[], TcpCollective],
        source: int = 0,
        nbytes: int = 0,
        *,
        helped: bool = False,
        beside: TcpCollective | None = None,
    ) -> int:
        """Agree with all ranks on a collective, and exchange small inputs, or move the chunks of one meanwhile.

        Return when all ranks had come, in nanoseconds of the steady clock.
        """
        barrier, world = self._barrier, self._world
        if self.rank >= self.size:
            return time.monotonic_ns()  # the ranks have agreed before a helper follows
        if barrier is None:
            if beside is None:
                world.agree(signature, timeout=self._timeout, helped=helped)
            else:
                world.agree(
                    signature,
                    timeout=self._timeout,
                    moved=lambda: beside.touched,
                    pause=partial(self._move_beside, beside),
                )
            met = time.monotonic_ns()
            self._open_barrier(self._timeout)
            return met
        world.meet()
        barrier.begin(signature.pack(), source, nbytes)
        go_on = barrier.go_on if beside is None else partial(beside.meet, barrier)
        status = go_on()
        if status != ENDED:
            self._finish_barrier(barrier, signature, state, status, go_on)
        world.met += 1
        return barrier.met_at

    def _move_beside(self, state: TcpCollective) -> bool:
        """Move chunks until the rank is woken; return False if there is nothing to move before all have come."""
        if state.status == WAITING:
            state.go_on()
        if state.status == WAITING:
            self._wakeup.clear()
        return state.status == WAITING

    def _finish_barrier(
        self,
        barrier: DisseminationBarrier,
        signature: Signature,
        state: Callable[[], TcpCollective],
        status: int,
        go_on: Callable[[], int],
    ) -> None:
        """Continue a barrier at which not all ranks have arrived at once, or raise why it cannot end."""
        world = self._world
        begun = barrier.touched = time.monotonic()
        missed = False

        def waits() -> Waiting:
            peer = barrier.peer
            return Waiting(peer, state().stops_at(peer), time.monotonic() - barrier.touched)

        def miss() -> None:
            nonlocal missed
            if not missed:
                missed = True
                world.miss_others(signature)

        def advance() -> None:
            nonlocal status
            if status == WAITING:
                status = go_on()
                self._wakeup.clear()
            if status != ENDED and (status != WAITING or time.monotonic() - begun > LATE):
                miss()
            if status not in (WAITING, ENDED):  # the rendezvous will report the reason
                with world.changed:
                    world.changed.wait(LOOK)

        with self._waiting(waits, lambda peer: state().stops_at(peer)):
            world.wait(
                lambda: (
                    status == ENDED
                    or world.control.differ is not None
                    or (status != WAITING and world.control.alone)
                ),
                timeout=self._timeout,
                moved=lambda: barrier.touched,
                pause=advance,
            )
            if status == ENDED:
                return
            error = world.differing
            if error is not None:
                raise error
            peer = barrier.peer
            text = "runs another collective" if status == DIFFERS else "closed its connection"
            world.report(f"rank {peer} {text}", peer=peer, step=state().stops_at(peer))
            world.wait(lambda: False, timeout=self._timeout)

    def reach_others(self, timeout: float) -> None:
        """Open the barrier's connections within `timeout` seconds, as the first collective would; all ranks call it.

        If the ranks do not reach each other the back end is unusable from then on.
        """
        with self._reporting_failures():
            nothing = Signature(0, "", self.size, "to meet", None, None, "", 0, 0)
            self._world.agree(nothing, timeout=timeout)
            self._open_barrier(timeout)

    def _open_barrier(self, timeout: float) -> None:
        """Open the connections of the barrier if all ranks allow it; all ranks call this together."""
        if self.size == 1 or not self._all_meet:
            return
        distances, network, world = barrier_distances(self.size), self._network, self._world
        for distance in distances:
            peer = (self.rank + distance) % self.size
            try:
                network.open_barrier(peer, timeout)
            except ConnectionError as error:
                world.report(str(error), peer=peer, step=None)
                world.wait(lambda: False, timeout=timeout)
        world.wait(lambda: len(network.barrier_in) == len(distances), timeout=timeout)
        links = [
            (
                network.barrier_out[(self.rank + distance) % self.size],
                network.barrier_in[(self.rank - distance) % self.size],
            )
            for distance in distances
        ]
        self._barrier, self._barrier_opened = (
            DisseminationBarrier(self.rank, self.size, links, self._wakeup),
            True,
        )

    def refuse(self, signature: Signature) -> None:
        """Refuse as a rank of the agreement, or end the job as a helper rank."""
        if self.rank < self.size:
            self.agree(signature)
        elif not self._closed:
            self._world.refuse(signature)
            self._end()

    def close(self) -> None:
        """Close the back end after what this rank has sent has reached the other machines."""
        # a forked child must not send the shutdown notice of its parent
        if os.getpid() != self._process:
            return
        self._leave()
        if self.survivors is not None:
            self.survivors.close()

    def _leave(self) -> None:
        """Leave the other ranks, with a shutdown notice unless the job has failed."""
        if not self._closed:
            self._network.drain(self._timeout)
            self._world.leave()
            self._end()
        while self.on_close:
            self.on_close.pop(0)()

    def _rendezvous(self, rendezvous: str, timeout: float) -> None:
        """Find the other ranks at the rendezvous."""
        lock, look, until = threading.RLock(), self.survivors, time.monotonic() + timeout
        self._wakeup = WakingCondition(lock)
        key = meeting_key(parse_address(rendezvous))
        made: list[TcpConnections] = []
        own: list[MembershipProtocol] = []
        undo = contextlib.ExitStack()
        undo.callback(self._wakeup.close)

        def hello(local: str) -> Message:
            network = TcpConnections(
                self.rank,
                local,
                self._wires,
                key=key,
                lock=lock,
                changed=self._wakeup,
                failed=self._end_with,
            )
            made.append(network)
            undo.callback(network.close)
            meets = network.general is not None and not self._wires and not self.helpers
            about = {
                "general": network.general,
                "ports": network.ports,
                "links": network.card,
                "meets": meets,
            }
            if network.general is not None and not self.helpers and self.survivors is None:
                own.append(MembershipProtocol(local))
                undo.callback(own[0].close)
                about["survivors"] = own[0].card
            return {**about, "flight_bytes": self._flight_bytes}

        with undo:
            self._world = TcpControlPlane(
                rendezvous,
                self.rank,
                self.size,
                timeout=timeout,
                helpers=self.helpers,
                hello=hello,
                changed=self._wakeup,
                look=None if look is None else lambda: look.check(until),
            )
            undo.callback(self._world.end)
            (self._network,) = made
            peers = self._world.peers(self._network.pass_on)
            undo.pop_all()
        self._world.link_counts = self._link_counts
        self._all_meet = all(peer["meets"] for peer in peers)
        cards = [peer["survivors"] for peer in peers[: self.size]]
        for one in own:
            if can_reach_each_other(cards):
                one.know(self.rank, cards)
                self.survivors = one
            else:
                one.close()
        self._network.start(peers)

    def _end_with(self, error: BaseException) -> None:
        """End the job with an error of a thread of this rank."""
        reason = f"a connection to rank {self.rank} failed: {type(error).__name__}: {error}"
        self._world.report(reason, peer=self.rank, step=None)

    def _open(self, call: Call[Any], state: TcpCollective) -> Mapping[Queue, float]:
        """Open the outgoing links of a collective; return the paces that the system does not keep by itself."""
        network, links = self._network, state.program.leaving
        for link in links:
            try:
                self._open_link(link)
            except ConnectionError as error:
                lost = (link,) if isinstance(error, LinkLostError) else ()
                self._world.report(str(error), peer=link[1], step=state.stops_at(link[1]), links=lost)
                return {}
        if self._pace is None:
            return {}
        plan = call.signature.plan
        if plan not in self._rates:
            self._rates[plan] = connection_rates(call.plan, self._wires)
        rates = {link: self._rates[plan][link] * self._pace for link in links}
        return {link: rate for link, rate in rates.items() if not set_pace(network.outgoing[link], rate)}

    def _open_link(self, link: Queue) -> None:
        """Open a link from this rank; report one that is watched after `TRIES`, and try on until the timeout."""
        if link not in self._cables:
            self._network.open(link, self._timeout)
            return
        until, tries = time.monotonic() + self._timeout, 0
        while True:
            began = time.monotonic()
            try:
                self._network.open(link, self._timeout, answers_within=REPORT_SECONDS)
                return
            except LinkLostError:
                tries += 1
                if began >= until:
                    raise
            if tries >= TRIES:
                self._world.report_lost([link])
            time.sleep(max(0.0, began + REPORT_SECONDS - time.monotonic()))
            failure = self._world.trouble()
            if failure is not None:
                raise failure

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """End with a failure inside, after reporting it to the other ranks."""
        if self._closed:
            raise BackendError("the tcp back end has ended; make a new one", rank=self.rank)
        try:
            yield
        except RefusedError as error:
            # Some ranks may have sent half of their notes or chunks, so all of them reopen all connections. Helpers do
            # not know of the refusal; with them no chunk moves before an agreement, nor by counts that are new.
            self._barrier = None
            new, self._same_counts = self._same_counts < SETTLED_COUNTS, 0
            if error.unknown_counts and new:
                self._network.close_barrier()
            elif not self.helpers:
                self._network.close_links()
                self._collectives.clear()
                self._dropped.clear()
            raise
        except BaseException as error:
            if not isinstance(error, BackendError):
                reason = f"rank {self.rank} gave up: {type(error).__name__} {error}".rstrip()
                self._world.tell(BackendError(reason, peer=self.rank))
            self._end()
            raise

    def _end(self) -> None:
        self._closed = True
        atexit.unregister(self.close)
        self._network.close()
        self._world.end()
        self._wakeup.close()
