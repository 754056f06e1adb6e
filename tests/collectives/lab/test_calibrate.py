"""``topoplan calibrate`` from the first copy to the file, on a fake CuPy: numbers come back, errors are one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import topoplan
from collectives.lab import calibrate_command
from collectives.lab.peer_copies import PeerCopies
from tests.support import fake_cupy
from tests.support.tool_outputs import NVBANDWIDTH, P2P, TOPO
from topoplan.cli.main import main
from topoplan.errors import ProbeError
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.fit import Measurement

V100S = topoplan.load("dgx-1v")
MIB = 1 << 20
SIZES = (1 << 16, MIB, 1 << 24, 1 << 28)

Calibrate = Callable[..., str]


def machine(wires: Topology = V100S, **settings: object) -> fake_cupy.Machine:
    gpus = list(wires.gpus)
    return fake_cupy.Machine(wires, gpus, [f"0000:{6 + i:02x}:00.0" for i in range(len(gpus))], **settings)  # type: ignore[arg-type]


def with_bus_ids(topology: Topology) -> Topology:
    number = {name: i for i, name in enumerate(topology.gpus)}
    return replace(
        topology,
        devices=tuple(
            replace(device, busid=f"00000000:{6 + number[device.name]:02X}:00.0")
            if device.name in number
            else device
            for device in topology.devices
        ),
    )


def bandwidths(topology: Topology) -> dict[tuple[str, str, str], float]:
    return {(link.src, link.dst, link.channel): link.bandwidth for link in topology.links}


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Calibrate:
    """Run the command on a fake machine; what it holds is given back, whatever happens."""

    def call(driven: fake_cupy.Machine, *arguments: str, status: int = 0) -> str:
        fake_cupy.install(monkeypatch, driven)
        enabled = set(driven.enabled)
        capsys.readouterr()
        assert main(["calibrate", *arguments]) == status
        out, err = capsys.readouterr()
        assert (driven.held, driven.enabled) == ({}, enabled)
        assert (out if status else err) == ""
        return str(err if status else out)

    return call


def measured(driven: fake_cupy.Machine, patch: pytest.MonkeyPatch, **options: Any) -> Measurement:
    fake_cupy.install(patch, driven)
    given = {"gpus": None, "progress": None, **options}
    return PeerCopies(clock=driven.clock).measure(V100S, sizes=SIZES, repeats=3, **given)


def test_nominal_links_keep_their_rate(calibrate: Calibrate, tmp_path: Path) -> None:
    """Every bandwidth comes back to the last digit, latencies too; AllReduce stays at 600/7 GB/s."""
    path = tmp_path / "measured.json"
    assert calibrate(machine(), "dgx-1v", "-o", str(path)).endswith(f"written: {path}\n")
    made = topoplan.load(path)
    assert bandwidths(made) == bandwidths(V100S)
    assert {link.latency for link in made.links if link.channel == "nvlink"} == {1e-5}
    assert [gpus for gpus, _ in made.peer_access] == [2, 3, 4, 5, 6, 7, 8]
    assert topoplan.verify(topoplan.plan(made)).exact_rate == Fraction(600, 7)


def test_a_link_at_half_speed_plans_as_with_slow_link(calibrate: Calibrate, tmp_path: Path) -> None:
    slow = topoplan.slow_links(V100S, {"gpu1-gpu2": 25})
    path = tmp_path / "measured.json"
    calibrate(machine(slow), "dgx-1v", "-o", str(path))
    rates = [topoplan.verify(topoplan.plan(one)).exact_rate for one in (topoplan.load(path), slow)]
    assert rates == [Fraction(575, 7)] * 2


def test_a_slow_pair_a_refused_pair_and_an_outlier_are_told(calibrate: Calibrate) -> None:
    driven = machine(
        topoplan.slow_links(V100S, {"gpu1->gpu2": 20}),
        refused={frozenset(("gpu0", "gpu3"))},
        alphas={("gpu4", "gpu7"): 1.2e-5},
        disturbed={(("gpu0", "gpu1"), MIB, 4): 3.0, (("gpu0", "gpu2"), MIB, 0): 9.0},
    )
    lines = calibrate(driven, "dgx-1v", "--sizes", "64KB:256MB", "--all").splitlines()
    assert lines[:2] == [
        "dgx-1v, 8 GPUs: 8 to 50 GB/s, of 56 directed pairs 2 off the median of their kind",
        "method       CuPy 13.0.0 (fake) peer copies, timed by events on the GPU that copies, 64KB to 256MB, median "
        "of 9",
    ]
    assert lines[4:9] == [
        "pair        channel  us out  us back  GB/s out  GB/s back  stated  outliers",
        "gpu0  gpu1  nvlink     10.0     10.0        25         25      25         1",
        "gpu0  gpu2  nvlink     10.0     10.0        25         25      25         0",
        "gpu0  gpu3  host       10.0     10.0        12         12      12         0",
        "gpu0  gpu4  nvlink     10.0     10.0        50         50      50         0",
    ]
    assert "gpu1  gpu2  nvlink     10.0     10.0        20         50      50         0" in lines
    assert "gpu4  gpu7  nvlink     12.0     10.0        50         50      50         0" in lines
    assert [line for line in lines if line.startswith("note:")] == [
        "note: calibrated: dgx-1v states no bus ids: GPUs taken in the order of CUDA",
        "note: calibrated: 40 of 66 links measured: each as fast as the fastest copy that crosses it",
        "note: calibrated: changed by more than 20%, GB/s: gpu1>gpu2 50 to 20",
        "note: calibrated: as stated, since narrower links held back all copies that cross them: gpu1>pcie0, "
        "pcie0>gpu1, gpu2>pcie1, pcie1>gpu2, pcie2>cpu1, cpu1>pcie2, gpu4>pcie2, pcie2>gpu4 and 8 more",
        "note: calibrated: as stated, since no copy crossed them: gpu0>gpu3, gpu3>gpu0, nic0>pcie0, pcie0>nic0, "
        "nic1>pcie1, pcie1>nic1, nic2>pcie2, pcie2>nic2 and 2 more",
        "note: calibrated: peer access refused, copied through the host, GB/s: gpu0>gpu3 12, gpu3>gpu0 12",
        "note: calibrated: NVLinks that no copy may use, kept as stated: gpu0-gpu3; plans leave them out; allow peer "
        "access to use them",
        "note: calibrated: 1 of 6552 copies off the median of their size, without effect: gpu0>gpu1 1MB repeat 4 "
        "(3x)",
        "note: calibrated: off the median of the pairs with such links: gpu1>gpu2 20 GB/s (usual: 50), gpu4>gpu7 "
        "12 us (usual: 10)",
    ]


def test_copies_through_the_host_are_timed_both_ways_at_once(calibrate: Calibrate, tmp_path: Path) -> None:
    """57 GB/s both ways of 43 each is a cap, 86 is none; pairs with peer access have no such copies."""
    wires = topoplan.load("rtx5090-x8-nopeer")
    pairs = {frozenset(one) for one in combinations(wires.gpus, 2)}
    for rate, cap in ((57.0, 57.0), (86.0, None)):
        out = tmp_path / f"{rate:g}.json"
        made = calibrate(
            machine(wires, refused=pairs, together=dict.fromkeys(pairs, rate)),
            *("rtx5090-x8-nopeer", "--sizes", "64KB:256MB", "-o", str(out)),
        )
        assert ("both directions of a link together" in made) == (cap is not None)
        links = topoplan.load(out).links
        caps = [link.shared for link in links if link.src in wires.gpus]
        assert caps == [cap and pytest.approx(cap, rel=0.01)] * 8
        assert topoplan.plan(out).rate == pytest.approx(57 / 3.5 if cap else 4 * 43 / 7, rel=0.01)


def test_copies_both_ways_that_do_not_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {frozenset(("gpu0", "gpu3")), frozenset(("gpu1", "gpu2"))}
    found = measured(machine(refused=pairs, together={frozenset(("gpu0", "gpu3")): 0.0}), monkeypatch)
    assert [one for one in found.notes if "both ways" in one] == [
        "copies gpu0<>gpu3 both ways at once did not end within 2 s"
    ]
    assert [one[:2] for one in found.together] == [("gpu1", "gpu2")]


def test_bus_ids_tell_gpus_apart(calibrate: Calibrate, tmp_path: Path) -> None:
    slow = topoplan.slow_links(V100S, {"gpu1-gpu2": 25})
    driven = machine(slow)
    driven.gpus.reverse()
    driven.bus_ids.reverse()
    stated, path = tmp_path / "stated.json", tmp_path / "measured.json"
    stated.write_text(with_bus_ids(V100S).to_json())
    calibrate(driven, str(stated), "-o", str(path))
    assert bandwidths(topoplan.load(path)) == bandwidths(slow)


def test_some_gpus_are_measured_alone(calibrate: Calibrate) -> None:
    slow = topoplan.slow_links(V100S, {"gpu1-gpu2": 25})
    made = json.loads(calibrate(machine(slow), "dgx-1v", "--gpus", "5,1,2", "--repeats", "3", "--json"))
    assert [(pair["src"], pair["dst"], pair["channel"]) for pair in made["pairs"]] == [
        ("gpu1", "gpu2", "nvlink"),
        ("gpu1", "gpu5", "nvlink"),
        ("gpu2", "gpu1", "nvlink"),
        ("gpu2", "gpu5", "pcie"),
        ("gpu5", "gpu1", "nvlink"),
        ("gpu5", "gpu2", "pcie"),
    ]
    assert [round(pair["bandwidth"], 4) for pair in made["pairs"]] == [25, 50, 25, 8, 50, 8]
    assert [pair["stated"] for pair in made["pairs"]] == [50, 50, 50, 8, 50, 8]
    assert (list(made["peer_access"]), made["memory"], made["repeats"]) == (["2", "3"], None, 3)
    assert topoplan.load(json.dumps(made["topology"])).links == tuple(
        replace(link, latency=made_link.latency)
        for link, made_link in zip(slow.links, topoplan.load(json.dumps(made["topology"])).links, strict=True)
    )


def test_one_gpu_has_its_memory_measured(calibrate: Calibrate, tmp_path: Path) -> None:
    """Bytes read and written both count; the topology gets a note and keeps its links."""
    path = tmp_path / "measured.json"
    out = calibrate(machine(V100S.subset([0]), memory_rate=800), "dgx-1v", "--gpus", "0", "-o", str(path))
    # Twice 256 MB in 681.1 us: 10 us, and 256 MB at 400 GB/s.
    note = (
        "calibrated: one GPU, no pair to measure; device memory copy 788.3 GB/s, bytes read and written "
        "both counted (gpu0, 256MB)"
    )
    assert f"note: {note}" in out.splitlines()
    made = topoplan.load(path)
    assert note in made.notes
    assert made.links == V100S.links


def test_switching_times_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """k (k - 1) calls off and as many on; a refused pair costs nothing, and of two such GPUs nothing is known."""
    driven = machine(refused={frozenset(("gpu0", "gpu1"))})
    found = measured(driven, monkeypatch)
    each = fake_cupy.ENABLE + fake_cupy.DISABLE
    assert [gpus for gpus, _ in found.peer_access] == [3, 4, 5, 6, 7, 8]
    assert [seconds for _, seconds in found.peer_access] == pytest.approx(
        [(k * (k - 1) - 2) * each for k in (3, 4, 5, 6, 7, 8)]
    )


def test_where_the_driver_allows_few_peers_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three peers at a time: four GPUs can be switched, and every pair still has its copies over NVLink."""
    driven = machine(most_peers=3)
    found = measured(driven, monkeypatch)
    assert [gpus for gpus, _ in found.peer_access] == [2, 3, 4]
    assert found.notes[1:] == (
        "peer access: switched between up to 4 GPUs, the driver allows no more peers at a time",
    )
    assert not any(pair.through_host for pair in found.pairs)
    assert driven.enabled == set()


ENDLESS = {
    (("gpu0", "gpu1"), "push"): 2.6,
    (("gpu1", "gpu0"), "pull"): 0.0,
    (("gpu0", "gpu3"), "push"): 0.0,
    (("gpu2", "gpu3"), "push"): 0.0,
    (("gpu2", "gpu3"), "pull"): 0.0,
    (("gpu4", "gpu3"), "push"): 2.6,  # over PCIe, as gpu0 to gpu5
    (("gpu0", "gpu5"), "push"): 0.0,
}
"""GB/s of accesses; 0 never ends."""


def test_both_accesses_are_measured_and_copies_that_never_end_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each after 2 s by the clock; what the copies show is in links and facts, and all other links are as stated."""
    driven, path = machine(rates=ENDLESS), tmp_path / "measured.json"
    told: list[tuple[float, str]] = []
    begun = 0.0

    def progress(text: str) -> None:
        nonlocal begun
        if text.startswith("copies"):
            begun = driven.now
        elif "end" in text:
            told.append((driven.now - begun, text))

    measured(driven, monkeypatch, progress=progress)
    names = ["push gpu0>gpu3", "push gpu0>gpu5", "pull gpu1>gpu0", "push gpu2>gpu3", "pull gpu2>gpu3"]
    assert [text for _, text in told] == [f"{name} did not end within 2 s" for name in names]
    assert all(2 <= seconds < 4.5 for seconds, _ in told)
    driven = machine(rates=ENDLESS)
    fake_cupy.install(monkeypatch, driven)
    monkeypatch.setattr(calibrate_command, "PeerCopies", lambda: PeerCopies(clock=driven.clock))
    assert main(["calibrate", "dgx-1v", "--all", "-o", str(path)]) == 0
    made = topoplan.load(path)
    links = {(one.src, one.dst): one for one in made.links if one.channel == "nvlink"}
    before = {(one.src, one.dst): one for one in V100S.links if one.channel == "nvlink"}
    differ = {ends: (one.bandwidth, one.push, one.pull) for ends, one in links.items() if one.access}
    assert differ == {
        ("gpu0", "gpu1"): (25, 2.6, 25),
        ("gpu1", "gpu0"): (25, 25, None),
        ("gpu0", "gpu3"): (50, None, 50),
    }
    assert before.keys() - links.keys() == {("gpu2", "gpu3")}
    assert all(one.bandwidth == before[ends].bandwidth for ends, one in links.items())
    facts = {one.name: dict(one.facts) for one in made.devices if one.kind == "gpu"}
    assert {name: known for name, known in facts.items() if known} == {
        "gpu3": {"pulls": "gpu4", "unreached": "gpu2"},
        "gpu5": {"pulls": "gpu0", "unwritten": "gpu0"},
    }
    notes = [note.removeprefix("calibrated: ") for note in made.notes]
    assert [note for note in notes if "end" in note or "differ," in note] == [
        *(f"{name} did not end within 2 s" for name in names),
        "peer access: not switched, since a copy has not ended",
        "push and pull differ, GB/s: gpu0>gpu1 push 2.6, pull 25, gpu0>gpu3 push never ends, pull 50, gpu0>gpu5 push "
        "never ends, pull 8, gpu1>gpu0 push 25, pull never ends, gpu4>gpu3 push 2.6, pull 8",
        "no copy ends, so links between the two are taken out: gpu2>gpu3",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert f"note: calibrated: {names[0]} did not end within 2 s" in lines
    assert "gpu3  gpu2  nvlink     10.0        -        50          -      50         0" in lines
    capsys.readouterr()
    again = machine(rates={key: rate for key, rate in ENDLESS.items() if key[0][0] != "gpu4"})
    fake_cupy.install(monkeypatch, again)
    monkeypatch.setattr(calibrate_command, "PeerCopies", lambda: PeerCopies(clock=again.clock))
    assert main(["calibrate", str(path), "--gpus", "3,4", "-o", str(path)]) == 0
    assert dict(topoplan.load(path).device("gpu3").facts) == {"unreached": "gpu2"}, "of measured pairs only"


def test_a_gpu_that_an_endless_copy_holds_up_is_not_blamed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other pairs are not measured, and said so; they are not said to never end."""
    driven = machine(rates={(("gpu0", "gpu3"), "pull"): 0.0}, held_up={"gpu3"})
    found = measured(driven, monkeypatch, gpus=[0, 1, 3])
    assert found.notes[1:] == (
        "pull gpu0>gpu3 did not end within 2 s",
        "not measured, since an earlier copy holds gpu3 up: gpu1>gpu3",
        "not measured, since an earlier copy holds gpu3 up: gpu3>gpu0",
        "not measured, since an earlier copy holds gpu3 up: gpu3>gpu1",
        "peer access: not switched, since a copy has not ended",
    )
    assert [pair.name for pair in found.pairs] == ["gpu0>gpu1", "gpu0>gpu3", "gpu1>gpu0"]


def test_peer_access_that_was_on_is_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (set(), {("gpu2", "gpu6")}):
        driven = machine(enabled={(0, 1), (2, 6), (7, 6)}, broken=broken)
        try:
            measured(driven, monkeypatch)
        except ProbeError:
            assert broken
        assert driven.enabled == {(0, 1), (2, 6), (7, 6)}
        assert driven.held == {}


def test_progress_names_pair_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = machine()
    told: list[str] = []
    measured(driven, monkeypatch, gpus=[0, 3, 6], progress=told.append)
    assert told[:2] == ["copies gpu0>gpu3, pair 1 of 6", "copies gpu0>gpu6, pair 2 of 6"]
    assert told[6:] == ["peer access of 2 of 3 GPUs", "peer access of 3 of 3 GPUs"]


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["calibrate", "dgx-1v"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return str(err)


def test_without_cupy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert refused(capsys) == (
        'topoplan calibrate: error: calibrate needs CuPy: pip install "topoplan[cuda12]"\n'
    )


def test_with_a_cupy_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CuPy frames its reason; the last line of it is told."""
    package = tmp_path / "cupy"
    package.mkdir()
    frame = "=" * 20
    text = (
        f"\\n{frame}\\nFailed to import CuPy.\\n\\nlibcuda.so.1: cannot open shared object file\\n{frame}\\n"
    )
    (package / "__init__.py").write_text(f'raise ImportError("{text}")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert refused(capsys) == (
        "topoplan calibrate: error: CuPy is installed but cannot be loaded: libcuda.so.1: cannot open shared "
        'object file; install the one for this driver: pip install "topoplan[cuda12]" or "topoplan[cuda13]"\n'
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("driven", "arguments", "message"),
    [
        (
            machine(
                failure=fake_cupy.CUDARuntimeError(35, "cudaErrorInsufficientDriver: driver is insufficient")
            ),
            ["dgx-1v"],
            "CUDA shows no GPU: cudaErrorInsufficientDriver: driver is insufficient; run calibrate on the machine "
            "that it is to measure, with its driver, and look at CUDA_VISIBLE_DEVICES",
        ),
        (
            fake_cupy.Machine(V100S, [], []),
            ["dgx-1v"],
            "CUDA shows no GPU; run calibrate on the machine that it is to measure, with its driver, and look at "
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            machine(broken={("gpu2", "gpu6")}),
            ["dgx-1v"],
            "copying gpu2>gpu6 failed: cudaErrorIllegalAddress: an illegal memory access was encountered; "
            "check for other users of the GPUs, or leave one out with --gpus",
        ),
        (
            machine(room=500 * MIB),
            ["dgx-1v"],
            "gpu0 has no room for two buffers of 256MB: cudaErrorMemoryAllocation: out of memory; choose smaller "
            "--sizes, or measure while nothing else runs",
        ),
        (
            machine(),
            ["dgx-2"],
            "CUDA shows 8 GPUs and dgx-2 has 16 without bus ids, so they cannot be matched; give the topology of "
            "topoplan probe, or --gpus with the visible ones",
        ),
        (
            machine(),
            ["dgx-1v", "--sizes", "1MB"],
            "--sizes 1MB: two or more sizes above zero are needed to tell latency from bandwidth, for example "
            "64KB:256MB",
        ),
        (
            machine(),
            ["dgx-1v", "--sizes", "0,1MB"],
            "--sizes 0B,1MB: two or more sizes above zero are needed to tell latency from bandwidth, for example "
            "64KB:256MB",
        ),
        (
            machine(),
            ["dgx-1v", "--sizes", "1,2,3"],
            "gpu0>gpu1: copies of up to 3B take 10 us whatever their size, which leaves their bandwidth open; "
            "choose larger sizes",
        ),
        (
            machine(),
            ["dgx-1v", "--repeats", "2"],
            "--repeats must be a number of repeats from 3 to 1000, got '2' (see topoplan calibrate --help)",
        ),
        (
            machine(),
            ["dgx-1v", "--gpus", "8"],
            "GPU 8 is out of range: dgx-1v has GPUs 0 to 7",
        ),
        (
            machine(),
            ["dgx-1v", "-o", "-", "--json"],
            "-o - and --json both print to stdout; leave one of them out",
        ),
        *(
            (
                machine(),
                [option, "20GB/s"],
                f"{option} belongs to TOPO; add TOPO, or leave {option} out",
            )
            for option in ("--nvlink-bandwidth", "--pcie-bandwidth", "--socket-bandwidth", "--merge")
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    calibrate: Calibrate, driven: fake_cupy.Machine, arguments: list[str], message: str
) -> None:
    assert calibrate(driven, *arguments, status=2) == f"topoplan calibrate: error: {message}\n"


def test_refuses_a_folder_as_output(calibrate: Calibrate, tmp_path: Path) -> None:
    driven = machine()
    message = calibrate(driven, "dgx-1v", "-o", str(tmp_path), status=2)
    assert (
        message == f"topoplan calibrate: error: cannot write {tmp_path}: it is a folder; name a file in it\n"
    )
    assert not driven.copies


def test_output_to_stdout_is_the_topology_alone(calibrate: Calibrate) -> None:
    made = topoplan.load(calibrate(machine(), "dgx-1v", "--repeats", "3", "-o", "-"))
    assert bandwidths(made) == bandwidths(V100S)


@pytest.mark.parametrize("text", [P2P, NVBANDWIDTH], ids=["p2pBandwidthLatencyTest", "nvbandwidth"])
def test_results_of_another_tool_are_written_into_the_machine(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links get the rate of the faster access, push and pull are kept apart, and latencies stay open."""
    topo, log, made = (tmp_path / name for name in ("topo.txt", "p2p.log", "made.json"))
    topo.write_text(TOPO)
    log.write_text(text)
    assert main(["calibrate", str(topo), "--results", str(log), "-o", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {(pair["src"], pair["dst"]): pair["bandwidth"] for pair in found["pairs"]}
    best = {("gpu0", "gpu1"): 51.2, ("gpu1", "gpu0"): 50.1} if text is P2P else dict(FETCHED)
    assert rates == best
    assert {pair["latency"] for pair in found["pairs"]} == {None}
    machine = topoplan.load(made)
    assert {link.latency for link in machine.links} == {None}
    assert machine.device("gpu0" if text is P2P else "gpu1").fact("pulls") == (
        "gpu1" if text is P2P else "gpu0"
    )
    assert any("2 of 2 rates are of routes of several links" in note for note in machine.notes)


FETCHED = {("gpu0", "gpu1"): 40.0, ("gpu1", "gpu0"): 41.0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--results {log}", "--results needs the machine"),
        ("dgx-1v --results {log} --gpus 0,1", "does not go with --results"),
        ("dgx-1v --results {topo}", "neither of p2pBandwidthLatencyTest nor of nvbandwidth"),
        ("{topo} --results {nine}", "give the machine that was measured"),
    ],
)
def test_results_of_another_machine_are_refused(
    words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("topo", TOPO), ("log", P2P), ("nine", NINE)):
        (tmp_path / name).write_text(text)
    line = words.format(**{name: tmp_path / name for name in ("topo", "log", "nine")})
    assert main(["calibrate", *line.split()]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


NINE = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n   D\\D 0 1 2\n" + "".join(
    f"  {gpu} 9.5 9.5 9.5\n" for gpu in range(3)
)
