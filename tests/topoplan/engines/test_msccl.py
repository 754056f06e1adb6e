"""Algorithms of MSCCL: plans run in and out of place at their rate; broken ones are named by block and step."""

from __future__ import annotations

from fractions import Fraction

import pytest

import topoplan
from tests.support.hand_plans import plan_of, stage, star
from topoplan import Plan, PlanError, UsageError
from topoplan.cli.verify import engine_of
from topoplan.engines.exported import Choices
from topoplan.engines.msccl_read_back import AlgorithmFile, check_msccl, read_algorithm_file
from topoplan.engines.registry import export_plan
from topoplan.engines.verdict import EngineVerdict, machine_loads
from topoplan.plans.shards import Shard


def step(
    number: int, kind: str, source: str, target: str, after: str = "-1 -1", told: int = 0, count: int = 1
) -> str:
    """A step; buffers with offsets such as ``i0``, what it waits for as block and step."""
    block, place = after.split()
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" dstbuf="{target[0]}" '
        f'dstoff="{target[1:]}" cnt="{count}" depid="{block}" deps="{place}" hasdep="{told}"/>'
    )


def exchange(**keys: str) -> str:
    """Two GPUs of two chunks: each sends one to the other's scratch, adds it there and sends the sum back."""
    named = {"proto": "Simple", "nchannels": "1", "nchunksperloop": "2", "ngpus": "2", "coll": "allreduce"}
    named |= {"name": "pair", "inplace": "1", "outofplace": "0", "minBytes": "0", "maxBytes": "1048576"}
    named |= keys
    gpus = []
    for rank in (0, 1):
        other = 1 - rank
        steps = [
            step(0, "s", f"i{other}", "s0"),
            step(1, "r", f"i{rank}", "s0", told=1),
            step(2, "s", f"i{rank}", f"i{rank}", after="1 0"),
            step(3, "r", f"i{other}", f"i{other}"),
        ]
        gpus.append(
            f'<gpu id="{rank}" i_chunks="2" o_chunks="2" s_chunks="1">'
            f'<tb id="0" send="{other}" recv="{other}" chan="0">{"".join(steps)}</tb>'
            f'<tb id="1" send="-1" recv="-1" chan="0">{step(0, "re", "s0", f"i{rank}", after="0 1", told=1)}</tb></gpu>'
        )
    attributes = " ".join(f'{name}="{value}"' for name, value in named.items())
    return f"<algo {attributes}>{''.join(gpus)}</algo>"


def check(text: str) -> EngineVerdict:
    return check_msccl(read_algorithm_file(text), runs=20)


def test_an_exchange_by_hand_is_right() -> None:
    verdict = check(exchange())
    assert verdict.traffic == {(0, 1): 1, (1, 0): 1}
    assert verdict.notes[0].startswith("in the limits of MSCCL and RCCL")
    assert engine_of(exchange()) == "msccl"
    assert engine_of('<?xml version="1.0"?>\n' + exchange()) == "msccl"


@pytest.mark.parametrize("name", ["minBytes", "maxBytes", "outofplace"])
def test_a_file_that_rccl_does_not_read_is_not_said_to_run_there(name: str) -> None:
    value = {"minBytes": "0", "maxBytes": "1048576", "outofplace": "0"}[name]
    (note,) = check(exchange().replace(f' {name}="{value}"', "")).notes
    assert note == f"in the limits of MSCCL; RCCL's parser refuses the file: <algo> has no {name}"


def test_reduce_scatter_is_spelt_as_its_runtime_reads_it() -> None:
    """MSCCL reads reduce_scatter and RCCL reducescatter; each refuses the other's."""
    plan = topoplan.plan("v100x4", "reduce_scatter")
    for runtime, other, spelt in (("msccl", "RCCL", "reduce_scatter"), ("rccl", "MSCCL", "reducescatter")):
        text = export_plan(plan, "msccl-xml", Choices(runtime=runtime)).text
        assert f'coll="{spelt}"' in text
        (note,) = check(text).notes
        assert f"{other}'s parser refuses the file: coll is {spelt}" in note
    with pytest.raises(
        PlanError, match="no runtime whose limits hold the file accepts it: MSCCL's parser refuses it"
    ):
        check(text.replace(' outofplace="1"', ""))


WRONG = {
    "bytes from more to less": ('minBytes="0"', 'minBytes="1048577"', "minBytes 1048577 must not be above"),
    "a sum sent too early": ('depid="1" deps="0"', 'depid="-1" deps="-1"', "wrong numbers"),
    "scratch added too early": ('depid="0" deps="1"', 'depid="-1" deps="-1"', "that are not written yet"),
    "the step that is waited for tells nobody": (
        step(1, "r", "i0", "s0", told=1),
        step(1, "r", "i0", "s0"),
        r"gpu 0, block 1, step 0 \(re\): waits for step 1 of block 0, which never signals",
    ),
    "a wait for no block": ('depid="1" deps="0"', 'depid="2" deps="0"', "which does not exist"),
    "a send that nobody receives": (step(3, "r", "i1", "i1"), "", "wrong numbers|never received"),
    "a receive for which nothing comes": (
        step(3, "r", "i1", "i1"),
        step(3, "r", "i1", "i1") + step(4, "r", "i1", "i1"),
        r"gpu 0, block 0, step 4 \(r\), to which nothing comes, waits forever",
    ),
    "past the end": ('srcbuf="s" srcoff="0"', 'srcbuf="s" srcoff="1"', "pass the 1 chunks of 's'"),
    "too many chunks at once": ('cnt="1"', 'cnt="72"', "cnt must be 1 to 71, got 72"),
    "chunks that do not add up": ('i_chunks="2"', 'i_chunks="3"', "are not the 2 of nchunksperloop"),
    "two senders to one peer": ('send="-1" recv="-1"', 'send="1" recv="-1"', "2 blocks sends to gpu 1"),
    "fewer chunks received than sent": (
        step(0, "s", "i1", "s0"),
        step(0, "s", "i0", "s0", count=2),
        "receives 1 cells at once, where 2 are sent",
    ),
    "a send without a peer": ('send="1" recv="1"', 'send="-1" recv="1"', "has no peer to send to"),
    "a channel beyond nchannels": ('recv="-1" chan="0"', 'recv="-1" chan="1"', "nchannels is 1"),
    "another protocol": ('proto="Simple"', 'proto="Fast"', "proto of <algo> is 'Fast'"),
    "an unknown step": ('type="re"', 'type="glre"', "type of <step> is 'glre'"),
    "a step out of order": ('s="3"', 's="5"', "this is number 3"),
    "a GPU that is missing": ('ngpus="2"', 'ngpus="3"', "are not those of GPUs 0 to 2"),
    "a cut file": ("</algo>", "", "line 1"),
    "a document type": ("<gpu ", "<!DOCTYPE a><gpu ", "line 1"),
    "channels that no runtime has": ('nchannels="1"', 'nchannels="64"', "exceed the limits of all runtimes"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_broken_algorithm_is_refused(name: str) -> None:
    """With what is wrong, and where; the change is made in the first place where it fits."""
    old, new, message = WRONG[name]
    assert old in exchange()
    with pytest.raises(PlanError, match=message):
        check(exchange().replace(old, new, 1))


def test_large_buffers_find_a_connection_too_narrow() -> None:
    """Both send three chunks before they receive: one slice of a small buffer, three of a large one."""

    def swap(largest: int) -> str:
        gpus = []
        for rank in (0, 1):
            other = 1 - rank
            own = step(0, "cpy", f"i{3 * rank}", f"o{3 * rank}", count=3)
            steps = step(0, "s", f"i{3 * other}", "o0", count=3) + step(
                1, "r", "i0", f"o{3 * other}", count=3
            )
            gpus.append(
                f'<gpu id="{rank}" i_chunks="6" o_chunks="6" s_chunks="0">'
                f'<tb id="0" send="{other}" recv="{other}" chan="0">{steps}</tb>'
                f'<tb id="1" send="-1" recv="-1" chan="0">{own}</tb>'
                "</gpu>"
            )
        head = (
            'name="a" proto="Simple" nchannels="1" nchunksperloop="6" ngpus="2" coll="alltoall" inplace="0"'
        )
        return f'<algo {head} minBytes="0" maxBytes="{largest}">{"".join(gpus)}</algo>'

    assert check(swap(4 << 20)).collective == "alltoall"
    with pytest.raises(PlanError, match="from which nothing is taken, waits forever"):
        check(swap(64 << 20))


def test_every_dependence_of_an_exported_algorithm_is_needed() -> None:
    text = export_plan(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), "msccl-xml").text
    lines = text.splitlines()
    waiting = [number for number, line in enumerate(lines) if "<step" in line and 'depid="-1"' not in line]
    assert waiting
    for number in waiting:
        line = lines[number]
        block = line.split('depid="')[1].split('"')[0]
        changed = [*lines]
        changed[number] = line.replace(f'depid="{block}" deps="0"', 'depid="-1" deps="-1"')
        assert changed != lines
        with pytest.raises(PlanError):
            check("\n".join(changed))


def exported(plan: Plan, **choices: int) -> tuple[AlgorithmFile, EngineVerdict]:
    """The file of a plan, checked in eight interleavings: two each in and out of place, small and large."""
    file = read_algorithm_file(export_plan(plan, "msccl-xml", Choices(**choices)).text)
    return file, check_msccl(file, runs=8)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-2", "mi250x", "pcie-x8"])
def test_every_plan_of_the_library_runs_at_its_rate(machine: str, collective: str) -> None:
    plan = topoplan.plan(machine, collective)
    _, verdict = exported(plan)
    loads = machine_loads(verdict.traffic, len(plan.ranks), plan.topology)
    assert float(loads.rate) == pytest.approx(plan.rate)


def test_connections_decide_the_number_of_channels() -> None:
    """A ring sums and hands on in one direction, so a pair of ranks would be connected twice in one channel.

    Stars out of the eight roots of a DGX-A100 have no pair in common, stars in and out have.
    """
    plan = topoplan.ring_plan("v100x4")
    file, verdict = exported(plan)
    assert float(machine_loads(verdict.traffic, 4, plan.topology).rate) == pytest.approx(plan.rate)
    assert file.channels >= 2
    assert exported(topoplan.plan("dgx-a100", "allgather"))[0].channels == 1
    assert exported(topoplan.plan("dgx-a100"))[0].channels == 8


def test_more_chunks_than_a_step_takes_are_several_steps() -> None:
    plan = topoplan.plan("v100x4", "allgather")
    file, _ = exported(plan, chunks=300)
    counts = [step.count for block in file.gpus[0].blocks for step in block.steps]
    assert max(counts) == 71
    assert any(len(block.steps) > 1 for block in file.gpus[0].blocks)


def test_the_limits_of_a_runtime_are_kept() -> None:
    """A star among 70 ranks needs more blocks than RCCL has; steps run out at 64 there and at 256 in MSCCL."""
    tree = star(range(70), 0)
    shards = [Shard(Fraction(1), (stage("reduce", 0, tree), stage("broadcast", 0, tree)))]
    plan = plan_of(70, "allreduce", shards)
    with pytest.raises(UsageError, match="137 blocks of a GPU, more than the 64 of RCCL 6"):
        export_plan(plan, "msccl-xml", Choices(runtime="rccl"))
    with pytest.raises(UsageError, match="more than the 3 of MSCCL"):
        export_plan(topoplan.plan("dgx-1v"), "msccl-xml", Choices(max_blocks=3))

    for collective in ("broadcast", "reduce"):
        with pytest.raises(UsageError, match="cannot name a root"):
            export_plan(topoplan.plan("v100x4", collective), "msccl-xml")
