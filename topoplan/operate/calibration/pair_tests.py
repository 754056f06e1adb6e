"""List the tests of two GPUs at a time that cross a machine's links, and the load of each test.

On a cluster a test joins GPUs of two servers, and one GPU stands for each NIC unless every GPU is requested; on one
server any two GPUs are joined. A test runs both ways at once (sendrecv of nccl-tests) or one way (broadcast of two
ranks); the route is that of a copy (`topoplan.model.copy_routes`), whatever other path the network would take.

With very many ends only near partners in the list are paired, so that there are at most `MOST_TESTS` tests.
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
"""Most pairs: those of 200 ends."""

MOST_ENDS = 4096

FILLED = " filled"
"""Suffix of the channel and the name of a link that several tests fill together."""


@dataclass(frozen=True, slots=True)
class PairTest:
    """A test of two GPUs.

    src, dst: names of the two; data runs from ``src`` to ``dst``, and back too in a test both ways.
    channel: of the route, as in `CopyRoute`.
    rate: GB/s of the links each way, as stated.
    out, back: GB/s of the test on each link at that rate; ``back`` is empty for one way.
    together: name of the round in which it fills wide links together with others
    (`topoplan.operate.calibration.pair_rounds`); their channel then appears a second time, as ``network filled``. Empty
    for a single test.
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
        """Name such as ``gpu0-gpu3``, ``gpu0>gpu3`` for one way, followed by the round that it fills links in."""
        name = f"{self.src}{'-' if self.back else '>'}{self.dst}"
        return f"{name} ({self.together})" if self.together else name

    @property
    def links(self) -> tuple[LinkKey, ...]:
        return (*self.out, *(key for key in self.back if key not in self.out))

    def load(self, key: LinkKey) -> float:
        """Return the GB/s of the test on a link."""
        return self.out.get(key, 0.0) + self.back.get(key, 0.0)


@dataclass(frozen=True, slots=True)
class PairTests:
    """All tests that a machine allows.

    one_way: each test is one way; every two ends then have two.
    alone: GPUs that no other end reaches.
    """

    topology: Topology
    ends: tuple[str, ...]
    tests: tuple[PairTest, ...]
    one_way: bool
    alone: tuple[str, ...] = ()

    def named(self, others: Sequence[PairTest] = ()) -> dict[tuple[str, str, str], PairTest]:
        """Return these tests and others by their ends and rounds; tests both ways under both orders."""
        every = (*self.tests, *others)
        found = {(test.src, test.dst, test.together): test for test in every}
        if not self.one_way:
            found |= {(test.dst, test.src, test.together): test for test in every}
        return found


def possible_tests(
    topology: Topology, gpus: Sequence[int] | None = None, *, every_gpu: bool = False, one_way: bool = False
) -> PairTests:
    """Return the tests of two GPUs of an allocation.

    every_gpu: on a cluster, each GPU rather than one for each NIC.

    >>> import topoplan
    >>> four = topoplan.cluster([topoplan.Server("dgx-1v", count=4)], nic_gbps=100, nics=1)
    >>> found = possible_tests(four)
    >>> found.ends, len(found.tests), found.tests[0].name, found.tests[0].rate
    (('s0.gpu0', 's1.gpu0', 's2.gpu0', 's3.gpu0'), 6, 's0.gpu0-s1.gpu0', 12.0)
    """
    names = [topology.gpus[gpu] for gpu in sorted(topology.select(gpus))]
    if len(names) < 2:
        raise UsageError(f"pair tests need two GPUs or more, got {len(names)}; name two or more")
    servers = {name: topology.device(name).server for name in names}
    many = len(set(servers.values())) > 1
    routes = CopyRoutes(topology)
    if many:
        names, alone = _ends(routes, topology, names, every_gpu=every_gpu)
    else:
        alone = ()
    if len(names) > MOST_ENDS:
        raise UsageError(f"ends must be at most {MOST_ENDS}, got {len(names)}; name fewer GPUs with --gpus")
    tests = []
    count = len(names)
    # with many ends only near ones are paired
    near = count if count * (count - 1) // 2 <= MOST_TESTS else max(1, MOST_TESTS // count)
    for a, b in ((i, j) for i in range(count) for j in range(i + 1, min(count, i + 1 + near))):
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
        raise UsageError(f"no two of the {len(names)} GPUs reach each other; choose joined GPUs with --gpus")
    joined = {end for test in tests for end in (test.src, test.dst)}
    return PairTests(
        topology,
        tuple(name for name in names if name in joined),
        tuple(tests),
        one_way,
        (*alone, *(name for name in names if name not in joined)),
    )


def node_test(possible: PairTests, src: str, dst: str) -> PairTest | None:
    """Return the test of two servers with all their ends at once, paired in order; None if no two ends reach each
    other.

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


def _ends(
    routes: CopyRoutes, topology: Topology, names: Sequence[str], *, every_gpu: bool
) -> tuple[list[str], tuple[str, ...]]:
    """Return the participating GPUs of a cluster, NIC 0 of all servers first, and GPUs that reach no server."""
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
    """Return the GB/s of a copy on each link, striped in proportion over each stage."""
    return {
        link_key(link): rate * link.bandwidth / stage_bandwidth(stage)
        for stage in route.stages
        for link in stage
    }


def link_classes(tests: Sequence[PairTest]) -> tuple[tuple[LinkKey, ...], ...]:
    """Return the links that tests cross, in classes that no test distinguishes.

    The links of a NIC and of the GPU that is tested over it are one class, both ways:

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
    """Return names of links: ``a-b`` for both directions, ``a>b`` for one; a NIC's two sides are one name.

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
            # devices of a server come first
            first, second = sorted((src, dst), key=lambda name: ("." not in name, name))
            named[f"{first}-{second}{filled}"] = None
        else:
            named[f"{src}>{dst}{filled}"] = None
    return tuple(sorted(named))
