"""Write the environment that NCCL needs on several servers: their NICs by name, rails, and cables without a switch.

Sources: NCCL's environment variables (docs.nvidia.com/deeplearning/nccl, env); for cabled servers, reports of three and
four DGX Sparks (sparkrun#157, #174; nccl#1034; aicad-nccl-optimization#1). NCCL joins servers by a ring in the order of
ranks and by two binary trees, whatever NCCL_ALGO says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from topoplan.engines.exported import Exported
from topoplan.errors import UsageError
from topoplan.machine.topology import Device, Topology
from topoplan.machine.variants import SIDES
from topoplan.schedules.binary_trees import server_trees

MANAGEMENT_PORT = {"NVIDIA GB10": "enP7s7"}
"""The interface beside the fabric, by model of the GPU: the 10GbE port of a DGX Spark."""

Setting = tuple[str, str, str]
"""A variable, its value, and the reason."""


@dataclass(frozen=True)
class _Cable:
    """Two NICs of two servers that a link joins."""

    start: Device
    end: Device

    @property
    def servers(self) -> frozenset[str]:
        return frozenset((self.start.server, self.end.server))

    def __str__(self) -> str:
        return "-".join(
            f"{nic.server}:{nic.name.removeprefix(f'{nic.server}.')}" for nic in (self.start, self.end)
        )


def nccl_environment(topology: Topology, server: str | None = None) -> Exported:
    """Return shell commands that set NCCL's variables, for ``server`` or, None, for all of them.

    If servers need different values, the file takes the server's name: ``source FILE s0`` in bash.

    UsageError if the machine has one server, no such server, or GPUs that NCCL does not run on.

    >>> import topoplan
    >>> for line in nccl_environment(topoplan.load("dgx-spark-x2")).text.splitlines()[1:6]: print(line)
    case "$1" in
    s0)
      # NICs that the cables or switches join, by exact name
      export NCCL_IB_HCA='=rocep1s0f0,roceP2p1s0f0'
      # two functions of one port are one NIC of its full rate
    """
    names = list(dict.fromkeys(topology.device(gpu).server for gpu in topology.gpus))
    if len(names) < 2:
        raise UsageError(
            f"nccl-env is about NICs between servers, and {topology.name} has one server; plan it with --servers, or "
            "describe a cluster"
        )
    if server is not None and server not in names:
        raise UsageError(f"{topology.name} has no server {server}; choose one of {', '.join(names)}")
    foreign = sorted(
        {topology.device(gpu).model for gpu in topology.gpus if "Apple" in topology.device(gpu).model}
    )
    if foreign:
        raise UsageError(f"NCCL runs on GPUs of NVIDIA and AMD, got {foreign[0]}; leave nccl-env out")
    cables = _cables(topology)
    warnings = (*_missing_pairs(names, cables), *_equal_ports(cables))
    chosen = names if server is None else [server]
    blocks = {name: _block(topology, name, cables) for name in chosen}
    lines = [f"# NCCL on {topology.name}", *(f"# warning: {text}" for text in warnings), *_subnets(cables)]
    if len(set(blocks.values())) == 1:
        lines += blocks[chosen[0]]
    else:
        lines.append('case "$1" in')
        for name, block in blocks.items():
            lines += [f"{name})", *(f"  {line}" for line in block), "  ;;"]
        lines += [f'*) echo "name a server: {" ".join(blocks)}" >&2 ;;', "esac"]
    without = [name for name in chosen if _unnamed(topology, name)]
    notes = (
        [f"NCCL_IB_HCA is left out: NICs of {', '.join(without)} have no adapter names"] if without else []
    )
    return Exported("\n".join(lines) + "\n", (*warnings, *notes))


def _block(topology: Topology, server: str, cables: Sequence[_Cable]) -> tuple[str, ...]:
    lines: list[str] = []
    without = _unnamed(topology, server)
    if without:
        lines.append(f"# NCCL_IB_HCA: name the adapters of {', '.join(without)}, as ibdev2netdev prints them")
    for variable, value, reason in _settings(topology, server, cables):
        lines += [f"# {reason}", f"export {variable}={value}"]
    return tuple(lines)


def _settings(topology: Topology, server: str, cables: Sequence[_Cable]) -> Iterator[Setting]:
    own = [cable for cable in cables if server in cable.servers]
    adapters = list(dict.fromkeys(name for nic in _nics(topology, server) for name in _functions(nic)))
    if adapters and not _unnamed(topology, server):
        reason = "NICs that the cables or switches join, by exact name"
        yield "NCCL_IB_HCA", f"'={','.join(adapters)}'", reason
    if own:
        yield from _of_cables(own)
        model = next(
            topology.device(gpu).model for gpu in topology.gpus if topology.device(gpu).server == server
        )
        if model in MANAGEMENT_PORT:
            reason = "ranks meet over a network that joins all servers"
            yield "NCCL_SOCKET_IFNAME", MANAGEMENT_PORT[model], reason
    elif _has_rails(topology):
        yield "NCCL_CROSS_NIC", "0", "no switch joins the rails: a ring must stay on its NIC"


def _of_cables(own: Sequence[_Cable]) -> Iterator[Setting]:
    neighbours = {name for cable in own for name in cable.servers}
    several = any(len(_functions(nic)) > 1 for cable in own for nic in (cable.start, cable.end))
    if len(neighbours) == 2:
        if several:
            yield "NCCL_IB_MERGE_NICS", "1", "two functions of one port are one NIC of its full rate"
        return
    yield "NCCL_IB_MERGE_NICS", "0", "NICs with cables to different servers must not become one"
    yield (
        "NCCL_IB_SUBNET_AWARE_ROUTING",
        "1",
        "take the NIC whose subnet has the other server, not that of its number",
    )
    yield "NCCL_CROSS_NIC", "1", "a ring comes in by one NIC and leaves by another"
    yield "NCCL_NET_PLUGIN", "none", "a network plugin chooses NICs without regard to subnets"


def _nics(topology: Topology, server: str) -> list[Device]:
    """Return the NICs of a server with links to other servers or to switches between them."""
    home = {device.name: device.server for device in topology.devices}
    outside = {link.src for link in topology.links if home[link.src] == server != home[link.dst]}
    outside |= {link.dst for link in topology.links if home[link.dst] == server != home[link.src]}
    return [device for device in topology.devices if device.name in outside and device.kind == "nic"]


def _functions(nic: Device) -> tuple[str, ...]:
    """Return the names by which the operating system knows a NIC; none if unknown."""
    names = nic.fact("functions") or nic.fact("adapter")
    return tuple(names.split(",")) if names else ()


def _cables(topology: Topology) -> list[_Cable]:
    found: dict[frozenset[str], _Cable] = {}
    for link in topology.links:
        ends = topology.device(link.src), topology.device(link.dst)
        if all(end.kind == "nic" and end.server for end in ends) and ends[0].server != ends[1].server:
            names = frozenset(_side_removed(end.name) for end in ends)
            found.setdefault(names, _Cable(*ends))
    return list(found.values())


def _side_removed(name: str) -> str:
    return next((name.removesuffix(side) for side in SIDES if name.endswith(side)), name)


def _missing_pairs(servers: Sequence[str], cables: Sequence[_Cable]) -> tuple[str, ...]:
    """Return why NCCL cannot start: servers that its ring or trees join, and no cable does."""
    if not cables:
        return ()
    joined = {cable.servers for cable in cables}
    ring = [frozenset(pair) for pair in pairwise((*servers, servers[0]))]
    trees = [
        frozenset((servers[child], servers[parent]))
        for tree in server_trees(len(servers))
        for child, (parent, _) in tree.items()
    ]
    for what, pairs in (("ring", ring), ("trees", trees)):
        lacking = sorted({"-".join(sorted(pair)) for pair in pairs if len(pair) == 2 and pair not in joined})
        if lacking:
            return (
                f"stock NCCL cannot start on these {len(servers)} servers: its {what} join {', '.join(lacking)}, which "
                "no cable joins, and it connects trees even with NCCL_ALGO=Ring (nccl#1034; one report says that it "
                "starts). A plan of topoplan on tcp, a patched NCCL, a plugin that relays, or a switch can",
            )
    return ()


def _equal_ports(cables: Sequence[_Cable]) -> tuple[str, ...]:
    """Warn of cables between ports of one number: NCCL pairs the NICs of two servers by their numbers."""
    wrong = [
        str(one) for one in cables if one.start.fact("functions") and _number(one.start) == _number(one.end)
    ]
    if not wrong:
        return ()
    return (
        f"cables must join port 0 to port 1, got {', '.join(wrong)}: NCCL pairs NICs by number, and ibv_modify_qp ends "
        "with error 110; change one end",
    )


def _number(nic: Device) -> str:
    found = re.search(r"\d+$", nic.name)
    return found[0] if found else ""


def _subnets(cables: Sequence[_Cable]) -> list[str]:
    """Return comments that pair the functions at both ends of every cable, each pair a subnet of its own."""
    lines = []
    for cable in cables:
        both = zip(_functions(cable.start), _functions(cable.end), strict=False)
        pairs = ", ".join(f"{one} with {other}" for one, other in both)
        if pairs:
            lines.append(f"# cable {cable}: a subnet each for {pairs}")
    return lines


def _has_rails(topology: Topology) -> bool:
    """Return whether the network has parts between which no switch leads, each with NICs of several servers."""
    import networkx as nx

    outside = {device.name for device in topology.devices if not device.server}
    wires = [(link.src, link.dst) for link in topology.links if link.channel == "network"]
    graph = nx.Graph(wire for wire in wires if outside.issuperset(wire))
    graph.add_nodes_from(outside)
    parts = enumerate(nx.connected_components(graph))
    part = {name: number for number, names in parts for name in names}
    reached: dict[int, set[str]] = {}
    for src, dst in wires:
        if dst in part and topology.device(src).server:
            reached.setdefault(part[dst], set()).add(topology.device(src).server)
    return len(reached) > 1 and all(len(servers) > 1 for servers in reached.values())


def _unnamed(topology: Topology, server: str) -> list[str]:
    """Return the NICs of a server whose names in the operating system are not known."""
    names = (_side_removed(nic.name) for nic in _nics(topology, server) if not _functions(nic))
    return list(dict.fromkeys(name.removeprefix(f"{server}.") for name in names))
