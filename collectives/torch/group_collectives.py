"""Run the collectives of the process group "topoplan": by a plan, or by inner groups of gloo and NCCL.

Every collective checks its arguments first, and all ranks refuse wrong ones. Collectives by plan, and those of gloo for
tensors on the CPU, run in one order and only once all ranks agree on them, so a call that has a plan on some ranks only
is an error on all of them. NCCL is called at once, in the caller's thread, without an agreement.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from collectives.backends.uneven_exchange import check_counts
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import CallQueue, Handle, in_step
from collectives.tables.numpy_arrays import reduction
from collectives.tables.torch_arrays import TORCH_DTYPES
from collectives.torch.futures import JointWork, PlannedWork, future_of
from collectives.torch.group_arguments import (
    as_types,
    blocks_of,
    check_alike,
    check_blocks,
    check_dense,
    check_length,
    check_results,
    check_single,
    copy_lines,
    dtype_of,
    given_options,
    joined_line,
    line_of,
    method_of,
    moved_line,
    numpy_dtype,
    op_name,
    operation_of,
    parts_of,
    split_counts,
    times,
)
from collectives.torch.sparse_rows import check_sparse, start_sum_of_rows
from topoplan.errors import UsageError

Result = TypeVar("Result")


LOOK = timedelta(seconds=0.5)
"""How often a rank that waits for the inner group looks whether another rank has ended the job."""


def wait_beneath(work: dist.Work, comm: Communicator) -> None:
    """Wait for a work of the inner group; raise the failure of the job if a rank has left it without its part."""
    while True:
        began = time.monotonic()
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            # gloo never completes the work of a reduce_scatter that it refuses
            if work.is_completed() or time.monotonic() - began < LOOK.total_seconds() / 2:
                raise
        comm._check_job()


UNPLANNED = CallQueue()
"""The queue of a group without a communicator."""


class GroupCollectives:
    """See `collectives.torch.process_group.ProcessGroupTopoplan`: "plan or beneath", for all of its faces."""

    inner: dist.ProcessGroup
    served: str
    communicator: Communicator | None
    _block: list[dist.Work] | None
    """Works of a block that ends in one work; None outside of one."""
    _timed_out: list[Handle[Any]]
    """Collectives for which a wait has timed out."""

    def rank(self) -> int:
        """Return this process's rank among the survivors, as `size`."""
        return self.inner.rank() if self.communicator is None else self.communicator.rank

    def size(self) -> int:
        """Return the number of survivors: between two collectives the same on all of them.

        DDP divides by it before it adds gradients up: ranks with other numbers would scale theirs otherwise.
        """
        return self.inner.size() if self.communicator is None else self.communicator.size

    @property
    def _in_order(self) -> CallQueue:
        return UNPLANNED if self.communicator is None else self.communicator._in_order

    def _refuse_for(self, error: BaseException) -> None:
        if self.communicator is not None:
            self.communicator._refuse_for(error)

    @abstractmethod
    def _planned(self) -> bool:
        """Return whether there is a plan; all ranks agree on it in the first collective."""

    @in_step
    def allreduce(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(tensors, list):
            return self.inner.allreduce(tensors, *given_options(opts), *others)
        if any(one.layout != torch.strided for one in tensors):
            return self._reduced_rows(tensors, opts)
        self._check_on_all(lambda: check_results(tensors, "tensor"))
        if len(tensors) == 1 and self._reduces(tensors, opts):
            return self._reduced(tensors, opts)
        return self._in_place("allreduce", tensors, opts, op=op_name(opts))

    @in_step
    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduced_rows(tensors, opts)

    @in_step
    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(tensors, list):
            return self.inner.allreduce_coalesced(tensors, *given_options(opts), *others)
        self._check_on_all(lambda: check_results(tensors, "tensor"))
        if self._reduces(tensors, opts):
            return self._reduced(tensors, opts)
        return self._in_place("allreduce_coalesced", tensors, opts, op=op_name(opts))

    @in_step
    def reduce(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(tensors, list) or opts is None:
            return self.inner.reduce(tensors, *given_options(opts), *others)
        root = int(opts.rootRank)

        def check() -> None:
            check_single(tensors, "tensors")
            if root == self.rank():
                check_results(tensors, "tensor")

        self._check_on_all(check)
        return self._in_place(
            "reduce", tensors, opts, op=op_name(opts), root=root, written=root == self.rank()
        )

    @in_step
    def broadcast(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(tensors, list) or opts is None:
            return self.inner.broadcast(tensors, *given_options(opts), *others)
        root = int(opts.rootRank)

        def check() -> None:
            check_single(tensors, "tensors")
            check_dense(tensors, "tensor")
            if root != self.rank():
                check_results(tensors, "tensor")

        self._check_on_all(check)
        written = root != self.rank()
        if not self._carries(tensors, None):
            return self._in_place("broadcast", tensors, opts, root=root, moved=True, written=written)
        (tensor,) = tensors
        flat = line_of(tensor)
        return self._started(
            lambda comm: comm.broadcast(flat, root=root, out=flat, async_op=True),
            flat,
            lambda: copy_lines([tensor] if written else [], [flat]),
            tensors,
            opts,
        )

    @in_step
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(inputs, list):
            return self.inner.allgather(outputs, inputs, *given_options(opts), *others)

        def check() -> bool:
            check_single(inputs, "tensors")
            check_single(outputs, "output lists")
            check_length(outputs[0], self.size(), "output tensors")
            uneven = self._moves_uneven(outputs[0], inputs)
            only = self.rank() if uneven else None
            check_alike(outputs[0], inputs[0], "output tensor", "the input", only=only)
            check_results(outputs[0], "output tensor")
            return uneven

        if self._check_on_all(check):
            mine, counts = line_of(inputs[0]), [one.numel() for one in outputs[0]]
            whole = mine.new_empty(sum(counts))
            return self._started(
                lambda comm: comm.all_gather_v(mine, counts, out=whole, async_op=True),
                mine,
                lambda: copy_lines(outputs[0], parts_of(whole, outputs[0])),
                outputs,
                opts,
            )
        if self._carries(inputs, None):
            return self._gathered([[one] for one in outputs[0]], inputs, outputs, opts)
        flat, lines = moved_line(inputs[0]), [moved_line(one) for one in outputs[0]]
        return self._by_inner_group(
            lambda: self.inner.allgather([lines], [flat], *given_options(opts)),
            inputs,
            outputs,
            opts,
            lambda: copy_lines(outputs[0], as_types(lines, outputs[0])),
            collective="allgather",
            count=self.size() * inputs[0].numel(),
        )

    @in_step
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        """Gather several tensors of all ranks as one; outputs are a list for each rank."""

        def check() -> None:
            check_length(outputs, self.size(), "output lists")
            for row in outputs:
                check_length(row, len(inputs), "tensors of an output list")
                for one, like in zip(row, inputs, strict=True):
                    check_alike([one], like, "output tensor", "the input")
            check_results([one for row in outputs for one in row], "output tensor")

        self._check_on_all(check)
        if self._carries(inputs, None):
            return self._gathered(outputs, inputs, outputs, opts)
        flats, rows = (
            [moved_line(one) for one in inputs],
            [[moved_line(one) for one in row] for row in outputs],
        )

        def finish() -> None:
            for one, row in zip(outputs, rows, strict=True):
                copy_lines(one, as_types(row, one))

        return self._by_inner_group(
            lambda: self.inner.allgather_coalesced(rows, flats, *given_options(opts), *others),
            inputs,
            outputs,
            opts,
            finish,
            collective="allgather",
            count=self.size() * sum(one.numel() for one in inputs),
        )

    @in_step
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        def check() -> None:
            check_blocks(output, input, self.size(), "output", "input")
            check_results([output], "output")

        self._check_on_all(check)
        carried = self._carries([input], None)
        flat, whole = (
            (line_of(input), line_of(output)) if carried else (moved_line(input), moved_line(output))
        )
        if not carried:
            return self._by_inner_group(
                lambda: method_of(self.inner, "all_gather_single", "_allgather_base")(
                    whole, flat, *given_options(opts)
                ),
                [input],
                [output],
                opts,
                lambda: copy_lines([output], as_types([whole], [output])),
                collective="allgather",
                count=output.numel(),
            )
        return self._started(
            lambda comm: comm.all_gather(flat, out=whole, async_op=True),
            flat,
            lambda: copy_lines([output], [whole]),
            [output],
            opts,
        )

    @in_step
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def check() -> int:
            size = self.size()
            check_length(outputs, len(inputs), "outputs", of="inputs")
            for one, other in zip(outputs, inputs, strict=True):
                check_blocks(one, other, size, "output", "input")
            check_results(outputs, "output")
            return size

        size = self._check_on_all(check)
        if self._carries(inputs, None):
            lines = [line_of(one) for one in outputs]
            rows = list(zip(*(blocks_of(one, size) for one in lines), strict=True))
            return self._gathered(rows, inputs, outputs, opts, then=lambda: copy_lines(outputs, lines))
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return JointWork(works)

    @in_step
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(outputs, list):
            return self.inner.reduce_scatter(outputs, inputs, *given_options(opts), *others)

        def check() -> bool:
            check_single(outputs, "outputs")
            check_single(inputs, "input lists")
            check_length(inputs[0], self.size(), "input tensors")
            uneven = self._moves_uneven(inputs[0], outputs) and self._reduces(outputs, opts)
            only = self.rank() if uneven else None
            check_alike(inputs[0], outputs[0], "input tensor", "the output", only=only)
            check_results(outputs, "output")
            return uneven

        uneven = self._check_on_all(check)
        whole = joined_line(inputs[0])
        if uneven:
            return self._scattered(outputs, whole, opts, [one.numel() for one in inputs[0]])
        if self._reduces([*inputs[0], *outputs], opts):
            return self._scattered(outputs, whole, opts)
        return self._scattered_by_inner_group(outputs[0], whole, opts)

    @in_step
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        def check() -> None:
            check_blocks(input, output, self.size(), "input", "output")
            check_results([output], "output")

        self._check_on_all(check)
        if self._reduces([input, output], opts):
            return self._scattered([output], line_of(input), opts)
        return self._scattered_by_inner_group(output, line_of(input), opts)

    @in_step
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def check() -> int:
            size = self.size()
            check_length(outputs, len(inputs), "outputs", of="inputs")
            for one, other in zip(outputs, inputs, strict=True):
                check_blocks(other, one, size, "input", "output")
            check_results(outputs, "output")
            return size

        size = self._check_on_all(check)
        if self._reduces([*inputs, *outputs], opts):
            blocks = zip(*(blocks_of(line_of(one), size) for one in inputs), strict=True)
            return self._scattered(outputs, joined_line([part for row in blocks for part in row]), opts)
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return JointWork(works)

    @in_step
    def alltoall_base(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Any:
        """Send every rank its block of a tensor."""

        def check() -> tuple[list[int], list[int]]:
            check_results([output], "output")
            return split_counts(output, input, output_split_sizes, input_split_sizes, self.size())

        received, sent = self._check_on_all(check)
        if output_split_sizes or input_split_sizes or not self._carries([input], None):
            given = bool(output_split_sizes or input_split_sizes)
            return self._uneven(output, input, received, sent, opts, [output], op="split" if given else None)
        flat, whole = line_of(input), line_of(output)
        return self._started(
            lambda comm: comm.all_to_all(flat, out=whole, async_op=True),
            flat,
            lambda: copy_lines([output], [whole]),
            [output],
            opts,
        )

    @in_step
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def check() -> None:
            check_length(outputs, self.size(), "output tensors")
            check_length(inputs, self.size(), "input tensors")
            for name, listed in (("output", outputs), ("input", inputs)):
                check_dense(listed, f"{name} tensor")
                for number, one in enumerate(listed):
                    if one.dtype != inputs[0].dtype:
                        raise UsageError(
                            f"{name} tensor {number} must have {dtype_of(inputs[0])} as input tensor 0, got "
                            f"{dtype_of(one)}"
                        )
            check_results(outputs, "output tensor")

        self._check_on_all(check)
        whole, flat = torch.cat([line_of(one) for one in outputs]), joined_line(inputs)
        counts = [[one.numel() for one in listed] for listed in (outputs, inputs)]
        return self._uneven(
            whole,
            flat,
            counts[0],
            counts[1],
            opts,
            outputs,
            then=lambda: copy_lines(outputs, parts_of(whole, outputs)),
        )

    @in_step
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(inputs, list) or opts is None:
            return self.inner.gather(outputs, inputs, *given_options(opts), *others)
        root = int(opts.rootRank)

        def check() -> list[torch.Tensor]:
            check_single(inputs, "tensors")
            check_dense(inputs, "tensor")
            if root != self.rank():
                return []
            check_single(outputs, "output lists")
            (listed,) = outputs
            check_length(listed, self.size(), "output tensors")
            only = root if self._moves_uneven(listed, inputs) else None
            check_alike(listed, inputs[0], "output tensor", "the input", only=only)
            check_results(listed, "output tensor")
            return list(listed)

        listed = self._check_on_all(check)
        if self._moves(inputs):
            line, counts = line_of(inputs[0]), [one.numel() for one in listed]
            whole = line.new_empty(sum(counts)) if listed else None
            return self._started(
                lambda comm: comm.gather(line, counts or None, root=root, out=whole, async_op=True),
                line,
                lambda: copy_lines(listed, [] if whole is None else parts_of(whole, listed)),
                outputs,
                opts,
            )
        flat, lines = moved_line(inputs[0]), [moved_line(one) for one in listed]
        return self._by_inner_group(
            lambda: self.inner.gather([lines] if lines else [], [flat], opts),
            inputs,
            outputs,
            opts,
            lambda: copy_lines(listed, as_types(lines, listed)),
            collective="gather",
            count=inputs[0].numel(),
            root=root,
        )

    @in_step
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        if not isinstance(outputs, list) or opts is None:
            return self.inner.scatter(outputs, inputs, *given_options(opts), *others)
        root = int(opts.rootRank)

        def check() -> list[torch.Tensor]:
            check_single(outputs, "outputs")
            check_dense(outputs, "output")
            check_results(outputs, "output")
            if root != self.rank():
                return []
            check_single(inputs, "input lists")
            (listed,) = inputs
            check_length(listed, self.size(), "input tensors")
            only = root if self._moves_uneven(listed, outputs) else None
            check_alike(listed, outputs[0], "input tensor", "the output", only=only)
            return list(listed)

        listed = self._check_on_all(check)
        if self._moves(outputs):
            found, counts = line_of(outputs[0]), [one.numel() for one in listed]
            line = joined_line(listed) if listed else found
            return self._started(
                lambda comm: comm.scatter(line, counts or None, root=root, out=found, async_op=True),
                line,
                lambda: copy_lines(outputs, [found]),
                outputs,
                opts,
            )
        flat, lines = moved_line(outputs[0]), [moved_line(one) for one in listed]
        return self._by_inner_group(
            lambda: self.inner.scatter([flat], [lines] if lines else [], opts),
            outputs,
            outputs,
            opts,
            lambda: copy_lines(outputs, as_types([flat], outputs)),
            collective="scatter",
            count=outputs[0].numel(),
            root=root,
        )

    @in_step
    def barrier(self, opts: Any = None, *others: Any) -> Any:
        self._planned()
        return self._by_inner_group(
            lambda: self.inner.barrier(*given_options(opts), *others), [], [], opts, collective="barrier"
        )

    def send(self, tensors: Any, *where: Any) -> Any:
        self._check_numbers()
        lines = [one if one.is_contiguous() else line_of(one) for one in tensors]
        return self._one_way(self.inner.send(lines, *where), lines, None)

    def _check_numbers(self) -> None:
        """Raise `BackendError` if the inner group already counts fewer ranks than callers do."""
        if self.communicator is not None:
            self.communicator._check_numbers()

    def recv(self, tensors: Any, *where: Any) -> Any:
        return self._received(self.inner.recv, tensors, *where)

    def recv_anysource(self, tensors: Any, *where: Any) -> Any:
        return self._received(self.inner.recv_anysource, tensors, *where)

    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        op, factor = operation_of(opts)
        flat = times(joined_line(tensors), factor)
        shaped = flat.view(tensors[0].shape) if len(tensors) == 1 else flat  # ranks compare shapes
        return self._started(
            lambda comm: comm.all_reduce(shaped, op=op, out=shaped, async_op=True),
            flat,
            lambda: copy_lines(tensors, parts_of(flat, tensors)),
            tensors,
            opts,
        )

    def _reduced_rows(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduce a sparse tensor by its rows: by plan on the CPU."""
        if self._planned() and all(one.device.type == "cpu" for one in tensors):
            op, factor = operation_of(opts)
            self._check_on_all(lambda: check_sparse(tensors, op if factor is None else ""))
            assert self.communicator is not None, "there is a plan"
            handle = start_sum_of_rows(self.communicator, tensors[0], op)
            arrays, device = self.communicator.arrays, tensors[0].device

            def finish() -> None:
                # in inference mode torch could not use the indices and values of another tensor later
                with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
                    tensors[0].copy_(handle.wait())

            future = future_of(handle, tensors, device=device, arrays=arrays, finish=finish)
            return self._record(PlannedWork(handle, future, tensors, self._timed_out.append), opts)
        return self._in_place("allreduce", tensors, opts, op=op_name(opts))

    def _gathered(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        results: list[Any],
        opts: Any,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> Any:
        """Gather tensors of every rank into a row of tensors for each, of the ranks at the call."""
        flat = joined_line(inputs)
        whole = flat.new_empty(len(rows) * flat.numel())

        def finish() -> None:
            for row, line in zip(rows, blocks_of(whole, len(rows)), strict=True):
                copy_lines(row, parts_of(line, row))
            then()

        return self._started(
            lambda comm: comm.all_gather(flat, out=whole, async_op=True), flat, finish, results, opts
        )

    def _scattered(
        self,
        outputs: list[torch.Tensor],
        whole: torch.Tensor,
        opts: Any,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Reduce a line by plan into equal blocks, or blocks of these counts."""
        op, factor = operation_of(opts)
        given, flat = times(whole, factor), joined_line(outputs)

        def start(comm: Communicator) -> Handle[Any]:
            if counts is None:
                return comm.reduce_scatter(given, op=op, out=flat, async_op=True)
            started: Handle[Any] = comm.reduce_scatter_v(given, counts, op=op, out=flat, async_op=True)
            return started

        return self._started(
            start,
            given,
            lambda: copy_lines(outputs, parts_of(flat, outputs)),
            outputs,
            opts,
        )

    def _scattered_by_inner_group(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> Any:
        flat = line_of(output)
        return self._by_inner_group(
            lambda: method_of(self.inner, "reduce_scatter_single", "_reduce_scatter_base")(
                flat, whole, *given_options(opts)
            ),
            [whole],
            [output],
            opts,
            lambda: copy_lines([output], [flat]),
            collective="reduce_scatter",
            op=op_name(opts),
            count=whole.numel(),
        )

    def _uneven(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        received: list[int],
        sent: list[int],
        opts: Any,
        results: list[Any],
        *,
        op: str | None = "split",
        then: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run an all-to-all of given counts from and to each rank: by plan, or by the inner group, in bytes."""
        if op is not None and input.device.type == "cpu" and self._carries([input], None):
            line, found = line_of(input), line_of(output)

            def fill() -> None:
                copy_lines([output], [found])
                then()

            return self._started(
                lambda comm: comm.all_to_all_v(line, sent, received, out=found, async_op=True),
                line,
                fill,
                results,
                opts,
            )
        flat, whole, itemsize = moved_line(input), moved_line(output), input.element_size()
        itemsize = itemsize if flat.dtype == torch.uint8 else 1
        counts = [[itemsize * one for one in listed] for listed in (received, sent)]

        def run() -> Any:
            if self.communicator is not None and input.device.type == "cpu":
                texts = self.communicator._gather_texts_in_order(json.dumps([sent, received]))
                check_counts(*zip(*map(json.loads, texts), strict=True))
            call = method_of(self.inner, "all_to_all_single", "alltoall_base")
            return call(whole, flat, *counts, *given_options(opts))

        def finish() -> None:
            copy_lines([output], as_types([whole], [output]))
            then()

        return self._by_inner_group(run, [input], results, opts, finish, collective="alltoall", op=op)

    def _in_place(
        self,
        name: str,
        tensors: list[torch.Tensor],
        opts: Any,
        *,
        op: str | None = None,
        root: int | None = None,
        moved: bool = False,
        written: bool = True,
    ) -> Any:
        """Run a collective of the inner group on tensors that are input and result, as lines."""
        dense = all(one.layout == torch.strided for one in tensors)
        lines = [(moved_line(one) if moved else line_of(one)) if dense else one for one in tensors]
        return self._by_inner_group(
            lambda: getattr(self.inner, name)(lines, *given_options(opts)),
            tensors,
            tensors,
            opts,
            lambda: copy_lines(*((tensors, as_types(lines, tensors)) if dense and written else ([], []))),
            collective=name.removesuffix("_coalesced"),
            op=op,
            root=root,
            count=sum(one.numel() for one in tensors),
        )

    def _by_inner_group(
        self,
        call: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        results: list[Any],
        opts: Any,
        finish: Callable[[], None] = lambda: None,
        **agreed: Any,
    ) -> Any:
        """Run a collective by the inner group: on the CPU in the order of those by plan, once all ranks agree on it.

        `call` starts it and returns the work of the inner group; `finish` copies the results to the caller's tensors;
        `agreed` must be the same on all ranks (`Communicator.run_in_order`).
        """
        comm = self.communicator
        if comm is None or any(one.device.type != "cpu" for one in inputs) or self.served != "cpu:gloo":
            device = inputs[0].device if inputs else None
            return self._record(JointWork([call()], finish, device, results), opts)
        types = dtype_of(inputs[0]) if inputs else ""
        handle = comm._run_in_order(lambda: wait_beneath(call(), comm), dtype=types, **agreed)
        device = torch.device("cpu")
        future = future_of(handle, results, device=device, arrays=comm.arrays, finish=finish)
        return self._record(PlannedWork(handle, future, results, self._timed_out.append), opts)

    def _received(self, receive: Callable[..., Any], tensors: list[torch.Tensor], *where: Any) -> Any:
        self._check_numbers()
        check_results(tensors, "tensor")
        lines = [one if one.is_contiguous() else line_of(one) for one in tensors]
        return self._one_way(receive(lines, *where), lines, tensors)

    def _one_way(self, work: Any, lines: list[torch.Tensor], tensors: list[torch.Tensor] | None) -> Any:
        if tensors is not None and any(one is not line for one, line in zip(tensors, lines, strict=True)):
            work = JointWork([work], lambda: copy_lines(tensors, lines), lines[0].device, tensors)
        elif tensors is None:
            work = JointWork([work], lines.clear)  # which must stay until then
        if self._block is not None and lines[0].device.type == "cpu":
            self._block.append(work)
        return work

    def _started(
        self,
        start: Callable[[Communicator], Handle[Any]],
        given: torch.Tensor,
        finish: Callable[[], None],
        tensors: list[Any],
        opts: Any,
    ) -> Any:
        assert self.communicator is not None, "`_carries` was asked before"
        handle = start(self.communicator)
        arrays = self.communicator.arrays
        future = future_of(handle, tensors, device=given.device, arrays=arrays, finish=finish)
        return self._record(PlannedWork(handle, future, tensors, self._timed_out.append), opts)

    def _record(self, work: dist.Work, opts: Any) -> dist.Work | None:
        """Return a work; keep it in a block that ends in one work, and return it for asynchronous calls only."""
        if self._block is None:
            return work
        self._block.append(work)
        return work if getattr(opts, "asyncOp", False) else None

    @in_step
    def _check_on_all(self, check: Callable[[], Result]) -> Result:
        """Return the result of a check of arguments, once all ranks have agreed on a plan."""
        self._planned()
        return check()

    def _reduces(self, tensors: Sequence[Any], opts: Any) -> bool:
        op, factor = operation_of(opts)
        if not op or (factor is not None and not all(one.is_floating_point() for one in tensors)):
            return False
        return self._carries(tensors, op)

    def _moves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether blocks of different lengths go by plan: on the CPU, of types that it carries."""
        return all(one.device.type == "cpu" for one in tensors) and self._carries(tensors, None)

    def _moves_uneven(self, blocks: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether blocks for all ranks, or of all, differ in length and go by plan."""
        return len({one.numel() for one in blocks}) > 1 and self._moves(tensors)

    def _carries(self, tensors: Sequence[Any], op: str | None) -> bool:
        """Return whether a plan can run a collective on tensors: the same on all ranks, as are their types."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in TORCH_DTYPES:
                return False
            if op is not None:
                try:
                    reduction(op, numpy_dtype(tensor))
                except UsageError:
                    return False
        return len({tensor.dtype for tensor in tensors}) == 1 and self._planned()
