"""What NCCL wants to know of a CPU: architecture, vendor, family and model, and the mask of its logical CPUs.

The first four tell it the rate between sockets. Facts come first, then the model's text. Where neither tells, the
processor is named whose rate in NCCL comes nearest. Family and model are those of NCCL's files, which join the base and
the extended field of CPUID by bits: EPYC of generation 2 is family 143 there, 23 in the kernel's words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topoplan.hosts.nccl_rates import socket_bandwidth
from topoplan.topology import Device

_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_MODELS = (
    (r"v3\b|Haswell", _INTEL, 6, 63),
    (r"E[57]-\d{4} ?v4|Broadwell", _INTEL, 6, 79),
    (r"v2\b|Ivy Bridge", _INTEL, 6, 62),
    (r"(Platinum|Gold|Silver|Bronze) \d[12]\d\d|Skylake|Cascade Lake", _INTEL, 6, 85),
    (r"(Platinum|Gold|Silver) \d3\d\d|Ice Lake", _INTEL, 6, 106),
    (r"(Platinum|Gold|Silver|Bronze) \d4\d\d|Sapphire Rapids", _INTEL, 6, 143),
    (r"(Platinum|Gold|Silver|Bronze) \d5\d\d|Emerald Rapids", _INTEL, 6, 207),
    (r"EPYC 7\w\w1\b|Naples|Zen 1\b", _AMD, 143, 1),
    (r"EPYC 7\w\w2\b|Rome|Zen 2\b", _AMD, 143, 49),
    (r"EPYC 7A53|Trento", _AMD, 175, 48),
    (r"EPYC 7\w\w3X?\b|Milan|Zen 3\b", _AMD, 175, 1),
    (r"EPYC [89]\w\w4[A-Z]?\b|Genoa|Bergamo|Zen 4\b", _AMD, 175, 17),
    (r"EPYC 9\w\w5[A-Z]?\b|Turin|Zen 5\b", _AMD, 191, 2),
)
"""Beginning with what is most telling; the first that fits is taken."""

_BY_RATE = ((_INTEL, 6, 79), (_INTEL, 6, 85), (_AMD, 143, 49), (_INTEL, 6, 143), (_INTEL, 6, 207))
_OTHER_ARCHITECTURES = (
    (r"POWER ?[89]|ppc64", "ppc64"),
    (r"Grace|Neoverse|Altra|ThunderX|Graviton|arm64", "arm64"),
)


@dataclass(frozen=True, slots=True)
class CpuIdentity:
    """Attributes of a ``cpu`` element and the names of those that no fact states.

    Parameters
    ----------
    attributes : tuple of (str, str)
        ``arch``, and where they are known or NCCL needs them ``vendor``, ``familyid`` and ``modelid``.
    invented : tuple of str
    rate : float
        GB/s between two such sockets, as NCCL counts.
    """

    attributes: tuple[tuple[str, str], ...]
    invented: tuple[str, ...]
    rate: float


def cpu_identity(cpu: Device, socket: float | None) -> CpuIdentity:
    """What to write of a CPU.

    Parameters
    ----------
    cpu : Device
    socket : float or None
        GB/s per direction to other CPUs; None where it is alone.

    Examples
    --------
    >>> found = cpu_identity(Device("cpu0", "cpu", model="Xeon E5-2698 v4"), 8.0)
    >>> found.attributes, found.rate
    ((('arch', 'x86_64'), ('vendor', 'GenuineIntel'), ('familyid', '6'), ('modelid', '79')), 6.0)
    >>> cpu_identity(Device("cpu0", "cpu"), 15.0).attributes[1]
    ('vendor', 'AuthenticAMD')
    """
    stated = {
        "arch": cpu.fact("arch"),
        "vendor": cpu.fact("vendor"),
        "familyid": cpu.fact("family"),
        "modelid": cpu.fact("model"),
    }
    stated = {key: value for key, value in stated.items() if value}
    arch = stated.get("arch") or _architecture(cpu.model)
    wanted = {"arch": arch}
    if arch == "x86_64":
        vendor, family, model = _processor(cpu.model, stated.get("vendor"), socket)
        wanted |= {"vendor": vendor, "familyid": str(family), "modelid": str(model)}
    wanted |= stated
    family, model = (_number(wanted.get(key, "0")) for key in ("familyid", "modelid"))
    rate = socket_bandwidth(wanted["arch"], wanted.get("vendor", ""), family, model)
    return CpuIdentity(tuple(wanted.items()), tuple(key for key in wanted if key not in stated), rate)


def _architecture(model: str) -> str:
    return next((arch for name, arch in _OTHER_ARCHITECTURES if re.search(name, model)), "x86_64")


def _processor(text: str, vendor: str | None, socket: float | None) -> tuple[str, int, int]:
    """Vendor, family and model by the model's text, else those of nearest rate, of this vendor where it has any."""
    for pattern, maker, family, model in _MODELS:
        if re.search(pattern, text) and vendor in (None, maker):
            return maker, family, model
    choices = [choice for choice in _BY_RATE if vendor in (None, choice[0])] or [(vendor or _INTEL, 6, 85)]
    if socket is None:
        return choices[0]
    return min(choices, key=lambda choice: abs(socket_bandwidth("x86_64", *choice) - socket))


def _number(text: str) -> int:
    """A number as NCCL reads it, 0 where the text is none."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


MOST_CPUS = 8192


def cpu_mask(cpus: str) -> str:
    """A list such as 0-19,40-59 as NCCL reads it: words of 32 bits in hexadecimal, the highest first; empty for none.

    Examples
    --------
    >>> cpu_mask("0-19,40-59"), cpu_mask("")
    ('0fffff00,000fffff', '')
    """
    mask = 0
    for span in cpus.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", span)
        if not match:
            return ""
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MOST_CPUS:
            return ""
        mask |= (1 << last + 1) - (1 << first)
    words = -(-mask.bit_length() // 32)
    return ",".join(f"{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))
