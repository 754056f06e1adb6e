"""PCIe beside NVLink: equation 8 of Blink, split plans, and one packing over all wires, staged or not."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
import topoplan
from tests.support.checkout import Run
from tests.support.known_answers import blink_figure
from tests.support.refusals import refused
from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.hardware import PEER_ACCESS
from topoplan.machine.routing import staged
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.topology_json import parse_topology_json
from topoplan.model.channel_split import SPLIT_GRAIN, channel_split, hybrid_plan, split_shares
from topoplan.model.dataflow import LAUNCH, channel_starts, peer_access_seconds, switched_hops
from topoplan.model.event_simulation import chrome_trace, run_events
from topoplan.plans.certificates.certificate import Channels, Cut, explain_certificate
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage

DGX = topoplan.load("dgx-1v")
COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
MB, GB = 1_000_000, 1_000_000_000

RATES = st.fractions(Fraction(1, 10), 600, max_denominator=1000)
STARTS = st.fractions(0, Fraction(1, 100), max_denominator=10**6)
SIZES = st.integers(0, 1 << 36)

PAIR = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))


def pcie_bytes(nbytes: int, pcie: Fraction, nvlink: Fraction, start: Fraction) -> Fraction:
    """Equation 8 as the paper writes it, clamped."""
    share = nbytes * pcie / (pcie + nvlink) - start * 10**9 * pcie * nvlink / (pcie + nvlink)
    return max(Fraction(0), share)


def mixed_machine(nvlink: float = 20.0, pcie: float = 5.0, seconds: float = 0.001) -> Topology:
    """Two GPUs with an NVLink and a PCIe link between the same two ends."""
    ends = [("gpu0", "gpu1"), ("gpu1", "gpu0")]
    links = [
        Link(*pair, channel, rate) for pair in ends for channel, rate in (("nvlink", nvlink), ("pcie", pcie))
    ]
    return Topology("pair", PAIR, tuple(links), peer_access=((2, seconds),))


def two_pairs(*, host: bool = True) -> Topology:
    """Four GPUs on one CPU at 24 GB/s, joined in pairs by NVLink at 56.25 GB/s."""
    devices = (*(Device(f"gpu{number}", "gpu") for number in range(4)), Device("cpu0", "cpu"))
    wires = [(f"gpu{number}", "cpu0", "pcie", 24.0) for number in range(4)] if host else []
    wires += [("gpu0", "gpu1", "nvlink", 56.25), ("gpu2", "gpu3", "nvlink", 56.25)]
    links = [Link(*ends, channel, rate) for a, b, channel, rate in wires for ends in ((a, b), (b, a))]
    return Topology("two pairs", devices, tuple(links))


def carried(plan: Plan) -> dict[str, Fraction]:
    """Share of the buffer of every channel."""
    total: dict[str, Fraction] = {}
    for shard in plan.shards:
        channel = next(edge.channel for stage in shard.stages for edge in stage.edges)
        total[channel] = total.get(channel, Fraction(0)) + shard.share
    return total


@pytest.mark.thorough
@given(channels=st.lists(st.tuples(RATES, STARTS), min_size=1, max_size=6), nbytes=SIZES)
@settings(max_examples=60)
def test_channels_finish_together_and_two_are_equation_8(
    channels: list[tuple[Fraction, Fraction]], nbytes: int
) -> None:
    """Parts end at T, one that starts after T carries nothing; rounded shares lose less than a grain."""
    rates, starts = [rate for rate, _ in channels], [start for _, start in channels]
    split = channel_split(rates, starts, nbytes)
    assert sum(split.nbytes) == nbytes
    for rate, start, part in zip(rates, starts, split.nbytes, strict=True):
        assert part == rate * 10**9 * max(0, split.seconds - start)
    shares = split_shares(rates, starts, nbytes)
    assert sum(shares) == 1
    for share, part in zip(shares[1:], split.nbytes[1:], strict=True):
        assert 0 <= part / max(nbytes, 1) - share < Fraction(1, SPLIT_GRAIN)
        assert SPLIT_GRAIN % share.denominator == 0
    if len(channels) > 1:
        pair = channel_split(rates[:2], [Fraction(0), starts[1]], nbytes)
        assert pair.nbytes[1] == pcie_bytes(nbytes, rates[1], rates[0], starts[1])


@pytest.mark.parametrize(
    ("rates", "starts", "nbytes", "message"),
    [
        ([Fraction(1)], [Fraction(0)], -1, "nbytes must be 0 or more, got -1"),
        ([Fraction(1)], [], 1, "one for each channel, got 1 and 0"),
        ([], [], 1, "one for each channel, got 0 and 0"),
        ([Fraction(0)], [Fraction(0)], 1, "start of zero or more, got 0 GB/s and 0 s"),
        ([Fraction(1)], [Fraction(-1)], 1, "start of zero or more, got 1 GB/s and -1 s"),
    ],
)
def test_a_split_refuses_what_no_channel_is(
    rates: list[Fraction], starts: list[Fraction], nbytes: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        channel_split(rates, starts, nbytes)


def test_only_pcie_beside_nvlink_waits_for_peer_access() -> None:
    """One channel alone was switched on before the plan runs, and so was what lies beside a network."""
    assert channel_starts(DGX, ("nvlink", "pcie")) == {"nvlink": 0, "pcie": Fraction(37, 10000)}
    for channels in (("nvlink",), ("pcie",), ("nvlink", "network"), ("pcie", "network")):
        assert set(channel_starts(DGX, channels).values()) == {0}


def test_times_of_peer_access() -> None:
    """Between two stated numbers of GPUs on a line, beyond them as the peers; servers switch at the same time."""
    machine = replace(DGX, peer_access=((4, 0.001), (6, 0.002)))
    times = [peer_access_seconds(machine.subset(range(gpus))) for gpus in (2, 4, 5, 6, 8)]
    assert times == [Fraction(ms, 1000) for ms in (1, 1, Fraction(3, 2), 2, Fraction(14, 5))]
    assert peer_access_seconds(topoplan.load("dgx-2")) == Fraction(37, 10000) * Fraction(15, 7)
    devices = tuple(replace(d, server="s0" if d.name < "gpu3" else "s1") for d in DGX.devices)
    assert peer_access_seconds(replace(DGX, devices=devices)) == peer_access_seconds(DGX.subset(range(5)))


def test_the_fit_of_peer_access_follows_from_figure_26() -> None:
    """Equation 8 solved for T_dpa at 500 MB and 8 GB/s of PCIe, then the closest times that do not fall."""
    bars = blink_figure(26)
    solved = []
    for gpus in range(3, 9):
        alone, both = bars[str(gpus)]["nvlink"], bars[str(gpus)]["both"]
        solved.append((0.5 / 8) * ((alone + 8) / both - 1))
    assert [round(1000 * seconds, 1) for seconds in solved] == [3.6, 3.9, 3.7, 2.9, 4.0, 3.4]
    blocks = [[seconds] for seconds in solved]
    while falling := [i for i in range(len(blocks) - 1) if np.mean(blocks[i]) > np.mean(blocks[i + 1])]:
        blocks[falling[0] : falling[0] + 2] = [blocks[falling[0]] + blocks[falling[0] + 1]]
    fitted = [float(np.mean(block)) for block in blocks for _ in block]
    stated = [float(peer_access_seconds(DGX.subset(range(gpus)))) for gpus in range(3, 9)]
    assert stated == [round(seconds, 4) for seconds in fitted]
    assert DGX.peer_access == PEER_ACCESS


def test_peer_access_survives_the_file_and_the_allocation() -> None:
    """Topology JSON writes it by number of GPUs and reads it in any order; an allocation keeps it."""
    machine = mixed_machine(seconds=0.25)
    assert '"peer_access": {"2": 0.25}' in machine.to_json()
    assert parse_topology_json(machine.to_json()) == machine
    value = json.loads(DGX.to_json())
    value["peer_access"] = {"8": 1, "2": 0}
    assert parse_topology_json(json.dumps(value)).peer_access == ((2, 0), (8, 1))
    assert DGX.subset([0, 1]).peer_access == DGX.peer_access
    assert "peer_access" not in topoplan.load("dgx-2").to_json()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ([0.001], "peer_access must be an object such as"),
        ({"two": 0.001}, "'two' must be a number of GPUs"),
        ({"08": 0.001}, "'08' must be a number of GPUs"),
        ({"1": 0.001}, "number of GPUs 1 must be a whole number from 2"),
        ({"2": "fast"}, "'fast' must be a number of seconds"),
        ({"2": True}, "True must be a number of seconds"),
        ({"2": -0.001}, "-0.001 must be seconds from 0 to 1000"),
        ({"2": 1e9}, "must be seconds from 0 to 1000"),
        ({"2": float("nan")}, "nan must be seconds from 0 to 1000"),
    ],
)
def test_wrong_peer_access_is_named(stated: object, message: str) -> None:
    value = json.loads(mixed_machine().to_json())
    value["peer_access"] = stated
    with refused(TopologyError, message):
        parse_topology_json(json.dumps(value))


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_in_the_limit_a_split_plan_is_optimal(collective: str) -> None:
    """Shares in proportion to the rates: the rate is the sum of both rates and of both bounds, exactly."""
    gpus = [0, 1, 2, 4, 5, 6]
    plan = topoplan.plan(DGX, collective, gpus=gpus, channels="nvlink+pcie")
    alone = [topoplan.plan(DGX, collective, gpus=gpus, channels=channel) for channel in ("nvlink", "pcie")]
    report = topoplan.verify(plan)
    assert plan.channels == ("nvlink", "pcie")
    assert report.optimal
    assert report.exact_rate == sum(topoplan.verify(part).exact_rate or 0 for part in alone)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("gpus", [(0, 2, 3), (0, 1, 2, 4, 5)])
def test_shares_of_a_size_are_those_of_equation_8(collective: str, gpus: tuple[int, ...]) -> None:
    """PCIe carries what equation 8 says of rates and T_dpa, to a grain, and every owner's block is divided alike."""
    plan = topoplan.plan(DGX, collective, gpus=gpus, channels="nvlink+pcie", nbytes=2 * GB)
    nvlink, pcie = (
        topoplan.verify(topoplan.plan(DGX, collective, gpus=gpus, channels=channel)).exact_rate or Fraction(0)
        for channel in ("nvlink", "pcie")
    )
    wanted = pcie_bytes(2 * GB, pcie, nvlink, peer_access_seconds(DGX.subset(gpus))) / (2 * GB)
    topoplan.verify(plan)
    assert 0 <= wanted - carried(plan)["pcie"] < Fraction(1, SPLIT_GRAIN)
    assert f"{2 * GB / (1 << 30):.4g}GB" in plan.notes[0]


@pytest.mark.thorough
def test_small_buffers_stay_on_nvlink() -> None:
    """Below T_dpa x B_nvl the plan is the NVLink plan, with a note that says from which size PCIe helps."""
    alone = topoplan.plan(DGX, "broadcast", channels="nvlink")
    for nbytes in (0, 64 << 20, 555 * MB):
        plan = topoplan.plan(DGX, "broadcast", channels="nvlink+pcie", nbytes=nbytes)
        assert replace(plan, notes=()) == replace(alone, notes=())
        assert "nvlink alone carries" in plan.notes[0]
        assert "pcie starts after 3.7 ms and helps from about 537.6MB on" in plan.notes[1]
    size = round(537.6 * (1 << 20) * 1.001)
    assert topoplan.plan(DGX, "broadcast", channels="nvlink+pcie", nbytes=size).channels == ("nvlink", "pcie")


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "machine", ["dgx-1v", *(pytest.param(one, marks=pytest.mark.slow) for one in ("v100x4", "dgx-h100"))]
)
def test_a_split_is_never_slower_than_nvlink_alone(machine: str, collective: str) -> None:
    """At every size, near the crossover too, the model gives the plan for it no more time than NVLink alone."""
    topology = topoplan.load(machine)
    parts = [topoplan.plan(topology, collective, channels=channel) for channel in ("nvlink", "pcie")]
    crossover = peer_access_seconds(topology) * round(parts[0].rate * 10**9)
    gains = []
    for factor in (0.5, 0.999, 1.001, 1.01, 1.1, 1.5, 4, 64, 1024):
        nbytes = round(crossover * Fraction(factor))
        plan = hybrid_plan(parts, nbytes=nbytes)
        alone = topoplan.simulate(parts[0], nbytes=nbytes).seconds
        gains.append(alone / topoplan.simulate(plan, nbytes=nbytes).seconds)
    assert min(gains) >= 1
    assert gains[:2] == [1, 1]
    assert gains[-1] > 1 + 0.7 * parts[1].rate / parts[0].rate


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_both_channels_finish_together_where_bandwidth_counts(collective: str) -> None:
    """Where filling the pipelines no longer counts the ends lie within 0.5 %, with PCIe begun at T_dpa."""
    plan = topoplan.plan(DGX, collective, gpus=range(4), channels="nvlink+pcie", nbytes=4000 * GB)
    timeline = topoplan.simulate(plan, nbytes=4000 * GB)
    first, second = timeline.channels
    assert (first.channel, second.channel) == ("nvlink", "pcie")
    assert first.start == LAUNCH
    assert second.start == pytest.approx(LAUNCH + 0.0035)
    assert first.share + second.share == pytest.approx(1)
    assert timeline.seconds == max(first.seconds, second.seconds)
    assert second.seconds == pytest.approx(first.seconds, rel=0.005)


@settings(deadline=None, max_examples=10)
@given(
    nbytes=st.integers(10 * MB, 10 * GB),
    pcie=st.sampled_from([1.0, 5.0, 47.3186]),
    seconds=st.sampled_from([0.0, 0.0001, 0.004]),
)
def test_on_one_wire_each_the_time_is_that_of_equation_8(nbytes: int, pcie: float, seconds: float) -> None:
    """A pair of GPUs has no pipeline: the model's time is equation 8's and the start-ups of one copy."""
    machine = mixed_machine(pcie=pcie, seconds=seconds)
    plan = topoplan.plan(machine, "broadcast", channels="nvlink+pcie", nbytes=nbytes)
    rates = [Fraction(20), Fraction(repr(pcie))]
    split = channel_split(rates, [Fraction(0), Fraction(repr(seconds))], nbytes)
    assert topoplan.simulate(plan, nbytes=nbytes).seconds == pytest.approx(float(split.seconds), abs=40e-6)


def test_two_channels_between_the_same_devices_are_both_used() -> None:
    """NVLink and PCIe between one pair of GPUs: neither link hides the other, and their bytes add up."""
    machine = mixed_machine()
    plan = topoplan.plan(machine, "allreduce", channels="nvlink+pcie")
    report = topoplan.verify(plan)
    assert len(Fabric(machine, plan.channels).links) == 4
    assert (plan.rate, plan.bound, report.optimal) == (25.0, 25.0, True)
    assert report.loads == {("gpu0", "gpu1"): 1.0, ("gpu1", "gpu0"): 1.0}
    timeline = topoplan.simulate(plan, nbytes=GB)
    assert timeline.link_bytes["gpu0", "gpu1"] == pytest.approx(GB)
    assert timeline.link_seconds["gpu0", "gpu1"] == pytest.approx(0.04)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather"])
def test_events_agree_and_pcie_starts_when_it_may(collective: str) -> None:
    """No PCIe chunk moves before T_dpa, and chunk by chunk the run takes what the closed form says, to 5 %."""
    plan = topoplan.plan(DGX, collective, gpus=range(4), channels="nvlink+pcie", nbytes=GB)
    run = run_events(plan, nbytes=GB)
    starts = sorted((t.start, run.fabric.links[t.link].channel) for t in run.transfers)
    first = {channel: start for start, channel in reversed(starts)}
    assert LAUNCH < first["nvlink"] < 0.0001
    assert LAUNCH + 0.0035 < first["pcie"] < LAUNCH + 0.0036
    assert run.starts == (("pcie", LAUNCH + 0.0035),)
    assert run.seconds == pytest.approx(topoplan.simulate(plan, nbytes=GB).seconds, rel=0.05)
    rows = json.loads(chrome_trace(run))["traceEvents"]
    boxes = [row for row in rows if row["name"] == "pcie: peer access is switched"]
    assert [round(box["dur"]) for box in boxes] == [3508]


def test_the_certificate_adds_up_the_channels_and_says_so() -> None:
    """Its value is the sum of those of the parts, each on the links of its channel."""
    plan = topoplan.plan(DGX, "broadcast", channels="nvlink+pcie")
    certificate = plan.certificate
    assert isinstance(certificate, Channels)
    parts = [(Fabric(plan.topology, (channel,)), part) for channel, part in certificate.parts]
    assert [part.bound(fabric, "broadcast", 0) for fabric, part in parts] == [150, 8]
    text = explain_certificate(plan)
    assert text.startswith(
        "150 GB/s over NVLink (only 150 GB/s leave {gpu0}; each byte must leave it once) and 8 GB/s"
    )
    assert json.loads(plan.to_json())["certificate"]["parts"][1]["channel"] == "pcie"


def pair_plan(shards: list[Shard], collective: str = "broadcast", **changes: object) -> Plan:
    """A plan of two GPUs over both channels, with whatever is to be wrong with it."""
    whole = topoplan.plan(mixed_machine(), collective, channels="nvlink+pcie")
    return replace(whole, shards=tuple(shards) or whole.shards, **changes)  # type: ignore[arg-type]


def hop(op: str, root: int, channel: str) -> Stage:
    """One edge between the two GPUs."""
    return Stage(op, root, (Edge(root, 1 - root, (f"gpu{root}", f"gpu{1 - root}"), channel),))


def test_verify_refuses_a_shard_on_two_channels() -> None:
    """Reduced over NVLink and broadcast over PCIe, a shard is outside of what the certificate bounds."""
    shard = Shard(Fraction(1), (hop("reduce", 0, "nvlink"), hop("broadcast", 0, "pcie")))
    plan = pair_plan([shard], "allreduce", rate=5.0)
    with pytest.raises(PlanError, match="shard 0, stage 1, rank 1: a shard over nvlink uses pcie too"):
        topoplan.verify(plan)
    one_cut = replace(plan, certificate=Cut(("gpu0",)), bound=25.0)
    with pytest.raises(PlanError, match="a shard over nvlink uses pcie too"):
        topoplan.verify(one_cut)


def test_without_equal_blocks_the_sum_of_bounds_is_no_bound() -> None:
    """Each owner over the channel that suits it beats the sum of the channels' bounds: verify refuses that claim."""
    there, back = ("gpu0", "gpu1"), ("gpu1", "gpu0")
    links = [Link(*ends, "nvlink", rate) for ends, rate in ((there, 20.0), (back, 1.0))]
    links += [Link(*ends, "pcie", rate) for ends, rate in ((there, 1.0), (back, 20.0))]
    machine = Topology("crossed", PAIR, tuple(links))
    plan = topoplan.plan(machine, "allgather", channels="nvlink+pcie")
    assert (plan.rate, plan.bound) == (4.0, 4.0)
    half = Fraction(1, 2)
    crossed = [Shard(half, (hop("broadcast", 0, "nvlink"),)), Shard(half, (hop("broadcast", 1, "pcie"),))]
    with pytest.raises(PlanError, match="the bound holds only if all are divided equally"):
        topoplan.verify(replace(plan, shards=tuple(crossed), rate=40.0))


def test_verify_refuses_a_certificate_of_other_channels() -> None:
    """Each channel of the plan needs one part, no more and no less."""
    for channels in (("nvlink",), ("nvlink", "pcie", "pcie"), ("pcie", "network"), ()):
        plan = pair_plan([], certificate=Channels(tuple((channel, Cut(("gpu0",))) for channel in channels)))
        with pytest.raises(PlanError, match="each channel needs one part"):
            topoplan.verify(plan)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (7, "certificate: parts must be a list"),
        ([7], "certificate: part must be an object"),
        ([{"channel": "nvlink"}], "certificate of a channel must be an object"),
        ([{"channel": 1, "certificate": {"kind": "trivial"}}], "certificate: channel must be a text"),
    ],
)
def test_plan_files_with_a_wrong_certificate_are_refused(parts: object, message: str) -> None:
    value = json.loads(pair_plan([]).to_json())
    value["certificate"]["parts"] = parts
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(value))


def bare(machine: Topology, *channels: str) -> Topology:
    """The machine with the links of some channels alone."""
    return replace(machine, links=tuple(link for link in machine.links if link.channel in channels))


SPLIT = {"channels": "nvlink+pcie"}
NO_SPLIT = "cannot be planned over nvlink and pcie together: no"


@pytest.mark.parametrize(
    ("machine", "options", "error", "message"),
    [
        *((DGX, {"channels": one}, UsageError, "unknown; use one of auto, ") for one in ("pcie+nvlink", "")),
        (
            DGX,
            {"nbytes": GB},
            UsageError,
            "a size matters only to channels nvlink+pcie, all, all-staged; leave it",
        ),
        (DGX, SPLIT | {"nbytes": -1}, UsageError, "a buffer of -1 bytes does not exist"),
        (DGX, {"channels": "all", "nbytes": -1}, UsageError, "a buffer of -1 bytes"),
        (
            two_pairs(host=False),
            {"channels": "all"},
            UsageError,
            "states no PCIe links, which channels all would",
        ),
        (two_pairs(host=False), {}, InfeasibleError, "states no PCIe links of a host that joins the others"),
        (topoplan.load("pcie-x8"), SPLIT, InfeasibleError, f"{NO_SPLIT} NVLink"),
        (bare(DGX, "nvlink"), SPLIT, InfeasibleError, f"{NO_SPLIT} PCIe"),
    ],
)
def test_bad_requests_are_one_line(
    machine: Topology, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with refused(error, message) as caught:
        topoplan.plan(machine, **options)
    if options == SPLIT:
        assert caught.value.cut == ("gpu0",)  # type: ignore[attr-defined]


def test_other_refusals_of_all_wires() -> None:
    with refused(UsageError, "plans by size need channels that suit all sizes"):
        topoplan.plan_by_size(DGX, channels="all")
    links = (Link("gpu0", "p", "pcie", 12.0), Link("p", "gpu1", "pcie", 12.0))
    with refused(UsageError, "no link leads from p to a CPU"):
        staged(Topology("no host", (*DGX.devices[:2], Device("p", "pcie")), links))


def test_a_split_plan_runs() -> None:
    """On the loopback every rank ends with the exact blocks, PCIe's part included."""
    plan = topoplan.plan(DGX, "allgather", gpus=range(4), channels="nvlink+pcie", nbytes=4 * GB)
    assert set(carried(plan)) == {"nvlink", "pcie"}
    data = [np.arange(1000, dtype=np.int64) * (rank + 1) for rank in range(4)]
    with collectives.Communicator(plan) as comm:
        for result in comm.all_gather(data):
            assert (result == np.concatenate(data)).all()


def test_the_command_line_plans_simulates_and_compares(tmp_path: Path, run: Run) -> None:
    """A split plan says which shard runs over what, verifies, is simulated with its trace, and compared."""
    file, trace = str(tmp_path / "plan.json"), str(tmp_path / "trace.json")
    request = ("dgx-1v", "--gpus", "0-3", "--channels", "nvlink+pcie")
    status, planned, _ = run("plan", *request, "--size", "1GB", "-o", file)
    assert status == 0
    assert "over NVLink and PCIe" in planned
    assert "channel  fraction" in planned
    assert run("verify", file)[0] == 0
    assert run("simulate", file, "--sizes", "1GB", "--trace", trace)[0] == 0
    assert "peer access is switched" in Path(trace).read_text()
    simulated = run("simulate", *request, "--size", "1GB", "--sizes", "1GB", "--json")[1]
    assert json.loads(simulated)["plan"]["rate"] == pytest.approx(80.8906129)
    said = "over NVLink and PCIe: trees do 1.11x NCCL's best (nccl tree)\nalgbw        83 GB/s"
    assert said in run("compare", *request)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan dgx-1v --channels nvlink+pcie --size 1KB,2KB", "names 2 sizes; give one"),
        ("plan dgx-1v --channels nvlink+pcie --size -5", "size '-5' is not a number"),
        ("plan dgx-1v --size 1GB", "a size matters only to channels nvlink+pcie"),
        ("plan pcie-x8 --channels nvlink+pcie", "pcie-x8 cannot be planned over nvlink and pcie"),
        ("compare dgx-1v --all-allocations --channels nvlink+pcie", "does not go with --all-allocations"),
    ],
)
def test_the_command_line_refuses_in_one_line(arguments: str, message: str, run: Run) -> None:
    status, _, error = run(*arguments.split())
    assert (status, error.count("\n"), message in error) == (2, 1, True)


KNOWN = [
    ((6, 7), "62", "62", "124", "56", "62", "112"),
    ((4, 5, 6, 7), "83", "112", "448/3", "79", "112", "424/3"),
    ((1, 3, 4, 5), "37", "37", "148/3", "34", "37", "148/3"),
    ((0, 1, 4, 5, 7), "255/4", "87", "435/4", "243/4", "87", "405/4"),
    ((0, 1, 4, 5, 6, 7), "141/2", "87", "522/5", "135/2", "87", "486/5"),
    ((1, 2, 3, 4, 5, 6, 7), "82", "108", "392/3", "79", "108", "392/3"),
    ((0, 1, 2, 3, 4, 5, 6, 7), "648/7", "158", "1296/7", "624/7", "156", "1248/7"),
]
"""Allocations of a DGX-1V with the best allreduce, broadcast and allgather over all wires, then with PCIe staged."""


@pytest.mark.sampled
@pytest.mark.parametrize("channels", ["all", "all-staged"])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if len(row[0]) == 4 else pytest.mark.thorough) for row in KNOWN],
    ids=lambda row: "".join(map(str, row[0])),
)
def test_known_optima_are_reached_and_proved(
    row: tuple[tuple[int, ...], *tuple[str, ...]], channels: str
) -> None:
    rates = row[1:4] if channels == "all" else row[4:]
    for collective, rate in zip(("allreduce", "broadcast", "allgather"), rates, strict=True):
        made = topoplan.plan(DGX, collective, gpus=row[0], channels=channels)
        report = topoplan.verify(Plan.from_json(made.to_json()))
        assert report.exact_rate == report.exact_bound == Fraction(rate)


@pytest.mark.parametrize("channels", ["all", "all-staged"])
def test_an_all_to_all_takes_all_wires_too(channels: str) -> None:
    assert topoplan.plan(DGX, "alltoall", channels=channels).rate == 79.0


@pytest.mark.parametrize(
    ("collective", "alone", "union"), [("allreduce", 16, 48), ("broadcast", 24, 48), ("allgather", 32, 96)]
)
def test_islands_take_the_wires_between_them(collective: str, alone: int, union: int) -> None:
    """By default, and without a switch of peer access: PCIe joins only GPUs that NVLink does not."""
    machine = two_pairs()
    made = topoplan.plan(machine, collective)
    assert (made.channels, made.rate, made.gap) == (("all",), union, 0)
    assert switched_hops(made) == 0
    assert topoplan.plan(machine, collective, channels="pcie").rate == alone


def test_staged_copies_pass_a_cpu() -> None:
    """No route between two GPUs turns around at a PCIe switch; a staged machine is staged already."""
    made = topoplan.plan(DGX, gpus=[6, 7], channels="all-staged")
    routes = [edge.route for shard in made.shards for stage in shard.stages for edge in stage.edges]
    pcie = [route for route in routes if len(route) > 2]
    assert pcie
    assert all(any(made.topology.device(name).kind == "cpu" for name in route) for route in pcie)
    assert staged(made.topology) == made.topology
    assert switched_hops(made) == 0
    with pytest.raises(PlanError, match="turns copies around"):
        topoplan.verify(replace(made, topology=DGX.subset([6, 7])))


@pytest.mark.thorough
def test_from_which_size_all_wires_pay() -> None:
    """PCIe beside NVLink starts 3.7 ms late, staged copies do not: they pay from 38 MB on, peer access from 4 GB."""
    for channels, small, large in (("all", 2 << 30, 8 << 30), ("all-staged", 16 << 20, 64 << 20)):
        assert topoplan.plan(DGX, channels=channels, nbytes=small).channels == ("nvlink",)
        made = topoplan.plan(DGX, channels=channels, nbytes=large)
        assert made.channels == (channels,)
        times = [topoplan.simulate(one, nbytes=large).seconds for one in (made, topoplan.plan(DGX))]
        assert times[0] < times[1]


def test_the_command_says_over_what_a_plan_is_optimal(run: Run) -> None:
    said = run("plan", "dgx-1v", "--gpus", "4,5,6,7")[1]
    assert "over NVLink: provably optimal\n" in said
    assert "with PCIe    at most 83 GB/s, busbw 124.5 GB/s; " in said
    said = run("plan", "dgx-1v", "--gpus", "4,5,6,7", "--channels", "all", "--notes")[1]
    assert "over NVLink and PCIe together: provably optimal\n" in said
    assert "nvlink alone reaches 75 GB/s; by the model all wires are faster from about" in said
