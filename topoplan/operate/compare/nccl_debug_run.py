"""Compare NCCL's setup, read from its log, with the machine: rates of its rings and trees, and mismatches with the
links.

A finding states NCCL's action, its place, and the machine's alternative. Fallbacks and their reasons are findings too:
environment variables, networks and peers that NCCL could not use. Rates are those of its own rings and chains on the
machine's links (`topoplan.schedules.nccl_channels`), on one server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.device_matching import gpus_of, numbered_by_bus_id
from topoplan.reading.nccl.debug_log import LoggedCommunicator, NcclLog, RankConnection, via_kind
from topoplan.reading.nccl.perf_text import LoggedRank
from topoplan.schedules.nccl_channels import NcclPaths, Order, chain_rate, ring_bandwidth
from topoplan.schedules.registry import nccl_ring
from topoplan.units import bus_factor, counted, format_size, nearest_float, number_ranges

LIMITING = {
    "NCCL_P2P_DISABLE": "switches NVLink and PCIe between GPUs off",
    "NCCL_P2P_LEVEL": "limits how far apart GPUs may be to copy directly",
    "NCCL_SHM_DISABLE": "takes host memory away as a way between GPUs",
    "NCCL_IB_DISABLE": "takes InfiniBand and RoCE away, which leaves sockets",
    "NCCL_NET_GDR_LEVEL": "limits how far a NIC may be from a GPU whose memory it reads",
    "NCCL_NVLS_ENABLE": "decides whether NVSwitches add and copy",
    "NCCL_ALGO": "takes the choice of an algorithm away from NCCL",
    "NCCL_PROTO": "takes the choice of a protocol away from NCCL",
    "NCCL_MAX_NCHANNELS": "limits the channels",
    "NCCL_MAX_CTAS": "limits the channels",
    "NCCL_NET": "names the network",
}
"""Settings that can cost rate, and their effects."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A mismatch with the machine, or a fallback of NCCL.

    kind: one or two words, for programs.
    line: of its first mention in the log; 0 if it follows from several.
    """

    kind: str
    text: str
    line: int = 0

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "text": self.text, "line": self.line}


@dataclass(frozen=True, slots=True)
class NcclRun:
    """A log of NCCL on a machine.

    gpus: GPU of every rank with a known place.
    rings, trees: GB/s of bus bandwidth of its rings, and of algorithm bandwidth of an allreduce over its chains, on the
    machine's links; None if the log is incomplete, or the ranks are on several servers.
    best_rings: GB/s of bus bandwidth of the best rings over the same links.
    """

    log: NcclLog
    gpus: Mapping[int, int]
    rings: float | None
    trees: float | None
    best_rings: float | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def main(self) -> LoggedCommunicator | None:
        """The largest communicator."""
        return self.log.communicators[0] if self.log.communicators else None

    def to_object(self) -> dict[str, object]:
        one = self.main
        return {
            "version": self.log.version,
            "ranks": (one.size or None) if one else 0,
            "gpus": {str(rank): gpu for rank, gpu in sorted(self.gpus.items())},
            "channels": one.channels if one else None,
            "nvls_channels": one.nvls_channels if one else None,
            "rings": [{"channel": c, "ranks": list(r)} for c, r in sorted(one.rings.items())] if one else [],
            "trees": [
                {"channel": channel, "parents": {str(rank): up for rank, up in sorted(parents.items())}}
                for channel, parents in (sorted(one.trees.items()) if one else ())
            ],
            "ring_busbw": self.rings,
            "best_ring_busbw": self.best_rings,
            "tree_algbw": self.trees,
            "transports": [
                {"source": joined.source, "target": joined.target, "via": joined.via, "channels": count}
                for joined, count in (one.joined() if one else ())
            ],
            "choices": [
                {"function": c.function, "size": c.size, "algorithm": c.algorithm, "protocol": c.protocol}
                for c in (one.choices if one else ())
            ],
            "settings": dict(self.log.settings),
            "findings": [finding.to_object() for finding in self.findings],
            "notes": list(self.notes),
        }


def judge_nccl(log: NcclLog, machine: Topology, *, gpus: Sequence[int] | None = None) -> NcclRun:
    """Return NCCL's setup compared with the machine.

    gpus: the GPUs of the ranks if the log does not state them, or by other numbers.

    >>> import topoplan
    >>> from topoplan.reading.nccl.debug_log import parse_nccl_log
    >>> log = parse_nccl_log("node1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct")
    >>> judge_nccl(log, topoplan.load("dgx-1v")).findings[0].text
    'GPU 0 sends to GPU 1 through host memory (SHM), where NVLink joins them'
    """
    notes: list[str] = []
    findings = [*_fallbacks(log, machine)]
    if not log.communicators:
        return NcclRun(
            log, {}, None, None, None, tuple(findings), ("the log shows no communicator: it is cut",)
        )
    one = log.communicators[0]
    if len(log.versions) > 1:
        notes.append(
            f"the log names several versions of NCCL: {', '.join(log.versions[:6])}; {log.version} is the first"
        )
    if len(log.communicators) > 1:
        sizes = ", ".join(str(other.size or "unknown") for other in log.communicators[1:6])
        notes.append(
            f"{len(log.communicators)} communicators; this is the largest, the others have {sizes} ranks"
        )
    of_rank = _gpus(one, machine, gpus, notes)
    names = {rank: machine.gpus[gpu] for rank, gpu in of_rank.items()}
    findings += _connections(one, of_rank, machine)
    rings, trees, best = None, None, None
    if of_rank:
        part = machine.subset(sorted(of_rank.values()))
        servers = {machine.device(name).server for name in names.values()}
        largest = max(Counter(machine.device(gpu).server for gpu in machine.gpus).values())
        distributed = len(servers) > 1 or one.size > largest
        if not distributed and len(of_rank) == one.size > 1:
            paths = NcclPaths(part)
            findings += _rings(one, names, of_rank, paths)
            rings = _rate(lambda orders: ring_bandwidth(paths, orders), _orders(one.rings.values(), names))
            trees = _rate(lambda orders: chain_rate(paths, orders), _orders(_chains(one), names))
            best = _best_rings(part) if rings else None
        findings += _network_channels(one, machine, servers) if distributed else _channels(one, part)
    unique = {(finding.kind, finding.text): finding for finding in reversed(findings)}
    return NcclRun(log, of_rank, rings, trees, best, tuple(unique.values())[::-1], tuple(notes))


def _gpus(
    one: LoggedCommunicator, machine: Topology, gpus: Sequence[int] | None, notes: list[str]
) -> dict[int, int]:
    """Return the GPU of every rank that the log, or the caller, places."""
    if gpus is not None:
        chosen = machine.select(gpus)
        if one.size not in (0, len(chosen)):
            raise UsageError(
                f"NCCL's log is of {one.size} ranks, but {len(chosen)} GPUs are chosen; name the GPUs that ran "
                "with --gpus"
            )
        return dict(enumerate(chosen))
    if one.ranks:
        placed = gpus_of(_placed([one.ranks[rank] for rank in sorted(one.ranks)], notes), machine)
        if len(placed) < one.size:
            notes.append(f"the log is of ranks {number_ranges(sorted(placed))}, {len(placed)} of {one.size}")
        return placed
    here = machine.select(None)
    if one.size > len(here):
        raise UsageError(
            f"NCCL's log is of {one.size} ranks, but {machine.name} has {len(here)} GPUs; give the machine "
            "that ran it, with --servers if it is a cluster"
        )
    if one.size:
        taken = here[: one.size]
        notes.append(f"the log does not say where its ranks run: taken as GPUs {number_ranges(taken)}")
        return dict(enumerate(taken))
    notes.append(
        "the log is cut and states neither the number of ranks nor their GPUs: each rank is taken as the GPU of its "
        "number"
    )
    logged = {rank for pair in one.connections for rank in pair[:2]}
    return {rank: rank for rank in sorted(logged) if rank in here}


def _placed(ranks: list[LoggedRank], notes: list[str]) -> list[LoggedRank]:
    """Return ranks with their host and their GPU's number there, as far as the log implies them."""
    if not all(rank.host for rank in ranks):
        ranks = _on_hosts(ranks, notes)
    numbered = numbered_by_bus_id(ranks)
    if numbered != ranks:
        notes.append(
            "every process sees one GPU as device 0: numbered by bus id, from GPU 0 of each server on; name others "
            "with --gpus"
        )
    return numbered


def _on_hosts(ranks: list[LoggedRank], notes: list[str]) -> list[LoggedRank]:
    """Return ranks whose lines lack the host: a new host begins at a repeated GPU, by bus id or else by device."""
    found: list[LoggedRank] = []
    number, seen = 0, set[object]()
    for rank in ranks:
        gpu = rank.busid or rank.device
        if gpu in seen:
            number, seen = number + 1, set()
        seen.add(gpu)
        found.append(replace(rank, host=f"host {number}"))
    notes.append(f"the lines lack host:pid:tid: taken as {counted(number + 1, 'host')}")
    return found


def _fallbacks(log: NcclLog, machine: Topology) -> Iterator[Finding]:
    """Yield settings that limit NCCL, and its fallbacks."""
    for name, value in log.settings:
        # 0 is the default of *_DISABLE
        if name in LIMITING and not (name.endswith("_DISABLE") and value == "0"):
            yield Finding("setting", f"{name}={value} {LIMITING[name]}")
    hosts = {rank.host for one in log.communicators for rank in one.ranks.values()}
    # one server needs no network
    nics = [device.name for device in machine.devices if device.kind == "nic" and len(hosts) != 1]
    able = [
        device for device in with_all_capabilities(with_capable(machine)).devices if device.kind == "nvswitch"
    ]
    for event in log.statements:
        if event.kind == "no ib device" and nics:
            yield Finding(
                "no ib",
                f"NCCL finds no InfiniBand or RoCE device, where the machine has {len(nics)} NICs",
                event.line,
            )
        elif event.kind == "network" and event.text == "Socket" and nics:
            yield Finding(
                "socket",
                f"NCCL uses sockets as its network, where the machine has {len(nics)} NICs",
                event.line,
            )
        elif event.kind in ("p2p disabled", "p2p failed"):
            checked = event.text.startswith("Check P2P")
            text = "not all GPUs of a server reach each other's memory (intraNodeP2pSupport 0)"
            yield Finding("p2p", text if checked else event.text.partition(". ")[0], event.line)
        elif event.kind == "no gdr":
            yield Finding("no gdr", event.text.partition(": ")[2] or event.text, event.line)
        elif event.kind == "no nvls" and any(device.multicast and device.reduce for device in able):
            yield Finding(
                "no nvls",
                "NCCL finds no multicast (NVLS), where the machine's NVSwitches can add and copy",
                event.line,
            )
        elif event.kind == "warning":
            yield Finding("warning", f"NCCL warns: {event.text[:200]}", event.line)


def _connections(one: LoggedCommunicator, of_rank: Mapping[int, int], machine: Topology) -> Iterator[Finding]:
    """Yield transports that are slower than the links of the pair, one finding for equal pairs."""
    parts: dict[str, NcclPaths] = {}
    pairs: dict[tuple[str, str], list[tuple[int, int, RankConnection]]] = {}
    unplaced: dict[tuple[str, str], list[RankConnection]] = {}
    nics = any(device.kind == "nic" for device in machine.devices)
    for joined, _ in one.joined():
        if joined.source not in of_rank or joined.target not in of_rank:
            how = via_kind(joined.via)
            # a rank without a logged host is on another server if the network joins it
            if how.startswith("NET") and (joined.source in of_rank or joined.target in of_rank):
                misfit = _misfit(how, joined.via, "", same=False, nics=nics)
                if misfit:
                    unplaced.setdefault(misfit, []).append(joined)
            continue
        source, target = of_rank[joined.source], of_rank[joined.target]
        tail, head = machine.gpus[source], machine.gpus[target]
        server = machine.device(tail).server
        same = server == machine.device(head).server
        how = via_kind(joined.via)
        kind = ""
        if same and how != "P2P":
            if server not in parts:
                parts[server] = NcclPaths(_server(machine, server))
            kind = _between(parts[server], tail, head)
        misfit = _misfit(how, joined.via, kind, same=same, nics=nics)
        if misfit:
            pairs.setdefault(misfit, []).append((source, target, joined))
    for (kind, text), found in pairs.items():
        source, target, joined = found[0]
        more = f" ({len(found)} pairs such)" if len(found) > 1 else ""
        yield Finding(kind, f"GPU {source} sends to GPU {target} {text}{more}", joined.line)
    for (kind, text), ways in unplaced.items():
        more = f" ({len(ways)} pairs such)" if len(ways) > 1 else ""
        yield Finding(
            kind, f"rank {ways[0].source} sends to rank {ways[0].target} {text}{more}", ways[0].line
        )


def _misfit(how: str, via: str, path: str, *, same: bool, nics: bool) -> tuple[str, str] | None:
    """Return kind and text of a transport that does not suit the path between two GPUs, or None."""
    if same and how == "SHM":
        if path == "NVL":
            return "shm", "through host memory (SHM), where NVLink joins them"
        if path in ("PIX", "PXB"):
            return "shm", "through host memory (SHM), where PCIe switches join them"
        return None
    if same and how.startswith("NET"):
        where = "NVLink joins them" if path == "NVL" else "both are on one server"
        return "net inside", f"over the network ({how}), where {where}"
    if how == "NET/Socket" and nics:
        return "socket", "over sockets (NET/Socket), where the machine has NICs"
    if how.startswith("NET/") and how != "NET/Socket" and "GDRDMA" not in via:
        return (
            "no gdr",
            f"by way of host memory ({how} without GDRDMA): the NIC does not read the GPU's memory",
        )
    return None


def _server(machine: Topology, server: str) -> Topology:
    inside = tuple(device for device in machine.devices if device.server == server)
    names = {device.name for device in inside}
    links = tuple(link for link in machine.links if link.src in names and link.dst in names)
    return Topology(server or machine.name, inside, links)


def _between(paths: NcclPaths, tail: str, head: str) -> str:
    try:
        return paths.hop(tail, head).kind
    except InfeasibleError:
        return ""


def _rings(
    one: LoggedCommunicator, names: Mapping[int, str], of_rank: Mapping[int, int], paths: NcclPaths
) -> Iterator[Finding]:
    """Yield hops of rings without NVLink, if NVLink joins other hops."""
    hops: Counter[tuple[int, int]] = Counter()
    for ring in (ring for ring in one.rings.values() if all(rank in names for rank in ring)):
        hops.update((ring[place], ring[(place + 1) % len(ring)]) for place in range(len(ring)))
    kinds = {hop: _between(paths, names[hop[0]], names[hop[1]]) for hop in hops}
    if "NVL" not in kinds.values():
        return
    for hop, kind in sorted(kinds.items()):
        if kind != "NVL":
            way = (
                "through another GPU" if kind == "NVB" else f"over PCIe ({kind})" if kind else "over nothing"
            )
            rings = f"{hops[hop]} of {len(one.rings)} rings go"
            yield Finding(
                "ring without link",
                f"{rings} from GPU {of_rank[hop[0]]} to GPU {of_rank[hop[1]]}, which no NVLink joins: {way}",
            )


def _orders(orders: Iterable[tuple[int, ...]], names: Mapping[int, str]) -> dict[Order, int]:
    known = [order for order in orders if all(rank in names for rank in order)]
    return dict(Counter(tuple(names[rank] for rank in order) for order in known))


def _chains(one: LoggedCommunicator) -> Iterator[tuple[int, ...]]:
    """Yield trees of one server that are chains over all ranks, as NCCL's are."""
    for parents in one.trees.values():
        below = {parent: rank for rank, parent in parents.items()}
        tops = [rank for rank in below if rank not in parents]
        if len(below) == len(parents) == one.size - 1 and len(tops) == 1:
            order = [tops[0]]
            while order[-1] in below and len(order) < one.size:
                order.append(below[order[-1]])
            if len(order) == one.size:
                yield tuple(order)


def _rate(rate: Callable[[dict[Order, int]], Fraction], orders: dict[Order, int]) -> float | None:
    if not orders:
        return None
    try:
        return nearest_float(rate(orders))
    except InfeasibleError:
        return None


def _best_rings(part: Topology) -> float | None:
    try:
        return nccl_ring(part).rate * bus_factor("allreduce", len(part.gpus))
    except InfeasibleError:
        return None


def _channels(one: LoggedCommunicator, part: Topology) -> Iterator[Finding]:
    """Yield a finding for fewer channels than a GPU has NVLinks."""
    count = one.channels or len(one.rings)
    wires: dict[str, int] = dict.fromkeys(part.gpus, 0)
    for link in part.links:
        if link.channel == "nvlink" and link.src in wires:
            wires[link.src] += link.count
    least = min(wires.values(), default=0)
    if count and count < least:
        yield Finding(
            "few channels",
            f"{counted(count, 'channel')}, where every GPU has {least} NVLinks or more: a channel is one "
            "block of threads and fills about one NVLink",
        )


def _network_channels(
    one: LoggedCommunicator, machine: Topology, servers: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for fewer channels than a server has NICs: each keeps to one NIC of every server."""
    count = one.channels or len(one.rings)
    nics = Counter(device.server for device in machine.devices if device.kind == "nic")
    least = min((nics[server] for server in servers), default=0)
    if count and count < least:
        yield Finding(
            "few channels",
            f"{counted(count, 'channel')}, where every server has {least} NICs or more: a channel keeps to one NIC, "
            "so the others carry nothing",
        )


def choice_lines(one: LoggedCommunicator) -> list[str]:
    """Return NCCL's selections by size, equal neighbours merged.

    >>> from topoplan.reading.nccl.debug_log import AlgorithmChoice
    >>> kinds = [(1 << 10, "ll"), (1 << 12, "ll"), (1 << 20, "simple")]
    >>> choices = [AlgorithmChoice("AllReduce", size, "ring", kind) for size, kind in kinds]
    >>> choice_lines(LoggedCommunicator(1, 8, choices=choices))
    ['AllReduce: ring/ll 1KB to 4KB, ring/simple 1MB']
    """
    lines = []
    for function in dict.fromkeys(choice.function for choice in one.choices):
        sizes = sorted(
            {(c.size, f"{c.algorithm}/{c.protocol}") for c in one.choices if c.function == function}
        )
        runs: list[tuple[str, int, int]] = []
        for size, what in sizes:
            if runs and runs[-1][0] == what:
                runs[-1] = (what, runs[-1][1], size)
            else:
                runs.append((what, size, size))
        words = [
            f"{what} {format_size(low)}" + (f" to {format_size(high)}" if high > low else "")
            for what, low, high in runs
        ]
        lines.append(f"{function}: {', '.join(words)}")
    return lines
