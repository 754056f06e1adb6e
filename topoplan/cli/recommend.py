"""Choose GPUs for one job, or for several side by side, for ``topoplan recommend``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby

from topoplan.cli import arguments
from topoplan.cli.machine_options import (
    RequestedMachine,
    add_cluster_options,
    add_fault_options,
    add_in_network,
)
from topoplan.cli.output import (
    gpu_set_lines,
    in_network_words,
    print_csv,
    print_json,
    print_notes,
    progress_line,
    table,
)
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.operate.compare.job_division import Division, JobGpus, divide
from topoplan.operate.compare.recommendation import GpuSet, recommend
from topoplan.plans.json_values import finite
from topoplan.plans.plan import check_collective
from topoplan.solve.upper_bound import bound
from topoplan.units import bus_factor, bus_words, counted, number_ranges


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.declare(
        parser,
        """
        --count K    GPUs of the job
        --jobs LIST  GPUs of several jobs, such as 4,2,2: the best way to divide the machine among them
        --free LIST  GPUs to choose from, such as 0,1,4-7 (default: all)
        """,
        count=arguments.whole_number(1, 999999, "number of GPUs"),
        jobs=_sizes,
        free=arguments.gpu_list,
    )
    arguments.add_collective(parser)
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    add_cluster_options(parser)
    add_in_network(parser)
    add_fault_options(parser)


def run(options: argparse.Namespace) -> int:
    """List all sets of so many GPUs, best first, with what the best leave; or divide a machine among jobs."""
    collective = check_collective(options.collective)
    arguments.check_csv(options)
    if (options.count is None) == (options.jobs is None):
        raise UsageError("say how many GPUs the job has with --count 4, or of several jobs with --jobs 4,2,2")
    if options.jobs is not None:
        return _run_jobs(options, collective)
    machine = read_machine(options)
    free = _free_gpus(options, machine)
    with progress_line("comparing") as progress:
        sets = recommend(machine.whole, options.count, collective, free=free, progress=progress)
    factor = bus_factor(collective, options.count)
    if options.json:
        print_json(
            {
                "machine": machine.whole.name,
                "collective": collective,
                "count": options.count,
                "free": list(free),
                "sets": [_object(one, factor) for one in sets],
                "notes": list(machine.whole.notes),
            }
        )
    elif options.csv:
        rows = [_object(one, factor) for one in sets]
        print_csv([{**row, "gpus": number_ranges(one.gpus)} for one, row in zip(sets, rows, strict=True)])
    else:
        _print_sets(machine, collective, sets, factor)
        print_notes(*machine.whole.notes)
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    """Parse the numbers of GPUs of several jobs."""
    one = arguments.whole_number(1, 999_999, "list of numbers of GPUs such as 4,2,2")
    try:
        return tuple(one(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be a list of numbers of GPUs such as 4,2,2, got {text[:40]!r}"
        ) from None


def _run_jobs(options: argparse.Namespace, collective: str) -> int:
    machine = read_machine(options)
    free = _free_gpus(options, machine)
    with progress_line("dividing") as progress:
        found = divide(machine.whole, options.jobs, collective, free=free, progress=progress)
    rows = [_job_object(job, collective) for job in found.jobs]
    if options.json:
        print_json(
            {
                "machine": machine.whole.name,
                "collective": collective,
                "free": list(free),
                "ways": found.ways,
                "proved": found.proved,
                "complete": found.complete,
                "least": found.least,
                "jobs": rows,
                "notes": list(machine.whole.notes),
            }
        )
    elif options.csv:
        print_csv(
            [{**row, "gpus": number_ranges(job.gpus)} for job, row in zip(found.jobs, rows, strict=True)]
        )
    else:
        _print_jobs(machine, collective, found)
        print_notes(*machine.whole.notes)
    return 0


def _job_object(job: JobGpus, collective: str) -> dict[str, object]:
    """Return a job for JSON; null where nothing moves."""
    return {
        "gpus": list(job.gpus),
        "rate": finite(job.rate),
        "busbw": finite(job.rate * bus_factor(collective, len(job.gpus))) if len(job.gpus) > 1 else None,
        "alone": finite(job.alone),
        "best": finite(job.best),
        "part": job.part,
        "shares_links": job.shares_links,
    }


def _print_jobs(machine: RequestedMachine, collective: str, found: Division) -> None:
    """Print a row for each job, and what the division maximises."""
    sizes = ",".join(str(len(job.gpus)) for job in found.jobs)
    best = "the best" if found.proved else "a good one"
    ways = f"{best} of {found.ways:,} ways" if found.ways != 1 else "the one way"
    print(f"{collective} in jobs of {sizes} GPUs on {machine.whole.name}: {ways} to divide it")
    print()
    rows = []
    for number, job in enumerate(found.jobs):
        moves = len(job.gpus) > 1
        rates = (
            [job.rate, job.rate * bus_factor(collective, len(job.gpus)), job.alone, job.best] if moves else []
        )
        rows.append(
            (
                str(number),
                number_ranges(job.gpus),
                *(f"{rate:.6g}" for rate in rates),
                *("-" for _ in range(4 - len(rates))),
                f"{job.part:.4g}",
                "yes" if job.shares_links else "no",
            )
        )
    print(table(("job", "GPUs", "GB/s", "busbw", "alone", "best set", "part", "shares links"), rows))
    print()
    print(
        "GB/s: all jobs at once; alone: these GPUs by themselves; best set: the best GPUs for a job of this size"
    )
    print(
        "part: GB/s over best set; the least part is as large as can be, and among such ways the sum of the parts"
    )
    for job in found.jobs:
        if not job.part:
            print(
                f"no NVLink, PCIe or network path of this description joins GPUs {number_ranges(job.gpus)}, "
                "so a job there does 0 GB/s"
            )
    if any(job.shares_links for job in found.jobs):
        print("shares links: its wires meet those of another job; GB/s holds while both run")
    if not found.complete:
        better = "in the sum of the parts" if found.proved else "in the least part"
        print(f"not all ways were looked at, only the most promising: one that is better {better} may exist")


def _free_gpus(options: argparse.Namespace, machine: RequestedMachine) -> tuple[int, ...]:
    """Return the GPUs to choose from, ascending."""
    if options.free is None:
        return machine.left
    chosen = machine.whole.select(options.free)
    gone = [gpu for gpu in chosen if gpu not in machine.left]
    if gone:
        raise UsageError(
            f"GPU {gone[0]} is named by --free and by --without-gpu; leave it out of one of them"
        )
    return tuple(sorted(chosen))


def _object(one: GpuSet, factor: float) -> dict[str, object]:
    """Return a set for JSON."""
    return {
        "gpus": list(one.gpus),
        "rate": one.rate,
        "ring": one.ring,
        "bound": one.bound,
        "busbw": one.rate * factor,
        "ring_kind": one.ring_kind,
        "nccl": one.nccl,
        "nccl_kind": one.nccl_kind,
        "channel": one.channel,
        "class": one.number,
        "following": one.following,
        "left": one.left,
    }


def _print_sets(machine: RequestedMachine, collective: str, sets: Sequence[GpuSet], factor: float) -> None:
    """Print classes best first, each with its sets, and what the best set leaves."""
    best = sets[0]
    classes = [
        list(group)
        for _, group in groupby(sorted(sets, key=lambda one: one.number), key=lambda one: one.number)
    ]
    print(
        f"{collective} on {machine.whole.name}: {counted(len(sets), 'set')} of {len(best.gpus)} GPUs, "
        f"in {len(classes)} {'class' if len(classes) == 1 else 'classes'}, best first"
    )
    if best.channel is None:
        print(f"best   none: no path joins any {len(best.gpus)} of these GPUs")
    else:
        over = channel_words(best.channel.split("+"))
        bus = bus_words(best.rate, collective, len(best.gpus))
        print(f"best   {number_ranges(best.gpus)}: {best.rate:.6g} GB/s{bus}, over {over}")
        beyond = _in_network(machine, collective, best)
        if beyond:
            print(f"       {beyond}")
        print(f"leaves {_remaining_words(best, sets)}")
    print()
    rows = [
        (
            str(group[0].number),
            f"{group[0].rate:.6g}",
            f"{group[0].rate * factor:.6g}",
            f"{group[0].bound:.6g}",
            _rate_range([one.ring for one in group]),
            group[0].ring_kind,
            f"{group[0].nccl:.6g}",
            group[0].nccl_kind,
            group[0].channel or "none",
            str(len(group)),
        )
        for group in classes
    ]
    heads = ("class", "GB/s", "busbw", "bound", "ring", "ring is", "NCCL", "NCCL is", "over", "sets")
    print(table(heads, rows))
    print()
    for group in classes:
        print(gpu_set_lines(f"class {group[0].number}: ", [one.gpus for one in group], len(group)))
    print()
    print("GB/s: packed trees, algorithm bandwidth; busbw: as nccl-tests counts; bound: what no plan exceeds")
    print("ring: NCCL's before 2.8; NCCL: the best that NCCL has today; sets of a class have equal wires")


def _in_network(machine: RequestedMachine, collective: str, best: GpuSet) -> str:
    """Return what in-network reduction could add to the bound of a set."""
    return in_network_words(bound(machine.whole, collective, gpus=best.gpus))


def _rate_range(rates: Sequence[float]) -> str:
    """Return a rate, or the least and the largest."""
    least, most = f"{min(rates):.6g}", f"{max(rates):.6g}"
    return least if least == most else f"{least}-{most}"


def _remaining_words(best: GpuSet, sets: Sequence[GpuSet]) -> str:
    """Return the GPUs that the best set leaves, and their rate for the next job."""
    free = sorted({gpu for one in sets for gpu in one.gpus})
    rest = [gpu for gpu in free if gpu not in best.gpus]
    if not rest:
        return "no GPU"
    parts = [number_ranges(rest)]
    if best.following is not None:
        parts.append(f"{best.following:.6g} GB/s for the next job of {len(best.gpus)}")
    if best.left is not None and len(rest) != len(best.gpus):
        unit = "" if parts[1:] else " GB/s"
        parts.append(f"{best.left:.6g}{unit} for one of all {len(rest)}")
    return f"{parts[0]}: {', '.join(parts[1:])}" if parts[1:] else f"{parts[0]}, no pair"
