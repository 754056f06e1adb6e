"""The public surface: a machine by any of its names wherever one is taken, the version, and typed packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import ROOT
from topoplan.cli.main import main
from topoplan.engines.registry import export_machine
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.model.candidates import candidates
from topoplan.model.schedule_selection import choose_by_size
from topoplan.operate.compare.allocations import allocation_classes
from topoplan.operate.compare.comparison import compare_all
from topoplan.operate.plot.machine import draw_topology

NAME = "v100x4"
MACHINE = topoplan.load(NAME)
PAIR = "     GPU0 GPU1 CPU Affinity\nGPU0  X   NV2  0-15\nGPU1 NV2   X   0-15\n"

Asked = Callable[[TopologyLike], object]


def one_server_has_no_phases(machine: TopologyLike) -> str:
    """Three phases need several servers: what is said of this machine."""
    with pytest.raises(UsageError) as caught:
        topoplan.three_phase(machine)
    return str(caught.value)


TAKERS: dict[str, Asked] = {
    "allocation_classes": allocation_classes,
    "compute_bound": topoplan.compute_bound,
    "candidates": candidates,
    "choose_by_size": lambda machine: choose_by_size(machine, sizes=[1 << 20]).plans,
    "cluster": lambda machine: topoplan.cluster([topoplan.Server(machine, [0, 1], count=2)], nic_gbps=100),
    "check": lambda machine: topoplan.check(machine).to_dict(),
    "compare": lambda machine: topoplan.compare(machine).to_dict(),
    "compare_all": lambda machine: compare_all(machine, sizes=[2]),
    "draw_topology": lambda machine: len(draw_topology(machine).axes),
    "double_binary_tree": topoplan.double_binary_tree,
    "export_machine": lambda machine: export_machine(machine, "nccl-topo"),
    "load": topoplan.load,
    "lowest_tree": topoplan.lowest_tree,
    "neighbour_probabilities": lambda machine: topoplan.neighbour_probabilities(machine).tolist(),
    "one_hop_plan": topoplan.one_hop_plan,
    "order": lambda machine: topoplan.order(machine).to_dict(),
    "one_shot_plan": topoplan.one_shot_plan,
    "apply_nvlink_status": topoplan.apply_nvlink_status,
    "plan": topoplan.plan,
    "plan_by_size": lambda machine: topoplan.plan_by_size(machine, sizes=[1 << 20]),
    "plan_late": lambda machine: topoplan.plan_late(machine, {1: 0.001}, nbytes="64MB"),
    "plan_from_trees": lambda machine: topoplan.plan_from_trees(machine, "allreduce", [[0, 1, 2, 3]]),
    "plan_from_rings": lambda machine: topoplan.plan_from_rings(machine, "allreduce", [[0, 1, 2, 3]]),
    "plan_mesh": lambda machine: topoplan.plan_mesh(machine, {"dp": 2, "tp": 2}),
    "plan_survival": topoplan.plan_survival,
    "recommend": lambda machine: topoplan.recommend(machine, 2).to_dict(),
    "report": lambda machine: str(topoplan.report(machine, sizes=["1MB"])),
    "ring_plan": topoplan.ring_plan,
    "slow_links": lambda machine: topoplan.slow_links(machine, {"gpu0-gpu1": 10}),
    "sparse_plan": lambda machine: topoplan.sparse_plan(machine, density=0.01),
    "three_phase": one_server_has_no_phases,
    "without_devices": lambda machine: topoplan.without_devices(machine, ["cpu0"]),
    "without_gpus": lambda machine: topoplan.without_gpus(machine, [3]),
    "with_relays": lambda machine: topoplan.with_relays(machine, [0]),
    "without_links": lambda machine: topoplan.without_links(machine, ["gpu0-gpu1"]),
}


QUICK = (
    "compute_bound",
    "cluster",
    "export_machine",
    "load",
    "plan",
    "ring_plan",
    "three_phase",
    "without_gpus",
)


def test_every_function_of_the_surface_that_takes_a_machine_is_tried() -> None:
    """Whatever is added to ``topoplan.__all__`` with a machine first, belongs into the table above."""
    takes = {
        name
        for name in topoplan.__all__
        if callable(found := getattr(topoplan, name))
        and not isinstance(found, type)
        and next(iter(signature(found).parameters), "") == "topology"
    }
    assert takes <= set(TAKERS)
    assert "TopologyLike" in str(signature(topoplan.Server).parameters["machine"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in sorted(TAKERS)],
)
def test_a_machine_may_be_named_wherever_it_is_taken(name: str, tmp_path: Path) -> None:
    """Library name, path, path as text, JSON and graph give what the machine itself gives; a few try them all."""
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.to_json(), encoding="utf-8")
    expected = TAKERS[name](MACHINE)
    sources = (MACHINE.to_networkx(), NAME, path, str(path), MACHINE.to_json())
    for source in sources if name in QUICK else sources[:2]:
        assert TAKERS[name](source) == expected


@pytest.mark.parametrize("old", sorted(topoplan._RENAMED))
def test_an_old_name_is_the_new_one_with_a_warning(old: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"topoplan.{old} is deprecated; use topoplan.{topoplan._RENAMED[old]}"
    ):
        assert getattr(topoplan, old) is getattr(topoplan, topoplan._RENAMED[old])


def test_what_names_no_machine_is_refused_as_load_refuses_it() -> None:
    with pytest.raises(UsageError, match="did you mean dgx-1v"):
        topoplan.plan("dgx1v")
    with pytest.raises(UsageError, match="cannot be read from dict; give a library name, a path, a text"):
        topoplan.ring_plan({"format": "topoplan.topology/1"})  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="no 'format'"):
        topoplan.Server("{}")
    assert topoplan.plan(PAIR).rate == topoplan.plan(topoplan.load(PAIR)).rate == 50.0


def test_a_machine_is_given_back_as_it_is() -> None:
    """No copy, and no bandwidth can be set that it states itself; NVLinks may come from another description."""
    assert as_topology(MACHINE) is MACHINE
    assert topoplan.load(MACHINE) is MACHINE
    with pytest.raises(UsageError, match="a Topology states its own bandwidths; leave out nvlink_gbps"):
        topoplan.load(MACHINE, nvlink_gbps=25)
    with pytest.raises(UsageError, match="a MultiDiGraph states its own bandwidths; leave out pcie_gbps"):
        topoplan.load(MACHINE.to_networkx(), pcie_gbps=12)
    assert topoplan.load(MACHINE, merge=MACHINE) == topoplan.load(MACHINE.to_json(), merge=NAME)


def test_to_json_keeps_what_any_machine_states() -> None:
    """Notes, source, facts, latencies, peer access, and characters of any script."""
    odd = Topology(
        "größe",
        (topoplan.Device("gpu0", "gpu", "s0", facts=(("sm", "70"),)), topoplan.Device("gpu1", "gpu", numa=0)),
        (topoplan.Link("gpu0", "gpu1", "c2c", 25.781, count=3, latency=1e-6),),
        ("a note",),
        "a source",
        ((2, 0.25),),
    )
    assert topoplan.load(odd.to_json()) == odd == topoplan.load(odd.to_networkx())


def test_the_version_is_stated_once(capsys: pytest.CaptureFixture[str]) -> None:
    """``topoplan --version`` prints it, the package is built with it, and it is known without loading anything."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"topoplan {topoplan.__version__}\n"
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in metadata
    assert '[tool.hatch.version]\npath = "topoplan/__init__.py"' in metadata
    assert topoplan.__version__ not in metadata
    code = "import topoplan, sys; print(topoplan.__version__, *(n for n in sys.modules if n.startswith('topoplan')))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [topoplan.__version__, "topoplan"]
    # PEP 561: a type checker reads the annotations of both packages
    assert all((ROOT / package / "py.typed").is_file() for package in ("topoplan", "collectives"))
