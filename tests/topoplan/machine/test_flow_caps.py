"""NICs of which one connection gets a part: how many connections a plan needs, and what it does with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from topoplan.cli.main import main
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.structure import connections_needed, flow_caps


def pair(flow: float | None, *, gpus: int = 1, nics: int = 1) -> Topology:
    return topoplan.cluster(
        [topoplan.Server("dgx-1v", list(range(gpus)), count=2)],
        nic_gbps=40,
        nics=nics,
        flow_gbps=flow,
        nic_access="direct",
    )


@pytest.mark.parametrize(
    ("flow", "needed", "single"), [(5, 8, 0.625), (20, 2, 2.5), (30, 2, 3.75), (40, 1, 5.0), (100, 1, 5.0)]
)
def test_two_servers_need_the_nic_over_the_cap(flow: float, needed: int, single: float) -> None:
    """An allreduce of two does 5 GB/s over NICs of 40 Gb/s, all of it between the two."""
    plan = topoplan.plan(pair(flow))
    found = connections_needed(plan)
    assert plan.rate == 5.0
    assert found is not None
    assert (found.needed, found.single, found.carried) == (needed, single, 5.0)


def test_the_rate_with_one_connection_is_what_the_fullest_pair_allows() -> None:
    """Recomputed from the plan's edges, on four servers of two GPUs and two NICs."""
    machine = topoplan.cluster(
        [topoplan.Server("dgx-1v", [0, 1], count=4)], nic_gbps=40, nics=2, flow_gbps=5, nic_access="direct"
    )
    plan = topoplan.plan(machine, "allgather")
    found = connections_needed(plan)
    assert found is not None
    sent: dict[object, float] = {}
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                nics = tuple(name for name in edge.route if "nic" in name)
                if nics:
                    key = edge.parent, edge.child, nics
                    sent[key] = sent.get(key, 0.0) + float(shard.share)
    assert found.single == pytest.approx(min(plan.rate, 0.625 / max(sent.values())))
    assert found.needed * 0.625 >= max(sent.values()) * plan.rate * (1 - 1e-9)
    assert (found.needed - 1) * 0.625 < max(sent.values()) * plan.rate


def test_rates_and_bounds_do_not_depend_on_the_cap() -> None:
    """It is a fact of the NICs alone; without one nothing is said."""
    capped, free = topoplan.plan(pair(5)), topoplan.plan(pair(None))
    assert (capped.rate, capped.bound, capped.shards) == (free.rate, free.bound, free.shards)
    assert connections_needed(free) is None
    assert connections_needed(topoplan.plan(pair(5, gpus=2), gpus=[0, 1])) is None
    assert topoplan.load(pair(5).to_json()) == pair(5)


def test_a_server_may_have_a_cap_of_its_own(tmp_path: Path) -> None:
    """In the file of a cluster, beside that of the network."""
    path = tmp_path / "two.json"
    servers = [{"machine": "dgx-1v", "gpus": [0]}, {"machine": "dgx-1v", "gpus": [0], "flow_gbps": 10}]
    network = {"nic_gbps": 40, "nics": 1, "flow_gbps": 5}
    path.write_text(json.dumps({"format": "topoplan.cluster/1", "servers": servers, "network": network}))
    assert {name: float(cap) for name, cap in flow_caps(topoplan.load(path)).items()} == {
        "s0.nic0.tx": 0.625,
        "s0.nic0.rx": 0.625,
        "s1.nic0.tx": 1.25,
        "s1.nic0.rx": 1.25,
    }


def test_the_plan_says_so_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A line, and an object in JSON; neither where there is no cap."""
    words = ["plan", "dgx-1v", "--gpus", "0,8", "--servers", "2", "--nic-gbps", "40", "--nics", "1"]
    assert main([*words, "--flow-gbps", "5"]) == 0
    out = capsys.readouterr().out
    assert "flows  8 connections from s0.gpu0 to s1.gpu0 carry 5 GB/s at 0.625 GB/s each; with one" in out
    assert main([*words, "--flow-gbps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["connections"]["needed"] == 8
    assert main([*words, "--json"]) == 0
    assert "connections" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--flow-gbps", "100"]) == 0
    assert "flows  one connection from a rank to another does" in capsys.readouterr().out


@pytest.mark.parametrize("flow", [0, -5, float("nan"), "5", True])
def test_what_is_no_rate_is_refused(flow: object) -> None:
    """By the cluster and by a server of it."""
    with pytest.raises(UsageError, match="flow_gbps"):
        pair(flow)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="flow_gbps"):
        topoplan.Server("dgx-1v", flow_gbps=flow)  # type: ignore[arg-type]


def test_without_servers_the_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It belongs to a cluster."""
    assert main(["plan", "dgx-1v", "--flow-gbps", "5"]) == 2
    assert "--flow-gbps belongs to --servers" in capsys.readouterr().err
