"""Read topology JSON, format ``topoplan.topology/1``, and networkx graphs, to a Topology.

`Topology.to_json` writes the format without loss. Unknown keys are rejected with the nearest known one, since a
misspelt option must not be ignored. Only ``facts`` of a device may hold any key.

`Topology.to_networkx` documents and writes the attributes of a graph. An edge needs ``channel`` and ``bandwidth``, a
node needs ``kind``; its key may be anything. Edges with a ``position`` come first, in its order. A graph is converted
to the object of topology JSON, whose reader checks it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, cast

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import (
    DEVICE_KINDS,
    FORMAT,
    LINK_CHANNELS,
    Device,
    Link,
    Topology,
    format_value,
)
from topoplan.units import SURROGATES, listed, shortened

if TYPE_CHECKING:
    import networkx


def object_of_graph(graph: object) -> dict[str, object]:
    """Return the JSON object of a machine that is given as a networkx.MultiDiGraph.

    UsageError if it is not a graph, TopologyError for another kind of graph, or a node or position of a wrong type. The
    reader of the object checks the rest.
    """
    from networkx import Graph, MultiDiGraph

    if not isinstance(graph, Graph):
        raise UsageError(
            f"a machine cannot be read from {type(graph).__name__}; give a library name, a path, a text, a "
            "networkx.MultiDiGraph or a topoplan.Topology"
        )
    if not isinstance(graph, MultiDiGraph):
        raise TopologyError(
            f"a machine must be a networkx.MultiDiGraph, not {type(graph).__name__}: its links have a direction, and "
            "may be parallel; topoplan.Topology.from_networkx(graph) reads it"
        )
    for node in graph:
        if not isinstance(node, str):
            raise TopologyError(
                f"node {str(node)[:60]!r} must be a text, as the name of a device; "
                "networkx.relabel_nodes(graph, str) renames them all"
            )
    head = {key: _plain(value) for key, value in graph.graph.items()}
    if isinstance(head.get("notes"), tuple):
        head["notes"] = list(cast("tuple[object, ...]", head["notes"]))
    edges = sorted(graph.edges(data=True), key=lambda edge: _position(edge[:2], edge[2]))
    return {
        **head,
        "format": FORMAT,
        "devices": [{**_attributes(known), "name": name} for name, known in graph.nodes(data=True)],
        "links": [
            {"src": src, "dst": dst, **_attributes(known, without="position")} for src, dst, known in edges
        ],
    }


def completed_graph(
    graph: object, kind: str, channel: str, bandwidth: str | float, name: str
) -> networkx.MultiDiGraph:
    """Return any graph as `object_of_graph` takes it; parameters and errors as `Topology.from_networkx`."""
    from networkx import Graph, MultiDiGraph

    if not isinstance(graph, Graph):
        raise UsageError(
            f"graph must be a networkx graph, got {type(graph).__name__}; build a networkx.DiGraph"
        )
    lacking: dict[str, list[str]] = {}
    made = MultiDiGraph(**{key: value for key, value in graph.graph.items() if key in _TOPOLOGY_KEYS})
    made.graph.update({"name": name} if name else {})
    names: dict[object, str] = {}
    for node in _by_number(graph):
        known = graph.nodes[node]
        stated = _value(known, "kind", kind, DEVICE_KINDS)
        names[node] = node if isinstance(node, str) else f"{stated or 'node'}{node}"
        if stated is None:
            lacking.setdefault("kind", []).append(names[node])
        device = {key: value for key, value in known.items() if key in _DEVICE_KEYS and key != "name"}
        made.add_node(names[node], **{**device, "kind": stated})
    if len(made) < len(graph):
        raise TopologyError("two nodes have one name; networkx.relabel_nodes gives them others")
    for source, target, known in graph.edges(data=True):
        link = {key: value for key, value in known.items() if key in (*_LINK_KEYS, "position")}
        link["channel"] = _value(known, "channel", channel, LINK_CHANNELS)
        link["bandwidth"] = _value(known, "bandwidth", bandwidth, ())
        for key in ("channel", "bandwidth"):
            if link[key] is None:
                lacking.setdefault(key, []).append(f"{names[source]}-{names[target]}")
        made.add_edge(names[source], names[target], **link)
        if not graph.is_directed():
            made.add_edge(names[target], names[source], **link)
    if lacking:
        words = "; ".join(f"no {key} for {listed(places, noun='of them')}" for key, places in lacking.items())
        raise TopologyError(
            f"the graph has {words}. Set these attributes, or give from_networkx the name of another attribute or a "
            'value for all: kind="gpu", channel="nvlink", bandwidth="weight" or 25'
        )
    return made


def _by_number(nodes: Iterable[Hashable]) -> list[Hashable]:
    """Return nodes as they stand, whole numbers among them in ascending order: node 0 is GPU 0, if all are GPUs.

    >>> _by_number([2, "switch", 0, 1])
    [0, 'switch', 1, 2]
    """
    every = list(nodes)
    whole = [place for place, node in enumerate(every) if isinstance(node, Integral)]
    ascending = sorted(every[place] for place in whole)  # type: ignore[type-var]
    for place, node in zip(whole, ascending, strict=True):
        every[place] = node
    return every


def _value(known: Mapping[str, object], key: str, given: str | float, values: Sequence[str]) -> object:
    """Return the value of an attribute: under its own key if ``given`` is a value for all, else under ``given``."""
    if not isinstance(given, str) or given in values:
        return known.get(key, given)
    return known.get(given)


def _position(ends: tuple[str, str], known: Mapping[str, object]) -> float:
    position = _plain(known.get("position", math.inf))
    if isinstance(position, bool) or not isinstance(position, (int, float)) or math.isnan(position):
        raise TopologyError(f"edge {ends[0]}->{ends[1]}: position {str(position)[:60]!r} must be a number")
    return position


def _attributes(known: Mapping[str, object], *, without: str = "") -> dict[str, object]:
    return {key: _plain(value) for key, value in known.items() if key != without}


def _plain(value: object) -> object:
    """Return a number of another library's type, as in tables of edges, as one of Python's."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True, slots=True)
class FieldType:
    """A type of value for a key: its words in messages, and the test."""

    words: str
    holds: Callable[[object], bool]


TEXT = FieldType("a text", lambda value: isinstance(value, str) and not SURROGATES.search(value))
PRINTABLE = FieldType("a text", lambda value: isinstance(value, str) and value.isprintable())
WHOLE = FieldType("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
NUMBER = FieldType("a number", lambda value: WHOLE.holds(value) or isinstance(value, float))
TRUTH = FieldType("true or false", lambda value: isinstance(value, bool))
LIST = FieldType("a list", lambda value: isinstance(value, list))
TEXTS = FieldType("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
OBJECT = FieldType("an object", lambda value: isinstance(value, dict))
FACTS = FieldType("an object of texts", OBJECT.holds)
PEER_ACCESS = FieldType('an object such as {"8": 0.0037}', OBJECT.holds)


def _or_null(of: FieldType) -> FieldType:
    return FieldType(f"{of.words} or null", lambda value: value is None or of.holds(value))


_TOPOLOGY_KEYS = {
    "format": TEXT,
    "name": TEXT,
    "source": TEXT,
    "notes": TEXTS,
    "peer_access": PEER_ACCESS,
    "devices": LIST,
    "links": LIST,
}
_DEVICE_KEYS = {
    "name": TEXT,
    "kind": TEXT,
    "server": TEXT,
    "model": TEXT,
    "busid": TEXT,
    "numa": _or_null(WHOLE),
    "multicast": TRUTH,
    "reduce": TRUTH,
    "facts": FACTS,
    "capable": TEXTS,
    "forwards": TRUTH,
}
_LINK_KEYS = {
    "src": TEXT,
    "dst": TEXT,
    "channel": TEXT,
    "bandwidth": NUMBER,
    "count": WHOLE,
    "latency": _or_null(NUMBER),
    "push": _or_null(NUMBER),
    "pull": _or_null(NUMBER),
    "shared": _or_null(NUMBER),
}


def parse_topology_json(text: str) -> Topology:
    """Read topology JSON; TopologyError if it is malformed, of another version, or has a bad key or value."""
    return topology_from_object(decode_json(text))


class _RefusedError(ValueError):
    """JSON that Python's reader accepts and topoplan does not."""


def decode_json(text: str, what: str = "the topology") -> object:
    """Return the value of JSON text; ``what`` names it in errors.

    TopologyError if it is not JSON, repeats a key in an object, is nested too deep, or has an integer of thousands of
    digits. NaN and Infinity are read, and rejected by the field that holds them.
    """
    if not isinstance(text, str):
        raise TopologyError(f"{what} must be a JSON text, got {shortened(text)}; give the text of a file")
    try:
        value: object = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise TopologyError(f"{what} is not JSON that can be read: it is nested too deep") from None
    except (json.JSONDecodeError, _RefusedError) as error:
        raise TopologyError(f"{what} is not JSON: {error}") from None
    except ValueError:
        # Python reads integers of at most some thousand digits.
        raise TopologyError(f"{what} is not JSON that can be read: an integer has too many digits") from None
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _RefusedError(f"key {format_value(key)} stands twice in an object; write it once")
    return made


def topology_from_object(value: object) -> Topology:
    """Read a topology from decoded JSON; errors as `parse_topology_json`."""
    if not isinstance(value, dict):
        raise TopologyError(f"topology JSON must be an object, not {type(value).__name__}")
    _check_format(value)
    check_keys(value, _TOPOLOGY_KEYS, ("devices", "links"), "the topology")
    return Topology(
        name=value.get("name", "machine"),
        devices=tuple(_device(item, _place(f"device {i}", item)) for i, item in enumerate(value["devices"])),
        links=tuple(_link(item, _place(f"link {i}", item)) for i, item in enumerate(value["links"])),
        notes=tuple(value.get("notes", [])),
        source=value.get("source", ""),
        peer_access=_peer_access(value.get("peer_access", {})),
    )


def _check_format(value: Mapping[object, object]) -> None:
    """Raise TopologyError for an object of another format or version, and name the difference."""
    if "format" not in value:
        misspelt = difflib.get_close_matches("format", [str(key) for key in value], n=1)
        hint = (
            f"did you mean it by {misspelt[0]!r}?"
            if misspelt
            else f'begin it with "format": "{FORMAT}" for a machine of devices and links, or '
            '"format": "topoplan.cluster/1" for a cluster of servers and a network'
        )
        raise TopologyError(f"this JSON has no 'format'; {hint}")
    known = value["format"]
    if isinstance(known, str) and known.startswith("topoplan.plan"):
        raise TopologyError(
            "this is a plan, not a machine; topoplan verify, simulate, export and bench take it"
        )
    if known != FORMAT:
        raise TopologyError(
            f"format {format_value(known)} is not {FORMAT!r}; convert the file or use another version of topoplan"
        )


def _place(where: str, item: object) -> str:
    """Return the place of an item with its names, if it has them."""
    if isinstance(item, dict):
        names = [str(item[key])[:60] for key in ("name", "src", "dst") if key in item]
        where += f" ({'->'.join(names)})" if names else ""
    return where


def _device(item: object, where: str) -> Device:
    stated = check_keys(item, _DEVICE_KEYS, ("name", "kind"), where)
    known = cast("dict[object, object]", stated.get("facts", {}))
    for key, fact in known.items():
        if not TEXT.holds(key) or not TEXT.holds(fact):
            raise TopologyError(
                f"{where}: fact {str(key)[:60]!r} is {format_value(fact)}; facts must be texts"
            )
        if key == "sm" and not re.fullmatch("[0-9]{1,4}", cast("str", fact)):
            raise TopologyError(
                f"{where}: fact 'sm' is {format_value(fact)}; it must be a compute capability without the dot, such "
                "as 90"
            )
    facts = tuple(sorted(cast("dict[str, str]", known).items()))
    return Device(**stated | {"facts": facts})  # type: ignore[arg-type]


def _link(item: object, where: str) -> Link:
    stated = check_keys(item, _LINK_KEYS, ("src", "dst", "channel", "bandwidth"), where)
    access = {key: stated[key] for key in ("push", "pull") if key in stated}
    if len(access) == 1:
        raise TopologyError(
            f"{where}: push and pull must both be stated, got {next(iter(access))} alone; add the other, null if such "
            "copies never end, or leave both out"
        )
    if access and set(access.values()) == {None}:
        raise TopologyError(
            f"{where}: push and pull must not both be null, since no copy would end; leave the link out"
        )
    link = Link(**stated)  # type: ignore[arg-type]
    better = max(cast("float", rate or 0) for rate in access.values()) if access else 0
    if better > cast("float", stated["bandwidth"]):
        raise TopologyError(
            f"{where}: bandwidth must be at least {better:g}, the better of push and pull, got {link.bandwidth:g}; "
            "correct one of them"
        )
    if link.shared is not None and cast("float", stated["bandwidth"]) > link.shared:
        raise TopologyError(
            f"{where}: shared must be at least the bandwidth of one direction, {stated['bandwidth']:g} GB/s, got "
            f"{link.shared:g}; correct one of them"
        )
    return link


def _peer_access(item: Mapping[object, object]) -> tuple[tuple[int, float], ...]:
    """Return seconds by number of GPUs, from an object whose keys are texts."""
    stated: list[tuple[int, float]] = []
    for count, seconds in item.items():
        if not re.fullmatch(r"[1-9][0-9]{0,6}", str(count)):
            raise TopologyError(
                f"topology peer_access: {str(count)[:60]!r} must be a number of GPUs such as '8'"
            )
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TopologyError(f"topology peer_access: {format_value(seconds)} must be a number of seconds")
        stated.append((int(str(count)), seconds))
    return tuple(sorted(stated))


def check_keys(
    item: object, known: Mapping[str, FieldType], required: tuple[str, ...], where: str
) -> dict[str, object]:
    """Return an object of a machine's or cluster's JSON after checking its keys and their types.

    ``known`` has all allowed keys; ``where`` is the object's place, for errors. TopologyError names a key that is
    missing, unknown or of a wrong type, its place and the nearest known one.
    """
    if not isinstance(item, dict):
        raise TopologyError(f"{where} must be an object, not {format_value(item)}")
    unknown = [] if item.keys() <= known.keys() else [key for key in item if key not in known]
    for key in required:
        if key not in item:
            near = difflib.get_close_matches(key, [str(other) for other in unknown], n=1)
            hint = f"did you mean it by {near[0]!r}?" if near else "add it"
            raise TopologyError(f"{where} has no {key!r}; {hint}")
    for key in unknown:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join(known)}"
        raise TopologyError(f"{where}: key {format_value(key)} is unknown; {hint}")
    for key, value in item.items():
        if not known[key].holds(value):
            raise TopologyError(f"{where}: {key} must be {known[key].words}, not {format_value(value)}")
    return cast("dict[str, object]", item)
