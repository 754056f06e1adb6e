"""Exact isomorphism of vertex sets of one labelled graph: a fingerprint by colour refinement, then a search.

Colour refinement (Weisfeiler and Leman 1968) gives isomorphic sets the same fingerprint and leaves few candidates
for each vertex. Equal fingerprints prove nothing: GPUs 0, 1, 3, 4, 5, 6 and 1, 2, 3, 4, 6, 7 of a DGX-1V share
one, and their allreduce optima are 60 and 50 GB/s. So a backtracking search then finds an isomorphism or shows that
there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.compare.labelled_graph import LabelledGraph

Signature = tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Coloured:
    """A vertex set with its refined colours.

    Parameters
    ----------
    vertices : tuple of int
    colours : tuple of int
        Colour of each vertex; comparable between sets of equal fingerprint.
    fingerprint : tuple
        The sorted signatures of every round: equal for isomorphic sets.
    """

    vertices: tuple[int, ...]
    colours: tuple[int, ...]
    fingerprint: tuple[tuple[int | Signature, ...], ...]


def refine(graph: LabelledGraph, vertices: Sequence[int]) -> Coloured:
    """Colour the vertices until the colours no longer tell more of them apart.

    A vertex is coloured anew by its colour and the labels and colours of its links out and in. Colours are ranks of
    sorted signatures, so they do not depend on the numbering of the vertices.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.compare.labelled_graph import labelled_graph
    >>> graph = labelled_graph(topoplan.load("dgx-1v"), ("nvlink",))
    >>> refine(graph, [4, 5, 7]).colours
    (1, 0, 1)
    """
    kept = set(vertices)
    out = {v: [(label, w) for w, label in graph.out[v].items() if w in kept] for v in vertices}
    into = {v: [(label, w) for w, label in graph.into[v].items() if w in kept] for v in vertices}
    colour = {v: graph.labels[v] for v in vertices}
    rounds: list[tuple[int | Signature, ...]] = [tuple(sorted(colour.values()))]
    known = len(set(colour.values()))
    while True:
        signature: dict[int, Signature] = {
            v: (
                colour[v],
                tuple(sorted((label, colour[w]) for label, w in out[v])),
                tuple(sorted((label, colour[w]) for label, w in into[v])),
            )
            for v in vertices
        }
        rounds.append(tuple(sorted(signature.values())))
        ranked = {seen: rank for rank, seen in enumerate(sorted(set(signature.values())))}
        colour = {v: ranked[signature[v]] for v in vertices}
        if len(ranked) == known:
            return Coloured(tuple(vertices), tuple(colour[v] for v in vertices), tuple(rounds))
        known = len(ranked)


def find_isomorphism(graph: LabelledGraph, first: Coloured, second: Coloured) -> dict[int, int] | None:
    """A map from the first vertex set onto the second that keeps all labels; None where there is none.

    Exponential at worst; the fabrics of machines are so small, or so symmetric, that it hardly ever turns back.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.compare.labelled_graph import labelled_graph
    >>> graph = labelled_graph(topoplan.load("dgx-1v"), ("nvlink",))
    >>> find_isomorphism(graph, refine(graph, [0, 1, 2]), refine(graph, [4, 5, 7]))
    {0: 5, 1: 4, 2: 7}
    """
    if first.fingerprint != second.fingerprint:
        return None
    candidates: dict[int, list[int]] = {}
    for w, colour in zip(second.vertices, second.colours, strict=True):
        candidates.setdefault(colour, []).append(w)
    choices = {v: candidates[c] for v, c in zip(first.vertices, first.colours, strict=True)}
    order = _search_order(graph, first)
    image: dict[int, int] = {}
    used: set[int] = set()
    trials = [iter(choices[order[0]])]
    while trials:
        v = order[len(trials) - 1]
        used.discard(image.pop(v, -1))
        for w in trials[-1]:
            if w not in used and _keeps_labels(graph, v, w, image):
                image[v] = w
                used.add(w)
                if len(image) == len(order):
                    return image
                trials.append(iter(choices[order[len(trials)]]))
                break
        else:
            trials.pop()
    return None


def _search_order(graph: LabelledGraph, coloured: Coloured) -> list[int]:
    """Vertices with the fewest candidates first, but neighbours of placed ones before all others."""
    size = Counter(coloured.colours)
    choices = {v: size[colour] for v, colour in zip(coloured.vertices, coloured.colours, strict=True)}
    order: list[int] = []
    near: set[int] = set()
    while choices:
        v = min(choices, key=lambda u: (u not in near, choices[u], u))
        del choices[v]
        order.append(v)
        near.update(graph.out[v])
    return order


def _keeps_labels(graph: LabelledGraph, v: int, w: int, image: Mapping[int, int]) -> bool:
    out_v, out_w, into_v, into_w = graph.out[v], graph.out[w], graph.into[v], graph.into[w]
    return all(out_v.get(u) == out_w.get(x) and into_v.get(u) == into_w.get(x) for u, x in image.items())
