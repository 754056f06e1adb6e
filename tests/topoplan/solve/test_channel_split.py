"""PCIe and NVLink together: equation 8 of Blink, the start of a channel, split plans, their proof and their time."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
import topoplan
from tests.support.known_answers import blink_figure
from topoplan.cli.main import main
from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.hardware import PEER_ACCESS
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.topology_json import parse_topology_json
from topoplan.model.channel_split import SPLIT_GRAIN, channel_split, hybrid_plan, split_shares
from topoplan.model.dataflow import LAUNCH, channel_starts, peer_access_seconds
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


def pcie_bytes(nbytes: int, pcie: Fraction, nvlink: Fraction, start: Fraction) -> Fraction:
    """Equation 8 as the paper writes it, clamped."""
    share = nbytes * pcie / (pcie + nvlink) - start * 10**9 * pcie * nvlink / (pcie + nvlink)
    return max(Fraction(0), share)


def mixed_machine(nvlink: float = 20.0, pcie: float = 5.0, seconds: float = 0.001) -> Topology:
    """Two GPUs with an NVLink and a PCIe link between the same two ends."""
    links = [
        Link(a, b, channel, bandwidth)
        for a, b in (("gpu0", "gpu1"), ("gpu1", "gpu0"))
        for channel, bandwidth in (("nvlink", nvlink), ("pcie", pcie))
    ]
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))
    return Topology("pair", devices, tuple(links), peer_access=((2, seconds),))


def carried(plan: Plan) -> dict[str, Fraction]:
    """Share of the buffer of every channel."""
    total: dict[str, Fraction] = {}
    for shard in plan.shards:
        channel = next(edge.channel for stage in shard.stages for edge in stage.edges)
        total[channel] = total.get(channel, Fraction(0)) + shard.share
    return total


@given(nbytes=SIZES, nvlink=RATES, pcie=RATES, start=STARTS)
def test_two_channels_are_equation_8(nbytes: int, nvlink: Fraction, pcie: Fraction, start: Fraction) -> None:
    """The general form with a leader that starts at once is equation 8, and both finish together where both work."""
    split = channel_split([nvlink, pcie], [Fraction(0), start], nbytes)
    expected = pcie_bytes(nbytes, pcie, nvlink, start)
    assert split.nbytes == (nbytes - expected, expected)
    assert split.seconds == split.nbytes[0] / (nvlink * 10**9)
    if expected:
        assert split.seconds == start + expected / (pcie * 10**9)


@given(nbytes=SIZES, channels=st.lists(st.tuples(RATES, STARTS), min_size=1, max_size=6))
def test_any_number_of_channels_finish_together(
    nbytes: int, channels: list[tuple[Fraction, Fraction]]
) -> None:
    """The parts add up to the buffer; each ends at T, and one that starts after T carries nothing."""
    rates, starts = [rate for rate, _ in channels], [start for _, start in channels]
    split = channel_split(rates, starts, nbytes)
    assert sum(split.nbytes) == nbytes
    for rate, start, part in zip(rates, starts, split.nbytes, strict=True):
        assert part == rate * 10**9 * max(0, split.seconds - start)


@given(channels=st.lists(st.tuples(RATES, STARTS), min_size=1, max_size=4), nbytes=SIZES)
def test_shares_of_a_size_are_short_and_lose_less_than_a_grain(
    channels: list[tuple[Fraction, Fraction]], nbytes: int
) -> None:
    """Rounded shares add up to 1, and no later channel gets more than its part or a grain less."""
    rates, starts = [rate for rate, _ in channels], [start for _, start in channels]
    shares = split_shares(rates, starts, nbytes)
    parts = channel_split(rates, starts, nbytes).nbytes
    assert sum(shares) == 1
    for share, part in zip(shares[1:], parts[1:], strict=True):
        assert 0 <= part / max(nbytes, 1) - share < Fraction(1, SPLIT_GRAIN)
        assert SPLIT_GRAIN % share.denominator == 0


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
    """Sizes below zero, channels without a rate and starts in the past are named."""
    with pytest.raises(UsageError, match=message):
        channel_split(rates, starts, nbytes)


def test_only_pcie_beside_nvlink_waits_for_peer_access() -> None:
    """One channel alone was switched on before the plan runs, and so was what lies beside a network."""
    assert channel_starts(DGX, ("nvlink", "pcie")) == {"nvlink": 0, "pcie": Fraction(37, 10000)}
    for channels in (("nvlink",), ("pcie",), ("nvlink", "network"), ("pcie", "network")):
        assert set(channel_starts(DGX, channels).values()) == {0}


@pytest.mark.parametrize(
    ("gpus", "seconds"),
    [(2, Fraction(1, 1000)), (4, Fraction(1, 1000)), (5, Fraction(3, 2000)), (6, Fraction(2, 1000))],
)
def test_stated_times_are_interpolated(gpus: int, seconds: Fraction) -> None:
    """Between two stated numbers of GPUs on a line; below the first as the first."""
    machine = replace(DGX, peer_access=((4, 0.001), (6, 0.002)))
    assert peer_access_seconds(machine.subset(range(gpus))) == seconds


def test_beyond_the_last_stated_number_time_grows_with_the_peers() -> None:
    """8 GPUs have 7 peers each where 6 have 5; a machine that states nothing is taken as a DGX-1V."""
    machine = replace(DGX, peer_access=((4, 0.001), (6, 0.002)))
    assert peer_access_seconds(machine) == Fraction(2, 1000) * Fraction(7, 5)
    assert peer_access_seconds(topoplan.load("dgx-2")) == Fraction(37, 10000) * Fraction(15, 7)


def test_servers_switch_at_the_same_time() -> None:
    """Of 3 + 5 GPUs in two servers the five count."""
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
    """A file that states no seconds by number of GPUs is refused in one line."""
    value = json.loads(mixed_machine().to_json())
    value["peer_access"] = stated
    with pytest.raises(TopologyError, match=message) as caught:
        parse_topology_json(json.dumps(value))
    assert "\n" not in str(caught.value)


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
@pytest.mark.parametrize("gpus", [(0, 2, 3), (0, 1, 2, 4, 5), tuple(range(8))])
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
    for nbytes in (0, 1, 64 << 20, 555 * MB):
        plan = topoplan.plan(DGX, "broadcast", channels="nvlink+pcie", nbytes=nbytes)
        assert replace(plan, notes=()) == replace(alone, notes=())
        assert "nvlink alone carries" in plan.notes[0]
        assert "pcie starts after 3.7 ms and helps from about 537.6MB on" in plan.notes[1]


@pytest.mark.thorough
def test_the_size_of_the_note_is_where_pcie_begins_to_help() -> None:
    """At the size that the note names both channels are used, and 2 % below it they are not."""
    size = round(537.6 * (1 << 20))
    used = [
        topoplan.plan(DGX, "broadcast", channels="nvlink+pcie", nbytes=round(size * factor)).channels
        for factor in (0.97, 1.001)
    ]
    assert used == [("nvlink",), ("nvlink", "pcie")]


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-1p", "nvlink-x4", "v100x4", "dgx-h100"])
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


@settings(deadline=None, max_examples=25)
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


@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather"])
def test_events_agree_and_pcie_starts_when_it_may(collective: str) -> None:
    """No PCIe chunk moves before T_dpa, and chunk by chunk the run takes what the closed form says, to 5 %."""
    plan = topoplan.plan(DGX, collective, gpus=range(4), channels="nvlink+pcie", nbytes=GB)
    run = run_events(plan, nbytes=GB)
    first = {
        channel: min(t.start for t in run.transfers if run.fabric.links[t.link].channel == channel)
        for channel in ("nvlink", "pcie")
    }
    assert LAUNCH < first["nvlink"] < 0.0001
    assert LAUNCH + 0.0035 < first["pcie"] < LAUNCH + 0.0036
    assert run.starts == (("pcie", LAUNCH + 0.0035),)
    assert run.seconds == pytest.approx(topoplan.simulate(plan, nbytes=GB).seconds, rel=0.05)
    rows = json.loads(chrome_trace(run))["traceEvents"]
    boxes = [row for row in rows if row["name"] == "pcie: peer access is switched"]
    assert [round(box["dur"]) for box in boxes] == [3508]


def test_a_channel_cuts_its_shards_for_itself() -> None:
    """PCIe's shards, small and slow to start, are cut into other numbers of chunks than NVLink's."""
    plan = topoplan.plan(DGX, "allreduce", channels="nvlink+pcie", nbytes=GB)
    chunks = topoplan.simulate(plan, nbytes=GB).chunks
    channel = [shard.stages[0].edges[0].channel for shard in plan.shards]
    by_channel = {
        name: {count for count, one in zip(chunks, channel, strict=True) if one == name}
        for name in set(channel)
    }
    assert all(len(counts) == 1 for counts in by_channel.values())
    assert by_channel["nvlink"] != by_channel["pcie"]


def test_the_certificate_adds_up_the_channels_and_says_so() -> None:
    """Its value is the sum of those of the parts, each on the links of its channel."""
    plan = topoplan.plan(DGX, "broadcast", channels="nvlink+pcie")
    certificate = plan.certificate
    assert isinstance(certificate, Channels)
    values = [
        part.bound(Fabric(plan.topology, (channel,)), "broadcast", 0) for channel, part in certificate.parts
    ]
    assert values == [150, 8]
    text = explain_certificate(plan)
    assert text.startswith(
        "150 GB/s over nvlink (only 150 GB/s leave {gpu0}, and every byte must) and 8 GB/s over pcie ("
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
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))
    links = (
        Link("gpu0", "gpu1", "nvlink", 20.0),
        Link("gpu1", "gpu0", "nvlink", 1.0),
        Link("gpu0", "gpu1", "pcie", 1.0),
        Link("gpu1", "gpu0", "pcie", 20.0),
    )
    machine = Topology("crossed", devices, links)
    plan = topoplan.plan(machine, "allgather", channels="nvlink+pcie")
    assert (plan.rate, plan.bound) == (4.0, 4.0)
    half = Fraction(1, 2)
    crossed = [Shard(half, (hop("broadcast", 0, "nvlink"),)), Shard(half, (hop("broadcast", 1, "pcie"),))]
    with pytest.raises(PlanError, match="the bound holds only if all are divided equally"):
        topoplan.verify(replace(plan, shards=tuple(crossed), rate=40.0))


@pytest.mark.parametrize("channels", [("nvlink",), ("nvlink", "pcie", "pcie"), ("pcie", "network"), ()])
def test_verify_refuses_a_certificate_of_other_channels(channels: tuple[str, ...]) -> None:
    """Each channel of the plan needs one part, no more and no less."""
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
        (
            [{"channel": "nvlink", "certificate": {"kind": "channels", "parts": []}}],
            "cannot itself be one of channels",
        ),
    ],
)
def test_plan_files_with_a_wrong_certificate_are_refused(parts: object, message: str) -> None:
    """The fault is named, and nesting has an end."""
    value = json.loads(pair_plan([]).to_json())
    value["certificate"]["parts"] = parts
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(value))


def test_bad_requests_are_one_line() -> None:
    """Unknown mixes, sizes where they do not matter, sizes below zero, machines without one of the channels."""
    for channels in ("pcie+nvlink", "nvlink+nvlink", "nvlink+sys", ""):
        with pytest.raises(UsageError, match=r"is unknown; use one of auto, .*nvlink\+pcie"):
            topoplan.plan(DGX, channels=channels)
    with pytest.raises(
        UsageError,
        match=r"a size matters only to channels nvlink\+pcie, all, all-staged; leave it out with 'auto'",
    ):
        topoplan.plan(DGX, nbytes=GB)
    with pytest.raises(UsageError, match="a buffer of -1 bytes cannot be planned for"):
        topoplan.plan(DGX, channels="nvlink+pcie", nbytes=-1)
    with pytest.raises(
        InfeasibleError, match="pcie-x8 cannot be planned over nvlink and pcie together: no NVLink"
    ):
        topoplan.plan(topoplan.load("pcie-x8"), channels="nvlink+pcie")
    bare = replace(DGX, links=tuple(link for link in DGX.links if link.channel == "nvlink"))
    with pytest.raises(
        InfeasibleError, match="dgx-1v cannot be planned over nvlink and pcie together: no PCIe"
    ) as no:
        topoplan.plan(bare, channels="nvlink+pcie")
    assert no.value.cut == ("gpu0",)
    assert "\n" not in str(no.value)


def test_one_gpu_needs_no_second_channel() -> None:
    """Nothing moves, whatever the channels and the size."""
    plan = topoplan.plan(DGX, "broadcast", gpus=[3], channels="nvlink+pcie", nbytes=GB)
    assert topoplan.verify(plan).exact_rate is None


@pytest.mark.thorough
def test_every_allocation_of_a_dgx_1v_that_nvlink_connects_can_be_split() -> None:
    """All 4-GPU allocations: rate and bound are the sums of both channels', and verified."""
    for gpus in combinations(range(8), 4):
        try:
            nvlink = topoplan.plan(DGX, "allreduce", gpus=gpus, channels="nvlink")
        except InfeasibleError:
            continue
        pcie = topoplan.plan(DGX, "allreduce", gpus=gpus, channels="pcie")
        plan = hybrid_plan([nvlink, pcie], nbytes=None)
        assert topoplan.verify(plan).optimal
        assert plan.bound == pytest.approx(nvlink.bound + pcie.bound, rel=1e-12)


def test_a_machine_that_states_no_time_is_told_what_was_assumed() -> None:
    """The note gives the seconds and the key to set."""
    plan = topoplan.plan(topoplan.load("dgx-h100"), "allgather", channels="nvlink+pcie", nbytes=8 * GB)
    assert any("not stated: 3.7 ms assumed" in note and "peer_access" in note for note in plan.notes)


@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_a_split_plan_runs(collective: str) -> None:
    """On the loopback every rank ends with the exact sums or blocks, PCIe's part included."""
    plan = topoplan.plan(DGX, collective, gpus=range(4), channels="nvlink+pcie", nbytes=4 * GB)
    assert set(carried(plan)) == {"nvlink", "pcie"}
    with collectives.Communicator(plan) as comm:
        data = [np.arange(1000, dtype=np.int64) * (rank + 1) for rank in range(4)]
        if collective == "allreduce":
            for result in comm.all_reduce(data):
                assert (result == sum(data)).all()
        else:
            for result in comm.all_gather(data):
                assert (result == np.concatenate(data)).all()


def test_the_command_line_plans_simulates_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A split plan says which shard runs over what, verifies, is simulated with its trace, and compared."""
    file, trace = str(tmp_path / "plan.json"), str(tmp_path / "trace.json")
    request = ["dgx-1v", "--gpus", "0-3", "--channels", "nvlink+pcie"]
    assert main(["plan", *request, "--size", "1GB", "-o", file]) == 0
    planned = capsys.readouterr().out
    assert "over nvlink and pcie" in planned
    assert "shard  channel  share" in planned
    assert main(["verify", file]) == 0
    assert main(["simulate", file, "--sizes", "1GB", "--trace", trace]) == 0
    assert "peer access is switched" in Path(trace).read_text()
    capsys.readouterr()
    assert main(["simulate", *request, "--size", "1GB", "--sizes", "1GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["rate"] == pytest.approx(80.8906129)
    assert main(["compare", *request]) == 0
    assert "nvlink+pcie    83.00   124.50    83.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "dgx-1v", "--channels", "nvlink+pcie", "--size", "1KB,2KB"], "names 2 sizes; give one"),
        (["plan", "dgx-1v", "--channels", "nvlink+pcie", "--size", "-5"], "size '-5' is not a number"),
        (["plan", "dgx-1v", "--size", "1GB"], "a size matters only to channels nvlink+pcie"),
        (["plan", "pcie-x8", "--channels", "nvlink+pcie"], "pcie-x8 cannot be planned over nvlink and pcie"),
        (
            ["compare", "dgx-1v", "--all-allocations", "--channels", "nvlink+pcie"],
            "does not go with --all-allocations",
        ),
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and what to do instead."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
