"""Listings of `nvidia-smi nvlink -s` and `-R`: real ones, every form that drivers print, contradictions, damage."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.mutated_texts import mutated
from tests.support.nvlink_listings import Listings, wires_of
from topoplan.errors import TopologyError
from topoplan.reading.nvlink_status import GpuNvlinks, parse_nvlink_status

UUID = "GPU-0a1b2c3d-0000-0000-0000-00000000000"


def gpu_of(*lines: str, header: str = "GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-1)") -> GpuNvlinks:
    """The one GPU of a listing."""
    (gpu,) = parse_nvlink_status("\n".join([header, *lines]))
    return gpu


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
    assert sorted(Counter(link.remote for link in gpu.active).items()) == [
        ("0000:05:00.0", 4),
        ("0000:06:00.0", 5),
        ("0000:07:00.0", 5),
        ("0000:08:00.0", 4),
    ]
    assert (gpu.links[4].remote_link, gpu.links[4].speed, gpu.total) == (41, None, None)


@pytest.mark.parametrize(
    "value", ["<inactive>", "inactive", "N/A", "<N/A>", "Disabled", "0.000 GB/s", "0 GB/s"]
)
def test_every_word_for_a_link_that_is_down(value: str) -> None:
    """Drivers have said it in several ways; a link of no speed is down too."""
    gpu = gpu_of("Link 0: 25 GB/s", f"Link 1: {value}")
    assert [(link.index, link.speed) for link in gpu.active] == [(0, 25.0)]
    assert gpu.total == 2


def test_a_gpu_all_of_whose_links_are_down_lists_none() -> None:
    """The driver's sentence may stand below the GPU line or in it."""
    sentence = "NVML: Unable to retrieve NVLink information as all links are inActive"
    for text in (
        f"GPU 1: NVIDIA B200 (UUID: {UUID}1)\n{sentence}",
        f"GPU 1: NVIDIA B200 (UUID: {UUID}1) {sentence}",
    ):
        assert parse_nvlink_status(text) == (GpuNvlinks(1, "NVIDIA B200", f"{UUID}1", (), None),)


def test_a_gpu_without_nvlink_has_none() -> None:
    """Not Supported is no damage: the GPU has 0 links."""
    text = "GPU 0: NVIDIA RTX 4090\n\t NVML: Unable to retrieve NVLink information: Not Supported"
    assert parse_nvlink_status(text) == (GpuNvlinks(0, "NVIDIA RTX 4090", "", (), 0),)


def test_far_ends_that_are_hidden_are_up_and_unknown() -> None:
    """What NVML fills in for a switch that is not visible."""
    for device in ("FFFFFFFF:FF:FF.0", "FFFFFFFF:FFFF:FF.F"):
        (link,) = gpu_of(f"Link 0: Remote Device {device}: Link 255").links
        assert (link.active, link.remote, link.remote_link) == (True, "", None)


def test_far_ends_without_link_numbers_are_read() -> None:
    """As ``nvidia-smi nvlink -p`` prints them."""
    (link,) = gpu_of("Link 0: 00000000:0A:00.0").links
    assert (link.active, link.remote, link.remote_link) == (True, "0000:0a:00.0", None)


def test_both_listings_are_one_by_number() -> None:
    """A link that is down may still have a far end."""
    status = ["Link 0: 25 GB/s", "Link 1: <inactive>"]
    for far in ("<inactive>", "Remote Device <inactive>", "Remote Device 0000:09:00.0: Link 4"):
        remotes = ["Link 0: Remote Device 0000:08:00.0: Link 3", f"Link 1: {far}"]
        header = "GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-1)"
        gpu = gpu_of(*status, header, *remotes)
        assert gpu == gpu_of(*remotes, header, *status) == gpu_of(*status, *remotes)
        assert [(link.index, link.speed, link.remote, link.remote_link) for link in gpu.active] == [
            (0, 25.0, "0000:08:00.0", 3)
        ]


def test_links_that_r_numbers_anew_are_those_that_are_up() -> None:
    """Drivers leave inactive links out of -R and number the others from 0: link 4 there is link 6 of -s."""
    up = [0, 1, 2, 3, 6, 7]
    status = [f"Link {i}: {'26.562 GB/s' if i in up else '<inactive>'}" for i in range(8)]
    remotes = [f"Link {i}: Remote Device 0000:D5:00.0: Link {link}" for i, link in enumerate(up)]
    gpu = gpu_of(*status, "GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-1)", *remotes)
    assert [(link.index, link.remote_link) for link in gpu.active] == [(i, i) for i in up]


def test_what_is_not_of_links_is_skipped() -> None:
    """Comments, prompts, MIG devices, capabilities, colours, the legend of the matrix, a byte order mark."""
    plain = parse_nvlink_status("GPU 0: A100\n Link 0: 25 GB/s\nGPU 1: A100\n Link 0: <inactive>")
    dressed = (
        "\ufeff# GPU 0: nothing\n$ nvidia-smi nvlink -s\n\x1b[1mGPU 0: A100\x1b[0m\r\n  MIG 3g.20gb Device 0: "
        "(UUID: MIG-1)\r\n Link 0: 25 GB/s\r\n Link 0, P2P is supported: true\nGPU0  X   NV1\n\nGPU 1: A100\n"
        "# Link 0: 25 GB/s\n Link 0: <inactive>\nGPU 2: A100\nbye\n"
    )
    assert parse_nvlink_status(dressed) == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "this is not a listing of NVLinks (no line such as 'GPU 0: …'); give the whole output of nvidia-smi nvlink",
        ),
        ("     GPU0 GPU1\nGPU0  X   NV2\nGPU1 NV2   X", "this is the matrix of nvidia-smi topo -m"),
        ("<system/>", "this is not a listing of NVLinks"),
        ("GPU 0: V100\nGPU 1: V100", "no NVLink is listed below the GPU lines"),
        ("Link 0: 25 GB/s\nGPU 0: V100", "line 1 ('Link 0: 25 GB/s') precedes every GPU line"),
        (
            "NVML: Driver/library version mismatch",
            "line 1 ('NVML: Driver/library version mismatch') precedes",
        ),
        ("GPU 0: V100\nLink 0: fast GB/s", "GPU 0, link 0: speed must be a number of GB/s, got 'fast'"),
        ("GPU 0: V100\nLink 0: -25 GB/s", "GPU 0, link 0: speed must be a number of GB/s, got '-25'"),
        ("GPU 0: V100\nLink 0: 1e999 GB/s", "speed must be a number of GB/s, got '1e999'"),
        ("GPU 0: V100\nLink 0: Replay Errors: 0", "GPU 0, link 0: 'Replay Errors: 0' is neither a speed"),
        ("GPU 0: V100\nLink 0:", "GPU 0, link 0: '' is neither a speed"),
        ("GPU 0: V100\nLink 0: Remote Device nowhere", "'Remote Device nowhere' is neither"),
        ("GPU 0: V100\nLink 0: Remote Device 0:7.0: Link 1", "remote device '0:7.0' is not a PCI bus id"),
        (
            "GPU 0: V100\nLink 0: Remote Device 0:7:0.0: Link x",
            "GPU 0, link 0: remote link must be a number, got 'x'",
        ),
        ("GPU 0: V100\nLink 0: 25 GB/s\nLink 0: 25 GB/s", "GPU 0, link 0 is listed twice below one GPU line"),
        (
            "GPU 0: V100\nLink 0: 25 GB/s\nGPU 0: V100\nLink 0: <inactive>",
            "GPU 0, link 0: 25 GB/s in one listing, inactive in another; take the listings at one time",
        ),
        (
            "GPU 0: V100\nLink 0: Remote Device 0:7:0.0: Link 1\nGPU 0: V100\nLink 0: Remote Device 0:8:0.0: Link 1",
            "GPU 0, link 0: to 0000:07:00.0 in one listing, to 0000:08:00.0 in another",
        ),
        (
            "GPU 0: V100\nLink 0: 25 GB/s\nGPU 0: A100\nLink 0: 25 GB/s",
            "GPU 0 is named twice, as V100 and as A100",
        ),
        (
            "GPU 0: V100 (UUID: GPU-a)\nLink 0: 25 GB/s\nGPU 0: V100 (UUID: GPU-b)\nLink 0: 25 GB/s",
            "GPU 0 is named twice, as GPU-a and as GPU-b; give listings of one machine",
        ),
        (
            "GPU 0: V100\nLink 0: 25 GB/s\nNVML: all links are inActive",
            "GPU 0 has NVLinks that are up in one listing",
        ),
        ("GPU 2: V100\nNVML: GPU is lost", "GPU 2: the driver answered 'GPU is lost'; leave this GPU out"),
        (
            "GPU 0: V100\nLink 0: 25 GB/s\nLink 1: 25 GB/s\nLink 0: Remote Device 0:7:0.0: Link 1",
            "GPU 0: nvidia-smi nvlink -s lists 2 NVLinks that are up, nvidia-smi nvlink -R 1; take both at one time",
        ),
        (
            "GPU 0: V100\nLink 2: Remote Device 0:7:0.0: Link 1",
            "GPU 0: nvidia-smi nvlink -R lists links 2 and leaves out others; add nvidia-smi nvlink -s",
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, says: str) -> None:
    """The message names GPU, link and value, and what to do."""
    with pytest.raises(TopologyError) as caught:
        parse_nvlink_status(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_was_listed_is_read_back(data: st.DataObject) -> None:
    """Links that are up and down, and where those that are up lead, for any set of dead wires, numbered anew or not."""
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


SAMPLE = (
    Listings(topoplan.load("v100x4"), dead=wires_of(topoplan.load("v100x4"))[:2]).status()
    + Listings(topoplan.load("v100x4"), dead=wires_of(topoplan.load("v100x4"))[:2]).remotes()
)


WORDS = ("<inactive>", "GPU", "99:", "0.0", "\x1b[4m", "", "-1", "NVML:", "\0", "٣", "FFFF:FF")


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_listing_is_read_or_refused(data: st.DataObject) -> None:
    """Nothing but TopologyError, and an overlay of what was read is a topology or refused likewise."""
    with contextlib.suppress(TopologyError):
        gpus = parse_nvlink_status(mutated(SAMPLE, data, words=WORDS))
        assert gpus
        assert sorted({gpu.number for gpu in gpus}) == [gpu.number for gpu in gpus]
    with contextlib.suppress(TopologyError):
        topoplan.overlay(topoplan.load("v100x4"), mutated(SAMPLE, data, words=WORDS) + "\n")
