"""A rank dies: plans for every single failure made beforehand, and replanning what is left.

How many plans symmetry saves, how large the file is, and the lowest rates that are left. Then the time of
`SurvivalPlans.plan_without`, which plans nothing, and of `topoplan.replan`, once for each failure, none of which the
process has planned before: the loss of one GPU comes first and is not counted, for modules that are loaded on first use
and tables of permutation groups. Beside the wall, CPU seconds: other processes do not count there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import topoplan
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan, plan_text
from topoplan.plans.survival import SurvivalPlans, verify_survival


@dataclass(frozen=True, slots=True)
class Times:
    wall: float
    cpu: float


def main() -> None:
    machines = {
        "dgx-1v": topoplan.load("dgx-1v"),
        "2 x dgx-a100": servers(2),
    }
    books = {name: _book(name, machine) for name, machine in machines.items()}
    print("\nplan_without, each failure once:")
    for name, book in books.items():
        _row(name, "any failure", [timed(partial(book.plan_of, number)) for number in _with_plan(book)])
    print("\nreplan, each failure once, after one of another GPU:")
    for name, machine in (("dgx-1v", machines["dgx-1v"]), ("4 x dgx-a100", servers(4))):
        whole = topoplan.plan(machine)
        topoplan.replan(whole, without_gpus=[0])
        _row(name, "a GPU", [timed(partial(replanned, whole, [gpu])) for gpu in range(1, 8)])
        wires = [f"{link.src}-{link.dst}" for link in machine.links if link.channel == "nvlink"]
        if "network" in whole.channels:
            wires = [f"s0.gpu{number}-s0.nic{number}" for number in range(8)]
        else:
            wires = list(dict.fromkeys("-".join(sorted(wire.split("-"))) for wire in wires))
        _row(name, "a link", [timed(partial(replanned, whole, (), [wire])) for wire in wires])


def servers(number: int) -> Topology:
    """So many DGX-A100 with eight NICs of 200 Gb/s."""
    return topoplan.cluster([topoplan.Server("dgx-a100", count=number)], nic_gbps=200)


def replanned(whole: Plan, gpus: Sequence[int], links: Sequence[str] = ()) -> Plan:
    """The plan without some GPUs and links, held to be optimal."""
    made = topoplan.replan(whole, without_gpus=gpus, without_links=links).plan
    assert made.gap == 0, f"{gpus} {links}: {made.rate} of {made.bound} GB/s"
    return made


def timed(call: Callable[[], object]) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def _with_plan(book: SurvivalPlans) -> list[int]:
    return [number for number, one in enumerate(book.outcomes) if not one.reason]


def _book(name: str, machine: Topology) -> SurvivalPlans:
    started = time.process_time()
    book = topoplan.plan_survival(machine)
    planned = time.process_time() - started
    text = book.to_json()
    verified = timed(lambda: verify_survival(SurvivalPlans.from_json(text))).cpu
    plans = [book.plan_of(number) for number in _with_plan(book)]
    apart = sum(len(plan_text({**plan.to_object(), "topology": None}).encode()) for plan in plans)
    failures = [one.failure for one in book.outcomes if not one.reason]
    failure, worst = min(zip(failures, plans, strict=True), key=lambda pair: pair[1].rate)
    print(f"{name}: {len(book.outcomes)} failures, {len(book.outcomes) - len(plans)} of them without a plan")
    print(f"  plans before and after symmetry:  {len(plans):5} {len(book.own):8}")
    print(f"  ratio:                            {len(plans) / len(book.own):14.2f} x")
    print(f"  file, and all plans written out:  {len(text) / 1e3:8.0f} KB {apart / 1e3:8.0f} KB")
    print(f"  CPU seconds to plan, to verify:   {planned:8.2f} s  {verified:8.2f} s")
    print(
        f"  rate of the whole, worst left:    {book.whole.rate:8.4g} GB/s {worst.rate:.4g} GB/s ({failure})"
    )
    print(f"  all of them proved optimal:       {'yes' if all(plan.gap == 0 for plan in plans) else 'no'}")
    return book


def _row(name: str, what: str, times: Sequence[Times]) -> None:
    wall, cpu = ([getattr(one, kind) * 1e3 for one in times] for kind in ("wall", "cpu"))
    print(
        f"  {name:13} {what:12} {len(times):3} calls, median {statistics.median(cpu):7.2f} ms of CPU, "
        f"{statistics.median(wall):7.2f} ms on the wall; longest {max(cpu):7.2f} ms of CPU"
    )
