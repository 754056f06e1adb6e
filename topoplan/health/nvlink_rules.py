"""What NVLinks of a server lack: held against the machine that it is, or against each other.

Where nobody knows the machine, a wire runs as fast one way as the other and as most do, and GPUs at a switch have as
many wires as most. Of GPUs that are wired to each other, a pair has lost wires where three quarters of the pairs have
more and all have some, or where nearly all have some; and so have a few of eight GPUs, sixteen, … if the others have
equal sums.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from topoplan.health.faults import SLOW, Ends, Fault, compared, lower_median, most_have
from topoplan.health.resemblance import Resemblance, server_nvlinks, shape_of
from topoplan.topology import Link, Topology
from topoplan.units import counted

MOST = 3 / 4
"""Part of the pairs, or of the GPUs, that have the same NVLinks where the others are said to have fewer."""

NEARLY_ALL = 0.9
"""Part of the pairs of GPUs that have NVLinks, where the others are said to lack them: more than this."""

_WIRED = re.compile(r"SXM[3-9]|HBM3|GB[23]00")
"""In the names of GPUs that are sold on boards with NVLink between every two alone. V100-SXM2 are not: see a DGX-1."""


def nvlink_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """What NVLinks lack: of the machine that a server is, else of what is usual in it."""
    have = {(link.src, link.dst): link for link in server_nvlinks(server)}
    if not have:
        return _dark(server)
    if found.wires:
        wanted = {(link.src, link.dst): link for link in found.wires}
    elif any(server.device(end).kind == "nvswitch" for ends in have for end in ends):
        wanted = _usual_ports(server, have)
    else:
        wanted = _usual_pairs(server, have)
    gpus = [gpu for gpu in server.gpus if any(gpu in ends for ends in wanted)]
    faults = compared(have, wanted, gpus)
    if found.machine is not None or faults:
        return faults
    return _fewer(server)


def _dark(server: Topology) -> list[Fault]:
    """All GPUs of a server without any NVLink, whose boards join every two of them; those in MIG mode are cut off."""
    gpus = [server.device(gpu) for gpu in server.gpus]
    wired = len(gpus) > 1 and all(_WIRED.search(gpu.model) and not gpu.fact("mig") for gpu in gpus)
    should_be = "some, as on every such board (is the fabric manager running?)"
    return [Fault("no NVLink", server.gpus, "no NVLink", should_be)] if wired else []


def _usual_ports(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """For each switch as many wires as most of the GPUs have, both ways, for all of them."""
    rate = lower_median([link.bandwidth / link.count for link in have.values()])
    wanted: dict[Ends, Link] = {}
    for switch in (device.name for device in server.devices if device.kind == "nvswitch"):
        ports = {gpu: _better(have.get((gpu, switch)), have.get((switch, gpu))) for gpu in server.gpus}
        usual = most_have(port.count if port else 0 for port in ports.values()) or 0
        for gpu, port in ports.items():
            count = max(usual, port.count if port else 0)
            if count:
                wanted |= _whole_bundle(gpu, switch, count, rate, port)
    return wanted


def _usual_pairs(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """What each pair has, both ways and at the rate of a whole wire; nearly all pairs say what the others should."""
    rate = lower_median([link.bandwidth / link.count for link in have.values()])
    pairs: dict[Ends, Link] = {}
    for first, second in combinations(server.gpus, 2):
        best = _better(have.get((first, second)), have.get((second, first)))
        if best is not None:
            pairs[first, second] = best
    every = len(server.gpus) * (len(server.gpus) - 1) // 2
    (count, times), *_ = Counter(link.count for link in pairs.values()).most_common(1)
    mesh = times >= MOST * every and (len(pairs) == every > 1 or len(pairs) > NEARLY_ALL * every)
    mesh = mesh and not shape_of(server).regular
    wanted: dict[Ends, Link] = {}
    for pair in combinations(server.gpus, 2):
        there = pairs.get(pair)
        number = max(there.count if there else 0, count if mesh else 0)
        if number:
            wanted |= _whole_bundle(*pair, number, rate, there)
    return wanted


def _whole_bundle(first: str, second: str, count: int, rate: float, there: Link | None) -> dict[Ends, Link]:
    """So many wires both ways: at the rate of what is there, unless that is less than the usual."""
    bandwidth = max(count * rate, there.bandwidth if there else 0.0)
    if there is not None and there.count == count and there.bandwidth >= SLOW * count * rate:
        bandwidth = there.bandwidth
    ends = ((first, second), (second, first))
    return {(a, b): Link(a, b, "nvlink", bandwidth, count) for a, b in ends}


def _better(first: Link | None, second: Link | None) -> Link | None:
    """The faster of a wire's directions, as far as they are there."""
    return max((one for one in (first, second) if one), key=lambda one: one.bandwidth, default=None)


def _fewer(server: Topology) -> list[Fault]:
    """GPUs of a machine that nobody knows which have fewer NVLinks than most."""
    shape = shape_of(server)
    counts = dict(zip(shape.gpus, shape.wires, strict=True))
    present = {gpu: count for gpu, count in counts.items() if count}
    most = max(present.values())
    count = len(counts)
    lost = {gpu: most - count for gpu, count in counts.items() if count < most}
    # A dead wire is missing at both of its ends; counts that cannot pair up are the machine's own.
    paired = sum(lost.values()) % 2 == 0 and 2 * max(lost.values(), default=0) <= sum(lost.values())
    if not Resemblance().whole(server) or len(lost) > (1 - MOST) * count or not paired:
        return []
    return [
        Fault(
            "fewer NVLinks",
            (gpu,),
            counted(counts[gpu], "NVLink"),
            f"{most} as most GPUs have",
        )
        for gpu in lost
    ]
