"""Check the arguments of a sparse allreduce before anything is taken from the caller's arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.request import check_inputs, check_outputs
from collectives.peers.control_plane import shape_text
from collectives.sparse.entry_arrays import message_bytes
from collectives.sparse.exchange_choice import entry_count
from collectives.sparse.selection.error_feedback import checked_density
from topoplan.errors import UsageError
from topoplan.units import exact

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Of gradients; those of 16 bits are kept, selected and sent in float32."""

OPERATIONS = ("sum", "avg")

NOMINAL = 1 << 20
"""Elements of the gradient for which the bits of an entry are counted that plans and models go by."""

LEAST_SHARE = Fraction(1, 10**9)
"""Smallest share of the bytes that plans are made for; a density below it still gives one entry."""


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A sparse allreduce whose arguments fit.

    Parameters
    ----------
    inputs : list of arrays, one for each rank of this process
    outputs : list of arrays or None
    op : str
        sum or avg.
    shape : tuple of int
    size : int
        Elements of a gradient.
    dtype : str
        In which entries are kept and sent.
    density, exchange, wire, key, momentum, loss_scale
        As `Communicator.sparse_all_reduce` takes them.
    """

    inputs: list[Any]
    outputs: Sequence[Any | None]
    op: str
    shape: tuple[int, ...]
    size: int
    dtype: str
    density: float
    exchange: str
    wire: WireFormat | None
    key: str
    momentum: float
    loss_scale: float

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides how it is exchanged."""
        return self.size, self.dtype, self.density, self.exchange, self.wire

    @property
    def entry_share(self) -> Fraction:
        """Bytes of entries for a byte of the gradient by which plans and models go: those of a large one."""
        entries = entry_count(NOMINAL, self.density)
        nbytes = message_bytes(entries, size=NOMINAL, dtype=self.dtype, wire=self.wire)
        share = exact(self.density) * Fraction(nbytes, entries * np.dtype(self.dtype).itemsize)
        return max(share, LEAST_SHARE)

    def about(self, exchange: str) -> str:
        """What the elements mean that one of the exchanges moves: ranks that differ in it must not exchange them."""
        told = (
            f"sparse {self.op} of {shape_text(self.shape)} {self.dtype}, {float(self.density)} by {exchange}"
        )
        if self.wire is not None:
            told += f", {self.wire.values} {self.wire.indices}"
        if self.loss_scale != 1:
            told += f", loss scale {self.loss_scale:g}"
        return told + (f", key {_in_short(self.key)}" if self.key else "")


def sparse_request(
    backend: Backend[Any],
    arrays: Any,
    *,
    density: float,
    exchange: str,
    wire: WireFormat | None,
    out: Any = None,
    op: str = "sum",
    key: str = "",
    momentum: float = 0.0,
    loss_scale: float = 1.0,
) -> SparseRequest:
    """Check the arrays of a sparse allreduce.

    Raises
    ------
    UsageError
        Names the rank and what does not fit.
    """
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    checked_density(density)
    dtype = library.dtype(inputs[0])
    if dtype not in DTYPES:
        raise UsageError(f"gradients of {dtype} cannot be made sparse; give {', '.join(DTYPES)}")
    if op not in OPERATIONS:
        raise UsageError(f"a sparse {op!r} is not defined; use {' or '.join(OPERATIONS)}")
    if not (isinstance(loss_scale, Real) and 0 < loss_scale < math.inf):
        raise UsageError(
            f"loss_scale must be above 0 and finite, got {loss_scale!r}; give that of the gradients"
        )
    shape = library.shape(inputs[0])
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shape=shape,
        like=inputs[0],
        holders=backend.ranks,
    )
    size = 1
    for length in shape:
        size *= length
    kept = "float64" if dtype == "float64" else "float32"
    return SparseRequest(
        inputs, outputs, op, shape, size, kept, density, exchange, wire, key, momentum, float(loss_scale)
    )


def _in_short(name: str) -> str:
    """A key in the few letters that all ranks compare; of a long one its beginning and a digest."""
    shown = name.encode("ascii", "replace").decode()[:32]
    return shown if shown == name else f"{shown} {sha256(name.encode()).hexdigest()[:8]}"
