"""Compare logs of nccl-tests and NCCL with what the machine's links allow, ``topoplan explain``.

With ``--tune`` write a file for NCCL's tuner from logs of nccl-tests, one for each algorithm. With two logs list what
changed from one to the other.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from topoplan.cli import arguments
from topoplan.cli.machine_options import RequestedMachine, add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    MAX_COLUMNS,
    Answer,
    Column,
    folded,
    folded_line,
    printable,
    progress_line,
    rank_names,
    records_of,
    step_lines,
    table_of,
)
from topoplan.cli.sources import read_as_logged, read_log, read_machine
from topoplan.engines.nccl.tuner_file import known_channels, measured_tuner, model_ranges, parse_label
from topoplan.errors import UsageError, warning
from topoplan.machine.fabric import channel_words
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.expected_times import NcclTime
from topoplan.operate.compare.comparison import BANDWIDTH, Attainable, attainable
from topoplan.operate.compare.judged_log import JudgedRow, JudgedRun, judge, nic_words
from topoplan.operate.compare.log_changes import NOISE, LogChanges, SizeChange, log_changes
from topoplan.operate.compare.nccl_debug_run import NcclRun, choice_lines, judge_nccl
from topoplan.operate.device_matching import gpus_of
from topoplan.operate.next_steps import (
    DEBUG_SETTINGS,
    KINDS,
    OF_LINKS,
    OF_MODEL,
    RunVerdict,
    judge_run,
    log_steps,
    machine_for,
    percent,
)
from topoplan.plans.plan import check_collective, collective_name
from topoplan.reading.load import form_of, format_of, library
from topoplan.reading.nccl.debug_log import NcclLog, parse_nccl_log, via_kind
from topoplan.reading.nccl.job_reports import RasRank, RasReport, parse_ras
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import PerfRun
from topoplan.schedules.nccl_tuning import COLLECTIVES, NcclExpectation, expectations, has, setting_of
from topoplan.units import LABEL_COLUMNS, counted, format_size, labelled, number_ranges, rate_words

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
    """Return the fastest choice for each range of sizes, for NCCL's example tuner plugin or as a plug-in in C."""
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
        plugin=str(options.output or "").endswith(".c"),
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
        if not row.wrong and row.size:
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
    Column("% of limit", value="of_nccl", form=_percent),
    Column("% of bound", value="of_best", form=_percent),
    Column("bound by", value="bound_by"),
    Column("NCCL model", value="expected", form="{0.algorithm}/{0.protocol}".format),
    Column(
        "expected us", value=lambda one: one.expected_time and one.expected_time.seconds * 1e6, form=".6g"
    ),
    Column("% of expected", value="of_expected", form=_percent),
)

IN_NETWORK_NOTE = (
    "switches that can add and copy do, as NCCL's NVLS lets them; --in-network none leaves that out"
)


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.declare(
        parser,
        """
        log LOG  output of nccl-tests, topoplan bench or NCCL_DEBUG=INFO, also of several runs in one file, or - for
                 stdin
        newer NEW  a second log: what changed since LOG, by size, and in what NCCL set up; takes no machine
        """,
        log={"nargs": "?"},
        newer={"nargs": "?"},
    )
    arguments.add_machine(parser, option="--machine")
    arguments.add_allocation(parser)
    arguments.add_collective(
        parser, default=None, otherwise="the one that the log names, else the one that its columns fit"
    )
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    arguments.declare(
        parser,
        """
        --all     print every row, run and finding
        --expect  without LOG: the busbw that NCCL's own model expects by size, and the limits of the links
        """,
    )
    arguments.declare(
        parser.topic("explain"),
        """
        --tune ALGORITHM=LOG,…  in place of LOG: write a file for NCCL's example tuner plugin with the fastest choice by
                                size, from a log of nccl-tests for each algorithm, or algorithm and protocol, such as
                                ring=A.log,tree/ll=B.log,nvls=C.log
        -o F.csv                with --tune: the file (default: stdout); F.c is the source of a plug-in instead
        --nccl-channels N       with --tune: number of NCCL's channels (default: from the logs or the machine)
        """,
        nccl_channels=arguments.whole_number(1, 64, "number of channels from 1 to 64"),
    )
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan explain nccl-tests.log --machine topo.txt",
        "topoplan explain old.log new.log",
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
    if options.expect:
        if options.log is not None:
            raise UsageError("--expect is for a machine without a log; leave LOG or --expect out")
        return _expectation(options)
    if options.log is None:
        raise UsageError(
            "no LOG is given; name the output of nccl-tests, - for stdin, or --expect without one"
        )
    if options.newer is not None:
        if options.topo is not None:
            raise UsageError("--machine does not go with a second log; leave one of them out")
        others = dict.fromkeys(("gpus", "collective", "in_network", "servers"))
        arguments.refuse_beside(options, "a second log", others)
        return _changes(options)
    if options.log == "-" and "-" in (options.topo, options.merge):
        raise UsageError("stdin is read once; give a file to LOG or --machine")
    collective = None if options.collective is None else check_collective(options.collective)
    text = read_log(options.log)
    where = "stdin" if options.log == "-" else "the log" if "\n" in options.log else options.log
    if text.lstrip().startswith("{") and form_of(text) == "ras":
        if options.topo is not None:
            raise UsageError("--machine does not go with a report of RAS; leave one of them out")
        arguments.refuse_beside(options, "a report of RAS", dict.fromkeys(("gpus", "collective")))
        return _ras_answer(parse_ras(text), every=options.all)
    runs, spoken = parse_perf_runs(text), parse_nccl_log(text)
    if not runs and spoken is None:
        found = format_of(text)
        what = f"is the output of {found.printed_by}, and " if found and found.pattern else ""
        raise UsageError(
            f"{where} {what}holds no run of nccl-tests or topoplan bench and no line of NCCL_DEBUG=INFO; "
            "give their output"
        )
    if collective is not None and all(run.program or run.collective for run in runs):
        raise UsageError(
            "--collective is for runs that do not name their test, and all runs name it; leave it out"
        )
    if options.topo is None:
        raise UsageError(_machine_wanted(runs, spoken))
    models = {rank.model for run in runs for rank in run.ranks if rank.model}
    machine = read_as_logged(options, models.pop() if len(models) == 1 else "")
    with progress_line("explaining") as progress:
        named = machine.whole
        whole = named if options.in_network is not None else with_all_capabilities(with_capable(named))
        judged = judge_runs(runs, machine, whole, options.gpus, collective, progress)
        gpus = machine.allocation(options.gpus)
        nccl = None if spoken is None else judge_nccl(spoken, machine.whole, gpus=gpus)
    verdicts = [judge_run(one, machine.whole) for one in judged]
    servers = {whole.device(whole.gpus[gpu]).server for one in judged for gpu in one.gpus}
    ranks = [rank for one in judged if one.model for rank in one.run.ranks]
    own = not isinstance(options.topo, Topology) and options.topo not in library()
    healthy = own and not machine.warnings(None) and any(link.channel == "nvlink" for link in whole.links)
    command = _machine_command(options)
    steps = log_steps(verdicts, nccl, command=command, servers=len(servers), ranks=ranks, healthy=healthy)
    ruled_out = f"missing NVLinks: {command} shows all of them" if healthy else ""
    adding = () if whole == named else (IN_NETWORK_NOTE,)
    noted = [note for one in judged for note in one.notes] + list(nccl.notes if nccl else ())
    notes = tuple(dict.fromkeys((*noted, *adding, *machine.whole.notes)))
    return Answer(
        text=lambda: _lines(
            judged, verdicts, nccl, steps, machine, 0 if options.all else _room(notes, options), ruled_out
        ),
        value=lambda: _object(judged, verdicts, nccl, steps, machine),
        rows=lambda: [_flatten_row(row.to_object()) for one in judged for row in one.rows],
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class RasFinding:
    """A rank that RAS shows missing, in an error, or behind the others."""

    communicator: str
    rank: RasRank
    text: str


FINDINGS: tuple[Column[RasFinding], ...] = (
    Column("communicator", "communicator"),
    Column("rank", "rank", "rank.rank"),
    Column("host", "host", lambda one: printable(one.rank.host) or None),
    Column("GPU", "device", "rank.device"),
    Column("pid", "pid", "rank.pid"),
    Column("finding", "finding", "text"),
)


def _ras_answer(report: RasReport, *, every: bool) -> Answer:
    """Return the ranks that a report of RAS shows missing, in an error, or behind; those behind delay the others."""
    found = [
        RasFinding(printable(one.name), rank, rank.state)
        for one in report.communicators
        for rank in one.faulty
    ]
    found += [
        RasFinding(printable(one.name), rank, f"{count} of {most} {printable(name)}")
        for one in report.communicators
        for rank, name, count, most in one.lagging()
    ]
    faulty = sum(len(one.faulty) for one in report.communicators)
    behind = sorted({(one.name, rank.rank) for one in report.communicators for rank, *_ in one.lagging()})
    once = all(most - count == 1 for one in report.communicators for _, _, count, most in one.lagging())

    def text() -> Iterator[str]:
        ranks = counted(sum(one.size for one in report.communicators), "rank")
        what = f"{counted(len(report.communicators), 'communicator')} of {ranks}"
        if not found:
            yield f"RAS: {what}: every rank answers, and all have started as many collectives"
        else:
            words = [f"{faulty} missing or in an error"] if faulty else []
            words += [f"{len(behind)} behind in a collective"] if behind else []
            yield f"RAS: {what}: {', '.join(words)}"
        yield from labelled(
            ("NCCL", printable(report.nccl_version)),
            (
                "timeouts",
                f"{report.timeouts} of RAS itself: its figures may lack ranks" if report.timeouts else "",
            ),
        )
        shown, left = folded(found, DEFAULT_LINES - 8, every=every)
        if shown:
            yield f"\n{table_of(FINDINGS, shown)}"
            yield from folded_line(left, "row")
            yield ""
        yield from step_lines(_ras_steps(faulty=bool(faulty), behind=bool(behind), once=once))

    return Answer(
        text=text,
        value=lambda: {
            "nccl_version": report.nccl_version,
            "timeouts": report.timeouts,
            "communicators": [
                {"communicator": one.name, "size": one.size, "faulty": len(one.faulty)}
                for one in report.communicators
            ],
            "findings": records_of(FINDINGS, found),
        },
        rows=lambda: records_of(FINDINGS, found),
    )


def _ras_steps(*, faulty: bool, behind: bool, once: bool) -> list[str]:
    steps = []
    if faulty:
        steps.append("look at the processes of the missing ranks, and at their hosts' dmesg (Xid)")
    if behind and once:
        steps.append(
            "ask again after some seconds: a rank behind by one may be on its way, the same counts are a hang"
        )
    elif behind:
        steps.append("look where the ranks behind are (py-spy dump --pid PID): the others wait for them")
    return steps or ["nothing to do"]


CHANGES: tuple[Column[SizeChange], ...] = (
    Column("test", "test", "test", form=lambda test: collective_name(test) if test else "-"),
    Column("size", "size", "nbytes", format_size),
    Column("old us", "old_time", lambda one: one.old * 1e6, ".6g"),
    Column("new us", "new_time", lambda one: one.new * 1e6, ".6g"),
    Column("change", "change", form="{:+.1%}".format),
    Column("old busbw", "old_busbw", form=".2f"),
    Column("new busbw", "new_busbw", form=".2f"),
    Column("old choice", "old_choice", lambda one: one.old_choice or None),
    Column("new choice", "new_choice", lambda one: one.new_choice or None),
)


def _changes(options: argparse.Namespace) -> Answer:
    """Return what changed from one log to another."""
    if options.log == options.newer == "-":
        raise UsageError("stdin is read once; give a file to LOG or NEW")
    found = log_changes(read_log(options.log), read_log(options.newer))
    return Answer(
        text=lambda: _change_lines(found, every=options.all),
        value=lambda: {
            "rows": records_of(CHANGES, found.sizes),
            "setup": [{"what": one.what, "old": one.old, "new": one.new} for one in found.setup],
            "slower": len(found.slower),
            "faster": len(found.faster),
            "only_old": found.only_old,
            "only_new": found.only_new,
        },
        rows=lambda: records_of(CHANGES, found.sizes),
    )


def _change_lines(found: LogChanges, *, every: bool) -> Iterator[str]:
    """Yield the verdict, what NCCL set up otherwise, and the sizes whose time or algorithm changed."""
    count = counted(len(found.sizes), "size")
    noise = f"more than {100 * NOISE:g} %"
    if not found.sizes:
        yield "no size in common: only what NCCL says is compared"
    elif not found.slower and not found.faster:
        yield f"no change: {count}, none by {noise}"
    else:
        both = (("slower", found.slower), ("faster", found.faster))
        words = [f"{len(ones)} {how} by {noise}, {_most(ones[0])}" for how, ones in both if ones]
        yield f"of {count} {'; '.join(words)}"
    yield from labelled(*((one.what, f"{one.old or '-'} -> {one.new or '-'}") for one in found.setup))
    if not found.setup:
        same = "both logs say the same of its setup"
        yield from labelled(
            ("NCCL", same if found.spoken else f"not in both logs; run with {DEBUG_SETTINGS}")
        )
    shown = [one for one in found.sizes if every or one.changed or one.old_choice != one.new_choice]
    columns = [
        column for column in CHANGES if any(column.of(one) for one in shown) or column.head == "change"
    ]
    few, left = folded(shown, DEFAULT_LINES - 8, every=every)
    if few:
        yield ""
        yield table_of(columns, few)
        yield from folded_line(left, "row")
    for number, log in ((found.only_old, "LOG"), (found.only_new, "NEW")):
        if number:
            yield f"{counted(number, 'row')} of {log} alone {'is' if number == 1 else 'are'} not compared"


def _most(one: SizeChange) -> str:
    rates = f"busbw {one.old_busbw:.4g} to {one.new_busbw:.4g} GB/s" if one.old_busbw else "time only"
    return f"most at {format_size(one.nbytes)}: {one.change:+.1%} time, {rates}"


EXPECTED_SIZES = tuple(1 << power for power in range(10, 34))
"""1 KB to 8 GB, as nccl-tests runs them with ``-b 1K -e 8G -f 2``."""

EXPECTED: tuple[Column[NcclTime], ...] = (
    Column("size", "size", "nbytes", format_size),
    Column("time (us)", "time", lambda one: one.seconds * 1e6, ".6g"),
    Column("algbw", "algbw", form=".2f"),
    Column("busbw", "busbw", form=".2f"),
    Column("NCCL runs", "runs"),
)


def _expectation(options: argparse.Namespace) -> Answer:
    """Return what NCCL's model expects of a machine by size, and the limits of its links."""
    if options.topo is None:
        raise UsageError(_machine_wanted((), None))
    collective = check_collective(options.collective or "allreduce")
    machine = read_machine(options)
    settled = options.in_network is not None
    whole = machine.whole if settled else with_all_capabilities(with_capable(machine.whole))
    with progress_line("explaining"):
        found = attainable(whole, collective, gpus=machine.allocation(options.gpus))
    if len(found.gpus) == 1:
        raise UsageError("--expect needs two GPUs or more, got 1: a single GPU sends nothing")
    times = [one for size in EXPECTED_SIZES if (one := found.expected_time(size)) is not None]
    names = rank_names([whole.gpus[gpu] for gpu in found.gpus])
    where = f"{collective_name(collective)} on {whole.name}, {counted(len(found.gpus), 'GPU')} ({names})"

    def text() -> Iterator[str]:
        if not times:
            yield f"{where}: neither measurements nor NCCL's model cover this; the limits of the links hold"
        else:
            top = times[-1]
            of_links = OF_LINKS * found.factor * (found.nccl_best or found.best)
            yield (
                f"{where}: busbw {top.busbw:.4g} GB/s at {format_size(top.nbytes)} is expected by "
                f"{found.expected_by(top)} (slow below {min(OF_MODEL * top.busbw, of_links):.4g})"
            )
        yield from _reference_lines(found, RunVerdict("not judged", ""))
        if times:
            yield f"\n{table_of(EXPECTED, times if options.all else [*times[::2], times[-1]])}\n"
        yield from step_lines(
            [
                f"run nccl-tests with -b 1K -e 8G -f 2, then topoplan explain LOG --machine {_machine_command(options)}"
            ]
        )

    return Answer(
        text=text,
        value=lambda: {
            "machine": whole.name,
            "collective": collective,
            "gpus": list(found.gpus),
            "expected": records_of(EXPECTED, times),
            "expected_by": [found.expected_by(one) for one in times],
            "references": [_reference(found)],
            "notes": list(machine.whole.notes),
        },
        rows=lambda: records_of(EXPECTED, times),
        notes=machine.whole.notes,
    )


def _machine_wanted(runs: Sequence[PerfRun], spoken: NcclLog | None) -> str:
    """Return the message for a log without a machine: the library machine that it fits, if any."""
    ranks = [rank for run in runs[:1] for rank in run.ranks if rank.group == run.ranks[0].group]
    if not ranks and spoken and spoken.communicators:
        ranks = [*spoken.communicators[0].ranks.values()]
    fitting = machine_for(ranks)
    own = "the output of nvidia-smi topo -m in a file"
    if fitting:
        return f"explain needs the machine that ran; add {fitting}, or --machine F with {own}"
    return f"explain needs the machine that ran; add --machine F with {own}, or a name of topoplan list"


def _machine_command(options: argparse.Namespace) -> str:
    """Return the machine as a command takes it."""
    cluster = f" --servers {options.servers} …" if options.servers else ""
    named = isinstance(options.topo, str) and options.topo != "-" and "\n" not in options.topo
    return f"{options.topo if named else 'TOPO'}{cluster}"


def _room(notes: Sequence[str], options: argparse.Namespace) -> int:
    """Return the lines that the text may have beside the notes."""
    shown = len(notes) if options.notes else bool(notes)
    return max(12, DEFAULT_LINES - shown)


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
                "references": [_reference(found) for found in one.references],
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


def _lines(
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
    above = [line for found in references for line in _reference_lines(found, verdict)]
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


def _reference_lines(found: Attainable, verdict: RunVerdict) -> list[str]:
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
