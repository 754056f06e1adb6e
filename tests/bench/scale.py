"""From 128 to 4096 GPUs: planning, writing, reading, checking and memory, and the whole command; the control plane.

``python -m tests.bench scale --ranks 64,128,256,512`` measures the control plane alone: processes that join a
job, agree and gather. The bytes are the system's counts of the connections of the rendezvous.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import linear_regression
from typing import Any

from collectives.backends.tcp.connections import TcpConnections
from collectives.peers import rendezvous_client
from collectives.peers.connections import ConnectionLoop, Message, encode_message
from collectives.peers.control_plane import Signature
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.rendezvous_state import RendezvousState
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.bench.measure import LIMIT, measured
from tests.bench.tables import Table
from tests.support.checkout import ROOT
from topoplan.cli.arguments import OneLineParser
from topoplan.errors import UsageError

MACHINES = (
    *(f"{servers} x A100" for servers in (16, 64, 128, 256, 512)),
    *(f"{servers} x MI250" for servers in (16, 32, 64)),
    *(f"{servers} x A100, measured" for servers in (16, 64, 128)),
    *(f"{servers} x H100, measured" for servers in (8, 32, 128)),
)
COLLECTIVES = ("allgather", "allreduce", "broadcast")


RANKS = "64,128,256,512"
HOST_RANKS = 8  # ranks of a host
AGREEMENTS = 5  # agreements, and gathers, that are averaged
EXTRAPOLATED = 100_000
JOIN_SECONDS = 120.0

_BYTES = struct.Struct("QQ")  # of Linux's tcp_info: acknowledged, received
_BYTES_AT = 120


def main(options: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench scale", description=__doc__)
    parser.add_argument(
        "--ranks", metavar="N,...", help=f"only the control plane, for so many ranks ({RANKS})"
    )
    given = parser.parse_args(options)
    if given.ranks is None:
        _print_planning()
        print()
    counts = sorted({int(count) for count in (given.ranks or RANKS).split(",")})
    _print_control_plane(counts)
    _print_state(EXTRAPOLATED)


def _print_planning() -> None:
    print(
        "servers of 8 A100 or 16 MI250 dies; measured: every link within 10 % of what is stated, no two alike;"
    )
    print("CPU seconds of one process each, file in kB, largest memory in MiB, gap below the proved bound")
    columns = "machine|<19 collective|<10 build|6.2f plan|7.2f write|6.2f read|6.2f verify|6.2f kB|6 MiB|5 GB/s|8.3f"
    table = Table(*columns.split(), "gap|6.2%", "height|6", "trees|5")
    for machine in MACHINES:
        for collective in COLLECTIVES:
            found = measured(machine, collective, runs=1)
            if found is None:
                table.row(machine, collective, f"over {LIMIT} s")
                continue
            table.row(
                *(machine, collective, found.build, found.plan, found.write, found.read, found.verify),
                *(found.size // 1000, found.peak >> 20, found.rate, 1 - found.rate / found.bound),
                *(found.height, found.trees),
            )
    print(
        "\nwhole commands for 1024 GPUs, 128 DGX A100 with NICs of 200 Gb/s; CPU seconds, start-up included"
    )
    with tempfile.TemporaryDirectory() as folder:
        _print_commands(Path(folder))


def _print_commands(folder: Path) -> None:
    servers, network = {"machine": "dgx-a100", "count": 128}, {"kind": "rail-optimised", "nic_gbps": 200}
    cluster = {"format": "topoplan.cluster/1", "servers": [servers], "network": network}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    for collective in COLLECTIVES[:2]:
        (folder / "plan.json").unlink(missing_ok=True)
        named = "dgx-a100 --servers 128 --nic-bandwidth 200Gb/s"
        _print_command(folder, f"plan {named} --collective {collective} -o plan.json")
        _print_command(folder, f"plan cluster.json --collective {collective}")
        if (folder / "plan.json").exists():
            _print_command(folder, "verify plan.json")
            _print_command(folder, "simulate plan.json --sizes 1MB:1GB")


def _print_command(folder: Path, command: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "topoplan", *command.split()],
            cwd=folder,
            check=False,
            capture_output=True,
            timeout=LIMIT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    except subprocess.TimeoutExpired:
        print(f"  over {LIMIT} s  topoplan {command}")
        return
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"  {seconds:6.2f} ({time.perf_counter() - started:.2f} elapsed, {len(done.stdout) / 1000:.1f} kB printed"
        f"{'' if done.returncode == 0 else f', STATUS {done.returncode}'})  topoplan {command}"
    )


@dataclass(frozen=True)
class Phase:
    """Seconds of all ranks, CPU seconds of the rendezvous, bytes to and from other hosts, messages of a rank."""

    seconds: float
    cpu: float
    sent: float
    received: float
    messages: float


def _print_control_plane(counts: Sequence[int]) -> None:
    print(
        f"control plane: N processes share the processors of this machine, as if {HOST_RANKS} were on a host;"
    )
    print(
        "CPU seconds of the rendezvous; MB out of and into its host, and both for another one; messages of a rank;"
    )
    print("tcp: with the addresses and contact data that its ranks announce, which others do not need")
    phases = ("join", "join, tcp", "agree", "gather, equal texts of 100 B", "gather, different texts")
    columns = "ranks|7 s|8.4f CPU|8.4f out|9.4f in|8.4f another|9.4f messages|8.1f"
    table = Table("phase|<28", *columns.split())
    found: dict[str, list[Phase]] = {name: [] for name in phases}
    for count in counts:
        join, agree, equal, different = _joined(count, announces=False)
        tcp, *_ = _joined(count, announces=True)
        for name, phase in zip(phases, (join, tcp, agree, equal, different), strict=True):
            found[name].append(phase)
    for name in phases:
        for count, one in zip(counts, found[name], strict=True):
            sent, received = one.sent / 1e6, one.received / 1e6
            another = (sent + received) / max(count - HOST_RANKS, 1) * HOST_RANKS
            table.row(name, count, one.seconds, one.cpu, sent, received, another, one.messages)
        if len(counts) > 1 and counts[0] > HOST_RANKS:
            cpu, out = (
                _fit(counts, [one.cpu for one in found[name]]),
                _fit(counts, [one.sent for one in found[name]]),
            )
            print(f"    exponent of the ranks: CPU {cpu[0]:.2f}, out {out[0]:.2f}; extrapolated to", end=" ")
            print(f"{EXTRAPOLATED:,} ranks, not measured: {cpu[1]:.3g} s, {out[1] / 1e6:.3g} MB")


def _print_state(count: int) -> None:
    """Print what the rendezvous itself does for so many ranks, without processes and connections."""
    hub, signature = RendezvousState(count), "x" * 512
    began = time.process_time()
    for rank in range(count):
        address, port = f"10.{rank // HOST_RANKS >> 8}.{rank // HOST_RANKS & 255}.1", 30_000 + rank % 10_000
        fields = {"type": "hello", "rank": rank, "size": count, "processes": f"host {rank // HOST_RANKS}"}
        about = _about(rank, address, {address: port}, secrets.token_hex(32))
        _, posts = hub.join({**fields, **about, "timeout": JOIN_SECONDS}, 0.0)
    sent, last, text = 0, None, b""
    for _, message in posts:
        if message is not last:
            last, text = message, encode_message(message)
        sent += len(text)
    joined = time.process_time()
    for rank in range(count):
        hub.receive(rank, {"type": "agree", "signature": signature, "met": 0}, 0.0)
    agreed = time.process_time() - joined
    print(f"the rendezvous' state for {count:,} ranks of tcp, without connections: join", end=" ")
    print(f"{joined - began:.2f} CPU s and {sent / 1e6:.0f} MB out, agreement {agreed:.2f} CPU s")


def _fit(counts: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return the exponent of the ranks that fits values best, and the value that it gives for many more ranks."""
    line = linear_regression([log(count) for count in counts], [log(max(one, 1e-9)) for one in values])
    return line.slope, exp(line.intercept + line.slope * log(EXTRAPOLATED))


def _about(rank: int, general: str | None, ports: dict[str, int], links: str) -> Message:
    """Return an announcement as that of a rank of the tcp back end."""
    home = f"{rank // HOST_RANKS:08d}-3f6c-4c4c-9d0f-0123456789abnet:[4026531840]"
    card = [
        f"10.0.{rank // HOST_RANKS}.1",
        1,
        secrets.token_hex(32),
        home,
        f"{home}pid:[4026531836]",
        rank,
        -1,
    ]
    about = {"general": general, "ports": ports, "links": links, "meets": True}
    return {**about, "survivors": json.dumps(card), "flight_bytes": 1 << 22}


def _joined(count: int, *, announces: bool) -> list[Phase]:
    """Return the phases of so many processes: join, agree, gather of equal texts and of different ones."""
    size = 4
    gates = [
        os.pipe() for _ in range(size + 1)
    ]  # a phase begins when its gate is closed; the last one ends the job
    ended = [os.pipe() for _ in range(size)]
    served, pids = Rendezvous("127.0.0.1:0", count), list[int]()  # it starts behind the forks
    for rank in range(count):
        pid = os.fork()
        if not pid:
            for _, write in gates:
                os.close(write)
            served._listener._socket.close()
            _work(
                rank,
                count,
                served.address,
                announces,
                [gate[0] for gate in gates],
                [end[1] for end in ended],
            )
        pids.append(pid)
    phases, before = list[Phase](), (0, 0, 0)
    with served as rendezvous:
        for number in range(size):
            begun, cpu = time.monotonic(), time.process_time()
            os.close(gates[number][1])
            seen = 0
            while seen < count and select.select([ended[number][0]], [], [], JOIN_SECONDS)[0]:
                seen += len(os.read(ended[number][0], count))
            if seen < count:
                raise UsageError(f"{count - seen} of {count} ranks have not come through phase {number}")
            seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
            now = _counted(rendezvous, count)
            times = AGREEMENTS if number else 1
            sent, received, messages = ((new - old) / times for new, old in zip(now, before, strict=True))
            remote = max(count - HOST_RANKS, 0) / count
            phases.append(
                Phase(seconds / times, cpu / times, sent * remote, received * remote, messages / count)
            )
            before = now
        os.close(gates[size][1])
    for pid in pids:
        os.waitpid(pid, 0)
    for pair in (*gates, *ended):
        os.close(pair[0])
    for _, write in ended:
        os.close(write)
    return phases


def _work(rank: int, count: int, address: str, announces: bool, gates: list[int], ended: list[int]) -> None:
    """The life of a process of the job."""
    made: list[TcpConnections] = []
    changed = threading.Condition(lock := threading.RLock())

    def announced(local: str) -> Message:
        made.append(
            TcpConnections(
                rank, local, {}, key=b"", lock=lock, changed=changed, failed=traceback.print_exception
            )
        )
        return _about(rank, made[0].general, made[0].ports, made[0].card)

    try:
        os.read(gates[0], 1)
        # ranks of one host pass announcements on
        rendezvous_client.process_namespace = lambda: f"host {rank // HOST_RANKS}"
        options: dict[str, Any] = {"hello": announced} if announces else {}
        world = TcpControlPlane(address, rank, count, timeout=JOIN_SECONDS, changed=changed, **options)
        if announces:
            world.peers(made[0].pass_on)
        os.write(ended[0], b".")
        signature = Signature(0, "0" * 16, count, "allreduce", None, "sum", "float32", 1 << 20, 1 << 16)
        acts: tuple[Callable[[], Any], ...] = (
            lambda: world.agree(signature, timeout=JOIN_SECONDS),
            lambda: world.gather(b"x" * 100, timeout=JOIN_SECONDS),
            lambda: world.gather(secrets.token_bytes(100), timeout=JOIN_SECONDS),
        )
        for act, gate, end in zip(acts, gates[1:-1], ended[1:], strict=True):
            os.read(gate, 1)
            for _ in range(AGREEMENTS):
                act()
            os.write(end, b".")
        os.read(gates[-1], 1)
        world.end()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _counted(rendezvous: Rendezvous, count: int) -> tuple[int, int, int]:
    """Return the bytes sent and received so far by a rendezvous, and the messages, once all is acknowledged."""
    loop = ConnectionLoop.hold()
    loop.settle()
    loop.release()
    time.sleep(0.1)
    ranks = [one.connection for one in rendezvous._openings[0].visitors.values()]
    assert len(ranks) == count
    info = [one.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in ranks]
    sent, received = (
        sum(part) for part in zip(*(_BYTES.unpack_from(one, _BYTES_AT) for one in info), strict=True)
    )
    return sent, received, sum(sum(one._counts) for one in ranks)
