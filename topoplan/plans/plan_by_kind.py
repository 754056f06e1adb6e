"""The plan of a cluster by kind: templates of trees on a sample of the servers, and the rule of their images.

The file, format ``topoplan.plan/2`` with ``cluster`` in place of ``topology``, grows with the kinds of servers, not
with their number. `PlanByKind.listed` returns the same plan with all devices and trees, where they fit into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import cast

from topoplan.errors import PlanError, TopologyError, UsageError
from topoplan.machine.cluster_by_kind import MOST_SERVERS, ClusterByKind, ClusterSample
from topoplan.machine.cluster_network import ClusterNetwork
from topoplan.machine.fabric import CHANNEL_LINKS, Fabric
from topoplan.machine.nic_wiring import NicPort, WiredServer
from topoplan.machine.topology import Topology
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Lengths
from topoplan.plans.certificates.kind_lengths import forest_at_least
from topoplan.plans.file_values import (
    check_format,
    check_known,
    compact,
    finite,
    read_fraction,
    read_list,
    read_number,
    read_object,
    read_text,
    read_texts,
    read_whole,
)
from topoplan.plans.kind_templates import (
    SAMPLE,
    KindTemplate,
    TemplateImages,
    all_images,
    class_crossings,
    image_count,
)
from topoplan.plans.plan import PLAN_FORMAT_2, Plan, collective_name
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.units import bus_factor, counted, exact, labelled, nearest_float, rate_words

BY_KIND = "by-kind"
"""Method of plans of clusters by kind."""

MOST_LISTED_EDGES = 4_000_000
"""Tree edges up to which a plan by kind is listed: some gigabytes."""

MOST_LISTED_GPUS = 16_384
"""GPUs up to which a plan by kind is listed."""

NOT_BY_KIND = "devices that add, copy or forward data of other servers are planned in a list only"
"""Why a cluster is not planned by kind: distances in a sample prove bounds if routes pass network switches alone."""

ClassLength = tuple[str, str, Fraction]
"""Source and destination of a link of the sample, and the length of all links of its class."""


@dataclass(frozen=True)
class PlanByKind:
    """A plan of a cluster by kind.

    ``root`` is a GPU number of the cluster, whose server is a kind of its own. ``templates`` and ``lengths`` name the
    sample's devices. ``rate`` and ``bound`` are in GB/s of algorithm bandwidth.
    """

    collective: str
    cluster: ClusterByKind
    root: int | None
    channels: tuple[str, ...]
    templates: tuple[KindTemplate, ...]
    lengths: tuple[ClassLength, ...]
    rate: float
    bound: float
    notes: tuple[str, ...] = ()
    planning_seconds: float | None = None

    @classmethod
    def build(
        cls,
        cluster: ClusterByKind,
        collective: str,
        *,
        root: int | None,
        channels: tuple[str, ...],
        templates: tuple[KindTemplate, ...],
        lengths: tuple[ClassLength, ...],
    ) -> PlanByKind:
        """Return a plan with its rate recomputed from the templates, and its bound from the lengths."""
        bare = cls(collective, cluster, root, channels, templates, lengths, 0.0, 0.0)
        rate, bound = bare.exact_rate(), bare.exact_bound()
        made = replace(bare, rate=nearest_float(rate), bound=nearest_float(bound), notes=cluster.notes)
        # Caches of what does not depend on the rate.
        made.__dict__.update(
            {key: bare.__dict__[key] for key in ("sample", "fabric") if key in bare.__dict__}
        )
        return made

    def timed(self, seconds: float) -> PlanByKind:
        """Return the same plan with its planning time."""
        return replace(self, planning_seconds=seconds)

    @cached_property
    def sample(self) -> ClusterSample:
        """The servers on which the templates stand."""
        return self.cluster.sample(SAMPLE)

    @cached_property
    def fabric(self) -> Fabric:
        """The links of the sample that the plan may use."""
        return Fabric(self.sample.topology.settled(), self.channels)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cluster.size

    @property
    def unsupported(self) -> bool:
        """Whether the cluster's devices rule out a plan by kind, see `NOT_BY_KIND`."""
        return unsupported(self.fabric)

    @property
    def sample_root(self) -> int | None:
        """The root as a rank of the sample."""
        if self.root is None:
            return None
        server, gpu = self.cluster.server_of(self.root)
        names = [name for name in self.fabric.ranks if name.startswith(f"s{server}.")]
        if len(names) <= gpu:
            raise PlanError(f"root {self.root} is on s{server}, which is not a kind of its own")
        return self.fabric.ranks.index(names[gpu])

    @property
    def gap(self) -> float:
        """Distance of the rate from the bound, as a fraction of the bound; 0 means proved optimal."""
        return max(0.0, 1 - self.rate / self.bound)

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s, as nccl-tests prints it."""
        return self.rate * bus_factor(self.collective, self.size)

    @property
    def num_trees(self) -> int:
        """Number of trees: the images of all templates."""
        return sum(image_count(self.sample, template) for template in self.templates)

    @property
    def height(self) -> int:
        """Edges on the longest root-to-leaf path of any tree."""
        return max(stage.height for template in self.templates for stage in template.stages)

    def link_loads(self) -> list[Fraction]:
        """Return the bytes that cross each link of the sample, in the whole cluster, for each byte of the buffer."""
        classes, counts = self.sample.link_classes(self.fabric.links)
        totals = [Fraction(0)] * len(counts)
        for template in self.templates:
            crossings = class_crossings(self.sample, self.fabric, classes, len(counts), template)
            for row, times in enumerate(crossings):
                if times:
                    totals[row] += template.share * times
        loads = [total / count for total, count in zip(totals, counts, strict=True)]
        return [loads[row] for row in classes]

    def exact_rate(self) -> Fraction:
        """Return the rate in GB/s at which the first class of links is full."""
        loads = zip(self.fabric.capacity, self.link_loads(), strict=True)
        return min(capacity / load for capacity, load in loads if load)

    def exact_bound(self) -> Fraction:
        """Return the bound in GB/s that the lengths prove; PlanError if they prove nothing."""
        classes, counts = self.sample.link_classes(self.fabric.links)
        number = self.fabric.link_index
        of_class: dict[int, Fraction] = {}
        for src, dst, value in self.lengths:
            if (src, dst) not in number:
                raise PlanError(
                    f"the certificate names link {src}->{dst}, which the plan's sample does not have"
                )
            row = classes[number[src, dst]]
            if value < 0 or row in of_class:
                fault = "is below 0" if value < 0 else "is not the only one of its class"
                raise PlanError(f"the certificate's length of {src}->{dst} {fault}")
            of_class[row] = value
        unit = lcm(*(value.denominator for value in of_class.values()))
        lengths = [int(of_class.get(row, Fraction(0)) * unit) for row in classes]
        capacity = dict(zip(classes, self.fabric.capacity, strict=True))
        total = sum((capacity[row] * counts[row] * value for row, value in of_class.items()), Fraction(0))
        forest = forest_at_least(self.sample, self.fabric, lengths, self.collective, self.sample_root) / unit
        if forest <= 0:
            raise PlanError("the lengths prove nothing: a forest may have length 0")
        return total / forest

    def explain_bound(self) -> str:
        """Return one sentence on the bottleneck: the classes of links with a length, and how many links they have."""
        classes, counts = self.sample.link_classes(self.fabric.links)
        parts: dict[tuple[str, str], int] = {}
        for src, dst, _ in self.lengths:
            kinds = (_kind_words(self.fabric, src), _kind_words(self.fabric, dst))
            parts[kinds] = parts.get(kinds, 0) + counts[classes[self.fabric.link_index[src, dst]]]
        words = ", ".join(f"{number:,} links {src} to {dst}" for (src, dst), number in parts.items())
        return f"the bottleneck is {words}"

    def listed(self) -> Plan:
        """Return the plan with all devices and trees of the cluster; of one kind of servers with their symmetries.

        UsageError if they do not fit: more than `MOST_LISTED_EDGES` tree edges or `MOST_LISTED_GPUS`.
        """
        rotations = self.cluster.rotations() if all(one.shifts == 1 for one in self.templates) else None
        trees = self.num_trees if rotations is None else len(self.templates)
        edges = trees * (self.size - 1) * len(self.templates[0].stages)
        if edges > MOST_LISTED_EDGES or self.size > MOST_LISTED_GPUS:
            raise UsageError(
                f"a list of {trees:,} trees of {self.size:,} GPUs has {edges:,} edges; at most {MOST_LISTED_EDGES:,} "
                f"edges and {MOST_LISTED_GPUS:,} GPUs fit; choose fewer servers, or use the plan by kind"
            )
        fabric = Fabric(self.cluster.listed().settled(), self.channels)
        shards: Sequence[Shard]
        if rotations is None:
            every = all_images(self.sample, self.fabric, self.templates)
            shards = sorted(every, key=lambda shard: _owner(shard, self.collective))
        else:
            number = {name: place for place, name in enumerate(fabric.nodes)}
            shards = ImageShards(
                fabric.nodes,
                fabric.size,
                tuple(tuple(number[moved(name)] for name in fabric.nodes) for moved in rotations),
                tuple(self.images(template).shard(0) for template in self.templates),
            )
        return build_plan(
            fabric,
            self.collective,
            root=self.root,
            shards=shards,
            certificate=self._listed_lengths(fabric),
            schedule="trees",
            method=BY_KIND,
        )

    def _listed_lengths(self, fabric: Fabric) -> Lengths:
        """Return the lengths of all links of the whole cluster."""
        every = tuple(range(self.cluster.servers))
        whole = ClusterSample(
            self.cluster, fabric.topology, tuple(self.cluster.place(server) for server in every), every
        )
        known = {(src, dst): value for src, dst, value in self.lengths}
        keys = self.sample.class_keys(self.fabric.links)
        values = {
            key: known[link.src, link.dst]
            for link, key in zip(self.fabric.links, keys, strict=True)
            if (link.src, link.dst) in known
        }
        return Lengths(
            tuple(
                (link.src, link.dst, values[key])
                for link, key in zip(fabric.links, whole.class_keys(fabric.links), strict=True)
                if key in values
            )
        )

    @property
    def digest(self) -> str:
        """Hash of the file, by which ranks and logs tell plans apart."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        value = self.to_object()
        rows = ",\n  ".join(compact(row) for row in cast("list[object]", value.pop("templates")))
        head = ",\n ".join(f'"{key}": {compact(field)}' for key, field in value.items())
        return "{" + head + ',\n "templates": [\n  ' + rows + "\n ]}\n"

    def to_object(self) -> dict[str, object]:
        """Return the plan file as a JSON object."""
        return {
            "format": PLAN_FORMAT_2,
            "collective": self.collective,
            "root": self.root,
            "cluster": cluster_object(self.cluster),
            "channels": list(self.channels),
            "rate": finite(self.rate),
            "bound": finite(self.bound),
            "certificate": {
                "kind": "class-lengths",
                "lengths": [[src, dst, str(value)] for src, dst, value in self.lengths],
            },
            "method": BY_KIND,
            "seconds": None,
            "trees": self.num_trees,
            "height": self.height,
            "notes": list(self.notes),
            "templates": [self._template_object(template) for template in self.templates],
        }

    def _template_object(self, template: KindTemplate) -> dict[str, object]:
        def server(number: int) -> str:
            return f"s{self.sample.numbers[number]}"

        ranks = self.fabric.ranks
        return {
            "share": str(template.share),
            "root": server(template.root),
            "centre": server(template.centre),
            "entries": [server(entry) for entry in template.entries],
            "shifts": template.shifts,
            "stages": [
                {
                    "op": stage.op,
                    "root": ranks[stage.root],
                    "edges": [[list(edge.route), edge.channel] for edge in stage.edges],
                }
                for stage in template.stages
            ],
        }

    @classmethod
    def from_object(cls, value: dict[str, object]) -> PlanByKind:
        """Read the object of a plan file; PlanError for a key that is unknown, missing or of a wrong type."""
        check_format(value, PLAN_FORMAT_2)
        known = (
            "format collective root cluster channels rate bound certificate method seconds trees height notes"
        )
        derived = "gap busbw digest gpus server templates times"
        check_known(value, f"{known} {derived}".split(), "the plan")
        cluster = cluster_from_object(value.get("cluster"))
        channels = read_texts(value.get("channels"), "channels")
        for channel in channels:
            if channel not in CHANNEL_LINKS:
                raise PlanError(f"channel {channel!r} is unknown; use one of {', '.join(CHANNEL_LINKS)}")
        certificate = read_object(value.get("certificate"), "certificate")
        if certificate.get("kind") != "class-lengths":
            raise PlanError("certificate: kind of a cluster by kind must be class-lengths")
        check_known(certificate, ("kind", "lengths"), "certificate")
        root = value.get("root")
        made = cls(
            collective=read_text(value.get("collective"), "collective"),
            cluster=cluster,
            root=None if root is None else read_whole(root, "root"),
            channels=channels,
            templates=(),
            lengths=tuple(_read_length(item) for item in read_list(certificate.get("lengths"), "lengths")),
            rate=read_number(value.get("rate"), "rate"),
            bound=read_number(value.get("bound"), "bound"),
            notes=read_texts(value.get("notes", []), "notes"),
        )
        templates = read_list(value.get("templates"), "templates")
        if not templates:
            raise PlanError("templates is an empty list; a plan has at least one")
        read = tuple(made._read_template(item, f"template {number}") for number, item in enumerate(templates))
        return replace(made, templates=read)

    def _read_template(self, item: object, where: str) -> KindTemplate:
        value = read_object(item, where)
        check_known(value, ("share", "root", "centre", "entries", "shifts", "stages"), where)
        servers = {f"s{number}": place for place, number in enumerate(self.sample.numbers)}
        ranks = {name: rank for rank, name in enumerate(self.fabric.ranks)}

        def server(name: object, key: str) -> int:
            text = read_text(name, f"{where}: {key}")
            if text not in servers:
                raise PlanError(f"{where}: {key} {text[:40]!r} is not a server of the plan's sample")
            return servers[text]

        def rank(name: object, key: str) -> int:
            text = read_text(name, f"{where}: {key}")
            if text not in ranks:
                raise PlanError(f"{where}: {key} {text[:40]!r} is not a GPU of the plan's sample")
            return ranks[text]

        stages = []
        for number, entry in enumerate(read_list(value.get("stages"), f"{where}: stages")):
            stage = read_object(entry, f"{where}, stage {number}")
            check_known(stage, ("op", "root", "edges"), f"{where}, stage {number}")
            edges = []
            for row in read_list(stage.get("edges"), f"{where}, stage {number}: edges"):
                pair = read_list(row, f"{where}, stage {number}: an edge")
                if len(pair) != 2:
                    raise PlanError(
                        f"{where}, stage {number}: an edge must be [route, channel], got {row!r}"[:200]
                    )
                route = read_texts(pair[0], f"{where}, stage {number}: route")
                if len(route) < 2:
                    raise PlanError(
                        f"{where}, stage {number}: a route must have two devices or more, got {route}"
                    )
                edges.append(
                    Edge(
                        rank(route[0], "route"),
                        rank(route[-1], "route"),
                        route,
                        read_text(pair[1], "channel"),
                    )
                )
            stages.append(
                Stage(
                    read_text(stage.get("op"), f"{where}: op"), rank(stage.get("root"), "root"), tuple(edges)
                )
            )
        if not stages:
            raise PlanError(f"{where} has no stage")
        shifts = read_whole(value.get("shifts"), f"{where}: shifts")
        if shifts < 1:
            raise PlanError(f"{where}: shifts must be 1 or more, got {shifts}")
        return KindTemplate(
            read_fraction(value.get("share"), f"{where}: share"),
            server(value.get("root"), "root"),
            server(value.get("centre"), "centre"),
            tuple(server(one, "entries") for one in read_list(value.get("entries"), f"{where}: entries")),
            shifts,
            tuple(stages),
        )

    def summary(self) -> str:
        """Return a few lines: what is planned and proved, bandwidths in GB/s, trees; ``print(plan)`` prints them."""
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "provably optimal"
        where = f"{collective_name(self.collective)} on {self.cluster.name}, {counted(self.size, 'rank')}"
        facts = labelled(
            ("algbw", rate_words(self.rate, self.collective, self.size)),
            ("upper bound", rate_words(self.bound, self.collective, self.size)),
            (
                "trees",
                f"{self.num_trees:,} of height {self.height} ({len(self.templates)} templates, {BY_KIND})",
            ),
        )
        return "\n".join([f"{where}: {proved}", *facts])

    def __str__(self) -> str:
        return self.summary()

    def images(self, template: KindTemplate) -> TemplateImages:
        """Return the trees that follow from a template, as shards of the whole cluster made on request."""
        return TemplateImages(self.sample, self.fabric, template)


def unsupported(fabric: Fabric) -> bool:
    """Return whether devices of a sample rule out a plan by kind, see `NOT_BY_KIND`."""
    forwards = any(device.forwards for device in fabric.topology.devices)
    return forwards or fabric.in_network or bool(fabric.helpers)


def _owner(shard: Shard, collective: str) -> tuple[int, Fraction]:
    stage = shard.stages[-1 if collective == "reduce_scatter" else 0]
    return stage.root, -shard.share


def _kind_words(fabric: Fabric, name: str) -> str:
    device = fabric.topology.device(name)
    return {"gpu": "GPU", "nvswitch": "NVSwitch", "nic": "NIC", "cpu": "CPU", "pcie": "PCIe switch"}.get(
        device.kind, "leaf" if name.startswith("leaf") else name.rstrip("0123456789")
    )


def _read_length(item: object) -> ClassLength:
    row = read_list(item, "certificate: a length")
    if len(row) != 3:
        raise PlanError(f"certificate: a length must be [src, dst, length], got {row!r}"[:200])
    return (
        read_text(row[0], "certificate: src"),
        read_text(row[1], "certificate: dst"),
        read_fraction(row[2], "certificate: length"),
    )


def cluster_object(cluster: ClusterByKind) -> dict[str, object]:
    """Return the JSON object of a cluster by kind."""
    network = cluster.network
    ratio = None if network.oversubscription is None else float(network.oversubscription)
    stated = {"rails": network.rails, "oversubscription": ratio, "leaf_size": network.leaf_size}
    return {
        "name": cluster.name,
        **({"source": cluster.source} if cluster.source else {}),
        "notes": list(cluster.notes),
        "kinds": [
            {
                "machine": Topology(f"kind {number}", kind.devices, kind.links).to_object(),
                "nics": kind.nics,
                "ports": [
                    [port.number, port.sender, port.receiver, port.out, port.back] for port in kind.ports
                ],
            }
            for number, kind in enumerate(cluster.kinds)
        ],
        "servers": [list(run) for run in cluster.runs],
        "nics": cluster.nics,
        **({} if cluster.latency is None else {"latency": cluster.latency}),
        "network": {
            "kind": network.kind,
            **{key: value for key, value in stated.items() if value is not None},
        },
    }


def cluster_from_object(item: object) -> ClusterByKind:
    """Read such an object; PlanError for a key that is unknown, missing or of a wrong type."""
    from topoplan.machine.topology_json import topology_from_object

    value = read_object(item, "cluster")
    check_known(
        value, ("name", "source", "notes", "kinds", "servers", "nics", "latency", "network"), "cluster"
    )
    kinds = []
    try:
        for number, entry in enumerate(read_list(value.get("kinds"), "cluster: kinds")):
            where = f"cluster: kind {number}"
            kind = read_object(entry, where)
            check_known(kind, ("machine", "nics", "ports"), where)
            machine = topology_from_object(kind.get("machine"))
            ports = tuple(_read_port(row, where) for row in read_list(kind.get("ports"), f"{where}: ports"))
            names = {device.name for device in machine.devices}
            for port in ports:
                if port.sender not in names or port.receiver not in names:
                    raise PlanError(
                        f"{where}: port {port.number} names a device that the machine does not have"
                    )
            if not machine.gpus or not ports:
                raise PlanError(f"{where} needs a GPU and a port")
            kinds.append(
                WiredServer(
                    machine.devices, machine.links, read_whole(kind.get("nics"), f"{where}: nics"), ports, ()
                )
            )
        runs = []
        for row in read_list(value.get("servers"), "cluster: servers"):
            pair = [read_whole(one, "cluster: servers") for one in read_list(row, "cluster: servers")]
            if len(pair) != 2 or not 0 <= pair[0] < len(kinds) or not 1 <= pair[1] <= MOST_SERVERS:
                raise PlanError(
                    f"cluster: servers must be pairs of a kind and a number of servers, got {row!r}"[:200]
                )
            runs.append((pair[0], pair[1]))
        network = read_object(value.get("network"), "cluster: network")
        check_known(network, ("kind", "rails", "oversubscription", "leaf_size"), "cluster: network")
        rails, leaf = network.get("rails"), network.get("leaf_size")
        ratio = network.get("oversubscription")
        latency = value.get("latency")
        return ClusterByKind(
            name=read_text(value.get("name"), "cluster: name"),
            kinds=tuple(kinds),
            runs=tuple(runs),
            network=ClusterNetwork(
                read_text(network.get("kind"), "cluster: network"),
                None if rails is None else read_whole(rails, "cluster: rails"),
                None if ratio is None else read_number(ratio, "cluster: oversubscription"),
                None if leaf is None else read_whole(leaf, "cluster: leaf_size"),
            ),
            nics=read_whole(value.get("nics"), "cluster: nics"),
            latency=None if latency is None else read_number(latency, "cluster: latency"),
            notes=read_texts(value.get("notes", []), "cluster: notes"),
            source=read_text(value.get("source", ""), "cluster: source"),
        )
    except (TopologyError, UsageError) as error:
        raise PlanError(f"cluster: {error}") from None


def _read_port(item: object, where: str) -> NicPort:
    row = read_list(item, f"{where}: a port")
    if len(row) != 5:
        raise PlanError(
            f"{where}: a port must be [number, sender, receiver, GB/s out, GB/s back], got {row!r}"[:200]
        )
    out, back = (read_number(one, f"{where}: rate of a port") for one in row[3:])
    for rate in (out, back):
        exact(rate)
    return NicPort(
        read_whole(row[0], f"{where}: number of a port"),
        read_text(row[1], f"{where}: sender"),
        read_text(row[2], f"{where}: receiver"),
        out,
        back,
    )
