"""One server of a cluster, or several that are alike: a machine, the GPUs that are used, and its NICs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topoplan.errors import UsageError
from topoplan.topology import FASTEST, SLOWEST, Topology, TopologyLike, as_topology
from topoplan.units import gigabytes_from_gigabits

MOST_NICS = 1024
"""Most NICs of one server: beyond it a number is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Server:
    """A machine as a server of a cluster.

    Parameters
    ----------
    machine : Topology, or what `topoplan.load` takes
        One server, not a cluster.
    gpus : sequence of int or None
        GPU numbers of the allocation on this server; None takes all. Devices keep their names.
    nics : int, str or None
        NICs of this server, as for `topoplan.cluster`; None takes what the cluster says.
    nic_gbps : float or None
        Gb/s of each NIC in each direction; None takes what the cluster says.
    count : int
        Servers of this kind.
    served : sequence of int or None
        The GPUs for which NICs are chosen, where only some of those that are there will be used; None for all.
    flow_gbps : float or None
        Gb/s of one connection through a NIC; None takes what the cluster says.
    name : str
        What it is called in the cluster; by its number (``s0``) if empty.

    Raises
    ------
    UsageError
        The machine is a cluster already; a GPU is not there; a number makes no sense.

    Examples
    --------
    >>> import topoplan
    >>> Server("dgx-1v", gpus=[2, 0, 1], count=2).gpus
    (0, 1, 2)
    """

    machine: TopologyLike
    gpus: Sequence[int] | None = None
    nics: int | str | None = None
    nic_gbps: float | None = None
    count: int = 1
    served: Sequence[int] | None = None
    flow_gbps: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine", as_topology(self.machine))
        machine = self.topology
        if len(machine.servers) > 1 or any(link.channel == "network" for link in machine.links):
            raise UsageError(f"{machine.name} has a network of its own; build a cluster from single servers")
        for name in ("gpus", "served"):
            chosen = machine.select(getattr(self, name))
            object.__setattr__(self, name, None if getattr(self, name) is None else chosen)
        if not isinstance(self.nics, str):
            check_count("nics", self.nics, most=MOST_NICS)
        check_count("count", self.count)
        if self.nic_gbps is not None:
            nic_rate(self.nic_gbps)
        check_flow(self.flow_gbps)
        if self.name and self.count != 1:
            raise UsageError(
                f"{self.count} servers cannot all be called {self.name}; list each with its name"
            )

    @property
    def topology(self) -> Topology:
        """The machine, however it was named."""
        return as_topology(self.machine)

    @property
    def kind(self) -> Server:
        """The same without its name: servers of one kind are wired alike."""
        return replace(self, name="") if self.name else self


def check_count(name: str, value: int | None, *, most: int = 10**15) -> None:
    """Refuse what is no whole number from 1 to ``most``; None stands for "not given" and passes.

    Raises
    ------
    UsageError
        The message names the field and the value.
    """
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:
        raise UsageError(f"{name} {_shown(value)} must be a whole number from 1 to {most:,}")


def nic_rate(gbps: float) -> float:
    """GB/s of a NIC that is sold as so many Gb/s.

    Raises
    ------
    UsageError
        It is zero, negative, not finite or beyond what links have.

    Examples
    --------
    >>> nic_rate(200)
    25.0
    """
    number = isinstance(gbps, (int, float)) and not isinstance(gbps, bool)
    if not number or not 8 * SLOWEST <= gbps <= 8 * FASTEST:
        raise UsageError(f"nic_gbps {_shown(gbps)} must be a number of Gb/s above zero, for example 100")
    return gigabytes_from_gigabits(gbps)


def check_flow(gbps: float | None) -> None:
    """Refuse what is no rate of a connection; None stands for "not given" and passes.

    Raises
    ------
    UsageError
        It is zero, negative, not finite or beyond what links have.
    """
    number = isinstance(gbps, (int, float)) and not isinstance(gbps, bool)
    if gbps is not None and not (number and 8 * SLOWEST <= gbps <= 8 * FASTEST):
        raise UsageError(
            f"flow_gbps {_shown(gbps)} must be the Gb/s of one connection, above zero, for example 5"
        )


def stated_gigabits(machine: Topology) -> float:
    """Gb/s that every NIC of a machine states as its own, as a probed machine's do.

    Raises
    ------
    UsageError
        None is stated, or they differ.
    """
    stated = sorted({device.fact("gigabits") for device in machine.devices if device.kind == "nic"})
    numbers = [text for text in stated if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) and float(text) > 0]
    if len(stated) == len(numbers) == 1:
        return float(numbers[0])
    if len(numbers) > 1:
        raise UsageError(
            f"the NICs of {machine.name} differ ({', '.join(numbers)} Gb/s): say with nic_gbps what each has"
        )
    raise UsageError("nic_gbps is not given: say how many Gb/s each NIC has, for example 100")


def _shown(value: object) -> str:
    """A value for a message: whatever it is, no longer than a line can bear."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "of more than 18 digits"
    return repr(value)[:40]
