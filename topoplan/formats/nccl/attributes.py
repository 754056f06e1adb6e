"""Attributes of the elements of a topology file, as NCCL reads them, and notes on what it passes over in silence.

Our own exporter states more than NCCL knows (``bandwidth``, ``name``, ``model``, ``socket``), and lists in ``assumed``
the attributes of an element that it had to invent because NCCL needs them: these say nothing about the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from topoplan.errors import TopologyError
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import bus_id
from topoplan.hosts.notes import listed
from topoplan.topology import FASTEST, SLOWEST

_NUMBER = re.compile(r"\s*([+-]?)(?:0x([0-9a-f]+)|([0-9]+))", re.IGNORECASE)
_LONGEST_NUMBER = 18


@dataclass(frozen=True, slots=True)
class GivenRates:
    """Bandwidths that a user gave, in GB/s per direction, in place of what a file states or NCCL assumes.

    Parameters
    ----------
    nvlink, pcie, socket : float or None
        Of one NVLink or XGMI link, of every PCIe link, and between CPUs.
    """

    nvlink: float | None = None
    pcie: float | None = None
    socket: float | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What was assumed or left out, and where, in order of first appearance.

    Examples
    --------
    >>> findings = Findings()
    >>> for place in ("gpu0", "gpu1"):
    ...     findings.add("sm is not stated", place)
    >>> findings.notes()
    ('sm is not stated: gpu0, gpu1',)
    """

    _places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, place: str = "") -> None:
        """One more place of a finding."""
        self._places.setdefault(what, []).append(place)

    def notes(self) -> tuple[str, ...]:
        """One line for each finding."""
        return tuple(
            f"{what}: {listed(dict.fromkeys(places))}" if any(places) else what
            for what, places in self._places.items()
        )


def stated(element: Element, attribute: str) -> str:
    """What an attribute says of the machine; empty where it is absent, or listed as assumed.

    Examples
    --------
    >>> from topoplan.formats.nccl.xml_tree import parse_xml
    >>> net = parse_xml('<net name="mlx5_0" speed="10000" assumed="speed"/>')
    >>> stated(net, "name"), stated(net, "speed")
    ('mlx5_0', '')
    """
    if attribute in element.attributes.get("assumed", "").split():
        return ""
    return element.attributes.get(attribute, "")


def needed(element: Element, attribute: str) -> str:
    """An attribute without which NCCL fails too.

    Raises
    ------
    TopologyError
        It is not there.
    """
    value = element.attributes.get(attribute)
    if value is None:
        raise TopologyError(
            f"line {element.line}: {element.name} has no attribute {attribute}; NCCL needs it too, add it"
        )
    return value


def needed_bus_id(element: Element) -> str:
    """Attribute ``busid`` as the kernel writes it; TopologyError where it is missing or none."""
    text = needed(element, "busid")
    try:
        return bus_id(text)
    except TopologyError as error:
        raise TopologyError(f"line {element.line}: {element.name} busid {error}") from None


def whole_number(element: Element, attribute: str) -> int | None:
    """The whole number at the beginning of an attribute, decimal or 0x…; None where there is none.

    Raises
    ------
    TopologyError
        It has more digits than any number of a machine.

    Examples
    --------
    >>> from topoplan.formats.nccl.xml_tree import parse_xml
    >>> cpu = parse_xml('<cpu numaid="-1" modelid="0x55" arch="x86_64"/>')
    >>> [whole_number(cpu, attribute) for attribute in ("numaid", "modelid", "arch", "vendor")]
    [-1, 85, None, None]
    """
    match = _NUMBER.match(element.attributes.get(attribute, ""))
    if not match:
        return None
    sign, hexadecimal, decimal = match.groups()
    digits = hexadecimal or decimal
    if len(digits) > _LONGEST_NUMBER:
        raise TopologyError(
            f"line {element.line}: {element.name} {attribute} {digits[:_LONGEST_NUMBER]}… is too large"
        )
    return int(sign + digits, 16 if hexadecimal else 10)


def stated_rate(element: Element, attribute: str) -> float | None:
    """GB/s per direction in an attribute that only our exporter writes; None where it is absent.

    Raises
    ------
    TopologyError
        It is no number of GB/s that a link may have.
    """
    text = stated(element, attribute)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SLOWEST <= value <= FASTEST:
        raise TopologyError(
            f"line {element.line}: {element.name} {attribute} {text[:40]!r} must be a number of GB/s from {SLOWEST:g} "
            f"to {FASTEST:g}"
        )
    return value
