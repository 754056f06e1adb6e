"""The plan file, format ``topoplan.plan/1``: Plan to text and back.

Writing is deterministic: fixed key order, exact shares, no time and no random part, so the same plan is the
same file byte for byte. ``seconds`` (the time it took to plan) is null in files for that reason; ``topoplan plan
--json`` prints it. Reading believes nothing but the types; `topoplan.verify` checks the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

from topoplan.errors import PlanError, TopologyError
from topoplan.fabric.fabric import CHANNEL_LINKS, Fabric
from topoplan.formats.topology_json import topology_from_object
from topoplan.plans.certificate import (
    BetweenServers,
    Certificate,
    Channels,
    Cut,
    Entries,
    InsideServer,
    Lengths,
    OneFabric,
    Partition,
    Trivial,
)
from topoplan.plans.plan import Edge, Plan, Shard, Stage
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.topology import Topology
from topoplan.units import nearest_float

FORMAT = "topoplan.plan/1"

_RATIONAL = re.compile(r"[+-]?[0-9]{1,1000}(?:/[0-9]{1,1000})?")
"""No exponents: ``1e999999999`` is short to write and too long to compute with."""

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""What JSON escapes can make and no file can hold."""


def dump_plan(plan: Plan) -> str:
    """The text of a plan file; shards stand one to a line."""
    return plan_text(plan_to_object(plan)) + "\n"


def plan_text(value: dict[str, object]) -> str:
    """The text of a plan's JSON object, whole or with keys left out, without a newline at the end."""
    value = dict(value)
    shards = value.pop("shards")
    head = ",\n ".join(f'"{key}": {compact(field)}' for key, field in value.items())
    rows = ",\n  ".join(compact(shard) for shard in cast("list[object]", shards))
    return "{" + head + ',\n "shards": [\n  ' + rows + "\n ]}"


def compact(value: object) -> str:
    """JSON on one line, any character as it is."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def plan_to_object(plan: Plan) -> dict[str, object]:
    """The plan file as a JSON object."""
    shards = tuple(shard for shard, _ in plan.shard_counts)
    symmetry = {"symmetry": _moves(plan.shards)} if isinstance(plan.shards, ImageShards) else {}
    return {
        "format": FORMAT,
        "collective": plan.collective,
        "ranks": list(plan.ranks),
        "root": plan.root,
        "topology": plan.topology.to_object(),
        "channels": list(plan.channels),
        "rate": finite(plan.rate),
        "bound": finite(plan.bound),
        "certificate": certificate_to_object(plan.certificate),
        "schedule": plan.schedule,
        "method": plan.method,
        **({} if plan.order == "height" else {"order": plan.order}),
        "seconds": None,
        "trees": plan.trees,
        "height": plan.height,
        "notes": list(plan.notes),
        **symmetry,
        "shards": [
            {
                "share": str(shard.share),
                "stages": [
                    {
                        "op": stage.op,
                        "root": stage.root,
                        **({} if stage.entries is None else {"entries": str(stage.entries)}),
                        "edges": [[e.parent, e.child, list(e.route), e.channel] for e in stage.edges],
                    }
                    for stage in shard.stages
                ],
            }
            for shard in shards
        ],
    }


def _moves(shards: ImageShards) -> list[dict[str, str]]:
    """Every symmetry as the devices that it moves, with their images."""
    return [
        {shards.nodes[place]: shards.nodes[image] for place, image in enumerate(generator) if place != image}
        for generator in shards.generators
    ]


def finite(value: float) -> float | None:
    """The number for JSON, which has no infinity: None stands for the rate of a plan that moves nothing."""
    return value if math.isfinite(value) else None


def certificate_to_object(certificate: Certificate) -> dict[str, object]:
    """The JSON object of a certificate."""
    if isinstance(certificate, Cut):
        return {"kind": "cut", "side": list(certificate.side)}
    if isinstance(certificate, Partition):
        return {"kind": "partition", "parts": [list(part) for part in certificate.parts]}
    if isinstance(certificate, Lengths):
        return {"kind": "lengths", "lengths": [[s, d, str(y)] for s, d, y in certificate.lengths]}
    if isinstance(certificate, Channels):
        parts = [
            {"channel": channel, "certificate": certificate_to_object(part)}
            for channel, part in certificate.parts
        ]
        return {"kind": "channels", "parts": parts}
    if isinstance(certificate, Entries):
        inner = certificate_to_object(certificate.certificate)
        return {"kind": "entries", "entries": str(certificate.entries), "certificate": inner}
    if isinstance(certificate, InsideServer):
        inner = certificate_to_object(certificate.certificate)
        return {"kind": "inside server", "server": certificate.server, "certificate": inner}
    if isinstance(certificate, BetweenServers):
        return {
            "kind": "between servers",
            "entries": str(certificate.entries),
            "side": list(certificate.side),
        }
    return {"kind": "trivial"}


def parse_plan(text: str) -> Plan:
    """Read a plan file.

    Raises
    ------
    PlanError
        No JSON, another format or version, or a key is missing or of a wrong type.
    """
    return read_plan(parse_object(text))


def read_plan(value: dict[str, object]) -> Plan:
    """The plan in the object of a plan file; errors as `parse_plan`."""
    check_format(value, FORMAT)
    return plan_from_object(value, embedded_topology(value))


def parse_object(text: str) -> dict[str, object]:
    """The JSON object of a plan file of any format; errors as `parse_plan`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the plan is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise PlanError(f"a plan file must be a JSON object, not {type(value).__name__}")
    return value


def check_format(value: dict[str, object], expected: str) -> None:
    """Refuse an object of another format or version; errors as `parse_plan`."""
    if value.get("format") != expected:
        raise PlanError(
            f"format {value.get('format')!r} is not {expected!r}; make the plan again with topoplan plan"
        )


def embedded_topology(value: dict[str, object]) -> Topology:
    """The machine in a plan file; errors as `parse_plan`."""
    try:
        return topology_from_object(value.get("topology"))
    except TopologyError as error:
        raise PlanError(f"the embedded topology is wrong: {error}") from None


def plan_from_object(value: dict[str, object], topology: Topology) -> Plan:
    """A plan from the other keys of its JSON object; errors as `parse_plan`."""
    root = value.get("root")
    channels = _channels(value.get("channels"))
    shards: Sequence[Shard] = tuple(
        _shard(item, i) for i, item in enumerate(_list(value.get("shards"), "shards"))
    )
    if "symmetry" in value:
        shards = _images(value["symmetry"], shards, Fabric(topology, channels))
    return Plan(
        collective=_text(value.get("collective"), "collective"),
        ranks=tuple(_text(name, "ranks") for name in _list(value.get("ranks"), "ranks")),
        root=None if root is None else _whole(root, "root"),
        topology=topology,
        channels=channels,
        schedule=_text(value.get("schedule", "trees"), "schedule"),
        method=_text(value.get("method"), "method"),
        shards=shards,
        rate=_rate(value.get("rate"), "rate"),
        bound=_rate(value.get("bound"), "bound"),
        certificate=_certificate(value.get("certificate")),
        seconds=None if value.get("seconds") is None else _rate(value.get("seconds"), "seconds"),
        notes=tuple(_text(note, "notes") for note in _list(value.get("notes", []), "notes")),
        order=_order(value.get("order", "height")),
    )


def _order(item: object) -> str:
    if item not in ("height", "trees"):
        raise PlanError(f"order must be height or trees, not {item!r}"[:200])
    return str(item)


def _images(item: object, templates: Sequence[Shard], fabric: Fabric) -> ImageShards:
    """All images of the templates under the symmetries of a compact plan."""
    position = {name: number for number, name in enumerate(fabric.nodes)}
    generators = []
    for number, moves in enumerate(_list(item, "symmetry")):
        image = list(range(len(fabric.nodes)))
        for name, there in _dict(moves, f"symmetry {number}").items():
            if name not in position or _text(there, f"symmetry {number}") not in position:
                raise PlanError(
                    f"symmetry {number} moves {name!r} to {there!r}; both must be devices of the plan"[:200]
                )
            image[position[name]] = position[str(there)]
        generators.append(tuple(image))
    return ImageShards(fabric.nodes, fabric.size, tuple(generators), tuple(templates))


def _shard(item: object, number: int) -> Shard:
    value = _dict(item, f"shard {number}")
    return Shard(
        _fraction(value.get("share"), f"shard {number}: share"),
        tuple(
            _stage(stage, number, position)
            for position, stage in enumerate(_list(value.get("stages"), f"shard {number}: stages"))
        ),
    )


def _stage(item: object, number: int, position: int) -> Stage:
    where = f"shard {number}, stage {position}"
    value = _dict(item, where)
    edges = []
    for edge in _list(value.get("edges"), f"{where}: edges"):
        if not isinstance(edge, list) or len(edge) != 4:
            raise PlanError(f"{where}: an edge must be [parent, child, route, channel], not {edge!r}"[:200])
        edges.append(
            Edge(
                _whole(edge[0], f"{where}: parent"),
                _whole(edge[1], f"{where}: child"),
                tuple(_text(name, f"{where}: route") for name in _list(edge[2], f"{where}: route")),
                _text(edge[3], f"{where}: channel"),
            )
        )
    return Stage(
        _text(value.get("op"), f"{where}: op"),
        _whole(value.get("root"), f"{where}: root"),
        tuple(edges),
        _fraction(value["entries"], f"{where}: entries") if "entries" in value else None,
    )


def _certificate(item: object) -> Certificate:
    value = _dict(item, "certificate")
    kind = value.get("kind")
    if kind == "cut":
        return Cut(_names(value.get("side"), "certificate: side"))
    if kind == "partition":
        parts = _list(value.get("parts"), "certificate: parts")
        return Partition(tuple(_names(part, "certificate: parts") for part in parts))
    if kind == "lengths":
        rows = []
        for row in _list(value.get("lengths"), "certificate: lengths"):
            if not isinstance(row, list) or len(row) != 3:
                raise PlanError(f"certificate: a length must be [src, dst, length], not {row!r}"[:200])
            where = "certificate: lengths"
            rows.append((_text(row[0], where), _text(row[1], where), _fraction(row[2], where)))
        return Lengths(tuple(rows))
    if kind == "trivial":
        return Trivial()
    if kind == "channels":
        return Channels(
            tuple(_certified_channel(part) for part in _list(value.get("parts"), "certificate: parts"))
        )
    if kind == "entries":
        return Entries(_entries(value), _one_fabric(value, "entries"))
    if kind == "inside server":
        return InsideServer(_text(value.get("server"), "certificate: server"), _one_fabric(value, "a server"))
    if kind == "between servers":
        return BetweenServers(_entries(value), _names(value.get("side"), "certificate: side"))
    raise PlanError(
        f"certificate kind {repr(kind)[:60]} is unknown; use cut, partition, lengths, trivial, channels, entries, "
        "inside server or between servers"
    )


def _certified_channel(item: object) -> tuple[str, OneFabric]:
    value = _dict(item, "certificate: part")
    return _text(value.get("channel"), "certificate: channel"), _one_fabric(value, "a channel")


def _one_fabric(value: dict[str, object], of: str) -> OneFabric:
    """The certificate inside one that is made of others."""
    inner = _dict(value.get("certificate"), f"certificate: certificate of {of}")
    part = _certificate(inner) if inner.get("kind") in ("cut", "partition", "lengths", "trivial") else None
    if inner.get("kind") == "channels" and of == "a channel":
        raise PlanError("certificate: a channel's certificate cannot itself be one of channels")
    if not isinstance(part, OneFabric):
        raise PlanError(f"certificate: that of {of} must be a cut, a partition, lengths or trivial")
    return part


def _entries(value: dict[str, object]) -> Fraction:
    entries = _fraction(value.get("entries"), "certificate: entries")
    if entries <= 0:
        raise PlanError(f"certificate: entries of {entries} must be above zero")
    return entries


def _channels(item: object) -> tuple[str, ...]:
    channels = _names(item, "channels")
    for channel in channels:
        if channel not in CHANNEL_LINKS:
            raise PlanError(f"channel {channel!r} is unknown; use one of {', '.join(CHANNEL_LINKS)}")
    return channels


def _names(item: object, where: str) -> tuple[str, ...]:
    return tuple(_text(name, where) for name in _list(item, where))


def _dict(item: object, where: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be an object, not {type(item).__name__}")
    return cast("dict[str, object]", item)


def _list(item: object, where: str) -> list[object]:
    if not isinstance(item, list):
        raise PlanError(f"{where} must be a list, not {type(item).__name__}")
    return cast("list[object]", item)


def _text(item: object, where: str) -> str:
    if not isinstance(item, str) or _HALF_CHARACTER.search(item):
        raise PlanError(f"{where} must be a text, not {item!r}"[:200])
    return item


def _whole(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise PlanError(f"{where} must be a whole number, not {item!r}"[:200])
    return item


def _rate(item: object, where: str) -> float:
    if item is None:
        return math.inf
    if isinstance(item, bool) or not isinstance(item, (int, float)) or not item >= 0:
        raise PlanError(f"{where} must be a number of zero or more, not {item!r}"[:200])
    return nearest_float(Fraction(item)) if isinstance(item, int) else item


def _fraction(item: object, where: str) -> Fraction:
    if isinstance(item, str) and _RATIONAL.fullmatch(item):
        try:
            return Fraction(item)
        except ZeroDivisionError:
            pass
    raise PlanError(f'{where} must be a rational number in quotes such as "1/6", not {item!r}'[:200])
