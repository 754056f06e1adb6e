"""The text of ``nvidia-smi topo -m`` for GPUs whose every pair has the same code."""

from __future__ import annotations


def uniform_matrix(gpus: int, code: str) -> str:
    """A row for each GPU, X on the diagonal."""
    head = "\t" + "\t".join(f"GPU{one}" for one in range(gpus))
    rows = (
        "\t".join([f"GPU{one}", *("X" if one == other else code for other in range(gpus))])
        for one in range(gpus)
    )
    return "\n".join([head, *rows, ""])
