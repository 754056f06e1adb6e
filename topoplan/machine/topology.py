"""Represent a machine as devices and the directed links between them.

Devices are GPUs, helpers that add and copy but are not ranks, and forwarding devices (NVSwitch, PCIe switch, CPU,
NIC, network switch). A link has one direction; a full-duplex wire is two links. ``bandwidth`` is in GB/s (1e9 bytes
per second) for that direction and includes the ``count`` parallel wires. Switches forward without copying or adding
unless they say ``multicast`` or ``reduce``. The text form is ``topoplan.topology/1``: `Topology.to_json` writes it,
`topoplan.load` reads it. `Topology.to_networkx` writes a graph that `topoplan.load` reads too. The memory that a
topology takes is estimated before a cluster is built.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, cast

import topoplan
from topoplan.errors import TopologyError, UsageError
from topoplan.units import counted, format_size, shortened

if TYPE_CHECKING:
    import networkx
    from matplotlib.figure import Figure

BYTES_PER_DEVICE = 330
BYTES_PER_LINK = 350
"""At least the measured bytes while 2048 servers of several machines were built and checked (Python 3.11, 64 bits)."""

UNKNOWN_MEMORY = 4 << 30
"""Bytes that are assumed if the system does not say."""


def check_memory(*, servers: int, devices: int, links: int) -> None:
    """Raise UsageError if a cluster would take more than half of this machine's memory."""
    needed = estimated_bytes(devices=devices, links=links)
    allowed = physical_memory() // 2
    if needed > allowed:
        raise UsageError(
            f"{servers:,} servers are {devices:,} devices and {links:,} links, which take about "
            f"{format_size(needed)} of memory; this machine can give {format_size(allowed)}; choose fewer servers"
        )


def estimated_bytes(*, devices: int, links: int) -> int:
    """Return the bytes that a topology of this size takes while it is built."""
    return devices * BYTES_PER_DEVICE + links * BYTES_PER_LINK


def physical_memory() -> int:
    """Return the bytes of memory of this machine, or `UNKNOWN_MEMORY`."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY


FORMAT = "topoplan.topology/1"
"""The ``format`` of a topology's JSON."""

DEVICE_KINDS = ("gpu", "nvswitch", "pcie", "cpu", "nic", "switch", "helper")
LINK_CHANNELS = ("nvlink", "pcie", "sys", "network", "c2c")
HALF_DUPLEX_CHANNELS = ("pcie", "sys", "c2c")

SLOWEST, FASTEST = 1e-6, 1e9
"""Range of links' bandwidths in GB/s: no machine is beyond it, and quotients of two links stay meaningful."""

MOST_WIRES = 1_000_000
"""Most parallel wires of one link."""

FACTS = {
    "adapter": "the operating system's name of a NIC, such as mlx5_0",
    "arch": "architecture of a CPU as NCCL names it: x86_64, arm64 or ppc64",
    "cpus": "logical CPUs of a NUMA node, such as 0-19,40-59",
    "family": "family number of a CPU",
    "flow_gigabits": "most Gb/s of one connection through a NIC, where the network caps it",
    "functions": "names of the functions of a NIC's port, joined by commas",
    "gcn": "architecture of an AMD GPU, such as gfx90a",
    "gigabits": "speed of a NIC in Gb/s, as NICs are sold",
    "host": "host of a GPU, where its server is an NVLink domain of several",
    "host_bridge": "PCIe host bridge above a GPU or NIC, such as pci0000:00: equal for devices that share one",
    "mig": "UUIDs of the MIG instances of a GPU in MIG mode, joined by commas",
    "model": "model number of a CPU",
    "numa_nodes": "NUMA nodes of a GPU that is near several, such as 0-1",
    "memory_node": "NUMA node that a GPU's memory is, as on Grace CPUs",
    "peer_access": "none if no other GPU of the server may read a GPU's memory, so that copies pass the CPU's",
    "pci": "vendor, device, subsystem vendor and subsystem device of a GPU, NIC or switch, such as 10de:1db1:10de:1212",
    "pulls": "GPUs of the server whose memory a GPU reads faster than they write its own, joined by commas",
    "refused": "GPUs of the server with which a GPU has no peer access, joined by commas: copies pass a CPU's memory",
    "removed": "yes for a GPU that `Topology.remove_gpus` took out and that keeps its number",
    "shared": "ends of the link of which a device is a part, since its directions share a cap, joined by a comma",
    "sm": "compute capability of an NVIDIA GPU without the dot, such as 70",
    "unreached": "GPUs of the server that send nothing to a GPU, since no copy ends, joined by commas",
    "unwritten": "GPUs of the server whose writes to a GPU's memory never end, joined by commas",
    "uuid": "identity of a GPU as the driver gives it",
    "vendor": "vendor of a CPU as the processor gives it, such as GenuineIntel",
}
"""Keys of `Device.facts`; all values are texts, and other keys are kept as they are. `ACCESS_FACTS` name
GPUs that no link of their own joins, whose ``push`` and ``pull`` would say so."""

REMOVED = "removed"
"""The fact of a GPU that was taken out and is not planned for."""

ACCESS_FACTS = PULLS, REFUSED, UNREACHED, UNWRITTEN = "pulls", "refused", "unreached", "unwritten"
"""Facts of a GPU that name peers by how data comes from them."""

IN_NETWORK = ("multicast", "reduce")
"""Capabilities of a switch besides forwarding: copy one input to several outputs, add several inputs."""

MOST_GPUS, LONGEST_SWITCH = 1_000_000, 1000.0
"""Largest number of GPUs of one server, and longest time in seconds, that `Topology.peer_access` may state."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, a helper, or a forwarding device.

    Parameters
    ----------
    name : str
        Unique in its topology, for example ``gpu0`` or ``s1.gpu0``.
    kind : str
        One of gpu, nvswitch, pcie, cpu, nic, switch, helper. A helper adds and copies its input as a GPU does, and has
        no data of its own.
    server : str
        Name of its server; empty for network switches.
    model, busid : str
        Hardware model and bus ID; may be empty.
    numa : int or None
        NUMA node.
    multicast, reduce : bool
        The device can copy one input to several outputs, or add several inputs (in-network collectives).
    facts : tuple of (str, str)
        Other facts, by key in ascending order (see `FACTS`). Plans depend on none of them but ``mig`` and
        ``peer_access``, which readers of machines turn into links (`topoplan.machine.routing.without_peer_access`).
    capable : tuple of str
        Members of `IN_NETWORK` that the device could do if it were used so; plans neither depend on it nor state it.
    forwards : bool
        A NIC or CPU that forwards data of other servers. Without it no route passes a NIC or CPU of a third server
        (`topoplan.machine.routing`).

    Raises
    ------
    TopologyError
        The name is empty, the kind unknown, facts are not texts in ascending order, or ``forwards`` is of another kind.
    """

    name: str
    kind: str
    server: str = ""
    model: str = ""
    busid: str = ""
    numa: int | None = None
    multicast: bool = False
    reduce: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    capable: tuple[str, ...] = ()
    forwards: bool = False

    def __post_init__(self) -> None:
        if self.forwards and self.kind not in ("nic", "cpu"):
            raise TopologyError(
                f"device {self.name}: forwards is a key of NICs and CPUs, got kind {self.kind!r}; leave it out"
            )
        if isinstance(self.capable, Iterable):
            object.__setattr__(self, "capable", tuple(self.capable))
        stated = [*self.capable] if isinstance(self.capable, tuple) else self.capable
        if not isinstance(stated, list) or not all(one in IN_NETWORK for one in stated):
            raise TopologyError(
                f"device {self.name}: capable {format_value(stated)} must list some of "
                f"{', '.join(IN_NETWORK)}"
            )
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise TopologyError(f"device name {self.name!r} is not a text of printable characters")
        if self.kind not in DEVICE_KINDS:
            raise TopologyError(
                f"device {self.name}: kind {self.kind!r} is unknown; use one of {', '.join(DEVICE_KINDS)}"
            )
        facts = self.facts if isinstance(self.facts, (tuple, list)) else (None,)
        pairs = [fact for fact in facts if isinstance(fact, (tuple, list)) and len(fact) == 2]
        keys = [pair[0] for pair in pairs if all(isinstance(part, str) for part in pair)]
        if len(keys) < len(facts) or keys != sorted(set(keys)):
            raise TopologyError(
                f"device {self.name}: facts {format_value(self.facts)} must be texts by key, each key once and in "
                "ascending order"
            )

    def fact(self, key: str) -> str:
        """Return the fact of this key, empty if it is not known."""
        return next((value for known, value in self.facts if known == key), "")


def facts(**known: object) -> tuple[tuple[str, str], ...]:
    """Return a device's facts from keyword arguments; None and empty ones are left out.

    >>> facts(sm=70, uuid="", gigabits=None, adapter="mlx5_0")
    (('adapter', 'mlx5_0'), ('sm', '70'))
    """
    return tuple(sorted((key, str(value)) for key, value in known.items() if value not in (None, "")))


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire, or of a bundle of equal wires.

    Parameters
    ----------
    src, dst : str
        Device names.
    channel : str
        One of nvlink, pcie, sys (between CPU sockets), network, c2c.
    bandwidth : float
        GB/s in this direction, all ``count`` wires together; from `SLOWEST` to `FASTEST`.
    count : int
        Parallel wires that ``bandwidth`` includes, 1 to `MOST_WIRES`.
    latency : float or None
        Seconds; None if unknown, which means the model's default for the channel.
    push, pull : float or None
        GB/s at which ``src`` writes the memory of ``dst``, and at which ``dst`` reads that of ``src``, of two GPUs for
        which they differ; None if such copies never end; both None if they are not stated. ``bandwidth`` is then at
        most the better of the two, and neither is above it.
    shared : float or None
        GB/s of this and the opposite link together, at least ``bandwidth``, equal on both; None if the two directions
        do not share a cap. Of channels pcie, sys and c2c, without ``push`` and ``pull``.

    Raises
    ------
    TopologyError
        A field is out of range.
    """

    src: str
    dst: str
    channel: str
    bandwidth: float
    count: int = 1
    latency: float | None = None
    push: float | None = None
    pull: float | None = None
    shared: float | None = None

    def __post_init__(self) -> None:
        where = f"link {self.src}->{self.dst}"
        if self.src == self.dst:
            raise TopologyError(f"{where}: a link must join two devices")
        if self.channel not in LINK_CHANNELS:
            raise TopologyError(
                f"{where}: channel {self.channel!r} is unknown; use one of {', '.join(LINK_CHANNELS)}"
            )
        if not is_number(self.bandwidth) or not SLOWEST <= self.bandwidth <= FASTEST:
            raise TopologyError(
                f"{where}: bandwidth {format_value(self.bandwidth)} must be a number of GB/s from {SLOWEST:g} to "
                f"{FASTEST:g}; leave out a link that is dead"
            )
        if (
            isinstance(self.count, bool)
            or not isinstance(self.count, int)
            or not 1 <= self.count <= MOST_WIRES
        ):
            raise TopologyError(
                f"{where}: count {format_value(self.count)} must be a whole number from 1 to {MOST_WIRES}"
            )
        if self.latency is not None and (
            not is_number(self.latency) or not math.isfinite(self.latency) or self.latency < 0
        ):
            raise TopologyError(
                f"{where}: latency {format_value(self.latency)} must be seconds, zero or more"
            )
        if self.shared is not None:
            self._check_shared(where)
        if self.push is None and self.pull is None:
            return
        for key, rate in (("push", self.push), ("pull", self.pull)):
            if rate is not None and (not is_number(rate) or not SLOWEST <= rate <= FASTEST):
                raise TopologyError(
                    f"{where}: {key} must be a number of GB/s from {SLOWEST:g} to {FASTEST:g}, got "
                    f"{format_value(rate)}; write null if such copies never end"
                )
        # A link that is slowed down later stays consistent.
        object.__setattr__(self, "bandwidth", min(self.bandwidth, max(self.push or 0, self.pull or 0)))
        for key, rate in (("push", self.push), ("pull", self.pull)):
            object.__setattr__(self, key, rate and min(rate, self.bandwidth))

    def _check_shared(self, where: str) -> None:
        if not is_number(self.shared) or not SLOWEST <= self.shared <= FASTEST:
            raise TopologyError(
                f"{where}: shared must be a number of GB/s from {SLOWEST:g} to {FASTEST:g}, got "
                f"{format_value(self.shared)}; leave it out if the directions do not share a cap"
            )
        if self.channel not in HALF_DUPLEX_CHANNELS or self.access:
            kind = "push and pull" if self.access else f"channel {self.channel}"
            raise TopologyError(
                f"{where}: shared is a key of {', '.join(HALF_DUPLEX_CHANNELS)} links without push and pull, got "
                f"{kind}; leave one of them out"
            )
        object.__setattr__(self, "bandwidth", min(self.bandwidth, self.shared))

    @property
    def pulls(self) -> bool:
        """Whether ``dst`` reads faster than ``src`` writes, so that data is pulled."""
        return (self.pull or 0) > (self.push or 0)

    @property
    def access(self) -> str:
        """Rates of push and pull in words; empty if they are not stated.

        >>> Link("gpu0", "gpu1", "pcie", 52, push=2.6, pull=52).access
        'push 2.6, pull 52'
        """
        if self.push is None and self.pull is None:
            return ""
        rates = (("push", self.push), ("pull", self.pull))
        return ", ".join(f"{key} {'never ends' if rate is None else f'{rate:g}'}" for key, rate in rates)

    @property
    def limits(self) -> str:
        """Rates besides ``bandwidth`` in words: `access`, or the cap of both directions; empty if none is stated.

        >>> Link("gpu0", "cpu0", "pcie", 43, shared=57).limits
        '57 both ways together'
        """
        return self.access if self.shared is None else f"{self.shared:g} both ways together"


def format_value(value: object) -> str:
    """Return a value as text for a message, cut to fit into a line."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "of more than 19 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 1 << 1000


def _check_peer_access(stated: Sequence[tuple[int, float]]) -> None:
    previous = 1
    for gpus, seconds in stated:
        if isinstance(gpus, bool) or not isinstance(gpus, int) or not previous < gpus <= MOST_GPUS:
            raise TopologyError(
                f"peer_access: number of GPUs {format_value(gpus)} must be a whole number from 2 to {MOST_GPUS}, and "
                "above the one before it"
            )
        if not is_number(seconds) or not 0 <= seconds <= LONGEST_SWITCH:
            raise TopologyError(
                f"peer_access of {gpus} GPUs: {format_value(seconds)} must be seconds from 0 to {LONGEST_SWITCH:g}"
            )
        previous = gpus


@dataclass(frozen=True, repr=False)
class Topology:
    """Devices and directed links of one machine or cluster.

    Parameters
    ----------
    name : str
        For example ``dgx-1v``.
    devices : tuple of Device
        GPU number i is the i-th device of kind gpu, in this order.
    links : tuple of Link
        At most one link for each (src, dst, channel): parallel wires are its ``count``.
    notes : tuple of str
        Assumptions, one line each; shown to the user.
    source : str
        Source of the figures.
    peer_access : tuple of (int, float)
        Seconds that switching peer access between NVLink and PCIe takes, by number of GPUs of a server, ascending
        (Blink, appendix A.3: T_dpa). Empty if unknown (see `topoplan.model.dataflow`).

    Raises
    ------
    TopologyError
        Two devices of one name, a link to an unknown device, the same link twice, or ``peer_access`` out of range.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> machine
    <Topology dgx-1v, 8 GPUs, 18 devices, 66 links>
    >>> len(machine.gpus), sum(link.count for link in machine.links if link.channel == "nvlink")
    (8, 48)
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    source: str = ""
    peer_access: tuple[tuple[int, float], ...] = ()
    # An index for `device`, derived from devices, so it takes no part in comparisons.
    _by_name: dict[str, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("devices", Device), ("links", Link), ("notes", str), ("peer_access", tuple)):
            each = getattr(self, name)
            if not isinstance(each, (tuple, list)) or not all(isinstance(one, kind) for one in each):
                raise TopologyError(f"{name} must be a tuple of {kind.__name__}, got {shortened(each)}")
        _check_peer_access(self.peer_access)
        names = {device.name: device for device in self.devices}
        if len(names) != len(self.devices):
            repeated, _ = min(item for item in Counter(d.name for d in self.devices).items() if item[1] > 1)
            raise TopologyError(f"device name {repeated!r} is used twice; names must be unique")
        object.__setattr__(self, "_by_name", names)
        seen = set()
        caps: dict[tuple[str, str, str], float | None] = {}
        for link in self.links:
            for end in (link.src, link.dst):
                if end not in names:
                    raise TopologyError(
                        f"link {link.src}->{link.dst}: device {end!r} is not listed under devices"
                    )
                if link.access and names[end].kind != "gpu":
                    raise TopologyError(
                        f"link {link.src}->{link.dst}: push and pull are of links between two GPUs, got "
                        f"{names[end].kind} {end}; leave them out"
                    )
            key = (link.src, link.dst, link.channel)
            if (shared := caps.setdefault(key, link.shared)) != caps.get(
                (link.dst, link.src, link.channel), shared
            ):
                raise TopologyError(
                    f"link {link.src}->{link.dst} ({link.channel}): shared must be equal in both directions, got "
                    f"{shared} and {caps[link.dst, link.src, link.channel]}; state the GB/s of both together on each"
                )
            if key in seen:
                raise TopologyError(
                    f"link {link.src}->{link.dst} ({link.channel}) is listed twice; "
                    "list it once with the summed bandwidth and count"
                )
            seen.add(key)

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs; position in this tuple is the GPU's number."""
        return tuple(device.name for device in self.devices if device.kind == "gpu")

    @cached_property
    def half_duplex(self) -> bool:
        """Whether the two directions of some link share a cap."""
        return any(link.shared is not None for link in self.links)

    @cached_property
    def split_parts(self) -> frozenset[str]:
        """Devices that stand for a cap of both directions of a link (`topoplan.machine.half_duplex`)."""
        return frozenset(d.name for d in self.devices if d.facts and d.fact("shared"))

    @cached_property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers, in order of first appearance."""
        return tuple(dict.fromkeys(device.server for device in self.devices if device.server))

    def device(self, name: str) -> Device:
        """Return the device of this name; TopologyError if it does not exist."""
        if not isinstance(name, str) or name not in self._by_name:
            raise TopologyError(f"topology {self.name} has no device {shortened(name)}")
        return self._by_name[name]

    def __repr__(self) -> str:
        gpus = len(self.select(None)) if self.gpus else 0
        return f"<Topology {self.name}, {counted(gpus, 'GPU')}, {len(self.devices)} devices, {len(self.links)} links>"

    def select(self, gpus: Sequence[int] | None) -> tuple[int, ...]:
        """Return the GPU numbers of an allocation, checked and in the given order; all remaining GPUs for None.

        Raises
        ------
        UsageError
            A number is repeated, out of range or taken out (`remove_gpus`), or the selection or machine is empty.

        Examples
        --------
        >>> import topoplan
        >>> topoplan.load("dgx-1v").select([7, 1])
        (7, 1)
        """
        total = len(self.gpus)
        if total == 0:
            raise UsageError(f"topology {self.name} has no GPU to plan for")
        removed = {name for name, device in self._by_name.items() if device.facts and device.fact(REMOVED)}
        if gpus is None:
            return tuple(gpu for gpu, name in enumerate(self.gpus) if name not in removed)
        try:
            chosen = tuple(index(gpu) for gpu in gpus)
        except TypeError:
            raise UsageError(f"GPUs {gpus!r} are not all whole numbers; write them as [0, 1]") from None
        if not chosen:
            raise UsageError("the GPU list is empty; name at least one GPU, for example --gpus 0,1")
        for gpu in chosen:
            if not 0 <= gpu < total:
                raise UsageError(f"GPU {gpu} is out of range: {self.name} has GPUs 0 to {total - 1}")
            if removed and self.gpus[gpu] in removed:
                raise UsageError(f"GPU {gpu} of {self.name} was taken out; choose among the remaining GPUs")
        for gpu, times in Counter(chosen).items():
            if times > 1:
                raise UsageError(f"GPU {gpu} is named twice; name each GPU once")
        return chosen

    def subset(self, gpus: Sequence[int] | None) -> Topology:
        """Return the machine as an allocation may use it, without the other GPUs and their links.

        The GPUs stand in the given order, which is that of the ranks. Switches, CPUs and NICs stay. Device names do not
        change.

        Examples
        --------
        >>> import topoplan
        >>> topoplan.load("dgx-1v").subset([7, 4, 5]).gpus
        ('gpu7', 'gpu4', 'gpu5')
        """
        every = self.gpus
        chosen = self.select(gpus)
        kept = [every[gpu] for gpu in chosen]
        out = set(every) - set(kept)
        devices = tuple(device for device in self.devices if device.name not in out)
        if list(chosen) != sorted(chosen):
            ordered = iter(kept)
            devices = tuple(
                self.device(next(ordered)) if device.kind == "gpu" else device for device in devices
            )
        elif not out:
            return self
        links = tuple(link for link in self.links if link.src not in out and link.dst not in out)
        return replace(self, devices=devices, links=links)

    def remove_gpus(self, gpus: Iterable[int]) -> Topology:
        """Return the machine without some GPUs and their links; the others keep their numbers.

        This is ``--without-gpu`` of the command line. `topoplan.without_gpus` also takes the devices out, so that the
        GPUs behind them get lower numbers. UsageError if a GPU does not exist, or none remains.

        Examples
        --------
        >>> import topoplan
        >>> machine = topoplan.load("dgx-1v").remove_gpus([5])
        >>> topoplan.plan(machine, gpus=[4, 6, 7]).ranks
        ('gpu4', 'gpu6', 'gpu7')
        >>> topoplan.without_gpus("dgx-1v", [5]).gpus.index("gpu6")
        5
        """
        from topoplan.machine.variants import gpu_numbers_given, remaining_gpus

        named = gpu_numbers_given(self, gpus)
        if not named:
            return self
        remaining_gpus(self, named)
        out = [self.gpus[gpu] for gpu in named]
        return replace(
            self,
            devices=tuple(
                replace(one, facts=facts(**dict(one.facts), removed="yes")) if one.name in out else one
                for one in self.devices
            ),
            links=tuple(link for link in self.links if link.src not in out and link.dst not in out),
            notes=(*self.notes, f"taken out: {', '.join(out)}"),
        )

    def remove_links(self, links: Iterable[str]) -> Topology:
        """Return the machine without some links, such as ``gpu0-gpu3``; see `topoplan.without_links`."""
        from topoplan.machine.variants import without_links

        return without_links(self, links)

    def degrade_links(self, bandwidths: Mapping[str, float]) -> Topology:
        """Return the machine with some links slowed down to GB/s per direction; see `topoplan.slow_links`.

        Examples
        --------
        >>> import topoplan
        >>> topoplan.plan(topoplan.load("dgx-1v").degrade_links({"gpu1-gpu2": 12.5})).algbw  # doctest: +ELLIPSIS
        80.35...
        """
        from topoplan.machine.variants import slow_links

        return slow_links(self, bandwidths)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the machine, as ``topoplan show --plot`` draws it."""
        from topoplan.operate.plot.machine import draw_topology

        return draw_topology(self)

    def settled(self) -> Topology:
        """Return the machine as a plan states it, without ``capable`` of its switches."""
        if not any(device.capable for device in self.devices):
            return self
        stated = (replace(each, capable=()) if each.capable else each for each in self.devices)
        return replace(self, devices=tuple(stated))

    def to_object(self) -> dict[str, object]:
        """Return the JSON object of the machine, keys in the format's order, defaults left out."""
        head: dict[str, object] = {"format": FORMAT, "name": self.name}
        if self.source:
            head["source"] = self.source
        if self.notes:
            head["notes"] = list(self.notes)
        if self.peer_access:
            head["peer_access"] = {str(gpus): seconds for gpus, seconds in self.peer_access}
        head["devices"] = [_stated(device, _DEVICE_DEFAULTS) for device in self.devices]
        head["links"] = [_stated(link, _LINK_DEFAULTS) for link in self.links]
        return head

    def to_json(self) -> str:
        """Return topology JSON, one device or link to a line; `topoplan.load` reads it back equal.

        Examples
        --------
        >>> import topoplan
        >>> machine = topoplan.load("v100x4")
        >>> topoplan.load(machine.to_json()) == machine
        True
        """
        parts = []
        for key, value in self.to_object().items():
            if key in ("devices", "links"):
                items = cast("list[object]", value)
                rows = ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in items)
                parts.append(f'"{key}": [\n{rows}\n]' if rows else f'"{key}": []')
            else:
                parts.append(f'"{key}": {json.dumps(value, ensure_ascii=False)}')
        return "{" + ",\n ".join(parts) + "}\n"

    @staticmethod
    def from_networkx(
        graph: GraphLike,
        *,
        kind: str = "kind",
        channel: str = "channel",
        bandwidth: str | float = "bandwidth",
        name: str = "",
    ) -> Topology:
        """Return the machine of a networkx graph of any kind; an undirected edge is a link in both directions.

        Parameters
        ----------
        graph : networkx.Graph, DiGraph, MultiGraph or MultiDiGraph
            Nodes are devices, edges are links. Attributes that `to_networkx` documents are read, others are ignored. A
            node that is not a text is named after its kind: ``gpu0`` for 0. Whole numbers are taken in ascending order,
            so that node 0 of GPUs 0 to n - 1 is rank 0; other nodes in the order of the graph.
        kind : str
            Attribute of nodes with the kind of device; or a kind, such as ``gpu``, of all nodes without ``kind``.
        channel : str
            Attribute of edges with the channel; or a channel, such as ``nvlink``, of all edges without ``channel``.
        bandwidth : str or float
            Attribute of edges with GB/s per direction; or GB/s of all edges without ``bandwidth``.
        name : str
            Name of the machine; that of the graph if it is empty.

        Raises
        ------
        TopologyError
            Attributes are missing, all of which the message names; or a value is wrong, as for `topoplan.load`.

        See Also
        --------
        to_networkx, topoplan.load

        Examples
        --------
        >>> import networkx, topoplan
        >>> ring = topoplan.Topology.from_networkx(networkx.cycle_graph(4), kind="gpu", channel="nvlink", bandwidth=25)
        >>> ring, topoplan.plan(ring).algbw
        (<Topology machine, 4 GPUs, 4 devices, 8 links>, 33.333333333333336)
        >>> machine = topoplan.load("dgx-1v")
        >>> topoplan.Topology.from_networkx(machine.to_networkx()) == machine
        True
        """
        from topoplan.machine.topology_json import completed_graph

        return topoplan.load(completed_graph(graph, kind, channel, bandwidth, name))

    def to_networkx(self) -> networkx.MultiDiGraph:
        """Return the machine as a graph; `from_networkx` and `topoplan.load` read it back equal.

        Returns
        -------
        networkx.MultiDiGraph
            A node for each device, by its name, with the attributes ``kind``, ``server``, ``model``, ``busid``,
            ``numa``, ``multicast``, ``reduce``, ``facts`` (a dict of texts) and, if not empty, ``capable`` (a list of
            texts) and ``forwards`` of `Device`. An edge for each link, its key the channel, with the attributes
            ``channel``, ``bandwidth`` (GB/s), ``count``, ``latency`` (s) and, if stated, ``push``, ``pull`` and
            ``shared`` of `Link`, and ``position``, its place among the links of the machine, since a graph keeps none.
            Attributes of the graph: ``name``, ``source``, ``notes`` (a list of texts), ``peer_access`` (a dict of
            seconds by number of GPUs).

        Examples
        --------
        The minimum cut between two GPUs of a DGX-1V is all links of one of them over NVLink, 150 GB/s.

        >>> import networkx, topoplan
        >>> graph = topoplan.load("dgx-1v").to_networkx()
        >>> graph.edges["gpu0", "gpu3", "nvlink"]["bandwidth"], graph.nodes["gpu0"]["server"]
        (50.0, 's0')
        >>> wires = networkx.DiGraph()
        >>> for src, dst, link in graph.edges(data=True):
        ...     if link["channel"] == "nvlink":
        ...         wires.add_edge(src, dst, capacity=link["bandwidth"])
        >>> networkx.minimum_cut_value(wires, "gpu0", "gpu7")
        150.0
        >>> topoplan.load(graph) == topoplan.load("dgx-1v")
        True
        """
        from networkx import MultiDiGraph

        graph = MultiDiGraph(
            name=self.name, source=self.source, notes=list(self.notes), peer_access=dict(self.peer_access)
        )
        for device in self.devices:
            known = {key: getattr(device, key) for key in _DEVICE_DEFAULTS if key != "name"}
            known["facts"] = dict(device.facts)
            known["capable"] = list(device.capable)
            graph.add_node(
                device.name,
                **{key: known[key] for key in known if key not in ("capable", "forwards") or known[key]},
            )
        for position, link in enumerate(self.links):
            left_out = ("src", "dst") if link.access else ("src", "dst", "push", "pull")
            known = {key: getattr(link, key) for key in _LINK_DEFAULTS if key not in left_out}
            if link.shared is None:
                del known["shared"]
            graph.add_edge(link.src, link.dst, key=link.channel, **known, position=position)
        return graph


def without_named(topology: Topology, names: Iterable[str], *notes: str) -> Topology:
    """Return the machine without some devices and their links, and with more notes."""
    gone = set(names)
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name not in gone),
        links=tuple(link for link in topology.links if link.src not in gone and link.dst not in gone),
        notes=(*topology.notes, *notes),
    )


def without_bare_switches(topology: Topology) -> Topology:
    """Return the machine without switches that have lost all links: its file would be refused for them."""
    linked = {end for link in topology.links for end in (link.src, link.dst)}
    switches = (device.name for device in topology.devices if device.kind in ("nvswitch", "switch"))
    bare = [name for name in switches if name not in linked]
    return without_named(topology, bare) if bare else topology


_DEVICE_DEFAULTS = {one.name: one.default for one in fields(Device)}
_LINK_DEFAULTS = {one.name: one.default for one in fields(Link)}


def _stated(item: Device | Link, defaults: dict[str, object]) -> dict[str, object]:
    """Return the fields of a device or link that differ from their default, in order; facts as an object of texts."""
    stated = {key: value for key, default in defaults.items() if (value := getattr(item, key)) != default}
    if "capable" in stated:
        stated["capable"] = list(cast("tuple[str, ...]", stated["capable"]))
    if "facts" in stated:
        stated["facts"] = dict(cast("tuple[tuple[str, str], ...]", stated["facts"]))
    if isinstance(item, Link) and item.access:
        stated |= {"push": item.push, "pull": item.pull}
    return stated


class GraphLike(Protocol):
    """A ``networkx.MultiDiGraph``, for type checkers without stubs of networkx."""

    def is_directed(self) -> bool: ...
    def is_multigraph(self) -> bool: ...


TopologyLike: TypeAlias = Topology | str | os.PathLike[str] | GraphLike
"""A machine, or what `topoplan.load` reads one from: a library name, a path, ``-``, a text, or a graph."""


def as_topology(machine: TopologyLike) -> Topology:
    """Return the machine itself, or the one that `topoplan.load` reads; errors as there."""
    # The reader stands above this room, so it is called by its public name.
    return machine if isinstance(machine, Topology) else topoplan.load(machine)
