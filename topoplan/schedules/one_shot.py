"""One-shot allreduce: every rank sends all it has to all others, and each adds everything up itself.

A byte crosses as few edges one after another as the wires allow, and no sum is waited for: nothing has fewer start-ups.
For that every rank takes in what N - 1 others have, so it is for small messages. Between servers it is the middle of
three phases: each server adds up inside, the owners of a part exchange their sums, each adds them up, and hands the
total out inside.

An exchange is a gather from every rank that takes part (`topoplan.plans.tree.Stage`). All ranks add in the order of the
senders, so all have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard, Stage
from topoplan.schedules.lowest_tree import lowest_tree
from topoplan.schedules.sparse_servers import exchanging_servers
from topoplan.topology import TopologyLike

ONE_SHOT = "one-shot"
ONE_SHOT_SERVERS = "one-shot three-phase"


def one_shot(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The allreduce in which every rank sends all it has to all others, over the lowest tree of each.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : None
        An allreduce has none.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        Another collective, a root, or a GPU out of range.
    InfeasibleError
        The channels do not connect the allocation.

    Examples
    --------
    A DGX-2 adds up in one hop what fits through its ports fifteen times:

    >>> import topoplan
    >>> plan = one_shot(topoplan.load("dgx-2"))
    >>> plan.rate, plan.depth, len(plan.shards[0].stages)
    (10.0, 1, 16)
    >>> round(topoplan.simulate(plan, nbytes=1024).seconds * 1e6, 1)
    17.3
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    _check(asked.collective)
    fabric = asked.connected(channels)
    if fabric.size == 1:
        return trivial_plan(fabric, asked.collective, root=None, method=ONE_SHOT)
    gathered = lowest_tree(topology, "allgather", gpus=gpus, channels="+".join(fabric.channels))
    return _plan(fabric, exchange_of(gathered), ONE_SHOT).timed(time.perf_counter() - started)


def one_shot_servers(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The allreduce in three phases, of which the one between servers is one-shot.

    Parameters are those of `one_shot`.

    Raises
    ------
    UsageError
        Another collective, a root, a GPU out of range, or all GPUs on one server.
    InfeasibleError
        Servers of one GPU each, GPUs of a server that are not connected inside it, or servers not in one hop.

    Examples
    --------
    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("dgx-a100"), count=2)], nic_gbps=200, nics=8)
    >>> plan = one_shot_servers(pair)
    >>> plan.depth, [stage.op for stage in plan.shards[0].stages]
    (3, ['reduce', 'reduce', 'gather', 'gather', 'broadcast', 'broadcast'])
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    _check(asked.collective)
    fabric = asked.connected(channels)
    shards = exchanging_servers(fabric, None)
    return _plan(fabric, shards, ONE_SHOT_SERVERS).timed(time.perf_counter() - started)


def exchange_of(gathered: Plan) -> tuple[Shard, ...]:
    """The exchange that goes along the trees of an allgather: what was one rank's block is all that it has.

    Each owner divides its block between trees in its own way; a shard here is a part that none of them divides.

    Examples
    --------
    >>> import topoplan
    >>> gathered = topoplan.plan(topoplan.load("dgx-1v"), "allgather", gpus=[0, 1, 2])
    >>> [(str(shard.share), len(shard.stages)) for shard in exchange_of(gathered)]
    [('1', 3)]
    """
    size = len(gathered.ranks)
    trees: dict[int, list[tuple[Fraction, Stage]]] = {}
    for shard in gathered.shards:
        stage = shard.stages[0]
        trees.setdefault(stage.root, []).append((shard.share * size, stage))
    ends = {root: list(accumulate(share for share, _ in parts)) for root, parts in trees.items()}
    cuts = sorted({Fraction(0), *(end for found in ends.values() for end in found)})
    shards = []
    for start, stop in pairwise(cuts):
        stages = []
        for root in sorted(trees):
            place = next(number for number, end in enumerate(ends[root]) if end > start)
            stage = trees[root][place][1]
            stages.append(Stage("gather", root, stage.edges))
        shards.append(Shard(stop - start, tuple(stages)))
    return tuple(shards)


def one_shot_along(gathered: Plan) -> Plan:
    """The one-shot allreduce along the trees of an allgather on the same machine."""
    return _plan(Fabric(gathered.topology, gathered.channels), exchange_of(gathered), ONE_SHOT)


def _check(collective: str) -> None:
    if collective != "allreduce":
        raise UsageError(f"one-shot is an allreduce, not {collective}; choose another schedule")


def _plan(fabric: Fabric, shards: Iterable[Shard], schedule: str) -> Plan:
    return build_plan(
        fabric,
        "allreduce",
        root=None,
        shards=tuple(shards),
        certificate=best_bound(fabric, "allreduce", None),
        schedule=schedule,
        method=schedule,
    )
