"""``topoplan calibrate``: measured bandwidth and latency of the links between the GPUs of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

import topoplan
from topoplan.calibration.apply import Calibration, Pair, calibrated
from topoplan.cli.arguments import (
    OneLineParser,
    add_allocation,
    add_json,
    add_machine,
    add_sizes,
    first_given,
    whole,
)
from topoplan.cli.output import check_target, print_json, print_notes, table, write_whole
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_topology
from topoplan.errors import UsageError
from topoplan.units import counted, format_seconds, format_size

if TYPE_CHECKING:
    from topoplan.calibration.samples import Meter
    from topoplan.topology import Topology

LINE = "measure this machine's links between GPUs"
"""For ``topoplan --help``."""

REPEATS, FEWEST, MOST = 9, 3, 1000

_OF_A_DESCRIPTION = ("nvlink_gbps", "pcie_gbps", "socket_gbps", "merge")


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``calibrate``."""
    add_machine(parser, otherwise="what topoplan probe finds")
    add_allocation(parser)
    parser.add_argument(
        "-o", metavar="F.json", dest="output", help="write the measured machine, topology JSON"
    )
    add_sizes(parser, "64KB:256MB")
    parser.add_argument(
        "--repeats",
        type=whole(FEWEST, MOST, f"number of repeats from {FEWEST} to {MOST}"),
        default=REPEATS,
        metavar="N",
        help=f"copies of each size, of which the median counts, {FEWEST} to {MOST} (default: {REPEATS})",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Time copies between every two GPUs of this machine with CuPy, fit latency and bandwidth, and write them into its
    topology. A form for processes without GPUs comes with the MPI back end.
    """
    from collectives.calibration import PeerCopies

    if options.output == "-" and options.json:
        raise UsageError("-o - and --json both print the machine; leave one out")
    check_target(options.output, "-o")
    sizes = _sizes(options.sizes)
    meter: Meter = PeerCopies()
    meter.ready()
    topology = _machine(options)
    with progress_line("measuring") as progress:
        measurement = meter.measure(
            topology, gpus=options.gpus, sizes=sizes, repeats=options.repeats, progress=progress
        )
    made = calibrated(topology, measurement, date=date.today().isoformat())
    if options.output == "-":
        print(made.topology.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, made.topology.to_json())
    if options.json:
        print_json(calibration_to_object(made))
        return 0
    _print(made)
    if options.output:
        print(f"written: {options.output}")
    return 0


def _sizes(given: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(sorted(set(given)))
    if len(sizes) < 2 or sizes[0] < 1:
        raise UsageError(
            f"--sizes {','.join(format_size(size) for size in given)[:60]}: two or more sizes above zero are needed to "
            "tell latency from bandwidth, for example 64KB:256MB"
        )
    return sizes


def _machine(options: argparse.Namespace) -> Topology:
    if options.topo is not None:
        return read_topology(options)
    given = first_given(options, dict.fromkeys(_OF_A_DESCRIPTION))
    if given:
        raise UsageError(f"{given} goes with a description of the machine; name it, or leave {given} out")
    return topoplan.probe()


def calibration_to_object(made: Calibration) -> dict[str, object]:
    """The JSON object of a calibration: bandwidths in GB/s, latencies and times in seconds."""
    measurement = made.measurement
    memory = measurement.memory
    return {
        "machine": made.topology.name,
        "source": made.topology.source,
        "method": measurement.method,
        "sizes": list(measurement.sizes),
        "repeats": measurement.repeats,
        "pairs": [_pair_to_object(pair) for pair in made.pairs],
        "peer_access": {str(gpus): seconds for gpus, seconds in measurement.peer_access},
        "memory": {"gpu": memory.gpu, "bytes": memory.nbytes, "bandwidth": memory.bandwidth}
        if memory
        else None,
        "notes": list(made.notes),
        "topology": made.topology.to_object(),
    }


def _pair_to_object(pair: Pair) -> dict[str, object]:
    fit = pair.fit
    return {
        "src": fit.src,
        "dst": fit.dst,
        "channel": pair.route.channel if pair.route else None,
        "through_host": fit.through_host,
        "latency": fit.line.alpha,
        "bandwidth": fit.line.bandwidth,
        "stated": pair.stated,
        "distance": fit.line.distance,
        "odd": pair.odd,
        "outliers": [
            {"bytes": one.nbytes, "repeat": one.repeat, "seconds": one.seconds, "median": one.median}
            for one in fit.outliers
        ],
    }


def _print(made: Calibration) -> None:
    measurement = made.measurement
    gpus = len({pair.fit.src for pair in made.pairs}) or 1
    sizes = f"{format_size(measurement.sizes[0])} to {format_size(measurement.sizes[-1])}"
    print(
        f"{made.topology.name}, {counted(gpus, 'GPU')}: {measurement.method}, {sizes}, median of {measurement.repeats}"
    )
    if made.pairs:
        print()
        print(table(HEAD, pair_rows(made.pairs)))
    if measurement.peer_access:
        times = ", ".join(
            f"{gpus} GPUs {format_seconds(seconds)}" for gpus, seconds in measurement.peer_access
        )
        print(f"\npeer access off and on: {times}")
    print_notes(*made.notes)


HEAD = ("pair", "", "channel", "us out", "us back", "GB/s out", "GB/s back", "stated", "outliers")


def pair_rows(pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """A row for every two GPUs, out and back, in the columns of `HEAD`."""
    found = {(pair.fit.src, pair.fit.dst): pair for pair in pairs}
    rows = []
    for src, dst in tuple(found):
        if {(src, dst), (dst, src)} <= found.keys():
            rows.append(_row(found[src, dst], found.pop((dst, src))))
    return rows


def _row(out: Pair, back: Pair) -> tuple[str, ...]:
    channels = dict.fromkeys(
        "host" if pair.fit.through_host else pair.route.channel if pair.route else "unknown"
        for pair in (out, back)
    )
    stated = dict.fromkeys("-" if pair.stated is None else f"{pair.stated:g}" for pair in (out, back))
    return (
        out.fit.src,
        out.fit.dst,
        "/".join(channels),
        *(f"{pair.fit.line.alpha * 1e6:.1f}" for pair in (out, back)),
        *(f"{pair.fit.line.bandwidth:.4g}" for pair in (out, back)),
        "/".join(stated),
        str(len(out.fit.outliers) + len(back.fit.outliers)),
    )
