"""Look up export formats by name and export plans and machines to them, Graphviz and thresholds included.

A format is one row of `FORMATS`: its writer, its arguments, and how the file is used and seen to be used. The Graphviz
writer draws a cluster for each stage of each shard, with data along the arrows. Readers of engine files are separate
(`topoplan.engines.verdict`).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

from topoplan.engines.chakra import chakra_traces
from topoplan.engines.exported import DEFAULT_CHOICES, Choices, Exported, one_server
from topoplan.engines.jaccl import jaccl_devices
from topoplan.engines.msccl_write import msccl_algorithm
from topoplan.engines.mscclpp_write import execution_plan, execution_plans
from topoplan.engines.nccl.environment_file import nccl_environment
from topoplan.engines.nccl.graph_file import machine_graph_xml, plan_graph_xml
from topoplan.engines.nccl.topology_file import nccl_topo_xml
from topoplan.engines.nccl.tuner_file import model_tuner
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.model.expected_times import KERNELS, ExpectedTimes, expected_times
from topoplan.model.schedule_selection import fastest_from
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.plan import Plan, Plans, collective_name
from topoplan.plans.shards import shard_counts
from topoplan.units import shortened

MAX_FILE_EDGES = 1_000_000
"""Largest number of tree edges of a plan whose edges a file has one by one: some minutes, and gigabytes of memory."""

MAX_DOT_EDGES = 20_000
"""Largest number of edges that Graphviz can draw in reasonable time."""


def plan_dot(plan: Plan) -> Exported:
    """Export a digraph: roots are drawn double, edges are labelled with the share and the switches that they pass.

    >>> import topoplan
    >>> text = plan_dot(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])).text
    >>> print(text.splitlines()[5])
        "0.0.gpu4" [label="gpu4", peripheries=2];
    """
    edges = sum(len(stage.edges) for shard in plan.shards for stage in shard.stages)
    if edges > MAX_DOT_EDGES:
        raise UsageError(f"this plan has {edges} tree edges, and more than {MAX_DOT_EDGES} cannot be drawn")
    names = plan.vertices
    lines = [f"digraph {_quote_dot(f'{plan.collective} on {plan.topology.name}')} {{", "  rankdir=TB;"]
    for number, shard in enumerate(plan.shards):
        for position, stage in enumerate(shard.stages):
            lines.append(f"  subgraph cluster_{number}_{position} {{")
            lines.append(
                f"    label={_quote_dot(f'shard {number}: {stage.op}, {shard.share} of the buffer')};"
            )
            members = {stage.root, *(end for edge in stage.edges for end in (edge.parent, edge.child))}
            for rank in sorted(members):
                double = ", peripheries=2" if rank == stage.root else ""
                name = _quote_dot(f"{number}.{position}.{names[rank]}")
                lines.append(f"    {name} [label={_quote_dot(names[rank])}{double}];")
            for edge in stage.top_down():
                route = edge.route[::-1] if stage.op == "reduce" else edge.route
                ends = [_quote_dot(f"{number}.{position}.{device}") for device in (route[0], route[-1])]
                label = ", ".join((edge.channel, *route[1:-1]))
                lines.append(f"    {ends[0]} -> {ends[1]} [label={_quote_dot(label)}];")
            lines.append("  }")
    return Exported("\n".join([*lines, "}"]) + "\n")


def _quote_dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


THRESHOLDS = "topoplan.thresholds/1"

_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter")
_SIZES = tuple(1 << power for power in range(10, 31))


def thresholds(topology: Topology, counts: range | None = None) -> Exported:
    """Return the cut-off table of a machine: the quickest kernel by number of GPUs and size.

    It has the keys format, machine, source and ranges; a range has collective, gpus, from and to (bytes of the caller's
    buffer, the last one included; null for no end), implementation (nccl, or one of
    `topoplan.model.expected_times.KERNELS`), and us_from, the expected microseconds at ``from``, at least 1 KB. A
    kernel is listed only near sizes at which it was measured; NCCL at all others.

    counts: numbers of GPUs; from two to all for None, on several servers all.
    UsageError if no measurements of NCCL on such a machine are published.

    >>> import topoplan
    >>> for one in json.loads(thresholds(topoplan.load("dgx-h100"), range(8, 9)).text)["ranges"]:
    ...     print(one["from"], one["to"], one["implementation"], one["us_from"])
    0 2047 nccl 17.6
    2048 8191 two-shot 13.7
    8192 107712995 multimem 10.8
    107712996 None nccl 497.9
    """
    servers = {topology.device(name).server for name in topology.gpus}
    most = len(topology.gpus)
    if counts is None:
        counts = range(2 if len(servers) == 1 else most, most + 1)
    made = [one for count in counts for one in _of_count(topology, count)]
    if not made:
        raise UsageError(
            f"thresholds need a machine with published measurements of NCCL, and {topology.name} is not like one; "
            "choose a DGX A100, H100, B200 or B300, an NVL72, or an MI300X"
        )
    content = {
        "format": THRESHOLDS,
        "machine": topology.name,
        "source": "published measurements, fitted (topoplan.model.expected_times)",
        "ranges": made,
    }
    return Exported(json.dumps(content, indent=1) + "\n")


def _of_count(topology: Topology, count: int) -> Iterator[dict[str, object]]:
    """Yield the ranges of a number of GPUs."""
    part = topology if count == len(topology.gpus) else topology.subset(range(count))
    for collective in _COLLECTIVES:
        known = expected_times(part, collective)
        whole = [one for one in known if one.implementation == "nccl"]
        if not whole:
            continue
        kernels = [one for one in known if one.implementation in KERNELS]
        changes = fastest_from([whole[0].seconds, *map(_where_measured, kernels)], _SIZES)
        names = ["nccl", *(one.implementation for one in kernels)]
        for place, ((start, number), following) in enumerate(pairwise([*changes, None])):  # type: ignore[misc]
            yield {
                "collective": collective_name(collective),
                "gpus": count,
                "from": start if place else 0,
                "to": None if following is None else following[0] - 1,
                "implementation": names[number],
                "us_from": round([whole[0], *kernels][number].seconds(start) * 1e6, 1),
            }


def _where_measured(times: ExpectedTimes) -> Callable[[int], float]:
    return lambda nbytes: times.seconds(nbytes) if times.covers(nbytes) else math.inf


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format, with the line of the help.

    ``of_machine`` also takes the name of one of several servers; it is None if only plans have the format.
    ``choices`` are the options that it supports. ``of_ranges`` writes a file for each range of sizes, None if the
    format holds one plan. ``many_servers``: it holds a machine of several servers. ``of_edges``: it holds the edges of
    all trees. ``use`` returns lines on how to use the file and how to see that it is used, with ``{file}`` and
    ``{folder}`` for its place; None without such lines.
    """

    line: str
    of_machine: Callable[[Topology, str | None], Exported] | None
    of_plan: Callable[[Plan, Choices], Exported]
    choices: tuple[str, ...] = ()
    of_ranges: Callable[[Plans, Choices], Exported] | None = None
    many_servers: bool = False
    of_edges: bool = False
    use: Callable[[Choices], tuple[str, ...]] | None = None


_USE_GRAPH = (
    "to use it: export NCCL_GRAPH_FILE={file} (NCCL 2.6 or later; NVIDIA does not document it)",
    "with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV,GRAPH NCCL says: Search 0 : … channels loaded from XML graph",
)
_USE_TOPO = (
    "to use it: export NCCL_TOPO_FILE={file} (NCCL 2.6 or later, and RCCL)",
    "with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV NCCL says: NCCL_TOPO_FILE set by environment to …",
    "NCCL_TOPO_DUMP_FILE=dump.xml writes what NCCL made of it, for topoplan diff",
)
_USE_ENV = (
    "to use it: . {file} on each server before the job, or export what it sets (mpirun -x)",
    "with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV,NET NCCL says: NCCL_IB_HCA set to …",
)
_USE_TUNER = (
    "to use it: cc -O2 -shared -fPIC {file} -o libnccl-tuner-topoplan.so",
    "and export NCCL_TUNER_PLUGIN=$PWD/libnccl-tuner-topoplan.so (NCCL 2.28 or later)",
    "with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING NCCL says: topoplan: chooses for … ranks on … servers",
)
_USE_MSCCLPP = (
    "to use it: export MSCCLPP_EXECUTION_PLAN_DIR={folder}, where no other files are",
    "and LD_PRELOAD MSCCL++'s libmscclpp_nccl.so into a program that calls NCCL",
)
_USE_MSCCL = {
    "msccl": (
        "to use it: export MSCCL_XML_FILES={file} NCCL_ALGO=MSCCL,RING,TREE",
        "and MSCCL's libnccl.so first in LD_LIBRARY_PATH; NCCL_DEBUG=INFO says: Connected 1 MSCCL algorithms",
    ),
    "rccl": (
        "to use it: export MSCCL_ALGO_DIR={folder} RCCL_MSCCL_FORCE_ENABLE=1, where no other files are",
    ),
}

FORMATS = {
    "nccl-graph": ExportFormat(
        "NCCL_GRAPH_FILE: a plan of rings or of chains, or the best rings and chains of a machine; NCCL cannot run "
        "packed trees inside a server",
        lambda machine, server: machine_graph_xml(machine, server=server),
        lambda plan, _: plan_graph_xml(plan),
        use=lambda _: _USE_GRAPH,
    ),
    "nccl-topo": ExportFormat(
        "NCCL_TOPO_FILE: the machine, as NCCL (or RCCL) reads it",
        lambda machine, server: nccl_topo_xml(machine, server=server),
        lambda plan, _: nccl_topo_xml(plan.topology),
        use=lambda _: _USE_TOPO,
    ),
    "nccl-tuner": ExportFormat(
        "NCCL_TUNER_CONFIG_FILE of NCCL's example tuner plugin (CSV): which algorithm, protocol and channels for which "
        "size, as NCCL's own model finds them fastest on the machine",
        lambda machine, server: model_tuner(
            machine if server is None else one_server(machine, server, "the file")
        ),
        lambda plan, _: model_tuner(plan.topology),
        many_servers=True,
    ),
    "nccl-tuner-plugin": ExportFormat(
        "source (C) of a tuner plug-in of NCCL with the same choices, for versions 5, 6 and 7 of its interface; it "
        "leaves communicators of other sizes to NCCL",
        lambda machine, server: model_tuner(
            machine if server is None else one_server(machine, server, "the file"), plugin=True
        ),
        lambda plan, _: model_tuner(plan.topology, plugin=True),
        many_servers=True,
        use=lambda _: _USE_TUNER,
    ),
    "nccl-env": ExportFormat(
        "shell file of NCCL's variables for a cluster: which NICs, merged or not, rails, subnets, each with a reason; "
        "says if stock NCCL cannot start on its cables",
        lambda machine, server: nccl_environment(machine, server=server),
        lambda plan, _: nccl_environment(plan.topology),
        many_servers=True,
        use=lambda _: _USE_ENV,
    ),
    "thresholds": ExportFormat(
        "cut-off table (JSON): for each number of GPUs and range of sizes the kernel that published measurements "
        "expect to be quickest: one-shot, two-shot, multimem, NCCL",
        lambda machine, server: thresholds(
            machine if server is None else one_server(machine, server, "the file")
        ),
        lambda plan, _: thresholds(plan.topology, range(len(plan.ranks), len(plan.ranks) + 1)),
        many_servers=True,
    ),
    "mscclpp": ExportFormat(
        "execution plan of MSCCL++ (JSON), which runs packed trees on GPUs: all_reduce, broadcast, all_gather, "
        "reduce_scatter, all_to_all",
        None,
        execution_plan,
        ("size", "max_blocks", "chunks", "protocol"),
        execution_plans,
        of_edges=True,
        use=lambda _: _USE_MSCCLPP,
    ),
    "msccl-xml": ExportFormat(
        "algorithm of MSCCL (XML): all_reduce, all_gather, reduce_scatter; RCCL up to the releases that carry MSCCL",
        None,
        msccl_algorithm,
        ("size", "max_blocks", "chunks", "runtime"),
        of_edges=True,
        use=lambda choices: _USE_MSCCL[choices.runtime or "msccl"],
    ),
    "chakra": ExportFormat(
        "execution traces of Chakra, one for each rank, for ASTRA-sim and a buffer of one --size",
        None,
        chakra_traces,
        ("size", "chunk"),
        of_edges=True,
    ),
    "jaccl": ExportFormat(
        "device file of JACCL (MLX): which device of each rank leads to which other, for servers joined by cables",
        lambda machine, _: jaccl_devices(machine),
        lambda plan, _: jaccl_devices(plan.topology),
        many_servers=True,
        use=lambda _: ("to use it: export MLX_IBV_DEVICES={file} on every rank",),
    ),
    "dot": ExportFormat(
        "the trees of a plan as a graph of Graphviz", None, lambda plan, _: plan_dot(plan), of_edges=True
    ),
}
"""Every format by its name."""


def check_format(name: str) -> str:
    """Return the name of a known format; the UsageError for an unknown one lists them."""
    if not isinstance(name, str) or name not in FORMATS:
        near = difflib.get_close_matches(str(name), FORMATS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"format {shortened(name)} is unknown; {hint}known ones are {', '.join(FORMATS)}")
    return name


def export_machine(machine: TopologyLike, to: str, *, server: str | None = None) -> Exported:
    """Export an allocation, as for `topoplan.load`, to one of `FORMATS`; ``server`` selects one of several."""
    made = FORMATS[check_format(to)].of_machine
    if made is None:
        raise UsageError(f"{to} takes a plan; make one with topoplan plan TOPO -o F.json, and export F.json")
    return made(as_topology(machine), server)


def export_plan(plan: Plans, to: str, choices: Choices = DEFAULT_CHOICES) -> Exported:
    """Export a plan to one of `FORMATS`; raise for options that it does not support, and plans that it cannot hold."""
    found = FORMATS[check_format(to)]
    for field in fields(choices):
        if getattr(choices, field.name) is not None and field.name not in found.choices:
            raise UsageError(f"--{field.name.replace('_', '-')} does not go with {to}; leave it out")
    edges = max(map(_edges, plan.plans)) if found.of_edges else 0
    if edges > MAX_FILE_EDGES:
        raise UsageError(
            f"a plan must have at most {MAX_FILE_EDGES:,} edges of trees for {to}, got {edges:,} of "
            f"{len(plan.ranks):,} GPUs; plan fewer servers"
        )
    helped = next((one for one in plan.plans if one.helpers), None)
    if helped is not None and to != "dot":
        raise UsageError(
            f"trees of this plan pass {helped.helpers[0]}, which is not a rank, and {to} knows only ranks; leave the "
            "helpers out of the machine"
        )
    chosen = plan.plans[0] if choices.size is None else plan.at(choices.size)
    if len(plan.ranges) > 1 and choices.size is None:
        if found.of_ranges is None:
            raise UsageError(
                f"this file has {len(plan.ranges)} plans by size, and {to} holds one; make a plan without --sizes"
            )
        return found.of_ranges(plan, choices)
    servers = {plan.topology.device(name).server for name in plan.ranks}
    if len(servers) > 1 and found.of_machine is not None and not found.many_servers:
        raise UsageError(
            f"this plan spans {len(servers)} servers, and {to} describes one; export the machine with --server, or a "
            "plan for one server"
        )
    return found.of_plan(chosen, choices)


def _edges(plan: Plan) -> int:
    """Return the number of edges of all trees of a plan, which is not listed for that."""
    if isinstance(plan, DeferredPlan):
        return plan.by_kind.num_edges
    return sum(
        times * sum(len(stage.edges) for stage in shard.stages) for shard, times in shard_counts(plan.shards)
    )


def how_to_use(
    to: str, choices: Choices = DEFAULT_CHOICES, *, file: str = "", folder: str = ""
) -> tuple[str, ...]:
    """Return lines on how to use a file of this format, and how to see that it is used.

    ``file`` and the ``folder`` that holds it are empty if they are not known yet.
    """
    use = FORMATS[check_format(to)].use
    lines = () if use is None else use(choices)
    return tuple(
        line.replace("{file}", file or "FILE").replace("{folder}", folder or "FOLDER") for line in lines
    )
