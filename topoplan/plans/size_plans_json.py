"""The file of plans by size, format ``topoplan.plans/1``: ranges of bytes, each with a plan, and one machine.

Each plan is an object of format ``topoplan.plan/1`` without its ``topology``, which stands once beside the ranges.
Writing is deterministic and reading believes nothing but the types, as for single plans.
"""

from __future__ import annotations

from typing import cast

from topoplan.errors import PlanError
from topoplan.plans import plan_json
from topoplan.plans.plan import Plan
from topoplan.plans.plan_json import check_format, compact, embedded_topology, parse_object, plan_to_object
from topoplan.plans.size_plans import SizePlans, SizeRange
from topoplan.topology import Topology

FORMAT = "topoplan.plans/1"


def size_plans_to_object(plans: SizePlans) -> dict[str, object]:
    """The file as a JSON object."""
    return {
        "format": FORMAT,
        "collective": plans.collective,
        "ranges": [
            {"from": one.start, "to": one.stop, "plan": _without_topology(one.plan)} for one in plans.ranges
        ],
        "topology": plans.topology.to_object(),
    }


def dump_size_plans(plans: SizePlans) -> str:
    """The text of the file; shards stand one to a line."""
    rows = ",\n ".join(
        f'{{"from": {one.start}, "to": {compact(one.stop)}, "plan": '
        f"{plan_json.plan_text(_without_topology(one.plan))}}}"
        for one in plans.ranges
    )
    return (
        f'{{"format": {compact(FORMAT)},\n "collective": {compact(plans.collective)},\n "ranges": [\n {rows}\n ],\n'
        f' "topology": {compact(plans.topology.to_object())}}}\n'
    )


def _without_topology(plan: Plan) -> dict[str, object]:
    value = plan_to_object(plan)
    del value["topology"]
    return value


def parse_size_plans(text: str) -> SizePlans:
    """Read a file of plans by size.

    Raises
    ------
    PlanError
        No JSON, another format or version, a key is missing or of a wrong type, or the ranges do not fit.
    """
    return read_size_plans(parse_object(text))


def read_size_plans(value: dict[str, object]) -> SizePlans:
    """The plans in the object of such a file; errors as `parse_size_plans`."""
    check_format(value, FORMAT)
    topology = embedded_topology(value)
    rows = value.get("ranges")
    if not isinstance(rows, list):
        raise PlanError(f"ranges must be a list, not {type(rows).__name__}")
    plans = SizePlans(tuple(_range(row, number, topology) for number, row in enumerate(rows)))
    if value.get("collective") != plans.collective:
        raise PlanError(
            f"collective {value.get('collective')!r} is not that of the plans, {plans.collective}"
        )
    return plans


def _range(item: object, number: int, topology: Topology) -> SizeRange:
    where = f"range {number}"
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be an object, not {type(item).__name__}")
    start, stop, plan = item.get("from"), item.get("to"), item.get("plan")
    if not isinstance(plan, dict):
        raise PlanError(f"{where}: plan must be an object, not {type(plan).__name__}")
    try:
        check_format(plan, plan_json.FORMAT)
        made = plan_json.plan_from_object(cast("dict[str, object]", plan), topology)
    except PlanError as error:
        raise error.under(where) from None
    return SizeRange(
        _bytes(start, f"{where}: from"), None if stop is None else _bytes(stop, f"{where}: to"), made
    )


def _bytes(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise PlanError(f"{where} must be a whole number of bytes, zero or more, not {item!r}"[:200])
    return item
