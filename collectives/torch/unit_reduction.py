"""Reduce one unit of FSDP2 in compressed form: its reduce-scatter, and the average of its shards over replicas.

Messages of chunks (`collectives.training.chunk_messages`) travel by one all-to-all of equal blocks; entries of replicas
by an allgather; codes and rounded values of replicas are reduced in parts, and the results gathered. A low rank has no
chunks: its thin matrices are added by the plan's allreduce, all ranks have the product, and each takes its own part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from collectives.torch.group_arguments import method_of, operation_of
from collectives.torch.process_group import ProcessGroupTopoplan
from collectives.torch.sharded_layout import ShardedParameter, ShardedUnit, UnitLayout
from collectives.training.checkpoint_state import BucketPart
from collectives.training.chunk_messages import ChunkMessages, EntryChunkMessages, chunk_messages
from collectives.training.exchange_settings import TopK
from collectives.training.gradient_filters import Cast, FilterCall
from collectives.training.low_rank import LowRank, LowRankExchange
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.torch.fsdp2 import ShardedCompression

Array = NDArray[Any]

SHARDS, REPLICAS = "shards", "replicas"
"""The reduction that a residual belongs to: the reduce-scatter of whole gradients, or the allreduce of shards."""


class UnitReduction:
    """The reductions of one unit: a custom reduce-scatter of torch, and its all-reduce hook."""

    def __init__(self, state: ShardedCompression, unit: ShardedUnit) -> None:
        self.unit = unit
        self._state = state
        self._messages: dict[str, ChunkMessages] = {}
        self._layouts: dict[str, UnitLayout] = {}
        self._results: ChunkMessages | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for torch's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce a unit's buffer into this rank's part; the result is there when it returns."""
        state, layout = self._state, self._layout(input_tensor)
        state.begin(id(self), input_tensor.device)
        if not output_tensor.numel():
            return
        name, factor = operation_of(SimpleNamespace(reduceOp=op))
        if name not in ("sum", "avg"):
            raise UsageError(f"FSDP2 must reduce by sums, got {op}; leave its reduction as it is")
        ranks = layout.ranks
        divisor = ranks if name == "avg" else 1 if factor is None else 1 / factor
        given = _on_host(input_tensor).reshape(ranks, layout.count)
        started = state.recorder.now()
        if SHARDS in state.low_rank:
            sums = self._by_low_rank(SHARDS, layout.whole(given), input_tensor, started)
            if sums is None:
                method_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")(
                    output_tensor, input_tensor, op=op, group=group
                )
                state.look_at(given, output_tensor)
                self._note(SHARDS, input_tensor.nbytes, 1.0, started, density=1.0, how="dense")
                return
            total = layout.rows(sums, given.dtype.name)[dist.get_rank(group)]
            total /= total.dtype.type(divisor)
            output_tensor.copy_(torch.from_numpy(total))
            state.look_at(given, output_tensor)
            return
        messages = self._prepared(SHARDS, layout, given.dtype.name)
        sent, total = self._reduced(messages, given, group, divisor, input_tensor.device, SHARDS)
        output_tensor.copy_(torch.from_numpy(total))
        state.look_at(given, output_tensor)
        self._record(SHARDS, messages, input_tensor.nbytes, sent, started)

    def all_reduce(self, output: torch.Tensor) -> None:
        """Average this rank's part over the replicas, in place."""
        state, ranks = self._state, self._state.size(REPLICAS)
        how, group = state.chunked.get(REPLICAS), state.groups[REPLICAS]
        if not state.compresses(SHARDS) or state.size(SHARDS) == 1:
            state.begin(id(self), output.device)
        if ranks == 1 or not output.numel():
            return
        started = state.recorder.now()
        if not state.compresses(REPLICAS):
            self._average(output, group, ranks, started)
            return
        given, layout = _on_host(output), self._layout(output, ranks=1)
        if how is None:
            parts = layout.local(given, state.rank(SHARDS))
            sums = self._by_low_rank(REPLICAS, parts, output, started)
            if sums is None:
                self._average(output, group, ranks, started)
                state.look_at(given, output)
                return
            average = layout.line(sums, given.dtype.name) / given.dtype.type(ranks)
            output.copy_(torch.from_numpy(average))
            state.look_at(given, output)
            return
        messages = self._prepared(REPLICAS, layout, given.dtype.name)
        if isinstance(how, TopK):
            mine = self._encode(messages, given[None])
            sent, average = mine.nbytes, messages.total(_gathered(mine[0], group, ranks, output.device))
            average /= ranks
        else:
            padded = np.zeros((ranks, messages.count), given.dtype)
            padded.reshape(-1)[: given.size] = given
            sent, part = self._reduced(messages, padded, group, ranks, output.device, REPLICAS)
            assert self._results is not None, "made with the messages"
            mine = self._encode(self._results, part[None])
            sent += mine.nbytes
            found = _gathered(mine[0], group, ranks, output.device)
            average = np.concatenate([self._results.total(one[None]) for one in found])[: given.size]
        output.copy_(torch.from_numpy(average))
        state.look_at(given, output)
        self._record(REPLICAS, messages, output.nbytes, sent, started)

    def _average(self, output: torch.Tensor, group: dist.ProcessGroup, ranks: int, started: float) -> None:
        """Average this rank's part over the replicas without compression."""
        narrow = output.element_size() <= 2  # a sum may be too large for float16
        if narrow:
            output.div_(ranks)
        dist.all_reduce(output, group=group)
        if not narrow:
            output.div_(ranks)
        self._note(REPLICAS, output.nbytes, 1.0, started, density=1.0, how="dense")

    def parameters(self) -> Sequence[ShardedParameter]:
        """Return all parameters, frozen ones included."""
        return self.unit.layout(every=True).parameters

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a residual of a checkpoint state has another shape than here."""
        rank = self._state.rank(SHARDS)
        for one in self.parameters():
            for which, shape in ((SHARDS, one.shape), (REPLICAS, one.local_shape(rank))):
                for value in state[which].get(one.name, {}).values():
                    if tuple(value.shape) != shape:
                        raise UsageError(
                            f"the residual of {one.name} must have the shape {shape}, got {tuple(value.shape)}; load "
                            "the state into the model that it was saved from"
                        )

    def saved(self) -> dict[str, dict[str, dict[str, Array]]]:
        """Return the residuals of each reduction by parameter, in units of a loss scale of 1."""
        return {which: self._saved(which) for which in self._messages}

    def forget(self) -> None:
        """Drop all residuals."""
        self._messages.clear()
        self._layouts.clear()

    def settle(self, *, undo: bool) -> None:
        """End a step; with `undo` its residuals are as before it."""
        for one in self._messages.values():
            if isinstance(one, EntryChunkMessages):
                one.settle(undo=undo)

    def _layout(self, buffer: torch.Tensor, *, ranks: int | None = None) -> UnitLayout:
        """Return the layout of a buffer of so many rows; `UsageError` if it is not that of the parameters."""
        layout = self.unit.layout()
        if (ranks or layout.ranks) * layout.count != buffer.numel():
            raise UsageError(
                f"{self.unit.name} must reduce all its {len(layout.parameters)} parameters that need gradients, got "
                f"{buffer.numel()} elements of {(ranks or layout.ranks) * layout.count}; call "
                "set_reduce_scatter_unused_params(True), and fully_shard for each module alone"
            )
        return layout

    def _prepared(self, which: str, layout: UnitLayout, dtype: str) -> ChunkMessages:
        """Return the messages of a reduction; if other parameters need gradients than before, residuals move along."""
        state = self._state
        known = self._messages.get(which)
        if known is not None and self._layouts[which] == layout and known.dtype == dtype:
            return known
        state.waiting[which].update(self._saved(which))
        how, key, ranks = state.chunked[which], f"{self.unit.name}, {which}", state.size(which)
        if which == SHARDS:
            chunks, count = layout.ranks, layout.count
        elif isinstance(how, TopK):
            chunks, count = 1, layout.count
        else:
            chunks, count = ranks, -(-layout.count // ranks)
            self._results = chunk_messages(how, f"{key}, results", 1, count, dtype)
        made = chunk_messages(how, key, chunks, count, dtype)
        if isinstance(made, EntryChunkMessages):
            held = {one.name: state.waiting[which].pop(one.name, {}) for one in layout.parameters}
            for kind, target in (
                ("residual", made.kept.whole.residual),
                ("velocity", made.kept.whole.velocity),
            ):
                found = {name: kept[kind] for name, kept in held.items() if kind in kept}
                if target is not None and found:
                    place = layout.rows if which == SHARDS else layout.line
                    target[...] = place(found, dtype).reshape(-1)
        self._messages[which], self._layouts[which] = made, layout
        return made

    def _saved(self, which: str) -> dict[str, dict[str, Array]]:
        made = self._messages.get(which)
        if not isinstance(made, EntryChunkMessages):
            return {}
        layout, whole = self._layouts[which], made.kept.whole
        found: dict[str, dict[str, Array]] = {one.name: {} for one in layout.parameters}
        for kind, line in (("residual", whole.residual), ("velocity", whole.velocity)):
            if line is None:
                continue
            unscaled = line / line.dtype.type(made.kept.scale)
            if which == SHARDS:
                parts = layout.whole(unscaled.reshape(layout.ranks, layout.count))
            else:
                parts = layout.local(unscaled, self._state.rank(SHARDS))
            for name, value in parts.items():
                found[name][kind] = value
        return found

    def _encode(self, messages: ChunkMessages, given: Array) -> NDArray[np.uint8]:
        state = self._state
        if isinstance(messages, EntryChunkMessages) and state.protects:
            messages.remember()
        return messages.encode(
            given, step=state.step, rank=dist.get_rank(), scale=state.scale, draw=state.passes
        )

    def _reduced(
        self,
        messages: ChunkMessages,
        given: Array,
        group: dist.ProcessGroup,
        divisor: float,
        device: torch.device,
        which: str,
    ) -> tuple[int, Array]:
        """Return the bytes that this rank gives, and the sum of its row over all ranks, divided."""
        rounded = isinstance(self._state.chunked[which], Cast)
        if rounded and divisor != 1:
            # before it is rounded: a sum may be too large for float16
            given = given / given.dtype.type(divisor)
        mine = torch.from_numpy(self._encode(messages, given)).to(device)
        arrived = torch.empty_like(mine)
        dist.all_to_all_single(arrived, mine, group=group)
        total = messages.total(arrived.cpu().numpy())
        if not rounded and divisor != 1:
            total /= total.dtype.type(divisor)
        return mine.nbytes, total

    def _by_low_rank(
        self, which: str, values: Mapping[str, Array], like: torch.Tensor, started: float
    ) -> dict[str, Array] | None:
        """Return the low-rank sums of some parameters over all ranks; None if all of them travel whole."""
        state, parts, start = self._state, [], 0
        if like.device.type != "cpu":
            raise UsageError(
                f"LowRank with FSDP2 needs gradients on the CPU, got {like.device}; give TopK or Cast"
            )
        for name, one in values.items():
            parts.append(BucketPart(name, start, start + one.size, one.shape))
            start += one.size
        line = torch.from_numpy(np.concatenate([one.reshape(-1) for one in values.values()]))
        call = FilterCall(
            f"{self.unit.name}, {which}",
            line,
            parts,
            state.step,
            state.scale,
            op="sum",
            out=None,
            async_op=False,
        )
        started_exchange = state.low_rank[which].start(call)
        if started_exchange is None:
            return None
        handle, share, how = started_exchange
        total: Array = handle.wait().numpy()
        sent = share * line.nbytes / like.nbytes
        self._note(which, like.nbytes, sent, started, density=1.0, how=how)
        return {one.name: total[one.start : one.stop].reshape(one.shape) for one in parts}

    def _record(self, which: str, messages: ChunkMessages, nbytes: int, sent: int, started: float) -> None:
        self._note(which, nbytes, sent / nbytes, started, density=messages.density, how=messages.how)

    def _note(
        self, which: str, nbytes: int, sent: float, started: float, *, density: float, how: str
    ) -> None:
        """Record an exchange; `sent` is what this rank gave, as a fraction of the bytes of the buffer."""
        recorder = self._state.recorder
        key = self.unit.name if which == SHARDS else f"{self.unit.name}, {which}"
        recorder.add(
            key, nbytes, started, density=density, how=how, bound=math.inf, sent=sent, step=recorder.step
        )


def low_rank_exchange(how: LowRank, group: dist.ProcessGroup) -> LowRankExchange:
    """Return the low-rank filter over the plan of a process group; `UsageError` if it has none."""
    planned = ProcessGroupTopoplan.of(group)
    communicator = None if planned is None else planned.communicator
    if communicator is None:
        reason = "it is another back end" if planned is None else planned.reason or "no collective has run"
        raise UsageError(
            f"LowRank needs a mesh over the process group topoplan with a plan, and {reason}; write "
            'init_process_group("topoplan")'
        )
    return how.exchange(communicator)


def _on_host(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor of floats, those of 16 bits as float32."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    found: Array = tensor.detach().to("cpu", wide).numpy()
    return found


def _gathered(
    message: NDArray[np.uint8], group: dist.ProcessGroup, ranks: int, device: torch.device
) -> NDArray[np.uint8]:
    """Return the messages of all ranks, (ranks, bytes)."""
    mine = torch.from_numpy(message).to(device)
    every = torch.empty(ranks * mine.numel(), dtype=torch.uint8, device=device)
    method_of(dist, "all_gather_single", "all_gather_into_tensor")(every, mine, group=group)
    found: NDArray[np.uint8] = every.cpu().numpy().reshape(ranks, -1)
    return found
