"""Word the comparison of a log with the limits of its machine: lines, table, rows and JSON of ``topoplan explain``.

A run has its verdict, its rates beside the upper bound and what NCCL can attain, and the rows that bandwidth binds. Of
several runs the one that decides is shown in full.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from topoplan.cli.machine_options import RequestedMachine
from topoplan.cli.output import (
    MAX_COLUMNS,
    Column,
    folded,
    folded_line,
    printable,
    rank_names,
    step_lines,
    table_of,
)
from topoplan.errors import warning
from topoplan.machine.fabric import channel_words
from topoplan.operate.compare.comparison import BANDWIDTH, Attainable
from topoplan.operate.compare.judged_log import JudgedRow, JudgedRun, nic_words
from topoplan.operate.compare.nccl_debug_run import NcclRun, choice_lines
from topoplan.operate.next_steps import KINDS, RunVerdict, percent
from topoplan.plans.plan import collective_name
from topoplan.reading.nccl.debug_log import via_kind
from topoplan.units import LABEL_COLUMNS, counted, format_size, labelled, number_ranges, rate_words


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def _in_place(one: JudgedRow) -> object:
    return one.row.in_place if one.row.out_of_place else None


ROWS: tuple[Column[JudgedRow], ...] = (
    Column("size", value="row.size", form=format_size),
    Column("time (us)", value=lambda one: one.row.timing.seconds * 1e6, form=".6g"),
    Column("algbw", value="row.timing.algbw", form=".2f"),
    Column("busbw", value="row.timing.busbw", form=".2f"),
    Column("in place", value=_in_place, form="{0.busbw:.2f}".format),
    Column("% of limit", value="of_nccl", form=_percent),
    Column("% of bound", value="of_best", form=_percent),
    Column("bound by", value="bound_by"),
    Column("NCCL model", value="expected", form="{0.algorithm}/{0.protocol}".format),
    Column(
        "expected us", value=lambda one: one.expected_time and one.expected_time.seconds * 1e6, form=".6g"
    ),
    Column("% of expected", value="of_expected", form=_percent),
)


def judged_object(
    judged: Sequence[JudgedRun],
    verdicts: Sequence[RunVerdict],
    nccl: NcclRun | None,
    steps: Sequence[str],
    machine: RequestedMachine,
) -> dict[str, object]:
    return {
        "machine": machine.whole.name,
        "rows": [row.to_object() for one in judged for row in one.rows],
        "runs": [
            {
                "program": one.run.program,
                "line": one.run.line,
                "verdict": verdict.kind,
                "verdict_text": verdict.text,
                "normal": verdict.normal and verdict.normal.to_object(),
                "looks_like": verdict.likely and verdict.likely.text,
                "gpus": list(one.gpus),
                "references": [reference_object(found) for found in one.references],
                "nics": [words for _, words in _nic_sentences(one)],
                "warnings": list(one.warnings),
                "notes": list(one.notes),
            }
            for one, verdict in zip(judged, verdicts, strict=True)
        ],
        "nccl": None if nccl is None else nccl.to_object(),
        "next_steps": list(steps),
        "notes": list(machine.whole.notes),
    }


def reference_object(found: Attainable) -> dict[str, object]:
    return {
        "collective": found.collective,
        "nccl": [{"schedule": name, "rate": rate} for name, rate in found.nccl],
        "best": found.best if len(found.gpus) > 1 else None,
        "over": list(found.channels),
        "links": found.links,
        "factor": found.factor,
    }


def flatten_row(row: dict[str, object]) -> dict[str, object]:
    """Return a row without nested objects: their keys are joined to the object's name."""
    empty = {
        "in_place": ("time", "algbw", "busbw", "wrong"),
        "nccl_expects": ("algorithm", "protocol", "time"),
    }
    flat = {key: value for key, value in row.items() if key not in empty}
    for key, names in empty.items():
        inner = row[key]
        flat |= {f"{key}_{name}": inner[name] if isinstance(inner, dict) else None for name in names}
    return flat


def judged_lines(
    judged: Sequence[JudgedRun],
    verdicts: Sequence[RunVerdict],
    nccl: NcclRun | None,
    steps: Sequence[str],
    machine: RequestedMachine,
    room: int,
    ruled_out: str,
) -> Iterator[str]:
    """Yield the verdict, the run that decides it, what NCCL set up, and the next step.

    room: the number of lines, 0 for all of all runs.
    """
    head = [_run_title(one, verdict, machine) for one, verdict in zip(judged, verdicts, strict=True)]
    likely = list(dict.fromkeys(one.likely.text for one in verdicts if one.likely))
    slow = any(one.kind == "slow" for one in verdicts)
    causes = labelled(("looks like", "; ".join(likely)), ("ruled out", ruled_out if slow else ""))
    causes = [line for text in causes for line in _wrapped(text, indent=" " * LABEL_COLUMNS)]
    end = ["", *causes, *step_lines(steps)]
    spoken = _nccl_lines(nccl, room) if nccl else []
    if not judged:
        yield from [*spoken, *end]
        return
    if len(judged) > 1:
        counts = Counter(verdict.kind for verdict in verdicts)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
        yield f"{counted(len(judged), 'run')} on {machine.whole.name}: {kinds}"
        room = room and room - 1
    if spoken:
        end = ["", *spoken, *end]
    if not room:
        for one, verdict, line in zip(judged, verdicts, head, strict=True):
            yield line
            yield from _run_lines(one, verdict, 0)
            yield ""
        yield from end[1:]
        return
    worst = min(range(len(judged)), key=lambda place: KINDS.index(verdicts[place].kind))
    others = [line for place, line in enumerate(head) if place != worst]
    few, left = folded(others, 5)
    others = [*few, *folded_line(left, "run")]
    warnings = [line for place, one in enumerate(judged) if place != worst for line in _warning_lines(one)]
    yield head[worst]
    yield from _run_lines(judged[worst], verdicts[worst], room - 1 - len(others) - len(warnings) - len(end))
    yield from (*others, *warnings, *end)


def _run_lines(one: JudgedRun, verdict: RunVerdict, room: int) -> Iterator[str]:
    """Yield rates, upper bound, rows and warnings of a run in at most ``room`` lines, 0 for any number."""
    references = one.references
    if room and verdict.row is not None and verdict.row.reachable is not None:
        references = (verdict.row.reachable,)
    above = [line for found in references for line in reference_lines(found, verdict)]
    below = [words for _, words in _nic_sentences(one)][-1:]
    below = [line for words in below for line in _wrapped(words, indent="  ")]
    below += _warning_lines(one)
    binding = [row for row in one.rows if row.bound_by == BANDWIDTH]
    shown = one.rows if not room or len(binding) == len(one.rows) or not binding else binding
    small = [row for row in one.rows if row not in shown]
    fitting = max(1, room - len(above) - len(below) - (2 if small else 1) - 1)
    if room and len(shown) > fitting:
        small = [row for row in one.rows if row not in shown[-fitting + bool(not small) :]]
        shown = [row for row in one.rows if row not in small]
    columns = [column for column in ROWS if not room or column.head != "bound by"]
    columns = [
        column for column in columns if column.head in ("size", "time (us)") or any(map(column.of, shown))
    ]
    yield from above
    if shown:
        yield ""
        yield table_of(columns, shown)
    if small:
        yield _small_line(small)
    yield from below


def _small_line(rows: Sequence[JudgedRow]) -> str:
    """Return one line for rows that are not in the table."""

    def span(values: list[float]) -> str:
        ends = [f"{min(values):.4g}", f"{max(values):.4g}"]
        return " to ".join(dict.fromkeys(ends))

    times = span([row.row.timing.seconds * 1e6 for row in rows])
    expected = [row.expected_time.seconds * 1e6 for row in rows if row.expected_time]
    model = f" (expected {span(expected)})" if expected else ""
    latency = ", latency binds" if all(row.bound_by not in (None, BANDWIDTH) for row in rows) else ""
    sizes = " to ".join(dict.fromkeys(format_size(row.row.size) for row in (rows[0], rows[-1])))
    them = f"{counted(len(rows), 'row')}, " if len(rows) > 1 else ""
    return f"{sizes}: {them}{times} us{model}{latency}; --all prints {'them' if them else 'it'}"


def _warning_lines(one: JudgedRun) -> list[str]:
    return [printable(warning(words)) for words in one.warnings]


def _wrapped(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(text, MAX_COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _nccl_lines(nccl: NcclRun, room: int) -> list[str]:
    """Return the lines on what NCCL set up."""
    one = nccl.main
    found = counted(len(nccl.findings), "finding") if nccl.findings else "nothing in it misfits the machine"
    version = nccl.log.version or "of a version that its log does not say"
    lines = [f"NCCL {version}: {found}"]
    if one is not None:
        gpus = f", on GPUs {number_ranges(sorted(nccl.gpus.values()))}" if nccl.gpus else ""
        count = one.channels or len(one.rings)
        shown = counted(count, "channel") if count else "number of channels not logged"
        nvls = f", {one.nvls_channels} for NVLS" if one.nvls_channels else ""
        ranks = counted(one.size, "rank") if one.size else "ranks of unknown number"
        lines[0] = f"NCCL {version}: {ranks}{gpus}, {shown}{nvls}: {found}"
        rates = []
        if nccl.rings is not None:
            most = f" (the best rings: {nccl.best_rings:.4g})" if nccl.best_rings else ""
            rates.append(f"{counted(len(one.rings), 'ring')}, busbw {nccl.rings:.4g} GB/s{most}")
        if nccl.trees is not None:
            rates.append(f"chains as trees, algbw {nccl.trees:.4g} GB/s")
        ways = Counter(via_kind(joined.via) for joined, _ in one.joined())
        pairs_by_way = ", ".join(f"{way} for {counted(count, 'pair')}" for way, count in sorted(ways.items()))
        lines += labelled(("links allow", "; ".join(rates)), ("transports", pairs_by_way))
        lines += [line for choice in choice_lines(one) for line in labelled(("chose", choice))]
    findings, left = folded(nccl.findings, 5, every=not room)
    for finding in findings:
        where = f"line {finding.line}: " if finding.line else ""
        lines.append(printable(warning(f"{where}{finding.text}")))
    return [*lines, *folded_line(left, "finding")]


def _run_title(one: JudgedRun, verdict: RunVerdict, machine: RequestedMachine) -> str:
    """Return the verdict on a run: what ran, where, and the answer."""
    what = one.rows[0].collective if one.rows else one.run.program or "no rows"
    if not one.gpus:
        return f"{what}: {verdict.text}"
    names = rank_names([machine.whole.gpus[gpu] for gpu in one.gpus])
    where = f"{machine.whole.name}, {counted(len(one.gpus), 'GPU')} ({names})"
    return f"{collective_name(what)} on {where}: {verdict.text}"


def reference_lines(found: Attainable, verdict: RunVerdict) -> list[str]:
    """Return what such machines measure, what was measured, and what any schedule and NCCL can attain."""

    def both(rate: float) -> str:
        return rate_words(rate, found.collective, len(found.gpus), digits=4)

    def bus(rate: float) -> str:
        return f"{'algbw' if found.factor == 1 else 'busbw'} {rate * found.factor:.4g} GB/s"

    if len(found.gpus) == 1:
        return ["a single rank sends nothing, so nothing bounds it"]
    normal = measured = expected = part = ""
    row = verdict.row
    if row is not None and row.reachable is found:
        at = f"at {format_size(row.row.size)}"
        normal = "no published figures of this machine"
        if verdict.normal:
            normal = f"busbw {verdict.normal.text}: {verdict.normal.sources}"
        measured = f"{both(row.rate)} {at}"
        if row.of_best is not None:
            measured += f", {percent(row.of_best)} of the upper bound"
        if time := row.expected_time:
            who, runs = found.expected_by(time), time.runs.replace(" ", "/")
            chosen = f"{who}; NCCL's model: {runs}" if time.measured else f"{who}: {runs}"
            expected = f"{bus(time.algbw)} {at} ({chosen}); "
            expected += f"measured is {percent(row.of_expected or 0.0)}"
        if row.of_nccl is not None:
            part = f"; measured is {percent(row.of_nccl)}"
    others = "".join(f"; {name} {rate * found.factor:.4g}" for name, rate in found.nccl[1:])
    limit = f"{bus(found.nccl[0][1])} by {found.nccl[0][0]}{others}" if found.nccl else "no schedule here"
    limit += part
    beyond = f"at most {both(found.in_network)} with in-network reduction" if found.in_network else ""
    bound = f"{both(found.best)}, over {channel_words(found.channels)}: {found.links}"
    indent = " " * LABEL_COLUMNS
    pairs = (
        ("normal", normal),
        ("measured", measured),
        ("upper bound", bound),
        ("in-network", beyond),
        ("expected", expected),
        ("link limit", limit),
    )
    return [line for text in labelled(*pairs) for line in _wrapped(text, indent=indent)]


def _nic_sentences(one: JudgedRun) -> list[tuple[JudgedRow, str]]:
    return [(row, words) for row in one.rows for words in [nic_words(row)] if words]
