"""``topoplan explain``: logs of nccl-tests and of NCCL beside what the machine's wires allow."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from topoplan.cli import arguments
from topoplan.cli.cluster_options import add_cluster, add_in_network
from topoplan.cli.damage_options import Machine, add_damage
from topoplan.cli.output import print_csv, print_json, print_notes, printable, table
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_log, read_machine
from topoplan.cli.tuner_logs import tune
from topoplan.compare.measured import JudgedRow, JudgedRun, judge, nic_words
from topoplan.compare.nccl_run import NcclRun, choice_lines, judge_nccl
from topoplan.compare.reachable import LATENCY, Reachable, reachable
from topoplan.errors import UsageError
from topoplan.formats.nccl_logs.debug_log import parse_nccl_log, via_kind
from topoplan.formats.nccl_logs.perf_json import parse_perf_runs
from topoplan.formats.nccl_logs.perf_runs import PerfRun
from topoplan.hosts.gpu_identity import with_capable
from topoplan.hosts.notes import warning
from topoplan.in_network import fully_used
from topoplan.plans.plan import check_collective
from topoplan.topology import Topology
from topoplan.units import bus_words, counted, format_size, number_ranges

HEAD = (
    *("size", "time (us)", "algbw", "busbw", "in place", "of NCCL", "of best", "bound by"),
    *("model", "(us)", "of it"),
)

MODEL = (
    "model: what NCCL's own model of time chooses at this size, and its time over the time that was measured"
)

ADDING = "switches that can add and copy do, as NCCL's NVLS lets them; --in-network none leaves that out"


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``explain``."""
    parser.add_argument(
        "log",
        nargs="?",
        metavar="LOG",
        help="what nccl-tests, topoplan bench or NCCL_DEBUG=INFO printed, several runs in one file too; - for stdin",
    )
    arguments.add_machine(parser, option="--machine")
    arguments.add_allocation(parser)
    arguments.add_collective(parser, default=None, otherwise="what the log names, else what its columns fit")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    tuning = parser.add_argument_group("a file for NCCL's example tuner plugin, in place of LOG")
    tuning.add_argument(
        "--tune",
        metavar="ALGORITHM=LOG,…",
        help="write what was fastest by size, from a log of nccl-tests for each algorithm, or algorithm and protocol, "
        "such as ring=A.log,tree/ll=B.log,nvls=C.log",
    )
    tuning.add_argument("-o", dest="output", metavar="F.csv", help="with --tune: the file (default: stdout)")
    tuning.add_argument(
        "--nccl-channels",
        type=arguments.whole(1, 64, "number of channels from 1 to 64"),
        metavar="N",
        help="with --tune: channels that NCCL has (default: what the logs or the machine say)",
    )
    add_cluster(parser)
    add_in_network(parser)
    add_damage(parser)


def run(options: argparse.Namespace) -> int:
    """Read the logs of nccl-tests, topoplan bench and NCCL: what was measured, what NCCL and any schedule can reach."""
    if options.tune is not None:
        given = arguments.first_given(options, {"json": False, "csv": False})
        if options.log is not None or given:
            raise UsageError(f"--tune writes a file of its own logs; leave {given or 'LOG'} out")
        return tune(options)
    given = arguments.first_given(options, {"output": None, "nccl_channels": None})
    if given:
        raise UsageError(f"{given.replace('--output', '-o')} goes with --tune; leave it out")
    if options.log is None:
        raise UsageError("no LOG is given; name what nccl-tests printed, or - for stdin")
    arguments.check_csv(options)
    if options.topo is None:
        raise UsageError("explain needs the machine that ran; add --machine TOPO")
    if options.log == "-" and "-" in (options.topo, options.merge):
        raise UsageError("stdin is read once; give LOG and --machine a file each, but for one")
    collective = None if options.collective is None else check_collective(options.collective)
    text = read_log(options.log)
    runs, spoken = parse_perf_runs(text), parse_nccl_log(text)
    where = "stdin" if options.log == "-" else options.log
    if not runs and spoken is None:
        raise UsageError(
            f"{where} holds no run of nccl-tests or topoplan bench and no line of NCCL_DEBUG=INFO; "
            "give what they printed"
        )
    if collective is not None and all(run.program or run.collective for run in runs):
        raise UsageError(
            "--collective is for runs that do not name their test, and there are none here; leave it out"
        )
    machine = read_machine(options)
    with progress_line("explaining") as progress:
        named = _with_models(machine.whole, runs)
        whole = named if options.in_network is not None else fully_used(with_capable(named))
        judged = judge_runs(runs, machine, whole, options.gpus, collective, progress)
        gpus = machine.allocation(options.gpus)
        nccl = None if spoken is None else judge_nccl(spoken, machine.whole, gpus=gpus)
    if options.json:
        print_json(_object(judged, nccl, machine))
    elif options.csv:
        print_csv([_flat(row.to_object()) for one in judged for row in one.rows])
    else:
        parts = [_lines(one, machine) for one in judged] + ([_nccl_lines(nccl)] if nccl else [])
        print("\n\n".join("\n".join(lines) for lines in parts))
        adding = [] if whole == named else [ADDING]
        print_notes(*adding, *machine.whole.notes)
    return 0


def _with_models(machine: Topology, runs: Sequence[PerfRun]) -> Topology:
    """The machine whose GPUs are of the model that the logs name, where they name one and the machine names none."""
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
    machine: Machine,
    whole: Topology,
    gpus: tuple[int, ...] | None,
    collective: str | None,
    progress: Callable[[str], None] | None,
) -> list[JudgedRun]:
    """Every run beside what its GPUs can reach; each collective on each allocation is worked out once."""

    @cache
    def reach(known: str, gpus: tuple[int, ...], root: int | None) -> Reachable:
        if progress:
            progress(f"{known} on {counted(len(gpus), 'GPU')} …")
        return reachable(whole, known, gpus=machine.allocation(gpus), root=root)

    named = machine.allocation(gpus)
    return [judge(run, whole, reach, gpus=named, collective=collective) for run in runs]


def _object(judged: Sequence[JudgedRun], nccl: NcclRun | None, machine: Machine) -> dict[str, object]:
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


def _reference(found: Reachable) -> dict[str, object]:
    return {
        "collective": found.collective,
        "nccl": [{"schedule": name, "rate": rate} for name, rate in found.nccl],
        "best": found.best if len(found.gpus) > 1 else None,
        "over": list(found.channels),
        "links": found.links,
        "factor": found.factor,
    }


def _flat(row: dict[str, object]) -> dict[str, object]:
    """A row without objects in it: their keys stand beside the others, behind the name of the object."""
    empty = {
        "in_place": ("time", "algbw", "busbw", "wrong"),
        "nccl_expects": ("algorithm", "protocol", "time"),
    }
    flat = {key: value for key, value in row.items() if key not in empty}
    for key, names in empty.items():
        inner = row[key]
        flat |= {f"{key}_{name}": inner[name] if isinstance(inner, dict) else None for name in names}
    return flat


def _lines(one: JudgedRun, machine: Machine) -> list[str]:
    """A run for a person."""
    lines = [_title(one, machine)]
    for found in one.references:
        lines += _reference_lines(found)
    if one.rows:
        lines += ["", table(HEAD, [_cells(row) for row in one.rows])]
        lines += [MODEL, ""] if any(row.expected for row in one.rows) else [""]
    lines += [_verdict(one)] if one.references else []
    lines += [words.replace(": ", ":\n       ", 1) for _, words in _nic_sentences(one)][-1:]
    lines += [printable(warning(words)) for words in one.warnings]
    lines += [printable(f"note: {words}") for words in one.notes]
    return lines


def _nccl_lines(nccl: NcclRun) -> list[str]:
    """What NCCL set up, for a person."""
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
            told = ", ".join(f"{way} for {counted(count, 'pair')}" for way, count in sorted(ways.items()))
            lines.append(f"ways   {told}")
        lines += [f"chose  {line}" for line in choice_lines(one)]
    for finding in nccl.findings:
        where = f"line {finding.line}: " if finding.line else ""
        lines.append(printable(warning(f"{where}{finding.text}")))
    if not nccl.findings:
        lines.append("nothing in it misfits the machine")
    lines += [f"note: {note}" for note in nccl.notes]
    return lines


def _title(one: JudgedRun, machine: Machine) -> str:
    what = one.rows[0].collective if one.rows else one.run.program or "no rows"
    by = "topoplan bench" if one.run.program == "bench" else "nccl-tests"
    ran = f", {one.run.schedule}" if one.run.schedule else ""
    if not one.gpus:
        return f"{what} by {by}{ran}"
    where = f"GPUs {number_ranges(one.gpus)} of {machine.whole.name}"
    return f"{what} of {counted(len(one.gpus), 'rank')} by {by}{ran}, on {where}"


def _reference_lines(found: Reachable) -> list[str]:
    """What NCCL and any schedule can, in algorithm and bus bandwidth."""

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


def _cells(row: JudgedRow) -> tuple[str, ...]:
    inside, expected = row.row.in_place if row.row.out_of_place else None, row.expected
    return (
        format_size(row.row.size),
        f"{row.row.timing.seconds * 1e6:.6g}",
        f"{row.row.timing.algbw:.2f}",
        f"{row.row.timing.busbw:.2f}",
        "-" if inside is None else f"{inside.busbw:.2f}",
        _percent(row.of_nccl),
        _percent(row.of_best),
        row.bound_by or "-",
        f"{expected.algorithm}/{expected.protocol}" if expected else "-",
        f"{expected.seconds(row.row.size) * 1e6:.6g}" if expected else "-",
        _percent(row.of_model),
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}%"


def _verdict(one: JudgedRun) -> str:
    """The fastest row that nothing is wrong with, in one sentence."""
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
