"""Average one gradient after another over all ranks: one protocol for every synchronisation mode.

The torch hook and the plain loop share it: `start` for each gradient of a step, `end_step`, and after the last step
`finish`. In step (`BSP`) a gradient is exchanged dense or sparse; the other modes do not wait for all ranks:

- `SSP`, `ASP`: average of a step = (own gradient + gradients of others that arrived since the last step) / ranks. Over
  a whole run every gradient is used once by every rank, so the sums agree in the end; on the way replicas differ by
  the gradients that are still under way.
- `LocalSGD`: gradients stay local, and when it is `due` the parameters are averaged instead; with `Gossip` each rank
  mixes its own with those of one other.

Gradients are told apart by keys, whose residuals live in the communicator; every exchange is recorded for the report.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.sparse.exchange_choice import SparseExplanation
from collectives.tables.array_library import ArrayLibrary
from collectives.training.checkpoint_state import EMPTY_STATE, BucketPart, FilterState, describe_state
from collectives.training.exchange_settings import FILTERS, ExchangeSettings, LossScale
from collectives.training.gradient_filters import IntegerCodeExchange, SignificanceExchange
from collectives.training.low_rank import LowRankExchange
from collectives.training.mailbox import Mailbox
from collectives.training.modes import ASP, BSP, SSP, Gossip, LocalSGD, Mode
from collectives.training.report import Recorder
from topoplan.errors import UsageError


class Averager(ABC):
    """Averages the gradients of one step after another.

    Parameters
    ----------
    mode : Mode
    recorder : Recorder
    loss_scale : LossScale, optional
        What gradients are multiplied by; what is kept of them is in units of 1.

    Attributes
    ----------
    due : int
        How often the steps so far ask for parameters to be averaged.
    gap : int or None
        How many steps this rank was ahead of the slowest when it had ended one, at most; None where no clocks are kept.
    """

    def __init__(self, mode: Mode, recorder: Recorder, loss_scale: LossScale | None = None) -> None:
        self.mode = mode
        self.recorder = recorder
        self.due = 0
        self.loss_scale = loss_scale or LossScale()
        self._scale: float | None = None
        self._warned = False

    @property
    def scale(self) -> float:
        """The loss scale of this step, which is asked for once."""
        if self._scale is None:
            self._scale = self.loss_scale()
        return self._scale

    @abstractmethod
    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
    ) -> Handle[Any]:
        """Begin to average a gradient.

        Parameters
        ----------
        key : str
            The same for the same gradient in every step.
        gradients : array, or a list of one for each rank of this process
            Not changed, unless given as ``out`` too.
        op : str
            avg; or, in step, sum of gradients that were divided by the number of ranks before.
        out : as ``gradients``
            Where to put the averages; new arrays by default.
        parts : sequence of Part, optional
            The parameters whose gradients these are, one after another; by default it is one, called ``key``. What is
            kept of one that is left out stays as it is (not with ``low_rank``, which must have all).

        Returns
        -------
        Handle
            Of the averages.

        Raises
        ------
        BackendError
            Another rank has failed.
        UsageError
            The gradient cannot be averaged so.
        """

    def end_step(self) -> None:
        """All gradients of a step have been waited for."""
        self.settle()
        self._scale = None
        self.recorder.end_step()

    def give_up(self) -> None:
        """The step failed and its averages are not used: all that is kept is as before it.

        All exchanges of the step have ended. The next step has the same number.
        """
        self._scale = None

    def settle(self) -> None:
        """All gradients of a step are there: where one average is not finite, all is kept as before the step.

        Calling it again before the next step is fine.
        """
        return

    def _warn_of_step(self) -> None:
        """A step with an average that is not finite has changed nothing: once a word if no loss scale is known."""
        if self._warned or self.loss_scale.given:
            return
        self._warned = True
        warnings.warn(
            f"gradients of training step {self.recorder.step} are not finite on some rank: the averages show it on all "
            "ranks, and what is kept of gradients is as before the step, which is to be left out; if a loss scaler "
            "multiplies gradients, give loss_scale=scaler, so that what is kept follows its scale",
            stacklevel=3,
        )

    @property
    def gap(self) -> int | None:
        """See above."""
        return None

    @property
    def filters(self) -> bool:
        """Whether something travels in place of dense gradients."""
        return False

    def filter_state(self) -> dict[str, Any]:
        """What the filter of dense gradients keeps on this process's ranks, as copies: for a checkpoint.

        Returns
        -------
        dict
            ``filter``: the settings, empty without a filter; and what `FilterState.state` gives.
        """
        return dict(EMPTY_STATE)

    def restore_filter(self, state: Mapping[str, Any]) -> str:
        """Go on from what `filter_state` gave.

        Returns
        -------
        str
            What is lost, since it was kept by another filter than this run's; empty if nothing is.
        """
        return describe_state(state)

    def drop_unused(self) -> str:
        """Give up what the filter was restored with and has found no use for: what it was."""
        return ""

    def norm_kept(self) -> float | None:
        """Norm of what this process's ranks have kept of gradients; None where they keep nothing."""
        return None

    def common(self) -> dict[str, NDArray[Any]]:
        """What all ranks have alike besides parameters: a rank that comes later needs it."""
        return {}

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `common` gave on another rank."""
        return

    def mix(self, parameters: Sequence[Any]) -> None:
        """Where it is `due`: make parameters more alike, in place, as `average_parameters` takes them.

        Raises
        ------
        BackendError
            Another rank has failed.
        UsageError
            They are no floats.
        """
        return

    def finish(self) -> dict[str, NDArray[Any]]:
        """After the last step: wait for all ranks; what has come late of each key, divided by the number of ranks.

        In units of a loss scale of 1.

        Raises
        ------
        BackendError
            Another rank has failed, or does not finish within the timeout.
        """
        return {}

    def close(self) -> None:
        """Leave; the communicator stays, which is all that is open in most modes."""
        return


class InStepAverager(Averager):
    """Every step waits for all ranks (`BSP`): by the plan of a communicator, dense or sparse.

    Parameters
    ----------
    communicator : Communicator
    settings : ExchangeSettings
    recorder : Recorder
    loss_scale : LossScale, optional
    """

    def __init__(
        self,
        communicator: Communicator,
        settings: ExchangeSettings,
        recorder: Recorder,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(BSP(), recorder, loss_scale)
        self.communicator = communicator
        self._keys: set[str] = set()
        self.settings = settings
        self._low_rank = (
            None if settings.low_rank is None else LowRankExchange(communicator, settings.low_rank)
        )
        self._codes = None if settings.codes is None else IntegerCodeExchange(communicator, settings.codes)
        self._significance = (
            None
            if settings.significance is None
            else SignificanceExchange(communicator, settings.significance)
        )

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
        async_op: bool = True,
    ) -> Handle[Any]:
        """See `Averager.start`.

        Without ``async_op`` the exchange runs in this thread, which two others then need not wake: for who has nothing
        to do meanwhile. The handle is done, and what ended the exchange is raised here.
        """
        comm, how, recorder, step = self.communicator, self.settings, self.recorder, self.recorder.step
        started = recorder.now()
        nbytes = nbytes_of(comm, gradients)
        handle: Handle[Any]
        low_rank, codes = self._low_rank, self._codes
        elements = elements_of(comm, gradients)
        try:
            density = how.density_at(step)
            scale = self.scale if self.filters or how.density is not None else 1.0
        except UsageError as error:
            comm.refuse(str(error))
            raise
        if parts is None:
            parts = (BucketPart(key, 0, elements, (elements,)),)
        if low_rank is not None and (thin := low_rank.settings.thin(key, parts, step)):
            handle, part = low_rank.start(
                thin, gradients, parts=parts, scale=scale, op=op, out=out, async_op=async_op
            )
            how_told = f"rank {low_rank.settings.rank}"
            told_of: Mapping[str, Any] | None = {"density": part, "how": how_told, "bound": math.inf}
        elif codes is not None:
            handle = codes.start(key, gradients, step=step, op=op, out=out, async_op=async_op)
            part = codes.settings.nbytes(elements) / max(nbytes, 1)
            told_of = {"density": part, "how": f"{codes.settings.bits} bits", "bound": math.inf}
        elif self._significance is not None:
            handle, part = self._significance.start(
                key, gradients, parts=parts, scale=scale, op=op, out=out, async_op=async_op
            )
            above = f"above {self._significance.settings.threshold:g}"
            told_of = {"density": min(part, 1.0), "how": above, "bound": math.inf}
        elif how.density is None:
            told = async_op or comm.on_failure == "shrink"
            handle = Handle.around(comm.all_reduce(gradients, op=op, out=out, async_op=told))
            if (memory := self._memory) is not None:
                handle = handle.then(partial(self._looked_at, memory))
            plan = comm.plan_for("allreduce", nbytes)
            told_of = {"density": 1.0, "how": plan.schedule, "bound": plan.bound}
        else:
            # first, since it keeps the gradient where ranks cannot agree on how to exchange it
            self._keys.add(key)
            found = comm.sparse_all_reduce(
                gradients,
                density=density,
                op=op,
                key=key,
                momentum=how.momentum,
                exchange=how.exchange,
                wire=how.wire,
                loss_scale=scale,
                out=out,
                async_op=async_op or comm.on_failure == "shrink",
            )
            handle = Handle.around(found)
            told_of = None
            if not isinstance(found, Handle):
                chosen = comm.explain(gradients, density=density, exchange=how.exchange, wire=how.wire)
                told_of = _sparse_note(chosen, density)

        def over() -> None:
            if handle.exchange is not None:
                recorder.add(key, nbytes, started, step=step, **_sparse_note(handle.exchange, density))
            elif told_of is not None:  # else it failed before it was known how
                recorder.add(key, nbytes, started, step=step, **told_of)

        handle.when_done(over)
        if not async_op:
            handle.wait()
        return handle

    def end_step(self) -> None:
        """See `Averager.end_step`."""
        super().end_step()
        if (memory := self._memory) is not None:
            memory.end_step()

    def give_up(self) -> None:
        """See `Averager.give_up`."""
        super().give_up()
        if (memory := self._memory) is not None:
            memory.finite = False
            memory.settle()
        if keys := self._keys:
            self._keys = set()
            self.communicator.end_sparse_step(keys, lost=True)

    def _looked_at(self, memory: FilterState, averages: Any) -> Any:
        """Averages that travelled whole in a step in which others may be filtered."""
        library = self.communicator.arrays
        one = averages if self.communicator.one_rank else averages[0]
        memory.look_at(library.values(one), library.dtype(one))
        return averages

    def settle(self) -> None:
        """See `Averager.settle`."""
        memory, keys = self._memory, self._keys
        finite = memory is None or memory.settle()
        if keys:
            finite, self._keys = self.communicator.end_sparse_step(keys), set()
        if not finite:
            self._warn_of_step()

    @property
    def filters(self) -> bool:
        """See `Averager`."""
        return bool(self._filter)

    def filter_state(self) -> dict[str, Any]:
        """See `Averager.filter_state`."""
        kept = super().filter_state() if self._memory is None else self._memory.state()
        return {**kept, "filter": self._filter}

    def restore_filter(self, state: Mapping[str, Any]) -> str:
        """See `Averager.restore_filter`."""
        memory, fits = self._memory, state["filter"] == self._filter
        if memory is not None:
            memory.restore(state if fits else EMPTY_STATE)
        return describe_state(state) if memory is None or not fits else ""

    def marked(self) -> tuple[Callable[[], None], dict[str, list[NDArray[Any]]]]:
        """What takes back what steps change from now on in what the filter keeps; and its residuals."""
        return (lambda: None, {}) if self._memory is None else self._memory.marked()

    def drop_unused(self) -> str:
        """See `Averager.drop_unused`."""
        return "" if self._memory is None else describe_state(self._memory.drop_unused())

    def common(self) -> dict[str, NDArray[Any]]:
        """See `Averager.common`: the matrices with which low ranks go on."""
        return (
            {}
            if self._low_rank is None
            else {key: one for key, (one, *_) in self._low_rank.memory.arrays.items()}
        )

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        """See `Averager.restore_common`."""
        if self._low_rank is not None:
            self._low_rank.memory.arrays = {key: [one] for key, one in state.items()}

    def norm_kept(self) -> float | None:
        """See `Averager.norm_kept`."""
        if self.settings.density is not None:
            state = self.communicator.sparse_state()
            lines = [one["residual"] for kept in state.values() for one in kept]
        elif self._memory is not None:
            lines = [line for kept in self._memory.residuals.values() for line in kept]
        else:
            return None
        return math.sqrt(math.fsum(float(np.vdot(one, one)) for one in lines))

    @property
    def _filter(self) -> str:
        return ", ".join(f"{one}" for name in FILTERS if (one := getattr(self.settings, name)) is not None)

    @property
    def _memory(self) -> FilterState | None:
        """What the filter keeps, if there is one that keeps anything."""
        kept: LowRankExchange | SignificanceExchange | None = self._low_rank or self._significance
        return None if kept is None else kept.memory


class StaleAverager(Averager):
    """Uses what has arrived (`SSP`, `ASP`); one rank to a process.

    Parameters
    ----------
    mailbox : Mailbox
    library : ArrayLibrary
        Of the gradients; they travel through the host.
    mode : SSP or ASP
    recorder : Recorder
    loss_scale : LossScale, optional
        Of this rank: gradients travel in units of 1, so that ranks may differ in it. With one the gradients of a step
        are sent at its end, if all are finite, since the step is left out where one is not.

    Notes
    -----
    Gradients of 16 bits travel and are added up in float32. One that is not finite is not sent: only this rank sees it,
    and what has come of others is used in its next step.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        library: ArrayLibrary[Any],
        mode: SSP | ASP,
        recorder: Recorder,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(mode, recorder, loss_scale)
        self.mailbox = mailbox
        self._bound = mode.bound
        self._library = library
        self._begun = False
        self._finite = True
        self._own: dict[str, NDArray[Any]] = {}
        self._taken: dict[str, NDArray[Any]] = {}
        self._late: dict[str, NDArray[Any]] = {}

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
    ) -> Handle[Any]:
        """Send a gradient, and average it with what has come; the first of a step waits if this rank is too far ahead.

        See `Averager.start`; also where a rank stands still while this one waits for it, a `BackendError`.
        """
        library, recorder = self._library, self.recorder
        kind = library.dtype(gradients)
        if "float" not in kind:
            raise UsageError(f"gradients of {kind} cannot be averaged with stale ones; give floats")
        if not self._begun:
            with recorder.waiting():
                self.mailbox.wait_to_begin(self._bound)
            self._begun = True
        started = recorder.now()
        given = library.values(gradients)
        own = given.astype(np.result_type(given.dtype, np.float32), copy=False)
        scale, finite = self.scale, bool(np.isfinite(own).all())
        if scale != 1:
            own = own * own.dtype.type(1 / scale)
        if self.loss_scale.given:
            self._own[key] = own.copy() if own is given else own
        elif finite:
            self.mailbox.post(key, own)
        arrived = self._arrived(key)
        with np.errstate(over="ignore", invalid="ignore"):
            total = own if arrived is None else own + arrived
            average = total / self.mailbox.size * scale
            average = average.astype(given.dtype, copy=False)
        self._finite = self._finite and finite and bool(np.isfinite(average).all())
        result = library.empty(library.shape(gradients), gradients) if out is None else out
        library.put(result, average)
        how = "asynchronous" if self._bound is None else f"stale by {self._bound}"
        recorder.add(key, given.nbytes, started, density=1.0, how=how, bound=math.inf)
        return Handle.of(result)

    def _arrived(self, key: str) -> NDArray[Any] | None:
        """What has come of a gradient and was not used; noted, for a step that is left out."""
        arrived, late = self.mailbox.take(key), self._late.pop(key, None)
        if late is not None:
            arrived = late if arrived is None else arrived + late
        if arrived is not None:
            self._taken[key] = arrived
        return arrived

    def settle(self) -> None:
        """See `Averager.settle`: what has come is then used in the next step, and nothing of this one is sent."""
        if self._finite:
            for key, own in self._own.items():
                self.mailbox.post(key, own)
        else:
            self._late.update(self._taken)
            self._warn_of_step()
        self._own, self._taken, self._finite = {}, {}, True

    def give_up(self) -> None:
        """See `Averager.give_up`: what has come is used in the next step. What was sent without a scale stays sent."""
        super().give_up()
        self._late.update(self._taken)
        self._own, self._taken, self._finite = {}, {}, True

    def end_step(self) -> None:
        """This rank has used the averages of a step."""
        self.settle()
        self.mailbox.tick()
        self._begun = False
        super().end_step()

    @property
    def gap(self) -> int | None:
        """See `Averager`."""
        return self.mailbox.farthest + 1

    def finish(self) -> dict[str, NDArray[Any]]:
        """See `Averager.finish`."""
        left = self.mailbox.drain()
        for key, late in self._late.items():
            left[key] = left[key] + late if key in left else late
        self._late = {}
        return {key: total / self.mailbox.size for key, total in sorted(left.items())}

    def close(self) -> None:
        """See `Averager.close`."""
        self.mailbox.close()


class LocalAverager(Averager):
    """Gradients stay where they are, and all ranks average parameters (`LocalSGD`).

    Parameters
    ----------
    communicator : Communicator
    mode : LocalSGD or Gossip
    recorder : Recorder
    """

    def __init__(
        self,
        communicator: Communicator,
        mode: LocalSGD | Gossip,
        recorder: Recorder,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(mode, recorder, loss_scale)
        self._communicator = communicator
        self._averages_after = mode.averages_after

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
    ) -> Handle[Any]:
        """The rank's own gradient: nothing is sent. See `Averager.start`."""
        comm = self._communicator
        given = [gradients] if comm.one_rank else list(gradients)
        if out is None:
            results = [comm.arrays.empty(comm.arrays.shape(one), one) for one in given]
        else:
            results = [out] if comm.one_rank else list(out)
        for result, one in zip(results, given, strict=True):
            if not comm.arrays.same(result, one):
                comm.arrays.copy(result, one)
        return Handle.of(results[0] if comm.one_rank else results)

    def end_step(self) -> None:
        """See `Averager.end_step`."""
        self.due += self._averages_after(self.recorder.step)
        super().end_step()

    def mix(self, parameters: Sequence[Any]) -> None:
        """See `Averager.mix`."""
        average_parameters(self._communicator, self.recorder, parameters)


class GossipAverager(LocalAverager):
    """Gradients stay where they are, and each rank mixes its parameters with those of one other (`Gossip`).

    Ranks of one process take turns in their order, each with what the other has by then, so that a run repeats bit for
    bit. With a process for each rank, whoever is pulled from goes on training, and what comes is as new as it happens
    to be. Parameters travel through the host.

    Parameters
    ----------
    communicator : Communicator
    mode : Gossip
    recorder : Recorder
    mailbox : Mailbox or None
        None where this process has all ranks.
    """

    def __init__(
        self, communicator: Communicator, mode: Gossip, recorder: Recorder, mailbox: Mailbox | None
    ) -> None:
        super().__init__(communicator, mode, recorder)
        self._gossip = mode
        self._mailbox = mailbox

    def mix(self, parameters: Sequence[Any]) -> None:
        """See `Averager.mix`."""
        comm, recorder, step = self._communicator, self.recorder, self.recorder.step - 1
        library, mailbox = comm.arrays, self._mailbox
        lists = [[one] if comm.one_rank else list(one) for one in parameters]
        ranks = [
            {f"{index}": one[place] for index, one in enumerate(lists)} for place in range(len(comm.ranks))
        ]
        for kind in sorted({library.dtype(one) for one in ranks[0].values()}):
            if "float" not in kind and "complex" not in kind:
                raise UsageError(
                    f"parameters of {kind} cannot be mixed with a neighbour's; give float or complex arrays"
                )
        with recorder.waiting():
            for rank, mine in zip(comm.ranks, ranks, strict=True):
                started, other = recorder.now(), self._gossip.neighbour(rank, step)
                if mailbox is not None:
                    mailbox.publish({key: library.values(one).copy() for key, one in mine.items()})
                if other == rank:
                    continue
                pulled = (
                    {key: library.values(one) for key, one in ranks[other].items()}
                    if mailbox is None
                    else mailbox.pull(other)
                )
                weight, nbytes = self._gossip.weights[rank, other], 0
                for key, array in mine.items():
                    own = library.values(array)
                    nbytes += own.nbytes
                    wide = own.astype(np.result_type(own.dtype, np.float32), copy=False)
                    mixed = wide - weight * (wide - pulled[key])
                    library.put(array, mixed.astype(own.dtype, copy=False))
                recorder.add(
                    "parameters", nbytes, started, density=1.0, how="gossip", bound=math.inf, step=step
                )

    def close(self) -> None:
        """See `Averager.close`."""
        if self._mailbox is not None:
            self._mailbox.close()


def make_averager(
    communicator: Communicator,
    settings: ExchangeSettings,
    recorder: Recorder,
    *,
    timeout: float,
    loss_scale: LossScale | None = None,
) -> Averager:
    """What averages gradients in the mode of the settings.

    Parameters
    ----------
    communicator : Communicator
    settings : ExchangeSettings
    recorder : Recorder
    timeout : float
        Seconds that a rank waits for another.
    loss_scale : LossScale, optional

    Raises
    ------
    UsageError
        The mode does not go with several ranks in a process.
    BackendError
        The ranks do not find each other.
    """
    mode = settings.mode
    if isinstance(mode, BSP):
        return InStepAverager(communicator, settings, recorder, loss_scale)
    if isinstance(mode, LocalSGD):
        return LocalAverager(communicator, mode, recorder, loss_scale)
    if isinstance(mode, Gossip):
        if mode.size != communicator.size:
            raise UsageError(f"{mode} is for {mode.size} ranks, and there are {communicator.size}")
        if not communicator.one_rank:
            return GossipAverager(communicator, mode, recorder, None)
    elif not communicator.one_rank:
        raise UsageError(
            f"{mode} needs a process for each rank; back end {communicator.backend} holds all in one"
        )
    gather, (rank,) = communicator.gather_texts, communicator.ranks
    mailbox = Mailbox(gather, rank=rank, size=communicator.size, timeout=timeout)
    if isinstance(mode, Gossip):
        return GossipAverager(communicator, mode, recorder, mailbox)
    return StaleAverager(mailbox, communicator.arrays, mode, recorder, loss_scale)


def average_parameters(communicator: Communicator, recorder: Recorder, parameters: Sequence[Any]) -> None:
    """Average parameters over all ranks, in place; all of them must call it.

    Parameters
    ----------
    communicator : Communicator
    recorder : Recorder
        Told of it as part of the step that has just ended.
    parameters : sequence of arrays, or of lists with one for each rank of this process
        Writeable.

    Raises
    ------
    BackendError
        Another rank failed.
    """
    with recorder.waiting():
        for number, one in enumerate(parameters):
            started, nbytes = recorder.now(), nbytes_of(communicator, one)
            listed = one if communicator.one_rank else list(one)
            handle = Handle.around(
                communicator.all_reduce(
                    listed, op="avg", out=listed, async_op=communicator.on_failure == "shrink"
                )
            )
            handle.wait()
            recorder.gave(
                f"parameter {number}", handle.among, repeated=handle.repeated, step=recorder.step - 1
            )
            plan = communicator.plan_for("allreduce", nbytes)
            recorder.add(
                f"parameter {number}",
                nbytes,
                started,
                density=1.0,
                how=plan.schedule,
                bound=plan.bound,
                step=recorder.step - 1,
            )


def _sparse_note(chosen: SparseExplanation, density: float) -> dict[str, Any]:
    """What a record says of a sparse exchange."""
    dense = chosen.exchange == "dense"
    bound = math.inf if chosen.plan is None else chosen.plan.bound
    return {"density": 1.0 if dense else density, "how": chosen.exchange, "bound": bound}


def nbytes_of(comm: Communicator, gradients: Any) -> int:
    """Bytes of one rank's gradient."""
    one = gradients if comm.one_rank else gradients[0]
    return elements_of(comm, gradients) * comm.arrays.itemsize(one)


def elements_of(comm: Communicator, gradients: Any) -> int:
    """Elements of one rank's gradient."""
    return math.prod(comm.arrays.shape(gradients if comm.one_rank else gradients[0]))
