"""Describe how bytes travel between a NIC and the buffers of a rank: TCP, DPDK or RDMA.

TCP passes the kernel, which takes time to start and
copies every byte twice. DPDK hands packets to the process without the kernel, and one core polls each NIC. RDMA reads
and writes the buffers in hardware and needs a lossless network (priority flow control), which spreads congestion. The
figures are assumptions: two machines differ more than two transports. Measured links (`topoplan.operate.calibration`)
replace start-ups and rates; copies and cores stay. Shares of the wire are the payload of Ethernet frames: 1448 of 1538
bytes for TCP segments in frames of 1500, also for DPDK; 4096 of 4178 for RoCE v2. Not in the model: the copy rate of a
core, retransmission, pauses of a lossless network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.machine.topology import is_number


@dataclass(frozen=True, slots=True)
class Transport:
    """The costs of a transport.

    ``alpha`` is in seconds for a message between servers, ``share`` the payload's part of the wire. ``copies`` are
    those of each sent byte, and of each received one, in the host's memory; ``polling`` cores do nothing but poll one
    NIC. ``lossless`` means that the network must not drop packets.
    """

    name: str
    alpha: float
    share: float
    copies: int
    polling: int
    lossless: bool

    def memory_load(self, out: float, back: float) -> float:
        """Return the memory traffic in GB/s of copies on a host whose NICs send and receive so many GB/s."""
        return self.copies * (out + back)

    def rate(self, wire: float, *, nics: int = 1, memory: float | None = None) -> float:
        """Return the payload rate in GB/s of a NIC in each direction.

        ``wire`` is the NIC's GB/s, ``nics`` the number of NICs that share the host's memory, ``memory`` the GB/s that
        copies may take of it; None means no limit.

        >>> round(TRANSPORTS["tcp"].rate(12.5), 3), TRANSPORTS["tcp"].rate(12.5, nics=2, memory=40.0)
        (11.769, 5.0)
        """
        payload = wire * self.share
        if memory is None or not self.copies:
            return payload
        return min(payload, memory / (2 * self.copies * nics))

    def note(self, *, nics: int, out: float, back: float) -> str:
        """Return a note on a host whose NICs together send and receive so many GB/s."""
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

CABLED = Transport("rdma", alpha=6.8e-6, share=1.0, copies=0, polling=0, lossless=False)
"""RDMA over cables between servers without a switch, from memory of the host: 48 KB take 8.8 us at 25 GB/s, as
ConnectX-7 NICs of DGX Sparks were measured (b12x issue 295). Cables state the rate that they carry."""


def transport_of(name: str | None, memory_gbps: float | None) -> Transport | None:
    """Return the transport of a name, None for None; check it together with the memory that its copies may take."""
    if name is not None and (not isinstance(name, str) or name not in TRANSPORTS):
        raise UsageError(f"transport {str(name)[:40]!r} is unknown; use one of {', '.join(TRANSPORTS)}")
    if memory_gbps is not None:
        if name is None:
            raise UsageError("memory_gbps limits what a transport copies; give a transport too, such as tcp")
        if not is_number(memory_gbps) or not 1e-3 <= memory_gbps <= 1e6:
            raise UsageError(f"memory_gbps {str(memory_gbps)[:40]} must be GB/s from 0.001 to 1000000")
    return None if name is None else TRANSPORTS[name]
