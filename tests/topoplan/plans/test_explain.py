"""Certificates read aloud: capacity over use, as the sentence states them, is the bound."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import Certificate, Cut, Lengths, Partition, explain_certificate
from topoplan.plans.plan import COLLECTIVES, Plan
from topoplan.reading.load import library
from topoplan.units import parse_gpu_list

CUT = re.compile(r"only (\S+) GB/s (leave|enter) \{(.*)\}, and (every byte|(\d+)/(\d+) of the buffer) must")
EDGE = re.compile(r"only (\S+) GB/s cross the edge of \{(.*)\} each way, and every byte must both ways")
COUNTED = re.compile(
    r".* carry (\S+) GB/s (?:both ways|together), and every byte crosses them (?:at least )?(\S+) times"
)
WEIGHTED = re.compile(
    r".* carry (\S+) GB/s, and every byte takes at least (\S+) of that weight; the heaviest are .*"
)


def stated_bound(sentence: str) -> float:
    """The bound that a reader of the sentence computes."""
    if found := CUT.fullmatch(sentence):
        used = 1.0 if found[5] is None else int(found[5]) / int(found[6])
        return float(found[1]) / used
    if found := EDGE.fullmatch(sentence):
        return float(found[1])
    found = COUNTED.fullmatch(sentence) or WEIGHTED.fullmatch(sentence)
    assert found is not None, sentence
    return float(found[1]) / float(found[2])


def proved(plan: Plan, certificate: Certificate) -> tuple[Plan, float]:
    """The plan under another certificate, and the bound which that one proves."""
    fabric = Fabric(plan.topology, plan.channels)
    bound = float(certificate.bound(fabric, plan.collective, plan.root))
    return replace(plan, certificate=certificate, bound=bound), bound


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "dgx-1v" else pytest.mark.thorough) for one in library()]
)
def test_the_sentence_gives_the_bound(name: str, collective: str) -> None:
    """On every library machine and its PCIe side, the stated figures give the plan's bound."""
    machine = topoplan.load(name)
    for gpus in (None, [0, 1, 3], [1, 2]):
        for channels in ("auto", "pcie"):
            if gpus is not None or channels == "auto":
                plan = topoplan.plan(machine, collective, gpus=gpus, channels=channels)
                assert stated_bound(explain_certificate(plan)) == pytest.approx(plan.bound, rel=2e-5)


@given(st.data(), st.sampled_from(["broadcast", "reduce", "allgather", "reduce_scatter"]))
@settings(max_examples=25, deadline=None)
def test_the_shorter_side_of_a_cut_is_named(data: st.DataObject, collective: str) -> None:
    """Of any cut the side with fewer devices is named, and the stated capacity leaves or enters that side."""
    plan = topoplan.plan(topoplan.load("v100x4"), collective, channels="pcie")
    others = data.draw(st.sets(st.sampled_from(["gpu1", "gpu2", "pcie0", "pcie1", "cpu0"])))
    explained, bound = proved(plan, Cut(("gpu0", *sorted(others))))
    sentence = explain_certificate(explained)
    assert stated_bound(sentence) == pytest.approx(bound, rel=2e-5)
    found = CUT.fullmatch(sentence)
    assert found is not None
    named = {name for names in found[3].split() for name in listed_names(names)}
    assert len(named) <= 3
    crossing = sum(
        link.bandwidth
        for link in plan.topology.links
        if link.channel in ("pcie", "sys")
        and (link.src in named, link.dst in named) == (found[2] == "leave", found[2] == "enter")
    )
    assert float(found[1]) == pytest.approx(crossing, rel=2e-5)


def listed_names(names: str) -> list[str]:
    """The devices of one word such as ``gpu0-2,6``."""
    found = re.fullmatch(r"([a-z]+)([\d,-]+)", names)
    assert found is not None
    return [f"{found[1]}{number}" for number in parse_gpu_list(found[2])]


@pytest.mark.parametrize(
    ("gpus", "certificate", "bound", "sentence"),
    [
        (
            range(8),
            Cut(tuple(f"gpu{i}" for i in range(7))),
            150,
            "only 150 GB/s enter {gpu7}, and every byte must",
        ),
        (
            range(3),
            Partition((("gpu0",), ("gpu2",))),
            50,
            "the links between {gpu0} {gpu1} {gpu2} carry 200 GB/s both ways, and every byte crosses them 4 times",
        ),
    ],
    ids=["weaker of both directions", "a GPU in no part is one of its own"],
)
def test_sentences_of_an_allreduce(
    gpus: range, certificate: Certificate, bound: float, sentence: str
) -> None:
    explained, proved_bound = proved(topoplan.plan("dgx-1v", gpus=gpus), certificate)
    assert explain_certificate(explained) == sentence
    assert proved_bound == bound


def test_equal_lengths_are_a_count() -> None:
    """Behind one switch every byte leaves a GPU 30 times in an allreduce of 16: 16 x 150 / 30 = 80 GB/s."""
    assert explain_certificate(topoplan.plan("dgx-2")) == (
        "the links out of all 16 GPUs carry 2400 GB/s together, and every byte crosses them at least 30 times"
    )
    assert explain_certificate(topoplan.plan("dgx-1v", gpus=[3])) == "one rank moves nothing"


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_unequal_lengths_are_weights(values: list[int]) -> None:
    """Any lengths on the six links of three GPUs give their bound, in whatever unit they are stated."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2])
    ends = [(link.src, link.dst) for link in plan.topology.links if link.channel == "nvlink"]
    certificate = Lengths(tuple((*pair, Fraction(y, 7)) for pair, y in zip(ends, values, strict=True)))
    try:
        explained, bound = proved(plan, certificate)
    except PlanError:
        return
    sentence = explain_certificate(explained)
    assert stated_bound(sentence) == pytest.approx(bound, rel=2e-5)
    assert bool(WEIGHTED.fullmatch(sentence)) == (len({y for y in values if y}) > 1)


def test_a_link_that_is_named_twice() -> None:
    """Of two lengths for one link the last counts, as it does in the bound."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1])
    certificate = Lengths(tuple(("gpu0", "gpu1", Fraction(y)) for y in (9, 1)))
    explained, bound = proved(plan, certificate)
    assert stated_bound(explain_certificate(explained)) == bound
