"""Find the units of a model under FSDP2, and where the gradient of each parameter lies in what a unit reduces.

A unit reduces one buffer of (n, c) elements for n ranks: row r is rank r's part of each parameter, one after another in
the order of `fully_shard`. A part is a piece along the sharded axis, as `torch.chunk` cuts, with zeros up to the length
of the first one:

    weight (5, 2), bias (3,) on 2 ranks    row 0: weight[0:3], bias[0:2]    row 1: weight[3:5], 0 0, bias[2:3], 0

Only public names of torch are used: a sharded parameter is a DTensor, which knows its mesh and its placement. The order
of parameters follows `fully_shard`, which lists the modules of a unit children first; tests compare it with the places
of the gradients in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from topoplan.errors import UsageError
from topoplan.units import check_type

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter on `ranks` ranks: its name in the model, its whole shape, and the axis that is sharded."""

    name: str
    shape: tuple[int, ...]
    axis: int
    ranks: int

    @property
    def piece(self) -> int:
        """Elements of the axis that each rank has, with padding."""
        return -(-self.shape[self.axis] // self.ranks)

    @property
    def count(self) -> int:
        """Elements of a rank's part, with padding."""
        return self.piece * (math.prod(self.shape) // self.shape[self.axis])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part, without padding.

        >>> [ShardedParameter("weight", (5, 2), 0, 4).local_shape(rank) for rank in range(4)]
        [(2, 2), (2, 2), (1, 2), (0, 2)]
        """
        start = min(rank * self.piece, self.shape[self.axis])
        length = min(self.piece, self.shape[self.axis] - start)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def rows(self, values: Array) -> Array:
        """Return the parts of all ranks, (ranks, count), of an array of the whole shape."""
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        padded = np.zeros((*before, self.ranks * self.piece, *after), values.dtype)
        padded[(slice(None),) * self.axis + (slice(self.shape[self.axis]),)] = values
        parts = padded.reshape(*before, self.ranks, self.piece, *after)
        return np.moveaxis(parts, self.axis, 0).reshape(self.ranks, self.count)

    def whole(self, rows: Array) -> Array:
        """Return the array of which these are the parts of all ranks; the inverse of `rows`.

        >>> one = ShardedParameter("weight", (3, 2), 0, 2)
        >>> one.rows(np.arange(6).reshape(3, 2)).tolist()
        [[0, 1, 2, 3], [4, 5, 0, 0]]
        >>> one.whole(one.rows(np.arange(6).reshape(3, 2))).tolist()
        [[0, 1], [2, 3], [4, 5]]
        """
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        parts = np.moveaxis(rows.reshape(self.ranks, *before, self.piece, *after), 0, self.axis)
        padded = parts.reshape(*before, self.ranks * self.piece, *after)
        return padded[(slice(None),) * self.axis + (slice(self.shape[self.axis]),)]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The parameters of a unit whose gradients are reduced together, in the order of their parts in a row.

    >>> layout = UnitLayout((ShardedParameter("weight", (5, 2), 0, 2), ShardedParameter("bias", (3,), 0, 2)))
    >>> layout.ranks, layout.count, [(one.name, start) for one, start, _ in layout.parts()]
    (2, 8, [('weight', 0), ('bias', 6)])
    >>> layout.rows({"bias": np.ones(3)}, "float64")[1].tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """

    parameters: tuple[ShardedParameter, ...]

    @property
    def ranks(self) -> int:
        """Ranks among which the parameters are sharded; 1 without a parameter."""
        return self.parameters[0].ranks if self.parameters else 1

    @property
    def count(self) -> int:
        """Elements of a row."""
        return sum(one.count for one in self.parameters)

    def parts(self) -> Iterator[tuple[ShardedParameter, int, int]]:
        """Yield each parameter with the first and the last element (exclusive) of its part of a row."""
        start = 0
        for one in self.parameters:
            yield one, start, start + one.count
            start += one.count

    def rows(self, values: Mapping[str, Array], dtype: str) -> Array:
        """Return the (ranks, count) buffer of some arrays of whole shapes, by names; zeros for the others."""
        rows = np.zeros((self.ranks, self.count), dtype)
        for one, start, stop in self.parts():
            if one.name in values:
                rows[:, start:stop] = one.rows(values[one.name])
        return rows

    def whole(self, rows: Array) -> dict[str, Array]:
        """Return copies of the arrays of whole shapes in a (ranks, count) buffer, by names."""
        return {one.name: one.whole(rows[:, start:stop]).copy() for one, start, stop in self.parts()}

    def line(self, values: Mapping[str, Array], dtype: str) -> Array:
        """Return the (count,) row of one rank of some of its parts, by names; zeros for the others."""
        line = np.zeros(self.count, dtype)
        for one, start, _ in self.parts():
            if one.name in values:
                line[start : start + values[one.name].size] = values[one.name].reshape(-1)
        return line

    def local(self, line: Array, rank: int) -> dict[str, Array]:
        """Return copies of a rank's parts in its (count,) row, by names."""
        found = {}
        for one, start, _ in self.parts():
            shape = one.local_shape(rank)
            found[one.name] = line[start : start + math.prod(shape)].reshape(shape).copy()
        return found


class ShardedUnit:
    """A module to which `fully_shard` was applied, and the parameters that it reduces."""

    def __init__(self, name: str, module: Any, parameters: list[tuple[str, nn.Parameter]]) -> None:
        self.name, self.module, self.parameters = name, module, parameters

    def layout(self, *, every: bool = False) -> UnitLayout:
        """Return the layout of the present step: of the parameters that need gradients, or of `every` one."""
        found = []
        for name, parameter in self.parameters:
            if every or parameter.requires_grad:
                placed: Any = parameter
                found.append(
                    ShardedParameter(
                        name, tuple(placed.shape), placed.placements[-1].dim, placed.device_mesh.size(-1)
                    )
                )
        return UnitLayout(tuple(found))

    @property
    def mesh(self) -> Any:
        """The `DeviceMesh` of its parameters: one dimension, or that of replicas before that of shards."""
        placed: Any = self.parameters[0][1]
        return placed.device_mesh


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """Return the units of a model that have parameters, by the order of their modules.

    Raises `UsageError` if it has none, or their mesh is not the same mesh of one or two dimensions.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.nn import Module

    check_type("model", model, Module, remedy="give the model that fully_shard returned")
    modules = [(name, one) for name, one in model.named_modules() if isinstance(one, FSDPModule)]
    for _, module in modules:
        module.reshard()  # after a forward pass without a backward pass parameters may be whole
    names = {id(one): name for name, one in model.named_parameters()}
    units = []
    for name, module in modules:
        found: dict[int, tuple[str, nn.Parameter]] = {}
        root: Any = module
        for part in _modules_of(root, FSDPModule):
            for one in part.parameters(recurse=False):
                if isinstance(one, DTensor):
                    found.setdefault(id(one), (names[id(one)], one))
        if found:
            units.append(ShardedUnit(name or "the root", module, list(found.values())))
    if not units:
        raise UsageError(
            f"model must have modules of fully_shard, got a {type(model).__name__} without; call fully_shard before"
        )
    for unit in units:
        if unit.mesh.ndim > 2:
            raise UsageError(
                f"the mesh of fully_shard must have one or two dimensions, got {unit.mesh.ndim}; shard over "
                "a part of it"
            )
        if unit.mesh != units[0].mesh:
            raise UsageError(
                f"all units must have one mesh, got {unit.mesh} and {units[0].mesh}; shard them over the same"
            )
        for one_name, parameter in unit.parameters:
            placed: Any = parameter
            *others, last = placed.placements
            sharded = isinstance(last, Shard) and all(isinstance(one, Replicate) for one in others)
            if not sharded or not parameter.is_floating_point():
                raise UsageError(
                    f"{one_name} must be sharded and of floats, got {placed.placements} of {parameter.dtype}; "
                    "give it to fully_shard's ignored_params"
                )
    return units


def _modules_of(module: nn.Module, boundary: Any) -> list[nn.Module]:
    """Return the modules of a unit, children before parents; a nested unit has its own."""
    found: list[nn.Module] = []
    seen: set[int] = set()

    def visit(one: nn.Module) -> None:
        seen.add(id(one))
        for child in one.children():
            if id(child) not in seen and not isinstance(child, boundary):
                visit(child)
        found.append(one)

    visit(module)
    return found
