"""The images of a template of a cluster by kind, as shards of the whole cluster made on request.

The rule of the images is that of `topoplan.plans.kind_templates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from topoplan.machine.cluster_by_kind import ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.plans.kind_templates import (
    KindTemplate,
    centre_of,
    centre_turns,
    entry_of,
    group_turns,
    image_count,
    leaf_groups,
    represented,
    third_groups,
)
from topoplan.plans.shards import Edge, Shard, Stage


@dataclass(frozen=True)
class TemplateImages:
    """The images of one template as shards of the whole cluster, made on request."""

    sample: ClusterSample
    fabric: Fabric
    template: KindTemplate

    def servers(self, number: int) -> dict[int, list[tuple[int, int, int]]]:
        """Return for every server of the sample the servers of one image: (server, leaf class, leaf) each."""
        cluster, sample, template = self.sample.cluster, self.sample, self.template
        cells, places = cluster.cells, sample.places
        home = cells[places[template.root].cell]
        index, _ = divmod(number, template.shifts)
        leaf, position = divmod(index, home.count)
        root = ServerPlace(places[template.root].cell, leaf, position)
        centre = ServerPlace(
            places[template.centre].cell, *centre_of(sample, template, leaf, position, number)
        )
        role: dict[int, list[ServerPlace]] = {template.root: [root]}
        if template.centre != template.root:
            role[template.centre] = [centre]
        held = {(cells[place.cell].leaf_class, place.leaf) for place in (root, centre)}
        pods = {
            sample.pod_of(server): cells[place.cell].pod(place.leaf)
            for server, place in ((template.root, root), (template.centre, centre))
        }
        slots = {sample.leaf_of(template.root): root.leaf, sample.leaf_of(template.centre): centre.leaf}
        groups = leaf_groups(sample, template)
        entered = {
            entry: entry_of(sample, template, entry, leaf, position, number) for entry in template.entries
        }

        def leaves(server: int) -> list[int]:
            """Return the leaves of images of a server of the sample."""
            if sample.leaf_of(server) in slots:
                return [slots[sample.leaf_of(server)]]
            own, pod = cells[places[server].cell], pods.get(sample.pod_of(server))
            entry = groups.entry_beside(own, places[server].leaf)
            inside = groups.entered(server) is not None
            return [
                at
                for at in range(own.leaves)
                if (own.leaf_class, at) not in held
                and (own.pod(at) not in pods.values() if pod is None else own.pod(at) == pod)
                and (entry is None or (at % own.leaves_in_pod == entered[entry][0]) == inside)
            ]

        for entry, (_, at) in entered.items():
            role[entry] = [ServerPlace(places[entry].cell, slot, at) for slot in leaves(entry)]
        taken = {place for marked in role.values() for place in marked}
        for server, count in represented(sample, template).items():
            if server in role:
                continue
            cell = places[server].cell
            found = (
                ServerPlace(cell, at, place) for at in leaves(server) for place in range(cells[cell].count)
            )
            role[server] = [place for place in found if place not in taken]
            assert len(role[server]) == count, "the rule covers every server once"
        return {
            server: [(cluster.server(place), cells[place.cell].leaf_class, place.leaf) for place in listed]
            for server, listed in role.items()
        }

    @property
    def count(self) -> int:
        """Number of images."""
        return image_count(self.sample, self.template)

    @property
    def edges(self) -> int:
        """Number of edges of one image."""
        return (self.sample.cluster.size - 1) * len(self.template.stages)

    @property
    def share_each(self) -> Fraction:
        """Fraction of the buffer that one image carries."""
        return self.template.share / self.count

    def load(self, edge: Edge) -> Fraction:
        """Return what the images of one edge carry together: bytes for each byte of the buffer."""
        return self.template.share * Fraction(self._stands[self._home[edge.child]])

    @cached_property
    def _stands(self) -> dict[int, int]:
        return represented(self.sample, self.template)

    @cached_property
    def _group_turns(self) -> dict[int, tuple[int, int]]:
        return group_turns(self.sample, self.template.stages)

    @cached_property
    def _home(self) -> list[int]:
        return self.sample.servers_of(self.fabric.ranks)

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole cluster, with its part of the share."""
        members = self.servers(number)
        sample, cluster = self.sample, self.sample.cluster
        home = self._home
        local = local_numbers(home)
        of_leaf = {cell.leaf_class: cell for cell in cluster.cells}
        leaves_at = {
            server: [(leaf_class, leaf) for _, leaf_class, leaf in listed]
            for server, listed in members.items()
        }
        pods_at = {
            server: [of_leaf[leaf_class].pod(leaf) for leaf_class, leaf in listed]
            for server, listed in leaves_at.items()
        }
        turned = number // centre_turns(sample, self.template.root, self.template.centre)
        third = {
            leaf_class: cluster.leaf_name(leaf_class, turned // divisor % modulus)
            for leaf_class, (divisor, modulus) in self._group_turns.items()
        }
        stages = []
        for stage in self.template.stages:
            edges = []
            for edge in stage.edges:
                parent, child = home[edge.parent], home[edge.child]
                passed = {name: third[one] for name, one in third_groups(sample, edge.route).items()}
                for place, (server, leaf_class, leaf) in enumerate(members[child]):
                    if parent == child:
                        above = members[parent][place]
                    elif len(members[parent]) == 1:
                        above = members[parent][0]
                    elif sample.leaf_of(parent) == sample.leaf_of(child):
                        above = members[parent][leaves_at[parent].index((leaf_class, leaf))]
                    else:
                        above = members[parent][pods_at[parent].index(pods_at[child][place])]
                    names = {
                        f"s{sample.numbers[child]}": f"s{server}",
                        f"s{sample.numbers[parent]}": f"s{above[0]}",
                    }
                    leaves = passed | sample.switch_names(parent, above[2]) | sample.switch_names(child, leaf)
                    edges.append(
                        Edge(
                            cluster.first_rank(above[0]) + local[edge.parent],
                            cluster.first_rank(server) + local[edge.child],
                            tuple(renamed(device, names, leaves) for device in edge.route),
                            edge.channel,
                        )
                    )
            root = members[home[stage.root]][0][0]
            made = Stage(stage.op, cluster.first_rank(root) + local[stage.root], tuple(edges))
            stages.append(Stage(made.op, made.root, made.top_down()))
        return Shard(self.share_each, tuple(stages))


def local_numbers(home: Sequence[int]) -> list[int]:
    """Return the number of every rank among those of its server, given the servers of the ranks."""
    seen: dict[int, int] = {}
    found = []
    for server in home:
        found.append(seen.get(server, 0))
        seen[server] = found[-1] + 1
    return found


def renamed(device: str, servers: Mapping[str, str], leaves: Mapping[str, str]) -> str:
    """Return a device's name in an image, given those of servers and leaves."""
    head, dot, tail = device.partition(".")
    return f"{servers[head]}.{tail}" if dot and head in servers else leaves.get(device, device)
