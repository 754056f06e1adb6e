"""Diagnose a machine and the cost of each of its faults for ``topoplan check``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import Answer, note_lines, printable, progress_line, table
from topoplan.cli.sources import DESCRIPTION_OPTIONS, apply_machine_options, read_machine
from topoplan.errors import kind_of
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
    add_all_options(parser)
    parser.examples = (
        "topoplan check",
        "topoplan check topo.txt --overlay nvlink-status.txt",
        "topoplan check dgx-1v --without-link gpu0-gpu3",
    )


def run(options: argparse.Namespace) -> Answer:
    """Diagnose a machine and print the cost of each fault; exit status 1 if there is any."""
    found = diagnose(_machine(options))
    asked = dict.fromkeys((DEFAULT_COLLECTIVE, options.collective))
    with progress_line("planning") as progress:
        costs = {collective: costs_of(found, collective, progress=progress) for collective in asked}
    return Answer(
        text=lambda: _lines(found, costs),
        value=lambda: _object(found, costs),
        status=0 if found.healthy else 1,
    )


def _machine(options: argparse.Namespace) -> Topology:
    """Return the machine of TOPO, or this one."""
    if options.topo is not None:
        return read_machine(options).topology
    arguments.refuse_without(options, dict.fromkeys(DESCRIPTION_OPTIONS, "TOPO"))
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


def _lines(found: Diagnosis, costs: dict[str, tuple[Cost, ...]]) -> Iterator[str]:
    gpus = len(found.topology.gpus)
    verdict = "healthy" if found.healthy else counted(len(found.faults), "fault")
    yield f"{printable(found.topology.name)}, {counted(gpus, 'GPU')}: {verdict}"
    yield f"resembles  {_resembles(found)}"
    for collective, each in costs.items():
        if each:
            now, healthy = (
                f"{rate:.6g} GB/s{bus_words(rate, collective, gpus)}"
                for rate in (each[0].now, each[0].healthy)
            )
            yield f"{collective}  now {now}; healthy {healthy}"
    if found.faults:
        yield ""
        yield _table(found.faults, costs)
    notes = _other_notes(found)
    if notes:
        yield ""
        yield from note_lines(*notes)


def _other_notes(found: Diagnosis) -> list[str]:
    """Return the notes of the machine that are not faults by themselves."""
    reported = {fault.state for fault in found.faults if fault.kind == "told"}
    return [
        note
        for note in found.topology.notes
        if kind_of(note) != "filled in" and (kind_of(note) != "warning" or warning_text(note) not in reported)
    ]


def _resembles(found: Diagnosis) -> str:
    if not found.resembles:
        return "no machine of the library; it was compared with itself"
    servers = max(1, len(found.topology.servers))
    whole = found.parts * servers
    if len(found.topology.gpus) == whole:
        return found.resembles if servers == 1 else f"{found.resembles}, {servers} servers"
    return f"{found.resembles}, of which {len(found.topology.gpus)} of {whole} GPUs are here"


_TEXTS = {"devices": ("where", 30), "is": ("state", 32), "should be": ("should_be", 30)}
"""Columns of text with the attribute of the fault and most characters; a longer one stands in full below the table."""


def _table(faults: Sequence[Fault], costs: dict[str, tuple[Cost, ...]]) -> str:
    """Return a row for each fault; ``alone`` is the rate of the machine with this fault and no other."""
    rated = [collective for collective, each in costs.items() if each]
    rows, cut = [], []
    for i, fault in enumerate(faults):
        texts = [(printable(getattr(fault, name)), widest) for name, widest in _TEXTS.values()]
        short = [text if len(text) <= widest else f"{text[: widest - 1]}…" for text, widest in texts]
        rows.append((fault.kind, *short, *(f"{costs[name][i].alone:.6g}" for name in rated)))
        if short != [text for text, _ in texts]:
            cut += textwrap.wrap(printable(f"{fault.kind}: {fault.text}"), 118, subsequent_indent="  ")
    shown = table(("kind", *_TEXTS, *(f"{name} alone" for name in rated)), rows)
    return "\n".join([shown, *(["", *dict.fromkeys(cut)] if cut else [])])
