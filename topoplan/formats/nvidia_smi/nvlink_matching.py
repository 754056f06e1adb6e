"""The GPUs of a listing of NVLinks as GPUs of a topology, or why the two are of different machines.

GPU n of a listing is ``gpu<n>``, or the n-th GPU where GPUs have other names. A GPU may list more NVLinks than the
topology gives it: some are not wired, and ``nvidia-smi topo -m`` leaves out those that were down. Never may it list
fewer, or have more that are up.

A driver prints the signalling rate (25.781 GB/s for a V100, 26.562 for an H100), topologies state nominal or effective
ones. So a link is judged against its like: it is slow if it is below the fastest of all listed links of this model,
or below the nominal rate of the generation where even the fastest is more than a tenth below that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.nvlink_status import GpuNvlinks
from topoplan.hosts.gpu_identity import compute_capability
from topoplan.hosts.link_rates import MOST_LINKS, GpuGeneration, generation_of
from topoplan.topology import Device, Topology
from topoplan.units import exact

SLOW_BELOW = Fraction(9, 10)
"""Share of the nominal rate below which all links of a listing are slow."""

_PRODUCT = re.compile(r"\b((?:GH|GB|MI|[PVAHBLTK])\d{1,4})[A-Z]?\b|\bRTX (\d{4})\b")


def product(model: str) -> str:
    """The product that a model text names, empty where none is recognised.

    Examples
    --------
    >>> [product(text) for text in ("Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "GeForce RTX 3090", "GPU")]
    ['V100', 'H100', '3090', '']
    """
    match = _PRODUCT.search(model)
    return (match[1] or match[2]) if match else ""


def generation(model: str) -> GpuGeneration | None:
    """Its generation, None where it is not known."""
    capability = compute_capability(model)
    return None if capability is None else generation_of(capability)


def speed_shares(gpus: Sequence[GpuNvlinks]) -> dict[tuple[int, int], Fraction]:
    """What share of its normal speed each link that is up runs at, at most 1, by GPU and link; 1 where none is stated.

    Examples
    --------
    >>> from topoplan.formats.nvidia_smi.nvlink_status import parse_nvlink_status
    >>> lines = ["GPU 0: Tesla V100-SXM2-32GB", "Link 0: 25.781 GB/s", "Link 1: 25.781 GB/s", "Link 2: 12.8905 GB/s"]
    >>> [str(share) for share in speed_shares(parse_nvlink_status("\\n".join(lines))).values()]
    ['1', '1', '1/2']
    """
    normal: dict[str, Fraction] = {}
    for gpu in gpus:
        speeds = [exact(link.speed) for link in gpu.active if link.speed is not None]
        normal[_like(gpu)] = max(normal.get(_like(gpu), Fraction(0)), *speeds, Fraction(0))
    for gpu in gpus:
        made = generation(gpu.model)
        if made and normal[_like(gpu)] < SLOW_BELOW * exact(made.nvlink):
            normal[_like(gpu)] = exact(made.nvlink)
    return {
        (gpu.number, link.index): Fraction(1)
        if link.speed is None
        else min(Fraction(1), exact(link.speed) / normal[_like(gpu)])
        for gpu in gpus
        for link in gpu.active
    }


def _like(gpu: GpuNvlinks) -> str:
    """What GPUs of equal links have in common."""
    return product(gpu.model) or gpu.model


ANOTHER = "the listing is of another machine; give that of this one"


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU of which a listing says how its NVLinks are.

    Parameters
    ----------
    name : str
        Of the device.
    wires : dict of str to int
        NVLinks that the topology gives it, by device at the far end.
    up : tuple of (str, Fraction)
        For each link that is up, the bus id of its far end, empty if that is hidden, and the share of its normal
        speed at which it runs.
    unwired : int
        Links that the GPU lists beyond those that the topology gives it; none of them is up.
    """

    name: str
    wires: dict[str, int]
    up: tuple[tuple[str, Fraction], ...]
    unwired: int

    @property
    def dead(self) -> int:
        """Links that the topology has and that are down."""
        return sum(self.wires.values()) - len(self.up)

    @property
    def slow(self) -> tuple[Fraction, ...]:
        """Shares of the links that are up but slow."""
        return tuple(share for _, share in self.up if share < 1)


def match_gpus(topology: Topology, gpus: Sequence[GpuNvlinks]) -> tuple[ListedGpu, ...]:
    """The listed GPUs on the topology.

    Raises
    ------
    TopologyError
        The topology has several servers, or the two are of different machines: a number, model, uuid or number of
        links contradicts; the message names the GPU.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.formats.nvidia_smi.nvlink_status import parse_nvlink_status
    >>> lines = ["GPU 3: V100", *(f"Link {i}: {'<inactive>' if i > 3 else '25.781 GB/s'}" for i in range(6))]
    >>> gpu, = match_gpus(topoplan.load("dgx-1v"), parse_nvlink_status("\\n".join(lines)))
    >>> gpu.name, gpu.dead, gpu.wires
    ('gpu3', 2, {'gpu0': 2, 'gpu1': 1, 'gpu2': 2, 'gpu7': 1})
    """
    if len(topology.servers) > 1:
        raise TopologyError(
            f"{topology.name} has {len(topology.servers)} servers, and a listing of NVLinks is of one; put it on the "
            "machine of which they are made"
        )
    shares = speed_shares(gpus)
    listed = []
    for gpu in gpus:
        device = _device(topology, gpu.number)
        _check_identity(topology, gpu, device)
        wires = _wires(topology, device.name)
        _check_counts(topology, gpu, sum(wires.values()))
        up = tuple((link.remote, shares[gpu.number, link.index]) for link in gpu.active)
        unwired = 0 if gpu.total is None else gpu.total - sum(wires.values())
        listed.append(ListedGpu(device.name, wires, up, unwired))
    return tuple(listed)


def _device(topology: Topology, number: int) -> Device:
    names = topology.gpus
    numbered = all(re.fullmatch(r"gpu\d+", name) for name in names)
    if f"gpu{number}" in names:
        return topology.device(f"gpu{number}")
    if numbered or number >= len(names):
        known = f"{names[0]} to {names[-1]}" if names else "none"
        raise TopologyError(
            f"GPU {number} is in the listing, but the GPUs of {topology.name} are {known}; {ANOTHER}"
        )
    return topology.device(names[number])


def _check_identity(topology: Topology, gpu: GpuNvlinks, device: Device) -> None:
    uuid = device.fact("uuid")
    if uuid and gpu.uuid and uuid.lower() != gpu.uuid.lower():
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.uuid} in the listing and {uuid} in {topology.name}; {ANOTHER}"
        )
    listed, known = product(gpu.model), product(device.model)
    if listed and known and listed != known:
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.model!r} in the listing and {device.model!r} in {topology.name}; {ANOTHER}"
        )
    sm, made = device.fact("sm"), generation(gpu.model)
    other = generation_of(int(sm)) if re.fullmatch("[0-9]{1,3}", sm) else None
    if made and other and made != other:
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.model!r} in the listing and has compute capability {sm} in {topology.name}; "
            f"{ANOTHER}"
        )


def _check_counts(topology: Topology, gpu: GpuNvlinks, wired: int) -> None:
    number, up = gpu.number, len(gpu.active)
    made = generation(gpu.model)
    most = made.links if made else MOST_LINKS
    if len(gpu.links) > most:
        owner = f"a {product(gpu.model) or gpu.model}" if made else "no GPU"
        raise TopologyError(
            f"GPU {number} lists {len(gpu.links)} NVLinks, and {owner} has {'only' if made else 'more than'} {most}; "
            "give the output of nvidia-smi nvlink as it is"
        )
    if gpu.total is not None and gpu.total < wired:
        raise TopologyError(
            f"GPU {number} lists {gpu.total} NVLinks, and {topology.name} gives it {wired}; {ANOTHER}"
        )
    if up > wired:
        raise TopologyError(
            f"GPU {number} lists {up} NVLinks that are up, and {topology.name} gives it {wired} (NVLinks to CPUs are "
            f"in no matrix); {ANOTHER}"
        )


def _wires(topology: Topology, gpu: str) -> dict[str, int]:
    """NVLinks of a GPU by far end, as many in both directions."""
    out = {link.dst: link.count for link in topology.links if link.channel == "nvlink" and link.src == gpu}
    back = {link.src: link.count for link in topology.links if link.channel == "nvlink" and link.dst == gpu}
    for end in (*out, *back):
        forth, reverse = out.get(end, 0), back.get(end, 0)
        if forth != reverse:
            raise TopologyError(
                f"{topology.name} has {forth} NVLinks {gpu}->{end} and {reverse} {end}->{gpu}; listings are put on "
                "machines with as many in both directions"
            )
    return out
