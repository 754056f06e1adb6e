"""Define the process-group back end "topoplan": ``torch.distributed.init_process_group("topoplan")``, and its plan.

allreduce, broadcast, allgather, reduce-scatter, all-to-all of equal blocks, coalesced calls of one type and sums of
multiples (FSDP2) run by plan; everything else goes to inner groups of gloo (CPU tensors) and NCCL (GPU tensors). The
plan is the given one, that of the file in TOPOPLAN_PLAN, or made of the job's machine at the first collective; all
ranks agree on it (`PlanAgreement`). A file is for the whole job: groups of some ranks get plans on its machine. A file
that does not contain a plan of this job is a `UsageError` of that collective, on all ranks
(`collectives.peers.agreement`). TOPOPLAN_ENGINE selects the engine between GPUs: auto, windows or messages, as for
`Communicator`.

With TOPOPLAN_ON_FAILURE=shrink the default group survives the failure of a rank if torch sees no GPU: collectives are
repeated among survivors, with a new inner gloo group; `rank` and `size` change. Groups of some ranks do not, and no
rank joins.

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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import topoplan
from collectives.backends.torch.backend_selection import backend_of
from collectives.backends.torch.process_groups import (
    WATCHDOG_FACTOR,
    devices_of,
    gloo_among,
    gloo_over,
    wait_for_gloo_threads,
)
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.communicator.job_plan import PlanLike, agree_on_input, agree_on_plan
from collectives.peers.agreement import Gather, check_still_wanted, gather_or_raise, plan_on_one_rank
from collectives.torch.futures import JointWork
from collectives.torch.group_collectives import GroupCollectives
from collectives.training.exchange_settings import ExchangeSettings
from topoplan.errors import InfeasibleError, TopoplanError, UsageError
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import SizePlans

PLAN_VARIABLE = "TOPOPLAN_PLAN"


@dataclass(frozen=True, slots=True)
class PlanAgreement:
    """The plan that the ranks have agreed on, or the reason for none; `reason` is empty with a plan."""

    plan: Plans | None
    reason: str = ""


def agreed_plan(plan: PlanLike | None, group: dist.ProcessGroup, gather: Gather) -> PlanAgreement:
    """Return the plan that all ranks have and that fits their group; all of them must call this.

    `plan` is as in `plan_of`; None makes one for the job. Raises `UsageError`, with the same text on all ranks, if a
    given plan is invalid, not for this group, or not that of the others.
    """
    rank, size = group.rank(), group.size()
    try:
        gather_or_raise(gather, lambda: str(devices_of(group)))  # else its messages cannot carry a plan
    except TopoplanError as error:
        return PlanAgreement(None, str(error))
    try:
        job_input = agree_on_input(gather, plan, size=size, where="the process group")
        if job_input is not None:
            return PlanAgreement(agree_on_plan(gather, job_input, rank=rank, size=size))
    except TopoplanError as error:
        raise UsageError(str(error)) from None
    try:
        return PlanAgreement(agree_on_plan(gather, None, rank=rank, size=size))
    except TopoplanError as error:
        return PlanAgreement(None, f"no plan can be made of this job: {error}")


def agreed_file(group: dist.ProcessGroup, gather: Gather, members: Sequence[int]) -> PlanAgreement:
    """Return `agreed_plan` for the plan in the environment, if any; `members` are the group's ranks in the job."""
    rank = group.rank()
    read: list[Plans | None] = []

    def whole() -> str:
        try:
            path = os.environ.get(PLAN_VARIABLE)
            read.append(topoplan.load_plan(path) if path else None)
        except TopoplanError as error:
            raise UsageError(f"{PLAN_VARIABLE}: {error}") from error
        return "" if read[0] is None else read[0].digest

    digests, world = gather_or_raise(gather, whole), dist.get_world_size()
    plan = read[0]
    # a plan that differs between ranks, or has another number of ranks than the job, is refused as it is
    if plan is None or len(set(digests)) > 1 or len(members) == world or len(plan.ranks) != world:
        return agreed_plan(plan, group, gather)
    try:
        part = plan_on_one_rank(gather, _plan_for_members(plan, members), rank=rank)
    except InfeasibleError as error:
        return PlanAgreement(None, str(error))
    return agreed_plan(part, group, gather)


def _plan_for_members(plan: Plans, members: Sequence[int]) -> Callable[[], Plans]:
    gpus = [device.name for device in plan.topology.devices if device.kind == "gpu"]
    numbers = [gpus.index(plan.ranks[member]) for member in members]
    make = topoplan.plan_by_size if isinstance(plan, SizePlans) else topoplan.plan
    return lambda: make(plan.topology, "allreduce", gpus=numbers, progress=check_still_wanted)


def agreed_settings(make: Callable[[], ExchangeSettings], gather: Gather) -> ExchangeSettings:
    """Return the settings of `make` once all ranks have the same; all of them must call this.

    Raises `UsageError`, with the same text on all ranks, if `make` raises on some rank, or ranks differ.
    """
    made: list[ExchangeSettings] = []

    def text() -> str:
        made.append(make())
        return f"{made[0]}"

    _agreed_text(gather, text)
    return made[0]


def _agreed_text(gather: Gather, text: Callable[[], str], name: str = "") -> str:
    first, *others = gather_or_raise(gather, text)
    for rank, one in enumerate(others, start=1):
        if one != first:
            raise UsageError(f"rank {rank} has {name}{one}, and rank 0 {first}; give all ranks the same")
    return first


def gather_by(group: dist.ProcessGroup) -> Gather:
    """Return the gathering of texts over a process group."""

    def gather(text: str) -> list[str]:
        texts = [""] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return gather


def gather_over(group: dist.ProcessGroup, device: torch.device) -> Gather:
    """Return the gathering of texts over a process group without a name in torch; it takes tensors on `device`."""

    def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
        outputs = [torch.empty_like(tensor) for _ in range(group.size())]
        group.allgather([outputs], [tensor]).wait()
        return [output.cpu() for output in outputs]

    def gather(text: str) -> list[str]:
        data = text.encode()
        lengths = [int(one) for one in gathered(torch.tensor([len(data)], device=device))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = gathered(padded.to(device))
        return [one[:length].numpy().tobytes().decode() for one, length in zip(found, lengths, strict=True)]

    return gather


ENGINE = "TOPOPLAN_ENGINE"
ON_FAILURE = "TOPOPLAN_ON_FAILURE"

DELEGATED = (
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
    "monitored_barrier",
    "set_timeout",
)
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
    store: Store


class ProcessGroupTopoplan(GroupCollectives):
    """A process group whose collectives run by a plan; torch makes it.

    Attributes
    ----------
    inner, carrier : ProcessGroup
        For collectives without a plan, and for the messages of plans on GPUs.
    served : str
        Backend of each kind of device, as "cpu:gloo,cuda:nccl".
    communicator : Communicator or None
        None until the first collective, and if no plan fits.
    reason : str
        Why no plan fits; empty if one does.
    goes_on : bool
        Whether it survives the failure of a rank, once its first collective has run.
    """

    def __init__(self, groups: InnerGroups, *, timeout: timedelta) -> None:
        inner = groups.others
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # without a store
        self.inner = inner
        self._lost: list[dist.ProcessGroup] = []
        for device in inner._device_types:  # a DeviceMesh finds it by this name
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(device, kind, inner._get_backend(device))
        self.carrier = groups.plans
        self.served = groups.served
        self.communicator: Communicator | None = None
        self.reason = ""
        self.goes_on = False
        self.given_members: tuple[int, ...] = ()
        self._timeout = timeout.total_seconds()
        self._store = groups.store
        self._block: list[dist.Work] | None = None
        self._timed_out: list[Handle[Any]] = []

    def getBackendName(self) -> str:  # torch's name
        return "topoplan"

    def rank(self) -> int:
        """Return this process's rank among the survivors."""
        return self.inner.rank()

    def size(self) -> int:
        """Return the number of survivors."""
        return self.inner.size()

    getRank, getSize = rank, size  # as torch asks from C++

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block whose collectives end in one work, which `_end_coalescing` returns."""
        block: list[dist.Work] = []
        self._block = block
        # torch does not end a block that raises: its finalized context manager drops it
        manager = sys._getframe(2).f_locals.get("self")
        if isinstance(manager, AbstractContextManager):
            weakref.finalize(manager, self._leave_block, block).atexit = False
        if device.type == "cuda":
            self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> JointWork:
        """Return the work of all calls in the block."""
        works, self._block = self._block or [], None
        if device.type == "cuda":
            works = [*works, self.inner._end_coalescing(device)]
        return JointWork(works)

    def _leave_block(self, block: list[dist.Work]) -> None:
        """Drop a block that has not been ended, and what torch has collected in it."""
        if self._block is block:
            self._block = None
            dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)

    def get_group_store(self) -> Store:
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
    ) -> ProcessGroupTopoplan | None:
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
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < self.size():
            raise UsageError(
                f"new_ranks must be different ranks from 0 to {self.size() - 1}, got {list(new_ranks)}"
            )
        if self._lost:
            raise UsageError("a group with a failed rank cannot be split; start the job again")
        if self.rank() not in ranks:
            return None
        limit = timeout or timedelta(seconds=self._timeout)
        members = [self.members[rank] for rank in ranks]
        if group_name is None:
            made: ProcessGroupTopoplan = dist.new_group(
                members,
                timeout=limit,
                backend="topoplan",
                use_local_synchronization=True,
                group_desc=group_desc,
            )
            return made
        store = PrefixStore(f"{group_name}/", self._store)
        made = _make(store, ranks.index(self.rank()), len(ranks), limit)
        made.given_members = tuple(members)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks, by their numbers in the job."""
        return self.given_members or tuple(dist.get_process_group_ranks(self))

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
            on_failure = agreed_on_failure(gather) if self is dist.group.WORLD else "raise"
            verdict = agreed_file(self, gather, self.members)
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
                    backend = backend_of(self, gather, timeout=self._timeout, engine=engine)
                    on_error.callback(backend.close)
                    if backend.survivors is not None:
                        backend.survivors.beside = self._recover
                    self.communicator = Communicator(
                        verdict.plan, backend, timeout=self._timeout, on_failure=on_failure
                    )
                    on_error.pop_all()
                self.goes_on = on_failure == "shrink"
        return self.communicator is not None

    def _register(self) -> None:
        """Register a group that `split_group` has made with torch, unless its caller has."""
        world = dist.distributed_c10d
        if self.given_members and self not in world._world.pg_map:
            world._register_pg_in_world(
                self,
                backend_name="topoplan",
                store=self._store,
                group_name=self.group_name,
                backend_config="cpu:topoplan,cuda:topoplan",
                rank_mapping={member: rank for rank, member in enumerate(self.given_members)},
            )

    def _recover(self, gather: Gather, rank: int, size: int, local: str) -> None:
        """Make a new inner group of the survivors."""
        group = gloo_among(gather, rank=rank, size=size, local=local, timeout=self._timeout)
        # dropped in `shutdown`, when gloo's threads have ended
        self._lost.append(self.inner)
        self.inner = self.carrier = group


def agreed_on_failure(gather: Gather) -> str:
    """Return the reaction to failures in the environment of all ranks: "raise" or "shrink"; all must call this.

    Raises `UsageError`, with the same text on all ranks, for another value, or if ranks differ.
    """

    def text() -> str:
        found = os.environ.get(ON_FAILURE) or "raise"
        if found not in ("raise", "shrink"):
            raise UsageError(f"{ON_FAILURE} must be raise or shrink, got {found!r}")
        return found

    return _agreed_text(gather, text, f"{ON_FAILURE}=")


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: ProcessGroupTopoplan, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{name}` of the inner group."
    return method


for _name in DELEGATED:
    setattr(ProcessGroupTopoplan, _name, _delegated(_name))


def inner_groups(store: Store, rank: int, size: int, timeout: timedelta) -> InnerGroups:
    """Return the groups of a rank; steps of plans must end in the timeout, and their NCCL group has twice the time."""
    kind = dist.ProcessGroup.BackendType
    others = gloo_over(store, rank, size, timeout)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return InnerGroups(others, others, "cpu:gloo", store)

    def nccl(name: str, limit: timedelta) -> dist.ProcessGroupNCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    others._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl", timeout))
    plans = dist.ProcessGroup(store, rank, size)
    plans._set_default_backend(kind.NCCL)
    plans._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl of plans", WATCHDOG_FACTOR * timeout))
    return InnerGroups(others, plans, "cpu:gloo,cuda:nccl", store)


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupTopoplan:
    """Return a new group; its keys in the store differ from those of an earlier group of the same name.

    torch gives a group the name of a destroyed one, and gloo would connect to the addresses that it finds there.
    """
    generation = store.add(f"generation/{rank}", 1)
    own = PrefixStore(f"{generation}/", store)
    return ProcessGroupTopoplan(inner_groups(own, rank, size, timeout), timeout=timeout)


dist.Backend.register_backend("topoplan", _make, devices=["cpu", "cuda"])
