"""The sparse allreduce: every rank gives the largest entries of what it has, and all add them up.

What a rank does not give stays in its residual (`ErrorFeedback`), one for each key, and so does what rounding on the
wire takes away. Chosen entries are gathered as pairs of index and value by the allgather plan of the allocation; every
rank adds all contributions in the order of the ranks, so the sums are bit-identical everywhere. Where the model finds
the allreduce of the whole gradient quicker, that runs instead and leaves no residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.execution import Execution
from collectives.request import request
from collectives.selection.error_feedback import ErrorFeedback
from collectives.sparse.explanation import Explanation, explain
from collectives.sparse.pairs import decode_entries, encode_entries
from collectives.sparse.sparse_request import SparseRequest
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Array = NDArray[Any]


class SparseCollective:
    """Sparse allreduces of one communicator, and the residuals of its ranks in this process.

    Parameters
    ----------
    execution : Execution
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._feedback: dict[str, list[ErrorFeedback]] = {}

    def explain(
        self, asked: SparseRequest, *, density: float, exchange: str, wire: WireFormat | None
    ) -> Explanation:
        """What would be exchanged for a gradient, and why."""
        return explain(
            size=asked.size,
            dtype=asked.dtype,
            itemsize=np.dtype(asked.dtype).itemsize,
            density=density,
            ranks=self._execution.backend.size,
            exchange=exchange,
            wire=wire,
            model=self._execution.model_seconds,
        )

    def prepare(self, asked: SparseRequest, *, key: str, momentum: float) -> list[ErrorFeedback]:
        """The residuals of a key, made when it is first used.

        Raises
        ------
        UsageError
            It was used for gradients of another size or dtype, or with another momentum.
        """
        if key not in self._feedback:
            self._feedback[key] = [
                ErrorFeedback(asked.size, asked.dtype, momentum=momentum) for _ in asked.inputs
            ]
        kept = self._feedback[key]
        had = (kept[0].residual.size, kept[0].residual.dtype.name, kept[0].momentum)
        if had != (asked.size, asked.dtype, momentum):
            raise UsageError(
                f"key {key!r} holds a residual of {had[0]} {had[1]} elements with momentum {had[2]:g}, and now come "
                f"{asked.size} {asked.dtype} elements with {momentum:g}; give every gradient a key of its own"
            )
        return kept

    def run(
        self,
        asked: SparseRequest,
        feedback: list[ErrorFeedback],
        chosen: Explanation,
        wire: WireFormat | None,
    ) -> Any:
        """Run to the end; the result, or a list with one for each rank of this process."""
        library = self._execution.backend.arrays
        gradients = [library.values(one) for one in asked.inputs]
        if len(gradients) > 1:  # one rank would notice its own before anything has happened
            _refuse_nan(gradients)
        about = f"sparse {asked.op} of {asked.size} {asked.dtype}, {chosen.exchange}"
        if wire is not None:
            about += f", {wire.values} {wire.indices}"
        if chosen.exchange == "dense":
            totals = self._add_up(asked, feedback, gradients, about)
        else:
            totals = self._gather(asked, feedback, gradients, chosen.entries, wire, about)
        results = [self._finished(asked, place, total) for place, total in enumerate(totals)]
        return results[0] if self._execution.backend.one_rank else results

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """The residuals of this process's ranks, by key."""
        return {key: [one.state() for one in kept] for key, kept in sorted(self._feedback.items())}

    def restore(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Go on from a state of as many ranks.

        Raises
        ------
        UsageError
            It is of another number of ranks; nothing has changed.
        """
        ranks = len(self._execution.backend.ranks)
        restored: dict[str, list[ErrorFeedback]] = {}
        for key, listed in state.items():
            if len(listed) != ranks:
                raise UsageError(
                    f"the state of {len(listed)} ranks does not fit a process with {ranks}; "
                    "restore it where it was saved"
                )
            restored[key] = []
            for one in listed:
                residual = one["residual"]
                feedback = ErrorFeedback(residual.size, residual.dtype.name, momentum=one["momentum"])
                feedback.restore(one)
                restored[key].append(feedback)
        self._feedback = restored

    def _gather(
        self,
        asked: SparseRequest,
        feedback: list[ErrorFeedback],
        gradients: list[Array],
        entries: int,
        wire: WireFormat | None,
        about: str,
    ) -> list[Array]:
        sent: list[tuple[Array, Array]] = []
        messages = []
        try:
            for rank, kept, gradient in zip(self._execution.backend.ranks, feedback, gradients, strict=True):
                indices, values = kept.feed(gradient, entries)
                sent.append((indices, values))
                message = encode_entries(
                    indices, values, size=asked.size, wire=wire, rank=rank, step=kept.step
                )
                messages.append(message)
                if wire is not None and not wire.lossless_for(asked.dtype):
                    arriving = self._decode(asked, message, wire)[1]
                    kept.residual[indices] = values - arriving
                    sent[-1] = (indices, arriving)
            gathered = self._exchange("allgather", messages, None, about)
        except BaseException:
            for kept, (indices, values) in zip(feedback, sent, strict=False):
                kept.residual[indices] += values
            raise
        return [self._sum(asked, message, wire) for message in gathered]

    def _sum(self, asked: SparseRequest, gathered: Array, wire: WireFormat | None) -> Array:
        """The contributions of all ranks, added up in their order."""
        total = np.zeros(asked.size, asked.dtype)
        for message in np.split(gathered, self._execution.backend.size):
            indices, values = self._decode(asked, message, wire)
            total[indices] += values
        return total

    def _decode(self, asked: SparseRequest, message: Array, wire: WireFormat | None) -> tuple[Array, Array]:
        return decode_entries(message, size=asked.size, dtype=asked.dtype, wire=wire)

    def _add_up(
        self, asked: SparseRequest, feedback: list[ErrorFeedback], gradients: list[Array], about: str
    ) -> list[Array]:
        sent: list[Array] = []
        try:
            for kept, gradient in zip(feedback, gradients, strict=True):
                sent.append(kept.feed(gradient, asked.size)[1])
            return self._exchange("allreduce", sent, "sum", about)
        except BaseException:
            for kept, values in zip(feedback, sent, strict=False):
                kept.residual += values
            raise

    def _exchange(self, collective: str, arrays: list[Array], op: str | None, about: str) -> list[Array]:
        """A dense collective on arrays of our own; all ranks must mean the same gradient."""
        backend = self._execution.backend
        library = backend.arrays
        given = [library.of(array) for array in arrays]
        checked = request(collective, backend, given[0] if backend.one_rank else given, out=None, op=op)
        results = self._execution.run(replace(checked, about=about))
        return [library.values(one) for one in ([results] if backend.one_rank else results)]

    def _finished(self, asked: SparseRequest, place: int, total: Array) -> Any:
        library = self._execution.backend.arrays
        if asked.op == "avg":
            total /= self._execution.backend.size
        given = asked.inputs[place]
        result = library.of(total.astype(library.dtype(given), copy=False).reshape(asked.shape))
        output = asked.outputs[place]
        if output is None:
            return result
        library.copy(output, result)
        return output


def _refuse_nan(gradients: list[Array]) -> None:
    for rank, gradient in enumerate(gradients):
        places = np.flatnonzero(np.isnan(gradient))
        if len(places):
            raise UsageError(
                f"element {int(places[0])} of the gradient is NaN, on rank {rank}; leave this step out, or repair it"
            )
