"""Run a rank's whole part of a collective in one kernel, in memory that the GPUs write to each other.

The kernel works through the tables of `kernel_program`, which are copied to the GPU's memory here. A page of host
memory connects both: the kernel's progress and its wait, and the request to end.

Between domains messages move behind each kernel but the last. Each carries the sender's failure flag, which the next
kernel of the slice reads, so no rank returns the output of a kernel that gave up. Messages of a buffer in slices have
a stream of their own: events let a kernel wait for the messages of its slice, and these for the kernel before them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AVERAGED, Call
from collectives.backends.nccl.device_arenas import DeviceArenas
from collectives.backends.nccl.kernel_program import (
    FLAG_BYTES,
    MOST_ENDS,
    KernelMessage,
    KernelPhase,
    KernelPlan,
    clock_of,
    writes_everywhere,
)
from collectives.backends.nccl.tree_steps import order_of
from collectives.tables.kernels.kernel_launch import Kernels
from collectives.tables.kernels.source import TELL_CALL, forest_kernel, switch_adds
from collectives.tables.lowering import PlanKey
from collectives.tables.transfer_table import Given, TransferTable
from topoplan.model.window_engine import BLOCKS, SLOT_BYTES, SMALL_BLOCKS, SMALL_BYTES, WIDE_BLOCKS
from topoplan.model.window_slices import MOST_SLICES
from topoplan.units import listed

THREADS, SMALL_THREADS = 512, 256
"""Threads of a block, and of one of a small collective; as in ``forest.cu``."""

INBOX_PART = 32
"""The part of the room, 1 in so many, that inboxes of small collectives take at most."""

LONGEST_WAIT = 1 << 62
"""Nanoseconds that a kernel waits at most."""

KEPT = 64
"""Programs whose tables stay in the GPU's memory."""

CALL_BYTES, TELLING_THREADS = 16, 32
"""Bytes in an arena by which a rank tells its call, as in ``forest.cu``; and threads of the kernel that only tells."""

STOP, FAILED, FIRST_BLOCK = range(3)
"""Words of the page that host and kernel share; as in ``forest.cu``."""

LATE, PEER_GAVE_UP, DIFFERS = 1, 3, 4
"""The kernel's codes for failures: a peer did not come in time; a rank of another domain gave up; a peer has told
another call.
"""

COMPLETE = 0xFFFFFFFF
"""Progress word of a block that has ended; as in ``forest.cu``."""


def peer_and_row(word: int) -> tuple[int, int]:
    """Return for which peer and row of the table a block waits, by its word (``forest.cu``)."""
    return (word >> 24 & 0xFFFF) - 1, word & 0xFFFFFF


def blocks_on(processors: int) -> int:
    """Return the most blocks of a kernel on a GPU with so many multiprocessors."""
    return max(min(BLOCKS, processors), min(WIDE_BLOCKS, processors // 3))


Layout = tuple[TransferTable, str, str | None, Given, tuple[int, int], bool]
"""Key of a program: table, dtype, operation, input and result elements, and whether other ranks write to its result."""

Move = Callable[[Sequence[tuple[bool, int, int, int]], Any], None]
"""Queue a group of messages on a stream: whether it sends, the peer, an address and bytes."""


@dataclass(slots=True, eq=False)
class KernelLaunch:
    """A kernel of a program, and the messages behind it.

    `job` holds the kernel's arguments, a CuPy array, and `phase` its tables, for reports of failures; both are None if
    no kernel runs. `counts` is the address of the numbers that count the chunks of earlier collectives. `slice` of the
    buffer; `follows` is the launch whose messages the kernel needs, the last earlier one of its slice, or None.
    """

    job: Any
    grid: int
    messages: tuple[KernelMessage, ...]
    counts: int = 0
    phase: KernelPhase | None = None
    slice: int = 0
    follows: int | None = None


@dataclass(slots=True, eq=False)
class BoundKernelPlan:
    """A program whose tables lie on the GPU.

    `room` is a CuPy array for residual sums and messages, or None. `small`: every rank sends its input to all others.
    `kept` holds the CuPy arrays that the jobs point to. `alone`: no rank sends messages, and there are no relays.
    `relays`: the programs of this rank's relays (`relay_engine`).
    """

    kernel: Any
    launches: tuple[KernelLaunch, ...]
    threads: int
    itemsize: int
    room: Any
    small: bool
    kept: list[Any]
    alone: bool = True
    relays: tuple[BoundKernelPlan, ...] = ()

    @property
    def slices(self) -> int:
        """Return into how many slices the buffer is cut."""
        return 1 + max((one.slice for one in self.launches), default=0)


class WindowEngine:
    """Run collectives among the ranks of arenas; all ranks have the same settings.

    - `kernels` of the GPU that is current now and in every call.
    - `stream` on which kernels run.
    - `timeout` in seconds; after twice as long without a chunk the kernel ends by itself, unless the host stopped it
      before.
    - `blocks`: the most blocks of the kernel.
    - `slot_bytes`: the longest chunk; a multiple of 256.
    - `small_bytes`: up to this size ranks may send their input to all others, instead of along trees; a multiple of 16.
    - `room_bytes` of each arena for slots and flags, the same on all ranks; the whole arena by default.
    - `exact`: sums have the plan's bits. Without it a switch that can add does so, in any order.
    - `beside`: a stream for the messages of buffers in slices. None, on all ranks, if kernels and messages cannot run
      at once; no buffer is cut then.
    - `ranks`: how many of the region's arenas belong to ranks, the first ones, by default all; the others are relays'.

    `alone`: all ranks are in one domain. `about_pairs`: why pairs of GPUs in the plans so far exchange messages, in one
    line; the same on all ranks, and empty without such pairs.
    """

    def __init__(
        self,
        cupy: ModuleType,
        kernels: Kernels,
        region: DeviceArenas,
        stream: Any,
        *,
        timeout: float,
        blocks: int = WIDE_BLOCKS,
        slot_bytes: int = SLOT_BYTES,
        small_bytes: int = SMALL_BYTES,
        room_bytes: int | None = None,
        exact: bool = True,
        beside: Any = None,
        ranks: int | None = None,
    ) -> None:
        self._cupy: Any = cupy
        self._ranks = region.size if ranks is None else ranks
        self._kernels = kernels
        self.region = region
        self._stream = stream
        self._beside = beside
        self._timeout = timeout
        self.blocks = blocks
        self._slot_bytes = slot_bytes
        self._exact = exact
        self._room = region.array(room_bytes or region.nbytes)  # for inboxes, flags and slots
        self._base = region.offset(self._room.data.ptr)
        self._end = self._base + self._room.nbytes
        self._ran: set[str] = set()
        self._plans: dict[tuple[str, bool], tuple[KernelPlan, Any] | None] = {}
        self._programs: OrderedDict[Layout, BoundKernelPlan] = OrderedDict()
        self._captured: list[tuple[BoundKernelPlan, object]] = []
        self._running: BoundKernelPlan | None = None
        self.about_pairs = ""
        words = FIRST_BLOCK + 2 * max(blocks, SMALL_BLOCKS)
        self._memory: Any = cupy.cuda.alloc_pinned_memory(8 * words)
        self._page: NDArray[np.uint64] = np.frombuffer(self._memory, dtype=np.uint64, count=words)
        self._page[:] = 0
        self._inbox = self._base
        self.alone = len(set(region.domains)) == 1
        most = self._room.nbytes // (4 * INBOX_PART * region.size) // FLAG_BYTES * FLAG_BYTES
        self._small_bytes = min(small_bytes, most) if self.alone else 0
        self._base += 4 * self._small_bytes * region.size
        with stream:
            self._dead = cupy.zeros(1, dtype=np.uint64)
            # of each slice: what this rank tells with its messages, and what each other rank has told
            self._gave_up = cupy.zeros(MOST_SLICES, dtype=np.uint64)
            self._others = cupy.zeros(MOST_SLICES * region.size, dtype=np.uint64)
            self._numbers = cupy.zeros(SMALL_BLOCKS, dtype=np.uint64)
            self._arenas = cupy.asarray(np.array(region.addresses, dtype=np.int64))
            self._calls, self._calls_at = 0, self._base
            self._told = self._job([])
            self._base += -(-2 * CALL_BYTES * region.size // FLAG_BYTES) * FLAG_BYTES

    def tell_call(self, turn: int | None = None) -> None:
        """Queue word to all ranks that this one makes a call that it does not compare (`queue`), by default the next.

        A block that notices a difference may end the others before the first one tells this rank's own call of a
        `turn`: ranks that wait for that get this word.
        """
        if turn is None:
            self._calls += 1
            turn = self._calls
        with self._stream:
            self._kernels.forest(TELL_CALL)((1,), (TELLING_THREADS,), (self._told, np.uint64(turn)))

    @property
    def turn(self) -> int:
        """Return the number by which kernels compare the last call that was told."""
        return self._calls

    @property
    def failed(self) -> bool:
        """Return whether a kernel has failed: none runs any more."""
        return bool(self._page[FAILED])

    @property
    def differs(self) -> bool:
        """Return whether the ranks have told different calls."""
        return bool(self._page[FAILED] == DIFFERS)

    def differs_at(self, turn: int, digest: int) -> bool:
        """Return whether a rank has told another call than this digest at a turn, after which no kernel has run."""
        size = self.region.size
        arena = self.region.addresses[self.region.rank]
        told = self._words(arena + self._calls_at + turn % 2 * size * CALL_BYTES, 2 * size).reshape(-1, 2)
        return any(number == turn and other != digest for other, number in told.tolist())

    def forget_difference(self) -> None:
        """Let kernels run again after a difference, which has ended all queued ones."""
        with self._stream:
            self._dead[:] = 0
        self._stream.synchronize()
        self._page[FAILED] = 0

    def place(self, call: Call[Any], *, direct: bool = False) -> BoundKernelPlan | None:
        """Return the program of a call; None, on all ranks, if the plan is too large for the arena or the kernel.

        `direct`: the results of all ranks begin at the same offset of their arenas.
        """
        one = call.memory[0]
        layout = (call.table, call.dtype, call.op, one.given, one.block, direct)
        if layout not in self._programs:
            with self._stream:  # the tables are copied before the kernel starts
                small = self._small(call) if writes_everywhere(call.plan) else None
                bound = small or self._large(call, direct)
            if bound is None:
                return None
            self._programs[layout] = bound
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(layout)
        return self._programs[layout]

    def place_of_result(self, address: int, nbytes: int) -> int:
        """Return the offset of a result in the arena, comparable among ranks; 0 if it lies outside."""
        offset = self.region.offset(address)
        return offset if self._end <= offset <= self.region.nbytes - nbytes else 0

    def kept(self, call: Call[Any]) -> BoundKernelPlan | None:
        """Return the program of a call like an earlier one, if it exists, whose results other ranks do not write."""
        one = call.memory[0]
        return self._programs.get((call.table, call.dtype, call.op, one.given, one.block, False))

    def queue(
        self,
        bound: BoundKernelPlan,
        source: int,
        result: int,
        move: Move | None = None,
        *,
        captured: object = None,
        digest: int | None = None,
    ) -> None:
        """Queue a program on arrays at these addresses.

        `move` queues the messages between domains. `captured` is what a graph works on into which the program is
        captured: it is kept as long as the engine lives. With the digest of a call the kernel runs only if the calls of
        all ranks with this number have the same one; otherwise (`differs`) no kernel runs until `forget_difference`.
        """
        if captured is not None:
            self._captured.append((bound, captured))
        call = (0, 0)
        if digest is not None:
            self._calls += 1
            call = (self._calls, digest)
        room = 0 if bound.room is None else bound.room.data.ptr
        places = (source, result) if bound.small else (source, result, room)
        moving = self._stream if bound.slices == 1 else self._beside
        moved: dict[int, Any] = {}
        with self._stream:
            for number, one in enumerate(bound.launches):
                if one.job is not None:
                    if one.follows is not None:
                        self._wait(self._stream, moved[one.follows])
                    numbers = (*map(np.int64, places), *map(np.uint64, call))
                    bound.kernel((one.grid,), (bound.threads,), (one.job, *numbers))
                if one.messages:
                    assert move is not None, "there are several domains"
                    self._wait(moving, self._end_of(self._stream, before=moving))
                    move(self._addressed(one, (source, result, room), bound.itemsize), moving)
                    moved[number] = self._end_of(moving, before=self._stream)
            if moved:
                self._wait(self._stream, moved[max(moved)])

    def _end_of(self, stream: Any, *, before: Any) -> Any:
        """Return an event behind the queued work of a stream; None if `before` is that stream, which needs none."""
        if stream is before:
            return None
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _wait(self, stream: Any, event: Any) -> None:
        if event is not None:
            stream.wait_event(event)

    def begins(self, bound: BoundKernelPlan) -> None:
        """Reset progress and waits of the blocks; no kernel may run."""
        self.follows(bound)
        self._page[FIRST_BLOCK:] = 0

    def follows(self, bound: BoundKernelPlan) -> None:
        """Note that the kernels before this program's have ended."""
        self._running = bound

    def progress(self) -> int:
        """Return a number that changes whenever a chunk is done."""
        return int(self._page[FIRST_BLOCK::2].sum())

    def waiting(self) -> tuple[int | None, int | None]:
        """Return the peer and the row for which the block furthest behind waits: following such peers leads to the
        failed rank.

        Between two kernels it is the peer whose message the next one needs, if there is only one.
        """
        running = self._running
        word = self.earliest_wait()
        if word is not None:
            peer, row = peer_and_row(word)
            return peer, None if running is not None and running.small else row
        blocks = self._page[FIRST_BLOCK::2].tolist()
        launches = () if running is None else running.launches
        for number, one in enumerate(launches):
            if self._has_ended(number, one):
                continue
            if one.follows is None or any(block >> 32 == number for block in blocks):
                break
            peers = {message.peer for message in launches[one.follows].messages if not message.sends}
            return (peers.pop(), None) if len(peers) == 1 else (None, None)
        return None, None

    def has_unfinished(self) -> bool:
        """Return whether a program waits for a peer, in a kernel or between two."""
        return self.waiting() != (None, None)

    def stands_still(self) -> bool:
        """Return whether a kernel of the running program has not ended, and no block of it waits for a peer."""
        launches = () if self._running is None else self._running.launches
        ended = all(self._has_ended(number, one) for number, one in enumerate(launches))
        return not ended and self.earliest_wait() is None

    def _has_ended(self, number: int, launch: KernelLaunch) -> bool:
        """Return whether the blocks of a launch have ended; their words only grow during a call."""
        blocks = self._page[FIRST_BLOCK::2][: launch.grid].tolist()
        return launch.job is None or min(blocks) >= number << 32 | COMPLETE

    def earliest_wait(self) -> int | None:
        """Return the word of the block that waits in the earliest round (``forest.cu``); None if no block waits."""
        running = self._running
        # other blocks have words of an earlier program
        count = 0 if running is None else max((one.grid for one in running.launches), default=0)
        return min((word for word in self._page[FIRST_BLOCK + 1 :: 2][:count].tolist() if word), default=None)

    def state(self) -> str:
        """Return the contents of the page and the flags, a line for each block and each flag that it waits for.

        It explains a collective that did not end. The kernel must have ended, since this copies from the GPU.
        """
        names = {LATE: "late", PEER_GAVE_UP: "a rank of another domain gave up", DIFFERS: "another call"}
        failed = int(self._page[FAILED])
        lines = [
            f"page: stop {int(self._page[STOP])}, failed {failed} ({names.get(failed, 'see forest.cu')})"
        ]
        running = self._running
        words = self._page[FIRST_BLOCK:].reshape(-1, 2).tolist()
        for block, (done, waits) in enumerate(words):
            if not done and not waits:
                continue
            phase, chunks = done >> 32, done & 0xFFFFFFFF
            far = "complete" if chunks == COMPLETE else f"{chunks} chunks"
            line = f"block {block}: kernel {phase}, {far}"
            if not waits:
                lines.append(line)
                continue
            turn, peer, row = waits >> 40, (waits >> 24 & 0xFFFF) - 1, waits & 0xFFFFFF
            lines.append(f"{line}, waits in round {turn} for rank {peer}, row {row}")
            if running is not None and not running.small and phase < len(running.launches):
                lines += self._flags_of(running.launches[phase], block, turn, peer, row)
        return "\n".join(lines)

    def _flags_of(self, launch: KernelLaunch, block: int, turn: int, peer: int, row: int) -> list[str]:
        """Return a line for each flag from a peer that a block may wait for in a round."""
        tables = launch.phase
        if tables is None or not len(tables.steps) or block >= launch.grid:
            return []
        lines = []
        for step in tables.steps[tables.blocks[block] : tables.blocks[block + 1]]:
            chunk = turn - int(step["level"])
            for place in range(int(step["arrivals"] + step["departures"])):
                end = tables.ends[step["first"] + place]
                if (int(end["peer"]), int(end["row"])) != (peer, row) or end["count"] < 0 or chunk < 0:
                    continue
                arrives = place < step["arrivals"]
                what, offset = ("data", end["data"]) if arrives else ("credit", end["credit"])
                earlier = self._word(launch.counts + 8 * int(end["sent"]))
                wanted = earlier + chunk + 1 - (0 if arrives else int(end["count"]))
                found = self._word(self.region.addresses[self.region.rank] + int(offset))
                lines.append(
                    f"  {what} flag at {int(offset)} of the arena: {found}, wanted {wanted} "
                    f"({earlier} of earlier collectives, chunk {chunk})"
                )
        return lines

    def _word(self, address: int) -> int:
        return int(self._words(address, 1)[0])

    def _words(self, address: int, count: int) -> NDArray[np.uint64]:
        """Return so many times 8 bytes of the GPU's memory as numbers."""
        words = np.zeros(count, dtype=np.uint64)
        runtime = self._cupy.cuda.runtime
        runtime.memcpy(words.ctypes.data, address, words.nbytes, runtime.memcpyDeviceToHost)
        return words

    def stop(self) -> None:
        """Make the kernel end, and all later ones; from any thread."""
        self._page[STOP] = 1

    @property
    def late(self) -> bool:
        """Return whether the kernel has ended because it has waited too long."""
        return bool(self._page[FAILED] == LATE)

    @property
    def in_graphs(self) -> bool:
        """Return whether graphs may launch kernels at any time."""
        return bool(self._captured)

    @property
    def peer_gave_up(self) -> bool:
        """Whether the kernel has ended because a rank of another domain gave up."""
        return bool(self._page[FAILED] == PEER_GAVE_UP)

    def _addressed(
        self, launch: KernelLaunch, places: tuple[int, int, int], itemsize: int
    ) -> list[tuple[bool, int, int, int]]:
        """Return messages with their addresses, and behind them for each peer the word for failures."""
        moved = [
            (one.sends, one.peer, places[one.buffer] + one.first * itemsize, one.count * itemsize)
            for one in launch.messages
        ]
        gave_up, others = self._words_of(launch.slice)
        for sends, peer in sorted({(one.sends, one.peer) for one in launch.messages}):
            moved.append((sends, peer, gave_up if sends else others + 8 * peer, 8))
        return moved

    def _words_of(self, cut: int) -> tuple[int, int]:
        """Return the addresses of a slice's words for failures: this rank's, and the first of the others'."""
        return self._gave_up.data.ptr + 8 * cut, self._others.data.ptr + 8 * cut * self.region.size

    def _small(self, call: Call[Any]) -> BoundKernelPlan | None:
        """Return the program that sends every input to all ranks; None for a large collective, or one without
        an order."""
        key, nbytes = PlanKey(call.plan.digest, call.plan), call.table.count * call.itemsize
        if nbytes > self._small_bytes or nbytes > clock_of(key).packets_to:
            return None
        orders = order_of(key)
        if orders is None:
            return None
        codes = [rank << 2 | action for order in orders for rank, action in order]
        firsts = np.cumsum([0, *(len(order) for order in orders)])
        half = 2 * self._small_bytes * self.region.size
        tables, places = self._put((call.table.bounds, firsts, np.array(codes, dtype=np.int64)))
        numbers = [call.table.count, self._inbox, half, *places, self._numbers.data.ptr]
        kernel = self._ready(call, "small")
        launch = KernelLaunch(self._job(numbers), SMALL_BLOCKS, ())
        return BoundKernelPlan(kernel, (launch,), SMALL_THREADS, call.itemsize, None, True, [tables])

    def _large(self, call: Call[Any], direct: bool) -> BoundKernelPlan | None:
        """Return the program along the trees; None if the plan does not fit."""
        switched = bool(self.region.multicast)
        able = switched and any(device.reduce for device in call.plan.topology.devices)
        adds = able and switch_adds(call.op, call.dtype, exact=self._exact)
        found = self._plan(call, adds=adds, copies=switched)
        if found is None:
            return None
        plan, counts = found
        tables = plan.tables(call.table, call.memory[0], call.itemsize, direct=direct)
        kernel = self._ready(call, "switch" if plan.stars else "forest")
        kept: list[Any] = []
        launches: list[KernelLaunch] = []
        received: set[int] = set()  # slices of which messages have come
        moved: dict[int, int] = {}
        for number, phase in enumerate(tables.phases):
            one = self._launch(
                number, phase, counts, kept, looks=phase.slice in received, apart=bool(plan.apart)
            )
            one.slice, one.follows = phase.slice, moved.get(phase.slice)
            launches.append(one)
            if phase.messages:
                moved[phase.slice] = number
            if any(not message.sends for message in phase.messages):
                received.add(phase.slice)
        nbytes = tables.room * call.itemsize
        room = self._cupy.empty(nbytes, dtype=np.uint8) if nbytes else None
        alone = self.alone and not plan.apart
        return BoundKernelPlan(kernel, tuple(launches), THREADS, call.itemsize, room, False, kept, alone)

    def _plan(self, call: Call[Any], *, adds: bool, copies: bool) -> tuple[KernelPlan, Any] | None:
        """Return a plan with its place in the arenas, and the counters of this rank's chunks."""
        digest = call.plan.digest
        if (digest, adds) not in self._plans:
            plan = KernelPlan(
                PlanKey(digest, call.plan),
                base=self._base,
                stride=self._slot_bytes,
                blocks=self.blocks,
                room=(self._end - self._base) // 2,  # leave half for further plans
                domains=self.region.domains,
                overlaps=self._beside is not None,
                adds=adds,
                copies=copies,
            )
            if plan.apart:
                names = call.plan.vertices
                pairs = sorted(f"{names[a]}-{names[b]}" for a, b in plan.apart if a < b)
                why = "where no copy ends" if plan.ends_nowhere else "without peer access"
                self.about_pairs = f"messages for {listed(pairs, noun='pairs')}, {why}"
            if self._base + plan.nbytes > self._end or plan.most_ends > MOST_ENDS:
                self._plans[digest, adds] = None
            else:
                self._base += -(-plan.nbytes // FLAG_BYTES) * FLAG_BYTES
                counts = self._cupy.zeros(max(plan.numbers, 1), dtype=np.uint64)
                self._plans[digest, adds] = plan, counts
        return self._plans[digest, adds]

    def _launch(
        self, number: int, phase: KernelPhase, counts: Any, kept: list[Any], *, looks: bool, apart: bool
    ) -> KernelLaunch:
        """Return a kernel and its messages; with `looks` one without steps too, which reads whether senders gave up."""
        blocks = phase.blocks
        if not len(phase.steps):
            if not looks:
                return KernelLaunch(None, 0, phase.messages)
            blocks = np.zeros(2, dtype=np.int64)
        tables, places = self._put((blocks, phase.steps, phase.ends))
        kept.append(tables)
        job = self._job([*places, counts.data.ptr, number], apart=apart, cut=phase.slice)
        return KernelLaunch(job, len(blocks) - 1, phase.messages, counts.data.ptr, phase)

    def _put(self, parts: tuple[NDArray[Any], ...]) -> tuple[Any, list[int]]:
        """Copy tables to the GPU; return the array and the address of each."""
        flat = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts]
        made = self._cupy.asarray(np.concatenate(flat))
        places = made.data.ptr + np.cumsum([0, *(len(part) for part in flat[:-1])])
        return made, [int(place) for place in places]

    def _job(self, numbers: list[int], *, apart: bool = False, cut: int = 0) -> Any:
        """Return the arguments of a kernel: the common ones, and these numbers; `cut` is its slice."""
        gave_up, others = (0, 0) if self.alone and not apart else self._words_of(cut)
        control = [
            *(self._arenas.data.ptr, self.region.multicast, self._dead.data.ptr),
            *(others, gave_up, self._memory.ptr),
            *(self.region.rank, self.region.size),
            *(int(min(2e9 * self._timeout, LONGEST_WAIT)), self._calls_at, self._ranks),
        ]
        return self._cupy.asarray(np.array([*control, *numbers], dtype=np.int64))

    def _ready(self, call: Call[Any], kind: str) -> Any:
        """Return the loaded kernel of a call."""
        averages = call.dtype in AVERAGED
        return self.loaded(forest_kernel(call.op, call.dtype, call.itemsize, averages=averages, kind=kind))

    def loaded(self, name: str) -> Any:
        """Return the kernel of this name, which has run once on nothing before any rank waits for it.

        The first launch may load the kernel, and wait for the GPU.
        """
        kernel = self._kernels.forest(name)
        if name not in self._ran:
            self._ran.add(name)
            zeros = self._cupy.zeros(4, dtype=np.uint64)  # kept: CuPy reuses the memory of a dropped array
            empty = [zeros.data.ptr] * 4
            small = name.startswith("small_")
            job = self._job([0, 0, 0, *empty] if small else [*empty, 0])
            numbers = [0] * (4 if small else 5)
            threads = SMALL_THREADS if small else THREADS
            kernel((1,), (threads,), (job, *map(np.int64, numbers)))
            self._stream.synchronize()
        return kernel
