"""Diagnose a machine and the cost of each of its faults for ``topoplan check``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_cluster_options, add_fault_options
from topoplan.cli.output import print_json, print_notes, printable, progress_line, table
from topoplan.cli.sources import apply_machine_options, read_machine
from topoplan.errors import UsageError, kind_of
from topoplan.machine.topology import Topology
from topoplan.operate.compare.costs import Cost, costs_of
from topoplan.operate.diagnosis import Diagnosis, diagnose, warning_text
from topoplan.operate.faults import Fault
from topoplan.reading.probe import probe
from topoplan.units import bus_words, counted

DEFAULT_COLLECTIVE = "allreduce"
"""The collective whose cost is always printed."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, otherwise="this machine, as topoplan probe reads it")
    arguments.add_collective(parser)
    arguments.add_json(parser)
    add_cluster_options(parser)
    add_fault_options(parser)


def run(options: argparse.Namespace) -> int:
    """Diagnose a machine and print the cost of each fault; exit status 1 if there is any."""
    found = diagnose(_machine(options))
    asked = dict.fromkeys((DEFAULT_COLLECTIVE, options.collective))
    with progress_line("planning") as progress:
        costs = {collective: costs_of(found, collective, progress=progress) for collective in asked}
    if options.json:
        print_json(_object(found, costs))
    else:
        _print(found, costs)
    return 0 if found.healthy else 1


def _machine(options: argparse.Namespace) -> Topology:
    """Return the machine of TOPO, or this one."""
    if options.topo is not None:
        return read_machine(options).topology
    given = arguments.first_set_option(
        options, dict.fromkeys(("nvlink_gbps", "pcie_gbps", "socket_gbps", "merge"))
    )
    if given:
        raise UsageError(f"{given} belongs to a description; give TOPO, or leave {given} out")
    return apply_machine_options(options, probe()).topology


def _object(found: Diagnosis, costs: dict[str, tuple[Cost, ...]]) -> dict[str, object]:
    """Return the object that ``--json`` prints; a machine of less than two GPUs has no rates."""
    return {
        "healthy": found.healthy,
        "machine": found.topology.name,
        "resembles": found.resembles or None,
        "faults": [
            {
                "kind": fault.kind,
                "devices": list(fault.devices),
                "servers_alike": list(fault.servers),
                "is": fault.state,
                "should_be": fault.should_be,
                "cost": {
                    collective: {"now": each[i].now, "healthy": each[i].healthy, "alone": each[i].alone}
                    for collective, each in costs.items()
                    if each
                },
            }
            for i, fault in enumerate(found.faults)
        ],
        "notes": _other_notes(found),
    }


def _print(found: Diagnosis, costs: dict[str, tuple[Cost, ...]]) -> None:
    gpus = len(found.topology.gpus)
    print(f"{printable(found.topology.name)}, {counted(gpus, 'GPU')}: {_verdict(found)}")
    print(f"resembles  {_resembles(found)}")
    for collective, each in costs.items():
        if each:
            now, healthy = (
                f"{rate:.6g} GB/s{bus_words(rate, collective, gpus)}"
                for rate in (each[0].now, each[0].healthy)
            )
            print(f"{collective}  now {now}; healthy {healthy}")
    if found.faults:
        print()
        print(_table(found.faults, costs))
    notes = _other_notes(found)
    if notes:
        print()
        print_notes(*notes)


def _other_notes(found: Diagnosis) -> list[str]:
    """Return the notes of the machine that are not faults by themselves."""
    reported = {fault.state for fault in found.faults if fault.kind == "told"}
    return [
        note
        for note in found.topology.notes
        if kind_of(note) != "filled in" and (kind_of(note) != "warning" or warning_text(note) not in reported)
    ]


def _verdict(found: Diagnosis) -> str:
    return "healthy" if found.healthy else f"{counted(len(found.faults), 'fault')}"


def _resembles(found: Diagnosis) -> str:
    if not found.resembles:
        return "no machine of the library; it was compared with itself"
    servers = max(1, len(found.topology.servers))
    whole = found.parts * servers
    if len(found.topology.gpus) == whole:
        return found.resembles if servers == 1 else f"{found.resembles}, {servers} servers"
    return f"{found.resembles}, of which {len(found.topology.gpus)} of {whole} GPUs are here"


_MAX_WIDTHS = {"devices": 30, "is": 32, "should be": 30}
"""Most characters of a cell; the full text of a longer one stands below the table."""


def _table(faults: Sequence[Fault], costs: dict[str, tuple[Cost, ...]]) -> str:
    """Return a row for each fault; ``alone`` is the rate of the machine with this fault and no other."""
    rated = [collective for collective, each in costs.items() if each]
    header = ("kind", *_MAX_WIDTHS, *(f"{name} alone" for name in rated))
    rows = []
    cut = []
    for i, fault in enumerate(faults):
        texts = dict(zip(_MAX_WIDTHS, (fault.where, fault.state, fault.should_be), strict=True))
        cells = [_shorten(text, _MAX_WIDTHS[title]) for title, text in texts.items()]
        rows.append((fault.kind, *cells, *(f"{costs[name][i].alone:.6g}" for name in rated)))
        if any(len(printable(text)) > _MAX_WIDTHS[title] for title, text in texts.items()):
            cut += textwrap.wrap(printable(f"{fault.kind}: {fault.text}"), 118, subsequent_indent="  ")
    return "\n".join([table(header, rows), *(["", *dict.fromkeys(cut)] if cut else [])])


def _shorten(text: str, widest: int) -> str:
    text = printable(text)
    return text if len(text) <= widest else f"{text[: widest - 1]}…"
