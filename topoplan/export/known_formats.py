"""The formats that plans and machines can be exported to: one table, and the two functions that look into it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.export.exported import Exported
from topoplan.export.nccl.graph import machine_graph_xml, plan_graph_xml
from topoplan.export.nccl.topo import nccl_topo_xml
from topoplan.plans.plan import Plan, Plans
from topoplan.topology import Topology, TopologyLike, as_topology


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Parameters
    ----------
    line : str
        What it is, for the help.
    of_machine : function of a Topology and the name of a server or None
        Which of several servers; None where the machine has one.
    of_plan : function of a Plan
    """

    line: str
    of_machine: Callable[[Topology, str | None], Exported]
    of_plan: Callable[[Plan], Exported]


FORMATS = {
    "nccl-graph": Format(
        "NCCL_GRAPH_FILE: a plan of rings or of chains, or the best rings and chains of a machine; NCCL cannot run "
        "packed trees inside a server",
        lambda machine, server: machine_graph_xml(machine, server=server),
        plan_graph_xml,
    ),
    "nccl-topo": Format(
        "NCCL_TOPO_FILE: the machine, as NCCL (or RCCL) reads it",
        lambda machine, server: nccl_topo_xml(machine, server=server),
        lambda plan: nccl_topo_xml(plan.topology),
    ),
}
"""Every format by its name."""


def check_format(name: str) -> str:
    """The name of a known format.

    Raises
    ------
    UsageError
        It is unknown; the message lists those that are.

    Examples
    --------
    >>> check_format("nccl-topo")
    'nccl-topo'
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"format {name[:40]!r} is unknown; {hint}known ones are {', '.join(FORMATS)}")
    return name


def export_machine(machine: TopologyLike, to: str, *, server: str | None = None) -> Exported:
    """A machine in this format.

    Parameters
    ----------
    machine : Topology, or what `topoplan.load` takes
        The allocation (see `Topology.subset`).
    to : str
        One of `FORMATS`.
    server : str or None
        Which of several servers, for formats that describe one.

    Raises
    ------
    UsageError
        The format is unknown, or cannot hold the machine.

    Examples
    --------
    >>> import topoplan
    >>> export_machine(topoplan.load("dgx-1v"), "nccl-topo").text.splitlines()[-1]
    '</system>'
    """
    return FORMATS[check_format(to)].of_machine(as_topology(machine), server)


def export_plan(plan: Plans, to: str) -> Exported:
    """A plan in this format; errors as `export_machine`, and UsageError for plans by size or of several servers.

    Examples
    --------
    >>> import topoplan
    >>> export_plan(topoplan.ring(topoplan.load("dgx-1v")), "nccl-graph").text.splitlines()[-1]
    '</graphs>'
    """
    found = FORMATS[check_format(to)]
    if len(plan.ranges) > 1:
        raise UsageError(
            f"this file has {len(plan.ranges)} plans by size, and {to} holds one; make a plan without --sizes"
        )
    servers = {plan.topology.device(name).server for name in plan.ranks}
    if len(servers) > 1:
        raise UsageError(
            f"this plan spans {len(servers)} servers, and {to} describes one; export the machine with --server, or a "
            "plan for one server"
        )
    return found.of_plan(plan.plans[0])
