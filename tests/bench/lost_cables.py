"""Lose one cable after another on a network of shaped links: is the right one named, and how soon do the ranks go on?

``python -m tests.bench lost_cables --losses N`` cuts N cables of each machine, one at a time, each in a new
communicator. A cable goes down (``ip link set``), or drops every frame, in both directions or in one: then its
interfaces know nothing. The communicators recover by themselves (``on_failure="shrink"``), or raise after the timeout
and the program calls ``shrink``. Times are from the cut to the end of the first all_reduce on all ranks, by the new
plan. Losses that are not named right are printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.tcp.connections import wires_of
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.lab.testbed import sandbox
from collectives.lab.testbed.network import (
    Cable,
    NetworkCommands,
    cable_flows,
    crossed_links,
    lay_out_network,
    management_address,
    network_commands,
    wires_file,
    with_management,
)
from topoplan.cli.arguments import OneLineParser
from topoplan.errors import BackendError, ProbeError
from topoplan.machine.variants import cables
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import parse_plan_file

MACHINES = ("mac-tb5-ring-x4", "mac-tb5-x4")
SCALE = 0.001  # 80 Mbit/s for each cable
NBYTES = 256 << 10
KINDS = ("down", "silent", "one way")
WAYS = {
    "shrink": ("shrink", 30.0, False),
    "planned ahead": ("shrink", 30.0, True),
    "raise": ("raise", 2.0, False),
}
"""on_failure, the timeout, and whether the plans for every single failure were made before (`plan_survival`)."""

PORT = 29600


@dataclass(frozen=True, slots=True)
class Loss:
    """A cable that is cut in a new communicator, and the commands for ip that cut it and mend it, by namespace."""

    cable: str
    kind: str
    way: str
    delay: float
    cut: Mapping[str, Sequence[str]]
    mend: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Job:
    """A network and the losses on it."""

    commands: NetworkCommands
    ranks: tuple[str, ...]
    plan: str
    wires: list[Any]
    losses: tuple[Loss, ...]


def main(words: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench lost_cables")
    parser.add_argument("--losses", type=int, default=20, metavar="N", help="cables to cut, of each machine")
    losses = parser.parse_args(list(words)).losses
    refused = sandbox.sandbox_refusal()
    if refused:
        print(f"not run: {refused}")
        return
    print(f"all_reduce of {NBYTES >> 10} KB, cables at 80 Mbit/s, {losses} losses of each machine and way:")
    print(
        "  machine          way            timeout  named right  wrong  seconds to the next result: median, most"
    )
    for name in MACHINES:
        for way in WAYS:
            _print_records(name, way, run_job(job_of(name, way, losses)))


def job_of(name: str, way: str, losses: int) -> Job:
    book = topoplan.plan_survival(name)
    plan = book.whole
    known = crossed_links(plan)
    flows = {**known, **cable_flows(plan, known)}
    network = lay_out_network(flows, plan.topology.links, SCALE)
    ranks = tuple(network.namespace(device) for device in plan.ranks)
    commands = with_management(network_commands(network), ranks)
    names = sorted(cables(plan.topology).items())
    random = np.random.default_rng(losses)
    chosen = []
    for number in range(losses):
        wire, ends = names[number % len(names)]
        cable = next(one for one in network.cables if one.ends in ends)
        kind = KINDS[number // len(names) % len(KINDS)]
        namespaces = [network.namespace(end) for end in cable.ends]
        cut, mend = _commands(kind, cable, namespaces, commands)
        chosen.append(Loss(wire, kind, way, float(random.uniform(0, 0.1)), cut, mend))
    wires = wires_file(network, flows)["wires"]
    assert isinstance(wires, list)
    return Job(commands, ranks, (book if WAYS[way][2] else plan).to_json(), wires, tuple(chosen))


def _commands(
    kind: str, cable: Cable, namespaces: Sequence[str], commands: NetworkCommands
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the commands that cut a cable and mend it: by its state, or by a hardware address that nobody has."""
    name = cable.interface
    before = [
        [line for line in commands.inside[one] if f"dev {name}" in line and "address" not in line]
        for one in namespaces
    ]
    if kind == "down":
        mend = [f"link set {name} up", *before[0]]
        return {namespaces[0]: [f"link set {name} down"]}, {namespaces[0]: mend}
    cut, mends = {}, {}
    for side in range(2 if kind == "silent" else 1):
        (line,) = [one for one in before[side] if one.startswith("neighbour add")]
        right = line.replace("neighbour add", "neighbour replace")
        cut[namespaces[side]] = [right.replace("lladdr 02:", "lladdr 06:")]
        mends[namespaces[side]] = [right]
    return cut, mends


def run_job(job: Job) -> list[dict[str, object]]:
    """Run the losses in a sandbox; return a record for each loss and rank."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        sandbox.run_in_sandbox("tests.bench.lost_cables", json.dumps(asdict(job)), stderr) as process,
    ):
        assert process.stdout is not None, "stdout is a pipe"
        records = [json.loads(line) for line in process.stdout]
        if process.wait():
            stderr.seek(0)
            raise ProbeError(stderr.read()[-2000:])
    return records


def _print_records(name: str, way: str, records: Sequence[Mapping[str, object]]) -> None:
    right, wrong, seconds = 0, 0, []
    losses = sorted({int(str(one["loss"])) for one in records})
    for number in losses:
        mine = [one for one in records if one["loss"] == number]
        cut = next(float(str(one["cut"])) for one in mine if one["cut"] is not None)
        seconds.append(max(float(str(one["end"])) for one in mine) - cut)
        wrong += sum(int(str(one["wrong"])) for one in mine)
        unlike = [one for one in mine if one["lost"] != [one["cable"]]]
        right += not unlike
        for one in unlike:
            print(
                f"    loss {number}, {one['cable']} {one['kind']}: rank {one['rank']} avoids {one['lost']}: "
                f"{one['error']}"
            )
    print(
        f"  {name:16} {way:13} {WAYS[way][1]:7g} s  {right:3} of {len(losses):3}  {wrong:5}  "
        f"{statistics.median(seconds):.3f}, {max(seconds):.3f}",
        flush=True,
    )


def in_sandbox() -> int:
    """Build the network of the job on stdin, and start its ranks."""
    line = sys.stdin.readline()
    sandbox.end_with_stdin()
    commands = json.loads(line)["commands"]
    sandbox.build_network(commands["create"], commands["inside"], commands["shape"])
    sandbox.JOB_FOLDER.mkdir()
    (sandbox.JOB_FOLDER / "job.json").write_text(line, encoding="utf-8")
    ranks = []
    for rank, namespace in enumerate(json.loads(line)["ranks"]):
        with sandbox.in_namespace(namespace):
            ranks.append(subprocess.Popen([sys.executable, "-m", "tests.bench.lost_cables", str(rank)]))
    return max(rank.wait() for rank in ranks)


def run_rank(rank: int) -> None:
    """Lose each cable of the job, as one rank."""
    warnings.filterwarnings("ignore", message="the rendezvous")
    given = json.loads((sandbox.JOB_FOLDER / "job.json").read_text(encoding="utf-8"))
    plans = parse_plan_file(given["plan"])
    for number, fields in enumerate(given["losses"]):
        record = _lose(rank, len(given["ranks"]), number, Loss(**fields), plans, given["wires"])
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


def _lose(rank: int, size: int, number: int, loss: Loss, plans: Plans, wires: list[Any]) -> dict[str, object]:
    """Cut a cable beside all_reduces, and return the first result after it."""
    on_failure, timeout, _ = WAYS[loss.way]
    backend = TcpBackend(
        rank,
        size,
        rendezvous=f"{management_address(0)}:{PORT + number}",
        wires=wires_of(wires),
        timeout=timeout,
        meeting_timeout=60.0,
    )
    mine = np.arange(NBYTES // 4, dtype=np.float32) % 97 * (rank + 1)
    wanted = np.arange(NBYTES // 4, dtype=np.float32) % 97 * (size * (size + 1) // 2)
    cut: list[float] = []
    error = ""

    def cut_cable() -> None:
        cut.append(time.monotonic())
        sandbox.change_interfaces(loss.cut)

    timer = threading.Timer(loss.delay, cut_cable)
    with Communicator(plans, backend, chunk_bytes=32 << 10, on_failure=on_failure) as comm:
        for _ in range(2):
            comm.all_reduce(mine)
        if rank == 0:
            timer.start()
        while True:
            try:
                result = comm.all_reduce(mine)
            except BackendError as failure:
                error = str(failure)
                comm.shrink()
                continue
            if comm.notes:
                break
        end = time.monotonic()
        lost = comm._members.membership.change.without_links
        comm.barrier()
        if rank == 0:
            timer.join()
            sandbox.change_interfaces(loss.mend)
    return {
        "loss": number,
        "rank": rank,
        "cable": loss.cable,
        "kind": loss.kind,
        "lost": lost,
        "error": error,
        "cut": cut[0] if cut else None,
        "end": end,
        "wrong": int(np.count_nonzero(result != wanted)),
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]))
    else:
        sys.exit(in_sandbox())
