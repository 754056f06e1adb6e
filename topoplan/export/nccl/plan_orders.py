"""The rings or chains that a plan consists of, as orders of GPUs with their shares: all that NCCL can run of a plan.

A ring is recognised by its shape, whoever made it. AllReduce: a shard reduces along a path into a rank and broadcasts
along the path out of it, both the same way around. The other collectives have one path for each shard, which NCCL runs
around the ring that closes it. A chain reduces up a path and broadcasts down the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanOrders:
    """What a plan runs.

    Parameters
    ----------
    closed : bool
        Rings, or else chains.
    shares : dict of tuple of str to Fraction
        Share of the buffer of each order of GPUs: of a ring from the lowest rank on, of a chain from its root on.
    """

    closed: bool
    shares: dict[tuple[str, ...], Fraction]


def plan_orders(plan: Plan) -> PlanOrders | None:
    """The rings or the chains of a plan; None where it has other trees.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> found = plan_orders(topoplan.ring(machine, "broadcast", gpus=[0, 1, 2]))
    >>> for order, share in found.shares.items():
    ...     print(*order, share)
    gpu0 gpu1 gpu2 1/2
    gpu0 gpu2 gpu1 1/2
    >>> plan_orders(topoplan.plan(machine)) is None
    True
    """
    rings: dict[Path, Fraction] = {}
    chains: dict[Path, Fraction] = {}
    if plan.sparse:
        return None
    for shard in plan.shards:
        paths = [_path(stage, len(plan.ranks)) for stage in shard.stages]
        if None in paths or not 1 <= len(paths) <= 2:
            return None
        around = [_along_data(stage, path) for stage, path in zip(shard.stages, paths, strict=True) if path]
        if around[0] == around[-1]:
            start = around[0].index(min(around[0]))
            ring = around[0][start:] + around[0][:start]
            rings[ring] = rings.get(ring, Fraction(0)) + shard.share
        if len(paths) == 2 and paths[0] == paths[1] and paths[0]:
            chains[paths[0]] = chains.get(paths[0], Fraction(0)) + shard.share
    for closed, found in ((True, rings), (False, chains)):
        if sum(found.values()) == 1:
            names = {tuple(plan.ranks[rank] for rank in path): share for path, share in sorted(found.items())}
            return PlanOrders(closed, names)
    return None


def _path(stage: Stage, size: int) -> Path | None:
    """Ranks from the root on, where every one has at most one child and all are there."""
    child = {edge.parent: edge.child for edge in stage.edges}
    if len(child) != len(stage.edges) or len(child) != size - 1:
        return None
    path = [stage.root]
    while path[-1] in child and len(path) <= size:
        path.append(child[path[-1]])
    return tuple(path) if len(path) == size else None


def _along_data(stage: Stage, path: Path) -> Path:
    """Around the ring from the root on, the way data runs: in a reduce stage that is against the path."""
    return path if stage.op == "broadcast" else (path[0], *path[:0:-1])
