"""Plans with relays on the windows engine: idle GPUs whose kernels a rank's process runs; the bits of loopback."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest

import topoplan
from collectives import Communicator
from collectives.backends.nccl import device_arenas, relay_engine
from collectives.backends.nccl.relay_engine import HostReport, relay_owners
from collectives.backends.open_backend import check_helpers
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy, floats, machine, on_every_rank, outcome
from tests.support.regular_fabrics import helped_star
from tests.support.tcp_jobs import call, seal
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.machine.topology import facts
from topoplan.plans.plan import Plan
from topoplan.units import listed

__all__ = ["cupy", "machine"]

GPUS = (0, 1, 4, 6)
"""Of a DGX-1V: no NVLink ring joins them."""

REGION = 64 << 20
"""Bytes, half of which take the slots of the trees."""

COLLECTIVES = ("allreduce", "broadcast", "reduce", "reduce_scatter", "allgather")


@cache
def relayed(collective: str = "allreduce", gpus: tuple[int, ...] = GPUS) -> Plan:
    """Return a plan whose trees pass relays."""
    plan = topoplan.plan(topoplan.with_relays("dgx-1v", gpus), collective)
    assert plan.helpers
    return plan


def run(cupy: ModuleType, plan: Plan, task: Any, gpus: tuple[int, ...] = GPUS, **options: Any) -> list[Any]:
    settings = {"region_bytes": REGION, "timeout": 40.0, "chunk_bytes": 1 << 20}
    return on_every_rank(cupy, plan, task, gpus=gpus, **{**settings, **options})


def sums(comm: Communicator, given: Any, calls: int, **how: Any) -> list[str | None]:
    found = [comm.all_reduce(given, **how) for _ in range(calls)]
    return [seal(one.get()) for one in found]


def check_bits(
    cupy: ModuleType, plan: Plan, gpus: tuple[int, ...] = GPUS, *, count: int = 3001, calls: int = 2
) -> list[str]:
    """Run a plan's collective on floats as loopback does; return what the ranks say of their engine."""
    size = len(plan.ranks)
    lengths = (count, 0, 1) if plan.collective in ("allreduce", "broadcast", "reduce") else (size * count, 0)
    given = [floats(size, length) for length in lengths]

    def task(comm: Communicator, rank: int) -> Any:
        found = [call(comm, plan.collective, cupy.asarray(one[rank])) for one in given for _ in range(calls)]
        return [None if one is None else seal(one.get()) for one in found], comm.engine

    found = outcome(run(cupy, plan, task, gpus))
    with Communicator(plan, "loopback") as comm:
        wanted = [call(comm, plan.collective, one) for one in given for _ in range(calls)]
    for rank, (results, _) in enumerate(found):
        assert results == [seal(one[rank]) for one in wanted]
    return [said for _, said in found]


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_idle_gpus_add_and_send_on(machine: Machine, cupy: ModuleType, collective: str) -> None:
    machine.gpus, machine.peers = 8, True
    said = set(check_bits(cupy, relayed(collective)))
    assert len(said) == 1
    assert said.pop().endswith("; windows over peer access with relays gpu2, gpu3, gpu5, gpu7")
    assert machine.memory == {}


@pytest.mark.parametrize(
    "collective",
    [COLLECTIVES[0], *(pytest.param(one, marks=pytest.mark.thorough) for one in COLLECTIVES[1:])],
)
def test_relays_of_islands(machine: Machine, cupy: ModuleType, collective: str) -> None:
    """The trees of an allreduce pass relays, and those of the other collectives do not."""
    machine.gpus, machine.peers = 8, True
    gpus = (0, 1, 4, 5)
    plan = topoplan.plan(topoplan.with_relays("rtx-pro-6000-2x4", gpus), collective)
    assert bool(plan.helpers) == (collective == "allreduce")
    check_bits(cupy, plan, gpus)


@pytest.mark.thorough
def test_an_average_divides_by_the_ranks_alone(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 8, True
    plan, given = relayed(), floats(4, 4200)
    found = run(cupy, plan, lambda comm, rank: sums(comm, cupy.asarray(given[rank]), 2, op="avg"))
    with Communicator(plan, "loopback") as comm:
        wanted = [seal(one) for one in comm.all_reduce(given, op="avg")]
    assert outcome(found) == [[one] * 2 for one in wanted]


@pytest.mark.thorough
def test_only_pairs_of_the_trees_access_each_other(machine: Machine, cupy: ModuleType) -> None:
    """On a DGX-1V GPUs without an NVLink do not: the ranks alone have messages."""
    machine.gpus, machine.peers = 8, True
    plan = relayed()
    joined = {frozenset((link.src, link.dst)) for link in plan.topology.links if link.channel == "nvlink"}
    machine.apart = {
        frozenset(pair)
        for pair in combinations(range(8), 2)
        if frozenset(f"gpu{gpu}" for gpu in pair) not in joined
    }
    said = check_bits(cupy, plan)
    assert said[0].startswith("messages: no windows")
    assert said[0].endswith("; windows over peer access with relays gpu2, gpu3, gpu5, gpu7")


@pytest.mark.thorough
def test_a_relay_exchanges_no_messages(machine: Machine, cupy: ModuleType) -> None:
    """The machine states that a relay has no peer access to a rank, and the trees pass them through a CPU."""
    machine.gpus, machine.peers = 8, True
    gpus = (0, 1, 4, 5)
    plan = refusing("allreduce", "gpu2")

    def task(comm: Communicator, rank: int) -> str:
        with pytest.raises(RefusedError) as refused:
            comm.all_reduce(cupy.asarray(floats(4, 300)[rank]))
        return str(refused.value)

    found = set(outcome(run(cupy, plan, task, gpus)))
    assert len(found) == 1
    assert "without access to each other's memory, gpu0-gpu2; leave such relays" in found.pop()


@cache
def refusing(collective: str, name: str) -> Plan:
    """Return a plan of four ranks whose machine states that a GPU has no peer access to gpu0."""
    topology = topoplan.with_relays("rtx-pro-6000-2x4", (0, 1, 4, 5))
    devices = tuple(
        replace(one, facts=(*one.facts, *facts(refused="gpu0"))) if one.name == name else one
        for one in topology.devices
    )
    return topoplan.plan(replace(topology, devices=devices), collective)


@pytest.mark.parametrize("name", ["gpu2", "gpu1"])
def test_a_pair_that_no_tree_joins_needs_no_access(machine: Machine, cupy: ModuleType, name: str) -> None:
    """An idle GPU or a rank is on no edge with gpu0: the engine has no messages, and a graph captures the call."""
    machine.gpus, machine.peers = 8, True
    plan = refusing("reduce", name)
    assert plan.helpers == ()

    def task(comm: Communicator, rank: int) -> str:
        given, stream = cupy.zeros(24, dtype="float32"), cupy.cuda.Stream(non_blocking=True)
        comm.reduce(given, root=plan.root)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            comm.reduce(given, root=plan.root)
            stream.end_capture()
        return comm.engine

    found = outcome(run(cupy, plan, task, (0, 1, 4, 5)))
    assert all("messages for" not in said for said in found), found


@pytest.mark.thorough
def test_processes_open_the_arenas_of_relays(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner opens each other process's arena on its own GPU and on its relay's."""
    machine.gpus, machine.peers = 8, True
    monkeypatch.setattr(device_arenas, "_process", lambda: f"process {machine.device}")
    plan, given, opened = relayed(), floats(4, 300), []

    def task(comm: Communicator, rank: int) -> list[str | None]:
        found = sums(comm, cupy.asarray(given[rank]), 2)
        opened.append(len(machine.opened))
        assert comm.engine.endswith("; windows over ipc with relays gpu2, gpu3, gpu5, gpu7")
        return found

    found = outcome(run(cupy, plan, task))
    with Communicator(plan, "loopback") as comm:
        assert found == [[seal(one)] * 2 for one in comm.all_reduce(given)]
    assert max(opened) == 4 * 3 + 8 * 6, "of the ranks alone, and of ranks and relays"
    assert machine.opened == []
    assert machine.memory == {}


@pytest.mark.parametrize("place", ["own", "relay"])
def test_a_rank_that_ends_while_a_relay_works_is_named_by_all(
    machine: Machine, cupy: ModuleType, place: str
) -> None:
    """Its own kernel, or that of its relay, is not launched."""
    machine.gpus, machine.peers = 8, True
    given = floats(4, 4200)

    def task(comm: Communicator, rank: int) -> None:
        comm.all_reduce(cupy.asarray(given[rank]))
        backend: Any = comm._open().backend
        (engine,) = backend._relayed.values()
        if rank == 1:
            failing = engine if place == "own" else engine.relays[0].engine
            failing.queue = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("the GPU fell off the bus"))
        comm.all_reduce(cupy.asarray(given[rank]))

    found = run(cupy, relayed(), task, timeout=15.0)
    assert all(isinstance(one, BackendError) for one in found), found
    assert all(one.rank == 1 and "fell off the bus" in str(one) for one in found), found


@pytest.mark.thorough
def test_a_relay_that_does_not_start_leads_to_its_owner(machine: Machine, cupy: ModuleType) -> None:
    """Nobody reports: the ranks' waits lead to the rank whose relay stands still."""
    machine.gpus, machine.peers = 8, True
    given = floats(4, 4200)

    def task(comm: Communicator, rank: int) -> None:
        comm.all_reduce(cupy.asarray(given[rank]))
        backend: Any = comm._open().backend
        (engine,) = backend._relayed.values()
        if rank == 2:
            engine.relays[0].engine.queue = lambda *_, **__: None
        comm.all_reduce(cupy.asarray(given[rank]))

    found = run(cupy, relayed(), task, timeout=3.0)
    assert all(isinstance(one, BackendError) for one in found), found
    assert {one.peer for one in found} == {2}, found
    assert any("relay gpu" in note for note in found[2].__notes__), "the owner tells the state of its relays"


@pytest.mark.parametrize(
    ("visible", "apart", "why"),
    [
        (
            7,
            [],
            "relay gpu7 is not visible to any rank: a machine without bus ids needs GPUs 0 to 7 visible, and all",
        ),
        (8, [(0, 2), (4, 5)], "GPUs without access to each other's memory, gpu0-gpu2, gpu4-gpu5; leave such"),
    ],
)
def test_all_ranks_refuse_what_is_not_there_and_go_on(
    machine: Machine, cupy: ModuleType, visible: int, apart: list[tuple[int, int]], why: str
) -> None:
    machine.gpus, machine.peers, machine.apart = visible, True, {frozenset(pair) for pair in apart}
    given = floats(4, 300)

    def task(comm: Communicator, rank: int) -> Any:
        array, texts = cupy.asarray(given[rank]), []
        for _ in range(2):
            with pytest.raises(RefusedError) as refused:
                comm.all_reduce(array)
            texts.append(str(refused.value))
        machine.gpus = 8  # all ranks have looked
        return texts, comm._gather_texts("here") if apart else sums(comm, array, 2)

    found = outcome(run(cupy, relayed(), task))
    assert {text for texts, _ in found for text in texts} == {found[0][0][0]}
    assert found[0][0][0].startswith("a plan with relays cannot run here: ")
    assert why in found[0][0][0]
    with Communicator(relayed(), "loopback") as comm:
        wanted = [["here"] * 4] * 4 if apart else [[seal(one)] * 2 for one in comm.all_reduce(given)]
    assert [result for _, result in found] == wanted
    assert machine.memory == {}


@pytest.mark.thorough
def test_ranks_on_other_gpus_and_demanded_messages_are_refused(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 8, True
    given = floats(4, 300)

    def task(comm: Communicator, rank: int) -> Any:
        with pytest.raises(RefusedError) as refused:
            comm.all_reduce(cupy.asarray(given[rank]))
        return str(refused.value)

    found = set(outcome(run(cupy, relayed(), task, (0, 1, 2, 3))))
    assert len(found) == 1
    assert (
        "rank 2 is on the GPU at 0000:02:00.0, and the plan has it on gpu4 at 0000:04:00.0; name"
        in found.pop()
    )
    found = set(outcome(run(cupy, relayed(), task, engine="messages")))
    assert len(found) == 1
    assert 'need the windows engine, got engine="messages"; use engine="auto"' in found.pop()


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("gpus", "relays"), [((5, 0, 3), None), ((2, 4, 5, 7, 1), None), ((6, 0), (2, 4))])
def test_other_ranks_and_relays(
    machine: Machine, cupy: ModuleType, collective: str, gpus: tuple[int, ...], relays: tuple[int, ...] | None
) -> None:
    machine.gpus, machine.peers = 8, True
    check_bits(cupy, topoplan.plan(topoplan.with_relays("dgx-1v", gpus, relays), collective), gpus)


@pytest.mark.thorough
def test_relays_that_no_tree_passes_need_nothing(machine: Machine, cupy: ModuleType) -> None:
    """They may be invisible; nor does a fact matter of a GPU without NVLinks, which the trees do not number."""
    machine.gpus, machine.peers = 7, True
    plan = relayed(gpus=(0, 1))
    assert set(plan.vertices) - {*plan.ranks, *plan.helpers} == {"gpu7"}
    assert check_bits(cupy, plan, (0, 1))[0].endswith(f"with relays {listed(plan.helpers)}")
    topology = topoplan.with_relays("dgx-1v", GPUS)
    devices = tuple(
        replace(one, facts=(*one.facts, *facts(refused="gpu0"))) if one.name == "gpu7" else one
        for one in topology.devices
    )
    links = tuple(
        one for one in topology.links if one.channel != "nvlink" or "gpu7" not in (one.src, one.dst)
    )
    plan = topoplan.plan(replace(topology, devices=devices, links=links))
    assert plan.helpers
    assert "gpu7" not in plan.vertices
    check_bits(cupy, plan)
    assert machine.memory == {}


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["blocking launches", "an engine"])
def test_all_ranks_refuse_relays_that_one_cannot_open(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Launches that wait for the kernel's end, or a relay's engine that fails."""
    machine.gpus, machine.peers = 8, True
    why = "CUDA_LAUNCH_BLOCKING must be 0 for relays, whose kernels wait for this rank's, got 1; unset it"
    if what == "blocking launches":
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    else:
        why = "no_such_kernels"
        monkeypatch.setattr(relay_engine, "Kernels", lambda cupy: cupy.no_such_kernels)

    def task(comm: Communicator, rank: int) -> str:
        with pytest.raises(RefusedError) as refused:
            comm.all_reduce(cupy.asarray(floats(4, 300)[rank]))
        return str(refused.value)

    found = set(outcome(run(cupy, relayed(), task)))
    assert len(found) == 1
    assert why in found.pop()
    assert machine.memory == {}


def test_no_graph_captures_a_plan_with_relays(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 8, True

    def task(comm: Communicator, rank: int) -> None:
        given, stream = cupy.zeros(24, dtype="float32"), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            comm.all_reduce(given, out=given)

    found = run(cupy, relayed(), task)
    assert all(isinstance(one, UsageError) for one in found), found
    assert "a graph cannot capture a plan with relays, got gpu2, gpu3, gpu5, gpu7; run it" in str(found[0])


def test_relays_belong_to_ranks_that_see_them() -> None:
    """A GPU that no rank sees, or that is a host, has no owner."""
    plan = relayed(gpus=(0, 1))
    shown = [f"0000:0{number}:00.0" for number in range(8)]

    def reports(*visible: list[int], hosts: str = "aa") -> list[HostReport]:
        return [
            HostReport(host, "p", shown[rank], 0, tuple(shown[gpu] for gpu in seen))
            for rank, (host, seen) in enumerate(zip(hosts, visible, strict=True))
        ]

    everywhere = {2: (0, 2), 3: (0, 3), 4: (1, 1), 5: (1, 2), 6: (1, 3), 7: (0, 1)}
    used = {vertex: everywhere[vertex] for vertex in range(2, 8) if plan.vertices[vertex] in plan.helpers}
    assert relay_owners(plan, reports([0, 7, 2, 3], [1, 4, 5, 6])) == used
    with pytest.raises(UsageError, match="relays need all ranks on one server, got rank 0 and rank 1 on two"):
        relay_owners(plan, reports([0], [1], hosts="ab"))
    with pytest.raises(
        UsageError, match=r"relay gpu5 at 0000:05:00\.0 is not visible to any rank; name in CUDA"
    ):
        relay_owners(stated(plan, shown), reports([0, 2, 3], [1, 4, 6, 7]))
    with pytest.raises(
        UsageError, match="must state the bus ids of all GPUs of a plan or of none, got none of gpu3"
    ):
        relay_owners(stated(plan, [*shown[:3], "", *shown[4:]]), reports([0], [1]))
    check_helpers(plan, "nccl")
    hosts = topoplan.plan(helped_star(3, 2))
    with pytest.raises(
        UsageError, match="helper0 is a helper rank in this plan, and the nccl back end has none"
    ):
        check_helpers(hosts, "nccl")
    with pytest.raises(
        UsageError, match="relays must be GPUs with bus ids or names such as gpu3, got helper0"
    ):
        relay_owners(hosts, reports([0], [1], [2], hosts="aaa"))


def stated(plan: Plan, bus_ids: list[str]) -> Plan:
    """Return the plan for its machine with bus ids."""
    devices = tuple(
        replace(one, busid=bus_ids[int(one.name[3:])]) if one.name in plan.vertices else one
        for one in plan.topology.devices
    )
    return topoplan.plan(replace(plan.topology, devices=devices))
