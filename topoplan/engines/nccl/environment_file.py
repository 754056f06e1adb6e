"""Write the environment that NCCL needs between the servers of a cluster, as a file that a shell sources.

Every value follows from the topology: which NICs have a link out of the server, and whether a switch, rails or cables
join them. A NIC that lost its link is left out. Servers with the same values share a branch of the file; if there are
several branches, the name of the server selects one. A comment states the reason of each value, and of a variable that
the topology does not settle.

NCCL connects its rings and its double binary trees over the servers in the order of the ranks at start, whatever
``NCCL_ALGO`` selects later. So servers cabled to one another need a cable for each edge of both; a missing one is a
warning, since other transports and patched builds exist. On cables, ``NCCL_IB_SUBNET_AWARE_ROUTING`` selects the device
on the peer's subnet (``ncclIbFindDevBySubnet``, ``src/transport/net_ib/connect.cc`` of NCCL 2.30); without it NCCL
joins devices of one index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from topoplan.engines.exported import Exported
from topoplan.errors import UsageError, warning
from topoplan.machine.hardware import is_apple
from topoplan.machine.topology import Device, Topology
from topoplan.machine.variants import SIDES
from topoplan.schedules.binary_trees import nccl_start_warning
from topoplan.units import listed

SERVER_VARIABLE = "TOPOPLAN_SERVER"
"""Variable that names this server to the file; if it is unset, the host's short name does."""

WHAT_STARTS = (
    "what can start: an NCCL patched to connect rings alone (NCCL_SWITCHLESS_RING_ONLY, NCCL_SKIP_TREE_CONNECT exist "
    "only there), a net plug-in that relays, a switch, or topoplan's own plan, whose edges are cables"
)

_SHELL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")


@dataclass(frozen=True, slots=True)
class _Nic:
    """A NIC with a link out of its server; ``functions`` are its RDMA devices, empty if the machine names none.

    ``ends`` are the far ends: a switch's name, or server and NIC at the other end of a cable.
    """

    name: str
    functions: tuple[str, ...]
    ends: tuple[tuple[str, str], ...]

    @property
    def peers(self) -> set[str]:
        """The servers at the other ends of its cables."""
        return {server for server, _ in self.ends if server}


@dataclass(frozen=True, slots=True)
class _Line:
    """A variable with its value, None if the topology does not settle it, and the reason."""

    variable: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        if self.value is None:
            return f"# {self.variable} is not set: {self.reason}"
        return f"# {self.reason}\nexport {self.variable}={quote(self.value)}"


def nccl_environment(topology: Topology, *, server: str | None = None) -> Exported:
    """Return the variables of NCCL for the servers of a cluster that have GPUs, or for one ``server``.

    UsageError for fewer than two servers, an unknown server, GPUs that NCCL does not drive, or a server that no network
    link leaves.

    >>> import topoplan
    >>> text = nccl_environment(topoplan.load("dgx-spark-x3"), server="s0").text
    >>> print([line for line in text.splitlines() if "MERGE" in line][0])
    export NCCL_IB_MERGE_NICS=0
    """
    gpus = [topology.device(name) for name in topology.gpus]
    servers = tuple(dict.fromkeys(gpu.server for gpu in gpus))
    if len(servers) < 2:
        raise UsageError(
            f"nccl-env needs a machine of several servers, got {topology.name} with one; add --servers N, or name a "
            "cluster"
        )
    if server is not None and server not in servers:
        raise UsageError(f"{topology.name} has no server {server!r} with GPUs; it has {listed(servers)}")
    foreign = next((gpu for gpu in gpus if is_apple([gpu])), None)
    if foreign is not None:
        raise UsageError(f"nccl-env needs GPUs that NCCL or RCCL drives, got {foreign.name}, {foreign.model}")
    nics = _nics_out(topology, servers)
    for name, found in nics.items():
        if not found:
            raise UsageError(f"nccl-env needs a NIC with a link out of each server, got none for {name}")
    cables = _cables(nics)
    missing = nccl_start_warning(topology)
    ways = (WHAT_STARTS,) if missing else ()
    warnings = (*missing, *ways, *_crossed_ports(nics, cables)) if cables else ()
    chosen = servers if server is None else (server,)
    ports: dict[str, str] = {}
    for one in topology.devices:
        if one.fact("management"):
            ports.setdefault(one.server, one.fact("management"))
    branches: dict[str, list[str]] = {}
    for name in chosen:
        text = "\n".join(map(str, _lines(nics[name], ports.get(name, ""))))
        branches.setdefault(text, []).append(name)
    head = [
        f"# Environment of NCCL for {_one_line(topology.name)}, made by topoplan export --to nccl-env; source it "
        "on each server",
        *(f"# {note}" for note in warnings),
    ]
    return Exported("\n".join([*head, *_branches(branches)]) + "\n", tuple(warnings))


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _branches(branches: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the lines of all servers: without a choice if they have one text."""
    if len(branches) == 1:
        yield next(iter(branches))
        return
    yield f"case ${{{SERVER_VARIABLE}:-$(hostname -s)}} in"
    for text, names in branches.items():
        yield f"{'|'.join(quote(name) for name in names)})"
        yield from (f"  {line}" for line in text.splitlines())
        yield "  ;;"
    yield (
        f'*) echo "{SERVER_VARIABLE} must name a server of the topology, got '
        f'${{{SERVER_VARIABLE}:-$(hostname -s)}}; set it" >&2 ;;'
    )
    yield "esac"


def _nics_out(topology: Topology, servers: Sequence[str]) -> dict[str, tuple[_Nic, ...]]:
    """Return the NICs of each server with a link to another server or to a switch of the network, in its order.

    A NIC of several GPUs, which is two devices, counts once.
    """
    ends: dict[tuple[str, str], list[tuple[str, str]]] = {}
    device: dict[tuple[str, str], Device] = {}
    for link in topology.links:
        if link.channel != "network":
            continue
        near, far = topology.device(link.src), topology.device(link.dst)
        if near.kind == "nic" and far.server != near.server:
            key = near.server, _bare(near)
            device[key] = near
            ends.setdefault(key, []).append((far.server, _bare(far)))
    found: dict[str, list[_Nic]] = {server: [] for server in servers}
    for server, name in dict.fromkeys(
        (one.server, _bare(one)) for one in topology.devices if one.kind == "nic"
    ):
        if server in found and (server, name) in ends:
            key = server, name
            found[server].append(_Nic(name, _functions(device[key]), tuple(dict.fromkeys(ends[key]))))
    return {server: tuple(nics) for server, nics in found.items()}


def _bare(device: Device) -> str:
    """Return a device's name without its server and without the side of a NIC."""
    name = device.name.removeprefix(f"{device.server}.") if device.server else device.name
    side = next((side for side in SIDES if name.endswith(side)), "") if device.kind == "nic" else ""
    return name.removesuffix(side)


def _functions(nic: Device) -> tuple[str, ...]:
    named = nic.fact("functions") or nic.fact("adapter")
    found = tuple(name for name in named.split(",") if name)
    return found if all(_SHELL_NAME.fullmatch(name) for name in found) else ()


def _cables(nics: Mapping[str, Sequence[_Nic]]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return both ends of every cable, a server and its NIC each."""
    both = [((server, nic.name), end) for server, found in nics.items() for nic in found for end in nic.ends]
    return [(one, other) for one, other in both if other[0] in nics and one < other]


def _crossed_ports(
    nics: Mapping[str, Sequence[_Nic]], cables: Iterable[tuple[tuple[str, str], tuple[str, str]]]
) -> Iterator[str]:
    """Yield a warning for each cable between ports of one number, of servers with cables to several others."""
    hubs = {server for server, found in nics.items() if len(set().union(*(nic.peers for nic in found))) > 1}
    for one, other in cables:
        numbers = [re.search(r"(\d+)$", port) for _, port in (one, other)]
        if {one[0], other[0]} & hubs and all(numbers) and len({int(n[1]) for n in numbers if n}) == 1:
            yield warning(
                f"cable {':'.join(one)}-{':'.join(other)} should join port 0 and port 1, since an NCCL without "
                "subnet-aware routing joins ports of different cables by their index (ibv_modify_qp fails with 110); "
                "plug one end into the other port"
            )


def _lines(nics: Sequence[_Nic], management: str) -> Iterator[_Line]:
    """Yield the variables of a server with these NICs and this management port, empty if the topology names none."""
    peers = sorted(set().union(*(nic.peers for nic in nics)))
    switches = sorted({name for nic in nics for far, name in nic.ends if not far})
    names = [nic.name for nic in nics]
    unnamed = [nic.name for nic in nics if not nic.functions]
    if unnamed:
        hint = "give nvidia-smi topo -m with its NIC Legend"
        yield _Line(
            "NCCL_IB_HCA",
            None,
            f"it takes {listed(names)}, and the description has no adapter name of {listed(unnamed)}; {hint}",
        )
    else:
        devices = [function for nic in nics for function in nic.functions]
        taken = f"the NICs with a link out of the server: {listed(names)}"
        yield _Line("NCCL_IB_HCA", f"={','.join(devices)}", f"{taken}; = takes these names exactly")
    several = any(len(nic.functions) > 1 for nic in nics)
    if len(peers) > 1:
        why = f"cables lead to {listed(peers)}, and a merged NIC would send to one of them over both ports"
        yield _Line("NCCL_IB_MERGE_NICS", "0", why)
        why = "each port reaches one server: NCCL takes the device on the peer's subnet (NCCL 2.30)"
        yield _Line("NCCL_IB_SUBNET_AWARE_ROUTING", "1", why)
        why = "a ring comes in over one port and leaves over another"
        yield _Line("NCCL_CROSS_NIC", "1", why)
        why = "subnet-aware routing belongs to NCCL's own IB transport, which a net plug-in would replace"
        yield _Line("NCCL_NET_PLUGIN", "none", why)
    elif peers:
        why = f"all ports lead to {peers[0]}: NCCL merges them into one NIC of their rates together"
        yield _Line("NCCL_IB_MERGE_NICS", "1", why)
        if len(nics) > 1:
            why = "several cables to one server: NCCL takes the device at the other end of the same cable"
            yield _Line("NCCL_IB_SUBNET_AWARE_ROUTING", "1", why)
    elif len(switches) > 1:
        why = f"NICs of one number share a switch ({listed(switches)}): crossing would leave the rail"
        yield _Line("NCCL_CROSS_NIC", "0", why)
        why = "NICs merged into one would be on several rails"
        yield _Line("NCCL_IB_MERGE_NICS", "0", why)
    else:
        why = "one switch of the network has all NICs: NCCL keeps a ring on one NIC if that is not slower"
        yield _Line("NCCL_CROSS_NIC", "2", why)
        why = "the functions of a NIC lead to the same switch, and NCCL merges them" if several else ""
        if why:
            yield _Line("NCCL_IB_MERGE_NICS", "1", why)
    if switches and not peers:
        why = "a switch joins the NICs, so no port needs its peer's subnet"
        yield _Line("NCCL_IB_SUBNET_AWARE_ROUTING", "0", why)
    yield from _addresses(nics, peers, management)


def _addresses(nics: Sequence[_Nic], peers: Sequence[str], management: str) -> Iterator[_Line]:
    """Yield what the topology knows of interfaces and addresses."""
    why = "the topology has no addresses; NCCL selects the RoCE v2 address itself (its default, -1)"
    yield _Line("NCCL_IB_GID_INDEX", None, why)
    if management and _SHELL_NAME.fullmatch(management):
        why = "ranks meet over the management port, which reaches all servers"
        yield _Line("NCCL_SOCKET_IFNAME", f"={management}", why)
    else:
        why = "the topology names no Ethernet interface" + (
            "; set one that reaches all servers, which a cable does not" if len(peers) else ""
        )
        yield _Line("NCCL_SOCKET_IFNAME", None, why)
    if peers:
        functions = max(len(nic.functions) for nic in nics)
        each = f", {functions} for each cable, one a function" if functions > 1 else ""
        yield _Line(
            "NCCL_IB_SUBNET_PREFIX_LEN",
            None,
            f"its default is 24: give each cable a subnet of its own, such as a /24{each}",
        )
