"""Every reader of texts that people hand in, with whole texts for it: what `tests.bench.mutations` damages.

A reader takes a text as a file holds it, or refuses it with one of topoplan's errors. Logs go through ``topoplan
explain``, plans are verified and engines' files are run, since what follows a reader must stand what it let through.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import topoplan
from collectives.backends.tcp.connections import parse_wires
from tests.support import nccl_texts
from tests.support.damaged_machines import as_text, read_library
from tests.support.nccl_debug_logs import healthy, over_sockets, without_peers
from tests.support.nvlink_listings import Listings
from tests.support.perf_logs import PerfLog
from topoplan.cli import explain
from topoplan.cli.main import main
from topoplan.cli.sources import host_names, parse_claimed_plan, read_demand, read_trees
from topoplan.cli.verify import engine_of, read_engine_file
from topoplan.engines.nccl.identities import parse_bus_ids
from topoplan.engines.nccl.tuner_file import parse_label
from topoplan.errors import UsageError
from topoplan.machine.named_nodes import cluster_of_nodes
from topoplan.model.jobs import read_jobs
from topoplan.model.times_by_size import check_times
from topoplan.model.window_engine import load_costs
from topoplan.operate.calibration.pair_results import parse_results
from topoplan.operate.compare import nccl_debug_run
from topoplan.plans.mesh_plans import MeshPlans, verify_mesh
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.survival import SurvivalPlans, verify_survival
from topoplan.plans.verify import verify_all
from topoplan.reading.clusters import regular_network
from topoplan.reading.load import decode_text, load_network, load_text
from topoplan.reading.nvlink_overlay import apply_nvlink_status
from topoplan.schedules.user_trees import plan_from_trees
from topoplan.units import parse_bandwidth, parse_gpu_list, parse_size, parse_sizes

SMALL = "nvlink-x4"  # the machine of plans and pairs


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    # its texts, or what makes them; a few are made by planning
    made: tuple[str, ...] | Callable[[], tuple[str, ...]]
    read: Callable[[str], object]

    @property
    def texts(self) -> tuple[str, ...]:
        return self.made if isinstance(self.made, tuple) else self.made()


def readers() -> tuple[Reader, ...]:
    return (
        Reader("topology JSON", _topology_texts, _machine),
        Reader("cluster JSON", CLUSTERS, _machine),
        Reader("nvidia-smi topo -m", lambda: (as_text(read_library("dgx-1v")), NICS, UNEVEN), _machine),
        Reader(
            "nvidia-smi nvlink",
            _nvlink_texts,
            lambda text: apply_nvlink_status(topoplan.load("dgx-1v"), decoded(text) + "\n"),
        ),
        Reader("rocm-smi", (ROCM, AMD), _machine),
        Reader("NCCL topology XML", _xml_texts, _machine),
        Reader("Slurm's topology", SLURM, _nodes),
        Reader(
            "host list",
            ("node[01-08,12],login", "a1-b[2-3]-c[04-06]"),
            lambda text: host_names(decoded(text)),
        ),
        Reader("nccl-tests text", _perf_texts, explained("dgx-1v")),
        Reader("nccl-tests JSON", PERF_JSON, explained("dgx-1v")),
        Reader("topoplan bench", BENCH, explained("dgx-1v")),
        Reader(
            "NCCL_DEBUG=INFO",
            _debug_texts,
            explained("dgx-1v", "--servers", "2", "--nic-bandwidth", "100Gb/s"),
        ),
        Reader("pair results", PAIRS, lambda text: parse_results(decoded(text))),
        Reader("bus ids", (BUS_IDS,), lambda text: parse_bus_ids(decoded(text))),
        Reader("plan files", _plan_texts, _plans),
        Reader("engines' files", _engine_texts, _engine_file),
        Reader("jobs", (JOBS,), lambda text: read_jobs(decoded(text))),
        Reader("user-defined trees", TREES, _trees),
        Reader("demand", ('{"bytes": [[0, 5, 1], [7, 0, 2.5], [1, 1, 0]]}',), _from_file(read_demand)),
        Reader("engine costs", (COSTS,), _from_file(load_costs)),
        Reader("wires", (WIRES,), lambda text: parse_wires(decoded(text), "wires.json")),
        Reader(
            "values of options",
            ("torus:3,3@10", "bcube:4,2", "0-3,7", "1KB:1GB", "64KB,1MB", "25.5", "ring/ll"),
            _options,
        ),
    )


def decoded(text: str) -> str:
    """Return a text as a file of it is read."""
    return decode_text(text.encode("utf-8", "surrogatepass"))


def _machine(text: str) -> object:
    return load_text(decoded(text), "file", "file")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="topoplan-texts-")


def _file() -> Path:
    """Return the file of this process in which a reader of files finds its text."""
    return Path(_folder().name, f"text{os.getpid()}")


def _from_file(read: Callable[[str], object]) -> Callable[[str], object]:
    def from_file(text: str) -> object:
        _file().write_bytes(text.encode("utf-8", "surrogatepass"))
        return read(str(_file()))

    return from_file


def explained(*machine: str) -> Callable[[str], object]:
    """Return what runs ``topoplan explain``, as a table or as JSON; bounds are worked out once in a process."""

    def run(path: str) -> None:
        form = ("--json",) if os.path.getsize(path) % 2 else ()
        told = io.StringIO()
        with (
            patch.object(explain, "attainable", _reachable),
            patch.object(nccl_debug_run, "nccl_ring", _nccl_ring),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(told),
        ):
            status = main(["explain", path, *(("--machine", *machine) if machine else ()), *form])
        if status:
            raise UsageError(told.getvalue())

    return _from_file(run)


_reachable, _nccl_ring = cache(explain.attainable), cache(nccl_debug_run.nccl_ring)


def _nodes(text: str) -> object:
    network = load_network(decoded(text) + "\n")
    if network is None:
        raise UsageError("no topology of Slurm")
    if len(network.nodes) > 100:
        return network
    return cluster_of_nodes(network, {node: topoplan.load(SMALL) for node, _ in network.nodes}, nic_gbps=100)


def _plans(text: str) -> object:
    text = decoded(text)
    if '"topoplan.mesh/1"' in text:
        return verify_mesh(MeshPlans.from_json(text))
    plans = parse_claimed_plan(text, "file")
    if isinstance(plans, SurvivalPlans):
        return verify_survival(plans)
    reports = verify_all(plans)
    return check_times(plans) if isinstance(plans, SizePlans) else reports


def _engine_file(text: str) -> object:
    text = decoded(text)
    engine = engine_of(text)
    if engine is None:
        raise UsageError("no engine's file")
    return read_engine_file(text, engine)()


def _trees(text: str) -> object:
    return plan_from_trees(SMALL, "allreduce", _from_file(read_trees)(text))  # type: ignore[arg-type]


def _options(text: str) -> object:
    """Read a text as every kind of value that has its form."""
    told = ""
    for read in (regular_network, parse_gpu_list, parse_sizes, parse_size, parse_bandwidth, parse_label):
        try:
            if read(text) is not None:
                return read
        except UsageError as error:
            told = str(error)
    raise UsageError(told or "no value")


@cache
def _topology_texts() -> tuple[str, ...]:
    return tuple(json.dumps(read_library(name)) for name in (SMALL, "mi250"))


@cache
def _nvlink_texts() -> tuple[str, ...]:
    listings = Listings(topoplan.load("dgx-1v"), dead=[("gpu0", "gpu1", 0)])
    return (listings.status(), listings.remotes(), listings.status() + listings.remotes())


@cache
def _xml_texts() -> tuple[str, ...]:
    wires = {(0, 1): 2, (0, 2): 1, (1, 3): 1, (2, 3): 2}
    return (nccl_texts.machine(4, wires, nics=2), nccl_texts.machine(4, {}, switched=6))


@cache
def _perf_texts() -> tuple[str, ...]:
    sizes = [1 << 10, 1 << 20, 1 << 30]
    four = (("node1", range(4)),)
    return (
        PerfLog(sizes=sizes, rate=80).text(),
        PerfLog("all_reduce", four, sizes, newer=False, names_test=False, rate=40).text(),
        PerfLog("reduce", four, sizes, checked=False, rate=40).text() + PerfLog(sizes=sizes, rate=50).text(),
        "[1,0]<stdout>:" + PerfLog(sizes=sizes, rate=80).text().replace("\n", "\n[1,0]<stdout>:"),
    )


@cache
def _debug_texts() -> tuple[str, ...]:
    sparse = "\n".join(line for line in without_peers().text().splitlines() if "Ring" not in line)
    return (replace(healthy(), repeat=1).text(), over_sockets().text(), sparse)


@cache
def _plan_texts() -> tuple[str, ...]:
    """Return a plan, plans by size, plans for failures and plans of a mesh."""
    path = str(_file())
    made = []
    for words in (
        (),
        ("--sizes", "1KB,64KB,16MB"),
        ("--survive", "1"),
        ("--mesh", "dp=2,tp=2", "--axes", "dp"),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            status = main(["plan", SMALL, *words, "-o", path])
        assert status == 0, words
        made.append(Path(path).read_text(encoding="utf-8"))
    return tuple(made)


@cache
def _engine_texts() -> tuple[str, ...]:
    path, made = str(_file()), []
    with contextlib.redirect_stdout(io.StringIO()):
        main(["plan", "pcie-x8", "--gpus", "0,1,2", "--schedule", "ring", "-o", path])
    for form in ("msccl-xml", "mscclpp"):
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
            status = main(["export", path, "--to", form])
        assert status == 0, form
        made.append(told.getvalue())
    return tuple(made)


CLUSTERS = (
    json.dumps(
        {
            "format": "topoplan.cluster/1",
            "name": "two boxes",
            "servers": [
                {"machine": "dgx-1v", "gpus": [0, 1, 2]},
                {"machine": "nvlink-x4", "gpus": "1-3", "count": 2, "nics": 1, "nic_gbps": 40},
            ],
            "network": {
                "kind": "rail-optimised",
                "nic_gbps": 100,
                "oversubscription": 2,
                "transport": "rdma",
            },
        },
        indent=1,
    ),
)

NICS = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tPIX\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""

UNEVEN = """\
        GPU0    GPU1    GPU2    CPU Affinity
GPU0     X      NV2     SYS     0-15
GPU1    NV2      X      PHB     0-15
GPU2    SYS     PHB      X      16-31
"""

ROCM = """\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           15
GPU1   15           0            15
GPU2   15           15           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            1
GPU1   1            0            1
GPU2   1            1            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            XGMI
GPU2   XGMI         XGMI         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[1]\t\t: (Topology) Numa Affinity: 0
GPU[2]\t\t: (Topology) Numa Node: 1
GPU[2]\t\t: (Topology) Numa Affinity: 1
================================== End of ROCm SMI Log ===================================
"""

AMD = """\
ACCESS TABLE:
             0000:01:00.0  0000:02:00.0
0000:01:00.0 ENABLED       ENABLED
0000:02:00.0 ENABLED       ENABLED

WEIGHT TABLE:
             0000:01:00.0  0000:02:00.0
0000:01:00.0 0             15
0000:02:00.0 15            0

HOPS TABLE:
             0000:01:00.0  0000:02:00.0
0000:01:00.0 0             1
0000:02:00.0 1             0

LINK TYPE TABLE:
             0000:01:00.0  0000:02:00.0
0000:01:00.0 SELF          XGMI
0000:02:00.0 XGMI          SELF

NUMA BW TABLE:
             0000:01:00.0  0000:02:00.0
0000:01:00.0 N/A           50000-100000
0000:02:00.0 50000-100000  N/A
"""

SLURM = (
    "# racks\nSwitchName=leaf1 Nodes=node[01,03,05] LinkSpeed=200\nswitchname=leaf2 nodes=node[02,04],node[06-07]\n"
    "SwitchName=spine \\\n    Switches=leaf[1-2]\n",
    "BlockName=b1 Nodes=Node[104-106]\nBlockName=b2 Nodes=Node[201-202],Node205\nBlockSizes=3,6\n",
    "---\n- topology: small\n  cluster_default: true\n  tree:\n    switches:\n        - switch: leaf1\n"
    "          nodes: n[1-2]\n"
    "- topology: racks\n  block:\n    blockSizes:\n        - 2\n    blocks:\n    - block: rack2\n      nodes: n[3-4]\n",
)

_BLOCK = {"time": 120.5, "alg_bw": 8.7, "bus_bw": 15.225, "nwrong": 0.0}

PERF_JSON = (
    json.dumps(
        {
            "version": 3,
            "start_time": "2026-11-02 10:00:00",
            "args": ["./build/all_reduce_perf", "-b", "1M", "-J", "out.json"],
            "nccl_version": "2.30.7",
            "config": {
                "nthreads": 1,
                "ngpus": 8,
                "blocking": "false",
                "devices": [
                    {
                        "rank": rank,
                        "group": 0,
                        "pid": 7,
                        "hostname": "node1",
                        "device": rank,
                        "device_hex": f"0x{rank + 1:02x}",
                        "device_info": "Tesla V100-SXM2-32GB",
                    }
                    for rank in range(8)
                ],
            },
            "results": [
                {
                    "size": size,
                    "count": size // 4,
                    "type": "float",
                    "redop": "sum",
                    "root": "-1",
                    "out_of_place": _BLOCK | {"time": size / 8700},
                    "in_place": _BLOCK | {"time": size / 8700},
                    "actual_iterations": 20,
                    "experiment_name": "all_reduce_perf",
                }
                for size in (1 << 20, 1 << 24)
            ],
        },
        indent=1,
    ),
    '{"#wrong":"0","algBw":0.053,"busBw":0.093,"gpus":8,"inPlace":0,"name":"AllReduce","redop":"sum","size":1024,'
    '"time":19.184,"type":"float"}\n'
    '{"#wrong":"0","algBw":0.051,"busBw":0.089,"gpus":8,"inPlace":1,"name":"AllReduce","redop":"sum","size":1024,'
    '"time":19.898,"type":"float"}\n',
)

BENCH = (
    json.dumps(
        {
            "ranks": [f"gpu{rank}" for rank in range(4)],
            "collective": "allreduce",
            "rows": [
                {
                    "schedule": "plan",
                    "size": 1 << 20,
                    "type": "float32",
                    "redop": "sum",
                    "time": 262.144,
                    "algbw": 4.0,
                    "busbw": 6.0,
                    "wrong": 0,
                }
            ],
        },
        indent=1,
    ),
    "# allreduce of 8 ranks, loopback, median of 20\n"
    "#       size         count      type   redop     time   algbw   busbw  #wrong\n"
    "#        (B)    (elements)                       (us)  (GB/s)  (GB/s)\n"
    "     1048576        262144   float32     sum   262.14    4.00    7.00       0\n",
)

PAIRS = (
    "a,b,GB/s\ns0.gpu0,s1.gpu0,11.5\ns0.gpu1,s1.gpu1,failed\n",
    "src,dst,GB/s\n# one way\ngpu0,gpu1,22.5,1\ngpu2,gpu3,23,1\n",
    '{"one_way": true, "pairs": [{"src": "gpu0", "dst": "gpu1", "bandwidth": 22.5, "together": "1"}]}',
)

BUS_IDS = "index, pci.bus_id\n0, 00000000:07:00.0\n1, 00000000:0A:00.0\n"

JOBS = (
    '{"format": "topoplan.jobs/1", "links": {"leaf0": 1.0}, "horizon": 12.0, "jobs": [{"name": "a", "gpus": 8, '
    '"weight": 1.0, "release": 0.0, "stages": [{"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}, '
    '"overlap": 0.5}]}]}'
)

TREES = (
    '{"format": "topoplan.trees/1", "trees": [{"edges": [[0, 1], [1, 2], [2, 3]], "share": "1/3"}, [0, [1, 2], 3]]}',
    '[{"chain": [0, 1, 2, 3]}, {"ring": [3, 1, 0, 2]}]',
)

COSTS = (
    '{"format": "topoplan.engine-costs/1", "name": "H100", "source": "invented", "launch": 5e-6, "hop": 1e-6, '
    '"allreduce_rate": 20.0, "other_rate": 25.0, "peak": 450.0, "packet_factor": 9.0, "fewest_blocks": 1}'
)

WIRES = (
    '{"format": "topoplan.wires/1", "wires": [{"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1",'
    ' "to": "10.1.0.2"}, {"source": 1, "destination": 0, "channel": "nvlink", "from": "10.1.0.2", "to": "10.1.0.1"}]}'
)
