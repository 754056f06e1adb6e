"""Expected times of NCCL and other kernels: published rows, the bound, machines without measurements, the winners."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest

import topoplan
from tests.bench import published
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Topology
from topoplan.machine.variants import slow_links, with_all_capabilities
from topoplan.model.expected_times import (
    IMPLEMENTATIONS,
    KERNELS,
    ExpectedWinners,
    Place,
    expected_times,
    fitted_costs,
    fitted_seconds,
    nccl_times,
)
from topoplan.solve.upper_bound import compute_bound

SIZES = [1 << power for power in range(10, 34)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "gpus", "implementation", "nbytes", "microseconds"),
    [
        # vllm#42324, CUDA graph
        ("dgx-h100", 8, "multimem", 512 << 10, 11),
        ("dgx-h100", 8, "multimem", 128 << 20, 631),
        ("dgx-h100", 8, "two-shot", 4 << 20, 37),
        ("dgx-h100", 8, "nccl", 128 << 20, 561),
        # nccl-tests of an AWS p5.48xlarge (awsome-distributed-training)
        ("p5.48xlarge", 8, "nccl", 1 << 10, 16.4),
        ("p5.48xlarge", 8, "nccl", 1 << 30, 4253),
        # vllm#37756
        ("dgx-b300", 6, "one-shot", 64 << 10, 8),
        ("dgx-b300", 6, "two-shot-torch", 16 << 20, 99),
        # microsoft/mscclpp, perf_ndmv4
        ("dgx-a100", 8, "mscclpp", 1 << 30, 7702),
    ],
)
def test_published_rows_are_met_within_a_quarter(
    machine: str, gpus: int, implementation: str, nbytes: int, microseconds: float
) -> None:
    part = topoplan.load(machine).subset(range(gpus))
    known = {one.implementation: one for one in expected_times(part, "allreduce")}
    assert 0.8 <= known[implementation].seconds(nbytes) * 1e6 / microseconds <= 1.25
    assert known[implementation].covers(nbytes)


def machines() -> list[Topology]:
    servers = [
        cluster([Server(name, count=count)], nics=8, nic_gbps=gbps, nic_access="direct")
        for name, count, gbps in (("dgx-h100", 2, 400), ("dgx-a100", 2, 200))
    ]
    named = ("dgx-a100", "dgx-h100", "dgx-b300", "mi300x")
    return [*map(topoplan.load, named), *servers]


@pytest.mark.sampled
@pytest.mark.parametrize("machine", machines(), ids=lambda one: one.name)
def test_nothing_is_expected_to_be_quicker_than_the_bound_and_more_bytes_take_longer(
    machine: Topology,
) -> None:
    for collective in ("allreduce", "allgather", "reduce_scatter"):
        least = compute_bound(with_all_capabilities(machine), collective).rate * 1e9
        known = expected_times(machine, collective, compute_bound(machine, collective).rate)
        assert collective != "allreduce" or known
        for one in known:
            times = [one.seconds(size) for size in SIZES]
            assert all(a < b for a, b in pairwise(times)), one
            assert all(time >= size / least for time, size in zip(times, SIZES, strict=True)), one


def test_the_table_has_known_implementations_once_and_shares_below_the_wires() -> None:
    keys = [(one.implementation, one.generation, one.servers > 1, one.halves) for one in fitted_costs()]
    assert len(keys) == len(set(keys))
    for one in fitted_costs():
        assert one.implementation in IMPLEMENTATIONS
        assert all((one.source, one.date, one.rows >= 3, one.least <= one.most))
        assert 0 < one.share <= (1.25 if one.implementation.startswith("nccl") else 1)


@pytest.mark.parametrize(
    "machine",
    [
        topoplan.load("dgx-1v"),
        topoplan.load("dgx-2"),
        topoplan.load("pcie-x8"),
        topoplan.load("dgx-h100").subset([3]),
        slow_links(topoplan.load("dgx-h100"), {"gpu0-nvswitch0": 0.5}),
    ],
    ids=["DGX-1V", "DGX-2", "PCIe", "one GPU", "a slow link"],
)
def test_machines_without_measurements_have_no_expected_times(machine: Topology) -> None:
    assert expected_times(machine, "allreduce") == ()


def test_without_measurements_the_time_of_nccl_is_its_own_models() -> None:
    (one,) = nccl_times(topoplan.plan("dgx-1v"), {}, [1 << 20])
    assert not one.measured
    (other,) = nccl_times(topoplan.plan("dgx-h100"), {}, [1 << 20])
    assert (other.measured, other.runs) == (True, "ring ll")


def test_ours_is_the_quickest_only_where_no_kernel_and_not_nccl_is() -> None:
    winners = ExpectedWinners(topoplan.plan("dgx-h100"))
    for size in SIZES[:21]:
        one = winners.quickest(size, 1e-9)
        assert one.implementation in ("ours", "nccl", *KERNELS)
        assert one.nccl is not None
        assert one.seconds <= min(one.ours, one.nccl.seconds)
    # a kernel that was measured there is never slower than an engine that was not
    assert winners.quickest(1 << 20, 1e-9).implementation == "multimem"
    assert winners.quickest(8 << 30, 1e-9).implementation == "ours"
    mesh = ExpectedWinners(topoplan.plan("dgx-1v"))
    assert mesh.quickest(1 << 20, 1.0).implementation == "nccl"
    assert mesh.quickest(1 << 20, 1e-9).implementation == "ours"


def test_two_gpus_have_no_reduction_in_the_switch() -> None:
    part = topoplan.load("dgx-h100").subset([0, 1])
    assert not {"nvls", "multimem"} & {one.implementation for one in expected_times(part, "allreduce")}


def test_a_gpu_of_text_is_placed_by_its_links() -> None:
    place = Place.of(topoplan.load("dgx-h100"))
    assert place == Place("Hopper", 8, 1, 450.0, True)
    assert Place.of(topoplan.load("mi300x")) == Place("CDNA 3", 8, 1, 448.0, False)


def test_the_fit_finds_costs_again_and_judges_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, table = tmp_path / "rows.csv", tmp_path / "costs.csv"
    sizes = [1 << power for power in range(12, 30)]
    moving = [size * 1.75 / 450e9 / 0.6 for size in sizes]
    with rows.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(
            [
                "machine",
                "gpus",
                "servers",
                "collective",
                "bytes",
                "implementation",
                "time_us",
                "algbw_gbps",
                "busbw_gbps",
                "nic_gbps",
                "source",
            ]
        )
        for size, x in zip(sizes, moving, strict=True):
            seconds = fitted_seconds(x, 12e-6, 0.5e-6)
            writer.writerow(
                ["h100-sxm", 8, 1, "allreduce", size, "two-shot", seconds * 1e6, "", "", "", "made up"]
            )
        writer.writerow(["h100-sxm", 8, 1, "allreduce", 1 << 20, "hand-made", 9, "", "", "", "made up"])
    published.main(["--rows", str(rows), "--fit", str(table)])
    assert "two-shot, Hopper, 1: 18;    9   1.00   1.00   1.00  100%" in capsys.readouterr().out
    with table.open(newline="") as lines:
        (found,) = csv.DictReader(lines)
    wanted = {"start": 12, "share": 0.6, "fill": 0.5, "least": 4096, "most": 1 << 29, "rows": 18}
    assert {name: float(found[name]) for name in wanted} == pytest.approx(wanted, rel=0.02)
    published.main(["--rows", str(rows)])
    told = capsys.readouterr().out
    assert all(words in told for words in ("not claimed: 1 of 19 rows", "h100-sxm: hand-made 1"))


def test_thresholds_cover_all_sizes_of_all_numbers_of_gpus() -> None:
    made = json.loads(str(topoplan.export("dgx-h100", "thresholds", gpus=range(4))))
    assert made["format"] == "topoplan.thresholds/1"
    assert {one["gpus"] for one in made["ranges"]} == set(range(2, 5))
    for count in range(2, 5):
        own = [one for one in made["ranges"] if one["gpus"] == count and one["collective"] == "all_reduce"]
        assert (own[0]["from"], own[-1]["to"]) == (0, None)
        assert all(a["to"] + 1 == b["from"] for a, b in pairwise(own))
        assert {one["implementation"] for one in own} <= {"nccl", *KERNELS}
    plan = topoplan.plan("dgx-h100", gpus=[0, 2, 4, 6])
    assert {one["gpus"] for one in json.loads(str(topoplan.export(plan, "thresholds")))["ranges"]} == {4}


def test_thresholds_of_a_machine_without_measurements_are_refused() -> None:
    with pytest.raises(UsageError, match="thresholds need a machine with published measurements of NCCL"):
        topoplan.export("dgx-1v", "thresholds")


def test_the_benchmark_refuses_a_fit_without_rows() -> None:
    with pytest.raises(UsageError, match="--fit needs published rows"):
        published.main(["--fit", "x.csv"])


def test_a_mesh_without_a_switch_has_no_reduction_in_it() -> None:
    mesh = topoplan.load("nvlink-x4").to_networkx()
    for _, facts in mesh.nodes(data=True):
        if facts.get("kind") == "gpu":
            facts["model"] = "NVIDIA H100 80GB HBM3"
    known = {one.implementation for one in expected_times(topoplan.load(mesh), "allreduce")}
    assert "two-shot" in known
    assert not known & {"nvls", "multimem"}
