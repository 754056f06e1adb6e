"""Parse what NCCL says of a running job: the records of its Inspector, and the status of its RAS subsystem.

The Inspector (a profiler plug-in, format v4.0) writes an object for each operation and rank. Records of one operation
have one sequence number; the rank with the shortest time came last and did not wait, so its time is that of the
operation, and the median over operations of a size is that of the size. Sizes are of a rank's part for all-gather and
reduce-scatter, and become those of the whole buffer, as nccl-tests counts them; bandwidths follow from them.

RAS (``ncclras -f json``, or port 28028) states for each communicator its ranks, their counts of collectives, and ranks
that do not answer. A rank whose count lags behind is one that the others wait for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import format_value
from topoplan.machine.topology_json import decode_json
from topoplan.reading.nccl.perf_text import PROGRAMS, LoggedRow, PerfRun, Timing
from topoplan.units import counted, listed

_WHOLE = "give the whole file"
_PROGRAMS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "alltoall",
}
_DIVIDED = ("all_gather", "reduce_scatter")
"""Collectives whose recorded size is that of a rank's part."""

MOST_RANKS = 1 << 20


def _bus_factor(program: str, ranks: int) -> float:
    """Return busbw over algbw, as nccl-tests define them."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "alltoall": share}.get(
        program, 1.0
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """One operation of one rank: the communicator, its ranks, and the collective's number, bytes and microseconds."""

    line: int
    communicator: str
    ranks: int
    rank: int
    host: str
    program: str
    number: int
    nbytes: int
    time: int
    source: str


def is_inspector(text: str) -> bool:
    """Return whether a text holds records of the Inspector."""
    return '"coll_perf"' in text or '"p2p_perf"' in text


def parse_inspector(text: str) -> tuple[PerfRun, ...]:
    """Return a run for each communicator and collective; files of several ranks may follow one another.

    Point-to-point operations are counted in a warning. UsageError if no line is a whole record.
    """
    records: list[_Record] = []
    faults: list[str] = []
    p2p = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if "p2p_perf" in value:
                p2p += 1
            else:
                records.append(_record(number, value))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            faults.append(f"line {number}: the record is cut or lacks a key ({str(error)[:60]}); left out")
    if not records:
        why = (
            f"{counted(p2p, 'record')} of point-to-point operations" if p2p else (faults or ["no record"])[0]
        )
        raise UsageError(f"the Inspector's file holds no whole record of a collective: {why}; {_WHOLE}")
    if p2p:
        faults.append(
            f"{counted(p2p, 'record')} of point-to-point operations left out: they belong to no collective"
        )
    groups: dict[tuple[str, str, int], list[_Record]] = {}
    for record in records:
        groups.setdefault((record.communicator, record.program, record.ranks), []).append(record)
    runs = [_run(key, group) for key, group in groups.items()]
    first = runs[0]
    return (
        PerfRun(
            first.line,
            first.program,
            first.collective,
            first.schedule,
            first.stated,
            first.ranks,
            first.rows,
            (*faults[:20], *first.warnings),
        ),
        *runs[1:],
    )


def _record(line: int, value: Mapping[str, Mapping[str, object]]) -> _Record:
    header, perf = value["header"], value["coll_perf"]
    name = re.sub("[^a-z]", "", str(perf["coll"]).lower())
    numbers = [
        _whole(source[key], key, most)
        for source, key, most in (
            (header, "n_ranks", MOST_RANKS),
            (header, "rank", MOST_RANKS),
            (perf, "coll_sn", 1 << 62),
            (perf, "coll_msg_size_bytes", 1 << 50),
            (perf, "coll_exec_time_us", 1 << 50),
        )
    ]
    ranks, rank, number, nbytes, time = numbers
    if not rank < ranks or not time or not nbytes:
        raise ValueError(f"rank {rank} of {ranks}, {nbytes} bytes, {time} us")
    program = _PROGRAMS.get(name, name)
    return _Record(
        line,
        str(header["id"])[:40],
        ranks,
        rank,
        str(value.get("metadata", {}).get("hostname", ""))[:80],
        program,
        number,
        nbytes * ranks if program in _DIVIDED else nbytes,
        time,
        str(perf.get("coll_timing_source", ""))[:30],
    )


def _whole(value: object, key: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{key} is {format_value(value)}")
    return value


def _run(key: tuple[str, str, int], records: Sequence[_Record]) -> PerfRun:
    communicator, program, ranks = key
    by_operation: dict[tuple[int, int], list[_Record]] = {}
    for record in records:
        by_operation.setdefault((record.nbytes, record.number), []).append(record)
    times: dict[int, list[_Record]] = {}
    for (nbytes, _), same in sorted(by_operation.items()):
        times.setdefault(nbytes, []).append(min(same, key=lambda one: (one.time, one.line)))
    rows = []
    for nbytes, chosen in times.items():
        seconds = median(one.time for one in chosen) * 1e-6
        algbw = nbytes / seconds / 1e9
        timing = Timing(seconds, algbw, algbw * _bus_factor(program, ranks), None)
        rows.append(LoggedRow(chosen[0].line, nbytes, "", "", None, timing, None))
    seen = {record.rank for record in records}
    warnings = []
    if len(seen) < ranks:
        warnings.append(
            f"communicator {communicator}: records of {len(seen)} of {ranks} ranks: times hold their waits for the "
            "others; give the files of all ranks, one after another"
        )
    if sources := sorted({one.source for one in records if one.source and "gpu" not in one.source}):
        warnings.append(
            f"communicator {communicator}: some times are the CPU's ({listed(sources)}), not the kernel's"
        )
    return PerfRun(
        records[0].line,
        program,
        PROGRAMS.get(program, ""),
        f"Inspector, communicator {communicator}",
        ranks,
        (),
        tuple(rows),
        tuple(warnings),
    )


@dataclass(frozen=True, slots=True)
class RasRank:
    """A rank as RAS states it; ``device`` is CUDA's number, ``counts`` are those of its collectives.

    ``state`` says what is wrong with it, empty for a rank that answers without an error.
    """

    rank: int
    host: str
    pid: int
    device: int
    state: str
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """A communicator of ``size`` ranks, first the ranks that answer, then the missing ones."""

    name: str
    size: int
    ranks: tuple[RasRank, ...]

    @property
    def faulty(self) -> tuple[RasRank, ...]:
        """Return the ranks that are missing, or in an error."""
        return tuple(rank for rank in self.ranks if rank.state)

    def lagging(self) -> Iterator[tuple[RasRank, str, int, int]]:
        """Yield each rank that lags behind in a collective, with the collective, its count and the largest one."""
        answering = [rank for rank in self.ranks if rank.counts]
        for name in sorted({name for rank in answering for name in rank.counts}):
            most = max(rank.counts.get(name, 0) for rank in answering)
            for rank in answering:
                if rank.counts.get(name, 0) < most:
                    yield rank, name, rank.counts.get(name, 0), most


@dataclass(frozen=True, slots=True)
class RasReport:
    nccl_version: str
    communicators: tuple[RasCommunicator, ...]
    timeouts: int


def parse_ras(text: str) -> RasReport:
    """Return the status that ``ncclras -f json`` prints; UsageError for another text, or one that is cut."""
    try:
        value = decode_json(text, "the report of RAS")
        if not isinstance(value, dict):
            raise UsageError(f"the report of RAS must be an object, got {format_value(value)}; {_WHOLE}")
        found = _items(value, "communicators", "the report")
        if not found:
            raise UsageError(
                "the report of RAS must list a communicator, got none: no job of NCCL answered; ask while one runs"
            )
        communicators = tuple(_communicator(one, place) for place, one in enumerate(found))
    except TopologyError as error:
        raise UsageError(f"{error}; {_WHOLE}") from None
    ras = value.get("ras")
    timeouts = ras.get("timeouts_count") if isinstance(ras, dict) else 0
    return RasReport(
        str(value.get("nccl_version", ""))[:40], communicators, timeouts if isinstance(timeouts, int) else 0
    )


def _items(value: Mapping[str, object], key: str, what: str) -> list[dict[str, object]]:
    items = value.get(key)
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise UsageError(f"{what} of RAS must have a list {key}, got {format_value(items)}; {_WHOLE}")
    return items


def _communicator(value: Mapping[str, object], place: int) -> RasCommunicator:
    what = f"communicator {place}"
    size = _number(value, "size", what)
    ranks = [_rank(one, what, missing=False) for one in _items(value, "ranks", what)]
    ranks += [_rank(one, what, missing=True) for one in _items(value, "missing_ranks", what)]
    numbers = [one.rank for one in ranks]
    if len(set(numbers)) < len(numbers) or any(number >= size for number in numbers):
        raise UsageError(f"{what} of RAS must list each of its {size} ranks once; {_WHOLE}")
    unlisted = [
        RasRank(rank, "", 0, 0, "not listed", {})
        for rank in sorted(set(range(min(size, MOST_RANKS))) - set(numbers))
    ]
    return RasCommunicator(str(value.get("hash", place))[:40], size, (*ranks, *unlisted))


def _number(value: Mapping[str, object], key: str, what: str) -> int:
    try:
        return _whole(value.get(key), key, MOST_RANKS << 12 if key == "pid" else MOST_RANKS)
    except ValueError as error:
        raise UsageError(f"{what} of RAS: {error}, and must be a whole number; {_WHOLE}") from None


def _rank(value: Mapping[str, object], what: str, *, missing: bool) -> RasRank:
    status, counts = value.get("status"), value.get("collective_counts", {})
    if not isinstance(status, dict) or not isinstance(counts, dict):
        raise UsageError(f"{what} of RAS: a rank must have a status and collective_counts; {_WHOLE}")
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(
                f"{what} of RAS: {name[:40]} must be a count, got {format_value(count)}; {_WHOLE}"
            )
    words = {
        "considered_dead": "dead",
        "unresponsive": "unresponsive",
        "abort_flag": "aborted",
    }
    state = next(
        (word for key, word in words.items() if status.get(key) is True), "missing" if missing else ""
    )
    if not state and status.get("async_error") not in (0, None):
        state = f"error {format_value(status['async_error'])}"
    if not state and status.get("init_state") not in (0, None):
        state = f"initialisation {format_value(status['init_state'])}"
    return RasRank(
        _number(value, "rank", what),
        str(value.get("host", ""))[:80],
        _number(value, "pid", what),
        _number(value, "cuda_dev", what),
        state,
        {} if missing else dict(counts),
    )
