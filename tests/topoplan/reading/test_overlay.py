"""Listings of `nvidia-smi nvlink`: every form that drivers print, laid over a topology, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.machine_links import bundles
from tests.support.nvlink_listings import Listings, Wire, bus_ids, wires_of
from tests.support.refusals import refused
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.reading.nvlink_overlay import Sum, narrow_ranges
from topoplan.reading.nvlink_status import GpuNvlinks, parse_nvlink_status

UUID = "GPU-0a1b2c3d-0000-0000-0000-00000000000"


def test_the_real_degraded_v100_has_links_3_and_5_down(machines_dir: Path) -> None:
    """GPU 3, six links, four at 25.781 GB/s; its UUID is not spelled out."""
    path = machines_dir / "nvidia-smi" / "nvlink_s_v100_inactive_AZURE73.nvlink.txt"
    (gpu,) = parse_nvlink_status(path.read_text())
    assert (gpu.number, gpu.model, gpu.uuid, gpu.total) == (3, "Tesla V100-SXM2-32GB", "", 6)
    assert [link.index for link in gpu.links if not link.active] == [3, 5]
    assert {link.speed for link in gpu.active} == {25.781}


def test_the_real_h100_has_eighteen_links_into_four_switch_chips(machines_dir: Path) -> None:
    """Four or five into each chip; -R states no speed and no number of links that are down."""
    path = machines_dir / "nvidia-smi" / "nvlink_R_h100_NCCL1182.nvlink.txt"
    (gpu,) = parse_nvlink_status(path.read_text())
    chips = Counter(link.remote for link in gpu.active)
    assert chips == {f"0000:0{number}:00.0": count for number, count in ((5, 4), (6, 5), (7, 5), (8, 4))}
    assert (gpu.links[4].remote_link, gpu.links[4].speed, gpu.total) == (41, None, None)


def test_every_word_for_a_link_that_is_down() -> None:
    """Drivers have said it in several ways; a link of no speed is down too."""
    for value in ("<inactive>", "inactive", "N/A", "<N/A>", "Disabled", "0.000 GB/s", "0 GB/s"):
        (gpu,) = parse_nvlink_status(f"GPU 0: V100\nLink 0: 25 GB/s\nLink 1: {value}")
        assert ([(link.index, link.speed) for link in gpu.active], gpu.total) == ([(0, 25.0)], 2)


def test_gpus_without_links_that_are_up() -> None:
    """All down: the driver's sentence stands below the GPU line or in it. "Not Supported" means 0 links, not damage."""
    sentence = "NVML: Unable to retrieve NVLink information as all links are inActive"
    for end in (f"\n{sentence}", f" {sentence}"):
        (gpu,) = parse_nvlink_status(f"GPU 1: NVIDIA B200 (UUID: {UUID}1){end}")
        assert gpu == GpuNvlinks(1, "NVIDIA B200", f"{UUID}1", (), None)
    text = "GPU 0: NVIDIA RTX 4090\n\t NVML: Unable to retrieve NVLink information: Not Supported"
    assert parse_nvlink_status(text) == (GpuNvlinks(0, "NVIDIA RTX 4090", "", (), 0),)


@pytest.mark.parametrize(
    ("far", "remote"),
    [
        ("Remote Device FFFFFFFF:FF:FF.0: Link 255", ""),
        ("Remote Device FFFFFFFF:FFFF:FF.F: Link 255", ""),
        ("00000000:0A:00.0", "0000:0a:00.0"),
    ],
)
def test_far_ends_that_are_hidden_or_have_no_link_number_are_up(far: str, remote: str) -> None:
    """What NVML fills in for a switch that is not visible; and as ``nvidia-smi nvlink -p`` prints them."""
    ((link,),) = (gpu.links for gpu in parse_nvlink_status(f"GPU 0: V100\nLink 0: {far}"))
    assert (link.active, link.remote, link.remote_link) == (True, remote, None)


def test_what_is_not_of_links_is_skipped() -> None:
    """Comments, prompts, MIG devices, capabilities, colours, the legend of the matrix, a byte order mark."""
    plain = parse_nvlink_status("GPU 0: A100\n Link 0: 25 GB/s\nGPU 1: A100\n Link 0: <inactive>")
    dressed = (
        "\ufeff# GPU 0: nothing\n$ nvidia-smi nvlink -s\n\x1b[1mGPU 0: A100\x1b[0m\r\n  MIG 3g.20gb Device 0: "
        "(UUID: MIG-1)\r\n Link 0: 25 GB/s\r\n Link 0, P2P is supported: true\nGPU0  X   NV1\n\nGPU 1: A100\n"
        "# Link 0: 25 GB/s\n Link 0: <inactive>\nGPU 2: A100\nbye\n"
    )
    assert parse_nvlink_status(dressed) == plain


V100 = "GPU 0: V100\nLink 0: "
ONE, FAR = f"{V100}25 GB/s", f"{V100}Remote Device 0:7:0.0: Link 1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "not a listing of NVLinks (no line such as 'GPU 0: …'); give the whole output of nvidia-smi nvlink",
        ),
        ("     GPU0 GPU1\nGPU0  X   NV2\nGPU1 NV2   X", "this is the matrix of nvidia-smi topo -m"),
        ("<system/>", "this is not a listing of NVLinks"),
        ("GPU 0: V100\nGPU 1: V100", "no NVLink is listed below the GPU lines"),
        ("Link 0: 25 GB/s\nGPU 0: V100", "line 1 ('Link 0: 25 GB/s') precedes every GPU line"),
        ("NVML: Driver/library version mismatch", "line 1 ('NVML: Driver/library version mismatch')"),
        (f"{V100}fast GB/s", "GPU 0, link 0: speed must be a number of GB/s, got 'fast'"),
        (f"{V100}-25 GB/s", "GPU 0, link 0: speed must be a number of GB/s, got '-25'"),
        (f"{V100}1e999 GB/s", "speed must be a number of GB/s, got '1e999'"),
        (f"{V100}Replay Errors: 0", "GPU 0, link 0: 'Replay Errors: 0' is neither a speed"),
        (V100.strip(), "GPU 0, link 0: '' is neither a speed"),
        (f"{V100}Remote Device nowhere", "'Remote Device nowhere' is neither"),
        (f"{V100}Remote Device 0:7.0: Link 1", "remote device '0:7.0' is not a PCI bus id"),
        (f"{V100}Remote Device 0:7:0.0: Link x", "GPU 0, link 0: remote link must be a"),
        (f"{ONE}\nLink 0: 25 GB/s", "GPU 0, link 0 is listed twice below one GPU line"),
        (
            f"{ONE}\n{V100}<inactive>",
            "25 GB/s in one listing, inactive in another; take the listings at one time",
        ),
        (f"{FAR}\n{FAR.replace(':7:', ':8:')}", "to 0000:07:00.0 in one listing, to 0000:08:00.0 in"),
        (f"{ONE}\n{ONE.replace('V100', 'A100')}", "GPU 0 is named twice, as V100 and"),
        (
            "\n".join(ONE.replace("V100", f"V100 (UUID: GPU-{one})") for one in "ab"),
            "GPU 0 is named twice, as GPU-a and as GPU-b; give listings of one machine",
        ),
        (f"{ONE}\nNVML: all links are inActive", "GPU 0 has NVLinks that are up in one listing"),
        ("GPU 2: V100\nNVML: GPU is lost", "GPU 2: the driver answered 'GPU is lost'; leave this GPU out"),
        (
            f"{ONE}\nLink 1: 25 GB/s\nLink 0: Remote Device 0:7:0.0: Link 1",
            "GPU 0: nvidia-smi nvlink -s lists 2 NVLinks that are up, nvidia-smi nvlink -R 1; take both at one time",
        ),
        (FAR.replace("Link 0", "Link 2"), "GPU 0: nvidia-smi nvlink -R lists links 2"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, says: str) -> None:
    """The message names GPU, link and value, and what to do."""
    with refused(TopologyError, says):
        parse_nvlink_status(text)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_was_listed_is_read_back(data: st.DataObject) -> None:
    """Links that are up or down, and the far ends of those up, for any set of dead wires, numbered anew or not."""
    machine = topoplan.load(data.draw(st.sampled_from(["dgx-1v", "v100x4"])))
    dead = data.draw(st.sets(st.sampled_from(wires_of(machine))))
    listings = Listings(machine, dead, links=data.draw(st.integers(0, 8)))
    renumbered = data.draw(st.booleans())
    both = [listings.status(), listings.remotes(renumbered=renumbered)]
    read = parse_nvlink_status("".join(data.draw(st.permutations(both))))
    plain = parse_nvlink_status("".join([listings.status(), listings.remotes()]))
    assert read == plain
    up = Counter(end for wire in wires_of(machine) if wire not in dead for end in wire[:2])
    assert {f"gpu{gpu.number}": len(gpu.active) for gpu in read} == {gpu: up[gpu] for gpu in machine.gpus}
    assert all(link.remote and link.remote_link is not None for gpu in read for link in gpu.active)


V100S = topoplan.load("dgx-1v")
A100S = topoplan.load("dgx-a100")
FOUR = topoplan.load("v100x4")
HALF = Fraction(1, 2)


def on_bus(machine: Topology, busids: dict[str, str]) -> Topology:
    devices = [replace(device, busid=busids.get(device.name, "")) for device in machine.devices]
    return replace(machine, devices=tuple(devices))


def without_models(machine: Topology) -> Topology:
    return replace(machine, devices=tuple(replace(device, model="") for device in machine.devices))


def test_one_dead_wire_of_a_pair_leaves_the_other() -> None:
    """GPUs 0 and 3 of a DGX-1V list five of six links: AllReduce falls from 600/7 to 575/7 = 82.143 GB/s."""
    status = Listings(V100S, dead=[("gpu0", "gpu3", 1)], model="Tesla V100-SXM2-32GB").status()
    broken = topoplan.apply_nvlink_status(V100S, status)
    changed = {ends: links for ends, links in bundles(broken).items() if links != bundles(V100S)[ends]}
    assert changed == {("gpu0", "gpu3"): (1, 25.0), ("gpu3", "gpu0"): (1, 25.0)}
    assert broken.notes == (*V100S.notes, "taken out: 1 of 2 NVLinks gpu0-gpu3")
    assert topoplan.verify(topoplan.plan(broken)).exact_rate == Fraction(575, 7)


def test_dead_wires_into_a_switch_need_no_far_ends() -> None:
    """GPU 4 of a DGX H100 lists 16 of 18 links: 400 of 450 GB/s; all out-links 3550, each byte 14 times: 253.571."""
    machine = topoplan.load("dgx-h100")
    status = Listings(machine, dead=wires_of(machine)[72:74], model="NVIDIA H100 80GB HBM3").status([4])
    broken = topoplan.apply_nvlink_status(machine, status)
    assert bundles(broken)["gpu4", "nvswitch0"] == bundles(broken)["nvswitch0", "gpu4"] == (16, 400.0)
    assert broken.notes[-1] == "taken out: 2 of 18 NVLinks gpu4-nvswitch0"
    assert topoplan.compute_bound(broken).rate == pytest.approx(3550 / 14)


def test_slow_wires_into_a_switch_count_by_their_speed() -> None:
    """GPU 5 of a DGX A100, one link dead and three at half speed: 300 * (8 + 3/2) / 12 = 237.5 GB/s on 11 links."""
    wires = [wire for wire in wires_of(A100S) if "gpu5" in wire]
    listings = Listings(A100S, dead=wires[:1], speeds=dict.fromkeys(wires[3:6], HALF))
    broken = topoplan.apply_nvlink_status(A100S, listings.status())
    assert bundles(broken)["gpu5", "nvswitch0"] == (11, 237.5)
    assert broken.notes[-2:] == (
        "taken out: 1 of 12 NVLinks gpu5-nvswitch0",
        "slowed: gpu5-nvswitch0 to 237.5 GB/s (3 of 11 NVLinks)",
    )


@pytest.mark.parametrize(
    ("rate", "model", "bandwidth"),
    [("12.5", "NVIDIA A100", 150.0), ("22.6", "NVIDIA A100", 300.0), ("12.5", "GPU", 300.0)],
)
def test_all_links_at_half_the_nominal_rate_are_slow(rate: str, model: str, bandwidth: float) -> None:
    """No link of the listing is faster, but an A100 has 25 GB/s per link; a tenth below that is no damage."""
    listed = Listings(A100S, model=model).status().replace("25.781", rate)
    found = bundles(topoplan.apply_nvlink_status(A100S, listed))
    assert {whole for _, whole in found.values()} == {bandwidth}


def test_a_matrix_has_left_out_already_what_is_down() -> None:
    """Six links listed, four or five up, as many in the machine: nothing is left to take out, and the note says so."""
    status = Listings(FOUR, model="Tesla V100-SXM2-16GB", links=6).status()
    seen = topoplan.apply_nvlink_status(FOUR, status)
    assert seen.links == FOUR.links
    assert seen.notes[-1] == (
        "nvidia-smi nvlink: no NVLink of gpu0, gpu1, gpu2, gpu3 is dead or slow; inactive ones of gpu0, gpu1, gpu2, "
        "gpu3 are not among those of the machine"
    )


def test_a_gpu_all_of_whose_links_are_down_is_off_nvlink() -> None:
    """The driver's sentence takes out every NVLink of the GPU, leaves its PCIe, and of all GPUs the switch too."""
    sentence = "GPU 2: V100\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
    broken = topoplan.apply_nvlink_status(V100S, sentence)
    wires = [f"gpu2-gpu{other}" for other in (0, 1, 3, 6)]
    assert broken.links == topoplan.without_links(V100S, wires).links
    assert broken.notes[-1] == "taken out: link gpu0-gpu2, gpu1-gpu2, gpu2-gpu3, gpu2-gpu6"
    every = (sentence.replace("GPU 2: V100", f"GPU {gpu}: A100") for gpu in range(8))
    dark = topoplan.apply_nvlink_status(A100S, "".join(every))
    assert not bundles(dark)
    assert topoplan.load(dark.to_json()) == dark


def test_listings_may_come_in_several_files_of_one_gpu_each(tmp_path: Path) -> None:
    """As ``-i`` prints them, in any order, -s and -R apart."""
    listings = Listings(V100S, dead=[("gpu0", "gpu4", 0), ("gpu2", "gpu6", 0)])
    texts = {f"s{number}": listings.status([number]) for number in reversed(range(8))}
    texts |= {f"R{number}": listings.remotes([number], renumbered=True) for number in range(8)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    whole = topoplan.apply_nvlink_status(V100S, listings.status(), listings.remotes())
    assert topoplan.apply_nvlink_status(V100S, *(tmp_path / name for name in texts)) == whole


def test_far_ends_tell_by_bus_ids_that_the_topology_knows() -> None:
    """GPU 3 alone lists two links down; its far ends say that they lead to GPUs 0 and 7, in whatever order of ids."""
    listings = Listings(V100S, dead=[("gpu0", "gpu3", 0), ("gpu3", "gpu7", 0)], model="Tesla V100-SXM2-32GB")
    text = listings.status([3]) + listings.remotes([3], renumbered=True)
    known = on_bus(V100S, bus_ids(V100S))
    assert topoplan.apply_nvlink_status(known, text).links == listings.damaged().links
    swapped = bus_ids(V100S) | {"gpu0": bus_ids(V100S)["gpu1"], "gpu1": bus_ids(V100S)["gpu0"]}
    found = topoplan.apply_nvlink_status(on_bus(V100S, swapped), text)
    assert bundles(V100S).keys() - bundles(found).keys() == {("gpu3", "gpu7"), ("gpu7", "gpu3")}


def test_wires_that_are_anyones_guess_are_refused_with_the_candidates() -> None:
    """One GPU of eight with two links down; four GPUs each with one, which two pairs of wires explain."""
    alone = Listings(V100S, dead=[("gpu0", "gpu3", 0), ("gpu3", "gpu7", 0)], model="Tesla V100-SXM2-32GB")
    square = Listings(V100S, dead=[("gpu0", "gpu1", 0), ("gpu4", "gpu5", 0)])
    one = "has 1 of 6 NVLinks down, "
    for listing, says in (
        (
            alone.status([3]),
            "gpu3 has 2 of 6 NVLinks down, and which is open: 0 to 2 of 2 gpu0-gpu3, 0 to 1 of 1 gpu1-gpu3, 0 to 2 "
            "of 2 gpu2-gpu3, 0 to 1 of 1 gpu3-gpu7; add nvidia-smi nvlink -R of all GPUs, which states where each "
            "link leads",
        ),
        (
            square.status(),
            f"gpu0 {one}gpu1 {one}gpu4 {one}gpu5 {one}and which is open: 0 to 1 of 1 gpu0-gpu1, 0 to 1 of 2 "
            "gpu0-gpu4, 0 to 1 of 2 gpu1-gpu5, 0 to 1 of 1 gpu4-gpu5; add nvidia-smi nvlink -R",
        ),
    ):
        with refused(TopologyError, begins=says):
            topoplan.apply_nvlink_status(V100S, listing)
    both = topoplan.apply_nvlink_status(V100S, square.status(), square.remotes())
    assert both.links == square.damaged().links


def test_real_listings_fit_real_and_library_machines_or_are_refused(machines_dir: Path) -> None:
    """The V100's: on a DGX-1V it is open which two wires are dead. Eighteen links up are those of an HGX H100."""
    folder = machines_dir / "nvidia-smi"
    v100 = folder / "nvlink_s_v100_inactive_AZURE73.nvlink.txt"
    h100 = folder / "nvlink_R_h100_NCCL1182.nvlink.txt"
    matrix = topoplan.load(folder / "dgx1_v100.txt")
    for machine, listing, says in (
        (matrix, v100, "gpu3 has 2 of 6 NVLinks down, and which is open"),
        (
            topoplan.load("dgx-h100"),
            v100,
            "GPU 3 is 'Tesla V100-SXM2-32GB' in the listing and 'H100' in dgx-h100",
        ),
        (matrix, h100, "GPU 0 lists 18 NVLinks that are up, and dgx1_v100 gives it 6"),
    ):
        with refused(TopologyError, says):
            topoplan.apply_nvlink_status(machine, listing)
    dgx_2 = topoplan.apply_nvlink_status(topoplan.load("dgx-2"), v100)
    assert bundles(dgx_2)["gpu3", "nvswitch0"] == (4, 100.0)
    hgx = topoplan.load(folder / "hgx_h100x8.txt")
    assert topoplan.apply_nvlink_status(hgx, h100).links == hgx.links


def pair(**changes: object) -> Topology:
    """Two GPUs with two wires between them, as a probe describes them."""
    first = {"busid": "0000:07:00.0", "facts": facts(uuid="GPU-aa", sm=70)} | changes
    devices = (Device("gpu0", "gpu", **first), Device("gpu1", "gpu", busid="0000:08:00.0"))  # type: ignore[arg-type]
    links = (Link("gpu0", "gpu1", "nvlink", 50, 2), Link("gpu1", "gpu0", "nvlink", 50, 2))
    return Topology("pair", devices, links)


TWO_UP = "Link 0: 25 GB/s\nLink 1: 25 GB/s\n"
TWELVE_DOWN = "".join(f"Link {i}: <inactive>\n" for i in range(12))


@pytest.mark.parametrize(
    ("machine", "listing", "says"),
    [
        (pair(), f"GPU 0: V100 (UUID: GPU-bb)\n{TWO_UP}", "GPU 0 is GPU-bb in the listing and GPU-aa in"),
        (pair(), f"GPU 0: A100\n{TWO_UP}", "GPU 0 is 'A100' in the listing and has compute capability 70"),
        (pair(model="P100"), f"GPU 0: V100\n{TWO_UP}", "GPU 0 is 'V100' in the listing and 'P100' in pair"),
        (pair(), f"GPU 2: V100\n{TWO_UP}", "GPU 2 is in the listing, but the GPUs of pair are gpu0 to gpu1"),
        (pair(), "GPU 0: V100\nLink 0: 25 GB/s\n", "GPU 0 lists 1 NVLinks, and pair gives it 2"),
        (pair(), f"GPU 0: V100\n{TWO_UP}Link 2: 25 GB/s\n", "GPU 0 lists 3 NVLinks that are up, and pair"),
        *(
            (pair(), f"GPU 0: {model}\n{TWELVE_DOWN}", f"GPU 0 lists 12 NVLinks, and a {model} has only 6")
            for model in ("V100", "Quadro GV100")
        ),
        (
            pair(),
            f"GPU 0: V100\n{TWO_UP}GPU 1: V100\nLink 0: 25 GB/s\nLink 1: <inactive>\n",
            "gpu1 lists 1 NVLinks to gpu0 that are up, and gpu0 lists 2 back; take all listings at one time",
        ),
        (
            topoplan.cluster([topoplan.Server(V100S, count=2)], nic_gbps=100),
            Listings(V100S).status(),
            "2 servers, and a listing of NVLinks is of one",
        ),
        (
            topoplan.without_links(V100S, ["gpu0->gpu1"]),
            Listings(V100S).status(),
            "dgx-1v has 0 NVLinks gpu0->gpu1 and 1 gpu1->gpu0",
        ),
        (
            FOUR,
            Listings(FOUR, dead=wires_of(FOUR)[:1]).status([0]) + Listings(FOUR).status([1, 2, 3]),
            "gpu0 has 1 of 4 NVLinks down, which fits no set of wires of v100x4, as a wire has two ends",
        ),
        (
            on_bus(FOUR, bus_ids(FOUR)),
            Listings(FOUR).status() + Listings(FOUR).remotes().replace(":07:", ":66:"),
            "lists an NVLink to 0000:66:00.0, a bus id that v100x4 does",
        ),
        (
            V100S,
            Listings(V100S).remotes().replace(":07:", ":08:").replace(":10:", ":07:").replace(":08:", ":10:"),
            "the listing is of another machine",
        ),
    ],
)
def test_a_machine_and_an_overlay_of_different_machines(machine: Topology, listing: str, says: str) -> None:
    """UUID, model, compute capability, GPU numbers, link numbers and far ends must fit; one line says which do not."""
    with refused(TopologyError, says):
        topoplan.apply_nvlink_status(machine, listing)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """No file, a folder, or no text; the name of the file stands before what is wrong with its content."""
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\0\1")
    empty.write_bytes(b"")
    for place, error, says in (
        (tmp_path / "no", UsageError, "cannot be read"),
        (tmp_path, UsageError, "cannot"),
        (binary, UsageError, "binary"),
        (empty, TopologyError, f"{empty}: this is not a listing of NVLinks"),
    ):
        with refused(error, says):
            topoplan.apply_nvlink_status(V100S, place)
    assert topoplan.apply_nvlink_status(V100S) == V100S


@st.composite
def damages(draw: st.DrawFn, machine: Topology) -> Listings:
    """Up to six wires dead and up to three at some share of their speed."""
    wires = wires_of(machine)
    dead = draw(st.sets(st.sampled_from(wires), max_size=6))
    slow = draw(st.sets(st.sampled_from(wires), max_size=3)) - dead
    shares = {wire: draw(st.sampled_from([HALF, Fraction(3, 4)])) for wire in sorted(slow)}
    return Listings(machine, dead, shares, links=draw(st.sampled_from([0, 12, 18])))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["dgx-1v", "mi250", "v100x4", "nvlink-x4"]), st.booleans())
def test_full_listings_give_the_damaged_machine_back(data: st.DataObject, name: str, known: bool) -> None:
    """-s and -R of all GPUs tell every wire, with the bus ids of the machine known or not."""
    machine = without_models(topoplan.load(name))
    listings = data.draw(damages(machine))
    renumbered = data.draw(st.booleans())
    text = listings.status() + listings.remotes(renumbered=renumbered)
    seen = topoplan.apply_nvlink_status(on_bus(machine, bus_ids(machine)) if known else machine, text)
    assert seen.links == listings.damaged().links


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["dgx-1v", "mi250", "v100x4"]))
def test_what_is_read_from_numbers_alone_is_never_wrong(data: st.DataObject, name: str) -> None:
    """-s of some GPUs, and -R of some, gives the damage that these GPUs have, or is refused as open."""
    machine = without_models(topoplan.load(name))
    gpus = sorted(data.draw(st.sets(st.integers(0, len(machine.gpus) - 1), min_size=1)))
    wires = [wire for wire in wires_of(machine) if {machine.gpus[i] for i in gpus} & set(wire[:2])]
    dead = data.draw(st.sets(st.sampled_from(wires), max_size=4))
    listings = Listings(machine, dead)
    told = sorted(data.draw(st.sets(st.sampled_from(gpus))))
    text = listings.status(gpus) + (listings.remotes(told) if told else "")
    try:
        seen = topoplan.apply_nvlink_status(machine, text)
    except TopologyError as error:
        assert "which is open" in str(error)  # noqa: PT017
    else:
        assert seen.links == listings.damaged().links


Puzzle = tuple[list[tuple[int, int]], list[Sum], list[Sum]]
"""Ranges, sums and rooms of `narrow_ranges`."""


@st.composite
def puzzles(draw: st.DrawFn) -> Puzzle:
    """Small ones that have a solution, and some that have none."""
    ends = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
    wires = [draw(st.integers(1, 2)) for _ in ends]
    levels = draw(st.integers(1, 2))
    sums = []
    for gpu in sorted(draw(st.sets(st.integers(0, 3)))):
        bundles = [i for i, pair in enumerate(ends) if gpu in pair]
        sums += [([i * levels + k for i in bundles], draw(st.integers(0, 2))) for k in range(levels)]
    ranges = [(0, most) for most in wires for _ in range(levels)]
    for i in range(len(ends)):
        if draw(st.integers(0, 5)) == 0:
            ranges[i * levels : (i + 1) * levels] = [(1, 1)] + [(0, 0)] * (levels - 1)
    return ranges, sums, [(range(i * levels, (i + 1) * levels), most) for i, most in enumerate(wires)]


def solutions(puzzle: Puzzle) -> list[tuple[int, ...]]:
    """All of them, by trying every table."""
    ranges, sums, rooms = puzzle
    return [
        table
        for table in product(*(range(low, high + 1) for low, high in ranges))
        if all(sum(table[e] for e in entries) == total for entries, total in sums)
        and all(sum(table[e] for e in entries) <= most for entries, most in rooms)
    ]


@settings(max_examples=100, deadline=None)
@given(puzzles())
def test_what_is_narrowed_holds_for_all_solutions(puzzle: Puzzle) -> None:
    """No solution is cut off, by enumeration; where every range is one number it is the one solution."""
    every = solutions(puzzle)
    ranges, sums, rooms = puzzle
    if not narrow_ranges(ranges, sums, rooms):
        assert every == []
        return
    assert all(low <= one <= high for table in every for one, (low, high) in zip(table, ranges, strict=True))
    if all(low == high for low, high in ranges):
        assert every == [tuple(low for low, _ in ranges)]


def test_what_sums_leave_open_stays_open_and_long_chains_end() -> None:
    """Six GPUs in a ring with two of four wires dead each; a chain of 400 whose every link follows from the last."""
    ranges = [(0, 2)] * 6
    assert narrow_ranges(ranges, [((i, (i + 1) % 6), 2) for i in range(6)], [])
    assert ranges == [(0, 2)] * 6
    chain = [(0, 2)] * 400
    assert narrow_ranges(chain, [((i, i + 1), 2) for i in reversed(range(399))] + [((0,), 1)], [])
    assert chain == [(1, 1)] * 400


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["plan", "show", "compare", "simulate"])
def test_every_command_that_takes_a_machine_takes_an_overlay(command: str, tmp_path: Path, run: Run) -> None:
    """Given twice, -s and -R; the notes say what was found, and what cannot be is one line and status 2."""
    wires: list[Wire] = [("gpu0", "gpu1", 0), ("gpu4", "gpu5", 0)]
    listings = Listings(V100S, dead=wires)
    status, remotes = tmp_path / "s.txt", tmp_path / "R.txt"
    status.write_text(listings.status())
    remotes.write_text(listings.remotes(renumbered=True))
    asked = (command, "dgx-1v", "--overlay", str(status))
    code, out, _ = run(*asked, "--notes", "--overlay", str(remotes))
    assert code == 0
    assert "taken out: link gpu0-gpu1, gpu4-gpu5" in out
    code, out, err = run(*asked)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"topoplan {command}: error: {status}: gpu0 has 1 of 6 NVLinks down" in err


def test_an_overlay_holds_for_every_server_of_a_cluster(tmp_path: Path, run: Run) -> None:
    """It is put on the machine before that becomes a cluster."""
    path = tmp_path / "s.txt"
    path.write_text(Listings(A100S, dead=wires_of(A100S)[:3]).status())
    cluster = ("dgx-a100", "--servers", "2", "--nic-bandwidth", "200Gb/s")
    code, out, _ = run("show", *cluster, "--overlay", str(path), "--json")
    assert code == 0
    links = bundles(topoplan.load(out))
    assert links["s0.gpu0", "s0.nvswitch0"] == links["s1.gpu0", "s1.nvswitch0"] == (9, 225.0)


@pytest.mark.parametrize("machine", [V100S, A100S], ids=lambda one: str(one.name))
def test_what_a_machine_states_as_slow_already_is_not_slowed_twice(machine: Topology) -> None:
    """As a probe of the broken machine does: its own listing changes nothing more."""
    first, second, *_ = wires_of(machine)
    listings = Listings(machine, dead=[second], speeds={first: HALF})
    listed = (listings.status(), listings.remotes())
    broken = topoplan.apply_nvlink_status(machine, *listed)
    assert bundles(broken) == bundles(listings.damaged())
    assert bundles(topoplan.apply_nvlink_status(broken, *listed)) == bundles(broken)


def test_far_ends_alone_say_nothing_of_speeds() -> None:
    note = "nvidia-smi nvlink: no NVLink of gpu0, gpu1, gpu2, gpu3 is dead"
    whole = Listings(FOUR)
    for listing, end in ((whole.status(), " or slow"), (whole.remotes(), " (speeds are not listed)")):
        assert topoplan.apply_nvlink_status(FOUR, listing).notes[-1] == note + end


def test_an_overlay_belongs_to_a_machine(tmp_path: Path, run: Run) -> None:
    """A plan file has settled its machine; a listing is none."""
    plan, listing = tmp_path / "plan.json", tmp_path / "s.txt"
    plan.write_text(topoplan.plan(V100S, gpus=[0, 1]).to_json())
    listing.write_text(Listings(V100S).status())
    for command, told in (
        (("simulate", str(plan), "--overlay", "-"), "--overlay does not go with a plan file"),
        (("plan", str(listing)), "give it to --overlay, and the machine itself"),
    ):
        code, _, err = run(*command)
        assert (code, err.count("\n"), told in err) == (2, 1, True)
