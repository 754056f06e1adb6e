"""Parse the JSON of nccl-tests (``-J``) and of ``topoplan bench --json``, or a text that holds either.

CSV of rccl-tests (``-Z csv``) becomes its JSON rows. With MPI, older versions print a value more in each row than the
head names: it lacks ``nodes``. Records of NCCL's Inspector are parsed by `topoplan.reading.nccl.job_reports`.

Both JSON files hold the content of the tables and become the same `PerfRun`. Booleans and NaN are texts in the JSON of
nccl-tests. The file of a run that was killed lacks its closing brackets: it is parsed up to its last whole result.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.errors import UsageError
from topoplan.reading.nccl.job_reports import is_inspector, parse_inspector
from topoplan.reading.nccl.perf_text import (
    ENDLESS,
    PROGRAMS,
    LoggedRank,
    LoggedRow,
    OpenRun,
    PerfRun,
    Timing,
    logged_row,
    named_tests,
    parse_perf_text,
    short_bus_id,
    timing_of,
)


def parse_perf_runs(text: str) -> tuple[PerfRun, ...]:
    """Return all runs in a text or a JSON object; none if it is neither. A UsageError if the JSON is incomplete."""
    start = text.lstrip("\ufeff \t\r\n")
    if is_inspector(text):
        return parse_inspector(text)
    head = start.partition("\n")[0].strip()
    if not start.startswith(("{", "[")) and head.count(",") >= 8 and "busbw" in head.lower():
        return parse_perf_text(_rows_of_csv(text))
    if start.startswith("[") and '"busBw"' in text:
        # rccl-tests may put its rows into one list
        with contextlib.suppress(ValueError, RecursionError):
            text = "\n".join(map(json.dumps, json.loads(start)))
    if not start.startswith("{"):
        return parse_perf_text(text)
    found: list[PerfRun] = []
    for value, cut in _objects(text):
        try:
            if "rows" in value and "ranks" in value:
                found += _bench_runs(value)
            elif "results" in value and "config" in value:
                found.append(_perf_run(value, cut=cut))
            elif "busBw" in value or "algBw" in value:
                return parse_perf_text(text)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UsageError(
                f"the JSON of the log lacks what nccl-tests writes: {str(error)[:100]!r} ({type(error).__name__}); "
                "give the whole file"
            ) from None
    return tuple(found)


def _rows_of_csv(text: str) -> str:
    """Return the rows of rccl-tests' CSV as its JSON, each on its line; a row of other length stays as it is cut."""
    lines = text.lstrip("\ufeff \t\r\n").splitlines()
    columns = [name.strip().lower() for name in lines[0].split(",")]
    names = {"collective": "name", "inplace": "inPlace", "algbw": "algBw", "busbw": "busBw"}
    made = [""]
    for line in lines[1:]:
        values = [value.strip().strip('"') for value in line.split(",")]
        heads = columns
        if len(values) == len(columns) + 1 and "ranks" in columns and "nodes" not in columns:
            place = columns.index("ranks")
            heads = [*columns[:place], "nodes", *columns[place:]]
        if len(values) == len(heads):
            made.append(
                json.dumps({names.get(key, key): value for key, value in zip(heads, values, strict=True)})
            )
        else:
            made.append('{"busBw": ' if line.strip() else "")
    return "\n".join(made)


def _objects(text: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield every JSON object of a text, and whether it was cut: the end of a killed run is missing."""
    decoder = json.JSONDecoder()
    text = text.lstrip("\ufeff \t\r\n")
    start = 0
    while start < len(text):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            value = _completed(text[start:])
            if value is None:
                first = text[start:].partition("\n")[0]
                if start == 0 and ('"busBw"' in first or '"algBw"' in first):
                    yield {"busBw": None}, True
                    return
                fault = "it has a number of 25 digits or more" if ENDLESS.search(text) else str(error)[:200]
                raise UsageError(
                    f"the log is not JSON: {fault}; give the whole file, or the text that was printed"
                ) from None
            yield value, True
            return
        if not isinstance(value, dict):
            raise UsageError("the log is not a JSON object; give the file that nccl-tests wrote with -J")
        yield value, False
        while end < len(text) and text[end] in " \t\r\n":
            end += 1
        start = end


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[][{}]', re.DOTALL)
"""A string, the last one perhaps cut, or a bracket; every string matches, so that a text is scanned once."""


def _completed(text: str) -> dict[str, Any] | None:
    """Return a cut JSON object up to its last whole result, its brackets closed; None without a whole result."""
    opened: list[str] = []
    last, brackets = 0, ""
    for token in _TOKEN.finditer(text):
        kind = token[0]
        if kind in ("{", "["):
            opened.append("}" if kind == "{" else "]")
        elif kind in ("}", "]"):
            if not opened or opened.pop() != kind:
                return None
            if opened == ["}", "]"]:
                last, brackets = token.end(), "]}"
    if not last or '"results"' not in text[:last]:
        return None
    try:
        value = json.loads(text[:last] + brackets)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
    size = int(row["size"])
    if not 0 <= size < 1 << 63:
        raise ValueError(f"size {str(row['size'])[:30]} is not a number of bytes")
    return size


def _perf_run(value: Mapping[str, Any], *, cut: bool) -> PerfRun:
    config, results, arguments = value["config"], value["results"], value.get("args", [])
    devices = value.get("devices") or config.get("devices") or []
    ranks = [
        LoggedRank(
            int(one["rank"]),
            int(one.get("group", 0)),
            str(one["hostname"]),
            int(one["device"]),
            short_bus_id(str(one["device_hex"])),
            str(one.get("device_info", "")),
        )
        for one in devices
    ]
    # the program is the first argument; later ones may name files
    tests = named_tests(str(arguments[0]) if arguments else "")
    tests = tests or named_tests(" ".join(str(row.get("experiment_name", "")) for row in results[:1]))
    run = OpenRun(1, program=tests[0] if tests else "", ranks=ranks, summaries=0 if cut else 1)
    for place, row in enumerate(results, 1):
        size = _size(row)
        placed = [_timing(run, place, size, row.get(key)) for key in ("out_of_place", "in_place")]
        if any(placed):
            run.rows.append(logged_row(place, size, row, *placed))
    return run.closed()


def _timing(run: OpenRun, place: int, size: int, block: Mapping[str, Any] | None) -> Timing | None:
    """Return one measurement of a result; None if it was not made, or is not a number."""
    if block is None:
        return None
    known = {
        "algbw": str(block["alg_bw"]),
        "busbw": str(block["bus_bw"]),
        "time": str(block.get("time", block.get("cpu_time"))),
    }
    wrong = block.get("nwrong")
    if wrong is None or str(wrong) in ("N/A", "nan"):
        wrong = "N/A"
    return timing_of(run, place, str(size), known | {"#wrong": str(wrong)})
