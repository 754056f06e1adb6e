"""What each kernel is run on, and in plain numpy what it must leave behind.

A case makes its arrays anew for every run. All that a kernel may reach is there with its exact bounds; what it is
to fill is marked as not written. Sizes are small, and chosen so that blocks have several tiles, whole and broken ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.kernels.kernel_launch import (
    BINS,
    SELECTION_STATE,
    THREADS,
    TILE_BYTES,
    Chunks,
    digits,
    work_of,
)
from collectives.tables.kernels.source import GRADIENT_DTYPES, KEY_BITS
from tests.ptx.machine import KernelFault, Memory, run
from tests.ptx.text import Program
from tests.support.kernel_data import averaged, bits_type, joined, same_bits, special, widened
from tests.support.selection_data import drawn, key_of, reference

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Arrays and arguments of one run, and what is wrong with the arrays after it, if anything."""

    memory: Memory
    grid: int
    arguments: list[int]
    wrong: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    what: str
    prepare: Callable[[], Prepared]
    heavy: bool = False  # takes seconds: one order is enough
    quick: bool = False  # takes milliseconds: many orders can be tried


def outcome(program: Program, case: Case, seed: int) -> str | None:
    """What a run of the case does wrong: a fault, a wrong result, or nothing."""
    prepared = case.prepare()
    try:
        run(
            program,
            prepared.grid,
            THREADS,
            prepared.arguments,
            memory=prepared.memory,
            seed=seed,
            most_steps=MOST_STEPS,
        )
    except KernelFault as fault:
        return f"{fault.problem}: {fault} [{case.what}, seed {seed}]"
    wrong = prepared.wrong()
    return None if wrong is None else f"result: {case.kernel}: {wrong} [{case.what}, seed {seed}]"


MOST_STEPS = 200_000_000  # far more than any case takes


# ---- numbers


def wide(values: Array, dtype: str) -> Array:
    """Numbers to compute with: singles for bfloat16, others as they are."""
    return widened(values) if dtype == "bfloat16" else values


# ---- joins, averages, copies

JOIN_SHAPES = (
    # parts of a tile, elements more, places behind 16 bytes of what is written and of what arrives, arrivals
    (0, 1, (0, 0), 1),
    (1, 1, (0, 0), 1),
    (2, 7, (3, 3), 3),
    (0, 300, (2, 3), 5),
    (0, 1003, (0, 1), 2),
)


def _join(kernel: str, op: str | None, dtype: str, shape: tuple[int, int, tuple[int, int], int]) -> Prepared:
    tiles, more, shifts, siblings = shape
    generator = np.random.default_rng(7)
    kind = bits_type(dtype)
    count = tiles * TILE_BYTES // kind.itemsize + more
    memory = Memory()

    def some() -> Array:
        if op is None:
            return generator.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
        return special(dtype, count, generator)

    own, out = some(), np.zeros(count, dtype=kind)
    arriving = [some() for _ in range(siblings if op else 0)]
    same_place = np.zeros(max(len(arriving), 1), dtype=np.int64)
    numbers = np.arange(2, 2 + len(arriving)) if arriving else np.ones(1, dtype=np.int64)
    work = work_of(
        Chunks(
            *[same_place] * 3,
            same_place + count,
            same_place == (0 if arriving else 1),
            (same_place, same_place),
            (same_place + 1, same_place),
            (numbers, same_place),
        ),
        kind.itemsize,
    )
    put = partial(memory.put, writable=False)
    bases = [memory.put("out", out, written=False, shift=shifts[0] * kind.itemsize)]
    bases.append(put("own", own, shift=shifts[0] * kind.itemsize))
    bases += [put(f"arriving {i}", one, shift=shifts[1] * kind.itemsize) for i, one in enumerate(arriving)]
    tables = (np.array(bases, dtype=np.int64), work.items, work.arrivals, work.tiles)
    arguments = [
        put(name, table) for name, table in zip(("bases", "items", "arrivals", "tiles"), tables, strict=True)
    ]
    expected = own if op is None else joined(dtype, op, own, arriving)
    return Prepared(
        memory,
        2,
        [*arguments, len(work.tiles)],
        lambda: None if same_bits(out, expected, "" if op is None else dtype) else "differs from numpy",
    )


def _divide(dtype: str, ranks: int, tiles: int, more: int, shift: int) -> Prepared:
    kind = bits_type(dtype)
    line = special(dtype, tiles * TILE_BYTES // kind.itemsize + more, np.random.default_rng(ranks))
    expected = averaged(dtype, line, ranks)
    memory = Memory()
    address = memory.put("line", line, shift=shift * kind.itemsize)
    count = -(-line.nbytes // TILE_BYTES)
    return Prepared(
        memory,
        2,
        [address, len(line), ranks, count],
        lambda: None if same_bits(line, expected, dtype) else "differs from numpy",
    )


def _join_cases(kernel: str) -> Iterator[Case]:
    kind, _, rest = kernel.partition("_")
    op, _, dtype = rest.partition("_")
    if kind == "copy":
        for shape in JOIN_SHAPES:
            prepare = partial(_join, kernel, None, f"V{rest}", shape)
            yield Case(kernel, f"{shape}", prepare)
    elif kind == "divide":
        for ranks, tiles, more, shift in ((2, 0, 1, 0), (3, 1, 1, 0), (7, 2, 9, 3), (200, 0, 1001, 1)):
            yield Case(kernel, f"by {ranks}", partial(_divide, rest, ranks, tiles, more, shift))
    else:
        for shape in JOIN_SHAPES:
            yield Case(kernel, f"{shape}", partial(_join, kernel, op, dtype, shape))


# ---- selection

INFINITE = {dtype: (1 << top) - (1 << mantissa) for dtype, (top, mantissa) in KEY_BITS.items()}
NO_NUMBER = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF, "float64": 0x7FF8000000000000}
"""The NaN that a sum on a GPU becomes."""


@dataclass(slots=True)
class Addend:
    """What a kernel adds to the elements that it reads: nothing, or a gradient, through a velocity or not."""

    kind: str  # "", "feedback" or "momentum"
    dtype: str
    given: str
    x: Array
    gradient: Array
    velocity: Array
    momentum: Array
    kept: Array  # x, the velocity and the sums, as they must be afterwards
    speed: Array
    sums: Array

    @staticmethod
    def of(
        kind: str, dtype: str, given: str, data: str, count: int, generator: np.random.Generator
    ) -> Addend:
        x = drawn(data, dtype, count, generator)
        gradient = drawn(data, given or dtype, count, generator)
        velocity = drawn("layered" if data == "layered" else "normal", dtype, count, generator)
        momentum = np.array([0.5], dtype=bits_type(dtype))
        kept, speed, sums = x.copy(), velocity.copy(), x.copy()
        with np.errstate(all="ignore"):
            if kind:
                step = wide(gradient, given).astype(dtype)
                if kind == "momentum":
                    step = velocity * momentum[0] + step
                sums = x + step
                number = ~np.isnan(sums)
                kept = np.where(number, sums, x)
                speed = np.where(number, step, velocity) if kind == "momentum" else velocity
        if kind:
            no_number = np.isnan(wide(sums, dtype))
            sums = sums.copy()
            sums.view(f"u{sums.itemsize}")[no_number] = NO_NUMBER[dtype]
        return Addend(kind, dtype, given, x.copy(), gradient, velocity, momentum, kept, speed, sums)

    def place(self, memory: Memory, shift: int) -> list[int]:
        size = self.x.itemsize
        places = [memory.put("x", self.x, writable=self.kind != "", shift=shift * size)]
        if not self.kind:
            return places
        places.append(
            memory.put("gradient", self.gradient, writable=False, shift=shift * self.gradient.itemsize)
        )
        if self.kind == "feedback":
            return [*places, 0, 0]
        places.append(memory.put("velocity", self.velocity, shift=shift * size))
        return [*places, memory.put("momentum", self.momentum, writable=False)]

    def wrong(self) -> str | None:
        if not same_bits(self.x, self.kept, self.dtype):
            return "x is not the sum"
        return None if same_bits(self.velocity, self.speed, self.dtype) else "the velocity differs"


def new_state(**fields: int) -> Array:
    state = np.zeros(1, dtype=SELECTION_STATE)
    for name, value in fields.items():
        state[name] = value
    return state


def differs(state: Array, **fields: int) -> str | None:
    found = {name: int(state[name][0]) for name in fields}
    return None if found == fields else f"state {found} is not {fields}"


def _histogram(
    addend: Callable[[np.random.Generator], Addend],
    grid: int,
    number: int,
    density: float,
    shift: int,
    cut: int,
) -> Prepared:
    generator = np.random.default_rng(11)
    added = addend(generator)
    keys = key_of(added.sums).astype(np.uint64)
    count = len(keys) - cut
    low, bits = digits(added.dtype)[number]
    k = max(1, round(count * density))
    known, wanted = 0, k
    chosen = np.sort(keys[:count])[::-1]
    if number:  # as earlier digits have left it
        known = int(chosen[k - 1]) >> (low + bits) << (low + bits)
        wanted = k - int(np.count_nonzero(chosen >> np.uint64(low + bits) > known >> (low + bits)))
    eligible = chosen[chosen >> np.uint64(low + bits) == known >> (low + bits)]
    border = int(eligible[wanted - 1]) >> low
    state = new_state(key=known if number else 0, wanted=wanted if number else 0)
    counts = np.zeros(BINS, dtype=np.uint64)
    memory = Memory()
    arguments = added.place(memory, shift)
    arguments.append(len(keys))
    length = np.array([count], dtype=np.uint64)
    arguments.append(memory.put("length", length, writable=False) if cut else 0)
    arguments += [low, bits, 0 if number else k, memory.put("counts", counts), memory.put("state", state)]
    if cut:  # what lies behind is not read, so nothing is added there
        added.kept[count:], added.speed[count:] = added.x[count:], added.velocity[count:]
        reached = -(-count // 1)
        keys = keys[:reached]

    def wrong() -> str | None:
        if counts.any():
            return "counts are not zero"
        return added.wrong() or differs(
            state,
            ended=0,
            key=border << low,
            wanted=wanted - int(np.count_nonzero(eligible >> np.uint64(low) > border)),
            nan=int(keys.max() > INFINITE[added.dtype]),
            gathered=0,
        )

    return Prepared(memory, grid, arguments, wrong)


def tile_of(dtype: str) -> int:
    return TILE_BYTES // bits_type(dtype).itemsize


def runs_of(chosen: NDArray[np.int64], tiles: int, tile: int) -> list[Array]:
    return np.split(chosen, np.searchsorted(chosen, np.arange(1, tiles) * tile))


def _gather(
    addend: Callable[[np.random.Generator], Addend], grid: int, density: float, space: float, shift: int
) -> Prepared:
    generator = np.random.default_rng(12)
    added = addend(generator)
    dtype, count = added.dtype, len(added.x)
    tile = tile_of(dtype)
    tiles = -(-count // tile)
    keys = key_of(added.sums).astype(np.uint64)
    bound = int(np.sort(keys)[::-1][max(1, round(count * density)) - 1])
    chosen = np.flatnonzero(keys >= bound)
    room = int(len(chosen) * space)
    state, limit = new_state(gathered=0), np.array([bound], dtype=np.uint64)
    values, places = np.zeros(room, dtype=bits_type(dtype)), np.zeros(room, dtype=np.uint16)
    starts, kept = np.zeros(tiles, dtype=np.uint64), np.zeros(tiles, dtype=np.uint32)
    memory = Memory()
    arguments = [*added.place(memory, shift), count, memory.put("bound", limit, writable=False)]
    unwritten = partial(memory.put, written=False)
    arguments += [unwritten("values", values), unwritten("places", places), room]
    arguments += [unwritten("starts", starts), unwritten("kept", kept), memory.put("state", state)]

    def wrong() -> str | None:
        runs = runs_of(chosen, tiles, tile)
        if kept.tolist() != [len(one) for one in runs]:
            return "kept differs"
        order = np.argsort(starts, kind="stable")
        ends = np.cumsum(kept[order])
        full = [place for place in order.tolist() if kept[place]]
        begins = {place: int(starts[place]) for place in full}
        expected = dict(zip(order.tolist(), (ends - kept[order]).tolist(), strict=True))
        if any(begins[place] != expected[place] for place in full):
            return "runs do not lie one behind another"
        for number in full:
            first, last = begins[number], min(begins[number] + len(runs[number]), room)
            here = runs[number][: max(last - first, 0)]
            if not np.array_equal(places[first : max(last, first)], here - number * tile):
                return "places differ"
            if not same_bits(values[first : max(last, first)], added.kept[here], dtype):
                return "values differ"
        nan = int(keys.max() > INFINITE[dtype])
        return added.wrong() or differs(state, ended=0, key=0, wanted=0, nan=nan, gathered=len(chosen))

    return Prepared(memory, grid, arguments, wrong)


@dataclass(slots=True)
class Runs:
    """Elements as `emit.cu` walks through them, all or a list of candidates, and the border among them."""

    dtype: str
    listed: bool
    x: Array
    k: int
    key: int
    wanted: int
    values: Array
    places: Array
    starts: Array
    kept: Array
    tiles: int

    @staticmethod
    def of(dtype: str, listed: bool, data: str, count: int, density: float) -> Runs:
        generator = np.random.default_rng(13)
        x = drawn(data, dtype, count, generator)
        keys = key_of(x).astype(np.uint64)
        k = max(1, round(count * density))
        ordered = np.sort(keys)[::-1]
        key = int(ordered[k - 1])
        tile = tile_of(dtype)
        tiles = -(-count // tile)
        least = int(ordered[min(count, k + k // 2 + 5) - 1])
        runs = runs_of(np.flatnonzero(keys >= least), tiles, tile)
        order = generator.permutation(tiles)
        kept = np.array([len(one) for one in runs], dtype=np.uint32)
        starts = np.zeros(tiles, dtype=np.uint64)
        starts[order] = np.cumsum(kept[order]) - kept[order]
        there = np.concatenate([runs[place] for place in order.tolist()])
        wanted = k - int(np.count_nonzero(keys > key))
        places = (there % tile).astype(np.uint16)
        return Runs(dtype, listed, x, k, key, wanted, x[there], places, starts, kept, tiles)

    def place(self, memory: Memory) -> list[int]:
        put = partial(memory.put, writable=False)
        if not self.listed:
            return [put("x", self.x), 0, len(self.x), 0, 0, self.k, 0]
        arguments = [put("values", self.values), put("places", self.places), len(self.x)]
        return [*arguments, put("starts", self.starts), put("kept", self.kept), self.k, len(self.values)]

    def state(self, **fields: int) -> Array:
        return new_state(key=self.key, wanted=self.wanted, gathered=len(self.values), **fields)

    def before(self, grid: int) -> tuple[Array, Array, Array]:
        """How many above the border and equal to it lie before each tile in its block, and before each block."""
        keys = key_of(self.x).astype(np.uint64)
        tile = tile_of(self.dtype)
        each = -(-self.tiles // grid)
        counts = []
        for holds in (keys > self.key, keys == self.key):
            padded = np.zeros(grid * each * tile, dtype=np.int64)
            padded[: len(keys)] = holds
            counts.append(padded.reshape(grid, each, tile).sum(axis=2))
        within = [np.cumsum(one, axis=1) - one for one in counts]
        blocks = [np.cumsum(one.sum(axis=1)) - one.sum(axis=1) for one in counts]
        above, equal = (one.reshape(-1)[: self.tiles].astype(np.uint32) for one in within)
        return above, equal, np.stack(blocks, axis=1).reshape(-1).astype(np.uint64)


def _measure(runs: Callable[[], Runs], grid: int) -> Prepared:
    made = runs()
    expected = made.before(grid)
    state, memory = made.state(), Memory()
    arrays = [np.zeros_like(one) for one in expected]
    arguments = made.place(memory)
    for name, array in zip(("above", "equal", "groups"), arrays, strict=True):
        arguments.append(memory.put(name, array, written=False))
    arguments.append(memory.put("state", state))

    def wrong() -> str | None:
        for name, found, right in zip(("above", "equal", "groups"), arrays, expected, strict=True):
            if not np.array_equal(found, right):
                return f"{name} differs"
        return differs(state, ended=0)

    return Prepared(memory, grid, arguments, wrong)


def _emit(runs: Callable[[], Runs], grid: int, index: str, feeds: bool) -> Prepared:
    made = runs()
    dtype = made.dtype
    state, memory = made.state(), Memory()
    indices, values = np.zeros(made.k, dtype=index), np.zeros(made.k, dtype=bits_type(dtype))
    residual = made.x.copy()
    arguments = [*made.place(memory), 1]
    put = partial(memory.put, writable=False)
    for name, array in zip(("above", "equal", "groups"), made.before(grid), strict=True):
        arguments.append(put(name, array))
    arguments.append(put("state", state))
    arguments += [memory.put("indices", indices, written=False), memory.put("chosen", values, written=False)]
    arguments.append(memory.put("residual", residual) if feeds else 0)
    wanted = reference(made.x, made.k)
    left = made.x.copy()
    if feeds:
        left[wanted[0]] = 0

    def wrong() -> str | None:
        if not np.array_equal(indices, wanted[0]):
            return "indices differ"
        if values.tobytes() != wanted[1].tobytes():
            return "values differ"
        return None if residual.tobytes() == left.tobytes() else "the residual differs"

    return Prepared(memory, grid, arguments, wrong)


SELECTION_DATA = ("few values", "special", "normal")


def _selection_cases(kernel: str) -> Iterator[Case]:
    form, kind, dtype, given = parsed(kernel)
    tile = tile_of(dtype)
    index = "int64" if "int64" in form else "int32"
    # whole and broken tiles for each block; then less than one, at an odd address; then one block alone
    shapes = ((3, 6 * tile + tile // 3, 0), (2, tile // 5, 1), (1, 3 * tile, 0))
    for data in SELECTION_DATA:
        for grid, count, shift in shapes:
            if data == "normal" and grid == 1:
                continue
            what = f"{data}, {count} elements, {grid} blocks"
            addend = partial(Addend.of, kind, dtype, given, data, count)
            if form == "histogram":
                # the first digit of normal values has few bins, the second all
                numbers = {"few values": range(len(digits(dtype))), "special": (0,), "normal": (1,)}[data]
                for number in numbers:
                    cut = tile // 7 if number == 1 and not kind else 0
                    prepare = partial(_histogram, addend, grid, number, 0.1, shift, cut)
                    yield Case(kernel, f"{what}, digit {number}", prepare)
            elif form == "gather":
                for density, space in ((0.05, 1.0), (0.3, 0.5)):
                    prepare = partial(_gather, addend, grid, density, space, shift)
                    yield Case(kernel, f"{what}, density {density}", prepare)
            else:
                runs = partial(Runs.of, dtype, "list" in form, data, count, 0.05)
                if form.startswith("measure"):
                    yield Case(kernel, what, partial(_measure, runs, grid))
                else:
                    yield Case(kernel, what, partial(_emit, runs, grid, index, shift == 0))
    if form == "histogram":  # bins of all threads
        addend = partial(Addend.of, kind, dtype, given, "any bits", tile // 3)
        yield Case(kernel, "any bits", partial(_histogram, addend, 3, 0, 0.1, 0, 0), quick=True)
        addend = partial(Addend.of, kind, dtype, given, "any bits", 2 * tile)
        yield Case(kernel, "any bits, 2 tiles", partial(_histogram, addend, 2, 0, 0.1, 0, 0))
    if form == "gather":  # a block's later tiles have nothing to gather
        addend = partial(Addend.of, kind, dtype, given, "layered", 4 * tile)
        yield Case(kernel, "layered", partial(_gather, addend, 1, 0.05, 1.0, 0))
    if form.startswith("measure"):
        listed = "list" in form
        if listed:  # more tiles than a block has threads
            many = partial(Runs.of, dtype, listed, "few values", 300 * tile, 0.0005)
            yield Case(kernel, "300 tiles, 1 block", partial(_measure, many, 1), True)
        few = partial(Runs.of, dtype, listed, "few values", 2 * tile, 0.05)
        yield Case(kernel, "260 blocks", partial(_measure, few, 260), True)  # and more blocks than that


def parsed(kernel: str) -> tuple[str, str, str, str]:
    """Form, kind of addend, dtype and dtype of the gradient."""
    form, _, dtype = kernel.rpartition("_")
    head, _, given = form.rpartition("_")
    if given in GRADIENT_DTYPES["float64"] and head:
        kind, _, form = head.partition("_")
        return (form, kind, dtype, given) if kind != "take" else (head, "", dtype, given)
    return form, "", dtype, ""


# ---- error feedback and entries


def _take_back(kind: str, dtype: str, given: str, data: str, count: int) -> Prepared:
    generator = np.random.default_rng(14)
    x, gradient = drawn(data, dtype, count, generator), drawn(data, given, count, generator)
    velocity, momentum = drawn("normal", dtype, count, generator), np.array([0.5], dtype=dtype)
    step = wide(gradient, given).astype(dtype)
    with np.errstate(all="ignore"):
        left = ~np.isnan(step)
        broken = np.flatnonzero(~left)[0] if not left.all() else 2**64 - 1
        speed = velocity.copy()
        if kind == "momentum":
            left &= ~(np.isinf(step) & (velocity != step))
            before = (velocity - step) / momentum[0]
            speed = np.where(left, np.where(np.isnan(before), 0, before), velocity)
            step = velocity
        back = x - step
        expected = np.where(left, np.where(np.isnan(back), 0, back), x)
    memory, first = Memory(), np.array([2**64 - 1], dtype=np.uint64)
    own = velocity.copy()
    arguments = [memory.put("x", x), memory.put("gradient", gradient, writable=False)]
    moves = kind == "momentum"
    arguments += (
        [memory.put("velocity", own), memory.put("momentum", momentum, writable=False)] if moves else [0, 0]
    )
    arguments += [count, memory.put("broken", first)]

    def wrong() -> str | None:
        if not (same_bits(x, expected) and same_bits(own, speed)):
            return "x or the velocity differs"
        return None if int(first[0]) == int(broken) else "another first NaN"

    return Prepared(memory, 2, arguments, wrong)


def _entries(kind: str, dtype: str, index: str, count: int) -> Prepared:
    generator = np.random.default_rng(15)
    size = 3000
    total = drawn("special", dtype, size, generator)
    values = drawn("special", dtype, count, generator)
    indices = np.sort(generator.permutation(size)[:count]).astype(index)
    outside, memory, expected = np.zeros(1, dtype=np.uint64), Memory(), total.copy()
    inside = np.ones(count, dtype=np.bool_)
    if kind == "add":
        indices[::9] = [-1, size][count % 2]
        inside[::9] = False
    with np.errstate(all="ignore"):
        expected[indices[inside]] = expected[indices[inside]] + values[inside] if kind == "add" else 0
    put = partial(memory.put, writable=False)
    arguments = [memory.put("total", total), size, put("indices", indices), put("entries", values), count]
    if kind == "add":
        arguments.append(memory.put("outside", outside))
    else:
        arguments = [arguments[0], arguments[2], count]

    def wrong() -> str | None:
        if not same_bits(total, expected):
            return "the array differs"
        return None if int(outside[0]) == np.count_nonzero(~inside) else "another number outside"

    return Prepared(memory, 2, arguments, wrong)


def cases(kernel: str) -> list[Case]:
    if kernel.partition("_")[0] in ("join", "divide", "copy"):
        return list(_join_cases(kernel))
    if "entries" in kernel:
        kind, _, index, dtype = kernel.split("_")
        return [
            Case(kernel, f"{count} entries", partial(_entries, kind, dtype, index, count))
            for count in (700, 1)
        ]
    if "take_back" in kernel:
        kind, _, _, given, dtype = kernel.split("_")
        return [
            Case(kernel, data, partial(_take_back, kind, dtype, given, data, 1500)) for data in SELECTION_DATA
        ]
    return list(_selection_cases(kernel))
