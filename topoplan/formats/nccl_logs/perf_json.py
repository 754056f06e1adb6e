"""The runs of nccl-tests in the JSON that it writes (``-J``), and of ``topoplan bench --json``; or in a text.

Both hold what the tables hold, and become the same `PerfRun`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from topoplan.errors import UsageError
from topoplan.formats.nccl_logs.perf_runs import (
    PROGRAM,
    PROGRAMS,
    LoggedRank,
    LoggedRow,
    OpenRun,
    PerfRun,
    parse_perf_text,
    short_bus_id,
    timing_of,
)


def parse_perf_runs(text: str) -> tuple[PerfRun, ...]:
    """All runs in a text or a JSON object; none where it is neither.

    Raises
    ------
    UsageError
        The JSON is cut, or lacks what it should have.

    Examples
    --------
    >>> parse_perf_runs('{"some": "other file"}'), parse_perf_runs("some other text")
    ((), ())
    """
    if not text.lstrip().startswith("{"):
        return parse_perf_text(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the log is no JSON: {error}; give the whole file, or the text that was printed"
        ) from None
    try:
        if "rows" in value and "ranks" in value:
            return _bench_runs(value)
        if "results" in value and "config" in value:
            return (_perf_run(value),)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the JSON of the log lacks what nccl-tests writes: {error!r}; give the whole file"
        ) from None
    return ()


def _bench_runs(value: Mapping[str, Any]) -> tuple[PerfRun, ...]:
    ranks = [LoggedRank(rank, name=str(name)) for rank, name in enumerate(value["ranks"])]
    collective = str(value["collective"])
    runs: dict[str, OpenRun] = {}
    for place, row in enumerate(value["rows"], 1):
        schedule, size = str(row["schedule"]), _size(row)
        run = runs.setdefault(schedule, OpenRun(1, program="bench", schedule=schedule, ranks=list(ranks)))
        known = {name: str(row[name]) for name in ("time", "algbw", "busbw", "wrong")}
        timing = timing_of(run, place, str(size), known)
        if timing is not None:
            run.rows.append(LoggedRow(place, size, str(row["type"]), str(row["redop"]), None, timing, None))
    for run in runs.values():
        run.stated = len(ranks)
        run.collective = collective if collective in PROGRAMS.values() else ""
    return tuple(run.closed() for run in runs.values())


def _size(row: Mapping[str, Any]) -> int:
    """Bytes of a row."""
    size = int(row["size"])
    if not 0 <= size < 1 << 63:
        raise ValueError(f"size {str(row['size'])[:30]} is no number of bytes")
    return size


def _perf_run(value: Mapping[str, Any]) -> PerfRun:
    config, results, arguments = value["config"], value["results"], value.get("args", [])
    devices = value.get("devices") or config.get("devices") or []
    ranks = tuple(
        LoggedRank(
            int(one["rank"]),
            int(one.get("group", 0)),
            str(one["hostname"]),
            int(one["device"]),
            short_bus_id(str(one["device_hex"])),
            str(one.get("device_info", "")),
        )
        for one in devices
    )
    told = " ".join([*map(str, arguments), *(str(row.get("experiment_name", "")) for row in results[:1])])
    program = PROGRAM.search(told)
    run = OpenRun(1, program=program[1] if program else "", ranks=list(ranks), summaries=1)
    for place, row in enumerate(results, 1):
        size = _size(row)
        placed = []
        for key in ("out_of_place", "in_place"):
            block = row.get(key)
            known = {} if block is None else {name: str(block[name]) for name in ("alg_bw", "bus_bw")}
            if block is not None:
                known = {
                    "algbw": known["alg_bw"],
                    "busbw": known["bus_bw"],
                    "time": str(block.get("time", block.get("cpu_time"))),
                }
                known["#wrong"] = "N/A" if block.get("nwrong") is None else f"{float(block['nwrong']):g}"
            placed.append(timing_of(run, place, str(size), known) if known else None)
        if any(placed):
            root = str(row.get("root", "")).strip()
            run.rows.append(
                LoggedRow(
                    place,
                    size,
                    str(row.get("type", "")),
                    str(row.get("redop", "")),
                    int(root) if root.isdecimal() else None,
                    *placed,
                )
            )
    run.collective = PROGRAMS.get(run.program, "")
    return run.closed()
