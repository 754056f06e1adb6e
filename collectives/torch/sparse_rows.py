"""Add up sparse COO tensors of all ranks by their rows, which travel in an allgather of the plan.

A row is an index of the sparse axes with its values. Each rank sends the rows that it has; messages are as long as that
with the most rows. All ranks add them in the order of the ranks, so they get the same bits, and the same coalesced
indices: every row that any rank has. Rows of 16 bits are added in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.torch.group_arguments import dtype_of
from collectives.training.gradient_filters import reduce_line
from topoplan.errors import RefusedError, UsageError

NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of 16 bits, to which dense gradients may be rounded."""

FLOATS = (torch.float64, torch.float32, *NARROW.values(), torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

HEADER_BYTES = 256
"""Bytes of a rank's number of rows and of the text on its tensor."""


@dataclass(frozen=True, slots=True)
class RowMessage:
    """The form of the messages of a sparse tensor: a count, indices of the sparse axes, values.

    `most` is the number of rows of the longest; `tensor` is as on all ranks, coalesced, with the rows of this one.
    """

    tensor: torch.Tensor
    most: int

    @property
    def _start(self) -> int:
        """The first byte of the values."""
        return 8 + 8 * self.tensor.sparse_dim() * self.most

    @property
    def _row_bytes(self) -> int:
        values = self.tensor.values()
        return values.dtype.itemsize * math.prod(values.shape[1:])

    def packed(self) -> torch.Tensor:
        """Return the message of this rank, in bytes."""
        indices, values, device = self.tensor.indices(), self.tensor.values(), self.tensor.device
        axes, count = indices.shape
        message = torch.zeros(self._start + self._row_bytes * self.most, dtype=torch.uint8, device=device)
        message[:8] = torch.tensor([count], device=device).view(torch.uint8)
        message[8 : 8 + 8 * axes * count] = indices.reshape(-1).view(torch.uint8)
        end = self._start + self._row_bytes * count
        message[self._start : end] = values.contiguous().reshape(-1).view(torch.uint8)
        return message

    def added(self, gathered: torch.Tensor, *, average: bool) -> torch.Tensor:
        """Return the sum or the average of the tensors of all messages, one after another in `gathered`."""
        values, axes = self.tensor.values(), self.tensor.sparse_dim()
        dtype = values.dtype
        wide = torch.float32 if dtype in NARROW.values() else dtype
        ranks = [self._rows_of(one) for one in gathered.view(-1, self._start + self._row_bytes * self.most)]
        numbers = torch.unique(torch.cat([places for places, _ in ranks]))
        total = torch.zeros(len(numbers), *values.shape[1:], dtype=wide, device=values.device)
        filled = [(places, found.to(wide)) for places, found in ranks if len(places)]
        for places, found in filled:
            total.index_add_(0, torch.searchsorted(numbers, places), found)
        if len(filled) == 1:
            total = filled[0][1]  # as torch adds a tensor without rows: a -0.0 stays
        if average:
            total = total / len(ranks)
        where = torch.stack(torch.unravel_index(numbers, self.tensor.shape[:axes]))
        return sparse_rows(where, total.to(dtype), self.tensor.shape)

    def _rows_of(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of a rank's rows, counted over all sparse axes, and their values."""
        values, axes = self.tensor.values(), self.tensor.sparse_dim()
        held = int(message[:8].clone().view(torch.int64))
        places = message[8 : 8 + 8 * axes * held].clone().view(torch.int64).view(axes, held)
        line = message[self._start : self._start + self._row_bytes * held].clone()
        numbers = torch.zeros(held, dtype=torch.int64, device=message.device)
        for place, size in zip(places, self.tensor.shape[:axes], strict=True):
            numbers = numbers * size + place
        return numbers, line.view(values.dtype).view(held, *values.shape[1:])


def average_rows(communicator: Communicator, gradient: torch.Tensor, *, async_op: bool) -> Handle[Any]:
    """Average a sparse COO tensor over all ranks by their rows, in place; all ranks get the same bits.

    The gradient becomes coalesced, with every row that any rank has. The call waits for the largest number of rows of a
    rank. One rank in each process.
    """
    own = gradient.coalesce()
    most = torch.tensor([own.indices().shape[1]], device=gradient.device)
    reduce_line(communicator, [most], "max")
    message = RowMessage(own, int(most))

    def added(gathered: torch.Tensor) -> torch.Tensor:
        gradient.copy_(message.added(gathered, average=True))
        return gradient

    asynchronous = async_op or communicator.on_failure == "shrink"
    return communicator._in_order.around(
        communicator.all_gather(message.packed(), async_op=asynchronous)
    ).then(added)


def start_sum_of_rows(communicator: Communicator, tensor: torch.Tensor, op: str) -> Handle[torch.Tensor]:
    """Start to add up or average ("sum", "avg") sparse COO tensors of all ranks; the handle has the result.

    It runs in the background, in the order of the other collectives. All ranks raise `RefusedError` if shapes, types or
    sparse axes differ.
    """
    own = tensor.detach().coalesce()
    axes = "axis" if own.sparse_dim() == 1 else "axes"
    text = f"{dtype_of(own)} of shape {tuple(own.shape)} with {own.sparse_dim()} sparse {axes}, {op}"
    header = np.zeros(HEADER_BYTES, np.uint8)
    header[:8] = np.frombuffer(np.int64(own.indices().shape[1]).tobytes(), np.uint8)
    encoded = text.encode()[: HEADER_BYTES - 8]
    header[8 : 8 + len(encoded)] = np.frombuffer(encoded, np.uint8)

    def run() -> torch.Tensor:
        found = communicator._all_gather_in_order(torch.from_numpy(header))
        headers = found.numpy().reshape(-1, HEADER_BYTES)
        texts = [one[8:].tobytes().rstrip(b"\0").decode(errors="replace") for one in headers]
        for rank, one in enumerate(texts):
            if one != texts[0]:
                raise RefusedError(
                    f"sparse tensors must be alike on all ranks, got {texts[0]} on rank 0, and {one} on rank {rank}",
                    rank=communicator.rank,
                )
        most = int(headers[:, :8].copy().view(np.int64).max())
        message = RowMessage(own, most)
        return message.added(communicator._all_gather_in_order(message.packed()), average=op == "avg")

    return communicator._submit(run)


def check_sparse(tensors: Sequence[torch.Tensor], op: str) -> None:
    """Raise `UsageError` if a sparse tensor cannot be reduced by its rows; `op` is empty for an unknown one.

    >>> check_sparse([torch.ones(2).to_sparse()], "max")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: all_reduce of a sparse tensor must be a sum or an average, got max; convert it with \
    to_dense()
    """
    for one in tensors:
        if one.layout != torch.sparse_coo:
            raise UsageError(
                f"tensor must be dense or sparse COO, got {one.layout}; convert it with to_sparse_coo()"
            )
        if len(tensors) > 1:
            raise UsageError(
                f"sparse tensors must be reduced one at a time, got {len(tensors)}; call once for each"
            )
        if not one.sparse_dim():
            raise UsageError("a sparse tensor must have a sparse axis, got none; convert it with to_dense()")
        if one.dtype not in (*FLOATS, *INTEGERS):
            raise UsageError(
                f"a sparse tensor must be of numbers, got {dtype_of(one)}; convert it to float32"
            )
        if op not in ("sum", "avg"):
            raise UsageError(
                f"all_reduce of a sparse tensor must be a sum or an average, got {op or 'another operation'}; convert "
                "it with to_dense()"
            )
        if op == "avg" and one.dtype not in FLOATS:
            raise UsageError(
                f"an average must be of floating-point numbers, got {dtype_of(one)}; use ReduceOp.SUM"
            )


def rows_in(values: torch.Tensor, axes: int, also: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows of a dense tensor that are not zero as a sparse one; the first `axes` axes number rows.

    `also` is an (axes, n) int64 tensor of rows that are included in any case.

    >>> rows_in(torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]), 1, torch.tensor([[2]])).indices().tolist()
    [[1, 2]]
    """
    chosen = values.ne(0)
    if values.dim() > axes:
        chosen = chosen.flatten(axes).any(-1)
    if also is not None:
        chosen[tuple(also)] = True
    where = chosen.nonzero().T
    return sparse_rows(where, values[tuple(where)], values.shape)


def sparse_rows(where: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a sparse tensor of rows in ascending order without repetition."""
    return torch.sparse_coo_tensor(where, values, shape, is_coalesced=True, check_invariants=False)
