"""The same plan files byte for byte from processes with different hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.checkout import ROOT

PROGRAM = """
import hashlib, json
import topoplan
from topoplan import Server, cluster, load, nvswitch_cluster, plan, without_devices, without_gpus
from tests.support.irregular_fabrics import irregular, mi250
from topoplan.operate.compare.comparison import compare_all
from topoplan.operate.compare.table import to_object

dgx = load("dgx-1v")
def cluster_in_pieces():
    pair = cluster([Server(dgx, [0, 1, 2]), Server(dgx, [3, 4, 5, 6, 7])], nic_gbps=100, nics=2)
    return without_gpus(topoplan.without_links(pair, ["s1.gpu4-s1.gpu5"]), [6])

made = {
    "exact": lambda: plan(dgx, "allreduce"),
    "mwu": lambda: plan(dgx, "allreduce", method="mwu"),
    "few trees": lambda: plan(dgx, "broadcast", order="trees", gpus=[0, 1, 2, 3, 4]),
    "two servers": lambda: plan(nvswitch_cluster(2), "allgather"),
    "two servers, allreduce": lambda: plan(nvswitch_cluster(2), "allreduce"),
    "1024 GPUs": lambda: plan(nvswitch_cluster(128), "allgather"),
    "irregular": lambda: plan(mi250(), "allgather"),
    "measured": lambda: plan(irregular("ports", 0), "allreduce"),
    "broken": lambda: plan(cluster_in_pieces(), "reduce_scatter"),
    "dead NIC": lambda: plan(without_devices(nvswitch_cluster(2), ["s0.nic3"]), "broadcast"),
    "split": lambda: plan(dgx, "broadcast", gpus=[0, 1, 2, 3], channels="nvlink+pcie", nbytes=1 << 26),
    "all-to-all": lambda: plan(dgx, "alltoall"),
    "all-to-all on 16": lambda: plan(nvswitch_cluster(2), "alltoall"),
    "all-to-all, measured": lambda: plan(irregular("ports", 0), "alltoall"),
    "by size": lambda: topoplan.plan_by_size(dgx, "allreduce", gpus=[0, 1, 2]),
}
for name, make in made.items():
    print(name, hashlib.sha256(make().to_json().encode()).hexdigest())
print(json.dumps(to_object(compare_all(load("mi250x"), sizes=[3, 4]))))
"""


def digests(seed: int) -> str:
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.mark.thorough
def test_plans_are_the_same_in_every_process() -> None:
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(digests, (1, 2, 3)))
    assert len(outputs[0].splitlines()) == PROGRAM.count("lambda:") + 1
    assert set(outputs) == {outputs[0]}
