"""Repeat steps of DDP among the survivors when a rank fails, and let joining ranks in.

A step counts when all ranks have all of its averages, which they confirm in one short round at its end. DDP has used
none of them before: it reads the buckets when the hook of the last one has returned. So after a failure the survivors
agree (`Communicator.shrink`), restore the state before the step (gradients, which are copied for that, residuals, warm
starts), and exchange its buckets anew; averages are of fewer ranks. If the round had ended on some rank, all accept the
step: every rank had confirmed its averages. Residuals of a failed rank are lost; each round reports their norm.

A joining rank has a process group of its own, for DDP alone. It gets parameters, buffers, optimizer state, step and
warm starts by the broadcast of the plan, between two steps. Every round exchanges the same message (`StepMessage`);
ranks decide by these messages alone, after a failure and after a join.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.communicator.handle import Handle
from collectives.torch.bucket_exchange import (
    DdpBucket,
    DdpBucketExchange,
    KeptBucket,
    give_back,
    watch_backward,
)
from collectives.torch.parameter_residuals import ParameterNumbers
from collectives.torch.process_group import ProcessGroupTopoplan
from collectives.training.averaging import InStepAverager
from collectives.training.buckets import share_failure
from collectives.training.checkpoint_state import broadcast_state, choose_sender
from topoplan.errors import BackendError, RefusedError, UsageError

OriginalRanks = tuple[int, ...]
"""Ranks, by their numbers in the first plan."""


@dataclass(frozen=True, slots=True)
class LostResiduals:
    """Residuals of gradients: parameters or buckets that have one, entries that are not zero, and their L2 norm."""

    keys: int = 0
    entries: int = 0
    norm: float = 0.0

    @staticmethod
    def of(lines: Mapping[str, Sequence[Any]]) -> LostResiduals:
        """Return the measure of residuals, a list of arrays for each key.

        >>> LostResiduals.of({"parameter 0": [np.array([3.0, 0.0, 4.0])], "parameter 1": [np.zeros(2)]})
        LostResiduals(keys=1, entries=2, norm=5.0)
        """
        held = [np.concatenate([np.ravel(one) for one in listed]) for listed in lines.values() if listed]
        counts = [int(np.count_nonzero(one)) for one in held]
        squares = [float(np.linalg.norm(one.astype(np.float64))) ** 2 for one in held]
        return LostResiduals(sum(count > 0 for count in counts), sum(counts), math.sqrt(math.fsum(squares)))

    def plus(self, other: LostResiduals) -> LostResiduals:
        """Return the measure of both together."""
        return LostResiduals(
            self.keys + other.keys, self.entries + other.entries, math.hypot(self.norm, other.norm)
        )


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Message of a rank in the round that ends a step.

    `steps` counts the steps that it has ended, and calls of `RecoveringExchange.grow`; `has_it` says whether it has the
    state of the job; `grown`, whether ranks have joined in the present call of `grow`; `alike` is the signature that
    all ranks must share in such a call; `seats` are the original ranks at the end of its last step; `unsent` measures
    its residuals.
    """

    steps: int
    has_it: bool
    grown: bool
    alike: str
    seats: OriginalRanks
    unsent: LostResiduals

    @staticmethod
    def read(text: str) -> StepMessage:
        """Return the message of its JSON text."""
        read = json.loads(text)
        return StepMessage(
            **{**read, "seats": tuple(read["seats"]), "unsent": LostResiduals(**read["unsent"])}
        )


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A step of training after which there are fewer ranks.

    `without` lists the failed ranks, by their numbers before; `lost` measures the residuals that they had reported at
    the end of the step before.
    """

    step: int
    without: tuple[int, ...]
    old_size: int
    new_size: int
    lost: LostResiduals


class _HeldBucket(KeptBucket):
    """A bucket that can be exchanged again."""

    def __init__(self, bucket: DdpBucket) -> None:
        super().__init__(bucket)
        self._given = self._buffer.clone()
        self.running: tuple[Handle[Any], torch.futures.Future[Any]] | None = None

    def wait(self) -> None:
        """Wait for the average; raises the error of the exchange."""
        if self.running is not None:
            handle, average = self.running
            with suppress(Exception):  # the future raises it with step and bucket
                handle.wait()  # which Ctrl-C ends, unlike the wait for a future of torch
            average.wait()

    def restore(self) -> None:
        """Restore the gradients of this rank."""
        self.running = None
        self._buffer.copy_(self._given)


class RecoveringExchange(DdpBucketExchange):
    """Averages buckets, also when ranks fail; steps are those of `BSP`.

    `on_change` is called when a step has ended with another membership, before DDP gets its averages, with the original
    ranks before and now, the failed ones among those before, and their residuals. `has_it` is False on a joining rank,
    which gets the state of the job by `grow`.
    """

    def __init__(
        self,
        averager: InStepAverager,
        numbers: ParameterNumbers,
        on_change: Callable[[OriginalRanks, OriginalRanks, OriginalRanks, LostResiduals], None],
        *,
        has_it: bool = True,
    ) -> None:
        super().__init__(averager, numbers)
        self._on_change = on_change
        self._members = averager.communicator.original_ranks
        self._has_it = has_it
        self._grown, self._signature = False, ""
        self._steps = 0
        self._reported: dict[int, LostResiduals] = {}
        self._held: list[_HeldBucket] = []
        self._before: Callable[[], None] | None = None
        self._after: Callable[[], None] | None = None
        """Restore the residuals before this step, and after it; None if they are unknown."""
        self._residual_size = LostResiduals()
        self._failure: BackendError | None = None

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Start to average a bucket; the last one of a step waits for all of them.

        Raises `BackendError` if the step failed for another reason than a failed rank, or if the others excluded this
        rank.
        """
        self.check_has_it()
        communicator = self._averager.communicator
        try:
            with communicator._refusing():
                if not self._kept:
                    self._failure = None
                    if self._before is None:
                        self._before = self._snapshot()
                    communicator._begin_batch()
                    watch_backward(self._abandoned)
                kept = KeptBucket(bucket) if self.regroups else _HeldBucket(bucket)
            self._kept.append(kept)
            if isinstance(kept, _HeldBucket):
                self._hold(kept, async_op=not bucket.is_last())
            if bucket.is_last():
                chosen: list[DdpBucket] = []
                with self._averager.recorder.waiting():
                    if self.regroups:
                        with communicator._refusing():
                            chosen = self.regrouped(self._kept)
                        for one in chosen:
                            self._hold(_HeldBucket(one), async_op=False)
                    self._end(self._complete, self._again)
                with communicator._behind():
                    give_back(chosen)
                    listed, self._kept = self._kept, []
                    for each in listed:
                        each.averaged.set_result(each.buffer())
                    self._held.clear()
                    communicator._end_batch()
                    self._end_step()
            return kept.averaged
        except BaseException as error:
            self._give_up(wait=isinstance(error, Exception))
            raise

    def _abandoned(self) -> None:
        """Leave after an error of backward between two buckets: the others continue without this rank."""
        if begun := len(self._kept):
            error = f"training step {self._averager.recorder.step}: backward raised an error behind bucket {begun - 1}"
            self._averager.communicator.abort(error)
            self._give_up(wait=True)

    def _give_up(self, *, wait: bool) -> None:
        self._under_way = [one.running for one in self._held if one.running is not None]
        self._held.clear()
        self.forget()
        super()._give_up(wait=wait)

    def _hold(self, held: _HeldBucket, *, async_op: bool) -> None:
        """Start the exchange of a bucket, unless one of this step has failed."""
        self._held.append(held)
        if self._failure is None:
            try:
                held.running = self._start(held, async_op=async_op)
            except BackendError as error:
                self._failure = error

    def check_has_it(self) -> None:
        """Raise `UsageError` on a joining rank that has not called `grow`."""
        if not self._has_it:
            raise UsageError(
                "this rank has joined and does not have the state of the others yet; call state.grow first"
            )

    def forget(self) -> None:
        """Drop the snapshots: the last step failed, or the residuals come from a checkpoint."""
        self._before = self._after = None

    def settle(self) -> None:
        """Return when all survivors have completed all steps; all of them call it after the last step."""
        self._end(lambda: None, lambda: None)

    def grow(
        self, signature: str, give: Callable[[], bytes], take: Callable[[bytes], None]
    ) -> tuple[int, ...]:
        """Let joining ranks in between steps, and send them the state; all ranks must call it.

        `signature` must be the same on all ranks: a joining rank with another one is excluded and raises
        `UsageError`. `give` returns the state of this rank, `take` restores that of another one. Returns the ranks that
        joined, by their numbers from now on. Raises `BackendError` if all ranks that had the state failed, or on
        another failure.
        """
        if self._numbers.arrivals is not None:
            raise UsageError("joining ranks identify parameters by their order; give HookState parameters=")
        comm = self._averager.communicator
        self._grown, self._signature = not self._has_it, signature  # others' calls let a joining rank in
        joined: set[int] = set()

        def let_in() -> None:
            if not self._grown:
                comm.grow()
                self._grown = True

        def send(sender: int, message: StepMessage) -> None:
            with share_failure(comm, "growing"):
                broadcast_state(comm, sender, has_it=self._has_it, give=give, take=take)
            if not self._has_it:
                self._steps, self._members, self._has_it = message.steps, message.seats, True

        act: Callable[[], None] = let_in
        while True:
            messages, _ = self._act_and_confirm(act, joining=True)
            if self._ahead(messages) is not None:
                break
            if not any(one.grown for one in messages.values()):
                act = let_in
                continue
            sender, foreign = choose_sender({seat: (one.has_it, one.alike) for seat, one in messages.items()})
            lacking = {seat for seat, one in messages.items() if not one.has_it}
            if comm.original_ranks[comm.rank] in foreign:
                raise UsageError(
                    f"this rank has {signature}, and the others {messages[sender].alike}; make model and state the same"
                )
            if foreign:
                act = partial(comm.shrink, without=[comm.original_ranks.index(seat) for seat in foreign])
            elif lacking:
                joined |= lacking
                act = partial(send, sender, messages[sender])
            else:
                break
        self._grown, self._signature = False, ""
        self._accept(messages, joined)
        return tuple(rank for rank, seat in enumerate(self._members) if seat in joined)

    def _complete(self) -> None:
        """Wait for all averages of this step."""
        for one in self._held:
            one.wait()  # raises the error of an earlier bucket first
        if self._failure is not None:
            raise self._failure
        with self._averager.communicator._refusing():
            self._averager.settle()
            self._after = self._snapshot()

    def _again(self) -> None:
        """Exchange the buckets of this step anew."""
        self._failure = None
        assert self._before is not None, "taken when the step began"
        self._before()
        for one in self._held:
            one.restore()
        for one in self._held:
            one.running = self._start(one, async_op=False)

    def _end(self, complete: Callable[[], None], again: Callable[[], None]) -> None:
        """End a step together with the survivors, and report the failed ranks."""

        def repeated() -> None:
            again()
            complete()

        messages, rank_failed = self._act_and_confirm(complete)
        while rank_failed and self._ahead(messages) is None:
            messages, rank_failed = self._act_and_confirm(repeated)
        self._accept(messages)

    def _ahead(self, messages: Mapping[int, StepMessage]) -> StepMessage | None:
        """Return the message of a rank that has ended this rank's step, since all had confirmed their averages."""
        ahead = (one for one in messages.values() if self._has_it and one.steps > self._steps)
        return next(ahead, None)

    def _accept(self, messages: Mapping[int, StepMessage], joined: Collection[int] = ()) -> None:
        """Count a step as over; ranks that failed after another rank had ended it are reported a step later.

        `messages` are those of the last round by original rank, `joined` the original ranks whose places were taken.
        """
        ahead, before = self._ahead(messages), self._members
        self._members = tuple(messages) if ahead is None else ahead.seats
        self._steps, self._before = self._steps + 1, self._after
        kept, lost = self._reported, LostResiduals()
        self._reported = {**kept, **{seat: one.unsent for seat, one in messages.items()}}
        failed = tuple(seat for seat in before if seat not in self._members or seat in joined)
        for seat in failed:
            lost = lost.plus(kept.get(seat, LostResiduals()))
        if failed or before != self._members:
            with self._averager.communicator._behind():
                self._on_change(before, self._members, failed, lost)

    def _act_and_confirm(
        self, act: Callable[[], object], *, joining: bool = False
    ) -> tuple[dict[int, StepMessage], bool]:
        """Act, then exchange messages with the others or the survivors; return also whether ranks failed.

        A rank that refuses a step stays; one that refuses while ranks are `joining` leaves with its own error.
        """
        try:
            act()
            return self._confirm(), False
        except BackendError as error:
            if isinstance(error, RefusedError) and not joining:
                raise
            return self._recover(error), True

    def _confirm(self) -> dict[int, StepMessage]:
        """Return the message of each rank, by its original rank."""
        comm = self._averager.communicator
        mine = StepMessage(
            self._steps, self._has_it, self._grown, self._signature, self._members, self._residual_size
        )
        messages = [StepMessage.read(text) for text in comm._gather_texts(json.dumps(asdict(mine)))]
        return dict(zip(comm.original_ranks, messages, strict=True))

    def _recover(self, error: BackendError) -> dict[int, StepMessage]:
        """Agree on the survivors and exchange messages with them; raises the error if no rank failed."""
        comm = self._averager.communicator
        for one in self._held:
            with suppress(Exception):
                one.wait()
        while True:
            seats = comm.original_ranks
            comm.shrink()
            if comm.original_ranks == seats:
                raise error
            try:
                return self._confirm()
            except BackendError as later:  # another rank failed meanwhile
                error = later

    def _snapshot(self) -> Callable[[], None]:
        """Take a snapshot of residuals and filters and return what restores it, any number of times.

        The norm of the residuals goes into the next messages.
        """
        if self._averager.settings.top_k is not None:
            back, lines = self.residuals.snapshot()
        else:
            back, lines = self._averager.snapshot()
        self._residual_size = LostResiduals.of(lines)
        return back


def warn_of_launcher(rank: int) -> None:
    """Warn on rank 0 if one torchrun has started all ranks: it ends the survivors of a failed one."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") != "1"
    if rank == 0 and alone and "TORCHELASTIC_RUN_ID" in os.environ:
        warnings.warn(
            "torchrun ends the survivors of a failed rank; start each rank by itself "
            "(docs/fault-tolerance.md#launchers)",
            stacklevel=3,
        )


def check_recoverable(model: DistributedDataParallel) -> None:
    """Raise `UsageError` if DDP uses its process group beside the hook, and the group cannot recover."""
    group = model.process_group
    planned = ProcessGroupTopoplan.of(group)
    if group.size() == 1 or (planned is not None and planned.goes_on):
        return
    newer = hasattr(model, "forward_sync_buffers")
    synchronised = model.forward_sync_buffers if newer else model.broadcast_buffers
    option = "forward_sync_buffers" if newer else "broadcast_buffers"
    faults = [
        text
        for text, found in (
            (
                f"broadcasts the model's buffers in every step; write DistributedDataParallel(network, {option}=False)",
                synchronised and len(model.modules_buffers) > 0,
            ),
            (
                "asks all ranks for unused parameters in every step; leave find_unused_parameters out, or give "
                "static_graph=True",
                model.find_unused_parameters and not model.static_graph,
            ),
            (
                "reduces some gradients by itself; leave delay_all_reduce_named_params out",
                len(getattr(model, "_delay_all_reduce_params", ())) > 0,
            ),
        )
        if found
    ]
    if faults:
        raise UsageError(
            f"Shrink() needs a DDP that does not use its process group, which cannot lose a rank, and this DDP "
            f"{faults[0]}, or use the process group topoplan with TOPOPLAN_ON_FAILURE=shrink"
        )
