"""Costs of the control plane of tcp at its rendezvous, and those of a tree of control connections.

1. A rendezvous in a process of its own, and all its clients in another one, over real connections: CPU time of the
   rendezvous for each rank, when ranks join, agree on a collective, gather the digest of a plan, and leave.
2. The state machine of the rendezvous alone (`RendezvousState`), up to 100,000 ranks: messages and bytes at rank 0.
3. A simulation of both shapes with the costs of 1: every process handles its messages one after another, a message
   takes `HOP` seconds on its way, and in the tree a rank passes on one message for all ranks below it. Rank 0 admits
   every rank in both, from its own hello, which costs as much as in 2.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from multiprocessing.connection import Connection as Pipe

from collectives.backends.tcp.collective_state import barrier_distances
from collectives.peers.address import connect, parse_address
from collectives.peers.connections import MEETING, Connection, Message, decode_message, encode_message
from collectives.peers.control_plane import LENGTH, Signature
from collectives.peers.environment import job_identity
from collectives.peers.rendezvous import Rendezvous, meeting_key
from collectives.peers.rendezvous_state import FANOUT, FORMAT, Post, RendezvousState

EACH = 8  # ranks of a host
ROUNDS = 10
HOP = 50e-6
SIZES = (1024, 4096, 16_384, 100_000)
PHASES = ("join", "agree", "digests", "leave")
JOB = job_identity(0)
SIGNATURE = (
    Signature(0, "12ab34cd56ef7890", 0, "allreduce", None, "sum", "float32", 1 << 20, 1 << 18).pack().decode()
)
AGREE: Message = {"type": "agree", "signature": SIGNATURE, "refused": False, "met": 0}
DIGEST: Message = {"type": "gather", "data": "t" + "0" * 100, "met": 0}
BYE: Message = {"type": "bye", "met": 0}


def hello_of(rank: int, size: int) -> Message:
    """Return a hello with the fields and lengths of a rank of tcp."""
    host = rank // EACH
    address = f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}"
    space = f"{host:08x}-93a4-4099-a4a8-b72e654dcce0net:[4026531833]"
    port, name, other = 30_000 + rank % EACH, *(sha256(f"{rank} {one}".encode()).hexdigest() for one in "ab")
    card = f'["{address}", {port}, "{other}", "{space}", "{space}pid:[4026531836]", {5000 + rank % EACH}, -1]'
    return {
        "type": "hello",
        "format": FORMAT,
        "rank": rank,
        "size": size,
        "pid": 5000 + rank % EACH,
        "general": address,
        "ports": {address: port},
        "links": name,
        "meets": True,
        "survivors": card,
        "flight_bytes": 4 << 20,
        "process": f"{rank:016x}",
        "job": asdict(JOB),
        "timeout": 60.0,
        "processes": f"{space}pid:[4026531836]",
    }


def serve(pipe: Pipe, size: int) -> None:
    """Host a rendezvous, and answer each message of the pipe with the CPU seconds so far."""
    warnings.simplefilter("ignore")
    with Rendezvous("127.0.0.1:0", size, job=JOB) as rendezvous:
        pipe.send(rendezvous.address)
        while pipe.recv():
            pipe.send(time.process_time())


class Clients:
    """All ranks of a job, as bare connections to the rendezvous; `heard` counts messages by type."""

    def __init__(self, address: str, size: int) -> None:
        self.heard: Counter[str] = Counter()
        self._changed = threading.Condition()
        where = parse_address(address)
        until = time.monotonic() + 60
        self.connections: list[Connection] = []
        for rank in range(size):
            made = Connection.dial(
                connect(where, until),
                MEETING,
                meeting_key(where),
                job=str(JOB),
                receive=self._receive,
                ended=lambda error: None,
                failed=lambda error: None,
            )
            made.send(hello_of(rank, size))
            self.connections.append(made)
            self.wait("heard", rank - ROUNDS)

    def _receive(self, messages: Sequence[Message]) -> None:
        with self._changed:
            self.heard.update(str(message["type"]) for message in messages)
            self._changed.notify_all()

    def say(self, of_rank: Callable[[int], Message], answer: str | None, times: int = 1) -> None:
        """Send a message from every rank, and wait until each has this answer, so many times."""
        for _ in range(times):
            goal = self.heard[answer or ""] + len(self.connections)
            for rank, connection in enumerate(self.connections):
                connection.send(of_rank(rank))
            if answer:
                self.wait(answer, goal)

    def wait(self, answer: str, goal: int) -> None:
        """Wait for so many messages of a type."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.heard[answer] >= goal, 30):
                raise TimeoutError(f"{self.heard} after 30 s")


def measured(size: int) -> dict[str, float]:
    """Return the CPU seconds of the rendezvous for each rank, by phase."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=serve, args=(end, size))
    process.start()
    address = pipe.recv()

    def spent() -> float:
        pipe.send(True)
        return float(pipe.recv())

    began = spent()
    clients = Clients(address, size)
    clients.wait("welcome", size)
    now = spent()
    began, seconds = now, {"join": (now - began) / size}
    steps: dict[str, tuple[Callable[[int], Message], str | None, int]] = {
        "agree": (lambda rank: AGREE, "agreed", ROUNDS),
        "digests": (lambda rank: DIGEST, "agreed", ROUNDS),
        "leave": (lambda rank: BYE, None, 1),
    }
    for name, (of_rank, answer, times) in steps.items():
        clients.say(of_rank, answer, times)
        if answer is None:
            time.sleep(0.5)
        now = spent()
        began, seconds[name] = now, (now - began) / size / times
    pipe.send(False)
    process.join(10)
    for connection in clients.connections:
        connection.close()
    return seconds


def counted(size: int) -> tuple[dict[str, tuple[int, int, int]], float]:
    """Return messages in, messages out and bytes out at the rendezvous, by phase, from its state machine; and the CPU
    seconds for reading and admitting all hellos.
    """
    state, hellos = (
        RendezvousState(size, host=0),
        [encode_message(hello_of(rank, size)) for rank in range(size)],
    )
    said: dict[str, Callable[[int], Message]] = {
        "agree": lambda rank: AGREE,
        "digests": lambda rank: DIGEST,
        "leave": lambda rank: BYE,
    }
    began = time.process_time()
    posts = [post for data in hellos for post in state.join(decode_message(data), 0.0)[1]]
    admitting = time.process_time() - began
    found = {"join": _posted(size, posts)}
    for name, of_rank in said.items():
        found[name] = _posted(
            size, [post for rank in range(size) for post in state.receive(rank, of_rank(rank), 1.0)]
        )
    return found, admitting


def _posted(size: int, posts: Sequence[Post]) -> tuple[int, int, int]:
    """Return the messages of all ranks, those of posts, and their bytes."""
    lengths: dict[int, int] = {}
    for _, message in posts:
        if id(message) not in lengths:
            lengths[id(message)] = len(encode_message(message))
    return size, len(posts), sum(lengths[id(message)] for _, message in posts)


def parent_of(rank: int) -> int | None:
    """Return the rank to which one is connected in the tree: the first of its 64, of its 4,096, and so on.

    Ranks below one are consecutive, so a rank concatenates what they say in runs (`runs_of`).

    >>> [parent_of(rank) for rank in (0, 5, 64, 69, 4096, 4160)]
    [None, 0, 0, 64, 0, 4096]
    """
    block = FANOUT
    while rank and rank % block == 0:
        block *= FANOUT
    return rank // block * block if rank else None


def simulated(size: int, seconds: float, parents: Sequence[int | None]) -> tuple[float, int, int]:
    """Return the time of a round, the most connections of a rank, and the depth.

    A rank handles one message, and sends one, in ``seconds`` together; each way takes half.
    """
    children: list[list[int]] = [[] for _ in range(size)]
    for rank, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(rank)
    each, order = seconds / 2, sorted(range(size), key=lambda rank: -rank)
    said = [0.0] * size  # when a rank has sent what all below it say
    for rank in order:
        now = 0.0
        for arrival in sorted(said[child] + HOP for child in children[rank]):
            now = max(now, arrival) + each
        said[rank] = now + each
    told, depth = [0.0] * size, [0] * size
    told[0] = said[0]
    for rank in reversed(order):
        for number, child in enumerate(children[rank]):
            told[child] = told[rank] + (number + 1) * each + HOP
            depth[child] = depth[rank] + 1
    most = max(len(below) + (rank > 0) for rank, below in enumerate(children))
    return max(told), most, max(depth)


def main() -> None:
    print("rendezvous over real connections: CPU microseconds of the rendezvous for each rank")
    print("ranks", *(f"{phase:>9}" for phase in PHASES))
    costs = {}
    for size in (128, 512):
        costs = measured(size)
        print(f"{size:5}", *(f"{costs[phase] * 1e6:9.0f}" for phase in PHASES), flush=True)
    print("state machine: messages in and out, and bytes out, at the rendezvous")
    admitting = {}
    for size in SIZES:
        found, admitting[size] = counted(size)
        for phase, (came, left, nbytes) in found.items():
            print(f"{size:8,} {phase:8} in {came:8,} out {left:8,} bytes {nbytes:14,}", flush=True)
        rounds = len(barrier_distances(size))
        print(
            f"{size:8,} each collective: {rounds} messages of {LENGTH} bytes from each rank, none to rank 0"
        )
    print(f"simulated round, {HOP * 1e6:.0f} us a hop: all ranks to rank 0, and a tree of {FANOUT}")
    for size in SIZES:
        for phase in ("join", "agree", "digests"):
            star = simulated(size, costs[phase], [None, *[0] * (size - 1)])
            tree = simulated(size, costs[phase], [parent_of(rank) for rank in range(size)])
            more = admitting[size] if phase == "join" else 0.0
            print(
                f"{size:8,} {phase:8} star {star[0]:8.3f} s, {star[1]:7,} connections; tree {tree[0] + more:8.3f} s, "
                f"{tree[1]:4} connections, depth {tree[2]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
