"""Run the sparse allreduce: every rank sends the largest entries of its gradient, and all ranks sum them.

The other entries stay in the rank's residual (`ErrorFeedback`), one for each key, and so does the rounding error of
the encoding. The model selects the exchange of the entries, or of the whole gradient
(`collectives.sparse.exchange_choice`). Values are added in the same order on all ranks, so the sums are bit-identical
everywhere.

A residual is kept in the units of the loss scale of its last call, and multiplied when the scale changes. A value that
is not finite takes a place among a rank's entries, so that all ranks see it in the sum; on all of them the residual is
then the one before the call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from collectives.backends.execution import Execution
from collectives.backends.request import request
from collectives.sparse.entry_arrays import Entries, EntryArrays, EntryMessages, Line
from collectives.sparse.exchange_choice import ExchangeTimes, SparseExplanation, SparsePlans, SparseRequest
from collectives.sparse.exchanges import (
    DenseExchange,
    PairExchange,
    ServerExchange,
    TreeExchange,
    part_borders,
)
from collectives.sparse.hashed_owners import HashedExchange, OwnedMessages
from collectives.sparse.residuals import (
    Residuals,
    ResidualSnapshot,
    clipped,
    finite_residual,
    select_by_layers,
    select_entries,
)
from collectives.tables.numpy_arrays import LIMITS, ArrayLibrary
from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_TO_ALL
from topoplan.plans.shards import shard_bounds
from topoplan.units import check_type

LINES = ("residual", "velocity")  # arrays of a residual's state


class Exchange(Protocol[Line]):
    """Sums the selected entries of all ranks, or everything."""

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Return the sums for this process's ranks; gradients are lines in the dtype of the residuals."""


class SparseCollective:
    """Sparse allreduces of one communicator, and the residuals of its ranks in this process."""

    def __init__(self, execution: Execution[Any]) -> None:
        self._execution = execution
        self._plans = SparsePlans(execution)
        self._arrays: dict[int | None, EntryArrays[Any]] = {}
        self._residuals: dict[str, list[Residuals]] = {}
        self._before: dict[str, list[ResidualSnapshot]] = {}
        self._not_finite: set[str] = set()
        self._called: set[str] = set()
        """Keys with a call since the end of the last step; what `_before` holds of others is older."""
        self._chosen: dict[tuple[object, ...], SparseExplanation] = {}
        self._explained: dict[tuple[object, ...], SparseExplanation] = {}
        self._local_plans: SparsePlans | None = None

    def choose(self, asked: SparseRequest) -> SparseExplanation:
        """Return the exchange of a gradient; UsageError for an unknown or impossible one."""
        known = self.known(asked)
        if known is None:
            times = ExchangeTimes(self._plans, asked)
            known = self._chosen[asked.kind] = times.choose()
        return known

    def known(self, asked: SparseRequest) -> SparseExplanation | None:
        """Return an earlier result of `choose` for such a gradient; None without one."""
        return self._chosen.get(asked.kind)

    def explain(self, asked: SparseRequest) -> SparseExplanation:
        """Return the exchange of a gradient with the times of all exchanges; raises as `choose`."""
        if self._local_plans is None:
            one = self._execution.backend.one_rank
            self._local_plans = SparsePlans(self._execution, local=True) if one else self._plans
        if asked.kind not in self._explained:
            self._explained[asked.kind] = ExchangeTimes(self._local_plans, asked).explain()
        return self._explained[asked.kind]

    def prepare(self, asked: SparseRequest) -> list[Residuals]:
        """Return the residuals of a key, made at its first use; UsageError for another size, dtype or momentum."""
        key, momentum = asked.key, asked.momentum
        if key not in self._residuals:
            arrays = self._arrays_of(asked.inputs[0])
            self._residuals[key] = [
                Residuals(arrays.feedback(asked.size, asked.dtype, momentum=momentum), arrays, fresh=True)
                for _ in asked.inputs
            ]
        kept = self._residuals[key][0].whole
        had = (kept.residual.size, kept.residual.dtype.name, kept.momentum)
        if had != (asked.size, asked.dtype, momentum):
            raise UsageError(
                f"key {key!r} holds a residual of {had[0]} {had[1]} elements with momentum {had[2]:g}, got "
                f"{asked.size} {asked.dtype} elements with {momentum:g}; give every gradient its own key"
            )
        return self._residuals[key]

    def keep(self, asked: SparseRequest, residuals: list[Residuals]) -> None:
        """Add a gradient of which nothing was sent to the residuals, for the next call, if it is finite."""
        arrays = self._arrays_of(asked.inputs[0])
        with arrays.here():
            lines = [arrays.values(one) for one in self._lines(asked, arrays)]
            if not all(map(arrays.bounded, lines)):
                return
            for one in residuals:
                one.follow(arrays)
                one.rescale(asked.loss_scale)
            self._begin(asked.key, residuals)
            for one, line in zip(residuals, lines, strict=True):
                one.changed()
                one.whole.feed(line, 0)

    def kept(self, asked: SparseRequest) -> list[ResidualSnapshot] | None:
        """Return snapshots of the residuals of a request's key, for `go_back`; None if it has none yet."""
        residuals = self._residuals.get(asked.key)
        return None if residuals is None else [one.saved() for one in residuals]

    def go_back(self, asked: SparseRequest, before: list[ResidualSnapshot] | None) -> None:
        """Restore snapshots of `kept`, also after another collective for fewer ranks."""
        if before is None:
            self._residuals.pop(asked.key, None)
        else:
            for one, saved in zip(self._residuals[asked.key], before, strict=True):
                one.restore(saved)

    def run(self, asked: SparseRequest, residuals: list[Residuals], chosen: SparseExplanation) -> Any:
        """Run a request; return the result, or a list with one for each rank of this process."""
        arrays = self._arrays_of(asked.inputs[0])
        with arrays.here(), np.errstate(all="ignore"):
            for one in residuals:
                one.follow(arrays)
            return self._run(asked, arrays, residuals, chosen)

    def _run(
        self,
        asked: SparseRequest,
        arrays: EntryArrays[Any],
        residuals: list[Residuals],
        chosen: SparseExplanation,
    ) -> Any:
        backend = self._execution.backend
        lines = self._lines(asked, arrays)
        gradients = dict(zip(backend.ranks, lines, strict=True))
        exchange = self._exchange(asked, arrays, chosen.exchange)
        kept = dict(zip(backend.ranks, residuals, strict=True))
        for one in residuals:
            one.rescale(asked.loss_scale)
        before = self._begin(asked.key, residuals)
        try:
            totals = exchange.run(kept, gradients)
        except BaseException:
            for one, saved in zip(residuals, before, strict=True):
                if not arrays.bounded(one.whole.residual):
                    one.restore(saved)
            raise
        for one, saved in zip(residuals, before, strict=True):
            one.whole.step = saved.step + 1
        results = [self._finished(asked, arrays, place, total) for place, total in enumerate(totals)]
        limit = LIMITS.get(backend.arrays.dtype(asked.inputs[0]), math.inf)
        if not arrays.bounded(arrays.values(totals[0]), limit):
            for one, saved in zip(residuals, before, strict=True):
                one.restore(saved)
            self._not_finite.add(asked.key)
        return results[0] if backend.one_rank else results

    def _lines(self, asked: SparseRequest, arrays: EntryArrays[Any]) -> list[Any]:
        """Return the gradients in the dtype of the residuals, clipped (Deep Gradient Compression, section 3.2)."""
        lines = [arrays.widened(one, asked.dtype) for one in asked.inputs]
        if asked.clip is None:
            return lines
        limit = asked.clip * asked.loss_scale / math.sqrt(self._execution.backend.size)
        found = []
        for line in lines:
            values = arrays.values(line)
            limited = clipped(values, limit)
            found.append(line if limited is values else arrays.line(limited))
        return found

    def _begin(self, key: str, residuals: Sequence[Residuals]) -> list[ResidualSnapshot]:
        earlier: Sequence[ResidualSnapshot | None] = self._before.get(key) or [None] * len(residuals)
        before = [one.saved(into) for one, into in zip(residuals, earlier, strict=True)]
        self._before[key] = before
        self._called.add(key)
        self._not_finite.discard(key)
        return before

    def end_step(self, keys: Collection[str], *, lost: bool = False) -> bool:
        """Undo the last call of some keys if a sum of one of them is not finite, or the step is lost.

        Returns whether the step counts; the same on all ranks, which have the same sums.
        """
        called = self._called.intersection(keys)
        self._called -= called
        if not lost and self._not_finite.isdisjoint(keys):
            return True
        self._not_finite.difference_update(keys)
        for key in self._before.keys() & self._residuals.keys() & called:
            for one, saved in zip(self._residuals[key], self._before[key], strict=True):
                one.restore(saved)
        return False

    def follow(self, other: SparseCollective) -> None:
        """Take over the state of the current step from another object for the same ranks."""
        self._before, self._not_finite, self._called = other._before, other._not_finite, other._called

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """Return the residuals of this process's ranks, by key, in numpy arrays."""
        return {key: [_state(one) for one in kept] for key, kept in sorted(self._residuals.items())}

    def restore(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Restore a state of as many ranks; values that are not finite become 0, with a warning.

        Raises `UsageError`, without a change, for another number of ranks.
        """
        check_type("state", state, Mapping, remedy="give what sparse_state returned")
        for listed in state.values():
            for one in listed if isinstance(listed, list) else [listed]:
                check_type("state of a rank", one, Mapping, remedy="give what sparse_state returned")
        arrays = self._arrays_of(self._execution.backend.arrays.of(np.empty(0)))
        found = {
            key: [
                {**one, **{name: finite_residual(one[name]) for name in LINES if one[name] is not None}}
                for one in listed
            ]
            for key, listed in state.items()
        }
        self._residuals = {key: self._made(arrays, listed) for key, listed in found.items()}
        self._before, self._not_finite, self._called = {}, set(), set()

    def take(self, keys: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Remove and return the residuals of some keys: as `state`, but as lines where they are."""
        taken = {key: self._residuals.pop(key) for key in sorted(keys) if key in self._residuals}
        for key in keys:
            self._before.pop(key, None)
            self._not_finite.discard(key)
            self._called.discard(key)
        return {key: [_lines(one) for one in kept] for key, kept in taken.items()}

    def put(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Add residuals of `take` to those of other keys; raises as `restore`."""
        made = {}
        for key, listed in state.items():
            arrays = self._arrays_of(listed[0]["residual"])
            with arrays.here():
                values = [
                    {**one, **{name: arrays.values(one[name]) for name in LINES if one[name] is not None}}
                    for one in listed
                ]
                made[key] = self._made(arrays, values)
        self._residuals.update(made)

    def _arrays_of(self, array: Any) -> EntryArrays[Any]:
        library = self._execution.backend.arrays
        gpu = library.gpu(array)
        if gpu not in self._arrays:
            self._arrays[gpu] = entry_arrays(library, gpu)
        return self._arrays[gpu]

    def _made(self, arrays: EntryArrays[Any], listed: Sequence[Mapping[str, Any]]) -> list[Residuals]:
        ranks = len(self._execution.backend.ranks)
        if len(listed) != ranks:
            raise UsageError(
                f"the state of {len(listed)} ranks does not fit a process with {ranks}; "
                "restore it where it was saved"
            )
        made = []
        for one in listed:
            residual = one["residual"]
            feedback = arrays.feedback(residual.size, residual.dtype.name, momentum=one["momentum"])
            with arrays.here():
                feedback.restore(one)
            made.append(Residuals(feedback, arrays, fresh=False))
        return made

    def _exchange(self, asked: SparseRequest, arrays: EntryArrays[Any], exchange: str) -> Exchange[Any]:
        backend = self._execution.backend
        library, about = backend.arrays, asked.about(exchange)
        messages = partial(EntryMessages, arrays, dtype=asked.dtype, density=asked.density, wire=asked.wire)

        def select(residuals: Residuals, values: Any) -> Entries:
            if asked.layers is not None:
                return select_by_layers(residuals, values, asked.layers, asked.counts, arrays)
            return select_entries(residuals.whole, values, asked.counts[0], arrays)

        if exchange == "dense":
            return DenseExchange(
                lambda lines: self._collective("allreduce", lines, "sum", about), library, arrays
            )
        if exchange == "pairs":
            return PairExchange(
                lambda sent: self._moved("allgather", sent, arrays, about),
                backend.size,
                library,
                arrays,
                messages((0, asked.size), entries=(sum(asked.counts),)),
                select,
                self._targets(asked, arrays),
            )
        if exchange == "hashed":
            return HashedExchange(
                lambda sent: self._moved("allgather", sent, arrays, about),
                lambda sent: self._moved(ALL_TO_ALL, sent, arrays, about),
                backend.size,
                library,
                arrays,
                OwnedMessages(asked.size, asked.dtype, asked.wire),
                select,
                self._targets(asked, arrays),
            )
        runner = self._plans.runner(exchange, asked.entry_share)
        borders = shard_bounds((shard.share for shard in runner.plan.shards), asked.size)
        if exchange == "servers":
            parts = messages(part_borders(runner.plan, borders))
            return ServerExchange(runner, library, arrays, borders, parts, about)
        return TreeExchange(runner, library, arrays, messages(borders), about)

    def _targets(self, asked: SparseRequest, arrays: EntryArrays[Any]) -> dict[int, Any]:
        """Return the callers' arrays as lines by rank, if they are on the host and of the dtype of the sums."""
        backend, placed = (
            self._execution.backend,
            zip(self._execution.backend.ranks, asked.outputs, strict=True),
        )
        return {
            rank: arrays.widened(one, asked.dtype)
            for rank, one in placed
            if asked.on_host and one is not None and backend.arrays.dtype(one) == asked.dtype
        }

    def _moved(self, collective: str, messages: list[Any], arrays: EntryArrays[Any], about: str) -> list[Any]:
        """Run an allgather or all-to-all of messages of one length."""
        lines = [arrays.line(message) for message in messages]
        return [arrays.values(line) for line in self._collective(collective, lines, None, about)]

    def _collective(self, collective: str, lines: list[Any], op: str | None, about: str) -> list[Any]:
        """Run a dense collective on internal arrays; all ranks must pass the same gradient."""
        backend = self._execution.backend
        checked = request(collective, backend, lines[0] if backend.one_rank else lines, out=None, op=op)
        results = self._execution.run(replace(checked, about=about))
        return [results] if backend.one_rank else list(results)

    def _finished(self, asked: SparseRequest, arrays: EntryArrays[Any], place: int, total: Any) -> Any:
        """Return a result in its shape and dtype, in the caller's array if there is one."""
        backend = self._execution.backend
        library = backend.arrays
        if asked.op == "avg":
            library.divide(total, backend.size)
        given, output = asked.inputs[place], asked.outputs[place]
        result = library.shaped(total, asked.shape)
        if library.dtype(given) != asked.dtype:
            narrow = library.empty(asked.shape, given) if output is None else output
            arrays.rounded(narrow, result)
            return narrow
        if output is None:
            return result
        if not library.same(output, result):
            library.copy(output, result)
        return output


def _state(residuals: Residuals) -> dict[str, Any]:
    """Return the state in units of a loss scale of 1."""
    with residuals.arrays.here():
        state, scale = residuals.whole.state(), residuals.scale
    if scale != 1:
        for name in LINES:
            if state[name] is not None:
                state[name] *= 1 / scale
    return state


def _lines(residuals: Residuals) -> dict[str, Any]:
    """Return the state as lines of the back end's arrays, where it is, in units of a loss scale of 1."""
    whole, arrays = residuals.whole, residuals.arrays
    with arrays.here():
        residuals.rescale(1.0)
        return {
            "residual": arrays.line(whole.residual),
            "velocity": None if whole.velocity is None else arrays.line(whole.velocity),
            "momentum": whole.momentum,
            "step": whole.step,
        }


def entry_arrays(library: ArrayLibrary[Line], gpu: int | None) -> EntryArrays[Line]:
    """Return the `EntryArrays` of a back end's arrays; `gpu` as `ArrayLibrary.gpu` returns it.

    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> arrays = entry_arrays(NumpyArrays(), None)
    >>> total = arrays.zeroed(np.empty(4))
    >>> arrays.add(total, (np.array([1, 3]), np.array([0.5, 2.0])))
    >>> total.tolist(), arrays.nonzero(total)[0].tolist()
    ([0.0, 0.5, 0.0, 2.0], [1, 3])
    """
    if library.name == "CuPy":
        from collectives.sparse.gpu_entry_arrays import GpuEntryArrays

        return GpuEntryArrays(library)
    if gpu is not None:
        from collectives.sparse.torch_entry_arrays import torch_entry_arrays

        return torch_entry_arrays(library, gpu)
    from collectives.sparse.entry_arrays import HostEntryArrays

    return HostEntryArrays(library)
