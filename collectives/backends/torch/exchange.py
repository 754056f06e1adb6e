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
"""Bytes of a block where ranks have not agreed on another: gloo cannot bear messages of another length than is
expected."""


def exchange(
    block: bytes, wires: Wires, *, rank: int, size: int, device: torch.device, length: int = BLOCK
) -> list[bytes]:
    """The blocks of all ranks, in the order of the ranks; all ranks must call it.

    Parameters
    ----------
    block : bytes
        At most ``length``; filled up with spaces.
    wires : Wires
    rank, size : int
    device : torch.device
        Where the messages are put together.
    length : int
        Bytes of a block, the same on all ranks.

    Raises
    ------
    LostPeer
        A peer did not take part within the timeout.
    """
    assert len(block) <= length, "a block that does not fit"
    have = torch.empty(size * length, dtype=torch.uint8, device=device)
    have[:length] = torch.frombuffer(bytearray(block.ljust(length)), dtype=torch.uint8)
    known = 1
    while known < size:
        more = min(known, size - known)
        ahead, behind = (rank + known) % size, (rank - known) % size
        receive = Message(ahead, have[known * length : (known + more) * length])
        wires.start([receive], [Message(behind, have[: more * length])])
        wires.received(ahead)
        wires.sent(behind)
        known += more
    wires.settle()
    gathered = have.cpu().numpy().tobytes()
    blocks = [gathered[place * length : (place + 1) * length] for place in range(size)]
    return [blocks[(other - rank) % size] for other in range(size)]
