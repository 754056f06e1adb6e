"""Who takes part in a job: on which host each rank is, and which GPU it drives."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from topoplan.errors import UsageError
from topoplan.plans.plan import check_collective
from topoplan.probing.probe import host_sysfs
from topoplan.topology import Topology

Gpu = int | str
"""A GPU's UUID, PCI bus id or name in the machine, or its number among those that CUDA shows the process."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""The environment on which CUDA's numbers depend."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank says of itself.

    Parameters
    ----------
    rank, size : int
    host : str
        The same for ranks of one host, and of no others.
    process : int
        Its process id.
    gpu : int, str or None
        None where it computes without.
    visible : tuple of (str, str)
        Those variables of `VISIBLE` that are set.
    wanted : tuple of (str, str)
        Collective and channels of the plan.
    machine : str
        What the host is, as topology JSON, where the caller says so; else empty.
    """

    rank: int
    size: int
    host: str
    process: int
    gpu: Gpu | None
    visible: tuple[tuple[str, str], ...]
    wanted: tuple[str, str]
    machine: str = ""

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> Member:
        """From `to_text`."""
        told = json.loads(text)
        told["visible"] = tuple((name, value) for name, value in told["visible"])
        told["wanted"] = tuple(told["wanted"])
        return Member(**told)


def this_member(
    rank: int,
    size: int,
    gpu: Gpu | None,
    *,
    host: str | None,
    machine: Topology | None,
    wanted: tuple[str, str],
) -> Member:
    """What this process says of itself.

    Raises
    ------
    UsageError
        An argument makes no sense.
    """
    for name, value in (("rank", rank), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name} {value!r} is no whole number; give this process's place in the job")
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
    if isinstance(gpu, bool) or not isinstance(gpu, int | str | None) or gpu == "":
        raise UsageError(
            f"device {gpu!r} names no GPU; give its UUID, its PCI bus id or its number in CUDA, or None for none"
        )
    if not isinstance(host, str | None) or host == "":
        raise UsageError(f"host {host!r} is no name; give a text, or None for the name of this machine")
    return Member(
        rank=rank,
        size=size,
        host=this_host() if host is None else host,
        process=os.getpid(),
        gpu=gpu,
        visible=tuple((name, os.environ[name]) for name in VISIBLE if name in os.environ),
        wanted=(check_collective(wanted[0]), wanted[1]),
        machine="" if machine is None else machine.to_json(),
    )


def this_host() -> str:
    """Name of this machine, and of its last start where the kernel tells it: names are not always unique."""
    sysfs = host_sysfs()
    boot = sysfs.text(sysfs.root.parent / "proc/sys/kernel/random/boot_id") or ""
    return " ".join(part for part in (platform.node() or "this machine", boot) if part)


def check_members(members: Sequence[Member]) -> None:
    """Whether the ranks are one job that wants one plan.

    Raises
    ------
    UsageError
        Names a rank that does not fit; the same text on all ranks.
    """
    first = members[0]
    for place, one in enumerate(members):
        if (one.rank, one.size) != (place, len(members)):
            raise UsageError(
                f"rank {place} of {len(members)} in the gather calls itself rank {one.rank} of {one.size}; "
                "give rank and size of the group that the gather is of"
            )
        if one.wanted != first.wanted:
            raise UsageError(
                f"rank {place} wants a plan for {' over '.join(one.wanted)} and rank 0 for "
                f"{' over '.join(first.wanted)}; ask for the same on all ranks"
            )
        if (one.gpu is None) != (first.gpu is None):
            ranks = (0, place) if one.gpu is None else (place, 0)
            raise UsageError(
                f"rank {ranks[0]} has a GPU and rank {ranks[1]} has none; give every rank a GPU, or none"
            )


def by_host(members: Sequence[Member]) -> tuple[tuple[Member, ...], ...]:
    """The ranks of each host in ascending order, hosts in the order of their first ranks.

    Examples
    --------
    >>> told = [Member(rank, 4, host, 7, None, (), ("allreduce", "auto")) for rank, host in enumerate("abab")]
    >>> [[one.rank for one in host] for host in by_host(told)]
    [[0, 2], [1, 3]]
    """
    hosts: dict[str, list[Member]] = {}
    for one in members:
        hosts.setdefault(one.host, []).append(one)
    return tuple(map(tuple, hosts.values()))
