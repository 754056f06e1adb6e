"""Compare the runs of a log with the bounds of a machine's links, row by row.

Figures are kept as printed; shares are those of size over time, which is printed with more digits for small sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from topoplan.errors import UsageError
from topoplan.machine.hardware import compute_capability
from topoplan.machine.topology import Topology
from topoplan.model.expected_times import NcclTime
from topoplan.operate.compare.comparison import BANDWIDTH, Attainable
from topoplan.operate.device_matching import run_gpus
from topoplan.plans.plan import ALL_COLLECTIVES
from topoplan.reading.nccl.perf_text import PROGRAMS, LoggedRank, LoggedRow, PerfRun, Timing, columns_fit
from topoplan.schedules.nccl_tuning import NcclExpectation
from topoplan.units import bus_factor, format_size

ABOVE = 1.0005
"""Ratio to a bound above which an assumption is wrong (`fallen_assumption`)."""

DIP = 1.5
"""Ratio to the time of a larger size above which a row is doubted: a change of protocol explains less."""


LARGE = 1 << 24
"""Bytes from which both places of a row should take about as long."""


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A row of a log.

    collective: the name in the log or of its test if plans have no such collective.
    reachable: None without a comparison.
    """

    collective: str
    row: LoggedRow
    reachable: Attainable | None

    @property
    def rate(self) -> float:
        """GB/s of algorithm bandwidth: size over time."""
        return self.row.size / self.row.timing.seconds / 1e9

    @property
    def of_nccl(self) -> float | None:
        """Fraction of NCCL's best schedule on the links, their limit; None without one."""
        best = self.reachable.nccl_best if self.reachable else None
        return self.rate / best if best and best < float("inf") else None

    @property
    def of_best(self) -> float | None:
        """Share of the bound."""
        best = self.reachable.best if self.reachable else None
        return self.rate / best if best and best < float("inf") else None

    @property
    def expected(self) -> NcclExpectation | None:
        """NCCL's selection for this size by its own model."""
        return self.reachable.expected(self.row.size) if self.reachable else None

    @property
    def of_model(self) -> float | None:
        """Time of NCCL's model over the measured time."""
        expected = self.expected
        return expected.seconds(self.row.size) / self.row.timing.seconds if expected else None

    @property
    def expected_time(self) -> NcclTime | None:
        """NCCL's time for this size by published measurements, else by its own model."""
        return self.reachable.expected_time(self.row.size) if self.reachable else None

    @property
    def of_expected(self) -> float | None:
        """The expected time over the measured time."""
        expected = self.expected_time
        return expected.seconds / self.row.timing.seconds if expected else None

    @property
    def bound_by(self) -> str | None:
        """`LATENCY` or `BANDWIDTH`."""
        return self.reachable.bound_by(self.row.size) if self.reachable else None

    def to_object(self) -> dict[str, object]:
        """Return a JSON object: ``time`` in microseconds, as nccl-tests prints it, rates in GB/s of algorithm
        bandwidth.
        """
        found, row, model, expected = self.reachable, self.row, self.expected, self.expected_time
        return {
            "collective": self.collective,
            "size": row.size,
            "time": _microseconds(row.timing),
            "algbw": row.timing.algbw,
            "busbw": row.timing.busbw,
            "nccl_best": None if found is None else _finite(found.nccl_best),
            "best": None if found is None else _finite(found.best),
            "bound_by": self.bound_by,
            "of_nccl": self.of_nccl,
            "of_best": self.of_best,
            "nccl_is": found.nccl[0][0] if found and found.nccl else None,
            "nccl_expects": None
            if model is None
            else {
                "algorithm": model.algorithm,
                "protocol": model.protocol,
                "time": float(f"{model.seconds(row.size) * 1e6:.6g}"),
            },
            "of_model": self.of_model,
            "expected_time": expected and float(f"{expected.seconds * 1e6:.6g}"),
            "expected_by": found.expected_by(expected) if found and expected else None,
            "of_expected": self.of_expected,
            "links": found.links if found and self.bound_by == BANDWIDTH else None,
            "type": row.type,
            "redop": row.redop,
            "root": row.root,
            "line": row.line,
            "wrong": row.timing.wrong,
            "place": "out-of-place" if row.out_of_place else "in-place",
            "in_place": None if row.in_place is None else _timing_object(row.in_place),
        }


def _timing_object(timing: Timing) -> dict[str, object]:
    return {
        "time": _microseconds(timing),
        "algbw": timing.algbw,
        "busbw": timing.busbw,
        "wrong": timing.wrong,
    }


def _microseconds(timing: Timing) -> float:
    return float(f"{timing.seconds * 1e6:.9g}")


def _finite(rate: float | None) -> float | None:
    return rate if rate is not None and rate < float("inf") else None


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run of a log on a machine.

    gpus: GPU numbers on the machine, ascending; empty without a comparison.
    model: model of the GPUs that ran if the machine has others; empty otherwise.
    """

    run: PerfRun
    gpus: tuple[int, ...]
    rows: tuple[JudgedRow, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    model: str = ""

    @property
    def references(self) -> tuple[Attainable, ...]:
        """The attainable rates of its rows, one for each root."""
        return tuple({id(one.reachable): one.reachable for one in self.rows if one.reachable}.values())


def judge(
    run: PerfRun,
    machine: Topology,
    reach: Callable[[str, tuple[int, ...], int | None], Attainable],
    *,
    gpus: Sequence[int] | None = None,
    collective: str | None = None,
) -> JudgedRun:
    """Return a run beside the attainable rates.

    reach: returns `topoplan.operate.compare.comparison.attainable` of a collective, GPUs and the GPU number of a root.
    gpus: the GPUs of the ranks, as the caller states them; None reads them from the log.
    """
    notes: list[str] = []
    warnings = list(run.warnings)
    side = {rank.group for rank in run.ranks}
    if len(side) > 1:
        warnings.append(
            f"{len(side)} communicators ran at once and shared the links; the comparison is for group {min(side)} only"
        )
    ranks = [rank for rank in run.ranks if rank.group == min(side)] if side else []
    chosen, of_rank = run_gpus(run, ranks, machine, gpus, notes)
    if len(chosen) == 1 and run.rows:
        warnings.append(
            "a single rank moves nothing: if mpirun started several processes, nccl-tests was built without MPI=1"
        )
    assumed = gpus is None and not ranks and run.stated is None
    known = run.collective or (collective or "" if not run.program else "")
    if run.rows and not run.program:
        known = _guessed(run, known, len(chosen), machine, notes, warnings, assumed=assumed)
    elif run.rows and assumed and known:
        _check_ranks(run, [known], len(chosen), machine)
    if not known:
        if run.rows:
            warnings.append(
                f"{run.program}: {len(run.rows)} rows are not compared: plans and bounds do not cover {run.program}"
            )
        rows = tuple(JudgedRow(run.program, row, None) for row in run.rows)
        return JudgedRun(run, (), rows, tuple(notes), tuple(warnings))
    judged = []
    for row in run.rows:
        root = of_rank.get(row.root or 0, chosen[0]) if known in ("broadcast", "reduce") else None
        judged.append(JudgedRow(known, row, reach(known, chosen, root)))
    model, other = _other_model(ranks, of_rank, machine)
    warnings += [*_doubts(judged, len(chosen)), *other]
    if run.program == "bench":
        notes.append(
            "topoplan bench moves data through this host unless its links are paced; it does not measure the links"
        )
    return JudgedRun(run, chosen, tuple(judged), tuple(notes), tuple(warnings), model)


def _other_model(
    ranks: Sequence[LoggedRank], of_rank: Mapping[int, int], machine: Topology
) -> tuple[str, list[str]]:
    """Return the logged model and a warning if GPUs are of another generation, or PCIe cards and the machine's GPUs
    have NVSwitches.
    """
    switched = any(device.kind == "nvswitch" for device in machine.devices)
    for rank in ranks:
        here = machine.device(machine.gpus[of_rank[rank.rank]]).model if rank.rank in of_rank else ""
        there, ours = compute_capability(rank.model), compute_capability(here)
        slot = "PCIe" in rank.model and "PCIe" not in here and switched
        if there and ours and (there != ours or slot):
            with_switches = " behind NVSwitches" if slot else ""
            return rank.model, [
                f"the log ran on {rank.model}, but GPU {of_rank[rank.rank]} of {machine.name} is a {here}"
                f"{with_switches}: give the machine that ran it"
            ]
    return "", []


TESTS = {
    **{collective: test for test, collective in PROGRAMS.items()},
    **{test: test for test in ("gather", "scatter", "sendrecv")},
}
"""Tests by collective, those of plans first."""


def _guessed(
    run: PerfRun,
    stated: str,
    ranks: int,
    machine: Topology,
    notes: list[str],
    warnings: list[str],
    *,
    assumed: bool,
) -> str:
    """Return the collective of a run that does not name its test: the stated one, or the only one that fits its
    columns.

    ``assumed`` means that the log states no number of ranks, so that another one than that of the machine may fit.
    """
    fitting = [name for name, test in TESTS.items() if columns_fit(run.rows, test)]
    likely = [name for name in fitting if all(_fits(row, name, ranks) for row in run.rows)]
    if stated:
        if stated not in fitting:
            others = f", which are those of {' or '.join(likely)}" if likely else ""
            warnings.append(f"--collective {stated} does not fit the columns of the log{others}")
        elif assumed:
            _check_ranks(run, [stated], ranks, machine)
        return stated
    if not likely:
        _check_ranks(run, fitting, ranks, machine)
        what = f"no collective of {ranks} ranks has these bandwidths"
        raise UsageError(f"the log does not name its test, and {what}; name it with --collective")
    if assumed and len(likely) == 1:
        # another collective of fewer ranks may have the same columns
        likely += [
            name
            for name in fitting
            if name not in likely and _numbers(run, name, len(machine.gpus)) is not None
        ]
    if len(likely) == 1 and likely[0] in ALL_COLLECTIVES:
        notes.append(f"the log does not name its test; by its columns it is {likely[0]}")
        return likely[0]
    ours = [name for name in likely if name in ALL_COLLECTIVES]
    remedy = "name it with --collective" if ours else "no plan does that"
    raise UsageError(f"the log does not name its test, and it may be {' or '.join(likely)}; {remedy}")


def _check_ranks(run: PerfRun, names: Sequence[str], ranks: int, machine: Topology) -> None:
    """Raise UsageError if the columns of a log without ranks are those of another number of GPUs."""
    for name in names:
        if all(_fits(row, name, ranks) for row in run.rows):
            return
    for name in names:
        found = _numbers(run, name, MOST_RANKS)
        if found is not None:
            number = str(found[0]) if found[0] == found[1] else f"{found[0]} to {found[1]}"
            raise UsageError(
                f"by its columns the log is of {name} of {number} ranks, and it does not say on which GPUs; "
                f"{machine.name} has {len(machine.gpus)}: name the GPUs that ran with --gpus"
            )


MOST_RANKS = 4096
"""Largest number of ranks that is tried."""


def _numbers(run: PerfRun, name: str, most: int) -> tuple[int, int] | None:
    """Return the least and the largest number of ranks up to ``most`` that all rows fit, or None."""
    # bandwidths of few digits fit any number
    telling = sorted(run.rows, key=lambda row: -row.timing.algbw)[:4]
    found = [number for number in range(2, most + 1) if all(_fits(row, name, number) for row in telling)]
    found = [
        number for number in (found[:1] + found[-1:]) if all(_fits(row, name, number) for row in run.rows)
    ]
    return (found[0], found[-1]) if found else None


def _fits(row: LoggedRow, name: str, ranks: int) -> bool:
    """Return whether the bandwidths and the number of parts, if stated, of a row fit a number of ranks."""
    return row.parts in (None, ranks) and fits_factor(row.timing, name, ranks)


def fits_factor(timing: Timing, collective: str, ranks: int) -> bool:
    """Return whether bus and algorithm bandwidth, each rounded to a hundredth, fit a number of ranks.

    >>> timing = Timing(20e-6, 52.43, 91.75, 0)
    >>> fits_factor(timing, "allreduce", 8), fits_factor(timing, "allreduce", 4), fits_factor(timing, "broadcast", 8)
    (True, False, False)
    """
    factor = bus_factor("allgather" if collective in ("gather", "scatter") else collective, ranks)
    slack = 0.011 * (1 + factor) + 0.003 * timing.busbw
    return abs(timing.busbw - timing.algbw * factor) <= slack


def _doubts(rows: Sequence[JudgedRow], ranks: int) -> list[str]:
    """Return contradictions in rows, each kind once, with the first row that has it."""
    doubts: dict[str, tuple[int, float, str]] = {}

    def doubt(kind: str, words: str, weight: float = 0.0) -> None:
        """Count a doubt; its text is that of the first row, or of the row with most weight."""
        count, heaviest, known = doubts.get(kind, (0, -1.0, ""))
        doubts[kind] = (count + 1, max(weight, heaviest), words if weight > heaviest else known)

    for one in rows:
        where = f"line {one.row.line}: {format_size(one.row.size)}"
        for timing in (one.row.out_of_place, one.row.in_place):
            if timing is None:
                continue
            if not fits_factor(timing, one.collective, ranks):
                factor = bus_factor(one.collective, ranks)
                doubt(
                    "factor",
                    f"{where}: busbw {timing.busbw:g} is not algbw {timing.algbw:g} x {factor:.4g}, the factor of "
                    f"{one.collective} on {ranks} ranks",
                )
            rate = one.row.size / timing.seconds / 1e9
            if abs(timing.algbw - rate) > 0.011 + 0.02 * rate:
                doubt("rate", f"{where}: algbw {timing.algbw:g} is not size / time, {rate:.4g}")
            found = one.reachable
            if found is None:
                continue
            above = _above(found, rate)
            if above:
                doubt(above[0], f"{where}: {above[1]}", rate / found.best)
    for row in (one.row for one in rows):
        if row.out_of_place and row.in_place and row.size >= LARGE:
            out, inside = row.out_of_place.seconds, row.in_place.seconds
            if max(out, inside) > DIP * min(out, inside):
                slower, other = ("in", "out of") if inside > out else ("out of", "in")
                times = max(out, inside) / min(out, inside)
                doubt(
                    "places",
                    f"line {row.line}: {format_size(row.size)} takes {times:.3g} times as long {slower} place as "
                    f"{other} place; the verdict is of the times out of place",
                    times,
                )
    alike: dict[tuple[str, str, int | None], list[LoggedRow]] = {}
    for row in sorted((one.row for one in rows), key=lambda row: row.size):
        alike.setdefault((row.type, row.redop, row.root), []).append(row)
    for small, large in (pair for same in alike.values() for pair in pairwise(same)):
        first, second = small.timing.seconds, large.timing.seconds
        if first > DIP * second and small.size < large.size:
            doubt(
                "dip",
                f"line {small.line}: {format_size(small.size)} takes {first / second:.3g} times as long as "
                f"{format_size(large.size)}; run it again, other traffic may have shared the links",
                first / second,
            )
    return [words + (f" (and {count - 1} more)" if count > 1 else "") for count, _, words in doubts.values()]


def _above(found: Attainable, rate: float) -> tuple[str, str] | None:
    """Return kind and words of the assumption that is wrong if a rate exceeds the bound, or NCCL's best; else None."""
    if rate > found.best * ABOVE:
        what = f"above the upper bound of these links ({found.best:.4g})"
        return "above", f"{rate:.4g} GB/s is {what}: {fallen_assumption(found, rate)}"
    if found.nccl_best and rate > found.nccl_best * ABOVE:
        what = f"{100 * rate / found.nccl_best:.1f}% of the link limit ({found.nccl[0][0] if found.nccl else ''})"
        why = f"{_more_than_stated(found, rate / found.nccl_best)}, or a schedule that is not listed"
        return "above NCCL", f"{rate:.4g} GB/s is {what}: {why}"
    return None


def _more_than_stated(found: Attainable, times: float) -> str:
    """Return what links carry in a measurement that is so many times what they are stated to carry."""
    if found.nics is None:
        return f"it takes {100 * times - 100:.1f}% more of the links than the machine states"
    return (
        f"it takes {found.nics.one * times:.4g} GB/s of each NIC, where the machine states {found.nics.one:.4g} "
        "(a NIC of 400 Gb/s measures up to 49 GB/s in a Gen5 slot)"
    )


def fallen_assumption(found: Attainable, rate: float) -> str:
    """Return which assumption of a bound is wrong if a measurement in GB/s exceeds it."""
    if found.in_network is not None:
        reason = f"the bound leaves in-network reduction out, with which it is {found.in_network:.4g} GB/s"
        if rate <= found.in_network * ABOVE:
            return f"{reason}; --in-network nvswitch takes it in"
    else:
        reason = _more_than_stated(found, rate / found.best)
    return f"{reason}, or the machine has more than was stated, or these GPUs are not the ones that ran"


def nic_words(row: JudgedRow) -> str | None:
    """Return why the bus bandwidth of a row exceeds the bandwidth of NICs; None if it does not.

    The limit is that of all NICs of a server, or of a rank's part of them for an all-to-all.
    """
    nics = row.reachable.nics if row.reachable else None
    if nics is None:
        return None
    busbw = row.rate * nics.factor
    whole = nics.server if row.collective != "alltoall" else nics.server / nics.ranks
    of = f"the {whole:.4g} GB/s of " + (
        f"a rank's part of its server's {nics.count} NICs"
        if row.collective == "alltoall"
        else f"a server's {nics.count} NICs"
        if nics.count > 1
        else "the NIC of a server"
    )
    if busbw > whole * 1.001 and nics.leaving:
        leaving = (
            f"all ranks of a server together send {nics.leaving:.4g} out of it"
            if row.collective == "alltoall"
            else f"only {nics.leaving:.4g} must leave a server"
        )
        return (
            f"bus bandwidth {busbw:.4g} at {format_size(row.row.size)} is above {of}, which are full at "
            f"{nics.most:.4g}: its factor counts {nics.factor:.4g} bytes for a byte of the buffer, and {leaving}, the "
            "rest stays inside servers"
        )
    if nics.count > 1 and busbw > nics.one * 1.001:
        return (
            f"bus bandwidth {busbw:.4g} at {format_size(row.row.size)} is above the {nics.one:.4g} GB/s of one NIC: a "
            f"server has {nics.count} of them, and all carry a part"
        )
    return None
