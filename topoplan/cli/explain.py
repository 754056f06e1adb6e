"""Compare logs of nccl-tests and NCCL with what the machine's links allow, ``topoplan explain``.

With ``--tune`` write a file for NCCL's tuner from logs of nccl-tests, one for each algorithm. With two logs list what
changed from one to the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from topoplan.cli import arguments
from topoplan.cli.judged_log_text import (
    flatten_row,
    judged_lines,
    judged_object,
    reference_lines,
    reference_object,
)
from topoplan.cli.machine_options import RequestedMachine, add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
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
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.expected_times import NcclTime
from topoplan.operate.compare.comparison import Attainable, attainable
from topoplan.operate.compare.judged_log import JudgedRun, judge
from topoplan.operate.compare.log_changes import NOISE, LogChanges, SizeChange, log_changes
from topoplan.operate.compare.nccl_debug_run import judge_nccl
from topoplan.operate.device_matching import gpus_of
from topoplan.operate.next_steps import (
    DEBUG_SETTINGS,
    OF_LINKS,
    OF_MODEL,
    RunVerdict,
    judge_run,
    log_steps,
    machine_for,
)
from topoplan.plans.plan import check_collective, collective_name
from topoplan.reading.load import form_of, format_of, library
from topoplan.reading.nccl.debug_log import NcclLog, parse_nccl_log
from topoplan.reading.nccl.job_reports import RasRank, RasReport, parse_ras
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import PerfRun
from topoplan.schedules.nccl_tuning import COLLECTIVES, NcclExpectation, expectations, has, setting_of
from topoplan.units import counted, format_size, labelled

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
        text=lambda: judged_lines(
            judged, verdicts, nccl, steps, machine, 0 if options.all else _room(notes, options), ruled_out
        ),
        value=lambda: judged_object(judged, verdicts, nccl, steps, machine),
        rows=lambda: [flatten_row(row.to_object()) for one in judged for row in one.rows],
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
        yield from reference_lines(found, RunVerdict("not judged", ""))
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
            "references": [reference_object(found)],
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
