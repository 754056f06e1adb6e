"""Which NICs of a server take part: those that NCCL would take, or those that a user names as for ``NCCL_IB_HCA``.

NCCL searches with NICs at the nearest kind of path first (below one PCIe switch, below several, on the GPU's CPU, on
another one) and stops at the first kind that works (``ncclTopoCompute``, ``src/graph/search.cc``). So a NIC that is
farther from every one of its GPUs than another NIC is not used: a NIC for storage on another CPU, for example.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from topoplan.errors import UsageError
from topoplan.topology import Device, Topology

NICS_FORM = "names such as mlx5_0,mlx5_1, ^NAME to leave NICs out, =NAME for one exact name, or a number"
"""How a choice of NICs is written."""

_CHOICE = re.compile(
    r"(\^?)(=?)([A-Za-z0-9_.-]{1,80}(?::[0-9]{1,3})?(?:,[A-Za-z0-9_.-]{1,80}(?::[0-9]{1,3})?)*)"
)


def path_kind(machine: Topology, path: Sequence[str]) -> int:
    """Return how far a NIC and a GPU are apart: 0 for PIX, 1 for PXB, 2 for PHB and NODE (one to NCCL), 3 for SYS.

    An empty path, of which nothing is known, is 0.
    """
    kinds = [machine.device(name).kind for name in path[1:-1]]
    if "cpu" in kinds:
        return 2 if kinds.count("cpu") == 1 else 3
    return 0 if kinds.count("pcie") <= 1 else 1


def nic_machine(machine: Topology, choice: str) -> Topology:
    """Return a machine with the NICs of a choice alone, under their names.

    A name is a device's (``nic0``, in any case) or begins an adapter's, as in ``NCCL_IB_HCA``: ``mlx5_1`` takes
    mlx5_1 and mlx5_10, ``=mlx5_1`` the first alone, ``^mlx5_1`` all others. A port behind the name, as in ``mlx5_1:1``,
    is not used.

    Raises
    ------
    UsageError
        The choice is not written so, a name is not there, or no NIC is left.

    Examples
    --------
    >>> import topoplan
    >>> [device.name for device in nic_machine(topoplan.load("dgx-1v"), "^nic0,nic3").devices if device.kind == "nic"]
    ['nic1', 'nic2']
    """
    match = _CHOICE.fullmatch(choice)
    if match is None:
        raise UsageError(f"nics {choice[:60]!r} must be {NICS_FORM}")
    every = [device for device in machine.devices if device.kind == "nic"]
    if not every:
        raise UsageError(f"nics {choice[:60]!r}: {machine.name} lists no NIC; give a number of NICs")
    named: set[str] = set()
    notes: list[str] = []
    for word in match[3].split(","):
        name = word.split(":")[0]
        found = [nic for nic in every if _is_named(nic, name, exact=bool(match[2]))]
        if not found:
            names = ", ".join(_told(nic) for nic in every)
            legend = (
                "" if any(nic.fact("adapter") for nic in every) else "; it has no adapter names (NIC Legend)"
            )
            raise UsageError(f"nics: {name} is not a NIC of {machine.name}, which has {names[:300]}{legend}")
        named |= {nic.name for nic in found}
        longer = [_told(nic) for nic in found if name not in (nic.name, nic.fact("adapter"))]
        if longer and len(longer) < len(found):
            notes.append(
                f"{name} names {', '.join(longer)[:200]} too, as in NCCL_IB_HCA; ={name} names one alone"
            )
    kept = {nic.name for nic in every if (nic.name in named) != bool(match[1])}
    if not kept:
        raise UsageError(f"nics {choice[:60]!r} leaves no NIC of {machine.name}; name fewer behind ^")
    gone = {nic.name for nic in every} - kept
    return replace(
        machine,
        devices=tuple(device for device in machine.devices if device.name not in gone),
        links=tuple(link for link in machine.links if not gone & {link.src, link.dst}),
        notes=(*machine.notes, *notes),
    )


def _is_named(nic: Device, name: str, *, exact: bool) -> bool:
    adapter = nic.fact("adapter")
    if name.lower() == nic.name.lower() or name == adapter:
        return True
    return not exact and bool(adapter) and adapter.startswith(name)


def _told(nic: Device) -> str:
    """A NIC for a message: the adapter's name where it has one."""
    return nic.fact("adapter") or nic.name
