"""The checker believes nothing: every way to spoil a good plan is caught, with shard, stage and rank."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.hand_plans import full_mesh, plan_of, stage, star, three_phase_plan
from tests.support.small_fabrics import COLLECTIVES, ROOTED, machine
from topoplan import Plan, PlanError, Topology
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.shards import Shard
from topoplan.plans.verify import Verification
from topoplan.solve.cuts_and_partitions import best_bound

JsonPlan = dict[str, Any]
Told = tuple[int, int, int | None, str]
"""Shard, stage and rank (None: any rank) that an error names, and words of its message."""


@cache
def good(machine_name: str, collective: str) -> str:
    """A plan file that verifies: the hybrid mesh, a switch, PCIe, and a switch with a weak port."""
    gpus = {"dgx-1v": [0, 1, 2, 3, 4, 7], "dgx-2": [0, 3, 7, 9], "pcie-x8": [0, 1, 6]}.get(machine_name)
    machine = uneven_switch() if machine_name == "uneven" else topoplan.load(machine_name)
    return topoplan.plan(machine, collective, gpus=gpus).to_json()


def uneven_switch() -> Topology:
    """The proof of its allreduce needs dual lengths, and its plans several trees."""
    ports = {("gpu0", "sw0"): 4.0, ("gpu1", "sw0"): 3.0, ("gpu2", "sw0"): 7.0, ("gpu3", "sw0"): 3.0}
    ports |= {("sw0", "gpu0"): 6.0, ("sw0", "gpu1"): 5.0, ("sw0", "gpu2"): 3.0, ("sw0", "gpu3"): 3.0}
    return machine(4, ports, switches=1)


def checked(value: JsonPlan) -> Verification:
    return topoplan.verify(Plan.from_json(json.dumps(value)))


def spoiled(text: str, change: Callable[[JsonPlan], object]) -> PlanError:
    value = json.loads(text)
    change(value)
    with pytest.raises(PlanError) as caught:
        checked(value)
    assert "\n" not in str(caught.value)
    return caught.value


MACHINES = ["dgx-1v", "dgx-2", "pcie-x8", "uneven"]
every_plan = pytest.mark.parametrize(
    ("name", "collective"), [(name, collective) for name in MACHINES for collective in COLLECTIVES]
)


@every_plan
def test_good_plans_pass_and_name_a_full_link(name: str, collective: str) -> None:
    """Rate and bound agree as rational numbers, the bottleneck links are full, and a run gives the right numbers."""
    value = json.loads(good(name, collective))
    report = checked(value)
    assert report.optimal
    assert report.exact_rate == rate_by_hand(value)
    widths = {(link["src"], link["dst"]): link["bandwidth"] for link in value["topology"]["links"]}
    assert report.bottleneck
    for ends, load in report.loads.items():
        full = report.rate * load == pytest.approx(widths[ends], rel=1e-12)
        assert full == (ends in report.bottleneck)
    assert runs_right(Plan.from_json(good(name, collective)))


def rate_by_hand(value: JsonPlan) -> Fraction:
    """min c(e) / load(e), straight from the file."""
    kinds = {"nvlink": {"nvlink"}, "pcie": {"pcie", "sys", "c2c"}, "network": {"network"}}
    usable = {kind for channel in value["channels"] for kind in kinds[channel]}
    width: dict[tuple[str, str], Fraction] = {}
    for link in value["topology"]["links"]:
        if link["channel"] in usable:
            ends, wide = (link["src"], link["dst"]), Fraction(repr(float(link["bandwidth"])))
            width[ends] = max(wide, width.get(ends, wide))
    load: dict[tuple[str, str], Fraction] = {}
    for shard in value["shards"]:
        for tree in shard["stages"]:
            for _, _, route, _ in tree["edges"]:
                for hop in pairwise(route if tree["op"] == "broadcast" else route[::-1]):
                    load[hop] = load.get(hop, Fraction(0)) + Fraction(shard["share"])
    return min(width[hop] / x for hop, x in load.items())


def runs_right(plan: Plan) -> bool:
    """Run the trees on random numbers, whatever buffers hold at first, and compare with the collective's definition."""
    chance = np.random.Generator(np.random.PCG64(3))
    size = len(plan.ranks)
    for shard in plan.shards:
        given_to = chance.integers(-(10**9), 10**9, size).tolist()
        held = list(given_to)
        for tree in shard.stages:
            for edge in tree.top_down() if tree.op == "broadcast" else tree.top_down()[::-1]:
                if tree.op == "broadcast":
                    held[edge.child] = held[edge.parent]
                else:
                    held[edge.parent] += held[edge.child]
        owner = {"allgather": shard.stages[0].root, "reduce_scatter": shard.stages[-1].root}.get(
            plan.collective, plan.root
        )
        everyone = plan.collective in ("allreduce", "broadcast", "allgather")
        summed = plan.collective in ("allreduce", "reduce", "reduce_scatter")
        for rank in range(size) if everyone else [owner]:
            assert rank is not None
            if held[rank] != (sum(given_to) if summed else given_to[owner or 0]):
                return False
    return True


def leaf_edge(tree: JsonPlan) -> int:
    parents = {edge[0] for edge in tree["edges"]}
    return next(i for i, edge in enumerate(tree["edges"]) if edge[1] not in parents)


def missing_edge(value: JsonPlan) -> Told:
    """A leaf that is cut off never gets, or never gives, its part."""
    stages = value["shards"][-1]["stages"]
    down = stages[0]["op"] == "broadcast"
    lost = stages[0]["edges"].pop(leaf_edge(stages[0]))[1]
    owner = stages[0]["root"] if down else lost
    told = f"contribution of rank {owner} 0 times instead of 1"
    return len(value["shards"]) - 1, len(stages) - 1, lost if down else None, told


def doubled_edge(value: JsonPlan) -> Told:
    edges = value["shards"][-1]["stages"][0]["edges"]
    edges.append(edges[-1])
    return len(value["shards"]) - 1, 0, edges[-1][1], "two parents"


def swapped_parent(value: JsonPlan) -> Told:
    """The tree may still be one, but the route does not begin where it says."""
    tree = value["shards"][0]["stages"][0]
    edge = tree["edges"][leaf_edge(tree)]
    edge[0] = next(e[1] for e in tree["edges"] if e[1] not in edge[:2])
    return 0, 0, edge[1], "does not lead from"


def cycle(value: JsonPlan) -> Told:
    """Two ranks that are each other's parent are reached from no root."""
    edges = value["shards"][0]["stages"][0]["edges"]
    one, two = (edge[1] for edge in edges[:2])
    for edge in edges:
        if edge[1] in (one, two):
            edge[0] = two if edge[1] == one else one
    return 0, 0, None, "does not reach it"


def unknown_channel(value: JsonPlan) -> Told:
    return other_channel(value, "wireless")


def unused_channel(value: JsonPlan) -> Told:
    return other_channel(value, "pcie" if "pcie" not in value["channels"] else "nvlink")


def other_channel(value: JsonPlan, channel: str) -> Told:
    """An edge may use the channels that the plan speaks of, and no other."""
    stages = value["shards"][-1]["stages"]
    edge = stages[-1]["edges"][0]
    edge[3] = channel
    return len(value["shards"]) - 1, len(stages) - 1, edge[1], f"channel {channel!r}"


def turned_machine(value: JsonPlan) -> Told:
    """Ranks in another order, and devices with them: the routes lead between other devices."""
    value["ranks"].reverse()
    value["topology"]["devices"].reverse()
    return 0, 0, None, ""


DAMAGES = (missing_edge, doubled_edge, swapped_parent, cycle, unknown_channel, unused_channel, turned_machine)


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_named_by_shard_stage_and_rank(
    name: str, collective: str, damage: Callable[[JsonPlan], Told]
) -> None:
    told: list[Told] = []
    error = spoiled(good(name, collective), lambda value: told.append(damage(value)))
    ((shard, stage, rank, words),) = told
    assert (error.shard, error.stage) == (shard, stage)
    assert error.rank is not None
    assert rank in (None, error.rank)
    assert words in str(error)


@every_plan
def test_a_route_over_a_missing_link_is_found(name: str, collective: str) -> None:
    text = good(name, collective)
    tree = json.loads(text)["shards"][0]["stages"][0]
    route = tree["edges"][0][2]
    src, dst = route[:2] if tree["op"] == "broadcast" else route[1::-1]

    def cut(value: JsonPlan) -> None:
        links = value["topology"]["links"]
        links[:] = [link for link in links if (link["src"], link["dst"]) != (src, dst)]

    error = spoiled(text, cut)
    if "not connected" not in str(error):
        assert (error.shard, error.stage) == (0, 0)
        assert f"crosses {src}->{dst}, which has no" in str(error)


@every_plan
def test_changed_shares_are_found(name: str, collective: str) -> None:
    """A sum that is not 1, a share of zero or less, and the right sum with an owner's part moved to another."""
    text = good(name, collective)
    shards = json.loads(text)["shards"]
    share = Fraction(shards[-1]["share"])

    def put(value: Fraction) -> Callable[[JsonPlan], None]:
        return lambda v: v["shards"][-1].update(share=str(value))

    for change in (Fraction(1, 10**9), Fraction(-1, 10**9)):
        assert "add up to" in str(spoiled(text, put(share + change)))
    for none in (Fraction(0), -share):
        assert spoiled(text, put(none)).shard == len(shards) - 1

    def shift(value: JsonPlan) -> None:
        first = Fraction(shards[0]["share"])
        value["shards"][0]["share"] = str(first / 2)
        value["shards"][-1]["share"] = str(share + first / 2)

    def swap(value: JsonPlan) -> None:
        value["shards"][0], value["shards"][-1] = value["shards"][-1], value["shards"][0]

    if collective in ("allgather", "reduce_scatter"):
        error = spoiled(text, shift)
        assert error.rank == 0
        assert "of the buffer instead of 1/" in str(error)
        error = spoiled(text, swap)
        assert (error.shard, error.rank) == (1, shards[1 if len(shards) > 2 else 0]["stages"][0]["root"])
        assert "order of their owners" in str(error)


def test_shares_in_the_wrong_places_change_the_rate() -> None:

    def shift(value: JsonPlan) -> None:
        first, second, *rest = value["shards"]
        for shard in (first, second):
            shard["share"] = "1/7"
        for shard in rest:
            shard["share"] = str(Fraction(5, 7) / len(rest))

    for name in ("dgx-1v", "uneven"):
        assert "claims a rate" in str(spoiled(good(name, "broadcast"), shift))


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("key", ["rate", "bound"])
def test_claims_that_are_not_recomputed_are_refused(name: str, collective: str, key: str) -> None:
    """Inflated by a millionth, deflated, infinite, zero: each is compared with what the file shows."""
    text = good(name, collective)
    claimed = json.loads(text)[key]
    for wrong in (claimed * (1 + 1e-6), claimed * (1 - 1e-6), claimed * 2, 0, None, float("inf"), 10**400):
        assert f"claims a {key} of" in str(spoiled(text, lambda v, wrong=wrong: v.update({key: wrong})))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_certificate_of_another_machine_is_refused(collective: str) -> None:
    """It names what is not there, or proves another bound than the plan claims."""
    proofs = {name: json.loads(good(name, collective))["certificate"] for name in MACHINES}
    for name, own in proofs.items():
        for other in proofs.values():
            if other != own:
                spoiled(good(name, collective), lambda v, c=other: v.update(certificate=c))


def test_certificates_may_be_rescaled_and_no_more() -> None:
    """Dual lengths times three prove the same; one of them raised proves less, and the claim no longer fits."""
    value = json.loads(good("uneven", "allreduce"))
    assert value["certificate"]["kind"] == "lengths"
    lengths = value["certificate"]["lengths"]
    for row in lengths:
        row[2] = str(3 * Fraction(row[2]))
    assert checked(value).optimal
    lengths[0][2] = str(2 * Fraction(lengths[0][2]))
    with pytest.raises(PlanError, match="claims a bound"):
        checked(value)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_changed_root_is_found(name: str, collective: str) -> None:
    """The plan's: the trees do not serve that rank. A tree's: its new root has a parent."""
    text = good(name, collective)
    if collective not in ROOTED:
        assert "has no root" in str(spoiled(text, lambda v: v.update(root=1)))
        return
    error = spoiled(text, lambda v: v.update(root=2))
    assert (error.shard, error.stage, error.rank is None) == (0, 0, False)
    assert "times instead of" in str(error)
    error = spoiled(text, lambda v: v["shards"][0]["stages"][0].update(root=2))
    assert (error.shard, error.stage, error.rank) == (0, 0, 2)
    for nowhere in (99, -1, None):
        assert "is not a rank" in str(spoiled(text, lambda v, root=nowhere: v.update(root=root)))


@every_plan
def test_permuted_ranks_are_found(name: str, collective: str) -> None:
    for change in (lambda v: v["ranks"].reverse(), lambda v: v["ranks"].pop()):
        assert "are not the GPUs" in str(spoiled(good(name, collective), change))


@pytest.mark.parametrize("name", MACHINES)
def test_a_stage_of_the_other_kind_is_found(name: str) -> None:
    """A broadcast where a reduce belongs, stages in the wrong order, no stage, and an op that there is not."""
    for change in (
        lambda v: v["shards"][0]["stages"][0].update(op="broadcast"),
        lambda v: v["shards"][0]["stages"][1].update(op="reduce"),
        lambda v: v["shards"][0]["stages"].reverse(),
        lambda v: v["shards"][0]["stages"].pop(),
        lambda v: v["shards"][0].update(stages=[]),
        lambda v: v["shards"][0]["stages"][0].update(op="scan"),
    ):
        assert spoiled(good(name, "allreduce"), change).shard == 0


@pytest.mark.parametrize("rank", [-1, 6, 10**30])
def test_ranks_that_there_are_not_are_found(rank: int) -> None:
    for change in (
        lambda v: v["shards"][1]["stages"][1]["edges"][0].__setitem__(0, rank),
        lambda v: v["shards"][1]["stages"][1]["edges"][0].__setitem__(1, rank),
        lambda v: v["shards"][1]["stages"][1].update(root=rank),
    ):
        error = spoiled(good("dgx-1v", "allreduce"), change)
        assert (error.shard, error.stage, error.rank) == (1, 1, rank)
    for collective in ("allgather", "reduce_scatter"):
        error = spoiled(good("dgx-1v", collective), lambda v: v["shards"][-1]["stages"][0].update(root=rank))
        assert error.rank == rank


@pytest.mark.parametrize(
    ("channels", "message"), [([], "not connected over"), (["pcie"], "channel 'nvlink'")]
)
def test_the_channels_that_a_plan_speaks_of_matter(channels: list[str], message: str) -> None:
    """None connect nothing; others are not those of the edges; more than are used change nothing that is claimed."""
    text = good("dgx-1v", "allreduce")
    assert message in str(spoiled(text, lambda v: v.update(channels=channels)))
    assert checked(json.loads(text) | {"channels": ["nvlink", "network"]}).optimal


def test_what_a_rank_held_before_must_not_be_added_to_a_broadcast() -> None:
    """The root first adds what happens to lie in rank 1's buffer, then broadcasts: that is not the root's data."""
    stages = (stage("reduce", 0, {1: 0}), stage("broadcast", 0, star(range(3), 0)))
    with pytest.raises(PlanError, match="contribution of rank 1 1 times instead of 0") as caught:
        topoplan.verify(plan_of(3, "broadcast", [Shard(Fraction(1), stages)], root=0))
    assert (caught.value.shard, caught.value.stage, caught.value.rank) == (0, 1, 0)
    gathers = [(stage("broadcast", rank, star(range(3), rank)),) for rank in range(3)]
    gathers[2] = (stage("reduce", 2, {0: 2}), *gathers[2])
    with pytest.raises(PlanError, match="contribution of rank 0 1 times instead of 0"):
        topoplan.verify(plan_of(3, "allgather", [Shard(Fraction(1, 3), one) for one in gathers]))


def test_counts_do_not_wrap_around() -> None:
    """A value doubled 64 times is 2^64 times too much, and zero in a machine word: it must not look like nothing."""
    gathered = stage("reduce", 0, star(range(4), 0))
    doubled = [stage("broadcast", 2, {3: 2}), stage("reduce", 2, {3: 2})] * 64
    spoil = stage("reduce", 0, {2: 0})
    out = stage("broadcast", 0, star(range(4), 0))
    with pytest.raises(PlanError, match="contribution of rank 2"):
        topoplan.verify(plan_of(4, "allreduce", [Shard(Fraction(1), (gathered, *doubled, spoil, out))]))
    fine = plan_of(4, "allreduce", [Shard(Fraction(1), (gathered, *doubled, out))])
    assert topoplan.verify(fine).exact_rate is not None


def test_stages_over_parts_of_the_ranks_pass() -> None:
    """Three phases over servers of 3, 2 and 3 GPUs: trees need not span all ranks, only their work together must."""
    made = three_phase_plan([[0, 1, 2], [3, 4], [5, 6, 7]])
    report = topoplan.verify(made)
    assert not report.optimal
    assert report.exact_rate == rate_by_hand(json.loads(made.to_json())) == 1
    assert runs_right(made)


def test_a_plan_of_one_rank_claims_nothing() -> None:
    single = topoplan.plan(full_mesh(1), "allreduce")
    report = topoplan.verify(single)
    assert (report.exact_rate, report.exact_bound, report.rate) == (None, None, float("inf"))
    for key in ("rate", "bound"):
        assert "no byte crosses" in str(spoiled(single.to_json(), lambda v, key=key: v.update({key: 5.0})))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in items for place in [(value, key), *places(child)]]


ODD: list[object] = [None, True, False, 0, -1, 1, 2, 3, 10**30, 10**400, 0.5, -0.5, 1e308, 5e-324]
ODD += [float("nan"), float("inf"), "", "1/2", "1/0", "0", "-1/3", "1e9", "1e999999999", "9" * 900, "½"]
ODD += ["gpu0", "gpu1", "gpu7", "nvlink", "pcie", "\ud800", "reduce", "broadcast", "allreduce", "allgather"]
ODD += ["cut", "lengths", "trivial", [], {}, [[]]]


def mutate(value: JsonPlan, chance: random.Random) -> None:
    """One random damage: another value, a neighbour's value, a nudge, a removal, a repetition, a swap."""
    spots = [spot for spot in places(value) if chance.random() < 0.3 or spot[1] != "topology"]
    container, key = chance.choice(spots)
    kind = chance.randrange(6)
    if kind == 0:
        container[key] = copy.deepcopy(chance.choice(ODD))
    elif kind == 1:
        same = [c[k] for c, k in spots if type(c[k]) is type(container[key])]
        container[key] = copy.deepcopy(chance.choice(same))
    elif kind == 2 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
        container[key] = chance.choice([container[key] + 1, container[key] - 1, container[key] * 2])
    elif kind == 3:
        del container[key]
    elif kind == 4 and isinstance(container, list):
        container.insert(chance.randrange(len(container) + 1), copy.deepcopy(container[key]))
    elif isinstance(container, list):
        other = chance.randrange(len(container))
        container[key], container[other] = container[other], container[key]


SMALL_PLANS = [("uneven", c) for c in COLLECTIVES] + [("dgx-2", "allreduce"), ("dgx-1v", "broadcast")]


@pytest.mark.thorough
@given(st.sampled_from(SMALL_PLANS), st.integers(0, 1 << 60), st.integers(1, 3))
@settings(max_examples=500, deadline=None)
def test_random_damage_raises_plan_error_or_leaves_a_true_plan(
    base: tuple[str, str], seed: int, damages: int
) -> None:
    """Nothing but PlanError; what still passes really does its collective, at its rate, below an independent bound."""
    value = json.loads(good(*base))
    chance = random.Random(seed)
    for _ in range(damages):
        mutate(value, chance)
    try:
        plan = Plan.from_json(json.dumps(value))
        report = topoplan.verify(plan)
    except PlanError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert Plan.from_json(plan.to_json()) == plan
    if len(plan.ranks) == 1:
        return
    assert report.exact_rate == rate_by_hand(json.loads(plan.to_json()))
    assert report.exact_rate is not None
    assert report.exact_bound is not None
    assert report.exact_rate <= report.exact_bound
    fabric = Fabric(plan.topology, plan.channels)
    lowest = best_bound(fabric, plan.collective, plan.root)
    assert report.exact_rate <= lowest.bound(fabric, plan.collective, plan.root)
    assert runs_right(plan)


@pytest.mark.parametrize("given", ["plan.json", {"format": "topoplan.plan/1"}, None])
def test_what_is_not_a_plan_is_refused_in_one_line(given: Any) -> None:
    with pytest.raises(UsageError, match=r"verify takes one plan, got .*read a file by load_plan"):
        topoplan.verify(given)
