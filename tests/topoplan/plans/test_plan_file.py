"""The plan file: nothing lost, the same bytes in every process, and a clear refusal of what is no plan."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import ROOT
from tests.support.hand_plans import three_phase_plan
from tests.support.small_fabrics import COLLECTIVES, WRITTEN, direct_machines, machine, switched_machines
from topoplan.cli.plan import plan_object
from topoplan.errors import PlanError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT, shard_bounds

CALLS = {
    "trees": lambda: topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2, 3, 4, 7]),
    "few": lambda: topoplan.plan(topoplan.load("dgx-1v"), "broadcast", root=5, order="trees"),
    "mwu": lambda: topoplan.plan(topoplan.load("dgx-1p"), "allgather", method="mwu"),
    "one-hop": lambda: topoplan.plan(topoplan.load("dgx-2"), "reduce_scatter"),
    "pcie": lambda: topoplan.plan(topoplan.load("pcie-x8"), "reduce", gpus=[7, 2, 3]),
    "trivial": lambda: topoplan.plan(topoplan.load("dgx-a100"), "allgather", gpus=[6]),
    "ring": lambda: topoplan.ring(topoplan.load("dgx-1v"), "allreduce"),
    "binary": lambda: topoplan.double_binary_tree(topoplan.load("dgx-2"), "allreduce"),
    "parts of the ranks": lambda: three_phase_plan([[0, 1, 2], [3], [4, 5]]),
}


@pytest.mark.parametrize("call", CALLS)
def test_plans_of_every_kind_survive_their_file(call: str) -> None:
    """Read back, a plan is equal but for the time it took, and written again it is the same file."""
    made = CALLS[call]()
    text = made.to_json()
    back = Plan.from_json(text)
    assert back == made
    assert back.to_json() == text
    assert back.seconds is None
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
    """Device names, notes and schedules are written as they are, in UTF-8."""
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
    assert gpus == value["ranks"] == ["gpu2", "gpu3", "gpu7"]
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
    made = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
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


def stage(value: dict[str, Any]) -> Any:
    return value["shards"][1]["stages"][1]


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    value = json.loads(CALLS["trees"]().to_json())
    change(value)
    return json.dumps(value)


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
    """Empty, cut short, too deep, of another format or version."""
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
        (
            lambda v: v["shards"][1].update(share="1/" + "9" * 5000),
            "shard 1: share must be a rational number",
        ),
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
    ],
)
def test_a_wrong_key_is_named_with_its_shard_and_stage(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """The value is shown, cut short where it is long, on one line."""
    with pytest.raises(PlanError) as caught:
        Plan.from_json(damaged(change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_numbers_beyond_floats_are_read() -> None:
    """10**400 is a number of JSON: read as infinite, for the checker to refuse."""
    back = Plan.from_json(damaged(lambda v: v.update(rate=10**400, bound=10**400, seconds=10**400)))
    assert back.rate == back.bound == back.seconds == float("inf")


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
