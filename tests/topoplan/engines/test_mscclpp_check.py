"""Execution plans of MSCCL++, whoever wrote them: right ones are accepted, broken ones named by block and operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import topoplan
from topoplan import PlanError
from topoplan.cli.verify import engine_of
from topoplan.engines.mscclpp_read import read_plan_file
from topoplan.engines.mscclpp_read_back import check_execution_plan
from topoplan.engines.registry import export_plan
from topoplan.engines.verdict import EngineVerdict

File = dict[str, Any]


def local(index: int, size: int = 1, kind: str = "i") -> File:
    return {"type": kind, "index": index, "size": size}


def remote(index: int, size: int = 1, buffer: int = 0) -> File:
    return {"buffer_id": buffer, "index": index, "size": size}


def on(name: str, *ids: int, kind: str = "memory") -> File:
    return {"name": name, "channel_ids": list(ids), "channel_type": kind}


def moves(name: str, reads: list[File], writes: list[File], kind: str = "memory", *ids: int) -> File:
    return {
        "name": name,
        "src_buff": reads,
        "dst_buff": writes,
        "channel_type": kind,
        **({"channel_ids": list(ids)} if ids else {}),
    }


NOP: File = {"name": "nop"}


def pair(
    operations: Callable[[int], list[list[File]]],
    *,
    remote_buffer: str = "i",
    kind: str = "memory",
    scratch: int = 0,
    chunks: tuple[int, int] = (2, 2),
    groups: bool = False,
    **keys: object,
) -> File:
    """Two GPUs with a channel between them; ``operations`` gives the blocks of each."""
    gpus = []
    for rank in (0, 1):
        made = [
            {
                "id": number,
                "ops": ops,
                "channels": [{"channel_type": kind, "channel_ids": [0]}]
                + ([{"channel_type": "switch", "channel_ids": [0]}] if groups else []),
                "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": [0]}],
            }
            for number, ops in enumerate(operations(rank))
        ]
        switch = {"channel_type": "switch", "buffer_type": "i", "rank_groups": [{"size": 2, "ranks": [0, 1]}]}
        gpus.append(
            {
                "id": rank,
                "input_chunks": chunks[0],
                "output_chunks": chunks[1],
                "scratch_chunks": scratch,
                "threadblocks": made,
                "channels": [{"channel_type": kind, "connected_to": [1 - rank]}]
                + ([switch] if groups else []),
                "remote_buffers": [{"rank": 1 - rank, "type": remote_buffer, "access_channel_types": [kind]}],
                "semaphores": [],
            }
        )
    head = {"name": "pair", "collective": "allreduce", "protocol": "Simple", "inplace": True}
    return {**head, **keys, "gpus": gpus}


def exchange(rank: int) -> list[list[File]]:
    """Each adds one half of both and writes it to both, between two meetings."""
    meet = [on("signal", 0), on("wait", 0), NOP]
    add = moves("rres", [local(rank), remote(rank)], [local(rank), remote(rank)])
    return [[*meet, add, NOP, on("signal", 0), on("wait", 0)]]


def check(file: File) -> EngineVerdict:
    return check_execution_plan(read_plan_file(json.dumps(file)), runs=20)


def test_an_exchange_by_hand_is_right() -> None:
    verdict = check(pair(exchange))
    assert verdict.traffic == {(0, 1): 1, (1, 0): 1}
    assert engine_of(json.dumps(pair(exchange))) == "mscclpp"


def test_port_channels_and_a_local_sum_are_right() -> None:
    """All of the input goes to the peer's scratch, and each adds for itself once the signal is there."""

    def operations(rank: int) -> list[list[File]]:
        send = moves("pwsf", [local(0, 2)], [remote(0, 2)], "port", 0)
        add = moves("re", [local(0, 2), local(0, 2, "s")], [local(0, 2)])
        return [[send, NOP, on("wait", 0, kind="port"), NOP, add]]

    file = pair(operations, kind="port", remote_buffer="s", scratch=2)
    assert check(file).traffic == {(0, 1): 1, (1, 0): 1}
    for gpu in file["gpus"]:
        gpu["threadblocks"][0]["ops"][0]["name"] = "pws"
    with pytest.raises(PlanError, match=r"ends with wrong numbers|kernel may have ended"):
        check(file)  # the proxy may send the sum in place of the input, or what comes after the call


def test_packets_say_themselves_when_they_are_there() -> None:

    def operations(rank: int) -> list[list[File]]:
        other = 1 - rank
        return [
            [moves("ppkt", [local(other)], [remote(other)])],
            [
                moves("respkt", [local(rank), local(rank, 1, "s")], [local(rank), remote(rank)]),
                {"name": "upkt", "src_buff": [local(other, 1, "s")], "dst_buff": [local(other)]},
            ],
        ]

    file = pair(operations, remote_buffer="s", scratch=2, protocol="LL")
    assert "twice the bytes" in check(file).notes[0]
    file["protocol"] = "Simple"
    with pytest.raises(PlanError, match="which need the protocol LL"):
        check(file)


def test_a_switch_adds_and_copies() -> None:

    def operations(rank: int) -> list[list[File]]:
        at = {"switch_channel_id": 0, "index": rank, "size": 1}
        loop = {"name": "pipeline", "iter_context": {"unit_size": 1024, "num_chunks": 1}}
        meet = [on("rlxsignal", 0), on("rlxwait", 0), NOP]
        return [[*meet, {**loop, "ops": [moves("glres", [at], [at], "switch")]}, NOP, *meet]]

    assert check(pair(operations, groups=True)).traffic == {}


Change = Callable[[File, list[File]], object]
"""A change of the exchange, which gets the file and the operations of GPU 0."""


def in_both(places: slice) -> Change:
    return lambda file, _: [gpu["threadblocks"][0]["ops"].__delitem__(places) for gpu in file["gpus"]]


def first(**keys: object) -> Change:
    return lambda _, ops: ops[0].update(keys)


def adding(**keys: object) -> Change:
    return lambda _, ops: ops[3].update(keys)


def source(**keys: object) -> Change:
    return lambda _, ops: ops[3]["src_buff"][0].update(keys)


def more(*operations: File) -> Change:
    return lambda _, ops: ops.extend(operations)


WRONG: dict[str, tuple[Change, str]] = {
    "no second meeting": (in_both(slice(5, 7)), "kernel may have ended"),
    "no first meeting": (in_both(slice(0, 2)), "before its kernel may have begun"),
    "one wait more": (more(on("wait", 0)), "operation 7 \\(wait\\).* waits forever"),
    "one signal more": (more(on("signal", 0)), "is sent 1 more times than it is waited for"),
    "no sync after the wait": (lambda _, ops: ops.pop(2), "begun"),
    "the same half twice": (source(index=1), "is in the sum twice|wrong numbers"),
    "sizes differ": (source(size=2), "differ in size"),
    "past the end": (
        lambda _, ops: ops[3]["dst_buff"][1].update(index=2),
        "chunks 2 to 3 of a buffer 'i' that has 2",
    ),
    "no such channel": (first(channel_ids=[1]), "names 1, which must be below 1"),
    "unknown operation": (adding(name="glre"), "the engine knows no such operation"),
    "nine channels": (first(channel_ids=[0] * 9), "9 channels; the engine has room for 8"),
    "sixty-five operations": (more(*[NOP] * 60), "67 operations; the engine has room for 64"),
    "seventeen channels": (
        lambda file, _: file["gpus"][0]["threadblocks"][0]["channels"][0].update(channel_ids=[0] * 17),
        "17 memory channels",
    ),
    "unpaired channel": (
        lambda file, _: file["gpus"][0]["channels"][0]["connected_to"].append(1),
        "2 memory channels to gpu 1, which has 1 back",
    ),
    "a local read where a remote one belongs": (
        lambda _, ops: ops[3]["src_buff"].__setitem__(1, local(0)),
        "src_buff is local local, and has to be local remote",
    ),
    "a signal from a put over memory": (
        more(moves("pws", [local(0)], [remote(0)])),
        "over a memory channel the engine sends no signal",
    ),
    "the wrong collective": (lambda file, _: file.update(collective="allgather"), "has 1 to 2"),
    "a part beyond its group": (
        adding(tbg_info={"tb_id": 2, "tbg_size": 2}),
        "its tb_id is 2, and its group has 2 blocks",
    ),
    "a maximum": (adding(reduce_op="max"), "reduce_op is not sum"),
    "an outsider": (
        lambda file, _: file["gpus"][0]["remote_buffers"][0].update(rank=2),
        "gpu 2, which is not another GPU",
    ),
    "no protocol": (lambda file, _: file.pop("protocol"), "protocol must be a text"),
    "no GPUs": (lambda file, _: file.update(gpus=[]), "gpus: the number of GPUs must be 1 to 1024, got 0"),
    "one id twice": (lambda file, _: file["gpus"][1].update(id=0), "gpu 1: its id is 0"),
    "no input chunks": (lambda file, _: file["gpus"][0].pop("input_chunks"), "input_chunks"),
    "a negative channel": (first(channel_ids=[-1]), "must be 0 or more"),
    "a reference to nothing": (lambda _, ops: ops[3]["src_buff"][0].pop("type"), "a reference has one of"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_refuses_a_broken_plan(name: str) -> None:
    change, message = WRONG[name]
    file = pair(exchange)
    change(file, file["gpus"][0]["threadblocks"][0]["ops"])
    with pytest.raises(PlanError, match=message):
        check(file)


def test_blocks_that_divide_an_operation_without_a_barrier_are_told() -> None:
    """As in one of the engine's own examples: accepted, with a warning that says which read may come too early."""

    def operations(rank: int) -> list[list[File]]:
        made = []
        for half in (0, 1):
            parts = {"tbg_info": {"tb_id": half, "tbg_size": 2}}
            copy = {"name": "copy", "src_buff": [local(0, 2)], "dst_buff": [local(0, 2, "s")], **parts}
            add = moves("re", [local(1 - half), local(half, 1, "s")], [local(1 - half)])
            made.append([copy, NOP, add])
        return made

    file = pair(operations, scratch=2)
    with pytest.raises(PlanError):
        check(file)

    def in_step(rank: int) -> list[list[File]]:
        made = []
        for half in (0, 1):
            parts = {"tbg_info": {"tb_id": half, "tbg_size": 2}}
            copy = {"name": "copy", "src_buff": [local(0, 2)], "dst_buff": [local(0, 2, "s")], **parts}
            channel = on("signal", 0), on("wait", 0)
            meet = [*channel, NOP] if half == 0 else []
            add = {**moves("rre", [local(0, 2), remote(0, 2)], [local(0, 2)]), **parts}
            made.append([copy, NOP, *meet, add, NOP, *(channel if half == 0 else ())])
        return made

    (note,) = check(pair(in_step, remote_buffer="s", scratch=2)).notes
    assert note.startswith("warning: right only if blocks")


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather", "reduce_scatter"])
def test_every_signal_and_wait_of_an_exported_plan_is_needed(collective: str) -> None:
    text = export_plan(topoplan.plan("dgx-1v", collective, gpus=[1, 4, 5, 7]), "mscclpp").text
    places = [
        (rank, number, place)
        for rank, gpu in enumerate(json.loads(text)["gpus"])
        for number, block in enumerate(gpu["threadblocks"])
        for place, operation in enumerate(block["ops"])
        if operation["name"] in ("signal", "wait")
    ]
    for rank, number, place in places[::3]:
        file = json.loads(text)
        del file["gpus"][rank]["threadblocks"][number]["ops"][place]
        with pytest.raises(PlanError):
            check(file)
