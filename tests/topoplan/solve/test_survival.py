"""Plans for every single failure, and replanning: against planning each damaged machine anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.refusals import refused
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.survival import SurvivalPlans, single_failures, surviving_ranks
from topoplan.solve.failure_planner import equivalent_failures, plan_survival_by_kind


@cache
def machine(name: str) -> Topology:
    """A machine of the library, or two servers of it behind a switch."""
    if name.startswith("2 x "):
        return topoplan.cluster([topoplan.Server(name.removeprefix("2 x "), count=2)], nic_gbps=100)
    return topoplan.load(name)


@cache
def book_of(name: str, collective: str = "allreduce") -> SurvivalPlans:
    return topoplan.plan_survival(machine(name), collective)


def held_against_planning_anew(book: SurvivalPlans) -> None:
    """Every failure's plan has the rate and bound of a plan made for the damaged machine, or neither has one."""
    whole = book.topology
    for number, outcome in enumerate(book.outcomes):
        left = outcome.failure.left_of(whole)
        root = None
        if book.root is not None:
            name = book.ranks[book.root]
            if name not in left.gpus:
                assert "root" in outcome.reason
                continue
            root = left.gpus.index(name)
        if outcome.reason:
            with refused(InfeasibleError, outcome.reason):
                topoplan.plan(left, book.collective, root=root)
            with refused(InfeasibleError, outcome.reason):
                book.plan_of(number)
            continue
        anew = topoplan.plan(left, book.collective, root=root)
        made = book.plan_of(number)
        assert (made.rate, made.bound, made.channels) == (anew.rate, anew.bound, anew.channels)
        assert made.topology == anew.topology
        topoplan.verify(made)


LARGER = [pytest.param(one, marks=pytest.mark.thorough) for one in ("2 x nvlink-x4", "dgx-1v", "pcie-x8")]


@pytest.mark.parametrize("name", ["v100x4", *LARGER])
def test_every_failure_has_the_rate_of_planning_it_anew(name: str) -> None:
    held_against_planning_anew(book_of(name))


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("name", ["v100x4", "2 x nvlink-x4"])
def test_every_collective_survives(name: str, collective: str) -> None:
    """Owners, roots and the order of paths are renamed with the trees."""
    book = book_of(name, collective)
    held_against_planning_anew(book)
    assert SurvivalPlans.from_json(book.to_json()) == book


@pytest.mark.parametrize(
    ("name", "failures", "plans", "without"), [("v100x4", 10, 6, 0), ("2 x nvlink-x4", 29, 6, 5)]
)
def test_failures_that_are_images_share_a_plan(name: str, failures: int, plans: int, without: int) -> None:
    """Two servers of one kind need no more plans than one of them, but for the wires between."""
    book = book_of(name)
    assert (len(book.outcomes), len(book.own)) == (failures, plans)
    assert sum(bool(outcome.reason) for outcome in book.outcomes) == without


@pytest.mark.thorough
def test_all_ports_of_a_switch_are_one_class() -> None:
    """Eight GPUs share a plan, so do their links, which leave one GPU to PCIe; without the switch all take PCIe."""
    book = topoplan.plan_survival("dgx-a100")
    assert len(book.outcomes) == 17
    assert [plan.channels for plan in book.own] == [("nvlink",), ("all",), ("pcie",)]
    assert book.plan_without(links=["gpu5-nvswitch0"]).channels == ("all",)
    topoplan.verify_survival(book)


def test_a_pair_without_its_links_goes_on_over_pcie_and_alone() -> None:
    """A lost link leaves PCIe, the same as a lost switch; a lost GPU leaves one, where nothing moves."""
    book = topoplan.plan_survival("dgx-2", gpus=[0, 1])
    over = {str(one.failure): book.plan_of(number).channels for number, one in enumerate(book.outcomes)}
    assert over.pop("gpu0") == over.pop("gpu1") == ("nvlink",)
    assert set(over) == {"link gpu0-nvswitch0", "link gpu1-nvswitch0", "nvswitch0"}
    assert set(over.values()) == {("pcie",)}
    assert len(book.own) == 2
    topoplan.verify_survival(book)


def test_ranks_that_are_left_keep_their_order() -> None:
    book = book_of("v100x4")
    after = book.plan_without(gpus=[1])
    assert after.ranks == ("gpu0", "gpu2", "gpu3")
    assert surviving_ranks(book.whole, after) == (0, 2, 3)
    assert book.plan_without() is book.whole


def test_what_fails_goes_by_any_of_its_names() -> None:
    book = book_of("2 x nvlink-x4")
    there, back = (book.plan_without(links=[wire]) for wire in ("s0.gpu0-s0.gpu1", "s0.gpu1-s0.gpu0"))
    assert there == back
    for name in ("s0.nic0", "s0.nic0.tx"):
        with pytest.raises(InfeasibleError, match=r"no plan exists without s0\.nic0"):
            book.plan_without(devices=[name])


def test_what_the_plan_does_not_use_changes_nothing_but_the_machine() -> None:
    book = book_of("v100x4")
    after = book.plan_without(devices=["pcie0"])
    assert after.shards == book.whole.shards
    assert "pcie0" not in {device.name for device in after.topology.devices}
    topoplan.verify(after)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ({"gpus": [0, 1]}, r"gpu0, gpu1: the book has plans for single failures; topoplan\.replan"),
        ({"links": ["gpu0->gpu1"]}, r"no plan without link gpu0->gpu1; topoplan\.replan makes one"),
        ({"gpus": [4]}, "GPU 4 is out of range"),
        ({"links": ["gpu0-gpu9"]}, "has no device 'gpu9'"),
    ],
)
def test_what_the_book_does_not_have_is_one_line(lost: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        book_of("v100x4").plan_without(**lost)


def test_the_bandwidth_of_a_link_divides_classes() -> None:
    """Only failures that leave the same wires share a plan: slowing one link of a switch leaves its GPU alone."""
    slower = topoplan.slow_links("nvlink-x4", {"gpu0-gpu1": 5})
    book = topoplan.plan_survival(slower)
    assert len(book.own) > len(topoplan.plan_survival("nvlink-x4").own)
    held_against_planning_anew(book)


@given(st.integers(0, 7), st.sampled_from(["allreduce", "broadcast", "allgather"]))
@settings(max_examples=4, deadline=None)
def test_replanning_proves_the_best_rate_for_what_is_left(gpu: int, collective: str) -> None:
    """The first optimum has the rate and bound of the plan with fewest trees, and is as low."""
    whole = topoplan.plan("nvlink-x4", collective)
    gpu %= 4
    if collective == "broadcast" and gpu == 0:
        with refused(UsageError, "rank 0, the root of this broadcast, is lost; name another root"):
            topoplan.replan(whole, without_gpus=[gpu])
        return
    plan, survivors = topoplan.replan(whole, without_gpus=[gpu])
    anew = topoplan.plan(topoplan.without_gpus("nvlink-x4", [gpu]), collective)
    assert (plan.rate, plan.bound, plan.height) == (anew.rate, anew.bound, anew.height)
    assert plan.num_trees >= anew.num_trees
    assert survivors == tuple(rank for rank in range(4) if rank != gpu)
    topoplan.verify(plan)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("name", ["v100x4", "pcie-x8", "2 x nvlink-x4"])
def test_the_first_optimum_is_as_good_and_as_low(name: str, collective: str) -> None:
    """It has the rate, the bound and the height of the plan with few trees, and a file that says nothing of it."""
    first, few = (topoplan.plan(machine(name), collective, order=order) for order in ("first", "height"))
    for field in ("rate", "bound", "height", "order"):
        assert getattr(first, field) == getattr(few, field)
    assert first.num_trees >= few.num_trees
    topoplan.verify(first)


def test_replanning_takes_every_damage_at_once() -> None:
    """A lost GPU, a lost link and a slow one of four V100; the root moves with its GPU."""
    whole = topoplan.plan("v100x4", "broadcast", root=3)
    damage: dict[str, Any] = {"without_links": ["gpu0-gpu2"], "slow_links": {"gpu2-gpu3": 12.5}}
    plan, survivors = topoplan.replan(whole, without_gpus=[1], **damage)
    assert survivors == (0, 2, 3)
    assert (plan.root, plan.ranks) == (2, ("gpu0", "gpu2", "gpu3"))
    assert plan.rate == plan.bound == 12.5


def test_replanning_goes_over_what_is_left() -> None:
    """Without NVLink PCIe, unless other channels are named."""
    whole = topoplan.plan("dgx-2", gpus=[0, 1])
    assert topoplan.replan(whole, without_links=["gpu0-nvswitch0"]).plan.channels == ("pcie",)
    with pytest.raises(InfeasibleError, match="no NVLink path"):
        topoplan.replan(whole, without_links=["gpu0-nvswitch0"], channels="nvlink")


def test_what_is_not_one_plan_of_elements_is_not_replanned() -> None:
    with refused(UsageError, "got SurvivalPlans; read a file by load_plan, and of several plans give one"):
        topoplan.replan(book_of("v100x4"), without_gpus=[0])  # type: ignore[arg-type]
    with refused(UsageError, "is not replanned; plan the degraded machine anew"):
        topoplan.replan(topoplan.sparse_plan("v100x4", density=0.01), without_gpus=[0])


def test_links_of_equal_groups_are_counted_once_for_both_ways() -> None:
    cluster = topoplan.cluster_by_kind(
        [topoplan.Server("v100x4", count=9)], nic_gbps=100, network="dragonfly", group_size=2, global_gbps=20
    )
    plan = topoplan.plan_by_kind(cluster, "allgather")
    listed = single_failures(Fabric(cluster.listed(), plan.channels))
    found: Counter[str] = Counter()
    for failure, count in equivalent_failures(plan):
        found[failure.kind] += count
    assert found == Counter(one.kind for one in listed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "collective", "root", "access"),
    [
        ({"network": "fat-tree", "leaf_size": 2}, "allgather", None, "direct"),
        ({"network": "rail-optimised", "oversubscription": 2}, "broadcast", 5, "pcie"),
        ({"network": "dragonfly", "group_size": 1, "global_gbps": 40}, "allgather", None, "direct"),
    ],
)
def test_failures_by_kind_are_those_of_the_listed_cluster_with_the_same_rates(
    network: dict[str, Any], collective: str, root: int | None, access: str
) -> None:
    cluster = topoplan.cluster_by_kind(
        [topoplan.Server("v100x4", count=3)], nic_gbps=100, nics=2, nic_access=access, **network
    )
    book = plan_survival_by_kind(cluster, collective, root=root)
    listed = topoplan.plan_survival(cluster.listed(), collective, root=root)
    plans = [
        one.plan or (None if one.like is None else listed.outcomes[one.like].plan) for one in listed.outcomes
    ]
    wanted = Counter(None if plan is None else round(plan.rate, 6) for plan in plans)
    found: Counter[float | None] = Counter()
    for one in book.classes:
        found[None if one.plan is None else round(one.plan.rate, 6)] += one.count
    assert found == wanted
    rates = [one.plan.rate for one in book.classes if one.plan is not None]
    assert rates == sorted(rates)
    assert all(one.reason for one in book.classes[: len(book.classes) - len(rates)])
