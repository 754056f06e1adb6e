"""Tables of commands: what they print, and what they refuse in one line on stderr with exit status 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from tests.support.perf_logs import PerfLog
from tests.topoplan.cli.conftest import PAIR

FILES: dict[str, Callable[[], str]] = {
    "plan.json": lambda: topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).to_json(),
    "run.log": PerfLog(sizes=[1 << 10, 1 << 20, 1 << 30]).text,
    "jobs.json": lambda: json.dumps(
        {
            "format": "topoplan.jobs/1",
            "links": {"leaf0": 1.0},
            "jobs": [{"name": "a", "stages": [{"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}}]}],
        }
    ),
    "topology.conf": lambda: (
        "SwitchName=leaf1 Nodes=n[1,3]\nSwitchName=leaf2 Nodes=n[2,4]\nSwitchName=top Switches=leaf[1-2]\n"
    ),
    "pairs.csv": lambda: "a,b,GB/s\ns0,s2,6\n",
    "hosts.csv": lambda: "a,b,GB/s\na,b,6\nc,b,6\n",
}

SHORT = {
    "TWO": "--servers 2 --nic-bandwidth 100Gb/s",
    "FOUR": "dgx-1v --servers 4 --nic-bandwidth 100Gb/s --nics 1 --nic-access direct",
    "HELPERS": "nvlink-x4 --servers 4 --nics 1 --nic-bandwidth 80Gb/s --helpers 2",
    "NODES": "dgx-h100 --servers 4 --nics 2 --nic-bandwidth 400Gb/s",
    "WIRES": "topology.conf --server v100x4 --nic-bandwidth 100Gb/s --oversubscription 4",
    "NO_NICS": " ".join(f"--without-device s1.nic{number}" for number in range(4)),
    "DIGITS": "9" * 5000,
    "SIZES": ",".join(["1KB"] * 2000),
    "RANGES": "0-999999," * 9 + "0",
}

REFUSED = r"""
# commands, allocations and sizes
plan dgx-1v --gpus 8  |  GPU 8  |  0 to 7
plan dgx-1v --gpus 1,1  |  GPU 1  |  twice
plan dgx-1v --gpus=  |  ''  |  such as 1,4,5,7
plan dgx-1v --gpus 1,,2  |  '1,,2'  |  such as 1,4,5,7
plan dgx-1v --gpus -1  |  '-1'  |  such as 1,4,5,7
plan dgx-1v --gpus 5-2  |  5-2  |  write 2-5
plan dgx-1v --gpus 1e9  |  '1e9'  |  such as 1,4,5,7
compare dgx-1v --gpu-counts 3-8  |  --gpu-counts  |  --all-allocations
compare dgx-1v --all-allocations --gpu-counts 9  |  got 9  |  2 to 8
plan dgx-1v --collective brodcast  |  'brodcast'  |  did you mean broadcast?
simulate dgx-1v --collective xyz  |  'xyz'  |  use one of allreduce
plan dgx-1v --root 0  |  allreduce has no root  |  leave out
plan dgx-1v --collective broadcast --gpus 1,2 --root 3  |  root 3  |  1, 2
plan dgx-1v --collective broadcast --root x  |  'x'  |  such as 0
plan dgx-1v --collective broadcast --root -1  |  '-1'  |  such as 0
plan dgx-1v --method magic  |  'magic'  |  exact, mwu
plan dgx-1v --order size  |  'size'  |  height
plan dgx-1v --channels wifi  |  'wifi'  |  nvlink
plan pcie-x8 --channels nvlink  |  NVLink  |  --channels auto
plan dgx-1v --method mwu --epsilon 0  |  epsilon 0  |  0.05
plan dgx-1v --method mwu --epsilon nan  |  'nan'  |  0.05
plan dgx-1v --method mwu --threshold 2  |  '2'  |  0.05
plan dgx-1v --nvlink-bandwidth 25GB/s  |  states its own  |  leave out
show - --nvlink-bandwidth 0GB/s  |  '0GB/s'  |  above zero
show - --pcie-bandwidth nan  |  'nan'  |  above zero
show - --nvlink-bandwidth fast  |  'fast'  |  such as 25GB/s
show - --nvlink-bandwidth 25  |  --nvlink-bandwidth must have a unit, got '25'; write 25Gb/s or 25GB/s
show - --nvlink-gbps 25 --nvlink-bandwidth 25GB/s  |  does not go with --nvlink-
simulate dgx-1v --sizes 1KB:  |  size ''  |  for example
simulate dgx-1v --sizes=  |  size ''  |  for example
simulate dgx-1v --sizes 0:1KB  |  '0:1KB'  |  for example
simulate dgx-1v --sizes 8KB:1KB  |  '8KB:1KB'  |  for example
simulate dgx-1v --sizes -1  |  '-1'  |  for example
simulate dgx-1v --sizes huge  |  'huge'  |  for example
simulate dgx-1v --sizes 1KB:9999999TB  |  9999999TB  |  choose smaller
simulate dgx-1v --sizes DIGITS  |  99999999  |  choose smaller
compare dgx-1v --all-allocations --csv --json  |  --json and --csv  |  leave one of them out
compare dgx-1v --all-allocations --root 0  |  --all-allocations  |  leave one of them out
plan dgx-1v --json -o -  |  stdout  |  leave one of them out
plan dgx-1v --colective reduce  |  '--colective'  |  did you mean --collective?
plan dgx-1v --xyz  |  '--xyz'  |  see topoplan plan --help
--json plan dgx-1v  |  '--json'  |  after the command
plan dgx-1v dgx-2  |  'dgx-2'  |  see topoplan plan --help
plan  |  TOPO  |  see topoplan plan --help
verify  |  PLAN.json  |  see topoplan verify --help
  |  no command  |  see topoplan --help
pln dgx-1v  |  'pln'  |  did you mean plan?
frobnicate  |  'frobnicate'  |  use one of list
# bench
bench plan.json --backend smoke  |  'smoke'  |  loopback  |  tcp
bench plan.json --dtype float8  |  'float8'  |  float32
bench plan.json --dtype 99999999999i4  |  '99999999999i4'  |  float32
bench plan.json --sizes 1024TB  |  memory  |  choose smaller --sizes
bench plan.json --backend tcp --np 5  |  4 ranks  |  not for 5  |  --np 4
bench plan.json --scale 0.1  |  --scale belongs to --paced
bench plan.json --seed 1  |  --seed belongs to --chaos
bench plan.json --paced --scale 0  |  '0'  |  above zero
bench plan.json --np none  |  'none'  |  such as 4
bench plan.json --dtype bool  |  bool has no sums  |  broadcast  |  uint8
# figures
plan v100x4 --plot f.png --dpi 9  |  must be a number of dots per inch such as 300, got '9'
plan v100x4 --plot f.png --plot-size 6  |  must be a size in inches from 1x1 to 200x200, such as 6x4, got '6'
plan v100x4 --plot f.png --plot-size 0x4  |  such as 6x4, got '0x4'
plan v100x4 --plot f.png --font 'Nosuch Sans'  |  the font 'Nosuch Sans' is not installed
plan v100x4 --plot f.png --plot-format docx  |  'docx' is not a figure format; use png, svg or pdf
# files in the wrong place
show plan.json  |  plan.json: this is a plan, not a machine; topoplan verify, simulate, export and bench take it
verify dgx-1v  |  topoplan plan dgx-1v -o F.json makes a plan
bench nowhere.json  |  made by topoplan plan
check dgx-1x  |  did you mean
check run.log  |  run.log
check --pcie-bandwidth 12GB/s  |  --pcie-bandwidth belongs to TOPO
verify plan.json --machine dgx-1v  |  --machine does not go with a plan
simulate plan.json --gpus 0  |  --gpus does not go with a plan file
simulate plan.json --collective reduce  |  --collective does not go with a plan file
simulate plan.json --nvlink-bandwidth 25GB/s  |  --nvlink-bandwidth does not go with a plan file
simulate plan.json TWO  |  --servers does not go with a plan file
simulate plan.json --without-gpu 1  |  --without-gpu does not go with a plan file
export plan.json --to nccl-graph --server s0  |  --server does not go with a plan file
compare v100x4 --dpi 300  |  --dpi belongs to a figure; add --plot F.png
compare dgx-1v --gpus 3 --plot f.png  |  leave out --plot
simulate dgx-2 --headroom 1.2  |  must be a part of a link from 0.01 to 1, such as 0.95, got '1.2'
# clusters and degraded machines
plan dgx-1v --helpers 2  |  --helpers belongs to --servers
plan dgx-1v --servers 2  |  --servers needs the rate of a NIC; add --nic-bandwidth
plan dgx-1v --servers 0 --nic-bandwidth 1Gb/s  |  must be a whole number of 1 or more, got '0'
plan dgx-1v --servers 2 --nic-bandwidth 0Gb/s  |  must be a rate above zero with its unit  |  got '0Gb/s'
plan dgx-1v --servers 2 --nic-bandwidth 9e9Gb/s  |  must be a bandwidth below 1e6 Gb/s, got '9e9Gb/s'
plan dgx-1v --servers 2 --nic-gbps 0  |  '0' is not a bandwidth in Gb/s above zero
plan dgx-1v --nic-gbs 1  |  did you mean --nic-bandwidth?
plan dgx-1v --servers 2 --nic-bandwidth nan  |  must be a rate above zero with its unit  |  'nan'
plan dgx-1v --servers 100000000 --nic-bandwidth 100Gb/s  |  a cluster must have 1 to 1,000,000 servers, got 100,000,000
plan dgx-1v --servers 2 --nic-bandwidth 1e-30Gb/s  |  nic_gbps 1e-30 must be a number of Gb/s above zero
plan dgx-1v TWO --nics 5000  |  nics 5000 must be a whole number from 1 to 1,024
plan dgx-1v TWO --network ring  |  network 'ring' is unknown
plan dgx-1v TWO --network fat-tree --leaf-size 1 --oversubscription 1e9
    |  oversubscription 1000000000.0 must be a number from 1 (none) to 1000
plan dgx-1v TWO --rails 2  |  rails belongs to the network rail-optimised
plan dgx-1v TWO --network rail-optimised --rails 9  |  rail4 would be a switch without ports
plan dgx-1v TWO --network fat-tree  |  a fat tree needs leaf_size (--leaf-size)
plan dgx-1v TWO --network fat-tree --leaf-size 1 --oversubscription 0.5
    |  must be a number of 1 (no oversubscription) or more, such as 2, got '0.5'
plan dgx-1v TWO --nic-access wifi  |  nic_access 'wifi' is unknown
plan dgx-1v TWO --gpus 0-16  |  GPU 16 is out of range: 2 x dgx-1v has GPUs 0 to 15
plan dgx-1v TWO --gpus 0,12 --network rail-optimised  |  s0 and s1 cannot reach each other
plan dgx-1v TWO --without-device switch0  |  no NVLink, PCIe or network path leads from {s0.gpu0
plan dgx-1v TWO NO_NICS
    |  path leads from {s0.gpu0, s0.gpu1, s0.gpu2, s0.gpu3, s0.gpu4, s0.gpu5, s0.gpu6, s0.gpu7} to {s1.gpu0
plan dgx-1v --channels nvlink --gpus 0,3 --without-link gpu0-gpu3  |  no NVLink path leads from
plan dgx-1v --without-link=-  |  link -: dgx-1v has no device ''
plan dgx-1v '--without-link=gpu0->'  |  link gpu0->: dgx-1v has no device ''
plan dgx-1v --slow-link gpu0=5  |  'gpu0' names no link; write its two ends
plan dgx-1v --slow-link =5  |  must be a link with its rate, such as gpu1-gpu2=12.5GB/s, got '=5'
plan dgx-1v --slow-link gpu0-gpu1=nan  |  'nan' is not a bandwidth in GB/s above zero
plan dgx-1v --slow-link gpu0-gpu1=5 --slow-link 'gpu0->gpu1=6'  |  gpu0->gpu1 is given two speeds
plan dgx-1v --without-link gpu0-gpu5  |  link gpu0-gpu5 does not exist: gpu0 has links with gpu1
plan dgx-1v --slow-link gpu0-gpu1  |  must be a link with its rate, such as gpu1-gpu2=12.5GB/s, got 'gpu0-gpu1'
plan dgx-1v --slow-link gpu0-gpu1=0  |  '0' is not a bandwidth in GB/s above zero
plan dgx-1v --slow-link gpu0-gpu1=26  |  gpu0-gpu1 has 25 GB/s, and 26 is not slower
plan dgx-1v --slow-link gpu0-gpu1=5 --slow-link gpu0-gpu1=6  |  gives gpu0-gpu1 two speeds, 5 and 6
plan dgx-1v --slow-link gpu0-gpu1=5 --slow-link gpu1-gpu0=6  |  is given two speeds
plan dgx-1v --slow-link gpu0-gpu1=5 --without-link gpu1-gpu0
    |  --slow-link gpu0-gpu1 is a link that --without-link gpu1-gpu0 takes out
plan dgx-1v --slow-link gpu0-gpu1=5 --without-gpu 1  |  is a link that --without-gpu 1 takes out
plan dgx-1v --slow-link nic0-pcie0=5 --without-device nic0  |  that --without-device nic0 takes out
plan dgx-1v --without-gpu 1 --gpus 0-3  |  GPU 1 is named by --gpus and by --without-gpu
plan dgx-1v --without-gpu 5 --root 5 --collective broadcast  |  root 5 is not in the allocation 0, 1
plan dgx-1v --without-gpu 0-7  |  all 8 GPUs of dgx-1v are taken out
plan dgx-1v --gpus RANGES  |  names more than 1,048,576 GPUs
plan dgx-1v --gpus DIGITS  |  is not a list of GPU numbers
plan dgx-1v --sizes SIZES  |  more than 1,024 sizes are listed
plan dgx-1v --servers 1000000000 --nic-bandwidth 100Gb/s  |  choose fewer servers
plan dgx-1v --without-device gpu1  |  gpu1 is GPU 1; take it out by its number
plan dgx-1v --without-device nic9  |  has no device 'nic9'; did you mean nic
# engines of plan --sizes
plan v100x4 --engine windows  |  --engine belongs to --sizes; add --sizes, or leave --engine out
plan v100x4 --engine-costs f.json  |  --engine-costs belongs to --engine windows
plan v100x4 --sizes --engine messages --engine-costs f.json  |  belongs to --engine windows
plan v100x4 --sizes --engine windows --engine-costs none.json  |  none.json cannot be read
plan v100x4 --sizes --engine kernels  |  invalid choice: 'kernels'
plan v100x4 --sizes --engine windows --channels pcie  |  needs GPUs in one NVLink domain
plan dgx-h100 --sizes 1KB --engine windows --in-network nvswitch --collective all_gather  |  Hopper, got all_gath
plan dgx-h100 --gpus 0,1 --sizes 1KB --engine windows --in-network nvswitch  |  got all_reduce of 2 GPUs
# plan --sizes
plan v100x4 --sizes 1KB:1MB --method mwu  |  --method does not go with --sizes; leave one of them out
plan v100x4 --sizes 1KB:1MB --method mwu --epsilon 0.1  |  --epsilon does not go with --sizes
plan v100x4 --sizes 1KB:1MB --threshold 0.1  |  --threshold belongs to --method mwu
plan v100x4 --sizes 1KB:1MB -o - --json  |  -o - and --json both print to stdout
# plan --mesh
plan dgx-a100 --mesh dp=2,tp=4 --sizes  |  --mesh does not go with --sizes
plan dgx-a100 --mesh dp=2,tp=4 --root 1  |  --root does not go with --mesh
plan dgx-a100 --axes dp  |  --axes belongs to --mesh
plan dgx-a100 --mesh dp=2,dp=4  |  'dp=2,dp=4' must be axes with whole numbers of ranks
plan dgx-a100 --mesh dp=1/2  |  'dp=1/2' must be axes with whole numbers of ranks
plan dgx-a100 --mesh dp=2,tp=4 --axes tp=x  |  'tp=x' must be axes, such as dp, or with weights, such as dp=1,tp=3
# plan --survive
plan v100x4 --survive 2  |  --survive 2: plans are made for single failures; give 1
plan v100x4 --survive x  |  --survive
plan v100x4 --survive 1 --sizes  |  --survive does not go with --sizes
plan v100x4 --survive 1 --mesh dp=2,tp=2  |  --mesh
plan v100x4 --survive 1 --schedule ring  |  --schedule
plan v100x4 --survive 1 --method mwu  |  --method
plan v100x4 --survive 1 --channels nvlink+pcie  |  take one forest, not channels nvlink+pcie
# all-to-all
plan dgx-1v --collective alltoall --sizes  |  all_to_all is planned by paths
plan dgx-1v --collective alltoall --method three-phase  |  by method exact or mwu, got three-phase
plan dgx-1v --collective alltoall --schedule ring
    |  unknown to trees and rings; use topoplan.plan, or the schedule one-hop
plan dgx-1v --collective alltoall --channels nvlink+pcie  |  takes one choice of links
plan dgx-1v --collective alltoall --root 0  |  alltoall has no root
plan dgx-1v --collective alltoall --demand /nowhere.json  |  /nowhere.json
# export
export mi250x --to nccl-topo  |  gpu1 is joined to nic0 by PCIe
export dgx-1v --to nccl-topo --without-link 'gpu0->gpu3'  |  gpu3->gpu0 (nvlink) has no reverse direction
export dgx-1v --to nccl-topo --server s9  |  dgx-1v has no server 's9'; it has s0
export dgx-1v --to nccl-graph --gpus 3  |  dgx-1v has 1 GPU here
export dgx-1v --to nccl-topo -o /no/such/folder/f.xml  |  folder /no/such/folder does not exist
export none --to svg  |  format 'svg' is unknown; known ones are nccl-graph, nccl-topo
export dgx-1v --to nccl_topo  |  did you mean nccl-topo?
export dgx-1v  |  --to
export plan.json --to nccl-topo --max-blocks 4  |  --max-blocks does not go with nccl-topo
export dgx-1v --to mscclpp  |  mscclpp takes a plan
export plan.json --to mscclpp --size 1000  |  1000 bytes are not a multiple
# recommend
recommend dgx-1v  |  say how many GPUs the job has with --count
recommend dgx-1v --count 0  |  must be a number of GPUs
recommend dgx-1v --jobs 4,x  |  must be a list of numbers of GPUs such as 4,2,2, got '4,x'
recommend dgx-1v --jobs 4 --count 2  |  say how many GPUs the job has with --count 4, or of several
recommend dgx-1v --jobs 4,6  |  jobs of 4 and 6 GPUs do not fit on 8
recommend dgx-1v --count 2 --free 0-3 --without-gpu 1  |  GPU 1 is named by --free and
compare FOUR --without-each-server --all-allocations  |  --all-allocations does not go with --without-each-server
# report
report v100x4  |  report needs an output file; give one with -o
report v100x4 -o no/x.html  |  does not exist; make it
report v100x4 -o x.html --sizes 0  |  needs a size above zero bytes
report v100x4 -o x.html --gpus 9  |  GPU 9
report nosuch -o x.html  |  nosuch
# explain
explain run.log  |  add --machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)
explain run.log --machine dgx-h100 --gpus 0-3  |  of 8 ranks, but 4 GPUs are chosen; name the GPUs that ran with --gpus
explain run.log --machine v100x4  |  rank 4 of the log ran on device 4 of node1, and v100x4 has 4 GPUs
explain run.log --machine dgx-h100 --collective gather  |  gather
explain run.log --machine dgx-h100 --collective broadcast  |  --collective is for runs that do not name
# explain --tune
explain --tune ring  |  names no log
explain --tune rings=x.log  |  is not an algorithm of NCCL
explain --tune ring/ll=/nowhere.log  |  /nowhere.log cannot be read
explain x.log --tune ring/ll=y.log  |  LOG does not go with --tune
explain x.log --machine dgx-1v -o f.csv  |  -o belongs to --tune
explain --machine dgx-1v  |  no LOG is given
# simulate --policy
simulate jobs.json --policy tcp  |  policy 'tcp' is unknown; use fifo, fair, grouper
simulate jobs.json --policy fair --queues 2  |  --queues belongs to --policy crux
simulate jobs.json --policy crux --queues 0  |  queues must be 1 or more, and only for crux, got 0 for crux
simulate jobs.json --queues 2  |  --queues belongs to --policy
simulate jobs.json --policy fair --gpus 0-3  |  --gpus does not go with --policy
simulate jobs.json  |  is a file of jobs; topoplan simulate runs it under a --policy
# order
order topology.conf  |  states how Slurm's nodes are joined, and not what a node is: topoplan order takes it with
order topology.conf --server dgx-1v  |  a network needs the rate of a NIC; add --nic-bandwidth
order WIRES --servers 2  |  --servers does not go with a description of Slurm
order WIRES --hosts n9  |  node n9 is not in topology, which has 4 nodes, n1 to n4
order WIRES --hosts n[1-  |  --hosts: no such file, and 'n[1-' has a bracket that is not closed
order WIRES --slurm-topology x  |  topology 'x' is not in a topology.conf
order topology.conf --server nothing --nic-bandwidth 1Gb/s  |  no machine 'nothing' in the library
order dgx-1v --server dgx-1v  |  dgx-1v is neither; leave --server out
order dgx-1v --slurm-topology x  |  --slurm-topology belongs to --server
order dgx-1v --hosts a,b  |  names must be one for each of 1 hosts, got 2 different ones
order dgx-1v --gpus 1  |  an order needs two ranks or more, got 1
order dgx-1v --gpus 1,1  |  GPU 1 is named twice
order dgx-1v --mesh dp=3  |  the mesh must have as many ranks as GPUs, 8, got dp 3
order dgx-1v --preset megatron  |  --preset belongs to --mesh
order dgx-1v --mesh dp=2,tp=4
    |  --mesh needs the weights of its 2 axes  |  such as dp=1,tp=8, or --preset megatron (tp inside
order dgx-1v --mesh dp=2,x=4 --preset megatron  |  not of axis 'x'; rename the axis
order dgx-1v --mesh dp=2,tp=4 --axes dp --preset megatron  |  --preset gives the weights that --axes states
order dgx-1v -o f  |  -o needs a --format
order dgx-1v --json --format slurm  |  --json does not go with --format slurm
order dgx-1v --format toml  |  invalid choice: 'toml'
order dgx-1v --collective gossip  |  collective 'gossip' is unknown
order dgx-1v --collective alltoall  |  rings and trees do not do alltoall
# pairs
pairs dgx-h100 --servers 2 --nics 2 --nic-bandwidth 400Gb/s --results hosts.csv
    |  name 3 hosts, such as a, and 2 x dgx-h100 has 2 servers
pairs dgx-1v --results hosts.csv  |  dgx-1v has 1 server; give --servers 3
pairs NODES --results hosts.csv --hosts n[1-3]  |  3 names for 4 servers
pairs FOUR --results nowhere  |  nowhere cannot be read
pairs FOUR --results pairs.csv --times 1  |  is not a planned test
pairs FOUR --results pairs.csv --format ssh  |  do not go together
pairs FOUR -o x  |  -o writes a script
pairs FOUR --json --format ssh  |  leave one out
pairs FOUR --format ssh --hosts pairs.csv  |  is not a host name
pairs FOUR --format ssh --hosts n[1-3]  |  3 names for 4 servers
pairs FOUR --hosts n[1-4]  |  --hosts is for scripts
pairs FOUR --format ssh --size 0  |  a test of 0 bytes measures nothing
pairs FOUR --results pairs.csv --csv  |  do not go together
pairs dgx-1v --gpus 2  |  pair tests need two GPUs or more, got 1
pairs - --results -  |  stdin is read once
"""
"""A command, and parts of the line that it is refused with; lines with an indent go on."""


PRINTED = r"""
plan dgx-1v --collective reduce --root 5  |  reduce to gpu5 on dgx-1v, 8 GPUs
    |  over NVLink: provably optimal  |  algbw        150 GB/s
    |  upper bound  150 GB/s: only 150 GB/s enter {gpu5}; each byte must enter it once
plan dgx-1v TWO --gpus 0,1,9 --root 9 --collective broadcast
    |  broadcast from s1.gpu1 on 2 x dgx-1v, 3 GPUs (s0.gpu0,1 s1.gpu1)
plan dgx-1v --without-link gpu0-gpu3 --notes  |  algbw        78.5714 GB/s  |  planned in
    |  note: taken out: link gpu0-gpu3
plan HELPERS  |  8.33333 GB/s, busbw 15.625 GB/s  |  over NVLink and the network: provably optimal
compare HELPERS  |  all_reduce on 4 x nvlink-x4 + 2 helpers
plan dgx-2 --gpus 0,1 --survive 1  |  3 failures without NVLink: over PCIe
    |  5 single failures, worst 12 GB/s without link gpu0-nvswitch0
plan v100x4 --order first  |  over NVLink: provably optimal
    |  ; the first such plan that was found: --order height looks for fewer trees
plan dgx-1v --gpus 1,4,5,7 --sizes 1KB:1MB --notes  |  note: no one-hop: gpu4 reaches gpu1 only through another GPU
    |  note: no ring: no NVLink ring exists
compare dgx-1v --gpus 1,4,5,7 --notes  |  50.00  |  NCCL before 2.8: pcie ring     5.33
    |  note: pcie ring: no NVLink ring exists
compare v100x4 --all-allocations  |  11 allocations
compare torus:40,40  |  all_reduce on torus:40,40, 1,600 GPUs of 1,600 servers, over the network: trees and NCCL's best
    |  NCCL: network ring  25.02  50.00       1.00x
compare torus:2,200 --collective all_gather  |  NCCL         not compared: its model needs switches between servers, or
order dgx-1v  |  GPUs         0,3,2,1,5-7,4 on every host  |  provably optimal: every order was tried
order dgx-1v --gpus 0,3,2,1,5,6,7,4  |  : the order as given is the best
simulate dgx-2  |  the plan is faster than NCCL's best from 64KB on
    |  NCCL's ring before 2.8, as messages; the plan is never slower
"""
"""A command, and parts of what it prints."""


def rows(table: str) -> list[tuple[str, tuple[str, ...]]]:
    lines = table.strip().replace("\n    |", "  |").splitlines()
    parts = [line.split("  |  ") for line in lines if not line.startswith("#")]
    return [(command, tuple(fragments)) for command, *fragments in parts]


def words_of(command: str) -> list[str]:
    return shlex.split(" ".join(SHORT.get(word, word) for word in command.split(" ")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    for name, text in FILES.items():
        (place / name).write_text(text())
    return place


@pytest.mark.parametrize(("command", "fragments"), rows(REFUSED))
def test_is_one_line_with_value_and_remedy(
    refused: Done, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, fragments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    line = refused(*words_of(command), stdin=PAIR)
    assert all(fragment in line for fragment in fragments), line
    assert line.startswith("topoplan")
    assert len(line) < 700
    assert {place.name for place in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize(("command", "fragments"), rows(PRINTED))
def test_prints(done: Done, command: str, fragments: tuple[str, ...]) -> None:
    out = done(*words_of(command))
    assert all(fragment in out for fragment in fragments), out
