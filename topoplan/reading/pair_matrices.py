"""Parse the measured matrices of p2pBandwidthLatencyTest and nvbandwidth to rates of pairs of GPUs.

Direction is by what a test does, and not by what it prints: nvbandwidth's arrows point the other way. In its read test
the row fetches from the column, in its write test the row stores into the column; p2pBandwidthLatencyTest with
``P2P Writes`` stores from the row into the column, with ``P2P Reads`` it fetches. So a store of row i and column j is
a push from i to j, a fetch a pull from j to i. Bidirectional tables of p2pBandwidthLatencyTest add up both directions;
those of nvbandwidth, and tables of latency, of host memory and of a GPU's own memory, are left out.

A pair without peer access is copied through the host by p2pBandwidthLatencyTest, and left out (``N/A``) by nvbandwidth,
which waives a test without any pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.host_topology import plain_bus_id
from topoplan.machine.topology import format_value
from topoplan.machine.topology_json import decode_json
from topoplan.reading.load import form_of
from topoplan.units import counted, listed

Rates = Mapping[tuple[int, int], float]
"""GB/s by numbers of GPUs, source first."""

MEASURED = ("p2pBandwidthLatencyTest", "nvbandwidth", "nvbandwidth.json")
"""Formats of the registry that are parsed here."""

MOST_GPUS = 512
MOST_RATE = 1e5
"""GB/s that no memory has."""

_WHOLE = "give the whole output"


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Rates of pairs as one program measured them.

    ``push`` and ``pull`` are of copies that the source stores and the destination fetches, ``hosted`` the pairs that
    were copied through the host, and ``refused`` those of them without peer access. ``together`` adds up copies both
    ways at once. ``busids`` are those of the GPUs by number, empty if not printed. ``notes`` say what was left out.
    """

    method: str
    gpus: int
    push: Rates
    pull: Rates
    hosted: frozenset[tuple[int, int]] = frozenset()
    busids: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refused: frozenset[tuple[int, int]] = frozenset()
    together: Rates = field(default_factory=dict)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the measured pairs, source first, in order."""
        return tuple(sorted({*self.push, *self.pull}))

    def best(self, pair: tuple[int, int]) -> float:
        """Return the GB/s of a pair by the faster access."""
        return max(rates[pair] for rates in (self.push, self.pull) if pair in rates)


def parse_measured_rates(text: str) -> MeasuredRates:
    """Return the rates in the output of p2pBandwidthLatencyTest or nvbandwidth, text or JSON.

    UsageError for another text, a table that is cut or has other cells than rates, and an output without a table of
    pairs.

    >>> title = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\\n"
    >>> parse_measured_rates(title + "  D\\\\D 0 1\\n  0 900 51.2\\n  1 2.6 901\\n").push
    {(0, 1): 51.2, (1, 0): 2.6}
    """
    form = form_of(text)
    if form == "p2pBandwidthLatencyTest":
        return _of_latency_test(text)
    if form not in MEASURED:
        raise UsageError(
            "the text is neither of p2pBandwidthLatencyTest nor of nvbandwidth; give the output of one"
        )
    try:
        tests = list(_json_tests(text) if form == "nvbandwidth.json" else _text_tests(text))
    except TopologyError as error:
        raise UsageError(f"{error}; {_WHOLE}") from None
    return _of_nvbandwidth(tests, _busids(text))


_TITLE = re.compile(
    r"[ \t]*(?:(Unidirectional|Bidirectional) P2P=(Enabled|Disabled) Bandwidth ?(?:\(P2P (Writes|Reads)\) ?)?Matrix"
    r" \(GB/s\)|(P2P Connectivity Matrix)|(P2P=\w+ Latency.*))[ \t\r]*"
)
_HEAD = re.compile(r"[ \t]*(?:D\\D)?((?:[ \t]+[0-9]{1,4})+)[ \t\r]*")
_ROW = re.compile(r"[ \t]*([0-9]{1,4})((?:[ \t]+\S{1,40})*)[ \t\r]*")


def _of_latency_test(text: str) -> MeasuredRates:
    found: dict[tuple[str, ...], dict[tuple[int, int], float | None]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    lines = text.splitlines()
    for place, line in enumerate(lines):
        title = _TITLE.fullmatch(line)
        if title is None or title[5]:
            continue
        key = ("Connectivity",) if title[4] else (title[1], title[2], title[3] or "")
        what = line.strip()
        if key in found:
            raise UsageError(f"{what} stands twice; give one run of the test")
        found[key], sizes[key] = _table(what, lines[place + 1 :], diagonal=True)
    access = found.get(("Connectivity",), {})
    enabled = {key[2]: table for key, table in found.items() if key[:2] == ("Unidirectional", "Enabled")}
    staged = {**found.get(("Unidirectional", "Disabled", ""), {})}
    tables = [(key, size) for key, size in sizes.items() if key[0] != "Bidirectional"]
    if len({size for _, size in tables}) > 1:
        raise UsageError(f"the tables are of {' and '.join(str(size) for _, size in tables)} GPUs; {_WHOLE}")
    if not enabled and not staged:
        raise UsageError(
            "p2pBandwidthLatencyTest must hold a Unidirectional table, got none: bidirectional ones add up both "
            f"directions; {_WHOLE}"
        )
    notes = []
    push, pull = _pairs(enabled.get("Writes", {})), _turned(_pairs(enabled.get("Reads", {})))
    if "" in enabled:
        undirected = _pairs(enabled[""])
        push = {(i, j): min(rate, undirected.get((j, i), rate)) for (i, j), rate in undirected.items()}
        notes.append("the table does not state its direction: both directions of a pair get the slower rate")
    refused = hosted = {pair for pair, allowed in access.items() if allowed == 0}
    both: dict[tuple[int, int], float] = {}
    measured, counts = "Enabled" if enabled else "Disabled", {size for _, size in tables}
    for kind, table in found.items():
        if kind[:2] == ("Bidirectional", measured) and sizes[kind] in counts:
            for (i, j), rate in _pairs(table).items():
                both[i, j] = both[j, i] = max(rate, both.get((i, j), 0.0))
    if not enabled:
        push = _pairs(staged)
        hosted = set(push)
        notes.append("only P2P=Disabled was measured: every copy went through the host")
    return MeasuredRates(
        "p2pBandwidthLatencyTest",
        max(sizes.values()),
        push,
        pull,
        frozenset(hosted & {*push, *pull}),
        _busids(text),
        tuple(notes),
        frozenset(refused & {*push, *pull}),
        both,
    )


def _turned(rates: Rates) -> dict[tuple[int, int], float]:
    return {(j, i): rate for (i, j), rate in rates.items()}


def _pairs(table: Mapping[tuple[int, int], float | None]) -> dict[tuple[int, int], float]:
    return {pair: rate for pair, rate in table.items() if pair[0] != pair[1] and rate is not None}


def _table(
    what: str, lines: Sequence[str], *, diagonal: bool
) -> tuple[dict[tuple[int, int], float | None], int]:
    """Return the cells of a square table and its number of GPUs; ``diagonal``: that of a GPU with itself is a rate."""
    head = next((match for match in map(_HEAD.fullmatch, lines[:3]) if match), None)
    if head is None:
        raise UsageError(f"{what} must have a line of GPU numbers below it; {_WHOLE}")
    columns = [int(word) for word in head[1].split()]
    if columns != list(range(len(columns))) or len(columns) > MOST_GPUS:
        raise UsageError(
            f"{what} must have columns 0, 1, … as its GPUs, got {head[1].strip()[:60]}; {_WHOLE}"
        )
    start = next(place for place, line in enumerate(lines) if _HEAD.fullmatch(line)) + 1
    rows = []
    for line in lines[start : start + len(columns)]:
        match = _ROW.fullmatch(line)
        if match is None:
            break
        rows.append((int(match[1]), match[2].split()))
    if [number for number, _ in rows] != columns:
        raise UsageError(
            f"{what} must have rows 0 to {len(columns) - 1}, got {listed(str(one) for one, _ in rows) or 'none'}; "
            f"{_WHOLE}"
        )
    return _cells(what, [cells for _, cells in rows], diagonal=diagonal), len(columns)


def _cells(
    what: str, rows: Sequence[Sequence[str]], *, diagonal: bool
) -> dict[tuple[int, int], float | None]:
    found: dict[tuple[int, int], float | None] = {}
    for i, row in enumerate(rows):
        if len(row) != len(rows):
            lost = "; is the diagonal missing?" if len(row) == len(rows) - 1 else ";"
            raise UsageError(
                f"{what}: row {i} must have {counted(len(rows), 'cell')}, got {len(row)}{lost} {_WHOLE}"
            )
        for j, cell in enumerate(row):
            found[i, j] = rate = None if cell == "N/A" else _number(cell)
            binary = "Connectivity" in what
            wrong = rate is not None and not (rate in (0, 1) if binary else (0 < rate < MOST_RATE))
            if wrong or (rate is None and diagonal):
                must = (
                    "0 or 1"
                    if binary
                    else "a rate above 0 GB/s"
                    if diagonal
                    else "a rate above 0 GB/s or N/A"
                )
                raise UsageError(
                    f"{what}: row {i}, column {j} must be {must}, got {format_value(cell)}; {_WHOLE}"
                )
    return found


def _number(text: str) -> float:
    try:
        return (
            float(text)
            if re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,12})?(?:e[+-]?[0-9]{1,3})?", text)
            else math.nan
        )
    except ValueError:
        return math.nan


_TEST = re.compile(r"device_to_device_memcpy_(read|write)_(ce|sm)")
_RUNNING = re.compile(r"Running (\w{1,80})\.[ \t]*")
_ENGINES = {"ce": "copy engines", "sm": "kernels"}


@dataclass(frozen=True, slots=True)
class _Test:
    """A test of nvbandwidth: its name, its status (Passed, Waived, Error), and its cells if it is one of `_TEST`."""

    name: str
    status: str
    cells: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    gpus: int = 0


def _text_tests(text: str) -> Iterator[_Test]:
    lines = text.splitlines()
    starts = [(place, match[1]) for place, line in enumerate(lines) if (match := _RUNNING.fullmatch(line))]
    for (place, name), (end, _) in pairwise([*starts, (len(lines), "")]):
        section = lines[place + 1 : end]
        status = next(
            (word for line in section for word in ("Waived", "Error") if line.lstrip().startswith(word)),
            "Passed",
        )
        if not _TEST.fullmatch(name) or status != "Passed":
            yield _Test(name, status)
            continue
        table = next((at for at, line in enumerate(section) if _HEAD.fullmatch(line)), None)
        if table is None:
            raise UsageError(f"{name} must have a table or be waived, got neither: was it cut? {_WHOLE}")
        cells, gpus = _table(name, section[table:], diagonal=False)
        yield _Test(name, status, cells, gpus)


def _json_tests(text: str) -> Iterator[_Test]:
    value = decode_json(text, "the output of nvbandwidth")
    root = value.get("nvbandwidth") if isinstance(value, dict) else None
    tests = root.get("testcases") if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(tests, list):
        error = (
            f", which says {format_value(root['error'])}"
            if isinstance(root, dict) and "error" in root
            else ""
        )
        raise UsageError(f"the JSON must hold nvbandwidth.testcases{error}; {_WHOLE}")
    for place, one in enumerate(tests):
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise UsageError(f"testcases[{place}] must have a name, got {format_value(one)}; {_WHOLE}")
        name, status = one["name"], str(one.get("status", ""))
        matrix = one.get("bandwidth_matrix")
        if not _TEST.fullmatch(name) or matrix is None:
            yield _Test(name, "Error" if status == "Passed" and matrix is None else status)
            continue
        rows = [row for row in matrix if isinstance(row, list)] if isinstance(matrix, list) else []
        if not isinstance(matrix, list) or len(rows) != len(matrix) or not 0 < len(rows) <= MOST_GPUS:
            raise UsageError(f"{name}: bandwidth_matrix must be a list of 1 to {MOST_GPUS} rows; {_WHOLE}")
        cells = _cells(name, [[str(cell) for cell in row] for row in rows], diagonal=False)
        yield _Test(name, status, cells, len(rows))


def _of_nvbandwidth(tests: Sequence[_Test], busids: Mapping[int, str]) -> MeasuredRates:
    """Return the rates of the tests of pairs; copy engines count before kernels, as `topoplan calibrate` copies."""
    found: dict[tuple[str, str], _Test] = {}
    for test in tests:
        match = _TEST.fullmatch(test.name)
        if match and _pairs(test.cells):
            if (match[1], match[2]) in found:
                raise UsageError(f"{test.name} stands twice; give one run of nvbandwidth")
            found[match[1], match[2]] = test
    waived = [test.name for test in tests if _TEST.fullmatch(test.name) and test.status != "Passed"]
    if not found:
        why = (
            f"{listed(waived, noun='tests')} {'was' if len(waived) == 1 else 'were'} waived or failed: no GPU has peer "
            "access to another, or there is one GPU; p2pBandwidthLatencyTest measures copies through the host"
            if waived
            else "it has none of a pair; run nvbandwidth -t device_to_device_memcpy_write_ce "
            "device_to_device_memcpy_read_ce"
        )
        raise UsageError(f"nvbandwidth must hold a device_to_device_memcpy test that passed: {why}")
    engine = "ce" if any(key[1] == "ce" for key in found) else "sm"
    used = {key[0]: test for key, test in found.items() if key[1] == engine}
    if len({test.gpus for test in used.values()}) > 1:
        raise UsageError(
            f"the tests are of {' and '.join(str(one.gpus) for one in used.values())} GPUs; {_WHOLE}"
        )
    gpus = next(iter(used.values())).gpus
    push = _pairs(used["write"].cells) if "write" in used else {}
    pull = _turned(_pairs(used["read"].cells)) if "read" in used else {}
    notes = []
    missing = [
        f"gpu{i}>gpu{j}" for i in range(gpus) for j in range(gpus) if i != j and not {(i, j)} & {*push, *pull}
    ]
    if missing:
        notes.append(f"pairs without peer access, not measured: {listed(missing, noun='pairs')}")
    if waived:
        notes.append(f"tests of nvbandwidth that were waived or failed: {listed(waived, noun='tests')}")
    return MeasuredRates(
        f"nvbandwidth, {_ENGINES[engine]}", gpus, push, pull, frozenset(), busids, tuple(notes)
    )


_DEVICES = (
    re.compile(
        r'(?:Device |")(\d{1,3}): [^\n"]{1,100}\(([0-9a-fA-F]{8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)'
    ),
    re.compile(
        r"Device: (\d{1,3}), .{1,100}?, pciBusID: ([0-9a-f]{1,2}), pciDeviceID: ([0-9a-f]{1,2}), "
        r"pciDomainID: ?([0-9a-f]{1,8})"
    ),
)


def _busids(text: str) -> dict[int, str]:
    """Return the bus ids of GPUs by number, as nvbandwidth and p2pBandwidthLatencyTest list their devices."""
    found = {int(one[1]): f"{one[2]}:{one[3]}:{one[4]}.0" for one in _DEVICES[0].finditer(text)}
    found |= {int(one[1]): f"{one[4]}:{one[2]}:{one[3]}.0" for one in _DEVICES[1].finditer(text)}
    return {number: plain_bus_id(busid) for number, busid in found.items()}
