"""``plan`` of clusters of more than 256 GPUs, by kinds of servers, and the commands that take their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.topoplan.cli.conftest import Told
from topoplan import PlanError

BIG = "plan dgx-h100 --servers 12500 --nic-bandwidth 400Gb/s --nic-access direct"

HEAD = "all_reduce on 12500 x dgx-h100, 100,000 GPUs of 12,500 servers, over NVLink and the network: "


def test_a_hundred_thousand_gpus_go_through_their_file(
    done: Done, told: Told, run: Run, tmp_path: Path
) -> None:
    place = tmp_path / "big.json"
    said = done(f"{BIG} -o {place}")
    assert said.startswith(f"{HEAD}provably optimal\nalgbw        200.016 GB/s, busbw 400.028 GB/s\n")
    assert all(len(line) <= 120 for line in said.splitlines())
    assert place.stat().st_size < 100_000
    assert place.read_text() == done(f"{BIG} -o -")
    assert done(f"verify {place}").startswith(f"valid: {HEAD}provably optimal\n")
    assert told(f"verify {place}")["gpus"] == 100_000
    value = json.loads(place.read_text())
    status, _, err = run("verify -", stdin=json.dumps({**value, "bound": 201.0}))
    assert status == 1
    assert "claims a bound of 201 GB/s; recomputed it is 200.016" in err
    assert "1GB" in done(f"simulate {place} --sizes 1GB")
    status, _, err = run(f"simulate {place} --trace {tmp_path}/trace.json")
    assert status == 2
    assert "of 100,000 GPUs has" in err
    assert "choose fewer servers" in err


def test_switches_of_a_hundred_thousand_gpus_that_add(
    done: Done, told: Told, run: Run, tmp_path: Path
) -> None:
    place = tmp_path / "nvls.json"
    said = done(f"{BIG} --in-network all -o {place}")
    assert said.startswith(f"{HEAD}provably optimal\nalgbw        400 GB/s, busbw 799.992 GB/s\n")
    assert place.stat().st_size < 100_000
    assert done(f"verify {place}").startswith(f"valid: {HEAD}provably optimal\n")
    network = json.loads(place.read_text())["cluster"]["network"]
    assert network == {"kind": "switch", "in_network": True}
    assert "1GB" in done(f"simulate {place} --sizes 1GB")
    told_plan = told(f"simulate {BIG.removeprefix('plan ')} --in-network all --sizes 1GB --json")
    assert told_plan["rate"] == 400
    assert "at most 400 GB/s" in done(f"{BIG} --in-network all --bound-only")
    # Every byte leaves a server once for the sum, and enters it once; --in-network none sends 2 x 12,499 / 12,500.
    part = told(f"{BIG} --in-network all --list s17 --json")["server"]
    for key in ("sent", "received"):
        network = [row[key] for row in part["gpus"] if row["channel"] == "network"]
        assert network == [0.125] * 8
        assert [row[key] for row in part["gpus"] if row["channel"] == "nvlink"] == [1] * 8
    # Up to 1,024 GPUs the devices are listed.
    small = BIG.replace("12500", "40")
    assert '"topology"' in done(f"{small} --in-network all --collective broadcast -o -")


def test_one_server_of_many(done: Done, told: Told, run: Run) -> None:
    part = told(f"{BIG} --list s17 --json")["server"]
    gpus = {row["gpu"] for row in part["gpus"]}
    assert gpus == {f"s17.gpu{gpu}" for gpu in range(8)}
    network = sum(row["sent"] for row in part["gpus"] if row["channel"] == "network")
    assert network == pytest.approx(2 * 12_499 / 12_500)
    assert "s17: ranks 136 to 143, one of 12,500 equivalent servers" in done(f"{BIG} --list s17")
    for name, words in (("s12500", "from s0 to s12499"), ("node1", "from s0 to s12499")):
        status, _, err = run(f"{BIG} --list {name}")
        assert (status, words in err) == (2, True)
    status, _, err = run("plan dgx-1v --list s0")
    assert (status, "add --servers" in err) == (2, True)
    status, _, err = run("plan dgx-1v --servers 2 --nic-bandwidth 100Gb/s --list s0")
    assert (status, "more than 256 GPUs" in err) == (2, True)


def test_all_to_all_and_broadcast(done: Done) -> None:
    said = done(f"{BIG} --collective all_to_all")
    assert "provably optimal" in said
    assert "paths        9,999,900,000 of height 1" in said
    assert done(f"{BIG} --collective broadcast --root 13").startswith(
        "broadcast from s1.gpu5 on 12500 x dgx-h100, "
    )


def test_a_cluster_file_of_three_kinds(done: Done, tmp_path: Path) -> None:
    servers = [
        {"machine": name, "count": count}
        for name, count in (("v100x4", 300), ("dgx-1v", 20), ("nvlink-x4", 40))
    ]
    network = {"kind": "fat-tree", "nic_gbps": 100, "leaf_size": 40, "oversubscription": 2}
    place = tmp_path / "mixed.json"
    place.write_text(
        json.dumps({"format": "topoplan.cluster/1", "name": "mixed", "servers": servers, "network": network})
    )
    said = done(f"plan {place}")
    assert said.startswith(
        "all_reduce on mixed, 1,520 GPUs of 360 servers, over NVLink and the network: provably optimal\n"
    )


@pytest.mark.thorough
def test_options_of_listed_plans_list_the_cluster(done: Done, tmp_path: Path) -> None:
    small = "plan v100x4 --servers 66 --nic-bandwidth 100Gb/s"
    by_kind, listed = done(small), done(f"{small} --listed")
    assert "264 GPUs of 66 servers" in by_kind
    assert "264 GPUs (s0-65.gpu0-3)" in listed
    assert [line for line in by_kind.splitlines() if line.startswith("algbw")] == [
        line for line in listed.splitlines() if line.startswith("algbw")
    ]
    place = tmp_path / "small.json"
    done(f"{small} -o {place}")
    assert "all_reduce on 66 x v100x4, 264 GPUs" in done(f"simulate {place}")


def test_stdin_and_pipes_are_read_once(run: Run, done: Done) -> None:
    machine = done("show v100x4 --json")
    for words in ("--servers 2", "--servers 2 --survive 1", "--servers 66"):
        status, out, err = run(f"plan - {words} --nic-bandwidth 100Gb/s", stdin=machine)
        assert (status, out[:13]) == (0, "all_reduce on"), err
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        pipe.write(machine)
    try:
        assert done(f"plan /dev/fd/{reading}").startswith("all_reduce on v100x4, 4 GPUs")
    finally:
        os.close(reading)


def test_large_clusters_are_compared_and_simulated_by_kind(run: Run, tmp_path: Path) -> None:
    """10,000 GPUs would take minutes as a list; a plan file gives the answers of its cluster."""
    asked = ("dgx-h100", "--servers", "1250", "--nic-bandwidth", "400Gb/s")
    status, out, _ = run("compare", *asked)
    assert status == 0
    assert out.splitlines()[0].endswith("trees do 1.00x NCCL's best (network ring)")
    assert "NCCL: nvls tree" in out
    assert run("plan", *asked, "-o", str(tmp_path / "plan.json"))[0] == 0
    times = [
        run("simulate", *which, "--sizes", "1GB")[1] for which in (asked, (str(tmp_path / "plan.json"),))
    ]
    assert times[0] == times[1]
    assert times[0].splitlines()[0].endswith("the plan is never slower than NCCL's best, 1.23x at 1GB")


@pytest.mark.thorough
def test_dragonflies_are_planned_compared_and_simulated_by_kind(
    run: Run, done: Done, told: Told, tmp_path: Path
) -> None:
    asked = "dgx-h100 --servers 1250 --nic-bandwidth 400Gb/s --nic-access direct --network dragonfly --group-size 16"
    thin, wide = (f"{asked} --global-bandwidth {rate}" for rate in ("40Gb/s", "51200Gb/s"))
    place = tmp_path / "plan.json"
    said = done(f"plan {thin} --collective all_gather -o {place}")
    # 1,248 of 1,250 servers are outside the last of 79 groups; 78 links of 5 GB/s lead there.
    assert "over NVLink and the network: provably optimal\nalgbw        390.625 GB/s" in said
    assert done(f"verify {place}").startswith("valid: all_gather on 1250 x dgx-h100, 10,000 GPUs")
    assert "1GB" in done(f"simulate {place} --sizes 1GB")
    assert {row["gpu"] for row in told(f"plan {thin} --list s1249 --json")["server"]["gpus"]} == {
        f"s1249.gpu{gpu}" for gpu in range(8)
    }
    assert "not compared: its model needs equal servers" in done(f"compare {thin}")
    assert "trees do 1.00x NCCL's best (network ring)" in done(f"compare {wide}")
    # 77 links of 5 GB/s and one of 1 GB/s lead there.
    slow = done(f"plan {thin} --slow-link group0-group78=1GB/s --collective all_gather")
    assert f"provably optimal\nalgbw        {386 * 1250 / 1248:.3f} GB/s" in slow


def test_a_cluster_of_two_kinds_is_compared_with_nothing(run: Run, tmp_path: Path) -> None:
    cluster = {
        "format": "topoplan.cluster/1",
        "name": "two kinds",
        "servers": [{"machine": "v100x4", "count": 40}, {"machine": "dgx-1v", "count": 20}],
        "network": {"kind": "switch", "nic_gbps": 100},
    }
    path = tmp_path / "two.json"
    path.write_text(json.dumps(cluster))
    status, out, _ = run("compare", str(path))
    assert status == 0
    assert "not compared: its model needs equal servers" in out
    assert "busbw" in out.splitlines()[0]
    status, _, err = run("simulate", str(path), "--sizes", "1MB", "--gpus", "0-3")
    assert status == 0, err


def test_a_large_cluster_is_shown_by_its_kinds_of_servers(done: Done) -> None:
    listed, shown = (done(f"show dgx-h100 --nic-gbps 400 --servers {n}").splitlines() for n in (4, 12500))
    assert shown[0] == "12500 x dgx-h100: 100000 H100 GPUs, 12500 servers, 100000 NICs, 12500 NVSwitches"
    assert shown[1] == "servers      s0 (shown for 12500 equivalent servers, up to s12499)"
    assert shown[2:] == ["network      switch", *listed[2:]]
    thin = done(
        "show dgx-h100 --nic-gbps 400 --servers 1250 --network fat-tree --leaf-size 4 --oversubscription 2"
    )
    assert "\nnetwork      fat-tree, oversubscription 2, leaf size 4\n" in thin
    broken = done("show dgx-h100 --nic-gbps 400 --servers 1250 --without-link s3.nic0-switch0").splitlines()
    assert broken[1].endswith("(shown for 1249 equivalent servers, up to s1249), s3")


@pytest.mark.parametrize("network", ["", "--network fat-tree --leaf-size 4", "--network rail-optimised"])
def test_the_environment_of_a_large_cluster_is_that_of_its_list(done: Done, network: str) -> None:
    given = f"export dgx-h100 --nic-gbps 400 --to nccl-env {network}"
    listed, large = (done(f"{given} --servers {n}") for n in (16, 1250))
    assert large == listed.replace("16 x dgx-h100", "1250 x dgx-h100")
    assert done(f"{given} --servers 1250 --server s1249") == large
    refused = done(f"{given} --servers 1250 --server s1250", status=2)
    assert "--server must name a server from s0 to s1249, got 's1250'" in refused


def test_a_machine_on_stdin_is_read_once(done: Done) -> None:
    """Large clusters are asked for first, of the same text."""
    text = topoplan.load("v100x4").to_json()
    for line in ("show -", "compare -", "simulate - --sizes 1MB", "export - --to nccl-env", "plan -"):
        for servers in (2, 65):
            made = done(f"{line} --servers {servers} --nic-gbps 100", stdin=text)
            assert f"{servers} x v100x4" in made


LARGE = "dgx-h100 --servers {} --nic-bandwidth 400Gb/s"

ABOVE_1024 = (
    "plan {} --mesh dp=12500,tp=8 --in-network nvswitch",
    "plan {} --schedule ring",
    "plan {} --method three-phase",
    "plan {} --helpers 2",
    "plan {} --channels pcie",
    "plan {} --size 1MB",
    "compare {} --plot rates.png",
    "compare {} --in-network nvswitch",
    "compare {} --all-allocations",
    "compare {} --without-each-server",
    "simulate {} --trace run.json",
    "recommend {} --count 64 --members",
    "recommend {} --jobs 64,64",
)

ABOVE_MORE = (
    ("report {} -o report.html --in-network all", 512),
    ("pairs {}", 2048),
    ("order {} --mesh dp=12500,tp=8 --preset megatron", 4096),
    ("order {}", 16_384),
    ("plan {} --gpus 0-15", 16_384),
    ("check {}", 16_384),
    ("show {} --json", 16_384),
    ("export {} --to nccl-topo", 16_384),
    ("testbed {}", 16_384),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("command", "most"), [*((one, 1024) for one in ABOVE_1024), *ABOVE_MORE])
def test_what_lists_every_gpu_is_refused_before_the_cluster_is_listed(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, most: int
) -> None:
    """One line with the limit, the size and a remedy; no device of the cluster is listed for it."""

    def listed(*_: object, **__: object) -> None:
        raise AssertionError("the cluster is listed")

    monkeypatch.setattr("topoplan.cli.machine_options.cluster", listed)
    for servers in (12_500, most // 8 + 1):
        status, _, err = run(command.format(LARGE.format(servers)))
        assert (status, err.count("\n")) == (2, 1)
        assert f"at most {most:,} GPUs for " in err
        assert f", got {8 * servers:,} ({servers} x dgx-h100); " in err


def test_the_bound_alone_of_a_large_cluster_is_that_of_its_kinds(run: Run) -> None:
    """Above 1,024 GPUs by kind: 400 N / (2 (N - 1)) of N servers, as the list proves."""
    for servers in (33, 129, 12_500):
        status, out, _ = run(f"plan {LARGE.format(servers)} --nic-access direct --bound-only --json")
        assert (status, json.loads(out)["bound"]) == (0, pytest.approx(200 * servers / (servers - 1)))
    status, out, _ = run(f"plan {LARGE.format(129)} --nic-access direct --bound-only")
    assert (
        "1,032 GPUs of 129 servers, over NVLink and the network: at most 201.562 GB/s" in out.splitlines()[0]
    )
    status, _, err = run(f"plan {LARGE.format(129)} --bound-only --list s3")
    assert (status, "--list does not go with --bound-only" in err) == (2, True)


def test_chosen_gpus_of_a_large_cluster_are_listed(run: Run) -> None:
    """The number of chosen GPUs counts, and so does that of all that are read."""
    status, out, _ = run(f"recommend {LARGE.format(129)} --count 8 --free 0-7")
    assert (status, "all 8 GPUs" in out) == (0, True)


@pytest.mark.thorough
def test_gpus_of_a_large_cluster_are_chosen_by_shape(done: Done, told: Told, run: Run) -> None:
    """Whole servers are the fastest of 10,000 GPUs, proved for any set; GPUs taken out keep their numbers."""
    large = LARGE.format(1250)
    asked = f"recommend {large} --nic-access direct --count 1024"
    said = done(asked)
    assert "1,024 of 10,000 GPUs: 128 servers x 8 GPUs, no set is faster\n" in said
    assert "take         0-1023\n" in said
    found = told(f"{asked} --json")
    assert found["shapes"][0]["rate"] == pytest.approx(400 * 128 / (2 * 127))
    assert found["limit"] == found["shapes"][0]["rate"]
    assert [one["servers"] for one in found["shapes"]] == [128, 128, 256, 512, 1024][-len(found["shapes"]) :]
    assert found["times"][2]["busbw"] > found["times"][0]["busbw"]
    assert found["left"] == pytest.approx(400 * 1122 / (2 * 1121))
    part = told(f"{asked} --without-gpu 8 --json")
    assert part["free"] == 9999
    assert "8" not in part["shapes"][0]["gpus"].replace("-", ",").split(",")
    status, _, err = run(f"{asked} --without-gpu 8 --free 0-4000")
    assert (status, "GPU 8 is named by --free and by --without-gpu" in err) == (2, True)
    status, _, err = run(
        f"recommend {large} --count 64 --network dragonfly --group-size 125 --global-bandwidth 800Gb/s"
    )
    assert (status, "must have one in each group" in err) == (2, True)


def test_each_server_of_a_large_torus_has_an_environment_of_its_own(run: Run) -> None:
    """Server 17 of 8 x 8 is cabled to its neighbours in both dimensions, and the whole file has its part."""
    asked = "export dgx-h100 --nic-gbps 400 --network torus {} --to nccl-env"
    given = asked.format("--servers 64 --sides 8,8")
    status, alone, err = run(f"{given} --server s17")
    assert (status, "stock NCCL cannot start on these 64 cabled servers" in err) == (0, True)
    assert "# cables lead to s16, s18, s25, s9, and a merged NIC" in alone
    _, every, _ = run(given)
    own = every.partition("\ns17)\n")[2].partition("  ;;\n")[0]
    assert own
    assert [line.strip() for line in own.splitlines()] == alone.splitlines()[-len(own.splitlines()) :]
    assert every.count("NCCL_IB_SUBNET_AWARE_ROUTING=1") == 64
    status, _, err = run(asked.format("--servers 4096 --sides 64,64"))
    assert (status, "needs the list of its GPUs, at most 16,384, got 32,768" in err) == (2, True)


def test_a_mesh_of_a_large_cluster_is_planned_by_kinds_of_groups(
    done: Done, told: Told, run: Run, tmp_path: Path
) -> None:
    asked = f"plan {LARGE.format(250)} --mesh dp=250,tp=8"
    place = tmp_path / "mesh.json"
    said = done(f"{asked} -o {place}")
    assert "a mesh of dp 250 x tp 8, over NVLink and the network: provably optimal\n" in said
    assert "8 groups along dp and 250 groups along tp, all at once, of 9 kinds\n" in said
    found = told(f"{asked} --json")
    assert found["rate"] == found["bound"] == pytest.approx(48 * 250 / (2 * 249))
    assert [one["count"] for one in found["groups"]] == [*[1] * 8, 250]
    assert "tp 8, over NVLink: provably optimal\n" in done(f"{asked} --axes tp --channels nvlink+network")
    said = done(f"verify {place}")
    assert said.startswith(
        "valid: all_reduce on 250 x dgx-h100, a mesh of dp 250 x tp 8, 258 groups at once: prov"
    )
    assert "checked      every group is of one of 9 kinds; in each kind each contribution arrives" in said
    checked = told(f"verify {place} --json")
    assert (checked["rate"], checked["optimal"]) == (found["rate"], True)
    assert [one["count"] for one in checked["groups"]] == [*[1] * 8, 250]
    text = place.read_text()
    place.write_text(text.replace('"trees": 8', '"trees": 9'))
    status, _, err = run(f"verify {place}")
    assert (status, "wrong plan: group 8: claims trees 9; recomputed it is 8" in err) == (1, True)
    place.write_text(text.replace('"count": 250', '"count": 249'))
    status, _, err = run(f"verify {place}")
    assert (status, "group 8: its kind must have 250 groups, got 249" in err) == (1, True)
    with pytest.raises(PlanError, match="must have a plan for every group, got plans by kinds of groups"):
        topoplan.load_mesh(place)


def test_a_cluster_file_is_refused_like_the_options(run: Run, tmp_path: Path) -> None:
    value = {"servers": [{"machine": "dgx-h100", "count": 3_000}], "network": {"nic_gbps": 400}}
    place = tmp_path / "many.json"
    place.write_text(json.dumps({"format": "topoplan.cluster/1", "name": "many", **value}))
    for command, most in (
        ("report {} --in-network all -o r.html", 512),
        ("check {}", 16_384),
        ("testbed {}", 16_384),
    ):
        status, _, err = run(command.format(place))
        assert (status, f"at most {most:,} GPUs for " in err, ", got 24,000 (many); " in err) == (
            2,
            True,
            True,
        )


def test_the_topology_file_of_one_server_is_that_of_the_listed_cluster(done: Done) -> None:
    large, small = (done(f"export {LARGE.format(number)} --to nccl-topo --server s17") for number in (40, 20))
    assert large.replace("40 x", "20 x") == small


def test_tori_are_planned_and_compared_by_kind(done: Done, told: Told, run: Run, tmp_path: Path) -> None:
    asked = "dgx-h100 --servers 1250 --nic-bandwidth 400Gb/s --network torus --sides 25,50"
    place = tmp_path / "plan.json"
    said = done(f"plan {asked} --collective all_gather -o {place}")
    # 8 NICs of 48 GB/s: 384 x 1,250 / 1,249.
    assert "over NVLink and the network: provably optimal\nalgbw        384.307 GB/s" in said
    assert done(f"verify {place}").startswith(
        "valid: all_gather on 1250 x dgx-h100, 10,000 GPUs of 1,250 servers"
    )
    assert {row["gpu"] for row in told(f"plan {asked} --list s1249 --json")["server"]["gpus"]} == {
        f"s1249.gpu{gpu}" for gpu in range(8)
    }
    assert "network      torus, sides 25,50" in done(f"show {asked}")
    assert "not compared: its model needs switches between servers, or a torus" in done(f"compare {asked}")
    said = done(f"plan {asked} --collective broadcast --root 777")
    assert "provably optimal\nalgbw        384 GB/s" in said
    assert "the bottleneck is 8 ports that enter 1 server" in said
    for more in ("--without-link s0.nic0-s50.nic2", "--survive 1", "--collective broadcast --list s17"):
        status, _, err = run(f"plan {asked} {more}")
        assert (status, "--listed" in err, len(err.splitlines())) == (2, True, 1)
    # Both commands time the same plan.
    (listed,) = told(f"plan {asked} --collective all_gather --sizes 1MB --json")["times"]["points"]
    (timed,) = told(f"simulate {place} --sizes 1MB --json")["times"]
    assert timed["time"] == pytest.approx(1e6 * listed["seconds"], rel=1e-6)
    assert listed["bound_seconds"] > 37 * 36e-6


@pytest.mark.thorough
def test_a_torus_of_hosts_is_planned_by_kind_or_listed(done: Done) -> None:
    said = done("plan torus:17,16@10 --collective all_gather")
    assert said.startswith(
        "all_gather on torus:17,16, 272 GPUs of 272 servers, over the network: provably optimal\n"
    )
    listed = done("plan torus:17,16@10 --collective all_gather --listed")
    assert said.splitlines()[1] == listed.splitlines()[1]
    for options in ("--listed", "--without-link gpu0-gpu1", "--collective broadcast"):
        assert "(gpu0-271), over the network" in done(f"plan torus:17,16@10 {options}").splitlines()[0]
