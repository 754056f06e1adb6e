"""Meshes by kinds of groups: files, agreement with the listed cluster, and wrong files that are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

import topoplan
from tests.support.kind_meshes import changed_mesh_file, listed_figures, random_mesh
from topoplan import PlanError, Server
from topoplan.plans.kind_mesh import MeshByKind
from topoplan.plans.verify_kind_mesh import recompute_mesh, verify_kind_mesh
from topoplan.solve.mesh_by_kind import plan_mesh_by_kind


def agree(mesh: MeshByKind | None) -> None:
    if mesh is None:
        return
    read = MeshByKind.from_json(mesh.to_json())
    assert read.to_json() == mesh.to_json()
    found = verify_kind_mesh(read)
    assert (float(found.exact_rate), float(found.exact_bound)) == pytest.approx(
        (mesh.rate, mesh.bound), rel=1e-12
    )
    rate, bound = listed_figures(read)
    assert rate == found.exact_rate
    assert bound <= found.exact_bound


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(30))
def test_the_listed_cluster_agrees(seed: int) -> None:
    agree(random_mesh(seed, most=32))


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(30, 330))
def test_the_listed_cluster_of_up_to_64_gpus_agrees(seed: int) -> None:
    agree(random_mesh(seed, most=64))


@pytest.mark.thorough
def test_ten_thousand_gpus_are_verified_from_a_small_file() -> None:
    """Two axes share each NIC, so 1/rate is the sum of the times of both; 2,330 groups of 17 kinds."""
    many = topoplan.cluster_by_kind([Server("dgx-h100", count=1250)], nic_gbps=400)
    mesh = plan_mesh_by_kind(many, {"pp": 10, "dp": 125, "tp": 8})
    text = mesh.to_json()
    assert len(text) < 40_000
    found = verify_kind_mesh(MeshByKind.from_json(text))
    assert (
        found.exact_rate == found.exact_bound == 1 / (Fraction(2 * 9, 10 * 48) + Fraction(2 * 124, 125 * 48))
    )
    assert [one.trees for one in found.groups] == [*[10] * 8, *[125] * 8, 8]


@cache
def mesh_file() -> str:
    hosts = [Server("nvlink-x4", count=6, nics=2)]
    network: dict[str, Any] = {"network": "fat-tree", "leaf_size": 2, "oversubscription": 4}
    many = topoplan.cluster_by_kind(hosts, nic_gbps=100, nic_access="direct", **network)
    return plan_mesh_by_kind(many, {"dp": 6, "tp": 4}).to_json()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda value: value["groups"].pop(),
            "every group along tp must be of a kind of the file, got another",
        ),
        (
            lambda value: value["groups"].append(value["groups"][0]),
            "groups 0 and 5 must be of different kinds, got one kind",
        ),
        (lambda value: value["groups"][4].update(count=5), "group 4: its kind must have 6 groups, got 5"),
        (
            lambda value: value["groups"][4].update(first=2),
            "first must be the lowest rank of a group along tp",
        ),
        (lambda value: value["groups"][0].update(axis="pp"), "group 0: axis 'pp' must be one of dp, tp"),
        (lambda value: value["groups"][0]["plan"].update(cluster={}), "plan must be without cluster"),
        (lambda value: value["groups"][0]["plan"].update(rate=9.0), "group 0: claims a rate of 9 GB/s"),
        (lambda value: value.update(rate=9.0), "claims a rate of 9 GB/s"),
        (lambda value: value.update(bound=9.0), "claims a bound of 9 GB/s"),
        (lambda value: value.update(collective="broadcast"), "a mesh by kind must be of allreduce"),
        (lambda value: value["axes"][0].__setitem__(1, 7), "the axes make 28 ranks of 24 GPUs"),
        (lambda value: value["weights"].pop(), "axis 'tp' has no weight"),
        (lambda value: value["weights"][0].__setitem__(1, "0"), "weights must be above zero"),
        (lambda value: value["certificate"].update(lengths=[]), "the lengths prove nothing"),
        (lambda value: value.update(group=[]), "key 'group' is unknown; did you mean 'groups'"),
        (lambda value: value.update(groups=value["groups"] * 200), "at most 256 kinds, got"),
        (
            lambda value: value["cluster"]["network"].update(uplinks=[["leaf0", 1e-300, 1]]),
            "group 0: link leaf0->spine0: bandwidth 1e-300 must be",
        ),
    ],
)
def test_a_wrong_file_is_named(change: Callable[[dict[str, Any]], object], told: str) -> None:
    value = json.loads(mesh_file())
    change(value)
    with pytest.raises(PlanError, match=told):
        verify_kind_mesh(MeshByKind.from_object(value))


def refuse_wrong_files(seeds: range, changes: int) -> None:
    """Change files at random; whatever is accepted must be right by the list of the cluster."""
    rng = random.Random(11)
    meshes = [mesh for mesh in (random_mesh(seed, most=32) for seed in seeds) if mesh is not None]
    refused = 0
    for _ in range(changes):
        value = changed_mesh_file(rng, json.loads(rng.choice(meshes).to_json()))
        try:
            read = MeshByKind.from_object(value)
            found = recompute_mesh(read)
            # Claims that fit, so that groups and plans alone decide.
            verify_kind_mesh(replace(read, rate=float(found.exact_rate), bound=float(found.exact_bound)))
        except PlanError:
            refused += 1
            continue
        rate, bound = listed_figures(read)
        assert rate == found.exact_rate
        assert bound <= found.exact_bound
    assert refused > changes // 2


@pytest.mark.thorough
def test_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(15), 60)


@pytest.mark.slow
def test_many_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(120), 1500)
