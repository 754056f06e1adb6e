"""Traces of Chakra: their messages are the rows of the transfer table, and take as long; trees for Graphviz."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import topoplan
from collectives.tables.lowering import lower
from topoplan import Plan, UsageError
from topoplan.engines.exported import Choices
from topoplan.engines.registry import export_plan
from topoplan.model.event_simulation import run_events
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.shards import Shard

Fields = dict[int, list[int | bytes]]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Fields:
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(data[at : at + value])
            at += value
        else:
            found.setdefault(key >> 3, []).append(value)
    return found


def messages(data: bytes) -> Iterator[Fields]:
    """Messages that their sizes precede."""
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        yield fields(data[at : at + size])
        at += size


def packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


class Node:
    """A node of a trace, read from its bytes."""

    def __init__(self, message: Fields) -> None:
        def one(number: int) -> int:
            value = message[number][0]
            assert isinstance(value, int)
            return value

        self.number, self.kind = one(1), one(3)
        self.name = bytes(message[2][0]).decode()  # type: ignore[arg-type]
        self.after = packed(bytes(message[5][0])) if 5 in message else []  # type: ignore[arg-type]
        self.attributes = {}
        for content in message[10]:
            parts = fields(bytes(content))  # type: ignore[arg-type]
            (name,) = parts.pop(1)
            (value,) = parts.values()
            self.attributes[bytes(name).decode()] = value[0]  # type: ignore[arg-type]

    @property
    def ends(self) -> tuple[int, int]:
        return int(self.attributes["comm_src"]), int(self.attributes["comm_dst"])


def traces(plan: Plan, size: int, chunk: int | None) -> list[list[Node]]:
    made = export_plan(plan, "chakra", Choices(size=size, chunk=chunk))
    found = []
    for rank, (end, content) in enumerate(made.files):
        assert end == f".{rank}.et"
        first, *nodes = messages(content)
        assert first == {1: [b"0.0.4"]}
        found.append([Node(one) for one in nodes])
    return found


PLANS = [
    ("v100x4", "alltoall"),
    ("dgx-1v", "allreduce"),
    ("dgx-1v", "allgather"),
    ("mi250x", "reduce_scatter"),
    ("v100x4", "allreduce"),
    ("dgx-2", "allreduce"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("machine", "collective"), PLANS)
def test_the_messages_are_the_rows_of_the_transfer_table(machine: str, collective: str) -> None:
    """The same chunks between the same ranks, each after the rows that its source needs."""
    plan = topoplan.plan(machine, collective)
    size, chunk = 1 << 20, 1 << 14
    table = lower(plan, size * plan.buffers, chunk_elements=chunk)
    names = [
        (f"shard {shard} stage {stage} chunk {turn}", source, destination)
        for shard, stage, turn, source, destination in zip(
            table.shard, table.stage, table.chunk, table.source, table.destination, strict=True
        )
    ]
    nodes = traces(plan, size, chunk)
    sends = {(node.name, *node.ends): node for own in nodes for node in own if node.kind == 5}
    receives = {node.number: node for own in nodes for node in own if node.kind == 6}
    assert len(sends) == len(receives) == len(table)
    for row, name in enumerate(names):
        send = sends[name]
        receive = receives[send.number + 1]
        assert (receive.ends, receive.attributes["comm_tag"]) == (send.ends, send.attributes["comm_tag"])
        assert (
            send.attributes["comm_size"]
            == receive.attributes["comm_size"]
            == table.stop[row] - table.start[row]
        )
        needed = {names[one] for one in table.before(row) if table.destination[one] == table.source[row]}
        assert needed <= {(receives[one].name, *receives[one].ends) for one in send.after}


@pytest.mark.sampled
@pytest.mark.parametrize(("machine", "collective"), PLANS)
def test_a_replay_takes_as_long_as_the_plan(machine: str, collective: str) -> None:
    """A plan made of the messages alone, with our routes, in the event simulation; sizes divide without a rest."""
    plan = topoplan.plan(machine, collective)
    size, chunk = 15 << 20, 1 << 18
    edges: dict[tuple[int, int], set[tuple[int, int]]] = {}
    carried = 0
    for own in traces(plan, size, chunk):
        arrived = {node.number: node for node in own if node.kind == 6}
        for node in own:
            if node.kind == 5:
                _, shard, _, stage, _, turn = node.name.split()
                edges.setdefault((int(shard), int(stage)), set()).add(node.ends)
                carried += int(node.attributes["comm_size"])
                for number in node.after:
                    assert arrived[number].name.split()[1::4] == [shard, turn]
    shards = []
    for number, shard in enumerate(plan.shards):
        stages = []
        for position, stage in enumerate(shard.stages):
            ends = edges.get((number, position), set())  # none of a block that stays where it is
            kept = [
                edge
                for edge in stage.edges
                if ((edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)) in ends
            ]
            assert len(kept) == len(ends)
            stages.append(replace(stage, edges=tuple(kept)))
        shards.append(Shard(shard.share, tuple(stages)))
    replayed = run_events(replace(plan, shards=tuple(shards)), nbytes=size, chunk_bytes=chunk)
    assert replayed.seconds == run_events(plan, nbytes=size, chunk_bytes=chunk).seconds
    assert carried == sum(
        shard.share * size * len(stage.edges) for shard in plan.shards for stage in shard.stages
    )


def test_refuses_what_a_trace_cannot_hold() -> None:
    """No size, a size that does not divide, more messages than a simulator takes; the model chooses the chunk."""
    plan = topoplan.plan("dgx-1v", "allgather")
    with pytest.raises(UsageError, match="give it with --size"):
        export_plan(plan, "chakra")
    with pytest.raises(UsageError, match="cannot be divided among 8 ranks"):
        export_plan(plan, "chakra", Choices(size=1001))
    with pytest.raises(UsageError, match="more than 1000000"):
        export_plan(plan, "chakra", Choices(size=1 << 40, chunk=1 << 16))
    assert len(traces(plan, 1 << 16, None)[0]) < len(traces(plan, 1 << 26, None)[0])


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


@pytest.mark.parametrize("to", ["mscclpp", "msccl-xml", "chakra", "dot"])
def test_plans_of_too_many_edges_are_refused_before_they_are_listed(to: str) -> None:
    servers = [topoplan.Server("dgx-h100", count=12_500)]
    many = topoplan.cluster_by_kind(servers, nic_gbps=400, nic_access="direct").with_in_network("all")
    plan = DeferredPlan(topoplan.plan_by_kind(many, "all_reduce"))
    # 200,000 pairs of trees with 99,999 edges each.
    with pytest.raises(
        UsageError, match=f"at most 1,000,000 edges of trees for {to}, got 39,999,600,000 of 100,000"
    ):
        export_plan(plan, to)
    assert "_listed" not in plan.__dict__
