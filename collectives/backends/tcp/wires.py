"""The wires file: which address each link leaves from and goes to, so that its connection uses that very wire.

::

    {"format": "topoplan.wires/1",
     "wires": [{"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1", "to": "10.1.0.2"}, ...]}
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoplan.errors import UsageError

FORMAT = "topoplan.wires/1"

Queue = tuple[int, int, str]
"""Source rank, destination rank, channel: a directed link as transfer tables know it."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The two ends of a directed link.

    Parameters
    ----------
    queue : (source rank, destination rank, channel)
    leaves : str
        Address of the source's end of the wire.
    reaches : str
        Address of the destination's end, where it listens.
    """

    queue: Queue
    leaves: str
    reaches: str


def read_wires(path: Path | str) -> dict[Queue, Wire]:
    """The wires of a file.

    Raises
    ------
    UsageError
        The file cannot be read or is no wires file; names the wire and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the wires file {path}: {error}") from error
    return parse_wires(text, str(path))


def parse_wires(text: str, name: str) -> dict[Queue, Wire]:
    """The wires in the text of a file of this name.

    Examples
    --------
    >>> text = json.dumps({"format": FORMAT, "wires": [
    ...     {"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1", "to": "10.1.0.2"}]})
    >>> parse_wires(text, "wires.json")[0, 1, "nvlink"].reaches
    '10.1.0.2'
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{name} is no wires file; its format must be {FORMAT!r}")
    listed = content.get("wires")
    if not isinstance(listed, list):
        raise UsageError(f"{name}: wires is no list; give one entry for each directed link")
    wires: dict[Queue, Wire] = {}
    for number, entry in enumerate(listed):
        wire = _wire(entry, f"{name}: wire {number}")
        if wire.queue in wires:
            raise UsageError(f"{name}: wire {number} repeats the link {wire.queue}; list every link once")
        wires[wire.queue] = wire
    return wires


def _wire(entry: Any, where: str) -> Wire:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no object with source, destination, channel, from and to")
    for key in ("source", "destination"):
        if type(entry.get(key)) is not int or entry[key] < 0:
            raise UsageError(f"{where} has {key} {entry.get(key)!r}; give a rank")
    if entry["source"] == entry["destination"]:
        raise UsageError(f"{where} joins rank {entry['source']} to itself; give two ranks")
    if not isinstance(entry.get("channel"), str):
        raise UsageError(f"{where} has channel {entry.get('channel')!r}; give nvlink, pcie or network")
    for key in ("from", "to"):
        try:
            ipaddress.ip_address(str(entry.get(key)))
        except ValueError:
            raise UsageError(f"{where} has {key} {entry.get(key)!r}; give an IP address") from None
    queue = (entry["source"], entry["destination"], entry["channel"])
    return Wire(queue, entry["from"], entry["to"])
