"""Place ranks on GPUs and nodes for ``topoplan order``, so that rings, trees or the axes of a mesh are fast.

The tables and the JSON object state rates before and after, what is proved, and the placement of each rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.cli import arguments
from topoplan.cli.machine_options import RequestedMachine, add_all_options, apply_faults, apply_overlay
from topoplan.cli.output import Answer, Column, folded, folded_line, progress_line, table, table_of
from topoplan.cli.plan_sets import add_mesh_options as add_mesh
from topoplan.cli.sources import MOST_READ, host_names, read_machine, refuse_listing
from topoplan.engines.jaccl import jaccl_devices
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words, usable_fabric
from topoplan.machine.named_nodes import NodeNetwork, cluster_of_nodes, domain
from topoplan.operate.launch_files import LAUNCH_FILES, RankPlacement, hosts_of, rank_placements, usage
from topoplan.operate.link_loads import OrderRates
from topoplan.operate.mesh_placement import PRESETS, MeshOrder, MeshPlacement, best_mesh, preset_weights
from topoplan.operate.rank_order import ENUMERATED, RankOrder, best_order
from topoplan.plans.plan import COLLECTIVES, check_collective, collective_name
from topoplan.reading.load import load, load_network
from topoplan.reading.registry import RATES
from topoplan.reading.slurm import fold_hostlist
from topoplan.units import bus_factor, counted, labelled, number_ranges, rate_words

MAX_PLACEMENTS = 5
"""Most placements in the table without ``--all``."""

MOST_PLACED = 4096
"""Ranks of a cluster up to which meshes are placed: about a minute."""

MAX_LIST_COLUMNS = 110
"""Most characters of a list."""


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """The placement of ranks.

    ``gpus`` are the GPUs that are ranks, ascending. ``given`` and ``found`` are the placements of every rank, as given
    and in the best order; ``order`` is the GPU of every rank in the best order.
    """

    machine: RequestedMachine
    gpus: tuple[int, ...]
    given: tuple[RankPlacement, ...]
    found: tuple[RankPlacement, ...]
    order: tuple[int, ...]
    collective: str

    @property
    def hosts(self) -> list[str]:
        """Hosts in the order of their first ranks."""
        return list(dict.fromkeys(placement.host for placement in self.found))


def _title(answer: OrderAnswer) -> str:
    where = f"{counted(len(answer.order), 'rank')} on {counted(len(answer.hosts), 'host')}"
    return f"{collective_name(answer.collective)} on {answer.machine.whole.name}, {where}"


def _order_lines(answer: OrderAnswer, ranked: RankOrder) -> Iterator[str]:
    """Yield the verdict, the rates as given and in the best order, and the hosts and GPUs of the best order."""
    channels = usable_fabric(answer.machine.whole.subset(answer.gpus)).channels
    pairs = _rate_pairs(answer, ranked)
    as_given = ranked.ranks == ranked.given
    gains = [
        f"{name} {found[0] / given[0]:.2f}x as fast"
        for name, given, found in pairs
        if given[0] and found[0] != given[0]
    ]
    same = (
        "this order is as fast as the one given"
        if ranked.before.ring
        else "the order given has no ring, this one has"
    )
    if as_given:
        verdict = (
            "the order as given is the best"
            if ranked.proof
            else "no better order than the one given was found"
        )
    else:
        verdict = f"this order makes the {', '.join(gains)}" if gains else same
    yield f"{_title(answer)}, over {channel_words(channels, answer.machine.whole)}: {verdict}"
    yield ""
    rates: tuple[Column[RatePairs], ...] = (
        Column("", value=lambda row: row[0]),
        Column("algbw as given", value=lambda row: row[1][0] or None, form=".6g"),
        Column("busbw", value=lambda row: row[1][1] or None, form=".6g"),
        Column("algbw in this order", value=lambda row: row[2][0] or None, form=".6g"),
        Column("busbw", value=lambda row: row[2][1] or None, form=".6g"),
        Column("gain", value=lambda row: row[2][0] / row[1][0] if row[1][0] else None, form="{:.2f}x".format),
    )
    yield table_of(rates, pairs)
    yield ""
    bound = f"busbw {float(ranked.bound):.6g} GB/s"
    if ranked.proof == ENUMERATED:
        proof = "provably optimal: every order was tried"
    elif ranked.proof:
        proof = f"provably optimal: no ring of any order exceeds {bound}"
    else:
        gap = 100 * float(1 - ranked.after.ring / ranked.bound)
        proof = f"{gap:.2f} % below the upper bound of every order, {bound}"
    crossed = [float(rates.between_switches) for rates in (ranked.before, ranked.after)]
    crossings = f"{crossed[0]:.6g} between switches as given, {crossed[1]:.6g} in this order"
    several = "lays several rings of its own inside a server: topoplan compare has them"
    yield from labelled(
        ("ring", proof),
        ("NCCL", several if ranked.after.tree is None else ""),
        ("links crossed", crossings if any(crossed) else ""),
    )
    yield from _placement_lines(answer)


RatePair = tuple[float, float]
"""Algorithm and bus bandwidth in GB/s."""

RatePairs = tuple[str, RatePair, RatePair]
"""Rates of rings or trees, as given and in the best order."""


def _rate_pairs(answer: OrderAnswer, ranked: RankOrder) -> list[RatePairs]:
    factor = bus_factor(answer.collective, len(answer.order))
    buses = [float(rates.ring) for rates in (ranked.before, ranked.after)]
    rings: list[RatePair] = [(bus / factor if factor else 0.0, bus) for bus in buses]
    rows = [("ring", rings[0], rings[1])]
    if answer.collective == "allreduce" and ranked.after.tree is not None:
        algorithms = [float(rates.tree or 0) for rates in (ranked.before, ranked.after)]
        trees: list[RatePair] = [(rate, rate * factor) for rate in algorithms]
        rows.append(("tree", trees[0], trees[1]))
    return rows


def _placement_lines(answer: OrderAnswer) -> Iterator[str]:
    yield from labelled(("hosts", _shorten_list(fold_hostlist(answer.hosts), MAX_LIST_COLUMNS)))
    taken: dict[str, list[int]] = {}
    for placement in answer.found:
        taken.setdefault(placement.host, []).append(placement.slot)
    hosts_by_slots: dict[tuple[int, ...], list[str]] = {}
    for host, slots in taken.items():
        hosts_by_slots.setdefault(tuple(slots), []).append(host)
    for places, names in list(hosts_by_slots.items())[:4]:
        where = "every host" if len(hosts_by_slots) == 1 else _shorten_list(fold_hostlist(names), 40)
        if len(hosts_by_slots) > 1 or list(places) != list(range(len(places))):
            yield from labelled(("GPUs", f"{_shorten_list(number_ranges(places), 60)} on {where}"))
    if len(hosts_by_slots) > 4:
        yield from labelled(
            ("GPUs", f"otherwise on {len(hosts_by_slots) - 4} sets of hosts more; --json has all")
        )


def _shorten_list(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _mesh_lines(answer: OrderAnswer, ranked: MeshOrder, *, every: bool) -> Iterator[str]:
    """Yield the verdict, the placements of a mesh with their rates, and the position of each axis in the best one."""
    axes = " x ".join(f"{name} {extent}" for name, extent in ranked.axes)
    best = ranked.best
    if best.ranks == ranked.given.ranks:
        verdict = "the placement as given is the fastest found"
    elif ranked.given.together:
        gain = float(best.together / ranked.given.together)
        verdict = f"this placement is {gain:.2f}x as fast" if gain > 1 else "this placement is the best"
    else:
        verdict = "this placement is the best"
    yield f"{_title(answer)}, a mesh of {axes}: {verdict}"
    words = [word for word, _ in ranked.levels]
    weights = ", ".join(f"{name} {weight}" for name, weight in ranked.weights)
    sizes = " x ".join(f"{size} {word}" for word, size in ranked.levels)
    yield from labelled(
        ("weights", f"{weights}: how fast the axes are to be in proportion (--axes)"),
        ("levels", f"{sizes}; the table has the extent of every axis on each"),
    )
    yield ""
    header = (
        "ranks",
        *(name for name, _ in ranked.axes),
        *(f"{name} alone" for name, _ in ranked.weights),
        "rings at once",
        "trees at once",
    )
    rows = [_placement_row("as given", ranked, ranked.given)]
    shown, left = folded(ranked.placements, MAX_PLACEMENTS, every=every)
    rows += [_placement_row(f"{number}", ranked, one) for number, one in enumerate(shown, 1)]
    yield table(header, rows)
    yield from folded_line(left, "slower placement")
    yield "algbw in GB/s in every group; at once: of an axis of weight 1 while all axes run"
    yield ""
    for (name, extent), parts in zip(ranked.axes, best.factors, strict=False):
        if extent > 1:
            text = f"{_axis_extent(parts, words)}{_rate_alone(ranked, best, name, answer.collective)}"
            yield from labelled((name, text))
    if best.nested:
        text = (
            f"{' > '.join(best.nested)} along the hosts, across their ends: extents do not divide the levels"
        )
        yield from labelled(("axes", text))
    if best.packed is not None:
        proof = "provably optimal" if best.proved else "faster trees may exist"
        text = f"planned together {best.packed:.6g} GB/s of weight 1 in this order ({proof})"
        yield from labelled(("trees", text))
    yield from _placement_lines(answer)


def _rate_alone(ranked: MeshOrder, best: MeshPlacement, name: str, collective: str) -> str:
    for (axis, weight), alone in zip(ranked.weights, best.alone, strict=True):
        if axis == name:
            ranks = dict(ranked.axes)[axis]
            rates = [float(alone), float(best.together * weight)]
            return ": " + "; ".join(
                f"{word} {rate_words(rate, collective, ranks)}"
                for word, rate in zip(("rings alone", "at once"), rates, strict=True)
            )
    return ""


def _axis_extent(parts: Sequence[int], words: Sequence[str]) -> str:
    """Return the extent of an axis on each level.

    >>> _axis_extent((2, 4), ["in a server", "across"]), _axis_extent((1, 4), ["in a server", "across"])
    ('2 in a server x 4 across', '4 across')
    """
    extents = [f"{part} {word}" for part, word in zip(parts, words, strict=True) if part > 1]
    return " x ".join(extents) or "-"


def _placement_row(name: str, ranked: MeshOrder, one: MeshPlacement) -> tuple[str, ...]:
    depth = {axis: f"nested {place + 1}" for place, axis in enumerate(one.nested)}
    lies = ["x".join(map(str, parts)) for parts in one.factors]
    lies = lies or [depth.get(axis, "-") for axis, _ in ranked.axes]
    rates = [*one.alone, one.together]
    return (
        name,
        *lies,
        *(f"{float(rate):.6g}" if rate else "-" for rate in rates),
        "-" if one.packed is None else f"{one.packed:.6g}",
    )


def order_object(
    answer: OrderAnswer, ranked: RankOrder | MeshOrder, given: Sequence[int]
) -> dict[str, object]:
    """Return the answer as a JSON object."""
    names = answer.machine.whole.gpus
    found: dict[str, object] = {
        "collective": answer.collective,
        "order": list(answer.order),
        "gpus": [names[gpu] for gpu in answer.order],
        "nodes": answer.hosts,
        "ranks": [{"host": placement.host, "slot": placement.slot} for placement in answer.found],
        "given": {
            "order": list(given),
            "nodes": list(dict.fromkeys(placement.host for placement in answer.given)),
        },
    }
    if isinstance(ranked, MeshOrder):
        found["mesh"] = dict(ranked.axes)
        found["weights"] = {name: str(weight) for name, weight in ranked.weights}
        found["levels"] = [[word, size] for word, size in ranked.levels]
        found["before"] = _placement_object(ranked, ranked.given, answer.collective)
        found["after"] = _placement_object(ranked, ranked.best, answer.collective)
        found["placements"] = [_placement_object(ranked, one, answer.collective) for one in ranked.placements]
        return found
    factor = bus_factor(answer.collective, len(answer.order))
    rows = _rate_pairs(answer, ranked)
    for key, side, rates in (("before", 1, ranked.before), ("after", 2, ranked.after)):
        found[key] = _rates_object(rows, side, rates)
    bound = float(ranked.bound)
    found["bound"] = {"algbw": bound / factor if factor else 0.0, "busbw": bound}
    found["optimal"] = bool(ranked.proof)
    found["proof"] = ranked.proof
    return found


def _rates_object(rows: Sequence[RatePairs], side: int, rates: OrderRates) -> dict[str, object]:
    found: dict[str, object] = {"ring": None, "tree": None}
    for row in rows:
        algbw, busbw = row[1] if side == 1 else row[2]
        found[row[0]] = {"algbw": algbw, "busbw": busbw}
    found["between_servers"] = rates.between_servers
    found["between_switches"] = float(rates.between_switches)
    return found


def _placement_object(ranked: MeshOrder, one: MeshPlacement, collective: str) -> dict[str, object]:
    def rate(algbw: Fraction, axis: str) -> dict[str, float]:
        factor = bus_factor(collective, dict(ranked.axes)[axis])
        return {"algbw": float(algbw), "busbw": float(algbw) * factor}

    return {
        "lies": {name: list(parts) for (name, _), parts in zip(ranked.axes, one.factors, strict=False)},
        "nested": list(one.nested),
        "alone": {
            name: rate(alone, name) for (name, _), alone in zip(ranked.weights, one.alone, strict=True)
        },
        "together": {name: rate(one.together * weight, name) for name, weight in ranked.weights},
        "trees_together": one.packed,
        "trees_optimal": one.proved,
    }


FORMATS = (*LAUNCH_FILES, "jaccl", "json")

NOT_OF_TREES = dict.fromkeys(
    (
        *("servers", "network", "rails", "leaf_size", "pod_size", "pod_oversubscription"),
        *("group_size", "global_gbps", "sides", "dimension_nics", "helpers", "merge"),
    )
)
"""Options that a description of Slurm replaces."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.declare(
        parser,
        """
        --gpus LIST     GPU numbers of the ranks in their present order, such as 0,2,1,3 (default: all, by number)
        --hosts LIST|F  hosts of the job in their present order, node[01-08,12] or a file with a host on each line
        """,
        gpus=arguments.gpu_list,
    )
    arguments.add_collective(parser)
    add_mesh(parser)
    arguments.declare(
        parser,
        f"""
        --preset NAME    with --mesh, the weights of a kind of training: {", ".join(PRESETS)}: topoplan help mesh
        --format FORMAT  {", ".join(FORMATS)}: a file of Open MPI, Slurm or JACCL in place of a table
        -o F             write the file (default: stdout)
        """,
        preset={"choices": tuple(PRESETS)},
        format={"choices": FORMATS},
    )
    arguments.add_json(parser)
    arguments.declare(parser, "--all  with --mesh, print every placement")
    arguments.declare(
        parser.topic("order"),
        """
        --server TOPO          with Slurm's topology.conf or topology.yaml as TOPO: the machine of each node, such as
                               dgx-h100; --hosts then selects nodes (default: all, as Slurm lists them)
        --slurm-topology NAME  the topology to use of several in a topology.yaml (default: the cluster's)
        """,
    )
    add_all_options(parser)
    parser.examples = (
        "topoplan order dgx-1v --gpus 0-3",
        "topoplan order dgx-a100 --mesh dp=2,tp=4 --preset megatron",
        "topoplan order topology.conf --server dgx-h100 --nic-bandwidth 400Gb/s",
    )


def run(options: argparse.Namespace) -> Answer:
    """Find the rank order in which rings and trees, or the axes of a mesh, are fastest."""
    if options.json and options.format not in (None, "json"):
        raise UsageError(f"--json does not go with --format {options.format}; leave one of them out")
    if options.output and not options.format:
        raise UsageError(f"-o needs a --format: one of {', '.join(FORMATS)}")
    axes = _axes(options)
    collective = check_collective(options.collective)
    if collective not in COLLECTIVES:
        raise UsageError(f"rings and trees do not do {collective}; use one of {', '.join(COLLECTIVES)}")
    if options.server is None:
        most, what = (
            (MOST_READ, "an order of ranks")
            if options.mesh is None
            else (MOST_PLACED, "placements of a mesh")
        )
        remedy = "choose some with --gpus; topoplan compare rates NCCL's rings and trees by kinds of servers"
        refuse_listing(options, most, what, remedy)
    machine, names, network = _machine(options)
    gpus = machine.allocation(options.gpus)
    listed = tuple(gpu for gpu in _gpus_in_host_order(machine, network) if gpu in machine.left)
    given = listed if options.gpus is None or gpus is None else gpus
    chosen = tuple(sorted(machine.whole.select(given)))
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
    answer = OrderAnswer(
        machine,
        chosen,
        rank_placements(machine.whole, given, names),
        rank_placements(machine.whole, order, names),
        order,
        collective,
    )
    found = order_object(answer, ranked, given)
    if options.format == "json":
        return Answer(file=lambda: json.dumps(found, allow_nan=False, indent=1) + "\n")
    if options.format == "jaccl":
        devices = jaccl_devices(machine.whole, order)
        return Answer(file=lambda: devices.text, notes=devices.notes)
    if options.format:
        path = "F" if options.output in (None, "-") else options.output
        text = LAUNCH_FILES[options.format](answer.found)
        how = usage(options.format, answer.found, path)
        if path == "F":
            return Answer(file=lambda: text, notes=how)
        return Answer(text=lambda: how, file=lambda: text)
    return Answer(
        text=lambda: (
            _mesh_lines(answer, ranked, every=options.all)
            if isinstance(ranked, MeshOrder)
            else _order_lines(answer, ranked)
        ),
        value=lambda: found,
        notes=(*(network.notes if network else ()), *machine.whole.notes),
    )


def _axes(options: argparse.Namespace) -> Mapping[str, Fraction | int] | None:
    """Return weights of the axes, as given or of a preset; UsageError if several axes run and neither is given."""
    arguments.refuse_without(options, {"axes": "--mesh", "preset": "--mesh", "slurm_topology": "--server"})
    if options.axes is not None and options.preset is not None:
        raise UsageError("--preset gives the weights that --axes states; leave one of them out")
    if options.preset is not None:
        return preset_weights(options.preset, options.mesh)
    wide = [name for name, extent in (options.mesh or {}).items() if extent > 1]
    if options.axes is None and len(wide) > 1:
        inner = "tp" if "tp" in wide else wide[-1]
        weights = ",".join(f"{name}={8 if name == inner else 1}" for name in wide)
        raise UsageError(
            f"--mesh needs the weights of its {len(wide)} axes, which decide the placement; add --axes with the bytes "
            f"that they move in proportion, such as {weights}, or --preset megatron (tp inside the server)"
        )
    axes: Mapping[str, Fraction | int] | None = options.axes
    return axes


def _machine(options: argparse.Namespace) -> tuple[RequestedMachine, tuple[str, ...], NodeNetwork | None]:
    """Return the machine, names for its hosts if it has none, and Slurm's network with the nodes of the job in
    order.
    """
    if options.server is None:
        return read_machine(options), () if options.hosts is None else host_names(options.hosts), None
    network = load_network(options.topo, which=options.slurm_topology or "")
    if network is None:
        raise UsageError(
            f"--server names the machine of the nodes in Slurm's topology.conf or topology.yaml, and "
            f"{options.topo[:60]} is neither; leave --server out"
        )
    arguments.refuse_beside(options, "a description of Slurm, which says how nodes are joined", NOT_OF_TREES)
    nodes = tuple(node for node, _ in network.nodes) if options.hosts is None else host_names(options.hosts)
    machine = _cluster_of_hosts(options, network, nodes)
    home = dict(network.nodes)
    return machine, (), replace(network, nodes=tuple((node, home[node]) for node in nodes))


def _gpus_in_host_order(machine: RequestedMachine, network: NodeNetwork | None) -> tuple[int, ...]:
    """Return all GPUs, host by host as Slurm lists these: hosts of several NVLink domains may take turns."""
    hosts = hosts_of(machine.whole)
    if network is None:
        return tuple(range(len(hosts)))
    place = {node: number for number, (node, _) in enumerate(network.nodes)}
    return tuple(sorted(range(len(hosts)), key=lambda gpu: place.get(hosts[gpu], 0)))


def _cluster_of_hosts(
    options: argparse.Namespace, network: NodeNetwork, nodes: Sequence[str]
) -> RequestedMachine:
    rates = {name: getattr(options, name) for name in RATES}
    server = apply_overlay(options, load(options.server, **rates))
    if options.domain is not None:
        server = domain(server, options.domain)
    stated = any(device.fact("gigabits") for device in server.devices if device.kind == "nic")
    if options.nic_gbps is None and not stated:
        raise UsageError(
            "a network needs the rate of a NIC; add --nic-bandwidth, for example --nic-bandwidth 400Gb/s"
        )
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
    return apply_faults(options, whole)
