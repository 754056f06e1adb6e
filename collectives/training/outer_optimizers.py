"""Run the rounds of `DiLoCo` and `SparseLoCo`: what ranks moved alone becomes the gradient of an outer optimizer.

All ranks hold the same `start` of each parameter, from which they train alone. A round sends start - parameter, by an
allreduce (`DiLoCo`), or as chunk-wise largest entries by an allgather (`SparseLoCo`, `ChunkFormat`), and moves the
start; the parameters then are the start, or alpha times a rank's own and 1 - alpha times the start. With a delay the
exchange runs beside the next steps.

A round whose result is not finite, or whose exchange fails, puts back the start, which the ranks share, and leaves
momentum and residuals as before it. Ranks that differ at the first start are refused. Parameters of 16 bits have a
start in float32; they move by the difference from its rounded values. All of this computes on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.sparse.chunk_codec import ChunkFormat
from collectives.tables.numpy_arrays import LIMITS
from collectives.training.modes import DiLoCo, OuterMode, SparseLoCo
from collectives.training.report import Recorder
from topoplan.errors import TopoplanError, UsageError

Line = NDArray[Any]

Named = Mapping[str, Sequence[Any]]
"""For parameters by name an array of each rank of this process."""


@dataclass(slots=True)
class OuterRound:
    """A round whose exchange has begun; `ends` is the number of steps after which its result is used.

    `handles` has an exchange for each dtype of `names`, `residuals` what each rank will keep; `means` is the result,
    None before it is known, and empty if it is not finite. `moved` says whether the start has been moved.
    """

    names: tuple[str, ...]
    ends: int
    started: float = 0.0
    handles: dict[str, Handle[Any]] = field(default_factory=dict)
    residuals: dict[str, list[Line]] = field(default_factory=dict)
    means: dict[str, Line] | None = None
    moved: bool = False


class OuterOptimizer:
    """Holds the start, the momentum and the residuals of parameters by name, and moves parameters in rounds.

    Parameters are float or complex arrays of the communicator's library. `start` and `momentum` have (n,) arrays, the
    same on all ranks, `residuals` a list of one for each rank of this process.
    """

    def __init__(self, communicator: Communicator, mode: OuterMode, recorder: Recorder) -> None:
        self._comm = communicator
        self.mode = mode
        self._recorder = recorder
        self.start: dict[str, Line] = {}
        self.momentum: dict[str, Line] = {}
        self.residuals: dict[str, list[Line]] = {}
        self._fragment_of: dict[str, int] = {}
        self._rounds: list[OuterRound] = []
        self._unchecked: dict[str, set[int]] = {}
        """Starts not compared between ranks yet, with the places of this process's ranks that have another one."""
        self._warned = False

    def hold(self, named: Named, *, again: bool = False) -> None:
        """Make parameters the start of the first round; those known already only if `again`."""
        for name, arrays in named.items():
            found = self._line(arrays[0])
            if name in self.start and self.start[name].size != found.size:
                raise UsageError(
                    f"the start of {name} must have {found.size} elements, got {self.start[name].size}; load a "
                    "checkpoint into the model that it was saved from"
                )
            if name not in self.start or again:
                self.start[name] = found.copy()
                self._unchecked[name] = {
                    place for place, one in enumerate(arrays) if self._line(one).tobytes() != found.tobytes()
                }

    def advance(self, count: int, named: Named) -> None:
        """Do what is due after so many steps of rounds, for parameters that have moved, in place.

        All ranks must call it with the same names. Raises `UsageError` on all ranks if their starts differ, and
        `BackendError` if another rank failed; parameters are then those of the start.
        """
        self._check_starts(named)
        self._divide_into_fragments()
        for part in self.mode.due(count):
            names = tuple(name for name in sorted(named, key=_natural) if self._fragment_of[name] == part)
            if names:
                self._begin(names, count, named)
        for one in list(self._rounds):
            if one.ends <= count:
                self._end(one, named)

    def meets(self, count: int) -> bool:
        """Return whether `advance` calls a collective after so many steps of rounds."""
        return bool(self._unchecked or self.mode.due(count))

    def align(self, count: int, named: Named) -> bool:
        """End rounds in flight; return whether parameters may still differ between ranks."""
        for one in list(self._rounds):
            self._end(one, named)
        mode = self.mode
        whole = isinstance(mode, SparseLoCo) or (mode.fragments == 1 and not mode.alpha and not mode.delay)
        return bool(count % mode.period) or not whole

    def state(self) -> dict[str, Any]:
        """Return copies of all state; exchanges in flight are waited for, and their results are part of it."""
        for one in self._rounds:
            self._collect(one)
        return {
            "mode": f"{self.mode}",
            "start": {name: one.copy() for name, one in self.start.items()},
            "momentum": {name: one.copy() for name, one in self.momentum.items()},
            "residuals": {name: [one.copy() for one in kept] for name, kept in self.residuals.items()},
            "fragments": dict(self._fragment_of),
            "rounds": [
                {
                    "names": list(one.names),
                    "ends": one.ends,
                    "moved": one.moved,
                    "means": {name: line.copy() for name, line in (one.means or {}).items()},
                }
                for one in self._rounds
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned on the same rank."""
        self.start = {name: np.array(one) for name, one in state["start"].items()}
        held = state["momentum"] if isinstance(self.mode, DiLoCo) else {}
        self.momentum = {name: np.array(one) for name, one in held.items()}
        kept = state["residuals"] if isinstance(self.mode, SparseLoCo) else {}
        self.residuals = {name: [np.array(one) for one in listed] for name, listed in kept.items()}
        same = state["mode"] == f"{self.mode}"
        self._fragment_of = dict(state["fragments"]) if same else {}
        self._rounds = [
            OuterRound(
                tuple(one["names"]),
                int(one["ends"]),
                means={name: np.array(line) for name, line in one["means"].items()},
                moved=bool(one["moved"]),
            )
            for one in state["rounds"]
        ]
        self._unchecked = {name: set() for name in self.start}

    def restore_on_other_ranks(
        self, states: Sequence[tuple[Sequence[int], Mapping[str, Any]]], saved: int
    ) -> list[int]:
        """Restore states of a job of `saved` ranks, each with the saved ranks that it is of.

        All ranks must call it, each with any number of states, at least one. Every rank then has the mean residual over
        the saved ranks, so that the sum over ranks divided by their number is as before. Returns the saved ranks that
        no process gives, whose residuals are lost.
        """
        self.restore({**states[0][1], "residuals": {}})
        if not isinstance(self.mode, SparseLoCo):
            return []
        comm, library = self._comm, self._comm.arrays
        mine = {rank: (one, place) for ranks, one in states for place, rank in enumerate(ranks)}
        owners: dict[int, int] = {}
        for process, ranks in sorted(
            json.loads(text) for text in comm._gather_texts(json.dumps([min(comm.ranks), sorted(mine)]))
        ):
            for rank in ranks:
                owners.setdefault(rank, process)
        for name, start in sorted(self.start.items()):
            total = np.zeros_like(start)
            for rank in sorted(mine):
                found, place = mine[rank]
                if owners[rank] == min(comm.ranks) and name in found["residuals"]:
                    total += np.asarray(found["residuals"][name][place])
            lines = [library.wrapped(total * (not place)) for place in range(len(comm.ranks))]
            given = lines[0] if comm.one_rank else lines
            comm.all_reduce(given, op="sum", out=given)
            mean = np.array(library.values(lines[0])) / saved
            self.residuals[name] = [mean.astype(start.dtype) for _ in comm.ranks]
        return [rank for rank in range(saved) if rank not in owners]

    def common(self) -> dict[str, Line]:
        """Return the state that all ranks share, by name, which joining ranks need; no round may be in flight."""
        found = {
            f"{part} {name}": one
            for part, held in (("start", self.start), ("momentum", self.momentum))
            for name, one in held.items()
        }
        return {**found, "unchecked": np.array(sorted(self._unchecked), dtype=np.str_)}

    def restore_common(self, state: Mapping[str, Line]) -> None:
        """Restore what `common` returned on another rank."""
        for part, held in (("start ", self.start), ("momentum ", self.momentum)):
            held.clear()
            held.update(
                {key[len(part) :]: np.array(one) for key, one in state.items() if key.startswith(part)}
            )
        self._unchecked = {str(name): set() for name in state["unchecked"]}

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun whose result is not used yet."""
        return bool(self._rounds)

    def norm_kept(self) -> float | None:
        """Return the norm of the residuals of this process's ranks; None without residuals."""
        if not isinstance(self.mode, SparseLoCo):
            return None
        lines = [line for kept in self.residuals.values() for line in kept]
        return math.sqrt(math.fsum(float(np.vdot(one, one)) for one in lines))

    def _begin(self, names: tuple[str, ...], count: int, named: Named) -> None:
        """Start the exchange of parameters that have moved."""
        comm, library, mode = self._comm, self._comm.arrays, self.mode
        delay = mode.delay if isinstance(mode, DiLoCo) else 0
        one = OuterRound(names, count + delay, self._recorder.now())
        asynchronous = delay > 0 or comm.on_failure == "shrink"
        moved = {
            name: [self._rounded(name, array) - self._line(array) for array in named[name]] for name in names
        }
        try:
            for dtype, group in self._by_dtype(names).items():
                if isinstance(mode, DiLoCo):
                    lines = [
                        np.concatenate([moved[name][place] for name in group])
                        for place in range(len(comm.ranks))
                    ]
                    given = [library.wrapped(line) for line in lines]
                    adding = given[0] if comm.one_rank else given
                    handle = comm.all_reduce(adding, op="avg", out=adding, async_op=asynchronous)
                else:
                    messages = []
                    for place in range(len(comm.ranks)):
                        held = [self._with_residual(name, moved[name][place], place) for name in group]
                        message, carried = self._format.encode(held)
                        messages.append(library.wrapped(message))
                        for name, line, gone in zip(group, held, carried, strict=True):
                            one.residuals.setdefault(name, []).append(line - gone)
                    handle = comm.all_gather(
                        messages[0] if comm.one_rank else messages, async_op=asynchronous
                    )
                one.handles[dtype] = comm._in_order.around(handle)
        except TopoplanError:
            self._put_back(names, named)
            raise
        self._rounds.append(one)

    def _end(self, one: OuterRound, named: Named) -> None:
        """Wait for an exchange, move the start, and give its values to the parameters."""
        self._rounds.remove(one)
        try:
            means = self._collect(one)
        except TopoplanError:
            self._put_back(one.names, named)
            raise
        if not one.moved:
            self._move(one, means, named)
        alpha = self.mode.alpha if isinstance(self.mode, DiLoCo) and one.means else 0.0
        for name in one.names:
            for array in named.get(name, ()):
                values = self.start[name]
                self._put(array, values + alpha * (self._line(array) - values) if alpha else values)
        if absent := tuple(name for name in one.names if name not in named):
            one.names, one.moved = absent, True  # other optimizers move these
            self._rounds.append(one)

    def _collect(self, one: OuterRound) -> dict[str, Line]:
        """Return the means of a round, empty if one is not finite; the same on all ranks."""
        if one.means is not None:
            return one.means
        library, means = self._comm.arrays, dict[str, Line]()
        finite = True
        for dtype, group in self._by_dtype(one.names).items():
            handle = one.handles[dtype]
            with self._recorder.waiting():
                found = handle.wait()
            values = np.array(library.values(found if self._comm.one_rank else found[0])).reshape(-1)
            sizes = [self.start[name].size for name in group]
            self._record(one, _key(group), handle, sizes, np.dtype(dtype))
            if isinstance(self.mode, DiLoCo):
                parts = np.split(values, np.cumsum(sizes)[:-1])
            else:
                parts = self._summed(values, sizes, np.dtype(dtype)) or []
            finite = finite and bool(parts) and all(bool(np.isfinite(part).all()) for part in parts)
            means.update(zip(group, parts, strict=False))
        one.handles, one.means = {}, means if finite else {}
        return one.means

    def _summed(self, values: NDArray[np.uint8], sizes: list[int], dtype: np.dtype[Any]) -> list[Line] | None:
        """Return the means of gathered messages, added in the order of the ranks; None if a rank had no finite ones."""
        assert isinstance(self.mode, SparseLoCo), "DiLoCo sends no entries"
        totals = [np.zeros(size, dtype=dtype) for size in sizes]
        senders = [np.zeros(size, dtype=np.int64) for size in sizes]
        messages = values.reshape(-1, self._format.nbytes(sizes, dtype))
        for message in messages:
            found = self._format.decode(message, sizes, dtype)
            if found is None:
                return None
            for total, count, (indices, entries) in zip(totals, senders, found, strict=True):
                with np.errstate(over="ignore"):  # an infinite sum is seen by the caller
                    total[indices] += entries
                count[indices] += entries != 0
        if self.mode.divisor == "all":
            return [total / dtype.type(len(messages)) for total in totals]
        return [
            total / np.maximum(count, 1).astype(dtype) for total, count in zip(totals, senders, strict=True)
        ]

    def _move(self, one: OuterRound, means: Mapping[str, Line], named: Named) -> None:
        """Move the start by the outer optimizer, unless a result is not finite."""
        mode, starts, momenta = self.mode, dict[str, Line](), dict[str, Line]()
        with np.errstate(over="ignore", invalid="ignore"):
            for name, mean in means.items():
                step = mean
                if isinstance(mode, DiLoCo) and mode.outer_momentum:
                    held = self.momentum.get(name)
                    momenta[name] = mean if held is None else mode.outer_momentum * held + mean
                    step = mean + mode.outer_momentum * momenta[name] if mode.nesterov else momenta[name]
                starts[name] = self.start[name] - mode.outer_rate * step
        limits = {
            name: LIMITS.get(self._comm.arrays.dtype(named[name][0]), math.inf) if name in named else math.inf
            for name in starts
        }
        if not means or not all(bool((np.abs(line) < limits[name]).all()) for name, line in starts.items()):
            one.means = {}
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the round of {self.mode} after training step {self._recorder.step - 1} is not finite on some "
                    "rank: parameters are as before the round on all ranks",
                    stacklevel=4,
                )
            return
        self.start.update(starts)
        self.momentum.update(momenta)
        self.residuals.update(one.residuals)

    def _put_back(self, names: Sequence[str], named: Named) -> None:
        for name in names:
            for array in named.get(name, ()):
                self._put(array, self.start[name])

    def _with_residual(self, name: str, moved: Line, place: int) -> Line:
        assert isinstance(self.mode, SparseLoCo), "DiLoCo keeps no residual"
        kept = self.residuals.get(name)
        return moved if kept is None else self.mode.decay * kept[place] + moved

    @property
    def _format(self) -> ChunkFormat:
        assert isinstance(self.mode, SparseLoCo), "DiLoCo sends no entries"
        return ChunkFormat(self.mode.k, self.mode.chunk, self.mode.bits)

    def _by_dtype(self, names: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.start[name].dtype.name, []).append(name)
        return {dtype: found[dtype] for dtype in sorted(found)}

    def _record(
        self, one: OuterRound, key: str, handle: Handle[Any], sizes: list[int], dtype: np.dtype[Any]
    ) -> None:
        recorder, mode, step = self._recorder, self.mode, self._recorder.step - 1
        nbytes, density, how = sum(sizes) * dtype.itemsize, 1.0, "outer step"
        if isinstance(mode, SparseLoCo):
            density = self._format.nbytes(sizes, dtype) / max(nbytes, 1)
            how = f"{mode.k} of {mode.chunk}"
        recorder.gave(key, handle.among, repeated=handle.repeated, step=step)
        recorder.add(key, nbytes, one.started, density=density, how=how, bound=math.inf, step=step)

    def _divide_into_fragments(self) -> None:
        """Give each new parameter its fragment: consecutive ones, with about the same number of elements."""
        fresh = sorted(self.start.keys() - self._fragment_of.keys(), key=_natural)
        parts = self.mode.fragments if isinstance(self.mode, DiLoCo) else 1
        total, before = max(sum(self.start[name].size for name in fresh), 1), 0
        for name in fresh:
            size = self.start[name].size
            self._fragment_of[name] = min((2 * before + size) * parts // (2 * total), parts - 1)
            before += size

    def _check_starts(self, named: Named) -> None:
        """Raise `UsageError` on all ranks if new starts differ between them."""
        fresh = sorted(self._unchecked & named.keys())
        if not fresh:
            return
        comm, library = self._comm, self._comm.arrays
        lines = []
        for place in range(len(comm.ranks)):
            digest = hashlib.sha256()
            for name in fresh:
                other = f"other {place}" * (place in self._unchecked[name])
                digest.update(f"{name} {self.start[name].dtype} {self.start[name].size} {other}".encode())
                digest.update(self.start[name].tobytes())
            lines.append(library.wrapped(np.frombuffer(digest.digest(), np.uint8).copy()))
        handle = comm._in_order.around(
            comm.all_gather(lines[0] if comm.one_rank else lines, async_op=comm.on_failure == "shrink")
        )
        found = handle.wait()
        rows = np.asarray(library.values(found if comm.one_rank else found[0])).reshape(-1, 32)
        if (rows != rows[0]).any():
            rank = int(np.nonzero((rows != rows[0]).any(axis=1))[0][0])
            raise UsageError(
                f"parameters must be the same on all ranks before the first round of {self.mode}, and rank {rank} "
                "has others than rank 0; broadcast those of one rank first"
            )
        for name in fresh:
            del self._unchecked[name]

    def _line(self, array: Any) -> Line:
        """Return the values of a parameter as a line of float32 or float64; complex ones as real numbers."""
        values = np.ascontiguousarray(self._comm.arrays.values(array)).reshape(-1)
        if values.dtype.kind == "c":
            values = values.view(values.real.dtype)
        if "float" not in values.dtype.name or values.dtype.itemsize > 8:
            raise UsageError(
                f"{type(self.mode).__name__} needs float or complex parameters, got {values.dtype}"
            )
        return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)

    def _rounded(self, name: str, array: Any) -> Line:
        """Return the start of a parameter as the parameter's dtype holds it."""
        start, dtype = self.start[name], self._comm.arrays.values(array).dtype
        return start if dtype.itemsize >= start.itemsize else start.astype(dtype).astype(start.dtype)

    def _put(self, array: Any, line: Line) -> None:
        library = self._comm.arrays
        dtype = library.values(array).dtype
        made = line.view(dtype) if dtype.kind == "c" else line.astype(dtype, copy=False)
        library.put(array, made.reshape(library.shape(array)))


def check_rounds_in_flight(state: Mapping[str, Any], mode: OuterMode) -> None:
    """Raise `UsageError` if a state of `OuterOptimizer` has the result of another kind of mode in flight."""
    saved = str(state["mode"])
    waiting = any(not one["moved"] for one in state["rounds"])
    if waiting and saved.partition("(")[0] != type(mode).__name__:
        raise UsageError(
            f"the state has a round of {saved} in flight, which {type(mode).__name__} cannot use; load it into "
            f"{saved.partition('(')[0]}, or save it between rounds or after finish()"
        )


def _key(names: Sequence[str]) -> str:
    return f"parameters {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")


def _natural(name: str) -> tuple[int, str]:
    """Return the key of an order in which numbers count as numbers."""
    return (int(name), "") if name.isdecimal() else (1 << 62, name)
