"""Which elements of the buffer each rank gets."""

from __future__ import annotations

from collectives.peers.signature import Signature


def result_blocks(signature: Signature, ranks: int) -> tuple[tuple[int, int], ...]:
    """For each rank the elements of its result.

    Examples
    --------
    >>> result_blocks(Signature(0, "", 2, "reduce_scatter", None, "sum", "int8", 6, 6), 2)
    ((0, 3), (3, 6))
    """
    count = signature.count
    if signature.collective == "reduce_scatter":
        block = count // ranks
        return tuple((rank * block, (rank + 1) * block) for rank in range(ranks))
    if signature.collective == "reduce":
        return tuple((0, count if rank == signature.root else 0) for rank in range(ranks))
    return ((0, count),) * ranks
