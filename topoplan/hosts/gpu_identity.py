"""What NCCL wants to know of a GPU: its compute capability, or for AMD its architecture and compute units.

Facts come first, then the model's name. NCCL takes the rate of an NVLink from the compute capability, RCCL that of an
XGMI link from the architecture. Sources: NVIDIA, CUDA GPU compute capability; AMD, ROCm GPU specifications.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from topoplan.hosts.link_rates import A100
from topoplan.topology import IN_NETWORK, Device, Topology

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
    """Attributes of a ``gpu`` element and the names of those that no fact states.

    Parameters
    ----------
    attributes : tuple of (str, str)
        ``sm``, and for AMD ``gcn`` and ``arch``.
    invented : tuple of str
        Taken from the model's name, or assumed.
    guessed : bool
        True where not even the model tells; NCCL then asks the driver for what is left out.
    """

    attributes: tuple[tuple[str, str], ...]
    invented: tuple[str, ...]
    guessed: bool

    @property
    def capability(self) -> int:
        """Compute capability without the dot, `UNKNOWN_CAPABILITY` of an unknown one; of an AMD GPU its units."""
        return int(dict(self.attributes).get("sm", UNKNOWN_CAPABILITY))

    @property
    def gcn(self) -> str:
        """Architecture of an AMD GPU, such as gfx90a."""
        return dict(self.attributes).get("gcn", "")


def compute_capability(model: str) -> int | None:
    """Compute capability of the NVIDIA GPU that a model's name means, without the dot.

    Examples
    --------
    >>> [compute_capability(text) for text in ("Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", "A6000", "GPU")]
    [70, 90, 86, None]
    """
    return next((sm for name, sm in _COMPUTE_CAPABILITY if re.search(name, model)), None)


def is_amd(gpus: Iterable[Device]) -> bool:
    """True where the GPUs are AMD's, so that the file is for RCCL.

    Examples
    --------
    >>> is_amd([Device("gpu0", "gpu", model="MI250 GCD")]), is_amd([Device("gpu0", "gpu", model="A100")])
    (True, False)
    """
    return any(gpu.fact("gcn") or _amd_model(gpu.model) or "AMD" in gpu.model for gpu in gpus)


def gpu_identity(gpu: Device, *, amd: bool) -> GpuIdentity:
    """What to write of a GPU.

    Examples
    --------
    >>> gpu_identity(Device("gpu0", "gpu", model="Tesla V100-SXM2-16GB"), amd=False)
    GpuIdentity(attributes=(('sm', '70'),), invented=('sm',), guessed=False)
    >>> gpu_identity(Device("gpu0", "gpu", model="MI250 GCD"), amd=True).attributes
    (('sm', '104'), ('gcn', 'gfx90a'), ('arch', '38911'))
    """
    if amd:
        return _amd_identity(gpu)
    if gpu.fact("sm"):
        return GpuIdentity((("sm", gpu.fact("sm")),), (), False)
    known = compute_capability(gpu.model)
    if known is None:
        return GpuIdentity((), (), True)
    return GpuIdentity((("sm", str(known)),), ("sm",), False)


def direct_to_nic(gpu: Device) -> bool:
    """True where NICs can read the GPU's memory: all but GeForce and workstation models."""
    return not _WITHOUT_GDR.search(gpu.model)


def _amd_identity(gpu: Device) -> GpuIdentity:
    known = _amd_model(gpu.model)
    gcn, units = known or (UNKNOWN_GCN, UNKNOWN_UNITS)
    stated = {key: gpu.fact(key) for key in ("sm", "gcn") if gpu.fact(key)}
    # Bits of what every GPU of these architectures can do (hipDeviceArch_t), the same in all of RCCL's own files.
    wanted = {"sm": str(units), "gcn": gcn} | stated | {"arch": "38911"}
    invented = tuple(key for key in wanted if key not in stated)
    return GpuIdentity(tuple(wanted.items()), invented, known is None and "gcn" not in stated)


def _amd_model(model: str) -> tuple[str, int] | None:
    return next(((gcn, units) for name, gcn, units in _AMD if re.search(name, model)), None)


THIRD_GENERATION = 90
"""Compute capability of the GPUs from which on their NVSwitches copy and add (NVLink SHARP)."""


def nvswitch_capable(gpus: Iterable[Device]) -> tuple[str, ...]:
    """What the NVSwitch of these GPUs could do besides forwarding: nothing where their generation is not known.

    Examples
    --------
    >>> nvswitch_capable([Device("gpu0", "gpu", model="H100")]), nvswitch_capable([Device("gpu0", "gpu")])
    (('multicast', 'reduce'), ())
    """
    known = [known_capability(gpu) for gpu in gpus]
    able = bool(known) and all(one is not None and one >= THIRD_GENERATION for one in known)
    return IN_NETWORK if able else ()


def known_capability(gpu: Device, nvlinks: int = 0) -> int | None:
    """Compute capability without the dot by what is stated, by the model, or by the NVLinks; None where nothing tells.

    Parameters
    ----------
    gpu : Device
    nvlinks : int
        NVLinks of the GPU that are known; more than an A100 has tell `THIRD_GENERATION` at least.

    Examples
    --------
    >>> known_capability(Device("gpu0", "gpu", model="H20")), known_capability(Device("gpu0", "gpu"), 18)
    (90, 90)
    >>> known_capability(Device("gpu0", "gpu"), 8) is None
    True
    """
    identity = gpu_identity(gpu, amd=False)
    if not identity.guessed:
        return identity.capability
    return THIRD_GENERATION if nvlinks > A100.links else None


def nvlink_counts(topology: Topology) -> dict[str, int]:
    """NVLinks that leave every GPU that has any."""
    gpus = set(topology.gpus)
    counts: dict[str, int] = {}
    for link in topology.links:
        if link.channel == "nvlink" and link.src in gpus:
            counts[link.src] = counts.get(link.src, 0) + link.count
    return counts


def with_capable(topology: Topology) -> Topology:
    """The machine whose NVSwitches say what they could do, by the generation of the GPUs on them.

    NVSwitches copy and add from Hopper on (NVLink SHARP), and the GPUs of their generation tell which they are. A GPU
    whose model is not known tells it by more NVLinks than an A100 has.

    Examples
    --------
    >>> import topoplan
    >>> bare = topoplan.load("dgx-h100").settled()
    >>> bare.device("nvswitch0").capable, with_capable(bare).device("nvswitch0").capable
    ((), ('multicast', 'reduce'))
    >>> with_capable(topoplan.load("dgx-a100")) == topoplan.load("dgx-a100")
    True
    """
    silent = {
        device.name
        for device in topology.devices
        if device.kind == "nvswitch" and device.capable != IN_NETWORK
    }
    if not silent:
        return topology
    gpus, counts = set(topology.gpus), nvlink_counts(topology)
    on: dict[str, set[str]] = {name: set() for name in silent}
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
