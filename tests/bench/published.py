"""Times that papers and users measured, beside the model's.

Without options: figures 16 and 27 of Blink (MLSys 2020), read off the charts (0.5 GB/s; 8 %); figures of ForestColl for
two DGX-A100; NCCL issue 1801 for three NVLink domains of GB200, NVLS off. There NCCL takes the faster of its double
tree and its rings, and the model is the event simulation. Fitted are one-hop trees of 1 KB on a DGX-2 and the allgather
of 1 MB between servers (`topoplan.model.dataflow`).

``--rows FILE.csv`` takes rows of any collection (columns: machine, gpus, servers, collective, bytes, implementation,
time_us, algbw_gbps, busbw_gbps, nic_gbps, source) and `topoplan.model.expected_times`. ``--fit OUT.csv`` fits its table
to every other row of a kind, by size, and prints how the others agree.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import topoplan
from tests.bench.three_phases import BARS
from tests.support.known_answers import blink_figure
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Topology
from topoplan.model.expected_times import (
    HALVES,
    IMPLEMENTATIONS,
    MOST_GPUS,
    OF_NCCL,
    ExpectedTimes,
    FittedCosts,
    Place,
    default_model,
    expected_times,
    fitted_seconds,
)
from topoplan.plans.plan import Plan
from topoplan.schedules.binary_trees import nccl_tree
from topoplan.schedules.nccl_tuning import NcclExpectation
from topoplan.solve.upper_bound import compute_bound
from topoplan.units import bus_factor, format_size

SIZES = tuple(1 << 10 << step for step in (0, 6, 8, 10, 12, 14, 16, 18, 20))
"""Of figure 27, which has every power of two."""

WITHIN = (0.8, 1.25)
"""Ratios of model to measurement that agree."""

LIBRARY = {
    "h100-sxm": "dgx-h100",
    "h200-sxm": "dgx-h100",
    "p5.48xlarge": "p5.48xlarge",
    "a100-sxm": "dgx-a100",
    "dgx-a100": "dgx-a100",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200-nvl72": "gb200-nvl72",
    "gb300-nvl72": "gb300-nvl72",
    "mi300x": "mi300x",
}
"""Machines of the library by their names in the rows."""

ALIASES = {"nccl-ring-or-tree": "nccl", "forestcoll": "msccl-trees"}
"""Implementations under other names: an A100 has no third algorithm, and ForestColl's trees ran on MSCCL."""

REDUCED = ("allreduce", *HALVES)

FEWEST = 3
"""Fewer rows of a kind are not fitted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A published row; ``seconds`` is derived from a bandwidth where no time is stated."""

    machine: str
    gpus: int
    servers: int
    collective: str
    nbytes: int
    implementation: str
    seconds: float
    nic_gbps: float
    source: str

    @property
    def kind(self) -> tuple[str, int, int, str]:
        return self.machine, self.gpus, self.servers, self.implementation


def read_rows(path: str) -> list[Measured]:
    """Return the rows of a file, in the order of `Measured.kind`, then by size."""
    with Path(path).open(encoding="utf-8", newline="") as lines:
        rows = [_measured(row) for row in csv.DictReader(lines)]
    return sorted(rows, key=lambda row: (*row.kind, row.collective, row.nbytes, row.source))


def _measured(row: Mapping[str, str]) -> Measured:
    gpus, nbytes = int(row["gpus"]), int(row["bytes"])
    seconds = float(row["time_us"] or 0) * 1e-6
    if not seconds:
        rate = float(row["algbw_gbps"] or 0) or float(row["busbw_gbps"]) / bus_factor(row["collective"], gpus)
        seconds = nbytes / rate / 1e9
    name = row["implementation"]
    name = "mscclpp" if name.startswith("mscclpp-") else ALIASES.get(name, name)
    return Measured(
        row["machine"],
        gpus,
        int(row["servers"]),
        row["collective"],
        nbytes,
        name,
        seconds,
        float(row["nic_gbps"] or 0),
        row["source"],
    )


@cache
def machine_of(machine: str, gpus: int, servers: int, nic_gbps: float) -> Topology | None:
    """Return the machine of a row; None if the library has none like it."""
    name = LIBRARY.get(machine)
    if name is None:
        return None
    one = topoplan.load(name)
    if servers == 1:
        return one.subset(range(gpus))
    if not nic_gbps or gpus > MOST_GPUS:
        return None
    each = len(one.gpus)
    # 32 NICs of 100 Gb/s of a p5.48xlarge are four of a GPU
    rate = 400 if machine == "p5.48xlarge" else 2 * nic_gbps if nic_gbps == 100 else nic_gbps
    if machine == "p5.48xlarge":
        name = "dgx-h100"
    return cluster([Server(name, count=servers)], nics=each, nic_gbps=rate, nic_access="direct")


def main(given: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench published", description=__doc__)
    parser.add_argument("--rows", metavar="FILE.csv", help="published rows")
    parser.add_argument("--fit", metavar="OUT.csv", help="fit the table to every other row and write it")
    parser.add_argument("--every", action="store_true", help="print every row")
    options = parser.parse_args(given)
    if options.fit and not options.rows:
        raise UsageError("--fit needs published rows; give them with --rows")
    if not options.rows:
        charts()
    elif options.fit:
        fit(read_rows(options.rows), options.fit)
    else:
        judge(read_rows(options.rows), every=options.every)


def fit(rows: Sequence[Measured], path: str) -> None:
    """Write the table of costs that fit every other row of a kind best, and print how the others agree."""
    table = []
    print("implementation, generation, servers: rows; model / measured of the rows not fitted to")
    for (name, generation, several, halves), group in groups(rows).items():
        if len(group) < FEWEST:
            print(f"  {name}, {generation}, {'several' if several else 1}: {len(group)}, too few")
            continue
        fitted = [one for place, one in enumerate(group) if place % 2 == 0]
        start, share, fill = _least_squares(fitted)
        others = [one for place, one in enumerate(group) if place % 2]
        ratios = [
            fitted_seconds(one.moving / share, one.start * start, fill * 1e-6) / one.row.seconds
            for one in others
        ]
        print(
            f"  {name}, {generation}, {'several' if several else 1}{', halves' if halves else ''}: {len(group)}; "
            f"{_summary(ratios)}"
        )
        known = [one.row for one in group]
        table.append(
            FittedCosts(
                implementation=name,
                generation=generation,
                servers=max(row.servers for row in known),
                halves=halves,
                start=start,
                share=share,
                fill=fill,
                rows=len(known),
                gpus=" ".join(str(count) for count in sorted({row.gpus for row in known})),
                least=min(row.nbytes for row in known),
                most=max(row.nbytes for row in known),
                source="; ".join(sorted({row.source for row in known})),
                date=datetime.now(UTC).date().isoformat(),
            )
        )
    with Path(path).open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([field.name for field in fields(FittedCosts)])
        writer.writerows(astuple(one) for one in table)


class Unit(NamedTuple):
    """A row with the unit of its start, and the seconds that its bytes take at the rate R."""

    row: Measured
    start: float
    moving: float


def groups(rows: Iterable[Measured]) -> dict[tuple[str, str, bool, bool], list[Unit]]:
    """Return the rows by implementation, generation, one server or several, and allreduce or its halves."""
    found: dict[tuple[str, str, bool, bool], list[Unit]] = defaultdict(list)
    for row in rows:
        place, model, planned = known_of(row)
        if place is None or row.implementation not in IMPLEMENTATIONS or row.collective not in REDUCED:
            continue
        start, rate = place.wires(row.implementation, row.collective, model, planned)
        if rate:
            key = (row.implementation, place.generation, row.servers > 1, row.collective in HALVES)
            found[key].append(Unit(row, start, row.nbytes / (rate * 1e9)))
    return dict(sorted(found.items()))


def known_of(row: Measured) -> tuple[Place | None, tuple[NcclExpectation, ...], float]:
    """Return what the time of a row depends on."""
    machine = machine_of(row.machine, row.gpus, row.servers, row.nic_gbps)
    if machine is None:
        return None, (), 0.0
    return *_known(machine, row.collective), _planned(machine, row)


@cache
def _known(machine: Topology, collective: str) -> tuple[Place | None, tuple[NcclExpectation, ...]]:
    return Place.of(machine), default_model(machine, collective)


def _planned(machine: Topology, row: Measured) -> float:
    """Return the rate of the optimal plan, for rows of packed trees."""
    return compute_bound(machine, row.collective).rate if row.implementation == "msccl-trees" else 0.0


def _least_squares(units: Sequence[Unit]) -> tuple[float, float, float]:
    """Return start, share and fill with the least differences of logarithms; outliers count less."""
    starts, moving, seconds = (
        np.array(column)
        for column in zip(*((one.start, one.moving, one.row.seconds) for one in units), strict=True)
    )

    def differences(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        start, share, fill = np.exp(logs)
        x = moving / share
        made: NDArray[np.float64] = np.log((start * starts + x + 2 * np.sqrt(fill * 1e-6 * x)) / seconds)
        return made

    first = np.log([float(np.min(seconds / starts)), 0.7, 0.1])
    # nothing is quicker than the wires; NCCL counts their rate some 10 to 20 % lower than it is
    most = 1.25 if units[0].row.implementation in OF_NCCL else 1.0
    bounds = (np.log([0.5, 0.02, 1e-3]), np.log([1e3, most, 200.0]))
    found = least_squares(differences, np.clip(first, *bounds), bounds=bounds, loss="soft_l1", f_scale=0.1)
    start, share, fill = (float(f"{value:.4g}") for value in np.exp(found.x))
    return start, share, fill


def judge(rows: Sequence[Measured], *, every: bool) -> None:
    """Print the expected times beside the rows, by kind, the worst of them, and which implementation is quickest."""
    found: list[tuple[Measured, float]] = []
    without: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        expected = expected_of(row)
        if expected is None:
            without[row.machine, row.implementation] += 1
        else:
            found.append((row, expected.seconds(row.nbytes) / row.seconds))
    if every:
        print("every row: model / measured")
        for row, ratio in found:
            print(f"  {_words(row)}  {ratio:.2f}")
    print(
        "machine, implementation: rows, model / measured: median, 10th and 90th percentile, within 0.8 to 1.25"
    )
    for kind in dict.fromkeys((row.machine, row.implementation) for row, _ in found):
        ratios = [ratio for row, ratio in found if (row.machine, row.implementation) == kind]
        print(f"  {kind[0]:14} {kind[1]:15} {_summary(ratios)}")
    print(f"  all            {'':15} {_summary([ratio for _, ratio in found])}")
    print("the 15 rows that agree least")
    for row, ratio in sorted(found, key=lambda one: -abs(log(one[1])))[:15]:
        print(f"  {_words(row)}  {ratio:.2f}  {row.source}")
    print(f"not claimed: {sum(without.values())} of {len(rows)} rows")
    machines: dict[str, list[str]] = defaultdict(list)
    for (machine, name), count in without.items():
        machines[machine].append(f"{name} {count}")
    for machine, names in machines.items():
        print(f"  {machine}: {', '.join(names)}")
    winners(rows)


def expected_of(row: Measured) -> ExpectedTimes | None:
    """Return the expected times of a row's implementation; None if they are not known."""
    machine = machine_of(row.machine, row.gpus, row.servers, row.nic_gbps)
    if machine is None or row.collective not in REDUCED:
        return None
    return _expected(machine, row.collective, _planned(machine, row)).get(row.implementation)


@cache
def _expected(machine: Topology, collective: str, planned: float) -> dict[str, ExpectedTimes]:
    return {one.implementation: one for one in expected_times(machine, collective, planned)}


def winners(rows: Sequence[Measured]) -> None:
    """Print how often the implementation that is expected to be quickest was, or was within a tenth of it.

    A case is a machine, collective and size with rows of several implementations from one source.
    """
    cases: dict[tuple[str, int, int, str, int, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        expected = expected_of(row)
        if expected is not None:
            case = (row.machine, row.gpus, row.servers, row.collective, row.nbytes, row.source)
            cases[case][row.implementation] = (expected.seconds(row.nbytes), row.seconds)
    chosen = []
    for case, known in cases.items():
        if len(known) > 1:
            best = min(known, key=lambda name: known[name])
            quickest = min(seconds for _, seconds in known.values())
            chosen.append((known[best][1] / quickest, case, best))
    right = sum(lost <= 1.1 for lost, _, _ in chosen)
    print(f"quickest of several: right within 10 % in {right} of {len(chosen)} cases")
    for lost, case, best in sorted(chosen, key=lambda one: -one[0]):
        if lost > 1.1:
            machine, gpus, _, collective, nbytes, _ = case
            fastest = min(cases[case], key=lambda name: cases[case][name][1])
            print(
                f"  {gpus} x {machine}, {collective}, {format_size(nbytes)}: {best}, {lost:.2f}x of {fastest}"
            )


def _summary(ratios: Sequence[float]) -> str:
    if not ratios:
        return "0"
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    inside = sum(WITHIN[0] <= ratio <= WITHIN[1] for ratio in ratios)
    return f"{len(ratios):4}  {middle:5.2f}  {low:5.2f}  {high:5.2f}  {inside / len(ratios):4.0%}"


def _words(row: Measured) -> str:
    return (
        f"{row.gpus:5} x {row.machine:12} {row.collective:14} {row.implementation:15} "
        f"{format_size(row.nbytes):>7} {row.seconds * 1e6:10.1f} us"
    )


class Row(NamedTuple):
    """One measurement: of what, where, bytes, microseconds measured, and by the model of the fastest of some plans."""

    what: str
    machine: str
    nbytes: int
    measured: float
    plans: tuple[Plan, ...]

    def model(self) -> float:
        """Microseconds of the event simulation."""
        return min(topoplan.simulate(plan, nbytes=self.nbytes).seconds for plan in self.plans) * 1e6


def of_rate(what: str, machine: str, nbytes: int, rate: float, plan: Plan) -> Row:
    return Row(what, machine, nbytes, nbytes / rate / 1e3, (plan,))


def charts() -> None:
    """Print charts of papers beside the event simulation."""
    groups = (
        ("Blink figure 27", dgx2()),
        ("Blink figure 16", dgx1()),
        ("ForestColl", a100()),
        ("NCCL 1801", gb200()),
    )
    print("model against published measurements; microseconds, and model / measured")
    for source, made in groups:
        ratios = []
        for row in made:
            model = row.model()
            ratios.append(model / row.measured)
            print(
                f"  {source:15}  {row.machine:26}  {row.what:27}  {format_size(row.nbytes):>6}  {row.measured:9.1f}"
                f"  {model:9.1f}  {ratios[-1]:5.2f}"
            )
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"  {source:15}  mean {mean:.2f}, {min(ratios):.2f} to {max(ratios):.2f} of {len(ratios)}")


def dgx2() -> Iterator[Row]:
    """Figure 27: one-hop trees, and NCCL 2."""
    machine = topoplan.load("dgx-2")
    hops = topoplan.one_hop_plan(machine)
    rivals = (topoplan.double_binary_tree(machine), topoplan.ring_plan(machine))
    figure = blink_figure(27)
    for nbytes in SIZES:
        bars = figure[format_size(nbytes)]
        yield Row("allreduce, one-hop trees", "dgx-2", nbytes, bars["one-hop"], (hops,))
        yield Row("allreduce, NCCL", "dgx-2", nbytes, bars["nccl"], rivals)


def dgx1(nbytes: int = 1 << 30) -> Iterator[Row]:
    """Figure 16: bars of large messages, packed trees."""
    machine = topoplan.load("dgx-1v")
    for gpus, (blink, _) in (*BARS.items(), (tuple(range(8)), (64.33, 64.86))):
        plan = topoplan.plan(machine, gpus=list(gpus), channels="nvlink")
        name = f"dgx-1v {','.join(map(str, gpus))}"
        yield of_rate("allreduce, packed trees", name, nbytes, blink, plan)


def a100() -> Iterator[Row]:
    """Allgather of two DGX-A100, a NIC of 200 Gb/s for each GPU, in its PCIe place."""
    machine = cluster([Server("dgx-a100", count=2)], nics=8, nic_gbps=200, nic_access="pcie")
    plan = topoplan.plan(machine, "allgather")
    for nbytes, rate in ((1 << 20, 13.1), (1 << 30, 247.0)):
        yield of_rate("allgather, packed trees", "2 x dgx-a100", nbytes, rate, plan)


def gb200(nbytes: int = 1 << 34) -> Iterator[Row]:
    """Rings and trees of NCCL on three NVLink domains, a NIC of 400 Gb/s for each GPU."""
    for gpus, ring, tree in ((4, 107.3, 127.9), (8, 205.4, 253.4)):
        machine = nvswitch_cluster(3, gpus=gpus, nvlink=900, nic=50, rails=None)
        for what, rate, plan in (
            ("ring", ring, topoplan.ring_plan(machine)),
            ("tree", tree, nccl_tree(machine)),
        ):
            yield of_rate(f"allreduce, NCCL {what}", f"3 x {gpus} GB200", nbytes, rate, plan)
