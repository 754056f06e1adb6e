"""``topoplan explain --tune``: a file for NCCL's tuner from logs of nccl-tests, one for each algorithm."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from topoplan.cli.damage_options import Machine
from topoplan.cli.output import check_target, print_notes, write_whole
from topoplan.cli.sources import read_log, read_machine
from topoplan.compare.logged_ranks import gpus_of
from topoplan.errors import UsageError
from topoplan.export.nccl.tuner import known_channels, measured_tuner, model_ranges, parse_label
from topoplan.formats.nccl_logs.debug_log import NcclLog, parse_nccl_log
from topoplan.formats.nccl_logs.perf_json import parse_perf_runs
from topoplan.formats.nccl_logs.perf_runs import PerfRun
from topoplan.hosts.notes import warning
from topoplan.in_network import fully_used
from topoplan.plans.plan import check_collective
from topoplan.schedules.nccl.tuning import COLLECTIVES, Expectation, expectations, has, setting_of
from topoplan.units import format_size

Times = dict[str, dict[tuple[str, str], dict[int, float]]]
"""Of a collective, of an algorithm and protocol, seconds by size."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A log and what it ran.

    Parameters
    ----------
    label, path : str
    algorithm, protocol : str
        The protocol is empty where the label leaves it open.
    runs : tuple of PerfRun
    spoken : NcclLog or None
    """

    label: str
    path: str
    algorithm: str
    protocol: str
    runs: tuple[PerfRun, ...]
    spoken: NcclLog | None


def tune(options: argparse.Namespace) -> int:
    """Write what was fastest for each range of sizes, as NCCL's example tuner plugin reads it."""
    check_target(options.output, "-o")
    logs = [_read(part) for part in options.tune.split(",")]
    machine = None if options.topo is None else read_machine(options)
    expected = {} if machine is None else _model(options, machine)
    notes: list[str] = []
    times: Times = {}
    shapes: dict[tuple[int, int], str] = {}
    for log in logs:
        for run in log.runs:
            shapes.setdefault(_shape(run, log, machine), log.path)
            _collect(times, log, run, options, expected, notes)
    if len(shapes) > 1:
        (one, first), (other, second), *_ = shapes.items()
        raise UsageError(
            f"{first} is of {one[1]} ranks on {one[0]} servers, {second} of {other[1]} on {other[0]}; tune one "
            "communicator at a time"
        )
    if not shapes:
        raise UsageError("the logs hold no run of nccl-tests; give what all_reduce_perf and its like printed")
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
    notes += exported.notes
    if options.output in (None, "-"):
        sys.stdout.write(exported.text)
        print_notes(*notes, file=sys.stderr)
    else:
        write_whole(options.output, exported.text)
        print(f"written: {options.output}")
        print_notes(*notes)
    return 0


def _read(part: str) -> Labelled:
    label, equals, path = part.partition("=")
    if not equals or not path:
        raise UsageError(f"--tune {part[:60]!r} names no log; write ring=LOG, tree/ll=LOG or nvls=LOG")
    algorithm, protocol = parse_label(label)
    text = read_log(path)
    runs = parse_perf_runs(text)
    if not runs:
        raise UsageError(f"{path} holds no run of nccl-tests; give what all_reduce_perf and its like printed")
    return Labelled(label.strip(), path, algorithm, protocol, runs, parse_nccl_log(text))


def _model(options: argparse.Namespace, machine: Machine) -> dict[str, tuple[Expectation, ...]]:
    """What NCCL's model expects on the machine, which names the protocols that labels leave open."""
    allocation = machine.whole.subset(machine.allocation(options.gpus))
    here = setting_of(fully_used(allocation) if options.in_network is None else allocation)
    return {collective: expectations(here, collective) for collective in COLLECTIVES}


def _shape(run: PerfRun, log: Labelled, machine: Machine | None) -> tuple[int, int]:
    """Servers and ranks of a run; without a machine every host is a server, which NVLink between hosts changes."""
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


def _collect(
    times: Times,
    log: Labelled,
    run: PerfRun,
    options: argparse.Namespace,
    expected: dict[str, tuple[Expectation, ...]],
    notes: list[str],
) -> None:
    """Add the times of a run; warnings of the log, and rows that say nothing, become notes."""
    notes += [warning(f"{log.path}: {told}") for told in run.warnings]
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
            protocol = log.protocol or _protocol(log, collective, row.size, expected)
            known = times.setdefault(collective, {}).setdefault((log.algorithm, protocol), {})
            known[row.size] = min(row.timing.seconds, known.get(row.size, row.timing.seconds))


def _protocol(log: Labelled, collective: str, size: int, expected: dict[str, tuple[Expectation, ...]]) -> str:
    """The protocol of a size that the label leaves open: what NCCL said that it chose, or what its model chooses."""
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
        f"{log.label}/simple, /ll or /ll128, or add --machine for what NCCL's model chooses"
    )
