"""Figures of the windows engine: NCCL's own answers from them, which GPU has which, and files of measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import topoplan
from topoplan.errors import UsageError
from topoplan.machine.topology import Device, Topology
from topoplan.model.window_engine import BLACKWELL, HOPPER, EngineCosts, costs_of, joint_blocks, load_costs

MIB = 1 << 20


@pytest.mark.parametrize(("costs", "blocks", "microseconds"), [(HOPPER, 7, 94), (BLACKWELL, 12, 65)])
def test_nccl_answers_what_it_is_known_to(costs: EngineCosts, blocks: int, microseconds: float) -> None:
    """AllReduce of 16 MiB among 8 without multicast: its formula, with the fewest blocks within 2.5 % of 64."""
    bus_bytes = 2 * 16 * MIB * 7 / 8
    counts = np.arange(1, 65)
    rate = joint_blocks(counts, np.array(costs.peak / costs.allreduce_rate)) * costs.allreduce_rate * 1e9
    seconds = costs.launch + 3 * costs.hop + bus_bytes / rate - 1e-6
    few = int(np.argmax(seconds <= 1.025 * seconds[-1]))
    assert counts[few] == blocks
    assert seconds[few] * 1e6 == pytest.approx(microseconds, abs=0.6)


@pytest.mark.parametrize(
    ("costs", "packets", "others"), [(HOPPER, 4.5e-6, 7.8e-6), (BLACKWELL, 11e-6, 19.5e-6)]
)
def test_launch_and_hop_add_up_to_the_bases(costs: EngineCosts, packets: float, others: float) -> None:
    """A launch and one hop for packets; a launch and three for kernels between barriers."""
    assert costs.launch + costs.hop == pytest.approx(packets)
    assert costs.launch + 3 * costs.hop == pytest.approx(others)


def machine(*gpus: tuple[str, str]) -> Topology:
    """GPUs of these models and stated capabilities, on their own."""
    return Topology(
        "some",
        tuple(
            Device(f"gpu{number}", "gpu", model=model, facts=(("sm", sm),) if sm else ())
            for number, (model, sm) in enumerate(gpus)
        ),
        (),
    )


@pytest.mark.parametrize(
    ("gpus", "name", "blocks"),
    [
        ([("NVIDIA H200", "")], "Hopper", 1),
        ([("", "90")], "Hopper", 1),
        ([("B200", "")], "Blackwell", 1),
        ([("", "103")], "Blackwell", 1),
        ([("B200", ""), ("H100", "")], "Hopper", 1),
        ([("H100", ""), ("A100", "")], "Hopper", 24),
        ([("", "")], "Hopper", 24),
    ],
)
def test_the_oldest_gpu_decides(gpus: list[tuple[str, str]], name: str, blocks: int) -> None:
    """A stated capability comes before the model; what is older than all figures takes Hopper's and all blocks."""
    costs, words = costs_of(machine(*gpus))
    assert (costs.name, costs.fewest_blocks) == (name, blocks)
    assert ("assumed" in words) == (blocks == 24)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    made = replace(HOPPER, name="mine", source="a sweep", hop=2e-6, fewest_blocks=4)
    path.write_text(made.to_json())
    assert load_costs(path) == made


def test_what_may_be_left_out(tmp_path: Path) -> None:
    """The price of packets and the fewest blocks."""
    path = tmp_path / "costs.json"
    value = json.loads(HOPPER.to_json())
    del value["packet_factor"], value["fewest_blocks"]
    path.write_text(json.dumps(value))
    assert load_costs(path) == HOPPER


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "topoplan.engine-costs/2", "format 'topoplan.engine-costs/2' is not 'topoplan.engine-costs/1'"),
        ("hop", None, "hop"),
        ("hop", "fast", "hop"),
        ("hop", 0, "hop 0 must be a number above zero"),
        ("launch", -1e-6, "launch -1e-06 must be a number above zero"),
        ("peak", float("inf"), "peak inf must be a number above zero"),
        ("peak", 10**400, "peak of more than 19 digits must be a number above zero"),
        ("other_rate", float("nan"), "other_rate nan must be a number above zero"),
        ("fewest_blocks", 25, "fewest_blocks 25 must be a whole number from 1 to 24"),
        ("fewest_blocks", 1.5, "fewest_blocks"),
        ("hops", 1e-6, "key 'hops' is unknown; did you mean 'hop'?"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path: Path, key: str, value: object, message: str) -> None:
    """One line that begins with the file and names the key."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**json.loads(HOPPER.to_json()), key: value}))
    with pytest.raises(UsageError) as caught:
        load_costs(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Missing, binary, no JSON, no object, and one key short."""
    path = tmp_path / "costs.json"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_costs(path)
    for content in (b"\xff\xfe", b"{", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is not JSON"):
            load_costs(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="format None is not"):
        load_costs(path)
    value = json.loads(HOPPER.to_json())
    del value["hop"]
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="has no 'hop'"):
        load_costs(path)


def test_machines_of_the_library_have_figures() -> None:
    names = ("dgx-h100", "dgx-b200", "dgx-a100", "v100x4")
    found = [costs_of(topoplan.load(name))[0] for name in names]
    assert [(one.name, one.fewest_blocks) for one in found] == [
        ("Hopper", 1),
        ("Blackwell", 1),
        ("Hopper", 24),
        ("Hopper", 24),
    ]
