"""Define the back end protocol: it runs the rows of transfer tables for the ranks whose arrays this process holds.

The communicator checks arguments, plans, lowers, allocates memory and divides averages; a back end only moves and
joins bytes. A `Call` describes one collective. Optional abilities are protocols of their own, checked at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from collectives.peers.control_plane import ControlPlane, Signature
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.tables.array_library import ArrayLibrary
from collectives.tables.transfer_table import Given, TransferTable, place_in
from topoplan.errors import BackendError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan

Array = TypeVar("Array")

LONGEST_TIMEOUT = 100_000
"""Seconds, more than a day; waits of the systems, some of them for multiples of it, end at 2**31 milliseconds."""

AVERAGED = ("float32", "float64", "complex64", "complex128")
"""Types whose averages a back end may divide itself: numpy divides them alike wherever they are."""

DIVIDED_FIRST = ("float16", "bfloat16")
"""Types whose averages are sums of values that each rank has divided by the number of ranks.

A sum of values of 16 bits may be beyond their type where the average is not. The communicator divides them; a back end
adds them up as they come.
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
        The elements of the buffer that are the rank's result; empty where it gets none.
    result : array
        One contiguous dimension of those elements, to be written. Where no row leads, the communicator puts
        what the rank has given.
    """

    rank: int
    given: Given
    source: Array
    block: tuple[int, int]
    result: Array

    def put_in(self, start: int, stop: int) -> slice:
        """Where elements lie in ``source``; those of one shard, which is one piece of it."""
        first = place_in(self.given, start)
        return slice(first, first + stop - start)

    def holds(self, start: int, stop: int) -> bool:
        """Whether elements are part of the result; chunks are so as a whole or not at all."""
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
        What all ranks must agree on before the first byte moves.
    op : str or None
        Reduction (sum, prod, min, max, or avg: added up here, and divided by the communicator unless the back end
        `averages`, or divided before in `DIVIDED_FIRST` types); None where data is copied.
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


class Backend(Protocol[Array]):
    """Moves bytes for some ranks.

    Attributes
    ----------
    name : str
    ranks : tuple of int
        The ranks whose arrays this process holds: all of them in one process, else one.
    one_rank : bool
        Whether a process holds one rank, so that methods take and return one array instead of a list.
    size : int
        Number of all ranks.
    direct : bool
        Whether results may be written to the caller's arrays. A back end that can fail after it has begun to write
        them says False; its results are copied to the caller's arrays when they are complete.
    averages : bool
        Whether it divides the averages of `AVERAGED` types by the number of ranks, in the pass that hands results over;
        if not, the communicator divides them.
    chunk_bytes : int or None
        The chunk size that suits it; None where the best one depends on the machine and has to be found.
    """

    name: str
    ranks: tuple[int, ...]
    one_rank: bool
    size: int
    direct: bool
    averages: bool
    chunk_bytes: int | None

    @property
    def arrays(self) -> ArrayLibrary[Array]:
        """The kind of arrays that it takes."""

    def run(self, call: Call[Array]) -> None:
        """Run a collective to its end for the ranks of this process.

        Raises
        ------
        RefusedError
            A rank refused, or means another collective: on all ranks, before anything moves.
        BackendError
            A peer died or stalled. The back end is unusable from then on.
        """

    def refuse(self, signature: Signature) -> None:
        """Tell the other ranks that this one will not take part in a collective, and why (`Signature.refusal`).

        All ranks come together for that as for any collective, and all of them raise; nothing is done where all ranks
        are in this process.

        Raises
        ------
        RefusedError
            As `run`.
        BackendError
            As `run`.
        """

    def largest(self, value: float) -> float:
        """The largest of the values that all ranks give, the same on every rank; all ranks must call it."""

    def close(self) -> None:
        """Give up processes, connections and memory; closing twice is fine."""


@runtime_checkable
class GathersTexts(Protocol):
    """A back end of one rank that carries words too, over the control plane that watches its collectives."""

    def agree(self, signature: Signature) -> None:
        """Compare with all ranks what they are about to do, before they tell each other about it.

        Raises
        ------
        RefusedError
            A rank means something else, or refuses: on all ranks.
        BackendError
            A rank died or stalled. The back end is unusable from then on.
        """

    def gather_texts(self, text: str) -> list[str]:
        """What every rank says, in order of rank; all ranks must call it, between collectives.

        Raises
        ------
        BackendError
            A rank died, stalled, or makes another call. The back end is unusable from then on.
        """


@runtime_checkable
class Aborts(Protocol):
    """A back end of one rank whose waits can be ended from another thread."""

    def abort(self, error: BackendError) -> None:
        """End every wait of this rank, and tell the other ranks why; the back end is unusable from then on."""


@runtime_checkable
class Follows(Protocol):
    """A back end of one rank, or of one device that is no rank: a helper, numbered behind the ranks."""

    helpers: int

    def follow(self) -> Signature | None:
        """What the ranks have agreed on that this helper takes part in, whenever that is; None once they have left.

        Raises
        ------
        BackendError
            The job has failed. The back end is unusable from then on.
        """


PreparedRun = Callable[[int, int, int], None]
"""Runs a collective of a kind: its number, and the addresses of input and result."""


@runtime_checkable
class PreparesRuns(Protocol):
    """A back end of one rank that needs less time for a collective that is like one before."""

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        """What runs calls that differ from this one only in their number and in where their arrays begin.

        It takes addresses of contiguous arrays, aligned to their elements, which overlap only where results take the
        places of their inputs; it divides averages; and raises as `run`. None where such a call is no quicker.
        """


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that a rank did in a collective, for a timeline.

    Parameters
    ----------
    row : str
        Of the timeline: the rank, or the link over which it received.
    what : str
    start, end : int
        Nanoseconds of the host's steady clock.
    """

    row: str
    what: str
    start: int
    end: int


@runtime_checkable
class Traces(Protocol):
    """A back end that tells what it does in a collective."""

    def trace(self, steps: list[TraceEvent] | None) -> None:
        """Add the steps of the collectives from now on to a list; with None no longer."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link from this rank has carried since it was opened.

    Parameters
    ----------
    nbytes : int
        That have arrived.
    busy : float
        Seconds in which something was on its way, those not counted in which the destination had no room for it.
    """

    nbytes: int
    busy: float


@dataclass(frozen=True, slots=True)
class LinkShare:
    """What a plan counts on for a link from one rank to another.

    Parameters
    ----------
    rate : float
        GB/s.
    wires : tuple of (source device, destination device, channel)
        The links of the machine that it crosses, sorted.
    """

    rate: float
    wires: tuple[tuple[str, str, str], ...]


@runtime_checkable
class MeasuresLinks(Protocol):
    """A back end of one rank that sees how fast its links are while they are busy."""

    @property
    def measures(self) -> bool:
        """Whether the system under it counts what that takes."""

    def link_uses(self) -> Mapping[tuple[int, int, str], LinkUse]:
        """What has gone over each link from this rank so far."""

    def link_shares(self, plan: Plan, machine: Topology) -> Mapping[tuple[int, int, str], LinkShare]:
        """What a plan counts on for its links on a machine that has those of the plan's, perhaps slower."""


@runtime_checkable
class GivesMemory(Protocol):
    """A back end of one rank with memory of its own kind, from which it can do with fewer copies."""

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """A new contiguous array of the same dtype, contents undefined: of that memory where there is some left."""

    def writes(self, array: Any) -> bool:
        """Whether results may be written to this contiguous array at once, also where that is not so of all arrays."""


@runtime_checkable
class Captures(Protocol):
    """A back end whose collectives can be put into graphs that the caller launches later."""

    @property
    def captures(self) -> bool:
        """Whether the caller captures a graph now."""


@runtime_checkable
class Splits(Protocol):
    """A back end that can be made for the groups of its ranks, too."""

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        """New back ends, one for each group that has ranks of this process; all ranks must call it at once.

        Parameters
        ----------
        groups : sequence of sequence of int
            Ranks; every rank is in one of them. Rank i of a new back end is the i-th of its group.

        Raises
        ------
        UsageError, BackendError
            As where such a back end is made.
        """


@runtime_checkable
class Recovers(Protocol):
    """A back end of one rank whose ranks can go on when others are gone.

    Attributes
    ----------
    survivors : Survivors or None
        How ranks that are left find each other; None where they cannot, or a new back end has taken it over.
    about : dict
        What that of a rank that joins these must be made with, as JSON has it (`open_among`).
    """

    survivors: MembershipProtocol | None

    @property
    def about(self) -> dict[str, Any]:
        """See above."""

    def go_on(self, gather: Callable[[str], list[str]], *, rank: int, size: int) -> Backend[Any]:
        """A new back end among the ranks that are left, with the same survivors; all of them call it.

        This one ends, if it has not ended, but leaves the survivors open. A second attempt may follow.

        Parameters
        ----------
        gather : callable
            An allgather of texts among those ranks.
        rank, size : int
            This rank among them, and how many they are.

        Raises
        ------
        UsageError, BackendError
            As where such a back end is made.
        """


def group_of(groups: Sequence[Sequence[int]], rank: int) -> Sequence[int]:
    """The group that a rank is in."""
    return next(group for group in groups if rank in group)


@runtime_checkable
class HasEngines(Protocol):
    """A back end that moves data in one of several ways.

    Attributes
    ----------
    about_engine : str
        Which one it is, and why no better one; empty where it has no choice. The same on all ranks.
    """

    about_engine: str


class OneRank:
    """What back ends of one rank that have a `ControlPlane` tell the other ranks through it, between collectives.

    Attributes
    ----------
    _world : World
    _timeout : float
        Seconds that a rank waits for the others.
    """

    _world: ControlPlane
    _timeout: float

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for the others."""
        return self._timeout

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        with self._telling():
            return self._world.largest(value, timeout=self._timeout)

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        with self._telling():
            self._world.agree(signature, timeout=self._timeout)

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        self.agree(signature)

    def abort(self, error: BackendError) -> None:
        """See `Aborts.abort`."""
        self._world.abort(error)

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`."""
        with self._telling():
            return self._world.texts(text, timeout=self._timeout)

    def _telling(self) -> AbstractContextManager[None]:
        """Tells all ranks of what this one stops with by itself, inside, where they would wait for it."""
        return nullcontext()
