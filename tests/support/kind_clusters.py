"""Random clusters by kind of up to a few hundred GPUs, and random changes of their plan files."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import pytest

import topoplan
from topoplan import ClusterByKind, InfeasibleError, PlanByKind, PlanError, Server, TopoplanError
from topoplan.plans.verify import Verification
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.reading.clusters import torus_by_kind

MACHINES = ("v100x4", "dgx-1v", "nvlink-x4", "dgx-h100", "pcie-x8", "dgx-2", "mi250x")

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce")


def random_pods(seed: int) -> dict[str, Any]:
    """Return the pods of a random fat tree of three levels, or nothing for one of two levels."""
    rng = random.Random(f"pods {seed}")
    if rng.random() < 0.4:
        return {}
    return {"pod_size": rng.randint(1, 3), "pod_oversubscription": rng.choice([None, 2, 3.5, 9])}


def random_cluster(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a cluster of 2 servers or more, at most so many GPUs; None for one that cannot be built."""
    rng = random.Random(seed)
    servers = []
    for _ in range(rng.randint(1, 3)):
        gpus = list(range(rng.choice([1, 2, 4]))) if rng.random() < 0.5 else None
        rate, count = rng.choice([None, 50, 200]), rng.randint(1, 6)
        servers.append(Server(rng.choice(MACHINES), gpus, nic_gbps=rate, count=count))
    network = rng.choice(["switch", "rail-optimised", "fat-tree", "fat-tree"])
    more: dict[str, Any] = {}
    if network == "fat-tree":
        more = {"leaf_size": rng.randint(1, 5), "oversubscription": rng.choice([None, 2, 3.5])}
        more |= random_pods(seed)
    if network == "rail-optimised":
        more = {"oversubscription": rng.choice([None, 2, 3.5])}
    nics, access = rng.choice([None, 1, 2, 4]), rng.choice(["direct", "pcie"])
    try:
        found = topoplan.cluster_by_kind(
            servers, nic_gbps=100, nics=nics, nic_access=access, network=network, **more
        )
    except TopoplanError:
        return None
    return found if found.servers > 1 and found.size <= most else None


def random_stragglers(seed: int, *, most: int) -> ClusterByKind | None:
    """Return equal servers of which every second to fourth one has slower NICs or links, as `random_cluster`."""
    rng = random.Random(f"stragglers {seed}")
    apart, times = rng.randint(2, 4), rng.randint(2, 5)
    gpus = list(range(rng.choice([1, 2, 4]))) if rng.random() < 0.7 else None
    network = rng.choice(["switch", "switch", "rail-optimised", "fat-tree", "fat-tree", "dragonfly"])
    size = rng.choice([1, apart, apart, 2 * apart, rng.randint(1, 5)])
    more: dict[str, Any] = {}
    if network == "fat-tree":
        more = {"leaf_size": size, "oversubscription": rng.choice([None, 2, 3.5])}
        more |= {"pod_size": rng.randint(1, 3)} if rng.random() < 0.3 else {}
    elif network == "dragonfly":
        more = {"group_size": size, "global_gbps": rng.choice([20, 100])}
    nics, access = rng.choice([None, 1, 2]), rng.choice(["direct", "pcie"])
    kind = Server(rng.choice(MACHINES), gpus, count=apart * times)
    slower = rng.choice([0.1, 0.5, 0.9])
    try:
        found = topoplan.cluster_by_kind(
            [kind], nic_gbps=100, nics=nics, nic_access=access, network=network, **more
        )
        if found.size > most:
            return None
        links = rng.sample(found.server_machine(0).links, rng.randint(0, 2))
        names = [(f"{link.src}->{link.dst}", link.bandwidth) for link in links]
        if not names or rng.random() < 0.7:
            out = [link for link in found.joined([0, 1], [1, 1]).links if link.src.startswith("s0.")]
            names += [
                (f"{one.src}->{one.dst}", one.bandwidth) for one in out if not one.dst.startswith("s0.")
            ][:2]
        first = rng.randrange(apart)
        slow = {
            name.replace("s0.", f"s{server}.")
            .replace("leaf0", f"leaf{server // size}")
            .replace("group0", f"group{server // size}"): rate * slower
            for server in range(first, found.servers, apart)
            for name, rate in names
        }
        return found.with_faults(slow_links=slow)
    except TopoplanError:
        return None


def plan_with_equal_gpus(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of servers whose GPUs are equal; None if it cannot be planned by kind."""
    rng = random.Random(f"equal GPUs {seed}")
    gpus, count = rng.choice([2, 2, 3, 4]), rng.choice([2, 3, 4, 6])
    size = rng.choice([1, 2, 3])
    network, more = rng.choice(
        [
            ("switch", {}),
            ("rail-optimised", {"nic_access": "direct"}),
            ("fat-tree", {"leaf_size": size, "oversubscription": 2}),
            ("dragonfly", {"group_size": size, "global_gbps": 100}),
            ("torus", {"sides": (count, 3), "nics": 8 * gpus, "nic_access": "direct"}),
        ]
    )
    servers = count * 3 if network == "torus" else count
    collective = rng.choice(["allreduce", "allgather", "reduce_scatter", "alltoall"])
    try:
        cluster = topoplan.cluster_by_kind(
            [Server("dgx-h100", range(gpus), count=servers)], nic_gbps=400, network=network, **more
        )
        if network == "switch" and count % 2 == 0 and rng.random() < 0.5:
            out = [one for one in cluster.joined([0, 1], [1, 1]).links if one.src.startswith("s0.nic")]
            links = [(one.src[3:], one.dst, one.bandwidth / 2) for one in out if one.dst.startswith("switch")]
            slow = {
                f"s{server}.{nic}->{switch}": rate
                for server in range(0, servers, 2)
                for nic, switch, rate in links
            }
            cluster = cluster.with_faults(slow_links=slow)
        return topoplan.plan_by_kind(cluster, collective) if cluster.size <= most else None
    except TopoplanError:
        return None


def plan_with_stragglers(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a collective on such a cluster; None if it cannot be planned by kind."""
    cluster = random_stragglers(seed, most=most)
    if cluster is None:
        return None
    collective = random.Random(seed).choice(["allreduce", "allgather", "reduce_scatter", "alltoall"])
    try:
        return topoplan.plan_by_kind(cluster, collective)
    except InfeasibleError:
        return None


def _random_servers(rng: random.Random, most: int) -> list[Server]:
    """Return one to three kinds of servers, up to so many of each."""
    servers = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        gpus = list(range(rng.choice([1, 2, 4]))) if rng.random() < 0.7 else None
        rate, count = rng.choice([None, 50, 200]), rng.randint(2, most)
        servers.append(Server(rng.choice(MACHINES), gpus, nic_gbps=rate, count=count))
    return servers


def random_three_levels(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a fat tree of three levels whose pods are often the bottleneck, as `random_cluster`."""
    rng = random.Random(f"three levels {seed}")
    servers = _random_servers(rng, 14)
    try:
        found = topoplan.cluster_by_kind(
            servers,
            nic_gbps=100,
            nics=rng.choice([None, 1, 2]),
            nic_access=rng.choice(["direct", "pcie"]),
            network="fat-tree",
            leaf_size=rng.randint(1, 4),
            oversubscription=rng.choice([None, 2, 3.5]),
            pod_size=rng.randint(2, 3),
            pod_oversubscription=rng.choice([4, 9, 16]),
        )
    except TopoplanError:
        return None
    return found if found.size <= most and len(found.leaves) > found.pod_size else None


def random_torus(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a torus of equal servers, or of hosts of one GPU, as `random_cluster`."""
    rng = random.Random(f"torus {seed}")
    sides = [rng.choice([2, 2, 3, 4, 5, 6]) for _ in range(rng.choice([1, 2, 2, 3]))]
    each = [rng.randint(1, 3) for _ in sides] if rng.random() < 0.5 else [1] * len(sides)
    gpus = list(range(rng.choice([1, 1, 2, 3]))) if rng.random() < 0.7 else None
    machine = rng.choice(MACHINES)
    try:
        found = topoplan.cluster_by_kind(
            [Server(machine, gpus, count=prod(sides))],
            nic_gbps=rng.choice([50, 200, 800]),
            nics=2 * sum(each),
            nic_access=rng.choice(["direct", "pcie"]),
            network="torus",
            sides=sides,
            dimension_nics=each,
        )
    except TopoplanError:
        return None
    return found if found.size <= most else None


def plan_of_torus(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a collective on a torus; None if it cannot be planned by kind."""
    return _plan_of_torus(seed, COLLECTIVES[seed % 3], most=most)


def exchange_of_torus(seed: int, *, most: int) -> PlanByKind | None:
    """Return the plan of an all_to_all on a torus; None if it cannot be planned by kind."""
    return _plan_of_torus(seed, "alltoall", most=most)


def random_hosts(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a torus of hosts of one GPU whose ports are equal, differ by dimension, or differ by direction."""
    rng = random.Random(f"hosts {seed}")
    sides = [rng.choice([2, 2, 3, 4, 5, 6, 7]) for _ in range(rng.choice([1, 2, 2, 2, 3, 4]))]
    cluster = torus_by_kind("torus:" + ",".join(map(str, sides)))
    if cluster is None or cluster.size > most:
        return None
    kind, form = cluster.kinds[0], rng.choice(["equal", "dimensions", "directions"])
    by_dimension = [rng.choice([1, 1, 2, 3, 4]) for _ in sides]
    rates = [float(by_dimension[number // 2]) for number in range(2 * len(sides))]
    if form == "equal":
        rates = [12.5] * len(rates)
    elif form == "directions":
        rates = [float(rng.choice([1, 2])) for _ in rates]
    # Port i ahead sends to port i back.
    ports = tuple(
        replace(port, out=rates[number], back=rates[number ^ 1]) for number, port in enumerate(kind.ports)
    )
    return replace(cluster, kinds=(replace(kind, ports=ports),))


def broadcast_of_hosts(seed: int, *, most: int) -> PlanByKind | None:
    """Return the plan of a broadcast or reduce on such a torus; None if it cannot be planned by kind."""
    cluster, rng = random_hosts(seed, most=most), random.Random(seed)
    if cluster is None:
        return None
    root = rng.randrange(cluster.size)
    try:
        return topoplan.plan_by_kind(cluster, rng.choice(["broadcast", "reduce"]), root=root)
    except InfeasibleError:
        return None


def broadcast_of_servers(seed: int, *, most: int) -> PlanByKind | None:
    """Return the plan of a broadcast or reduce on a torus of equal servers; None if it cannot be planned by kind."""
    cluster, rng = random_torus(seed, most=most), random.Random(seed)
    if cluster is None:
        return None
    try:
        return topoplan.plan_by_kind(
            cluster, rng.choice(["broadcast", "reduce"]), root=rng.randrange(cluster.size)
        )
    except InfeasibleError:
        return None


def loads_in_list(
    plan: PlanByKind, report: Verification, listed: Verification
) -> dict[tuple[str, str], float]:
    """Return the loads of the list for a report's links of the sample: the most of those for which each stands."""
    if not plan.rooted_in_torus:
        return {ends: listed.loads[ends] for ends in report.loads}
    assert plan.root is not None
    root = plan.cluster.server_of(plan.root)[0]
    whole, small = plan.cluster.network.torus, plan.sample.cluster.network.torus
    found: dict[tuple[str, str], float] = {}
    for ends, load in listed.loads.items():
        at = [int(name[1:].partition(".")[0]) for name in ends]
        names = [name.partition(".")[2] for name in ends]
        if plan.collective == "reduce":
            at.reverse()
        # The server that is entered, and its parent.
        block = [
            one if one < 2 else max(1, one - side + fewer)
            for one, side, fewer in zip(whole.between(root, at[1]), whole.sides, small.sides, strict=True)
        ]
        back = [one if one < 2 else -1 for one in whole.between(*at)]
        at = [small.server([one - step for one, step in zip(block, back, strict=True)]), small.server(block)]
        if plan.collective == "reduce":
            at.reverse()
        key = f"s{at[0]}.{names[0]}", f"s{at[1]}.{names[1]}"
        found[key] = max(found.get(key, 0.0), load)
    return found


def _plan_of_torus(seed: int, collective: str, *, most: int) -> PlanByKind | None:
    cluster = random_torus(seed, most=most)
    if cluster is None:
        return None
    try:
        return topoplan.plan_by_kind(cluster, collective)
    except InfeasibleError:
        return None


def random_dragonfly(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a dragonfly of two groups or more, equal ones or of servers that differ, as `random_cluster`."""
    rng = random.Random(f"dragonfly {seed}")
    servers = _random_servers(rng, 9)
    try:
        found = topoplan.cluster_by_kind(
            servers,
            nic_gbps=100,
            nics=rng.choice([None, 1, 2]),
            nic_access=rng.choice(["direct", "pcie"]),
            network="dragonfly",
            group_size=rng.randint(1, 4),
            global_gbps=rng.choice([5, 20, 40, 100, 300]),
        )
    except TopoplanError:
        return None
    return found if found.size <= most and len(found.leaves) > 1 else None


def plan_of_three_levels(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a collective on a fat tree of three levels; None if it cannot be planned by kind."""
    return _plan(random_three_levels(seed, most=most), seed)


def plan_of_groups(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a collective on a dragonfly; None if it cannot be planned by kind."""
    return _plan(random_dragonfly(seed, most=most), seed)


def random_in_network(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a cluster whose NVSwitches, or switches of the network, copy and add, as `random_cluster`."""
    rng = random.Random(f"in-network {seed}")
    servers = []
    for _ in range(rng.choice([1, 1, 2])):
        gpus = list(range(rng.choice([1, 2, 4]))) if rng.random() < 0.5 else None
        machine = rng.choice(["dgx-h100", "dgx-h100", "dgx-2", "dgx-a100", "v100x4"])
        servers.append(Server(machine, gpus, nic_gbps=rng.choice([None, 50, 800]), count=rng.randint(1, 5)))
    network = rng.choice(["switch", "rail-optimised", "fat-tree", "fat-tree", "dragonfly"])
    more: dict[str, Any] = {}
    if network == "fat-tree":
        more = {"leaf_size": rng.randint(1, 3), "oversubscription": rng.choice([None, 2, 3.5])}
        more |= {"pod_size": rng.randint(1, 3)} if rng.random() < 0.2 else {}
    elif network == "rail-optimised":
        more = {"oversubscription": rng.choice([None, 2])}
    elif network == "dragonfly":
        more = {"group_size": rng.randint(1, 3), "global_gbps": rng.choice([20, 300])}
    access = rng.choice(["direct", "pcie"])
    which = rng.choice(["nvswitch", "nvswitch", "all", "switch"])
    try:
        found = topoplan.cluster_by_kind(
            servers, nic_gbps=400, nics=rng.choice([None, 2]), nic_access=access, network=network, **more
        ).with_in_network(which)
    except TopoplanError:
        return None
    return found if found.servers > 1 and found.size <= most else None


def plan_in_network(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a collective on such a cluster; None if it cannot be planned by kind."""
    return _plan(random_in_network(seed, most=most), seed)


def changed_switches(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a plan file after `changed_file`, or with other switches that copy and add."""
    if rng.random() < 0.7:
        return changed_file(rng, value)
    value = copy.deepcopy(value)
    network = value["cluster"]["network"]
    devices = [one for kind in value["cluster"]["kinds"] for one in kind["machine"]["devices"]]
    switches = [one for one in devices if one["kind"] == "nvswitch"]
    if switches and rng.random() < 0.7:
        key, one = rng.choice(["multicast", "reduce"]), rng.choice(switches)
        one[key] = not one.get(key, False)
    else:
        network["in_network"] = not network.get("in_network", False)
    return value


def _plan(cluster: ClusterByKind | None, seed: int) -> PlanByKind | None:
    if cluster is None:
        return None
    collective = COLLECTIVES[seed % len(COLLECTIVES)]
    root = random.Random(seed).randrange(cluster.size) if collective in ("broadcast", "reduce") else None
    try:
        return topoplan.plan_by_kind(cluster, collective, root=root)
    except InfeasibleError:
        return None


def random_plan(seed: int, *, most: int) -> PlanByKind | None:
    """Return a plan of a random collective on such a cluster; None if it cannot be planned by kind."""
    return drawn_plan(random_cluster(seed, most=most), seed)


def drawn_plan(
    cluster: ClusterByKind | None, seed: int, among: Sequence[str] = COLLECTIVES
) -> PlanByKind | None:
    """Return a plan of a random collective on a cluster; None if there is none, or it cannot be planned by kind."""
    if cluster is None:
        return None
    rng = random.Random(-seed)
    collective = rng.choice(among)
    root = rng.randrange(cluster.size) if collective in ("broadcast", "reduce") else None
    try:
        return topoplan.plan_by_kind(cluster, collective, root=root)
    except InfeasibleError:
        return None


def refused_of_changed(
    plans: Sequence[PlanByKind],
    change: Callable[[random.Random, dict[str, Any]], dict[str, Any]],
    rng: random.Random,
    changes: int,
    proved: Callable[[PlanByKind, Verification], Fraction | None],
) -> int:
    """Change files of plans at random, and return how many are refused; whatever is accepted is right by its list.

    ``proved`` returns the bound of the list, which that of the plan by kind must not be below.
    """
    refused = 0
    for _ in range(changes):
        value = change(rng, json.loads(json.dumps(rng.choice(plans).to_object())))
        try:
            read = PlanByKind.from_object(value)
            # Claims that fit, so that the trees alone decide.
            read = replace(read, rate=float(read.exact_rate()), bound=float(read.exact_bound()))
            report = verify_by_kind(read)
        except PlanError:
            refused += 1
            continue
        listed = topoplan.verify(read.listed())
        assert listed.exact_rate == report.exact_rate
        assert report.loads == pytest.approx(loads_in_list(read, report, listed))
        bound = proved(read, listed)
        assert bound is not None
        assert report.exact_bound is not None
        assert bound <= report.exact_bound
    return refused


def changed_file(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a plan file with one or two random changes of templates, cluster or certificate."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2])):
        template = rng.choice(value["templates"])
        stage = rng.choice(template["stages"])
        edges = stage["edges"]
        names = sorted(
            {
                end
                for each in template["stages"]
                for edge in each["edges"]
                for end in edge[0][:: len(edge[0]) - 1]
            }
        )
        servers = sorted({name.split(".")[0] for name in names})
        if not edges or not names:
            continue
        edge = rng.choice(edges)
        kind = rng.randrange(13)
        if kind == 0:
            edges.remove(edge)
        elif kind == 1:
            edge[0] = rng.choice(edges)[0]
        elif kind in (2, 3, 4, 12) and "arms" in template:
            arm, other = rng.choice(template["arms"]), rng.choice(template["arms"])
            if kind == 2:
                arm[1], arm[2] = arm[2], arm[1]
            elif kind == 3:
                arm[:], other[:] = list(other), list(arm)
            else:
                arm[rng.randrange(3)] += rng.choice([-1, 1])
        elif kind == 2:
            template["shifts"] = rng.choice([1, 2, 3, 4, 6, 12])
        elif kind == 3:
            template[rng.choice(["root", "centre"])] = rng.choice(servers)
        elif kind == 4:
            template["entries"] = rng.sample(servers, rng.randint(0, min(2, len(servers))))
        elif kind == 12:
            given = rng.choice([servers, template.get("entries", []) or servers])
            template["pod_entries"] = rng.sample(given, rng.randint(0, min(2, len(given))))
        elif kind == 5:
            other = rng.choice(value["templates"])
            template["share"], other["share"] = other["share"], template["share"]
        elif kind == 6:
            run = rng.choice(value["cluster"]["servers"])
            run[1] = max(1, run[1] + rng.choice([-1, 1]))
        elif kind == 7 and "leaf_size" in value["cluster"]["network"]:
            size = rng.choice(["leaf_size", "leaf_size", "pod_size"])
            value["cluster"]["network"][size] = rng.randint(1, 6)
        elif kind == 7 and "group_size" in value["cluster"]["network"]:
            value["cluster"]["network"]["group_size"] = rng.randint(1, 6)
        elif kind == 7 and "sides" in value["cluster"]["network"]:
            sides = value["cluster"]["network"]["sides"]
            rng.shuffle(sides)
        elif kind == 8 and "dimensions" in value["certificate"]:
            dimensions = value["certificate"]["dimensions"]
            sides = value["cluster"]["network"]["sides"]
            dimensions[:] = rng.sample(range(-1, len(sides) + 1), rng.randint(0, len(sides)))
        elif kind == 8:
            rng.choice(value["certificate"]["lengths"])[2] = str(rng.randint(0, 9))
        elif kind == 9 and len(edge[0]) > 2:
            edge[0][rng.randrange(1, len(edge[0]) - 1)] = rng.choice(rng.choice(edges)[0])
        elif kind == 10:
            edge[0][0] = rng.choice(names)
        else:
            first, second = rng.choice(servers), rng.choice(servers)
            text = json.dumps(template).replace(f'"{first}.', '"@.')
            text = text.replace(f'"{second}.', f'"{first}.').replace('"@.', f'"{second}.')
            template.update(json.loads(text))
    return value
