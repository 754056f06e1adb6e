"""Why a plan cannot be faster, in words: the certificate read aloud."""

from __future__ import annotations

from fractions import Fraction

from topoplan.plans.certificate import Cut, Lengths, Partition
from topoplan.plans.fabric import Fabric
from topoplan.plans.plan import Plan

_LISTED = 8


def explain_certificate(plan: Plan) -> str:
    """One sentence that names the bottleneck which the certificate proves.

    Examples
    --------
    >>> import topoplan
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "broadcast"))
    'only 150 GB/s leave {gpu0}, and every byte must'
    """
    certificate = plan.certificate
    fabric = Fabric(plan.topology, plan.channels)
    if isinstance(certificate, Cut):
        return _explain_cut(certificate, fabric, plan)
    if isinstance(certificate, Partition):
        parts = " ".join(_braced(part) for part in certificate.parts)
        part_of = {name: number for number, part in enumerate(certificate.parts) for name in part}
        crossing = sum(
            (
                c
                for link, c in zip(fabric.links, fabric.capacity, strict=True)
                if part_of.get(link.src, link.src) != part_of.get(link.dst, link.dst)
            ),
            Fraction(0),
        )
        return (
            f"the links between {parts} carry {float(crossing):.6g} GB/s both ways, and every byte crosses "
            f"them {2 * (len(certificate.parts) - 1)} times"
        )
    if isinstance(certificate, Lengths):
        return (
            f"dual lengths on {len(certificate.lengths)} links, under which every forest is long enough: "
            f"{_longest(certificate)}"
        )
    return "one rank moves nothing"


def _explain_cut(cut: Cut, fabric: Fabric, plan: Plan) -> str:
    side = set(cut.side)
    inside = [name for name in fabric.ranks if name in side]
    leaving = _crossing(fabric, side, outwards=True)
    entering = _crossing(fabric, side, outwards=False)
    names = _braced(cut.side)
    if plan.collective == "broadcast":
        return f"only {float(leaving):.6g} GB/s leave {names}, and every byte must"
    if plan.collective == "reduce":
        return f"only {float(entering):.6g} GB/s enter {names}, and every byte must"
    if plan.collective == "allreduce":
        return f"only {float(leaving + entering) / 2:.6g} GB/s cross the edge of {names}, and every byte must both ways"
    share = f"{len(inside)}/{fabric.size} of the buffer"
    if plan.collective == "allgather":
        return f"only {float(leaving):.6g} GB/s leave {names}, and {share} must"
    return f"only {float(entering):.6g} GB/s enter {names}, and {share} must"


def _crossing(fabric: Fabric, side: set[str], outwards: bool) -> Fraction:
    return sum(
        (
            c
            for link, c in zip(fabric.links, fabric.capacity, strict=True)
            if (link.src in side) == outwards and (link.dst in side) != outwards
        ),
        Fraction(0),
    )


def _longest(certificate: Lengths) -> str:
    """The links of greatest length: the tightest part of the machine."""
    longest = max(value for _, _, value in certificate.lengths)
    names = [f"{src}>{dst}" for src, dst, value in certificate.lengths if value == longest]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"longest {', '.join(names[:_LISTED])}{more}"


def _braced(names: tuple[str, ...]) -> str:
    shown = names if len(names) <= _LISTED else (*names[:_LISTED], f"and {len(names) - _LISTED} more")
    return "{" + " ".join(shown) + "}"
