"""Run plans with relays: GPUs without a rank, whose kernels add and send on (`topoplan.with_relays`).

A relay has an *owner*, a rank whose process sees the GPU. The owner allocates the relay's arena there and launches the
relay's kernel with its own, so the job has no further processes. Arenas are CUDA's, of ranks and relays alike: NCCL has
no windows on a GPU that is not in its communicator. They are numbered as the vertices of the plan's trees, ranks first.

Only pairs of GPUs between which a plan sends must access each other's memory; on many machines not all can.
All ranks compare each call with a relay by texts. Absent: several servers, whose messages NCCL moves between ranks.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from collectives.backends.backend import Call
from collectives.backends.loopback.loopback_backend import with_helpers
from collectives.backends.nccl.agreed_setup import AgreedStepFailed, AgreedSteps
from collectives.backends.nccl.device_arenas import (
    SPARE,
    TRIAL_SECONDS,
    ArenaPlace,
    CudaArenas,
    DeviceArenas,
    PeerTrial,
    leave_arenas,
    place_on_host,
)
from collectives.backends.nccl.kernel_program import refused_edges, tree_pairs
from collectives.backends.nccl.window_engine import (
    BoundKernelPlan,
    Move,
    WindowEngine,
    blocks_on,
    peer_and_row,
)
from collectives.tables.cupy_arrays import on_device
from collectives.tables.kernels.kernel_launch import Kernels
from topoplan.errors import TopoplanError, UsageError
from topoplan.machine.host_topology import bus_id_order, plain_bus_id
from topoplan.plans.plan import Plan
from topoplan.units import format_size, listed

BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""The variable with which each launch of a kernel waits until the kernel has ended."""

NO_OWNER = (-1, -1)
"""In place of the owner and the number in CUDA of a relay that the trees do not pass."""


@dataclass(slots=True, eq=False)
class Relay:
    """A relay of this rank: its vertex in the trees, its name in the plan, its number in CUDA, stream and engine."""

    vertex: int
    name: str
    device: int
    stream: Any
    engine: WindowEngine


class RelayEngine(WindowEngine):
    """The engine of a rank and of the relays that it owns; other arguments are those of `WindowEngine`.

    `owners`: the rank of each vertex, which is itself or has the relay. `reached`: pairs of vertices, in both orders,
    that access each other's memory.
    """

    def __init__(
        self,
        cupy: ModuleType,
        kernels: Kernels,
        region: DeviceArenas,
        stream: Any,
        *,
        relays: Sequence[Relay],
        owners: tuple[int, ...],
        reached: frozenset[tuple[int, int]],
        **settings: Any,
    ) -> None:
        super().__init__(cupy, kernels, region, stream, **settings)
        self.relays = tuple(relays)
        self._owners = owners
        self._reached = reached
        self._refusals: dict[str, str] = {}  # by the plan's digest

    def refusal(self, plan: Plan) -> str:
        """Return in one line why a plan cannot run, the same on all ranks; empty if it may."""
        if plan.digest not in self._refusals:
            self._refusals[plan.digest] = self._lack_of_access(plan)
        return self._refusals[plan.digest]

    def _lack_of_access(self, plan: Plan) -> str:
        apart = refused_edges(plan)
        refused = {pair for pair in tree_pairs(plan) if pair[0] < pair[1]}
        refused = {pair for pair in refused if pair not in self._reached or pair in apart}
        if not refused:
            return ""
        names = listed([f"{plan.vertices[a]}-{plan.vertices[b]}" for a, b in sorted(refused)], noun="pairs")
        return (
            f"the plan sends between GPUs without access to each other's memory, {names}; "
            "leave such relays out of the plan"
        )

    def place(self, call: Call[Any], *, direct: bool = False) -> BoundKernelPlan | None:
        bound = super().place(call)
        if bound is None:
            return None
        first, relays = len(call.plan.ranks), with_helpers(call)[1:]
        found = []
        for relay in self.relays:
            with on_device(self._cupy, relay.device):
                found.append(relay.engine.place(replace(call, memory=(relays[relay.vertex - first],))))
        bound.relays, bound.alone = tuple(one for one in found if one is not None), False
        return bound

    def queue(
        self,
        bound: BoundKernelPlan,
        source: int,
        result: int,
        move: Move | None = None,
        **settings: Any,
    ) -> None:
        """Queue a program, and those of the relays beside it; the stream continues when all have ended."""
        begun, ended = self._end_of(self._stream, before=None), []
        for relay, one in zip(self.relays, bound.relays, strict=True):
            with on_device(self._cupy, relay.device):
                relay.stream.wait_event(begun)
                relay.engine.queue(one, 0, 0)
                ended.append(self._end_of(relay.stream, before=None))
        super().queue(bound, source, result, move, **settings)
        for event in ended:
            self._stream.wait_event(event)

    def begins(self, bound: BoundKernelPlan) -> None:
        super().begins(bound)
        for relay, one in zip(self.relays, bound.relays, strict=True):
            relay.engine.begins(one)

    def follows(self, bound: BoundKernelPlan) -> None:
        super().follows(bound)
        for relay, one in zip(self.relays, bound.relays, strict=True):
            relay.engine.follows(one)

    def progress(self) -> int:
        return super().progress() + sum(relay.engine.progress() for relay in self.relays)

    def waiting(self) -> tuple[int | None, int | None]:
        """Return the peer, or the owner of the relay, and the row; no peer if this rank itself is behind.

        A kernel that has not begun, here or on a relay, is behind all that wait.
        """
        kernels: list[Any] = [super(), *(relay.engine for relay in self.relays)]
        words = [word for kernel in kernels if (word := kernel.earliest_wait()) is not None]
        if not words or any(kernel.stands_still() for kernel in kernels):
            return None, None
        vertex, row = peer_and_row(min(words))
        owner = self._owners[vertex]
        return (None, None) if owner == self.region.rank else (owner, row)

    def has_unfinished(self) -> bool:
        kernels: list[Any] = [super(), *(relay.engine for relay in self.relays)]
        return any(one.earliest_wait() is not None or one.stands_still() for one in kernels)

    def state(self) -> str:
        states = [super().state()]
        for relay in self.relays:
            with on_device(self._cupy, relay.device):
                states.append(f"relay {relay.name}, vertex {relay.vertex}: {relay.engine.state()}")
        return "\n".join(states)

    def stop(self) -> None:
        super().stop()
        for relay in self.relays:
            relay.engine.stop()

    @property
    def failed(self) -> bool:
        return super().failed or any(relay.engine.failed for relay in self.relays)

    @property
    def late(self) -> bool:
        return super().late or any(relay.engine.late for relay in self.relays)


@dataclass(frozen=True, slots=True)
class HostReport(ArenaPlace):
    """A rank's GPU, and the bus ids of all GPUs that its process sees, in CUDA's order."""

    shown: tuple[str, ...]


def open_relay_engine(
    cupy: ModuleType,
    plan: Plan,
    steps: AgreedSteps,
    kernels: Kernels,
    stream: Any,
    *,
    rank: int,
    device: int,
    nbytes: int,
    timeout: float,
    exact: bool,
) -> RelayEngine | str:
    """Return the engine for plans with the same ranks and relays, or in one line why not; all ranks call it.

    `nbytes` of each arena. The rank's GPU is current here and in the threads of `steps`.
    """
    runtime = cupy.cuda.runtime

    def look() -> dict[str, Any]:
        blocking = os.environ.get(BLOCKING, "")
        if blocking not in ("", "0"):
            raise UsageError(
                f"{BLOCKING} must be 0 for relays, whose kernels wait for this rank's, got {blocking}; unset it"
            )
        shown = [plain_bus_id(runtime.deviceGetPCIBusId(one)) for one in range(runtime.getDeviceCount())]
        return {**place_on_host(runtime, device), "shown": shown}

    arenas: _RelayArenas | None = None
    try:
        reports = [HostReport(**{**one, "shown": tuple(one["shown"])}) for one in steps.take(look)]
        held = relay_owners(plan, reports)
        size = len(plan.vertices)
        owners = tuple(
            vertex if vertex < len(reports) else held.get(vertex, NO_OWNER)[0] for vertex in range(size)
        )
        places = [*reports, *(reports[0] for _ in range(len(reports), size))]  # of unused helpers too
        for vertex, (owner, one) in held.items():
            places[vertex] = replace(reports[owner], gpu=reports[owner].shown[one], device=one)
        own = {vertex: places[vertex].device for vertex, owner in enumerate(owners) if owner == rank}
        arenas = mapped = _RelayArenas(cupy, plan, steps, own, places, nbytes)
        seen, blocks = arenas.open()
        settings: dict[str, Any] = {"timeout": timeout, "blocks": blocks, "exact": exact}
        settings |= {"small_bytes": 0, "ranks": len(reports)}

        def region(vertex: int) -> DeviceArenas:
            own_arenas, domains = mapped if vertex == rank else None, (0,) * size
            addresses, device = seen[vertex], own[vertex]
            return DeviceArenas(
                vertex, size, nbytes, addresses, domains, 0, 1, mapped.kind, "", cupy, device, own_arenas
            )

        engines: list[RelayEngine] = []

        def make() -> None:
            relays = []
            for vertex in sorted(own.keys() - {rank}):
                with on_device(cupy, own[vertex]):
                    its_stream = cupy.cuda.Stream(non_blocking=True)
                    engine = WindowEngine(cupy, Kernels(cupy), region(vertex), its_stream, **settings)
                    its_stream.synchronize()
                relays.append(Relay(vertex, plan.vertices[vertex], own[vertex], its_stream, engine))
            reached = frozenset(
                (one, other) for one in range(size) for other in range(size) if seen[one][other]
            )
            about: dict[str, Any] = {"relays": relays, "owners": owners, "reached": reached}
            engines.append(RelayEngine(cupy, kernels, region(rank), stream, **about, **settings))

        steps.take(make)  # all ranks close their arenas if one fails
        return engines[0]
    except AgreedStepFailed as failed:
        if arenas is not None:
            arenas.given_up.set()
            leave_arenas(arenas, steps)
        return str(failed)
    except UsageError as refused:  # by all ranks, which have the same reports
        return str(refused)


def relay_owners(plan: Plan, reports: Sequence[HostReport]) -> dict[int, tuple[int, int]]:
    """Return the rank that owns each relay in a plan's trees, and the relay's number in CUDA there, by vertex.

    GPUs are found by the bus ids that the machine states. A machine without them has GPU k in the place k of all GPUs
    that any rank sees, by bus id, as drivers count them. A relay belongs to the rank with the fewest that sees it.

    UsageError: ranks are on several servers or not on the plan's GPUs; a relay is not visible.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.with_relays("dgx-1v", [0, 1], [2, 3]))
    >>> shown = [f"0000:0{number}:00.0" for number in range(8)]
    >>> relay_owners(plan, [HostReport("a", "p", shown[rank], rank, tuple(shown)) for rank in range(2)])
    {2: (0, 2), 3: (1, 3)}
    """
    first = reports[0]
    for rank, one in enumerate(reports):
        if one.host != first.host:
            raise UsageError(
                f"relays need all ranks on one server, got rank 0 and rank {rank} on two; plan without relays"
            )
    names = (*plan.ranks, *plan.helpers)
    order = "name in CUDA_VISIBLE_DEVICES the GPUs of the plan's ranks in their order, and then the relays"
    stated = {name: plain_bus_id(plan.topology.device(name).busid) for name in names}
    unknown = [name for name, busid in stated.items() if not busid]
    if unknown and len(unknown) < len(names):
        raise UsageError(
            f"a machine must state the bus ids of all GPUs of a plan or of none, got none of {listed(unknown)}; "
            "take the machine of topoplan probe"
        )
    if unknown:
        order += ", and then all others"
    bus_ids = _bus_ids(plan, reports, names) if unknown else stated
    for rank, (one, name) in enumerate(zip(reports, plan.ranks, strict=True)):
        wanted = bus_ids[name]
        if plain_bus_id(one.gpu) != wanted:
            raise UsageError(
                f"rank {rank} is on the GPU at {plain_bus_id(one.gpu)}, and the plan has it on {plan.ranks[rank]} at "
                f"{wanted}; {order}"
            )
    held: Counter[int] = Counter()
    found = {}
    for name in plan.helpers:
        wanted = bus_ids[name]
        seeing = [rank for rank, one in enumerate(reports) if wanted in one.shown]
        if not seeing:
            raise UsageError(f"relay {name} at {wanted} is not visible to any rank; {order}")
        owner = min(seeing, key=lambda rank: (held[rank], rank))
        held[owner] += 1
        found[plan.vertices.index(name)] = owner, reports[owner].shown.index(wanted)
    return found


def _bus_ids(plan: Plan, reports: Sequence[HostReport], names: Sequence[str]) -> dict[str, str]:
    """Return the bus ids of GPUs of a machine that states none: GPU k has the place k of all visible GPUs."""
    shown = sorted({busid for one in reports for busid in one.shown}, key=bus_id_order)
    places = {}
    for name in names:
        number = re.fullmatch(r"gpu(\d+)", name)
        if number is None:
            raise UsageError(
                f"relays must be GPUs with bus ids or names such as gpu3, got {name}; "
                "take the machine of topoplan probe"
            )
        places[name] = int(number[1])
    last = max(places.values())
    hidden = next((name for name in names if places[name] >= len(shown)), None)
    if hidden is not None:
        what = "relay " if hidden not in plan.ranks else ""
        raise UsageError(
            f"{what}{hidden} is not visible to any rank: a machine without bus ids needs GPUs 0 to {last} visible, and "
            f"all ranks together see {len(shown)}; name all in CUDA_VISIBLE_DEVICES, or take the machine of topoplan "
            "probe"
        )
    return {name: shown[place] for name, place in places.items()}


class _RelayArenas:
    """Arenas of ranks and relays (`HeldArenas`), of which this rank allocates its own and those of its relays.

    `own`: the number in CUDA of each of these vertices' GPUs. `kind`: "ipc" or "peer access".
    """

    def __init__(
        self,
        cupy: ModuleType,
        plan: Plan,
        steps: AgreedSteps,
        own: Mapping[int, int],
        places: Sequence[ArenaPlace],
        nbytes: int,
    ) -> None:
        self.given_up = threading.Event()
        self._cupy: Any = cupy
        self._names = plan.vertices
        self._steps = steps
        self._own = own
        self._size = len(places)
        self._nbytes = nbytes
        runtime, together = cupy.cuda.runtime, (0,) * len(places)
        self._arenas = {
            vertex: CudaArenas(runtime, steps, vertex, together, places, nbytes) for vertex in own
        }
        self.kind = next(arena.kind for arena in self._arenas.values())

    def open(self) -> tuple[dict[int, tuple[int, ...]], int]:
        """Return the addresses of all arenas as each vertex sees them, 0 without access, and the blocks of kernels.

        Addresses of other processes are not valid here. Raises `AgreedStepFailed`.
        """
        given = self._of_all(self._allocate, (0, ""))
        seen = self._of_all(lambda vertex: self._arenas[vertex].reach_most(given), (0,) * self._size)
        both = {
            one: tuple(address if seen[other][one] else 0 for other, address in enumerate(seen[one]))
            for one in range(self._size)
        }
        self._try(both)
        return both, min(blocks for blocks in self._of_all(self._blocks, 0) if blocks)

    def close(self, steps: AgreedSteps) -> None:
        for vertex, arena in self._arenas.items():
            with on_device(self._cupy, self._own[vertex]):
                arena.unmap()
        with suppress(AgreedStepFailed, TopoplanError):
            steps.take(lambda: None)  # no rank has them mapped any more
            for vertex, arena in self._arenas.items():
                with on_device(self._cupy, self._own[vertex]):
                    arena.free()

    def _of_all(self, work: Callable[[int], Any], nothing: Any = None) -> list[Any]:
        """Do work for each vertex on its GPU, by its owner; return the results of all, `nothing` without an owner."""

        def of_own() -> list[tuple[int, Any]]:
            with ThreadPoolExecutor(len(self._own)) as pool:  # kernels of the trial wait for each other
                return list(zip(self._own, pool.map(on_gpu, self._own), strict=True))

        def on_gpu(vertex: int) -> Any:
            with on_device(self._cupy, self._own[vertex]):
                return work(vertex)

        found = {vertex: result for some in self._steps.take(of_own) for vertex, result in some}
        return [found.get(vertex, nothing) for vertex in range(self._size)]

    def _allocate(self, vertex: int) -> tuple[int, str]:
        free = int(self._cupy.cuda.runtime.memGetInfo()[0])
        if free < self._nbytes + SPARE:
            raise UsageError(
                f"{self._names[vertex]} has {format_size(free)} free, and a plan with relays takes "
                f"{format_size(self._nbytes + SPARE)}"
            )
        return self._arenas[vertex].allocate()

    def _blocks(self, vertex: int) -> int:
        return blocks_on(self._cupy.cuda.Device(self._own[vertex]).attributes["MultiProcessorCount"])

    def _try(self, seen: Mapping[int, Sequence[int]]) -> None:
        """Try that stores arrive between all GPUs that access each other."""
        trials = {
            vertex: PeerTrial(self._cupy, vertex, seen[vertex], self.given_up, names=self._names)
            for vertex in self._own
        }
        flags = self._of_all(lambda vertex: trials[vertex].prepare(), 0)
        seconds = min(TRIAL_SECONDS, self._steps.timeout / 2)
        self._of_all(lambda vertex: trials[vertex].run(flags, seconds))
        self._of_all(lambda vertex: trials[vertex].clear())
