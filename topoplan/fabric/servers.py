"""The ranks of a fabric by server, and which links leave a server: those of NICs to switches, and cables between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.topology import Device, Link, Topology


@dataclass(frozen=True)
class Servers:
    """Servers that hold ranks of a fabric, in the order of their first ranks.

    Parameters
    ----------
    fabric : Fabric

    Examples
    --------
    >>> from topoplan.clusters import nvswitch_cluster
    >>> servers = Servers(Fabric(nvswitch_cluster(2, gpus=4), ("nvlink", "network")))
    >>> servers.names, servers.of_rank.tolist()
    (('s0', 's1'), [0, 0, 0, 0, 1, 1, 1, 1])
    """

    fabric: Fabric

    @cached_property
    def _of_device(self) -> dict[str, str]:
        return {device.name: device.server for device in self.fabric.topology.devices}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(self._of_device[name] for name in self.fabric.ranks))

    @cached_property
    def of_rank(self) -> NDArray[np.int64]:
        """(N,) int64: number of the server of every rank."""
        number = {name: i for i, name in enumerate(self.names)}
        return np.array([number[self._of_device[name]] for name in self.fabric.ranks], dtype=np.int64)

    @cached_property
    def members(self) -> tuple[NDArray[np.int64], ...]:
        """The ranks of every server."""
        return tuple(np.flatnonzero(self.of_rank == number) for number in range(len(self.names)))

    @cached_property
    def same(self) -> NDArray[np.bool_]:
        """(N, N) bool: True where two ranks are on one server."""
        return np.asarray(self.of_rank[:, None] == self.of_rank[None, :])

    @cached_property
    def ends(self) -> tuple[tuple[str, str], ...]:
        """Servers at both ends of every link; empty names for switches between servers."""
        return tuple((self._of_device[link.src], self._of_device[link.dst]) for link in self.fabric.links)

    @cached_property
    def crossing(self) -> NDArray[np.bool_]:
        """(links,) bool: True for links that leave or enter a server."""
        return np.array([src != dst for src, dst in self.ends], dtype=bool)

    @cached_property
    def stars(self) -> bool:
        """True where inside every server all ranks hang on one switch, and no two are joined in another way."""
        fabric = self.fabric
        ranks = set(fabric.ranks)
        hubs: dict[str, set[str]] = {}
        beside: dict[str, set[str]] = {}
        for link, (src, dst) in zip(fabric.links, self.ends, strict=True):
            if src == dst:
                if link.src in ranks and link.dst in ranks:
                    return False
                for rank, other in ((link.src, link.dst), (link.dst, link.src)):
                    if rank in ranks:
                        beside.setdefault(other, set()).add(rank)
                    elif other not in ranks:
                        return False
        for device, near in beside.items():
            if len(near) > 1:
                hubs.setdefault(self._of_device[device], set()).add(device)
        return all(len(devices) == 1 for devices in hubs.values())

    def keeps(self, permutation: Sequence[int]) -> bool:
        """True where a permutation of `Fabric.nodes` takes each server to one server, and switches of none to such."""
        home = [self._of_device[name] for name in self.fabric.nodes]
        image_of: dict[str, str] = {}
        for node, image in enumerate(permutation):
            if image_of.setdefault(home[node], home[image]) != home[image]:
                return False
        return len(set(image_of.values())) == len(image_of) and image_of.get("", "") == ""

    def check(self) -> None:
        """Refuse what cannot be composed.

        Raises
        ------
        UsageError
            All ranks are on one server.
        InfeasibleError
            The ranks of a server are not connected inside it; carries the cut.
        """
        if len(self.names) < 2:
            where = f"are on {self.names[0]}" if self.names[0] else "name no server"
            raise UsageError(
                f"three phases need GPUs on two servers or more, and all {self.fabric.size} {where}; "
                "plan trees instead (method exact)"
            )
        for name, inside in self.alone():
            cut = inside.unreachable()
            if cut:
                near = [rank for rank in cut if rank in inside.ranks]
                far = [rank for rank in inside.ranks if rank not in near]
                wires = "+".join(channel for channel in self.fabric.channels if channel != "network")
                raise InfeasibleError(
                    f"three phases need the GPUs of {name} connected inside it, and no {wires} path leads from "
                    f"{{{', '.join(near)}}} to {{{', '.join(far)}}}; plan trees instead (method exact)",
                    cut=cut,
                )

    def alone(self) -> Iterator[tuple[str, Fabric]]:
        """Every server with several ranks, without what lies outside it."""
        fabric = self.fabric
        devices: dict[str, list[Device]] = {}
        for device in fabric.topology.devices:
            devices.setdefault(device.server, []).append(device)
        links: dict[str, list[Link]] = {}
        for link, (src, dst) in zip(fabric.links, self.ends, strict=True):
            if src == dst:
                links.setdefault(src, []).append(link)
        for number, name in enumerate(self.names):
            if len(self.members[number]) > 1:
                part = Topology(name, tuple(devices[name]), tuple(links.get(name, ())))
                yield name, Fabric(part, fabric.channels)
