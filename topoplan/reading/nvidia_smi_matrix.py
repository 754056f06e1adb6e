"""Parse the table that ``nvidia-smi topo -m`` prints into checked cells; nothing is inferred here.

Accepted: tabs or spaces, colour and underline escapes, lines that begin with #, text before and after the table, cut
rows, tables with and without affinity columns, old codes (SOC is SYS, PSB is PIX). Each stated pair of devices has
one code; two rows that state a pair must agree.

Pages and tickets lose blanks (``NIC8NIC9``, ``NODEPXB``, ``GPU7CPU Affinity``, ``NV120-31``). A run of names or cells
is split if exactly one split fits the header, the diagonal and the other row of the pair; a note lists the runs.

The table of peer access that ``nvidia-smi topo -p2p`` prints may stand beside the matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.errors import TopologyError
from topoplan.reading.pcie_tree import CODES
from topoplan.units import listed

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\[(?:\d{1,2}(?:;\d{1,2})*)?m")
_GPU = re.compile(r"GPU\d{1,6}")
_RUN_TOGETHER = re.compile(r"GPU\d+|(?:(?!GPU\d)\S)+")
_EDGE = re.compile(r"(?<=\d)(?=[A-Za-z])")
_STEM = re.compile(r"([A-Za-z]\w*[A-Za-z_])\d+")
_CODE = re.compile(r"X|NV[1-9]\d?|" + "|".join(CODES))
_CELL = re.compile(r"X|NV[1-9]\d?|SOC|PSB|" + "|".join(CODES))
_CPUS = re.compile(r"\d[\d,-]*|N/A")
_NAME_AND_CELLS = re.compile(rf"(\S{{1,40}}?)((?:{_CELL.pattern})+(?:{_CPUS.pattern})?)")
_OLD = {"SOC": "SYS", "PSB": "PIX"}
_AFTER_DEVICES = ("CPU", "NUMA", "GPU")
_AFFINITY_COLUMN = re.compile("CPU Affinity|NUMA Affinity|GPU NUMA ID")
_NIC_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*")
_ACCESS = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
"""Cells of ``nvidia-smi topo -p2p``: access, and the reasons for its absence."""

MOST_DEVICES = 512
"""Largest number of columns of a table, which has their square of cells."""

LONGEST_NAME = 80
"""Characters of the longest name of a column."""

_LONGEST_RUN = 4096
"""Characters of the longest word that is taken for a run of cells."""


@dataclass(frozen=True, slots=True)
class ConnectionMatrix:
    """Cells of one table.

    ``gpus`` and ``nics`` are column names as printed, in printed order. ``codes`` hold each stated pair under both
    orders: ``NV2``, or one of `pcie_tree.CODES`. ``affinity`` and ``numa`` (such as ``0-1``) hold the GPUs that state
    them, ``memory_nodes`` those whose memory is a NUMA node; ``cut`` lists GPUs without a row. ``hardware`` names the
    adapter of a NIC column, from the legend. ``access`` holds cells of ``topo -p2p``, row first: ``OK``, or a reason.
    ``notes`` list lost blanks that were put back.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    codes: dict[tuple[str, str], str]
    affinity: dict[str, str]
    numa: dict[str, str]
    memory_nodes: dict[str, str]
    cut: tuple[str, ...]
    hardware: dict[str, str]
    access: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def nvlinks(self, first: str, second: str) -> int:
        """Return the NVLinks that the cell of a pair states; 0 for any other code, and if no row states the pair."""
        code = self.codes.get((first, second), "")
        return int(code[2:]) if code.startswith("NV") else 0


def read_matrix(text: str) -> ConnectionMatrix:
    """Parse and check the table; a TopologyError names row, column and value."""
    tables = _tables(text)
    access = [table for table in tables if table.is_access]
    found = [table for table in tables if table.rows and not table.is_access]
    if access and not found:
        raise TopologyError(
            "this is nvidia-smi topo -p2p, which states peer access alone; give the output of nvidia-smi topo -m, and "
            "this one beside it, in the same file or with --merge"
        )
    for table in found[1:]:
        if repeated := [name for name in table.rows if name in found[0].rows]:
            raise TopologyError(f"row {repeated[0]} occurs twice; give one matrix")
    if not found or not any(name in found[0].rows for name in found[0].head.gpus):
        raise TopologyError(
            "the nvidia-smi matrix has no GPU row; give the whole output of nvidia-smi topo -m"
        )
    head = found[0].head
    rows = _settled(found[0])
    return ConnectionMatrix(
        gpus=head.gpus,
        nics=tuple(name for name in head.columns if name not in set(head.gpus)),
        codes=_pairs(rows, head.columns),
        affinity=_affinity(rows, head, "CPU Affinity"),
        numa=_affinity(rows, head, "NUMA Affinity"),
        memory_nodes=_affinity(rows, head, "GPU NUMA ID"),
        cut=tuple(name for name in head.gpus if name not in rows),
        hardware=found[0].hardware,
        access=_access(access, head),
        notes=_notes(head.split, found[0].split),
    )


def read_access(text: str) -> tuple[tuple[str, ...], dict[tuple[str, str], str]]:
    """Return the GPUs and cells of a text of ``nvidia-smi topo -p2p`` alone; errors as `read_matrix`."""
    tables = [table for table in _tables(text) if table.is_access]
    if not tables:
        raise TopologyError("topo -p2p has no whole row; give the whole output of nvidia-smi topo -p2p r")
    head = tables[0].head
    if missing := [name for name in head.gpus if any(name not in table.rows for table in tables)]:
        raise TopologyError(
            f"topo -p2p has no row of {listed(missing)}; give the whole output of nvidia-smi topo -p2p r"
        )
    return head.gpus, _access(tables, head)


def _tables(text: str) -> list[_Table]:
    lines = [_ESCAPE.sub("", line) for line in text.lstrip("\ufeff").splitlines()]
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    heads = _headers(lines)
    ends = [head.line for head in heads[1:]] + [len(lines)]
    return [_read_table(head, lines[head.line + 1 : end]) for head, end in zip(heads, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Head:
    """A header: its line, columns of devices and of affinity, and the runs of names that were split."""

    line: int
    columns: tuple[str, ...]
    affinities: tuple[str, ...]
    split: tuple[str, ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if _GPU.fullmatch(name))


@dataclass(slots=True)
class _Table:
    """A header and the rows below it: each row's possible readings, cells and then affinities; runs that were split."""

    head: _Head
    rows: dict[str, list[list[str]]] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    split: list[str] = field(default_factory=list)
    is_access: bool = False


def _headers(lines: Sequence[str]) -> list[_Head]:
    """Return the headers of all tables: lines of names above a row, else the first line that may be one."""
    found: list[_Head] = []
    others: list[_Head] = []
    for number, line in enumerate(lines):
        if "GPU" not in line:
            continue
        tokens, split = _names_in(line.split())
        if not any(map(_GPU.fullmatch, tokens)) or any(map(_CODE.fullmatch, tokens)):
            continue
        end = next((i for i, token in enumerate(tokens) if token in _AFTER_DEVICES), len(tokens))
        columns = tuple(tokens[:end])
        if not columns or max(map(len, columns)) > LONGEST_NAME:
            continue
        head = _Head(number, columns, tuple(_AFFINITY_COLUMN.findall(" ".join(tokens[end:]))), split)
        below = lines[number + 1].split(None, 1)[0] if number + 1 < len(lines) else ""
        (found if _row_begins(below, frozenset(columns)) else others).append(head)
    if not found and not others:
        raise TopologyError(_no_header(lines))
    found = found or others[:1]
    for head in found:
        if len(head.columns) > MOST_DEVICES:
            raise TopologyError(
                f"the header names {len(head.columns)} devices, and up to {MOST_DEVICES} are read; give one server's "
                "matrix"
            )
        name, times = Counter(head.columns).most_common(1)[0]
        if times > 1:
            raise TopologyError(f"column {name[:60]} occurs twice in the header; names must be unique")
    return found


def _no_header(lines: Sequence[str]) -> str:
    if any(re.match(r"\s*Link \d+:", line) for line in lines):
        return (
            "this is a listing of nvidia-smi nvlink, which shows no whole machine; give it to --overlay, and the "
            "machine itself, such as the output of nvidia-smi topo -m, as TOPO"
        )
    return (
        "this is neither topology JSON nor an nvidia-smi matrix (no header line names GPU0, GPU1, ...); "
        "give the whole output of nvidia-smi topo -m"
    )


def _names_in(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a header, and the runs that were split behind a digit, at a name like another one.

    GPUs that run together are not noted: old pages have all headers so.
    """
    stems = {stem[1] for word in words[:MOST_DEVICES] if (stem := _STEM.fullmatch(word[:80]))}
    begins = ("CPU", "NUMA", "NIC", "mlx", *sorted(stems)[:32])
    tokens: list[str] = []
    split: list[str] = []
    for word in words:
        parts = []
        lost = False
        for part in _RUN_TOGETHER.findall(word):
            places = [m.start() for m in _EDGE.finditer(part) if part.startswith(begins, m.start())]
            parts += [part[a:b] for a, b in zip([0, *places], [*places, len(part)], strict=True)]
            lost = lost or bool(places)
        tokens += parts
        if lost:
            split.append(f"{' '.join(parts)[:60]} in the header")
    return tokens, tuple(split)


def _row_begins(word: str, columns: frozenset[str]) -> tuple[str, str] | None:
    """Return the row's name that a line's first word begins with, and cells that ran into it; None for other lines."""
    if word in columns:
        return word, ""
    run = _NAME_AND_CELLS.fullmatch(word) if len(word) <= _LONGEST_RUN else None
    return (run[1], run[2]) if run and run[1] in columns else None


def _read_table(head: _Head, lines: Sequence[str]) -> _Table:
    table = _Table(head)
    columns = frozenset(head.columns)
    legend = False
    for line in lines:
        legend = legend or "egend" in line.split(":", 1)[0]
        entry = _NIC_LEGEND.fullmatch(line)
        if entry and entry[1] in columns:
            table.hardware[entry[1]] = entry[2]
        if legend or entry:
            continue
        word, *tokens = line.split()
        begun = _row_begins(word, columns)
        if begun is None:
            if tokens and _CODE.fullmatch(_OLD.get(tokens[0], tokens[0])):
                raise TopologyError(
                    f"row {word[:60]} has no column of that name; the columns are "
                    f"{', '.join(head.columns)[:300]}"
                )
            continue
        name, run = begun
        if run:
            table.split.append(f"{name} {run[:30]} in row {name}")
            tokens = [run, *tokens]
        if name in table.rows:
            raise TopologyError(f"row {name} occurs twice; give one matrix")
        table.is_access = table.is_access or (not table.rows and _is_access(name, tokens, head.columns))
        if table.is_access:
            table.rows[name] = [_access_row(name, tokens, head.columns)]
        else:
            table.rows[name] = _readings(name, tokens, table)
    return table


def _is_access(name: str, tokens: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether a row is of ``topo -p2p``: the cells of all other GPUs are among `_ACCESS`."""
    cells = [token for column, token in zip(columns, tokens, strict=False) if column != name]
    return bool(cells) and all(cell in _ACCESS for cell in cells)


def _access_row(name: str, tokens: Sequence[str], columns: Sequence[str]) -> list[str]:
    if len(tokens) != len(columns) or not (len(columns) == 1 or _is_access(name, tokens, columns)):
        raise TopologyError(
            f"row {name} of topo -p2p has other cells than one of {', '.join(_ACCESS)} for each of {len(columns)} "
            "GPUs; give the whole output of nvidia-smi topo -p2p r"
        )
    return list(tokens)


def _access(tables: Sequence[_Table], head: _Head) -> dict[tuple[str, str], str]:
    """Return the cells of the tables of peer access; ``OK`` in one table (such as for NVLink) overrides the others."""
    found: dict[tuple[str, str], str] = {}
    gpus = set(head.gpus)
    for table in tables:
        for name, (cells, *_) in table.rows.items():
            for column, cell in zip(table.head.columns, cells, strict=True):
                if not {name, column} <= gpus:
                    raise TopologyError(
                        f"topo -p2p has {name if name not in gpus else column}, which the matrix lacks; give both of "
                        "one machine"
                    )
                if name != column and found.get((name, column)) != "OK":
                    found[name, column] = cell
    return found


def _readings(name: str, tokens: Sequence[str], table: _Table) -> list[list[str]]:
    """Return the possible readings of a row: two if NV12 and an affinity may be NV1 and another affinity, else one."""
    columns = table.head.columns
    row: list[str] = []
    other: list[str] = []
    for place, token in enumerate(tokens):
        if len(row) >= len(columns):
            row += tokens[place:]
            break
        cells, rest = _cells_in(token)
        if cells and rest and re.fullmatch(r"NV\d\d", cells[-1]) and not _CPUS.fullmatch(rest):
            cells[-1], rest = cells[-1][:3], cells[-1][3:] + rest
        if not cells or (rest and not _CPUS.fullmatch(rest)):
            cells, rest = [token], ""
        row += cells
        if len(row) > len(columns) or (rest and len(row) < len(columns)):
            raise TopologyError(
                f"row {name}: {token[:60]!r} has lost a blank, but split the row does not fit the {len(columns)} "
                f"columns: a blank is missing between other cells or in the header too; put it in"
            )
        if len(cells) > 1 or rest:
            table.split.append(f"{' '.join([*cells, rest]).strip()[:60]} in row {name}")
        if rest:
            following = tokens[place + 1 :]
            if re.fullmatch(r"NV\d\d", cells[-1]) and rest[0].isdigit():
                other = [*row[:-1], cells[-1][:3], cells[-1][3:] + rest, *following]
            row += [rest, *following]
            break
    return [_checked(name, reading, table.head) for reading in ([row, other] if other else [row])]


def _cells_in(token: str) -> tuple[list[str], str]:
    """Return the codes that a word begins with, and the rest of it."""
    cells: list[str] = []
    at = 0
    while found := _CELL.match(token, at):
        cells.append(found[0])
        at = found.end()
    return cells, token[at:]


def _checked(name: str, tokens: Sequence[str], head: _Head) -> list[str]:
    """Return a row with today's codes; raise if one may not stand in its column."""
    columns = head.columns
    codes = [_OLD.get(token, token) for token in tokens[: len(columns)]]
    gpus = {column for column in columns if _GPU.fullmatch(column)}
    for column, code in zip(columns, codes, strict=False):
        if not _CODE.fullmatch(code):
            raise TopologyError(
                f"row {name}, column {column}: {code[:60]!r} is none of X, NV#, {', '.join(CODES)}; "
                "is a cell missing?"
            )
        if (code == "X") != (name == column):
            raise TopologyError(
                f"row {name}, column {column}: {code!r}, but X belongs on the diagonal and only there"
            )
        if code.startswith("NV") and not {name, column} <= gpus:
            raise TopologyError(
                f"row {name}, column {column}: {code!r}, but only GPUs have NVLinks between them"
            )
    if len(codes) < len(columns):
        raise TopologyError(
            f"row {name} has {len(codes)} cells for {len(columns)} columns; give the whole matrix"
        )
    extra = [_OLD.get(token, token) for token in tokens[len(columns) :]]
    if extra and (not head.affinities or _CODE.fullmatch(extra[0])):
        runs = [column for column in columns if _EDGE.search(column)]
        hint = f"is a blank missing in {runs[0][:60]!r} of the header?" if runs else "give the whole matrix"
        raise TopologyError(
            f"row {name}: {extra[0][:60]!r} stands after the last of {len(columns)} columns; {hint}"
        )
    return [*codes, *extra]


def _settled(table: _Table) -> dict[str, list[str]]:
    """Return each row; of two readings the one that the other row of the pair or other affinities confirm."""
    columns = table.head.columns
    rows = {name: readings[0] for name, readings in table.rows.items() if len(readings) == 1}
    longest = max((len(row) for readings in table.rows.values() for row in readings), default=0)
    affinities = {row[len(columns)] for row in rows.values() if len(columns) < len(row) == longest}
    for name, readings in table.rows.items():
        if len(readings) == 1:
            continue
        mate = rows.get(columns[-1])
        place = columns.index(name)
        fit = [row for row in readings if mate is None or mate[place] == row[len(columns) - 1]]
        if len(fit) != 1:
            fit = [row for row in readings if row[len(columns)] in affinities]
        if len(fit) != 1:
            ways = " or ".join(f"{row[len(columns) - 1]} and {row[len(columns)]}" for row in readings)
            raise TopologyError(f"row {name}: a blank is missing between {ways}; put it in")
        rows[name] = fit[0]
    for name, row in rows.items():
        cpus = "".join(row[len(columns) : len(columns) + 1])
        parts = [
            one for one in affinities if cpus.startswith(one) and re.fullmatch(r"[\d,-]+", cpus[len(one) :])
        ]
        if len(row) < longest and cpus not in affinities and len(parts) == 1:
            table.split.append(f"{parts[0][:30]} {cpus[len(parts[0]) :][:30]} in row {name}")
            rows[name] = [*row[: len(columns)], parts[0], cpus[len(parts[0]) :], *row[len(columns) + 1 :]]
    return {name: rows[name] for name in table.rows}


def _affinity(rows: Mapping[str, Sequence[str]], head: _Head, column: str) -> dict[str, str]:
    """Return a column of affinity for the GPUs that state it."""
    found = {}
    for gpu in head.gpus:
        stated = dict(zip(head.affinities, rows.get(gpu, ())[len(head.columns) :], strict=False))
        if re.fullmatch(r"\d[\d,-]*", stated.get(column, "")):
            found[gpu] = stated[column]
    return found


def _notes(*runs: Sequence[str]) -> tuple[str, ...]:
    places = [place for part in runs for place in dict.fromkeys(part)]
    return (f"lost blanks put back: {listed(places, noun='places')}",) if places else ()


def _pairs(rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> dict[tuple[str, str], str]:
    codes: dict[tuple[str, str], str] = {}
    for name, row in rows.items():
        for column, code in zip(columns, row, strict=False):
            stated = codes.get((name, column), code)
            if stated != code:
                raise TopologyError(
                    f"row {name}, column {column}: {code!r}, but row {column}, column {name}: {stated!r}; "
                    "the matrix must be symmetric"
                )
            if name != column:
                codes[name, column] = codes[column, name] = code
    return codes
