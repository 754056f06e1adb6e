"""Run one rank in this process with one GPU, and NCCL between the ranks.

The ranks compare signatures before each collective. Every rank then runs its program: one kernel that writes to the
other GPUs' memory (`window_engine`); or messages grouped by steps that match on all ranks, and joins beside them
(`stepped_program`).

A later call of a kind, among ranks in one domain, returns when its kernel is queued: the caller's stream waits for it.
The guard's thread finds a failure, and `StartedCall.wait`, the next call or `close` raises it; kernels queued behind it
end at once. Other collectives return when the GPU has finished.

Tests without GPUs cannot show speeds, nor the overlap of NCCL's kernels and the joins.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from collectives.backends.backend import (
    AVERAGED,
    LONGEST_TIMEOUT,
    Backend,
    Call,
    OneRank,
    PreparedRun,
    StartedCall,
    group_of,
)
from collectives.backends.nccl.agreed_setup import AgreedStepFailed, AgreedSteps, describe_failure
from collectives.backends.nccl.device_arenas import UNIT, count_ranks_per_gpu, open_device_arenas
from collectives.backends.nccl.gpu_streams import (
    BoundProgram,
    GraphReplays,
    NcclStreams,
    QueuedCall,
    QueuedCalls,
    bind_program,
    replay_decision,
)
from collectives.backends.nccl.kernel_program import WHOLE
from collectives.backends.nccl.nccl_communicators import (
    ABORT_SECONDS,
    DESTROY_SECONDS,
    CollectiveGuard,
    NcclConnection,
    ParentCommunicator,
    prepare_library,
)
from collectives.backends.nccl.relay_engine import RelayEngine, open_relay_engine
from collectives.backends.nccl.window_engine import KEPT, BoundKernelPlan, WindowEngine, blocks_on
from collectives.backends.stepped_program import program_of, waits_for
from collectives.peers.address import address_among
from collectives.peers.agreement import Gather, gather_or_raise
from collectives.peers.control_plane import Signature
from collectives.peers.environment import integer_variable, read_rank_environment
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.cupy_arrays import (
    NOT_READY,
    CupyArrays,
    is_capturing,
    load_cupy,
    may_query,
    on_device,
    use_device,
)
from collectives.tables.transfer_table import Given
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError
from topoplan.model.window_engine import SLOT_BYTES
from topoplan.plans.plan import Plan
from topoplan.units import format_size, listed

ENGINES = ("auto", "windows", "messages")

REGION_BYTES = 256 << 20
"""The default for the memory of a GPU that the other GPUs write to."""

DRAIN_SECONDS = 1.0
"""Time for the GPU to finish queued work after the communicator is aborted."""

NOTICE_SECONDS = 1.0
"""Time for a rank that gave up to report why."""

NCCL_BLOCKS = 64
"""The most blocks of a kernel of NCCL, one for each channel (``MAXCHANNELS`` of NCCL 2.30); each takes a processor."""

CAPTURES, NOT_READY_TO_CAPTURE, ON_HOST = -1, -2, -3
"""Offers of ranks that capture a collective in a graph, or have their arrays on the host."""

CAPTURED_ALONE = "some ranks capture this collective in a graph and others run it; do the same on all"

CALLED_ON = "this rank has called on meanwhile; to go on after a refusal, wait for each call (Handle.wait, synchronize)"
"""End of the message of a refusal that comes too late for the ranks to go on."""

MOST_AGREED = 4096
"""Signatures of which all ranks remember that they have compared them."""

UNDER_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that Open MPI and MPICH set for the processes that they start."""

_in_graphs: list[WindowEngine] = []
"""Engines whose kernels are in a caller's graph and read the stop word there: kept until the process ends."""

Layout = tuple[Any, int, Given, tuple[int, int]]
"""Key of a program: the table, the bytes of an element, and the elements that the rank puts in and gets."""


class NcclBackend(OneRank):
    """Run collectives on one GPU of one rank over NCCL.

    - `device` is CUDA's number of the GPU, by default the current one.
    - `timeout` is in seconds: for the rendezvous, and for the next step of a collective.
    - `step_bytes`: the least that a rank sends in a step, if the buffer has as much.
    - `graphs`: replay a collective as a CUDA graph from the third call with the same arrays on all ranks.
    - `engine`: "windows" runs one kernel for each collective, which writes to the other GPUs' memory. "messages" uses
      NCCL's sends and receives, and kernels that join. "auto" takes windows if all ranks have them and the plan fits.
    - `region_bytes`: memory of each GPU for windows, half of it for slots and flags, half for arrays of `empty`.
    - `exact`: sums have the plan's bits. Without it a switch may add floating-point numbers in its own order.
    - `recovers`: ranks can recover from a failure; not under mpiexec, since MPI waits for a failed rank at the end.
    - `arrays`, `survivors`, `parent`: taken over from an earlier back end of this rank. This one closes `survivors`.

    `about_engine` names the engine and why no better one is used; it is the same on all ranks. `survivors` becomes None
    when this rank's GPU has failed: the others recover without it. NCCL 2.30 puts several ranks on one GPU, with
    ``NCCL_MULTI_RANK_GPU_ENABLE=1`` and a small ``NCCL_MAX_CTAS``, which are set here unless they are set.

    Raises `UsageError` if NCCL is missing, an argument is out of range, or windows are demanded and not available;
    `BackendError` if the ranks do not find each other.
    """

    _world: TcpControlPlane

    name = "nccl"
    arrays: CupyArrays
    direct = False
    averages = True

    def __init__(
        self,
        cupy: ModuleType,
        world: TcpControlPlane,
        *,
        device: int | None = None,
        timeout: float = 30.0,
        step_bytes: int = 2 << 20,
        graphs: bool = True,
        engine: str = "auto",
        region_bytes: int = REGION_BYTES,
        exact: bool = True,
        recovers: bool = True,
        arrays: CupyArrays | None = None,
        survivors: MembershipProtocol | None = None,
        parent: ParentCommunicator | None = None,
    ) -> None:
        if region_bytes < 2 * UNIT or region_bytes % UNIT:
            raise UsageError(
                f"region_bytes must be a multiple of {UNIT}, {2 * UNIT} at least, got {region_bytes}"
            )
        if engine not in ENGINES:
            raise UsageError(
                f"the engine {engine!r} is unknown; use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            )
        if step_bytes < 1 or not 0 < timeout <= LONGEST_TIMEOUT:
            raise UsageError(
                f"step_bytes and timeout must be above 0, and timeout at most {LONGEST_TIMEOUT} s, got {step_bytes} "
                f"and {timeout}"
            )
        if arrays is not None:
            device = arrays.device
        elif device is None:
            device = int(cupy.cuda.runtime.getDevice())
        self.library = prepare_library(count_ranks_per_gpu(cupy, world, device, timeout=timeout))
        self.rank = world.rank
        self.size = world.size
        self.ranks: tuple[int, ...] = (world.rank,)
        self.arrays = CupyArrays(cupy, device) if arrays is None else arrays
        self.survivors: MembershipProtocol | None = None
        self._cupy: Any = cupy
        self._gpu = partial(on_device, cupy, self.arrays.device)
        self._enter = partial(use_device, cupy, self.arrays.device)
        self._named = _ranges()
        self._world = world
        self._timeout = timeout
        self._step_bytes = step_bytes
        self._settings = {"step_bytes": step_bytes, "engine": engine, "exact": exact}
        self._graphs = graphs
        self._shared_settings: dict[str, Any] = {
            **self._settings,
            "graphs": graphs,
            "recovers": recovers,
            "region_bytes": region_bytes,
        }
        self._region_bytes = region_bytes
        self._on_close: list[Callable[[], None]] = []
        self._programs: OrderedDict[Layout, tuple[BoundProgram, GraphReplays]] = OrderedDict()
        self._captures = 0
        self._agreed: dict[Signature, int] = {}
        self._calls = QueuedCalls(self._has_succeeded)
        self._refused: tuple[QueuedCall, RefusedError] | None = None
        self._comparing, self._ending = threading.Lock(), threading.RLock()
        self._closed = False
        with self.arrays.here():
            self._streams = NcclStreams(cupy, self.arrays.kernels)
            self._event = cupy.cuda.Event(disable_timing=True)
        self.arrays.settle = self.settle
        self._connection = NcclConnection(
            self.library, cupy, world, device=self.arrays.device, timeout=timeout, parent=parent
        )
        self._guard = CollectiveGuard(world, self._connection, timeout=timeout)
        self._guard.on_stop = self._stop_engines
        self._engine: WindowEngine | None = None
        # by the vertices and the helpers of the plans
        self._relayed: dict[tuple[tuple[str, ...], tuple[str, ...]], RelayEngine] = {}
        try:
            self._connection.connect()
            self.about_engine = self._open_engine(region_bytes)
            if survivors is None and recovers:
                gather = partial(world.texts, timeout=timeout)
                survivors = MembershipProtocol.of(gather, self.rank, world.control.local)
            self.survivors = survivors
            self._connection.keeps = self.survivors is not None
        except BaseException as error:
            self._end(self._failure(error))
            self.close()
            raise

    @classmethod
    def from_environment(
        cls,
        *,
        timeout: float = 30.0,
        environment: Mapping[str, str] = os.environ,
        **options: int | str | bool,
    ) -> NcclBackend:
        """Return the back end of a process that a launcher started.

        Rank and size are found as for the other back ends (`read_rank_environment`); under mpiexec without these
        variables the ranks are MPI's, and cannot recover. The GPU is number ``LOCAL_RANK``, under mpiexec the rank
        among the processes of the host, modulo the GPUs that the process sees. It becomes current in the calling
        thread, so that arrays are made there.
        """
        cupy = load_cupy(cls.name)
        settings: dict[str, Any] = {**options}
        if not environment.get("RANK") and any(environment.get(name) for name in UNDER_MPI):
            from collectives.backends.mpi.mpi_backend import load_mpi

            mpi = load_mpi()
            comm = mpi.COMM_WORLD
            local = int(comm.Split_type(mpi.COMM_TYPE_SHARED).Get_rank())
            # all ranks raise if one has no GPU: MPI would wait for it without end
            used = gather_or_raise(comm.allgather, lambda: str(_use_gpu(cupy, local, settings.get("device"))))
            settings["device"] = int(used[comm.rank])
            address = address_among(comm.allgather, comm.rank)
            if not address:
                raise UsageError("hosts do not reach each other by TCP; look at their names and firewalls")
            return cls.among(
                comm.allgather,
                range(comm.size),
                cupy,
                rank=comm.rank,
                local=address,
                timeout=timeout,
                recovers=False,
                **settings,
            )
        place = read_rank_environment(environment, cls.name, timeout=timeout)
        local = integer_variable(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else place.rank
        world = TcpControlPlane(place.rendezvous, place.rank, place.size, timeout=timeout)
        try:
            settings["device"] = _use_gpu(cupy, local, settings.get("device"))
            return cls(cupy, world, timeout=timeout, **settings)
        except BaseException as error:
            world.close_with(error)
            raise

    @property
    def about(self) -> dict[str, Any]:
        return self._shared_settings

    @classmethod
    def among(
        cls,
        gather: Gather,
        members: Sequence[int],
        cupy: ModuleType,
        *,
        rank: int,
        local: str,
        timeout: float,
        **options: Any,
    ) -> NcclBackend:
        """Return the back end of a group of ranks that gather texts; the first one hosts the rendezvous.

        `gather` is an allgather of texts among all ranks that make such a group at this time. `members` are this
        group's ranks by their position in what is gathered; rank i of the new back end is the i-th of them. `local` is
        the address at which the others reach this machine.
        """
        address, place = rendezvous_within(gather, members, rank=rank, local=local)
        world: TcpControlPlane | None = None
        try:
            world = TcpControlPlane(address, members.index(rank), len(members), timeout=timeout)
            made = cls(cupy, world, timeout=timeout, **options)
        except BaseException as error:
            if world is not None:
                world.close_with(error)
            if place is not None:
                place.close()
            raise
        if place is not None:
            made._on_close.append(place.close)
        return made

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        made = NcclBackend.among(
            self.gather_texts,
            group_of(groups, self.rank),
            self._cupy,
            rank=self.rank,
            local=self._world.control.local,
            timeout=self._timeout,
            device=self.arrays.device,
            **self._shared_settings,
        )
        return [made]

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        survivors = self.survivors
        assert survivors is not None, "looked at before"
        with contextlib.suppress(BackendError):  # the ranks recover from it
            self.settle()
        # if ranks have joined and none has failed, all ranks that map the memory release it now
        self._leave(together=size >= self.size)
        try:
            return NcclBackend.among(
                gather,
                range(size),
                self._cupy,
                rank=rank,
                local=survivors.local,
                timeout=self._timeout,
                arrays=self.arrays,
                survivors=survivors,
                parent=self._connection.parent,
                **self._shared_settings,
            )
        except Exception as error:
            self._stay_out_if_failed()
            if isinstance(error, TopoplanError):
                raise
            raise BackendError(describe_failure(error), rank=rank) from error

    def run(self, call: Call[Any]) -> None:
        user, name = self.arrays.users_stream(), f"topoplan {call.signature.collective}"
        with self._reporting_failures(), self.arrays.here() as stream, self._named(name):
            if is_capturing(user):
                self._capture_for(call, user, stream)
            else:
                self._run(call, stream)

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        """All ranks have compared the signature: the arenas carry its digest from now on, and no text does."""
        engine, signature, name = self._engine, call.signature, f"topoplan {call.signature.collective}"
        bound = None if engine is None or not engine.alone or not len(call.table) else engine.kept(call)
        if engine is None or bound is None or not bound.alone:
            return None
        digest = self._digest(signature)
        call = replace(call, memory=())  # the arrays of this one are not kept

        def run(number: int, source: int, result: int) -> StartedCall:
            with self._reporting_failures(), self.arrays.here() as stream, self._named(name):
                return self._start(engine, bound, source, result, stream, call, number, digest)

        return run

    def _digest(self, signature: Signature) -> int:
        told = repr((replace(signature, call=0), self._settings))
        return int.from_bytes(sha256(told.encode()).digest()[:8])

    def agree(self, signature: Signature) -> None:
        with self._reporting_failures():
            self._agree(signature, 0)

    def agree_on_host(self, signature: Signature) -> None:
        """Compare with all ranks a collective of host arrays, which another back end carries."""
        with self._reporting_failures():
            self._agree(signature, ON_HOST)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        memory = self.memory(math.prod(shape) * self.arrays.itemsize(like))
        return self.arrays.empty(shape, like) if memory is None else memory.view(like.dtype).reshape(shape)

    def memory(self, nbytes: int) -> Any | None:
        """Return a CuPy array of bytes in the arena, contents undefined; None if the arena has no free range."""
        return None if self._engine is None else self._engine.region.array(nbytes)

    def writes(self, array: Any) -> bool:
        inside = self.holds(array.data.ptr, array.nbytes)
        return inside or (self._engine is not None and self.captures)

    @property
    def captures(self) -> bool:
        return is_capturing(self.arrays.users_stream())

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether memory lies in the arena, so that results can be written there directly."""
        return self._engine is not None and self._engine.place_of_result(address, nbytes) > 0

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._leave(together=True, ends=True)
            self._connection.abort_parent()
            if self.survivors is not None:
                self.survivors.close()

    def settle(self) -> None:
        if (last := self._calls.last) is not None and not last.over:
            self._wait_for_call(last, None)

    @property
    def failure(self) -> BackendError | None:
        return self._guard.error

    def _leave(self, *, together: bool, ends: bool = False) -> None:
        """Leave the other ranks; with `ends` the job ends on all ranks, and no communicator is kept."""
        if self._closed:
            return
        self._closed = True
        self._guard.close()
        if self._guard.error is None:
            with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):
                self._tell_call()
            self._leave_engine(together=together)
            if ends:
                self._connection.destroy()
            else:
                self._connection.abort(idle=True)
            self._drop_graphs()
            self._connection.wait_ended(DESTROY_SECONDS)
        self._world.close()
        self._programs.clear()
        for close in self._on_close:
            close()

    def _stay_out_if_failed(self) -> None:
        """Leave recovery to the other ranks if this rank's GPU has failed, which no later CUDA call repairs."""
        runtime = self._cupy.cuda.runtime
        try:
            with self._gpu():
                self._under_way(runtime.streamQuery(self._streams.origin.ptr))
        except runtime.CUDARuntimeError:
            survivors, self.survivors = self.survivors, None
            if survivors is not None:
                survivors.close()

    def _run(self, call: Call[Any], stream: Any) -> None:
        self._settle()
        one, (source, result) = call.memory[0], _addresses(call)
        if call.plan.helpers:
            self._run_relayed(call, source, result, stream)
            return
        engine = self._engine
        bound = None if engine is None else engine.place(call)
        if engine is not None and bound is not None:
            if engine.about_pairs not in self.about_engine:
                self.about_engine += f"; {engine.about_pairs}"
            told = replace(call.signature, call=0)
            digest = self._agreed.get(told)
            self._check_engine(engine)
            if digest is None:
                place = engine.place_of_result(result, one.result.nbytes)
                whole = call.plan.collective in WHOLE and not bound.small
                direct = engine.place(call, direct=True) if place and whole else None
                offers = self._agree(call.signature, place)
                if direct is not None and min(offers) == max(offers):
                    bound = direct
            if len(call.table):
                # with a digest only if all ranks have the same (`WindowEngine.differs`)
                with self._guard.watch(engine.progress, engine.waiting):
                    number = call.signature.call
                    self._complete(self._start(engine, bound, source, result, stream, call, number, digest))
                if bound.alone and digest is None:  # on all ranks at once
                    self._agreed[told] = self._digest(told)
                    if len(self._agreed) > MOST_AGREED:
                        del self._agreed[next(iter(self._agreed))]
        elif self._engine is not None and self._settings["engine"] == "windows":
            raise UsageError(
                f"this plan is too large for a region of {format_size(self._engine.region.nbytes)} or for a kernel; "
                'give more region_bytes, or use engine="messages"'
            )
        else:
            self._run_messages(call, source, result, stream)
            if call.op == "avg" and call.dtype in AVERAGED and one.result.size:
                with self._streams.origin:
                    self.arrays.kernels.divide(one.result, call.dtype, self.size)
                self._wait()

    def _run_relayed(self, call: Call[Any], source: int, result: int, stream: Any) -> None:
        """Run a plan with relays, or refuse it on all ranks."""
        signature = call.signature
        self._agree(signature, 0)
        if not len(call.table):
            return
        try:
            engine = self._engine_with_relays(call.plan)
            # no rank waits in a kernel while another one still loads it
            if engine.kept(call) is None and not all(
                self._steps().take(lambda: engine.place(call) is not None)
            ):
                raise UsageError(
                    f"this plan is too large for a region of {format_size(engine.region.nbytes)}; "
                    "give more region_bytes"
                )
            bound = engine.place(call)
            assert bound is not None, "placed before"
        except AgreedStepFailed as failed:  # arenas may differ from here on
            raise BackendError(failed.reason, rank=failed.rank) from failed
        except UsageError as refused:
            raise RefusedError(
                f"a plan with relays cannot run here: {refused}",
                rank=self.rank,
                by_all=True,
                next_call=signature.call + 1,
            ) from refused
        with self._guard.watch(engine.progress, engine.waiting):
            self._complete(self._start(engine, bound, source, result, stream, call, signature.call, None))

    def _engine_with_relays(self, plan: Plan) -> RelayEngine:
        """Return the engine of a plan's ranks and relays, which all ranks open with the first such plan.

        UsageError, on all ranks, if there is none, or if it cannot run this plan.
        """
        if self._settings["engine"] == "messages":
            raise UsageError('they need the windows engine, got engine="messages"; use engine="auto"')
        engine = next(
            (
                one
                for (vertices, helpers), one in self._relayed.items()
                if vertices == plan.vertices and set(helpers) >= set(plan.helpers)
            ),
            None,
        )
        if engine is None:
            found = open_relay_engine(
                self._cupy,
                plan,
                self._steps(),
                self.arrays.kernels,
                self._streams.origin,
                rank=self.rank,
                device=self.arrays.device,
                nbytes=self._region_bytes // 2 // UNIT * UNIT,
                timeout=self._timeout,
                exact=bool(self._settings["exact"]),
            )
            if isinstance(found, str):
                raise UsageError(found)
            engine = self._relayed[plan.vertices, plan.helpers] = found
            relays = listed(plan.helpers)
            self.about_engine += f"; windows over {engine.region.kind} with relays {relays}"
        refusal = engine.refusal(plan)
        if refusal:
            raise UsageError(refusal)
        return engine

    def _steps(self) -> AgreedSteps:
        return AgreedSteps(self._world, timeout=self._timeout, enter=self._enter)

    def _capture_for(self, call: Call[Any], user: Any, stream: Any) -> None:
        """Put a collective into the graph that the caller captures; all ranks do."""
        if call.plan.helpers:
            raise UsageError(
                f"a graph cannot capture a plan with relays, got {listed(call.plan.helpers)}; run it outside of the "
                "capture"
            )
        engine = self._engine
        if engine is None or not engine.alone:
            raise UsageError(
                "capturing a collective in a graph needs the windows engine on one server; this communicator "
                f"has {self.about_engine}"
            )
        self._settle()
        bound = engine.kept(call)
        if bound is not None and not bound.alone:
            raise UsageError(
                f"a graph cannot capture messages, got {engine.about_pairs}; run it outside of the capture"
            )
        self._check_engine(engine)
        offers = self._agree(call.signature, NOT_READY_TO_CAPTURE if bound is None else CAPTURES)
        averaged = call.op == "avg" and call.dtype not in AVERAGED
        if bound is None or NOT_READY_TO_CAPTURE in offers or call.op is None or averaged:
            raise UsageError(
                "a graph can capture an allreduce, reduce or reduce_scatter that ran before on arrays of this type and "
                "length, except an average of integers or 16-bit floats; run it once before the capture"
            )
        origin = self._streams.origin
        origin.wait_event(self._ready(stream))
        engine.queue(bound, *_addresses(call), captured=call.memory)
        user.wait_event(self._ready(origin))

    def _open_engine(self, region_bytes: int) -> str:
        """Open the windows engine if it is wanted and available, and return `about_engine`; all ranks call this."""
        wanted = str(self._settings["engine"])
        texts = self._world.texts(f"{wanted!r} and {region_bytes} bytes for it", timeout=self._timeout)
        for peer, theirs in enumerate(texts):
            if theirs != texts[0]:
                raise UsageError(
                    f"engine must be the same on all ranks, got {theirs} on rank {peer} and {texts[0]} on rank 0"
                )
        if wanted == "messages" or self.size == 1:
            return "messages"
        processors = self._cupy.cuda.Device(self.arrays.device).attributes["MultiProcessorCount"]
        steps = self._steps()
        with self._gpu():
            found = open_device_arenas(
                self._cupy,
                self.library,
                self._connection,
                steps,
                rank=self.rank,
                size=self.size,
                device=self.arrays.device,
                nbytes=region_bytes,
            )
            if isinstance(found, str):
                if wanted == "windows":
                    raise no_windows(found)
                return f"messages: {found}"
            each = processors // found.sharing
            blocks = -self._world.largest(-float(blocks_on(each)), timeout=self._timeout)
            # a kernel that waits for a peer must never keep NCCL's from starting, nor the other way round
            spare = -self._world.largest(-(each - blocks), timeout=self._timeout)
            kernels, origin = self.arrays.kernels, self._streams.origin
            self._engine = WindowEngine(
                self._cupy,
                kernels,
                found,
                origin,
                timeout=self._timeout,
                blocks=int(blocks),
                room_bytes=region_bytes // 2 // UNIT * UNIT,
                exact=bool(self._settings["exact"]),
                beside=self._streams.beside if spare >= NCCL_BLOCKS else None,
            )
            if self._engine.alone:
                self._engine.tell_call()  # loads the kernel before any rank waits in it
            origin.synchronize()
        self.chunk_bytes = SLOT_BYTES
        count = max(found.domains) + 1
        between = f", messages between {count} domains" if count > 1 else ""
        return f"windows over {found.kind}{between}" + (f" ({found.why})" if found.why else "")

    def _leave_engine(self, *, together: bool) -> None:
        """End the kernels, which nothing of NCCL can, and release their memory."""
        engines, in_graphs = self._engines, self._engine is not None and self._engine.in_graphs
        if not engines:
            return
        self._stop_engines()
        ended = self._drain()
        steps = None
        if together and ended:
            steps = AgreedSteps(self._world, timeout=self._timeout, enter=self._enter, leaving=True)
        with self._gpu():
            for engine in engines:  # which itself holds one array of its region
                engine.region.close(steps, lent=1, used=in_graphs)
        if self._engine is not None and in_graphs:
            _in_graphs.append(self._engine)

    @property
    def _engines(self) -> list[WindowEngine]:
        """Return the engines that are open, in the same order on all ranks."""
        return [*([] if self._engine is None else [self._engine]), *self._relayed.values()]

    def _stop_engines(self) -> None:
        for engine in self._engines:
            engine.stop()

    def _ready(self, stream: Any) -> Any:
        """Return an event behind all queued work, including copies of a program's tables; valid until the next one."""
        self._event.record(stream)
        return self._event

    def _start(
        self,
        engine: WindowEngine,
        bound: BoundKernelPlan,
        source: int,
        result: int,
        stream: Any,
        call: Call[Any],
        number: int,
        digest: int | None,
    ) -> QueuedCall:
        """Queue a call behind a stream, and the stream behind it, after a failure of earlier ones is raised."""
        first = self._calls.in_the_way()
        if first is not None:
            self._complete(first)
        if engine.failed:
            self._check_queued(engine)
        if not len(self._calls):
            engine.begins(bound)
        origin, ended = self._streams.origin, self._cupy.cuda.Event(disable_timing=True)
        origin.wait_event(self._ready(stream))
        engine.queue(bound, source, result, self._move, digest=digest)
        ended.record(origin)
        stream.wait_event(ended)
        nbytes = call.table.count * call.itemsize
        made = QueuedCall(
            call.signature,
            number,
            engine.turn,
            digest,
            engine,
            bound,
            ended,
            nbytes,
            self._wait_for_call,
            self._is_done,
        )
        self._calls.add(made)
        self._guard.attend(
            lambda: (self._calls.ended << 40) + engine.progress(),
            lambda: engine.waiting() if len(self._calls) else (None, None),
            lambda: self._nothing_queued(engine),
        )
        return made

    def _has_ended(self, call: QueuedCall) -> bool:
        return not self._under_way(self._cupy.cuda.runtime.eventQuery(call.ended.ptr))

    def _is_done(self, call: QueuedCall) -> bool:
        with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError), may_query():
            return self._has_ended(call)
        return True  # the GPU has failed, as a wait raises

    def _has_succeeded(self, call: QueuedCall) -> bool:
        # the kernel tells a failure before it ends
        return self._has_ended(call) and not call.engine.failed

    def _nothing_queued(self, engine: WindowEngine) -> bool:
        """Return whether no queued call is left to watch; end the communicator if one has failed, on guard's thread."""
        try:
            with self._gpu():
                first = self._calls.retire()
                if first is None:
                    return True
                engine.follows(first.bound)
                with self._comparing:
                    if engine.differs:
                        self._refusal(engine)
                        return True
                self._check_engine(engine)
        except Exception as error:  # of any kind: the thread must live on
            self._guard.stop(self._failure(error))
        return False

    def _wait_for_call(self, call: QueuedCall, until: float | None) -> bool:
        with self._reporting_failures(), self._gpu():
            return self._complete(call, until)

    def _settle(self) -> None:
        """Wait for all queued calls, and raise their failure."""
        if (last := self._calls.last) is not None and not last.over:
            self._complete(last)

    def _complete(self, call: QueuedCall, until: float | None = None) -> bool:
        """Wait for a queued call, or until a time; return whether it has ended, and raise its failure."""
        with may_query():
            ended = self._poll(lambda: call.over or self._has_ended(call), until)
            self._calls.retire()
        if ended and not call.over:
            self._check_queued(call.engine, call)
        return ended

    def _check_queued(self, engine: WindowEngine, waited: QueuedCall | None = None) -> None:
        """Raise the failure of queued calls, unless the one that is waited for has ended before it.

        All ranks can go on after a refusal only if it is raised before any of them calls on.
        """
        with self._comparing:
            if waited is not None and waited.refused is not None:
                raise waited.refused
            if engine.differs:
                first, error = self._refusal(engine)
                if waited is not None and waited.turn < first.turn:
                    return
                if first is waited and first is self._calls.last:
                    waited.refused, self._refused = error, None
                    self._calls.clear()
                    engine.forget_difference()
                    raise error
                failure = BackendError(f"{error}; {CALLED_ON}", rank=self.rank, peer=error.peer)
                self._world.tell(failure)
                raise self._first_report(failure)
        self._check_engine(engine)

    def _refusal(self, engine: WindowEngine) -> tuple[QueuedCall, RefusedError]:
        """Return the queued call whose digest differs among ranks, and the error for it: all ranks compare its text."""
        if self._refused is None:
            first = self._calls.find(engine.differs_at)
            assert first is not None, "it is kept until it has succeeded"
            engine.tell_call(first.turn)
            try:
                self._compare(first.signature.of_call(first.number), 0)
            except RefusedError as error:
                self._refused = first, error
            else:
                raise BackendError(
                    f"digests of call {first.number} differ among ranks and its texts do not; make a new communicator",
                    rank=self.rank,
                )
        return self._refused

    def _check_engine(self, engine: WindowEngine) -> None:
        """Raise the failure of a kernel, of this call or of a caller's graph."""
        if not (engine.late or engine.peer_gave_up):
            return
        peer, row = engine.waiting()
        if engine.late:
            own = "a relay of this rank" if isinstance(engine, RelayEngine) else "this rank's own flags"
            behind = f"rank {peer}" if peer is not None else own
            what = f"the kernel waited {2 * self._timeout:g} s for {behind}"
            raise BackendError(what, rank=self.rank, peer=peer, step=row)
        raise self._first_report(BackendError(f"rank {peer} gave up", rank=self.rank, peer=peer))

    def _first_report(self, failure: BackendError) -> BackendError:
        """Return the failure that was reported first, the same on all ranks; this one if no report arrives in time."""
        end = time.monotonic() + NOTICE_SECONDS
        while self._world.trouble() is None and time.monotonic() < end:
            time.sleep(1e-3)  # it is on the way
        return self._world.trouble() or failure

    def _move(self, messages: Sequence[tuple[bool, int, int, int]], stream: Any) -> None:
        """Queue messages behind a kernel (`window_engine.Move`)."""
        link = self._connection.link
        with self._connection.group():
            for sends, peer, address, nbytes in messages:
                (link.send if sends else link.receive)(address, nbytes, peer, stream.ptr)
        self._connection.settle(self._guard.check)

    def _run_messages(self, call: Call[Any], source: int, result: int, stream: Any) -> None:
        bound, replays = self._bound_program(call)
        scratch = 0 if bound.scratch is None else bound.scratch.data.ptr
        addresses = np.array([source, result, scratch], dtype=np.int64)
        key = (call.op, call.dtype, *addresses.tolist())
        what = replay_decision(self._agree(call.signature, replays.offer(key) if self._graphs else 0))
        if not len(call.table):
            return
        program = bound.program
        kernel = self.arrays.kernels.compiled(call.op, call.dtype, call.itemsize)
        done = self._streams.done
        done[0] = 0
        origin, ready = self._streams.origin, self._ready(stream)
        with self._guard.watch(lambda: int(done[0]), lambda: waits_for(program, int(done[0]))):
            origin.wait_event(ready)
            self._streams.send_addresses(bound, addresses)
            if what == "capture":
                self._capture(bound, replays, key, kernel, addresses)
            if what == "run":
                replays.ran(key)
                self._streams.run(bound, self._connection, kernel, addresses, self._guard.check)
            else:
                replays.graph(key).launch(origin)
            self._wait()

    def _capture(
        self, bound: BoundProgram, replays: GraphReplays, key: object, kernel: Any, addresses: Any
    ) -> None:
        origin = self._streams.origin
        self._captures += 1
        origin.begin_capture()
        try:
            self._streams.run(bound, self._connection, kernel, addresses, self._guard.check)
        except BaseException:
            # the stream must not stay in its capture, and nothing may hold what was captured
            with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):
                origin.end_capture()
            raise
        replays.captured(key, self._captures, origin.end_capture())

    def _wait(self) -> None:
        """Wait for the GPU: at first without sleeping, since most collectives are short."""
        ended, runtime = self._ready(self._streams.origin), self._cupy.cuda.runtime
        self._poll(lambda: not self._under_way(runtime.eventQuery(ended.ptr)))

    def _poll(self, ended: Callable[[], bool], until: float | None = None) -> bool:
        """Wait until something has ended, or until a time; return whether it has, and raise what ends all calls."""
        pause = 0.0
        while not ended():
            self._guard.check()
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)
        self._guard.check()
        return True

    def _under_way(self, status: int) -> bool:
        """Return whether the GPU still works; raise its failure, of which CuPy's ``done`` does not tell."""
        if status != NOT_READY:
            self._cupy.cuda.runtime.check_status(status)
        return status == NOT_READY

    def _agree(self, signature: Signature, offer: int) -> list[int]:
        """Compare the collective with all ranks, and return the offer of each."""
        self._settle()
        self._tell_call()
        return self._compare(signature, offer)

    def _tell_call(self) -> None:
        """Tell ranks that compare digests that this one compares texts, or leaves."""
        if self._engine is not None and self._engine.alone:
            with self._gpu():
                self._engine.tell_call()

    def _compare(self, signature: Signature, offer: int) -> list[int]:
        offers = []
        texts = self._world.compare(signature, self._about(offer), timeout=self._timeout)
        for peer, text in enumerate(texts):
            other = json.loads(text)
            offers.append(int(other.pop("offer")))
            if other != self._settings:
                raise BackendError(
                    f"settings of the nccl back end must be the same on all ranks, got {other} of the peer and "
                    f"{self._settings} here",
                    rank=self.rank,
                    peer=peer,
                )
            if (ON_HOST in (offers[0], offers[-1])) and offers[0] != offers[-1]:
                raise RefusedError(
                    f"arrays must be on the host or on GPUs on all ranks, and rank {peer} and rank 0 differ; move them "
                    "to the same kind",
                    rank=self.rank,
                    peer=peer,
                    next_call=signature.call + 1,
                )
        if min(offers) < 0 <= max(offers):
            raise UsageError(CAPTURED_ALONE)
        return offers

    def _about(self, offer: int) -> str:
        return json.dumps({**self._settings, "offer": offer})

    def _bound_program(self, call: Call[Any]) -> tuple[BoundProgram, GraphReplays]:
        one = call.memory[0]
        layout = (call.table, call.itemsize, one.given, one.block)
        if layout not in self._programs:
            program = program_of(call.table, one, call.itemsize, step_bytes=self._step_bytes)
            self._programs[layout] = (
                bind_program(program, self.arrays.kernels, self._cupy, call.itemsize),
                GraphReplays(),
            )
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(layout)
        return self._programs[layout]

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """Report failures inside to all ranks, and end."""
        try:
            self._guard.check()
            yield
        except RefusedError:
            raise  # by all ranks, before anything is queued
        except BaseException as error:
            failure = self._failure(error)
            self._end(failure)
            self._stay_out_if_failed()
            if isinstance(error, TopoplanError) or not isinstance(error, Exception):
                raise
            raise failure from error

    def _failure(self, error: BaseException) -> BackendError:
        """Return the failure of this rank as it is reported to the others."""
        if self._guard.error is not None:
            return self._guard.error
        failure = (
            error
            if isinstance(error, BackendError)
            else BackendError(describe_failure(error), rank=self.rank)
        )
        if self._world.trouble() is None:
            self._world.tell(failure)
        return failure

    def _end(self, failure: BackendError) -> None:
        """Abort the communicator, and let the GPU finish queued work before its memory is released."""
        with self._ending:
            self._end_alone(failure)

    def _end_alone(self, failure: BackendError) -> None:
        self._guard.stop(failure)
        self._leave_engine(together=False)
        for engine in self._engines:
            if engine.has_unfinished():
                with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError), self._gpu():
                    failure.add_note(engine.state())
        self._drop_graphs()
        self._connection.wait_ended(ABORT_SECONDS)
        if not self._drain() and self._connection.parent is not None:
            # only an abort ends a kernel that has not read the stop word, as one in a graph
            self._connection.abort_parent()
            self._drain()
        self._calls.clear()

    def _drain(self) -> bool:
        """Wait at most `DRAIN_SECONDS` for the GPU to finish queued work; return whether it has."""
        end = time.monotonic() + DRAIN_SECONDS
        runtime = self._cupy.cuda.runtime
        with contextlib.suppress(runtime.CUDARuntimeError), self._gpu():
            relays = [relay.stream for engine in self._relayed.values() for relay in engine.relays]
            for stream in (*relays, self._streams.beside, self._streams.origin):
                while self._under_way(runtime.streamQuery(stream.ptr)):
                    if time.monotonic() > end:
                        return False
                    time.sleep(1e-3)
        return True

    def _drop_graphs(self) -> None:
        """Drop all graphs: NCCL waits without end for them before it frees a communicator."""
        for _, replays in self._programs.values():
            replays.drop_graphs()


def use_local_gpu(cupy: ModuleType, environment: Mapping[str, str] = os.environ) -> int | None:
    """Make GPU number ``LOCAL_RANK`` current in a process that joins a job, and return its number.

    None if ``LOCAL_RANK`` is not set; the current GPU is used then.
    """
    if not environment.get("LOCAL_RANK"):
        return None
    return _use_gpu(cupy, integer_variable(environment, "LOCAL_RANK"))


def _use_gpu(cupy: ModuleType, local: int, device: int | None = None) -> int:
    """Make a GPU current in this thread and return its number, by default `local` modulo the visible GPUs."""
    named = "the GPUs" if device is None else f"GPU {device}"
    try:
        if device is None:
            device = local % int(cupy.cuda.runtime.getDeviceCount())
            named = f"GPU {device}"
        use_device(cupy, device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UsageError(
            f"{named} cannot be used: {error}; look at its processes and compute mode with nvidia-smi, and at "
            "LOCAL_RANK and CUDA_VISIBLE_DEVICES"
        ) from None
    return device


def no_windows(why: str) -> UsageError:
    """Return the error for demanded windows that are not available; the bare reason is its cause."""
    error = UsageError(f'the windows engine cannot be had: {why}; use engine="auto"')
    error.__cause__ = UsageError(why)
    return error


def _addresses(call: Call[Any]) -> tuple[int, int]:
    """Return where a rank's input and result lie; 0 for arrays without elements."""
    one = call.memory[0]
    return int(one.source.data.ptr) if one.source.size else 0, int(
        one.result.data.ptr
    ) if one.result.size else 0


def _ranges() -> Callable[[str], contextlib.AbstractContextManager[Any]]:
    """Return nvtx's `annotate`, which names ranges in NVIDIA's profilers; a no-op without the nvtx package."""
    try:
        annotate: Callable[[str], contextlib.AbstractContextManager[Any]] = import_module("nvtx").annotate
    except ImportError:
        return lambda name: contextlib.nullcontext()
    return annotate
