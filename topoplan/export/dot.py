"""The trees of a plan for Graphviz: a cluster for each stage of each shard, data along the arrows."""

from __future__ import annotations

from topoplan.errors import UsageError
from topoplan.export.exported import Exported
from topoplan.plans.plan import Plan

MOST_EDGES = 20_000
"""Edges beyond which Graphviz would not come to an end."""


def plan_dot(plan: Plan) -> Exported:
    """A digraph: roots are drawn double, edges are labelled with the share and the switches that they pass.

    Raises
    ------
    UsageError
        There are more edges than Graphviz can draw.

    Examples
    --------
    >>> import topoplan
    >>> text = plan_dot(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])).text
    >>> print(text.splitlines()[5])
        "0.0.gpu4" [label="gpu4", peripheries=2];
    """
    edges = sum(len(stage.edges) for shard in plan.shards for stage in shard.stages)
    if edges > MOST_EDGES:
        raise UsageError(f"this plan has {edges} tree edges, and more than {MOST_EDGES} cannot be drawn")
    names = plan.vertices
    lines = [f"digraph {_quoted(f'{plan.collective} on {plan.topology.name}')} {{", "  rankdir=TB;"]
    for number, shard in enumerate(plan.shards):
        for position, stage in enumerate(shard.stages):
            lines.append(f"  subgraph cluster_{number}_{position} {{")
            lines.append(f"    label={_quoted(f'shard {number}: {stage.op}, {shard.share} of the buffer')};")
            members = {stage.root, *(end for edge in stage.edges for end in (edge.parent, edge.child))}
            for rank in sorted(members):
                double = ", peripheries=2" if rank == stage.root else ""
                name = _quoted(f"{number}.{position}.{names[rank]}")
                lines.append(f"    {name} [label={_quoted(names[rank])}{double}];")
            for edge in stage.top_down():
                route = edge.route[::-1] if stage.op == "reduce" else edge.route
                ends = [_quoted(f"{number}.{position}.{device}") for device in (route[0], route[-1])]
                label = ", ".join((edge.channel, *route[1:-1]))
                lines.append(f"    {ends[0]} -> {ends[1]} [label={_quoted(label)}];")
            lines.append("  }")
    return Exported("\n".join([*lines, "}"]) + "\n")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
