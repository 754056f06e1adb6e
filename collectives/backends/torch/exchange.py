"""Small blocks of bytes from every rank to every rank, over the messages of a process group.

The gathering of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems", IEEE TPDS 8 (1997), section 3: with N ranks ceil(log2 N) rounds, in each of which a rank sends all it
has to one peer. torch's own all_gather is not used because gloo gives it no timeout of its own, and a thread that
hangs in it would outlive the error.
"""

from __future__ import annotations

import torch

from collectives.backends.torch.wires import Message, Wires

BLOCK = 528
"""Bytes of a block, always the same: gloo cannot bear messages of another length than is expected."""


def exchange(block: bytes, wires: Wires, *, rank: int, size: int, device: torch.device) -> list[bytes]:
    """The blocks of all ranks, in the order of the ranks; all ranks must call it.

    Parameters
    ----------
    block : bytes
        At most `BLOCK`; filled up with spaces.
    wires : Wires
    rank, size : int
    device : torch.device
        Where the messages are put together.

    Raises
    ------
    LostPeer
        A peer did not take part within the timeout.
    """
    assert len(block) <= BLOCK, "a block that does not fit"
    have = torch.empty(size * BLOCK, dtype=torch.uint8, device=device)
    have[:BLOCK] = torch.frombuffer(bytearray(block.ljust(BLOCK)), dtype=torch.uint8)
    known = 1
    while known < size:
        more = min(known, size - known)
        ahead, behind = (rank + known) % size, (rank - known) % size
        receive = Message(ahead, have[known * BLOCK : (known + more) * BLOCK])
        wires.start([receive], [Message(behind, have[: more * BLOCK])])
        wires.received(ahead)
        wires.sent(behind)
        known += more
    wires.settle()
    gathered = have.cpu().numpy().tobytes()
    blocks = [gathered[place * BLOCK : (place + 1) * BLOCK] for place in range(size)]
    return [blocks[(other - rank) % size] for other in range(size)]
