"""Compare packed trees with rings for ``topoplan compare``, and two descriptions of a machine for ``topoplan diff``.

``compare`` takes one allocation or all of a machine. ``diff`` lists what differs device by device and which difference
changes the bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options, add_cluster_options, apply_cluster_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    MAX_COLUMNS,
    Answer,
    Column,
    expected_words,
    folded,
    folded_line,
    gpu_set_lines,
    microseconds,
    note_lines,
    progress_line,
    rank_names,
    records_of,
    table,
    table_of,
    terminal_width,
)
from topoplan.cli.sources import (
    MOST_LISTED_INSTEAD,
    is_torus_name,
    may_be_large,
    printable_machine,
    read_machine,
    refuse_listing,
)
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.machine.topology import Topology
from topoplan.operate.compare.comparison import compare, compare_all
from topoplan.operate.compare.costs import ServerCosts, WithoutServer, without_each_server
from topoplan.operate.compare.differences import COLLECTIVES, Difference, Differences, differences
from topoplan.operate.compare.recommendation import MOST_SETS
from topoplan.operate.compare.table import (
    EQUAL,
    HEADS,
    NO_RING,
    Comparison,
    beats_library,
    format_table,
    summary,
    to_object,
)
from topoplan.plans.plan import ALL_TO_ALL, check_collective, collective_name
from topoplan.reading.load import load
from topoplan.reading.registry import RATES
from topoplan.units import bus_factor, counted, format_size, labelled, name_ranges, number_ranges, rate_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.model.expected_times import Quickest


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.declare(
        parser,
        """
        --all-allocations      every allocation of 2 or more GPUs (of --gpus if given), up to isomorphism
        --gpu-counts LIST      with --all-allocations, only allocations of these numbers of GPUs, such as 3-8
        --without-each-server  on a cluster, the cost of losing each server
        """,
        gpu_counts=arguments.gpu_list,
    )
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.add_channels(parser)
    arguments.add_plot(parser, "the rates as bars")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    arguments.declare(
        parser,
        """
        --all      with --all-allocations, print every class, and every column
        --members  with --all-allocations, print the allocations of each class
        """,
    )
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan compare dgx-1v --gpus 1,4,5,7",
        "topoplan compare dgx-1v --all-allocations --gpu-counts 3-4",
        "topoplan compare dgx-a100 --servers 2 --nic-bandwidth 200Gb/s",
    )


SIZES = tuple(1 << power for power in range(10, 31))
"""Sizes among which the quickest implementation is looked for: 1 KB to 1 GB."""

OMITTED_COLUMNS = ("collective", "notes", "others", "allocations", "quickest")
"""Keys of a row in JSON that are not columns of the CSV, or are its last column."""


def _renumber_row(row: Comparison, inside: Sequence[int]) -> Comparison:
    named = tuple(tuple(inside[gpu] for gpu in gpus) for gpus in (row.gpus, *row.allocations))
    return replace(row, gpus=named[0], allocations=named[1:])


def _rows(rows: Sequence[Comparison]) -> list[dict[str, object]]:
    made = cast("list[dict[str, object]]", to_object(rows)["rows"])
    heads = [name for name in made[0] if name not in OMITTED_COLUMNS] if made else ["gpus"]
    return [
        {
            "gpus": number_ranges(row.gpus),
            **{name: values[name] for name in heads[1:]},
            "allocations": " ".join(map(number_ranges, row.allocations)),
        }
        for row, values in zip(rows, made, strict=True)
    ]


def run(options: argparse.Namespace) -> Answer:
    """Compare packed trees with rings and NCCL's algorithms: rates, upper bound and ratio."""
    collective = check_collective(options.collective)
    arguments.refuse_without(options, {"gpu_counts": "--all-allocations"})
    if options.all_allocations:
        arguments.refuse_beside(
            options, "--all-allocations", {"root": None, "channels": "auto", "size": None}
        )
    if options.without_each_server:
        given = {"all_allocations": False, "root": None, "size": None, "plot": None}
        arguments.refuse_beside(options, "--without-each-server", given)
        remedy = "topoplan plan --survive 1 takes each failure of a large cluster by its kinds of servers"
        refuse_listing(options, MOST_LISTED_INSTEAD, "plans without each server", remedy)
        return _without_each_server(options, collective)
    if (may_be_large(options) or is_torus_name(options)) and not options.all_allocations:
        from topoplan.cli import large_cluster

        large = large_cluster.requested_plan(options, ("plot", "in_network"))
        if large is not None:
            return large_cluster.run_comparison(options, large)
    if options.all_allocations:
        remedy = "choose some with --gpus, or compare one server"
        refuse_listing(options, MOST_LISTED_INSTEAD, "allocations", remedy)
    machine = read_machine(options)
    topology = machine.whole
    rows: tuple[Comparison, ...]
    with progress_line("comparing") as progress:
        if options.all_allocations:
            inside = tuple(sorted(topology.select(machine.allocation(options.gpus) or machine.left)))
            found = compare_all(
                topology.subset(inside) if inside else topology,
                collective,
                sizes=options.gpu_counts,
                most_listed=MOST_SETS,
                progress=progress,
            )
            rows = tuple(_renumber_row(row, inside) for row in found)
        else:
            one = compare(
                topology,
                collective,
                gpus=machine.allocation(options.gpus),
                root=options.root,
                channels=options.channels,
                nbytes=options.size,
                sizes=SIZES,
            )
            rows = (one,)
    if options.plot and not any(math.isfinite(row.trees) for row in rows):
        raise UsageError("nothing moves on a single GPU, so there are no bars to draw; leave out --plot")
    title = f"{collective_name(collective)} on {topology.name}"

    def figure() -> Figure:
        from topoplan.operate.plot.charts import draw_comparison

        return draw_comparison(rows, title=title)

    best_first = rows
    if options.all_allocations:
        best_first = tuple(
            sorted(rows, key=lambda row: (len(row.gpus), -row.trees, -row.bound, -row.ring, row.gpus))
        )
    named = {"machine": topology.name, "collective": collective, "notes": list(topology.notes)}
    return Answer(
        text=lambda: (
            _class_lines(title, best_first, options) if options.all_allocations else _lines(topology, rows[0])
        ),
        value=lambda: {**named, **to_object(best_first)},
        rows=lambda: _rows(best_first),
        figure=figure,
        notes=(*topology.notes, *(() if options.all_allocations else rows[0].notes)),
    )


def _lines(topology: Topology, row: Comparison) -> Iterator[str]:
    """Yield the verdict on one allocation, the rate of the trees, and a row for each other schedule."""
    ranks = len(row.gpus)
    names = rank_names([topology.gpus[gpu] for gpu in row.gpus])
    where = f"{collective_name(row.collective)} on {topology.name}, {counted(ranks, 'GPU')} ({names})"
    if not math.isfinite(row.trees):
        yield f"{where}: a single GPU sends nothing"
        return
    noun = "path" if row.collective == ALL_TO_ALL else "tree"
    over = channel_words((row.channel or "").split("+"), topology)
    yield f"{where}, over {over}: {_beside_nccl(row, f'{noun}s')}"

    def both(rate: float) -> str:
        return rate_words(rate, row.collective, ranks)

    yield from labelled(
        ("algbw", f"{both(row.trees)}, {counted(row.tree_count, noun)} of height {row.height}"),
        ("upper bound", both(row.bound)),
        (
            "in-network",
            f"{both(row.in_network)} if switches add, as NVLS does (--in-network nvswitch plans it)"
            if row.in_network
            else "",
        ),
    )
    factor = bus_factor(row.collective, ranks)
    if row.schedules:
        yield ""
        yield table(
            ("schedule", "algbw", "busbw", f"{noun}s / it"),
            [
                (name, f"{rate:.2f}", f"{rate * factor:.2f}", f"{row.trees / rate:.2f}x")
                for name, rate in row.schedules
            ],
        )
    if row.quickest:
        yield ""
        yield table_of(QUICKEST, row.quickest)
        yield f"quickest: {expected_words(row.quickest[-1])}"


QUICKEST: tuple[Column[Quickest], ...] = (
    Column("from", value="nbytes", form=format_size),
    Column("quickest", value="implementation"),
    Column("us", value="seconds", form=microseconds),
    Column("ours us", value="ours", form=microseconds),
    Column("NCCL us", value=lambda one: one.nccl and one.nccl.seconds, form=microseconds),
    Column("NCCL runs", value=lambda one: one.nccl and one.nccl.runs),
)


def _beside_nccl(row: Comparison, trees: str) -> str:
    """Return how the trees, or paths, do beside NCCL's best, or beside JACCL's on Apple's GPUs."""
    ratio, (_, kind) = row.library_ratio, row.library_best
    if kind == NO_RING or ratio is None:
        return f"{row.library} has no schedule here"
    rival = f"NCCL's best ({kind})" if row.jaccl is None else kind
    return beside_rival(trees, ratio, rival, inverse=kind == row.nccl_nvls_kind)


def beside_rival(trees: str, ratio: float, rival: str, *, inverse: bool = True) -> str:
    """Return how the trees do beside a rival; with ``inverse``, how the rival does beside them if it is faster."""
    if abs(ratio - 1) <= EQUAL:
        return f"{trees} and {rival} are equally fast"
    if ratio < 1 and inverse:
        return f"{rival} is {1 / ratio:.2f}x the {trees}"
    return f"{trees} do {ratio:.2f}x {rival}"


def _class_lines(title: str, rows: Sequence[Comparison], options: argparse.Namespace) -> Iterator[str]:
    """Yield the summary, then the classes where trees beat NCCL's or JACCL's best, or all of them."""
    library = next((row.library for row in rows if row.jaccl is not None), "NCCL")
    faster = [row for row in rows if beats_library(row)]
    whole = summary(rows)
    if faster:
        most = max(row.library_ratio or 0.0 for row in faster)
        yield (
            f"{title}: trees beat {library}'s best in {len(faster)} of {counted(len(rows), 'class')} of allocations, "
            f"by up to {most:.2f}x"
        )
    else:
        yield f"{title}: trees beat {library}'s best in none of {counted(len(rows), 'class')} of allocations"
    yield f"{whole}"
    over_nvlink = [row for row in rows if row.channel == "nvlink"]
    if options.all and 0 < len(over_nvlink) < len(rows):
        yield f"\nof these, over NVLink:\n{summary(over_nvlink)}"
    # without the blank line, the head, its legend, the hint and the notes
    most = DEFAULT_LINES - 7 - len(str(whole).splitlines())
    shown, left = folded(faster or rows, most, every=options.all)
    if options.all:
        yield f"\n{format_table(rows, widest=terminal_width() or MAX_COLUMNS)}\n{HEADS}"
    elif shown:
        yield f"\n{table_of(_columns(library), shown)}"
        if left:
            yield f"… and {left} more"
        yield f"algbw in GB/s; allocations: how many have isomorphic links; trees / {library}: over its best"
    if options.members:
        yield ""
        for row in shown:
            yield gpu_set_lines(f"as {number_ranges(row.gpus)}: ", row.allocations, row.members)
    elif not options.all:
        yield f"--all prints all {len(rows)} classes, --members the allocations of each, --csv every column"


def _columns(library: str) -> tuple[Column[Comparison], ...]:
    """Return the columns of the classes where trees beat the best of a library."""
    return (
        Column("GPUs", value="gpus", form=number_ranges),
        Column("allocations", value="members"),
        Column("over", value="channel"),
        Column("trees", value="trees", form=".2f"),
        Column("busbw", value=lambda row: row.trees * bus_factor(row.collective, len(row.gpus)), form=".2f"),
        Column("upper bound", value="bound", form=".2f"),
        Column(library, value=lambda row: row.library_best[0], form=".2f"),
        Column(f"{library} algorithm", value=lambda row: row.library_best[1]),
        Column(f"trees / {library}", value="library_ratio", form="{:.2f}x".format),
        Column("ring", value=lambda row: row.ring or None, form=".2f"),
    )


def _without_each_server(options: argparse.Namespace, collective: str) -> Answer:
    machine = read_machine(options)
    with progress_line("comparing") as progress:
        found = without_each_server(
            machine.whole,
            collective,
            gpus=machine.allocation(options.gpus),
            channels=options.channels,
            progress=progress,
        )
    every = (found.whole, *found.rows)
    shown, left = folded(every, DEFAULT_LINES - 6 - len(found.slow), every=options.all)
    notes = [
        f"{_server_words(row.servers) or 'all'}: {100 * row.gap:.2f} % below the upper bound"
        for row in every
        if row.gap
    ]
    return Answer(
        text=lambda: [
            *_server_verdict(f"{collective_name(collective)} on {machine.whole.name}", found),
            "",
            table_of(_server_columns(found), shown),
            *folded_line(left, "server"),
        ],
        value=lambda: costs_to_object(found, machine.whole),
        rows=lambda: records_of(_server_columns(found), every),
        notes=(*machine.whole.notes, *notes),
    )


def _server_columns(found: ServerCosts) -> tuple[Column[WithoutServer], ...]:
    """Return the columns of the rates without one server of each class; the first row is the whole machine."""

    def gain(row: WithoutServer) -> str:
        return "" if row is found.whole else f"{found.gain(row):.2f}x" if row.rate else "no path"

    def positive(rate: float) -> str:
        return f"{rate:.4g}" if rate else "-"

    return (
        Column("servers", "servers", lambda row: list(row.servers), _all_but),
        Column("GPUs", "gpus"),
        Column("algbw", "rate", form=positive),
        Column("busbw", "busbw", "bus", positive),
        Column(None, "gap"),
        Column(None, "gain", found.gain),
        Column("of all", value=gain),
    )


def _server_verdict(title: str, found: ServerCosts) -> Iterator[str]:
    """Yield whether a server slows the others down, a line for each that does."""
    least = found.rows[-1].rate
    fewer = f"; without any other {least:.4g}" if least > found.whole.rate and len(found.rows) == 2 else ""
    if not found.slow:
        yield f"{title}: no server by itself slows the others down"
        return
    names = ", ".join(row.servers[0] for row in found.slow[:3])
    yield f"{title}: {names} {'slows' if len(found.slow) == 1 else 'slow'} the others down"
    for row in found.slow:
        yield f"without {row.servers[0]} algbw {row.rate:.4g} GB/s, with it {found.whole.rate:.4g}{fewer}"


def _server_words(names: Sequence[str]) -> str:
    """Return the name of a server, or of a class of equivalent servers."""
    return names[0] if len(names) == 1 else f"one of {', '.join(name_ranges(names))}" if names else ""


def _all_but(names: Sequence[str]) -> str:
    return f"all but {_server_words(names)}" if names else "all"


def costs_to_object(found: ServerCosts, topology: Topology) -> dict[str, object]:
    """Return the JSON object of the costs of servers; rates in GB/s, 0 if the remaining GPUs are not connected."""
    whole, *rows = records_of(_server_columns(found), (found.whole, *found.rows))
    return {
        "machine": topology.name,
        "collective": found.collective,
        "all": whole,
        "without": rows,
        "notes": list(topology.notes),
    }


MAX_NAMED, MAX_NAMES_LENGTH, MAX_CELLS = 4, 44, (20, 36, 17, 17)
"""Most devices or links in a row, most characters of their names, and of each cell without ``--all``."""

_RATE_OPTIONS = RATES


def add_diff_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.declare(parser, "other TOPO2  the other description (B; TOPO is A), or - for stdin")
    arguments.add_json(parser)
    arguments.declare(parser, "--all  print every difference")
    add_cluster_options(parser)
    parser.examples = (
        "topoplan diff dgx-1v topo.txt",
        "topoplan diff dgx-1v dgx-1p",
        "topoplan diff dgx-1v dgx-1p --servers 2 --nic-bandwidth 100Gb/s",
    )


def run_diff(options: argparse.Namespace) -> Answer:
    """Compare two descriptions of a machine device by device; exit status 0 if they are equal, 1 if not.

    Upper bounds are of all_reduce and all_gather on all GPUs; with --servers, of a cluster of the machine.
    """
    if options.topo == "-" and options.other == "-":
        raise UsageError("stdin is read once; give one of the two a file")
    if options.merge is not None:
        raise UsageError(
            "--merge changes one of the two; merge them with topoplan show TOPO --merge TOPO2 first"
        )
    first, second = _read_machines(options)
    with progress_line("comparing"):
        found = differences(first, second, placed=lambda machine: apply_cluster_options(options, machine))
    placed = [apply_cluster_options(options, one) for one in (first, second)]
    size = [len(one.select(None)) if one.gpus else 0 for one in placed]
    sources = (options.topo, options.other)
    names = [one.name if isinstance(one, Topology) else "stdin" if one == "-" else one for one in sources]
    return Answer(
        text=lambda: _difference_lines(found, size, names, options),
        value=lambda: differences_to_object(found, size),
        status=1 if found.rows else 0,
    )


def _read_machines(options: argparse.Namespace) -> tuple[Topology, Topology]:
    """Read both machines; the rates on the command line apply to the machine that needs them."""
    rates = {name: getattr(options, name) for name in _RATE_OPTIONS if getattr(options, name) is not None}
    read = []
    refused: list[UsageError] = []
    for source in (options.topo, options.other):
        try:
            read.append(load(source, **rates))
        except UsageError as error:
            if not rates or source == "-":
                raise
            read.append(load(source))
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    first, second = map(printable_machine, read)
    return first, second


def differences_to_object(found: Differences, size: Sequence[int]) -> dict[str, object]:
    """Return the JSON object of a comparison; bounds in GB/s of algorithm bandwidth, 0 if the GPUs are not
    connected.
    """
    sides = zip("ab", (found.a, found.b), size, (found.bounds_a, found.bounds_b), strict=True)
    return {
        **{
            side: {
                "machine": machine.name,
                "gpus": gpus,
                "bound": dict(zip(COLLECTIVES, bounds, strict=True)),
            }
            for side, machine, gpus, bounds in sides
        },
        "equal": not found.rows,
        "differences": [
            {
                "what": row.what,
                "names": list(row.names),
                "a": row.a,
                "b": row.b,
                "bound": None if row.bounds is None else dict(zip(COLLECTIVES, row.bounds, strict=True)),
                "changes_bound": found.changes(row),
            }
            for row in found.rows
        ],
    }


MAX_NAME_LENGTH, MAX_TITLE_LENGTH = 60, 28
"""Most characters of a machine's name in the table and in the verdict; a longer path loses its beginning."""


def _difference_lines(
    found: Differences, size: Sequence[int], names: Sequence[str], options: argparse.Namespace
) -> Iterator[str]:
    changing = sum(map(found.changes, found.rows))
    short = [_cut_front(name, MAX_NAME_LENGTH) for name in names]
    if found.rows:
        alone = "changes the upper bound alone" if changing == 1 else "change the upper bound alone"
        verdict = f"{counted(len(found.rows), 'difference')}, {changing or 'none'} of which {alone}"
    else:
        verdict = "no difference"
    yield f"{_cut_front(names[0], MAX_TITLE_LENGTH)} and {_cut_front(names[1], MAX_TITLE_LENGTH)}: {verdict}"
    yield ""
    sides = [
        (side, name, str(gpus), *_both_bandwidths(bounds, gpus))
        for side, name, gpus, bounds in zip("AB", short, size, (found.bounds_a, found.bounds_b), strict=True)
    ]
    heads = [head for collective in COLLECTIVES for head in (f"{collective_name(collective)} bound", "busbw")]
    yield table(("", "machine", "GPUs", *heads), sides)
    notes = []
    if any(row.what.startswith("bus id") for row in found.rows):
        notes.append(
            "NCCL finds GPUs and NICs of a topology file by bus id, and ignores bus ids that it does not have"
        )
    if found.bounds_a != found.bounds_b and not changing:
        notes.append("the bounds differ, and no difference by itself makes that: they do together")
    if found.rows:
        rows, left = folded(found.rows, DEFAULT_LINES - 8 - len(notes), every=options.all)
        yield "\nupper bound of A with one difference only"
        cells = []
        for row in rows:
            texts = [row.what, _device_names(row), row.a, row.b]
            if not options.all:
                texts = [*map(_cut, texts, MAX_CELLS)]
            cells.append((*texts, *_bound_change(found, row)))
        yield table(("what", "which", "in A", "in B", *map(collective_name, COLLECTIVES)), cells)
        yield from folded_line(left, "difference")
    yield from note_lines(*notes)


def _cut_front(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _both_bandwidths(bounds: Sequence[float], gpus: int) -> list[str]:
    """Return algorithm and bus bandwidth of each collective."""
    cells = []
    for collective, rate in zip(COLLECTIVES, bounds, strict=True):
        cells += [f"{rate:.4g}", f"{rate * bus_factor(collective, gpus):.4g}"] if rate else ["-", "-"]
    return cells


def _bound_change(found: Differences, row: Difference) -> list[str]:
    if row.bounds is None or not found.changes(row):
        return ["same"] * len(COLLECTIVES)
    return [f"{rate:.4g}" if rate else "no path" for rate in row.bounds]


def _device_names(row: Difference) -> str:
    if not any("-" in name or ">" in name or " " in name for name in row.names):
        short = ", ".join(name_ranges(row.names))
        if len(short) <= MAX_NAMES_LENGTH:
            return short
    kept: list[str] = []
    for named in row.names[:MAX_NAMED]:
        first, beside, others = named.partition(" with ")
        name = f"{first}{beside}{', '.join(name_ranges(others.split(', ')))}" if beside else first
        if kept and len(", ".join([*kept, name])) > MAX_NAMES_LENGTH:
            break
        kept.append(name)
    more = len(row.names) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")
