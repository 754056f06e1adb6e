"""Keep the verified plans and the chunk sizes of a communicator; find each when it is first needed.

`PlanStore` plans a collective, root and message size once and keeps its transfer table's key.

`ChunkSizes` searches as Blink (Wang et al., MLSys 2020), section 4: start at 1 MB, multiply (here by 4) while
throughput rises, then step back half of the way to the better neighbour. Chunks that stay in a CPU's L2 cache may be
the fastest, so the search divides the first size too, unless that is hopeless. Every size is tried twice and its better
rate counts; a size must be `SEARCH_GAIN` times as fast as the best one before it. At most 7 sizes, 14 calls. A size is
kept for a plan, a back end and a class of buffer sizes (between two powers of two); the search that ends first decides
for its class. It changes the speed of a collective, never its result. All ranks choose from the same seconds: the
longest of all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from collectives.backends.demand_plans import (
    demand_gap,
    demand_of_blocks,
    follows,
    has_paths,
    is_worth_planning,
    serving_plan,
)
from collectives.backends.request import Counts
from collectives.tables.lowering import PlanKey
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.schedule_selection import plan_like
from topoplan.plans.certificates.exchange import Demand, DemandMatrix
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.plans.verify import verify_all
from topoplan.solve.packing.block_trees import plan_blocks

Key = TypeVar("Key")

FIRST_CHUNK = 1 << 20
"""First size, in bytes."""

SMALLEST_CHUNK = 64 << 10
"""The smallest size that is tried, in bytes: below it the cost of each transfer dominates."""

LARGEST_CHUNK = 64 << 20
"""The largest size that is tried, in bytes."""

SEARCH_FACTOR = 4

SEARCH_GAIN = 1.03
"""Smaller gains are noise."""

HOPELESS_FACTOR = 1.5
"""A size so many times slower than the best ends the search among smaller ones."""

CHUNKS_FORMAT = "topoplan.chunks/1"

OPEN_SEARCHES = 64
"""The most concurrent searches; beyond them the oldest is dropped."""

KEPT_DEMANDS = 16
"""The most plans of uneven blocks that are kept; beyond them the least recently used is dropped."""

PAIRS = "pairs"
"""Name of the plan of equal blocks of the pairs of ranks that one-way links join; no collective has it."""

ChunkKey = tuple[str, str, int]
"""Plan digest, back end, and the power of two that the bytes do not exceed."""


class ChunkSizes:
    """Chunk sizes of the back end of this name; `fixed` bytes disable the search.

    >>> sizes = ChunkSizes("loopback")
    >>> while not sizes.settled("12ab", 8 << 20):
    ...     size = sizes.choose("12ab", 8 << 20)
    ...     sizes.measured("12ab", 8 << 20, seconds=1e-3 + size * 1e-9)
    >>> sizes.choose("12ab", 8 << 20), sizes.choose("12ab", 7 << 20)
    (65536, 65536)
    """

    def __init__(self, backend: str, *, fixed: int | None = None) -> None:
        if fixed is not None and fixed < 1:
            raise UsageError(f"chunks must have at least 1 byte, got {fixed}; give for example 262144")
        self.backend = backend
        self.fixed = fixed
        self._found: dict[ChunkKey, int] = {}
        self._open: dict[tuple[str, int], _ChunkSearch] = {}

    def choose(self, plan: str, nbytes: int) -> int:
        """Return the bytes of a chunk in the next call of this size; the same until `measured` is called.

        `plan` is a digest, `nbytes` the buffer's size.
        """
        if self.fixed is not None:
            return self.fixed
        found = self._found.get(self._key(plan, nbytes))
        if found is None and (plan, nbytes) in self._open:
            found = self._open[plan, nbytes].size
        return max(min(FIRST_CHUNK if found is None else found, nbytes), 1)

    def settled(self, plan: str, nbytes: int) -> bool:
        """Return whether calls of this size need not be measured."""
        return self.fixed is not None or nbytes <= SMALLEST_CHUNK or self._key(plan, nbytes) in self._found

    def measured(self, plan: str, nbytes: int, seconds: float) -> None:
        """Record the time of a call with the chosen size on the slowest rank; ignored if `settled`."""
        if self.settled(plan, nbytes):
            return
        if (plan, nbytes) not in self._open:
            if len(self._open) == OPEN_SEARCHES:
                del self._open[next(iter(self._open))]
            self._open[plan, nbytes] = _ChunkSearch(nbytes)
        settled = self._open[plan, nbytes].take(nbytes / max(seconds, 1e-9))
        if settled is not None:
            key = self._key(plan, nbytes)
            self._found[key] = settled
            self._open = {
                (other, size): search
                for (other, size), search in self._open.items()
                if self._key(other, size) != key
            }

    def save(self, path: str | Path) -> None:
        """Add the found sizes to a file, or create it; its sizes of other plans are kept.

        Raises `UsageError` if the file is something else, and is left unchanged, or cannot be written.
        """
        path = Path(path)
        kept = _read_chunk_sizes(path) if path.exists() else {}
        entries = [
            {"plan": plan, "backend": backend, "bytes": nbytes, "chunk": chunk}
            for (plan, backend, nbytes), chunk in sorted({**kept, **self._found}.items())
        ]
        text = json.dumps({"format": CHUNKS_FORMAT, "sizes": entries}, indent=1) + "\n"
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        try:
            draft.write_text(text)
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from error

    def load(self, path: str | Path) -> None:
        """Take over the sizes in a file, including those of other back ends, which only `save` uses.

        Raises `UsageError` if the file is missing or something else; nothing has been taken over then.
        """
        self._found.update(_read_chunk_sizes(Path(path)))
        self._open = {
            (plan, nbytes): search
            for (plan, nbytes), search in self._open.items()
            if not self.settled(plan, nbytes)
        }

    def _key(self, plan: str, nbytes: int) -> ChunkKey:
        return plan, self.backend, 1 << max(nbytes - 1, 0).bit_length()


def chunk_search(limit: int) -> Generator[int, float, int]:
    """Yield the size to use next, receive its rate, and return the best size, as a coroutine.

    `limit` is the largest size that makes sense, in bytes: that of the buffer. On a machine whose fastest chunks have
    256 KiB:

    >>> from math import log
    >>> search = chunk_search(16 << 20)
    >>> tried = [next(search)]
    >>> try:
    ...     while True:
    ...         tried.append(search.send(1 / (1 + abs(log(tried[-1] / (256 << 10))))))
    ... except StopIteration as end:
    ...     best = end.value
    >>> [size >> 10 for size in tried[::2]], best >> 10
    ([1024, 4096, 256, 64, 160], 256)
    """
    best = start = min(FIRST_CHUNK, limit)
    rates = {best: (yield from _better_of_two(best))}
    while (bigger := min(best * SEARCH_FACTOR, limit, LARGEST_CHUNK)) > best:
        rates[bigger] = yield from _better_of_two(bigger)
        if rates[bigger] < rates[best] * SEARCH_GAIN:
            break
        best = bigger
    smaller = start
    while smaller > SMALLEST_CHUNK and rates[smaller] * HOPELESS_FACTOR > rates[best]:
        smaller = max(smaller // SEARCH_FACTOR, SMALLEST_CHUNK)
        rates[smaller] = yield from _better_of_two(smaller)
        if rates[smaller] >= rates[best] * SEARCH_GAIN:
            best = smaller
    order = sorted(rates)
    place = order.index(best)
    neighbours = order[max(place - 1, 0) : place] + order[place + 1 : place + 2]
    if neighbours:
        between = (best + max(neighbours, key=lambda size: rates[size])) // 2
        if (yield from _better_of_two(between)) >= rates[best] * SEARCH_GAIN:
            best = between
    return best


def _better_of_two(size: int) -> Generator[int, float, float]:
    first = yield size
    second = yield size
    return max(first, second)


class _ChunkSearch:
    """A search under way for one buffer size."""

    def __init__(self, nbytes: int) -> None:
        self._steps: Generator[int, float, int] = chunk_search(nbytes)
        self.size = next(self._steps)

    def take(self, rate: float) -> int | None:
        """Continue with a rate in bytes per second; return the best size once it is known."""
        try:
            self.size = self._steps.send(rate)
        except StopIteration as end:
            best: int = end.value
            return best
        return None


def _read_chunk_sizes(path: Path) -> dict[ChunkKey, int]:
    """Return the sizes in a file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read chunk sizes from {path}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a file of chunk sizes: {error}; choose another, or remove it"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != CHUNKS_FORMAT:
        raise UsageError(
            f"{path} is not a file of chunk sizes: format {found!r} instead of {CHUNKS_FORMAT!r}; choose another"
        )
    entries = content.get("sizes")
    if not isinstance(entries, list):
        raise UsageError(f"{path} has no list of sizes; choose another file, or remove it")
    return dict(_chunk_entry(path, number, entry) for number, entry in enumerate(entries))


def _chunk_entry(path: Path, number: int, entry: Any) -> tuple[ChunkKey, int]:
    fields = entry if isinstance(entry, dict) else {}
    plan, backend, nbytes, chunk = (fields.get(name) for name in ("plan", "backend", "bytes", "chunk"))
    if isinstance(plan, str) and isinstance(backend, str) and _positive(chunk) and _power_of_two(nbytes):
        return (plan, backend, nbytes), chunk
    raise UsageError(
        f"{path}, size {number}: {str(entry)[:80]} needs plan and backend as text, bytes as a power of two, "
        "and chunk as a positive number; correct it, or remove the file"
    )


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _power_of_two(value: object) -> TypeGuard[int]:
    return _positive(value) and value.bit_count() == 1


def _kept(plans: dict[Key, Plans], key: Key, made: Plans) -> Plan:
    """Keep plans as the latest of `KEPT_DEMANDS`, and return the plan of large buffers among them."""
    if len(plans) == KEPT_DEMANDS:
        del plans[next(iter(plans))]
    plans[key] = made
    return made.plans[-1]


class PlanStore:
    """Verified plans of one allocation by collective, root and message size, and their transfer tables.

    The first plans are verified here; if they are of a demand, its counts run by them. Others are made for their
    topology and channels in the same way (`plan_like`), and verified. Sparse plans raise `UsageError`.

    >>> import topoplan
    >>> store = PlanStore(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7]))
    >>> store.plan("broadcast", 1, nbytes=400).root
    1
    """

    def __init__(self, plans: Plans) -> None:
        if any(plan.sparse for plan in plans.plans):
            raise UsageError(
                "plan must be dense, got a sparse plan; give the plan of an allreduce: sparse_all_reduce makes its own"
            )
        verify_all(plans)
        self._given = plans
        self._plans: dict[tuple[str, int | None], Plans] = {(plans.collective, plans.root): plans}
        self._of_demands: dict[DemandMatrix, Plans] = {}
        self._of_blocks: dict[tuple[str, tuple[str, ...], tuple[int, ...]], Plans] = {}
        """By collective, channels and proportions of the blocks."""
        self.demands_planned = 0
        self._keys: dict[int, tuple[Plan, PlanKey]] = {}

    def copied(self) -> PlanStore:
        """Return a store with the same plans, whose later plans this one does not get."""
        made = copy(self)
        made._plans, made._keys = dict(self._plans), {}
        made._of_demands, made._of_blocks = dict(self._of_demands), dict(self._of_blocks)
        return made

    @property
    def topology(self) -> Topology:
        """Return the machine of all plans."""
        return self._given.topology

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the channels of all plans; of plans by size, those of large buffers."""
        return self._given.plans[-1].channels

    def knows(self, collective: str, root: int | None) -> bool:
        """Return whether a collective was planned before."""
        return (collective, root) in self._plans

    def plan(
        self,
        collective: str,
        root: int | None,
        nbytes: int,
        *,
        made_by: Callable[[Callable[[], Plans]], Plans] | None = None,
    ) -> Plan:
        """Return the plan of a collective for a buffer of so many bytes, planned now if it never was before.

        `root` is None for collectives without one. `nbytes` is of the full gathered buffer for allgather and
        reduce_scatter. `made_by` calls the planner somewhere and returns a verified plan; by default it is called here.
        """
        key = (collective, root)
        if key not in self._plans:
            self._plans[key] = (made_by or plan_locally)(
                lambda: plan_like(self._given, collective, root=root)
            )
        return self._plans[key].at(nbytes)

    def plan_of_pairs(
        self, nbytes: int, *, made_by: Callable[[Callable[[], Plans]], Plans] | None = None
    ) -> Plan:
        """Return the plan of equal blocks between all ranks, or, over one-way links, of the pairs that have a path.

        `nbytes` and `made_by` are as in `plan`. No rank can send a block to one that it does not reach.
        """
        if self.knows(ALL_TO_ALL, None) or not self._pairs:
            return self.plan(ALL_TO_ALL, None, nbytes, made_by=made_by)
        key = (PAIRS, None)
        if key not in self._plans:
            epsilon = demand_gap(len(self._pairs))
            self._plans[key] = (made_by or plan_locally)(
                lambda: plan_like(self._given, ALL_TO_ALL, demand=self._pairs, epsilon=epsilon)
            )
        return self._plans[key].at(nbytes)

    @cached_property
    def _pairs(self) -> DemandMatrix | None:
        """Return one unit for each pair of ranks that a path joins; None if one joins all, or none joins two."""
        fabric = Fabric(self.topology, self.channels)
        if not fabric.unreachable():
            return None
        reached = [fabric.reached_from(rank, forward=True) for rank in range(fabric.size)]
        pairs = tuple(tuple(int(rank in found) for rank in range(fabric.size)) for found in reached)
        return pairs if sum(map(sum, pairs)) > fabric.size else None

    def plan_of_demand(
        self,
        demand: DemandMatrix,
        rows: Counts,
        even: Plan,
        *,
        made_by: Callable[[Callable[[], Plans]], Plans] | None = None,
    ) -> Plan:
        """Return the plan of an all-to-all in which row sends rows to column, with `made_by` as in `plan`.

        `even` is that of equal blocks, or a given one for a demand, by which rows run that follow it. Other rows run by
        that of their demand, by `even` or by one of the last `KEPT_DEMANDS`, if `serving_plan` finds one, or by a new
        one.
        """
        given = even.certificate
        # A given plan may lack paths for blocks that stay on their rank.
        if isinstance(given, Demand) and follows(rows, given.demand) and has_paths(self.key(even), rows):
            return even
        plans = self._of_demands.pop(demand, None)
        if plans is None:
            known = (even, *(one.plans[-1] for one in self._of_demands.values()))
            served = serving_plan([self.key(plan) for plan in known], rows)
            if served is not None:
                return served
            epsilon = demand_gap(len(demand))
            plans = (made_by or plan_locally)(
                lambda: plan_like(self._given, ALL_TO_ALL, demand=demand, epsilon=epsilon)
            )
            self.demands_planned += 1
        return _kept(self._of_demands, demand, plans)

    def plan_of_blocks(
        self,
        blocks: tuple[int, ...],
        itemsize: int,
        even: Plan,
        *,
        made_by: Callable[[Callable[[], Plans]], Plans] | None = None,
    ) -> Plan:
        """Return the plan of an allgather or reduce-scatter of these blocks, in elements, with `made_by` as in `plan`.

        It is that of equal blocks (`even`) unless another one is worth its planning.
        """
        demand = demand_of_blocks(blocks)
        if demand is None or not is_worth_planning(self.key(even), blocks, itemsize):
            return even
        key = (even.collective, even.channels, demand)
        plans = self._of_blocks.pop(key, None)
        if plans is None:
            plans = (made_by or plan_locally)(lambda: plan_blocks(even, demand))
            self.demands_planned += 1
        return _kept(self._of_blocks, key, plans)

    @cached_property
    def digest(self) -> str:
        """Return the digest of the first plans."""
        return self._given.digest

    def key(self, plan: Plan) -> PlanKey:
        """Return a plan with its digest, computed once, under which its transfer tables are kept.

        Its plan may be another object, an equal one: the first for which this process has made a key.
        """
        # hold the plan, since its id could be reused after its end
        if id(plan) not in self._keys:
            self._keys[id(plan)] = plan, _first_equal(PlanKey(plan.digest, plan))
        return self._keys[id(plan)][1]


def plan_locally(make: Callable[[], Plans]) -> Plans:
    """Return the verified plan of a planner in this process."""
    made = make()
    verify_all(made)
    return made


@lru_cache(maxsize=64)
def _first_equal(key: PlanKey) -> PlanKey:
    """Return the first of equal keys, so that equal plans that were read twice share tables."""
    return key
