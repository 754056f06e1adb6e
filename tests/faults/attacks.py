"""Attack the control plane of a running tcp job, and print what becomes of the job: `python -m tests.faults.attacks`.

Every row names the attack, whether the job goes on with right results, and what the attack cost the attacked rank: the
growth of its memory, and its CPU time beyond the collectives' own. The job has a key that the attacker does not have,
or none (``--no-key``): then attackers pass the handshake, as any process may.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from collectives.peers.connections import _FRAME, _HELLO, MAGIC, MEETING, VERSION, Connection, endpoint_name
from collectives.peers.rendezvous_state import FORMAT
from tests.support.ports import free_port

Place = tuple[str, int]

KEY = secrets.token_hex(32)

RANK = "import sys; from tests.faults.attacks import work; work()"


def work() -> None:
    """The life of an attacked rank: collectives until "end", a line of status for every line of input."""
    import numpy as np

    import topoplan
    from collectives import Communicator
    from collectives.backends.tcp.tcp_backend import TcpBackend

    if limit := int(os.environ.get("DESCRIPTORS", "0")):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=range(size))
    asked: list[str] = []
    threading.Thread(target=lambda: asked.extend(iter(sys.stdin.readline, "")), daemon=True).start()
    backend = TcpBackend.from_environment(timeout=10)
    small, large = np.full(100, rank + 1.0), np.full(200_000, rank + 1.0, np.float32)
    wrong, rounds, longest = 0, 0, 0.0
    with Communicator(plan, backend) as comm:
        places = [("127.0.0.1", port) for port in backend._network.ports.values()]
        while True:
            begun = time.monotonic()
            over = comm.all_reduce(np.array([float("end\n" in asked)]))[0] > 0
            for array in (small, large):
                wrong += not np.all(comm.all_reduce(array) == size * (size + 1) / 2)
            longest, rounds = max(longest, time.monotonic() - begun), rounds + 1
            if "status\n" in asked or over:
                asked[:] = [one for one in asked if one != "status\n"]
                status = Path("/proc/self/status").read_text()
                memory = int(status.split("VmRSS:")[1].split()[0])
                told = {"wrong": wrong, "rounds": rounds, "memory": memory, "cpu": time.process_time()}
                print(json.dumps({**told, "longest": longest, "places": places}), flush=True)
                longest = 0.0
            if over:
                return
            time.sleep(0.01)


class Job:
    """Ranks of a job as processes, with an address on the loopback."""

    def __init__(self, size: int = 2, **environment: str) -> None:
        self.place = ("127.0.0.1", free_port())
        self._world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.place[1])}
        self._environment = environment
        self.ranks = [self.start(rank) for rank in range(size)]

    def start(self, rank: int, **environment: str) -> subprocess.Popen[str]:
        """Start a rank; errors of Python end up in its standard error."""
        names = {**os.environ, **self._world, "RANK": str(rank), **self._environment, **environment}
        command = [sys.executable, "-c", RANK]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=names, text=True, **pipes)

    def ask(self, what: str = "status") -> list[dict[str, Any]]:
        """Return the report of every rank, or its error if it has ended."""
        for one in self.ranks:
            with contextlib.suppress(OSError):
                _input(one).write(f"{what}\n")
                _input(one).flush()
        return [self._answer(one) for one in self.ranks]

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        assert rank.stderr is not None
        line = rank.stdout.readline()
        return json.loads(line) if line else {"error": ([*rank.stderr.read().splitlines(), "ended"])[-2:][0]}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.ranks:
            one.kill()
            one.communicate()


def _input(rank: subprocess.Popen[str]) -> IO[str]:
    assert rank.stdin is not None
    return rank.stdin


@dataclass(frozen=True)
class Target:
    """The knowledge of an attacker: the address of the rendezvous, those of the ranks, and the key or none."""

    meeting: Place
    places: tuple[Place, ...]
    key: bytes

    @property
    def everywhere(self) -> tuple[Place, ...]:
        return (self.meeting, *self.places)


def connected(place: Place) -> socket.socket:
    return socket.create_connection(place, 5)


def send_raw(*data: bytes, keep: float = 0.0, times: int = 1) -> Callable[[Target], None]:
    """Return an attack that sends bytes to all listeners, and keeps the connections open so many seconds."""

    def act(target: Target) -> None:
        made = [connected(place) for place in target.everywhere for _ in range(times)]
        for one in made:
            with contextlib.suppress(OSError):
                for part in data:
                    one.sendall(part)
        time.sleep(keep)
        for one in made:
            one.close()

    return act


def hello(name: bytes = MEETING, version: int = VERSION) -> bytes:
    return _HELLO.pack(MAGIC, version, name, secrets.token_bytes(32), b"attacker")


@contextlib.contextmanager
def speaking(target: Target) -> Iterator[Connection]:
    """A connection to the rendezvous, by an attacker with the key that it has."""
    nothing: Any = lambda given: None  # noqa: E731
    made = Connection.dial(
        connected(target.meeting), MEETING, target.key, receive=nothing, ended=nothing, failed=nothing
    )
    made.settled.wait(5)
    try:
        yield made
    finally:
        time.sleep(0.05)
        made.close()


def say(*texts: bytes, times: int = 1) -> Callable[[Target], None]:
    """Return an attack of well-formed frames with these texts."""

    def act(target: Target) -> None:
        for _ in range(times):
            with speaking(target) as made:
                for text in texts:
                    with made._sending:
                        made._out += made._frame(text)
                        made._flush()

    return act


def announce_much(target: Target) -> None:
    """Twenty strangers announce frames of 16 MB, and send what is taken."""
    made = [connected(target.meeting) for _ in range(20)]
    for one in made:
        one.settimeout(0.2)
        with contextlib.suppress(OSError):
            one.sendall(hello())
            one.recv(1 << 10)
            one.sendall(bytes(32) + _FRAME.pack(1 << 24, bytes(16)) + bytes(1 << 24))
    time.sleep(1)
    for one in made:
        one.close()


def drip(target: Target) -> None:
    """Two hundred strangers say one byte in a tenth of a second."""
    made = [connected(place) for place in target.everywhere for _ in range(100)]
    until = time.monotonic() + 4
    while time.monotonic() < until:
        for one in made:
            with contextlib.suppress(OSError):
                one.send(b"t")
        time.sleep(0.1)
    for one in made:
        one.close()


def flood(target: Target, *, reset: bool = False, count: int = 2000) -> None:
    """Connections that end at once, by a reset or not."""
    for number in range(count):
        with contextlib.suppress(OSError), connected(target.everywhere[number % 2]) as made:
            if reset:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def replay(target: Target) -> None:
    """The bytes of a connection that had the key, once more."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        heard = bytearray()

        def relay() -> None:
            taken, _ = proxy.accept()
            with taken, connected(target.meeting) as onward:
                for way in ((taken, onward), (onward, taken), (taken, onward)):
                    data = way[0].recv(1 << 16)
                    way[1].sendall(data)
                    if way[0] is taken:
                        heard.extend(data)

        thread = threading.Thread(target=relay)
        thread.start()
        with speaking(Target(proxy.getsockname(), (), KEY.encode())) as made:
            made.send({"type": "bye"})
        thread.join(5)
    send_raw(bytes(heard), keep=0.2)(target)


def spoil(change: Callable[[bytes], bytes]) -> Callable[[Target], None]:
    """Return an attack of a frame that was changed on its way."""

    def act(target: Target) -> None:
        with speaking(target) as made:
            with made._sending:
                made._out += change(made._frame(b'{"type": "bye"}'))
                made._flush()
            time.sleep(0.1)

    return act


def wrong_hello(**fields: Any) -> bytes:
    """The hello of a rank with other fields, as text."""
    usual = {"type": "hello", "format": FORMAT, "rank": 1, "size": 2, "pid": 1, "process": "x"}
    return json.dumps(
        {**usual, "flight_bytes": 1, "ports": {}, "general": None, "timeout": 9, **fields}
    ).encode()


NESTED = b"[" * 100_000
ATTACKS: list[tuple[str, Callable[[Target], None]]] = [
    ("an HTTP request", send_raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)),
    ("100 KB of [", send_raw(NESTED)),
    ("100 KB of [ behind a length", send_raw(len(NESTED).to_bytes(4, "big"), NESTED)),
    ("1 MB of random bytes", send_raw(os.urandom(1 << 20))),
    ("64 KB of zeros, five times", send_raw(bytes(1 << 16), times=5)),
    ("a TLS hello", send_raw(bytes.fromhex("16030100c8010000c40303") + os.urandom(193))),
    ("a handshake of another version", send_raw(hello(version=9), keep=0.2)),
    ("a handshake for an unknown endpoint", send_raw(hello(endpoint_name("none")), keep=0.2)),
    ("a handshake that stops half-way", send_raw(hello()[:60], keep=2.5)),
    ("silence after the handshake's first part", send_raw(hello(), keep=2.5)),
    ("a wrong proof, fifty times", send_raw(hello() + bytes(32), keep=0.2, times=50)),
    ("300 silent connections", send_raw(keep=3.0, times=150)),
    ("200 connections that drip bytes", drip),
    ("2,000 connections that end at once", flood),
    ("2,000 connections that are reset", lambda target: flood(target, reset=True)),
    ("20 frames of 16 MB announced and sent", announce_much),
    ("a replayed connection of a rank", replay),
    ("a frame with one bit changed", spoil(lambda data: data[:-1] + bytes([data[-1] ^ 1]))),
    ("a truncated frame", spoil(lambda data: data[:-3])),
    ("the same frame twice", spoil(lambda data: data * 2)),
    ("a frame of length 0", spoil(lambda data: bytes(20))),
    ("a frame of 100 KB of [", say(b'{"type":"hello","x":' + NESTED[:8000])),
    ("a frame with the number 1e400", say(b'{"type": "hello", "timeout": 1e400}')),
    ("a frame with a number of 400 digits", say(b'{"type": "hello", "timeout": 1' + b"0" * 400 + b"}")),
    ("a frame with Infinity and NaN", say(b'{"type": "x", "epoch": Infinity, "y": NaN}')),
    ("a frame that is a list, a text, nothing", say(b"[1, 2]", b'"x"', b" ")),
    ("messages of unknown types", say(b'{"type": "exec"}', b'{"type": "agree"}')),
    (
        "ranks -1, 2^40, true, 1.5, null",
        say(*(wrong_hello(rank=one) for one in (-1, 1 << 40, True, 1.5, None))),
    ),
    ("a hello without fields", say(b'{"type": "hello"}')),
    ("a hello of 1,000 bytes of control characters", say(wrong_hello(format="\x1b[2J" * 200))),
]


def attacked(*, key: bool, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield a row for each attack on one running job; a job that an attack has ended is started anew."""
    environment = {"TOPOPLAN_JOB_KEY": KEY} if key else {}
    job: Job | None = None
    try:
        for name, act in ATTACKS:
            if only not in name:
                continue
            job = job or Job(**environment)
            before = job.ask()
            places = tuple(tuple(one) for one in before[0].get("places", []))
            begun, cpu = time.monotonic(), time.process_time()
            act(Target(job.place, places, b""))
            cpu = time.process_time() - cpu
            after = job.ask()
            row = {"attack": name, "seconds": time.monotonic() - begun, "attacker cpu": cpu}
            errors = [one["error"] for one in after if "error" in one]
            if errors:
                job.__exit__()
                job = None
                yield {**row, "result": f"ended: {errors[0]}"}
                continue
            wrong = sum(one["wrong"] for one in after)
            grown = max(new["memory"] - old["memory"] for new, old in zip(after, before, strict=True))
            used = max(new["cpu"] - old["cpu"] for new, old in zip(after, before, strict=True))
            longest = max(one["longest"] for one in after)
            result = "unharmed" if not wrong else f"{wrong} wrong results"
            yield {**row, "result": result, "memory": grown, "cpu": used, "longest": longest}
    finally:
        if job is not None:
            job.__exit__()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-key", action="store_true", help="attack a job without a key")
    parser.add_argument("--only", default="", help="only attacks with this text in their name")
    options = parser.parse_args()
    print("| attack | job | memory, KB | CPU, s of s | longest round, ms |\n|---|---|---|---|---|")
    for row in attacked(key=not options.no_key, only=options.only):
        costs = "| |"
        if "memory" in row:
            costs = f"{row['memory']} | {row['cpu']:.2f} of {row['seconds']:.1f} | {1e3 * row['longest']:.0f}"
        print(f"| {row['attack']} | {row['result']} | {costs} |", flush=True)


if __name__ == "__main__":
    main()
