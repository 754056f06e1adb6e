"""Check the arguments of a sparse allreduce, and choose its exchange by the model: dense, or one of five for entries.

An allreduce of d elements of b bytes sends 2 (N - 1) / N d b bytes over each link of a ring, gathering k entries of b
+ i bytes from each of N ranks (N - 1) k (b + i): so on a ring entries win below a density k / d of 2 b / (N (b + i)).
The model evaluates this for the machine's links and all plans. The time of selecting and adding entries is left out.

A call plans only exchanges that may be the fastest: one is ruled out, without a plan, by a lower bound of its time
(`SparsePlans.least_seconds`) above the time of another. An explanation plans all of them, on its rank alone. Plans are
kept: one for each exchange and each size of the entries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.execution import Execution
from collectives.backends.plan_and_chunk_store import plan_locally
from collectives.backends.request import check_inputs, check_outputs
from collectives.peers.control_plane import shape_text
from collectives.sparse.entry_arrays import entry_count, message_bytes, place_bytes
from collectives.sparse.exchanges import RoundRunner
from collectives.sparse.hashed_owners import OwnedMessages
from collectives.sparse.selection.error_feedback import checked_density, checked_momentum, real_number
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.model.closed_form import simulate
from topoplan.model.dataflow import LAUNCH, device_kinds, link_latency
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.verify import verify
from topoplan.schedules.low_latency import lowest_tree, one_hop_plan
from topoplan.schedules.sparse_plan import sparse_servers, sparse_trees
from topoplan.units import exact, format_size

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

EXCHANGES = ("auto", "dense", "pairs", "hashed", "servers", "tree", "balanced")

GATHERS = ("pairs", "hashed")
"""Exchanges of entries by dense collectives, without a sparse plan."""

TREES = ("tree", "balanced")
"""Exchanges of entries on trees."""

MOST_RANKS = 64
"""Most ranks for trees on entries: every rank would be the root of a star to all others."""

MARGIN = 1 - 1e-9
"""Factor of lower bounds, for rounding."""


@dataclass(frozen=True, slots=True)
class SparseExplanation:
    """The exchange of a gradient, and its reason.

    `exchange` is "dense": residual and gradient are summed as a whole; "pairs": the entries of all ranks are gathered;
    "hashed": owners by a hash of the index sum entries, and their sums are gathered; "servers": gradients are summed
    inside servers, and entries exchanged between them; "tree": entries are summed and selected again on the way up one
    low tree; or "balanced": the same on many trees, each for its part. `entries` are those of every rank, or with
    "servers" of every server, approximate if shards select for themselves; `pairs_bytes` those of the gathered messages
    of all ranks, with padding. `seconds` are model times: for "auto" of all exchanges of this machine if it comes from
    `explain`, of exchanges that no lower bound rules out if it comes from a call; else of the named one. `plan` runs,
    unless entries are gathered or sent to hashed owners: that of the allreduce, or the sparse plan.
    """

    exchange: str
    entries: int
    pairs_bytes: int
    reason: str
    seconds: Mapping[str, float]
    plan: Plan | None

    def __str__(self) -> str:
        return f"{self.exchange}: {self.reason}"

    @property
    def dense_seconds(self) -> float:
        """Model time of the whole gradient; NaN if another exchange was named."""
        return self.seconds.get("dense", math.nan)

    @property
    def pairs_seconds(self) -> float:
        """Model time of gathered entries; NaN if it was not computed."""
        return self.seconds.get("pairs", math.nan)


class ExchangeTimes:
    """Model times of the exchanges of one gradient, each computed when it is asked for."""

    def __init__(self, plans: SparsePlans, asked: SparseRequest) -> None:
        self._plans = plans
        self._asked = asked
        self._share = asked.entry_share
        self._entries = sum(asked.counts)
        self._nbytes = asked.size * np.dtype(asked.dtype).itemsize
        message = message_bytes(self._entries, size=asked.size, dtype=asked.dtype, wire=asked.wire)
        self._gathered = plans.ranks * place_bytes(message)
        self._owned = OwnedMessages(asked.size, asked.dtype, asked.wire).expected(self._entries, plans.ranks)
        self._sparse = self._entries < asked.size
        self._seconds: dict[str, float] = {}
        self._least: dict[str, float] = {}

    def explain(self) -> SparseExplanation:
        """Return the exchange, with the times of all exchanges of this machine if none is named."""
        if check_exchange(self._asked.exchange) != "auto":
            return self.choose()
        for name in ("dense", "pairs", *self._plans.possible(self._share)):
            if not self._asked.excludes(name):
                self._time(name)
        return self._explanation(self._fastest())

    def choose(self) -> SparseExplanation:
        """Return the exchange, by the times of exchanges that may be the fastest."""
        named = check_exchange(self._asked.exchange)
        if reason := self._asked.excludes(named):
            raise UsageError(reason)
        if named != "auto":
            self._time(named)
            return self._explanation(named)
        self._time("dense")
        left = (
            self._plans.least_seconds(self._share, self._nbytes, self._gathered, self._owned)
            if self._sparse
            else {}
        )
        left = {name: least for name, least in left.items() if not self._asked.excludes(name)}
        while left and min(left.values()) <= min(self._seconds.values()):
            name = min(left, key=left.__getitem__)
            del left[name]
            if self._competes(name):
                self._time(name)
        self._least = left
        return self._explanation(self._fastest())

    def _fastest(self) -> str:
        return choose_exchange(self._seconds, sparse=self._sparse, selection=self._asked.selection_seconds)

    def _competes(self, name: str) -> bool:
        """Return whether this machine has an exchange, and for trees that it has no three phases."""
        beside_servers = name in TREES and self._plans.has("servers", self._share)
        return name == "pairs" or (not beside_servers and self._plans.has(name, self._share))

    def _time(self, name: str) -> None:
        self._seconds[name] = self._plans.seconds(
            name, self._share, self._nbytes, self._gathered, self._owned
        )

    def _explanation(self, chosen: str) -> SparseExplanation:
        plan = None
        if chosen == "dense":
            plan = self._plans.dense("allreduce", self._nbytes)
        elif chosen not in GATHERS:
            plan = self._plans.runner(chosen, self._share).plan
        return SparseExplanation(chosen, self._entries, self._gathered, self._reason(), self._seconds, plan)

    def _reason(self) -> str:
        gathered = f"{format_size(self._gathered)} together, take"
        names = {
            "pairs": f"{self._entries} of {self._asked.size} entries of each of {self._plans.ranks} ranks, {gathered}",
            "dense": f"the whole gradient, {format_size(self._nbytes)}, takes",
            "hashed": "hashed owners",
            "servers": "three phases over servers",
            "tree": "one tree",
            "balanced": "balanced trees",
        }
        times = [
            f"{words} {found[name] * 1e3:.3g} ms"
            for found, more in ((self._seconds, ""), (self._least, " at least"))
            for name, words in ((name, names[name] + more) for name in names if name in found)
        ]
        if self._asked.exchange != "auto":
            return f"asked for; by the model {times[0]}"
        selection = self._asked.selection_seconds
        if selection:
            times.append(f"and the selection of entries {selection * 1e3:.3g} ms")
        return "by the model " + ", ".join((", and ".join(times[:2]), *times[2:]))


def check_exchange(exchange: str) -> str:
    """Return the name of an exchange, or "auto"; UsageError if it is unknown."""
    if not isinstance(exchange, str) or exchange not in EXCHANGES:
        raise UsageError(f"exchange {exchange!r} is unknown; use {', '.join(EXCHANGES)}")
    return exchange


def choose_exchange(seconds: Mapping[str, float], *, sparse: bool, selection: float = 0.0) -> str:
    """Return the exchange of "auto": the fastest, and dense if no entry is left out.

    Over several servers with several ranks each, trees on entries are taken only by name: they keep as many entries as
    one rank gives, while three phases keep those of every server. `selection` are seconds that all but dense take
    besides.

    >>> choose_exchange({"dense": 2.0, "pairs": 1.0, "servers": 0.5}, sparse=True)
    'servers'
    """
    if not sparse:
        return "dense"
    rivals = EXCHANGES[:-2] if "servers" in seconds else EXCHANGES
    extra = {name: selection * (name != "dense") for name in seconds}
    return min((name for name in rivals if name in seconds), key=lambda name: seconds[name] + extra[name])


@dataclass(frozen=True, slots=True)
class ServerCuts:
    """The links around each server with ranks, or around each rank if there is one server.

    `members` are the ranks of each, `into` and `out` its capacities in bytes per second, and `latency` the least
    start-up of a route from one to another, in seconds.
    """

    members: tuple[int, ...]
    into: tuple[float, ...]
    out: tuple[float, ...]
    latency: float

    @classmethod
    def around(cls, servers: FabricServers) -> ServerCuts:
        """Return the cuts of a fabric."""
        fabric = servers.fabric
        home = {name: name for name in fabric.ranks}
        if len(servers.names) > 1:
            home = {device.name: device.server for device in fabric.topology.devices}
        members = Counter(home[name] for name in fabric.ranks)
        into, out = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
        kinds, networked = device_kinds(fabric.topology), "network" in fabric.channels
        entering = leaving = direct = math.inf
        for link, capacity in zip(fabric.links, fabric.capacity, strict=True):
            src, dst = home.get(link.src), home.get(link.dst)
            if src == dst:
                continue
            counts = not networked or link.latency is not None or link.channel in ("network", "nvlink")
            seconds = link_latency(link, kinds) if counts else 0.0
            if src in out:
                out[src] += float(capacity) * 1e9
                leaving = min(leaving, seconds)
            if dst in into:
                into[dst] += float(capacity) * 1e9
                entering = min(entering, seconds)
                direct = min(direct, seconds if src in out else math.inf)
        return cls(
            tuple(members.values()),
            tuple(into.values()),
            tuple(out.values()),
            min(direct, leaving + entering),
        )


class SparsePlans:
    """Plans on which entries move, for the machine of a communicator; `local` makes them on this rank alone.

    Else one rank makes each plan for all, which must ask for the same ones.
    """

    def __init__(self, execution: Execution[Any], *, local: bool = False) -> None:
        self.ranks = execution.backend.size
        self._execution = execution
        self._store = execution.store.copied() if local else None
        self._runners: dict[tuple[str, Fraction], RoundRunner[Any]] = {}
        self._elements: dict[str, Plan] = {}
        self._absent: dict[str, str] = {}

    def dense(self, collective: str, nbytes: int) -> Plan:
        """Return the plan of a collective on elements for a buffer of so many bytes."""
        if self._store is not None:
            return self._store.plan(collective, None, nbytes)
        return self._execution.plan(collective, nbytes)

    def possible(self, entries: Fraction) -> tuple[str, ...]:
        """Return the exchanges that have a plan on this machine; ``entries`` as in `runner`."""
        return tuple(name for name in ("hashed", "servers", *TREES) if self.has(name, entries))

    def has(self, exchange: str, entries: Fraction) -> bool:
        """Return whether this machine has an exchange, which is then planned; ``entries`` as in `runner`."""
        return not self._missing(exchange, entries)

    def runner(self, exchange: str, entries: Fraction) -> RoundRunner[Any]:
        """Return the rounds of a verified sparse plan; UsageError if this machine has none.

        `entries` is the bytes of entries for a byte of the gradient.
        """
        missing = self._missing(exchange, entries)
        if missing:
            others = ", ".join(("dense", "pairs", *self.possible(entries)))
            raise UsageError(f"no exchange {exchange!r} here: {missing}; use {others}")
        return self._runners[exchange, entries]

    def seconds(
        self, exchange: str, entries: Fraction, nbytes: int, gathered: int, owned: tuple[int, int]
    ) -> float:
        """Return the model time of an exchange for a gradient of so many bytes, and messages of so many together.

        `owned` are the bytes of a block to a hashed owner and of the owner's message (`OwnedMessages.expected`).
        """
        if exchange == "hashed":
            if missing := self._missing(exchange, entries):
                raise UsageError(f"no exchange 'hashed' here: {missing}; use dense or pairs")
            ranks, (block, length) = self.ranks, owned
            sizes = [
                ("allgather", ranks * place_bytes(8 * ranks)),
                (ALL_TO_ALL, ranks * block),
                ("allgather", ranks * place_bytes(8)),
                ("allgather", ranks * length),
            ]
            return sum(simulate(self.dense(name, size), nbytes=size).seconds for name, size in sizes)
        nbytes = gathered if exchange == "pairs" else nbytes
        collective = {"dense": "allreduce", "pairs": "allgather"}.get(exchange)
        plan = self.dense(collective, nbytes) if collective else self.runner(exchange, entries).plan
        return simulate(plan, nbytes=nbytes).seconds

    def least_seconds(
        self, entries: Fraction, nbytes: int, gathered: int, owned: tuple[int, int]
    ) -> dict[str, float]:
        """Return lower bounds of the model times of exchanges of entries, without a plan; arguments as `seconds`.

        Every round takes a launch, a start-up, and the bytes that must enter or leave a server over its capacity; with
        one server, or one rank on each, a rank stands for a server. Of G servers, all but one receive what is gathered
        from the others (pairs), what they push to its owners and what theirs send (hashed), the entries of G - 1 others
        (servers), or the sums (trees), which G - 1 have sent up.
        """
        if self.ranks == 1:
            return {"pairs": 0.0}
        cuts, packed = ServerCuts.around(self._servers), nbytes * float(entries)
        others, start = len(cuts.members) - 1, LAUNCH + cuts.latency
        outside = [1 - members / self.ranks for members in cuts.members]
        bounds = {
            "pairs": start
            + max(gathered * part / into for part, into in zip(outside, cuts.into, strict=True)),
            "hashed": 4 * start
            + max(
                self.ranks * part * (owned[1] + members * owned[0]) / into
                for part, into, members in zip(outside, cuts.into, cuts.members, strict=True)
            ),
            "servers": start + 2 * LAUNCH + packed * others / min(cuts.into),
            "tree": 2 * start + packed * (1 / max(cuts.into) + 1 / max(cuts.out)),
            "balanced": 2 * start + packed * others * (1 / sum(cuts.into) + 1 / sum(cuts.out)),
        }
        return {name: bounds[name] * MARGIN for name in bounds if name == "pairs" or not self._reason(name)}

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
                if exchange == "hashed":
                    self.dense(ALL_TO_ALL, NOMINAL)
                    return ""
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
        if self._store is not None:
            made = plan_locally(make)
        else:
            made = self._execution.planned(make, collective="allreduce", about=f"plan of {about}")
        assert isinstance(made, Plan), "no plans by size"
        return made

    def _reason(self, exchange: str) -> str:
        ranks, servers = self.ranks, len(self._servers.names)
        if ranks == 1:
            return "one rank exchanges nothing"
        if exchange == "servers":
            return (
                ""
                if 1 < servers < ranks
                else f"it is for several servers with several ranks, not {servers} for {ranks}"
            )
        channels = self._execution.channels
        if exchange != "hashed" and len(channels) > 1 and "network" not in channels:
            return "the buffer is divided between channels"
        return (
            ""
            if exchange == "hashed" or ranks <= MOST_RANKS
            else f"it is looked for up to {MOST_RANKS} ranks"
        )

    def _trees_of(self, exchange: str) -> Plan:
        """Return the allreduce of elements on whose trees entries move."""
        if exchange not in self._elements:
            topology, channels = self._execution.topology, self._channels
            if exchange == "tree":
                found = self._made(lambda: lowest_tree(topology, channels=channels), "one low tree")
            else:
                try:
                    found = self._made(lambda: one_hop_plan(topology, channels=channels), "stars")
                except InfeasibleError:
                    found = self.dense("allreduce", 1 << 30)
            self._elements[exchange] = found
        return self._elements[exchange]


DTYPES = ("float16", "bfloat16", "float32", "float64")
"""dtypes of gradients; those of 16 bits are kept, selected and sent in float32."""

OPERATIONS = ("sum", "avg")

NOMINAL = 1 << 20  # elements of the gradient whose bits per entry plans and models use

AUTO_DENSITY = 0.01
"""The density of "auto"."""

SELECTION_SECONDS = 1e-9
"""Seconds to select from an element on the host: 0.8e-9 to 2e-9 were measured, at 1 % of 2^18 to 2^24 float32."""

LEAST_SHARE = Fraction(1, 10**9)
"""Smallest share of the bytes for which plans are made; a density below it still selects one entry."""


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A sparse allreduce with valid arguments.

    `inputs` and `outputs` are by rank of this process. `size` is in elements; `dtype` is that of residuals and
    messages. `on_host` says that the gradients are not on a GPU. `layers` are the elements of each layer that selects
    for itself, None for one selection, and `densities` their shares if these differ. `clip` is the largest norm of the
    average, by which ranks clip their gradients. `selection_seconds` is the time of the selection in comparisons with
    dense, for a density of "auto".
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
    on_host: bool = True
    layers: tuple[int, ...] | None = None
    clip: float | None = None
    selection_seconds: float = 0.0
    densities: tuple[float, ...] | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """The fields that determine the exchange."""
        return (
            self.size,
            self.dtype,
            self.density,
            self.exchange,
            self.wire,
            self.on_host,
            self.layers,
            self.selection_seconds,
            self.densities,
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries that a rank selects, by layer."""
        layers = self.layers or (self.size,)
        shares = self.densities or (self.density,) * len(layers)
        return tuple(map(entry_count, layers, shares))

    def excludes(self, exchange: str) -> str:
        """Return why an exchange cannot have these gradients; empty if it can."""
        if exchange == "hashed" and not self.on_host:
            return "exchange 'hashed' needs gradients on the host, got gradients on a GPU; use pairs or auto"
        if exchange in ("servers", *TREES) and self.layers is not None:
            return (
                f"exchange {exchange!r} selects by the shards of its plan, not by layers; use pairs or hashed"
            )
        return ""

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
        if self.layers is not None:
            layers = self.layers if self.densities is None else (self.layers, self.densities)
            text += f", layers {sha256(repr(layers).encode()).hexdigest()[:8]}"
        if self.clip is not None:
            text += f", clip {self.clip:g}"
        return text + (f", key {_in_short(self.key)}" if self.key else "")


def sparse_request(
    backend: Backend[Any],
    arrays: Any,
    *,
    density: float | Literal["auto"] | Sequence[float],
    exchange: str,
    wire: WireFormat | None,
    out: Any = None,
    op: str = "sum",
    key: str = "",
    momentum: float = 0.0,
    loss_scale: float = 1.0,
    layers: Sequence[int] | None = None,
    clip: float | None = None,
) -> SparseRequest:
    """Check the arguments of a sparse allreduce; UsageError names the rank and the argument."""
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    chooses = density == "auto"
    if isinstance(density, str | Real):
        density = AUTO_DENSITY if chooses else checked_density(density)
    dtype = library.dtype(inputs[0])
    if dtype not in DTYPES:
        raise UsageError(f"gradients of {dtype} cannot be made sparse; give {', '.join(DTYPES)}")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise UsageError(f"op of a sparse allreduce must be {' or '.join(OPERATIONS)}, got {op!r}")
    if not 0 < real_number(loss_scale) < math.inf:
        raise UsageError(
            f"loss_scale must be above 0 and finite, got {loss_scale!r}; give that of the gradients"
        )
    shape = library.shape(inputs[0])
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shapes=[shape] * len(inputs),
        like=inputs[0],
        holders=backend.ranks,
    )
    size = 1
    for length in shape:
        size *= length
    if layers is not None:
        layers = _checked_layers(layers, size)
    check_exchange(exchange)
    check_wire(wire)
    momentum = checked_momentum(momentum)
    if not isinstance(key, str):
        raise UsageError(f"key must be a text, got {key!r}; give the name of the gradient")
    mean, densities = (density, None) if isinstance(density, float) else _by_layer(density, layers)
    if clip is not None and not 0 < real_number(clip) < math.inf:
        raise UsageError(f"clip must be a norm above 0, got {clip!r}; give that of the average, or None")
    on_host = library.gpu(inputs[0]) is None
    kept = "float64" if dtype == "float64" else "float32"
    return SparseRequest(
        inputs,
        outputs,
        op,
        shape,
        size,
        kept,
        mean,
        exchange,
        wire,
        key,
        momentum,
        float(loss_scale),
        on_host,
        None if layers is None or len(layers) < 2 else layers,
        None if clip is None else float(clip),
        SELECTION_SECONDS * size if chooses and on_host else 0.0,
        densities,
    )


def check_wire(wire: Any) -> None:
    """Raise `UsageError` unless this is a `WireFormat`, or None."""
    if wire is None:
        return
    from collectives.sparse.codec import WireFormat

    if not isinstance(wire, WireFormat):
        raise UsageError(
            f"wire must be a WireFormat, got {wire!r}; give for example "
            "collectives.sparse.codec.WireFormat(values='float16')"
        )


def _checked_layers(layers: Any, size: int) -> tuple[int, ...]:
    try:
        found = tuple(map(index, layers))
    except TypeError:
        found = (-1,)
    if min(found, default=0) < 0 or sum(found) != size:
        raise UsageError(
            f"layers must be the elements of each layer, {size} together, got {_in_short(repr(layers))}"
        )
    return found


def _by_layer(density: Any, layers: Sequence[int] | None) -> tuple[float, tuple[float, ...] | None]:
    """Return the share of all entries, and the densities of several layers; None if they are equal."""
    if not isinstance(density, Sequence):
        return checked_density(density), None
    shares = tuple(map(checked_density, density))
    if layers is None or len(shares) != len(layers):
        raise UsageError(
            f"density must be a number for each of {len(layers or ())} layers, got {len(shares)} numbers; give as many"
        )
    if len(set(shares)) < 2:
        return (shares[0] if shares else AUTO_DENSITY), None
    return sum(map(entry_count, layers, shares)) / max(sum(layers), 1) or AUTO_DENSITY, shares


def _in_short(name: str) -> str:
    """Return a key as short text; a long one as its beginning and a digest."""
    shown = name.encode("ascii", "replace").decode()[:32]
    return shown if shown == name else f"{shown} {sha256(name.encode()).hexdigest()[:8]}"
