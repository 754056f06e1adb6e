"""What carries bytes between a NIC and the buffers of a rank: the kernel's TCP, DPDK or RDMA, and what each costs.

TCP passes the kernel, which takes time to start and copies every byte twice. DPDK hands whole packets to the process:
no kernel, but a core for each NIC that does nothing but ask whether something has come. RDMA reads and writes the
buffers itself, in hardware, and wants a network that drops nothing (priority flow control), with the congestion that
this spreads.

The figures are assumptions: two machines differ more than two transports. Measured links (`topoplan.calibration`)
replace start-ups and rates; copies and cores stay. Shares of the wire are what Ethernet frames leave to the payload:
1448 of 1538 bytes for TCP segments in frames of 1500, which DPDK sends too, 4096 of 4178 for messages of RoCE v2. Not
in the model: what a core can copy a second, retransmission, and the pauses of a lossless network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Transport:
    """What a transport costs.

    Parameters
    ----------
    name : str
    alpha : float
        Seconds to start a message from one server to another.
    share : float
        Part of the wire that payload gets.
    copies : int
        Copies in the host's memory of each byte that is sent, and of each that comes.
    polling : int
        Cores for each NIC that do nothing but poll it.
    lossless : bool
        Whether the network must not drop packets.
    """

    name: str
    alpha: float
    share: float
    copies: int
    polling: int
    lossless: bool

    def memory_load(self, out: float, back: float) -> float:
        """GB/s that copies load the memory of a host whose NICs send and receive so many GB/s.

        Examples
        --------
        >>> TRANSPORTS["tcp"].memory_load(12.5, 12.5), TRANSPORTS["rdma"].memory_load(12.5, 12.5)
        (50.0, 0.0)
        """
        return self.copies * (out + back)

    def rate(self, wire: float, *, nics: int = 1, memory: float | None = None) -> float:
        """GB/s of payload that a NIC carries in each direction.

        Parameters
        ----------
        wire : float
            GB/s of the NIC.
        nics : int
            NICs of the host, which share its memory evenly.
        memory : float or None
            GB/s that copies may take of the host's memory; None for no limit.

        Examples
        --------
        >>> round(TRANSPORTS["tcp"].rate(12.5), 3), TRANSPORTS["tcp"].rate(12.5, nics=2, memory=40.0)
        (11.769, 5.0)
        """
        carried = wire * self.share
        if memory is None or not self.copies:
            return carried
        return min(carried, memory / (2 * self.copies * nics))

    def note(self, *, nics: int, out: float, back: float) -> str:
        """A line on a host whose NICs send and receive so many GB/s together."""
        copies = (
            f"{self.copies} {'copy' if self.copies == 1 else 'copies'} of each byte, up to "
            f"{self.memory_load(out, back):.4g} GB/s of a server's memory"
            if self.copies
            else "no copies in a server's memory"
        )
        cores = self.polling * nics
        polling = f"{cores or 'no'} {'core' if cores == 1 else 'cores'} polling in each server"
        lossless = ", a network that drops nothing" if self.lossless else ""
        return (
            f"transport {self.name}: start-up of {self.alpha * 1e6:g} us and {self.share:.1%} of the wire, assumed "
            f"unless calibrated; {copies}, {polling}{lossless}"
        )


TRANSPORTS: Mapping[str, Transport] = {
    one.name: one
    for one in (
        Transport("tcp", alpha=30e-6, share=1448 / 1538, copies=2, polling=0, lossless=False),
        Transport("dpdk", alpha=10e-6, share=1448 / 1538, copies=1, polling=1, lossless=False),
        Transport("rdma", alpha=2e-6, share=4096 / 4178, copies=0, polling=0, lossless=True),
    )
}
"""The transports by name, with assumed figures."""


def transport_of(name: str | None, memory_gbps: float | None) -> Transport | None:
    """The transport of a name, None for none; checked together with the memory that its copies may take.

    Raises
    ------
    UsageError
        An unknown name, or a memory that is none or has no transport.
    """
    if name is not None and name not in TRANSPORTS:
        raise UsageError(f"transport {str(name)[:40]!r} is unknown; use one of {', '.join(TRANSPORTS)}")
    if memory_gbps is not None:
        if name is None:
            raise UsageError("memory_gbps limits what a transport copies; give a transport too, such as tcp")
        number = isinstance(memory_gbps, (int, float)) and not isinstance(memory_gbps, bool)
        if not number or not 1e-3 <= memory_gbps <= 1e6:
            raise UsageError(f"memory_gbps {str(memory_gbps)[:40]} must be GB/s from 0.001 to 1000000")
    return None if name is None else TRANSPORTS[name]
