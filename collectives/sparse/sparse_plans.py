"""Check the arguments of a sparse allreduce, make its plans with their model times, and run their rounds.

Plans are made at their first use, and kept: one for each exchange and each size of the entries.

A round moves elements in their buffers, or messages in an area of their own (`RoundRunner`). All ranks divide an area
in the same way among the messages of a round. A rank puts its own messages into their places, the back end copies them
along the trees into the same places elsewhere, and nothing else of the area is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.execution import Execution
from collectives.backends.request import check_inputs, check_outputs
from collectives.peers.control_plane import shape_text
from collectives.sparse.entry_arrays import EntryArrays, Line, message_bytes, place_bytes
from collectives.sparse.exchange_choice import entry_count
from collectives.sparse.selection.error_feedback import checked_density
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.model.closed_form import simulate
from topoplan.plans.plan import Plan
from topoplan.plans.structure import rounds
from topoplan.plans.verify import verify
from topoplan.schedules.low_latency import lowest_tree, one_hop
from topoplan.schedules.sparse_plan import sparse_servers, sparse_trees
from topoplan.units import exact

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat


class RoundRunner(Generic[Line]):
    """The rounds of one sparse plan for one communicator."""

    def __init__(self, execution: Execution[Line], plan: Plan) -> None:
        self.plan = plan
        self.rounds = rounds(plan)
        self._execution = execution
        self._reached = [
            [
                tuple(sorted({edge.child for stage in shard.stages for edge in stage.edges}))
                for shard in one.plan.shards[: len(one.senders)]
            ]
            for one in self.rounds
        ]

    def elements(
        self,
        number: int,
        borders: Sequence[int],
        *,
        op: str | None,
        given: Sequence[Line],
        results: Sequence[Line],
        about: str,
    ) -> None:
        """Run a round on elements, as `Execution.run_round`; shard s ends at ``borders[s]``."""
        part = self.rounds[number].plan
        self._execution.run_round(part, tuple(borders), op=op, given=given, results=results, about=about)

    def exchange(
        self,
        number: int,
        lengths: Sequence[int],
        sent: Mapping[tuple[int, int], Any],
        arrays: EntryArrays[Line],
        *,
        about: str,
    ) -> dict[int, list[tuple[int, int, Any]]]:
        """Run a round on entries.

        `lengths` are the bytes of a message of every shard of the sparse plan, 0 if its entries are sent with
        another's. `sent` has the messages (arrays of uint8) of this process's ranks by (rank, shard). Returns the
        received messages of each rank of this process as (shard, sender, message), in the order of shards and senders.
        """
        one = self.rounds[number]
        backend = self._execution.backend
        library = backend.arrays
        padded = [place_bytes(length) for length in lengths]
        borders = tuple(accumulate(sum(padded[shard] for shard in together) for together in one.shards))
        total = borders[-1] if borders else 0
        areas = {rank: arrays.area(total) for rank in backend.ranks}
        arrived: dict[int, list[tuple[int, int, Any]]] = {rank: [] for rank in backend.ranks}
        coming = []
        start = 0
        for place, (together, sender) in enumerate(zip(one.shards, one.senders, strict=True)):
            for shard in together:
                stop = start + lengths[shard]
                if sender in areas and lengths[shard]:
                    arrays.store(library.part(areas[sender], start, stop), sent[sender, shard])
                coming += [
                    (rank, shard, sender, start) for rank in self._reached[number][place] if rank in areas
                ]
                start += padded[shard]
        lines = list(areas.values())
        self._execution.run_round(one.plan, borders, op=None, given=lines, results=lines, about=about)
        for rank, shard, sender, start in sorted(coming):
            part = library.part(areas[rank], start, start + lengths[shard])
            arrived[rank].append((shard, sender, arrays.values(part)))
        return arrived


KINDS = ("servers", "tree", "balanced")  # exchanges with plans of their own
MOST_RANKS = 64  # most ranks for trees on entries: every rank would be the root of a star to all others


class SparsePlans:
    """Plans on which entries move, for the machine of a communicator."""

    def __init__(self, execution: Execution[Any]) -> None:
        self._execution = execution
        self._runners: dict[tuple[str, Fraction], RoundRunner[Any]] = {}
        self._seconds: dict[tuple[str, Fraction, int], float] = {}
        self._elements: dict[str, Plan] = {}
        self._absent: dict[str, str] = {}

    def possible(self, entries: Fraction) -> tuple[str, ...]:
        """Return the exchanges that have a plan on this machine; ``entries`` as in `runner`."""
        return tuple(name for name in KINDS if not self._missing(name, entries))

    def runner(self, exchange: str, entries: Fraction) -> RoundRunner[Any]:
        """Return the rounds of a verified sparse plan; UsageError if this machine has none.

        `entries` is the bytes of entries for a byte of the gradient.
        """
        missing = self._missing(exchange, entries)
        if missing:
            others = ", ".join(("dense", "pairs", *self.possible(entries)))
            raise UsageError(f"no exchange {exchange!r} here: {missing}; use {others}")
        return self._runners[exchange, entries]

    def seconds(self, exchange: str, entries: Fraction, nbytes: int) -> float:
        """Return the model time of an exchange for a gradient of so many bytes."""
        key = (exchange, entries, nbytes)
        if key not in self._seconds:
            self._seconds[key] = simulate(self.runner(exchange, entries).plan, nbytes=nbytes).seconds
        return self._seconds[key]

    @property
    def _channels(self) -> str:
        return "+".join(self._execution.channels)

    @cached_property
    def _servers(self) -> FabricServers:
        return FabricServers(Fabric(self._execution.topology, self._execution.channels))

    def _missing(self, exchange: str, entries: Fraction) -> str:
        """Return why this machine has no such exchange; empty if it has one, which is then planned."""
        if exchange not in self._absent:
            self._absent[exchange] = self._reason(exchange)
        if not self._absent[exchange] and (exchange, entries) not in self._runners:
            try:
                made = self._plan(exchange, entries)
            except RefusedError:
                raise
            except (InfeasibleError, UsageError):
                self._absent[exchange] = "the machine has no way for it"
            else:
                verify(made)
                self._runners[exchange, entries] = RoundRunner(self._execution, made)
        return self._absent[exchange]

    def _plan(self, exchange: str, entries: Fraction) -> Plan:
        if exchange != "servers":
            return sparse_trees(self._trees_of(exchange), entries=entries)
        topology, channels = self._execution.topology, self._channels
        return self._made(
            lambda: sparse_servers(topology, entries=entries, channels=channels), f"servers, {entries}"
        )

    def _made(self, make: Callable[[], Plan], about: str) -> Plan:
        """Return a plan that one rank makes for all."""
        made = self._execution.planned(make, collective="allreduce", about=f"plan of {about}")
        assert isinstance(made, Plan), "no plans by size"
        return made

    def _reason(self, exchange: str) -> str:
        """Return why an exchange does not apply here; empty if it does."""
        ranks, servers = self._execution.backend.size, len(self._servers.names)
        if ranks == 1:
            return "one rank exchanges nothing"
        if exchange == "servers":
            return (
                ""
                if 1 < servers < ranks
                else f"it is for several servers with several ranks, not {servers} for {ranks}"
            )
        if len(self._execution.channels) > 1 and "network" not in self._execution.channels:
            return "the buffer is divided between channels"
        return "" if ranks <= MOST_RANKS else f"it is looked for up to {MOST_RANKS} ranks"

    def _trees_of(self, exchange: str) -> Plan:
        """Return the allreduce of elements on whose trees entries move."""
        if exchange not in self._elements:
            topology, channels = self._execution.topology, self._channels
            if exchange == "tree":
                found = self._made(lambda: lowest_tree(topology, channels=channels), "one low tree")
            else:
                try:
                    found = self._made(lambda: one_hop(topology, channels=channels), "stars")
                except InfeasibleError:
                    found = self._execution.plan("allreduce", 1 << 30)
            self._elements[exchange] = found
        return self._elements[exchange]


DTYPES = ("float16", "bfloat16", "float32", "float64")
"""dtypes of gradients; those of 16 bits are kept, selected and sent in float32."""

OPERATIONS = ("sum", "avg")

NOMINAL = 1 << 20  # elements of the gradient whose bits per entry plans and models use

LEAST_SHARE = Fraction(1, 10**9)
"""Smallest share of the bytes for which plans are made; a density below it still selects one entry."""


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A sparse allreduce with valid arguments.

    `inputs` and `outputs` are by rank of this process. `size` is in elements; `dtype` is that of residuals and
    messages.
    """

    inputs: list[Any]
    outputs: Sequence[Any | None]
    op: str
    shape: tuple[int, ...]
    size: int
    dtype: str
    density: float
    exchange: str
    wire: WireFormat | None
    key: str
    momentum: float
    loss_scale: float

    @property
    def kind(self) -> tuple[object, ...]:
        """The fields that determine the exchange."""
        return self.size, self.dtype, self.density, self.exchange, self.wire

    @property
    def entry_share(self) -> Fraction:
        """Bytes of entries for a byte of the gradient, as plans and models use them: those of a large gradient."""
        entries = entry_count(NOMINAL, self.density)
        nbytes = message_bytes(entries, size=NOMINAL, dtype=self.dtype, wire=self.wire)
        share = exact(self.density) * Fraction(nbytes, entries * np.dtype(self.dtype).itemsize)
        return max(share, LEAST_SHARE)

    def about(self, exchange: str) -> str:
        """Describe the elements of an exchange, for comparison between ranks."""
        text = (
            f"sparse {self.op} of {shape_text(self.shape)} {self.dtype}, {float(self.density)} by {exchange}"
        )
        if self.wire is not None:
            text += f", {self.wire.values} {self.wire.indices}"
        if self.loss_scale != 1:
            text += f", loss scale {self.loss_scale:g}"
        return text + (f", key {_in_short(self.key)}" if self.key else "")


def sparse_request(
    backend: Backend[Any],
    arrays: Any,
    *,
    density: float,
    exchange: str,
    wire: WireFormat | None,
    out: Any = None,
    op: str = "sum",
    key: str = "",
    momentum: float = 0.0,
    loss_scale: float = 1.0,
) -> SparseRequest:
    """Check the arguments of a sparse allreduce; UsageError names the rank and the argument."""
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    checked_density(density)
    dtype = library.dtype(inputs[0])
    if dtype not in DTYPES:
        raise UsageError(f"gradients of {dtype} cannot be made sparse; give {', '.join(DTYPES)}")
    if op not in OPERATIONS:
        raise UsageError(f"op of a sparse allreduce must be {' or '.join(OPERATIONS)}, got {op!r}")
    if not (isinstance(loss_scale, Real) and 0 < loss_scale < math.inf):
        raise UsageError(
            f"loss_scale must be above 0 and finite, got {loss_scale!r}; give that of the gradients"
        )
    shape = library.shape(inputs[0])
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shape=shape,
        like=inputs[0],
        holders=backend.ranks,
    )
    size = 1
    for length in shape:
        size *= length
    kept = "float64" if dtype == "float64" else "float32"
    return SparseRequest(
        inputs, outputs, op, shape, size, kept, density, exchange, wire, key, momentum, float(loss_scale)
    )


def _in_short(name: str) -> str:
    """Return a key as short text; a long one as its beginning and a digest."""
    shown = name.encode("ascii", "replace").decode()[:32]
    return shown if shown == name else f"{shown} {sha256(name.encode()).hexdigest()[:8]}"
