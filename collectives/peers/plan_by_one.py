"""One rank plans, and all others get its plan: verified on each, and the same on all.

Planning may take much longer than ranks wait for a step of a collective, and need not take the same on all of them. So
rank 0 plans alone, the others wait as long as it is busy (`error_rounds.say_when_done`), and its error is theirs.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

from collectives.peers.error_rounds import Gather, say_when_done
from topoplan.errors import PlanError
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import parse_plan_file
from topoplan.plans.verify import verify_all

PLANNER = 0
"""The rank that plans."""

LONG = 1 << 14
"""Characters from which on a plan file travels compressed; nothing that is so begins as JSON does."""


def plan_by_one(
    gather: Gather,
    make: Callable[[], Plans],
    *,
    rank: int,
    check: Callable[[Plans], None] | None = None,
) -> Plans:
    """The plan that one rank makes; all ranks must call this.

    Parameters
    ----------
    gather : Gather
    make : callable
        Called on the rank that plans, in a thread.
    rank : int
        This one.
    check : callable, optional
        Further checks of the plan, on every rank; raises `PlanError`.

    Raises
    ------
    TopoplanError
        What ``make`` raises, or what a rank finds wrong: on all ranks, naming the one that failed.

    Examples
    --------
    >>> import topoplan
    >>> plan_by_one(lambda text: [text], lambda: topoplan.plan(topoplan.load("dgx-2")), rank=0).rate
    80.0
    """
    held: list[Plans] = []

    def planned() -> str:
        if rank != PLANNER:
            return ""
        held.append(make())
        return packed(held[0].to_json())

    text = say_when_done(gather, planned)[PLANNER]

    def checked() -> str:
        if rank != PLANNER:
            held.append(parse_plan_file(unpacked(text)))
        verify_all(held[0])
        if check is not None:
            check(held[0])
        return held[0].digest

    digests = say_when_done(gather, checked)
    for other, digest in enumerate(digests):
        if digest != digests[PLANNER]:
            raise PlanError(
                f"rank {other} has plan {digest[:16]} and rank {PLANNER} has {digests[PLANNER][:16]}; "
                "install the same version of topoplan everywhere"
            )
    return held[0]


def packed(text: str) -> str:
    """A plan file as it travels: a long one compressed, since control planes are made for short messages.

    Examples
    --------
    >>> packed("{}"), len(packed("{}" * LONG)) < 200, unpacked(packed("{}" * LONG)) == "{}" * LONG
    ('{}', True, True)
    """
    return text if len(text) < LONG else base64.b85encode(zlib.compress(text.encode())).decode()


def unpacked(text: str) -> str:
    """The plan file that `packed` was given."""
    return text if text.startswith("{") else zlib.decompress(base64.b85decode(text)).decode()
