"""Measure the links between the GPUs of this machine, ``topoplan calibrate``, and print what they carry."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import date

import topoplan
from collectives.lab.peer_copies import PeerCopies
from topoplan.cli.arguments import (
    OneLineParser,
    add_allocation,
    add_json,
    add_machine,
    add_sizes,
    declare,
    refuse_beside,
    refuse_without,
    whole_number,
)
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    folded,
    folded_line,
    note_lines,
    progress_line,
    table,
)
from topoplan.cli.sources import DESCRIPTION_OPTIONS, read_log, read_topology
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.calibrated_topology import Calibration, Pair, calibrated, method_words
from topoplan.operate.calibration.fit import Measurement, Meter
from topoplan.operate.calibration.pair_results import measured_rates
from topoplan.units import counted, format_seconds, format_size, labelled

LINE = "measure this machine's links between GPUs"
"""Line in ``topoplan --help``."""

REPEATS, MIN_REPEATS, MAX_REPEATS = 9, 3, 1000


def add_options(parser: OneLineParser) -> None:
    add_machine(parser, otherwise="the result of topoplan probe")
    add_allocation(parser)
    declare(parser, "-o F.json  write the measured machine as topology JSON")
    add_sizes(parser, "64KB:256MB")
    declare(
        parser,
        f"""
        --repeats N  copies of each size, {MIN_REPEATS} to {MAX_REPEATS}; their median counts (default: {REPEATS})
        """,
        repeats={
            "type": whole_number(
                MIN_REPEATS, MAX_REPEATS, f"number of repeats from {MIN_REPEATS} to {MAX_REPEATS}"
            ),
            "default": REPEATS,
        },
    )
    declare(
        parser,
        """
        --results FILE  in place of a measurement: output of p2pBandwidthLatencyTest or nvbandwidth on TOPO, or - for
                        stdin
        --all           print every pair
        """,
    )
    add_json(parser)
    parser.examples = (
        "topoplan calibrate -o measured.json",
        "topoplan calibrate --gpus 0-3 --sizes 64KB:64MB",
        "topoplan calibrate topo.txt --results p2p.log -o measured.json",
    )


def run(options: argparse.Namespace) -> Answer:
    """Time copies between all pairs of GPUs of this machine with CuPy, and write the fitted links into its topology.

    With ``--results`` the rates are those of another program's output.
    """
    if options.results is not None:
        return _answer(options, *_of_results(options))
    sizes = _copy_sizes(options.sizes)
    meter: Meter = PeerCopies()
    meter.ready()
    topology = _calibrated_machine(options)
    with progress_line("measuring") as progress:
        measurement = meter.measure(
            topology, gpus=options.gpus, sizes=sizes, repeats=options.repeats, progress=progress
        )
    return _answer(options, topology, measurement)


def _of_results(options: argparse.Namespace) -> tuple[Topology, Measurement]:
    """Return the machine of TOPO and the rates that another program measured on it."""
    if options.topo is None:
        raise UsageError("--results needs the machine that was measured; name it as TOPO")
    if options.results == options.topo == "-":
        raise UsageError("stdin is read once; give a file to TOPO or --results")
    refuse_beside(options, "--results", {"gpus": None, "repeats": REPEATS})
    topology = read_topology(options)
    try:
        return topology, measured_rates(read_log(options.results), topology)
    except UsageError as error:
        raise UsageError(f"{'stdin' if options.results == '-' else options.results}: {error}") from None


def _answer(options: argparse.Namespace, topology: Topology, measurement: Measurement) -> Answer:
    made = calibrated(topology, measurement, date=date.today().isoformat())
    return Answer(
        text=lambda: _calibration_lines(made, every=options.all),
        value=lambda: calibration_to_object(made),
        file=made.topology.to_json,
    )


def _copy_sizes(given: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(sorted(set(given)))
    if len(sizes) < 2 or sizes[0] < 1:
        raise UsageError(
            f"--sizes {','.join(format_size(size) for size in given)[:60]}: two or more sizes above zero are needed to "
            "tell latency from bandwidth, for example 64KB:256MB"
        )
    return sizes


def _calibrated_machine(options: argparse.Namespace) -> Topology:
    if options.topo is not None:
        return read_topology(options)
    refuse_without(options, dict.fromkeys(DESCRIPTION_OPTIONS, "TOPO"))
    return topoplan.probe()


def calibration_to_object(made: Calibration) -> dict[str, object]:
    """Return the JSON object of a calibration: bandwidths in GB/s, latencies and times in seconds."""
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
        "push": fit.access[0] if fit.access else None,
        "pull": fit.access[1] if fit.access else None,
        "latency": None if fit.rate_only else fit.line.alpha,
        "bandwidth": fit.line.bandwidth,
        "stated": pair.stated,
        "distance": fit.line.distance,
        "odd": pair.odd,
        "outliers": [
            {"bytes": one.nbytes, "repeat": one.repeat, "seconds": one.seconds, "median": one.median}
            for one in fit.outliers
        ],
    }


def _calibration_lines(made: Calibration, *, every: bool) -> Iterator[str]:
    """Yield the range of bandwidths, then the pairs, odd ones first, and what was found."""
    measurement = made.measurement
    gpus = len({name for pair in made.pairs for name in (pair.fit.src, pair.fit.dst)}) or 1
    where = f"{made.topology.name}, {counted(gpus, 'GPU')}"
    if made.pairs:
        rates = sorted(pair.fit.line.bandwidth for pair in made.pairs)
        odd = sum(bool(pair.odd) for pair in made.pairs)
        off = f"{odd} off the median of their kind" if odd else "none off the median of its kind"
        where += f": {rates[0]:.4g} to {rates[-1]:.4g} GB/s, of {len(rates)} directed pairs {off}"
    yield where
    peers = ", ".join(f"{gpus} GPUs {format_seconds(seconds)}" for gpus, seconds in measurement.peer_access)
    notes = [*note_lines(*made.notes)]
    yield from labelled(
        ("method", method_words(measurement)),
        ("peer access", f"off and on: {peers}" if peers else ""),
    )
    if made.pairs:
        rows = pair_rows(made.pairs if every else sorted(made.pairs, key=lambda pair: not pair.odd))
        shown, left = folded(rows, DEFAULT_LINES - len(notes) - 6, every=every)
        yield ""
        yield table(PAIR_COLUMNS, shown)
        yield from folded_line(left, "pair")
    yield from notes


PAIR_COLUMNS = ("pair", "", "channel", "us out", "us back", "GB/s out", "GB/s back", "stated", "outliers")


def pair_rows(pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Return a row for every two GPUs, out and back, in the columns of `PAIR_COLUMNS`."""
    found = {(pair.fit.src, pair.fit.dst): pair for pair in pairs}
    rows = []
    for ends in tuple(found):
        if ends in found:
            rows.append(_pair_row(found.pop(ends), found.pop(ends[::-1], None)))
    return rows


def _pair_row(out: Pair, back: Pair | None) -> tuple[str, ...]:
    """Return a row; without a way back, on which no copy ended, it has dashes."""
    both = [pair for pair in (out, back) if pair]
    channels = dict.fromkeys(
        "host" if pair.fit.through_host else pair.route.channel if pair.route else "unknown" for pair in both
    )
    stated = dict.fromkeys("-" if pair.stated is None else f"{pair.stated:g}" for pair in both)
    return (
        out.fit.src,
        out.fit.dst,
        "/".join(channels),
        *(
            f"{pair.fit.line.alpha * 1e6:.1f}" if pair and not pair.fit.rate_only else "-"
            for pair in (out, back)
        ),
        *(f"{pair.fit.line.bandwidth:.4g}" if pair else "-" for pair in (out, back)),
        "/".join(stated),
        str(sum(len(pair.fit.outliers) for pair in both)),
    )
