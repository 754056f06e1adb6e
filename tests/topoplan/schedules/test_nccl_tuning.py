"""NCCL's model of time: latencies counted by hand, limits of protocols, and what it has for which collective."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

import topoplan
from topoplan import Topology, UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.variants import with_all_capabilities
from topoplan.schedules.nccl_tuning import (
    COLLECTIVES,
    NcclExpectation,
    channel_count,
    expectations,
    setting_by_kind,
    setting_of,
)


def known(machine: Topology, collective: str) -> dict[tuple[str, str], NcclExpectation]:
    return {(one.algorithm, one.protocol): one for one in expectations(setting_of(machine), collective)}


def pair(name: str = "dgx-h100") -> Topology:
    return topoplan.cluster([topoplan.Server(name, count=2)], nic_gbps=400, nics=8, nic_access="direct")


@pytest.mark.parametrize(
    ("collective", "choice", "microseconds"),
    [
        ("allreduce", ("ring", "ll"), 6.6 + 14 * 0.6),
        ("allreduce", ("ring", "ll128"), 14.0 + 14 * 1.9),
        ("allreduce", ("ring", "simple"), 8.4 + 14 * 3.4),
        ("allreduce", ("tree", "simple"), 8.4 + 14 * 4.0),
        ("allgather", ("ring", "ll"), 6.6 + 7 * 0.6),
        ("broadcast", ("ring", "simple"), 8.4 + 3.4),
    ],
)
def test_latencies_on_one_server(collective: str, choice: tuple[str, str], microseconds: float) -> None:
    """A base and a hop for every step; a broadcast in a ring is a pipeline and pays one."""
    assert known(topoplan.load("dgx-a100"), collective)[choice].latency == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("collective", "choice", "microseconds"),
    [
        # 28 inside of the larger of a hop and the network's overhead, 2 between servers
        ("allreduce", ("ring", "ll"), 6.6 + 28 * 1.0 + 2 * 2.7),
        ("allreduce", ("ring", "simple"), 8.4 + 28 * 3.4 + 2 * 14.0),
        ("allreduce", ("tree", "ll"), 6.8 + 2 * (7 * 0.6 + 1 * 5.0)),
        ("allreduce", ("nvls_tree", "simple"), 25 + 2 * 20.9),
        ("reduce_scatter", ("ring", "ll"), 6.6 + 14 * 1.0 + 2.7),
    ],
)
def test_latencies_between_servers(collective: str, choice: tuple[str, str], microseconds: float) -> None:
    """As ``src/graph/tuning.cc`` adds them up for two servers of eight."""
    assert known(with_all_capabilities(pair()), collective)[choice].latency == pytest.approx(
        microseconds * 1e-6
    )


def test_bandwidths_of_protocols_are_limited_as_nccl_limits_them() -> None:
    """A100: rings of 240 GB/s over NVLinks counted at 20; LL half and 87.7 at most, LL128 23/25 of them."""
    found = known(topoplan.load("dgx-a100"), "allreduce")
    ring = 8 / 14
    assert found["ring", "simple"].bandwidth == pytest.approx(240 * ring)
    assert found["ring", "ll"].bandwidth == pytest.approx(87.7 * ring)
    assert found["ring", "ll128"].bandwidth == pytest.approx(240 * 0.92 * ring)
    assert found["tree", "simple"].bandwidth == pytest.approx(min(0.92 * 240 * ring, 12 * 24.0 / 2))
    hopper = known(with_all_capabilities(topoplan.load("dgx-h100")), "allreduce")
    assert hopper["nvls", "simple"].bandwidth == pytest.approx(2 * 370.8 * 0.85 * 7 / 8 * ring)


@pytest.mark.thorough
def test_what_nccl_has_for_which_collective() -> None:
    """Trees for allreduce alone, NVLS where switches can add, PAT with one rank a server, LL128 over NVLink alone."""
    names = {
        one: {a for a, _ in known(with_all_capabilities(topoplan.load("dgx-h100")), one)}
        for one in COLLECTIVES
    }
    assert names == {
        "allreduce": {"ring", "tree", "nvls"},
        "allgather": {"ring", "nvls"},
        "reduce_scatter": {"ring", "nvls"},
        "broadcast": {"ring"},
        "reduce": {"ring"},
    }
    assert {a for a, _ in known(with_all_capabilities(pair()), "allreduce")} == {"ring", "tree", "nvls_tree"}
    alone = pair("dgx-a100").subset([0, 8])
    assert {a for a, _ in known(alone, "allgather")} == {"ring", "pat"}
    assert {p for _, p in known(topoplan.load("pcie-x8"), "allreduce")} == {"ll", "simple"}


def test_a_tree_has_what_its_correction_leaves() -> None:
    """Half of the bandwidth at 128 KB with Simple, nine tenths at 64 bytes."""
    tree = known(topoplan.load("dgx-a100"), "allreduce")["tree", "simple"]
    moving = (tree.seconds(1 << 17) - tree.latency) * tree.bandwidth * 1e9
    assert moving == pytest.approx((1 << 17) / 0.5)
    assert (tree.seconds(64) - tree.latency) * tree.bandwidth * 1e9 == pytest.approx(64 / 0.9)


def test_channels_shrink_with_the_buffer() -> None:
    """As NCCL takes them away: 512 threads of 64 bytes each, with LL 8 bytes times the ranks of a ring."""
    found = [channel_count("ring", "simple", 32768 * times, ranks=8, most=24) for times in (0, 1, 5, 24, 99)]
    assert found == [1, 1, 5, 24, 24]
    assert channel_count("ring", "ll", 32768 * 3, ranks=8, most=24) == 3
    assert channel_count("nvls", "simple", 8, ranks=8, most=24) == 16


@pytest.mark.parametrize(
    ("machine", "told"), [("mi300x", "these are AMD's"), ("dgx-1v", "a single GPU has nothing to tune")]
)
def test_machines_without_a_model_are_refused(machine: str, told: str) -> None:
    found = topoplan.load(machine)
    with pytest.raises(UsageError, match=told):
        setting_of(found if machine == "mi300x" else found.subset([0]))
    with pytest.raises(UsageError, match="chooses no algorithm for alltoall"):
        expectations(setting_of(topoplan.load("dgx-1v")), "alltoall")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v"])
@pytest.mark.parametrize(
    "network", [{}, {"network": "rail-optimised"}, {"network": "fat-tree", "leaf_size": 3}]
)
def test_a_cluster_by_kind_has_the_setting_of_its_list(name: str, network: dict[str, Any]) -> None:
    servers = [topoplan.Server(name, count=7)]
    listed = setting_of(
        with_all_capabilities(with_capable(topoplan.cluster(servers, nic_gbps=100, **network)))
    )
    found = setting_by_kind(topoplan.cluster_by_kind(servers, nic_gbps=100, **network))
    assert found is not None
    assert astuple(found) == pytest.approx(astuple(listed))


def test_clusters_whose_network_nccl_does_not_know_have_no_setting() -> None:
    servers = [topoplan.Server("v100x4", count=7)]
    thin = {"network": "fat-tree", "leaf_size": 3, "oversubscription": 2}
    assert setting_by_kind(topoplan.cluster_by_kind(servers, nic_gbps=100, **thin)) is None
    kinds = [*servers, topoplan.Server("dgx-1v", count=7)]
    assert setting_by_kind(topoplan.cluster_by_kind(kinds, nic_gbps=100)) is None
