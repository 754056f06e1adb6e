"""What was measured beside what the wires allow: the runs of a log on the GPUs of a machine, row by row.

Figures stand as they were printed; parts of what is reachable are those of size over time, which is printed with more
digits where sizes are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topoplan.compare.logged_ranks import run_gpus
from topoplan.compare.reachable import BANDWIDTH, Reachable
from topoplan.errors import UsageError
from topoplan.formats.nccl_logs.perf_runs import LoggedRow, PerfRun, Timing
from topoplan.plans.plan import EVERY
from topoplan.schedules.nccl.tuning import Expectation
from topoplan.topology import Topology
from topoplan.units import bus_factor, format_size

ABOVE = 1.0005
"""Over what no schedule exceeds, a percentage is printed above 100: an assumption is wrong (`fallen_assumption`)."""


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A row of a log.

    Parameters
    ----------
    collective : str
        As the log or its test calls it where a plan has none.
    row : LoggedRow
    reachable : Reachable or None
        None where nothing is compared.
    """

    collective: str
    row: LoggedRow
    reachable: Reachable | None

    @property
    def rate(self) -> float:
        """GB/s of algorithm bandwidth: size over time."""
        return self.row.size / self.row.timing.seconds / 1e9

    @property
    def of_nccl(self) -> float | None:
        """Part of NCCL's best; None where there is nothing to divide."""
        best = self.reachable.nccl_best if self.reachable else None
        return self.rate / best if best and best < float("inf") else None

    @property
    def of_best(self) -> float | None:
        """Part of what no schedule exceeds."""
        best = self.reachable.best if self.reachable else None
        return self.rate / best if best and best < float("inf") else None

    @property
    def expected(self) -> Expectation | None:
        """What NCCL's own model would choose for this size."""
        return self.reachable.expected(self.row.size) if self.reachable else None

    @property
    def of_model(self) -> float | None:
        """Time that NCCL's model expects over the time that was measured."""
        expected = self.expected
        return expected.seconds(self.row.size) / self.row.timing.seconds if expected else None

    @property
    def bound_by(self) -> str | None:
        """What binds this size."""
        return self.reachable.bound_by(self.row.size) if self.reachable else None

    def to_object(self) -> dict[str, object]:
        """A JSON object: ``time`` in microseconds, as nccl-tests prints it, rates in GB/s of algorithm bandwidth."""
        found, row, model = self.reachable, self.row, self.expected
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

    Parameters
    ----------
    run : PerfRun
    gpus : tuple of int
        Numbers of its GPUs on the machine, ascending; empty where nothing is compared.
    rows : tuple of JudgedRow
    notes, warnings : tuple of str
    """

    run: PerfRun
    gpus: tuple[int, ...]
    rows: tuple[JudgedRow, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def references(self) -> tuple[Reachable, ...]:
        """What its rows are compared with: one for each root."""
        return tuple({id(one.reachable): one.reachable for one in self.rows if one.reachable}.values())


def judge(
    run: PerfRun,
    machine: Topology,
    reach: Callable[[str, tuple[int, ...], int | None], Reachable],
    *,
    gpus: Sequence[int] | None = None,
    collective: str | None = None,
) -> JudgedRun:
    """A run beside what the wires allow.

    Parameters
    ----------
    run : PerfRun
    machine : Topology
    reach : callable
        What a collective, GPUs and the GPU number of a root can reach: `topoplan.compare.reachable.reachable`, each
        asked once.
    gpus : sequence of int or None
        The GPUs of the ranks, as the caller states them; None reads them from the log.
    collective : str or None
        What the test was, where the log does not say.

    Raises
    ------
    UsageError
        The ranks do not fit the machine or the GPUs; or the log says neither what it tested nor enough to guess it.
    """
    notes: list[str] = []
    warnings = list(run.warnings)
    side = {rank.group for rank in run.ranks}
    if len(side) > 1:
        warnings.append(
            f"{len(side)} communicators ran side by side, and what follows is for group {min(side)} alone: they shared "
            "its wires"
        )
    ranks = [rank for rank in run.ranks if rank.group == min(side)] if side else []
    chosen, of_rank = run_gpus(run, ranks, machine, gpus, notes)
    if len(chosen) == 1 and run.rows:
        warnings.append(
            "a single rank moves nothing: where mpirun started several processes, nccl-tests was built without MPI=1"
        )
    known = run.collective or (collective or "" if not run.program else "")
    if run.rows and not known and not run.program:
        known = _guessed(run, len(chosen), notes)
    if not known:
        if run.rows:
            warnings.append(
                f"{run.program}: {len(run.rows)} rows are not compared: no plan does what {run.program} does, "
                "and nothing bounds it here"
            )
        rows = tuple(JudgedRow(run.program, row, None) for row in run.rows)
        return JudgedRun(run, (), rows, tuple(notes), tuple(warnings))
    judged = []
    for row in run.rows:
        root = of_rank.get(row.root or 0, chosen[0]) if known in ("broadcast", "reduce") else None
        judged.append(JudgedRow(known, row, reach(known, chosen, root)))
    warnings += _doubts(judged, len(chosen))
    if run.program == "bench":
        notes.append(
            "topoplan bench moves data through this host unless its links are paced; these are not the wires"
        )
    return JudgedRun(run, chosen, tuple(judged), tuple(notes), tuple(warnings))


def _guessed(run: PerfRun, ranks: int, notes: list[str]) -> str:
    likely = [name for name in EVERY if _may_be(run, name, ranks)]
    if len(likely) == 1:
        notes.append(f"the log does not name its test; by its columns it is {likely[0]}")
        return likely[0]
    what = (
        f"it may be {' or '.join(likely)}"
        if likely
        else f"no collective of {ranks} ranks has these bandwidths"
    )
    raise UsageError(f"the log does not name its test, and {what}; name it with --collective")


def _may_be(run: PerfRun, collective: str, ranks: int) -> bool:
    adds = collective in ("allreduce", "reduce", "reduce_scatter")
    rooted = collective in ("broadcast", "reduce")
    return all(
        (not row.redop or (row.redop != "none") == adds)
        and (row.root is None or rooted)
        and fits_factor(row.timing, collective, ranks)
        for row in run.rows
    )


def fits_factor(timing: Timing, collective: str, ranks: int) -> bool:
    """Whether bus and algorithm bandwidth, each rounded to a hundredth, can be those of so many ranks.

    Examples
    --------
    >>> timing = Timing(20e-6, 52.43, 91.75, 0)
    >>> fits_factor(timing, "allreduce", 8), fits_factor(timing, "allreduce", 4), fits_factor(timing, "broadcast", 8)
    (True, False, False)
    """
    factor = bus_factor(collective, ranks)
    slack = 0.011 * (1 + factor) + 0.003 * timing.busbw
    return abs(timing.busbw - timing.algbw * factor) <= slack


def _doubts(rows: Sequence[JudgedRow], ranks: int) -> list[str]:
    """What rows say that cannot be, each kind once, with the first row that says it."""
    told: dict[str, tuple[int, str]] = {}

    def doubt(kind: str, words: str) -> None:
        told[kind] = (told[kind][0] + 1, told[kind][1]) if kind in told else (1, words)

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
            best = one.reachable.best if one.reachable else float("inf")
            if rate > best * ABOVE:
                doubt(
                    "above",
                    f"{where}: {rate:.4g} GB/s is more than any schedule can over these wires ({best:.4g}): "
                    f"{fallen_assumption(one.reachable, rate)}",
                )
    return [words + (f" (and {count - 1} more)" if count > 1 else "") for count, words in told.values()]


def fallen_assumption(found: Reachable | None, rate: float) -> str:
    """Which assumption of a bound is wrong where a measurement in GB/s exceeds it."""
    other = "the machine has more than was stated, or these GPUs are not the ones that ran"
    if found is None or found.in_network is None:
        return other
    told = f"the bound leaves in-network reduction out, with which it is {found.in_network:.4g} GB/s"
    return (
        f"{told}; --in-network nvswitch takes it in"
        if rate <= found.in_network * ABOVE
        else f"{told}, and {other}"
    )


def nic_words(row: JudgedRow) -> str | None:
    """Why the bus bandwidth of a row is above what NICs carry; None where it is not.

    What NICs carry is that of all NICs of a server, and of a rank's part of them for an all-to-all.
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
        return (
            f"bus bandwidth {busbw:.4g} at {format_size(row.row.size)} is above {of}, which are full at "
            f"{nics.most:.4g}: its factor counts {nics.factor:.4g} bytes for a byte of the buffer, and "
            f"{_leaving_words(row.collective, nics.leaving)}, the rest stays inside servers"
        )
    if nics.count > 1 and busbw > nics.one * 1.001:
        return (
            f"bus bandwidth {busbw:.4g} at {format_size(row.row.size)} is above the {nics.one:.4g} GB/s of one NIC: a "
            f"server has {nics.count} of them, and all carry a part"
        )
    return None


def _leaving_words(collective: str, leaving: float) -> str:
    if collective == "alltoall":
        return f"all ranks of a server together send {leaving:.4g} out of it"
    return f"only {leaving:.4g} must leave a server"
