"""The connection matrix as ``topoplan show`` prints it: laid out like ``nvidia-smi topo -m``, with both legends."""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.cli.output import printable, table
from topoplan.formats.matrix import affinity_columns, relation_matrix
from topoplan.hosts.notes import listed
from topoplan.topology import Topology

WIDEST = 160
"""Characters of a line of the matrix; one of more devices is printed in several blocks of columns."""

_ROOMY = 120

_CODES = (
    "NV#: NVLinks between the two, or into the switch they share.  PIX: one PCIe switch.  PXB: several.",
    "PHB: through a CPU.  NODE: likewise, by two host bridges.  SYS: between NUMA nodes.  NET: over a network.  "
    "-: no path.",
)


def matrix_text(topology: Topology, kinds: Sequence[str]) -> str:
    """The matrix of the devices of some kinds, affinity of GPUs where it is known, and what codes and NICs mean.

    Empty where there is no such device.

    Examples
    --------
    >>> import topoplan
    >>> print(matrix_text(topoplan.load("v100x4"), ["gpu"]).split("Legend")[0].rstrip())
          gpu0  gpu1  gpu2  gpu3
    gpu0  X     NV1   NV1   NV2
    gpu1  NV1   X     NV2   NV1
    gpu2  NV1   NV2   X     NV2
    gpu3  NV2   NV1   NV2   X
    """
    names, cells = relation_matrix(topology, kinds)
    if not names:
        return ""
    columns = [(name, *(row[i] for row in cells)) for i, name in enumerate(names)]
    columns += [(title, *shown) for title, shown in affinity_columns(topology, names).items()]
    blocks = [_block(names, part) for part in _parts(names, columns)]
    legend = ["Legend:", *(f"  {line}" for line in _CODES)]
    nics = _nic_lines(topology, names)
    if nics:
        legend += ["NIC legend:", *(f"  {line}" for line in nics)]
    return "\n\n".join([*blocks, "\n".join(legend)])


def _parts(names: Sequence[str], columns: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    """Columns in blocks that a line can hold."""
    parts: list[list[Sequence[str]]] = [[]]
    for column in columns:
        if parts[-1] and _width(names, [*parts[-1], column], gap=1) > WIDEST:
            parts.append([])
        parts[-1].append(column)
    return parts


def _width(names: Sequence[str], columns: Sequence[Sequence[str]], *, gap: int) -> int:
    return max(map(len, names)) + sum(gap + max(map(len, column)) for column in columns)


def _block(names: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    gap = 2 if _width(names, columns, gap=2) <= _ROOMY else 1
    header, *rows = zip(("", *names), *columns, strict=True)
    return table(header, rows, gap=gap)


def _nic_lines(topology: Topology, names: Sequence[str]) -> list[str]:
    """What each NIC is, those of one model together."""
    meaning: dict[str, list[str]] = {}
    for device in map(topology.device, names):
        text = device.fact("adapter") or device.model
        if device.kind == "nic" and text:
            meaning.setdefault(text, []).append(device.name)
    return [f"{listed(found)}: {printable(text)}" for text, found in meaning.items()]
