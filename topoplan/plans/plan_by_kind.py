"""The plan of a cluster by kind: templates on a sample of the servers, and the rule of their images.

Templates are trees (`topoplan.plans.kind_templates`), or paths of an all-to-all (`topoplan.plans.kind_exchange`; in a
torus `topoplan.plans.torus_templates`). Trees of one root in a torus are those of `topoplan.plans.torus_trees`.

The file, format ``topoplan.plan/2`` with ``cluster`` in place of ``topology``, grows with the kinds of servers, not
with their number. `PlanByKind.listed` returns the same plan with all devices and trees, where they fit into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import lcm, prod
from typing import cast

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import STAGED, Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Cut, Lengths, OneFabric
from topoplan.plans.certificates.exchange import Steiner
from topoplan.plans.certificates.kind_lengths import CLASS_LENGTHS, DUAL_ASCENT, forest_at_least
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
from topoplan.plans.kind_cluster_object import cluster_from_object, cluster_object
from topoplan.plans.kind_exchange import KindPath, PathImages
from topoplan.plans.kind_images import TemplateImages
from topoplan.plans.kind_templates import ClassCrossings, KindTemplate, share_units, template_sample
from topoplan.plans.plan import ALL_TO_ALL, PLAN_FORMAT_2, ROOTED, Plan, collective_name, read_channels
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage, path_ends
from topoplan.plans.torus_templates import (
    TorusImages,
    TorusPathImages,
    TorusPaths,
    TorusTemplate,
    arms_from_object,
    arms_object,
)
from topoplan.plans.torus_trees import (
    TorusTree,
    TorusTreeImages,
    line_rate,
    port_rates,
    rooted_sample,
    stretched_loads,
)
from topoplan.units import bus_factor, counted, labelled, nearest_float, rate_words

BY_KIND = "by-kind"
"""Method of plans of clusters by kind."""

MOST_LISTED_EDGES = 4_000_000
"""Edges of trees or paths up to which a plan by kind is listed: some gigabytes."""

AnyTemplate = KindTemplate | KindPath | TorusTemplate | TorusTree
"""A template of trees, in a torus or another network, or a path."""

Templates = tuple[AnyTemplate, ...]
"""Templates of trees, or all paths of an all-to-all."""

MOST_LISTED_GPUS = 16_384
"""GPUs up to which a plan by kind is listed."""

NOT_BY_KIND = (
    "devices that forward data of other servers, in-network reduction in a torus or by switches of a dragonfly or a "
    "tree of three levels, and copies through the CPUs' memory, are planned in a list only"
)
"""Why a cluster is not planned by kind: distances in a sample prove bounds if routes pass network switches alone;
classes are those of devices, which staged channels divide; and copies are counted at leaves of two levels alone."""

ClassLength = tuple[str, str, Fraction]
"""Source and destination of a link of the sample, and the length of all links of its class."""


@dataclass(frozen=True)
class PlanByKind:
    """A plan of a cluster by kind.

    ``root`` is a GPU number of the cluster, whose server is a kind of its own but in a torus. ``templates`` and
    ``lengths`` name the sample's devices. ``rate`` and ``bound`` are in GB/s of algorithm bandwidth. ``line`` are the
    dimensions of the line of a torus whose cut proves the bound of a broadcast or reduce, in place of lengths.
    ``proof`` is the kind of the certificate of lengths (`topoplan.plans.certificates.kind_lengths`).
    """

    collective: str
    cluster: ClusterByKind
    root: int | None
    channels: tuple[str, ...]
    templates: Templates
    lengths: tuple[ClassLength, ...]
    rate: float
    bound: float
    notes: tuple[str, ...] = ()
    planning_seconds: float | None = None
    line: tuple[int, ...] | None = None
    proof: str = CLASS_LENGTHS

    def with_templates(self, templates: Templates) -> PlanByKind:
        """Return the plan with these templates, its rate recomputed from them, and its bound from the lengths."""
        made = replace(self, templates=templates, notes=self.cluster.notes)
        # Caches of what does not depend on the templates.
        kept: dict[str, object] = {
            key: self.__dict__[key] for key in self.__dict__.keys() & {"sample", "fabric", "_classes"}
        }
        made.__dict__.update(kept)
        rate, bound = made.exact_rate(), made.exact_bound()
        made = replace(made, rate=nearest_float(rate), bound=nearest_float(bound))
        made.__dict__.update(kept)
        return made

    def timed(self, seconds: float) -> PlanByKind:
        """Return the same plan with its planning time."""
        return replace(self, planning_seconds=seconds)

    @cached_property
    def sample(self) -> ClusterSample:
        """The servers on which the templates stand; PlanError if a torus is not planned by kind."""
        if self.rooted_in_torus:
            try:
                return rooted_sample(self.cluster)
            except InfeasibleError as error:
                raise PlanError(str(error)) from None
        return template_sample(self.cluster, rooted=self.root is not None)

    @cached_property
    def fabric(self) -> Fabric:
        """The links of the sample that the plan may use."""
        return Fabric(self.sample.topology.settled(), self.channels)

    @cached_property
    def _classes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The class of each link of the sample, and how many links of each class the cluster has."""
        return self.sample.link_classes(self.fabric.links)

    @property
    def rooted_in_torus(self) -> bool:
        """Whether the templates are those of `topoplan.plans.torus_trees`: of a broadcast or reduce in a torus."""
        return self.cluster.network.kind == "torus" and self.collective in ROOTED

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cluster.size

    @property
    def unsupported(self) -> bool:
        """Whether the cluster's devices rule out a plan by kind, see `NOT_BY_KIND`."""
        return unsupported(self.sample, self.fabric, self.collective)

    @property
    def sample_root(self) -> int | None:
        """The root as a rank of the sample."""
        if self.root is None:
            return None
        server, gpu = self.cluster.server_of(self.root)
        if self.rooted_in_torus:
            return gpu
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
        """Number of trees, or of paths: the images of all templates."""
        return sum(self.images(template).count for template in self.templates)

    @property
    def num_edges(self) -> int:
        """Number of edges of all trees, or paths."""
        return sum(one.count * one.edges for one in map(self.images, self.templates))

    @property
    def height(self) -> int:
        """Edges on the longest root-to-leaf path of any tree."""
        return max(self.template_height(template) for template in self.templates)

    def template_height(self, template: AnyTemplate) -> int:
        """Return the edges on the longest root-to-leaf path of an image of a template."""
        if isinstance(template, TorusTemplate):
            return TorusImages(self.sample, self.fabric, template).height
        if isinstance(template, TorusTree):
            return self._tree_images(template).height
        return max(stage.height for stage in template.stages)

    def link_loads(self) -> list[Fraction]:
        """Return the bytes that cross each link of the sample, in the whole cluster, for each byte of the buffer."""
        if self.rooted_in_torus:
            return self._tree_loads()
        classes, counts = self._classes
        totals = [Fraction(0)] * len(counts)
        for row, load in self._loads(classes):
            totals[row] += load
        each = [total / count for total, count in zip(totals, counts, strict=True)]
        return [each[row] for row in classes]

    def _tree_loads(self) -> list[Fraction]:
        """Return the most that crosses a link for which each of the sample of a torus with a root stands."""
        trees = [one for one in self.templates if isinstance(one, TorusTree)]
        return stretched_loads(self.sample, self.fabric, self.cluster.network.torus, trees)

    def exact_rate(self) -> Fraction:
        """Return the rate in GB/s at which the first class of links is full; PlanError if no template crosses one."""
        loads = zip(self.fabric.capacity, self.link_loads(), strict=True)
        rates = [capacity / load for capacity, load in loads if load]
        if not rates:
            raise PlanError("no template crosses a link")
        return min(rates)

    def _loads(self, classes: Sequence[int]) -> Iterator[tuple[int, Fraction]]:
        """Yield loads of links by their classes, all links of a class together: bytes for each byte of the buffer."""
        trees = [one for one in self.templates if not isinstance(one, (KindPath, TorusTree))]
        unit, shares = share_units(trees)
        crossings = ClassCrossings(self.sample, self.fabric, classes)
        totals: dict[int, int] = {}
        for template, share in zip(trees, shares, strict=True):
            for row, times in crossings.of(template).items():
                totals[row] = totals.get(row, 0) + share * times
        yield from ((row, Fraction(total, unit)) for row, total in totals.items())
        for path in self.templates:
            if isinstance(path, KindPath):
                yield from PathImages(self.sample, self.fabric, path).loads(classes).items()

    def exact_bound(self) -> Fraction:
        """Return the bound in GB/s that the lengths, or the line, prove; PlanError if they prove nothing."""
        if self.rooted_in_torus:
            return line_rate(self.cluster.network.torus.sides, port_rates(self.cluster), self._checked_line)
        classes, counts = self._classes
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
        whole = {row: int(value * unit) for row, value in of_class.items()}
        lengths = [whole.get(row, 0) for row in classes]
        capacity = dict(zip(classes, self.fabric.capacity, strict=True))
        total = sum((capacity[row] * counts[row] * value for row, value in of_class.items()), Fraction(0))
        forest = forest_at_least(
            self.sample, self.fabric, lengths, self.collective, self.sample_root, kind=self.proof
        )
        forest /= unit
        if forest <= 0:
            raise PlanError("the lengths prove nothing: a forest may have length 0")
        return total / forest

    @property
    def _checked_line(self) -> tuple[int, ...]:
        """The line that proves the bound; PlanError if it does not exist."""
        line, many = self.line, len(self.cluster.network.torus.sides)
        if line is None or list(line) != sorted(set(line)) or len(line) >= many or set(line) - {*range(many)}:
            raise PlanError(
                f"the certificate's dimensions must be some of 0 to {many - 1}, ascending and not all, got {line}"
            )
        return line

    def explain_bound(self) -> str:
        """Return one sentence on the bottleneck: the classes of links with a length, and how many links they have."""
        if self.rooted_in_torus:
            sides, given = self.cluster.network.torus.sides, self.cluster.network.dimension_nics
            hosts = prod(sides[one] for one in self._checked_line)
            verb = "enter" if self.collective == "broadcast" else "leave"
            each = given or [self.cluster.nics // (2 * len(sides))] * len(sides)
            links = 2 * hosts * sum(many for one, many in enumerate(each) if one not in self._checked_line)
            what = "host" if self.size == self.cluster.servers else "server"
            return f"the bottleneck is {links:,} ports that {verb} {counted(hosts, what)}"
        classes, counts = self._classes
        parts: dict[tuple[str, str], int] = {}
        for src, dst, _ in self.lengths:
            kinds = (_kind_words(self.fabric, src), _kind_words(self.fabric, dst))
            parts[kinds] = parts.get(kinds, 0) + counts[classes[self.fabric.link_index[src, dst]]]
        words = ", ".join(f"{number:,} links {src} to {dst}" for (src, dst), number in parts.items())
        return f"the bottleneck is {words}"

    @property
    def listed_rotations(self) -> tuple[Callable[[str], str], ...] | None:
        """The permutations of device names that the list has as symmetries; None if it has all trees."""
        symmetric = all(
            isinstance(one, TorusTemplate) or (isinstance(one, KindTemplate) and one.shifts == 1)
            for one in self.templates
        )
        return self.cluster.rotations() if symmetric and self.collective != ALL_TO_ALL else None

    def listed(self) -> Plan:
        """Return the plan with all devices, and all trees or paths, of the cluster.

        Trees of one kind of servers are listed with their symmetries. With in-network reduction the bound of the list
        may be higher, as its certificates are of other kinds. UsageError if they do not fit: more than
        `MOST_LISTED_EDGES` edges or `MOST_LISTED_GPUS`.
        """
        of_paths = self.collective == ALL_TO_ALL
        images = [self.images(template) for template in self.templates]
        rotations = self.listed_rotations
        listed = [one.count if rotations is None else 1 for one in images]
        edges = sum(count * one.edges for count, one in zip(listed, images, strict=True))
        if edges > MOST_LISTED_EDGES or self.size > MOST_LISTED_GPUS:
            raise UsageError(
                f"a list of {sum(listed):,} {'paths' if of_paths else 'trees'} of {self.size:,} GPUs has {edges:,} "
                f"edges; at most {MOST_LISTED_EDGES:,} edges and {MOST_LISTED_GPUS:,} GPUs fit; choose fewer servers, "
                "or use the plan by kind"
            )
        fabric = Fabric(self.cluster.listed().settled(), self.channels)
        shards: Sequence[Shard]
        if rotations is None:
            every = [one.shard(number) for one in images for number in range(one.count)]
            if of_paths:
                block = Fraction(1, self.size)
                every += [Shard(block, (Stage("broadcast", rank, ()),)) for rank in range(self.size)]
            shards = sorted(every, key=lambda shard: _owner(shard, self.collective))
        else:
            number = {name: place for place, name in enumerate(fabric.nodes)}
            shards = ImageShards(
                fabric.nodes,
                fabric.size,
                tuple(tuple(number[moved(name)] for name in fabric.nodes) for moved in rotations),
                tuple(one.shard(0) for one in images),
            )
        return build_plan(
            fabric,
            self.collective,
            root=self.root,
            shards=shards,
            certificate=self._listed_certificate(fabric),
            schedule="paths" if of_paths else "trees",
            method=BY_KIND,
        )

    def _listed_certificate(self, fabric: Fabric) -> OneFabric:
        """Return the lengths of all links, or what proves the lowest bound for switches that copy and add.

        With a root in a torus it is the cut of the line from the host behind the root in another dimension.

        Lengths may prove nothing there, as they leave cheaper trees through switches out, and the kind steiner has its
        limit. Then the cut of a GPU, a server or a leaf proves a bound, which may be above that of the plan by kind.
        """
        if self.rooted_in_torus:
            assert self.root is not None, "a broadcast or reduce has a root"
            torus, line = self.cluster.network.torus, self._checked_line
            free = next(one for one in range(len(torus.sides)) if one not in line)
            home = [*torus.coordinates(self.cluster.server_of(self.root)[0])]
            home[free] = (home[free] + 1) % torus.sides[free]
            outside = (
                name
                for name in fabric.nodes
                for at in (torus.coordinates(int(name.partition(".")[0][1:])),)
                if any(at[one] != home[one] for one in range(len(home)) if one not in line)
            )
            return Cut(tuple(outside))
        lengths = self._listed_lengths(fabric)
        if not fabric.in_network or self.collective == ALL_TO_ALL:
            return lengths
        of_server: dict[str, list[str]] = {}
        for name in fabric.nodes:
            of_server.setdefault(fabric.topology.device(name).server, []).append(name)
        root = None if self.root is None else fabric.ranks[self.root]
        sides: list[list[str]] = []
        first = dict(
            zip([place.cell for place in self.sample.places][::-1], self.sample.numbers[::-1], strict=True)
        )
        for number in sorted(first.values()):
            server = of_server[f"s{number}"]
            sides += [server, *([one] for one in server if one in fabric.ranks)]
        every = set(fabric.nodes)
        both = (sorted(side) for one in sides for side in (one, every.difference(one)))
        cuts = [Cut(tuple(side)) for side in both if root is None or root in side]
        best: tuple[Fraction, OneFabric] | None = None
        for made in (lengths, Steiner(lengths.lengths), *cuts):
            with suppress(PlanError):
                bound = made.bound(fabric, self.collective, self.root)
                if best is None or bound < best[0]:
                    best = bound, made
        assert best is not None, "a GPU's own links are a cut"
        return best[1]

    def _listed_lengths(self, fabric: Fabric) -> Lengths:
        """Return the lengths of all links of the whole cluster."""
        cluster = self.cluster
        every = tuple(
            one for one in range(cluster.servers) if cluster.first_rank(one) < cluster.first_rank(one + 1)
        )
        whole = ClusterSample(
            cluster, fabric.topology, tuple(cluster.place(server) for server in every), every
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
            "certificate": class_lengths_object(self.lengths, self.proof)
            if self.line is None
            else line_object(self.line),
            "method": BY_KIND,
            "seconds": None,
            "trees": self.num_trees,
            "height": self.height,
            "notes": list(self.notes),
            "templates": [self._template_object(template) for template in self.templates],
        }

    def _template_object(self, template: AnyTemplate) -> dict[str, object]:
        def server(number: int) -> str:
            return f"s{self.sample.numbers[number]}"

        def edges(stage: Stage) -> list[object]:
            return [[list(edge.route), edge.channel] for edge in stage.edges]

        if isinstance(template, KindPath):
            return {"share": str(template.share), "edges": edges(template.stages[0])}
        ranks = self.fabric.ranks
        stages = [
            {"op": stage.op, "root": ranks[stage.root], "edges": edges(stage)} for stage in template.stages
        ]
        if isinstance(template, TorusTree):
            return {"share": str(template.share), "stages": stages}
        if isinstance(template, TorusTemplate):
            return {"share": str(template.share), "arms": arms_object(template.arms), "stages": stages}
        return {
            "share": str(template.share),
            "root": server(template.root),
            "centre": server(template.centre),
            "entries": [server(entry) for entry in template.entries],
            **(
                {"pod_entries": [server(one) for one in template.pod_entries]} if template.pod_entries else {}
            ),
            "shifts": template.shifts,
            "stages": stages,
        }

    @classmethod
    def from_object(cls, value: dict[str, object], cluster: ClusterByKind | None = None) -> PlanByKind:
        """Read the object of a plan file, or of a plan in a file that states the cluster elsewhere.

        PlanError for a key that is unknown, missing or of a wrong type.
        """
        check_format(value, PLAN_FORMAT_2)
        known = (
            "format collective root cluster channels rate bound certificate method seconds trees height notes"
        )
        derived = "gap busbw digest gpus server templates times"
        check_known(value, f"{known} {derived}".split(), "the plan")
        cluster = cluster or cluster_from_object(value.get("cluster"))
        root = value.get("root")
        collective = read_text(value.get("collective"), "collective")
        of_line = cluster.network.kind == "torus" and collective in ROOTED
        certificate = value.get("certificate")
        proof = CLASS_LENGTHS
        lengths: tuple[ClassLength, ...] = ()
        if not of_line:
            proof, lengths = class_lengths_from_object(certificate, CLASS_LENGTHS, DUAL_ASCENT)
        made = cls(
            collective=collective,
            cluster=cluster,
            root=None if root is None else read_whole(root, "root"),
            channels=read_channels(value),
            templates=(),
            lengths=lengths,
            line=line_from_object(certificate) if of_line else None,
            rate=read_number(value.get("rate"), "rate"),
            bound=read_number(value.get("bound"), "bound"),
            notes=read_texts(value.get("notes", []), "notes"),
            proof=proof,
        )
        templates = read_list(value.get("templates"), "templates")
        if not templates:
            raise PlanError("templates is an empty list; a plan has at least one")
        numbered = [(item, f"template {number}") for number, item in enumerate(templates)]
        if made.collective == ALL_TO_ALL and cluster.network.kind != "torus":
            return replace(made, templates=tuple(made._read_path(*one) for one in numbered))
        return replace(made, templates=tuple(made._read_template(*one) for one in numbered))

    def _rank(self, name: str, where: str) -> int:
        number = self._rank_of.get(name)
        if number is None:
            raise PlanError(f"{where} {name[:40]!r} is not a GPU of the plan's sample")
        return number

    @cached_property
    def _rank_of(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate(self.fabric.ranks)}

    def _read_edges(self, value: object, where: str) -> tuple[Edge, ...]:
        edges = []
        for row in read_list(value, f"{where}: edges"):
            pair = read_list(row, f"{where}: an edge")
            if len(pair) != 2:
                raise PlanError(f"{where}: an edge must be [route, channel], got {row!r}"[:200])
            route = read_texts(pair[0], f"{where}: route")
            if len(route) < 2:
                raise PlanError(f"{where}: a route must have two devices or more, got {route}")
            first, last = (self._rank(name, f"{where}: route") for name in (route[0], route[-1]))
            edges.append(Edge(first, last, route, read_text(pair[1], "channel")))
        return tuple(edges)

    def _read_path(self, item: object, where: str) -> KindPath:
        value = read_object(item, where)
        check_known(value, ("share", "edges"), where)
        edges = self._read_edges(value.get("edges"), where)
        if not edges:
            raise PlanError(f"{where}: a path must have an edge or more, got none")
        stage = Stage("broadcast", edges[0].parent, edges)
        return KindPath(read_fraction(value.get("share"), f"{where}: share"), (stage,))

    def _read_template(self, item: object, where: str) -> KindTemplate | TorusTemplate | TorusTree:
        value = read_object(item, where)
        network = self.cluster.network
        placed: tuple[str, ...] = ("root", "centre", "entries", "pod_entries", "shifts")
        if network.kind == "torus":
            placed = () if self.rooted_in_torus else ("arms",)
        check_known(value, ("share", *placed, "stages"), where)
        servers = {f"s{number}": place for place, number in enumerate(self.sample.numbers)}

        def server(name: object, key: str) -> int:
            text = read_text(name, f"{where}: {key}")
            if text not in servers:
                raise PlanError(f"{where}: {key} {text[:40]!r} is not a server of the plan's sample")
            return servers[text]

        def listed(key: str) -> tuple[int, ...]:
            return tuple(server(one, key) for one in read_list(value.get(key, []), f"{where}: {key}"))

        stages = []
        for number, entry in enumerate(read_list(value.get("stages"), f"{where}: stages")):
            at = f"{where}, stage {number}"
            stage = read_object(entry, at)
            check_known(stage, ("op", "root", "edges"), at)
            root = self._rank(read_text(stage.get("root"), f"{where}: root"), f"{where}: root")
            edges = self._read_edges(stage.get("edges"), at)
            stages.append(Stage(read_text(stage.get("op"), f"{where}: op"), root, edges))
        if not stages:
            raise PlanError(f"{where} has no stage")
        if self.rooted_in_torus:
            return TorusTree(read_fraction(value.get("share"), f"{where}: share"), tuple(stages))
        if network.kind == "torus":
            arms = arms_from_object(value.get("arms"), network.torus, where)
            of = TorusPaths if self.collective == ALL_TO_ALL else TorusTemplate
            return of(read_fraction(value.get("share"), f"{where}: share"), arms, tuple(stages))
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
            listed("pod_entries"),
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

    def __repr__(self) -> str:
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "optimal"
        what = f"{collective_name(self.collective)}, {counted(self.size, 'rank')}"
        return f"<PlanByKind {what}, {self.rate:.6g} GB/s ({proved})>"

    def _tree_images(self, template: TorusTree) -> TorusTreeImages:
        if self.root is None:
            raise PlanError(f"{self.collective} must have a root, got None")
        return TorusTreeImages(self.cluster, self.root, self.sample, self.fabric, template)

    def images(self, template: AnyTemplate) -> TemplateImages | PathImages | TorusImages | TorusTreeImages:
        """Return the trees or paths that follow from a template, as shards of the whole cluster made on request."""
        if isinstance(template, TorusTree):
            return self._tree_images(template)
        if isinstance(template, TorusPaths):
            return TorusPathImages(self.sample, self.fabric, template)
        if isinstance(template, TorusTemplate):
            return TorusImages(self.sample, self.fabric, template)
        if isinstance(template, KindPath):
            return PathImages(self.sample, self.fabric, template)
        return TemplateImages(self.sample, self.fabric, template)


def unsupported(sample: ClusterSample, fabric: Fabric, collective: str) -> bool:
    """Return whether devices of a sample rule out a plan by kind, see `NOT_BY_KIND`.

    Paths of an all-to-all pass switches that copy or add as any others.
    """
    forwards = any(device.forwards for device in fabric.topology.devices)
    network = sample.cluster.network
    levels = network.kind == "dragonfly" or network.pod_size is not None
    merging = fabric.in_network and (network.kind == "torus" or (levels and sample.cluster.in_network))
    merging = merging and collective != ALL_TO_ALL
    return forwards or merging or bool(fabric.helpers) or STAGED in fabric.channels


def _owner(shard: Shard, collective: str) -> tuple[tuple[int, ...], Fraction, int]:
    """Return the key by which shards of a plan are sorted."""
    if collective == ALL_TO_ALL:
        return path_ends(shard)[::-1], -shard.share, len(shard.stages[0].edges)
    stage = shard.stages[-1 if collective == "reduce_scatter" else 0]
    return (stage.root,), -shard.share, 0


def _kind_words(fabric: Fabric, name: str) -> str:
    device = fabric.topology.device(name)
    return {"gpu": "GPU", "nvswitch": "NVSwitch", "nic": "NIC", "cpu": "CPU", "pcie": "PCIe switch"}.get(
        device.kind,
        "leaf" if name.startswith("leaf") else "pod" if name.startswith("pod") else name.rstrip("0123456789"),
    )


def line_object(line: Sequence[int]) -> dict[str, object]:
    """Return the JSON object of the certificate of a broadcast or reduce in a torus."""
    return {"kind": "torus-line", "dimensions": list(line)}


def line_from_object(item: object) -> tuple[int, ...]:
    """Read such an object; PlanError for another kind of certificate, or a wrong key."""
    certificate = read_object(item, "certificate")
    if certificate.get("kind") != "torus-line":
        raise PlanError("certificate: kind of a broadcast or reduce in a torus by kind must be torus-line")
    check_known(certificate, ("kind", "dimensions"), "certificate")
    rows = read_list(certificate.get("dimensions"), "certificate: dimensions")
    return tuple(read_whole(one, "certificate: dimensions") for one in rows)


def class_lengths_object(lengths: Sequence[ClassLength], kind: str = CLASS_LENGTHS) -> dict[str, object]:
    """Return the JSON object of the certificate of a cluster by kind."""
    return {"kind": kind, "lengths": [[src, dst, str(value)] for src, dst, value in lengths]}


def class_lengths_from_object(item: object, *kinds: str) -> tuple[str, tuple[ClassLength, ...]]:
    """Read kind and lengths of such an object; PlanError for none of the kinds, or a wrong key."""
    certificate = read_object(item, "certificate")
    kind = read_text(certificate.get("kind"), "certificate: kind")
    if kind not in kinds:
        raise PlanError(
            f"certificate: kind of a cluster by kind must be {' or '.join(kinds)}, got {kind[:40]!r}"
        )
    check_known(certificate, ("kind", "lengths"), "certificate")
    return kind, tuple(_read_length(row) for row in read_list(certificate.get("lengths"), "lengths"))


def _read_length(item: object) -> ClassLength:
    row = read_list(item, "certificate: a length")
    if len(row) != 3:
        raise PlanError(f"certificate: a length must be [src, dst, length], got {row!r}"[:200])
    return (
        read_text(row[0], "certificate: src"),
        read_text(row[1], "certificate: dst"),
        read_fraction(row[2], "certificate: length"),
    )
