"""``plan`` of an all-to-all and of hundreds of GPUs, and what other commands do with its file."""

from __future__ import annotations

from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from tests.topoplan.cli.conftest import Told
from topoplan.cli.plan import tree_lines
from topoplan.plans.shards import ImageShards


def test_a_plan_goes_through_its_file_and_all_commands(done: Done, told: Told, tmp_path: Path) -> None:
    """Engines without paths are told of."""
    place = str(tmp_path / "plan.json")
    said = done(f"plan v100x4 --collective all-to-all -o {place}")
    assert said.startswith("all_to_all on v100x4, 4 GPUs (gpu0-3), over NVLink: provably optimal\n")
    assert "algbw        125 GB/s, busbw 93.75 GB/s\n" in said
    assert "only 125 GB/s leave {gpu0,3}, and 2 x 2 blocks of 1/4 of a buffer must" in said
    assert "paths        18 of height 2 (exact)\n" in said
    said = done(f"verify {place}")
    assert said.startswith("valid: all_to_all on v100x4, 4 GPUs (gpu0-3), over NVLink: provably optimal\n")
    assert "18 paths of height 2\n" in said
    timed = told(f"simulate {place} --sizes 64MB")
    assert (timed["ring"], timed["direct"]["rate"]) == (None, 100)
    assert timed["plan"]["rows"][0]["busbw"] == pytest.approx(0.75 * timed["plan"]["rows"][0]["algbw"])
    benched = done(f"bench {place} --sizes 64KB").splitlines()[-1].split()
    assert (benched[1], benched[-1]) == ("4096", "0")
    assert "so alltoall is left out" in done(f"export {place} --to msccl-xml", status=2)
    assert "take paths; use simple" in done(f"export {place} --to mscclpp --protocol ll", status=2)
    said = done(f"export {place} --to mscclpp -o {tmp_path}/engine.json")
    assert "keeps 125 GB/s, all of the rate; 20 chunks" in said
    assert "postcondition of all_to_all holds" in done(f"verify {tmp_path}/engine.json")


@pytest.mark.parametrize(("machine", "direct"), [("v100x4", 100.0), ("dgx-1v", 4.0), ("dgx-2", 160.0)])
def test_paths_stand_beside_direct_sends(told: Told, machine: str, direct: float) -> None:
    (row,) = told(f"compare {machine} --collective alltoall")["rows"]
    assert (row["nccl"], row["nccl_kind"]) == (direct, "direct sends")
    assert row["trees"] == row["bound"] >= direct
    assert row["nccl_ratio"] == pytest.approx(row["trees"] / direct)


def test_a_demand_is_planned_in_the_time_of_its_cut(done: Done, told: Told, tmp_path: Path) -> None:
    demand = '{"bytes": [[0, 2000000], [500000, 0]]}'
    asked = "plan dgx-a100 --gpus 0,1 --collective alltoall --demand -"
    said = done(f"{asked} -o {tmp_path}/plan.json", stdin=demand)
    assert "time         6.67 us for the demand" in said
    assert "only 300 GB/s leave {gpu0}, and 2e+06 bytes must: 6.67 us at least" in said
    assert ": provably optimal\n" in done(f"verify {tmp_path}/plan.json")
    assert told(asked, stdin=demand)["certificate"]["kind"] == "demand"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bytes": [[0, -1], [1, 0]]}', "the demand from rank 0 to rank 1 must be whole bytes"),
        ('{"bytes": [[0, NaN], [1, 0]]}', "the demand from rank 0 to rank 1 must be whole bytes"),
        ('{"bytes": [[0, 1, 2], [1, 0, 2], [1, 2, 0]]}', "the demand has 3 rows of 3 entries for 2 ranks"),
        ('{"bytes": [[0, "1"], [1, 0]]}', "must be a demand: give"),
        ('{"bytes": 4}', "must be a demand: give"),
        ("[[0, 1], [1, 0]]", "must be a demand: give"),
        ('{"bytes": [[0, 1], [1, 0]], "unit": "MB"}', "must be a demand: give"),
        ("bytes", "is not JSON"),
    ],
)
def test_a_file_that_is_no_demand_is_refused_in_one_line(refused: Done, text: str, message: str) -> None:
    assert message in refused("plan dgx-1v --gpus 0,1 --collective alltoall --demand -", stdin=text)


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A topology file of 64 servers, 512 GPUs."""
    path = tmp_path_factory.mktemp("large") / "cluster.json"
    path.write_text(topoplan.nvswitch_cluster(64).to_json())
    return str(path)


def test_a_plan_of_512_gpus_prints_one_row(done: Done, cluster_file: str, tmp_path: Path) -> None:
    """One tree stands for 512; GPUs and edges are named at the beginning, with how many are left out."""
    out = done(f"plan {cluster_file} --collective allgather -o {tmp_path}/plan.json")
    assert len(out) < 3000
    assert "512 GPUs (s0-63.gpu0-7)" in out
    rows = [line for line in out.splitlines() if " … (511 edges)" in line]
    assert [row.split()[:4] for row in rows] == [["512", "1/512", "0.3968", "s0-63.gpu0-7"]]
    checked = done(f"verify {tmp_path}/plan.json")
    assert "512 trees of height 2\n" in checked
    assert checked.splitlines()[0].endswith(": provably optimal")


@pytest.mark.thorough
def test_simulate_of_512_gpus_beside_rings_across_servers(
    told: Told, refused: Done, cluster_file: str, tmp_path: Path
) -> None:
    """Both are timed from their templates; at a large size the plan has its rate, and the rings theirs.

    A trace of too many transfers is refused, and there is no file.
    """
    value = told(f"simulate {cluster_file} --collective allgather --sizes 64GB")
    assert value["plan"]["trees"] == 512
    assert value["plan"]["rows"][0]["algbw"] == pytest.approx(value["plan"]["rate"], rel=0.01)
    assert value["ring"]["schedule"] == "network ring"
    assert value["ring"]["trees"] == 8 * 512
    assert value["ring"]["rate"] == pytest.approx(200 * 512 / 511)
    trace = tmp_path / "trace.json"
    line = refused(f"simulate {cluster_file} --collective allgather --sizes 1GB --trace {trace}")
    assert "chunk transfers must be at most 2000000" in line
    assert not trace.exists()


@pytest.mark.thorough
def test_a_plan_of_many_shards_that_differ_is_cut_after_some() -> None:
    """Trees of a DGX-1V over NVLink and PCIe together are none alike: the last line counts the rest."""
    made = topoplan.plan("dgx-1v", channels="all", method="mwu")
    lines = tree_lines(made, 12)
    assert len(lines) == 12
    assert lines[-1].endswith(" more trees; --all prints them")
    assert len(tree_lines(made, 12, every=True)) == 1 + made.num_trees
    assert int(lines[-1].split()[2]) + 10 == made.num_trees


def test_rotations_of_a_ring_share_a_row() -> None:
    """Six rings of a DGX-1V are six rows, and five of 15 ranks over three servers five."""
    rows = tree_lines(topoplan.ring_plan("dgx-1v"), 16)
    assert [line.split()[0] for line in rows[1:]] == ["8"] * 6
    ring = topoplan.ring_plan(topoplan.nvswitch_cluster(3, gpus=5, rails=None))
    assert not isinstance(ring.shards, ImageShards)
    assert [line.split()[0] for line in tree_lines(ring, 6)[1:]] == ["15"] * 5
    assert len(tree_lines(ring, 5, every=True)) == 76


def test_channels_are_named_where_shards_keep_to_different_ones() -> None:
    assert "channel" not in tree_lines(topoplan.plan(topoplan.nvswitch_cluster(2), "allgather"), 20)[0]
    both = tree_lines(topoplan.plan(topoplan.load("v100x4"), channels="nvlink+pcie"), 20)
    assert {line.split()[1] for line in both[1:]} == {"nvlink", "pcie"}


def test_a_late_rank_goes_through_file_and_verify(done: Done, told: Told, tmp_path: Path) -> None:
    """All eight ports of 450 GB/s: 1 GB is 2.39 ms at full rate; the time is printed beside its bound."""
    place = str(tmp_path / "late.json")
    said = done(f"plan dgx-h100 --late 3=0.004 --size 1GB -o {place}")
    assert "late         rank 3 by 4 ms, with 1GB\n" in said
    assert "at least     6.39 ms and 2.39 ms, without start-ups and in-network reduction\n" in said
    assert "waiting      8.2 ms if all ranks wait, 1.26 times as long\n" in said
    assert (
        "back ends    tcp runs it as planned; shared adds up the other ranks' buffers first, from 8MB" in said
    )
    assert "checked      each contribution arrives exactly once" in done(f"verify {place}")
    late = told("plan dgx-1v --gpus 1,4,5,7 --late 2=0 --late 0=0.01 --size 64MB")["late"]
    assert [one["rank"] for one in late["ranks"]] == [0, 2]
    assert late["seconds"] <= late["usual"]
    assert "no plan for late ranks is faster" in done("plan dgx-1v --late 1=0 --size 64MB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--late 3=1", "--late needs the size of the buffer; add --size"),
        ("--late 3", "must be a rank with its seconds, such as 3=0.02, got '3'"),
        ("--late 3=1 --late 3=2 --size 1MB", "must name a rank once, got 3=1 and 3=2"),
        ("--late 8=1 --size 1MB", "a late rank must be 0 to 7, got 8"),
        ("--late 3=-1 --size 1MB", "must be finite and at least 0, got -1"),
        ("--late 3=1 --size 1MB --collective reduce", "--collective does not go with --late"),
        ("--late 3=1 --size 1MB --sizes 1MB", "does not go with"),
    ],
)
def test_late_ranks_that_do_not_fit_are_refused(refused: Done, options: str, message: str) -> None:
    assert message in refused(f"plan dgx-1v {options}")


def test_nics_that_join_gpus_without_nvlink_have_the_bound_with_pcie_beside_them(done: Done) -> None:
    said = done("plan dgx-1v --servers 2 --nic-bandwidth 100Gb/s --gpus 1,6,8")
    assert "algbw        9 GB/s" in said
    assert "with PCIe    at most 12 GB/s, busbw 16 GB/s: --channels all+network" in said
    assert "with PCIe" not in done("plan dgx-1v --servers 2 --nic-bandwidth 100Gb/s --gpus 0,1,8")
