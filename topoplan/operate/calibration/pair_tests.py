"""Tests of two GPUs at a time that cross a machine's links: who can be tested with whom, and what each test loads.

On a cluster a test joins GPUs of two servers, and one GPU stands for each NIC unless every GPU is asked for; on one
server any two GPUs are joined. A test runs both ways at once (sendrecv of nccl-tests) or one way (broadcast of two
ranks); the route is that of a copy (`topoplan.model.copy_routes`), whatever path the network would choose besides.

Of very many ends only partners near by in the list are paired, so that no more than `MOST_TESTS` are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import nic_name
from topoplan.model.copy_routes import CopyRoute, CopyRoutes, stage_bandwidth
from topoplan.operate.calibration.calibrated_topology import LinkKey, link_key

MOST_TESTS = 20_000
"""Most pairs that are looked at: those of 200 ends."""

MOST_ENDS = 4096

FILLED = " filled"
"""Behind the channel of a link that several tests fill together, and behind its name."""


@dataclass(frozen=True, slots=True)
class PairTest:
    """A test of two GPUs.

    src, dst: names of the two; data runs from ``src`` to ``dst``, and back too where the test is both ways.
    channel: of the route, as in `CopyRoute`.
    rate: GB/s that the links let through each way, as stated.
    out, back: GB/s that the test takes of each link on its way at that rate; ``back`` is empty where it is one way.
    together: name of the round in which it fills wide links together with others (see
    `topoplan.operate.calibration.pair_rounds`); their channel is then there a second time, as ``network filled``. Empty
    for a test by itself.
    """

    src: str
    dst: str
    channel: str
    rate: float
    out: Mapping[LinkKey, float] = field(hash=False)
    back: Mapping[LinkKey, float] = field(default_factory=dict, hash=False)
    together: str = ""

    @property
    def name(self) -> str:
        """Such as ``gpu0-gpu3``, and ``gpu0>gpu3`` where it is one way; behind it the round that it fills links in."""
        name = f"{self.src}{'-' if self.back else '>'}{self.dst}"
        return f"{name} ({self.together})" if self.together else name

    @property
    def links(self) -> tuple[LinkKey, ...]:
        """All links that it loads."""
        return (*self.out, *(key for key in self.back if key not in self.out))

    def load(self, key: LinkKey) -> float:
        """GB/s that it takes of a link."""
        return self.out.get(key, 0.0) + self.back.get(key, 0.0)


@dataclass(frozen=True, slots=True)
class PairTests:
    """All tests that a machine allows.

    ends: GPUs that take part.
    one_way: each test is one way; every two ends then have two.
    alone: GPUs that no other end can be reached from.
    """

    topology: Topology
    ends: tuple[str, ...]
    tests: tuple[PairTest, ...]
    one_way: bool
    alone: tuple[str, ...] = ()

    def named(self, others: Sequence[PairTest] = ()) -> dict[tuple[str, str, str], PairTest]:
        """These tests and others by their ends and rounds; those that are both ways under both orders."""
        every = (*self.tests, *others)
        found = {(test.src, test.dst, test.together): test for test in every}
        if not self.one_way:
            found |= {(test.dst, test.src, test.together): test for test in every}
        return found


def possible_tests(
    topology: Topology, gpus: Sequence[int] | None = None, *, every_gpu: bool = False, one_way: bool = False
) -> PairTests:
    """The tests of two GPUs of an allocation.

    gpus: the allocation; None for all.
    every_gpu: on a cluster, each GPU and not one for each NIC.
    one_way: from the first to the second alone.

    >>> import topoplan
    >>> four = topoplan.cluster([topoplan.Server("dgx-1v", count=4)], nic_gbps=100, nics=1)
    >>> found = possible_tests(four)
    >>> found.ends, len(found.tests), found.tests[0].name, found.tests[0].rate
    (('s0.gpu0', 's1.gpu0', 's2.gpu0', 's3.gpu0'), 6, 's0.gpu0-s1.gpu0', 12.0)
    """
    names = [topology.gpus[gpu] for gpu in topology.select(gpus)]
    if len(names) < 2:
        raise UsageError("a pair has two GPUs, and there is one; name two or more")
    servers = {name: topology.device(name).server for name in names}
    many = len(set(servers.values())) > 1
    routes = CopyRoutes(topology)
    if many:
        names, alone = _ends(routes, topology, names, every_gpu=every_gpu)
    else:
        alone = ()
    if len(names) > MOST_ENDS:
        raise UsageError(f"{len(names)} ends are too many; name up to {MOST_ENDS} GPUs with --gpus")
    tests = []
    for a, b in _couples(len(names)):
        src, dst = names[a], names[b]
        if many and servers[src] == servers[dst]:
            continue
        out, back = (routes.between_servers(*ends) for ends in ((src, dst), (dst, src)))
        if out is None or back is None:
            continue
        if one_way:
            tests += [_test(src, dst, out, None), _test(dst, src, back, None)]
        else:
            tests.append(_test(src, dst, out, back))
    if not tests:
        raise UsageError(f"no two of the {len(names)} GPUs reach each other; there is no pair to test")
    joined = {end for test in tests for end in (test.src, test.dst)}
    return PairTests(
        topology,
        tuple(name for name in names if name in joined),
        tuple(tests),
        one_way,
        (*alone, *(name for name in names if name not in joined)),
    )


def node_test(possible: PairTests, src: str, dst: str) -> PairTest | None:
    """Return the test of two servers with all their ends at once, the first of one with the first of the other.

    Its rate is what the links let through together, each way. None where no two of the ends reach each other.

    >>> import topoplan
    >>> pair = possible_tests(topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=200, nics=4))
    >>> made = node_test(pair, "s0", "s1")
    >>> made.name, made.rate, len(made.links)
    ('s0-s1', 100.0, 32)
    """
    topology, routes = possible.topology, CopyRoutes(possible.topology)
    of_server = {
        server: [end for end in possible.ends if topology.device(end).server == server]
        for server in (src, dst)
    }
    loads: tuple[dict[LinkKey, float], dict[LinkKey, float]] = ({}, {})
    rate = 0.0
    channel = ""
    for a, b in zip(of_server[src], of_server[dst], strict=False):
        out, back = routes.between_servers(a, b), routes.between_servers(b, a)
        if out is None or back is None:
            continue
        one = _test(a, b, out, None if possible.one_way else back)
        rate += one.rate
        channel = channel or one.channel
        for total, part in zip(loads, (one.out, one.back), strict=True):
            for key, load in part.items():
                total[key] = total.get(key, 0.0) + load
    if not rate:
        return None
    width = {link_key(link): link.bandwidth for link in topology.links}
    share = min(1.0, *(width[key] / load for total in loads for key, load in total.items()))
    out_loads, back_loads = ({key: load * share for key, load in total.items()} for total in loads)
    return PairTest(src, dst, channel, rate * share, out_loads, back_loads)


def _couples(count: int) -> Iterable[tuple[int, int]]:
    """Places of two ends: all of them, or of many ends those that are near each other."""
    near = count if count * (count - 1) // 2 <= MOST_TESTS else max(1, MOST_TESTS // count)
    return ((a, b) for a in range(count) for b in range(a + 1, min(count, a + 1 + near)))


def _ends(
    routes: CopyRoutes, topology: Topology, names: Sequence[str], *, every_gpu: bool
) -> tuple[list[str], tuple[str, ...]]:
    """The GPUs of a cluster that take part, those of NIC 0 of all servers first, and those that reach no server."""
    of_server: dict[str, list[str]] = {}
    for name in names:
        of_server.setdefault(topology.device(name).server, []).append(name)
    kinds = {device.name: device.kind for device in topology.devices}
    nics: dict[str, list[str]] = {}
    alone = []
    for number, (server, own) in enumerate(of_server.items()):
        others = [every for name, every in of_server.items() if name != server]
        following = [*others[number:], *others[:number]]
        for place, gpu in enumerate(own):
            tried = (every[(place + step) % len(every)] for every in following for step in range(len(every)))
            route = next((found for peer in tried if (found := routes.between_servers(gpu, peer))), None)
            if route is None:
                alone.append(gpu)
                continue
            nic = next((nic_name(link.dst) for link in route.links if kinds[link.dst] == "nic"), gpu)
            nics.setdefault(nic, []).append(gpu)
    ranked: list[tuple[int, int, str]] = []
    seen: dict[str, int] = {}
    for gpus in nics.values():
        server = topology.device(gpus[0]).server
        rank = seen[server] = seen.get(server, -1) + 1
        ranked += [(place, rank, gpu) for place, gpu in enumerate(gpus if every_gpu else gpus[:1])]
    return [gpu for _, _, gpu in sorted(ranked, key=lambda one: one[:2])], tuple(alone)


def _test(src: str, dst: str, out: CopyRoute, back: CopyRoute | None) -> PairTest:
    rate = min(route.bandwidth for route in (out, back) if route is not None)
    return PairTest(
        src, dst, out.channel, rate, _loads(out, rate), {} if back is None else _loads(back, rate)
    )


def _loads(route: CopyRoute, rate: float) -> dict[LinkKey, float]:
    """GB/s that a copy of this rate takes of each link: a stage of several carries it in proportion."""
    return {
        link_key(link): rate * link.bandwidth / stage_bandwidth(stage)
        for stage in route.stages
        for link in stage
    }


def link_classes(tests: Sequence[PairTest]) -> tuple[tuple[LinkKey, ...], ...]:
    """The links that these tests cross, those together that no test crosses without the others.

    The wires of a NIC and of the GPU that is tested over it are one class, both ways:

    >>> import topoplan
    >>> four = topoplan.cluster([topoplan.Server("dgx-1v", count=4)], nic_gbps=100, nics=1)
    >>> [wire_names(links) for links in link_classes(possible_tests(four).tests)][0]
    ('s0.gpu0-s0.nic0', 's0.nic0-switch0')
    """
    crossed: dict[LinkKey, list[int]] = {}
    for number, test in enumerate(tests):
        for key in test.links:
            crossed.setdefault(key, []).append(number)
    classes: dict[tuple[int, ...], list[LinkKey]] = {}
    for key, numbers in crossed.items():
        classes.setdefault(tuple(numbers), []).append(key)
    return tuple(tuple(keys) for keys in classes.values())


def wire_names(links: Iterable[LinkKey]) -> tuple[str, ...]:
    """Names of some links: ``a-b`` where both directions are there, ``a>b`` for one; a NIC's two sides are the NIC.

    >>> wire_names([("gpu0", "gpu1", "nvlink"), ("gpu1", "gpu0", "nvlink"), ("nic0.tx", "leaf0", "network")])
    ('gpu0-gpu1', 'nic0>leaf0')
    """
    ends = dict.fromkeys(
        (nic_name(src), nic_name(dst), FILLED if channel.endswith(FILLED) else "")
        for src, dst, channel in links
    )
    named: dict[str, None] = {}
    for src, dst, filled in ends:
        if (dst, src, filled) in ends:
            # What stands in a server comes first.
            first, second = sorted((src, dst), key=lambda name: ("." not in name, name))
            named[f"{first}-{second}{filled}"] = None
        else:
            named[f"{src}>{dst}{filled}"] = None
    return tuple(sorted(named))
