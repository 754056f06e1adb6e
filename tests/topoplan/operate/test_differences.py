"""``topoplan diff``: twins of devices under other names, what differs, and which difference changes the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Done
from tests.support.listings import MACHINES, MATRICES, each
from tests.topoplan.cli.conftest import Told
from topoplan.engines.registry import export_machine
from topoplan.machine.topology import Device, Link, Topology
from topoplan.operate.compare.differences import COLLECTIVES, differences
from topoplan.operate.device_matching import matching_devices

BOX = topoplan.load("dgx-1v")


def renamed(machine: Topology, new: Callable[[str], str]) -> Topology:
    """The same machine under other names, its devices and links in the opposite order."""
    return replace(
        machine,
        devices=tuple(replace(one, name=new(one.name)) for one in reversed(machine.devices)),
        links=tuple(replace(one, src=new(one.src), dst=new(one.dst)) for one in reversed(machine.links)),
    )


@cache
def bounds(machine: Topology) -> tuple[float, ...]:
    return tuple(topoplan.compute_bound(machine, collective).rate for collective in COLLECTIVES)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100", "pcie-x8", "v100x4", "torus:3,3", "mi250x", "dgx-2"])
def test_a_machine_under_other_names_does_not_differ(name: str) -> None:
    """Twins are found by structure alone; names and bus ids of NCCL's file are other ones."""
    machine = topoplan.load(name)
    assert differences(machine, renamed(machine, lambda one: f"x-{one}")).rows == ()
    if name == "dgx-1v":
        assert differences(machine, topoplan.load(export_machine(machine, "nccl-topo").text)).rows == ()


def test_bus_ids_come_before_names() -> None:
    """gpu0 and gpu1 are exchanged: what one is called, the other sits at."""
    devices = (Device("gpu0", "gpu", busid="0000:07:00.0"), Device("gpu1", "gpu", busid="0000:0a:00.0"))
    links = (Link("gpu0", "gpu1", "nvlink", 25.0), Link("gpu1", "gpu0", "nvlink", 50.0))
    one = Topology("one", devices, links)
    other = renamed(one, {"gpu0": "gpu1", "gpu1": "gpu0"}.__getitem__)
    assert matching_devices(one, other) == {"gpu0": "gpu1", "gpu1": "gpu0"}
    assert differences(one, other).rows == ()


def test_push_and_pull_are_a_difference_of_a_wire() -> None:
    gpus = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))
    plain = (Link("gpu0", "gpu1", "pcie", 52), Link("gpu1", "gpu0", "pcie", 52))
    differ = tuple(replace(link, push=2.6, pull=52) for link in plain)
    found = differences(Topology("one", gpus, plain), Topology("other", gpus, differ))
    assert [(one.names, one.a, one.b) for one in found.rows] == [
        (("gpu0-gpu1",), "52 GB/s (push and pull equal)", "52 GB/s (push 2.6, pull 52)")
    ]
    assert found.rows[0].bounds == found.bounds_b == found.bounds_a


@given(st.data())
@settings(max_examples=4)
def test_one_slower_link_is_the_one_difference_and_its_bound_is_that_of_the_other(
    data: st.DataObject,
) -> None:
    wires = sorted({tuple(sorted((link.src, link.dst))) for link in BOX.links})
    a, b = data.draw(st.sampled_from(wires))
    slow = topoplan.slow_links(BOX, {f"{a}-{b}": data.draw(st.sampled_from([1.0, 5.0]))})
    unknown = data.draw(st.booleans())
    found = differences(BOX, renamed(slow, lambda one: f"x-{one}") if unknown else slow)
    assert len(found.rows) == len(found.rows[0].names) == 1
    assert unknown or set(found.rows[0].names[0].split("-")) == {a, b}
    assert found.rows[0].bounds == found.bounds_b == bounds(slow)
    assert found.bounds_a == bounds(BOX)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "argument", "row"),
    [
        (topoplan.without_links, "gpu0->gpu3", ("nvlink gpu-gpu", "gpu0>gpu3", "50 GB/s", "-")),
        (topoplan.without_links, "gpu0-gpu3", ("nvlink gpu-gpu", "gpu0-gpu3", "50 GB/s", "-")),
        (topoplan.without_devices, "nic3", ("device nic", "nic3", "there", "-")),
        (topoplan.without_gpus, 5, ("device gpu", "gpu5", "there", "-")),
    ],
)
def test_what_is_missing_is_told_and_bounded(
    change: Callable[..., Topology], argument: str | int, row: tuple[str, str, str, str]
) -> None:
    """And the other way round it is what is there too much."""
    less = change(BOX, [argument])
    found = differences(BOX, less)
    assert [(one.what, one.names[0], one.a, one.b) for one in found.rows] == [row]
    assert found.rows[0].bounds == bounds(less)
    (back,) = differences(less, BOX).rows
    assert (back.a, back.bounds) == ("-", bounds(BOX))


def flattened(machine: Topology) -> Topology:
    """A DGX-1V whose PCIe switches nobody knows of: what hangs on them hangs on the CPU."""
    up = {f"pcie{n}": f"cpu{n // 2}" for n in range(4)}
    ends = [(up.get(link.src, link.src), up.get(link.dst, link.dst)) for link in machine.links]
    return replace(
        machine,
        devices=tuple(one for one in machine.devices if one.kind != "pcie"),
        links=tuple(
            replace(link, src=src, dst=dst)
            for link, (src, dst) in zip(machine.links, ends, strict=True)
            if src != dst
        ),
    )


def test_a_slot_of_another_width_is_told_beside_the_switch_that_is_missing() -> None:
    """A virtual machine's view: what hangs on the switches hangs on the CPU there.

    The slot alone changes the rate between two servers, in either direction.
    """

    def two(machine: Topology) -> Topology:
        return topoplan.cluster([topoplan.Server(machine, count=2)], nic_gbps=100)

    flat = flattened(BOX)
    (row,) = differences(BOX, flat).rows
    assert (row.what, row.names) == ("device pcie", tuple(f"pcie{n}" for n in range(4)))
    assert row.bounds == bounds(flat)
    slow = topoplan.slow_links(flat, {"nic1-cpu0": 3})
    for one, other, texts in ((BOX, slow, ("12 GB/s", "3 GB/s")), (slow, BOX, ("3 GB/s", "12 GB/s"))):
        found = differences(one, other, placed=two)
        assert [row.what for row in found.rows] == ["device pcie", "pcie cpu-nic"]
        assert (found.rows[1].a, found.rows[1].b) == texts
        assert [found.changes(row) for row in found.rows] == [False, True]
        assert found.rows[1].bounds == bounds(two(other))


def test_what_no_plan_depends_on_has_no_bound_of_its_own() -> None:
    ours = {"numa": 0, "busid": "0000:00:00.0"}
    theirs = {"numa": 1, "busid": "0000:99:00.0", "model": "H100"}
    stated, other = (
        replace(BOX, devices=tuple(replace(one, **new) if one.name == "gpu0" else one for one in BOX.devices))
        for new in (ours, theirs)
    )
    assert [(row.what, row.a, row.b, row.bounds) for row in differences(stated, other).rows] == [
        ("numa of gpu", "0", "1", None),
        ("bus id of gpu", "0000:00:00.0", "0000:99:00.0", None),
        ("model of gpu", "V100", "H100", None),
    ]


FILES = [path for glob in ("nccl-xml/n*-topo.xml", "rccl-xml/*.xml") for path in sorted(MACHINES.glob(glob))]


@pytest.mark.parametrize("path", each([*FILES, *MATRICES]))
def test_every_description_of_a_real_machine_equals_itself(path: Path | None) -> None:
    assert path is not None
    machine = topoplan.load(path)
    bare = replace(machine, devices=tuple(replace(one, busid="") for one in machine.devices))
    assert differences(bare, renamed(bare, lambda one: f"x-{one}")).rows == ()


def test_exit_status_and_json(done: Done, told: Told) -> None:
    slow = topoplan.slow_links(BOX, {"gpu0-gpu3": 10}).to_json()
    assert done("diff dgx-1v dgx-1v").splitlines()[0] == "dgx-1v and dgx-1v: no difference"
    lines = done("diff dgx-1v -", status=1, stdin=slow).splitlines()
    assert lines[0] == "dgx-1v and stdin: 1 difference, 1 of which changes the upper bound alone"
    assert max(map(len, lines)) <= 120
    made = told("diff dgx-1v -", status=1, stdin=slow)
    assert made["differences"][0]["changes_bound"] is True
    assert made["differences"][0]["bound"] == made["b"]["bound"]
    done("diff dgx-1v -", status=2, stdin="<system version=")


def test_with_servers_the_bounds_are_of_a_cluster(told: Told) -> None:
    """A PCIe slot of half the speed changes nothing within the server, and the rate between two of them."""
    slow = topoplan.slow_links(BOX, {"pcie1-nic1": 3}).to_json()
    made = told("diff dgx-1v -", status=1, stdin=slow)
    assert made["differences"][0]["changes_bound"] is False
    made = told("diff dgx-1v - --servers 2 --nic-bandwidth 100Gb/s", status=1, stdin=slow)
    assert (made["a"]["gpus"], made["differences"][0]["changes_bound"]) == (16, True)
