"""The check of a plan that splits the buffer between channels: what its certificate takes for granted.

The bounds of the channels add up only where every shard keeps to one of them, and where each owner's block of an
allgather or reduce-scatter is divided between them alike: the bound of a channel supposes equal blocks.
"""

from __future__ import annotations

from fractions import Fraction

from topoplan.errors import PlanError
from topoplan.fabric.fabric import CHANNEL_LINKS, Fabric
from topoplan.plans.certificate import Channels
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan, Shard


def check_channels(plan: Plan, fabric: Fabric) -> None:
    """Hold every shard of a split plan to one channel.

    Parameters
    ----------
    plan : Plan
        Its trees are trees. Other plans than split ones pass.
    fabric : Fabric
        The plan's.

    Raises
    ------
    PlanError
        A shard mixes channels, or the owners' blocks are not divided alike.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allgather", channels="nvlink+pcie")
    >>> check_channels(plan, Fabric(plan.topology, plan.channels))
    """
    if not (fabric.split or isinstance(plan.certificate, Channels)):
        return
    carried: dict[tuple[str, int], Fraction] = {}
    for number, shard in enumerate(plan.shards):
        channel = _only_channel(shard, number, fabric)
        owner = shard.stages[0].root if plan.collective == "allgather" else shard.stages[-1].root
        carried[channel, owner] = carried.get((channel, owner), Fraction(0)) + shard.share
    if plan.collective in ("allgather", "reduce_scatter") and isinstance(plan.certificate, Channels):
        for channel in sorted({channel for channel, _ in carried}):
            shares = [carried.get((channel, rank), Fraction(0)) for rank in range(fabric.size)]
            for rank, share in enumerate(shares):
                if share != shares[0]:
                    raise PlanError(
                        f"{float(share):.6g} of the buffer runs over {channel} from this owner and "
                        f"{float(shares[0]):.6g} from rank 0: the bound holds only where all are divided alike",
                        rank=rank,
                    )


def _only_channel(shard: Shard, number: int, fabric: Fabric) -> str:
    first = ""
    for position, stage in enumerate(shard.stages):
        for edge in stage.edges:
            first = first or edge.channel
            try:
                crossed = {fabric.links[link].channel for link in edge_links(edge, stage.op, fabric)}
            except PlanError as error:
                raise error.within(number, position) from None
            if edge.channel != first or not crossed <= set(CHANNEL_LINKS[first]):
                raise PlanError(
                    f"a shard over {first} uses {edge.channel} too; in a split plan every shard keeps to one channel",
                    shard=number,
                    stage=position,
                    rank=edge.child,
                )
    return first
