"""Define the process-group back end "topoplan": ``torch.distributed.init_process_group("topoplan")``, and its plan.

allreduce, broadcast, allgather, reduce-scatter, all-to-all of equal blocks, coalesced calls of one type and sums of
multiples (FSDP2) run by plan; everything else goes to inner groups of gloo (CPU tensors) and NCCL (GPU tensors). The
plan is the given one, that of the file in TOPOPLAN_PLAN, or made of the job's machine at the first collective; all
ranks agree on it (`PlanAgreement`). A file is for the whole job: groups of some ranks get plans on its machine. A file
that does not contain a plan of this job is a `UsageError` of that collective, on all ranks
(`collectives.peers.agreement`). TOPOPLAN_ENGINE selects the engine between GPUs: auto, windows or messages, as for
`Communicator`.

torch with `dist.BackendBase` makes the group, and `PlannedBackend` is its back end; in older releases
`PlannedProcessGroup` is the group. Both have one body, `GroupCollectives`: "plan or beneath".

With TOPOPLAN_ON_FAILURE=shrink the default group survives the failure of a rank if torch sees no GPU: collectives are
repeated among survivors, with a new inner gloo group; `rank` and `size` change. Between two steps a new process may
join in place of a failed rank (`collectives.torch.grow`). Groups of some ranks do neither.

All ranks refuse wrong arguments before anything moves (`collectives.torch.group_arguments`): the group stays usable.
Plans run in a thread of their own, on the CPU together with the other collectives; sends, receives and NCCL in the
caller's. Gloo separates both kinds of messages by tags. NCCL matches calls by order on one communicator, so messages
of plans have their own: a barrier right after a background allreduce could match it on another rank otherwise. (To let
the others wait for plans would deadlock if a rank receives after a collective a message that its peer sends before it.)
NCCL makes a communicator, and takes its memory, when it is first used.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from collectives.backends.torch.backend_selection import backend_of
from collectives.backends.torch.process_groups import (
    WATCHDOG_FACTOR,
    gloo_among,
    gloo_over,
    grouped,
    wait_for_gloo_threads,
    wrapping,
)
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.peers.agreement import Gather
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.torch.futures import JointWork
from collectives.torch.group_collectives import GroupCollectives
from collectives.torch.plan_agreement import ON_FAILURE, agreed_file, agreed_on_failure, gather_over
from topoplan.errors import BackendError, UsageError

ENGINE = "TOPOPLAN_ENGINE"

DELEGATED = ("_get_sequence_number_for_group", "_set_sequence_number_for_group", "monitored_barrier")
"""Methods of the inner process group; releases of torch that lack one do not call it."""


@dataclass(frozen=True, slots=True)
class InnerGroups:
    """The inner groups of a planned group.

    `others` carries collectives without a plan, `plans` the messages of plans over NCCL (without NCCL it is the same);
    `served` names what serves each kind of device, as "cpu:gloo,cuda:nccl"; `store` is that of the rendezvous.
    """

    others: dist.ProcessGroup
    plans: dist.ProcessGroup
    served: str
    store: dist.Store


class ProcessGroupTopoplan(GroupCollectives):
    """The common part of the process group "topoplan" for all releases of torch; `of` finds it in a group.

    Attributes
    ----------
    inner, carrier : ProcessGroup
        For collectives without a plan, and for the messages of plans on GPUs.
    served : str
        Backend of each kind of device, as "cpu:gloo,cuda:nccl".
    members : tuple of int
        Its ranks, by their numbers in the job.
    communicator : Communicator or None
        None until the first collective, and if no plan fits.
    reason : str
        Why no plan fits; empty if one does.
    goes_on : bool
        Whether it survives the failure of a rank, once its first collective has run.
    """

    whole = False
    """Whether it is the default group, of all ranks of the job."""
    grown = False
    """Whether a process has joined since it was made."""
    _job_size = 0
    """The number of ranks of the job, by which `members` are numbered."""

    def __init__(self, groups: InnerGroups, *, timeout: timedelta, members: Sequence[int]) -> None:
        self.inner = groups.others
        self._lost: list[dist.ProcessGroup] = []
        self.carrier = groups.plans
        self.served = groups.served
        self.members = tuple(members)
        self.communicator: Communicator | None = None
        self.reason = ""
        self.goes_on = False
        self._timeout = timeout.total_seconds()
        self._store = groups.store
        self._block: list[dist.Work] | None = None
        self._timed_out: list[Handle[Any]] = []

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> ProcessGroupTopoplan | None:
        """Return the back end "topoplan" of a process group, by default of the default group; None for others."""
        found = wrapping(dist.group.WORLD if group is None else group)
        return found if isinstance(found, ProcessGroupTopoplan) else None

    supports_reconfigure = False
    """torch would ask the inner gloo group, which the plans do not follow, or a back end of Python without end."""

    def get_reconfigure_handle(self) -> str:
        """Raise `UsageError`, as `reconfigure`."""
        return self.reconfigure()

    def reconfigure(self, opts: Any = None) -> NoReturn:
        """Raise `UsageError`: plans follow the membership of `shrink` and `grow` alone."""
        raise UsageError(
            f"the process group topoplan does not support reconfigure; set {ON_FAILURE}=shrink, and let processes in "
            "by collectives.torch.grow"
        )

    def getBackendName(self) -> str:  # torch's name
        return "topoplan"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the collectives of the inner groups, and of those by plan if none has run."""
        self._timeout = timeout.total_seconds()
        self.inner.set_timeout(timeout)

    def _begin_block(self) -> None:
        """Begin a block whose collectives end in one work."""
        block: list[dist.Work] = []
        self._block = block
        # torch does not end a block that raises: its finalized context manager drops it
        caller = sys._getframe(2)
        manager = None if caller.f_back is None else caller.f_back.f_locals.get("self")
        if isinstance(manager, AbstractContextManager):
            group = caller.f_locals.get("group")
            weakref.finalize(manager, self._leave_block, block, group).atexit = False

    def _end_block(self, *more: dist.Work) -> JointWork:
        """Return the work of all calls in the block."""
        works, self._block = self._block or [], None
        return JointWork([*works, *more])

    def _leave_block(self, block: list[dist.Work], group: Any) -> None:
        """Drop a block that has not been ended, and what torch has collected in it."""
        if self._block is block:
            self._block = None
            dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)

    def shutdown(self) -> None:
        """Close the communicator and the inner groups."""
        if self.communicator is not None and any(not handle.done() for handle in self._timed_out):
            self.communicator.abort(
                "a wait for a collective has timed out, and the process group is destroyed"
            )
        with ExitStack() as groups:
            groups.callback(self._lost.clear)
            groups.callback(self.inner.shutdown)
            if self.carrier is not self.inner:
                groups.callback(self.carrier.shutdown)
            groups.callback(wait_for_gloo_threads)
            if self.communicator is not None:
                self.communicator.close()  # raises what a collective on a GPU has met after the last call

    def abort(self) -> None:
        """Abort all running collectives: pending waits raise."""
        if self.communicator is not None:
            self.communicator.abort("its process group was aborted")
        if self.carrier is not self.inner:
            self.carrier.abort()
        self.inner.abort()

    def _planned(self) -> bool:
        if self.communicator is None and not self.reason:
            self._register()
            device = torch.device("cpu") if "cpu" in self.served else torch.device("cuda")
            gather = gather_over(self.inner, device)
            itself = cast("dist.ProcessGroup", self)  # or its back end, with the methods that are used here
            on_failure = agreed_on_failure(gather) if self.whole else "raise"
            verdict = agreed_file(itself, gather, self.members, self._job_size)
            self.reason = verdict.reason
            if verdict.plan is None:
                if on_failure == "shrink":
                    raise UsageError(
                        f"{ON_FAILURE}=shrink needs collectives by plan, and no plan fits: {self.reason}"
                    )
                warnings.warn(f"collectives run by {self.served}, not by plan: {self.reason}", stacklevel=4)
            else:
                with ExitStack() as on_error:
                    engine = os.environ.get(ENGINE) or "auto"
                    backend = backend_of(itself, gather, timeout=self._timeout, engine=engine)
                    on_error.callback(backend.close)
                    if backend.survivors is not None:
                        backend.survivors.beside = self._recover
                    self.communicator = Communicator(
                        verdict.plan, backend, timeout=self._timeout, on_failure=on_failure
                    )
                    self.communicator._members.renumbered = self._renumber
                    on_error.pop_all()
                self.goes_on = on_failure == "shrink"
        return self.communicator is not None

    def connected(self) -> Communicator:
        """Return the communicator of a default group that survives failures, after the agreement of its ranks.

        Raises `UsageError` for another group.
        """
        if not self.whole or not self._planned() or not self.goes_on:
            raise UsageError(
                f"ranks join the default process group topoplan with {ON_FAILURE}=shrink on all ranks, and this one "
                "is not of that kind; set the variable before init_process_group"
            )
        assert self.communicator is not None, "there is a plan"
        return self.communicator

    def join(self, join_token: str, *, wait: float) -> None:
        """Join the ranks of a token with this group, of one rank; `wait` is in seconds.

        Raises
        ------
        UsageError
            The group has several ranks, does not survive failures, or the text is not a token of such a group.
        BackendError
            No rank answers, or none admits this process in time.
        """
        alone = self.connected()
        if self.size() > 1:
            raise UsageError(
                f"a process joins with a group of its own, got one of {self.size()} ranks; write "
                'init_process_group("topoplan", store=HashStore(), rank=0, world_size=1)'
            )
        inner = self.inner
        survivors = MembershipProtocol.request_to_join(join_token, wait=wait)
        survivors.beside = self._recover
        try:
            self.communicator = Communicator._admitted(survivors)
        except BaseException:
            if self.inner is not inner:
                self._use(inner)
            raise
        self.communicator._members.renumbered = self._renumber
        self._renumber()
        alone.close()

    def drop_lost_groups(self) -> None:
        """Drop the inner groups of earlier memberships, with their threads; call it between collectives."""
        if self._lost and wait_for_gloo_threads():
            self._lost.clear()

    def _register(self) -> None:
        """Register a group with torch that torch does not know; called before its first collective."""

    def _recover(self, gather: Gather, rank: int, size: int, local: str) -> None:
        """Make a new inner group of the survivors and the joining ranks."""
        self._use(gloo_among(gather, rank=rank, size=size, local=local, timeout=self._timeout))

    def _use(self, group: dist.ProcessGroup) -> None:
        """Replace the inner group; the one before is dropped when gloo's threads are idle, which this makes them."""
        with suppress(RuntimeError, AttributeError):  # releases of torch that cannot
            self.inner.abort()
        self._lost.append(self.inner)
        self.inner = self.carrier = group

    def _renumber(self) -> None:
        """Tell torch the numbers of ranks that `rank` and `size` count."""
        numbers: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
        if self in numbers:
            numbers[self] = {rank: rank for rank in range(self.size())}


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: ProcessGroupTopoplan, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{name}` of the inner group."
    return method


for _name in DELEGATED:
    setattr(ProcessGroupTopoplan, _name, _delegated(_name))


class PlannedProcessGroup(ProcessGroupTopoplan, dist.ProcessGroup):
    """The process group itself, for releases of torch in which Python cannot define a back end of one.

    Also for a group that survives failures: only here can `rank` and `size` change.
    """

    def __init__(self, groups: InnerGroups, *, timeout: timedelta, members: Sequence[int]) -> None:
        inner = groups.others
        dist.ProcessGroup.__init__(self, inner.rank(), inner.size())  # type: ignore[call-arg]  # without a store
        super().__init__(groups, timeout=timeout, members=members)
        self._unknown = False
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)  # torch 2.15 looks up the group's name there, for its flight recorder
        for device in (
            ["cpu", "cuda"] if "cuda" in self.served else ["cpu"]
        ):  # a DeviceMesh finds it by this name
            place = torch.device(device)
            self._register_backend(place, kind, self._get_backend(place))

    # as torch asks from C++
    getRank = ProcessGroupTopoplan.rank
    getSize = ProcessGroupTopoplan.size

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device) if hasattr(self.inner, "_get_backend") else self.inner

    def _start_coalescing(self, device: torch.device) -> None:
        self._begin_block()
        if device.type == "cuda":
            self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> JointWork:
        return self._end_block(*([self.inner._end_coalescing(device)] if device.type == "cuda" else []))

    def get_group_store(self) -> dist.Store:
        """Return the store of the rendezvous."""
        return self._store

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> dist.ProcessGroup | None:
        """Return the group of some ranks of this one, with a plan of its own; None on the other ranks.

        Parameters
        ----------
        new_ranks : sequence of int
            Ranks of this group, in any order; the new group sorts them. All of them must call it.
        timeout : timedelta, optional
            By default that of this group.
        opts, device_types
            Not used; all are served as here.
        group_name : str, optional
            If given, as `torch.distributed.split_group` does, the caller registers the group.
        group_desc : str, optional

        Raises
        ------
        UsageError
            These are not ranks of this group, or one is named twice; or a rank of this group failed.
        """
        ranks = sorted(new_ranks)
        check_ranks(new_ranks, self.size())
        if self._lost or self.grown:
            raise UsageError("a group with a failed or joined rank cannot be split; start the job again")
        if self.rank() not in ranks:
            return None
        limit = timeout or timedelta(seconds=self._timeout)
        members = [self.members[rank] for rank in ranks]
        if group_name is None:
            found: dist.ProcessGroup = dist.new_group(
                members,
                timeout=limit,
                backend="topoplan",
                use_local_synchronization=True,
                group_desc=group_desc,
            )
            return found
        store = dist.PrefixStore(f"{group_name}/", self._store)
        made = PlannedProcessGroup(
            inner_groups(
                renewed(store, ranks.index(self.rank())), ranks.index(self.rank()), len(ranks), limit
            ),
            timeout=limit,
            members=members,
        )
        made._unknown, made._job_size = True, self._job_size
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def _register(self) -> None:
        world = dist.distributed_c10d
        if self._unknown and self not in world._world.pg_map:
            world._register_pg_in_world(
                self,
                backend_name="topoplan",
                store=self._store,
                group_name=self.group_name,
                backend_config="cpu:topoplan,cuda:topoplan",
                rank_mapping={member: rank for rank, member in enumerate(self.members)},
            )


BackendBase: Any = getattr(dist, "BackendBase", object)
"""torch's base of back ends that are written in Python, of the releases that have one."""


ALIVE: set[ProcessGroupTopoplan] = set()
"""Back ends until their end: torch's debug wrapper keeps the C++ part of one alone."""


class PlannedBackend(ProcessGroupTopoplan, BackendBase):  # type: ignore[misc]
    """The back end of a process group that is torch's own: names, stores, splits and the debug wrapper are torch's."""

    def __init__(self, groups: InnerGroups, *, timeout: timedelta, members: Sequence[int]) -> None:
        inner = groups.others
        BackendBase.__init__(self, inner.rank(), inner.size())
        super().__init__(groups, timeout=timeout, members=members)
        self._shrunk = 0
        ALIVE.add(self)

    @property
    def options(self) -> Any:
        """Options of torch, which it copies for a split."""
        made = BackendBase.Options("topoplan", timeout=timedelta(seconds=self._timeout))
        made.global_ranks_in_group = list(self.members)
        return made

    supports_coalescing = True
    supports_splitting = True
    supports_shrinking = True
    supports_window = False  # else torch 2.15 asks this class again, without end

    def start_coalescing(self) -> None:
        self._begin_block()
        if self.served != "cpu:gloo":
            self.inner._start_coalescing(torch.device("cuda"))

    def end_coalescing(self) -> JointWork:
        nccl = self.served != "cpu:gloo"
        return self._end_block(*([self.inner._end_coalescing(torch.device("cuda"))] if nccl else []))

    def split(self, store: dist.Store, ranks: Sequence[int], opts: Any) -> PlannedBackend:
        """Return the back end of some ranks, in their order.

        Raises `UsageError` on the other ranks, where torch 2.14 would end the process if it returned None.
        """
        check_ranks(ranks, self.size())
        if self.rank() not in ranks:
            raise UsageError(
                f"rank {self.rank()} is not among the ranks {list(ranks)} of the new group; call split_group on those "
                "alone, or use torch.distributed.new_group"
            )
        return self._part(store, ranks)

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None
    ) -> PlannedBackend:
        """Return the back end of the other ranks, which meet in the store of the job; they alone call it.

        With `SHRINK_ABORT` running collectives end first, with an error.
        """
        if shrink_flags & dist.distributed_c10d.SHRINK_ABORT:
            self.abort()
        self._shrunk += 1
        ranks = [rank for rank in range(self.size()) if rank not in ranks_to_exclude]
        try:
            return self._part(dist.PrefixStore(f"shrunk {self._shrunk}/", self._store), ranks)
        except dist.DistError as error:
            raise BackendError(
                f"the {len(ranks)} remaining ranks do not find each other ({' '.join(str(error).split())[:100]}); the "
                "process with the store of the job must be alive",
                rank=self.rank(),
            ) from error

    def shutdown(self) -> None:
        ALIVE.discard(self)
        super().shutdown()

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        cast("Any", self.inner).monitored_barrier(opts.timeout, wait_all_ranks)

    def get_error(self) -> Any:
        """Return COMM_ERROR after a failure or an abort, else SUCCESS."""
        found = BackendBase.get_error(self)
        return (
            found
            if self.communicator is None or self.communicator.failure is None
            else type(found).COMM_ERROR
        )

    def _part(self, store: dist.Store, ranks: Sequence[int]) -> PlannedBackend:
        rank, limit = list(ranks).index(self.rank()), timedelta(seconds=self._timeout)
        groups = inner_groups(renewed(store, rank), rank, len(ranks), limit)
        made = PlannedBackend(groups, timeout=limit, members=[self.members[one] for one in ranks])
        made._job_size = self._job_size
        return made


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Raise `UsageError` if these are not different ranks of a group."""
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < size:
        raise UsageError(f"new_ranks must be different ranks from 0 to {size - 1}, got {list(ranks)}")


def inner_groups(store: dist.Store, rank: int, size: int, timeout: timedelta) -> InnerGroups:
    """Return the groups of a rank; steps of plans must end in the timeout, and their NCCL group has twice the time."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        others = gloo_over(store, rank, size, timeout)
        return InnerGroups(others, others, "cpu:gloo", store)

    def nccl(name: str, limit: timedelta) -> dist.ProcessGroupNCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)

    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    others = grouped(store, rank, size, cpu=gloo, cuda=nccl("nccl", timeout))
    plans = grouped(store, rank, size, cuda=nccl("nccl of plans", WATCHDOG_FACTOR * timeout))
    return InnerGroups(others, plans, "cpu:gloo,cuda:nccl", store)


def renewed(store: dist.Store, rank: int) -> dist.Store:
    """Return the part of a store for the next group; its keys differ from those of an earlier group of the same name.

    torch gives a group the name of a destroyed one, and gloo would connect to the addresses that it finds there.
    """
    return dist.PrefixStore(f"{store.add(f'generation/{rank}', 1)}/", store)


def make_back_end(options: Any, _: object = None) -> ProcessGroupTopoplan:
    """Return the back end of a group, or the group itself if torch takes no back end of Python."""
    rank, size, limit = options.group_rank, options.group_size, options.timeout
    whole = ProcessGroupTopoplan.of() if options.global_ranks_in_group else None
    if whole is not None and whole.grown:
        raise UsageError(
            "a process that has joined does not share the store of the job, by which ranks of a new group meet; make "
            "groups before, or start the job again"
        )
    survives = not options.global_ranks_in_group and os.environ.get(ON_FAILURE) == "shrink"
    kind = PlannedProcessGroup if BackendBase is object or survives else PlannedBackend
    groups = inner_groups(renewed(options.store, rank), rank, size, limit)
    made = kind(groups, timeout=limit, members=options.global_ranks_in_group or range(size))
    made.whole = not options.global_ranks_in_group
    made._job_size = size if made.whole else dist.get_world_size()
    return made


def register() -> None:
    """Register the back end "topoplan" with torch; once the package is installed torch 2.14 and newer call this."""
    dist.Backend.register_backend("topoplan", make_back_end, extended_api=True, devices=["cpu", "cuda"])


register()
