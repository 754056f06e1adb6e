"""The NVLinks of one GPU as the driver tells them, link by link; any part of the telling may be missing.

NVML refuses a number beyond the last link, but nothing else says how many there are where the count is not told. So all
numbers are asked, and links exist up to the last one of which anything at all is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.errors import TopologyError
from topoplan.hosts.host import bus_id
from topoplan.probing.answers import Answers

MOST_LINKS = 36
"""Links that a GPU is asked for where it does not state their number."""

_UP = (1, 2)
"""Active, and asleep until there is traffic; 3, of newer drivers, is a link that is up and may carry none."""

_FAR_ENDS = {0: "gpu", 1: "cpu", 2: "nvswitch"}


@dataclass(frozen=True, slots=True)
class DriverLink:
    """One NVLink of a GPU as the driver sees it; None where it did not answer.

    Parameters
    ----------
    number : int
    active, peer_to_peer : bool or None
        Whether it is up, and whether it may carry traffic between GPUs.
    version : int or None
        NVML's enumeration: 1 is NVLink 1.0, 2 and 3 are 2.x, 4 and 5 are 3.x, 6 is 4.0, 7 is 5.0, 8 is 6.0.
    speed : float or None
        GB/s per direction.
    remote : str or None
        Bus id of the far end; empty where it is hidden.
    end : str or None
        gpu, cpu or nvswitch.
    """

    number: int
    active: bool | None
    peer_to_peer: bool | None
    version: int | None
    speed: float | None
    remote: str | None
    end: str | None


def read_links(answers: Answers, handle: object) -> tuple[tuple[DriverLink, ...], bool]:
    """The links that exist, in the order of their numbers and without gaps, and whether no question failed."""
    nvml = answers.nvml
    failures = answers.failures
    count = answers.field(handle, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    common = (answers.field(handle, nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON) or 0) / 1000 or None
    links: list[DriverLink] = []
    existing = 0
    for number in range(MOST_LINKS if count is None else count):
        state = answers.ask("DeviceGetNvLinkState", handle, number, kind=int)
        if state is None:
            state = answers.field(handle, nvml.NVML_FI_DEV_NVLINK_GET_STATE, number)
        info = answers.ask("DeviceGetNvLinkRemotePciInfo", handle, number, kind=object)
        version = answers.ask("DeviceGetNvLinkVersion", handle, number, kind=int)
        allowed = answers.ask(
            "DeviceGetNvLinkCapability", handle, number, nvml.NVML_NVLINK_CAP_P2P_SUPPORTED, kind=int
        )
        kind = answers.ask("DeviceGetNvLinkRemoteDeviceType", handle, number, kind=int, newer=True)
        speed = _speed(answers, handle, number)
        said = any(answer is not None for answer in (state, info, version, allowed, kind, speed))
        if said or count is not None:
            existing = number + 1
        links.append(
            DriverLink(
                number=number,
                active=None if state is None else state in _UP,
                peer_to_peer=None if allowed is None else bool(allowed),
                version=version or None,
                speed=speed or common,
                remote=None if info is None else remote_bus_id(info),
                end=None if kind is None else _FAR_ENDS.get(kind),
            )
        )
    return tuple(links[:existing]), answers.failures == failures


def remote_bus_id(info: object) -> str:
    """Bus id in NVML's PCI info; empty for a device that is hidden: ``FFFFFFF:FFFF:FF`` or nothing."""
    text = getattr(info, "busId", "")
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)
    try:
        return bus_id(text)
    except TopologyError:
        return ""


def _speed(answers: Answers, handle: object, number: int) -> float | None:
    """GB/s of a link, from the field of newer drivers or from those of older ones."""
    nvml = answers.nvml
    older = getattr(nvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{number}", None)
    fields = [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, number), *([(older, 0)] if older else [])]
    for field, scope in fields:
        megabytes = answers.field(handle, field, scope)
        if megabytes:
            return megabytes / 1000
    return None
