"""Repeat steps of DDP among the survivors when a rank fails, and let joining ranks in.

A step counts when all ranks have all of its averages, which they confirm in one short round at its end. Before that DDP
has used none of them: it reads the buckets when the hook of the last one has returned. So after a failure the survivors
agree (`Communicator.shrink`), take back the changes of the step (gradients, which are copied for that, residuals, warm
starts), and exchange its buckets anew; averages are of fewer ranks. If the round had ended on some rank only, all
accept the step: every rank had confirmed its averages. Residuals of a failed rank are lost; each round says how much.

A joining rank has a process group of its own, for DDP alone. It gets parameters, buffers, state of the optimizer, step
and warm starts by the broadcast of the plan, between two steps. Every round exchanges the same message (`StepMessage`),
and ranks decide by these alone, after a failure and after a join alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.communicator.handle import Handle
from collectives.torch.bucket_exchange import DdpBucketExchange
from collectives.torch.parameter_residuals import ParameterNumbers
from collectives.torch.process_group import PlannedGroup
from collectives.training.averaging import InStepAverager
from collectives.training.buckets import share_failure
from collectives.training.checkpoint_state import broadcast_state, choose_sender
from topoplan.errors import BackendError, RefusedError, UsageError

OriginalRanks = tuple[int, ...]
"""Ranks, by their numbers in the first plan."""


@dataclass(frozen=True, slots=True)
class LostResiduals:
    """What ranks have kept of their gradients.

    Parameters
    ----------
    keys : int
        Parameters or buckets of which they kept something.
    entries : int
        Elements that are not zero.
    norm : float
        The square root of the sum of their squares.
    """

    keys: int = 0
    entries: int = 0
    norm: float = 0.0

    @staticmethod
    def of(lines: Mapping[str, Sequence[Any]]) -> LostResiduals:
        """Of residuals, a list for each key.

        Examples
        --------
        >>> LostResiduals.of({"parameter 0": [np.array([3.0, 0.0, 4.0])], "parameter 1": [np.zeros(2)]})
        Unsent(keys=1, entries=2, norm=5.0)
        """
        held = [np.concatenate([np.ravel(one) for one in listed]) for listed in lines.values() if listed]
        counts = [int(np.count_nonzero(one)) for one in held]
        squares = [float(np.linalg.norm(one.astype(np.float64))) ** 2 for one in held]
        return LostResiduals(sum(count > 0 for count in counts), sum(counts), math.sqrt(math.fsum(squares)))

    def plus(self, other: LostResiduals) -> LostResiduals:
        """Of both."""
        return LostResiduals(
            self.keys + other.keys, self.entries + other.entries, math.hypot(self.norm, other.norm)
        )


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What a rank says of itself where ranks meet.

    Parameters
    ----------
    steps : int
        How many it has ended, calls of `RecoveringExchange.grow` too.
    has_it : bool
        Whether it has what the others have.
    grown : bool
        Whether others were let in, in the call of `grow` in which it is.
    alike : str
        What all ranks must have in common, in such a call.
    seats : tuple of int
        The ranks that there were behind the last step that it has ended.
    unsent : Unsent
        What it has kept of its gradients.
    """

    steps: int
    has_it: bool
    grown: bool
    alike: str
    seats: OriginalRanks
    unsent: LostResiduals

    @staticmethod
    def read(text: str) -> StepMessage:
        """Of its JSON."""
        told = json.loads(text)
        return StepMessage(
            **{**told, "seats": tuple(told["seats"]), "unsent": LostResiduals(**told["unsent"])}
        )


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A step after which there are fewer ranks.

    Parameters
    ----------
    step : int
        Of training.
    without : tuple of int
        The ranks that are gone, as they were counted before.
    old_size, new_size : int
        How many there were, and are.
    lost : Unsent
        What they had kept of their gradients behind the step before, as they told then.
    """

    step: int
    without: tuple[int, ...]
    old_size: int
    new_size: int
    lost: LostResiduals


class _HeldBucket:
    """A bucket of a step that is not over: as DDP's own, which is gone when its hook has returned.

    Parameters
    ----------
    bucket : GradBucket
    """

    def __init__(self, bucket: GradBucket) -> None:
        self._index, self._buffer, self._parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        self._given = self._buffer.clone()
        self.running: tuple[Handle[Any], torch.futures.Future[Any]] | None = None
        self.averaged: torch.futures.Future[Any] = torch.futures.Future()

    def index(self) -> int:
        """Its number in the step."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Its gradients, one after another, and in the end their averages."""
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients these are."""
        return self._parameters

    def begun(self, running: tuple[Handle[Any], torch.futures.Future[Any]]) -> None:
        """Its exchange has begun."""
        self.running = running

    def wait(self) -> None:
        """Wait until its average is there; raises what went wrong."""
        if self.running is not None:
            handle, average = self.running
            with suppress(Exception):  # the future tells of it with step and bucket
                handle.wait()  # which Ctrl-C ends, unlike the wait for a future of torch
            average.wait()

    def take_back(self) -> None:
        """The gradients are again what this rank has given."""
        self.running = None
        self._buffer.copy_(self._given)


class RecoveringExchange(DdpBucketExchange):
    """Averages buckets, also when ranks are lost; steps are those of `BSP`.

    Parameters
    ----------
    averager : InStepAverager
        Of a communicator whose back end can go on.
    numbers : ParameterNumbers
    on_change : callable
        Told when a step has ended with other ranks than before, and before DDP gets its averages: those before and now,
        and of those before the ones that are gone, by their numbers in the first plan; and what these had kept.
    has_it : bool
        Whether this rank has what the others have; one that has come later gets it by `grow`.
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
        self._seats = averager.communicator.seats
        self._has_it = has_it
        self._grown, self._alike = False, ""
        self._steps = 0
        self._kept: dict[int, LostResiduals] = {}
        self._held: list[_HeldBucket] = []
        self._before: Callable[[], None] | None = None
        self._behind: Callable[[], None] | None = None
        """What goes back to what this rank has kept before this step, and behind it; None where that is not known."""
        self._mine = LostResiduals()
        self._failure: BackendError | None = None

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Begin to average a bucket; the last one of a step waits for all of them.

        Raises
        ------
        BackendError
            The step failed, and not because a rank was lost; or the others have left this one out.
        """
        self.check_has_it()
        try:
            if not self._held:
                self._failure = None
                if self._before is None:
                    self._before = self._marked()
                self._averager.communicator.begin_batch()
            held = _HeldBucket(bucket)
            self._held.append(held)
            if self._failure is None:
                try:
                    held.begun(self._start(held, async_op=not bucket.is_last()))
                except BackendError as error:
                    self._failure = error
            if bucket.is_last():
                with self._averager.recorder.waiting():
                    self._end(self._complete, self._again)
                for one in self._held:
                    one.averaged.set_result(one.buffer())
                self._held.clear()
                self._averager.communicator.end_batch()
                self._averager.end_step()
            return held.averaged
        except BaseException as error:
            self._under_way = [one.running for one in self._held if one.running is not None]
            self._held.clear()
            self.forget()
            self._give_up(wait=isinstance(error, Exception))
            raise

    def check_has_it(self) -> None:
        """Raise `UsageError` where this rank has not what the others have."""
        if not self._has_it:
            raise UsageError(
                "this rank has come later and has not what the others have; call state.grow first"
            )

    def forget(self) -> None:
        """What this rank keeps is not what it was behind the last step: that failed, or it comes from a checkpoint."""
        self._before = self._behind = None

    def settle(self) -> None:
        """After the last step: return when all ranks that are left have all steps; all of them must call it."""
        self._end(lambda: None, lambda: None)

    def grow(self, alike: str, give: Callable[[], bytes], take: Callable[[bytes], None]) -> tuple[int, ...]:
        """Between steps: let in who knocks, and send it what the others have; all ranks must call it.

        Parameters
        ----------
        alike : str
            What all ranks must have in common; one that comes with something else is left out again.
        give, take : callable
            What a rank has, and what one that comes does with that of another.

        Returns
        -------
        tuple of int
            The ranks that have come, as all are counted from now on.

        Raises
        ------
        UsageError
            This one has come, and has something else in common.
        BackendError
            All ranks that had it are gone, or another failure.
        """
        if self._numbers.arrivals is not None:
            raise UsageError(
                "ranks that come later know parameters by their order; give HookState parameters="
            )
        comm = self._averager.communicator
        self._grown, self._alike = not self._has_it, alike  # one that comes was let in by the others' call
        come: set[int] = set()

        def let_in() -> None:
            if not self._grown:
                comm.grow()
                self._grown = True

        def hand_on(giver: int, told: StepMessage) -> None:
            with share_failure(comm, "growing"):
                broadcast_state(comm, giver, has_it=self._has_it, give=give, take=take)
            if not self._has_it:
                self._steps, self._seats, self._has_it = told.steps, told.seats, True

        act: Callable[[], None] = let_in
        while True:
            told, _ = self._met(act, joining=True)
            if self._ahead(told) is not None:
                break
            if not any(one.grown for one in told.values()):
                act = let_in
                continue
            giver, strange = choose_sender({seat: (one.has_it, one.alike) for seat, one in told.items()})
            lacking = {seat for seat, one in told.items() if not one.has_it}
            if comm.seats[comm.rank] in strange:
                raise UsageError(
                    f"this rank has {alike}, and the others {told[giver].alike}; make model and state alike"
                )
            if strange:
                act = partial(comm.shrink, without=[comm.seats.index(seat) for seat in strange])
            elif lacking:
                come |= lacking
                act = partial(hand_on, giver, told[giver])
            else:
                break
        self._grown, self._alike = False, ""
        self._accept(told, come)
        return tuple(rank for rank, seat in enumerate(self._seats) if seat in come)

    def _complete(self) -> None:
        """Wait for all averages of this step."""
        for one in self._held:
            one.wait()  # raises the error of an earlier bucket first
        if self._failure is not None:
            raise self._failure
        self._averager.settle()
        self._behind = self._marked()

    def _again(self) -> None:
        """Exchange the buckets of this step anew."""
        self._failure = None
        assert self._before is not None, "marked when the step began"
        self._before()
        for one in self._held:
            one.take_back()
        for one in self._held:
            one.begun(self._start(one, async_op=False))

    def _end(self, complete: Callable[[], None], again: Callable[[], None]) -> None:
        """End a step together with those that are left, and tell of the others."""

        def repeated() -> None:
            again()
            complete()

        told, failed = self._met(complete)
        while failed and self._ahead(told) is None:
            told, failed = self._met(repeated)
        self._accept(told)

    def _ahead(self, told: Mapping[int, StepMessage]) -> StepMessage | None:
        """What one says that has ended the step in which this rank is: it was told that all have theirs."""
        ahead = (one for one in told.values() if self._has_it and one.steps > self._steps)
        return next(ahead, None)

    def _accept(self, told: Mapping[int, StepMessage], come: Collection[int] = ()) -> None:
        """A step is over; who is gone since one has ended it that is ahead is told a step later.

        Parameters
        ----------
        told : mapping of int to Word
            By the seats of those that were met last.
        come : collection of int
            Seats of which others have come.
        """
        ahead, before = self._ahead(told), self._seats
        self._seats = tuple(told) if ahead is None else ahead.seats
        self._steps, self._before = self._steps + 1, self._behind
        kept, lost = self._kept, LostResiduals()
        self._kept = {**kept, **{seat: one.unsent for seat, one in told.items()}}
        gone = tuple(seat for seat in before if seat not in self._seats or seat in come)
        for seat in gone:
            lost = lost.plus(kept.get(seat, LostResiduals()))
        if gone or before != self._seats:
            self._on_change(before, self._seats, gone, lost)

    def _met(
        self, act: Callable[[], object], *, joining: bool = False
    ) -> tuple[dict[int, StepMessage], bool]:
        """Do something together with the others and meet them, or those that are left, and whether some were lost.

        A rank that refuses a step stays; one that refuses while ranks are ``joining`` leaves with its own error.
        """
        try:
            act()
            return self._meet(), False
        except BackendError as error:
            if isinstance(error, RefusedError) and not joining:
                raise
            return self._go_on(error), True

    def _meet(self) -> dict[int, StepMessage]:
        """What each rank says of itself, by its seat."""
        comm = self._averager.communicator
        mine = StepMessage(self._steps, self._has_it, self._grown, self._alike, self._seats, self._mine)
        told = [StepMessage.read(text) for text in comm.gather_texts(json.dumps(asdict(mine)))]
        return dict(zip(comm.seats, told, strict=True))

    def _go_on(self, error: BackendError) -> dict[int, StepMessage]:
        """Agree on who is left, and meet them; raises the error where nobody is gone."""
        comm = self._averager.communicator
        for one in self._held:
            with suppress(Exception):
                one.wait()
        while True:
            seats = comm.seats
            comm.shrink()
            if comm.seats == seats:
                raise error
            try:
                return self._meet()
            except BackendError as later:  # another one has died meanwhile
                error = later

    def _marked(self) -> Callable[[], None]:
        """What goes back to what this rank keeps now, as often as it is called; the others hear how much that is."""
        if self._averager.settings.density is not None:
            back, lines = self.residuals.marked()
        else:
            back, lines = self._averager.marked()
        self._mine = LostResiduals.of(lines)
        return back


def check_recoverable(model: DistributedDataParallel) -> None:
    """Look whether DDP asks something of its process group that a lost rank would end, when its buckets are arranged.

    Raises
    ------
    UsageError
        It does, and the group does not go on.
    """
    group = model.process_group
    if group.size() == 1 or (isinstance(group, PlannedGroup) and group.goes_on):
        return
    newer = hasattr(model, "forward_sync_buffers")
    synchronised = model.forward_sync_buffers if newer else model.broadcast_buffers
    faults = [
        text
        for text, found in (
            (
                "broadcasts the model's buffers in every step; give it forward_sync_buffers=False "
                "(broadcast_buffers=False in torch before 2.13)",
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
            f"DDP {faults[0]}: over its process group, which does not go on without a rank; or use the process group "
            "topoplan with TOPOPLAN_ON_FAILURE=shrink"
        )
