"""Run a checked request: plan, lower, give out memory, let the back end move bytes, hand over results.

A back end that can fail after it has begun to write gets memory of this module: results are copied to the caller's
arrays when they are complete, so that these are either complete or untouched. For a back end that writes to the
caller's arrays at once, inputs that results would overwrite too early are copied first, as numpy's functions do.

A call like an earlier one (same collective, array type, dtype and shape) reuses its plan and its lowered table
(`PreparedCall`). Only addresses and alignment are checked again; a call that is not aligned takes the long way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import NoneType
from typing import Any, Generic, TypeVar

from collectives.backends.backend import (
    AVERAGED,
    DIVIDED_FIRST,
    Aborts,
    Backend,
    Call,
    GathersTexts,
    GivesMemory,
    PreparedRun,
    PreparesRuns,
    RankArrays,
)
from collectives.backends.exchange_rounds import ExchangeRounds
from collectives.backends.open_backend import check_helpers
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore, plan_locally
from collectives.backends.request import CallKind, Request
from collectives.peers.agreement import Gather, plan_on_one_rank
from collectives.peers.control_plane import Signature, shape_text
from collectives.tables.array_library import ArrayLibrary
from collectives.tables.lowering import PlanKey, lower, lower_to
from collectives.tables.transfer_table import Given, Traffic, TransferTable, place_in
from topoplan.errors import BackendError, RefusedError
from topoplan.machine.topology import Topology
from topoplan.model.closed_form import simulate
from topoplan.plans.plan import Plan, Plans

Array = TypeVar("Array")
Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_CALL_KINDS = 64
"""Kinds of calls of which is kept what is run."""

DEBUG = "TOPOPLAN_DEBUG"
"""Set in the environment it has every collective told on stderr: 1 by the process of rank 0, all by every process."""


PlanQuery = tuple[str, int | None, str | None, Any, Any]
"""Collective, root, reduction, and dtype and shape of the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """What all calls of one kind have in common, for the one rank of this process.

    Parameters
    ----------
    run : callable
        See `PreparesRuns.repeated`.
    kind : Kind
    table : TransferTable
    dtype : dtype of the array's library
    kept : tuple of (int, int, int)
        See `local_copy_parts`.
    """

    run: PreparedRun
    kind: CallKind
    table: TransferTable
    dtype: Any
    kept: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, run: PreparedRun, kind: CallKind, call: Call[Any], dtype: Any) -> PreparedCall:
        """Of a call that has been run."""
        (one,) = call.memory
        return cls(run, kind, call.table, dtype, local_copy_parts(call.table, one.rank, one.given, one.block))

    def places(self, array: Any, out: Any, library: ArrayLibrary[Any]) -> tuple[int, int] | None:
        """Where the input and the array for the result are, 0 where that is yet to be made; None where they do not fit.

        Parameters
        ----------
        array : array
            Of this dtype and the shape of the call.
        out : anything
            What the caller wants the result in.
        library : ArrayLibrary
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
            and out.shape == kind.shape
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


class Execution(Generic[Array]):
    """Runs requests one after another; the state behind a `Communicator`.

    Parameters
    ----------
    store : PlanStore
    backend : Backend
    chunks : ChunkSizes

    Attributes
    ----------
    store : PlanStore
    traffic : Traffic
        What the collectives so far have moved.
    failure : BackendError or None
        What another process did that ended this.
    aborted : bool
        Whether `abort` was called.
    """

    def __init__(self, store: PlanStore, backend: Backend[Array], chunks: ChunkSizes) -> None:
        self.backend = backend
        self.chunks = chunks
        self.traffic = Traffic(backend.ranks)
        self.store = store
        self._calls = 0
        self._failed = False
        self.failure: BackendError | None = None
        self.aborted = False
        asked = os.environ.get(DEBUG, "0")
        self._tells = asked == "all" or (asked not in ("", "0") and 0 in backend.ranks)
        self._staging: dict[tuple[int, str, str], Array] = {}
        self._lowered: dict[CallKind, tuple[PlanKey, TransferTable, Signature]] = {}
        self._repeats = isinstance(backend, PreparesRuns) and not self._tells
        self._gives = backend if isinstance(backend, GivesMemory) else None
        self._repeated: dict[PlanQuery, PreparedCall] = {}
        self._exchanges: dict[str, ExchangeRounds[Array]] = {}

    def run(self, request: Request[Array]) -> Any:
        """Run a request to its end; the result, or a list with one for each rank of this process.

        Raises
        ------
        BackendError
            Another process failed, now or before.
        """
        self._check_alive()
        library, kind = self.backend.arrays, request.kind
        if kind not in self._lowered:
            plan = self._plan(kind.collective, kind.root, kind.nbytes)
            if plan.exchanges:
                return self._run_exchange(request, plan)
        key, table, signature = self._lowered.get(kind) or self._lower(kind)
        memory = [self._memory(request, place, rank) for place, rank in enumerate(self.backend.ranks)]
        if divides_first(kind):
            memory = [replace(one, source=self._divided(one.source, one.rank)) for one in memory]
        if self.backend.direct or self._gives:
            memory = copy_overlapping_inputs(memory, library)
        agreed = signature.of_call(self._calls)
        if request.about is not None:
            # helpers read the reduction in front
            agreed = replace(agreed, op=request.about if kind.op is None else f"{kind.op} {request.about}")
        call = Call(key.plan, table, agreed, kind.op, kind.dtype, kind.itemsize, tuple(memory))
        self._run(call, key.digest, kind.nbytes)
        for one in memory:
            copy_local_parts(
                local_copy_parts(table, one.rank, one.given, one.block), one.source, one.result, library
            )
        results = [
            self._finished(request, one, request.outputs[place]) if one.rank in kind.holders else None
            for place, one in enumerate(memory)
        ]
        if self._repeats:
            self._may_repeat(request, call)
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
        """What runs a call like an earlier one on these arrays; None where they have to be looked at.

        Parameters
        ----------
        collective, root, op
            As the caller asks.
        array, out : anything
            What he passes for input and result.
        later : bool
            Whether it runs in the background.
        below : int, optional
            Buffers of so many bytes and more have to be looked at in any case.
        """
        library = self.backend.arrays
        if (
            not self._repeats
            or type(array) not in library.plain
            or type(root) not in (int, NoneType)
            or type(op) not in (str, NoneType)
        ):
            return None
        call = self._repeated.get((collective, root, op, array.dtype, array.shape))
        if call is None or (below is not None and call.kind.nbytes >= below):
            return None
        places = call.places(array, out, library)
        if places is None:
            return None
        # a tensor may be given other memory meanwhile, so what was looked at is held
        held = [library.line(one) for one in (array, out) if one is not None] if later else []
        return partial(self._run_repeated, call, array, out, *places, held)

    def _run_repeated(
        self, call: PreparedCall, array: Array, out: Array | None, source: int, result: int, held: list[Array]
    ) -> Array:
        """Run a call whose arguments fit."""
        self._check_alive()
        if out is None:
            out = self.backend.arrays.empty(call.kind.shape, array)
            result = self.backend.arrays.address(out)
        number = self._calls
        self._calls += 1
        try:
            call.run(number, source, result)
        except BaseException as error:
            self._meets(error)
            raise
        self.traffic.add(call.table, itemsize=call.kind.itemsize)
        if call.kept:
            library = self.backend.arrays
            copy_local_parts(call.kept, library.line(array), library.line(out), library)
        return out

    def _may_repeat(self, request: Request[Array], call: Call[Array]) -> None:
        """Keep what runs calls like this one, which has been run."""
        kind = request.kind
        first: Any = request.inputs[0]
        asked = kind.collective, kind.root, kind.op, first.dtype, first.shape
        if (
            asked in self._repeated
            or kind not in self._lowered
            or request.about is not None
            or (kind.op == "avg" and kind.dtype not in AVERAGED)
            or self.backend.ranks[0] not in kind.holders
        ):
            return
        assert isinstance(self.backend, PreparesRuns), "looked at before"
        run = self.backend.repeated(call)
        if run is not None:
            _remember(self._repeated, asked, PreparedCall.of(run, kind, call, first.dtype))

    def _lower(self, kind: CallKind) -> tuple[PlanKey, TransferTable, Signature]:
        """What is run for calls of a kind; kept once their chunk size is settled."""
        key = self.store.key(self._plan(kind.collective, kind.root, kind.nbytes))
        check_helpers(key.plan, self.backend)
        chunk_bytes = self.chunks.choose(key.digest, kind.nbytes)
        chunk_elements = max(1, chunk_bytes // max(1, kind.itemsize))
        table = lower(key.plan, kind.count, chunk_elements=chunk_elements, digest=key.digest)
        signature = self._signature(
            plan=key.digest[:16],
            collective=kind.collective,
            root=kind.root,
            op=kind.op,
            dtype=kind.dtype,
            count=kind.count,
            chunk=table.chunk_elements,
            shape=shape_text(kind.input_shape),
        )
        if self.chunks.settled(key.digest, kind.nbytes):
            _remember(self._lowered, kind, (key, table, signature))
        return key, table, signature

    def _run_exchange(self, request: Request[Array], plan: Plan) -> Any:
        """Run an allreduce whose ranks exchange what they have; results as of `run`."""
        library, kind = self.backend.arrays, request.kind
        assert kind.op is not None, "an allreduce adds up"
        key = self.store.key(plan)
        if key.digest not in self._exchanges:
            _remember(self._exchanges, key.digest, ExchangeRounds(key.plan))
        first = request.inputs[0]
        lines = [library.line(one) for one in request.inputs]
        if divides_first(kind):
            lines = [self._divided(line, rank) for rank, line in zip(self.backend.ranks, lines, strict=True)]
        totals = [library.empty((kind.count,), first) for _ in lines]
        told = f"{kind.op} of {shape_text(kind.input_shape) if request.about is None else request.about}"
        self._exchanges[key.digest].run(
            lines,
            totals,
            self.backend.ranks,
            library,
            op=kind.op,
            run_round=lambda *given, about, **asked: self.run_round(
                *given, about=f"{told}: {about}", **asked
            ),
        )
        results = []
        for total, output in zip(totals, request.outputs, strict=True):
            if kind.op == "avg" and not divides_first(kind):
                library.divide(total, self.backend.size)
            result = library.shaped(total, kind.shape)
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
    ) -> None:
        """Run one round of a plan that exchanges elements or entries.

        Parameters
        ----------
        plan : Plan
            Of a `topoplan.plans.structure.PlanRound`.
        borders : tuple of int
            Where its shards end in the buffers.
        op : str or None
            Reduction, or None where data is copied.
        given, results : sequence of arrays, one for each rank of this process
            Lines of ``borders[-1]`` elements: what each rank starts with, and where what arrives is put; the same
            memory, or apart. Where nothing arrives, results stay as they are.
        about : str
            What the elements mean: ranks that differ in it must not exchange them.

        Raises
        ------
        BackendError
            Another process failed, now or before.
        """
        self._check_alive()
        library = self.backend.arrays
        itemsize = library.itemsize(results[0])
        key = self.store.key(plan)
        count = borders[-1]
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
        )
        call = Call(key.plan, table, signature, op, signature.dtype, itemsize, memory)
        self._run(call, key.digest, count * itemsize)

    @property
    def calls(self) -> int:
        """Transfer tables that were run so far."""
        return self._calls

    def plan_of(self, kind: CallKind) -> Plan:
        """The plan by which calls of a kind run; see `planned`."""
        return self._plan(kind.collective, kind.root, kind.nbytes)

    def settled(self, collective: str, root: int | None, nbytes: int) -> bool:
        """Whether the chunk size for buffers of so many bytes is no longer searched for."""
        plan = self.store.plan(collective, root, nbytes)
        return self.chunks.settled(self.store.key(plan).digest, nbytes)

    @property
    def topology(self) -> Topology:
        """The machine that plans are made for."""
        return self.store.topology

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels that plans are made for."""
        return self.store.channels

    def plan(self, collective: str, nbytes: int) -> Plan:
        """The plan of a collective without a root for a buffer of so many bytes; see `planned`."""
        return self._plan(collective, None, nbytes)

    def knows(self, collective: str) -> bool:
        """Whether a collective without a root was planned before."""
        return self.store.knows(collective, None)

    def planned(
        self,
        make: Callable[[], Plans],
        *,
        collective: str,
        root: int | None = None,
        about: str | None = None,
    ) -> Plans:
        """A verified plan: made here where all ranks are in this process, else by one rank for all.

        Parameters
        ----------
        make : callable
            What plans.
        collective, root, about
            What for: all ranks must want the same.

        Raises
        ------
        TopoplanError
            There is no such plan; the communicator stays usable.
        BackendError
            Another rank failed, or means something else.
        """
        if not isinstance(self.backend, GathersTexts):
            return plan_locally(make)
        with self._speaking(
            plan=self.store.digest[:16], collective=collective, root=root, op=about
        ) as gather:
            return plan_on_one_rank(gather, make, rank=self.backend.ranks[0])

    def gather_texts(self, text: str) -> list[str]:
        """What every rank says, in order of rank; of ranks that are all in this process the same.

        Raises
        ------
        BackendError
            Another rank failed, or does something else.
        """
        if not isinstance(self.backend, GathersTexts):
            return [text] * self.backend.size
        with self._speaking(collective="texts") as gather:
            return gather(text)

    @contextmanager
    def _speaking(self, **agreed: Any) -> Iterator[Gather]:
        """How ranks tell each other texts, once all mean the same by it."""
        backend = self.backend
        assert isinstance(backend, GathersTexts), "looked at before"
        self._check_alive()
        try:
            backend.agree(self._signature(**agreed))
            yield backend.gather_texts
        except BaseException as error:
            if isinstance(error, BackendError) or not isinstance(error, Exception):
                self._meets(error)
            raise

    def model_seconds(self, collective: str, nbytes: int) -> float:
        """Model time of a collective on a buffer of so many bytes, on the machine of the plan."""
        return simulate(self.plan(collective, nbytes), nbytes=nbytes).seconds

    def _plan(self, collective: str, root: int | None, nbytes: int) -> Plan:
        return self.store.plan(
            collective,
            root,
            nbytes,
            made_by=lambda make: self.planned(make, collective=collective, root=root),
        )

    def _run(self, call: Call[Array], digest: str, nbytes: int) -> None:
        self._calls += 1
        try:
            self._run_measured(call, digest, nbytes)
        except BaseException as error:
            if self.backend.one_rank:
                self._meets(error)
            raise
        self.traffic.add(call.table, itemsize=call.itemsize)

    def _run_measured(self, call: Call[Array], digest: str, nbytes: int) -> None:
        """Run a call, and time it while a chunk size is searched for: all ranks count the slowest."""
        started = time.perf_counter()
        self.backend.run(call)
        seconds = time.perf_counter() - started
        if self._tells:
            print(describe_call(call, self.backend, nbytes, seconds), file=sys.stderr, flush=True)
        if not self.chunks.settled(digest, nbytes):
            self.chunks.measured(digest, nbytes, self.backend.largest(seconds))

    def _memory(self, request: Request[Array], place: int, rank: int) -> RankArrays[Array]:
        """Where a rank's input lies and where its result is put together."""
        library = self.backend.arrays
        first, output, kind = request.inputs[0], request.outputs[place], request.kind
        elements = kind.blocks[place][1] - kind.blocks[place][0]
        if output is None:
            result = library.empty((elements,), first)
        elif self._into(output):
            result = library.line(output)
        else:
            result = library.part(self._room(rank, elements, first), 0, elements)
        return RankArrays(
            rank, kind.given[place], library.line(request.inputs[place]), kind.blocks[place], result
        )

    def _into(self, output: Array) -> bool:
        """Whether the back end may write a result to the caller's array itself."""
        if not self.backend.arrays.contiguous(output):
            return False
        return self.backend.direct or (self._gives is not None and self._gives.writes(output))

    def _divided(self, line: Array, rank: int) -> Array:
        """What a rank gives to an average, divided by the number of ranks, in memory of our own."""
        library = self.backend.arrays
        (elements,) = library.shape(line)
        divided = library.part(self._room(rank, elements, line, "given"), 0, elements)
        library.copy(divided, line)
        library.divide(divided, self.backend.size)
        return divided

    def _room(self, rank: int, elements: int, like: Array, use: str = "result") -> Array:
        """Memory for a result that is copied to the caller's array when it is complete; kept between calls.

        Also for what is given to a collective in place of the caller's array.
        """
        library = self.backend.arrays
        key = (rank, library.dtype(like), use)
        if key not in self._staging or library.shape(self._staging[key])[0] < elements:
            self._staging[key] = library.empty((elements,), like)
        return self._staging[key]

    def _finished(self, request: Request[Array], one: RankArrays[Array], output: Array | None) -> Array:
        """The result in its shape, in the caller's array where he gave one."""
        library = self.backend.arrays
        kind = request.kind
        divided = divides_first(kind) or (self.backend.averages and kind.dtype in AVERAGED)
        if kind.op == "avg" and not divided:
            library.divide(one.result, self.backend.size)
        result = library.shaped(one.result, kind.shape)
        if output is None:
            return result
        if not self._into(output):
            library.copy(output, result)
        return output

    def agree(self, **agreed: Any) -> None:
        """Compare with all ranks what they are about to do, which something else carries out.

        Raises
        ------
        RefusedError
            A rank means something else, or refuses; on all ranks.
        BackendError
            Another rank failed.
        """
        with self._speaking(**agreed):
            pass

    def abort(self, reason: str) -> None:
        """End what is under way and all that comes, from any thread; the other ranks are told."""
        rank = self.backend.ranks[0]
        self.aborted = self._failed = True
        self.failure = BackendError(reason, rank=rank, peer=rank)
        if isinstance(self.backend, Aborts):
            self.backend.abort(self.failure)

    def refuse(self, reason: str) -> None:
        """Refuse a collective with all ranks, since arguments do not fit here; nothing where all have other reasons.

        Where other ranks do not come for it, execution fails: the caller has an error to raise.

        Raises
        ------
        RefusedError
            Some rank does not refuse by itself; the same on all ranks.
        BackendError
            An earlier collective failed.
        """
        self._check_alive()
        try:
            self.backend.refuse(self._signature(refusal=reason))
        except RefusedError as error:
            self._meets(error)
            if not error.by_all:
                raise
        except BackendError as error:
            self._meets(error)

    def _signature(self, **agreed: Any) -> Signature:
        nothing: dict[str, Any] = {"plan": "", "collective": "", "root": None, "op": None, "dtype": ""}
        numbers = {"call": self._calls, "world": self.backend.size, "count": 0, "chunk": 0}
        return Signature(**{**nothing, **numbers, **agreed})

    def exchange_plans(self, store: PlanStore) -> None:
        """Go on with other plans, for the same ranks; all of them must do so at once."""
        self.store = store
        self._lowered.clear()
        self._repeated.clear()
        self._exchanges.clear()

    def hand_over(self) -> None:
        """Wait for the word that all ranks have their whole results; only then may one of them let the caller have it.

        Raises
        ------
        BackendError
            A rank failed. Where this is raised some may have had the word, and then all have their results.
        """
        self.agree(collective="handed over")

    def _meets(self, error: BaseException) -> None:
        """Note what has ended a collective: all ranks go on behind one that they have refused, and else never."""
        if isinstance(error, RefusedError):
            self._calls = error.next_call
            return
        self._failed = True
        if isinstance(error, BackendError) and not self.aborted:
            self.failure = error

    def _check_alive(self) -> None:
        if self.aborted and self.failure is not None:
            raise self.failure
        if self._failed:
            raise BackendError("the communicator failed in an earlier collective; make a new one")


def divides_first(kind: CallKind) -> bool:
    """Whether ranks divide what they give to a collective before it is added up (`DIVIDED_FIRST`)."""
    return kind.op == "avg" and kind.dtype in DIVIDED_FIRST


def _remember(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep what belongs to a kind of calls, and let go of the oldest where there are `MAX_CALL_KINDS`."""
    if len(kept) == MAX_CALL_KINDS:
        del kept[next(iter(kept))]
    kept[key] = value


def describe_call(call: Call[Any], backend: Backend[Any], nbytes: int, seconds: float) -> str:
    """One line about a collective that took so many seconds on this rank; GB/s is its algorithm bandwidth."""
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
    """The same memory, but inputs copied where results would overwrite them too early.

    An input and a result of one rank may be the same memory, element for element: what is written to an element
    then needs nothing of it any more.

    Examples
    --------
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
    """What no row of a table writes of what a rank has given: where it is there and in the result, and elements.

    Parameters
    ----------
    table : TransferTable
    rank : int
    given, block : Given, (int, int)
        As in `RankArrays`.
    """
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
    """Copy `local_copy_parts` of the input into the result, both lines of elements."""
    for start, goal, elements in parts:
        given, kept = (
            library.part(source, start, start + elements),
            library.part(result, goal, goal + elements),
        )
        if not library.same(given, kept):
            library.copy(kept, given)


def _aligned(one: RankArrays[Array], other: RankArrays[Array], library: ArrayLibrary[Array]) -> bool:
    """Whether the elements that both hold lie in the same places; in an all-to-all some never do."""
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
