"""Plans from one's own trees: the same plans as ours, the best shares, found routes, and one line for what is wrong."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import topoplan
from tests.support.checkout import Run
from tests.support.small_fabrics import direct_machines
from topoplan import InfeasibleError, Plan, Topology, UsageError, plan_from_trees
from topoplan.machine.fabric import Fabric
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import COLLECTIVES

BLINK = [1, 4, 5, 7]
"""GPUs of a DGX-1V without an NVLink ring; ranks 0 to 3."""
UP_AND_DOWN = [[(1, 2), (1, 3), (2, 0)], [(2, 3), (2, 0), (3, 1)]]
"""Two trees that fill the NVLinks between them."""


def edges_of(plan: Plan) -> list[object]:
    return [[(edge.parent, edge.child) for edge in shard.stages[-1].edges] for shard in plan.shards]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_trees_of_a_plan_make_it_again(collective: str) -> None:
    """Shares and routes left out are found: as fast as the packed trees, and proved optimal by the same bound."""
    packed = topoplan.plan("dgx-1v", collective, gpus=BLINK)
    made = plan_from_trees("dgx-1v", collective, edges_of(packed), gpus=BLINK)
    assert (made.rate, made.bound, made.gap) == (packed.rate, packed.bound, 0.0)
    assert topoplan.verify(Plan.from_json(made.to_json())).optimal
    given_too = plan_from_trees(
        "dgx-1v", collective, edges_of(packed), gpus=BLINK, shares=[shard.share for shard in packed.shards]
    )
    assert given_too.rate == packed.rate


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_ring_is_that_of_the_schedule_ring(collective: str) -> None:
    """A ring in its order, both ways round the square of a V100x4 that has one NVLink on a side."""
    order = [0, 1, 3, 2]
    made = plan_from_trees("dgx-2", collective, [{"ring": order}], gpus=[0, 1, 2, 3])
    assert made.rate == pytest.approx(topoplan.ring_plan("dgx-2", collective, gpus=[0, 1, 2, 3]).rate)
    assert len(made.shards) == (1 if collective in ("broadcast", "reduce") else 4)


def test_every_form_of_one_tree_is_the_same_plan() -> None:
    """Edges, a nested list, names of devices, a route: byte for byte. A flat order is a chain."""
    forms: list[Any] = [
        [(1, 2), (1, 3), (2, 0)],
        [1, [2, 0], 3],
        {"tree": ["gpu4", ["gpu5", "gpu1"], "gpu7"]},
        {"edges": [[1, 2], [1, 3, ["gpu4", "gpu7"]], ["gpu5", 0]], "share": 1},
    ]
    files = {plan_from_trees("dgx-1v", "allreduce", [form], gpus=BLINK).to_json() for form in forms}
    assert len(files) == 1
    chains = {
        plan_from_trees("v100x4", "broadcast", [form]).to_json()
        for form in ([3, 2, 0, 1], {"chain": [3, 2, 0, 1]}, [(3, 2), (2, 0), (0, 1)], [3, [2, [0, 1]]])
    }
    assert len(chains) == 1


def test_shares_are_kept_where_they_are_given() -> None:
    trees: list[object] = [
        {"edges": UP_AND_DOWN[0], "share": "1/3"},
        UP_AND_DOWN[1],
        [(0, 2), (2, 1), (1, 3)],
    ]
    made = plan_from_trees("dgx-1v", "allreduce", trees, gpus=BLINK)
    assert made.shards[0].share == Fraction(1, 3)
    assert sum(shard.share for shard in made.shards) == 1
    two = plan_from_trees("dgx-1v", "allreduce", UP_AND_DOWN, gpus=BLINK, shares=["1/3", None])
    assert [str(shard.share) for shard in two.shards] == ["1/3", "2/3"]
    assert two.rate < made.rate == 50
    decimal = plan_from_trees("dgx-1v", "allreduce", UP_AND_DOWN, gpus=BLINK, shares=[0.1, 0.9])
    assert [shard.share for shard in decimal.shards] == [Fraction(1, 10), Fraction(9, 10)]


def test_a_tree_that_only_slows_the_others_gets_no_share() -> None:
    made = plan_from_trees("dgx-1v", "broadcast", [[0, 3, 1, 2], [0, 1, 2, 3]], gpus=[0, 1, 2, 3])
    best = max(
        plan_from_trees("dgx-1v", "broadcast", [tree], gpus=[0, 1, 2, 3]).rate
        for tree in ([0, 3, 1, 2], [0, 1, 2, 3])
    )
    assert made.rate >= best
    two = plan_from_trees("v100x4", "allreduce", [[0, 1, 2, 3], [0, 1, 2, 3]])
    assert two.notes == ("tree 1 adds nothing beside the others: no share",)
    assert two.rate == plan_from_trees("v100x4", "allreduce", [[0, 1, 2, 3]]).rate


def test_data_passes_another_gpu_where_no_wire_joins_two() -> None:
    """GPUs 0 and 5 of a DGX-1V have no NVLink: the note says by way of whom."""
    made = plan_from_trees("dgx-1v", "broadcast", [[(0, 1), (0, 2)]], gpus=[0, 1, 5], channels="nvlink")
    assert made.shards[0].stages[0].edges[1].route == ("gpu0", "gpu1", "gpu5")
    assert made.notes == ("no wire leads from gpu0 to gpu5: data passes gpu1",)
    assert made.rate == topoplan.verify(made).rate == 12.5
    assert "relayed      no link for gpu0-gpu5 through gpu1" in str(made)


@st.composite
def machines_with_trees(draw: st.DrawFn) -> tuple[Topology, str, list[list[tuple[int, int]]]]:
    machine = draw(direct_machines(most=5, symmetric=True))
    size = len(machine.gpus)
    collective = draw(st.sampled_from(COLLECTIVES))
    gathers = collective in ("allgather", "reduce_scatter")
    roots = [*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=3))] if gathers else []
    if not gathers:
        count = draw(st.integers(1, 4))
        first = draw(st.integers(0, size - 1))
        any_root = collective == "allreduce"
        roots = [draw(st.integers(0, size - 1)) if any_root else first for _ in range(count)]
    trees = []
    for root in roots:
        order = [root, *draw(st.permutations([rank for rank in range(size) if rank != root]))]
        trees.append([(draw(st.sampled_from(order[:place])), order[place]) for place in range(1, size)])
    return machine, collective, trees


@settings(max_examples=20, deadline=None)
@given(machines_with_trees())
def test_shares_are_the_best_for_the_trees(case: tuple[Topology, str, list[list[tuple[int, int]]]]) -> None:
    """As a linear program in floating point says, for the routes of the plan; the plan is verified."""
    machine, collective, trees = case
    try:
        made = plan_from_trees(machine, collective, trees, channels="nvlink")
    except InfeasibleError:
        return
    topoplan.verify(made)
    # The routes of each tree alone, as they are in a plan where every tree has a share.
    size, gathers = len(machine.gpus), collective in ("allgather", "reduce_scatter")
    roots = [({p for p, _ in tree} - {c for _, c in tree}).pop() for tree in trees]
    parts = [Fraction(1, roots.count(root) * (size if gathers else 1)) for root in roots]
    if not gathers:
        parts = [Fraction(1, len(trees))] * len(trees)
    even = plan_from_trees(machine, collective, trees, channels="nvlink", shares=parts)
    order = sorted(range(len(trees)), key=lambda tree: roots[tree]) if gathers else range(len(trees))
    fabric = Fabric(even.topology, even.channels)
    shard_of = {tree: even.shards[place] for place, tree in enumerate(order)}
    loads = np.array(
        [
            [float(x / shard_of[tree].share) for x in link_loads([shard_of[tree]], fabric)]
            for tree in range(len(trees))
        ]
    )
    # maximise R: sum of x load <= c, sum of x of each owner's trees = its part of R
    owners = sorted(set(roots)) if gathers else [0]
    equal = [[float(not gathers or root == owner) for root in roots] + [-1 / len(owners)] for owner in owners]
    found = linprog(
        [*[0.0] * len(trees), -1.0],
        A_ub=np.hstack([loads.T, np.zeros((loads.shape[1], 1))]),
        b_ub=[float(capacity) for capacity in fabric.capacity],
        A_eq=equal,
        b_eq=[0.0] * len(owners),
    )
    assert found.x is not None
    assert made.rate == pytest.approx(found.x[-1])
    assert made.rate >= even.rate * (1 - 1e-12)


WRONG: list[tuple[object, str]] = [
    ([], "trees must be a list of one tree or more"),
    (5, "trees must be a list of one tree or more"),
    ([[]], r"tree 0: \[\] is not a tree; give edges"),
    ([5], "tree 0: 5 is not a tree"),
    ([[(0, 1), (1, 2)]], r"tree 0: it does not reach rank 3 \(gpu3\); a tree spans all"),
    ([[0, 1, 2, 3], [(0, 1), (2, 3), (3, 2)]], "tree 1: rank 2 is in a cycle that the root 0 does not reach"),
    ([[(0, 1), (1, 2), (2, 3), (3, 0)]], "tree 0: its edges run in a cycle, so no rank is the root"),
    ([[(0, 1), (2, 3)]], "tree 0: ranks 0 and 2 both have no parent"),
    ([[(0, 1), (2, 1), (0, 3)]], "tree 0: rank 1 has two parents, 0 and 2"),
    ([[(0, 1), (1, 1)]], "tree 0: an edge joins rank 1 with itself"),
    ([[(0, 1, 2, 3)]], r"tree 0: \(0, 1, 2, 3\) is not an edge"),
    ([[(0, 9)]], "tree 0: 9 is not a rank; ranks are 0 to 3, which are gpu0, gpu1, gpu2, gpu3"),
    ([[0, 1, 2, True]], "tree 0: True is not a rank"),
    ([{"chain": [0, 1, "gpu9", 3]}], "tree 0: 'gpu9' is not a rank"),
    ([{"ring": [0, 1, 2, 1]}], "tree 0: rank 1 stands twice in the ring"),
    ([{"ring": [0, 1, 2]}], "tree 0: it does not reach rank 3"),
    ([{"rings": [0, 1, 2, 3]}], "tree 0: key 'rings' is unknown; known are edges, tree, chain, ring and"),
    ([{"ring": [0], "chain": [0]}], "tree 0: it has chain and ring"),
    ([{"chain": [0, 1, 2, 3], "share": "a half"}], "tree 0: the share 'a half' is not a number"),
    ([{"chain": [0, 1, 2, 3], "share": "1e9999999999"}], "tree 0: the share '1e9999999999' is not a number"),
    ([{"chain": [0, 1, 2, 3], "share": 1.5}], "tree 0: the share 1.5 is not above 0 and at most 1"),
    ([{"chain": [0, 1, 2, 3], "share": "1/2"}], "the shares add up to 1/2, not to 1"),
    ([{"chain": [0, 1, 2, 3], "share": 0.75}] * 2, "the shares add up to 3/2, not to 1"),
    ([{"edges": [[0, 1, ["gpu0", "gpu2"]]]}], "tree 0: it does not reach"),
    ([{"edges": [[0, 1, ["gpu0", "gpu2"]], [1, 2], [2, 3]]}], "does not lead from gpu0 to gpu1"),
    ([{"edges": [[0, 1, ["gpu0", "sw", "gpu1"]], [1, 2], [2, 3]]}], "crosses gpu1->sw, but no link over"),
    ([{"edges": [[0, 1, "gpu0"], [1, 2], [2, 3]]}], "the route 'gpu0' is not a list of names of devices"),
    ([nx.star_graph(3)], "tree 0: an undirected graph has no root; give networkx.bfs_tree"),
    ([nx.cycle_graph(4)], "tree 0: an undirected graph has no root"),
    ([nx.DiGraph([(0, 1), (2, 1)])], "tree 0: rank 1 has two parents, 0 and 2"),
    ([nx.DiGraph([(0, 1)])], "tree 0: it does not reach rank 2"),
    ([nx.DiGraph()], "tree 0: .* is not a tree"),
]


@pytest.mark.parametrize(
    ("collective", "trees", "options", "told"),
    [
        *(("allreduce", trees, {}, told) for trees, told in WRONG),
        ("broadcast", [[0, 1, 2, 3], [1, 0, 2, 3]], {}, "tree 1 has rank 1 as its root, but tree 0 has"),
        ("broadcast", [[0, 1, 2, 3]], {"root": 2}, "tree 0 has rank 0 as its root, but root 2 was asked for"),
        ("allreduce", [[0, 1, 2, 3]], {"root": 2}, "allreduce has no root; leave out root 2"),
        ("allgather", [[0, 1, 2, 3]], {}, "no tree has rank 1 as its root; allgather needs one from every"),
        ("alltoall", [[0, 1, 2, 3]], {}, "collective 'alltoall' is unknown to trees"),
        ("allreduce", [[0, 1, 2, 3]], {"shares": [0.5, 0.5]}, "2 shares do not fit 1 trees"),
        ("allreduce", [{"chain": [0, 1, 2, 3], "share": 1}], {"shares": [1]}, "give them in one place"),
        ("allreduce", [[0, 1, 2, 3]], {"channels": "wire"}, "channels 'wire' is unknown"),
    ],
)
def test_wrong_trees_are_one_line(collective: str, trees: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        plan_from_trees("v100x4", collective, trees, **options)
    assert "\n" not in str(caught.value)


def test_a_file_of_trees_becomes_a_plan_that_verifies(run: Run, tmp_path: Path) -> None:
    trees, made = tmp_path / "trees.json", tmp_path / "plan.json"
    written = []
    for value in ({"format": "topoplan.trees/1", "trees": UP_AND_DOWN}, {"trees": UP_AND_DOWN}, UP_AND_DOWN):
        trees.write_text(json.dumps(value))
        command = ("plan", "dgx-1v", "--gpus", "1,4,5,7", "--schedule-file", str(trees), "-o", str(made))
        status, out, err = run(*command)
        assert (status, err) == (0, "")
        assert out.startswith(
            "all_reduce on dgx-1v, 4 GPUs (gpu1,4,5,7), over NVLink: provably optimal\nalgbw        50 GB/s"
        )
        assert run("verify", str(made))[0] == 0
        written.append(made.read_text())
    assert len(set(written)) == 1
    assert json.loads(written[0])["schedule"] == "own trees"


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("[[0,1", (), "is not JSON"),
        ('{"tree": []}', (), "key 'tree' is unknown; known are format and trees"),
        ('{"format": "topoplan.plan/1", "trees": []}', (), "'topoplan.plan/1' is not 'topoplan.trees/1'"),
        ('{"trees": 3}', (), "holds no trees"),
        ("[]", (), "trees must be a list of one tree or more"),
        ('[{"edgs": []}]', (), "tree 0: key 'edgs' is unknown"),
        ("[[0, 1, 2, 3, 4]]", (), "tree 0: 4 is not a rank"),
        (None, (), "cannot be read: No such file or directory; give a file of trees"),
        ("", ("--schedule", "ring"), "--schedule-file does not go with --schedule ring"),
        ("", ("--size", "1MB"), "--size does not go with --schedule-file"),
        ("", ("--mesh", "dp=2,tp=2"), "--schedule-file does not go with --mesh"),
        ("", ("--density", "0.01"), "--schedule-file does not go with --density"),
    ],
)
def test_a_wrong_file_is_one_line(
    run: Run, tmp_path: Path, text: str | None, options: tuple[str, ...], told: str
) -> None:
    trees = tmp_path / "trees.json"
    if text is not None:
        trees.write_text(text or "[[0, 1, 2, 3]]")
    status, out, err = run("plan", "v100x4", "--schedule-file", str(trees), *options)
    assert (status, out, err.count("\n"), told in err) == (2, "", 1, True)


def test_trees_are_networkx_graphs_or_those_of_a_plan() -> None:
    """Nodes are ranks or devices; an undirected graph states its root; trees of a plan keep their fractions."""
    machine, gpus = topoplan.load("dgx-1v"), [1, 4, 5, 7]
    wanted = plan_from_trees(machine, "allreduce", [[(1, 2), (1, 3), (2, 0)]], gpus=gpus)
    named = nx.DiGraph([("gpu4", "gpu5"), ("gpu4", "gpu7"), ("gpu5", "gpu1")])
    undirected = nx.Graph([(1, 2), (1, 3), (2, 0)], root=1)
    for graph in (nx.DiGraph([(1, 2), (1, 3), (2, 0)]), named, undirected):
        assert plan_from_trees(machine, "allreduce", [graph], gpus=gpus).shards == wanted.shards
    best = topoplan.plan(machine, gpus=gpus)
    for trees in (best.trees, [tree.to_networkx() for tree in best.trees]):
        again = plan_from_trees(machine, "allreduce", trees, gpus=gpus)
        assert (again.rate, again.gap) == (50.0, 0.0)
        assert [shard.share for shard in again.shards] == [tree.fraction for tree in best.trees]


def test_rings_are_orders_or_networkx_cycles() -> None:
    machine, gpus = topoplan.load("dgx-1v"), [0, 1, 2, 3]
    wanted = plan_from_trees(machine, "allreduce", [{"ring": [0, 1, 2, 3]}], gpus=gpus)
    cycle = nx.cycle_graph(4, create_using=nx.DiGraph)
    for ring in ([0, 1, 2, 3], [0, 1, 2, 3, 0], cycle, nx.cycle_graph(4)):
        assert topoplan.plan_from_rings(machine, "allreduce", [ring], gpus=gpus).shards == wanted.shards
    assert topoplan.plan_from_rings(machine, "allreduce", [nx.path_graph(2)], gpus=[0, 1]).algbw > 0


@pytest.mark.parametrize(
    ("ring", "says"),
    [
        (nx.path_graph(4), "ring 0 must be one cycle through all its nodes"),
        (nx.DiGraph(), "ring 0 must be one cycle"),
        (nx.complete_graph(4), "ring 0 must be one cycle through all its nodes"),
        (5, "ring 0 must be an order of ranks or a networkx graph, got int"),
    ],
)
def test_graphs_that_are_no_rings_are_refused(ring: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        topoplan.plan_from_rings("v100x4", "allreduce", [ring])
