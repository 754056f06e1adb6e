"""Algorithms of MSCCL, whoever wrote them: right ones are accepted, broken ones named by block and step."""

from __future__ import annotations

import pytest

import topoplan
from topoplan.cli.verify import engine_of
from topoplan.engines.exported import Choices
from topoplan.engines.msccl_read_back import check_msccl, read_algorithm_file
from topoplan.engines.registry import export_plan
from topoplan.engines.verdict import EngineVerdict
from topoplan.errors import PlanError


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
    "bytes from more to less": (
        'minBytes="0"',
        'minBytes="1048577"',
        "minBytes 1048577 must not be above maxBytes",
    ),
    "the sum is sent before it is there": ('depid="1" deps="0"', 'depid="-1" deps="-1"', "wrong numbers"),
    "scratch is added before anything came": (
        'depid="0" deps="1"',
        'depid="-1" deps="-1"',
        "cells that are not written yet",
    ),
    "the step that is waited for tells nobody": (
        step(1, "r", "i0", "s0", told=1),
        step(1, "r", "i0", "s0"),
        r"gpu 0, block 1, step 0 \(re\): waits for step 1 of block 0, which never signals",
    ),
    "a wait for a block that is not there": (
        'depid="1" deps="0"',
        'depid="2" deps="0"',
        "which does not exist",
    ),
    "a send that nobody receives": (step(3, "r", "i1", "i1"), "", "wrong numbers|never received"),
    "a receive for which nothing comes": (
        step(3, "r", "i1", "i1"),
        step(3, "r", "i1", "i1") + step(4, "r", "i1", "i1"),
        r"gpu 0, block 0, step 4 \(r\), to which nothing comes, waits forever",
    ),
    "past the end": ('srcbuf="s" srcoff="0"', 'srcbuf="s" srcoff="1"', "pass the 1 chunks of 's'"),
    "too many chunks at once": ('cnt="1"', 'cnt="72"', "cnt must be 1 to 71, got 72"),
    "chunks that do not add up": ('i_chunks="2"', 'i_chunks="3"', "are not the 2 of nchunksperloop"),
    "two blocks that send to one peer in one channel": (
        'send="-1" recv="-1"',
        'send="1" recv="-1"',
        "2 blocks sends to gpu 1",
    ),
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
    "more channels than any runtime has": (
        'nchannels="1"',
        'nchannels="64"',
        "exceed the limits of all runtimes",
    ),
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
