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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.peers.agreement import gather_or_raise
from collectives.sparse.residuals import finite_residual
from collectives.torch.plan_agreement import gather_by
from collectives.torch.sharded_layout import sharded_units
from collectives.torch.unit_reduction import REPLICAS, SHARDS, UnitReduction, low_rank_exchange
from collectives.training.checkpoint_state import (
    EMPTY_STATE,
    check_states,
    describe_state,
    warn_of_unused_state,
)
from collectives.training.exchange_settings import (
    Compression,
    GivenScale,
    LossScale,
    TopK,
)
from collectives.training.gradient_filters import Cast, Quantize
from collectives.training.low_rank import LowRank
from collectives.training.modes import check_count
from collectives.training.report import Recorder, register_recorder
from topoplan.errors import UsageError

Array = NDArray[Any]

FORMAT = "topoplan.fsdp2/1"
"""Format of a checkpoint state; residuals are in units of a loss scale of 1."""

_COMPRESSED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Units that have a state: torch cannot tell it."""


def compress_fsdp2(
    model: nn.Module,
    compression: Compression | None = None,
    *,
    replicate: DeviceMesh | dist.ProcessGroup | None = None,
    replicate_compression: Compression | None = None,
    loss_scale: GivenScale | None = None,
    micro_batches: int = 1,
) -> ShardedCompression:
    """Compress the gradients that a model of `fully_shard` reduces.

    All ranks call it with the same arguments, after `fully_shard` and before the first step.

    Parameters
    ----------
    model : Module
        The module on which the loop calls forward; its units have one mesh. If that has two dimensions, as for torch's
        own HSDP, the reduce-scatters are compressed, and torch's allreduces between replicas are not.
    compression : TopK, LowRank, Quantize or Cast, optional
        Compression of the reduce-scatter of each unit. `TopK` chooses in each rank's part of a unit. Its residual has
        the size of the whole gradients on every rank, not that of a shard.
    replicate : DeviceMesh or ProcessGroup, optional
        The ranks that hold the same shard, for HSDP: gradients are averaged over them after the reduce-scatter.
        ``fully_shard`` then gets ``mesh["shard"]`` alone, and all replicas begin with the same parameters.
    replicate_compression : TopK, LowRank, Quantize or Cast, optional
        Compression of that allreduce. The residual of `TopK` has the size of a shard.
    loss_scale : GradScaler, float or callable, optional
        Factor of the loss, as for `HookState`. Residuals then follow it, and are as before the step on all ranks if a
        gradient of the step is not finite; this costs a copy of the residuals. Give 1.0 in a loop that skips such
        steps without a scaler.
    micro_batches : int, optional
        Backward passes of one optimizer step that each reduce, so that their averages add up in ``grad``. Every pass
        is compressed by itself; ``loss_scale`` restores residuals to those before the first. By default 1. Call
        ``end_step`` after a step of fewer passes.

    Returns
    -------
    ShardedCompression
        Holds the residuals: ``state_dict`` belongs into the checkpoint of each rank.

    Raises
    ------
    UsageError
        An argument is out of range, or differs between ranks; the model has no unit, or ``replicate`` is given though
        torch reduces over replicas itself.
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
        micro_batches=micro_batches,
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
        micro_batches: int,
    ) -> None:
        given = {SHARDS: compression, REPLICAS: replicate_compression}
        units = sharded_units(model)
        if any(one.module in _COMPRESSED for one in units):
            raise UsageError(
                "the model has a compression already; use the state that compress_fsdp2 returned for it"
            )
        self._scale, self._given_scale = LossScale(loss_scale), loss_scale
        mesh = units[0].mesh
        self.groups = {SHARDS: mesh.get_group(mesh.ndim - 1)}
        by_torch = mesh.ndim == 2
        if by_torch:
            self.groups[REPLICAS] = mesh.get_group(0)
        elif replicate is not None:
            self.groups[REPLICAS] = _replicas(replicate, self.groups[SHARDS])
        layouts = [f"{unit.name}: {unit.layout()}" for unit in units]

        def settings() -> str:
            _check_compression("compression", compression)
            _check_compression("replicate_compression", replicate_compression)
            check_count("micro_batches", micro_batches, least=1)
            if by_torch and (replicate is not None or replicate_compression is not None):
                raise UsageError(
                    "torch reduces over the replicas of a mesh of two dimensions itself, and has no hook in place of "
                    'that; shard over mesh["shard"] alone to give replicate=mesh["replicate"]'
                )
            if replicate is None and replicate_compression is not None:
                raise UsageError('replicate_compression needs replicate; give replicate=mesh["replicate"]')
            if compression is None and replicate is None:
                raise UsageError(
                    "compression must be TopK(0.01), LowRank(2), Quantize(8) or Cast('float16'), got None"
                )
            scaled = "a" if self.protects else "no"
            return (
                f"compression {compression} and {replicate_compression}, {scaled} loss_scale, {micro_batches} "
                f"micro_batches, for {layouts}"
            )

        self._agree(settings)
        self.chunked = {which: how for which, how in given.items() if isinstance(how, TopK | Quantize | Cast)}
        self.low_rank = {
            which: low_rank_exchange(how, self.groups[which])
            for which, how in given.items()
            if isinstance(how, LowRank)
        }
        self.recorder = register_recorder(Recorder("fsdp2", ranks=self.size(SHARDS)))
        self.waiting: dict[str, dict[str, dict[str, Array]]] = {SHARDS: {}, REPLICAS: {}}
        """Restored residuals, by reduction and parameter, until their unit reduces."""
        self.scale = 1.0
        self.micro_batches = micro_batches
        self.micro_batch = 0
        """Backward passes of this step that have ended."""
        self._seen: set[int] = set()
        self._finite = True
        self._device = torch.device("cpu")
        self._warned = False
        self._warned_of_passes = False
        self._reductions = [UnitReduction(self, unit) for unit in units]
        for one in self._reductions:
            module = one.unit.module
            try:
                if compression is not None:
                    module.set_custom_reduce_scatter(one)
                if replicate is not None:
                    module.set_all_reduce_hook(one.all_reduce)
                elif by_torch and self.protects:
                    module.set_all_reduce_hook(self.look_at_average)
            except AttributeError as error:
                raise UsageError(
                    f"this release of torch cannot replace reductions of FSDP2: {error}"
                ) from error
            except ValueError as error:
                raise UsageError(f"{one.unit.name}: {error}") from error
        self._hook = model.register_forward_pre_hook(lambda *_: self._end_pass())
        _COMPRESSED.update(one.module for one in units)

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
        """Begin a unit's reductions: in the present pass, or in a new one if it has reduced in this."""
        if unit in self._seen:
            self._end_pass()
        if not self._seen and not self.micro_batch:
            self.scale = self._scale()
            self._warn_of_passes()
        self._seen.add(unit)
        self._device = device

    @property
    def protects(self) -> bool:
        """Whether residuals are restored after a step that is not finite."""
        return self._scale.given

    def look_at(self, given: Array, result: torch.Tensor) -> None:
        """Note whether a gradient and its sum are finite, the sum in the type in which torch gets it."""
        if not self._keeps() or (np.isfinite(given).all() and torch.isfinite(result).all()):
            return
        self._finite = False
        if not self.protects and not self._warned:
            self._warned = True
            warnings.warn(
                f"a gradient of step {self.step} is not finite, and the residuals of this step are not restored; give "
                "compress_fsdp2 the GradScaler as loss_scale, or 1.0 in a loop that skips such steps itself",
                stacklevel=2,
            )

    def look_at_average(self, output: torch.Tensor) -> None:
        """Note whether torch's own average over replicas is finite: each reduce-scatter may be."""
        if self._keeps() and not torch.isfinite(output).all():
            self._finite = False

    @property
    def passes(self) -> int:
        """Backward passes before this one, if every step had `micro_batches`: the number of its random rounding."""
        return self.step * self.micro_batches + self.micro_batch

    def _end_pass(self) -> None:
        """End a backward pass in which a unit has reduced, and with the last one of a step the step."""
        if self._seen and self.micro_batch + 1 < self.micro_batches:
            self._seen.clear()
            self.micro_batch += 1
        elif self._seen:
            self.end_step()

    def _warn_of_passes(self) -> None:
        """Warn once if residuals are protected, and a step seems to have more passes than `micro_batches`."""
        if not (self.protects and self._keeps()) or self._warned_of_passes:
            return
        found: list[Any] = [one.grad for unit in self._reductions for _, one in unit.unit.parameters]
        parts = (one.to_local() for one in found if one is not None)
        if next((bool(one.any()) for one in parts if one.numel()), False):
            self._warned_of_passes = True
            warnings.warn(
                f"gradients of step {self.step} are added to earlier ones, and a skipped step restores only the "
                "residuals of its last backward pass; give compress_fsdp2 micro_batches=, the passes of a step",
                stacklevel=2,
            )

    def end_step(self) -> None:
        """End a step in which a unit has reduced; with `loss_scale` all ranks must call it, as forward does.

        The loop calls it only after a step of fewer passes than `micro_batches`.
        """
        if not self._seen and not self.micro_batch:
            return
        self._seen.clear()
        self.micro_batch = 0
        finite, self._finite = self._finite, True
        if self.protects and self._keeps():
            flag = torch.tensor([0 if finite else 1], dtype=torch.int32, device=self._device)
            for group in self.groups.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            finite = not flag.item()
        for one in self._reductions:
            one.settle(undo=not finite and self.protects)
        for exchange in self.low_rank.values():
            if self.protects:
                exchange.memory.finite = finite
            exchange.memory.settle()
        self.recorder.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state of this rank; all ranks must call it, between steps.

        Returns
        -------
        dict
            Step, ranks, and for each parameter by its name the residual of this rank, in units of a loss scale of 1:
            ``"shards"`` of the whole gradient, ``"replicas"`` of this rank's shard; ``"factors"`` are the warm starts
            of `LowRank`. Tensors are copies on the host.

        Raises
        ------
        UsageError
            A step has begun, and not all of its `micro_batches` are over.
        """
        passes = self.micro_batch + bool(self._seen)
        if 0 < passes < self.micro_batches:
            raise UsageError(
                f"the step must have all its {self.micro_batches} micro-batches, got {passes}; save between steps, or "
                "call end_step first"
            )
        self.end_step()
        held = {which: dict(waiting) for which, waiting in self.waiting.items()}
        for one in self._reductions:
            for which, found in one.saved().items():
                held[which].update(found)
        shapes = {one.name: one for unit in self._reductions for one in unit.parameters()}
        for which, exchange in self.low_rank.items():
            for name, (residual, *_) in exchange.memory.residuals.items():
                local = shapes[name].local_shape(self.rank(SHARDS))
                shape = shapes[name].shape if which == SHARDS else local
                held[which][name] = {"residual": residual.reshape(shape)}
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
            "factors": {
                which: {
                    name: torch.from_numpy(factor.copy())
                    for name, (factor, *_) in sorted(exchange.memory.arrays.items())
                }
                for which, exchange in self.low_rank.items()
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
        for which in (SHARDS, REPLICAS):
            self.waiting[which] = {}
            found = {
                name: {kind: finite_residual(value.numpy().copy()) for kind, value in kept.items()}
                for name, kept in state[which].items()
            }
            exchange, factors = self.low_rank.get(which), state["factors"].get(which)
            residuals = {name: [kept["residual"].reshape(-1)] for name, kept in found.items()}
            if exchange is not None:
                arrays = {name: [one.numpy()] for name, one in (factors or {}).items()}
                kept = {"residuals": residuals, "arrays": arrays}
                exchange.memory.restore(EMPTY_STATE if lost or factors is None else kept)
            elif isinstance(self.chunked.get(which), TopK) and not lost and factors is None:
                self.waiting[which], residuals = found, {}
            if lost or (exchange is None) != (factors is None) or (exchange is None and residuals):
                why = lost[0] if lost else "the compression differs from that of the saved state"
                warn_of_unused_state([describe_state({"residuals": residuals})], why)

    def close(self) -> None:
        """End the last step and stop to count steps; the model keeps its reductions. Closing twice is allowed."""
        self.end_step()
        self._hook.remove()

    def compresses(self, which: str) -> bool:
        """Return whether a reduction is compressed."""
        return which in self.chunked or which in self.low_rank

    def _keeps(self) -> bool:
        return bool(self.low_rank) or any(isinstance(how, TopK) for how in self.chunked.values())

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
        check_states([state], ("format", "step", "ranks", SHARDS, REPLICAS, "factors"))
        if state["format"] != FORMAT:
            raise UsageError(
                f"format of the state must be {FORMAT}, got {state['format']!r}; load what state_dict returned"
            )
        here = [[self.rank(which), self.size(which)] for which in (SHARDS, REPLICAS)]
        places = [list(one) for one in state["ranks"]]
        if [size for _, size in here] != [size for _, size in places]:
            saved, now = (" x ".join(str(size) for _, size in one) for one in (places, here))
            return [f"the state was saved by {saved} ranks, and there are {now}"]
        if here != places:
            raise UsageError(
                f"this rank is {here}, and the state is of {places}; load on each rank what it has saved"
            )
        for one in self._reductions:
            one.check(state)
        for which, how in self.chunked.items():
            speeds = any("velocity" in kept for kept in state[which].values())
            if isinstance(how, TopK) and speeds and not how.momentum:
                raise UsageError(
                    f"the state has velocities of momentum, and {how} has no momentum; give it the momentum of the "
                    "saved run"
                )
        known = {one.name for unit in self._reductions for one in unit.parameters()}
        for which in (SHARDS, REPLICAS):
            if unknown := sorted(set(state[which]) - known):
                raise UsageError(
                    f"the model has no sharded parameter {unknown[0]}; load the state into the model that it was saved "
                    "from"
                )
        return []


def _check_compression(name: str, how: Compression | None) -> None:
    """Raise `UsageError` for a compression that reductions of shards do not have."""
    if not isinstance(how, TopK | Quantize | Cast | LowRank | None):
        raise UsageError(
            f"{name} must be TopK(0.01), LowRank(2), Quantize(8) or Cast('float16') with FSDP2, got {how!r}"
        )
    if isinstance(how, LowRank) and how.matrices != "layers":
        raise UsageError(f"matrices of LowRank must be layers with FSDP2, got {how.matrices!r}; leave it out")
    if isinstance(how, TopK):
        if how.exchange != "auto":
            raise UsageError(f"exchange of TopK must be auto with FSDP2, got {how.exchange!r}; leave it out")
        if how.density == "auto" or isinstance(how.density, dict):
            raise UsageError(
                f"density of TopK must be a number or a function of the step with FSDP2, got {how.density!r}"
            )
        if how.per != "bucket":
            raise UsageError(f"per of TopK must be bucket with FSDP2, got {how.per!r}; leave it out")
        if how.ef21 is not None:
            raise UsageError(f"ef21 of TopK must be None with FSDP2, got {how.ef21!r}; leave it out")
        if how.clip is not None:
            raise UsageError(
                f"clip of TopK must be None with FSDP2, got {how.clip!r}; clip with torch.nn.utils.clip_grad_norm_"
            )
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
