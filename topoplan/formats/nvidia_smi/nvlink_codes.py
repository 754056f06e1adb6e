"""What the NV# cells of a matrix mean: direct links or an NVSwitch, and of which GPU generation.

A cell NV# counts the links that join a pair, but behind an NVSwitch all pairs of a GPU share the same
links. So the rule: if the NV# of some row add up to more links than any GPU has (18), the machine is
switched, and a GPU has as many links as the largest NV# of its row. Otherwise every cell is a bundle of its
own. The generation is not printed; the first that fits is taken:

1. direct, every NV# is 1, three or more in some row: P100 (a V100 of a DGX-1 has two such neighbours only);
2. direct, pairs of NV4 and nothing else: the bridge of RTX 30 and A6000 cards;
3. the first of V100, A100, H100 whose 6, 12, 18 links suffice for the largest row (switched: the largest
   NV#).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.formats.nvidia_smi.matrix_text import Matrix
from topoplan.hosts.link_rates import A100, GA102, H100, MOST_LINKS, P100, UNKNOWN, V100, GpuGeneration
from topoplan.hosts.notes import listed


@dataclass(frozen=True, slots=True)
class Nvlinks:
    """NVLinks of a machine.

    Parameters
    ----------
    switched : bool
        GPUs are joined by an NVSwitch.
    direct : dict of (str, str) to int
        Links of each pair, each pair once; empty if switched.
    to_switch : dict of str to int
        Links of each GPU to the switch; empty if direct.
    generation : GpuGeneration
        Assumed GPU.
    notes : tuple of str
        What was assumed, other than bandwidths.
    """

    switched: bool
    direct: dict[tuple[str, str], int]
    to_switch: dict[str, int]
    generation: GpuGeneration
    notes: tuple[str, ...]


def read_nvlinks(matrix: Matrix) -> Nvlinks:
    """Apply the rule above to a matrix.

    Examples
    --------
    >>> from topoplan.formats.nvidia_smi.matrix_text import read_matrix
    >>> row = "       GPU0 GPU1 GPU2 GPU3"
    >>> four = [" ".join([f"GPU{i}"] + ["X" if i == j else "NV12" for j in range(4)]) for i in range(4)]
    >>> read_nvlinks(read_matrix("\\n".join([row, *four]))).to_switch
    {'GPU0': 12, 'GPU1': 12, 'GPU2': 12, 'GPU3': 12}
    """
    rows = {gpu: [matrix.nvlinks(gpu, other) for other in matrix.gpus if other != gpu] for gpu in matrix.gpus}
    counts = sorted({count for row in rows.values() for count in row if count})
    largest_row = max((sum(row) for row in rows.values()), default=0)
    notes = []
    if largest_row > MOST_LINKS:
        to_switch = {gpu: max(row) for gpu, row in rows.items() if any(row)}
        bare = [gpu for gpu in matrix.gpus if gpu not in to_switch]
        notes.append(
            f"NV# of a row add up to {largest_row} links, more than the {MOST_LINKS} that a GPU has at most: "
            f"an NVSwitch, with {counts[-1]} links per GPU"
        )
        if bare:
            notes.append(f"{listed(bare).lower()}: no NVLink to the switch")
        return Nvlinks(True, {}, to_switch, _smallest(counts[-1]), tuple(notes))
    direct = {
        (first, second): count
        for i, first in enumerate(matrix.gpus)
        for second in matrix.gpus[i + 1 :]
        if (count := matrix.nvlinks(first, second))
    }
    most_peers = max(sum(map(bool, row)) for row in rows.values())
    if not counts:
        generation = UNKNOWN
    elif counts == [1] and most_peers >= 3:
        generation = P100
    elif counts == [4] and most_peers == 1:
        generation = GA102
        notes.append("pairs of NV4 read as the bridge of RTX 30 and A6000 cards; an A30 has 25 GB/s per link")
    else:
        generation = _smallest(largest_row)
    if counts == [V100.links] and most_peers in (2, 3):
        notes.append(
            f"NV6 to {most_peers} peers read as direct links; "
            "V100 GPUs of an NVSwitch machine look the same, with 6 links per GPU in all"
        )
    return Nvlinks(False, direct, {}, generation, tuple(notes))


def _smallest(links: int) -> GpuGeneration:
    return next((generation for generation in (V100, A100, H100) if generation.links >= links), H100)
