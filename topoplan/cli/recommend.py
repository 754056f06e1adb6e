"""Choose GPUs for one job, or for several side by side, for ``topoplan recommend``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import RequestedMachine, add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    folded,
    folded_line,
    gpu_set_lines,
    in_network_words,
    progress_line,
    records_of,
    table_of,
)
from topoplan.cli.sources import MOST_LISTED_INSTEAD, may_be_large, read_machine, refuse_listing
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.machine.topology import Topology
from topoplan.operate.compare.job_division import Division, JobGpus, divide
from topoplan.operate.compare.recommendation import GpuSet, recommend
from topoplan.plans.file_values import finite
from topoplan.plans.plan import check_collective, collective_name
from topoplan.solve.upper_bound import compute_bound
from topoplan.units import bus_factor, counted, labelled, number_ranges, rate_words


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.declare(
        parser,
        """
        --count K    number of GPUs of the job
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
    arguments.declare(
        parser,
        """
        --all      print every class of sets
        --members  print every set of the classes
        """,
    )
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan recommend dgx-1v --count 4",
        "topoplan recommend topo.txt --count 2 --free 0,1,4-7",
        "topoplan recommend dgx-1v --jobs 4,2,2",
    )


def run(options: argparse.Namespace) -> Answer:
    """Rank the sets of K GPUs by bandwidth, and show what they leave to others; or divide a machine among jobs."""
    collective = check_collective(options.collective)
    if (options.count is None) == (options.jobs is None):
        raise UsageError("say how many GPUs the job has with --count 4, or of several jobs with --jobs 4,2,2")
    if options.jobs is None and may_be_large(options):
        from topoplan.cli import large_cluster

        large = large_cluster.run_recommendation(options)
        if large is not None:
            return large
    one = "topoplan recommend without --servers ranks the GPUs of one server, topoplan compare rates whole servers"
    refuse_listing(options, MOST_LISTED_INSTEAD, "sets of GPUs", f"choose some with --free; {one}")
    machine = read_machine(options)
    free = _free_gpus(options, machine)
    named = {"machine": machine.whole.name, "collective": collective}
    notes = machine.whole.notes
    if options.jobs is not None:
        with progress_line("dividing") as progress:
            found = divide(machine.whole, options.jobs, collective, free=free, progress=progress)
        columns = _job_columns(collective)
        return Answer(
            text=lambda: _job_lines(machine, collective, found, every=options.all),
            value=lambda: {
                **named,
                "free": list(free),
                "ways": found.ways,
                "proved": found.proved,
                "complete": found.complete,
                "least": found.least,
                "jobs": records_of(columns, found.jobs),
                "notes": list(notes),
            },
            rows=lambda: records_of(columns, found.jobs),
            notes=notes,
        )
    with progress_line("comparing") as progress:
        sets = recommend(machine.whole, options.count, collective, free=free, progress=progress)
    factor = bus_factor(collective, options.count)
    return Answer(
        text=lambda: _set_lines(machine, collective, sets, factor, options),
        value=lambda: {
            **named,
            "count": options.count,
            "free": list(free),
            "sets": [_object(one, factor) for one in sets],
            "notes": list(notes),
        },
        rows=lambda: [_object(one, factor) for one in sets],
        notes=notes,
    )


def _sizes(text: str) -> tuple[int, ...]:
    one = arguments.whole_number(1, 999_999, "list of numbers of GPUs such as 4,2,2")
    try:
        return tuple(one(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be a list of numbers of GPUs such as 4,2,2, got {text[:40]!r}"
        ) from None


def _job_columns(collective: str) -> tuple[Column[JobGpus], ...]:
    """Return the columns of jobs; nothing moves in a job of one GPU."""

    def bus(job: JobGpus) -> float | None:
        return finite(job.rate * bus_factor(collective, len(job.gpus))) if len(job.gpus) > 1 else None

    return (
        Column("GPUs", "gpus", lambda job: list(job.gpus), number_ranges),
        Column("algbw", "rate", lambda job: finite(job.rate), ".6g"),
        Column("busbw", "busbw", bus, ".6g"),
        Column("alone", "alone", lambda job: finite(job.alone), ".6g"),
        Column("best set", "best", lambda job: finite(job.best), ".6g"),
        Column("of best", "part", form=".4g"),
        Column("shares links", "shares_links", form=lambda shares: "yes" if shares else "no"),
    )


def _job_lines(machine: RequestedMachine, collective: str, found: Division, *, every: bool) -> Iterator[str]:
    """Yield a row for each job, and what the division maximises."""
    sizes = ",".join(str(len(job.gpus)) for job in found.jobs)
    best = "the best" if found.proved else "a good one"
    ways = f"{best} of {found.ways:,} divisions" if found.ways != 1 else "the only division"
    parts = " | ".join(number_ranges(job.gpus) for job in found.jobs)
    yield (
        f"{collective_name(collective)} in jobs of {sizes} GPUs on {machine.whole.name}: "
        f"{parts if len(parts) <= 60 else 'GPUs as below'} ({ways})\n"
    )
    jobs, left = folded(found.jobs, DEFAULT_LINES - 9, every=every)
    yield table_of((Column("job", value=found.jobs.index), *_job_columns(collective)), jobs)
    yield from folded_line(left, "job")
    yield "\nalgbw in GB/s while all jobs run; alone: this job only; best set: the best GPUs for a job of this size"
    yield "of best: algbw / best set; the least of these is as large as possible, then their sum"
    for job in found.jobs if every else [job for job in found.jobs if not job.part][:3]:
        if not job.part:
            yield (
                f"no NVLink, PCIe or network path of this description joins GPUs {number_ranges(job.gpus)}: 0 GB/s"
            )
    if any(job.shares_links for job in found.jobs):
        yield "shares links: with another job; algbw holds while both run"
    if not found.complete:
        better = "sum of the parts" if found.proved else "least part"
        yield f"only the most promising divisions were searched: one with a better {better} may exist"


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
        "ring": one.ring or None,
        "bound": one.bound,
        "busbw": one.rate * factor,
        "ring_kind": one.ring_kind,
        "nccl": one.nccl or None,
        "nccl_kind": one.nccl_kind,
        "nccl_best": one.nccl_best[0],
        "nccl_best_kind": one.nccl_best[1],
        **({} if one.jaccl is None else {"jaccl": one.jaccl[0] or None, "jaccl_kind": one.jaccl[1]}),
        "channel": one.channel,
        "class": one.number,
        "following": one.following,
        "left": one.left,
    }


def _set_lines(
    machine: RequestedMachine,
    collective: str,
    sets: Sequence[GpuSet],
    factor: float,
    options: argparse.Namespace,
) -> Iterator[str]:
    """Yield the best set and what it leaves, then classes best first, each with its sets."""
    best = sets[0]
    by_class: dict[int, list[GpuSet]] = {}
    for one in sorted(sets, key=lambda one: one.number):
        by_class.setdefault(one.number, []).append(one)
    classes = [*by_class.values()]
    if len(classes) == 1:
        best = min(sets, key=lambda one: (len(_numa_nodes(machine.whole, one)), one.gpus))
    near = _numa_nodes(machine.whole, best)
    nodes = "" if None in near else f", on {counted(len(near), 'NUMA node')}"
    count = len(best.gpus)
    free = len({gpu for one in sets for gpu in one.gpus})
    title = f"{collective_name(collective)} on {machine.whole.name}"
    if best.channel is None:
        yield f"{title}: no path joins any {count} of the {free} GPUs"
        return
    over = channel_words(best.channel.split("+"), machine.whole)
    library = "NCCL" if best.jaccl is None else "JACCL"
    if len(classes) == 1:
        chosen = f"all {free} GPUs" if free == count else f"any {count} of the {free} GPUs: all equal"
        yield f"{title}, {chosen}"
    else:
        yield f"{title}: GPUs {number_ranges(best.gpus)} are the best {count}"
    yield from labelled(
        ("algbw", f"{rate_words(best.rate, collective, count)}, over {over}"),
        ("upper bound", rate_words(best.bound, collective, count)),
        ("in-network", in_network_words(compute_bound(machine.whole, collective, gpus=best.gpus))[1]),
        ("take", f"{number_ranges(best.gpus)}{nodes}" if len(classes) == 1 and free > count else ""),
        ("leaves", _remaining_words(best, sets)),
    )
    if len(classes) == 1:
        known = dict.fromkeys((best.nccl_best, (best.nccl, best.nccl_kind)))
        if best.jaccl is not None:
            known = dict.fromkeys([best.jaccl])
        words = [f"{rate_words(rate, collective, count)} by {kind}" for rate, kind in known if rate]
        yield from labelled(
            (f"{library}'s best", words[0] if words else "no schedule here"),
            ("no NVLS", words[-1] if words[1:] else ""),
        )
        if options.members:
            yield ""
            yield gpu_set_lines("sets: ", [one.gpus for one in sets], len(sets))
        return
    columns: tuple[Column[list[GpuSet]], ...] = (
        Column("class", value=lambda group: group[0].number),
        Column("algbw", value=lambda group: group[0].rate, form=".6g"),
        Column("busbw", value=lambda group: group[0].rate * factor, form=".6g"),
        Column("upper bound", value=lambda group: group[0].bound, form=".6g"),
        Column(library, value=lambda group: (group[0].jaccl or group[0].nccl_best)[0], form=".6g"),
        Column(f"{library} algorithm", value=lambda group: (group[0].jaccl or group[0].nccl_best)[1]),
        Column("ring", value=lambda group: [one.ring for one in group], form=_rate_range),
        Column("over", value=lambda group: group[0].channel or "none"),
        Column("sets", value=len),
        Column("GPUs", value=_first_sets),
    )
    shown, left = folded(classes, DEFAULT_LINES - 11, every=options.all)
    yield f"\n{table_of(columns, shown)}"
    if left:
        sets_left = sum(map(len, classes[len(shown) :]))
        yield f"… and {left} more classes of {counted(sets_left, 'set')}, none better; --all prints them"
    yield f"{counted(len(sets), 'set')} in {len(classes)} classes with isomorphic links; --members prints the sets"
    yield "algbw in GB/s, of packed trees; NCCL: its best today; ring: of NCCL before 2.8"
    if options.members:
        yield ""
        for group in shown:
            yield gpu_set_lines(f"class {group[0].number}: ", [one.gpus for one in group], len(group))


def _numa_nodes(topology: Topology, one: GpuSet) -> set[int | None]:
    return {topology.device(topology.gpus[gpu]).numa for gpu in one.gpus}


MAX_SETS_LENGTH = 24
"""Most characters of the first sets of a class in the table."""


def _first_sets(group: Sequence[GpuSet]) -> str:
    text = "  ".join(number_ranges(one.gpus) for one in group[:2])
    first = number_ranges(group[0].gpus)
    text = text if len(text) <= MAX_SETS_LENGTH else first
    return text if len(group) <= (2 if text != first else 1) else f"{text}  …"


def _rate_range(rates: Sequence[float]) -> str:
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
        parts.append(f"{best.left:.6g}{unit} for a job of all {len(rest)}")
    return f"{parts[0]}: {', '.join(parts[1:])}" if parts[1:] else f"{parts[0]}, no pair"
