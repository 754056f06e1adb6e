"""A plan carried to a machine that is its own under other names: the same trees, shares, rate and certificate.

Ranks are numbered anew there, in the order of that machine's GPUs, and shards stand in the order of their new owners.
Where shards are images of templates under symmetries, templates and symmetries are carried: with node i called m(i),
the symmetry g becomes m g m^-1. What is carried is no proof that the machines are the same: `topoplan.verify` of the
result is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates import OneFabric
from topoplan.plans.certificates.exchange import ends_of
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.symmetric_shards import ImageShards, moved_shard, owner_of
from topoplan.plans.tree import Shard
from topoplan.topology import Topology


def carried(plan: Plan, names: Mapping[str, str], topology: Topology) -> Plan:
    """A plan on a machine that differs from its own in the names of devices alone.

    Parameters
    ----------
    plan : Plan
    names : mapping of str to str
        The name there of every device that the plan names.
    topology : Topology
        The machine there.

    Raises
    ------
    PlanError
        A device has no name there.

    Examples
    --------
    The two halves of a DGX-1V, GPUs 0 to 3 and 4 to 7, have the same wires.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> plan = topoplan.plan(machine, "broadcast", gpus=[0, 1, 2], root=1)
    >>> there = carried(plan, {"gpu0": "gpu4", "gpu1": "gpu5", "gpu2": "gpu6"}, machine.subset([4, 5, 6]))
    >>> there.ranks[there.root], topoplan.verify(there).rate == plan.rate
    ('gpu5', True)
    """
    if not isinstance(plan.certificate, OneFabric):
        raise PlanError(f"a plan with a certificate of kind {plan.certificate.kind} cannot be renamed")
    fabric = Fabric(topology, plan.channels)
    before = Fabric(plan.topology, plan.channels)
    for number, (shard, _) in enumerate(plan.shard_counts):
        for position, stage in enumerate(shard.stages):
            try:
                stage.check_ranks(len(before.vertices))
            except PlanError as error:
                raise error.within(number, position) from None
    try:
        there = {name: place for place, name in enumerate(fabric.nodes)}
        image = [there[names[name]] for name in before.nodes]
        move = partial(moved_shard, vertices=image, names=names)
        certificate = plan.certificate.renamed(names)
        shards: Sequence[Shard]
        if isinstance(plan.shards, ImageShards):
            shards = ImageShards(
                fabric.nodes,
                fabric.size,
                tuple(_conjugate(generator, image) for generator in plan.shards.generators),
                tuple(move(shard) for shard in plan.shards.templates),
            )
        else:
            shards = _in_order(plan.collective, [move(shard) for shard in plan.shards])
    except KeyError as error:
        raise PlanError(f"the renaming has no device for {error}") from None
    return Plan(
        collective=plan.collective,
        ranks=fabric.ranks,
        root=None if plan.root is None else image[plan.root],
        topology=topology,
        channels=plan.channels,
        schedule=plan.schedule,
        method=plan.method,
        shards=shards,
        rate=plan.rate,
        bound=plan.bound,
        certificate=certificate,
        notes=plan.notes,
        order=plan.order,
    )


def _conjugate(generator: Sequence[int], image: Sequence[int]) -> tuple[int, ...]:
    """What a permutation becomes when node i is called ``image[i]``."""
    moved = [0] * len(image)
    for place, target in enumerate(generator):
        moved[image[place]] = image[target]
    return tuple(moved)


def _in_order(collective: str, shards: list[Shard]) -> tuple[Shard, ...]:
    """Shards as plans have them: in the order of their owners, or of the ends of their paths."""
    if collective == ALL_TO_ALL:
        return tuple(sorted(shards, key=lambda shard: ends_of(shard)[::-1]))
    if collective in ("allgather", "reduce_scatter"):
        return tuple(sorted(shards, key=owner_of))
    return tuple(shards)
