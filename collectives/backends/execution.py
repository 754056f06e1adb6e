"""Run a checked request: plan, lower, allocate memory, let the back end move bytes, return results.

A back end that can fail after it has begun to write gets memory of this module: results are copied to the caller's
arrays when they are complete, so that these are either complete or untouched. For a back end that writes to the
caller's arrays at once, inputs that results would overwrite too early are copied first, as numpy's functions do.

A call like an earlier one (same collective, array type, dtype and shape) reuses its plan and its lowered table
(`CachedCall`). Only addresses and alignment are checked again; a call that is not aligned takes the long way. A
prepared call (`PreparedRequest`) has its arrays too, and checks only that they are still there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import NoneType
from typing import Any, Generic, TypeVar

from collectives.backends.backend import (
    AVERAGED,
    DIVIDED_FIRST,
    Backend,
    Call,
    PreparedRun,
    RankArrays,
    StartedCall,
)
from collectives.backends.demand_plans import demand_of, digest_of
from collectives.backends.exchange_rounds import ExchangeRounds
from collectives.backends.open_backend import check_helpers
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore, plan_locally
from collectives.backends.request import CallKind, Counts, Request
from collectives.backends.uneven_exchange import (
    UNEVEN,
    KnownCounts,
    UnevenCall,
    uneven_request,
)
from collectives.peers.agreement import Gather, plan_on_one_rank
from collectives.peers.control_plane import Signature, shape_text
from collectives.tables.lowering import PlanKey, lower, lower_to, lower_uneven
from collectives.tables.numpy_arrays import ArrayLibrary
from collectives.tables.transfer_table import (
    Given,
    RankBlocks,
    Traffic,
    TransferTable,
    UnevenBlocks,
    place_in,
)
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import Plan, Plans

Array = TypeVar("Array")
Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_CALL_KINDS = 64
"""Kinds of calls whose programs are kept."""

DEBUG = "TOPOPLAN_DEBUG"
"""The environment variable that prints every collective on stderr: 1 in the process of rank 0, all in every process."""


PlanQuery = tuple[str, int | None, str | None, Any, Any, int | None]
"""Collective, root, reduction, dtype and shape of the arrays, and their GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedCall:
    """The common part of all calls of one kind, for the one rank of this process.

    `run` is that of `Backend.repeated`, `dtype` the array library's, `kept` the `local_copy_parts`.
    """

    run: PreparedRun
    kind: CallKind
    table: TransferTable
    dtype: Any
    kept: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, run: PreparedRun, kind: CallKind, call: Call[Any], dtype: Any) -> CachedCall:
        """Return the common part of calls like one that has been run."""
        (one,) = call.memory
        return cls(run, kind, call.table, dtype, local_copy_parts(call.table, one.rank, one.given, one.block))

    def places(self, array: Any, out: Any, library: ArrayLibrary[Any]) -> tuple[int, int] | None:
        """Return the addresses of input and result, 0 for a result without `out`; None if the arrays do not fit.

        `array` has this dtype and the shape of the call.
        """
        kind = self.kind
        source, itemsize = library.address(array), kind.itemsize
        if source == 0 or source % itemsize:
            return None
        if out is None:
            return source, 0
        if not (
            type(out) in library.plain
            and out.dtype == self.dtype
            and out.shape == kind.shapes[0]
            and library.gpu(out) == library.gpu(array)
            and library.writeable(out)
        ):
            return None
        result = source if out is array else library.address(out)
        if result == 0 or result % itemsize:
            return None
        (given,), (block,) = kind.given, kind.blocks
        in_place = len(given) == 2 and source - given[0] * itemsize == result - block[0] * itemsize
        before = source + (given[1] - given[0]) * itemsize <= result
        behind = result + (block[1] - block[0]) * itemsize <= source
        return (source, result) if in_place or before or behind else None


class PreparedRequest(Generic[Array]):
    """A request that all ranks have agreed on, and run as often as they like, on arrays that keep their memory.

    `result` is that of every run; a list with one for each rank if this process has several. `quick` runs it as `run`
    once nothing remains to be prepared and its arrays lie on the host; else None.
    """

    def __init__(self, execution: Execution[Array], request: Request[Array]) -> None:
        self.request = request
        self._execution = execution
        backend, kind = execution.backend, request.kind
        held = [
            one if rank in kind.holders else None
            for rank, one in zip(backend.ranks, request.outputs, strict=True)
        ]
        self.result: Any = held[0] if backend.one_rank else held
        outputs = [one for one in held if one is not None]
        self._arrays = [
            *request.inputs,
            *(one for one in outputs if all(one is not i for i in request.inputs)),
        ]
        self._placed = backend.arrays.placed(self._arrays)
        self._on_gpu = backend.arrays.gpu(request.inputs[0]) is not None
        self._captured = False
        self._tries = 2
        self._bound: Callable[[], None] | None = None
        self.quick: Callable[[], None] | None = None

    def check(self) -> None:
        """Order the next run behind the caller's work; `UsageError` if an array has other memory or shape now."""
        if not self._placed():
            raise UsageError(
                f"the arrays of prepared call {self.request.prepared} must keep their memory and shape, and one was "
                "moved, freed or resized; prepare the call again"
            )
        if self._on_gpu:
            library = self._execution.backend.arrays
            self._captured = not library.follow_caller(*self._arrays)
            for array in self._arrays if self._captured else ():
                library.check(array, rank=self._execution.backend.ranks[0], what="array")

    def run(self) -> Any:
        """Run it once, as `Execution.run`."""
        if self._bound is None and self._tries:
            with self._execution.in_step():
                self._bound = self._execution.bind(self.request)
            self.quick = None if self._on_gpu else self._bound
            # a back end may need a run before it can repeat it
            self._tries -= self._execution.lowered(self.request.kind)
        if self._bound is None or self._captured:
            self._execution.run(self.request)
        else:
            self._bound()
        return self.result


class Execution(Generic[Array]):
    """Runs requests one after another; the state behind a `Communicator`.

    `traffic` counts what the collectives so far have moved, `exchanged` the agreements and transfers. `failure` is the
    error of another process that ended this, or None. `aborted`: `abort` was called. `completion` is the end of the
    last collective if a GPU may still run it.
    """

    def __init__(self, store: PlanStore, backend: Backend[Array], chunks: ChunkSizes) -> None:
        self.backend = backend
        self.chunks = chunks
        self.traffic = Traffic(backend.ranks)
        self.store = store
        self._calls = 0
        self._failed = False
        self.exchanged = 0
        self.failure: BackendError | None = None
        self.completion: StartedCall | None = None
        self.aborted = False
        setting = os.environ.get(DEBUG, "0")
        self._prints = setting == "all" or (setting not in ("", "0") and 0 in backend.ranks)
        self._staging: dict[tuple[int, str, str], Array] = {}
        self._lowered: dict[CallKind, tuple[PlanKey, TransferTable, Signature]] = {}
        self._caches = backend.one_rank and not self._prints
        self._cached: dict[PlanQuery, CachedCall] = {}
        self._counts: dict[tuple[str, int | None], KnownCounts] = {}
        """By the method of uneven blocks and its root."""
        self._cached_uneven: dict[tuple[object, ...], CachedCall] = {}
        """By method, root, reduction, number of the counts, dtype, and shape of a row."""
        self._exchanges: dict[str, ExchangeRounds[Array]] = {}
        self._prepared_calls = 0

    def run(self, request: Request[Array]) -> Any:
        """Run a request to its end; return the result, or a list with one for each rank of this process."""
        self._check_alive()
        library, kind = self.backend.arrays, request.kind
        with self.in_step():
            if kind not in self._lowered:
                plan = self.plan_of(kind)
                if plan.exchanges:
                    return self._run_exchange(request, plan)
            key, table, signature = self._lowered.get(kind) or self._lower(kind)
            if request.prepared or request.counts:
                signature = replace(signature, prepared=request.prepared, counts=request.counts)
            memory = [self._memory(request, place, rank) for place, rank in enumerate(self.backend.ranks)]
            if divides_first(kind):
                memory = [replace(one, source=self._divided(one.source, one.rank)) for one in memory]
            memory = copy_overlapping_inputs(memory, library)
        agreed = signature.of_call(self._calls)
        if request.about is not None:
            # helper ranks read the reduction at the start
            agreed = replace(agreed, op=request.about if kind.op is None else f"{kind.op} {request.about}")
        call = Call(key.plan, table, agreed, kind.op, kind.dtype, kind.itemsize, tuple(memory))
        self._run(call, key.digest, kind.nbytes)
        for one in memory:
            copy_local_parts(
                local_copy_parts(table, one.rank, one.given, one.block), one.source, one.result, library
            )
        results = [
            self._finished(request, place, one) if one.rank in kind.holders else None
            for place, one in enumerate(memory)
        ]
        if self._caches and request.counts:
            self._cache_uneven(request, call)
        elif self._caches and not request.prepared:
            self._cache(request, call)
        return results[0] if self.backend.one_rank else results

    def repeated(
        self,
        collective: str,
        root: int | None,
        op: str | None,
        array: Any,
        out: Any,
        *,
        later: bool,
        below: int | None = None,
    ) -> Callable[[], Any] | None:
        """Return a function that runs a cached call on these arrays; None if they need the checks of a first call.

        The first arguments are the caller's. `later`: it runs in the background. Buffers of `below` bytes and more
        always need the checks.
        """
        library = self.backend.arrays
        if (
            not self._caches
            or type(array) not in library.plain
            or type(root) not in (int, NoneType)
            or type(op) not in (str, NoneType)
        ):
            return None
        call = self._cached.get((collective, root, op, array.dtype, array.shape, library.gpu(array)))
        if call is None or (below is not None and call.kind.nbytes >= below):
            return None
        places = call.places(array, out, library)
        if places is None:
            return None
        arrays = (array,) if out is None else (array, out)
        if not library.follow_caller(*arrays):
            return None
        # a tensor may get other memory meanwhile, so this holds the checked memory
        held = [library.line(one) for one in arrays] if later else []
        return partial(self._run_cached, call, array, out, *places, held)

    def prepare(self, request: Request[Array]) -> PreparedRequest[Array]:
        """Agree with all ranks on a request that is run many times; nothing moves.

        Outputs that it lacks are allocated. Raises `RefusedError` on all ranks if one prepares another.
        """
        kind, backend = request.kind, self.backend
        first = request.inputs[0]
        number = self._prepared_calls + 1  # calls that a rank refused do not count
        outputs = [
            backend.empty(shape, first) if output is None and rank in kind.holders else output
            for rank, shape, output in zip(backend.ranks, kind.shapes, request.outputs, strict=True)
        ]
        made = PreparedRequest(self, replace(request, outputs=outputs, prepared=number))
        self.agree(**_agreed_fields(kind), prepared=number)
        self._prepared_calls = number
        return made

    def bind(self, request: Request[Array]) -> Callable[[], None] | None:
        """Return what runs a prepared request by the back end's `repeated`; None if that cannot, or not yet."""
        backend, library, kind = self.backend, self.backend.arrays, request.kind
        if not self._caches or request.about is not None or (kind.op == "avg" and kind.dtype not in AVERAGED):
            return None
        if kind not in self._lowered:
            if self.plan_of(kind).exchanges:
                return None
            self._lower(kind)
        if kind not in self._lowered:
            return None  # the search for a chunk size goes on
        key, table, signature = self._lowered[kind]
        array: Any = request.inputs[0]
        (out,), (rank,) = request.outputs, backend.ranks
        target = library.part(library.line(array), 0, 0) if out is None else library.line(out)
        memory = RankArrays(rank, kind.given[0], library.line(array), kind.blocks[0], target)
        agreed = replace(signature, prepared=request.prepared)
        call = Call(key.plan, table, agreed, kind.op, kind.dtype, kind.itemsize, (memory,))
        run = backend.repeated(call)
        cached = None if run is None else CachedCall.of(run, kind, call, array.dtype)
        places = None if cached is None else cached.places(array, out, library)
        if cached is None or places is None:
            return None
        return partial(self._run_bound, cached, array, out, *places)

    def _run_bound(self, call: CachedCall, array: Any, out: Any, source: int, result: int) -> None:
        """Run a cached call on arrays at these addresses."""
        if self._failed or self.aborted:
            self._check_alive()
        number = self._calls
        self._calls = number + 1
        self.exchanged += 1
        try:
            self.completion = call.run(number, source, result)
        except BaseException as error:
            self._note_failure(error)
            raise
        self.traffic.add(call.table, call.kind.itemsize)
        if self.completion is not None:
            self.completion.held = (array, out)
        if call.kept:
            library = self.backend.arrays
            copy_local_parts(call.kept, library.line(array), library.line(out), library)

    def _run_cached(
        self, call: CachedCall, array: Array, out: Array | None, source: int, result: int, held: list[Array]
    ) -> Array:
        """Run a cached call on arrays that fit."""
        library = self.backend.arrays
        if out is None:
            out = library.empty(call.kind.shapes[0], array)
            result = library.address(out)
        self._run_bound(call, array, out, source, result)
        return out

    def _cache(self, request: Request[Array], call: Call[Array]) -> None:
        """Cache what calls like this one, which has been run, have in common."""
        kind = request.kind
        first: Any = request.inputs[0]
        gpu = self.backend.arrays.gpu(first)
        key = kind.collective, kind.root, kind.op, first.dtype, first.shape, gpu
        if (
            key in self._cached
            or kind not in self._lowered
            or request.about is not None
            or kind.uneven is not None
            or (kind.op == "avg" and kind.dtype not in AVERAGED)
            or self.backend.ranks[0] not in kind.holders
        ):
            return
        run = self.backend.repeated(call)
        if run is not None:
            _remember(self._cached, key, CachedCall.of(run, kind, call, first.dtype))

    def _cache_uneven(self, request: Request[Array], call: Call[Array]) -> None:
        """Cache what calls of these counts have in common, after one of them has run."""
        first: Any = request.inputs[0]
        kind = request.kind
        key = kind.method, kind.root, kind.op, request.counts, first.dtype, kind.input_shape[1:]
        if (
            key not in self._cached_uneven
            and kind in self._lowered
            and request.about is None
            and (kind.op != "avg" or kind.dtype in AVERAGED)
            and self.backend.ranks[0] in kind.holders
        ):
            run = self.backend.repeated(call)
            if run is not None:
                _remember(self._cached_uneven, key, CachedCall.of(run, kind, call, first.dtype))

    def _repeated_uneven(self, number: int, asked: UnevenCall[Array]) -> Callable[[], Any] | None:
        """Return what runs a cached call of known counts; None if its arrays need the checks of a first call."""
        library, out = self.backend.arrays, asked.out
        array: Any = asked.inputs[0]
        if not self._cached_uneven or type(array) not in library.plain:
            return None
        key = asked.method, asked.root, asked.op, number, array.dtype, library.shape(array)[1:]
        call = self._cached_uneven.get(key)
        places = None if call is None else call.places(array, out, library)
        if call is None or places is None:
            return None
        return partial(self._run_cached, call, array, out, *places, [])

    def _lower(self, kind: CallKind) -> tuple[PlanKey, TransferTable, Signature]:
        """Return the lowered plan of a kind; kept once its chunk size is settled."""
        key = self.store.key(self.plan_of(kind))
        check_helpers(key.plan, self.backend)
        chunk_bytes = self.chunks.choose(key.digest, kind.nbytes)
        chunk_elements = max(1, chunk_bytes // max(1, kind.itemsize))
        if kind.uneven is None:
            table = self._even_table(key, kind, chunk_elements)
        else:
            table = lower_uneven(key, kind.uneven, chunk_elements)
        signature = self._signature(plan=key.digest[:16], chunk=table.chunk_elements, **_agreed_fields(kind))
        if self.chunks.settled(key.digest, kind.nbytes):
            _remember(self._lowered, kind, (key, table, signature))
        return key, table, signature

    def _even_table(self, key: PlanKey, kind: CallKind, chunk_elements: int) -> TransferTable:
        """Return the table of all ranks, or that of this rank alone if the back end runs it."""
        given = kind.given[0]
        if self.backend.one_rank and self.backend.takes_part((given[1] - given[0]) * kind.itemsize):
            from collectives.tables.rank_part import is_lowered_by_part, lower_part  # few plans are by kind

            if is_lowered_by_part(key.plan):
                return lower_part(key, self.backend.ranks[0], kind.count, chunk_elements)
        return lower(key.plan, kind.count, chunk_elements=chunk_elements, digest=key.digest)

    def _run_exchange(self, request: Request[Array], plan: Plan) -> Any:
        """Run an allreduce in exchange rounds; results as of `run`."""
        library, kind = self.backend.arrays, request.kind
        assert kind.op is not None, "an allreduce has a reduction"
        key = self.store.key(plan)
        if key.digest not in self._exchanges:
            _remember(self._exchanges, key.digest, ExchangeRounds(key.plan))
        first = request.inputs[0]
        lines = [library.line(one) for one in request.inputs]
        if divides_first(kind):
            lines = [self._divided(line, rank) for rank, line in zip(self.backend.ranks, lines, strict=True)]
        totals = [library.empty((kind.count,), first) for _ in lines]
        meaning = f"{kind.op} of {shape_text(kind.input_shape) if request.about is None else request.about}"
        self._exchanges[key.digest].run(
            lines,
            totals,
            self.backend.ranks,
            library,
            op=kind.op,
            run_round=lambda *given, about, **options: self.run_round(
                *given, about=f"{meaning}: {about}", prepared=request.prepared, **options
            ),
        )
        results = []
        for total, output in zip(totals, request.outputs, strict=True):
            if kind.op == "avg" and not divides_first(kind):
                library.divide(total, self.backend.size)
            result = library.shaped(total, kind.shapes[0])
            if output is not None:
                library.copy(output, result)
            results.append(result if output is None else output)
        return results[0] if self.backend.one_rank else results

    def run_round(
        self,
        plan: Plan,
        borders: tuple[int, ...],
        *,
        op: str | None,
        given: Sequence[Array],
        results: Sequence[Array],
        about: str,
        prepared: int = 0,
    ) -> None:
        """Run one round of a plan that exchanges elements or entries.

        `plan` is that of a `topoplan.plans.structure.PlanRound`; its shards end at `borders` in the buffers. `op` is
        None for copies. `given` and `results` have for each rank of this process one contiguous array of
        ``borders[-1]`` elements: the initial values, and the target of arrivals; the same memory, or disjoint. Elements
        without arrivals stay unchanged. `about` is the meaning of the elements: ranks that differ in it must not
        exchange them. `prepared` is the number of a prepared call.
        """
        self._check_alive()
        library = self.backend.arrays
        itemsize = library.itemsize(results[0])
        count = borders[-1]
        with self.in_step():
            key = self.store.key(plan)
            chunk_elements = max(1, self.chunks.choose(key.digest, count * itemsize) // itemsize)
            table = lower_to(key, borders, chunk_elements)
            memory = tuple(
                RankArrays(rank, (0, count), source, (0, count), result)
                for rank, source, result in zip(self.backend.ranks, given, results, strict=True)
            )
            signature = self._signature(
                plan=key.digest[:16],
                collective=plan.collective,
                op=about,
                dtype=library.dtype(results[0]),
                count=count,
                chunk=table.chunk_elements,
                prepared=prepared,
            )
            call = Call(key.plan, table, signature, op, signature.dtype, itemsize, memory)
        self._run(call, key.digest, count * itemsize)

    def _known_counts(self, asked: UnevenCall[Array]) -> KnownCounts:
        """Return the counts of earlier calls of a method and root."""
        return self._counts.setdefault((asked.method, asked.root), KnownCounts())

    def run_uneven(self, asked: UnevenCall[Array]) -> Any:
        """Run a collective of uneven blocks as `run`, once all ranks know the counts of all.

        A rank whose counts are those of an earlier call assumes that all ranks repeat it. The agreement before anything
        moves tells whether they do; otherwise they exchange their counts.
        """
        backend = self.backend
        counts = self._known_counts(asked)
        number = counts.number(backend.ranks[0], asked) if backend.one_rank else 0
        run = self._repeated_uneven(number, asked) if number else None
        if number and run is None:
            with suppress(UsageError):  # ``out`` is for other counts than those of the earlier call
                request = uneven_request(backend, asked, counts.of(number), number=number)
                run = partial(self.run, request) if request.kind in self._lowered else None
        if run is not None:
            try:
                result = run()
            except RefusedError as error:
                if not error.unknown_counts:
                    raise
            else:
                counts.use(number)
                return result
        return self.run(self.bound_to_counts(asked))

    def bound_to_counts(self, asked: UnevenCall[Array]) -> Request[Array]:
        """Return the request of a collective of uneven blocks once all ranks have exchanged their counts.

        Raises `RefusedError` on all ranks if a rank expects other counts than it is sent, and `UsageError` if ``out``
        has another shape: then the others raise `RefusedError`.
        """
        with self.in_step():
            if not self.backend.one_rank:
                return self._uneven_request(asked, 0, asked.sent)
            number, counts = self._agreed_counts(asked)
            return self._uneven_request(asked, number, counts.of(number))

    def _agreed_counts(self, asked: UnevenCall[Array]) -> tuple[int, KnownCounts]:
        """Exchange the counts of all ranks; return their number, and the counts of all numbers."""
        backend, library = self.backend, self.backend.arrays
        first = asked.inputs[0]
        counts = self._known_counts(asked)
        agreed: dict[str, Any] = {
            "collective": asked.method,
            "root": asked.root,
            "op": asked.op,
            "dtype": library.dtype(first),
            "shape": shape_text(library.shape(first)[1:]),
            "counts": -1,
        }
        try:
            self.agree(**agreed)
        except RefusedError as error:
            if not error.unknown_counts:
                raise
            self.agree(**agreed)  # with ranks that had assumed counts
        texts = self.gather_texts(counts.text(backend.ranks[0], asked))
        try:
            number = counts.agreed(texts, unit=asked.unit)
        except UsageError as error:
            raise RefusedError(str(error), by_all=True, next_call=self._calls) from None
        counts.use(number)
        return number, counts

    def _uneven_request(self, asked: UnevenCall[Array], number: int, rows: Counts) -> Request[Array]:
        """Return the request of counts of this number; refuse it with all ranks if ``out`` does not fit."""
        backend = self.backend
        try:
            return uneven_request(backend, asked, rows, number=number)
        except UsageError as error:
            if backend.one_rank:
                self.refuse(str(error))
            raise

    def lowered(self, kind: CallKind) -> bool:
        """Return whether calls of a kind have their table, after the search for a chunk size."""
        return kind in self._lowered

    @property
    def calls(self) -> int:
        """Return how many transfer tables were run."""
        return self._calls

    def plan_of(self, kind: CallKind) -> Plan:
        """Return the plan for calls of a kind; see `planned`."""
        if kind in self._lowered:
            return self._lowered[kind][0].plan
        if isinstance(kind.uneven, RankBlocks) and kind.uneven.only is not None:
            alone = "broadcast" if kind.uneven.gathered else "reduce"
            return self._plan(alone, kind.uneven.only, kind.nbytes)
        if isinstance(kind.uneven, UnevenBlocks):
            return self._plan_of_exchange(kind)
        plan = self._plan(kind.collective, kind.root if kind.uneven is None else None, kind.nbytes)
        if isinstance(kind.uneven, RankBlocks):
            blocks = kind.uneven.counts
            return self.store.plan_of_blocks(
                blocks,
                kind.itemsize,
                plan,
                made_by=lambda make: self.planned(make, collective=kind.method, about=digest_of((blocks,))),
            )
        return plan

    def _plan_of_exchange(self, kind: CallKind) -> Plan:
        """Return the plan for an all-to-all of uneven blocks."""
        plan = self.store.plan_of_pairs(
            kind.nbytes, made_by=lambda make: self.planned(make, collective=kind.collective)
        )
        demand = demand_of(kind.rows)
        if demand is None and not isinstance(plan.certificate, Demand):
            return plan
        demand = demand or ((1,) * kind.size,) * kind.size
        return self.store.plan_of_demand(
            demand,
            kind.rows,
            plan,
            made_by=lambda make: self.planned(make, collective=UNEVEN, about=digest_of(demand)),
        )

    def settled(self, collective: str, root: int | None, nbytes: int) -> bool:
        """Return whether the search for the chunk size of such buffers has ended."""
        plan = self.store.plan(collective, root, nbytes)
        return self.chunks.settled(self.store.key(plan).digest, nbytes)

    @property
    def topology(self) -> Topology:
        """Return the machine of the plans."""
        return self.store.topology

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the channels of the plans."""
        return self.store.channels

    def plan(self, collective: str, nbytes: int) -> Plan:
        """Return the plan of a collective without a root for a buffer of so many bytes; see `planned`."""
        return self._plan(collective, None, nbytes)

    def knows(self, collective: str) -> bool:
        """Return whether a collective without a root was planned before."""
        return self.store.knows(collective, None)

    def planned(
        self,
        make: Callable[[], Plans],
        *,
        collective: str,
        root: int | None = None,
        about: str | None = None,
    ) -> Plans:
        """Return a verified plan: made here if all ranks are in this process, else by one rank for all.

        All ranks must want the same `collective`, `root` and `about`. Raises `TopoplanError` if planning fails; the
        communicator stays usable.
        """
        if not self.backend.one_rank:
            return plan_locally(make)
        with self._agreed_gather(
            plan=self.store.digest[:16], collective=collective, root=root, op=about
        ) as gather:
            return plan_on_one_rank(gather, make, rank=self.backend.ranks[0])

    def gather_texts(self, text: str, about: str = "texts") -> list[str]:
        """Return the text of every rank, in order of rank; if all ranks are in this process, copies of this one.

        `about` names the purpose; raises `RefusedError` on all ranks if it is another on one of them.
        """
        with self._agreed_gather(collective=about) as gather:
            return gather(text)

    @contextmanager
    def _agreed_gather(self, **agreed: Any) -> Iterator[Gather]:
        """Yield an allgather of texts after all ranks have agreed on its purpose."""
        backend = self.backend
        self._check_alive()
        signature = self._signature(**agreed)
        try:
            backend.agree(signature)
            self.exchanged += 1
            yield backend.gather_texts
        except TopoplanError as error:
            if isinstance(error, BackendError):
                self._note_failure(error)
            raise
        except BaseException as error:
            self._leave(error)  # the others may have agreed
            raise

    def _plan(self, collective: str, root: int | None, nbytes: int) -> Plan:
        return self.store.plan(
            collective,
            root,
            nbytes,
            made_by=lambda make: self.planned(make, collective=collective, root=root),
        )

    def _run(self, call: Call[Array], digest: str, nbytes: int) -> None:
        self._calls += 1
        self.exchanged += 1
        self.completion = None
        try:
            self._run_measured(call, digest, nbytes)
        except BaseException as error:
            if self.backend.one_rank:
                self._note_failure(error)
            raise
        self.traffic.add(call.table, call.itemsize)

    def _run_measured(self, call: Call[Array], digest: str, nbytes: int) -> None:
        """Run a call, and time it during the search for a chunk size: all ranks count the slowest."""
        started = time.perf_counter()
        self.backend.run(call)
        seconds = time.perf_counter() - started
        if self._prints:
            print(describe_call(call, self.backend, nbytes, seconds), file=sys.stderr, flush=True)
        if not self.chunks.settled(digest, nbytes):
            self.chunks.measured(digest, nbytes, self.backend.largest(seconds))

    def _memory(self, request: Request[Array], place: int, rank: int) -> RankArrays[Array]:
        """Return the memory of a rank's input, and of its result."""
        library = self.backend.arrays
        first, output, kind = request.inputs[0], request.outputs[place], request.kind
        elements = kind.blocks[place][1] - kind.blocks[place][0]
        if output is None:
            result = library.empty((elements,), first)
        elif self._writes_to(output):
            result = library.line(output)
        else:
            result = library.part(self._staging_memory(rank, elements, first), 0, elements)
        return RankArrays(
            rank, kind.given[place], library.line(request.inputs[place]), kind.blocks[place], result
        )

    def _writes_to(self, output: Array) -> bool:
        """Return whether the back end may write a result to the caller's array itself."""
        backend = self.backend
        return backend.arrays.contiguous(output) and (backend.direct or backend.writes(output))

    def _divided(self, line: Array, rank: int) -> Array:
        """Return a rank's input of an average, divided by the number of ranks, in memory of this module."""
        library = self.backend.arrays
        (elements,) = library.shape(line)
        divided = library.part(self._staging_memory(rank, elements, line, "given"), 0, elements)
        library.copy(divided, line)
        library.divide(divided, self.backend.size)
        return divided

    def _staging_memory(self, rank: int, elements: int, like: Array, use: str = "result") -> Array:
        """Return memory for a result until it is complete, or for a replaced input; kept between calls."""
        library = self.backend.arrays
        key = (rank, library.dtype(like), use)
        if key not in self._staging or library.shape(self._staging[key])[0] < elements:
            self._staging[key] = library.empty((elements,), like)
        return self._staging[key]

    def _finished(self, request: Request[Array], place: int, one: RankArrays[Array]) -> Array:
        """Return the result in its shape, in the caller's array if there is one."""
        library = self.backend.arrays
        kind, output = request.kind, request.outputs[place]
        divided = divides_first(kind) or (self.backend.averages and kind.dtype in AVERAGED)
        if kind.op == "avg" and not divided:
            library.divide(one.result, self.backend.size)
        result = library.shaped(one.result, kind.shapes[place])
        if output is None:
            return result
        if not self._writes_to(output):
            library.copy(output, result)
        return output

    def agree(self, **agreed: Any) -> None:
        """Compare with all ranks what they are about to do outside of this module.

        Raises `RefusedError` on all ranks if one means something else, or refuses.
        """
        with self._agreed_gather(**agreed):
            pass

    def abort(self, reason: str) -> None:
        """End what is under way and all later calls, from any thread, and report it to the other ranks."""
        rank = self.backend.ranks[0]
        self.aborted = self._failed = True
        self.failure = BackendError(reason, rank=rank, peer=rank)
        self.backend.abort(self.failure)

    def refuse(self, reason: str) -> None:
        """Refuse a collective with all ranks, because this rank's arguments do not fit; return if all ranks refuse by
        themselves.

        Raises `RefusedError`, the same on all ranks, if some rank does not. If other ranks do not take part, execution
        fails without an error here: the caller has one to raise.
        """
        self._check_alive()
        try:
            self.backend.refuse(self._signature(refusal=reason))
        except RefusedError as error:
            self._note_failure(error)
            if not error.by_all:
                raise
        except BaseException as error:
            self._note_failure(error)
            if not isinstance(error, BackendError):
                raise

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Keep the ranks in step when this one alone raises an error that nobody expects, such as a `MemoryError`.

        All ranks refuse the collective if this one has moved nothing of it yet; a transfer follows the block. Else this
        rank ends the job: the others may wait in any of the transfers, and its next call must not meet them.
        """
        began = self._calls
        try:
            yield
        except BaseException as error:
            self.fall_out(error, self._calls == began)
            raise

    def fall_out(self, error: BaseException, refuses: bool) -> None:
        """Refuse a collective with all ranks, or end the job, after an error of this rank as in `in_step`.

        Raises the failure of another rank that comes in between, after which survivors repeat the collective.
        """
        if isinstance(error, TopoplanError) or not self.backend.one_rank or self._failed:
            return
        if refuses and isinstance(error, Exception):
            self.refuse(refusal_text(error))
            if self.failure is not None:
                raise self.failure from error
        else:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """End the job in the middle of a collective, unless it has ended or all ranks are in this process."""
        if self.backend.one_rank and not self._failed:
            self.abort(f"rank {self.backend.ranks[0]} left a collective: {refusal_text(error)}")

    def _signature(self, **agreed: Any) -> Signature:
        nothing: dict[str, Any] = {"plan": "", "collective": "", "root": None, "op": None, "dtype": ""}
        numbers = {"call": self._calls, "world": self.backend.size, "count": 0, "chunk": 0}
        return Signature(**{**nothing, **numbers, **agreed})

    def exchange_plans(self, store: PlanStore) -> None:
        """Switch to other plans for the same ranks; all ranks do so at once."""
        self.store = store
        self._lowered.clear()
        self._cached.clear()
        self._cached_uneven.clear()
        self._exchanges.clear()

    def hand_over(self) -> None:
        """Wait until all ranks have their whole results; only then may one of them return to the caller.

        If this raises, some ranks may have succeeded, and then all have their results.
        """
        self.agree(collective="handed over")

    def _note_failure(self, error: BaseException) -> None:
        """Note a failure of a collective: all ranks continue after a refusal, and never after another failure."""
        if isinstance(error, RefusedError):
            self._calls = error.next_call
            return
        if not isinstance(error, BackendError):
            self._leave(error)
        self._failed = True
        if isinstance(error, BackendError) and not self.aborted:
            self.failure = error

    def _check_alive(self) -> None:
        if self.aborted and self.failure is not None:
            raise self.failure
        if self._failed:
            raise BackendError("the communicator failed in an earlier collective; make a new one")


def refusal_text(error: BaseException) -> str:
    """Return why a rank refuses a collective, or leaves it."""
    return (
        str(error)
        if isinstance(error, TopoplanError)
        else f"{type(error).__name__}: {error}".removesuffix(": ")
    )


def _agreed_fields(kind: CallKind) -> dict[str, Any]:
    """Return what a signature has of a kind."""
    return {
        "collective": kind.method or kind.collective,
        "root": kind.root,
        "op": kind.op,
        "dtype": kind.dtype,
        "count": kind.count,
        "shape": shape_text(kind.input_shape if kind.uneven is None else kind.input_shape[1:]),
    }


def divides_first(kind: CallKind) -> bool:
    """Return whether ranks divide their inputs before they are added up (`DIVIDED_FIRST`)."""
    return kind.op == "avg" and kind.dtype in DIVIDED_FIRST


def _remember(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep a value, and drop the oldest of `MAX_CALL_KINDS`."""
    if len(kept) == MAX_CALL_KINDS:
        del kept[next(iter(kept))]
    kept[key] = value


def describe_call(call: Call[Any], backend: Backend[Any], nbytes: int, seconds: float) -> str:
    """Return a line about a collective that took so many seconds on this rank; GB/s is its algorithm bandwidth."""
    about, plan = call.signature, call.plan
    fields = {
        "rank": backend.ranks[0],
        "collective": about.collective,
        "bytes": nbytes,
        "dtype": about.dtype,
        "op": call.op or "none",
        "plan": f"{about.plan}:{plan.collective}:{plan.schedule.replace(' ', '-')}",
        "backend": backend.name,
        "chunk": about.chunk * call.itemsize,
        "seconds": f"{seconds:.4g}",
        "GB/s": f"{nbytes / seconds / 1e9:.4g}",
    }
    return " ".join(["topoplan:", *(f"{name}={value}" for name, value in fields.items())])


def copy_overlapping_inputs(
    memory: Sequence[RankArrays[Array]], library: ArrayLibrary[Array]
) -> list[RankArrays[Array]]:
    """Return the memory with copies of the inputs that results would overwrite too early.

    An input and a result of one rank may be the same memory, element for element: an element is written when its input
    is not needed any more.

    >>> import numpy as np
    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> line, other = np.arange(4), np.zeros(3)
    >>> memory = [RankArrays(0, (0, 3), line[:3], (0, 3), line[:3]), RankArrays(1, (0, 3), line[1:], (0, 3), other)]
    >>> [bool(np.shares_memory(one.source, line)) for one in copy_overlapping_inputs(memory, NumpyArrays())]
    [True, False]
    """
    apart = []
    for one in memory:
        source = one.source
        if any(
            library.overlap(source, other.result) and not _aligned(one, other, library) for other in memory
        ):
            copied = library.empty(library.shape(source), source)
            library.copy(copied, source)
            one = RankArrays(one.rank, one.given, copied, one.block, one.result)
        apart.append(one)
    return apart


@lru_cache(maxsize=256)
def local_copy_parts(
    table: TransferTable, rank: int, given: Given, block: tuple[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """Return the parts of a rank's input that no row of a table writes: offsets in input and result, and elements."""
    parts = []
    for holder, first, last in table.kept():
        start, stop = max(first, block[0]), min(last, block[1])
        if len(given) == 2:
            start, stop = max(start, given[0]), min(stop, given[1])
        if holder == rank and start < stop:
            parts.append((place_in(given, start), start - block[0], stop - start))
    return tuple(parts)


def copy_local_parts(
    parts: tuple[tuple[int, int, int], ...], source: Any, result: Any, library: ArrayLibrary[Any]
) -> None:
    """Copy `local_copy_parts` of the input into the result, both contiguous."""
    for start, goal, elements in parts:
        given, kept = (
            library.part(source, start, start + elements),
            library.part(result, goal, goal + elements),
        )
        if not library.same(given, kept):
            library.copy(kept, given)


def _aligned(one: RankArrays[Array], other: RankArrays[Array], library: ArrayLibrary[Array]) -> bool:
    """Return whether the common elements of both lie at the same addresses; in an all-to-all some never do."""
    if len(one.given) > 2:
        return False
    start, stop = max(one.given[0], other.block[0]), min(one.given[1], other.block[1])
    return (
        one.rank == other.rank
        and start < stop
        and library.same(
            library.part(one.source, start - one.given[0], stop - one.given[0]),
            library.part(other.result, start - other.block[0], stop - other.block[0]),
        )
    )
