"""Outputs of tools: recognised by content, read to a machine, rates or a run, and refused with one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

import topoplan
from tests.bench.mutations import outcome
from tests.support.refusals import refused
from tests.support.text_readers import Reader
from tests.support.tool_outputs import (
    ACCESS,
    AMD_SMI,
    DEVICES,
    HOSTS,
    INSPECTOR,
    LSPCI,
    LSPCI_TREE,
    LSTOPO,
    NVBANDWIDTH,
    P2P,
    PORTS,
    RCCL_CSV,
    READ,
    ROCM_SMI,
    TOPO,
    explained_logs,
    nvbandwidth_json,
    ras,
    record,
    tool_readers,
)
from topoplan.errors import TopologyError, TopoplanError, UsageError
from topoplan.machine.host_topology import both_ways
from topoplan.machine.topology import Device, Topology
from topoplan.operate.calibration.calibrated_topology import calibrated
from topoplan.operate.calibration.pair_results import measured_rates
from topoplan.operate.launch_files import hosts_of
from topoplan.reading.load import form_of, load
from topoplan.reading.nccl.job_reports import parse_ras
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.pair_matrices import parse_measured_rates


@pytest.mark.sampled
@pytest.mark.parametrize("reader", tool_readers(), ids=lambda reader: reader.name)
@pytest.mark.parametrize("number", [50, pytest.param(2000, marks=pytest.mark.thorough)])
def test_damaged_outputs_leave_no_traceback(reader: Reader, number: int) -> None:
    """The same texts in every run; whole ones are taken."""
    for text in reader.texts:
        reader.read(text)
    assert outcome(reader, range(number)).tracebacks == {}


@pytest.mark.thorough
@pytest.mark.parametrize("reader", explained_logs(), ids=lambda reader: reader.name)
@pytest.mark.parametrize("number", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_damaged_logs_are_explained_or_refused(reader: Reader, number: int) -> None:
    """`explain` takes whatever the parser of a log has accepted."""
    assert outcome(reader, range(number)).tracebacks == {}


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (TOPO, "nvidia-smi"),
        (TOPO + ACCESS, "nvidia-smi"),
        (ACCESS, "topo -p2p"),
        (PORTS, "ibdev2netdev"),
        (P2P, "p2pBandwidthLatencyTest"),
        (NVBANDWIDTH, "nvbandwidth"),
        (nvbandwidth_json(READ), "nvbandwidth.json"),
        (LSPCI, "lspci -vv"),
        (LSPCI_TREE, "lspci -tv"),
        (LSTOPO, "lstopo"),
        (AMD_SMI, "rocm-smi"),
        (ROCM_SMI, "rocm-smi"),
        (DEVICES, "jaccl"),
        (HOSTS, "jaccl"),
        (RCCL_CSV, "rccl.csv"),
        (INSPECTOR, "inspector"),
        (ras((7, 7)), "ras"),
        (topoplan.load("mi250").to_json(), "json"),
        ("<system version='1'>", "nccl"),
        ("hello", "nvidia-smi"),
        (" \n", ""),
    ],
)
def test_a_text_is_recognised_by_its_content(text: str, form: str) -> None:
    assert form_of("\ufeff\r\n" + text) == form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ACCESS, "nvidia-smi topo -m, and this one beside it"),
        (PORTS, "--merge to nvidia-smi topo -m"),
        (P2P, "topoplan calibrate TOPO --results FILE"),
        (NVBANDWIDTH, "topoplan calibrate TOPO --results FILE"),
        (nvbandwidth_json(READ), "topoplan calibrate TOPO --results FILE"),
        (INSPECTOR + "\n", "topoplan explain takes it as LOG"),
        (ras((7, 7)), "topoplan explain takes it as LOG"),
        (RCCL_CSV, "topoplan explain takes it as LOG"),
    ],
)
def test_a_text_that_states_no_machine_is_refused_with_the_command_that_takes_it(
    text: str, says: str
) -> None:
    with refused(TopoplanError, says):
        load(text)


def wires(machine: Topology) -> dict[tuple[str, str], tuple[float, int]]:
    return {(link.src, link.dst): (link.bandwidth, link.count) for link in machine.links}


def test_cables_of_jaccl_join_ports_by_name() -> None:
    machine = load(DEVICES)
    assert (machine.gpus, machine.servers) == (("s0.gpu0", "s1.gpu0", "s2.gpu0"), ("s0", "s1", "s2"))
    ports = {pair: rate for pair, rate in wires(machine).items() if "gpu" not in "".join(pair)}
    assert ports == {
        (src, dst): (10, 1)
        for ends in (
            ("s0.rdma_en3", "s1.rdma_en2"),
            ("s1.rdma_en4", "s2.rdma_en6"),
            ("s1.rdma_en5", "s2.rdma_en3"),
        )
        for src, dst in (ends, ends[::-1])
    }
    assert any("JACCL refuses these cables" in note for note in machine.notes)
    assert topoplan.plan(load(HOSTS, cable_gbps=5)).rate == 5
    assert hosts_of(load(HOSTS)) == ("mac1", "mac2")


def device_file(ranks: int, absent: set[tuple[int, int]]) -> str:
    return json.dumps(
        [
            [None if i == j or {(i, j), (j, i)} & absent else f"rdma_en{j}" for j in range(ranks)]
            for i in range(ranks)
        ]
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ranks", "absent", "rate", "jaccl"),
    [
        (4, {(0, 2), (1, 3)}, 40 / 3, "as a ring in rank order"),
        (4, set(), 20, "as a full mesh or as a ring in rank order"),
        (4, {(0, 1)}, 50 / 3, "refuses"),
        (6, {(0, 1)}, 28, "refuses"),
    ],
)
def test_plans_of_cabled_macs_have_the_known_rates(
    ranks: int, absent: set[tuple[int, int]], rate: float, jaccl: str
) -> None:
    """Optima of the linear program; a mesh that lost a cable is neither of the shapes that JACCL runs."""
    machine = load(device_file(ranks, absent))
    assert jaccl in machine.notes[0]
    assert float(topoplan.plan(machine).rate) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[null, null], [null, null]]", "every cell is null"),
        ("[[null, [], null], [null, null, null], [null, null, null]]", "every cell is null"),
        ('[[null, "a"], ["b"]]', "row 1 must have a cell for each of 2 ranks, got 1 cell"),
        ('[[null, "a", null], [null, null, "b"], [null, "c", null]]', "cells [0][1] and [1][0]"),
        ('[[null, ["a", "b"]], ["c", null]]', "got 2 devices and 1"),
        ('[["a", "b"], ["c", null]]', "cell [0][0] must be null"),
        ('[[null, 3], ["c", null]]', "cell [0][1] must be null, the name"),
        ('[[null, "a", "a"], ["b", null, "c"], ["d", "e", null]]', "rank 0 must name each device once"),
        ("[[null]]", "2 to 256 ranks, got 1"),
        (DEVICES[:40], "not JSON"),
        ('{"hosts": [{"ssh": "a"}, {"ssh": "b"}]}', "host 0 of the hostfile needs an rdma row"),
        ('[{"ssh": "a", "rdma": [null, "x"]}]', "2 to 256 ranks, got 1"),
    ],
)
def test_files_of_jaccl_that_state_no_cables_are_refused(text: str, says: str) -> None:
    with refused(TopologyError, says):
        load(text)


@pytest.mark.parametrize(
    ("text", "rates", "says"),
    [
        (TOPO, {"cable_gbps": 5}, "nvidia-smi topo -m does not take these bandwidths; leave out cable_gbps"),
        (
            LSPCI,
            {"pcie_gbps": 5, "nvlink_gbps": 5},
            "leave out nvlink_gbps (--nvlink-bandwidth) and pcie_gbps",
        ),
        (DEVICES, {"socket_gbps": 5}, "JACCL's device file does not take these bandwidths"),
    ],
)
def test_rates_without_effect_are_refused(text: str, rates: dict[str, float], says: str) -> None:
    with refused(UsageError, says):
        load(text, **rates)  # type: ignore[arg-type]


def test_directions_are_those_of_the_test_and_not_of_its_arrow() -> None:
    """A fetch of row 0 from column 1 carries data from 1 to 0; a store carries it from the row to the column."""
    rates = parse_measured_rates(NVBANDWIDTH)
    assert rates.push == {(0, 1): 2.6, (1, 0): 39}
    assert rates.pull == {(1, 0): 41, (0, 1): 40}
    rates = parse_measured_rates(P2P)
    assert (rates.push, rates.pull) == ({(0, 1): 51.2, (1, 0): 2.6}, {(1, 0): 50.1, (0, 1): 49.9})
    assert rates.busids == {0: "0000:03:00.0", 1: "0000:04:00.0"}
    assert parse_measured_rates(nvbandwidth_json(READ)).pull == {(1, 0): 41, (0, 1): 40}


def test_pairs_without_access_are_copied_through_the_host() -> None:
    barred = P2P.replace("     0\t     1     1", "     0\t     1     0").replace(
        "     1\t     1     1", "     1\t     0     1"
    )
    assert parse_measured_rates(barred).hosted == parse_measured_rates(barred).refused == {(0, 1), (1, 0)}
    alone = P2P[: P2P.index("Unidirectional P2P=Enabled")]
    assert parse_measured_rates(alone).push == {(0, 1): 11.2, (1, 0): 11.1}
    assert parse_measured_rates(alone).hosted == {(0, 1), (1, 0)}
    assert not parse_measured_rates(alone).refused


NO_PEERS = """P2P Connectivity Matrix
     D\\D     0     1     2
     0\t     1     0     0
     1\t     0     1     1
     2\t     0     1     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1      2
     0 900.00  43.00  43.00
     1  43.00 900.00  43.00
     2  43.00  43.00 900.00
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1      2
     0 900.00  43.00  43.00
     1  43.00 900.00  52.00
     2  43.00  52.00 900.00
Bidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1      2
     0 900.00  56.00  56.00
     1  56.00 900.00  56.00
     2  56.00  56.00 900.00
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\\D     0      1      2
     0 900.00  56.90  57.00
     1  56.80 900.00 103.00
     2  57.00 103.00 900.00
"""


def test_copies_both_ways_at_once_cap_the_links_of_gpus_and_refused_pairs_are_kept() -> None:
    """gpu0's link has 57 GB/s both ways together; those of gpu1 and gpu2 carry 103, their two directions alone."""
    rates = parse_measured_rates(NO_PEERS)
    assert rates.refused == {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert (rates.together[0, 1], rates.together[1, 0], rates.together[1, 2]) == (56.9, 56.9, 103)
    gpus = [Device(f"gpu{i}", "gpu", "s0") for i in range(3)]
    wires = [link for i in range(3) for link in both_ways(f"gpu{i}", "cpu0", "pcie", 64)]
    machine = Topology("three", (*gpus, Device("cpu0", "cpu", "s0")), tuple(wires))
    made = calibrated(machine, measured_rates(NO_PEERS, machine), date="2026-11-28")
    links = {(link.src, link.dst): link for link in made.topology.links}
    assert [links[f"gpu{i}", "cpu0"].shared for i in range(3)] == [57, None, None]
    assert [links[f"gpu{i}", "cpu0"].bandwidth for i in range(3)] == [43, 52, 52]
    assert links["cpu0", "gpu0"].shared == 57
    assert [made.topology.device(f"gpu{i}").fact("refused") for i in range(3)] == [
        "gpu1,gpu2",
        "gpu0",
        "gpu0",
    ]
    assert "calibrated: both directions of a link together, GB/s: gpu0-cpu0 57" in made.notes
    # Measured anew without a cap, and with access: both are gone.
    free = NO_PEERS.replace("     0\t     1     0     0", "     0\t     1     1     1").replace(
        "\t     0 ", "\t     1 "
    )
    free = re.sub(r"5[67]\.[0-9]0", "86.00", free)
    again = calibrated(made.topology, measured_rates(free, machine), date="2026-11-28").topology
    assert not again.half_duplex
    assert not any(device.facts for device in again.devices)


WAIVED = {"name": "device_to_device_memcpy_read_ce", "status": "Waived"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            P2P.replace("   D\\D     0      1\n     0 900.00  51.20", "   D\\D     0      1\n     0 51.20"),
            "diagonal",
        ),
        (P2P[: P2P.index("     1   2.60")], "must have rows 0 to 1, got 0"),
        (P2P.replace("51.20", "0.00"), "row 0, column 1 must be a rate above 0"),
        (P2P.replace("51.20", "nan"), "row 0, column 1 must be a rate above 0"),
        (P2P + P2P, "stands twice"),
        (P2P[: P2P.index("Unidirectional")], "must hold a Unidirectional table"),
        (NVBANDWIDTH[: NVBANDWIDTH.index(" 1     40.00")], "must have rows 0 to 1"),
        (NVBANDWIDTH.replace(" 0       N/A     41.00", " 0     41.00"), "is the diagonal missing"),
        (NVBANDWIDTH[: NVBANDWIDTH.index("Running device")], "device_to_device_memcpy test that passed"),
        (nvbandwidth_json(WAIVED), "was waived or failed: no GPU has peer access"),
        (nvbandwidth_json(READ, READ), "stands twice"),
        (nvbandwidth_json(READ)[:200], "not JSON"),
        ('{"nvbandwidth": {"error": "no driver", "testcases": 1}}', "no driver"),
        ("hello", "neither of p2pBandwidthLatencyTest nor of nvbandwidth"),
    ],
)
def test_matrices_with_missing_cells_are_refused(text: str, says: str) -> None:
    with refused(UsageError, says):
        parse_measured_rates(text)


def test_a_merged_table_of_access_stages_copies_over_pcie() -> None:
    machine = load(TOPO, merge=ACCESS)
    assert machine == load(TOPO + "\n" + ACCESS)
    assert all(machine.device(gpu).fact("peer_access") == "none" for gpu in machine.gpus)
    with refused(UsageError, "topo -p2p is of 2 GPUs, and dgx-1v has 8 GPUs"):
        load("dgx-1v", merge=ACCESS)
    with refused(TopologyError, "no row of GPU1"):
        load(TOPO, merge="\tGPU0\tGPU1\nGPU0\tX\tOK\n")


def test_nics_that_are_down_are_left_out() -> None:
    machine = load(TOPO, merge=PORTS)
    assert [device.fact("adapter") for device in machine.devices if device.kind == "nic"] == ["roceP2p1s0f1"]
    assert any("left out: rocep1s0f0" in note for note in machine.notes)
    with refused(UsageError, "names no NIC rocep1s0f0"):
        load("dgx-1v", merge=PORTS)
    with refused(TopologyError, "line 1 must be DEVICE port N"):
        load(TOPO, merge="a port 1 ==> b (Sideways)\n")


def test_lspci_gives_the_tree_and_the_lanes_of_both_ends() -> None:
    """An idle GPU counts by the rate of both ends; lanes that are lost stay lost, with a warning."""
    machine = load(LSPCI)
    rates = {
        link.src: link.bandwidth for link in machine.links if link.channel == "pcie" and link.dst == "pcie0"
    }
    assert {name: rates[name] for name in ("gpu0", "gpu1", "nic0")} == {"gpu0": 48, "gpu1": 24, "nic0": 48}
    assert "warning: PCIe device 0000:04:00.0: its PCIe link runs at x8, both ends have x16" in machine.notes
    assert [machine.device(name).busid for name in machine.gpus] == ["0000:03:00.0", "0000:04:00.0"]


def test_lspci_as_a_tree_gives_switches_and_says_what_it_lacks() -> None:
    machine = load(LSPCI_TREE, pcie_gbps=24)
    models = [machine.device(name).model for name in machine.gpus]
    assert models == ["H100 PCIe", "GeForce RTX 3090", "H100 PCIe"]
    assert {link.bandwidth for link in machine.links} == {24}
    assert {link.dst for link in machine.links if link.src in ("gpu0", "gpu1", "nic0")} == {"pcie0"}
    assert any("does not state the CPUs of 2 host bridges" in note for note in machine.notes)


def test_lstopo_gives_rates_as_nccl_counts_them_and_warns_of_idle_links() -> None:
    machine = load(LSTOPO)
    rates = {link.src: link.bandwidth for link in machine.links if link.channel == "pcie"}
    assert (rates["gpu0"], rates["gpu1"], rates["nic0"]) == (24, 3, 48)
    assert [machine.device(name).numa for name in machine.gpus] == [0, 1]
    assert next(device for device in machine.devices if device.kind == "nic").fact("adapter") == "mlx5_0"
    assert any("slow, as those of idle GPUs" in note for note in machine.notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LSPCI.replace("LnkSta", "Lnk"), "sudo lspci -vv"),
        (LSPCI.replace("NVIDIA", "Matrox"), "no GPU of NVIDIA or AMD"),
        (LSPCI + LSPCI, "0000:00:01.0 is listed twice"),
        (LSPCI.replace("secondary=02", "secondary=01"), "are both above bus 01"),
        (LSTOPO[:900], "cut or damaged"),
        (LSTOPO.replace("0302", "0604"), "no GPU"),
        (LSPCI_TREE.replace("NVIDIA", "Matrox"), "no GPU"),
    ],
)
def test_trees_without_gpus_or_lanes_are_refused(text: str, says: str) -> None:
    with refused(TopologyError, says):
        load(text)


def test_json_of_amd_gives_the_machine_of_its_tables() -> None:
    machine = load(AMD_SMI)
    assert wires(machine)["gpu0", "gpu1"] == (100, 2)
    assert machine.device("gpu1").busid == "0000:15:00.0"
    machine = load(ROCM_SMI)
    assert [machine.device(name).numa for name in machine.gpus] == [0, 0]
    assert {link.channel for link in machine.links} == {"pcie"}


def changed(text: str, change: Callable[[list[dict[str, list[dict[str, object]]]]], object]) -> str:
    value = json.loads(text)
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed(AMD_SMI, lambda gpus: gpus[0]["links"].pop(1)), "row 0000:05:00.0 has no 0000:15:00.0"),
        (changed(AMD_SMI, lambda gpus: gpus[0]["links"][1].update(weight=30)), "must be symmetric"),
        (changed(AMD_SMI, lambda gpus: gpus.pop()), "which the listing lacks"),
        (ROCM_SMI.replace("Link type", "Link"), "link types are missing"),
        (AMD_SMI[:300], "not JSON"),
    ],
)
def test_json_of_amd_with_missing_pairs_is_refused(text: str, says: str) -> None:
    with refused(TopologyError, says):
        load(text)


def test_csv_of_rccl_tests_has_the_figures_of_its_rows() -> None:
    """Older versions print a value more than the head names, which shifts all others by one."""
    (run,) = parse_perf_runs(RCCL_CSV)
    (row,) = run.rows
    assert (run.collective, run.stated, row.size) == ("allreduce", 8, 1 << 20)
    assert (row.timing.busbw, row.in_place.busbw if row.in_place else None) == (32.97, 33.37)
    named = RCCL_CSV.replace("collective,ranks", "collective,nodes,ranks")
    assert parse_perf_runs(named)[0].rows == run.rows
    (cut,) = parse_perf_runs(RCCL_CSV[:-20])
    assert "line 3: the row is cut" in cut.warnings[0]


def test_the_inspector_counts_the_rank_that_came_last() -> None:
    """The shortest time of each operation counts, and the median of each size; busbw is that of nccl-tests."""
    (run,) = parse_perf_runs(INSPECTOR)
    assert (run.collective, run.stated, run.warnings) == ("allreduce", 8, ())
    assert run.rows[0].timing.seconds == pytest.approx(400e-6)
    assert run.rows[0].timing.busbw == pytest.approx(1.75 * (1 << 24) / 400e-6 / 1e9)
    (gather,) = parse_perf_runs(
        "\n".join(record(rank, 1, 120, coll="AllGather", nbytes=1 << 20) for rank in range(8))
    )
    assert (gather.collective, gather.rows[0].size) == ("allgather", 8 << 20)
    assert gather.rows[0].timing.busbw == pytest.approx(7 * (1 << 20) / 120e-6 / 1e9)
    (one,) = parse_perf_runs(record(0, 1, 120) + "\n" + record(0, 2, 120)[:90])
    assert [text.split(":")[0] for text in one.warnings] == ["line 2", "communicator 0x1f"]
    with refused(UsageError, "no whole record"):
        parse_perf_runs(record(0, 1, 1).replace('"coll_exec_time_us": 1', '"coll_exec_time_us": 0'))


def test_ras_names_missing_ranks_and_those_behind() -> None:
    (found,) = parse_ras(ras((7, 7, 5))).communicators
    assert [(one.rank, one.state) for one in found.faulty] == [(3, "unresponsive")]
    assert [(rank.rank, name, count, most) for rank, name, count, most in found.lagging()] == [
        (2, "AllReduce", 5, 7)
    ]
    (sound,) = parse_ras(ras((7, 7), missing=0)).communicators
    assert (sound.faulty, list(sound.lagging())) == ((), [])
    with refused(UsageError, "not JSON"):
        parse_ras(ras((7, 7))[:-30])
    with refused(UsageError, "must list a communicator, got none"):
        parse_ras('{"communicators": []}')
    with refused(UsageError, "each of its 3 ranks once"):
        parse_ras(ras((7, 7)).replace('"rank": 1,', '"rank": 0,'))
