"""``--overlay``, ``--without-link``, ``--slow-link``, ``--without-gpu``, ``--without-device``: a machine not whole.

GPU numbers on the command line and in tables always are those of the whole machine, so that a GPU keeps its number
when another one dies.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from topoplan.cli.arguments import OneLineParser, bandwidth, gpu_list
from topoplan.degraded import (
    find_devices,
    find_links,
    remaining_gpus,
    slow_links,
    without_devices,
    without_gpus,
    without_links,
)
from topoplan.errors import UsageError
from topoplan.health.diagnosis import machine_warnings
from topoplan.topology import Topology

DAMAGE_OPTIONS = ("overlay", "without_link", "slow_link", "without_gpu", "without_device")
"""All of them, as argparse stores them; None where an option was not given."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as the options ask for it.

    Parameters
    ----------
    whole : Topology
        Links and devices are taken out or slowed, but all GPUs are there, under their numbers.
    left : tuple of int
        The GPUs that are not taken out.
    described : Topology or None
        The machine as its description has it, before it became a cluster or broke on request.
    """

    whole: Topology
    left: tuple[int, ...]
    described: Topology | None = None

    def warnings(self, gpus: tuple[int, ...] | None) -> tuple[str, ...]:
        """What is amiss in the description, as far as it hurts an allocation; not what was broken on request."""
        machine = self.whole if self.described is None else self.described
        apart = gpus is None or machine.gpus != self.whole.gpus
        return machine_warnings(machine, gpus=None if apart else [machine.gpus[gpu] for gpu in gpus or ()])

    @property
    def topology(self) -> Topology:
        """Without the GPUs that are taken out."""
        return self.whole.subset(self.left) if self.whole.gpus else self.whole

    def allocation(self, gpus: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The GPUs that were asked for, or all that are left.

        Raises
        ------
        UsageError
            One of them is taken out, or not there.
        """
        if gpus is None:
            return None if len(self.left) == len(self.whole.gpus) else self.left
        for gpu in self.whole.select(gpus):
            if gpu not in self.left:
                raise UsageError(
                    f"GPU {gpu} is named by --gpus and by --without-gpu; leave it out of one of them"
                )
        return gpus


def add_damage(parser: OneLineParser) -> None:
    """What is broken."""
    group = parser.add_argument_group("a broken machine", "each may be given several times")
    group.add_argument(
        "--overlay",
        action="append",
        metavar="FILE",
        help="nvidia-smi nvlink -s and -R listings of this machine, whose dead links are taken out and slow ones "
        "slowed; with --servers they hold for every server",
    )
    group.add_argument(
        "--without-link",
        action="append",
        metavar="A-B",
        help="take out the links between two devices, such as gpu0-gpu3, or 'gpu0->gpu3' for one direction",
    )
    group.add_argument(
        "--slow-link",
        action="append",
        type=_speed,
        metavar="A-B=GB/s",
        help="links that are slower than they should be, GB/s per direction, such as gpu1-gpu2=12.5",
    )
    group.add_argument(
        "--without-gpu",
        action="append",
        type=gpu_list,
        metavar="LIST",
        help="take out GPUs by number; the others keep their numbers",
    )
    group.add_argument(
        "--without-device", action="append", metavar="NAME", help="take out a switch or NIC by name"
    )


def overlaid(options: argparse.Namespace, topology: Topology) -> Topology:
    """The machine as the listings of its NVLinks say it is; errors as `topoplan.overlay`."""
    listings: list[str] = options.overlay or []
    if not listings:
        return topology
    # Few runs have one, and none should wait for its reader.
    from topoplan.formats.nvidia_smi.nvlink_overlay import overlay

    return overlay(topology, *listings)


def damaged(options: argparse.Namespace, topology: Topology) -> Machine:
    """Apply the options to a machine.

    Raises
    ------
    UsageError
        They name what is not there, or contradict each other.
    """
    cut: list[str] = options.without_link or []
    gone: list[str] = options.without_device or []
    gpus = sorted({gpu for numbers in options.without_gpu or [] for gpu in numbers})
    speeds: dict[str, float] = {}
    for wire, speed in options.slow_link or []:
        if speeds.setdefault(wire, speed) != speed:
            raise UsageError(
                f"--slow-link gives {wire} two speeds, {speeds[wire]:g} and {speed:g}; leave one out"
            )
    left = remaining_gpus(topology, gpus) if gpus else tuple(range(len(topology.gpus)))
    names = topology.gpus
    out = {name: f"--without-gpu {gpu}" for gpu in gpus for name in [names[gpu]]}
    out |= {device: f"--without-device {name}" for name in gone for device in find_devices(topology, name)}
    dead = {ends: f"--without-link {wire}" for wire in cut for ends in find_links(topology, wire)}
    for wire in speeds:
        for ends in sorted(find_links(topology, wire)):
            other = dead.get(ends) or out.get(ends[0]) or out.get(ends[1])
            if other:
                raise UsageError(
                    f"--slow-link {wire} is a link that {other} takes out; leave one of them out"
                )
    whole = without_devices(without_links(slow_links(topology, speeds), cut), gone)
    if gpus:
        # The GPUs stay in place, or the numbers of the others would change; only the note is taken.
        whole = replace(whole, notes=without_gpus(whole, gpus).notes)
    return Machine(whole, left)


def _speed(text: str) -> tuple[str, float]:
    wire, equals, number = text.rpartition("=")
    if not equals or not wire:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no link with its speed, such as gpu1-gpu2=12.5")
    return wire, bandwidth(number)
