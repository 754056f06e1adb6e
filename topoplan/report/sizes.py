"""Times over sizes, of the plan, the best schedule by size, the ring and the best that NCCL has: curves and a table."""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.choice.by_size import Choice, choose_by_size
from topoplan.errors import InfeasibleError, UsageError
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.report.drawing import Curve, draw_curves
from topoplan.report.markup import Section, element, joined, table
from topoplan.schedules.registry import ONE_FABRIC
from topoplan.simulation.model import clock
from topoplan.simulation.table import Row, sweep
from topoplan.topology import Topology
from topoplan.units import format_size


def by_size(
    topology: Topology,
    plan: Plan,
    chosen: Sequence[int],
    *,
    root: int | None,
    channels: str,
    sizes: Sequence[int],
) -> Choice | None:
    """Plans by size for the request that a plan was made for, where there are any."""
    if plan.collective == ALL_TO_ALL or channels not in ("auto", *ONE_FABRIC):
        return None
    try:
        return choose_by_size(
            topology, plan.collective, gpus=chosen, root=root, channels=channels, sizes=sizes
        )
    except (InfeasibleError, UsageError):
        # Some schedule refuses such a machine; the page has the others.
        return None


def sizes_section(
    plan: Plan, rivals: dict[str, Plan], choice: Choice | None, sizes: Sequence[int]
) -> Section:
    """Model times over sizes: the plan, the best plan by size, the ring, and the best that NCCL has."""
    own = sweep(plan, sizes)
    ring = rivals.get("ring")
    ring_rows = sweep(ring, sizes) if ring else None
    clocks = {name: clock(one) for name, one in rivals.items()}
    nccl: list[tuple[float, str]] = (
        [min((time(size).seconds, rivals[name].schedule) for name, time in clocks.items()) for size in sizes]
        if rivals
        else []
    )
    best = sweep(choice.plans, sizes) if choice else None
    heads = ["size", f"{plan.schedule}: us", "GB/s", "busbw"]
    columns: list[list[str]] = [
        [format_size(size) for size in sizes],
        *_cells([row.seconds for row in own], sizes),
        [f"{row.busbw:.4g}" for row in own],
    ]
    curves = [_curve(f"{plan.schedule} of the plan above", own)]
    if best is not None and choice is not None:
        heads += ["best by size: us", "GB/s", "which"]
        columns += [
            *_cells([row.seconds for row in best], sizes),
            [choice.plans.at(size).schedule for size in sizes],
        ]
        curves.append(_curve("best schedule by size", best))
        if choice.bound is not None:
            heads.append("least possible: us")
            columns.append([f"{choice.bound.seconds(size) * 1e6:.1f}" for size in sizes])
    if ring_rows is not None and ring is not None:
        heads += [f"{ring.schedule}: us", "GB/s"]
        columns += _cells([row.seconds for row in ring_rows], sizes)
        curves.append(_curve(ring.schedule, ring_rows))
    if nccl:
        heads += ["NCCL's best: us", "GB/s", "which"]
        columns += [*_cells([seconds for seconds, _ in nccl], sizes), [name for _, name in nccl]]
        points = tuple((size, size / seconds / 1e9) for size, (seconds, _) in zip(sizes, nccl, strict=True))
        curves.append(Curve("NCCL's best", points))
    told = "Model times (start-ups and bandwidth of every link, pipelined), not measured; GB/s of algorithm bandwidth."
    label = f"algorithm bandwidth of {plan.collective} on {plan.topology.name} over sizes"
    chart = draw_curves(curves, label=label)
    rows = list(zip(*columns, strict=True))
    return Section("sizes", "Times over sizes", joined((element("p", told), chart, table(heads, rows))))


def _cells(seconds: Sequence[float], sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """Microseconds and GB/s."""
    times = [f"{one * 1e6:.1f}" for one in seconds]
    return times, [f"{size / one / 1e9:.4g}" for size, one in zip(sizes, seconds, strict=True)]


def _curve(name: str, rows: Sequence[Row]) -> Curve:
    return Curve(name, tuple((row.nbytes, row.algbw) for row in rows))
