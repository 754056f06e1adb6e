"""Check the arguments of a process group's collectives, and convert reductions and tensors to lines of elements.

torch checks little of the arguments that it hands to a group, and gloo of torch 2.13 less: negative split sizes and
sizes that do not add up overwrite memory, and it moves the first bytes at the address of a tensor, whatever its
strides. So everything is checked here before anything moves, and only contiguous lines are handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from collectives.tables.torch_arrays import TORCH_DTYPES
from topoplan.errors import UsageError

OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
)
"""Reductions of plans."""


def operation_of(opts: Any) -> tuple[str, Any]:
    """Return the reduction of a collective, empty if plans have none, and the factor of PREMUL_SUM or None."""
    if opts is None:
        return "", None
    if opts.reduceOp == dist.ReduceOp.PREMUL_SUM:
        op = opts.reduceOp
        return "sum", op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # before torch 2.13
    return next((name for op, name in OPERATIONS if opts.reduceOp == op), ""), None


def given_options(opts: Any) -> tuple[Any, ...]:
    """Return the options of a collective as arguments: none if they are None."""
    return () if opts is None else (opts,)


def method_of(group: Any, *names: str) -> Callable[..., Any]:
    """Return the first of a group's methods: releases of torch differ in names."""
    found: Callable[..., Any] = getattr(group, next(name for name in names if hasattr(group, name)))
    return found


def op_name(opts: Any) -> str:
    """Return the reduction of a collective, as ranks compare it."""
    if opts is None:
        return "sum"
    return (
        operation_of(opts)[0] or str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2].lower()
    )


def line_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor one after another: its own memory if it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def joined_line(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors one after another; of one tensor as `line_of`."""
    return line_of(tensors[0]) if len(tensors) == 1 else torch.cat([line_of(one) for one in tensors])


def parts_of(line: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a line in parts as long as tensors."""
    return torch.split(line, [one.numel() for one in tensors])


def blocks_of(line: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Return a line in a part for each of `size` ranks.

    >>> blocks_of(torch.arange(4), 2)
    (tensor([0, 1]), tensor([2, 3]))
    """
    return line.view(size, -1).unbind() if line.numel() else [line] * size


def copy_lines(targets: Sequence[torch.Tensor], lines: Sequence[torch.Tensor]) -> None:
    """Copy lines into tensors, except lines that share their memory."""
    with torch.inference_mode():
        for target, line in zip(targets, lines, strict=False):
            if target.data_ptr() != line.data_ptr():
                target.detach().copy_(line.view(target.shape))


def moved_line(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that is only moved: on the CPU as bytes, since gloo lacks some types."""
    line = line_of(tensor)
    return line.view(torch.uint8) if line.device.type == "cpu" else line


def as_types(lines: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lines, perhaps of bytes, with the types of tensors."""
    return [line.view(one.dtype) for line, one in zip(lines, tensors, strict=False)]


def times(line: torch.Tensor, factor: Any) -> torch.Tensor:
    """Return a line multiplied by the factor of `operation_of`; the line itself if that is None."""
    return line if factor is None else line * factor


def numpy_dtype(tensor: torch.Tensor) -> Any:
    """Return numpy's type that stands for a tensor in `collectives.tables.numpy_arrays.reduction`."""
    return np.dtype("float32" if tensor.dtype == torch.bfloat16 else TORCH_DTYPES[tensor.dtype])


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type, as messages and agreements have it."""
    return str(tensor.dtype).removeprefix("torch.")


def check_results(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise `UsageError` if results of one type would be written to one place of memory twice.

    >>> check_results([torch.zeros(4), torch.zeros(4, 3)[:, 1]], "output")
    >>> check_results([torch.zeros(1).expand(4)], "tensor")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: tensor of shape (4,) and strides (0,) has several elements at one place of memory, \
    where results cannot be written; pass tensor.clone()
    """
    spans: list[tuple[int, int, int]] = []
    for number, one in enumerate(tensors):
        if one.layout != torch.strided or not one.numel() or one.device.type == "meta":
            continue
        name = what if len(tensors) == 1 else f"{what} {number}"
        if not one.is_contiguous() and _overlaps_itself(one):
            raise UsageError(
                f"{name} of shape {tuple(one.shape)} and strides {one.stride()} has several elements at one place of "
                f"memory, where results cannot be written; pass {what}.clone()"
            )
        start = one.data_ptr()
        stop = start + (1 + _last(one)) * one.element_size()
        for other_start, other_stop, other in spans:
            if start < other_stop and other_start < stop and _share(tensors[other], one):
                raise UsageError(f"{what}s {other} and {number} share memory; give each its own")
        spans.append((start, stop, number))


def check_dense(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise `UsageError` if a tensor is sparse or quantized, whose elements are not a line of memory.

    >>> check_dense([torch.ones(2).to_sparse()], "input")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: input must be a dense tensor, got torch.sparse_coo; convert it with to_dense()
    """
    for number, one in enumerate(tensors):
        name = what if len(tensors) == 1 else f"{what} {number}"
        if one.layout != torch.strided:
            raise UsageError(f"{name} must be a dense tensor, got {one.layout}; convert it with to_dense()")
        if one.is_quantized:
            raise UsageError(f"{name} must not be quantized, got {dtype_of(one)}; pass its int_repr()")


def check_alike(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str, of: str, *, only: int | None = None
) -> None:
    """Raise `UsageError` if tensors differ from `like` in type or number of elements; `only` one if that is given."""
    check_dense([like], of.removeprefix("the "))
    check_dense(tensors, what)
    for number, one in enumerate(tensors):
        longer = one.numel() != like.numel() and only in (None, number)
        if one.dtype != like.dtype or longer:
            name = what if len(tensors) == 1 else f"{what} {number}"
            raise UsageError(
                f"{name} must have {like.numel()} elements of {dtype_of(like)} as {of}, got {one.numel()} of "
                f"{dtype_of(one)}"
            )


def check_length(listed: Sequence[object], size: int, what: str, of: str = "ranks") -> None:
    """Raise `UsageError` if a list does not have one item for each rank, or for each of `of`."""
    if len(listed) != size:
        raise UsageError(f"{what} must be one for each of {size} {of}, got {len(listed)}")


def check_single(listed: Sequence[object], what: str) -> None:
    """Raise `UsageError` if a list does not have one item."""
    if len(listed) != 1:
        raise UsageError(f"{what} must be a list of one, got {len(listed)}")


def check_blocks(
    whole: torch.Tensor, block: torch.Tensor, size: int, whole_name: str, block_name: str
) -> None:
    """Raise `UsageError` if a tensor does not have the elements of one block for each rank."""
    check_dense([whole], whole_name)
    check_dense([block], block_name)
    if whole.dtype != block.dtype or whole.numel() != size * block.numel():
        raise UsageError(
            f"{whole_name} must have {size * block.numel()} elements of {dtype_of(block)}, {size} times those of "
            f"{block_name}, got {whole.numel()} of {dtype_of(whole)}"
        )


def split_counts(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    size: int,
) -> tuple[list[int], list[int]]:
    """Return how many elements come from each rank, and go to each, in an all-to-all.

    Splits are rows of dimension 0 for each rank; empty for equal numbers.

    >>> split_counts(torch.zeros(3, 2), torch.zeros(4, 2), [2, 1], [], 2)
    ([4, 2], [4, 4])
    >>> split_counts(torch.zeros(4), torch.zeros(4), [5, -1], [2, 2], 2)
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: output_split_sizes must be whole numbers from 0 on, got [5, -1]
    """
    check_dense([output], "output")
    check_dense([input], "input")
    if output.dtype != input.dtype:
        raise UsageError(f"output must have {dtype_of(input)} as input, got {dtype_of(output)}")
    counts, widths = [], {}
    for name, tensor, given in (("output", output, output_splits), ("input", input, input_splits)):
        rows = tensor.shape[0] if tensor.dim() else 1
        widths[name] = tensor.numel() // rows if rows else None
        splits = _whole_numbers(given or (), name)
        if not splits:
            if rows % size:
                raise UsageError(
                    f"{name} must have a multiple of {size} rows for {size} ranks, got {rows}; "
                    f"pass {name}_split_sizes, or pad it to {rows + -rows % size}"
                )
            splits = [rows // size] * size
        if len(splits) != size:
            raise UsageError(f"{name}_split_sizes must be {size} numbers for {size} ranks, got {len(splits)}")
        if sum(splits) != rows:
            raise UsageError(
                f"{name}_split_sizes must add up to the {rows} rows of {name}, got {splits}, which is {sum(splits)}"
            )
        counts.append([one * (widths[name] or 0) for one in splits])
    if None not in widths.values() and widths["output"] != widths["input"]:
        raise UsageError(
            f"a row of output must have {widths['input']} elements as one of input, got {widths['output']}"
        )
    if not output_splits and not input_splits and output.numel() != input.numel():
        raise UsageError(
            f"output must have {input.numel()} elements as input, got {output.numel()}; pass split sizes"
        )
    return counts[0], counts[1]


def _whole_numbers(splits: Sequence[int], name: str) -> list[int]:
    try:
        found = [index(one) for one in splits]
    except TypeError:
        found = [-1]
    if min(found, default=0) < 0:
        raise UsageError(f"{name}_split_sizes must be whole numbers from 0 on, got {list(splits)}")
    return found


def _last(tensor: torch.Tensor) -> int:
    """Return the distance from the first element of a tensor to its last, in elements."""
    return sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reached = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= reached:
            return stride == 0 or len(np.unique(_places(tensor))) < tensor.numel()
        reached += (length - 1) * stride
    return False


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one type with overlapping ranges have an element at one place."""
    apart = other.data_ptr() - one.data_ptr()
    if (one.is_contiguous() and other.is_contiguous()) or apart % one.element_size():
        return True
    shifted = _places(other) + apart // one.element_size()
    return bool(np.isin(_places(one), shifted).any())


def _places(tensor: torch.Tensor) -> NDArray[np.int64]:
    """Return the distance of each element from the first."""
    found = np.zeros(1, np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = np.add.outer(found, np.arange(length, dtype=np.int64) * stride).ravel()
    return found
