"""Compare logs of nccl-tests and NCCL with what the machine's wires allow, ``topoplan explain``.

With ``--tune`` write a file for NCCL's tuner from logs of nccl-tests, one for each algorithm.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from topoplan.cli import arguments
from topoplan.cli.machine_options import RequestedMachine, add_all_options
from topoplan.cli.output import Answer, Column, printable, progress_line, table_of
from topoplan.cli.sources import read_log, read_machine
from topoplan.engines.nccl.tuner_file import known_channels, measured_tuner, model_ranges, parse_label
from topoplan.errors import UsageError, warning
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.compare.comparison import LATENCY, Attainable, attainable
from topoplan.operate.compare.judged_log import JudgedRow, JudgedRun, judge, nic_words
from topoplan.operate.compare.nccl_debug_run import NcclRun, choice_lines, judge_nccl
from topoplan.operate.device_matching import gpus_of
from topoplan.plans.plan import check_collective
from topoplan.reading.nccl.debug_log import NcclLog, parse_nccl_log, via_kind
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import PerfRun
from topoplan.schedules.nccl_tuning import COLLECTIVES, NcclExpectation, expectations, has, setting_of
from topoplan.units import bus_words, counted, format_size, number_ranges

MeasuredTimes = dict[str, dict[tuple[str, str], dict[int, float]]]
"""Seconds by size, by collective, by algorithm and protocol."""


@dataclass(frozen=True, slots=True)
class LabelledLog:
    """A log and its algorithm; ``protocol`` is empty if the label leaves it open."""

    label: str
    path: str
    algorithm: str
    protocol: str
    runs: tuple[PerfRun, ...]
    spoken: NcclLog | None


def _tuner_file(options: argparse.Namespace) -> Answer:
    """Return the fastest choice for each range of sizes, in the format of NCCL's example tuner plugin."""
    logs = [_read_labelled_log(part) for part in options.tune.split(",")]
    machine = None if options.topo is None else read_machine(options)
    expected = {} if machine is None else _model_expectations(options, machine)
    notes: list[str] = []
    times: MeasuredTimes = {}
    shapes: dict[tuple[int, int], str] = {}
    for log in logs:
        for run in log.runs:
            shapes.setdefault(_servers_and_ranks(run, log, machine), log.path)
            _collect_times(times, log, run, options, expected, notes)
    if len(shapes) > 1:
        (one, first), (other, second), *_ = shapes.items()
        raise UsageError(
            f"{first} is of {one[1]} ranks on {one[0]} servers, {second} of {other[1]} on {other[0]}; tune one "
            "communicator at a time"
        )
    if not shapes:
        raise UsageError(
            "the logs hold no run of nccl-tests; give the output of all_reduce_perf or another test"
        )
    ((servers, ranks),) = shapes
    spoken = [one for log in logs if log.spoken for one in log.spoken.communicators if one.size == ranks]
    rings = options.nccl_channels or max((one.channels or 0 for one in spoken), default=0)
    nvls = options.nccl_channels or max((one.nvls_channels or 0 for one in spoken), default=0)
    if not rings and expected:
        rings = 2 * next(iter(expected.values()))[0].setting.channels
    exported = measured_tuner(
        times,
        servers=servers,
        ranks=ranks,
        channels=known_channels(rings or None, nvls or None),
        source=f"the times of {', '.join(log.label for log in logs)}",
        others=model_ranges(expected),
    )
    return Answer(file=lambda: exported.text, notes=(*notes, *exported.notes))


def _read_labelled_log(part: str) -> LabelledLog:
    label, equals, path = part.partition("=")
    if not equals or not path:
        raise UsageError(f"--tune {part[:60]!r} names no log; write ring=LOG, tree/ll=LOG or nvls=LOG")
    algorithm, protocol = parse_label(label)
    text = read_log(path)
    runs = parse_perf_runs(text)
    if not runs:
        raise UsageError(
            f"{path} holds no run of nccl-tests; give the output of all_reduce_perf or another test"
        )
    return LabelledLog(label.strip(), path, algorithm, protocol, runs, parse_nccl_log(text))


def _model_expectations(
    options: argparse.Namespace, machine: RequestedMachine
) -> dict[str, tuple[NcclExpectation, ...]]:
    """Return the times of NCCL's model on the machine, for the protocols that labels leave open."""
    allocation = machine.whole.subset(machine.allocation(options.gpus))
    here = setting_of(with_all_capabilities(allocation) if options.in_network is None else allocation)
    return {collective: expectations(here, collective) for collective in COLLECTIVES}


def _servers_and_ranks(run: PerfRun, log: LabelledLog, machine: RequestedMachine | None) -> tuple[int, int]:
    """Return servers and ranks of a run; without a machine every host is a server, which NVLink between hosts
    changes.
    """
    ranks = [rank for rank in run.ranks if rank.group == run.ranks[0].group]
    if not ranks:
        raise UsageError(
            f"{log.path}: the run from line {run.line} does not list its ranks; give the whole log"
        )
    if machine is None:
        return len({rank.host for rank in ranks}), len(ranks)
    names = machine.whole.gpus
    on = {machine.whole.device(names[gpu]).server for gpu in gpus_of(ranks, machine.whole).values()}
    return len(on), len(ranks)


def _collect_times(
    times: MeasuredTimes,
    log: LabelledLog,
    run: PerfRun,
    options: argparse.Namespace,
    expected: dict[str, tuple[NcclExpectation, ...]],
    notes: list[str],
) -> None:
    """Add the times of a run; warnings of the log and rows without a time become notes."""
    notes += [warning(f"{log.path}: {text}") for text in run.warnings]
    named = run.collective or ("" if run.program or options.collective is None else options.collective)
    if not named and not run.program:
        raise UsageError(f"{log.path}: the run from line {run.line} does not name its test; add --collective")
    collective = check_collective(named) if named else ""
    if collective not in COLLECTIVES or not has(log.algorithm, collective):
        what = collective or run.program
        notes.append(
            warning(f"{log.path}: NCCL has no {log.algorithm} for {what}; {len(run.rows)} rows left out")
        )
        return
    for row in run.rows:
        if not row.timing.wrong and row.size:
            protocol = log.protocol or _open_protocol(log, collective, row.size, expected)
            known = times.setdefault(collective, {}).setdefault((log.algorithm, protocol), {})
            known[row.size] = min(row.timing.seconds, known.get(row.size, row.timing.seconds))


def _open_protocol(
    log: LabelledLog, collective: str, size: int, expected: dict[str, tuple[NcclExpectation, ...]]
) -> str:
    """Return the protocol of a size that the label leaves open: NCCL's logged choice, or its model's."""
    function = collective.replace("_", "")
    said = [
        (choice.size, choice.protocol)
        for one in (log.spoken.communicators if log.spoken else ())
        for choice in one.choices
        if choice.function.lower() == function and choice.algorithm == log.algorithm and choice.size <= size
    ]
    if said:
        return max(said)[1]
    own = [one for one in expected.get(collective, ()) if one.algorithm == log.algorithm]
    if own:
        return min(own, key=lambda one: one.seconds(size)).protocol
    raise UsageError(
        f"--tune {log.label}={log.path} leaves open which protocol ran at {format_size(size)}; write "
        f"{log.label}/simple, /ll or /ll128, or add --machine for the choice of NCCL's model"
    )


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
    Column("of NCCL", value="of_nccl", form=_percent),
    Column("of best", value="of_best", form=_percent),
    Column("bound by", value="bound_by"),
    Column("model", value="expected", form="{0.algorithm}/{0.protocol}".format),
    Column("(us)", value=lambda one: one.expected and one.expected.seconds(one.row.size) * 1e6, form=".6g"),
    Column("of it", value="of_model", form=_percent),
)

MODEL_NOTE = "model: the choice of NCCL's own model of time at this size, and its time over the measured time"

IN_NETWORK_NOTE = (
    "switches that can add and copy do, as NCCL's NVLS lets them; --in-network none leaves that out"
)


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.declare(
        parser,
        """
        log LOG  output of nccl-tests, topoplan bench or NCCL_DEBUG=INFO, also of several runs in one file, or - for
                 stdin
        """,
        log={"nargs": "?"},
    )
    arguments.add_machine(parser, option="--machine")
    arguments.add_allocation(parser)
    arguments.add_collective(
        parser, default=None, otherwise="the one that the log names, else the one that its columns fit"
    )
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    arguments.declare(
        parser.topic("explain"),
        """
        --tune ALGORITHM=LOG,…  in place of LOG: write a file for NCCL's example tuner plugin with the fastest choice by
                                size, from a log of nccl-tests for each algorithm, or algorithm and protocol, such as
                                ring=A.log,tree/ll=B.log,nvls=C.log
        -o F.csv                with --tune: the file (default: stdout)
        --nccl-channels N       with --tune: number of NCCL's channels (default: from the logs or the machine)
        """,
        nccl_channels=arguments.whole_number(1, 64, "number of channels from 1 to 64"),
    )
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan explain nccl-tests.log --machine topo.txt",
        "topoplan explain nccl-tests.log --machine dgx-1v --gpus 0-3",
        "topoplan explain --tune ring/simple=ring.log,tree/ll=tree.log -o tuner.csv",
    )


def run(options: argparse.Namespace) -> Answer:
    """Judge a log of nccl-tests, topoplan bench or NCCL by what NCCL and any schedule can attain on the machine."""
    if options.tune is not None:
        if options.log is not None:
            raise UsageError("LOG does not go with --tune, which names its logs; leave one of them out")
        arguments.refuse_beside(options, "--tune", {"json": False, "csv": False})
        return _tuner_file(options)
    arguments.refuse_without(options, dict.fromkeys(("output", "nccl_channels"), "--tune"))
    if options.log is None:
        raise UsageError("no LOG is given; name the output of nccl-tests, or - for stdin")
    if options.topo is None:
        raise UsageError("explain needs the machine that ran; add --machine TOPO")
    if options.log == "-" and "-" in (options.topo, options.merge):
        raise UsageError("stdin is read once; give a file to LOG or --machine")
    collective = None if options.collective is None else check_collective(options.collective)
    text = read_log(options.log)
    runs, spoken = parse_perf_runs(text), parse_nccl_log(text)
    where = "stdin" if options.log == "-" else options.log
    if not runs and spoken is None:
        raise UsageError(
            f"{where} holds no run of nccl-tests or topoplan bench and no line of NCCL_DEBUG=INFO; "
            "give their output"
        )
    if collective is not None and all(run.program or run.collective for run in runs):
        raise UsageError(
            "--collective is for runs that do not name their test, and all runs name it; leave it out"
        )
    machine = read_machine(options)
    with progress_line("explaining") as progress:
        named = _with_models(machine.whole, runs)
        whole = named if options.in_network is not None else with_all_capabilities(with_capable(named))
        judged = judge_runs(runs, machine, whole, options.gpus, collective, progress)
        gpus = machine.allocation(options.gpus)
        nccl = None if spoken is None else judge_nccl(spoken, machine.whole, gpus=gpus)
    parts = [_run_lines(one, machine) for one in judged] + ([_nccl_lines(nccl)] if nccl else [])
    adding = () if whole == named else (IN_NETWORK_NOTE,)
    return Answer(
        text=lambda: ["\n\n".join("\n".join(lines) for lines in parts)],
        value=lambda: _object(judged, nccl, machine),
        rows=lambda: [_flatten_row(row.to_object()) for one in judged for row in one.rows],
        notes=(*adding, *machine.whole.notes),
    )


def _with_models(machine: Topology, runs: Sequence[PerfRun]) -> Topology:
    """Set the GPUs' model to the one in the logs if the machine names none."""
    models = {rank.model for run in runs for rank in run.ranks if rank.model}
    if len(models) != 1 or any(
        machine.device(gpu).model or machine.device(gpu).fact("sm") for gpu in machine.gpus
    ):
        return machine
    (model,) = models
    devices = (replace(one, model=model) if one.kind == "gpu" else one for one in machine.devices)
    return replace(machine, devices=tuple(devices))


def judge_runs(
    runs: Sequence[PerfRun],
    machine: RequestedMachine,
    whole: Topology,
    gpus: tuple[int, ...] | None,
    collective: str | None,
    progress: Callable[[str], None] | None,
) -> list[JudgedRun]:
    """Compare each run with what its GPUs can attain; each collective on each allocation is computed once."""

    @cache
    def reach(known: str, gpus: tuple[int, ...], root: int | None) -> Attainable:
        if progress:
            progress(f"{known} on {counted(len(gpus), 'GPU')} …")
        return attainable(whole, known, gpus=machine.allocation(gpus), root=root)

    named = machine.allocation(gpus)
    return [judge(run, whole, reach, gpus=named, collective=collective) for run in runs]


def _object(
    judged: Sequence[JudgedRun], nccl: NcclRun | None, machine: RequestedMachine
) -> dict[str, object]:
    return {
        "machine": machine.whole.name,
        "rows": [row.to_object() for one in judged for row in one.rows],
        "runs": [
            {
                "program": one.run.program,
                "line": one.run.line,
                "gpus": list(one.gpus),
                "references": [_reference(found) for found in one.references],
                "nics": [words for _, words in _nic_sentences(one)],
                "warnings": list(one.warnings),
                "notes": list(one.notes),
            }
            for one in judged
        ],
        "nccl": None if nccl is None else nccl.to_object(),
        "notes": list(machine.whole.notes),
    }


def _reference(found: Attainable) -> dict[str, object]:
    return {
        "collective": found.collective,
        "nccl": [{"schedule": name, "rate": rate} for name, rate in found.nccl],
        "best": found.best if len(found.gpus) > 1 else None,
        "over": list(found.channels),
        "links": found.links,
        "factor": found.factor,
    }


def _flatten_row(row: dict[str, object]) -> dict[str, object]:
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


def _run_lines(one: JudgedRun, machine: RequestedMachine) -> list[str]:
    """Return the lines of a run."""
    lines = [_run_title(one, machine)]
    for found in one.references:
        lines += _reference_lines(found)
    if one.rows:
        lines += ["", table_of(ROWS, one.rows)]
        lines += [MODEL_NOTE, ""] if any(row.expected for row in one.rows) else [""]
    lines += [_verdict(one)] if one.references else []
    lines += [words.replace(": ", ":\n       ", 1) for _, words in _nic_sentences(one)][-1:]
    lines += [printable(warning(words)) for words in one.warnings]
    lines += [printable(f"note: {words}") for words in one.notes]
    return lines


def _nccl_lines(nccl: NcclRun) -> list[str]:
    """Return the lines on what NCCL set up."""
    one = nccl.main
    lines = [f"NCCL {nccl.log.version or 'of a version that its log does not say'}"]
    if one is not None:
        gpus = f", on GPUs {number_ranges(sorted(nccl.gpus.values()))}" if nccl.gpus else ""
        count = one.channels or len(one.rings)
        shown = counted(count, "channel") if count else "number of channels not logged"
        nvls = f", {one.nvls_channels} for NVLS" if one.nvls_channels else ""
        ranks = counted(one.size, "rank") if one.size else "ranks of unknown number"
        lines[0] += f": {ranks}{gpus}, {shown}{nvls}"
        if nccl.rings is not None:
            rings = counted(len(one.rings), "ring")
            most = f"; the best do {nccl.best_rings:.4g}" if nccl.best_rings else ""
            lines.append(f"rings  {rings}, {nccl.rings:.4g} GB/s of bus bandwidth on these wires{most}")
        if nccl.trees is not None:
            lines.append(f"trees  chains, {nccl.trees:.4g} GB/s of algorithm bandwidth on these wires")
        ways = Counter(via_kind(joined.via) for joined, _ in one.joined())
        if ways:
            pairs_by_way = ", ".join(
                f"{way} for {counted(count, 'pair')}" for way, count in sorted(ways.items())
            )
            lines.append(f"ways   {pairs_by_way}")
        lines += [f"chose  {line}" for line in choice_lines(one)]
    for finding in nccl.findings:
        where = f"line {finding.line}: " if finding.line else ""
        lines.append(printable(warning(f"{where}{finding.text}")))
    if not nccl.findings:
        lines.append("nothing in it misfits the machine")
    lines += [f"note: {note}" for note in nccl.notes]
    return lines


def _run_title(one: JudgedRun, machine: RequestedMachine) -> str:
    what = one.rows[0].collective if one.rows else one.run.program or "no rows"
    by = "topoplan bench" if one.run.program == "bench" else "nccl-tests"
    ran = f", {one.run.schedule}" if one.run.schedule else ""
    if not one.gpus:
        return f"{what} by {by}{ran}"
    where = f"GPUs {number_ranges(one.gpus)} of {machine.whole.name}"
    return f"{what} of {counted(len(one.gpus), 'rank')} by {by}{ran}, on {where}"


def _reference_lines(found: Attainable) -> list[str]:
    """Return what NCCL and any schedule can attain, in algorithm and bus bandwidth."""

    def both(rate: float) -> str:
        return f"{rate:.4g} GB/s{bus_words(rate, found.collective, len(found.gpus), digits=4)}"

    if len(found.gpus) == 1:
        return ["a single rank sends nothing, so nothing bounds it"]
    rates = [f"{name} {both(rate)}" for name, rate in found.nccl]
    first, *others = rates or ["has nothing here"]
    without = (
        ""
        if found.in_network is None
        else f" without in-network reduction; with it at most {both(found.in_network)}"
    )
    return [
        f"NCCL   {first}",
        *(f"       {rate}" for rate in others),
        f"best   {both(found.best)}, over {'+'.join(found.channels)}, whatever the schedule{without}: {found.links}",
    ]


def _verdict(one: JudgedRun) -> str:
    """Return one sentence on the fastest row without wrong elements."""
    usable = [row for row in one.rows if not row.row.timing.wrong and row.reachable and row.row.size]
    if not usable:
        return "no row tells a rate"
    top = max(usable, key=lambda row: row.rate)
    found = top.reachable
    assert found is not None
    bus = bus_words(top.rate, found.collective, len(found.gpus), digits=4)
    first = f"fastest at {format_size(top.row.size)}: {top.rate:.4g} GB/s{bus}"
    if top.of_best is None:
        return first
    rest = f"{_percent(top.of_best)} of what any schedule can"
    if top.of_nccl is not None:
        rest = f"{_percent(top.of_nccl)} of NCCL's best ({found.nccl[0][0]}), {rest}"
    why = "; latency binds at this size, so larger ones are faster" if top.bound_by == LATENCY else ""
    return f"{first}; {rest}{why}"


def _nic_sentences(one: JudgedRun) -> list[tuple[JudgedRow, str]]:
    return [(row, words) for row in one.rows for words in [nic_words(row)] if words]
