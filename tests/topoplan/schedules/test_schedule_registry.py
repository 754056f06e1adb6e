"""The registry of schedules: one file and one line, and every command that names or compares schedules knows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from topoplan import InfeasibleError, Plan, UsageError
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.topology import TopologyLike, as_topology
from topoplan.model.candidates import candidates
from topoplan.operate.compare.comparison import compare
from topoplan.operate.compare.table import format_table
from topoplan.plans.build import build_plan, stage_order
from topoplan.plans.plan import root_rank
from topoplan.plans.shards import Shard, Stage
from topoplan.schedules.registry import SCHEDULES, Schedule, find_schedule, make_schedule
from topoplan.schedules.routes import LeastLoaded
from topoplan.solve.cuts_and_partitions import best_bound


def chain(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """A schedule of a newcomer: every rank hands the whole buffer to the next, from the root on."""
    machine = as_topology(topology)
    chosen = machine.select(gpus)
    rank = root_rank(chosen, collective, root)
    fabric = usable_fabric(machine.subset(chosen), channels=channels)
    routes = LeastLoaded(fabric)
    order = [((rank or 0) + step) % fabric.size for step in range(fabric.size)]
    stages = [
        Stage(op, order[0], tuple(routes.edge(op, (a,), b, Fraction(1)) for a, b in pairwise(order)))
        for op in stage_order(collective)
    ]
    return build_plan(
        fabric,
        collective,
        root=rank,
        shards=[Shard(Fraction(1), tuple(stages))],
        certificate=best_bound(fabric, collective, rank),
        schedule="chain",
        method="chain",
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Schedule("chain", chain, collectives=("allreduce", "broadcast", "reduce"), column="chain")
    monkeypatch.setitem(SCHEDULES, line.name, line)


@pytest.mark.usefixtures("registered")
def test_a_new_schedule_is_made_timed_and_compared(run: Run) -> None:
    """``plan --schedule``, ``plan --sizes`` and ``compare`` show it: 25 GB/s from GPU 1 to 2 limit the chain."""
    status, out, err = run("plan", "v100x4", "--schedule", "chain")
    assert (status, err) == (0, "")
    assert "trees        1 of height 3 (chain)" in out
    value = json.loads(run("plan", "v100x4", "--sizes", "1KB:1GB", "--json")[1])
    assert [one["schedule"] for one in value["candidates"]].count("chain") == 1
    rows = [line.split() for line in run("compare", "v100x4")[1].splitlines()]
    assert ["chain", f"{chain('v100x4').rate:.2f}"] in [row[:2] for row in rows]
    rows = json.loads(run("compare", "v100x4", "--json")[1])["rows"]
    assert rows[0]["others"] == {"chain": chain("v100x4").rate}
    assert "known ones are trees" in run("plan", "v100x4", "--schedule", "chains")[2]
    assert "did you mean chain?" in run("plan", "v100x4", "--schedule", "chains")[2]


@pytest.mark.usefixtures("registered")
def test_what_a_new_schedule_needs_decides_where_it_is_tried() -> None:
    """No allgather, for which it is not defined; where a hop has no wire the reason is a note, and a dash a column."""
    assert "chain" not in {one.schedule for one in candidates("v100x4", "allgather")[0]}
    assert compare("v100x4", "allgather").others == (("chain", None),)
    plans, notes = candidates("dgx-1v", gpus=[1, 4, 5, 7])
    assert "chain" not in {one.schedule for one in plans}
    assert "no chain: no wire leads to gpu1 from gpu4 but through another GPU" in notes
    row = compare("dgx-1v", gpus=[1, 4, 5, 7])
    assert row.others == (("chain", None),)
    assert format_table([row]).splitlines()[1].split()[-1] == "-"
    assert any(note.startswith("chain: no wire leads to gpu1 from gpu4") for note in row.notes)
    with pytest.raises(
        InfeasibleError, match="no chain: no wire leads to gpu1 from gpu4 but through another GPU; choose"
    ):
        make_schedule("chain", "dgx-1v", gpus=[1, 4, 5, 7])


ABSENT = {
    *((name, "dgx-1v") for name in ("one-hop", "spread-one-hop", "mesh", "parameter-server")),
    ("relay-ring", "pcie-x8"),
    *(
        (name, machine)
        for name in (
            "three-phase",
            "nvls",
            "nvls-tree",
            "one-shot-three-phase",
            "rails",
            "relayed-rails",
            "jaccl",
        )
        for machine in ("v100x4", "dgx-1v", "pcie-x8")
    ),
}
"""Schedules that a machine does not have: several servers, a wire between any two GPUs, NVLink, a switch that adds."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("machine", ["v100x4", "dgx-1v", "pcie-x8"])
def test_every_schedule_is_a_valid_plan_or_says_why_not(name: str, machine: str) -> None:
    """One rate whether made by name or by its function; never above the packed trees on the same wires."""
    if (name, machine) in ABSENT:
        with pytest.raises(
            (InfeasibleError, UsageError), match=r"choose another schedule|plan trees instead"
        ):
            make_schedule(name, machine)
        return
    made = make_schedule(name, machine)
    assert topoplan.verify(made).rate == find_schedule(name).make(machine).rate
    assert made.rate <= topoplan.plan(machine, channels="+".join(made.channels)).rate


CLUSTER = ("v100x4", "--servers", "3", "--nic-bandwidth", "100Gb/s")
PLACES = {
    "nvls": ("dgx-h100", "--in-network", "nvswitch"),
    "nvls-tree": ("dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s", "--in-network", "all"),
    "jaccl": ("mac-tb5-x4",),
    **dict.fromkeys(("three-phase", "one-shot-three-phase", "rails", "relayed-rails"), CLUSTER),
}
"""Machines that have a schedule, where v100x4 has it not."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "collective"), [(name, one) for name in sorted(SCHEDULES) for one in SCHEDULES[name].collectives]
)
def test_every_name_writes_a_plan_file_that_verifies(
    run: Run, tmp_path: Path, name: str, collective: str
) -> None:
    path = str(tmp_path / "plan.json")
    where = PLACES.get(name, ("v100x4",))
    planned = run("plan", *where, "--schedule", name, "--collective", collective, "-o", path)
    assert (planned[0], planned[2]) == (0, "")
    assert run("verify", path)[0] == 0


SOURCE = """
from dataclasses import replace

import topoplan
from topoplan.schedules.registry import Schedule

def wave(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):
    ranks = range(len(topoplan.Topology.select(topology, gpus)))
    return topoplan.plan_from_trees(
        topology, collective, [[*ranks], [*reversed(ranks)]], gpus=gpus, root=root, channels=channels
    )

swell = Schedule("swell", wave, words="a swell", collectives=("allreduce",))

def slow(topology, collective="allreduce", **asked):
    return topoplan.ring_plan(topology, collective, gpus=asked["gpus"])

def other(topology, *rest, **asked):
    return topoplan.plan("dgx-1v", gpus=[0, 1, 2, 3])

def claims(topology, *rest, **asked):
    return replace(topoplan.plan(topology), rate=1e6)

def crash(topology, *rest, **asked):
    return 1 / 0

def nothing(topology, *rest, **asked):
    return None

number = 7
"""

ENTRIES = """[topoplan.schedules]
wave = other_waves:wave
swell = other_waves:swell
slow = other_waves:slow
other = other_waves:other
claims = other_waves:claims
crash = other_waves:crash
nothing = other_waves:nothing
number = other_waves:number
missing = other_waves:missing
gone = other_gone:wave
broken = other_broken:wave
double-tree = other_waves:wave
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers schedules, good ones and broken ones."""
    folder = tmp_path / "other-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "other_waves.py").write_text(SOURCE)
    (tmp_path / "other_broken.py").write_text("this is no Python\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_a_package_adds_a_schedule_by_an_entry_point(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    status, out, err = run("plan", "v100x4", "--schedule", "wave", "-o", path)
    assert (status, err) == (0, "")
    assert "trees        1 of height 3 (own trees)" in out
    assert run("verify", path)[0] == 0
    machine = topoplan.load("v100x4")
    assert make_schedule("swell", machine).rate == make_schedule("wave", machine).rate
    assert find_schedule("swell").words == "a swell"
    refused = run("plan", "v100x4", "--schedule", "waves")
    assert (refused[0], "did you mean wave?" in refused[2]) == (2, True)


@pytest.mark.sampled
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("double-tree", "is topoplan's own, and the package other offers another of that name"),
        ("gone", "gone, which the package other offers, cannot be loaded: No module named 'other_gone'"),
        ("missing", "missing, which the package other offers, cannot be loaded"),
        ("broken", "broken, which the package other offers, cannot be loaded: SyntaxError"),
        ("number", "schedule number, of the package other, is a int, not a function that makes a plan"),
        ("crash", "schedule crash, of the package other, failed: ZeroDivisionError: division by zero"),
        ("nothing", "schedule nothing, of the package other, made a wrong plan: it is a NoneType, not a"),
        ("claims", "schedule claims, of the package other, made a wrong plan: claims a rate of 1000000 GB/s"),
        ("other", "schedule other, of the package other, made a wrong plan: it is of another machine"),
    ],
)
def test_a_broken_package_is_one_line(run: Run, name: str, told: str) -> None:
    status, out, err = run("plan", "v100x4", "--schedule", name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_ring_runs_over_the_channel_that_is_asked_for(run: Run, tmp_path: Path) -> None:
    assert make_schedule("ring", "v100x4").schedule == "nvlink ring"
    path = tmp_path / "ring.json"
    assert run("plan", "v100x4", "--schedule", "ring", "--channels", "pcie", "-o", str(path))[0] == 0
    assert topoplan.load_plan(path).schedule == "pcie ring"  # type: ignore[union-attr]
    assert run("verify", str(path))[0] == 0


def test_trees_are_what_is_planned_anyway(run: Run) -> None:
    assert run("plan", "v100x4", "--schedule", "trees", "-o", "-") == run("plan", "v100x4", "-o", "-")
    assert run("plan", "v100x4", "--schedule", "trees", "--method", "mwu", "--epsilon", "0.1")[0] == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--schedule", "nope"), "known ones are trees, three-phase, one-hop, mesh, double-tree"),
        (("--schedule", "Ring"), "did you mean ring?"),
        (("--schedule", ""), "schedule '' is unknown"),
        (("--schedule", "ring", "--sizes", "1KB:1MB"), "--schedule does not go with --sizes"),
        (("--schedule", "ring", "--method", "mwu"), "--method does not go with --schedule ring"),
        (("--schedule", "ring", "--order", "trees"), "--order does not go with --schedule ring"),
        (("--schedule", "ring", "--time-limit", "1"), "--time-limit does not go with --schedule ring"),
        (("--schedule", "ring", "--size", "1MB"), "--size does not go with --schedule ring"),
        (("--schedule", "ring", "--bound-only"), "--schedule does not go with --bound-only"),
        (("--schedule", "ring", "--density", "0.1"), "--schedule does not go with --density"),
        (("--schedule", "relay-ring", "--channels", "pcie"), "runs over nvlink here, not over pcie"),
        (("--schedule", "double-tree", "--collective", "allgather"), "double binary trees do not do allg"),
        (("--schedule", "one-hop", "--gpus", "1,4,5"), "no one-hop: gpu4 reaches gpu1 only through another"),
        (("--schedule", "relay-ring", "--gpus", "0,5"), "no relay rings: no NVLink path leaves the cut"),
        (("--method", "three-phase"), "three phases need GPUs on two servers or more, and all 8 are on"),
        (("--method", "three-phase", "--order", "trees"), "--order belongs to --method exact"),
        (("--method", "three-phase", "--sizes", "1KB:1GB"), "--method does not go with --sizes"),
    ],
)
def test_what_does_not_go_with_a_schedule_is_one_line(run: Run, options: tuple[str, ...], says: str) -> None:
    status, out, err = run("plan", "dgx-1v", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err
