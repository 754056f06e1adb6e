"""Files of plans, of plans by size and for failures: nothing lost, the same bytes everywhere, nothing believed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import ROOT
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from tests.support.small_fabrics import COLLECTIVES, WRITTEN, direct_machines, machine, switched_machines
from topoplan import Plan, PlanError, SizePlans, SurvivalPlans, Topology, UsageError, verify_survival
from topoplan.cli.plan import plan_object
from topoplan.plans.plan import PLAN_FORMAT_2, Plans, SizeRange
from topoplan.plans.shards import ALIGNMENT, ImageShards, shard_bounds
from topoplan.plans.survival import MachineFailure, renamed_plan
from topoplan.plans.verify import verify_all

CALLS = {
    "trees": lambda: topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1, 2, 3, 4, 7]),
    "few": lambda: topoplan.plan("dgx-1v", "broadcast", root=5, order="trees"),
    "mwu": lambda: topoplan.plan("dgx-1p", "allgather", method="mwu"),
    "one-hop": lambda: topoplan.plan("dgx-2", "reduce_scatter"),
    "pcie": lambda: topoplan.plan("pcie-x8", "reduce", gpus=[7, 2, 3]),
    "trivial": lambda: topoplan.plan("dgx-a100", "allgather", gpus=[6]),
    "ring": lambda: topoplan.ring_plan("dgx-1v", "allreduce"),
    "binary": lambda: topoplan.double_binary_tree("dgx-2", "allreduce"),
    "parts of the ranks": lambda: three_phase_plan([[0, 1, 2], [3], [4, 5]]),
    "sparse trees": lambda: topoplan.sparse_plan("dgx-2", density=0.01),
    "sparse servers": lambda: topoplan.sparse_plan(two_servers(100), density=0.01),
    "sparse servers, slow network": lambda: topoplan.sparse_plan(two_servers(5), density=0.5),
}


def two_servers(gbps: float) -> Topology:
    """Two and three GPUs of DGX-1V."""
    parts = [topoplan.Server("dgx-1v", gpus) for gpus in ([0, 1], [0, 1, 2])]
    return topoplan.cluster(parts, nic_gbps=gbps, nics=1)


@pytest.mark.sampled
@pytest.mark.parametrize("call", CALLS)
def test_plans_of_every_kind_survive_their_file(call: str) -> None:
    made = CALLS[call]()
    text = made.to_json()
    back = Plan.from_json(text)
    assert back == made
    assert back.to_json() == text
    assert back.planning_seconds is None
    assert topoplan.verify(back) == topoplan.verify(made)


@given(
    st.sampled_from(COLLECTIVES),
    switched_machines(bandwidths=WRITTEN) | direct_machines(most=4) | direct_machines(most=4, symmetric=True),
)
@settings(max_examples=20, deadline=None)
def test_plans_of_random_machines_survive_their_file(collective: str, topology: Topology) -> None:
    """Cuts, partitions and dual lengths, long shares and decimals."""
    made = topoplan.plan(topology, collective)
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json()).digest == made.digest


def test_names_of_any_script_and_quotes_survive() -> None:
    plain = machine(2, {("gpu0", "gpu1"): 1.5, ("gpu1", "gpu0"): 1.5})
    odd = {"gpu0": 'Rechner "ä"', "gpu1": "计算\\卡"}
    devices = tuple(replace(device, name=odd[device.name]) for device in plain.devices)
    links = tuple(replace(link, src=odd[link.src], dst=odd[link.dst]) for link in plain.links)
    made = topoplan.plan(replace(plain, devices=devices, links=links), "allreduce")
    made = replace(made, notes=("zeile\nzwei\t½", "\u2028"), schedule="ünlich")
    text = made.to_json()
    assert Plan.from_json(text) == made
    assert "计算" in text


def test_the_guaranteed_keys_are_there() -> None:
    """Design section 2: keys and their forms, shares as texts of rational numbers, routes from parent to child."""
    value = json.loads(CALLS["trees"]().to_json())
    assert value["format"] == "topoplan.plan/1"
    assert value["collective"] == "allreduce"
    assert value["ranks"] == [f"gpu{i}" for i in (0, 1, 2, 3, 4, 7)]
    assert value["topology"]["format"] == "topoplan.topology/1"
    assert value["method"] == "exact"
    assert {"rate", "bound", "certificate", "seconds", "trees", "height", "channels"} <= set(value)
    assert sum(Fraction(shard["share"]) for shard in value["shards"]) == 1
    assert value["trees"] == len(value["shards"])
    for shard in value["shards"]:
        assert [tree["op"] for tree in shard["stages"]] == ["reduce", "broadcast"]
        for tree in shard["stages"]:
            assert {parent for parent, _, _, _ in tree["edges"]} >= {tree["root"]}
            for parent, child, route, channel in tree["edges"]:
                assert (route[0], route[-1]) == (value["ranks"][parent], value["ranks"][child])
                assert channel == "nvlink"
    value = json.loads(CALLS["pcie"]().to_json())  # the machine is the allocation
    gpus = [device["name"] for device in value["topology"]["devices"] if device["kind"] == "gpu"]
    assert gpus == value["ranks"] == ["gpu7", "gpu2", "gpu3"]
    assert value["root"] == 0


DIGESTS = """
import numpy as np
import topoplan as t
from topoplan.solve.simplex.float_simplex import FloatSimplex

for name, collective, method in (("dgx-1v", "allreduce", "exact"), ("dgx-1p", "allgather", "exact"),
                                 ("dgx-1v", "broadcast", "mwu"), ("dgx-2", "allreduce", "exact")):
    print(t.plan(t.load(name), collective, method=method).digest)
dgx = t.load("dgx-1v")
print(t.ring(dgx, "allreduce").digest)
print(t.three_phase(t.cluster([t.Server(dgx, range(3)), t.Server(dgx, range(3, 8))], nic_gbps=100)).digest)
uneven = t.cluster([t.Server(dgx, [0, 1, 2]), t.Server(dgx, [1, 3, 5, 7]), t.Server(dgx, [2])], nic_gbps=40, nics=1)
print(t.sparse_plan(uneven, density=0.01).digest)
rng = np.random.Generator(np.random.PCG64(3))
guide = FloatSimplex(rng.integers(50, 99, 60).astype(float))
for _ in range(3):
    guide.add(rng.integers(0, 4, (60, 80)).astype(float), np.ones(80))
    assert guide.maximise()
print(guide.value.hex(), guide.members.tolist(), sep="")
"""


@pytest.mark.thorough
def test_a_plan_is_the_same_file_in_every_process() -> None:
    """On any hash seed and number of threads: of every method and schedule, and the pivots of the float simplex."""
    printed = []
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "OPENBLAS_NUM_THREADS": seed,
            "PYTHONPATH": str(ROOT),
        }
        run = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(run.stdout.splitlines())
    made = topoplan.plan("dgx-1v", "allreduce")
    here = hashlib.sha256(made.to_json().encode()).hexdigest()
    assert printed[0] == printed[1]
    assert len(set(printed[0])) == 8
    assert printed[0][0] == here == made.digest


def test_the_digest_tells_plans_apart_and_not_times() -> None:
    """Seconds are no part of a plan; the root, the method and one share are."""
    made = CALLS["few"]()
    assert made.timed(1.5).digest == made.timed(2.5).digest
    assert made.timed(1.5) == made.timed(2.5)
    others = [replace(made, root=4), replace(made, method="mwu"), replace(made, shards=made.shards[::-1])]
    assert len({made.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("[]", "must be a JSON object, not list"),
        ("null", "must be a JSON object, not NoneType"),
        ("{}", "format None is not 'topoplan.plan/1'"),
        ('{"format": "topoplan.plan/3"}', "format 'topoplan.plan/3' is not 'topoplan.plan/1'"),
        ('{"format": "topoplan.topology/1"}', "is not 'topoplan.plan/1'"),
        ('{"format": "topoplan.plan/1"}', "embedded topology is wrong: topology JSON must be an object"),
    ],
)
def test_what_is_no_plan_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        Plan.from_json(text)


def test_numbers_beyond_floats_are_read() -> None:
    """10**400 is a number of JSON: read as infinite, for the checker to refuse."""
    value = json.loads(CALLS["trees"]().to_json())
    back = Plan.from_json(json.dumps(value | dict.fromkeys(("rate", "bound", "seconds"), 10**400)))
    assert back.rate == back.bound == back.planning_seconds == float("inf")


def test_what_plan_json_adds_is_read() -> None:
    """The output of ``plan --json`` is a plan file with more keys, that follow from the others."""
    plan = topoplan.plan("dgx-h100")
    assert {"in_network_bound", "wider_bound"} <= plan_object(plan).keys()
    read = Plan.from_object(json.loads(json.dumps(plan_object(plan))))
    assert (read.shards, read.certificate, read.topology) == (plan.shards, plan.certificate, plan.topology)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_shards_cover_any_buffer_without_gap_or_overlap(weights: list[int], blocks: int, length: int) -> None:
    """Offsets rise from 0 to the count, each less than the alignment below its share, for any length of a block too.

    Inside a block they are multiples of the alignment from the block's start, and blocks end where they end.
    """
    shares = [Fraction(weight, sum(weights) * blocks) for weight in weights] * blocks
    count = length * blocks
    bounds = shard_bounds(shares, count, blocks=blocks)
    assert bounds == sorted(bounds)
    assert bounds[:: len(weights)] == [block * length for block in range(blocks + 1)]
    for i, bound in enumerate(bounds):
        assert 0 <= sum(shares[:i]) * count - bound < ALIGNMENT
        assert i % len(weights) == 0 or (bound - i // len(weights) * length) % ALIGNMENT == 0


def by_hand(collective: str = "allreduce", starts: tuple[int, ...] = (0, 100, 5000)) -> SizePlans:
    """Ranges that begin at these bytes, with stars, chains and heaps in turn."""
    stops = (*starts[1:], None)
    plans = [forest_plan(4, collective, shape) for shape in sorted(SHAPES)]
    return SizePlans(
        tuple(
            SizeRange(start, stop, plans[number % len(plans)])
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )
    )


@pytest.fixture(scope="module")
def planned() -> SizePlans:
    return topoplan.plan_by_size("v100x4")


def test_plans_by_size_survive_their_file(planned: SizePlans) -> None:
    text = planned.to_json()
    back = SizePlans.from_json(text)
    assert back == planned
    assert back.to_json() == text
    assert back.digest == planned.digest
    assert verify_all(back) == verify_all(planned)


@given(st.sampled_from(COLLECTIVES), st.sets(st.integers(1, 1 << 40), max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_ranges_survive_their_file(collective: str, starts: set[int]) -> None:
    made = by_hand(collective, (0, *sorted(starts)))
    assert SizePlans.from_json(made.to_json()) == made


def test_the_machine_stands_in_the_file_once(planned: SizePlans) -> None:
    """The promised keys; each plan is a plan file without its machine, and with it one that stands alone."""
    text = planned.to_json()
    value = json.loads(text)
    assert list(value) == ["format", "collective", "ranges", "topology", "times"]
    assert (value["format"], value["collective"]) == ("topoplan.plans/2", "allreduce")
    assert text.count("topoplan.topology/1") == 1
    assert [(one["from"], one["to"]) for one in value["ranges"]] == [
        (one.start, one.stop) for one in planned.ranges
    ]
    for one, expected in zip(value["ranges"], planned.plans, strict=True):
        assert "topology" not in one["plan"]
        alone = Plan.from_json(json.dumps(one["plan"] | {"topology": value["topology"]}))
        assert alone == expected


def test_load_plan_reads_both_kinds_and_refuses_others(planned: SizePlans, tmp_path: Path) -> None:
    """Told apart by the format that the file states, not by its name."""
    path = tmp_path / "a.json"
    for book in (planned, planned.plans[0]):
        path.write_text(book.to_json(), encoding="utf-8")
        assert topoplan.load_plan(path) == topoplan.load_plan(str(path)) == book
    with pytest.raises(UsageError, match=r"none\.json cannot be read: No such file"):
        topoplan.load_plan(tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is binary, not text"):
        topoplan.load_plan(path)
    path.write_text('{"format": "topoplan.plans/3"}')
    with pytest.raises(PlanError, match=r"format 'topoplan\.plans/3' is not 'topoplan\.plan/1'"):
        topoplan.load_plan(path)


def test_every_size_has_one_plan() -> None:
    """The range begins with its first byte and ends before its last; a single plan answers for all sizes."""
    made = by_hand()
    assert [made.at(size) for size in (0, 99, 100, 4999, 5000, 1 << 60)] == [
        made.plans[i] for i in (0, 0, 1, 1, 2, 2)
    ]
    assert made.at(99) is made.plans[0]
    assert made.plans[1].at(99) is made.plans[1]
    for book in (made, made.plans[1]):
        with pytest.raises(UsageError, match="a buffer of -1 bytes does not exist"):
            book.at(-1)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_a_single_plan_is_a_book_of_one_range(collective: str) -> None:
    plan = forest_plan(4, collective, "star")
    book = SizePlans(plan.ranges)
    assert plan.ranges == book.ranges == (SizeRange(0, None, plan),)
    assert plan.plans == book.plans == (plan,)
    assert plan.crossovers == book.crossovers == ()
    assert plan.at(1 << 40) is book.at(1 << 40) is plan
    assert verify_all(plan) == verify_all(book) == (topoplan.verify(plan),)
    assert (plan.collective, plan.ranks, plan.root) == (book.collective, book.ranks, book.root)
    assert plan.digest != book.digest


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "at least one range"),
        ([(1, None)], "range 0 starts at 1 bytes; it must start at 0"),
        ([(0, 10), (11, None)], "range 1 starts at 11 bytes; it must start at 10"),
        ([(0, 10), (9, None)], "range 1 starts at 9 bytes; it must start at 10"),
        ([(0, None), (5, None)], "range 1 starts at 5 bytes; it must start nowhere"),
        ([(0, 10)], "no range covers sizes from 10 bytes on"),
        ([(0, 10), (10, 10)], "range 1 from 10 to 10 bytes holds no size"),
    ],
)
def test_ranges_with_gaps_are_refused(spans: list[tuple[int, int | None]], message: str) -> None:
    plan = forest_plan(3, "allreduce", "star")
    with pytest.raises(PlanError, match=message):
        SizePlans(tuple(SizeRange(start, stop, plan) for start, stop in spans))


@pytest.mark.parametrize(
    ("collective", "size", "root", "name"),
    [("reduce", 3, None, "collective"), ("broadcast", 4, None, "ranks"), ("broadcast", 3, 0, "root")],
)
def test_plans_of_different_calls_are_refused(
    collective: str, size: int, root: int | None, name: str
) -> None:
    other = forest_plan(size, collective, "star", **({} if root is None else {"root": root}))
    ranges = (SizeRange(0, 8, forest_plan(3, "broadcast", "star")), SizeRange(8, None, other))
    with pytest.raises(PlanError, match=f"the plan of range 1 has another {name} than that of range 0"):
        SizePlans(ranges)


def test_a_wrong_plan_in_any_range_is_found() -> None:
    made = by_hand()
    stage = made.plans[1].shards[2].stages[0]
    shards = list(made.plans[1].shards)
    shards[2] = replace(shards[2], stages=(replace(stage, edges=stage.edges[:-1]), *shards[2].stages[1:]))
    wrong = replace(made.plans[1], shards=tuple(shards))
    ranges = (made.ranges[0], replace(made.ranges[1], plan=wrong), made.ranges[2])
    with pytest.raises(PlanError, match=r"sizes from 100B to 4\.883KB: shard 2, stage 0, rank 0") as caught:
        verify_all(SizePlans(ranges))
    assert (caught.value.shard, caught.value.stage, caught.value.rank) == (2, 0, 0)


@cache
def book() -> SurvivalPlans:
    return topoplan.plan_survival("v100x4")


def test_a_book_survives_its_file(tmp_path: Path) -> None:
    """Read back it is equal, written again the same bytes, and the usual loader knows it."""
    text = book().to_json()
    path = tmp_path / "book.json"
    path.write_text(text, encoding="utf-8")
    for back in (SurvivalPlans.from_json(text), topoplan.load_plan(path), topoplan.load_survival(path)):
        assert back == book()
        assert back.to_json() == text
    assert json.loads(text) == book().to_object()
    assert len(verify_survival(topoplan.load_survival(path))) == 11


def test_a_book_is_the_plan_of_the_whole_machine_to_who_takes_one() -> None:
    """Collective, ranks and range are those of the whole machine, and so is the file but for two keys."""
    text = book().to_json()
    assert text.count('"devices"') == 1
    value = json.loads(text)
    assert value.pop("format") == PLAN_FORMAT_2
    del value["failures"]
    assert Plan.from_object({**value, "format": "topoplan.plan/1"}) == book().whole
    assert book().plans == (book().whole,)
    assert (book().collective, book().ranks, book().root) == ("allreduce", book().whole.ranks, None)


@pytest.mark.thorough
def test_images_of_templates_are_renamed_with_their_symmetries() -> None:
    """A plan of 63 GPUs without one of server 0, carried to server 1: templates, generators and certificate."""
    whole = topoplan.nvswitch_cluster(8)
    lost, other = (MachineFailure("gpu", f"s{server}.gpu3") for server in (0, 1))
    plan = topoplan.plan(lost.left_of(whole))
    assert isinstance(plan.shards, ImageShards)
    names = {device.name: device.name for device in whole.devices}
    for name in names:
        server, _, rest = name.partition(".")
        if server in ("s0", "s1"):
            names[name] = f"{'s1' if server == 's0' else 's0'}.{rest}"
    there = renamed_plan(plan, names, other.left_of(whole))
    assert isinstance(there.shards, ImageShards)
    assert topoplan.verify(there).exact_rate == topoplan.verify(plan).exact_rate
    with pytest.raises(PlanError):
        topoplan.verify(
            renamed_plan(plan, {**names, "s2.gpu0": "s3.gpu0", "s3.gpu0": "s2.gpu0"}, other.left_of(whole))
        )


def test_nothing_is_planned_when_something_is_lost(tmp_path: Path) -> None:
    """A process that reads the book and takes a plan from it loads no planner, no bounds and no simplex."""
    path = tmp_path / "book.json"
    path.write_text(book().to_json(), encoding="utf-8")
    code = (
        "import sys, topoplan\n"
        f"after = topoplan.load_plan({str(path)!r}).plan_without(gpus=[3])\n"
        "assert after.ranks == ('gpu0', 'gpu1', 'gpu2'), after.ranks\n"
        "print(*sorted(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("topoplan.")}
    assert "plans" in rooms
    assert not rooms & {"packing", "columns", "simplex", "bounds", "schedules"}


Change = Callable[[dict[str, Any]], object]


def stage(value: dict[str, Any]) -> Any:
    return value["shards"][1]["stages"][1]


def renamed(value: dict[str, Any]) -> dict[str, Any]:
    """The first failure that has another one's plan under other names."""
    return next(row for row in value["failures"] if "rename" in row)


def broken(value: dict[str, Any]) -> None:
    """A failure of which the file says that nothing is left."""
    row = renamed(value)
    del row["as"], row["rename"]
    row["none"] = "it is broken"


def first_stage(value: dict[str, Any]) -> Any:
    return value["failures"][0]["plan"]["shards"][0]["stages"][0]


PERMUTE = "rename must permute devices of the machine among themselves"
ONE_OF = "failure 0: a failure has one of gpu, link and device"
OF_A_PLAN: list[tuple[Change, str]] = [
    (lambda v: v.pop("method"), "method must be a text, not None"),
    (lambda v: v.pop("shards"), "shards must be a list"),
    (lambda v: v.update(ranks="gpu0"), "ranks must be a list, not str"),
    (lambda v: v.update(root=1.5), "root must be a whole number, not 1.5"),
    (lambda v: v.update(root=True), "root must be a whole number, not True"),
    (lambda v: v.update(channels=["nvlink", "tin"]), "channel 'tin' is unknown"),
    (lambda v: v.update(rate="85.7"), "rate must be a number of zero or more, not '85.7'"),
    (lambda v: v.update(rate=-1), "rate must be a number of zero or more, not -1"),
    (lambda v: v.update(bound=float("nan")), "bound must be a number of zero or more, not nan"),
    (lambda v: v.update(notes=[1]), "notes must be a text, not 1"),
    (lambda v: v.update(schedule="\ud800"), "schedule must be a text"),
    (lambda v: v.update(certificate={"kind": "oath"}), "certificate kind 'oath' is unknown"),
    (lambda v: v.update(certificate={"kind": "cut", "side": "gpu0"}), "certificate: side must be a list"),
    (
        lambda v: v.update(certificate={"kind": "lengths", "lengths": [["a", "b"]]}),
        "must be [src, dst, length]",
    ),
    (lambda v: v["shards"][1].update(share=0.25), "shard 1: share must be a rational number in quotes"),
    (lambda v: v["shards"][1].update(share="1/0"), "shard 1: share must be a rational number"),
    (lambda v: v["shards"][1].update(share="1e999999999"), "shard 1: share must be a rational number"),
    (lambda v: v["shards"][1].update(share="1/" + "9" * 5000), "shard 1: share must be a rational"),
    (lambda v: v["shards"].__setitem__(1, []), "shard 1 must be an object, not list"),
    (lambda v: v["shards"][1]["stages"].__setitem__(0, 7), "shard 1, stage 0 must be an object, not int"),
    (lambda v: stage(v).pop("op"), "shard 1, stage 1: op must be a text"),
    (lambda v: stage(v).update(root="0"), "shard 1, stage 1: root must be a whole number"),
    (lambda v: stage(v)["edges"][0].pop(), "shard 1, stage 1: an edge must be [parent"),
    (lambda v: stage(v)["edges"][0].__setitem__(2, "gpu0"), "shard 1, stage 1: route must be a list"),
    (lambda v: v["topology"]["links"][0].update(bandwidth=0), "embedded topology is wrong: link"),
    (lambda v: v.update(treess=2), "the plan: key 'treess' is unknown; did you mean 'trees'?"),
    (lambda v: v["shards"][1].update(why=1), "shard 1: key 'why' is unknown; it may have share, stages"),
    (lambda v: stage(v).update(entry="1"), "stage 1: key 'entry' is unknown; did you mean 'entries'?"),
    (lambda v: v["certificate"].update(sides=[]), ": key 'sides' is unknown; "),
]
OF_RANGES: list[tuple[Change, str]] = [
    (lambda v: v.pop("ranges"), "ranges must be a list, not NoneType"),
    (lambda v: v.update(ranges=[]), "at least one range"),
    (lambda v: v["ranges"].__setitem__(1, 7), "range 1 must be an object, not int"),
    (lambda v: v["ranges"][1].pop("plan"), "range 1: plan must be an object, not NoneType"),
    (lambda v: v["ranges"][1].update({"from": "0"}), "range 1: from must be a whole number of bytes"),
    (lambda v: v["ranges"][1].update({"from": -3}), "range 1: from must be a whole number of bytes"),
    (lambda v: v["ranges"][1].update({"to": 2.5}), "range 1: to must be a whole number of bytes"),
    (lambda v: v["ranges"][1].update({"to": True}), "range 1: to must be a whole number of bytes"),
    (lambda v: v["ranges"][0].update({"to": 50}), "range 1 starts at 100 bytes; it must start at 50"),
    (lambda v: v["ranges"][2]["plan"].pop("format"), "range 2: format None is not 'topoplan.plan/1'"),
    (lambda v: v["ranges"][2]["plan"]["shards"][0].update(share="x"), "range 2: shard 0: share must be"),
    (lambda v: v.update(collective="reduce"), "collective 'reduce' is not that of the plans, allreduce"),
    (lambda v: v.pop("topology"), "embedded topology is wrong"),
    (lambda v: v.update(format="topoplan.plan/1"), "format 'topoplan.plan/1' is not 'topoplan.plans/1'"),
]
OF_FAILURES: list[tuple[Change, str]] = [
    (lambda v: v["failures"].pop(), "the file has 9 failures; the machine has 10 over these links"),
    (lambda v: renamed(v).update(gpu="gpu0"), "is that of gpu0; it must be"),
    (lambda v: renamed(v).pop("rename"), "without gpu1: "),
    (lambda v: renamed(v).update(rename={"gpu1": "gpu2", "gpu2": "gpu1"}), "without gpu1: "),
    (lambda v: renamed(v).update(rename={"gpu0": "gpu1"}), PERMUTE),
    (lambda v: renamed(v).update(rename={"gpu8": "gpu9", "gpu9": "gpu8"}), PERMUTE),
    (lambda v: renamed(v).update({"as": 9}), "as is 9, which is not an earlier failure with a plan of its"),
    (lambda v: renamed(v).update({"as": -1}), "as is -1, which is not an earlier failure"),
    (lambda v: v["failures"][0]["plan"].update(rate=1e3), "without gpu0: claims a rate of 1000 GB/s"),
    (lambda v: v["failures"][0]["plan"].update(bound=1e3), "without gpu0: claims a bound of 1000 GB/s"),
    (
        lambda v: v["failures"][0]["plan"].update(collective="allgather"),
        "without gpu0: it is a allgather, not a allreduce",
    ),
    (lambda v: first_stage(v).update(root=7), "out of range"),
    (lambda v: v["failures"][0].update(link="gpu0-gpu1"), ONE_OF),
    (lambda v: v["failures"][0].update(colour="red"), f"{ONE_OF}, and one of plan, as and none"),
    (lambda v: v["failures"][0].update(gpu="gpu9"), "failure 0: v100x4 has no GPU 'gpu9'"),
    (lambda v: v["failures"][4].update(link="gpu0-gpu4"), "failure 4: link gpu0-gpu4: v100x4 has no device"),
    (lambda v: v.update(failures={}), "failures must be a list, not dict"),
    (lambda v: v.update(failures=[1]), "failure 0: a failure must be an object, not int"),
    (lambda v: v["failures"][0].update(plan=[]), "failure 0: plan must be an object, not list"),
    (broken, "without gpu1: the file says that no plan exists, but links still join"),
]
DAMAGES: dict[str, tuple[Callable[[], Plans], Callable[[str], object], list[tuple[Change, str]]]] = {
    "plan": (CALLS["trees"], Plan.from_json, OF_A_PLAN),
    "ranges": (by_hand, SizePlans.from_json, OF_RANGES),
    "failures": (book, lambda text: verify_survival(SurvivalPlans.from_json(text)), OF_FAILURES),
}


@pytest.mark.parametrize(
    ("kind", "change", "message"), [(kind, *row) for kind, (_, _, rows) in DAMAGES.items() for row in rows]
)
def test_a_damaged_file_is_refused_in_one_line(kind: str, change: Change, message: str) -> None:
    """With its shard and stage, range or failure; the value is cut short where it is long."""
    make, read, _ = DAMAGES[kind]
    value = json.loads(make().to_json())
    change(value)
    with pytest.raises(PlanError) as caught:
        read(json.dumps(value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_other_files_are_no_books(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(book().whole.to_json(), encoding="utf-8")
    with pytest.raises(PlanError, match="no key failures; topoplan plan --survive 1 -o writes one"):
        topoplan.load_survival(path)
    with pytest.raises(UsageError, match="cannot be read"):
        topoplan.load_survival(tmp_path / "none.json")
