"""State the bandwidth of links and the identity of GPUs by generation: nominal figures and NCCL's.

Nominal: NVLink figures of NVIDIA's white papers; PCIe and socket figures that a transfer between GPUs gets, as in
NCCL's ``src/graph/topo.cc`` (``kvDictPciGen``: 0.75 GB/s for a lane of generation 3, doubled by each generation) and
``src/graph/topo.h`` (``BDW_QPI_BW`` 6, in older releases ``QPI_WIDTH`` 8; ``SKL_QPI_BW`` 10, ``AMD_BW`` 16,
``SRP_QPI_BW`` 22, ``ERP_QPI_BW`` 40).

NCCL's: NVLink and CPU figures of ``src/graph/topo.h`` (2.27.5 to 2.30.7), a lane's of ``kvDictPciGen``, XGMI's of
RCCL's ``src/graph/topo.h``. They are lower: a V100's NVLink counts 20 GB/s for NCCL and 25 in the library. Older
releases count a Hopper's NVLink at 20 (to 2.19), a Blackwell's as a Hopper's (to 2.24), Xeons of generations 4 and 5
as Skylake (to 2.25). NCCL compares the beginning of a lane's rate as text: it does not know ``16.0 GT/s`` without
``PCIe``. Deliberately absent: the surcharge of a fifth for traffic through an Intel CPU (``INTEL_P2P_OVERHEAD``), which
belongs to NCCL's search.

A GPU's compute capability, or for AMD its architecture and compute units, comes from its facts, then from its model.
NCCL takes the rate of an NVLink from the compute capability, RCCL that of an XGMI link from the architecture.
Sources: NVIDIA, CUDA GPU compute capability; AMD, ROCm GPU specifications.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.machine.topology import IN_NETWORK, Device, Topology, facts, is_number
from topoplan.units import exact, nearest_float

PCIE_X16 = {3: 12.0, 4: 24.0, 5: 48.0}
"""GB/s of a 16-lane PCIe link, by generation."""

SOCKET = {
    "Broadwell": 6.0,
    "Broadwell, older NCCL": 8.0,
    "Skylake to Ice Lake": 10.0,
    "Zen 1 to 2": 16.0,
    "Sapphire Rapids": 22.0,
    "Emerald Rapids": 40.0,
}
"""GB/s between two CPU sockets, by processor."""

PEER_ACCESS = ((3, 0.0035), (6, 0.0035), (7, 0.0037), (8, 0.0037))
"""Seconds that a DGX-1V takes to switch peer access between NVLink and PCIe (T_dpa), by number of GPUs.

Fitted to Blink (MLSys 2020), figure 26, broadcast over NVLink alone and over both. Equation 8 with the measured
NVLink rate, 8 GB/s of PCIe and a buffer of 500 MB gives 3.6, 3.9, 3.7, 2.9, 4.0 and 3.4 ms for 3 to 8 GPUs; bars read
to 0.5 GB/s leave 0.3 to 0.5 ms open. These are the closest times, in tenths of a millisecond, that do not fall with
the number of GPUs. The size of 500 MB is assumed, since the figure's values carry none: with 1 GB all times double.
"""


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """NVLinks of a GPU generation, named by one of its GPUs.

    ``nvlink``, ``pcie`` and ``socket`` are in GB/s per direction of one NVLink, of the GPU's PCIe link, and between the
    CPU sockets of its time.
    """

    name: str
    links: int
    nvlink: float
    pcie: float
    socket: float


P100 = GpuGeneration("P100", 4, 20.0, PCIE_X16[3], SOCKET["Broadwell"])
V100 = GpuGeneration("V100", 6, 25.0, PCIE_X16[3], SOCKET["Broadwell, older NCCL"])
A100 = GpuGeneration("A100", 12, 25.0, PCIE_X16[4], SOCKET["Zen 1 to 2"])
H100 = GpuGeneration("H100", 18, 25.0, PCIE_X16[5], SOCKET["Sapphire Rapids"])
B200 = GpuGeneration("B200", 18, 50.0, PCIE_X16[5], SOCKET["Emerald Rapids"])
GA102 = GpuGeneration("RTX 3090", 4, 14.0625, PCIE_X16[4], SOCKET["Skylake to Ice Lake"])
UNKNOWN = GpuGeneration("", 0, 25.0, PCIE_X16[3], SOCKET["Broadwell"])
"""The slowest figures, for a GPU that shows no NVLink."""

BY_CAPABILITY = {60: P100, 70: V100, 80: A100, 86: GA102, 90: H100, 100: B200}
"""Generation of the GPUs with NVLinks, from this compute capability on."""

MOST_LINKS = max(generation.links for generation in BY_CAPABILITY.values())
"""Most NVLinks of a GPU."""


def generation_of(capability: int) -> GpuGeneration | None:
    """Return the generation of a GPU by its compute capability, such as 70; None if it is older than all known ones."""
    return BY_CAPABILITY.get(max((least for least in BY_CAPABILITY if least <= capability), default=0))


def checked_rate(name: str, value: float | None) -> float | None:
    """Return a user's bandwidth in GB/s, or None for None; UsageError unless it is a finite number above zero."""
    if value is None:
        return None
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} must be a finite number of GB/s above zero, such as 25, got {value!r}")
    return float(value)


_COMPUTE_CAPABILITY = (
    (r"P100", 60),
    (r"P40|P4\b|GTX 10\d\d|TITAN X", 61),
    (r"V100|TITAN V|GV100", 70),
    (r"T4\b|RTX 20\d\d|GTX 16\d\d|RTX (4|5|6|8)000\b(?! Ada)", 75),
    (r"A100|A800|A30X?\b", 80),
    (r"A40\b|A10\b|A10G|A16\b|A2\b|RTX 30\d\d|\bA\d[05]00\b", 86),
    (r"L4\b|L40S?\b|L20\b|RTX 40\d\d|Ada", 89),
    (r"H100|H200|H800|H20\b|GH200", 90),
    (r"B300|GB300", 103),
    (r"B100|B200|GB200", 100),
    (r"RTX 50\d\d|RTX PRO", 120),
    (r"GB10\b", 121),
)
_AMD = (
    (r"MI50|MI60|Radeon VII", "gfx906", 60),
    (r"MI100", "gfx908", 120),
    (r"MI250X", "gfx90a", 110),
    (r"MI2[15]0|MI200", "gfx90a", 104),
    (r"MI300A", "gfx942", 228),
    (r"MI300X|MI325X?|MI300", "gfx942", 304),
    (r"MI35[05]X?", "gfx950", 256),
)
_WITHOUT_GDR = re.compile(r"GeForce|GTX|RTX|TITAN", re.IGNORECASE)

UNKNOWN_CAPABILITY, UNKNOWN_GCN, UNKNOWN_UNITS = 80, "gfx90a", 104


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """Attributes of a ``gpu`` element: ``sm``, and for AMD ``gcn`` and ``arch``.

    ``invented`` names the attributes that no fact states. ``guessed`` says that not even the model determines them;
    NCCL then asks the driver for missing ones.
    """

    attributes: tuple[tuple[str, str], ...]
    invented: tuple[str, ...]
    guessed: bool

    @property
    def capability(self) -> int:
        """Compute capability without the dot, `UNKNOWN_CAPABILITY` if unknown; the compute units of an AMD GPU."""
        return int(dict(self.attributes).get("sm", UNKNOWN_CAPABILITY))

    @property
    def gcn(self) -> str:
        """Architecture of an AMD GPU, such as gfx90a."""
        return dict(self.attributes).get("gcn", "")


def compute_capability(model: str) -> int | None:
    """Return the compute capability of an NVIDIA GPU by its model's name, without the dot."""
    return next((sm for name, sm in _COMPUTE_CAPABILITY if re.search(name, model)), None)


def is_amd(gpus: Iterable[Device]) -> bool:
    """Return whether any GPU is AMD's, so that the file is for RCCL."""
    return any(gpu.fact("gcn") or _amd_model(gpu.model) or "AMD" in gpu.model for gpu in gpus)


def is_apple(gpus: Iterable[Device]) -> bool:
    """Return whether any GPU is Apple's; NCCL does not run there."""
    return any(gpu.model.startswith("Apple") for gpu in gpus)


def gpu_identity(gpu: Device, *, amd: bool) -> GpuIdentity:
    """Return the attributes of a GPU for a file."""
    if amd:
        return _amd_identity(gpu)
    if gpu.fact("sm"):
        return GpuIdentity((("sm", gpu.fact("sm")),), (), False)
    known = compute_capability(gpu.model)
    if known is None:
        return GpuIdentity((), (), True)
    return GpuIdentity((("sm", str(known)),), ("sm",), False)


def direct_to_nic(gpu: Device) -> bool:
    """Return whether NICs can read the GPU's memory: all but GeForce and workstation models."""
    return not _WITHOUT_GDR.search(gpu.model)


def _amd_identity(gpu: Device) -> GpuIdentity:
    known = _amd_model(gpu.model)
    gcn, units = known or (UNKNOWN_GCN, UNKNOWN_UNITS)
    stated = {key: gpu.fact(key) for key in ("sm", "gcn") if gpu.fact(key)}
    # Capability bits of every GPU of these architectures (hipDeviceArch_t), the same in all of RCCL's own files.
    wanted = {"sm": str(units), "gcn": gcn} | stated | {"arch": "38911"}
    invented = tuple(key for key in wanted if key not in stated)
    return GpuIdentity(tuple(wanted.items()), invented, known is None and "gcn" not in stated)


def _amd_model(model: str) -> tuple[str, int] | None:
    return next(((gcn, units) for name, gcn, units in _AMD if re.search(name, model)), None)


THIRD_GENERATION = 90
"""Compute capability of the first GPUs whose NVSwitches copy and add (NVLink SHARP)."""


def nvswitch_capable(gpus: Iterable[Device]) -> tuple[str, ...]:
    """Return the capabilities of the NVSwitch of these GPUs besides forwarding; () if their generation is unknown."""
    known = [known_capability(gpu) for gpu in gpus]
    able = bool(known) and all(one is not None and one >= THIRD_GENERATION for one in known)
    return IN_NETWORK if able else ()


def known_capability(gpu: Device, nvlinks: int = 0) -> int | None:
    """Return the compute capability without the dot, from facts, model or number of NVLinks; None if unknown.

    More ``nvlinks`` than those of an A100 imply at least `THIRD_GENERATION`.
    """
    identity = gpu_identity(gpu, amd=False)
    if not identity.guessed:
        return identity.capability
    return THIRD_GENERATION if nvlinks > A100.links else None


def nvlink_counts(topology: Topology) -> dict[str, int]:
    """Return the number of NVLinks out of every GPU that has any."""
    gpus = set(topology.gpus)
    counts: dict[str, int] = {}
    for link in topology.links:
        if link.channel == "nvlink" and link.src in gpus:
            counts[link.src] = counts.get(link.src, 0) + link.count
    return counts


def with_capable(topology: Topology) -> Topology:
    """Return the machine with the capabilities of its NVSwitches, by the generation of the GPUs on them.

    NVSwitches copy and add from Hopper on (NVLink SHARP). A GPU of unknown model counts as Hopper if it has more
    NVLinks than an A100.
    """
    undeclared = {
        device.name
        for device in topology.devices
        if device.kind == "nvswitch" and device.capable != IN_NETWORK
    }
    if not undeclared:
        return topology
    gpus, counts = set(topology.gpus), nvlink_counts(topology)
    on: dict[str, set[str]] = {name: set() for name in undeclared}
    for link in topology.links:
        for switch, gpu in ((link.src, link.dst), (link.dst, link.src)):
            if switch in on and gpu in gpus:
                on[switch].add(gpu)
    known = {
        gpu: known_capability(topology.device(gpu), counts.get(gpu, 0)) for gpu in set().union(*on.values())
    }
    able = {
        name
        for name, near in on.items()
        if near and all((known[gpu] or 0) >= THIRD_GENERATION for gpu in near)
    }
    if not able:
        return topology
    devices = (
        replace(device, capable=IN_NETWORK) if device.name in able else device for device in topology.devices
    )
    return replace(topology, devices=tuple(devices))


def assumed_capability(topology: Topology) -> int | None:
    """Return the compute capability of the GPUs of a host whose models are unknown, by the rates of their links.

    It is that of the generation for which `topoplan.reading` takes these rates: of those with such NVLinks, and as many
    of them, the first whose PCIe link is as fast as theirs, else the first. None if a model is known, without PCIe, or
    if the rates are of no generation.
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    if is_amd(gpus) or not all(gpu_identity(gpu, amd=False).guessed for gpu in gpus):
        return None
    names = {gpu.name for gpu in gpus}
    out = [link for link in topology.links if link.src in names]
    rates = [exact(link.bandwidth) / link.count for link in out if link.channel == "nvlink"]
    pcie = [link.bandwidth for link in out if link.channel == "pcie"]
    if not rates or not pcie:
        return None
    most = max(nvlink_counts(topology).values())
    fitting = [
        sm
        for sm, one in BY_CAPABILITY.items()
        if one.links >= most and nearest_float(max(rates)) == one.nvlink
    ]
    return next((sm for sm in fitting if BY_CAPABILITY[sm].pcie == max(pcie)), next(iter(fitting), None))


def with_assumed_capability(topology: Topology) -> Topology:
    """Return the machine with the compute capability of its GPUs as a fact, if it is `assumed_capability`."""
    assumed = assumed_capability(topology)
    if assumed is None:
        return topology
    devices = (
        replace(one, facts=facts(**(dict(one.facts) | {"sm": str(assumed)}))) if one.kind == "gpu" else one
        for one in topology.devices
    )
    return replace(topology, devices=tuple(devices))


LANE = {2.5: 0.1875, 5.0: 0.375, 8.0: 0.75, 16.0: 1.5, 32.0: 3.0, 64.0: 6.0}
"""GB/s of one PCIe lane by its rate in GT/s; generations 1 to 6."""

UNKNOWN_LANE = LANE[8.0]
"""GB/s of a lane of unknown rate: NCCL takes generation 3."""

UNKNOWN_WIDTH = 16
"""Lanes if none are stated, as in NCCL."""

NVLINK = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 87: 20.0, 90: 20.6, 100: 40.1}
"""GB/s per direction of one NVLink, from this compute capability on."""

XGMI = {"gfx90a": 36.0, "gfx94": 48.0, "": 24.0}
"""GB/s per direction of one XGMI link by the beginning of the architecture's name."""

CPU_VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")
"""Vendors of x86_64 processors that NCCL knows; the last two are Zhaoxin."""

_INTEL = {0xCF: 40.0, 0x8F: 22.0, 0x55: 10.0, 0: 6.0}
_NUMBERED_GCN = {
    "906": "gfx906",
    "908": "gfx908",
    "910": "gfx90a",
    "940": "gfx940",
    "941": "gfx941",
    "942": "gfx942",
}


def lane_bandwidth(speed: str) -> float | None:
    """Return the GB/s per direction of one PCIe lane, from the kernel's text of its rate; None if unknown.

    NCCL takes generation 3 for spellings that kernels do not write, such as ``16.0 GT/s``; here they are read as 16.
    """
    match = re.match(r"\s*([0-9]{1,3}(?:\.[0-9]{1,3})?)\s*GT/s", speed)
    return LANE.get(float(match[1])) if match else None


def pcie_bandwidth(speed: str, width: int) -> float:
    """Return the GB/s per direction of a PCIe link, from the kernel's text of its lane rate and its number of lanes."""
    return (width or UNKNOWN_WIDTH) * (lane_bandwidth(speed) or UNKNOWN_LANE)


def nvlink_bandwidth(sm: int) -> float:
    """Return the GB/s per direction of one NVLink by the GPU's compute capability, such as 70; an unknown one is 80."""
    return next((rate for least, rate in sorted(NVLINK.items(), reverse=True) if sm >= least), NVLINK[80])


def gcn_name(gcn: str) -> str:
    """Return the name of an AMD GPU's architecture, which old files give as a number."""
    return _NUMBERED_GCN.get(gcn, gcn)


def xgmi_bandwidth(gcn: str) -> float:
    """Return the GB/s per direction of one XGMI link; the architecture is a name, or a number as in old files."""
    return next(rate for start, rate in XGMI.items() if gcn_name(gcn).startswith(start))


def socket_bandwidth(arch: str, vendor: str, family: int, model: int) -> float:
    """Return the GB/s per direction between two NUMA nodes; ``arch`` is x86_64, arm64 or ppc64.

    An unknown vendor has the slowest figure; NCCL assumes no limit at all.
    """
    if arch == "ppc64":
        return 32.0
    if arch == "x86_64" and vendor == "AuthenticAMD":
        return 16.0
    if arch == "x86_64" and vendor == "GenuineIntel" and family == 6:
        return next((rate for least, rate in _INTEL.items() if model >= least), _INTEL[0])
    if arch == "x86_64" and vendor in ("CentaurHauls", "  Shanghai  ") and (family, model) == (7, 0x5B):
        return 9.0
    return 6.0


LANE_RATES = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s", "64.0 GT/s PCIe")
"""The kernel's text of a lane's rate; generations 1 to 6."""

MOST_LANES = 16


def counted_bandwidth(speed: str, lanes: int) -> Fraction:
    """Return the GB/s per direction that NCCL counts for so many lanes of this rate."""
    return lanes * exact(lane_bandwidth(speed) or UNKNOWN_LANE)


def nearest_pcie(bandwidth: float) -> tuple[str, int]:
    """Return the lane rate and lanes whose bandwidth in NCCL is nearest to this one in GB/s; ties go to most lanes."""
    wanted = exact(bandwidth)
    choices = [(speed, lanes) for lanes in range(MOST_LANES, 0, -1) for speed in LANE_RATES]
    return min(choices, key=lambda choice: abs(counted_bandwidth(*choice) - wanted))
