"""``topoplan order``: which rank goes on which GPU and node, so that rings, trees or the axes of a mesh are fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from topoplan.cli import arguments
from topoplan.cli.arguments import first_given
from topoplan.cli.cluster_options import add_cluster
from topoplan.cli.damage_options import Machine, add_damage, damaged, overlaid
from topoplan.cli.order_table import Answer, order_object, print_mesh, print_order
from topoplan.cli.output import check_target, print_json, print_notes, write_whole
from topoplan.cli.plan_mesh import add_options as add_mesh
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import host_names, read_machine
from topoplan.clusters.domains import domain
from topoplan.clusters.named_nodes import NodeNetwork, cluster_of_nodes
from topoplan.errors import UsageError
from topoplan.formats.load import load, load_network
from topoplan.ordering.launch_files import LAUNCH_FILES, hosts_of, seats, usage
from topoplan.ordering.mesh_axes import PRESETS, MeshOrder, best_mesh, preset_weights
from topoplan.ordering.search import RankOrder, best_order
from topoplan.plans.plan import COLLECTIVES, check_collective

FORMATS = (*LAUNCH_FILES, "json")

NOT_OF_TREES = dict.fromkeys(("servers", "network", "rails", "leaf_size", "helpers", "merge"))
"""Options that say what a description of Slurm says itself."""


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``order``."""
    arguments.add_machine(parser)
    parser.add_argument(
        "--server",
        metavar="TOPO",
        help="where TOPO is Slurm's topology.conf or topology.yaml: what each node is, such as dgx-h100",
    )
    parser.add_argument(
        "--slurm-topology",
        metavar="NAME",
        help="of several in a topology.yaml this one (default: the cluster's)",
    )
    parser.add_argument(
        "--hosts",
        metavar="LIST|F",
        help="hosts of the job in the order as it is, node[01-08,12] or a file with a host on each line: of TOPO's "
        "nodes these (default: all, as Slurm lists them), or else names for the hosts of TOPO",
    )
    parser.add_argument(
        "--gpus",
        type=arguments.gpu_list,
        metavar="LIST",
        help="GPU numbers of the ranks in the order as it is, such as 0,2,1,3 (default: all, by number)",
    )
    arguments.add_collective(parser)
    add_mesh(parser)
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help="with --mesh, the weights of a kind of training in place of --axes: megatron "
        f"({_preset_words('megatron')})",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}: a file of Open MPI or Slurm in place of a table",
    )
    parser.add_argument("-o", dest="output", metavar="F", help="write the file (default: stdout)")
    arguments.add_json(parser)
    add_cluster(parser)
    add_damage(parser)


def run(options: argparse.Namespace) -> int:
    """The order of ranks and nodes in which rings and trees, or the axes of a mesh, are fastest."""
    as_json = options.json or options.format == "json"
    if options.json and options.format not in (None, "json"):
        raise UsageError(f"--json goes with no --format {options.format}; leave one of them out")
    if options.output and not options.format:
        raise UsageError(f"-o needs a --format: one of {', '.join(FORMATS)}")
    axes = _axes(options)
    check_target(options.output, "-o")
    collective = check_collective(options.collective)
    if collective not in COLLECTIVES:
        raise UsageError(f"rings and trees do not do {collective}; use one of {', '.join(COLLECTIVES)}")
    machine, names, network = _machine(options)
    gpus = machine.allocation(options.gpus)
    listed = tuple(gpu for gpu in _as_listed(machine, network) if gpu in machine.left)
    given = listed if options.gpus is None or gpus is None else gpus
    chosen = machine.whole.select(given)
    place = {gpu: number for number, gpu in enumerate(chosen)}
    part = machine.whole.subset(chosen)
    now = [place[gpu] for gpu in given]
    ranked: RankOrder | MeshOrder
    best: tuple[int, ...]
    with progress_line("ordering"):
        if options.mesh is None:
            ranked = best_order(part, given=now)
            best = ranked.ranks
        else:
            ranked = best_mesh(part, options.mesh, collective, axes=axes, given=now)
            best = ranked.best.ranks
    order = tuple(chosen[rank] for rank in best)
    answer = Answer(
        machine,
        chosen,
        seats(machine.whole, given, names),
        seats(machine.whole, order, names),
        order,
        collective,
    )
    if as_json:
        found = order_object(answer, ranked, given)
        if options.output and options.output != "-":
            write_whole(options.output, json.dumps(found, allow_nan=False, indent=1) + "\n")
        else:
            print_json(found)
        return 0
    if options.format:
        text = LAUNCH_FILES[options.format](answer.found)
        to_file = bool(options.output) and options.output != "-"
        if to_file:
            write_whole(options.output, text)
            print(f"written: {options.output}")
        else:
            print(text, end="")
        print_notes(
            *usage(options.format, answer.found, options.output if to_file else "F"),
            file=sys.stdout if to_file else sys.stderr,
        )
        return 0
    if isinstance(ranked, MeshOrder):
        print_mesh(answer, ranked)
    else:
        print_order(answer, ranked)
    print_notes(*dict.fromkeys((*(network.notes if network else ()), *machine.whole.notes)))
    return 0


def _axes(options: argparse.Namespace) -> Mapping[str, Fraction | int] | None:
    """Weights of the axes, as given or of a preset; UsageError if several axes run and neither is given."""
    for name in ("axes", "preset"):
        if getattr(options, name) is not None and options.mesh is None:
            raise UsageError(f"--{name} belongs to --mesh; give the mesh, or leave it out")
    if options.axes is not None and options.preset is not None:
        raise UsageError("--preset gives the weights that --axes states; leave one of them out")
    if options.preset is not None:
        return preset_weights(options.preset, options.mesh)
    wide = [name for name, extent in (options.mesh or {}).items() if extent > 1]
    if options.axes is None and len(wide) > 1:
        weights = ",".join(f"{name}={PRESETS['megatron'].get(name, 1)}" for name in wide)
        raise UsageError(
            f"the mesh has {len(wide)} axes and nothing says how many bytes each moves, which decides where it lies; "
            f"add --axes with their weights, such as {weights}, or --preset megatron"
        )
    axes: Mapping[str, Fraction | int] | None = options.axes
    return axes


def _preset_words(name: str) -> str:
    return ", ".join(f"{axis} {weight}" for axis, weight in PRESETS[name].items())


def _machine(options: argparse.Namespace) -> tuple[Machine, tuple[str, ...], NodeNetwork | None]:
    """The machine, names for its hosts where it has none, and Slurm's network with the nodes of the job in order."""
    if options.server is None:
        if options.slurm_topology is not None:
            raise UsageError("--slurm-topology belongs to --server, which says what a node is; add it")
        return read_machine(options), () if options.hosts is None else host_names(options.hosts), None
    network = load_network(options.topo, which=options.slurm_topology or "")
    if network is None:
        raise UsageError(
            f"--server says what the nodes of Slurm's topology.conf or topology.yaml are, and {options.topo[:60]} is "
            "neither; leave --server out"
        )
    refused = first_given(options, NOT_OF_TREES)
    if refused:
        raise UsageError(
            f"{refused} does not go with a description of Slurm, which says how nodes are joined"
        )
    nodes = tuple(node for node, _ in network.nodes) if options.hosts is None else host_names(options.hosts)
    machine = _of_nodes(options, network, nodes)
    home = dict(network.nodes)
    return machine, (), replace(network, nodes=tuple((node, home[node]) for node in nodes))


def _as_listed(machine: Machine, network: NodeNetwork | None) -> tuple[int, ...]:
    """All GPUs, host by host as Slurm lists these: hosts of several NVLink domains may take turns."""
    hosts = hosts_of(machine.whole)
    if network is None:
        return tuple(range(len(hosts)))
    place = {node: number for number, (node, _) in enumerate(network.nodes)}
    return tuple(sorted(range(len(hosts)), key=lambda gpu: place.get(hosts[gpu], 0)))


def _of_nodes(options: argparse.Namespace, network: NodeNetwork, nodes: Sequence[str]) -> Machine:
    rates = {name: getattr(options, name) for name in ("nvlink_gbps", "pcie_gbps", "socket_gbps")}
    server = overlaid(options, load(options.server, **rates))
    if options.domain is not None:
        server = domain(server, options.domain)
    stated = any(device.fact("gigabits") for device in server.devices if device.kind == "nic")
    if options.nic_gbps is None and not stated:
        raise UsageError("a network needs the speed of a NIC; add --nic-gbps, for example --nic-gbps 400")
    whole = cluster_of_nodes(
        network,
        {node: server for node, _ in network.nodes},
        nodes=nodes,
        nic_gbps=options.nic_gbps,
        nics=options.nics,
        oversubscription=options.oversubscription,
        nic_access=options.nic_access or "pcie",
        transport=options.transport,
    )
    return damaged(options, whole)
