"""A NIC's network devices as NCCL's topology file names them.

NCCL finds a NIC in the file by the operating system's name of its network device, or else by its bus id, and then adds
the network device itself: a NIC of which neither name nor speed is known needs no ``net`` element.
"""

from __future__ import annotations

import re
from fractions import Fraction

from topoplan.export.nccl.xml_text import Element
from topoplan.topology import Device

_GIGABITS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def net_elements(nic: Device, number: int, *, bandwidth: float | None = None) -> tuple[Element, ...]:
    """The ``nic`` element of a NIC, if it needs one.

    Parameters
    ----------
    nic : Device
        Fact ``adapter`` is the name of its network device, or several joined by +; fact ``gigabits`` its speed in Gb/s.
    number : int
        ``dev`` of its first network device.
    bandwidth : float or None
        GB/s per direction to the CPU, for a NIC that hangs on the CPU without a place on PCIe.

    Examples
    --------
    >>> from topoplan.topology import facts
    >>> nic = Device("nic0", "nic", facts=facts(adapter="mlx5_0", gigabits=100))
    >>> net_elements(nic, 0)[0].children[0].attributes
    (('name', 'mlx5_0'), ('dev', '0'), ('speed', '100000'))
    """
    adapters, speed = nic.fact("adapter"), _megabits(nic.fact("gigabits"))
    if not adapters and not speed:
        return ()
    names = adapters.split("+")
    nets = []
    for place, name in enumerate(names):
        part = speed // len(names) + (place < speed % len(names))
        known = [("name", name), ("dev", str(number + place)), ("speed", str(part) if part else "")]
        if bandwidth is not None:
            known.append(("bandwidth", repr(float(bandwidth))))
        # Without a speed NCCL asks the network; a reader must not take its default for a fact.
        known.append(("assumed", "" if part else "speed"))
        nets.append(Element("net", tuple((key, value) for key, value in known if value)))
    own = (("name", nic.name), ("model", nic.model)) if bandwidth is not None else ()
    return (Element("nic", tuple((key, value) for key, value in own if value), tuple(nets)),)


def _megabits(gigabits: str) -> int:
    """Mb/s, 0 where the text is no number."""
    return round(Fraction(gigabits) * 1000) if _GIGABITS.fullmatch(gigabits) else 0
