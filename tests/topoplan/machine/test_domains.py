"""One NVLink domain cut into several: what belongs to each, measured rates on them, and what is refused."""

from __future__ import annotations

import json

import pytest

import topoplan
from tests.support.checkout import Run
from topoplan.errors import UsageError
from topoplan.machine.named_nodes import domain


@pytest.mark.parametrize("size", [4, 12, 72])
def test_a_domain_has_its_gpus_trays_and_one_switch(size: int) -> None:
    rack = topoplan.load("gb200-nvl72")
    part = domain(rack, size)
    kinds = [device.kind for device in part.devices]
    assert [kinds.count(kind) for kind in ("gpu", "cpu", "nic", "nvswitch")] == [size, size // 2, size, 1]
    assert sum(link.bandwidth for link in part.links if link.dst == "nvswitch0") == 900 * size


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gb200-nvl72", 7, "72 GPUs of gb200-nvl72 make no domains of 7; use one of 1, 2, 3, 4, 6, 8"),
        ("gb200-nvl72", 2, "domains of 2 GPUs of gb200-nvl72 would share CPUs"),
        ("dgx-h100", 4, "domains of 4 GPUs of dgx-h100 would share CPUs"),
        ("dgx-1v", 4, "dgx-1v has no NVSwitch"),
    ],
)
def test_refuses_what_makes_no_domains(name: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        domain(topoplan.load(name), size)


@pytest.mark.parametrize(
    ("size", "ring", "tree", "optimum"),
    [
        pytest.param(4, 107.3, 127.9, 150.0),
        pytest.param(8, 205.4, 253.4, 300.0, marks=pytest.mark.thorough),
    ],
)
def test_three_domains_of_a_rack_by_option_are_those_that_were_measured(
    size: int, ring: float, tree: float, optimum: float, run: Run
) -> None:
    """NCCL issue 1801 on the library machine: rings within 5 %, trees within 15 %, the optimum above all."""
    asked = ("--domain", str(size), "--gpus", f"0-{3 * size - 1}", "--nic-access", "direct", "--json")
    status, out, err = run("compare", "gb200-nvl72", *asked)
    assert (status, err) == (0, "")
    row = json.loads(out)["rows"][0]
    assert row["ring"] == pytest.approx(ring, rel=0.05)
    assert (row["nccl_kind"], row["nccl"]) == ("nccl tree", pytest.approx(tree, rel=0.15))
    assert (row["trees"], row["bound"]) == (optimum, optimum)
    assert row["trees"] > max(ring, tree, row["nccl"])


@pytest.mark.thorough
def test_domains_of_several_racks_and_the_whole_rack(run: Run) -> None:
    found = json.loads(
        run("plan", "gb200-nvl72", "--domain", "36", "--servers", "2", "--bound-only", "--json")[1]
    )
    assert (len(found["ranks"]), found["ranks"][-1]) == (144, "s3.gpu35")
    whole = ("plan", "gb200-nvl72", "--gpus", "0-3", "-o", "-")
    assert run(*whole, "--domain", "72") == run(*whole)
    status, out, err = run("plan", "dgx-2", "--domain", "8")
    assert (status, out, err.count("\n")) == (2, "", 1)
