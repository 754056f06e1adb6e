"""Write a shell script that runs rounds of pair tests with nccl-tests and writes a file for `topoplan pairs --results`.

Between servers each test is an mpirun of two ranks of one GPU each, started here, or on the first of the two servers
over ssh; within one server it is one process with two GPUs, and needs no MPI. Both ways at once it is
``sendrecv_perf``, one way ``broadcast_perf`` from the first rank; the bus bandwidth of either with two ranks is the
traffic on the wires. GPUs are numbered by bus id, as nvidia-smi does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from shlex import quote

from topoplan.engines.nccl.identities import gpu_numbers
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.pair_tests import PairTest

STARTERS = ("mpirun", "ssh")

HOST_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,253})")


def server_hosts(names: Sequence[str], servers: Sequence[str]) -> dict[str, str]:
    """Return the host of each server, in their order.

    Examples
    --------
    >>> server_hosts(("node01", "node02"), ("s0", "s1"))
    {'s0': 'node01', 's1': 'node02'}
    """
    for name in names:
        if not HOST_PATTERN.fullmatch(name):
            raise UsageError(f"hosts: {name[:60]!r} is not a host name")
        if names.count(name) > 1:
            raise UsageError(f"hosts: {name} is named twice; each server is one host")
    if len(names) != len(servers):
        raise UsageError(
            f"hosts: {len(names)} names for {len(servers)} servers; give one for each, in their order"
        )
    return dict(zip(servers, names, strict=True))


def pair_script(
    topology: Topology,
    rounds: Sequence[Sequence[PairTest]],
    *,
    starter: str,
    hosts: Mapping[str, str],
    nbytes: int,
) -> str:
    """Return the script; tests of a round run side by side, ``starter`` is one of `STARTERS`.

    A server without an entry in ``hosts`` is its own host name. ``nbytes`` is the size of a test's buffer.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.operate.calibration.pair_tests import possible_tests
    >>> pair = topoplan.cluster([topoplan.Server("dgx-1v", count=2)], nic_gbps=100, nics=1)
    >>> text = pair_script(pair, [possible_tests(pair).tests], starter="mpirun", hosts={}, nbytes=1 << 28)
    >>> [line for line in text.splitlines() if line.startswith("pair 1")]
    ['pair 1 s0.gpu0 s0 0 s1.gpu0 s1 0 &']
    """
    tests = [test for tests in rounds for test in tests]
    one_way = not tests[0].back
    server = {name: topology.device(name).server for name in topology.gpus}
    numbers: dict[str, int] = {}
    for one in dict.fromkeys(server.values()):
        numbers |= gpu_numbers([name for name in topology.gpus if server[name] == one])
    program = "broadcast_perf" if one_way else "sendrecv_perf"
    sizes = f"-b {nbytes} -e {nbytes}" + (" -r 0" if one_way else "")
    inside = all(server[test.src] == server[test.dst] for test in tests)
    lines = [
        "#!/usr/bin/env bash",
        f"# {len(tests)} pair tests in {len(rounds)} rounds, made by topoplan pairs; GB/s of each go to $OUT, for",
        "# topoplan pairs … --results. NCCL_TESTS is the folder of the programs of nccl-tests"
        + ("." if inside else ", built with MPI=1."),
        "set -u",
        "NCCL_TESTS=${NCCL_TESTS:-./build} OUT=${OUT:-pairs.csv}",
        *([] if inside else ["MPIRUN=${MPIRUN:-mpirun}"]),
        "part=$(mktemp -d) && trap 'rm -rf \"$part\"' EXIT",
        f'test="$NCCL_TESTS/{program} {sizes} -g {2 if inside else 1}"',
        "# number, first GPU, its host, its number there, second GPU, its host, its number there; and the round where",
        "# tests fill links together, for which they run long enough to do so at the same time",
        "pair() {",
        "  local log rate",
        "  log=$part/$1.log",
        *_command(starter, inside=inside),
        "  rate=$(awk '/Avg bus bandwidth/ { print $NF }' \"$log\")",
        '  [ -n "$rate" ] || cp "$log" "$OUT.$1.log"',
        '  echo "$2,$5,${rate:-failed}${8:+,$8}" > "$part/$(printf %06d "$1").csv"',
        "}",
        'done_with() { wait; cat "$part"/*.csv >> "$OUT"; rm -f "$part"/*; echo "round $1 done"; }',
        f"echo '{'src,dst' if one_way else 'a,b'},GB/s' > \"$OUT\"",
    ]
    number = 0
    for turn, side_by_side in enumerate(rounds, 1):
        for test in side_by_side:
            number += 1
            words = [str(number)]
            for end in (test.src, test.dst):
                words += [end, hosts.get(server[end], server[end] or "localhost"), str(numbers[end])]
            words += [test.together] if test.together else []
            lines.append(f"pair {' '.join(map(quote, words))} &")
        lines.append(f"done_with {turn}")
    return "\n".join(lines) + "\n"


def _command(starter: str, *, inside: bool) -> list[str]:
    if inside:
        return ['  CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$4,$7 $test ${8:+-n 1000} > "$log" 2>&1']
    ranks = " : ".join(
        f"-np 1 --host ${host} env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${gpu} $test ${{8:+-n 1000}}"
        for host, gpu in ((3, 4), (6, 7))
    )
    if starter == "ssh":
        return [f'  ssh "$3" "cd $(printf %q "$PWD") && $MPIRUN {ranks}" < /dev/null > "$log" 2>&1']
    return [f'  $MPIRUN {ranks} > "$log" 2>&1']
