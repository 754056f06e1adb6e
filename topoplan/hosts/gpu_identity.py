"""What NCCL wants to know of a GPU: its compute capability, or for AMD its architecture and compute units.

Facts come first, then the model's name. NCCL takes the rate of an NVLink from the compute capability, RCCL that of an
XGMI link from the architecture. Sources: NVIDIA, CUDA GPU compute capability; AMD, ROCm GPU specifications.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from topoplan.topology import IN_NETWORK, Device

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
    known = [gpu_identity(gpu, amd=False) for gpu in gpus]
    able = bool(known) and all(not one.guessed and one.capability >= THIRD_GENERATION for one in known)
    return IN_NETWORK if able else ()
