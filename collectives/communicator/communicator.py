"""Define the Communicator: the collectives of a plan's ranks, run on arrays by a back end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.backend import Backend, TraceEvent
from collectives.backends.execution import Execution, refusal_text
from collectives.backends.open_backend import BackendSettings, check_helpers, open_backend
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore
from collectives.backends.request import request
from collectives.backends.uneven_exchange import GATHER, SCATTER, uneven_call
from collectives.communicator.block_sums import sum_blocks
from collectives.communicator.collective_methods import DenseCollectives, SparseCollectives
from collectives.communicator.handle import CallQueue, Handle, PreparedCall, StepBatch, behind, in_step
from collectives.communicator.job_plan import PlanLike, not_a_plan, open_backend_for_plan
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.recovery.arrivals import ArrivalReport, arrival_report, own_arrivals
from collectives.recovery.link_monitor import (
    MIN_MONITORED_BYTES,
    ON_SLOW_MODES,
    SlowLink,
    SlowRank,
    check_monitoring,
)
from collectives.recovery.membership import (
    REDUCTIONS,
    CollectiveOutcome,
    CommunicatorMembers,
    is_helper,
    serve_as_helper,
)
from collectives.recovery.survivors import (
    RECOVERY_UNSUPPORTED,
    JoinSettings,
    Membership,
    PlanChange,
    can_recover,
    join_recovery,
)
from collectives.tables.numpy_arrays import dtype_name
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError, deprecated
from topoplan.plans.plan import ROOTED, Plan, Plans, check_collective
from topoplan.units import check_type, parse_size

if TYPE_CHECKING:
    from topoplan.plans.mesh_plans import MeshPlans


EARLIER_NAMES = {
    "seats": "original_ranks",
    "slow": "slow_links",
    "invitation": "join_token",
    **{
        name: f"_{name}"
        for name in (
            "begin_batch",
            "end_batch",
            "end_sparse_step",
            "gather_texts",
            "gather_texts_in_order",
            "put_sparse_state",
            "refuse",
            "run_in_order",
            "settled",
            "take_sparse_state",
        )
    },
}
"""Attributes of `Communicator` by their names in earlier versions."""


class Communicator(DenseCollectives, SparseCollectives):
    """Runs collectives among the ranks of a plan.

    With ``loopback`` all ranks live in this process: every method takes a list with one array per rank and returns a
    list of results. With every other back end each rank is a process of its own: every method takes that rank's array
    and returns its result, and all ranks make the same calls in the same order.

    Inputs are not changed; ``out`` names the arrays for the results, and may be the inputs themselves. All arrays of a
    call have one shape and one dtype: floats, integers, complex numbers, or bool (moved anywhere, reduced by min and
    max only). Any number of elements is allowed, including zero.

    The plan fixes the order of additions, so results are bit-identical on all ranks and in every run. Integers wrap
    around; ``avg`` is the sum divided by the number of ranks, truncated towards zero for integers.

    ``async_op=True`` starts a collective and returns a `Handle`; later calls run after it. On a GPU every collective
    runs after the work queued on the caller's current stream at the call, and work that is queued there later runs
    after it; the call itself may return before. When a handle is done, any stream may use the results (`synchronize`).

    If a collective fails because of another process, every surviving rank raises `BackendError`. Its ``out`` array is
    then unchanged (but see `empty`), and so are the inputs. A rank that already had its whole result has returned it,
    and raises in the next call. The communicator is unusable until `shrink` is called.

    Invalid arguments are refused before any data moves, and the communicator stays usable. If all ranks pass invalid
    arguments, each raises its `UsageError`. If only some do, or the calls of ranks differ, all raise the same
    `RefusedError` (a UsageError and a BackendError), which names the rank. A rank that refuses waits for the next call
    of the others, up to the timeout.

    Parameters
    ----------
    plan : Plan, SizePlans, PlanByKind, str, path or Topology
        A plan or its file, verified once, here; or the machine whose GPUs are the ranks, also by its name in
        the library: then one rank plans for all. Ranks of tcp run their own parts of a plan by kind, without a
        list of it. With plans by size (`topoplan.plan_by_size`, or a file of them) every call takes the plan
        for the bytes of its buffer, the gathered one for ``all_gather`` and ``reduce_scatter``. Further
        collectives and roots are planned in the same way (`topoplan.model.schedule_selection`), on the same
        allocation and channels, at their first use, and kept: rank 0 plans, and all wait as long as that takes.
    backend : str or Backend
        A name, for a back end with its default settings, or a back end. A given back end stays open if the constructor
        fails; `close` closes either.
    chunk_bytes : int or str, optional
        Longest piece that moves at once, also as "1MB". By default the back end's own, or, if that depends on the
        machine, the fastest found in the first calls of each size (`collectives.backends.plan_and_chunk_store`).
    chunk_file : path, optional
        Cache of the sizes found, which `close` writes; every rank must see the same contents.
    timeout : float
        Seconds that a rank waits for the next step of a collective.
    engine : str
        How the nccl back end moves data: "windows" (one kernel for each collective, which writes to the other GPUs'
        memory), "messages" (NCCL's sends and receives), or "auto": windows if all ranks support them.
    exact : bool
        False lets a switch between GPUs add floating-point numbers, if plan and machine have one that can. It adds in
        its own order, so the bits of sums may differ from those elsewhere and from call to call.
    pace : float, optional
        Limit every connection to this times its planned rate, with ``tcp`` and ``loopback``: 1 keeps connections that
        share a port at the plan's rates, which must be true ones (see `topoplan calibrate`). None for no limit.
    on_failure : str
        Reaction to the failure of a rank in a collective: "raise", or "shrink" to exclude it (`shrink`) and repeat the
        collective among the survivors (see `Handle.repeated`, `Handle.without` and `notes`). Supported by the back
        ends tcp, shared and mpi, torch with tensors on the CPU, and nccl unless mpiexec started it. An average
        is then one of fewer ranks. A collective that cannot be repeated raises `BackendError`, and the next call runs
        among the survivors: its root failed, the survivors do not divide its arrays, or an ``out`` has as many blocks
        as there were ranks. Sparse collectives are repeated with the residuals from before them, by another exchange
        if fewer ranks do not support theirs. The cost is a further barrier in each collective, memory for one result,
        with ``out`` a copy of it, and for sparse ones a copy of the residual: a result is handed over when all ranks
        have theirs, so that inputs stay intact, also in place, and no rank keeps a result that another cannot get.
        With ``tcp`` and a wires file, a cable that fails is left out too, and all ranks stay. It is given up as soon as
        the system at its other end does not answer, if the other cables join the ranks; with "raise" it has the timeout
        to come back.
    on_slow : str
        Whether to monitor links and ranks for slowness, in dense collectives of 1 MB and more: "ignore"; "report", in
        `slow_links` and `notes`; or "replan", which also moves traffic away from slow links if the model gains more
        than 10 %, and back when they recover. ``tcp`` on Linux measures links; other back ends whose ranks are
        processes find only stragglers, against which no plan helps. The same on all ranks, which exchange their
        measurements before every fourth such collective, or after 0.2 s of them.

    Attributes
    ----------
    one_rank : bool
        Whether methods take one array, not a list.
    arrays : ArrayLibrary
        The kind of arrays that methods take.
    chunk_bytes : int or None
        Longest piece that moves at once; None while it is searched for.
    on_failure : str

    Raises
    ------
    PlanError
        The plan is wrong (see `topoplan.verify`).
    UsageError
        The back end is unknown or not installed, has another number of ranks, or the chunk size or the timeout is not
        positive. Every method raises it for invalid arguments, naming the rank, before anything is written.
    BackendError
        The ranks do not find each other.

    Examples
    --------
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> with Communicator(plan) as comm:
    ...     sums = comm.all_reduce([np.arange(3) + rank for rank in range(8)])
    >>> sums[7]
    array([28, 36, 44])
    """

    def __init__(
        self,
        plan: PlanLike,
        backend: str | Backend[Any] = "loopback",
        *,
        chunk_bytes: int | str | None = None,
        chunk_file: str | Path | None = None,
        timeout: float = 30.0,
        engine: str = "auto",
        exact: bool = True,
        pace: float | None = None,
        on_failure: str = "raise",
        on_slow: str = "ignore",
    ) -> None:
        if on_slow not in ON_SLOW_MODES:
            raise UsageError(f"on_slow is {on_slow!r}; use ignore, report or replan")
        if on_failure not in ("raise", "shrink"):
            raise UsageError(f"on_failure is {on_failure!r}; use raise or shrink")
        check_type("backend", backend, str, Backend, remedy="give the name of a back end, such as tcp")
        settings = BackendSettings(timeout, pace, engine, exact)
        if settings != BackendSettings(timeout) and not isinstance(backend, str):
            raise UsageError(
                f"the {backend.name} back end is already open; pass engine, exact and pace to it, or pass its name here"
            )
        check_type("chunk_file", chunk_file, str, PathLike, type(None), remedy="name a file")
        opened = None if isinstance(backend, str) else backend
        if plan is None:  # otherwise the ranks would plan for where they run
            raise not_a_plan(plan)
        if not isinstance(plan, Plans):
            opened, plan = open_backend_for_plan(backend, plan, settings)
        self._chunk_file = None if chunk_file is None else Path(chunk_file)
        try:
            store = PlanStore(plan)
            check_helpers(plan, backend)
            if opened is None:
                assert isinstance(backend, str), "a back end is open"
                opened = open_backend(backend, plan, settings)
            if opened.size != len(plan.ranks):
                raise UsageError(
                    f"the plan is for {len(plan.ranks)} ranks and the {opened.name} back end has {opened.size}; "
                    f"start {len(plan.ranks)} processes, or plan for other GPUs"
                )
            check_helpers(plan, opened)
            if on_failure == "shrink" and not can_recover(opened):
                raise UsageError(RECOVERY_UNSUPPORTED.format(name=opened.name))
            if on_slow != "ignore":
                check_monitoring(opened, plan, replans=on_slow == "replan")
            if chunk_bytes is not None and not isinstance(chunk_bytes, int):
                chunk_bytes = parse_size(chunk_bytes)
            self.chunk_bytes = opened.chunk_bytes if chunk_bytes is None else chunk_bytes
            chunks = ChunkSizes(opened.name, fixed=self.chunk_bytes)
            if self._chunk_file is not None and self._chunk_file.exists():
                chunks.load(self._chunk_file)
        except BaseException:
            if opened is not None and opened is not backend:
                opened.close()
            raise
        self.one_rank = opened.one_rank
        self.arrays = opened.arrays
        self.on_failure = on_failure
        settings_of_all = JoinSettings(opened.name, {}, timeout, self.chunk_bytes, on_failure, on_slow)
        self._members = CommunicatorMembers(Execution(store, opened, chunks), plan, settings_of_all)
        self._in_order = CallQueue(
            self.arrays, lambda: getattr(self._members.now, "completion", None), self._members
        )

    @property
    def plan(self) -> Plans:
        """The plan of the ranks, or their plans by size."""
        return self._members.plans

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose arrays this process holds."""
        return self._members.own_ranks

    @property
    def rank(self) -> int:
        """This process's rank; the first if it holds several."""
        return self.ranks[0]

    @property
    def size(self) -> int:
        """Number of ranks; between two collectives the same on all of them, also while only some know of a failure."""
        return len(self._members.seats_at_call)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._members.backend

    @property
    def engine(self) -> str:
        """How the back end moves data, and why not in a better way; empty if it has no choice."""
        return self._members.engine

    @property
    def failure(self) -> BackendError | None:
        """The error of a collective or of `abort` that ended this communicator; None while it works or once closed."""
        execution = self._members.now
        return None if execution is None else execution.failure

    @property
    def epoch(self) -> int:
        """Number of agreements on the membership."""
        return self._members.epoch

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes of plan and membership, and their reasons, in order."""
        return self._members.notes

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute by the name that it had in earlier versions, with a DeprecationWarning."""
            if name not in EARLIER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            new = EARLIER_NAMES[name]
            advice = "it is private now" if new.startswith("_") else f"write {new}"
            deprecated(f"Communicator.{name}", advice)
            return getattr(self, new)

    @property
    def original_ranks(self) -> tuple[int, ...]:
        """The original rank of each rank: its rank at the beginning, or that of the rank that it replaced."""
        return self._members.seats_at_call

    @property
    def slow_links(self) -> tuple[SlowLink | SlowRank, ...]:
        """The slow links and stragglers, the same on all ranks; empty without monitoring.

        Each has the measured and the planned GB/s of a link, or the delay of a rank, and since when; ``str`` is one
        line. Ranks are judged when the next collective of 1 MB or more begins (see ``on_slow``).
        """
        return self._members.slow

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """Return new arrays that collectives move with the fewest copies; contents undefined.

        If ranks share memory (``shared``, and ``mpi`` on one host) the arrays lie in it: a collective whose inputs and
        results lie there on every rank adds directly from one to the other, in a third to a half less time. On GPUs
        whose kernels write to each other's memory (``nccl`` with windows) results are written there directly, and if
        they lie at the same offsets on all ranks, as after the same allocations in the same order, by the GPU that has
        them first. Elsewhere they are ordinary arrays. The bits of sums are the same. If such a collective fails, its
        results (in place, its inputs) may be partly written, and may change until all ranks have noticed. Arrays
        outlive the communicator.

        ``dtype`` is one of numpy or torch, its name, or an array with the dtype and GPU to use. With several ranks in
        this process, returns a list of one array per rank. Raises `UsageError` if the dtype or shape does not exist.
        """
        backend = self._open().backend
        sides = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if any(
            isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 0 for side in sides
        ):
            raise UsageError(f"shape must be whole numbers of at least 0, got {sides}")
        if hasattr(dtype, "dtype") and not isinstance(dtype, type):
            like = self.arrays.check(dtype, rank=self.ranks[0], what="array")
        else:
            like = self.arrays.of(np.zeros(0, np.uint8), dtype_name(dtype))
        made = [backend.empty(sides, like) for _ in self.ranks]
        return made[0] if self.one_rank else made

    @in_step
    def split(self, mesh: MeshPlans, axis: str) -> Any:
        """Return the communicator of this rank's group along an axis of a mesh; all ranks must call it together.

        It is independent of this one: collectives of both may run at the same time, and each is closed by itself. If a
        process holds all ranks, returns a list with that of each group, in the order of the mesh.

        Raises
        ------
        UsageError
            The mesh has other ranks or no such axis, the arguments of ranks differ, or the back end cannot be split.
        BackendError
            Another rank failed, or does not call it.
        """
        from topoplan.plans.mesh_plans import MeshPlans

        check_type("mesh", mesh, MeshPlans, remedy="make one by topoplan.plan_mesh")
        backend = self._open().backend
        wanted = [group for group in mesh.groups if group.axis == axis]
        if len(mesh.ranks) != self.size or not wanted:
            raise UsageError(
                f"this communicator has {self.size} ranks, and the mesh {len(mesh.ranks)} with groups along "
                f"{' and '.join(name for name, _ in mesh.weights)}; asked for is {axis!r}"
            )
        purpose = f"{axis} {mesh.digest}"

        def split() -> list[Communicator]:
            if self.one_rank and len(set(self._members.unrepeated.gather_texts(purpose, "split"))) > 1:
                raise UsageError("the ranks split by different meshes or axes; give all of them the same")
            made = backend.split([group.members for group in wanted])
            mine = [group for group in wanted if set(group.members) & set(self.ranks)]
            return [Communicator(group.plan, one) for group, one in zip(mine, made, strict=True)]

        found = self._in_order.run(split)
        return found[0] if self.one_rank else found

    @in_step
    def prepare(
        self,
        collective: str,
        arrays: Any,
        *,
        op: str = "sum",
        root: int | None = None,
        out: Any = None,
    ) -> PreparedCall[Any]:
        """Prepare a collective that is started many times on the same arrays; all ranks call this together.

        Parameters
        ----------
        collective : str
            all_reduce, reduce, broadcast, all_gather, reduce_scatter or all_to_all.
        arrays : array, or a list with one for each rank of this process
            As for the method of that collective. They keep their memory and shape; their contents may change between
            two starts.
        op, root, out
            As for that method. By default ``out`` is allocated where a result takes the fewest copies.

        Raises
        ------
        UsageError
            An argument is invalid.
        RefusedError
            Another rank prepares another call, or refused: on all ranks.

        Examples
        --------
        >>> import numpy as np, topoplan
        >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 7])
        >>> gradients = [np.arange(4.0), np.ones(4)]
        >>> with Communicator(plan) as comm:
        ...     call = comm.prepare("all_reduce", gradients, op="avg")
        ...     first = call()[0].tolist()
        ...     gradients[0][:] = 3
        ...     first, call()[0].tolist()
        ([0.5, 1.0, 1.5, 2.0], [2.0, 2.0, 2.0, 2.0])
        """
        present = self._members.present
        self._refuse_helper()
        name = check_collective(collective)
        if root is not None and name not in ROOTED:
            raise UsageError(f"{name} has no root, got {root!r}; leave root out")
        if name not in REDUCTIONS and not (isinstance(op, str) and op == "sum"):
            raise UsageError(f"{name} has no reduction, got op {op!r}; leave op out")
        place = self._root(root) if name in ROOTED else None
        kind = op if name in REDUCTIONS else None
        checked = request(name, self._members.ranks_at_call, arrays, out=out, op=kind, root=place)
        return self._in_order.run(lambda: self._prepared_call(checked, present, name, place))

    def _prepared_call(
        self, checked: Any, present: tuple[Execution[Any], Membership], name: str, place: int | None
    ) -> PreparedCall[Any]:
        """Return the prepared call of a checked request, once all ranks agree on it; in the order of collectives."""
        execution, membership = present
        prepared = self._members.unrepeated.prepare(checked)
        members, kind = self._members, checked.kind.op
        run = prepared.run
        if members.repeats:
            original = None if place is None else membership.seats[place]
            outcome = CollectiveOutcome()
            whole = prepared.request
            settled = (
                name,
                original,
                kind,
                whole.inputs[0],
                prepared.result,
                membership.seats,
                outcome,
            )
            run = partial(members.run_to_end, *settled, prepared=whole.prepared)
        elif members.watched and prepared.request.kind.nbytes >= MIN_MONITORED_BYTES:
            run = partial(members.run, execution, prepared.request)
        changed = partial(members.changed_since, present)
        return PreparedCall(prepared, run, self._in_order, changed, self._refuse_for)

    @in_step
    def barrier(self) -> None:
        """Wait until all ranks call this; the collectives that were started before have ended then.

        If all ranks are in this process, it waits for started collectives alone. One element is added up by the plan,
        so a rank fails, and differs from others, as in `all_reduce`.
        """
        ones = [self.arrays.of(np.ones(1, np.int32)) for _ in self.ranks]
        found = self.all_reduce(ones[0] if self.one_rank else ones)
        self.arrays.values(found if self.one_rank else found[0])  # waits for a GPU too

    def synchronize(self) -> None:
        """Wait until the GPU has ended the collectives of this process, and raise the failure of one.

        A call on a GPU returns when it is queued, and the caller's stream waits for it. Without this method a failure
        is raised by the next call, by the `Handle` or by `close`.
        """
        self._in_order.run(lambda: self._open().backend.settle(), exchanges=False)

    def shrink(self, without: Collection[int] | None = None) -> None:
        """Exclude failed or named ranks from this communicator; all survivors must call it.

        The survivors are numbered anew, in their order: `rank`, `size`, `ranks` and `plan` change, `epoch` grows by
        one, and the last of `notes` describes the new plan, also if it needs other channels. They agree on the
        membership, even if further ranks fail meanwhile; excluded are ranks that any survivor names (``without``, as
        numbered now), whose process has ended, or that are silent for the timeout (for a second after a reported
        failure). After an error that names lost links (`BackendError.links`) the plan avoids them, and all ranks may
        stay. The lowest survivor plans, and all verify. Sums have the bits of a new communicator with the new
        `plan`. Residuals of sparse collectives stay. Collectives that run in the background end first. Communicators
        made by `split` do not change.

        Raises
        ------
        UsageError
            A rank does not exist, none would remain, or this one is named; or no channel joins the survivors.
        BackendError
            The others have excluded this rank (one that was taken for failed and returns learns it here); fewer than
            half remain, or half without the lowest, and some of the others are only silent; or the back end does not
            support it.

        Examples
        --------
        >>> import numpy as np, topoplan
        >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
        >>> with Communicator(plan) as comm:
        ...     comm.shrink(without=[2])
        ...     comm.plan.ranks, comm.epoch, comm.all_reduce([np.arange(3)] * 3)[0]
        (('gpu1', 'gpu4', 'gpu7'), 1, array([0, 3, 6]))
        """
        self._in_order.run(partial(self._members.shrink, without))

    @property
    def join_token(self) -> str:
        """One line of text with which another process may `join` in place of a failed rank, for a file or a variable.

        It has the addresses of the current ranks, is valid as long as one of them runs, and admits its holder to the
        job. Raises `UsageError` if all ranks are in this process, or the back end cannot recover.
        """
        return self._members.survivors("admit joining ranks").invitation

    @classmethod
    def join(
        cls,
        join_token: str,
        *,
        original_rank: int | None = None,
        wait: float = 60.0,
        seat: int | None = None,
    ) -> Communicator:
        """Join a job as a rank in place of a failed one; its ranks call `grow`.

        Back end, plan, timeout, ``on_failure`` and ``on_slow`` are those of the other ranks. The next call of this
        rank is the one after their `grow`. ``join_token`` is that of a rank, and ``original_rank`` the one to replace,
        by default the lowest failed one; ``seat`` is its earlier name. ``wait`` is in seconds.

        Raises
        ------
        UsageError
            The text is not a join token.
        BackendError
            No rank answers, or none admits this process in time.
        PlanError
            The plan of the job is wrong.
        """
        if seat is not None:
            deprecated("join(seat=)", "write original_rank=")
            original_rank = seat
        return cls._admitted(
            MembershipProtocol.request_to_join(join_token, original_rank=original_rank, wait=wait)
        )

    @classmethod
    def _admitted(cls, survivors: MembershipProtocol) -> Communicator:
        """Return the communicator of a rank that the others have admitted; closes `survivors` on an error."""
        try:
            recovered, settings = join_recovery(survivors)
        except BaseException:
            survivors.close()
            raise
        try:
            made = cls(
                recovered.plans,
                recovered.backend,
                chunk_bytes=settings.chunk_bytes,
                timeout=settings.timeout,
                on_failure=settings.on_failure,
                on_slow=settings.on_slow,
            )
        except BaseException:
            recovered.backend.close()
            raise
        made._members.joined(recovered)
        return made

    @in_step
    def grow(
        self, original_ranks: Collection[int] | None = None, *, seats: Collection[int] | None = None
    ) -> tuple[int, ...]:
        """Admit joining ranks in place of failed ones, between the same collectives on all ranks; return their new
        ranks.

        Without join requests it costs one exchange of short texts. Ranks are numbered anew: joining ranks take the
        places of failed ones, so the plan may be the first one again. The caller sends them the state that they need,
        parameters or residuals, best by `broadcast`. With ``on_failure="raise"``, `shrink` after an error of this
        method may admit them too. If one process holds all ranks, ``original_ranks`` are those to restore, by default
        all (``seats`` is the earlier name); otherwise the processes that called `join` decide.

        Raises
        ------
        UsageError
            An original rank has not failed, ``original_ranks`` is given although each rank is a process, or no rank can
            join (`join_token`).
        BackendError
            Another rank failed, or makes another call.

        Examples
        --------
        >>> import topoplan
        >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
        >>> with Communicator(plan) as comm:
        ...     comm.shrink(without=[1, 2])
        ...     comm.grow([2]), comm.plan.ranks, comm.grow(), comm.plan is plan
        ((1,), ('gpu1', 'gpu5', 'gpu7'), (1,), True)
        """
        self._members.check_no_helpers("grow")
        if seats is not None:
            deprecated("grow(seats=)", "write original_ranks=")
            original_ranks = seats
        if not self.one_rank:
            return self._in_order.run(partial(self._members.grow_here, original_ranks))
        if original_ranks is not None:
            raise UsageError(
                "each rank is a process here, and asks for its original rank itself; leave original_ranks out"
            )
        return self._in_order.run(self._members.grow)

    @in_step
    def replan(
        self, *, without_links: Collection[str] = (), slow_links: Mapping[str, float] | None = None
    ) -> None:
        """Replan for a machine with dead or slow links, and use the new plan; all ranks must pass the same links.

        ``without_links`` are dead wires, such as ``gpu0-gpu3``, or ``gpu0->gpu3`` for one direction; ``slow_links``
        are wires with the GB/s per direction that they still have. Ranks and epoch stay; `plan` changes, and the last
        of `notes` describes it. Changes accumulate.

        Raises
        ------
        UsageError
            A wire does not exist, or is not faster than that; the communicator does not change.
        InfeasibleError
            No channel joins the ranks any more.
        BackendError
            Another rank failed, or passed other links.

        Examples
        --------
        >>> import topoplan
        >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
        >>> with Communicator(plan) as comm:
        ...     comm.replan(without_links=["gpu0-gpu3"])
        ...     print(comm.notes[-1])
        without link gpu0-gpu3: 8 ranks (gpu0 gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7) at 78.57 GB/s, before 85.71
        """
        change = PlanChange.of(without_links=without_links, slow_links=slow_links)
        if not change.without_links and not change.slow_links:
            raise UsageError("no link changes; name links in without_links or slow_links")
        self._in_order.run(partial(self._members.replan, change))

    @in_step
    def _run_in_order(
        self,
        task: Callable[[], Any],
        *,
        collective: str,
        root: int | None = None,
        op: str | None = None,
        dtype: str = "",
        count: int = 0,
    ) -> Handle[Any]:
        """Start an exchange of another library, in the order of the collectives and once all ranks agree on it.

        `task` runs in the background, after everything that was started before, and ends with the exchange. The other
        arguments must be the same on all ranks: names, a rank, and a number of elements. The handle has the result of
        the task; it raises `RefusedError` if ranks differ, and the task does not run. An error of the other library is
        taken for one of all ranks, which made the same call; want of memory and an interrupt end the job.
        """
        call = {"collective": collective, "root": root, "op": op, "dtype": dtype, "count": count}

        def run() -> tuple[Any, Exception | None]:
            self._members.unrepeated.agree(**call)
            try:
                return task(), None
            except (MemoryError, TopoplanError):
                raise
            except Exception as error:
                return None, error

        def found(ended: tuple[Any, Exception | None]) -> Any:
            result, error = ended
            if error is not None:
                raise error
            return result

        started = self._in_order.submit(run)
        started.alone = lambda error: None  # what `found` raises is of all ranks
        handle = started.then(found)
        handle.alone = self._in_order.leave
        return handle

    def _check_job(self) -> None:
        """Raise the failure of the job if another rank has ended it; for tasks that wait for another library."""
        if (failure := self._open().backend.trouble()) is not None:
            raise failure

    def _check_numbers(self) -> None:
        """Raise `BackendError` in front of an exchange of another library whose ranks have changed for it alone."""
        _ = self._members.unrepeated

    def _begin_batch(self) -> None:
        """Start a batch of collectives that are refused together, until `end_batch`.

        If one of them is refused, the later ones raise the same `RefusedError` and exchange nothing. All ranks must
        start the same collectives in a batch, up to one that is refused.
        """
        self._in_order.batch = StepBatch()

    def _end_batch(self) -> None:
        """End the batch, even if collectives of it still run; idempotent."""
        self._in_order.batch = None

    def _gather_texts_in_order(self, text: str) -> list[str]:
        """Return `gather_texts`, from a task of `run_in_order`."""
        return self._members.unrepeated.gather_texts(text)

    @in_step
    def _submit(self, task: Callable[[], Any]) -> Handle[Any]:
        """Start a task of several collectives in the background, in the order of the others."""
        return self._in_order.submit(task)

    def _all_gather_in_order(self, array: Any) -> Any:
        """Return `all_gather` of one rank's array, from a task of `_submit`."""
        execution, membership = self._members.present
        if self._members.repeats:
            seats, outcome = membership.seats, CollectiveOutcome()
            return self._members.run_to_end("allgather", None, None, array, None, seats, outcome)
        return self._members.run(execution, request("allgather", execution.backend, array, out=None))

    def abort(self, reason: str) -> None:
        """End all current and later collectives of this rank, from any thread: pending waits raise.

        The other ranks are notified, and raise as if this one had died. Does nothing if the communicator is closed, or
        if all ranks are in this process. `reason` is a clause for the message of the `BackendError`.
        """
        execution = self._members.now
        if execution is not None and self.one_rank:
            execution.abort(f"rank {self.rank} aborted the communicator: {reason}; make a new one")

    def close(self) -> None:
        """Release all resources; every later call is an error. Idempotent.

        It raises the failure of a collective on a GPU that no call has raised, unless `abort` was called.
        """
        execution = self._members.close()
        if execution is not None:
            self._in_order.close()
            with suppress(BackendError) if execution.aborted else nullcontext():
                execution.backend.close()
            if self._chunk_file is not None and 0 in self.ranks:
                execution.chunks.save(self._chunk_file)

    def plan_for(self, collective: str, nbytes: int) -> Plan:
        """Return the plan by which a collective without a root runs on a buffer of so many bytes.

        If it is neither the plan's own nor used before, all ranks must call this, since one of them plans for all.

        Raises
        ------
        UsageError
            The collective is unknown, or `nbytes` is not a whole number from 0 on: on this rank alone.
        BackendError
            All ranks must call this, and one of them makes another call: it ends the job, since a rank that knows the
            plan, or has raised here, exchanges nothing.
        """
        name = check_collective(collective)
        if not isinstance(nbytes, int | np.integer) or nbytes < 0:
            raise UsageError(
                f"nbytes must be a whole number from 0 on, got {nbytes!r}; give that of the buffer"
            )
        execution = self._open()
        if execution.knows(name):
            return execution.plan(name, nbytes)

        def made() -> Plan:
            try:
                return self._open().plan(name, nbytes)
            except RefusedError as error:
                self._open().abort(f"{error}; call plan_for({name!r}, ...) on all ranks or on none")
                raise

        return self._in_order.run(made)

    @in_step
    def _gather_texts(self, text: str, about: str = "texts") -> list[str]:
        """Return the texts of all ranks, in order of rank; a process gives one text for all of its ranks.

        Raises `RefusedError` on all ranks if `about`, the purpose, is another on one of them.
        """
        return self._in_order.run(lambda: self._members.unrepeated.gather_texts(text, about))

    @in_step
    def report(self) -> ArrivalReport:
        """Return which ranks came late to the collectives since the last report, how often and by how much.

        All ranks call it, and get the same. It counts the last 1,024 collectives of the present membership. A rank
        is late in a call that it begins more than 1 ms after the median of the others.

        Raises
        ------
        UsageError
            All ranks are in this process, or the ranks meet on GPUs.
        BackendError
            A rank failed, or makes another call.
        """
        self._refuse_helper()

        def exchange() -> ArrivalReport:
            execution = self._members.unrepeated
            texts = execution.gather_texts(own_arrivals(execution.backend), "report")
            assert execution.backend.arrivals is not None, "looked at before"
            execution.backend.arrivals.forget()  # a refused report loses none
            return arrival_report(texts, self.plan.plans[-1].ranks)

        return self._in_order.run(exchange)

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Return the bytes that the ranks of this process have sent so far, by (source, destination).

        Counts the plans' transfers: each chunk once for each tree edge. Less moves if ranks share memory.
        """
        return self._in_order.run(lambda: self._open().traffic.sent, exchanges=False)

    @contextmanager
    def trace(self) -> Iterator[list[TraceEvent]]:
        """Record what this process does in the collectives of the block, with times of the host's monotonic clock.

        If ranks share memory: barriers, waits, copies and additions; with ``tcp``: barriers, and the arrival of each
        chunk on its link. Other back ends record nothing. ``topoplan bench --trace`` draws it. Yields a list to which
        collectives append when they end.
        """
        backend = self._open().backend
        steps: list[TraceEvent] = []
        self._in_order.run(partial(backend.trace, steps), exchanges=False)
        try:
            yield steps
        finally:
            self._in_order.run(partial(backend.trace, None), exchanges=False)

    def _settled(self, nbytes: int) -> bool:
        """Return whether the chunk size of the plan's own collective is settled for a buffer of so many bytes.

        Until then calls try sizes and may be slower than later ones; about ten calls of one size settle it.
        """
        return self._open().settled(self.plan.collective, self.plan.root, nbytes)

    @property
    def is_helper(self) -> bool:
        """Whether this process is a helper, which adds and copies in the plan (see `serve`), and not a rank."""
        return is_helper(self._open().backend)

    def serve(self) -> int:
        """Take part, as a helper, in the ranks' collectives until they close their communicators; return how many.

        Collectives whose trees pass helpers, of the plan and others on its machine, wait for them. Sparse entries are
        exchanged among the ranks alone. Raises `UsageError` on a rank, or if this process's plan is not that of the
        ranks, which are notified.
        """
        execution = self._open()
        return self._in_order.run(lambda: serve_as_helper(execution.backend, execution.store))

    def _refuse(self, reason: str) -> None:
        """Refuse the next collective with all ranks, for a reason: the others raise `RefusedError` in it.

        So does this rank, unless all ranks refuse by themselves. Does nothing if all ranks are in this process. If the
        others do not come within the timeout, the communicator is unusable.
        """
        if self.one_rank:
            self._open()
            self._in_order.run(partial(self._members.refuse, reason))

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Do `_refuse_for` an error of the block."""
        try:
            yield
        except BaseException as error:
            self._refuse_for(error)
            raise

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Keep the ranks in step in a block of calls: an error before the first is refused by all ranks.

        Later it ends the job, unless it is of this package and thus of all ranks.
        """
        begun = self._in_order.begun
        try:
            yield
        except BaseException as error:
            if self._in_order.begun == begun:
                self._refuse_for(error)
            else:
                self._in_order.leave(error)
            raise

    def _behind(self) -> AbstractContextManager[None]:
        """End the job if this rank alone fails in a block behind a collective, whose result the others use."""
        return behind(self._in_order.leave)

    def _refuse_for(self, error: BaseException) -> None:
        """Refuse a collective with all ranks if this one cannot read its arguments; its next call would meet theirs.

        An interrupt ends the job instead. Does nothing for an error of the back end, which the others have too, or
        once this communicator is closed.
        """
        if isinstance(error, BackendError) or self._members.now is None:
            return
        if isinstance(error, Exception):
            self._refuse(refusal_text(error))
        else:
            self.abort(f"{refusal_text(error)} in the middle of a call")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # an error of the block is not replaced by one that may follow from it
        with nullcontext() if kind is None else suppress(BackendError):
            self.close()

    @in_step
    def _start(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        if root is None and collective in ROOTED:
            root = self._root(root)
        execution = self._open()
        self._refuse_helper()
        if self._members.repeats:
            return self._start_to_end(collective, root, op, arrays, out, async_op)
        below = MIN_MONITORED_BYTES if self._members.watched else None
        task = execution.repeated(collective, root, op, arrays, out, later=async_op, below=below)
        if task is None:
            checked = request(collective, execution.backend, arrays, out=out, op=op, root=root)
            task = partial(self._members.run, execution, checked)
        if async_op:
            return self._in_order.submit(task, CollectiveOutcome(among=self.original_ranks))
        return self._in_order.run(task)

    @in_step
    def all_reduce_blocks(self, blocks: Any, offsets: Any, length: int) -> Any:
        """Sum blocks of elements that each rank places in a vector of zeros; every rank gets the dense sum.

        As ``ncclAllReduceSparseBlock`` of NCCLX. All ranks tell their numbers of blocks; they then gather the blocks if
        the model finds that faster, else they sum the dense vectors. The results are bit-identical on all ranks.

        Parameters
        ----------
        blocks : array of shape (m, w), on the host; with several ranks in this process a list of one per rank
            m blocks of w elements; m may differ by rank. float16, float32, float64, or integers of 32 or 64 bits.
        offsets : m whole numbers; with several ranks in this process a list for each rank
            The element of the result at which each block begins. Blocks of one rank must not overlap.
        length : int
            Elements of the result, the same on all ranks.

        Returns
        -------
        array of shape (length,), in the dtype of the blocks; with several ranks in this process a list

        Raises
        ------
        UsageError
            An argument is invalid, or w, length or dtype differ between ranks: the latter on all ranks.
        RefusedError
            Another rank refused its arguments.

        Examples
        --------
        >>> import numpy, topoplan
        >>> blocks = [numpy.array([[1.0, 1.0], [2.0, 2.0]]), numpy.array([[5.0, 5.0]])]
        >>> with Communicator(topoplan.load("v100x4").subset([0, 1])) as comm:
        ...     comm.all_reduce_blocks(blocks, [[0, 4], [4]], 6)[1].tolist()
        [1.0, 1.0, 0.0, 0.0, 7.0, 7.0]
        """
        return sum_blocks(self, blocks, offsets, length)

    def _refuse_helper(self) -> None:
        """Raise `UsageError` in a process that has no arrays of its own."""
        if self.is_helper:
            raise UsageError("this process is a helper without arrays; call serve")

    @in_step
    def _start_uneven(
        self,
        method: str,
        arrays: Any,
        counts: Any,
        recv_counts: Any = None,
        *,
        async_op: bool,
        **options: Any,
    ) -> Any:
        execution, seats = self._open(), self._members.seats_at_call
        self._refuse_helper()
        if method in (SCATTER, GATHER):
            options["root"] = self._root(options["root"])
        asked = uneven_call(self._members.ranks_at_call, method, arrays, counts, recv_counts, **options)
        outcome = CollectiveOutcome(among=seats)
        task: Callable[[], Any]
        if self._members.repeats:
            task = partial(self._members.run_uneven_to_end, asked, seats, outcome)
        else:
            task = partial(self._members.run_uneven, execution, asked)
        return self._in_order.submit(task, outcome) if async_op else self._in_order.run(task)

    def _start_to_end(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        """Start a collective that the survivors repeat if a rank fails."""
        backend, seats = self._open().backend, self._members.seats_at_call
        request(collective, self._members.ranks_at_call, arrays, out=out, op=op, root=root)
        if backend.captures:
            raise UsageError(
                "a collective in a graph cannot be repeated if a rank fails; capture it with a communicator that "
                'has on_failure="raise"'
            )
        outcome = CollectiveOutcome()
        original_root = None if root is None else seats[root]
        task = partial(self._members.run_to_end, collective, original_root, op, arrays, out, seats, outcome)
        return self._in_order.submit(task, outcome) if async_op else self._in_order.run(task)

    def _open(self) -> Execution[Any]:
        return self._members.execution

    def _root(self, root: int | None) -> int:
        if root is None:
            return 0 if self.plan.root is None else self._members.root_at_call
        return root
