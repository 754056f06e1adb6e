"""Trees of a plan for Graphviz."""

from __future__ import annotations

import re

import pytest

import topoplan
from topoplan import UsageError
from topoplan.engines.registry import export_plan


def test_every_tree_is_a_cluster_and_every_edge_an_arrow() -> None:
    """Data run along the arrows: up to the root, drawn double, in a reduce, and down from it in a broadcast."""
    plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    text = export_plan(plan, "dot").text
    assert text.count("subgraph") == sum(len(shard.stages) for shard in plan.shards)
    arrows = re.findall(r'"(\d+)\.(\d+)\.(\w+)" -> "\d+\.\d+\.(\w+)"', text)
    assert len(arrows) == sum(len(stage.edges) for shard in plan.shards for stage in shard.stages)
    root = plan.ranks[plan.shards[0].stages[0].root]
    assert f'"0.0.{root}" [label="{root}", peripheries=2]' in text
    assert not any(src == root for shard, stage, src, _ in arrows if (shard, stage) == ("0", "0"))
    assert not any(dst == root for shard, stage, _, dst in arrows if (shard, stage) == ("0", "1"))


def test_switches_on_the_way_are_named() -> None:
    """An edge of a DGX-2 passes an NVSwitch."""
    assert re.search(r'label="nvlink, nvswitch\w*"', export_plan(topoplan.plan("dgx-2"), "dot").text)


def test_what_graphviz_could_not_draw_is_refused() -> None:
    plan = topoplan.plan(topoplan.nvswitch_cluster(16, gpus=8))
    with pytest.raises(UsageError, match="cannot be drawn"):
        export_plan(plan, "dot")
