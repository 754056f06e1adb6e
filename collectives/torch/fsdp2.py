"""Compress what FSDP2 (`fully_shard`) reduces: the reduce-scatter of each unit, and the allreduce between replicas.

torch has two public places for it: ``FSDPModule.set_custom_reduce_scatter`` replaces the reduce-scatter of a unit, and
``set_all_reduce_hook`` is called with its result. A unit gives a buffer of (n, c) elements, row r for rank r
(`collectives.torch.sharded_layout`). Each rank encodes the rows (`collectives.training.chunk_messages`), one
all-to-all of equal blocks exchanges them, and the owner adds them in the order of the ranks. Between replicas, entries
are gathered; codes and rounded values are reduced in parts and then gathered. All messages travel over the process
groups of the model's mesh: by plan in the group "topoplan".

A step begins with the first reduction after a forward pass of the model, or with a unit that reduces again. With
``loss_scale`` the ranks agree at its end whether all its gradients were finite: one allreduce of a number.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.peers.agreement import gather_or_raise
from collectives.sparse.residuals import finite_residual
from collectives.torch.group_arguments import operation_of
from collectives.torch.plan_agreement import gather_by
from collectives.torch.sharded_layout import ShardedUnit, UnitLayout, sharded_units
from collectives.training.checkpoint_state import describe_state, warn_of_unused_state
from collectives.training.chunk_messages import ChunkMessages, EntryChunkMessages, chunk_messages
from collectives.training.exchange_settings import (
    Compression,
    GivenScale,
    LossScale,
    TopK,
)
from collectives.training.gradient_filters import Cast, Quantize
from collectives.training.report import Recorder, register_recorder
from topoplan.errors import UsageError

Array = NDArray[Any]

FORMAT = "topoplan.fsdp2/1"
"""Format of a checkpoint state; residuals are in units of a loss scale of 1."""

SHARDS, REPLICAS = "shards", "replicas"
"""The reduction that a residual belongs to: the reduce-scatter of whole gradients, or the allreduce of shards."""

_COMPRESSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that have a state: torch cannot tell it."""


def compress_fsdp2(
    model: nn.Module,
    compression: Compression | None = None,
    *,
    replicate: DeviceMesh | dist.ProcessGroup | None = None,
    replicate_compression: Compression | None = None,
    loss_scale: GivenScale | None = None,
) -> ShardedCompression:
    """Compress the gradients that a model of `fully_shard` reduces.

    All ranks call it with the same arguments, after `fully_shard` and before the first step.

    Parameters
    ----------
    model : Module
        The module on which the loop calls forward; its units have one mesh of one dimension.
    compression : TopK, Quantize or Cast, optional
        Compression of the reduce-scatter of each unit. `TopK` chooses in each rank's part of a unit. Its residual has
        the size of the whole gradients on every rank, not that of a shard.
    replicate : DeviceMesh or ProcessGroup, optional
        The ranks that hold the same shard, for HSDP: gradients are averaged over them after the reduce-scatter.
        ``fully_shard`` then gets ``mesh["shard"]`` alone, and all replicas begin with the same parameters.
    replicate_compression : TopK, Quantize or Cast, optional
        Compression of that allreduce. The residual of `TopK` has the size of a shard.
    loss_scale : GradScaler, float or callable, optional
        Factor of the loss, as for `HookState`. Residuals then follow it, and are as before the step on all ranks if a
        gradient of the step is not finite; this costs a copy of the residuals. Give 1.0 in a loop that skips such
        steps without a scaler.

    Returns
    -------
    ShardedCompression
        Holds the residuals: ``state_dict`` belongs into the checkpoint of each rank.

    Raises
    ------
    UsageError
        An argument is out of range, or differs between ranks; the model has no unit, or a mesh of two dimensions.
    BackendError
        From ``loss.backward()``: an exchange failed. Go back to the last checkpoint then.

    Notes
    -----
    Messages are made on the host; gradients of a GPU are copied there and back.
    """
    return ShardedCompression(
        model,
        compression,
        replicate=replicate,
        replicate_compression=replicate_compression,
        loss_scale=loss_scale,
    )


class ShardedCompression:
    """State of the compressed reductions of one model, which `compress_fsdp2` makes.

    Attributes
    ----------
    step : int
        Steps that have ended, each a backward pass that reduced gradients.
    recorder : Recorder
        Records exchanges, their bytes and times; ``collectives.report(state.recorder)`` prints them.
    loss_scale : GradScaler, float, callable or None
        As given. It may be set between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        compression: Compression | None,
        *,
        replicate: DeviceMesh | dist.ProcessGroup | None,
        replicate_compression: Compression | None,
        loss_scale: GivenScale | None,
    ) -> None:
        given = {SHARDS: compression, REPLICAS: replicate_compression}
        if model in _COMPRESSED:
            raise UsageError(
                "the model has a compression already; use the state that compress_fsdp2 returned for it"
            )
        self._scale, self._given_scale = LossScale(loss_scale), loss_scale
        units = sharded_units(model)
        self.groups = {SHARDS: units[0].mesh.get_group()}
        if replicate is not None:
            self.groups[REPLICAS] = _replicas(replicate, self.groups[SHARDS])
        layouts = [f"{unit.name}: {unit.layout()}" for unit in units]

        def settings() -> str:
            _check_compression("compression", compression)
            _check_compression("replicate_compression", replicate_compression)
            if replicate is None and replicate_compression is not None:
                raise UsageError('replicate_compression needs replicate; give replicate=mesh["replicate"]')
            if compression is None and replicate is None:
                raise UsageError("compression must be TopK(0.01), Quantize(8) or Cast('float16'), got None")
            return f"compression {compression} and {replicate_compression} for {layouts}"

        self._agree(settings)
        self.compression = {
            which: how for which, how in given.items() if isinstance(how, TopK | Quantize | Cast)
        }
        self.recorder = register_recorder(Recorder("fsdp2", ranks=self.size(SHARDS)))
        self.waiting: dict[str, dict[str, dict[str, Array]]] = {SHARDS: {}, REPLICAS: {}}
        """Restored residuals, by reduction and parameter, until their unit reduces."""
        self.scale = 1.0
        self._seen: set[int] = set()
        self._finite = True
        self._device = torch.device("cpu")
        self._warned = False
        self._reductions = [UnitReduction(self, unit) for unit in units]
        for one in self._reductions:
            module = one.unit.module
            try:
                if compression is not None:
                    module.set_custom_reduce_scatter(one)
                if replicate is not None:
                    module.set_all_reduce_hook(one.all_reduce)
            except AttributeError as error:
                raise UsageError(
                    f"this release of torch cannot replace reductions of FSDP2: {error}"
                ) from error
            except ValueError as error:
                raise UsageError(f"{one.unit.name}: {error}") from error
        self._hook = model.register_forward_pre_hook(lambda *_: self.end_step())
        _COMPRESSED.add(model)

    @property
    def step(self) -> int:
        return self.recorder.step

    @property
    def loss_scale(self) -> GivenScale | None:
        return self._given_scale

    @loss_scale.setter
    def loss_scale(self, given: GivenScale | None) -> None:
        self._scale.use(given)
        self._given_scale = given

    def size(self, which: str) -> int:
        """Return the ranks of a reduction; 1 without one."""
        return dist.get_world_size(self.groups[which]) if which in self.groups else 1

    def rank(self, which: str) -> int:
        """Return this process's rank in a reduction."""
        return dist.get_rank(self.groups[which]) if which in self.groups else 0

    def begin(self, unit: int, device: torch.device) -> None:
        """Begin a unit's reductions: in the present step, or in a new one if it has reduced in this."""
        if unit in self._seen:
            self.end_step()
        if not self._seen:
            self.scale = self._scale()
        self._seen.add(unit)
        self._device = device

    @property
    def protects(self) -> bool:
        """Whether residuals are restored after a step that is not finite."""
        return self._scale.given

    def look_at(self, *values: Array) -> None:
        """Note whether gradients are finite."""
        if not self._keeps() or all(bool(np.isfinite(one).all()) for one in values):
            return
        self._finite = False
        if not self.protects and not self._warned:
            self._warned = True
            warnings.warn(
                f"a gradient of step {self.step} is not finite, and the residuals of this step are not restored; give "
                "compress_fsdp2 the GradScaler as loss_scale, or 1.0 in a loop that skips such steps itself",
                stacklevel=2,
            )

    def end_step(self) -> None:
        """End a step in which a unit has reduced; with `loss_scale` all ranks must call it, as forward does."""
        if not self._seen:
            return
        self._seen.clear()
        finite, self._finite = self._finite, True
        if self.protects and self._keeps():
            flag = torch.tensor([0 if finite else 1], dtype=torch.int32, device=self._device)
            for group in self.groups.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            finite = not flag.item()
        for one in self._reductions:
            one.settle(undo=not finite and self.protects)
        self.recorder.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state of this rank; all ranks must call it.

        Returns
        -------
        dict
            Step, ranks, and for each parameter by its name the residual of this rank, in units of a loss scale of 1:
            ``"shards"`` of the whole gradient, ``"replicas"`` of this rank's shard. Tensors are copies on the host.
        """
        self.end_step()
        held = {which: dict(waiting) for which, waiting in self.waiting.items()}
        for one in self._reductions:
            for which, found in one.saved().items():
                held[which].update(found)
        return {
            "format": FORMAT,
            "step": self.step,
            "ranks": [[self.rank(which), self.size(which)] for which in (SHARDS, REPLICAS)],
            **{
                which: {
                    name: {kind: torch.from_numpy(one.copy()) for kind, one in sorted(kept.items())}
                    for name, kept in sorted(found.items())
                }
                for which, found in held.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank; all ranks must call it.

        On another number of ranks only the step is restored, and one warning names the residuals that are lost.

        Raises
        ------
        UsageError
            On all ranks, and nothing has changed: the state of some rank is of another rank, another model or another
            format.
        """
        lost: list[str] = []

        def check() -> str:
            lost.extend(self._unusable(state))
            return ""

        self.end_step()
        self._agree(check)
        self.recorder.step = int(state["step"])
        for one in self._reductions:
            one.forget()
        for which in self.waiting:
            usable = not lost and isinstance(self.compression.get(which), TopK)
            self.waiting[which] = {
                name: {kind: finite_residual(value.numpy().copy()) for kind, value in kept.items()}
                for name, kept in (state[which].items() if usable else ())
            }
            if not usable:
                residuals = {name: [kept["residual"].numpy()] for name, kept in state[which].items()}
                why = lost[0] if lost else "the compression differs from that of the saved state"
                warn_of_unused_state([describe_state({"residuals": residuals})], why)

    def close(self) -> None:
        """End the last step and stop to count steps; the model keeps its reductions. Closing twice is allowed."""
        self.end_step()
        self._hook.remove()

    def _keeps(self) -> bool:
        return any(isinstance(how, TopK) for how in self.compression.values())

    def _agree(self, text: Callable[[], str]) -> None:
        """Raise `UsageError` on all ranks of the mesh unless all have the same text."""
        failure: UsageError | None = None

        def made() -> str:
            if failure is not None:
                raise failure
            return text()

        for group in self.groups.values():
            try:
                first, *others = gather_or_raise(gather_by(group), made)
                for rank, one in enumerate(others, start=1):
                    if one != first:
                        raise UsageError(
                            f"rank {rank} has {one}, and rank 0 {first}; give all ranks the same"
                        )
            except UsageError as error:
                failure = error
        if failure is not None:
            raise failure

    def _unusable(self, state: Mapping[str, Any]) -> list[str]:
        """Return why residuals of a state are of no use here, if so; `UsageError` for the state of something else."""
        if state.get("format") != FORMAT:
            raise UsageError(
                f"format of the state must be {FORMAT}, got {state.get('format')!r}; load what state_dict returned"
            )
        here = [[self.rank(which), self.size(which)] for which in (SHARDS, REPLICAS)]
        found = [list(one) for one in state["ranks"]]
        if [size for _, size in here] != [size for _, size in found]:
            saved, now = (" x ".join(str(size) for _, size in one) for one in (found, here))
            return [f"the state was saved by {saved} ranks, and there are {now}"]
        if here != found:
            raise UsageError(
                f"this rank is {here}, and the state is of {found}; load on each rank what it has saved"
            )
        for one in self._reductions:
            one.check(state)
        known = {name for one in self._reductions for name in one.names()}
        for which in (SHARDS, REPLICAS):
            if unknown := sorted(set(state[which]) - known):
                raise UsageError(
                    f"the model has no sharded parameter {unknown[0]}; load the state into the model that it was saved "
                    "from"
                )
        return []


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
        messages = self._prepared(SHARDS, layout, given.dtype.name)
        started = state.recorder.now()
        sent, total = self._reduced(messages, given, group, divisor, input_tensor.device, SHARDS)
        state.look_at(given, total)
        output_tensor.copy_(torch.from_numpy(total))
        self._record(SHARDS, messages, input_tensor.nbytes, sent, started)

    def all_reduce(self, output: torch.Tensor) -> None:
        """Average this rank's part over the replicas, in place."""
        state, ranks = self._state, self._state.size(REPLICAS)
        how, group = state.compression.get(REPLICAS), state.groups[REPLICAS]
        if SHARDS not in state.compression or state.size(SHARDS) == 1:
            state.begin(id(self), output.device)
        if ranks == 1 or not output.numel():
            return
        started = state.recorder.now()
        if how is None:
            narrow = output.element_size() <= 2  # a sum may be too large for float16
            if narrow:
                output.div_(ranks)
            dist.all_reduce(output, group=group)
            if not narrow:
                output.div_(ranks)
            return
        given = _on_host(output)
        layout = self._layout(output, ranks=1)
        entries = isinstance(how, TopK)
        messages = self._prepared(REPLICAS, layout, given.dtype.name)
        if entries:
            mine = self._encode(messages, given[None], REPLICAS)
            sent, average = mine.nbytes, messages.total(_gathered(mine[0], group, ranks, output.device))
            average /= ranks
        else:
            padded = np.zeros((ranks, messages.count), given.dtype)
            padded.reshape(-1)[: given.size] = given
            sent, part = self._reduced(messages, padded, group, ranks, output.device, REPLICAS)
            assert self._results is not None, "made with the messages"
            mine = self._encode(self._results, part[None], REPLICAS)
            sent += mine.nbytes
            found = _gathered(mine[0], group, ranks, output.device)
            average = np.concatenate([self._results.total(one[None]) for one in found])[: given.size]
        state.look_at(given, average)
        output.copy_(torch.from_numpy(average))
        self._record(REPLICAS, messages, output.nbytes, sent, started)

    def names(self) -> list[str]:
        """Return the names of the parameters."""
        return [name for name, _ in self.unit.parameters]

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a residual of a checkpoint state has another shape than here."""
        rank = self._state.rank(SHARDS)
        for one in self.unit.layout(every=True).parameters:
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
        how, key, ranks = state.compression[which], f"{self.unit.name}, {which}", state.size(which)
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

    def _encode(self, messages: ChunkMessages, given: Array, which: str) -> NDArray[np.uint8]:
        state = self._state
        if isinstance(messages, EntryChunkMessages) and state.protects:
            messages.remember()
        return messages.encode(given, step=state.step, rank=state.rank(which), scale=state.scale)

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
        rounded = isinstance(self._state.compression[which], Cast)
        if rounded and divisor != 1:
            given = given / given.dtype.type(
                divisor
            )  # before it is rounded: a sum may be too large for float16
        mine = torch.from_numpy(self._encode(messages, given, which)).to(device)
        arrived = torch.empty_like(mine)
        dist.all_to_all_single(arrived, mine, group=group)
        total = messages.total(arrived.cpu().numpy())
        if not rounded and divisor != 1:
            total /= total.dtype.type(divisor)
        return mine.nbytes, total

    def _record(self, which: str, messages: ChunkMessages, nbytes: int, sent: int, started: float) -> None:
        recorder = self._state.recorder
        key = self.unit.name if which == SHARDS else f"{self.unit.name}, {which}"
        recorder.add(
            key,
            nbytes,
            started,
            density=messages.density,
            how=messages.how,
            bound=float("inf"),
            sent=sent / nbytes,
            step=recorder.step,
        )


def _check_compression(name: str, how: Compression | None) -> None:
    """Raise `UsageError` for a compression that reductions of shards do not have."""
    if not isinstance(how, TopK | Quantize | Cast | None):
        raise UsageError(f"{name} must be TopK(0.01), Quantize(8) or Cast('float16') with FSDP2, got {how!r}")
    if isinstance(how, TopK):
        if how.exchange != "auto":
            raise UsageError(f"exchange of TopK must be auto with FSDP2, got {how.exchange!r}; leave it out")
        if how.wire is not None and how.wire.cache_keys:
            raise UsageError("wire must be a WireFormat without cache_keys, got one that caches keys")


def _replicas(replicate: DeviceMesh | dist.ProcessGroup, shards: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of this rank's replicas; `UsageError` if it has other ranks of the shards' group."""
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise UsageError(
                f'replicate must have one dimension, got {replicate.ndim}; give mesh["replicate"]'
            )
        group: dist.ProcessGroup = replicate.get_group()
    elif isinstance(replicate, dist.ProcessGroup):
        group = replicate
    else:
        raise UsageError(f"replicate must be a DeviceMesh or a process group, got {replicate!r}")
    both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(shards))
    if both != {dist.get_rank()}:
        raise UsageError(
            f"replicate must share only rank {dist.get_rank()} with the mesh of fully_shard, got {sorted(both)}; give "
            "the ranks that hold the same shard"
        )
    return group


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
    dist.all_gather_into_tensor(every, mine, group=group)
    found: NDArray[np.uint8] = every.cpu().numpy().reshape(ranks, -1)
    return found
