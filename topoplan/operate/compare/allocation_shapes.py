"""Rank allocations of a number of GPUs of a large cluster by their shape, and rate the GPUs that the best one leaves.

A shape is how many servers give how many GPUs each, and how many leaves they are in. A cluster of thousands of GPUs has
too many sets to list, and equivalent servers make most of them equal. So a few shapes are tried:

- whole servers, the leaves filled one after another, those with most free GPUs first;
- whole servers, one of each leaf in turn; and the servers of the fastest kind first, by the rate of two of them;
- a half, a quarter and so on of the GPUs of every server, down to one;
- GPUs that are left over on one more server, or spread evenly over all servers;
- the best set inside one server, if it has enough GPUs (`topoplan.operate.compare.recommendation`).

The GPUs taken of a server are neighbours by number, or evenly spaced. Each shape is planned by kind. `rate_of_any_set`
bounds every set, tried or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.nic_wiring import WiredServer
from topoplan.operate.compare.recommendation import recommend
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.plan import ALL_TO_ALL, check_collective
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.schedules.nccl_tuning import NcclPeak, nccl_peaks
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.solve.planner import plan
from topoplan.units import counted, exact, nearest_float

Taken = dict[int, tuple[int, ...]]
"""GPUs taken of each server, by their numbers there, ascending."""

Progress = Callable[[str], None]

MOST_KINDS = 12
"""Most kinds of servers of which two are planned, to take the fastest first."""


@dataclass(frozen=True, slots=True)
class AllocationShape:
    """One set of GPUs of a large cluster with its shape; rates in GB/s of algorithm bandwidth.

    gpus: ascending numbers in the cluster.
    servers, leaves: how many they are on; leaves is 1 in a network without leaves.
    each: GPUs of a server and the number of servers that give so many, most GPUs first.
    rate, bound, why: of trees or paths, the upper bound of this set, and its bottleneck in words.
    nccl: NCCL's fastest schedule; None if its model does not know such sets.
    plan: the plan by kind; None inside one server.
    """

    gpus: tuple[int, ...]
    servers: int
    leaves: int
    each: tuple[tuple[int, int], ...]
    rate: float
    bound: float
    why: str
    nccl: NcclPeak | None
    plan: PlanByKind | None

    @property
    def words(self) -> str:
        """The servers and the GPUs of each, such as ``128 servers x 8 GPUs``."""
        parts = (f"{counted(number, 'server')} x {counted(gpus, 'GPU')}" for gpus, number in self.each)
        return " + ".join(parts)


@dataclass(frozen=True, slots=True)
class RankedShapes:
    """The shapes of a number of GPUs, best first.

    limit: GB/s that no set of as many GPUs exceeds; None if it is not known.
    following, left: GB/s of the best shape of as many of the remaining GPUs, and of all of them; None if they are too
    few, or have no plan by kind.
    """

    shapes: tuple[AllocationShape, ...]
    limit: float | None
    following: float | None
    left: float | None

    @property
    def proved(self) -> bool:
        """Whether no set of as many GPUs is faster than the first shape."""
        return self.limit is not None and self.shapes[0].rate >= self.limit


def recommend_shapes(
    cluster: ClusterByKind,
    count: int,
    collective: str = "allreduce",
    *,
    free: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> RankedShapes:
    """Return the shapes of ``count`` GPUs of a cluster, the fastest first, then those on fewest servers.

    ``free`` are the GPUs to choose from, all by default. The root of a broadcast or reduce is the first GPU of a set.
    UsageError for too few GPUs, and for a torus; InfeasibleError if no shape has a plan by kind.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=1250)], nic_gbps=400, nic_access="direct")
    >>> found = recommend_shapes(many, 1024)
    >>> found.shapes[0].words, round(found.shapes[0].rate, 3), found.proved
    ('128 servers x 8 GPUs', 201.575, True)
    """
    collective = check_collective(collective)
    if cluster.network.kind == "torus":
        raise UsageError("GPUs of a torus of servers are not chosen by kind; choose a cluster of switches")
    there = _available(cluster, free)
    number = sum(map(len, there.values()))
    if not 2 <= count <= number:
        raise UsageError(
            f"count must be 2 or more and at most {number:,}, the GPUs to choose from, got {count:,}; choose "
            f"{'more' if count < 2 else 'fewer'}"
        )
    shapes, limit = _ranked(cluster, there, count, collective, progress)
    taken = _by_server(cluster, shapes[0].gpus)
    rest = {server: tuple(sorted({*gpus} - {*taken.get(server, ())})) for server, gpus in there.items()}
    rest = {server: gpus for server, gpus in rest.items() if gpus}
    remaining = sum(map(len, rest.values()))
    following = left = None
    if remaining >= count:
        following = _rate_or_none(lambda: _ranked(cluster, rest, count, collective, progress)[0][0])
    if remaining >= 2:
        left = _rate_or_none(lambda: _planned(cluster, rest, collective))
    return RankedShapes(shapes, limit, following, left)


def _rate_or_none(made: Callable[[], AllocationShape]) -> float | None:
    try:
        return made().rate
    except (InfeasibleError, UsageError):
        return None


def _available(cluster: ClusterByKind, free: Sequence[int] | None) -> Taken:
    """Return the GPUs to choose from by server; UsageError for a number that the cluster does not have, or twice."""
    if free is None:
        found, server = {}, 0
        for kind, number in cluster.runs:
            own = tuple(range(cluster.gpus_of_kind[kind]))
            found.update(dict.fromkeys(range(server, server + number), own) if own else {})
            server += number
        return found
    if len(set(free)) < len(free) or not all(0 <= gpu < cluster.size for gpu in free):
        raise UsageError(
            f"GPUs to choose from must be different numbers from 0 to {cluster.size - 1}, got others; name each once"
        )
    return _by_server(cluster, sorted(free))


def _by_server(cluster: ClusterByKind, gpus: Sequence[int]) -> Taken:
    """Return ascending GPUs of a cluster by server."""
    places = map(cluster.server_of, gpus)
    return {
        server: tuple(gpu for _, gpu in members)
        for server, members in groupby(places, key=lambda one: one[0])
    }


def rate_of_any_set(
    cluster: ClusterByKind, there: Mapping[int, tuple[int, ...]], count: int, collective: str
) -> float | None:
    """Return GB/s that no set of so many GPUs on two servers or more exceeds; None for an all-to-all.

    Each tree of an all_gather enters n - 1 of n servers, over no more than the rates of the NICs of n servers, and of
    the links from NICs into ``count`` GPUs. The bound falls with n, so the fewest servers that have enough GPUs,
    with the fastest NICs, give it. An all_reduce crosses twice, up and down; a reduce_scatter leaves n - 1. A broadcast
    enters every server but the root's, and a reduce leaves it: the slowest of the n - 1 fastest.
    """
    if collective == ALL_TO_ALL or len(there) < 2:
        return None
    sizes = sorted(map(len, there.values()), reverse=True)
    fewest, number = 0, 0
    while number < count:
        number += sizes[fewest]
        fewest += 1
    fewest = max(fewest, 2)
    kinds = Counter((kind, there[one]) for one, kind in _kinds_of(cluster, there))
    total: list[Fraction] = []
    slowest: list[Fraction] = []
    for side in (0, 1):
        of_nics: Counter[Fraction] = Counter()
        of_gpus: Counter[Fraction] = Counter()
        for (kind, own), servers in kinds.items():
            of_nics[_nic_rates(cluster.kinds[kind])[side]] += servers
            rates = _gpu_rates(cluster.kinds[kind], side)
            for gpu in own:
                of_gpus[rates[gpu]] += servers
        total.append(min(_most(of_nics, fewest), _most(of_gpus, count)))
        slowest.append(_most(of_nics, fewest - 1) - _most(of_nics, fewest - 2))
    parts = fewest - 1
    found = {
        "allreduce": min(total) / (2 * parts),
        "allgather": total[1] / parts,
        "reduce_scatter": total[0] / parts,
        "broadcast": slowest[1],
        "reduce": slowest[0],
    }
    return nearest_float(found[collective])


def _kinds_of(cluster: ClusterByKind, servers: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield servers, ascending, with their kinds."""
    first = 0
    for kind, count in cluster.runs:
        yield from ((one, kind) for one in range(first, first + count) if one in servers)
        first += count


def _nic_rates(server: WiredServer) -> tuple[Fraction, Fraction]:
    """Return GB/s of all NICs of a server, out and back."""
    return (
        sum((exact(port.out) for port in server.ports), Fraction(0)),
        sum((exact(port.back) for port in server.ports), Fraction(0)),
    )


def _gpu_rates(server: WiredServer, side: int) -> list[Fraction]:
    """Return GB/s of all links of each GPU that may lead to NICs: out, or back for side 1."""
    inside = {device.name for device in server.devices if device.kind in ("gpu", "nvswitch")}
    rates = {device.name: Fraction(0) for device in server.devices if device.kind == "gpu"}
    for link in server.links:
        gpu, other = (link.dst, link.src) if side else (link.src, link.dst)
        if gpu in rates and other not in inside:
            rates[gpu] += exact(link.bandwidth)
    return [*rates.values()]


def _most(rates: Mapping[Fraction, int], number: int) -> Fraction:
    """Return the sum of the largest of some rates, each of which occurs several times."""
    total = Fraction(0)
    for rate in sorted(rates, reverse=True):
        taken = min(number, rates[rate])
        total += rate * taken
        number -= taken
    return total


def _ranked(
    cluster: ClusterByKind, there: Taken, count: int, collective: str, progress: Progress | None
) -> tuple[tuple[AllocationShape, ...], float | None]:
    """Return all shapes, the fastest first, and the rate that no set exceeds, None if it is not known.

    One shape of equal words and leaves stands, the fastest.
    """
    found, inside = _inside_servers(cluster, there, count, collective)
    failed: list[str] = []
    for taken in _candidates(cluster, there, count, collective):
        if progress is not None:
            progress(f"{counted(len(taken), 'server')} with {counted(count, 'GPU')}")
        try:
            found.append(_planned(cluster, taken, collective))
        except (InfeasibleError, UsageError) as error:
            failed.append(str(error))
    if not found and cluster.network.group_size:
        raise InfeasibleError(
            "GPUs of a dragonfly must have one in each group to be planned by kind; choose more"
        )
    if not found:
        raise InfeasibleError(failed[0] if failed else f"no shape of {count:,} GPUs has a plan by kind")
    best: dict[tuple[object, ...], AllocationShape] = {}
    for one in sorted(found, key=lambda one: (-one.rate, one.servers, one.leaves, one.gpus)):
        best.setdefault((one.each, one.leaves), one)
    between = rate_of_any_set(cluster, there, count, collective) if len(there) > 1 else 0.0
    limit = None if inside is None or between is None else max(inside, between)
    return tuple(best.values()), limit


def _planned(cluster: ClusterByKind, taken: Taken, collective: str) -> AllocationShape:
    """Return the shape of taken GPUs, planned by kind, or as a list inside one server."""
    each = tuple(sorted(Counter(map(len, taken.values())).items(), reverse=True))
    gpus = tuple(cluster.first_rank(server) + gpu for server, own in sorted(taken.items()) for gpu in own)
    leaves = len({server // cluster.leaf_size for server in taken}) if cluster.network.leaf else 1
    if len(taken) == 1:
        ((server, own),) = taken.items()
        inside = plan(cluster.server_machine(server), collective, gpus=own)
        why = explain_certificate(inside)
        return AllocationShape(gpus, 1, leaves, each, inside.rate, inside.bound, why, None, None)
    part = cluster.with_gpus(taken)
    root = 0 if collective in ("broadcast", "reduce") else None
    made = plan_by_kind(part, collective, root=root)
    peaks = nccl_peaks(made)
    return AllocationShape(
        *(gpus, len(taken), leaves, each, made.rate, made.bound, made.explain_bound()),
        peaks[0] if peaks else None,
        made,
    )


def _inside_servers(
    cluster: ClusterByKind, there: Taken, count: int, collective: str
) -> tuple[list[AllocationShape], float | None]:
    """Return the best set inside a server of each kind that has enough GPUs, and the highest bound of all such sets.

    If a server has too many sets to list, its first GPUs and evenly spaced ones stand for them, and the bound is None.
    """
    found: list[AllocationShape] = []
    limit: float | None = 0.0
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for server, kind in _kinds_of(cluster, there):
        own = there[server]
        if len(own) < count or (kind, own) in seen:
            continue
        seen.add((kind, own))
        machine, first = cluster.server_machine(server), cluster.first_rank(server)
        try:
            sets = recommend(machine, count, collective, free=own)
        except UsageError:
            sets = ()
        if not sets:
            limit = None
            for spaced in (False, True):
                with suppress(InfeasibleError):
                    chosen = {server: _chosen(own, count, spaced=spaced)}
                    found.append(_planned(cluster, chosen, collective))
            continue
        limit = None if limit is None else max(limit, *(one.bound for one in sets))
        best = sets[0]
        if best.rate:
            found.append(
                AllocationShape(
                    gpus=tuple(first + gpu for gpu in best.gpus),
                    servers=1,
                    leaves=1,
                    each=((count, 1),),
                    rate=best.rate,
                    bound=best.bound,
                    why=explain_certificate(plan(machine, collective, gpus=best.gpus)),
                    nccl=NcclPeak(best.nccl_best[1], best.nccl_best[0]) if best.nccl_best[0] else None,
                    plan=None,
                )
            )
    return found, limit


def _candidates(cluster: ClusterByKind, there: Taken, count: int, collective: str) -> Iterator[Taken]:
    """Yield the sets of so many GPUs that are planned, on two servers or more, each once."""
    most = max(map(len, there.values()))
    seen: set[tuple[tuple[int, tuple[int, ...]], ...]] = set()
    for place, order in enumerate(_orders(cluster, there, collective)):
        cap = most
        while cap:
            for number in _numbers(order, there, cap, count):
                for spaced in (False, True):
                    taken = {
                        server: _chosen(there[server], gpus, spaced=spaced)
                        for server, gpus in sorted(number.items())
                    }
                    key = tuple(taken.items())
                    if len(taken) > 1 and key not in seen:
                        seen.add(key)
                        yield taken
            # Parts of servers are tried in the first order alone.
            cap = cap // 2 if place == 0 else 0


def _chosen(gpus: tuple[int, ...], number: int, *, spaced: bool) -> tuple[int, ...]:
    if not spaced:
        return gpus[:number]
    return tuple(gpus[one * len(gpus) // number] for one in range(number))


def _orders(cluster: ClusterByKind, there: Taken, collective: str) -> Iterator[list[int]]:
    """Yield the orders in which servers are taken, see the module."""
    kind = dict(_kinds_of(cluster, there))
    in_leaf, in_pod = Counter[int](), Counter[int]()
    for server, gpus in there.items():
        leaf = server // cluster.leaf_size
        in_leaf[leaf] += len(gpus)
        in_pod[leaf // cluster.pod_size] += len(gpus)

    def packed(server: int) -> tuple[object, ...]:
        leaf = server // cluster.leaf_size
        pod = leaf // cluster.pod_size
        return (-in_pod[pod], pod, -in_leaf[leaf], leaf, -len(there[server]), server)

    first = sorted(there, key=packed)
    yield first
    if len({*kind.values()}) > 1:
        rate = _rates_of_two(cluster, Counter(kind.values()), collective)
        yield sorted(first, key=lambda server: -rate[kind[server]])
    if len(in_leaf) > 1:
        turn, before = {}, Counter[int]()
        for server in first:
            turn[server] = before[server // cluster.leaf_size]
            before[server // cluster.leaf_size] += 1
        yield sorted(first, key=turn.__getitem__)


def _rates_of_two(cluster: ClusterByKind, kinds: Counter[int], collective: str) -> dict[int, float]:
    """Return GB/s of two servers of each kind; 0 for kinds without a plan, and for the rarest of very many kinds."""
    rate = dict.fromkeys(kinds, 0.0)
    root = 0 if collective in ("broadcast", "reduce") else None
    for kind, _ in kinds.most_common(MOST_KINDS):
        with suppress(InfeasibleError, UsageError):
            two = replace(cluster, runs=((kind, 2),), uplinks=(), global_links=())
            rate[kind] = plan_by_kind(two, collective, root=root).rate
    return rate


def _numbers(order: Sequence[int], there: Taken, cap: int, count: int) -> Iterator[dict[int, int]]:
    """Yield the GPUs of each server in an order, at most ``cap`` of each: the last one with the rest, then evenly."""
    number: dict[int, int] = {}
    left = count
    for server in order:
        number[server] = min(left, cap, len(there[server]))
        left -= number[server]
        if not left:
            break
    if left:
        return
    yield number
    if len({*number.values()}) > 1:
        even = dict.fromkeys(number, 0)
        left = count
        open_ones = [*number]
        while left:
            share = max(1, left // len(open_ones))
            for server in open_ones:
                more = min(share, left, min(cap, len(there[server])) - even[server])
                even[server] += more
                left -= more
            open_ones = [one for one in open_ones if even[one] < min(cap, len(there[one]))]
        yield even
