"""Print the trees of a plan and its phases as tables of a length that a person reads.

In a plan for a thousand GPUs one row stands for all symmetric shards; long lists are cut and say how much is missing.
The plan file and ``--json`` hold the whole plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from topoplan.cli.output import table
from topoplan.machine.fabric import Fabric
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import ImageShards, Shard, Stage, bracket_notation
from topoplan.plans.structure import PlanPhases
from topoplan.units import counted, name_ranges

MAX_ROWS = 64
"""Most shards in a table."""

MAX_NAMES = 8
"""Most names, or ranges of them, in a list."""

MAX_TREE_LENGTH = 78
"""Most characters of a tree."""


def rank_names(names: Sequence[str]) -> str:
    """Return the names of GPUs, numbers as ranges; many ranges are cut to the first ones and the last.

    >>> rank_names(["gpu1", "gpu4", "gpu5", "gpu7"]), rank_names([f"gpu{i}" for i in range(0, 100, 2)])[-8:]
    ('gpu1,4,5,7', '94,96,98')
    """
    ranges = name_ranges(names)
    if len(ranges) > MAX_NAMES:
        ranges = (*ranges[: MAX_NAMES - 1], "…", ranges[-1])
    return " ".join(ranges)


def tree_noun(plan: Plan) -> str:
    """Return the noun for a tree of a plan."""
    return "path" if plan.collective == ALL_TO_ALL else "tree"


def tree_table(plan: Plan) -> str:
    """Return a table with a row for each shard; images of one shard under symmetries share a row.

    >>> import topoplan
    >>> print(tree_table(topoplan.plan(topoplan.nvswitch_cluster(64), "allgather")).splitlines()[1][:42])
    1 of 512 symmetric  1/512  0.3968  s0.gpu0
    """
    listed = plan.shard_counts[:MAX_ROWS]
    apart = len({_channels(plan, shard) for shard, _ in plan.shard_counts} - {""}) > 1
    images = isinstance(plan.shards, ImageShards)
    names = plan.vertices
    rows = []
    for number, (shard, count) in enumerate(listed):
        stage = _printed_stage(shard)
        if plan.collective == ALL_TO_ALL and not stage.edges:
            continue
        weight = float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0
        rows.append(
            (
                f"1 of {count} symmetric" if images else str(number),
                *((_channels(plan, shard),) if apart else ()),
                str(shard.share),
                f"{weight:.4g}",
                names[stage.root],
                str(stage.height),
                bracket_notation(names, stage, longest=MAX_TREE_LENGTH),
            )
        )
    text = table(("shard", *(("channel",) if apart else ()), "share", "GB/s", "root", "height", "tree"), rows)
    more = len(plan.shard_counts) - len(listed)
    return f"{text}\n… and {counted(more, 'shard')} more: -o and --json write all" if more else text


def tree_rows(plan: Plan) -> list[dict[str, object]]:
    """Return the rows of `tree_table` as objects, without limits; ``count`` is the number of symmetric shards.

    >>> import topoplan
    >>> tree_rows(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))[0]["tree"]
    'gpu4>(gpu7 gpu5>gpu1)'
    """
    return [
        {
            "count": count,
            "channel": _channels(plan, shard),
            "share": str(shard.share),
            "GB/s": float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0,
            "root": plan.vertices[_printed_stage(shard).root],
            "height": _printed_stage(shard).height,
            "tree": bracket_notation(plan.vertices, _printed_stage(shard)),
        }
        for shard, count in plan.shard_counts
    ]


def _printed_stage(shard: Shard) -> Stage:
    """Return the last stage, which of a reduce and broadcast is the broadcast; of an exchange the first gather."""
    gathers = [stage for stage in shard.stages if stage.op == "gather"]
    return gathers[0] if gathers else shard.stages[-1]


def _channels(plan: Plan, shard: Shard) -> str:
    crossed = {edge.channel for stage in shard.stages for edge in stage.edges}
    known = Fabric(plan.topology, plan.channels).edge_channels
    return "+".join(channel for channel in known if channel in crossed)


_LISTED = 4


def phase_table(by_phase: PlanPhases) -> str:
    """Return the rate of each phase alone, its full links, and which phase is the bottleneck."""
    rows = []
    for one in (by_phase.reduce, by_phase.between, by_phase.broadcast, by_phase.inside):
        links = [f"{src}>{dst}" for src, dst in one.full]
        more = f" and {len(links) - _LISTED} more" if len(links) > _LISTED else ""
        rows.append((one.name, f"{one.rate:.6g}" if links else "-", " ".join(links[:_LISTED]) + more))
    heads = ("phase", "GB/s alone", "full links")
    return f"{table(heads, rows)}\nbottleneck: {by_phase.bottleneck}"
