"""Links whose directions share a cap: an independent linear program, split and merged machines, bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import topoplan
from tests.support.host_trees import optimum, random_hosts
from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.half_duplex import caps, merged, split, wire_name
from topoplan.machine.host_topology import both_ways
from topoplan.machine.routing import staged
from topoplan.machine.topology import Device, Link, Topology
from topoplan.operate.compare.comparison import compare
from topoplan.schedules.nccl_channels import NcclPaths
from topoplan.schedules.registry import SCHEDULES

NO_PEERS = topoplan.load("rtx5090-x8-nopeer")
COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_plans_reach_the_optimum_of_an_independent_program(seed: int) -> None:
    """Rate and bound count both directions against the cap, for every collective of trees."""
    machine, above = random_hosts(seed)
    for collective in COLLECTIVES:
        made = topoplan.plan(machine, collective)
        best = optimum(machine, above, collective)
        assert made.rate == pytest.approx(best), collective
        assert topoplan.verify(made).optimal, collective
        assert topoplan.compute_bound(machine, collective).rate >= made.rate * (1 - 1e-12)


def test_the_cap_of_rtx5090_without_peers_halves_the_rate() -> None:
    """57 GB/s both ways together: an allreduce crosses each link 2 x 2 x 7/8 times, a broadcast 14 in all."""
    rates = {
        "allreduce": 57 / 3.5,
        "allgather": 57 / 1.75,
        "broadcast": (43 + 7 * 57) / 14,
        "reduce": 442 / 14,
    }
    for collective, rate in rates.items():
        made = topoplan.plan(NO_PEERS, collective)
        assert (
            made.rate
            == made.bound
            == topoplan.compute_bound(NO_PEERS, collective).rate
            == pytest.approx(rate)
        )
    for schedule in (topoplan.ring_plan(NO_PEERS), topoplan.plan(NO_PEERS, method="mwu")):
        assert topoplan.verify(schedule).rate == pytest.approx(57 / 3.5)
    free = replace(NO_PEERS, links=tuple(replace(link, shared=None) for link in NO_PEERS.links))
    assert topoplan.plan(free).rate == pytest.approx(4 * 43 / 7)
    assert topoplan.plan(NO_PEERS, "alltoall").rate == pytest.approx(32)  # the sockets' 64 GB/s bind


def test_a_plan_that_counts_each_direction_for_itself_is_refused() -> None:
    """The rate of the machine without the cap is not taken from a file with it."""
    value = json.loads(topoplan.plan(NO_PEERS).to_json())
    value["rate"] = 200 / 7
    with pytest.raises(PlanError, match="rate"):
        topoplan.verify(topoplan.Plan.from_object(value))
    free = replace(NO_PEERS, links=tuple(replace(link, shared=None) for link in NO_PEERS.links))
    value = json.loads(topoplan.plan(free).to_json())
    value["topology"] = NO_PEERS.to_object()
    with pytest.raises(PlanError, match=r"no pcie link|not a usable link"):
        topoplan.verify(topoplan.Plan.from_object(value))


def switched(cap: float) -> Topology:
    """Two PCIe switches with two GPUs each below one CPU; the links of GPUs and switches share caps."""
    names = ("cpu0", "pcie0", "pcie1", *(f"gpu{i}" for i in range(4)))
    kinds = {name: name.rstrip("0123456789") for name in names}
    links: tuple[Link, ...] = ()
    for i in range(4):
        links += both_ways(f"gpu{i}", f"pcie{i // 2}", "pcie", 20)
    for i in range(2):
        links += both_ways(f"pcie{i}", "cpu0", "pcie", 24)
    return Topology(
        "switched",
        tuple(Device(name, kinds[name], "s0") for name in names),
        tuple(replace(link, shared=cap) for link in links),
    )


@pytest.mark.parametrize("machine", [NO_PEERS, switched(30), staged(switched(30)), switched(48)])
def test_merging_undoes_splitting(machine: Topology) -> None:
    """A cap that binds no pair is dropped; split and merged machines stay as they are."""
    cut = split(machine)
    assert split(cut) == cut
    assert not cut.half_duplex
    loose = {(link.src, link.dst) for link in machine.links if 2 * link.bandwidth <= (link.shared or 0)}
    kept = tuple(replace(one, shared=None) if (one.src, one.dst) in loose else one for one in machine.links)
    assert merged(cut) == replace(machine, links=kept)
    assert 2 * len(caps(cut)) == sum(link.shared is not None for link in kept)
    assert Fabric(machine, ("pcie",)).topology == cut
    assert topoplan.load(machine.to_json()) == topoplan.load(machine.to_networkx()) == machine


def test_staged_copies_cross_the_caps_of_switches_twice() -> None:
    """Below one switch a staged copy goes up and down its link to the CPU, both against one cap."""
    machine = switched(24)
    direct = topoplan.plan(machine.subset([0, 1]), channels="pcie")
    through = topoplan.plan(machine.subset([0, 1]), channels="all-staged")
    assert [direct.rate, through.rate] == [
        pytest.approx(12),
        pytest.approx(6),
    ]  # 2 crossings of a byte, and 4
    for made in (direct, through):
        assert topoplan.verify(made).optimal


def test_links_with_caps_have_their_names_in_faults_and_failures() -> None:
    book = topoplan.plan_survival(NO_PEERS)
    names = [str(one.failure) for one in book.outcomes]
    assert "link gpu0-cpu0" in names
    assert not [name for name in names if "/" in name]
    topoplan.verify(book.plan_without(gpus=[3]))
    whole = book.whole.topology
    lost = topoplan.without_links(whole, ["gpu0-cpu0"])
    assert not topoplan.slow_links(whole, {"gpu1-cpu0": 5}).half_duplex
    slow = merged(topoplan.slow_links(whole, {"gpu1-cpu0": 5}))
    assert {one.bandwidth for one in slow.links if "gpu1" in (one.src, one.dst)} == {5}
    assert not [one for one in merged(lost).links if "gpu0" in (one.src, one.dst)]
    assert wire_name("gpu0/cpu0.in", "gpu0/cpu0.out") == "gpu0<>cpu0"


def test_hundreds_of_servers_count_the_caps() -> None:
    """Every edge crosses caps at both ends, 4 x 319 times in all, also on the way to a NIC."""
    free = replace(NO_PEERS, links=tuple(replace(link, shared=None) for link in NO_PEERS.links))
    rates = []
    for box in (NO_PEERS, free):
        many = topoplan.cluster_by_kind([topoplan.Server(box, count=40)], nic_gbps=400, nics=1)
        made = topoplan.plan_by_kind(many, "allreduce", channels="pcie+network")
        rates.append(topoplan.verify(made).rate)
        assert made.rate == made.bound
    assert rates[0] == pytest.approx(320 * 57 / (4 * 319))
    assert rates[1] > 1.2 * rates[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared": 0}, "shared must be a number of GB/s from 1e-06 to 1e[+]09, got 0; leave it out"),
        (
            {"shared": 40},
            "shared must be at least the bandwidth of one direction, 43 GB/s, got 40; correct one",
        ),
        ({"shared": "57"}, "shared must be a number or null, not '57'"),
        ({"shared": 60}, "shared must be equal in both directions, got 57.0 and 60|got 60 and 57"),
        ({"shared": None}, "shared must be equal in both directions"),
        (
            {"channel": "network"},
            "shared is a key of pcie, sys, c2c links without push and pull, got channel network",
        ),
        ({"push": 3, "pull": 43}, "without push and pull, got push and pull; leave one of them out"),
    ],
)
def test_a_cap_that_no_link_has_is_refused(change: dict[str, object], words: str) -> None:
    value = json.loads(NO_PEERS.to_json())
    value["links"][0] |= change
    with pytest.raises(TopologyError, match=words):
        topoplan.load(json.dumps(value))


def test_no_schedule_or_model_of_nccl_beats_the_bound_of_a_staged_machine() -> None:
    """A copy below one switch crosses the cap of its uplink twice, in every schedule's loads as in NCCL's paths."""
    machine = staged(switched(24))
    plan, row = topoplan.plan(machine), compare(machine)
    assert plan.rate == plan.bound == pytest.approx(24 * 2 / 12)
    assert row.ring == pytest.approx(plan.rate)
    assert {
        hop.path.count(link) for hop in [NcclPaths(machine).hop("gpu0", "gpu1")] for link in hop.path
    } == {1, 2}
    for schedule in SCHEDULES.values():
        try:
            made = schedule.make(machine, "allreduce")
        except (InfeasibleError, UsageError):
            continue
        assert topoplan.verify(made).rate <= plan.bound * (1 + 1e-12), schedule.name


def test_a_cluster_of_split_machines_loses_and_slows_the_links_of_whole_ones() -> None:
    """A plan states the split machine, whose facts name the ends within one server."""
    kept, parted = (
        topoplan.cluster([topoplan.Server(one, count=2)], nic_gbps=100) for one in (NO_PEERS, split(NO_PEERS))
    )
    assert merged(parted) == kept
    wire = "s1.gpu3-s1.cpu0"
    assert merged(topoplan.without_links(parted, [wire])) == topoplan.without_links(kept, [wire])
    slow = [merged(topoplan.slow_links(one, {wire: 5.0})) for one in (parted, kept)]
    assert [link.bandwidth for link in slow[0].links] == [link.bandwidth for link in slow[1].links]
