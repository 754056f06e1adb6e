"""Files for NCCL's tuner plugin: an independent reader of its rules runs what is fastest, at every size."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import topoplan
from tests.support.tuner_plugin import ALGORITHMS as PLUGIN_ALGORITHMS
from tests.support.tuner_plugin import COLLECTIVES as COLLECTIVE_NAMES
from tests.support.tuner_plugin import PROTOCOLS as PLUGIN_PROTOCOLS
from tests.support.tuner_plugin import Line, chosen, read
from topoplan import Topology, UsageError
from topoplan.engines.exported import Exported
from topoplan.engines.nccl.tuner_file import measured_tuner, model_tuner, parse_label
from topoplan.engines.registry import export_machine, export_plan
from topoplan.machine.variants import with_all_capabilities
from topoplan.schedules.nccl_tuning import COLLECTIVES, expectations, setting_of

NAMES = {name: name.replace("_", "") for name in COLLECTIVES}


def pair(name: str = "dgx-h100") -> Topology:
    return topoplan.cluster([topoplan.Server(name, count=2)], nic_gbps=400, nics=8, nic_access="direct")


MACHINES = {
    "dgx-1v": lambda: topoplan.load("dgx-1v"),
    "pcie-x8": lambda: topoplan.load("pcie-x8"),
    "dgx-h100": lambda: topoplan.load("dgx-h100"),
    "one rank a server": lambda: pair("dgx-a100").subset([0, 8]),
    "two servers": pair,
}


@cache
def tuner_text(name: str) -> str:
    return model_tuner(MACHINES[name]()).text


@pytest.mark.sampled
@pytest.mark.parametrize("name", MACHINES)
def test_the_plugin_runs_what_the_model_finds_fastest(name: str) -> None:
    """At every power of four and beside it, of every collective; never one channel where more would run."""
    here = setting_of(with_all_capabilities(MACHINES[name]()))
    lines = read(tuner_text(name))
    for collective in COLLECTIVES:
        known = expectations(here, collective)
        for size in sorted({max(0, (1 << power) + step) for power in range(0, 35, 2) for step in (-1, 0, 1)}):
            best = min(known, key=lambda one: one.seconds(size))
            algorithm, protocol, channels = chosen(
                lines, NAMES[collective], size, nodes=here.servers, ranks=here.ranks
            )
            ran = next(one for one in known if (one.algorithm, one.protocol) == (algorithm, protocol))
            assert ran.seconds(size) <= best.seconds(size) * (1 + 1e-6) + 1e-12
            assert ran.channels(size) / 2 < channels <= max(1, ran.channels(size))


def test_ranges_have_no_gap_and_no_overlap() -> None:
    """From 0 to the largest number that the plugin has; a communicator of another size matches no line."""
    lines = read(tuner_text("dgx-h100"))
    for collective in NAMES.values():
        own = [line for line in lines if line.collective == collective]
        assert (own[0].low, own[-1].high) == (0, 2**64 - 1)
        assert [line.low for line in own[1:]] == [line.high + 1 for line in own[:-1]]
    assert chosen(lines, "allreduce", 1 << 20, nodes=1, ranks=4) == ("", "", 1)
    notes = model_tuner(topoplan.load("dgx-1v")).notes
    assert "communicators of other sizes than 8 ranks on 1" in notes[0]


@pytest.mark.thorough
def test_words_and_lines_are_the_plugin_s() -> None:
    """Nothing that it would take for something else, and no line that it would cut."""
    texts = [tuner_text(name) for name in MACHINES]
    for line in "".join(texts).splitlines():
        assert len(line) < 255
        if not line.startswith("#"):
            (kept,) = read(line + "\n")
            words = line.split(",")
            assert len(words) == 10
            assert (kept.collective, kept.algorithm, kept.protocol) == (words[0], words[3], words[4])
    assert {"nvls", "nvls_tree", "tree", "ring", "pat"} == {
        line.algorithm for text in texts for line in read(text)
    }


def test_machines_plans_and_clusters_are_exported_alike() -> None:
    """A plan stands for its allocation; a cluster needs no choice of a server, and may have one."""

    def lines(exported: Exported) -> list[str]:
        return [line for line in exported.text.splitlines() if line[0] != "#"]

    plan = topoplan.plan("dgx-1v", gpus=[0, 1, 2, 3])
    machine = topoplan.load("dgx-1v").subset([0, 1, 2, 3])
    assert lines(export_plan(plan, "nccl-tuner")) == lines(export_machine(machine, "nccl-tuner"))
    two = pair("dgx-a100")
    assert {line.nodes for line in read(export_machine(two, "nccl-tuner", server="s1").text)} == {1}
    spread = topoplan.plan(two, gpus=[0, 8])
    found = read(export_plan(spread, "nccl-tuner").text)
    assert {(line.nodes, line.ranks) for line in found} == {(2, 2)}


def test_a_plan_whose_switches_forward_says_why_it_has_no_nvls() -> None:
    """A plan file states what its switches did; with in-network ones NVLS stands in the lines."""
    machine = topoplan.load("dgx-h100").subset([0, 1, 2, 3])
    plain, able = (topoplan.plan(one) for one in (machine, with_all_capabilities(machine)))
    assert "NVLS stands in no line" in export_plan(plain, "nccl-tuner").notes[-1]
    made = export_plan(able, "nccl-tuner")
    assert "nvls" in {line.algorithm for line in read(made.text)}
    assert not any("NVLS" in note for note in made.notes)


def measured(times: dict[tuple[str, str], dict[int, float]], most: int | None = 16) -> list[Line]:
    made = measured_tuner({"allreduce": times}, servers=1, ranks=8, channels=lambda _: most, source="a test")
    return read(made.text)


@hypothesis.given(
    st.dictionaries(
        st.sampled_from([("ring", "ll"), ("ring", "simple"), ("tree", "ll128"), ("nvls", "simple")]),
        st.dictionaries(st.integers(1, 20).map(lambda power: 1 << power), st.floats(1e-6, 1e-1), min_size=1),
        min_size=1,
    )
)
@hypothesis.settings(max_examples=60)
def test_what_was_measured_fastest_is_run_where_it_was_measured(
    times: dict[tuple[str, str], dict[int, float]],
) -> None:
    """Within the two per cent that count as noise, whatever was measured at which sizes."""
    lines = measured(times)
    for size in {size for one in times.values() for size in one}:
        algorithm, protocol, channels = chosen(lines, "allreduce", size, nodes=1, ranks=8)
        there = {choice: one[size] for choice, one in times.items() if size in one}
        assert there[algorithm, protocol] <= min(there.values()) / 0.98
        assert 1 <= channels <= 16
    assert chosen(lines, "allreduce", 0, nodes=1, ranks=8)[0]
    assert chosen(lines, "allreduce", 1 << 50, nodes=1, ranks=8)[0]


def test_neighbouring_sizes_of_one_choice_are_one_range() -> None:
    times = {
        ("tree", "ll"): {1 << 10: 10e-6, 1 << 12: 11e-6, 1 << 14: 12e-6, 1 << 20: 99e-6},
        ("ring", "simple"): {1 << 10: 20e-6, 1 << 12: 10.9e-6, 1 << 14: 21e-6, 1 << 20: 60e-6},
    }
    lines = measured(times, None)
    assert [(line.low, line.high, line.algorithm, line.channels) for line in lines] == [
        (0, (1 << 20) - 1, "tree", -1),
        (1 << 20, 2**64 - 1, "ring", -1),
    ]


def test_channels_that_nobody_knows_are_warned_of() -> None:
    made = measured_tuner(
        {"reduce": {("ring", "ll"): {8: 1e-5}}}, servers=1, ranks=8, channels=lambda _: None, source="a test"
    )
    assert "warning: channels are not known" in made.notes[-1]
    assert "no lines for allreduce, allgather, reducescatter, broadcast" in made.notes[1]


def test_refuses_labels_that_nccl_does_not_have_and_no_measurement() -> None:
    for label in ("", "rings", "ring/ll64", "nvls/ll", "pat/ll128", "ring/ll/simple"):
        with pytest.raises(UsageError, match=r"use |write "):
            parse_label(label)
    with pytest.raises(UsageError, match="nothing to tune"):
        measured_tuner({}, servers=1, ranks=8, channels=lambda _: 1, source="a test")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Compile the plug-in of a machine and the harness; return both."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a plug-in in C is compiled: install cc")
    folder = tmp_path_factory.mktemp("tuner")
    strict = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror"]
    harness = Path(__file__).parents[2] / "support" / "tuner_harness.c"
    subprocess.run([*strict, str(harness), "-ldl", "-o", "harness"], cwd=folder, check=True, timeout=60)

    def make(name: str) -> tuple[Path, Path]:
        source = folder / f"{name.replace(' ', '-')}.c"
        source.write_text(model_tuner(MACHINES[name](), plugin=True).text)
        library = source.with_suffix(".so")
        subprocess.run(
            [*strict, "-pedantic", "-shared", "-fPIC", str(source), "-o", str(library)],
            check=True,
            timeout=60,
        )
        return folder / "harness", library

    return make


@pytest.mark.parametrize("name", ["dgx-1v", "two servers"])
def test_the_plug_in_chooses_as_its_file_through_each_version_of_the_interface(
    built: Callable[[str], tuple[Path, Path]], name: str
) -> None:
    """One struct for each version; constants of either size stay as they are, and NCCL chooses all else itself."""
    harness, library = built(name)
    here, lines = setting_of(with_all_capabilities(MACHINES[name]())), read(tuner_text(name))
    calls = [
        (place, size) for place in range(5) for size in (0, 1, 4095, 1 << 16, 1 << 20, (1 << 30) + 1, 1 << 40)
    ]

    def run(version: int, ranks: int, missing: int = -1) -> list[list[float]]:
        done = subprocess.run(
            [str(harness), str(library), str(version), str(ranks), str(here.servers), str(missing)],
            input="".join(f"{place} {size}\n" for place, size in calls),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        head, *rows = done.stdout.splitlines()
        assert head == f"topoplan {32 if version == 5 else 40} {1152 if version < 7 else 1272}"
        assert ("chooses for" if ranks == here.ranks else "leaves") in done.stderr
        return [[float(word) for word in row.split()] for row in rows]

    expected = []
    for place, size in calls:
        algorithm, protocol, channels = chosen(
            lines, COLLECTIVE_NAMES[place], size, nodes=here.servers, ranks=here.ranks
        )
        expected.append([PLUGIN_ALGORITHMS.index(algorithm), PLUGIN_PROTOCOLS.index(protocol), channels, 0])
    for version in (5, 6, 7):
        assert run(version, here.ranks) == expected
    assert run(6, here.ranks + 1) == [[0, 0, 0, 10]] * len(calls)
    ring_simple = 1 * 3 + 2
    without = run(7, here.ranks, missing=ring_simple)
    for found, wanted in zip(without, expected, strict=True):
        assert found == ([0, 0, 0, 10] if wanted[:2] == [1, 2] else wanted)
