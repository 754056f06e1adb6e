"""Check the arguments of a sparse allreduce before the caller's arrays are read."""

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
"""dtypes of gradients; those of 16 bits are kept, selected and sent in float32."""

OPERATIONS = ("sum", "avg")

NOMINAL = 1 << 20  # elements of the gradient whose bits per entry plans and models use

LEAST_SHARE = Fraction(1, 10**9)
"""Smallest share of the bytes for which plans are made; a density below it still selects one entry."""


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A sparse allreduce with valid arguments.

    `inputs` and `outputs` are by rank of this process. `size` is in elements; `dtype` is that of residuals and
    messages.
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
        """The fields that determine the exchange."""
        return self.size, self.dtype, self.density, self.exchange, self.wire

    @property
    def entry_share(self) -> Fraction:
        """Bytes of entries for a byte of the gradient, as plans and models use them: those of a large gradient."""
        entries = entry_count(NOMINAL, self.density)
        nbytes = message_bytes(entries, size=NOMINAL, dtype=self.dtype, wire=self.wire)
        share = exact(self.density) * Fraction(nbytes, entries * np.dtype(self.dtype).itemsize)
        return max(share, LEAST_SHARE)

    def about(self, exchange: str) -> str:
        """Describe the elements of an exchange, for comparison between ranks."""
        text = (
            f"sparse {self.op} of {shape_text(self.shape)} {self.dtype}, {float(self.density)} by {exchange}"
        )
        if self.wire is not None:
            text += f", {self.wire.values} {self.wire.indices}"
        if self.loss_scale != 1:
            text += f", loss scale {self.loss_scale:g}"
        return text + (f", key {_in_short(self.key)}" if self.key else "")


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
    """Check the arguments of a sparse allreduce; UsageError names the rank and the argument."""
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    checked_density(density)
    dtype = library.dtype(inputs[0])
    if dtype not in DTYPES:
        raise UsageError(f"gradients of {dtype} cannot be made sparse; give {', '.join(DTYPES)}")
    if op not in OPERATIONS:
        raise UsageError(f"op of a sparse allreduce must be {' or '.join(OPERATIONS)}, got {op!r}")
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
    """Return a key as short text; a long one as its beginning and a digest."""
    shown = name.encode("ascii", "replace").decode()[:32]
    return shown if shown == name else f"{shown} {sha256(name.encode()).hexdigest()[:8]}"
