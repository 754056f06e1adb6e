"""The network of shaped links: what is built for a plan, and one plan that runs on it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.demand_plans import follows
from collectives.lab.benchmark import METHODS
from collectives.lab.testbed import sandbox
from collectives.lab.testbed.command import _direct_plan
from collectives.lab.testbed.network import (
    HEADER_FACTOR,
    ShapedNetwork,
    cable_flows,
    crossed_links,
    cut_commands,
    largest_scale,
    lay_out_network,
    management_address,
    network_commands,
    reshape_commands,
    slowed_plan,
    wires_file,
    with_management,
)
from collectives.lab.testbed.rank import expected_result, make_input, sent_counts
from collectives.lab.testbed.run import MAX_RUNS_DURING, PHASES, ScheduleMeasurement, ShapedRunOutcome
from tests.support.hand_plans import forest_plan
from tests.support.small_machines import tailed_triangle, thin_cycle
from topoplan.cli.main import main
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.variants import cables
from topoplan.plans.certificates.certificate import Cut
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage

DGX = topoplan.load("dgx-1v")
RING = topoplan.load("mac-tb5-ring-x4")
SCALE = 0.0005

needs_namespaces = pytest.mark.skipif(bool(sandbox.sandbox_refusal()), reason=sandbox.sandbox_refusal())


def over_nics() -> Plan:
    pair = [topoplan.Server(DGX, [0, 1], count=2)]
    return topoplan.three_phase(topoplan.cluster(pair, nic_gbps=100, nics=1))


PLANS = {
    "direct": lambda: topoplan.plan(DGX, gpus=[1, 4, 5, 7]),
    "relayed": lambda: topoplan.ring_plan(DGX, gpus=[1, 4, 5, 7], kind="relay"),
    "pcie": lambda: topoplan.ring_plan(DGX, gpus=[1, 4, 5, 7], kind="pcie"),
    "nics": over_nics,
    "nvswitch": lambda: topoplan.plan(topoplan.load("dgx-2"), gpus=[0, 1, 2]),
    "one way": lambda: topoplan.plan(DGX, "broadcast", gpus=[0, 1, 2]),
    "cables": lambda: topoplan.plan(topoplan.without_links("mac-tb5-x4", ["s0-s1"])),
    "cables side by side": lambda: topoplan.plan(beside("a", "b")),
    "shared adapters": lambda: topoplan.plan(topoplan.load("dgx-spark-x3")),
}


def beside(*ports: str, count: int = 1) -> topoplan.Topology:
    """Two servers with a cable between ports of each of these names."""
    joined = [topoplan.Cable(f"s0:{port}", f"s1:{port}", 80, count=count) for port in ports]
    pair = [topoplan.Server(topoplan.load("mac-tb5"), count=2)]
    return topoplan.cluster(pair, network="cables", cables=joined, name="pair")


@pytest.fixture(params=PLANS, ids=str)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def network_of(plan: Plan) -> ShapedNetwork:
    return lay_out_network(crossed_links(plan), plan.topology.links, SCALE)


def test_every_flow_of_a_stage_runs_as_its_data_does() -> None:
    """Reduce edges are crossed from child to parent, broadcast edges from parent to child."""
    plan = forest_plan(4, "allreduce", "chain")
    up = {(e.child, e.parent) for shard in plan.shards for e in shard.stages[0].edges}
    down = {(e.parent, e.child) for shard in plan.shards for e in shard.stages[1].edges}
    assert {(flow.source, flow.destination) for flow in crossed_links(plan)} == up | down


def test_a_route_without_a_wire_is_named_with_its_shard() -> None:
    made = topoplan.plan(DGX, "broadcast", gpus=[0, 1, 5])
    stage = Stage(
        "broadcast", 0, (Edge(0, 1, ("gpu0", "gpu1"), "nvlink"), Edge(0, 2, ("gpu0", "gpu5"), "nvlink"))
    )
    wrong = replace(made, shards=(Shard(Fraction(1), (stage,)),))
    with pytest.raises(
        PlanError, match="shard 0, stage 0, rank 2: the route gpu0-gpu5 crosses gpu0->gpu5, which has no"
    ):
        crossed_links(wrong)


def test_a_relaying_ring_has_one_flow_for_each_route() -> None:
    flows = crossed_links(PLANS["relayed"]())
    assert len(flows) > len({(flow.source, flow.destination) for flow in flows})


def test_rates_are_bandwidths_times_the_scale(plan: Plan) -> None:
    bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in plan.topology.links}
    for cable in network_of(plan).cables:
        for ends, rate in zip((cable.ends, cable.ends[::-1]), cable.rates, strict=True):
            wanted = bandwidth.get((*ends, cable.channel))
            assert rate == (None if wanted is None else round(wanted * SCALE * 8e9))


def test_addresses_are_used_once(plan: Plan) -> None:
    network = network_of(plan)
    addresses = [
        address for part in (network.cables, network.wires) for one in part for address in one.addresses
    ]
    assert len(addresses) == len(set(addresses))


def test_routes_lead_every_wire_along_its_route_and_back(plan: Plan) -> None:
    network = network_of(plan)
    lines = network_commands(network)
    tables = {
        name: dict(re.findall(r"route add (\S+)/32 via (\S+) ", "\n".join(inside)))
        for name, inside in lines.inside.items()
    }
    holder = {
        address: name
        for name, inside in lines.inside.items()
        for address in re.findall(r"address add (\S+)/3[12] ", "\n".join(inside))
    }
    for wire in network.wires:
        there = [network.namespace(device) for device in wire.flow.route]
        for (start, end), path in zip(
            (wire.addresses, wire.addresses[::-1]), (there, there[::-1]), strict=True
        ):
            walked = [holder[start]]
            while walked[-1] != holder[end]:
                walked.append(holder[tables[walked[-1]][end]])
            assert walked == path


def test_every_direction_of_every_link_is_shaped_where_it_is_sent(plan: Plan) -> None:
    network = network_of(plan)
    shaped = {
        (name, interface, round(int(rate) / HEADER_FACTOR))
        for name, lines in network_commands(network).shape.items()
        for interface, rate in re.findall(r"dev (\S+) root tbf rate (\d+)bit ", "\n".join(lines))
    }
    wanted = {
        (network.namespace(end), cable.interface, rate)
        for cable in network.cables
        for end, rate in zip(cable.ends, cable.rates, strict=True)
        if rate is not None
    }
    assert shaped == wanted


def test_a_link_that_falls_keeps_its_bucket(plan: Plan) -> None:
    """A packet that waits while the bucket becomes smaller than it would wait for ever."""
    network = network_of(plan)
    cable = next(one for one in network.cables if one.rates[0] is not None)
    before = next(
        line
        for line in network_commands(network).shape[network.namespace(cable.ends[0])]
        if f" {cable.interface} " in line
    )
    ((name, (after,)),) = reshape_commands(network, {"->".join(cable.ends): 1e6}).items()
    assert name == network.namespace(cable.ends[0])
    assert re.sub("rate [0-9]+bit", "", after).replace("change", "add") == re.sub(
        "rate [0-9]+bit", "", before
    )
    assert f"rate {round(1e6 * HEADER_FACTOR)}bit" in after


@pytest.mark.parametrize("name", ["mac-tb5-x4", "mac-tb5-ring-x4", "dgx-spark-x4"])
def test_every_cable_has_wires_though_a_plan_leaves_it_idle(name: str) -> None:
    """So that the next plan has them: whichever cable is lost, its routes are those of wires, or its cables are."""
    machine = topoplan.load(name)
    every = cables(machine)
    lost = next(iter(every))
    plan = replace(topoplan.plan(topoplan.without_links(machine, [lost])), topology=machine)
    known = crossed_links(plan)
    flows = {**known, **cable_flows(plan, known)}
    ends = {(link.src, link.dst) for links in flows.values() for link in links}
    assert ends >= set().union(*every.values())
    pairs = {(flow.source, flow.destination) for flow in flows}
    assert len(pairs) == len(flows) == 2 * len(every)
    for other in every:
        after = topoplan.plan(topoplan.without_links(machine, [other]))
        assert {(flow.source, flow.destination) for flow in crossed_links(after)} <= pairs
    assert not cable_flows(plan, flows)
    for flow, links in cable_flows(plan, known).items():
        assert flow.route == (links[0].src, *(link.dst for link in links))
        assert [device for device in flow.route if machine.device(device).kind == "gpu"] == [
            plan.ranks[flow.source],
            plan.ranks[flow.destination],
        ]


def test_a_cut_takes_one_end_of_each_of_its_cables_down() -> None:
    network = network_of(PLANS["cables"]())
    cable = network.cables[0]
    both = [cable.ends, cable.ends[::-1]]
    assert cut_commands(network, both) == {
        network.namespace(cable.ends[0]): (f"link set {cable.interface} down",)
    }
    assert cut_commands(network, []) == {}
    with pytest.raises(UsageError, match="is cut in both directions or not at all"):
        cut_commands(network, both[:1])


def test_the_network_besides_joins_the_ranks_alone() -> None:
    network = network_of(PLANS["cables"]())
    before, ranks = network_commands(network), [network.namespace(f"s{server}.gpu0") for server in range(4)]
    after = with_management(before, ranks)
    assert after.create[: len(before.create)] == before.create
    assert {name for name in after.inside if after.inside[name] != before.inside[name]} == set(ranks)
    assert after.inside[ranks[1]][-2:] == (
        f"address add {management_address(1)}/16 dev m0",
        "link set m0 up",
    )


@pytest.mark.parametrize(
    ("machine", "rates"),
    [
        pytest.param(beside("a", "b"), [10, 10], id="ports of their own"),
        pytest.param(beside("a", count=2), [20], id="one name"),
    ],
)
def test_cables_side_by_side_are_pairs_of_their_own_if_their_ports_are(
    machine: topoplan.Topology, rates: list[float]
) -> None:
    """A route names ports, so it cannot tell cables under one name apart."""
    network = network_of(topoplan.plan(machine))
    between = [cable for cable in network.cables if {end.split(".")[0] for end in cable.ends} == {"s0", "s1"}]
    assert [cable.rates for cable in between] == [(rate * SCALE * 8e9,) * 2 for rate in rates]
    crossed = {number for wire in network.wires for number, _ in wire.cables}
    assert {cable.number for cable in between} <= crossed
    assert len(network.wires) == 2 * len(rates)


def test_the_slowed_machine_has_no_latency_of_cables() -> None:
    """A veth pair delays nothing, so the model of the test bed must not either."""
    plan = PLANS["cables"]()
    assert {link.latency for link in plan.topology.links} > {None}
    assert {link.latency for link in slowed_plan(plan, SCALE).topology.links} == {None, 0.0}


def test_two_schedules_share_the_cables_that_both_cross() -> None:
    plans = [topoplan.plan(DGX, gpus=[0, 1, 2]), topoplan.ring_plan(DGX, gpus=[0, 1, 2])]
    flows = [crossed_links(plan) for plan in plans]
    network = lay_out_network({**flows[0], **flows[1]}, plans[0].topology.links, SCALE)
    assert len(network.cables) == 3
    for part in flows:
        wires = wires_file(network, part)["wires"]
        assert isinstance(wires, list)
        assert [(w["source"], w["destination"], tuple(w["route"])) for w in wires] == [
            (flow.source, flow.destination, flow.route) for flow in sorted(part)
        ]


def test_the_slowed_machine_has_the_same_rates_times_the_scale(plan: Plan) -> None:
    """Also by the verifier, which recomputes them from the links."""
    slowed = slowed_plan(plan, SCALE)
    assert slowed.rate == pytest.approx(plan.rate * SCALE)
    assert topoplan.verify(slowed).rate == pytest.approx(plan.rate * SCALE)


def test_the_default_scale_bounds_the_traffic_and_not_the_wiring() -> None:
    """Behind a thin NIC most of the NVLinks rest, so they may be fast."""
    behind = over_nics()
    assert largest_scale([behind]) > 2 * largest_scale([topoplan.plan(DGX)])
    assert largest_scale([behind, topoplan.plan(DGX)]) == largest_scale([topoplan.plan(DGX)])


def test_data_tells_where_a_chunk_belongs() -> None:
    data = make_input(3, 1 << 18).reshape(-1, 1 << 12)
    assert len(np.unique(data, axis=0)) == len(data)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"])
def test_what_ranks_must_get_is_what_loopback_gives(collective: str) -> None:
    plan = topoplan.plan(DGX, collective, gpus=[0, 1, 2])
    each = 20001 if collective == "allgather" else 30000
    with Communicator(plan) as communicator:
        got = getattr(communicator, METHODS[collective])([make_input(rank, each) for rank in range(3)])
    for rank in range(3):
        wanted = expected_result(collective, plan.root, rank=rank, ranks=3, count=each)
        assert (got[rank] is None) if wanted is None else np.array_equal(got[rank], wanted)


def test_gains_are_over_the_schedules_that_are_rings_whatever_their_names() -> None:
    rows = tuple(
        ScheduleMeasurement(name, 1000, 1.0, predicted, (seconds,), 0)
        for name, predicted, seconds in (("spring", 2.0, 3.0), ("loop", 4.0, 6.0))
    )
    (gain,) = ShapedRunOutcome(1.0, 1, (), rows, rings=("loop",)).gains()
    assert (gain.schedule, gain.rival, gain.predicted, gain.measured) == ("spring", "loop", 2.0, 2.0)


def test_switches_that_add_are_refused() -> None:
    """A forwarding namespace cannot do what the plan counts on."""
    machine = topoplan.load("dgx-2")
    adding = tuple(
        replace(d, reduce=True, multicast=True) if d.kind == "nvswitch" else d for d in machine.devices
    )
    plan = topoplan.plan(replace(machine, devices=adding), gpus=[0, 1, 2])
    with pytest.raises(UsageError, match=r"nvswitch0 copies or adds .* leave multicast and reduce out"):
        crossed_links(plan)


def test_links_too_slow_to_shape_are_refused() -> None:
    with pytest.raises(UsageError, match="gpu0->gpu1 would run at 200 bit/s"):
        lay_out_network(crossed_links(topoplan.plan(DGX, gpus=[0, 1])), DGX.links, 1e-9)


def machine_file(folder: Path, machine: topoplan.Topology) -> str:
    path = folder / "machine.json"
    path.write_text(machine.to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.thorough
@needs_namespaces
def test_trees_and_a_ring_run_on_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every element is right, and no run is faster than its links allow but for what their buckets hold."""
    path = machine_file(tmp_path, tailed_triangle())
    options = ["--sizes", "1MB,4MB", "--gbit-per-link", "0.2", "--runs", "1", "--json"]
    assert main(["testbed", path, *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["schedule"], row["nbytes"]) for row in shown["rows"]] == [
        (schedule, nbytes) for schedule in ("trees", "relay ring") for nbytes in (1 << 20, 4 << 20)
    ]
    for row in shown["rows"]:
        assert row["wrong"] == 0
        assert row["seconds"] > row["line_seconds"] / 2
    for link in shown["links"]:
        assert 0 < link["measured"] < 1.5 * link["shaped"]


@pytest.mark.thorough
@needs_namespaces
def test_a_demand_runs_beside_its_direct_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of the demand, in its proportions, by relayed paths and by the best direct ones."""
    demand = [[0, 8, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan("v100x4", "alltoall", demand=demand).to_json(), encoding="utf-8")
    options = ["--sizes", "256KB", "--scale", "0.001", "--runs", "1", "--json"]
    assert main(["testbed", str(path), *options]) == 0
    paths, direct = json.loads(capsys.readouterr().out)["rows"]
    assert (paths["schedule"], direct["schedule"]) == ("paths", "one-hop")
    assert direct["line_seconds"] > 1.5 * paths["line_seconds"]
    assert (paths["wrong"], direct["wrong"]) == (0, 0)


def test_direct_sends_of_a_demand_use_the_links_of_its_plan() -> None:
    plan = topoplan.plan(
        "dgx-1v", "alltoall", gpus=[4, 6, 7], demand=[[0, 1000, 0], [0, 0, 10], [0, 0, 0]], channels="pcie"
    )
    assert isinstance(plan.certificate, Demand)
    direct = _direct_plan(plan, plan.certificate, "one-hop")
    assert (direct.channels, direct.rate) == (("pcie",), plan.rate)
    beside_nvlink = topoplan.plan("dgx-1v", "alltoall", gpus=[7, 5, 4, 1], demand=[[0, 5, 1, 1]] * 4)
    assert isinstance(beside_nvlink.certificate, Demand)
    assert _direct_plan(beside_nvlink, beside_nvlink.certificate, "one-hop").channels == ("pcie",)
    relayed = topoplan.plan(RING, "alltoall", demand=[[0, 5, 1, 1]] * 4)
    assert isinstance(relayed.certificate, Demand)
    with pytest.raises(InfeasibleError, match=r"one-hop is impossible: .* run --schedules trees"):
        _direct_plan(relayed, relayed.certificate, "one-hop")


@needs_namespaces
@pytest.mark.thorough
def test_trees_run_alone_where_a_default_rival_is_impossible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    plan = topoplan.plan(RING, "alltoall", demand=[[0, 5, 1, 1]] * 4)
    path.write_text(plan.to_json(), encoding="utf-8")
    assert main(["testbed", str(path), "--sizes", "64KB", "--scale", "0.001", "--runs", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["schedule"] for row in answer["rows"]] == ["paths"]
    assert any(note.startswith("trees run alone: one-hop is impossible") for note in answer["notes"])


def test_small_blocks_beside_large_ones_keep_an_element() -> None:
    counts = sent_counts(Demand(((0, 10**10, 1000), (10**10, 0, 0), (0, 0, 0)), Cut(("gpu0",))), 16 << 20)
    assert counts[0][2] == 1


@pytest.mark.parametrize("nbytes", [1000, 262144, 999_999, 8 << 20])
@pytest.mark.parametrize("kept", [0, 50])
def test_counts_keep_the_proportions_of_their_demand(nbytes: int, kept: int) -> None:
    """So they run by the plan of the demand, whatever the size; too few elements are refused."""
    for hot in (8, 10**5):
        rows = ((kept, hot, 1, 1), (1, 0, 1, 1), (1, 1, kept, 1), (1, 1, 1, 0))
        demand = Demand(rows, Cut(("gpu0",)))
        counts = sent_counts(demand, nbytes)
        assert follows(counts, rows)
        assert abs(sum(map(sum, counts)) - nbytes) < 16
        with pytest.raises(
            UsageError, match="sizes must be large enough for the proportions of the demand, got 4"
        ):
            sent_counts(demand, 4)


@needs_namespaces
def test_a_demand_has_no_other_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        topoplan.plan("v100x4", "alltoall", demand=[[0, 1, 1, 1]] * 4).to_json(), encoding="utf-8"
    )
    assert main(["testbed", str(path), "--schedules", "trees,ring"]) == 2
    assert "a plan of a demand is compared with one-hop alone, got ring" in capsys.readouterr().err


@pytest.mark.thorough
@needs_namespaces
def test_ranks_plan_around_a_link_that_falls(capsys: pytest.CaptureFixture[str]) -> None:
    """One direction of the two NVLinks between two GPUs; every element is right before, during and after."""
    options = ["--sizes", "2MB", "--gbit-per-link", "0.1", "--runs", "2", "--json"]
    assert main(["testbed", "dgx-1v", "--gpus", "0,1,2", "--drop", "gpu1->gpu2=0.1", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["wrong"]) for one in shown["phases"]] == [(name, 0) for name in PHASES]
    assert [one["optimum"] for one in shown["phases"]] == [50.0, 30.0, 30.0]
    assert 4 < len(shown["phases"][1]["runs"]) <= MAX_RUNS_DURING
    assert shown["notes"][0].startswith("gpu1->gpu2: ")
    assert shown["notes"][-1].startswith("replanned: ")


@pytest.mark.thorough
@needs_namespaces
def test_a_rank_that_is_held_back_counts_in_the_prediction_and_in_the_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--sizes", "256KB", "--scale", "0.001", "--runs", "1", "--schedules", "trees", "--json"]
    seconds = {}
    for late in ([], ["--late", "1=0.5"]):
        assert main(["testbed", "mac-tb5-x4", *options, *late]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["rows"]
        assert shown["wrong"] == 0
        seconds[bool(late)] = shown["predicted"], shown["seconds"]
    assert seconds[True][0] > 0.5 > seconds[False][0]
    assert seconds[True][1] > 0.5


@pytest.mark.thorough
@needs_namespaces
def test_ranks_go_on_without_a_cable_that_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a run, over a cable that the first plan leaves idle: every element is right."""
    options = ["--sizes", "256KB", "--scale", "0.001", "--runs", "2", "--json"]
    assert main(["testbed", "mac-tb5-x4", "--drop", "s0-s1=0", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["wrong"]) for one in shown["phases"]] == [("before", 0), ("after", 0)]
    assert [one["optimum"] for one in shown["phases"]] == [20.0, pytest.approx(50 / 3)]
    assert [note.split(":")[1] for note in shown["notes"]] == [" without link s0-s1"]
    assert shown["recovered"] > 0


@pytest.mark.slow
@needs_namespaces
def test_other_collectives_run_on_real_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here an allgather from a plan file, whose columns are a table."""
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan(DGX, "allgather", gpus=[0, 1, 2]).to_json(), encoding="utf-8")
    assert main(["testbed", str(path), "--schedules", "trees", "--sizes", "1MB", "--runs", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(
        "# all_gather on dgx-1v, 3 GPUs (gpu0-2): every element right, measured over predicted"
    )
    assert re.split("  +", shown[2]) == [
        *("schedule", "size", "line ms", "predicted ms", "measured ms", "ratio", "line rate", "wrong")
    ]
    assert shown[3].split()[:2] == ["trees", "1MB"]
    assert shown[3].split()[-1] == "0"
    assert main(["testbed", str(path), "--schedules", "lowest-tree", "--sizes", "1MB", "--runs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[3].startswith("lowest trees  1MB")


@pytest.mark.slow
@needs_namespaces
def test_heartbeats_wait_less_with_pacing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All senders of a reduce meet at one port: without pacing its queue is most of what a heartbeat waits for."""
    asked = ["--gpus", "0-3", "--collective", "reduce", "--schedules", "one-hop", "--sizes", "16MB"]
    assert main(["testbed", "dgx-2", *asked, "--runs", "1", "--headroom", "0.9", "--json"]) == 0
    free, paced = json.loads(capsys.readouterr().out)["rows"]
    assert (free["headroom"], paced["headroom"]) == (None, 0.9)
    assert free["wrong"] == paced["wrong"] == 0
    assert min(free["beats"]["sent"], paced["beats"]["sent"]) > 50
    assert paced["beats"]["median"] < free["beats"]["median"] / 3
    assert paced["seconds"] == pytest.approx(paced["predicted"], rel=0.1)


@pytest.mark.thorough
@needs_namespaces
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (lambda command, ranks: os.kill(command.pid, signal.SIGINT), -2, "topoplan testbed: interrupted"),
        (lambda command, ranks: os.kill(command.pid, signal.SIGKILL), -9, ""),
        (
            lambda command, ranks: os.kill(ranks[2], signal.SIGKILL),
            1,
            "topoplan testbed: error: a rank failed: .*",
        ),
    ],
    ids=["interrupted", "killed", "rank killed"],
)
def test_nothing_is_left_behind(
    tmp_path: Path, end: Callable[[subprocess.Popen[str], list[int]], None], status: int, said: str
) -> None:
    """Every process of the test bed is gone soon after, and with the first of them its namespaces and mounts."""
    marker = f"TESTBED_MARKER={tmp_path}"
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "topoplan", "testbed", machine_file(tmp_path, thin_cycle())),
            *("--gbit-per-link", "0.01", "--sizes", "64MB"),
        ],
        env=os.environ | dict([marker.split("=")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # unshare, the first process of the sandbox, and the ranks, which are forked from it
        _, _, *ranks = wait_for(
            lambda: sorted(marked(marker, "collectives.lab.testbed.rank")), lambda pids: len(pids) == 6
        )
        end(command, ranks)
        _, shown = command.communicate(timeout=30)
        wait_for(lambda: marked(marker, ""), lambda pids: not pids)
    finally:
        command.kill()
    assert command.returncode == status
    assert re.fullmatch(said, shown.strip())


def wait_for(look: Callable[[], list[int]], enough: Callable[[list[int]], bool]) -> list[int]:
    deadline = time.monotonic() + 30
    while not enough(found := look()):
        assert time.monotonic() < deadline, f"still {found} after 30 s"
        time.sleep(0.05)
    return found


def marked(marker: str, word: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() not in (process / "environ").read_bytes().split(b"\0"):
                continue
            if word.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_machine_that_refuses_namespaces_says_so_in_one_line(tmp_path: Path) -> None:
    """Here one whose unshare is not allowed to do it."""
    denied = tmp_path / "unshare"
    denied.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    denied.chmod(0o755)
    command = [sys.executable, "-m", "topoplan", "testbed", "dgx-1v", "--gpus", "0,1"]
    for tool in ("ip", "tc", "mount"):
        (tmp_path / tool).symlink_to("/bin/true")
    done = subprocess.run(
        command, env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "topoplan testbed: error: this machine does not let users build networks: "
        "unshare: unshare failed: Operation not permitted\n"
    )
    assert not done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dgx-1v", "--schedules", "trees,rings"], "schedule 'rings' is unknown; use some of trees, ring,"),
        (["dgx-1v", "--gpus", "3"], "one GPU moves nothing; choose at least two"),
        (["dgx-1v", "--sizes", "1TB"], "1TB on 8 ranks need 32TB of memory, and the machine has"),
        (["dgx-1v", "--scale", "0"], "must be a number above zero, such as 1e-3, got '0'"),
        (["dgx-1v", "--runs", "-1"], "must be a whole number from 1 to 1000, got '-1'"),
        (["dgx-1v", "--scale", "1", "--gbit-per-link", "1"], "--gbit-per-link does not go with --scale"),
        (["dgx-1v", "--late", "1"], "must be a rank with its seconds, such as 3=0.02, got '1'"),
        (["dgx-1v", "--late", "9=1"], "a late rank must be 0 to 7, got 9"),
        (["dgx-1v", "--late", "1=1", "--drop", "gpu0-gpu3=0.1"], "--late and --drop are two test beds"),
        (["dgx-1v", "--drop", "gpu0-gpu3"], "such as gpu0-gpu3=0.1, got 'gpu0-gpu3'"),
        (["dgx-1v", "--drop", "gpu0-gpu3=1"], "must be a part of a rate below 1, such as 0.1, got '1'"),
        (["dgx-1v", "--gpus", "0,1", "--drop", "gpu0-gpu3=0.1"], "dgx-1v has no device 'gpu3'"),
        (["dgx-1v", "--gpus", "0,1", "--drop", "gpu0-pcie0=0.1"], "the plan sends nothing over gpu0-pcie0"),
        (
            ["dgx-1v", "--drop", "gpu0-gpu3=0.1", "--headroom", "0.9"],
            "--headroom and --drop are two test beds",
        ),
        (
            ["dgx-1v", "--drop", "gpu0-gpu3=0.1", "--sizes", "64KB"],
            "64KB is too small to be monitored; give 1MB or more",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["testbed", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert said in shown
