"""A networkx graph to the object of topology JSON, whose reader says what is wrong with it.

The attributes are those that `Topology.to_networkx` documents and writes. Of an edge only ``channel`` and ``bandwidth``
must be there, of a node ``kind``; its key may be anything. Edges with a ``position`` come first, in its order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import cast

from topoplan.errors import TopologyError, UsageError
from topoplan.topology import FORMAT


def object_of_graph(graph: object) -> dict[str, object]:
    """The JSON object of a machine that is given as a graph.

    Parameters
    ----------
    graph : networkx.MultiDiGraph

    Raises
    ------
    UsageError
        It is nothing that a machine can be read from.
    TopologyError
        A graph of another kind, or a node or position of a wrong type. All else is left to the reader of the object.

    Examples
    --------
    >>> import networkx, topoplan
    >>> graph = networkx.MultiDiGraph(name="pair")
    >>> graph.add_nodes_from(["gpu0", "gpu1"], kind="gpu")
    >>> for ends in (("gpu0", "gpu1"), ("gpu1", "gpu0")):
    ...     key = graph.add_edge(*ends, channel="nvlink", bandwidth=50.0, count=2)
    >>> topoplan.plan(graph).rate
    50.0
    """
    from networkx import Graph, MultiDiGraph

    if not isinstance(graph, Graph):
        raise UsageError(
            f"a machine cannot be read from {type(graph).__name__}; give a library name, a path, a text, a "
            "networkx.MultiDiGraph or a topoplan.Topology"
        )
    if not isinstance(graph, MultiDiGraph):
        raise TopologyError(
            f"a machine is a networkx.MultiDiGraph, not {type(graph).__name__}: its links have a direction, and there "
            "may be several; networkx.MultiDiGraph(graph) converts it"
        )
    for node in graph:
        if not isinstance(node, str):
            raise TopologyError(
                f"node {str(node)[:60]!r} is no text, and the name of a device must be one; "
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


def _position(ends: tuple[str, str], known: Mapping[str, object]) -> float:
    position = _plain(known.get("position", math.inf))
    if isinstance(position, bool) or not isinstance(position, (int, float)) or math.isnan(position):
        raise TopologyError(f"edge {ends[0]}->{ends[1]}: position {str(position)[:60]!r} must be a number")
    return position


def _attributes(known: Mapping[str, object], *, without: str = "") -> dict[str, object]:
    return {key: _plain(value) for key, value in known.items() if key != without}


def _plain(value: object) -> object:
    """A number of another library's kind, such as tables of edges bring, as one of Python's."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
