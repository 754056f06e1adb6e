"""Bounds of an allreduce from one cut and its images: servers behind a network, leaves behind a spine.

Where a set U of devices and its images under the fabric's symmetries part all ranks into k groups, every tree enters
k - 1 of them (a reduce as well as a broadcast, whatever its root), so a byte crosses the links into the groups at least
2 (k - 1) times: rate <= k B-(U) / (2 (k - 1)), with B-(U) the capacity into U. As dual lengths: 1 on those links.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates import Lengths
from topoplan.symmetry.search import find_symmetry


def repeated_cut(fabric: Fabric, part: Iterable[int], *, entering: bool) -> tuple[Fraction, Lengths] | None:
    """What a set of nodes and its images prove of an allreduce, or None where they do not part the ranks.

    Parameters
    ----------
    fabric : Fabric
    part : iterable of int
        Nodes; the ranks among them are one group.
    entering : bool
        Count links into the groups, or those that leave them.

    Returns
    -------
    (Fraction, Lengths) or None
        GB/s, and the certificate.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> fabric = Fabric(topoplan.nvswitch_cluster(4), ("nvlink", "network"))
    >>> server = [node for node, name in enumerate(fabric.nodes) if name.startswith("s0.")]
    >>> float(repeated_cut(fabric, server, entering=True)[0])
    133.33333333333334
    """
    groups = _images(fabric, sorted(part))
    group_of = [-1] * len(fabric.nodes)
    for number, group in enumerate(groups):
        for node in group:
            if group_of[node] >= 0:
                return None
            group_of[node] = number
    if len(groups) < 2 or -1 in group_of[: fabric.size]:
        return None
    lengths = []
    crossing = Fraction(0)
    for link, (src, dst), capacity in zip(fabric.links, fabric.ends, fabric.capacity, strict=True):
        if group_of[dst if entering else src] >= 0 and group_of[src] != group_of[dst]:
            lengths.append((link.src, link.dst, Fraction(1)))
            crossing += capacity
    return crossing / (2 * (len(groups) - 1)), Lengths(tuple(lengths))


def _images(fabric: Fabric, part: list[int]) -> list[tuple[int, ...]]:
    """The images of a set of nodes under the symmetries that are found, the set itself first."""
    generators = [np.asarray(each) for each in find_symmetry(fabric)]
    first = tuple(part)
    known = {first}
    found = [first]
    for group in found:
        for generator in generators:
            image = tuple(sorted(generator[list(group)].tolist()))
            if image not in known:
                known.add(image)
                found.append(image)
    return found
