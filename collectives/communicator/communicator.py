"""Define the Communicator: the collectives of a plan's ranks, run on arrays by a back end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.backend import Backend, Captures, GivesMemory, Splits, TraceEvent, Traces
from collectives.backends.execution import Execution
from collectives.backends.open_backend import BackendSettings, check_helpers, open_backend
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore
from collectives.backends.request import request
from collectives.communicator.collective_methods import DenseCollectives, SparseCollectives
from collectives.communicator.handle import CallQueue, CollectiveOutcome, Handle, StepBatch
from collectives.communicator.job_plan import PlanLike, open_backend_for_plan
from collectives.communicator.link_monitor import (
    MIN_MONITORED_BYTES,
    ON_SLOW_MODES,
    SlowLink,
    SlowRank,
    check_monitoring,
)
from collectives.communicator.membership import CommunicatorMembers, is_helper, serve_as_helper
from collectives.communicator.recovery import (
    RECOVERY_UNSUPPORTED,
    JoinSettings,
    PlanChange,
    can_recover,
    join_recovery,
)
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.tables.numpy_arrays import dtype_name
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan, Plans

if TYPE_CHECKING:
    from topoplan.plans.mesh_plans import MeshPlans


class Communicator(DenseCollectives, SparseCollectives):
    """Runs collectives among the ranks of a plan.

    With ``loopback`` all ranks live in this process: every method takes a list with one array per rank and
    returns a list of results. With every other back end each rank is a process of its own: every method takes
    that rank's array and returns its result, and all ranks make the same calls in the same order.

    Inputs are not changed; ``out`` names the arrays to put the results into, and the inputs themselves may be
    given there. All arrays of a call have one shape and one dtype: floats, integers, complex numbers, or bool
    (moved anywhere, reduced by min and max only). Any number of elements is fine, zero included.

    The order of additions is fixed by the plan, so results are bit-identical on all ranks and repeat bit for bit.
    Integers wrap around; ``avg`` is the sum divided by the number of ranks, truncated towards zero for integers.

    ``async_op=True`` starts a collective and returns a `Handle`; what is called later runs after it. On a GPU every
    collective is ordered behind what the caller's current stream had been told when it was called, and its results are
    complete for any stream when it returns, or when its handle is done.

    Where a collective fails because of another process, every rank that still lives raises `BackendError`. Its
    ``out`` array is then untouched (but see `empty`), and so are the inputs. A rank that already had its whole result
    has returned it, and raises in the next call. The communicator is unusable from then on, until `shrink` is called.

    Arguments that do not fit are refused before anything moves, and the communicator stays usable. If all ranks are
    called with such arguments, each raises its `UsageError`. If only some are, or ranks differ in what they call, all
    raise the same `RefusedError` (a UsageError and a BackendError), which names the rank. A rank that refuses waits for
    the next call of the others, up to the timeout.

    Parameters
    ----------
    plan : Plan, SizePlans, str, path or Topology
        A plan or its file, checked once, here; or the machine whose GPUs the ranks are, also by its name in the
        library, on which one of them plans for all. Of plans by size (`topoplan.plan_by_size`, or a file of them)
        every call takes the one for the bytes of its buffer, the full gathered one for ``all_gather`` and
        ``reduce_scatter``. Other collectives than the plan's own, or other roots, are planned in the same way
        (`topoplan.model.schedule_selection`) on the same allocation and channels when they are first used, and kept:
        rank 0 plans for all, who wait as long as that takes.
    backend : str or Backend
        A name, for a back end with its default settings, or one that was made with other settings. One that is given
        stays open where no communicator can be made of it; `close` closes either.
    chunk_bytes : int, optional
        Longest piece that moves at once. By default the back end's own, or, where that depends on the machine, the
        fastest that is found in the first calls of each size (`collectives.backends.plan_and_chunk_store`).
    chunk_file : path, optional
        Where sizes that were found are looked up, and kept by `close`; every rank must see the same contents.
    timeout : float
        Seconds that a rank waits for the next step of a collective before it gives up.
    engine : str
        How the nccl back end moves data: "windows" (one kernel for each collective, which writes to the other GPUs'
        memory), "messages" (NCCL's sends and receives), or "auto" for the first where all ranks have it.
    exact : bool
        False lets a switch between GPUs add floating-point numbers, where plan and machine have one that can: in an
        order of its own, so that sums need not have the same bits as elsewhere or in the next call.
    on_failure : str
        What to do where a rank dies in a collective: "raise", or "shrink" to go on without it (`shrink`) and
        repeat the collective among the ranks that are left (`Handle.repeated`, `Handle.without` and `notes` tell).
        Of back ends whose ranks are processes tcp, shared and mpi can, torch with tensors on the CPU, and nccl where
        its ranks meet at a rendezvous. An average is then one of fewer ranks. What cannot be repeated raises
        `BackendError`, and the next call goes on among those that are left: a root that is gone, arrays that
        fewer ranks do not divide, an ``out`` of as many blocks as there were ranks. Sparse collectives are repeated
        with the residuals from before them, and by another exchange where fewer ranks do not have theirs. It costs
        another meeting of the ranks in each collective, memory for one result, and with ``out`` a copy of it, of
        sparse ones a copy of the residual: results are handed over when all ranks have theirs, so that inputs stay
        intact, also where results take their places, and no rank keeps a result that another cannot get.
    on_slow : str
        Whether to look for links and ranks that are slower than the others, in dense collectives of 1 MB and more:
        "ignore"; "report", in `slow` and `notes`; or "replan", which also moves traffic away from slow links where the
        model gains more than 10 % by it, and back when they are fast again. ``tcp`` on Linux sees links; other back
        ends whose ranks are processes see only which rank the others wait for, against which no plan helps. The same
        on all ranks, who tell each other what they measured before every fourth such collective, or after 0.2 s of
        them.

    Attributes
    ----------
    one_rank : bool
        Whether methods take one array, not a list.
    arrays : ArrayLibrary
        The kind of arrays that methods take.
    chunk_bytes : int or None
        Longest piece that moves at once; None where it is searched for.
    on_failure : str
        As above.

    Raises
    ------
    PlanError
        The plan is wrong (see `topoplan.verify`).
    UsageError
        The back end is unknown or not installed, has another number of ranks, or the chunk size or the timeout
        is not positive. Every method raises it for arguments that do not fit, naming the rank, before anything is
        written.
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
        chunk_bytes: int | None = None,
        chunk_file: str | Path | None = None,
        timeout: float = 30.0,
        engine: str = "auto",
        exact: bool = True,
        on_failure: str = "raise",
        on_slow: str = "ignore",
    ) -> None:
        if on_slow not in ON_SLOW_MODES:
            raise UsageError(f"on_slow is {on_slow!r}; use ignore, report or replan")
        if on_failure not in ("raise", "shrink"):
            raise UsageError(f"on_failure is {on_failure!r}; use raise or shrink")
        if (engine != "auto" or not exact) and not isinstance(backend, str):
            raise UsageError(
                f"the {backend.name} back end is made already; give engine and exact to it, or name it here"
            )
        settings = BackendSettings(timeout, engine=engine, exact=exact)
        opened = None if isinstance(backend, str) else backend
        if plan is None:  # for which ranks would plan where they run
            raise UsageError(
                "a NoneType is no plan; make one with topoplan.plan or topoplan.plan_by_size, or give the path of a "
                "plan file or the name of a machine"
            )
        if not isinstance(plan, Plans):
            opened, plan = open_backend_for_plan(backend, plan, settings)
        self._chunk_file = None if chunk_file is None else Path(chunk_file)
        try:
            store = PlanStore(plan)
            check_helpers(plan, backend)
            if opened is None:
                assert isinstance(backend, str), "a name, or it would be open"
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
        terms = JoinSettings(opened.name, {}, timeout, self.chunk_bytes, on_failure, on_slow)
        self._members = CommunicatorMembers(Execution(store, opened, chunks), plan, terms)
        self._in_order = CallQueue(self.arrays)

    @property
    def plan(self) -> Plans:
        """By which the ranks work: a plan, or plans by size."""
        return self._members.plans

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose arrays this process holds."""
        return self._members.ranks

    @property
    def rank(self) -> int:
        """This process's rank; where it holds several, the first of them."""
        return self.ranks[0]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.plan.ranks)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._members.backend

    @property
    def engine(self) -> str:
        """How the back end moves data, and why no better way; empty where it has no choice."""
        return self._members.engine

    @property
    def epoch(self) -> int:
        """How often the ranks have agreed on who is left."""
        return self._members.epoch

    @property
    def notes(self) -> tuple[str, ...]:
        """What was planned anew and why, in order."""
        return self._members.notes

    @property
    def seats(self) -> tuple[int, ...]:
        """The numbers that the ranks of now had at the beginning, or those in whose places they have come."""
        return self._members.company.seats

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """The links and ranks that are slower than the others, the same on all ranks; empty where nobody looks.

        Each says in GB/s what a link does and was planned with, or by how much a rank is late, and since when: ``str``
        is one line. Ranks are judged when the next collective of 1 MB or more begins (see ``on_slow``).
        """
        return self._members.slow

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """New arrays that collectives move with the fewest copies; what they hold is undefined.

        Where ranks share memory (``shared``, and ``mpi`` on one host) it is memory that all of them see: a collective
        whose inputs and results lie there on every rank adds up straight from one to the other, which takes a third
        to a half of the time. On GPUs whose kernels write to each other's memory (``nccl`` with windows) results are
        written there at once, and where those of all ranks lie alike, as when all have made the same arrays in the same
        order, by the GPU that has them first. Everywhere else they are arrays like any other. Sums have the same bits.
        If such a collective fails, its results may be half written, in place its inputs too, and they may change until
        all ranks have noticed. Arrays outlive the communicator.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : str, dtype or array
            Of numpy or of torch, or its name; or an array, whose dtype is taken, and whose GPU.

        Returns
        -------
        An array of the back end's kind; with several ranks in this process a list of one per rank.

        Raises
        ------
        UsageError
            There is no such dtype or shape.
        """
        backend = self._open().backend
        sides = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(side, int | np.integer) and side >= 0 for side in sides):
            raise UsageError(
                f"an array of shape {sides} does not exist; give whole numbers that are not negative"
            )
        if hasattr(dtype, "dtype") and not isinstance(dtype, type):
            like = self.arrays.check(dtype, rank=self.ranks[0], what="array")
        else:
            like = self.arrays.of(np.zeros(0, np.uint8), dtype_name(dtype))
        make = backend.empty if isinstance(backend, GivesMemory) else self.arrays.empty
        made = [make(sides, like) for _ in self.ranks]
        return made[0] if self.one_rank else made

    def split(self, mesh: MeshPlans, axis: str) -> Any:
        """The communicator of this rank's group along an axis of a mesh, with its plan; all ranks must call it at once.

        It is independent of this one: collectives of both may run at the same time, and each is closed by itself.

        Parameters
        ----------
        mesh : MeshPlans
            For as many ranks as there are (`topoplan.plan_mesh`, `topoplan.load_mesh`).
        axis : str

        Returns
        -------
        Communicator
            Where a process holds all ranks, a list with that of each group, in the order of the mesh.

        Raises
        ------
        UsageError
            The mesh has other ranks or no such axis, the ranks have different ones, or the back end cannot be split.
        BackendError
            Another rank failed, or does not call it.
        """
        backend = self._open().backend
        wanted = [group for group in mesh.groups if group.axis == axis]
        if len(mesh.ranks) != self.size or not wanted:
            raise UsageError(
                f"this communicator has {self.size} ranks, and the mesh {len(mesh.ranks)} with groups along "
                f"{' and '.join(name for name, _ in mesh.weights)}; asked for is {axis!r}"
            )
        if not isinstance(backend, Splits):
            raise UsageError(
                f"the {backend.name} back end cannot be split; make a communicator over the members of each group"
            )
        if self.one_rank:
            said = self.gather_texts(f"{axis} {mesh.digest}")
            if len(set(said)) > 1:
                raise UsageError("the ranks split by different meshes or axes; give all of them the same")
        made = self._in_order.run(lambda: backend.split([group.members for group in wanted]))
        mine = [group for group in wanted if set(group.members) & set(self.ranks)]
        found = [Communicator(group.plan, one) for group, one in zip(mine, made, strict=True)]
        return found[0] if self.one_rank else found

    def shrink(self, without: Collection[int] | None = None) -> None:
        """Go on, with this object, without some ranks; all ranks that are left must call it.

        Those that are left are counted anew, in their order: `rank`, `size`, `ranks` and `plan` change, `epoch` is one
        more, and the last of `notes` says what the new plan is, and whether it needs other channels. They agree on who
        is left, whoever dies meanwhile: that is whom any of them wants to leave out, whose process has ended, or who
        says nothing for the timeout (for a second, if a failure of it was reported). The lowest of them plans, and all
        verify. Sums have the bits of a new communicator with the new `plan`. Residuals of sparse collectives stay.

        Collectives that are under way in the background end before. Communicators made by `split` stay what they are.

        Parameters
        ----------
        without : collection of int, optional
            Ranks, as they are counted now. By default those that are gone: after a `BackendError`.

        Raises
        ------
        UsageError
            A rank is not there, none would be left, or this one is to be left out; or no channel joins those that are
            left.
        BackendError
            The others have left this rank out (one that was taken for dead and comes back hears it here); fewer than
            half are left, or half without the lowest, and some of the others are only silent; or the back end cannot go
            on without a rank.

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
    def invitation(self) -> str:
        """What another process needs to come in (`join`) where a rank is gone: a line for a file or a variable.

        It says where the ranks that there are listen, and holds as long as one of them lives. Who has it may join.

        Raises
        ------
        UsageError
            All ranks are in this process, those of this back end cannot go on without one, or they are of the process
            group "topoplan".
        """
        return self._members.survivors("let others in").invitation

    @classmethod
    def join(cls, invitation: str, *, seat: int | None = None, wait: float = 60.0) -> Communicator:
        """Come in, as a rank, where others go on without one; they call `grow`.

        Everything is as it is for them: back end, plan, time limits, ``on_failure``, ``on_slow``. The next call of this
        rank is the one that theirs is behind `grow`.

        Parameters
        ----------
        invitation : str
            Of one of them (`invitation`).
        seat : int, optional
            In place of which rank, as they were counted at the beginning; by default of the lowest that is gone.
        wait : float
            Seconds until they let it in.

        Returns
        -------
        Communicator
            Of the grown group.

        Raises
        ------
        UsageError
            This is no invitation.
        BackendError
            Nobody is there, or nobody has let this process in.
        PlanError
            Their plan is wrong.
        """
        survivors = MembershipProtocol.knock(invitation, seat=seat, wait=wait)
        try:
            left, terms = join_recovery(survivors)
        except BaseException:
            survivors.close()
            raise
        try:
            made = cls(
                left.plans,
                left.backend,
                chunk_bytes=terms.chunk_bytes,
                timeout=terms.timeout,
                on_failure=terms.on_failure,
                on_slow=terms.on_slow,
            )
        except BaseException:
            left.backend.close()
            raise
        made._members.joined(left)
        return made

    def grow(self, seats: Collection[int] | None = None) -> tuple[int, ...]:
        """Let in who comes in place of ranks that are gone; all ranks must call it, at the same border of their work.

        Where nobody is there it costs one exchange of short texts. Ranks are counted anew: those that come take the
        places of those that are gone, so the plan may be the first one again. What they need, parameters or residuals,
        is sent to them by the caller, best by `broadcast`. With ``on_failure="raise"``, `shrink` after an error of this
        method may let them in as well.

        Parameters
        ----------
        seats : collection of int, optional
            Where one process holds all ranks: which come back, as they were counted at the beginning; by default all.
            Elsewhere whoever called `join`.

        Returns
        -------
        tuple of int
            The ranks that have come, as all are counted from now on.

        Raises
        ------
        UsageError
            A seat is not empty, or they are given where each rank is a process; or nobody can come in (`invitation`).
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
        if not self.one_rank:
            return self._in_order.run(partial(self._members.grow_here, seats))
        if seats is not None:
            raise UsageError(
                "each rank is a process here, and says itself where it wants to join; leave seats out"
            )
        return self._in_order.run(self._members.grow)

    def replan(
        self, *, without_links: Collection[str] = (), slow_links: Mapping[str, float] | None = None
    ) -> None:
        """Plan anew for a machine whose links are dead or slower, and go on with that; all ranks must call it alike.

        Ranks and epoch stay; `plan` changes, and the last of `notes` says to what. Changes add up.

        Parameters
        ----------
        without_links : collection of str
            Wires that are dead, such as ``gpu0-gpu3``, or ``gpu0->gpu3`` for one direction.
        slow_links : mapping of str to float
            Wires, and the GB/s per direction that they have.

        Raises
        ------
        UsageError
            There is no such wire, or it is not faster than that; the communicator stays as it is.
        InfeasibleError
            Nothing joins the ranks any more.
        BackendError
            Another rank failed, or means other links.

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
            raise UsageError("nothing is different; name links in without_links or slow_links")
        self._in_order.run(partial(self._members.replan, change))

    def run_in_order(
        self,
        task: Callable[[], Any],
        *,
        collective: str,
        root: int | None = None,
        op: str | None = None,
        dtype: str = "",
        count: int = 0,
    ) -> Handle[Any]:
        """Start what another library exchanges, in the order of the collectives and once all ranks agree on it.

        Parameters
        ----------
        task : callable
            Called in the background, after everything that was started before; ends with the exchange.
        collective, root, op, dtype, count
            What all ranks must mean alike: names, the rank, and the number of elements.

        Returns
        -------
        Handle
            Of what the task returns. It raises `RefusedError` where ranks mean different things; the task has not been
            called then.
        """
        told = {"collective": collective, "root": root, "op": op, "dtype": dtype, "count": count}

        def run() -> Any:
            self._open().agree(**told)
            return task()

        return self._in_order.submit(run)

    def begin_batch(self) -> None:
        """Refuse the collectives that are started from now on together, until `end_batch`.

        Where one of them is refused, the later ones raise the same `RefusedError` and exchange nothing. All ranks must
        start the same collectives between the two calls, up to one that is refused.
        """
        self._in_order.batch = StepBatch()

    def end_batch(self) -> None:
        """End what `begin_batch` has begun, also where some of it still runs; calling it twice is fine."""
        self._in_order.batch = None

    def gather_texts_in_order(self, text: str) -> list[str]:
        """As `gather_texts`, called in a task of `run_in_order`."""
        return self._open().gather_texts(text)

    def abort(self, reason: str) -> None:
        """End what is under way on this rank and all that comes, from any thread: pending waits raise.

        The other ranks are told, and raise as if this one had died. Nothing is done where the communicator is closed,
        or where all ranks are in this process.

        Parameters
        ----------
        reason : str
            A clause for the message of the `BackendError` that is raised.
        """
        execution = self._members.now
        if execution is not None and self.one_rank:
            execution.abort(f"rank {self.rank} aborted the communicator: {reason}; make a new one")

    def close(self) -> None:
        """Give up what the communicator holds; every later call is an error. Closing twice is fine."""
        execution = self._members.close()
        if execution is not None:
            self._in_order.close()
            execution.backend.close()
            if self._chunk_file is not None and 0 in self.ranks:
                execution.chunks.save(self._chunk_file)

    def plan_for(self, collective: str, nbytes: int) -> Plan:
        """The plan by which a collective without a root runs on a buffer of so many bytes.

        Where it is not the plan's own and never ran, all ranks must call this, since one of them plans for all.
        """
        execution = self._open()
        if execution.knows(collective):
            return execution.plan(collective, nbytes)
        return self._in_order.run(lambda: self._open().plan(collective, nbytes))

    def gather_texts(self, text: str) -> list[str]:
        """What every rank says, in order of rank: a process says one text, for all of its ranks.

        Raises
        ------
        BackendError
            Another rank failed, or makes another call.
        """
        return self._in_order.run(lambda: self._open().gather_texts(text))

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Bytes that the ranks of this process have sent so far, by (source, destination).

        What the plans' transfers carry: each chunk that crosses a tree edge once. Where ranks share memory, less moves.
        """
        return self._in_order.run(lambda: self._open().traffic.sent, exchanges=False)

    @contextmanager
    def trace(self) -> Iterator[list[TraceEvent]]:
        """What this process does in the collectives inside, with the times of the host's steady clock.

        Where ranks share memory: their meetings, what they wait for, copy and add up; with ``tcp``: meetings, and when
        each chunk came over its link. Other back ends tell nothing. ``topoplan bench --trace`` draws it.

        Yields
        ------
        list of Step
            To which collectives add when they end.
        """
        backend = self._open().backend
        steps: list[TraceEvent] = []
        if isinstance(backend, Traces):
            self._in_order.run(partial(backend.trace, steps), exchanges=False)
        try:
            yield steps
        finally:
            if isinstance(backend, Traces):
                self._in_order.run(partial(backend.trace, None), exchanges=False)

    def settled(self, nbytes: int) -> bool:
        """Whether the chunk size of the plan's own collective is settled for a buffer of so many bytes.

        Until then calls try sizes and may be slower than later ones; about ten calls of one size settle it.
        """
        return self._open().settled(self.plan.collective, self.plan.root, nbytes)

    @property
    def is_helper(self) -> bool:
        """Whether this process is no rank, but a device that adds and copies in the plan (see `serve_as_helper`)."""
        return is_helper(self._open().backend)

    def serve(self) -> int:
        """Of a helper: take part in the ranks' collectives until they close their communicators.

        Ranks call collectives as ever: those whose trees pass helpers, of the plan and others on its machine, wait for
        them. Entries of sparse ones are exchanged among the ranks alone.

        Returns
        -------
        int
            Collectives that this helper took part in.

        Raises
        ------
        UsageError
            This process is a rank; or a helper has another plan than the ranks, of which they are told.
        BackendError
            A rank or another helper has failed.
        """
        execution = self._open()
        return self._in_order.run(lambda: serve_as_helper(execution.backend, execution.store))

    def refuse(self, reason: str) -> None:
        """Refuse the next collective with all ranks, and say why: the others raise `RefusedError` in it.

        Nothing is done where all ranks are in this process. Where the others do not come within the timeout, the
        communicator is unusable from then on.

        Raises
        ------
        RefusedError
            Some rank does not refuse by itself; the same on all ranks.
        BackendError
            An earlier collective failed.
        """
        if self.one_rank:
            self._in_order.run(lambda: self._open().refuse(reason))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        """Check the arguments now, and run in turn."""
        execution = self._open()
        if self.is_helper:
            raise UsageError("this process is a helper and has nothing to put in; call serve")
        if self._members.repeats:
            return self._start_to_end(collective, root, op, arrays, out, async_op)
        below = MIN_MONITORED_BYTES if self._members.watched else None
        task = execution.repeated(collective, root, op, arrays, out, later=async_op, below=below)
        if task is None:
            try:
                checked = request(collective, execution.backend, arrays, out=out, op=op, root=root)
            except UsageError as error:
                self.refuse(str(error))
                raise
            task = partial(self._members.run, execution, checked)
        if async_op:
            return self._in_order.submit(task, CollectiveOutcome(among=self.seats))
        return self._in_order.run(task)

    def _start_to_end(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        """As `_start`, for a collective that is repeated by the ranks that are left where one dies."""
        execution, company = self._members.present
        backend, seats = execution.backend, company.seats
        try:
            request(collective, backend, arrays, out=out, op=op, root=root)
            if isinstance(backend, Captures) and backend.captures:
                raise UsageError(
                    "a collective in a graph is not repeated where a rank dies; capture it with a communicator that "
                    'has on_failure="raise"'
                )
        except UsageError as error:
            self.refuse(str(error))
            raise
        outcome = CollectiveOutcome()
        seat = None if root is None else seats[root]
        task = partial(self._members.run_to_end, collective, seat, op, arrays, out, seats, outcome)
        return self._in_order.submit(task, outcome) if async_op else self._in_order.run(task)

    def _open(self) -> Execution[Any]:
        return self._members.execution

    def _root(self, root: int | None) -> int:
        if root is None:
            return 0 if self.plan.root is None else self.plan.root
        return root
