"""Define the back end: it runs the rows of transfer tables for the ranks whose arrays this process holds.

The communicator checks arguments, plans, lowers, allocates memory and divides averages; a back end only moves and joins
bytes. A `Call` describes one collective. Methods of optional abilities do nothing, or refuse in one sentence.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from collectives.peers.control_plane import ControlPlane, Signature
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.tables.numpy_arrays import ArrayLibrary, Completion
from collectives.tables.transfer_table import Given, TransferTable, place_in
from topoplan.errors import BackendError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan

Array = TypeVar("Array")

LONGEST_TIMEOUT = 100_000
"""Seconds, more than a day: waits of the system, some for multiples of it, are limited to 2**31 milliseconds."""

AVERAGED = ("float32", "float64", "complex64", "complex128")
"""Types whose averages a back end may divide itself: numpy divides them equally everywhere."""

DIVIDED_FIRST = ("float16", "bfloat16")
"""Types whose averages are sums of values that each rank has divided by the number of ranks.

A sum of values of 16 bits may be beyond their type although the average is not. The communicator divides them; a back
end adds them up as they come.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RankArrays(Generic[Array]):
    """The memory of one rank in one collective.

    Parameters
    ----------
    rank : int
    given : Given
        The elements of the buffer that the rank puts in.
    source : array
        One contiguous dimension of those elements; only read, unless it is the same memory as ``result``.
    block : (int, int)
        The elements of the buffer in the rank's result; empty if it gets none.
    result : array
        One contiguous dimension of those elements, to be written. The communicator copies the rank's input to elements
        that no row writes.
    """

    rank: int
    given: Given
    source: Array
    block: tuple[int, int]
    result: Array

    def put_in(self, start: int, stop: int) -> slice:
        """Return where elements of one shard lie in `source`; they are one piece of it."""
        first = place_in(self.given, start)
        return slice(first, first + stop - start)

    def holds(self, start: int, stop: int) -> bool:
        """Return whether elements are part of the result; chunks are so as a whole or not at all."""
        return self.block[0] <= start and stop <= self.block[1]


@dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[Array]):
    """One collective, ready to run.

    Parameters
    ----------
    plan : Plan
    table : TransferTable
        The plan lowered for this element count.
    signature : Signature
        The data that all ranks must agree on before the first byte moves.
    op : str or None
        Reduction (sum, prod, min, max, or avg: added up here, and divided by the communicator unless the back end
        `averages`, or divided before in `DIVIDED_FIRST` types); None for copies.
    dtype : str
        numpy's name of the elements' type.
    itemsize : int
        Bytes of an element.
    memory : tuple of RankArrays
        One for each rank that the back end holds in this process, in the order of `Backend.ranks`.
    """

    plan: Plan
    table: TransferTable
    signature: Signature
    op: str | None
    dtype: str
    itemsize: int
    memory: tuple[RankArrays[Array], ...]


class StartedCall(Completion, Protocol):
    """A collective that a GPU may still run; it refers to the arrays in `held` until it has ended."""

    held: object


PreparedRun = Callable[[int, int, int], StartedCall | None]
"""Start a collective of a kind: its number, and the addresses of input and result; None if it has ended on return."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of a rank in a collective, for a timeline.

    `row` of the timeline is the rank, or the link over which it received; `start` and `end` are nanoseconds of the
    host's steady clock.
    """

    row: str
    what: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The traffic over a link from this rank since it was opened.

    `nbytes` have arrived. `busy` are the seconds with data under way, except those in which the destination had no
    room.
    """

    nbytes: int
    busy: float


@dataclass(frozen=True, slots=True)
class LinkShare:
    """The plan's rate of a link from one rank to another, in GB/s, and the links of the machine that it crosses,
    sorted.

    Those are (source device, destination device, channel).
    """

    rate: float
    wires: tuple[tuple[str, str, str], ...]


KEPT_ARRIVALS = 1024
"""Collectives of which a rank keeps how long it has waited for the others to come."""


class CallArrivals:
    """How long this rank has waited in its last `KEPT_ARRIVALS` collectives until all ranks had come, in nanoseconds.

    `ring` has the times; `count` is that of all collectives, the next place modulo the length. Compiled code adds too.

    >>> arrivals = CallArrivals()
    >>> arrivals.add(5)
    >>> before = arrivals.taken()
    >>> arrivals.forget()
    >>> before, arrivals.taken()
    ([5], [])
    """

    def __init__(self) -> None:
        self.ring = np.zeros(KEPT_ARRIVALS, dtype=np.int64)
        self.count = np.zeros(1, dtype=np.int64)
        self._taken = 0

    def add(self, nanoseconds: int) -> None:
        """Add a collective."""
        count = int(self.count[0])
        self.ring[count % KEPT_ARRIVALS] = nanoseconds
        self.count[0] = count + 1

    def forget(self) -> None:
        """Leave the collectives so far out of `taken`: all ranks have them."""
        self._taken = int(self.count[0])

    def taken(self) -> list[int]:
        """Return the times of the collectives since the last `forget`, at most `KEPT_ARRIVALS`, in order."""
        count = int(self.count[0])
        first = max(self._taken, count - KEPT_ARRIVALS)
        return [int(self.ring[number % KEPT_ARRIVALS]) for number in range(first, count)]


class Backend(ABC, Generic[Array]):
    """Moves bytes for some ranks.

    - `ranks`: the ranks whose arrays this process holds: all of them in one process, else one.
    - `one_rank`: a process holds one rank, so that methods take and return one array instead of a list, and ranks agree
      over a control plane.
    - `size`: number of all ranks.
    - `direct`: results may be written to the caller's arrays. A back end that can fail after it has begun to write them
      says False; its results are copied to the caller's arrays when they are complete.
    - `averages`: it divides averages of `AVERAGED` types as it writes results; otherwise the communicator does.
    - `chunk_bytes`: the best chunk size; None if it depends on the machine and has to be found.
    - `helpers`: processes of helper ranks, devices without arrays, numbered behind the ranks; None without such ranks.
    - `survivors`: how survivors of a failure find each other; None if they cannot, or a new back end has taken it over.
    - `about_engine`: how it moves data, and why not in a better way, the same on all ranks; empty without a choice.
    - `arrivals`: how long this rank has waited for the others in collectives; None if it does not know.
    - `monitored`: a link monitor reads `link_uses`. Nothing moves before all ranks have come, since a link to a late
      rank would count as busy.
    """

    name: str
    ranks: tuple[int, ...]
    one_rank: bool
    size: int
    direct: bool
    averages: bool
    arrays: ArrayLibrary[Array]
    chunk_bytes: int | None = None
    helpers: int | None = None
    survivors: MembershipProtocol | None = None
    about_engine: str = ""
    arrivals: CallArrivals | None = None
    monitored: bool = False

    @abstractmethod
    def run(self, call: Call[Array]) -> None:
        """Run a collective to its end for the ranks of this process.

        Raises
        ------
        RefusedError
            A rank refused, or calls another collective: on all ranks, before anything moves.
        BackendError
            A peer died or stalled. The back end is unusable from then on.
        """

    @abstractmethod
    def agree(self, signature: Signature) -> None:
        """Compare with all ranks the next operation; raises as `run`."""

    @abstractmethod
    def largest(self, value: float) -> float:
        """Return the largest of the values of all ranks, the same on every rank; all ranks must call it."""

    @abstractmethod
    def gather_texts(self, text: str) -> list[str]:
        """Return the text of every rank, in order of rank; all ranks must call it, between collectives.

        Raises
        ------
        BackendError
            A rank died, stalled, or makes another call. The back end is unusable from then on.
        """

    @abstractmethod
    def close(self) -> None:
        """Release processes, connections and memory; a second call does nothing."""

    def takes_part(self, nbytes: int) -> bool:
        """Return whether it runs a collective of inputs of so many bytes from the rows of its own rank alone; the same
        on all ranks."""
        return False

    def refuse(self, signature: Signature) -> None:
        """Refuse a collective for this rank, for the reason in `Signature.refusal`; raises as `run`.

        All ranks take part as in any collective, and all of them raise; nothing is done if all ranks are in this
        process.
        """
        self.agree(signature)

    def abort(self, error: BackendError) -> None:
        """End every wait of this rank, from any thread, and report the error to the other ranks; it is unusable
        afterwards."""

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        """Return what runs calls that differ from this one only in their number and in the addresses of their arrays.

        It takes addresses of contiguous, aligned arrays, which overlap only if results replace their inputs; it divides
        averages; and raises as `run`. None if that is not faster. A collective that is still on a GPU raises in
        `StartedCall.wait`, in a later call or in `close`; the caller's stream is behind it.
        """
        return None

    def settle(self) -> None:
        """Wait for the collectives that a GPU still runs, and raise their failure unless it has been raised."""

    def trouble(self) -> BackendError | None:
        """Return the failure that has ended the job on another rank, as far as it is known without waiting."""
        return None

    @property
    def failure(self) -> BackendError | None:
        """Return the failure that has ended it, if that was found on a GPU."""
        return None

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return a new contiguous array of the same dtype, contents undefined, in memory with the fewest copies."""
        return self.arrays.empty(shape, like)

    def writes(self, array: Any) -> bool:
        """Return whether results may be written directly to this contiguous array, although it is not `direct`."""
        return False

    def trace(self, steps: list[TraceEvent] | None) -> None:
        """Append the events of later collectives to a list, if it records them; None ends that."""

    @property
    def captures(self) -> bool:
        """Return whether the caller captures a graph now, into which collectives go."""
        return False

    @property
    def measures(self) -> bool:
        """Return whether it measures how fast its busy links are."""
        return False

    def link_uses(self) -> Mapping[tuple[int, int, str], LinkUse]:
        """Return the traffic over each link from this rank so far."""
        raise self._lacks("counters of links")

    def link_shares(self, plan: Plan, machine: Topology) -> Mapping[tuple[int, int, str], LinkShare]:
        """Return the planned share of each link on a machine that has the links of the plan's, perhaps slower."""
        raise self._lacks("counters of links")

    @property
    def wires(self) -> Mapping[tuple[int, int, str], tuple[str, ...]]:
        """Return the links with addresses of their own, each with its devices; these are empty if it is the only one
        between its ranks.
        """
        return {}

    def watch(self, cables: Mapping[tuple[int, int, str], str]) -> None:
        """Report a cable that does not answer at once, not after the timeout, since the ranks can do without it.

        `cables` has the name of the cable of each link to watch.
        """

    def follow(self) -> Signature | None:
        """Wait for the next agreement that concerns this helper rank, and return it; None after the ranks' shutdown.

        Raises `BackendError` if the job has failed; the back end is unusable from then on.
        """
        raise self._lacks("helper ranks")

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        """Return a new back end for each group that has ranks of this process; all ranks must call it at once.

        Every rank is in one of the groups. Rank i of a new back end is the i-th of its group.
        """
        raise UsageError(
            f"the {self.name} back end cannot be split; make a communicator over the members of each group"
        )

    @property
    def about(self) -> dict[str, Any]:
        """Return the settings for a rank that joins these, as JSON has it (`open_joining_backend`)."""
        return {}

    def go_on(self, gather: Callable[[str], list[str]], *, rank: int, size: int) -> Backend[Any]:
        """Return a new back end among the surviving ranks, with the same `survivors`; all of them call it.

        This one ends, if it has not ended, but leaves `survivors` open. A second attempt may follow. `gather` is an
        allgather of texts among those ranks; `rank` and `size` are this rank among them, and their number.
        """
        raise self._lacks("recovery")

    def _lacks(self, what: str) -> UsageError:
        return UsageError(f"the {self.name} back end has no {what}")


def group_of(groups: Sequence[Sequence[int]], rank: int) -> Sequence[int]:
    """Return the group of a rank."""
    return next(group for group in groups if rank in group)


class OneRank(Backend[Any]):
    """A back end of one rank, whose control messages between collectives go over a `ControlPlane`, `_world`."""

    one_rank = True
    _world: ControlPlane
    _timeout: float

    @property
    def timeout(self) -> float:
        """Return the seconds that a rank waits for the others."""
        return self._timeout

    def largest(self, value: float) -> float:
        with self._reporting_failures():
            return self._world.largest(value, timeout=self._timeout)

    def agree(self, signature: Signature) -> None:
        with self._reporting_failures():
            self._world.agree(signature, timeout=self._timeout)

    def trouble(self) -> BackendError | None:
        return self._world.trouble()

    def _agree_timed(self, signature: Signature) -> int:
        """Agree on a collective; return the nanoseconds until all ranks had come."""
        began = time.monotonic_ns()
        self._world.agree(signature, timeout=self._timeout)
        return time.monotonic_ns() - began

    def abort(self, error: BackendError) -> None:
        self._world.abort(error)

    def gather_texts(self, text: str) -> list[str]:
        with self._reporting_failures():
            return self._world.texts(text, timeout=self._timeout)

    def _reporting_failures(self) -> AbstractContextManager[None]:
        """Report failures inside to all ranks, which would wait for this one."""
        return nullcontext()


class AllRanks(Backend[Array]):
    """A back end that holds all ranks in one process."""

    one_rank = False
    direct = True
    averages = False

    def agree(self, signature: Signature) -> None: ...

    def largest(self, value: float) -> float:
        return value

    def gather_texts(self, text: str) -> list[str]:
        return [text] * self.size
