"""Run a testbed job in namespaces without root: build the network, measure its links, start the ranks.

``unshare`` gives the process its own user, network, mount and process namespaces. It is the first process there, so its
end ends all others, and the kernel removes mounts, namespaces and cables. A thread enters a namespace, and sockets and
processes that it creates there stay there.

The process reads a `SandboxJob`, pickled, in hexadecimal digits, as one line of stdin, and writes one JSON object on
each line of stdout: the rates of the links, then what the ranks write (`collectives.lab.testbed.rank`). It ends when
stdin ends, so nothing outlives its parent. The ranks are forked from it before it has threads, since each would import
for a second. A link is measured by one TCP connection, as many at once as the processors bear; a link below its rate
here is limited by the processors or the shaping, not by a plan."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO

from collectives.lab.testbed.heartbeats import HeartbeatWire, run_heartbeats
from collectives.lab.testbed.network import MAX_TOTAL_BITS, NetworkCommands
from topoplan.errors import ProbeError, TopoplanError

UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"),
    *("--kill-child", "--mount-proc"),
)

PRIVATE_RUN = ("mount", "-t", "tmpfs", "none", "/run")
"""``ip netns`` keeps its names under /run, which belongs to root."""

_TRIAL = f"""set -e
{" ".join(PRIVATE_RUN)}
ip netns add a
ip link add c0 netns a type veth peer name c0
tc qdisc add dev c0 root tbf rate 100mbit burst 32kb latency 50ms
"""


@lru_cache(maxsize=1)
def sandbox_refusal() -> str:
    """Return why this machine cannot build a test bed; empty if it can. Tried once in a process, in some 30 ms."""
    if sys.platform != "linux":
        return "a test bed needs Linux"
    for program, package in (
        ("unshare", "util-linux"),
        ("mount", "mount"),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
    ):
        if shutil.which(program) is None:
            return f"a test bed needs {program}; install {package}"
    tried = subprocess.run([*UNSHARE, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    if tried.returncode:
        errors = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        return f"this machine does not let users build networks: {errors[0]}"
    return ""


@contextmanager
def run_in_sandbox(module: str, job: str, stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a Python module as the first process of new namespaces, with pipes to its stdin and stdout.

    It gets a line of text, which `read_job` returns there. At the end it and all its children are killed. It is in
    another process group, so Ctrl-C does not reach it; if this process is killed, it ends because its stdin does.
    """
    process = subprocess.Popen(
        [*UNSHARE, sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None, "stdin is a pipe"
    try:
        process.stdin.write(job + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


NAMESPACE_FOLDER = Path("/run/netns")
"""Folder of the names of ``ip netns``."""

_CLONE_NEWNET = 0x40000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"

NAMESPACE_SETTINGS = {
    "ip_forward": "1",
    "tcp_congestion_control": "reno",
}
"""IPv4 settings in every namespace."""


@contextmanager
def in_namespace(namespace: str) -> Iterator[None]:
    """Run the body in a network namespace on this thread; OSError if it does not exist."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(_OWN_NAMESPACE, os.O_RDONLY)
    try:
        there = os.open(NAMESPACE_FOLDER / namespace, os.O_RDONLY)
        try:
            _enter_namespace(libc, there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter_namespace(libc, before)
    finally:
        os.close(before)


def _enter_namespace(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace cannot be entered: {os.strerror(number)}")


def build_network(
    create: Sequence[str], inside: Mapping[str, Sequence[str]], shape: Mapping[str, Sequence[str]]
) -> None:
    """Run the commands of `collectives.lab.testbed.network.NetworkCommands` with a private /run; ProbeError with the
    output of ``ip`` or ``tc``.
    """
    subprocess.run(PRIVATE_RUN, check=True)
    _run_batch(["ip"], create)
    for namespace, lines in inside.items():
        with in_namespace(namespace):
            _run_batch(["ip"], lines)
            for name, value in NAMESPACE_SETTINGS.items():
                Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
    shape_links(shape)


def shape_links(shape: Mapping[str, Sequence[str]]) -> None:
    """Run commands for tc in each namespace; ProbeError if it refuses."""
    for namespace, lines in shape.items():
        with in_namespace(namespace):
            _run_batch(["tc"], lines)


def change_interfaces(cut: Mapping[str, Sequence[str]]) -> None:
    """Run commands for ip in each namespace, which set interfaces down or up; ProbeError if it refuses."""
    for namespace, lines in cut.items():
        with in_namespace(namespace):
            _run_batch(["ip"], lines)


def _run_batch(program: Sequence[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ProbeError(f"{program[0]} cannot build the test bed: {'; '.join(errors[:2])}")


SETTLING_SECONDS = 0.25
"""Seconds in which bursts are used up and TCP windows open, before bytes are counted."""

COUNTED_SECONDS = 0.75
"""Seconds in which arriving bytes are counted."""

_SEND_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class LinkUnderTest:
    """One direction of a cable: namespaces and addresses of both ends, and the bits per second it is shaped to."""

    source: str
    destination: str
    source_address: str
    destination_address: str
    rate: int


def measure_links(links: Sequence[LinkUnderTest], together: float) -> list[float]:
    """Return bits per second of payload that arrive over each link; OSError if a link does not connect its ends.

    ``together`` are the bits per second of links that are loaded at the same time.
    """
    found: list[float] = []
    group: list[LinkUnderTest] = []
    for link in links:
        if group and sum(other.rate for other in group) + link.rate > together:
            found += _measure_group(group)
            group = []
        group.append(link)
    return found + _measure_group(group)


def _measure_group(links: Sequence[LinkUnderTest]) -> list[float]:
    over = threading.Event()
    received = [0] * len(links)
    ends = [_connect(link) for link in links]
    threads = []
    for number, (sender, receiver) in enumerate(ends):
        threads.append(threading.Thread(target=_send_until, args=(sender, over), daemon=True))
        threads.append(
            threading.Thread(target=_count_received, args=(receiver, received, number), daemon=True)
        )
    for thread in threads:
        thread.start()
    time.sleep(SETTLING_SECONDS)
    before, started = list(received), time.monotonic()
    time.sleep(COUNTED_SECONDS)
    after, seconds = list(received), time.monotonic() - started
    over.set()
    for pair in ends:
        for end in pair:
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for pair in ends:
        for end in pair:
            end.close()
    return [8 * (last - first) / seconds for first, last in zip(before, after, strict=True)]


def _connect(link: LinkUnderTest) -> tuple[socket.socket, socket.socket]:
    with in_namespace(link.destination):
        listener = socket.create_server((link.destination_address, 0))
    with listener:
        with in_namespace(link.source):
            sender = socket.socket()
        sender.settimeout(5)
        sender.bind((link.source_address, 0))
        sender.connect(listener.getsockname())
        sender.settimeout(None)
        receiver, _ = listener.accept()
    return sender, receiver


def _send_until(sender: socket.socket, over: threading.Event) -> None:
    piece = bytes(_SEND_BYTES)
    try:
        while not over.is_set():
            sender.send(piece)
    except OSError:
        return


def _count_received(receiver: socket.socket, received: list[int], number: int) -> None:
    buffer = bytearray(_SEND_BYTES)
    try:
        while count := receiver.recv_into(buffer):
            received[number] += count
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class ScheduledPlan:
    """A plan to run: text of the plan file and of the wires file, and the pace of `TcpBackend`."""

    name: str
    plan: str
    wires: str
    pace: float | None = None


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """A network, and the plans to run on it.

    ``links`` are measured before any plan runs. ``ranks`` are the namespaces of the ranks. ``sizes`` are bytes of the
    buffer; ``runs`` are timed runs of each schedule and size; a rank waits ``timeout`` seconds for a step. ``pulses``
    are wires with heartbeats. ``drop`` holds commands for tc in each namespace after ``runs`` runs, empty if no link
    becomes slower; then ``most_dropped`` are the most runs until the ranks judge a link slow. ``cut`` holds those for
    ip, in the middle of a run, if a link is lost; the communicators have ``on_failure``. ``meeting`` is the address of
    rank 0 at which the ranks meet, empty for a path. ``late`` are ranks that begin each run later, and the seconds.
    """

    commands: NetworkCommands
    links: tuple[LinkUnderTest, ...]
    ranks: tuple[str, ...]
    schedules: tuple[ScheduledPlan, ...]
    sizes: tuple[int, ...]
    runs: int
    chunk_bytes: int
    timeout: float
    pulses: tuple[HeartbeatWire, ...] = ()
    drop: dict[str, tuple[str, ...]] = field(default_factory=dict)
    most_dropped: int = 0
    cut: dict[str, tuple[str, ...]] = field(default_factory=dict)
    on_failure: str = "raise"
    meeting: str = ""
    late: tuple[tuple[int, float], ...] = ()


JOB_FOLDER = Path("/run/topoplan")
"""Job, wires and rendezvous; private to the sandbox."""

FAILURE_GRACE_SECONDS = 3.0
"""Seconds in which the other ranks may report the failure of one."""


Work = Callable[[int], int]
"""A function of a rank, which returns the exit status of its process."""


def run_sandbox(rank_work: Callable[[SandboxJob, int], int]) -> int:
    """Run the job of stdin, with `rank_work` in the process of each rank; exit status 1 if a rank or the job failed."""
    job: SandboxJob = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    beat, work = partial(run_heartbeats, job.pulses, JOB_FOLDER), partial(rank_work, job)
    with _Children() as children:
        hearts = [children.fork(beat, *one) for one in enumerate(job.ranks) if job.pulses]
        ranks = [children.fork(work, *one) for one in enumerate(job.ranks) if job.schedules]
        end_with_stdin()
        try:
            build_network(job.commands.create, job.commands.inside, job.commands.shape)
            if job.links:
                print(json.dumps({"links": measure_links(job.links, MAX_TOTAL_BITS)}), flush=True)
        except (TopoplanError, OSError, subprocess.CalledProcessError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return 1
        JOB_FOLDER.mkdir()
        children.start()
        return _await_ranks(ranks, hearts) if ranks else 0


class _Children:
    """Processes that are forked before this one starts threads, and begin their work once the network is there."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._network, self._ready = self._context.Pipe(duplex=False)
        self._processes: list[ForkProcess] = []

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.kill()
            one.join()

    def fork(self, work: Work, number: int, namespace: str) -> ForkProcess:
        made = self._context.Process(
            target=_be_child, args=(self._network, self._ready, work, number, namespace)
        )
        made.start()
        self._processes.append(made)
        return made

    def start(self) -> None:
        self._ready.close()


def _be_child(network: Connection, ready: Connection, work: Work, number: int, namespace: str) -> None:
    """Enter a namespace when all processes have closed `ready`, and work there."""
    ready.close()
    with suppress(EOFError):
        network.recv_bytes()
    with in_namespace(namespace):
        status = work(number)
    sys.exit(status)


def end_with_stdin() -> None:
    """End this process when its stdin ends, by a thread."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    # Read below the text layer, which holds a lock that the interpreter needs at exit.
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def _await_ranks(ranks: Sequence[ForkProcess], hearts: Sequence[ForkProcess]) -> int:
    deadline = None
    while any(rank.exitcode is None for rank in ranks):
        if deadline is None and any(rank.exitcode for rank in ranks):
            deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for number, rank in enumerate(ranks):
        if rank.exitcode not in (None, 0, 1):
            print(json.dumps({"rank": number, "error": f"ended with status {rank.exitcode}"}), flush=True)
    for heart in hearts:
        heart.terminate()
        heart.join()
    if all(heart.exitcode == 0 for heart in hearts):
        texts = [
            (JOB_FOLDER / f"beats{rank}.json").read_text(encoding="utf-8") for rank in range(len(hearts))
        ]
        print(json.dumps({"beats": [beat for text in texts for beat in json.loads(text)]}), flush=True)
    return int(any(rank.exitcode != 0 for rank in ranks))
