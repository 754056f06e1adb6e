"""Run one rank in this process, joined to the others by one TCP connection per directed link."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives.backends.backend import (
    Backend,
    Call,
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
from collectives.backends.tcp.connections import TcpConnections, link_use, set_pace
from collectives.backends.tcp.link_addresses import (
    LinkAddresses,
    Queue,
    among,
    connection_of,
    connection_rates,
    connection_shares,
    listed,
    read_wires,
    wires_of,
)
from collectives.peers.agreement import Gather
from collectives.peers.control_page import ScratchMemory
from collectives.peers.control_plane import Signature, Waiting
from collectives.peers.environment import read_rank_environment
from collectives.peers.membership_protocol import MembershipProtocol, can_reach_each_other
from collectives.peers.peer_watchdog import LOOK
from collectives.peers.rendezvous_state import Message
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.array_library import ArrayLibrary
from collectives.tables.numpy_arrays import PooledArrays
from collectives.tables.transfer_table import EdgeStream, result_blocks
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan

KEPT_FLOWS = 64
"""Kinds of collectives of which is kept what they need."""

LATE = 0.02
"""Seconds after which a rank that waits for others to meet tells the rendezvous."""


class TcpBackend(OneRank):
    """`Backend` of one rank; the others are other processes, on this machine or others.

    Ranks agree on their first collective over the rendezvous and on the others in a `DisseminationBarrier`, where what
    small ones put in goes along, so that every rank adds it up by itself. A wires file says which connections there may
    be, so with one they always agree over the rendezvous; with it or a pace all data goes over the links of the plan.

    Helpers of a plan, devices that add and copy and are no ranks, are processes too, numbered behind the ranks. They
    put in nothing and get nothing, and `follow` what the ranks agree on, which then is always over the rendezvous.

    Parameters
    ----------
    rank, size : int
        This rank, and number of ranks.
    helpers : int
        Number of helpers; their ranks follow on the others.
    rendezvous : str
        Where the ranks meet: ``host:port`` or ``unix:/path``. Rank 0 listens there, unless a `Rendezvous` does.
    wires : path or mapping of queue to Wire, optional
        File that names the addresses of each link (see `collectives.backends.tcp.link_addresses`), or what it says;
        other links use the address from which the rendezvous is reached, which for a Unix path is 127.0.0.1.
    pace : float, optional
        Let each link run no faster than this times the bandwidth in the plan (see
        `collectives.backends.tcp.link_addresses.connection_rates`).
    timeout : float
        Seconds to wait for the next step of a collective.
    meeting_timeout : float, optional
        Seconds to wait for all ranks to come; by default ``timeout``.
    flight_bytes : int
        Bytes that may be under way, or wait at their destination, of a stream that another may hold up: what the
        queues in the network hold, or it runs dry. The same on all ranks.
    arrays : ArrayLibrary, optional
        numpy by default; torch's for tensors on the CPU.
    survivors : Survivors, optional
        Of ranks that are left of another job, which go on here; by default new ones. This closes them.

    Raises
    ------
    UsageError
        An argument is out of range, or the wires file is wrong.
    BackendError
        The ranks do not find each other, or do not agree on their number.

    Examples
    --------
    >>> from collectives import Communicator
    >>> from collectives.peers.rendezvous import Rendezvous
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[3])
    >>> with Rendezvous("127.0.0.1:0", 1) as meeting:
    ...     with Communicator(plan, TcpBackend(0, 1, rendezvous=meeting.address)) as comm:
    ...         print(comm.all_reduce(np.arange(3)))
    [0 1 2]
    """

    _world: TcpControlPlane

    name = "tcp"
    one_rank = True
    direct = False
    averages = False
    goes_on = True
    """Whether ranks that are left may go on; a back end within another job leaves that to it."""
    chunk_bytes: int | None = None

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
        if pace is not None and not pace > 0:
            raise UsageError(f"a pace of {pace} moves nothing; give 1 for the plan's bandwidths, or less")
        meeting_timeout = timeout if meeting_timeout is None else meeting_timeout
        if not min(timeout, meeting_timeout) > 0:
            least = min(timeout, meeting_timeout)
            raise UsageError(f"a timeout of {least} s is no time to wait; give more than zero")
        if flight_bytes < 1:
            raise UsageError(
                f"{flight_bytes} bytes under way move nothing; give at least 1, for example 4194304"
            )
        self.size = size
        self.helpers = helpers
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self.arrays: ArrayLibrary[Any] = PooledArrays() if arrays is None else arrays
        self.then: list[Callable[[], None]] = []
        self.survivors = survivors
        self._timeout = timeout
        self._pace = pace
        self._flight_bytes = flight_bytes
        named = read_wires(wires) if isinstance(wires, Path | str) else wires or {}
        self._all_wires: Mapping[Queue, LinkAddresses] = named  # as ranks were counted at the beginning
        self._wires = named if survivors is None else among(named, survivors.seats)
        self._rates: dict[str, Mapping[Queue, float]] = {}
        self._scratch = ScratchMemory()
        self._flows: dict[tuple[object, ...], TcpCollective] = {}
        self._meeting: DisseminationBarrier | None = None
        self._meets = False
        """Whether the ranks have met: they do so again where they have refused a collective meanwhile."""
        self._frame = np.zeros(FRAME, dtype=np.int64)
        self._steps: list[TraceEvent] | None = None
        self._closed = False
        self._process = os.getpid()
        compile_ahead()
        compile_joins_ahead()
        self._meet(rendezvous, meeting_timeout)
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
        """The back end of a process that a launcher started; ``TOPOPLAN_WIRES`` names a wires file.

        All processes are ranks; or so many, where their number is given, and those behind them helpers.

        Raises
        ------
        UsageError
            Names the variables that are missing, or the one whose value is no number (see `read_rank_environment`).
        BackendError
            The ranks do not find each other.
        """
        place = read_rank_environment(environment, cls.name)
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
        """See `Splits.split`."""
        if self._wires:
            raise UsageError(
                "the wires file names ranks of the whole job; leave TOPOPLAN_WIRES out to split it"
            )
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
        """That of one of the ranks that are left of another job, or have joined it; the lowest hosts where they meet.

        Parameters
        ----------
        gather : Gather
            Among these ranks.
        wires : list, optional
            The entries of a wires file, for ranks as they were counted at the beginning.
        rank, size, survivors, **options
            See `TcpBackend`.
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
        """That of a rank of a group, whose first member hosts where they meet; all that gather have a group."""
        address, place = rendezvous_within(gather, members, rank=rank, local=local)
        try:
            made = cls(members.index(rank), len(members), rendezvous=address, **options)
        except BaseException:
            if place is not None:
                place.close()
            raise
        if place is not None:
            made.then.append(place.close)
        return made

    @property
    def about(self) -> dict[str, Any]:
        """See `GoesOn.about`."""
        wires = listed(self._all_wires)
        about = {"pace": self._pace, "flight_bytes": self._flight_bytes, "wires": wires}
        return {**about, "arrays": self.arrays.name}

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        """See `GoesOn.go_on`; the lowest rank hosts where they meet."""
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
        """See `Follows.follow`."""
        with self._telling():
            return self._world.follow()

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        with self._telling():
            if self._meets and self._small(call):
                lines = rank_buffers_of(call)
                ready = self._ready(call, lines)
                self._run_small(call, ready, call.signature, lines.source_at, lines.result_at, lines)
            else:
                self._run_flow(call)

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        """See `Repeats.repeated`."""
        lines = rank_buffers_of(call, self.size)
        quick = lines.aligned and lines.arithmetic.quick(call.op)
        if not self._meets or not self._small(call) or not quick:
            return None
        ready = self._ready(call, lines)
        (memory,) = call.memory
        # without the arrays of this call, which would be kept
        call = replace(call, memory=(replace(memory, source=None, result=None),))

        def run(number: int, source: int, result: int) -> None:
            with self._telling():
                self._run_small(call, ready, call.signature.of_call(number), source, result)

        return run

    def _ready(self, call: Call[Any], lines: RankBuffers) -> PreparedProgram:
        """What a rank adds up that has been told all that the ranks put in."""
        about, (memory,) = call.signature, call.memory
        program = host_program_of(
            call.table,
            self.rank,
            given=memory.given,
            blocks=result_blocks(about.collective, about.root, self.size, about.count),
            itemsize=call.itemsize,
            block_bytes=COMBINED_BYTES,
            roads=(EACH,),
        )
        return PreparedProgram.of(program, lines.arithmetic, aligned=lines.aligned)

    def _run_small(
        self,
        like: Call[Any],
        ready: PreparedProgram,
        about: Signature,
        source: int,
        result: int,
        lines: RankBuffers | None = None,
    ) -> None:
        """Run a collective of which all is told in the meeting, on arrays at these addresses."""
        if self._meeting is None:
            self._world.agree(about, timeout=self._timeout)
            self._open_meeting(self._timeout)
        assert self._meeting is not None, "where the ranks meet"
        (memory,) = like.memory
        nbytes = (memory.given[1] - memory.given[0]) * like.itemsize
        began = time.monotonic_ns()
        self._agree(about, lambda: self._flow_of(like), source, nbytes)
        self._note_steps(like, began, time.monotonic_ns())
        scratch = self._scratch.of(ready.program.scratch_elements * like.itemsize)
        rooms = scratch, scratch, self._meeting.shown
        work = None if lines is None else RunMemory(lines, rooms)
        execute_alone(ready, memories_of(source, result, rooms), self._frame, work)

    def _small(self, call: Call[Any]) -> bool:
        """Whether ranks tell each other all that they put in."""
        (memory,) = call.memory
        nbytes = (memory.given[1] - memory.given[0]) * call.itemsize
        return self._pace is None and nbytes * self.size <= COMBINED_BYTES and self.size <= MOST_RANKS

    def _run_flow(self, call: Call[Any]) -> None:
        """Run a collective over the links of the plan."""
        world, flow = self._world, self._flow_of(call)

        def go_on() -> None:
            flow.connect(self._network.descriptor, paces)
            flow.go_on()
            if flow.status == WAITING:
                self._bell.hush()
            elif flow.status != ENDED:
                peer, message = flow.trouble()
                world.report(message, peer=peer, step=flow.stops_at(peer))

        flow.begin(call, traced=self._steps is not None)
        try:
            with self._waiting(flow.waiting, flow.stops_at):
                began = time.monotonic_ns()
                self._agree(call.signature, lambda: flow, helped=self.helpers > 0 and call.table.helped)
                met = time.monotonic_ns()
                paces = self._open(call, flow)
                world.wait(
                    lambda: flow.finished, timeout=self._timeout, moved=lambda: flow.touched, pause=go_on
                )
        finally:
            flow.end()
        self._note_steps(call, began, met, flow)

    def _flow_of(self, call: Call[Any]) -> TcpCollective:
        """What runs a collective over links, at its beginning."""
        about, (memory,) = call.signature, call.memory
        kind = (call.table, about.collective, about.root, memory.given, memory.block, call.itemsize)
        flow = self._flows.get(kind)
        if flow is None:
            if len(self._flows) == KEPT_FLOWS:
                del self._flows[next(iter(self._flows))]

            def lane(stream: EdgeStream) -> Queue:
                return connection_of(stream, call.plan, call.table, self._wires)

            program = TcpProgram.of(call, self.rank, lane, self._flight_bytes)
            flow = self._flows[kind] = TcpCollective(
                program, call.table, self._scratch, self._bell.descriptor
            )
        flow.reset()
        return flow

    def trace(self, steps: list[TraceEvent] | None) -> None:
        """See `Traces.trace`: meetings, and the chunks that come over each link."""
        self._steps = steps

    @property
    def measures(self) -> bool:
        """See `MeasuresLinks.measures`."""
        with socket.socket() as unconnected:
            return link_use(unconnected) is not None

    def link_uses(self) -> Mapping[Queue, LinkUse]:
        """See `MeasuresLinks.link_uses`."""
        return self._network.uses()

    def link_shares(self, plan: Plan, machine: Topology) -> Mapping[Queue, LinkShare]:
        """See `MeasuresLinks.link_shares`."""
        return connection_shares(plan, self._wires, machine)

    def _note_steps(self, call: Call[Any], began: int, met: int, flow: TcpCollective | None = None) -> None:
        """Add what a collective did to the steps, where somebody asks."""
        if self._steps is None:
            return
        self._steps.append(TraceEvent(f"rank {self.rank}", "meet", began, met))
        for link, stream, chunk, start, end in () if flow is None else flow.arrivals():
            source, destination = (call.plan.vertices[rank] for rank in link[:2])
            what = f"shard {stream.shard} chunk {chunk}"
            self._steps.append(TraceEvent(f"{source} -> {destination} ({link[2]})", what, start, end))

    @contextlib.contextmanager
    def _waiting(
        self, waiting: Callable[[], Waiting], step: Callable[[int | None], int | None]
    ) -> Iterator[None]:
        """Tell who asks what this rank waits for inside, and at which row it stops because of another."""
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
        flow: Callable[[], TcpCollective],
        source: int = 0,
        nbytes: int = 0,
        *,
        helped: bool = False,
    ) -> None:
        """Agree with all ranks on a collective, and tell them what this one puts in where that is small."""
        meeting, world = self._meeting, self._world
        if self.rank >= self.size:
            return  # the ranks have agreed when a helper hears of it
        if meeting is None:
            world.agree(signature, timeout=self._timeout, helped=helped)
            self._open_meeting(self._timeout)
            return
        world.meet()
        status = meeting.begin(signature.pack(), source, nbytes)
        if status != ENDED:
            self._meet_slowly(meeting, signature, flow, status)
        world.met += 1

    def _meet_slowly(
        self,
        meeting: DisseminationBarrier,
        signature: Signature,
        flow: Callable[[], TcpCollective],
        status: int,
    ) -> None:
        """Go on with a meeting to which not all come at once, or raise why it cannot be."""
        world = self._world
        begun = meeting.touched = time.monotonic()
        missed = False

        def waits() -> Waiting:
            peer = meeting.peer
            return Waiting(peer, flow().stops_at(peer), time.monotonic() - meeting.touched)

        def miss() -> None:
            nonlocal missed
            if not missed:
                missed = True
                world.miss_others(signature)

        def go_on() -> None:
            nonlocal status
            if status == WAITING:
                status = meeting.go_on()
                self._bell.hush()
            if status != ENDED and (status != WAITING or time.monotonic() - begun > LATE):
                miss()
            if status not in (WAITING, ENDED):  # the rendezvous knows more, or will soon
                with world.changed:
                    world.changed.wait(LOOK)

        with self._waiting(waits, lambda peer: flow().stops_at(peer)):
            world.wait(
                lambda: (
                    status == ENDED
                    or world.control.differ is not None
                    or (status != WAITING and world.control.alone)
                ),
                timeout=self._timeout,
                moved=lambda: meeting.touched,
                pause=go_on,
            )
            if status == ENDED:
                return
            error = world.differing
            if error is not None:
                raise error
            peer = meeting.peer
            text = "runs another collective" if status == DIFFERS else "closed its connection"
            world.report(f"rank {peer} {text}", peer=peer, step=flow().stops_at(peer))
            world.wait(lambda: False, timeout=self._timeout)

    def reach_others(self, timeout: float) -> None:
        """Open what ranks meet over within some seconds, as the first collective would; all of them must call it.

        Raises
        ------
        BackendError
            The ranks do not reach each other. The back end is unusable from then on.
        """
        with self._telling():
            nothing = Signature(0, "", self.size, "to meet", None, None, "", 0, 0)
            self._world.agree(nothing, timeout=timeout)
            self._open_meeting(timeout)

    def _open_meeting(self, timeout: float) -> None:
        """Open what ranks meet over, where all of them may; they all come here together."""
        peers = self._world.welcome["peers"]
        if self.size == 1 or not all(peer["meets"] for peer in peers.values()):
            return
        apart = barrier_distances(self.size)
        try:
            come = self._network.open_to_meet(apart, timeout)
        except ConnectionError as error:
            raise BackendError(str(error), rank=self.rank) from error
        self._world.wait(come, timeout=timeout)
        links = [
            (
                self._network.telling[(self.rank + distance) % self.size],
                self._network.hearing[(self.rank - distance) % self.size],
            )
            for distance in apart
        ]
        self._meeting, self._meets = DisseminationBarrier(self.rank, self.size, links, self._bell), True

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`; a helper ends the job by it."""
        if self.rank < self.size:
            self.agree(signature)
        elif not self._closed:
            self._world.refuse(signature)
            self._end()

    def close(self) -> None:
        """See `Backend.close`. What this rank has sent reaches the machines of the others first."""
        # a child that was forked off must not say goodbye for its parent
        if os.getpid() != self._process:
            return
        self._leave()
        if self.survivors is not None:
            self.survivors.close()

    def _leave(self) -> None:
        """Leave the other ranks, in order where nothing has failed."""
        if not self._closed:
            self._network.drain(self._timeout)
            self._world.leave()
            self._end()
        while self.then:
            self.then.pop(0)()

    def _meet(self, rendezvous: str, timeout: float) -> None:
        """Find the other ranks."""
        lock, look, until = threading.RLock(), self.survivors, time.monotonic() + timeout
        self._bell = WakingCondition(lock)
        made: list[TcpConnections] = []
        own: list[MembershipProtocol] = []

        def hello(local: str) -> Message:
            network = TcpConnections(
                self.rank,
                local,
                self._wires,
                lock=lock,
                changed=self._bell,
            )
            made.append(network)
            meets = network.general is not None and not self._wires and not self.helpers
            about = {"general": network.general, "ports": network.ports, "meets": meets}
            if network.general is not None and not self.helpers and self.goes_on and self.survivors is None:
                own.append(MembershipProtocol(local))
                about["survivors"] = own[0].card
            return {**about, "flight_bytes": self._flight_bytes}

        try:
            self._world = TcpControlPlane(
                rendezvous,
                self.rank,
                self.size,
                timeout=timeout,
                helpers=self.helpers,
                hello=hello,
                changed=self._bell,
                look=None if look is None else lambda: look.check(until),
            )
        except BaseException:
            for network in made:
                network.close()
            for one in own:
                one.close()
            self._bell.close()
            raise
        (self._network,) = made
        welcome = self._world.welcome
        cards = [welcome["peers"][str(peer)].get("survivors") for peer in range(self.size)]
        for one in own:
            if can_reach_each_other(cards):
                one.know(self.rank, cards)
                self.survivors = one
            else:
                one.close()
        self._network.start(self._world.watcher, str(welcome["token"]), welcome["peers"])

    def _open(self, call: Call[Any], flow: TcpCollective) -> Mapping[Queue, float]:
        """Open the links on which a collective leaves; the paces that the system does not keep by itself."""
        network, links = self._network, flow.program.leaving
        for link in links:
            try:
                network.open(link, self._timeout)
            except ConnectionError as error:
                self._world.report(str(error), peer=link[1], step=flow.stops_at(link[1]))
                return {}
        if self._pace is None:
            return {}
        plan = call.signature.plan
        if plan not in self._rates:
            self._rates[plan] = connection_rates(call.plan, self._wires)
        rates = {link: self._rates[plan][link] * self._pace for link in links}
        return {link: rate for link, rate in rates.items() if not set_pace(network.outgoing[link], rate)}

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """End with what is raised inside; where the others do not know why yet, tell them first."""
        if self._closed:
            raise BackendError("the tcp back end has ended; make a new one", rank=self.rank)
        try:
            yield
        except RefusedError:
            # some ranks may have sent half of their notes, so all of them open what they meet over once more
            self._meeting = None
            self._network.close_meeting()
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
        self._world.watcher.close()
        self._network.close()
        self._world.end()
        self._bell.close()
