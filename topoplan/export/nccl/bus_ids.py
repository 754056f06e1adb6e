"""PCI bus ids for devices whose description states none.

NCCL identifies devices by bus id, so a file cannot do without. Invented ones lie in PCI domain ffff, as in the files of
AWS and Azure: switches on bus ff, GPUs on bus 00, NICs on bus 80. The function is always 0, because NCCL keeps the two
lowest bits of a GPU's bus id for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.errors import UsageError
from topoplan.hosts.host import bus_id
from topoplan.topology import Device

_FIRST_BUS = {"pcie": 0xFF, "gpu": 0x00, "nic": 0x80}
_BUSES = {"pcie": 1, "gpu": 0x80, "nic": 0x7F}
_PLACES = 32


def bus_ids(devices: Sequence[Device]) -> tuple[dict[str, str], frozenset[str]]:
    """Bus id of every GPU, NIC and PCIe switch by name, and the names for which it is invented.

    Raises
    ------
    UsageError
        Two devices state one bus id, or there are more devices without one than there is room for.
    TopologyError
        What a device states is no bus id.

    Examples
    --------
    >>> gpus = [Device("gpu0", "gpu"), Device("gpu1", "gpu", busid="00000000:07:00.0")]
    >>> ids, invented = bus_ids([*gpus, Device("pcie0", "pcie")])
    >>> sorted(ids.items()), sorted(invented)
    ([('gpu0', 'ffff:00:01.0'), ('gpu1', '0000:07:00.0'), ('pcie0', 'ffff:ff:01.0')], ['gpu0', 'pcie0'])
    """
    found = {device.name: bus_id(device.busid) for device in devices if device.busid}
    taken: dict[str, str] = {}
    for name, busid in found.items():
        if busid in taken:
            raise UsageError(f"{taken[busid]} and {name} both state bus id {busid}; give each its own")
        taken[busid] = name
    invented = []
    for kind, first in _FIRST_BUS.items():
        # Bus 1 up to its place 31, as the switches of those files start at ff:01.0.
        places = iter(range(1, _BUSES[kind] * _PLACES))
        for device in devices:
            if device.kind != kind or device.busid:
                continue
            free = (f"ffff:{first + place // _PLACES:02x}:{place % _PLACES:02x}.0" for place in places)
            chosen = next((busid for busid in free if busid not in taken), "")
            if not chosen:
                raise UsageError(f"{device.name} has no bus id, and no more can be invented; state its busid")
            found[device.name] = chosen
            taken[chosen] = device.name
            invented.append(device.name)
    return found, frozenset(invented)
