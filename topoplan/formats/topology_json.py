"""Topology JSON, format ``topoplan.topology/1``: text to Topology and back, nothing lost.

Optional keys that have their default value are left out when writing. Keys that this version does not know are
ignored, unless a required one is missing and they look like a misspelling of it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import TypeGuard, cast

from topoplan.errors import TopologyError
from topoplan.topology import Device, Link, Topology

FORMAT = "topoplan.topology/1"

_DEVICE_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "kind": (str,),
    "server": (str,),
    "model": (str,),
    "busid": (str,),
    "numa": (int, type(None)),
    "multicast": (bool,),
    "reduce": (bool,),
    "facts": (dict,),
}
_LINK_KEYS: dict[str, tuple[type, ...]] = {
    "src": (str,),
    "dst": (str,),
    "channel": (str,),
    "bandwidth": (int, float),
    "count": (int,),
    "latency": (int, float, type(None)),
}

_TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    dict: "an object of texts",
}
_DEVICE_DEFAULTS: dict[str, object] = {
    "server": "",
    "model": "",
    "busid": "",
    "numa": None,
    "multicast": False,
    "reduce": False,
    "facts": {},
}
_LINK_DEFAULTS: dict[str, object] = {"count": 1, "latency": None}

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""What JSON escapes can make and no file can hold."""


def parse_topology_json(text: str) -> Topology:
    """Read topology JSON.

    Raises
    ------
    TopologyError
        The text is no JSON, of another format or version, or a field is missing, of a wrong type or out of range.

    Examples
    --------
    >>> parse_topology_json('{"format": "topoplan.topology/2"}')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    topoplan.errors.TopologyError: format 'topoplan.topology/2' is not 'topoplan.topology/1'; ...
    """
    return topology_from_object(decode_json(text))


def decode_json(text: str) -> object:
    """The value that JSON text stands for; TopologyError if it is none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"the topology is no JSON: {error}") from None
    return value


def topology_from_object(value: object) -> Topology:
    """Read a topology from decoded JSON; errors as `parse_topology_json`."""
    if not isinstance(value, dict):
        raise TopologyError(f"topology JSON must be an object, not {type(value).__name__}")
    known = value.get("format")
    if isinstance(known, str) and known.startswith("topoplan.plan"):
        raise TopologyError(
            "this is a plan, not a machine; topoplan verify, simulate, export and bench take it"
        )
    if known != FORMAT:
        raise TopologyError(
            f"format {known!r} is not {FORMAT!r}; convert the file or use another version of topoplan"
        )
    name, source = value.get("name", "machine"), value.get("source", "")
    if not _is_text(name) or not _is_text(source):
        raise TopologyError("topology name and source must be texts")
    notes = value.get("notes", [])
    if not isinstance(notes, list) or not all(_is_text(note) for note in notes):
        raise TopologyError("topology notes must be a list of texts")
    return Topology(
        name=name,
        devices=tuple(
            _device(_fields(item, _DEVICE_KEYS, ("name", "kind"), f"device {i}"), f"device {i}")
            for i, item in enumerate(_items(value, "devices"))
        ),
        links=tuple(
            Link(**_fields(item, _LINK_KEYS, ("src", "dst", "channel", "bandwidth"), f"link {i}"))  # type: ignore[arg-type]
            for i, item in enumerate(_items(value, "links"))
        ),
        notes=tuple(notes),
        source=source,
        peer_access=_peer_access(value.get("peer_access", {})),
    )


def _device(fields: dict[str, object], where: str) -> Device:
    known = cast("dict[object, object]", fields.get("facts", {}))
    for key, fact in known.items():
        if not _is_text(key) or not _is_text(fact):
            raise TopologyError(f"{where}: fact {str(key)[:60]!r} is {repr(fact)[:60]}; facts must be texts")
    facts = tuple(sorted(cast("dict[str, str]", known).items()))
    return Device(**fields | {"facts": facts})  # type: ignore[arg-type]


def _peer_access(item: object) -> tuple[tuple[int, float], ...]:
    """Seconds by number of GPUs: an object, since JSON has no other keys than texts."""
    if not isinstance(item, dict):
        raise TopologyError(
            f'topology peer_access must be an object such as {{"8": 0.0037}}, not {type(item).__name__}'
        )
    for count, seconds in item.items():
        if not re.fullmatch(r"[1-9][0-9]{0,6}", str(count)):
            raise TopologyError(f"topology peer_access: {str(count)[:60]!r} is no number of GPUs such as '8'")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TopologyError(f"topology peer_access: {repr(seconds)[:60]} must be a number of seconds")
    return tuple(sorted((int(count), seconds) for count, seconds in item.items()))


def _items(value: Mapping[str, object], key: str) -> list[object]:
    items = value.get(key)
    if not isinstance(items, list):
        raise TopologyError(f"topology key {key!r} must be a list, not {type(items).__name__}")
    return cast("list[object]", items)


def _fields(
    item: object, known: Mapping[str, tuple[type, ...]], required: tuple[str, ...], where: str
) -> dict[str, object]:
    if not isinstance(item, dict):
        raise TopologyError(f"{where} must be an object, not {type(item).__name__}")
    for key in required:
        if key not in item:
            near = difflib.get_close_matches(key, [str(k) for k in item if k not in known], n=1)
            hint = f"; did you mean it by {near[0]!r}?" if near else ""
            raise TopologyError(f"{where} has no {key!r}{hint}")
    fields = {key: item[key] for key in known if key in item}
    for key, field in fields.items():
        typed = isinstance(field, known[key]) and (bool in known[key] or not isinstance(field, bool))
        if not typed or (isinstance(field, str) and not _is_text(field)):
            wanted = " or ".join(_TYPE_NAMES[one] for one in known[key])
            raise TopologyError(f"{where}: {key} {repr(field)[:60]} must be {wanted}")
    return fields


def _is_text(value: object) -> TypeGuard[str]:
    """True for a text that can be written: JSON escapes can make half characters that cannot."""
    return isinstance(value, str) and not _HALF_CHARACTER.search(value)


def topology_to_object(topology: Topology) -> dict[str, object]:
    """The JSON object of a topology, keys in the format's order, defaults left out."""
    head: dict[str, object] = {"format": FORMAT, "name": topology.name}
    if topology.source:
        head["source"] = topology.source
    if topology.notes:
        head["notes"] = list(topology.notes)
    if topology.peer_access:
        head["peer_access"] = {str(gpus): seconds for gpus, seconds in topology.peer_access}
    head["devices"] = [_device_to_object(device) for device in topology.devices]
    head["links"] = [
        {key: field for key in _LINK_KEYS if (field := getattr(link, key)) != _LINK_DEFAULTS.get(key, ...)}
        for link in topology.links
    ]
    return head


def _device_to_object(device: Device) -> dict[str, object]:
    fields = {key: getattr(device, key) for key in _DEVICE_KEYS} | {"facts": dict(device.facts)}
    return {key: field for key, field in fields.items() if field != _DEVICE_DEFAULTS.get(key, ...)}


def dump_topology_json(topology: Topology) -> str:
    """Topology JSON with one device or link to a line."""
    value = topology_to_object(topology)
    parts = []
    for key, field in value.items():
        if key in ("devices", "links"):
            rows = ",\n".join(
                "  " + json.dumps(item, ensure_ascii=False) for item in cast("list[object]", field)
            )
            parts.append(f'"{key}": [\n{rows}\n]' if rows else f'"{key}": []')
        else:
            parts.append(f'"{key}": {json.dumps(field, ensure_ascii=False)}')
    return "{" + ",\n ".join(parts) + "}\n"
