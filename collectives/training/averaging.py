"""Average one gradient after another over all ranks: one protocol for every synchronisation mode.

The torch hook and the plain loop share it: `start` for each gradient of a step, `end_step`, and after the last step
`finish`. In step (`BSP`) a gradient is exchanged dense or sparse; the other modes do not wait for all ranks:

- `SSP`, `ASP`: average of a step = (own gradient + gradients of others that arrived since the last step) / ranks. Over
  a whole run every rank uses every gradient once, so the sums agree in the end; meanwhile replicas differ by the
  gradients in flight.
- `LocalSGD`: gradients stay local, and when it is `due` the parameters are averaged instead; with `DiLoCo` and
  `SparseLoCo` an outer optimizer moves them; with `Gossip` each rank mixes its own with those of one other.

Gradients are identified by keys, whose residuals live in the communicator; every exchange is recorded for the report.
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
from collectives.sparse.entry_arrays import message_bytes
from collectives.sparse.exchange_choice import AUTO_DENSITY, SELECTION_SECONDS, SparseExplanation
from collectives.tables.numpy_arrays import ArrayLibrary
from collectives.training.checkpoint_state import EMPTY_STATE, BucketPart, FilterState, describe_state
from collectives.training.exchange_settings import ExchangeSettings, LossScale
from collectives.training.gradient_estimates import GradientEstimates
from collectives.training.gradient_filters import FilterCall
from collectives.training.mailbox import Mailbox
from collectives.training.modes import ASP, BSP, SSP, DiLoCo, Gossip, LocalSGD, Mode, OuterMode
from collectives.training.outer_optimizers import OuterOptimizer
from collectives.training.report import LOGGER, Recorder, log_compilation
from topoplan.errors import UsageError


class Averager(ABC):
    """Averages the gradients of one step after another; state is in units of a loss scale of 1.

    `due` is how often the steps so far ask for parameters to be averaged.
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
        """The loss scale of this step, which is read once."""
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
        """Start to average a gradient, and return the handle of its average.

        `gradients`, an array or a list of one for each rank of this process, do not change unless they are `out`, where
        the averages go instead of into new arrays. `key` is the same in every step. `op` is "avg" or, in step, the
        "sum" of gradients that were divided before. `parts` are the parameters, one after another, by default one
        called `key`; state of a parameter that is left out does not change (`LowRank` must have all). Raises
        `UsageError` for a gradient that the mode cannot average.
        """

    def end_step(self) -> None:
        """End a step after all its gradients were waited for."""
        self.settle()
        self._scale = None
        self.recorder.end_step()

    def give_up(self) -> None:
        """Abandon a step whose exchanges have all ended: restore the state before it, and repeat its number."""
        self._scale = None

    def settle(self) -> None:
        """Restore the state before the step if an average is not finite; a second call does nothing."""
        return

    def _warn_of_step(self) -> None:
        """Warn once, if no loss scale is known, that a step with an average that is not finite changed no state."""
        if self._warned or self.loss_scale.given:
            return
        self._warned = True
        warnings.warn(
            f"gradients of training step {self.recorder.step} are not finite on some rank: all ranks see it in the "
            "averages, and residuals are as before the step, which must be skipped; if a loss scaler multiplies "
            "gradients, give loss_scale=scaler, so that residuals follow its scale",
            stacklevel=3,
        )

    @property
    def gap(self) -> int | None:
        """How many steps this rank was ahead of the slowest after its own, at most; None without clocks."""
        return None

    @property
    def filters(self) -> bool:
        """Whether state is kept by parameter, which `start` must know."""
        return False

    @property
    def keeps_residuals(self) -> bool:
        """Whether a filter has residuals by parameter, which wait in a step without a gradient."""
        return False

    def filter_state(self) -> dict[str, Any]:
        """Return copies of the filter's state on this process's ranks; ``filter`` names its settings."""
        return dict(EMPTY_STATE)

    def restore_filter(self, state: Mapping[str, Any]) -> str:
        """Restore what `filter_state` returned; return a text of what another filter kept, and is lost."""
        return describe_state(state)

    def drop_unused(self) -> str:
        """Drop restored state that has not been used, and return a text of it."""
        return ""

    @property
    def mix_meets(self) -> bool:
        """Whether `mix` now calls a collective, in which the other ranks wait for this one."""
        return False

    def norm_kept(self) -> float | None:
        """Return the norm of the residuals of this process's ranks; None without residuals."""
        return None

    def common(self) -> dict[str, NDArray[Any]]:
        """Return the state that all ranks share besides parameters, which joining ranks need."""
        return {}

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `common` returned on another rank."""
        return

    def mix(self, parameters: Sequence[Any]) -> None:
        """Average or mix parameters, in place, if `due`; arguments are those of `average_parameters`.

        Raises `BackendError` if another rank failed, and `UsageError` if the parameters are not floats.
        """
        return

    def finish(self) -> dict[str, NDArray[Any]]:
        """Wait for all ranks after the last step; return the late gradients by key, over the number of ranks.

        They are in units of a loss scale of 1. Raises `BackendError` if another rank failed, or does not finish within
        the timeout.
        """
        return {}

    def close(self) -> None:
        """Leave the job; the communicator stays open."""
        return


class InStepAverager(Averager):
    """Averages steps that wait for all ranks (`BSP`): by the plan of a communicator, dense or sparse."""

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
        self._told = False
        self.settings = settings
        self._filter = None if settings.filter is None else settings.filter.exchange(communicator)
        self._memory = None if self._filter is None else self._filter.memory
        self._filter_text = f"{settings.filter or ''}"
        self._finite = True
        self._estimates: GradientEstimates | None = None
        if settings.top_k is not None and settings.top_k.ef21 is not None:
            self._estimates = GradientEstimates(communicator, settings.top_k.ef21)
            self._memory = self._estimates.memory
            self._filter_text = GradientEstimates.settings_text(settings.top_k.ef21)

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
        async_op: bool = True,
        rounded_from: int | None = None,
        idle: frozenset[str] = frozenset(),
    ) -> Handle[Any]:
        """Start as `Averager.start`; without ``async_op`` the exchange runs in this thread, and raises its errors here.

        That spares the wakeup of two threads if this one has nothing else to do. `rounded_from` are the bytes of
        gradients that were rounded before, for the report.
        """
        comm, sparse, recorder, step = (
            self.communicator,
            self.settings.top_k,
            self.recorder,
            self.recorder.step,
        )
        started = recorder.now()
        nbytes = nbytes_of(comm, gradients)
        handle: Handle[Any]
        with comm._refusing():
            density = 1.0 if sparse is None else sparse.at(step, self.settings.names_of(parts))
            layers = None if sparse is None else sparse.layers(parts)
            scale = self.scale if self.filters or sparse is not None else 1.0

        def sparse_note(chosen: SparseExplanation) -> dict[str, Any]:
            bound = math.inf if chosen.plan is None else chosen.plan.bound
            if chosen.exchange == "dense":
                return _note(1.0, chosen.exchange, bound)
            size = elements_of(comm, gradients)
            if density != "auto":
                self._tell_of_dense(key, chosen, size)
            one = gradients if comm.one_rank else gradients[0]
            dtype = "float64" if comm.arrays.dtype(one) == "float64" else "float32"  # as entries travel
            wire = None if sparse is None else sparse.wire
            share = chosen.entries / max(size, 1) if isinstance(density, tuple) else density
            gave = message_bytes(chosen.entries, size=size, dtype=dtype, wire=wire)
            return {
                **_note(AUTO_DENSITY if share == "auto" else share, chosen.exchange, bound),
                "sent": gave / max(nbytes, 1),
            }

        filtered = None
        if parts is None:
            elements = elements_of(comm, gradients)
            parts = (BucketPart(key, 0, elements, (elements,)),)
        if self._filter is not None:
            with comm._refusing():  # the last collective of a filter is its last step
                filtered = self._filter.start(
                    FilterCall(key, gradients, parts, step, scale, op, out, async_op, idle)
                )
        note: Mapping[str, Any] | None
        if filtered is not None:
            handle, part, words = filtered
            note = _note(part, words)
        elif sparse is None:
            asynchronous = async_op or comm.on_failure == "shrink"
            handle = comm._in_order.around(comm.all_reduce(gradients, op=op, out=out, async_op=asynchronous))
            if (memory := self._memory) is not None:
                handle = handle.then(partial(self._check_finite, memory))
            plan = comm.plan_for("allreduce", nbytes)
            note = _note(1.0, plan.schedule, plan.bound)
            if rounded_from:
                note, nbytes = {**note, "sent": nbytes / rounded_from}, rounded_from
        else:
            # first, since it keeps the gradient if ranks cannot agree on its exchange
            self._keys.add(key)
            with comm._refusing():
                changes = None if self._estimates is None else self._estimates.change(gradients, parts, scale)
            found = comm.sparse_all_reduce(
                gradients if changes is None else changes.arrays,
                density=density,
                op=op,
                key=key,
                momentum=sparse.momentum,
                exchange=sparse.exchange,
                wire=sparse.wire,
                loss_scale=scale,
                layers=layers,
                clip=sparse.clip,
                out=out if changes is None else changes.arrays,
                async_op=async_op or comm.on_failure == "shrink",
            )
            handle = comm._in_order.around(found)
            if self._estimates is not None and changes is not None:
                handle = handle.then(partial(self._estimates.add, changes, out))
            note = None
            if not isinstance(found, Handle):
                chosen = comm._exchange_taken(
                    gradients if changes is None else changes.arrays,
                    density=density,
                    exchange=sparse.exchange,
                    wire=sparse.wire,
                    layers=layers,
                )
                note = sparse_note(chosen)

        def over() -> None:
            if handle.exchange is not None:
                recorder.add(key, nbytes, started, step=step, **sparse_note(handle.exchange))
            elif note is not None:  # else it failed before its exchange was chosen
                recorder.add(key, nbytes, started, step=step, **note)

        handle.when_done(over)
        if not async_op:
            handle.wait()
        return handle

    def _tell_of_dense(self, key: str, chosen: SparseExplanation, elements: int) -> None:
        """Log once on rank 0 that dense gradients are predicted to be faster, the selection on the host included."""
        took = chosen.seconds.get(chosen.exchange, 0.0) + SELECTION_SECONDS * elements
        dense = chosen.dense_seconds  # NaN if it is unknown
        if dense < took and not self._told:
            self._told = True
            if 0 in self.communicator.ranks and self.communicator.arrays.name != "CuPy":
                LOGGER.info(
                    f"{key}: dense gradients are predicted to take {dense * 1e3:.3g} ms, and the entries of TopK "
                    f"{took * 1e3:.3g} ms with their selection; TopK('auto') or no compression may be faster"
                )

    def end_step(self) -> None:
        super().end_step()
        log_compilation(self.recorder, self.communicator)
        if self._memory is not None:
            self._memory.end_step()

    def skips(self) -> None:
        """Note that an average that travelled beside `start` is not finite: the same on all ranks."""
        self._finite = False

    def give_up(self) -> None:
        super().give_up()
        self._finite = True
        if self._memory is not None:
            self._memory.finite = False
            self._memory.settle()
        keys, self._keys = self._keys, set()
        if keys:
            self.communicator._end_sparse_step(keys, lost=True)

    def _check_finite(self, memory: FilterState, averages: Any) -> Any:
        """Note whether averages are finite that travelled whole in a step in which others may be filtered."""
        library = self.communicator.arrays
        one = averages if self.communicator.one_rank else averages[0]
        memory.look_at(library.values(one), library.dtype(one))
        return averages

    def settle(self) -> None:
        memory, keys = self._memory, self._keys
        finite, self._finite = self._finite, True
        if memory is not None:
            memory.finite = memory.finite and finite
            finite = memory.settle()
        if keys:
            # estimates are not finite if what was added to them is not
            finite, self._keys = self.communicator._end_sparse_step(keys, lost=not finite), set()
        if not finite and (keys or memory is not None):
            self._warn_of_step()

    @property
    def filters(self) -> bool:
        return self._memory is not None or self._filter is not None

    @property
    def keeps_residuals(self) -> bool:
        return self._memory is not None

    def filter_state(self) -> dict[str, Any]:
        kept = super().filter_state() if self._memory is None else self._memory.state()
        return {**kept, "filter": self._filter_text}

    def restore_filter(self, state: Mapping[str, Any]) -> str:
        # checkpoints of earlier versions have the earlier name of the class
        text = state["filter"].replace("Significance(", "Threshold(")
        memory, fits = self._memory, text == self._filter_text
        if memory is not None:
            memory.restore(state if fits else EMPTY_STATE)
        return describe_state(state) if memory is None or not fits else ""

    def snapshot(self) -> tuple[Callable[[], None], dict[str, list[NDArray[Any]]]]:
        """Return a function that restores the present state of the filter, and its residuals."""
        return (lambda: None, {}) if self._memory is None else self._memory.snapshot()

    def drop_unused(self) -> str:
        return "" if self._memory is None else describe_state(self._memory.drop_unused())

    def common(self) -> dict[str, NDArray[Any]]:
        """Return the right factors of low ranks."""
        return {key: one for key, (one, *_) in self._shared_arrays.arrays.items()}

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._shared_arrays.arrays = {key: [one] for key, one in state.items()}

    def norm_kept(self) -> float | None:
        if self.settings.top_k is not None:
            state = self.communicator.sparse_state()
            lines = [one["residual"] for kept in state.values() for one in kept]
        elif self._memory is not None:
            lines = [line for kept in self._memory.residuals.values() for line in kept]
        else:
            return None
        return math.sqrt(math.fsum(float(np.vdot(one, one)) for one in lines))

    @property
    def _shared_arrays(self) -> FilterState:
        """The filter's state if all ranks have the same arrays in it, else an empty one."""
        shared = self._filter is not None and self._filter.arrays_shared
        return self._memory if shared and self._memory is not None else FilterState()


class StaleAverager(Averager):
    """Uses gradients that have arrived (`SSP`, `ASP`); one rank in each process.

    Gradients travel through the host, in units of a loss scale of 1, so that ranks may have different scales. With a
    scale the gradients of a step are sent at its end, if all are finite, since a step that is not is skipped. Gradients
    of 16 bits travel and are added up in float32. One that is not finite is not sent: only this rank sees it, and uses
    what has arrived in its next step.
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
        self._step_begun = False
        self._finite = True
        self._unsent: dict[str, NDArray[Any]] = {}
        self._used: dict[str, NDArray[Any]] = {}
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
        """Send a gradient, and average it with the arrived ones.

        The first of a step waits if this rank is too far ahead; raises `BackendError` if a rank stalls meanwhile.
        """
        library, recorder = self._library, self.recorder
        kind = library.dtype(gradients)
        if "float" not in kind:
            raise UsageError(f"gradients of {kind} cannot be averaged with stale ones; give floats")
        if not self._step_begun:
            with recorder.waiting():
                self.mailbox.wait_to_begin(self._bound)
            self._step_begun = True
        started = recorder.now()
        given = library.values(gradients)
        own = given.astype(np.result_type(given.dtype, np.float32), copy=False)
        scale, finite = self.scale, bool(np.isfinite(own).all())
        if scale != 1:
            own = own * own.dtype.type(1 / scale)
        if self.loss_scale.given:
            self._unsent[key] = own.copy() if own is given else own
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
        """Return the unused sum of a gradient that has arrived, and note it for the case of a skipped step."""
        arrived, late = self.mailbox.take(key), self._late.pop(key, None)
        if late is not None:
            arrived = late if arrived is None else arrived + late
        if arrived is not None:
            self._used[key] = arrived
        return arrived

    def settle(self) -> None:
        """Send the gradients of the step if all are finite; else keep the arrived ones for the next step."""
        if self._finite:
            for key, own in self._unsent.items():
                self.mailbox.post(key, own)
        else:
            self._late.update(self._used)
            self._warn_of_step()
        self._unsent, self._used, self._finite = {}, {}, True

    def give_up(self) -> None:
        """Keep the gradients that arrived for the next step. Those sent without a scale stay sent."""
        super().give_up()
        self._late.update(self._used)
        self._unsent, self._used, self._finite = {}, {}, True

    def end_step(self) -> None:
        self.settle()
        self.mailbox.tick()
        self._step_begun = False
        super().end_step()

    @property
    def gap(self) -> int | None:
        return self.mailbox.farthest + 1

    def finish(self) -> dict[str, NDArray[Any]]:
        sums = self.mailbox.drain()
        for key, late in self._late.items():
            sums[key] = sums[key] + late if key in sums else late
        self._late = {}
        return {key: total / self.mailbox.size for key, total in sorted(sums.items())}

    def close(self) -> None:
        self.mailbox.close()


class LocalAverager(Averager):
    """Leaves gradients as they are, and averages parameters (`LocalSGD`)."""

    def __init__(
        self,
        communicator: Communicator,
        mode: LocalSGD | OuterMode | Gossip,
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
        """Return the rank's own gradient; nothing is sent."""
        comm = self._communicator
        given = [gradients] if comm.one_rank else list(gradients)
        if out is None:
            results = [comm.arrays.empty(comm.arrays.shape(one), one) for one in given]
        else:
            results = [out] if comm.one_rank else list(out)
        for result, one in zip(results, given, strict=True):
            if not comm.arrays.same(result, one):
                comm.arrays.follow_caller(one)
                with comm.arrays.ordered():
                    comm.arrays.copy(result, one)
        return Handle.of(results[0] if comm.one_rank else results)

    def end_step(self) -> None:
        self.due += self._averages_after(self.recorder.step)
        super().end_step()

    @property
    def mix_meets(self) -> bool:
        return True

    def mix(self, parameters: Sequence[Any]) -> None:
        average_parameters(self._communicator, self.recorder, parameters)


class OuterAverager(LocalAverager):
    """Leaves gradients as they are after the warm-up, and moves parameters by an outer optimizer (`OuterOptimizer`)."""

    def __init__(
        self,
        communicator: Communicator,
        mode: OuterMode,
        recorder: Recorder,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(communicator, mode, recorder, loss_scale)
        self._outer_mode = mode
        self.optimizer = OuterOptimizer(communicator, mode, recorder)

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        op: str = "avg",
        out: Any = None,
        parts: Sequence[BucketPart] | None = None,
    ) -> Handle[Any]:
        """Return the rank's own gradient; in the warm-up, start to average it."""
        comm, recorder = self._communicator, self.recorder
        if self._outer_mode.averages_after(recorder.step):
            return super().start(key, gradients, op=op, out=out, parts=parts)
        started, nbytes = recorder.now(), nbytes_of(comm, gradients)
        handle = comm._in_order.around(comm.all_reduce(gradients, op=op, out=out, async_op=True))
        plan = comm.plan_for("allreduce", nbytes)

        def record(average: Any) -> Any:
            recorder.add(key, nbytes, started, **_note(1.0, plan.schedule, plan.bound))
            return average

        return handle.then(record)

    def hold(self, named: Mapping[str, Sequence[Any]]) -> None:
        """Make parameters the start of the first round, until the warm-up is over."""
        self.optimizer.hold(named, again=not self.due)

    @property
    def mix_meets(self) -> bool:
        return self.optimizer.meets(self.due)

    def mix(self, parameters: Sequence[Any]) -> None:
        self.optimizer.advance(self.due, self.named(parameters))

    def align(self, count: int, named: Mapping[str, Sequence[Any]]) -> None:
        """Give all ranks the same parameters after so many steps of rounds: their average, the start of the next round.

        The outer optimizer does not move them; after a round of all parameters they are the same already.
        """
        if self.optimizer.align(count, named):
            one_rank = self._communicator.one_rank
            average_parameters(
                self._communicator,
                self.recorder,
                [one[0] if one_rank else list(one) for one in named.values()],
            )
            self.optimizer.hold(named, again=True)

    def outer_state(self) -> dict[str, Any]:
        """Return copies of the state of the outer optimizer, with the number of steps of rounds."""
        return {**self.optimizer.state(), "count": self.due}

    def restore_outer(
        self, states: Sequence[tuple[Sequence[int], Mapping[str, Any]]], saved: int | None = None
    ) -> str:
        """Restore what `outer_state` returned, with the ranks that it is of; return a text of what is lost.

        `saved` is the number of ranks of the job that saved them, None for the present one.
        """
        first = states[0][1]
        self.due = int(first["count"])
        used = "momentum" if isinstance(self._outer_mode, DiLoCo) else "residuals"
        lost = [f"outer {part}" for part in ("momentum", "residuals") if first[part] and part != used]
        if saved is None:
            self.optimizer.restore(first)
        elif missing := self.optimizer.restore_on_other_ranks(states, saved):
            lost.append(f"residuals of saved ranks {', '.join(map(str, missing))}")
        return ", ".join(lost)

    def named(self, parameters: Sequence[Any]) -> dict[str, Sequence[Any]]:
        """Return parameters by their place, each as a list of an array for each rank of this process."""
        one_rank = self._communicator.one_rank
        return {f"{place}": [one] if one_rank else list(one) for place, one in enumerate(parameters)}

    def common(self) -> dict[str, NDArray[Any]]:
        return self.optimizer.common()

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.optimizer.restore_common(state)

    def norm_kept(self) -> float | None:
        return self.optimizer.norm_kept()


class GossipAverager(LocalAverager):
    """Leaves gradients as they are, and mixes the parameters of a rank with those of one other (`Gossip`).

    Ranks of one process (`mailbox` is None) take turns in their order, each with the current parameters of the other,
    so that a run repeats bit for bit. With a process for each rank the other rank continues to train, and the age of
    its parameters is not fixed. Parameters travel through the host.
    """

    def __init__(
        self, communicator: Communicator, mode: Gossip, recorder: Recorder, mailbox: Mailbox | None
    ) -> None:
        super().__init__(communicator, mode, recorder)
        self._gossip = mode
        self._mailbox = mailbox

    @property
    def mix_meets(self) -> bool:
        return False

    def mix(self, parameters: Sequence[Any]) -> None:
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
    """Return the averager for the mode of the settings.

    Raises `UsageError` if the mode needs a process for each rank, and `BackendError` if the rendezvous fails.
    """
    mode = settings.mode
    if isinstance(mode, BSP):
        return InStepAverager(communicator, settings, recorder, loss_scale)
    if isinstance(mode, LocalSGD):
        return LocalAverager(communicator, mode, recorder, loss_scale)
    if isinstance(mode, OuterMode):
        return OuterAverager(communicator, mode, recorder, loss_scale)
    if isinstance(mode, Gossip):
        if mode.size != communicator.size:
            raise UsageError(f"{mode} must be for {communicator.size} ranks, got {mode.size}")
        if not communicator.one_rank:
            return GossipAverager(communicator, mode, recorder, None)
    elif not communicator.one_rank:
        raise UsageError(
            f"{mode} needs a process for each rank; back end {communicator.backend} has all in one"
        )
    gather, (rank,) = communicator._gather_texts, communicator.ranks
    mailbox = Mailbox(gather, rank=rank, size=communicator.size, timeout=timeout)
    if isinstance(mode, Gossip):
        return GossipAverager(communicator, mode, recorder, mailbox)
    return StaleAverager(mailbox, communicator.arrays, mode, recorder, loss_scale)


def average_parameters(communicator: Communicator, recorder: Recorder, parameters: Sequence[Any]) -> None:
    """Average parameters (or lists with one for each rank of this process) in place; all ranks must call it.

    The recorder counts it as part of the step that has just ended.
    """
    with recorder.waiting():
        for number, one in enumerate(parameters):
            started, nbytes = recorder.now(), nbytes_of(communicator, one)
            listed = one if communicator.one_rank else list(one)
            handle = communicator._in_order.around(
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


def _note(density: float, how: str, bound: float = math.inf) -> dict[str, Any]:
    return {"density": density, "how": how, "bound": bound}


def nbytes_of(comm: Communicator, gradients: Any) -> int:
    """Return the bytes of one rank's gradient."""
    one = gradients if comm.one_rank else gradients[0]
    return elements_of(comm, gradients) * comm.arrays.itemsize(one)


def elements_of(comm: Communicator, gradients: Any) -> int:
    """Return the elements of one rank's gradient."""
    return math.prod(comm.arrays.shape(gradients if comm.one_rank else gradients[0]))
