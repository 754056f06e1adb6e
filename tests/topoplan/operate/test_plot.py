"""Figures: what must be on them is on them, nothing overlaps, nothing is cut off, and files appear whole."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.listings import MATRICES, each
from tests.support.small_machines import CABLED
from topoplan.errors import UsageError
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.machine.variants import without_links
from topoplan.model.times_by_size import SizeRow, sweep
from topoplan.operate.compare.comparison import compare
from topoplan.operate.plot.canvas import BLACK, GREY, Look, save_figure, write_figure
from topoplan.operate.plot.charts import MOST_BARS, draw_bands, draw_comparison, draw_sweep
from topoplan.operate.plot.machine import MAX_DEVICES, draw_topology
from topoplan.operate.plot.nvlink_panel import circle_order, circle_places
from topoplan.operate.plot.page import machine_section
from topoplan.operate.plot.panels import wires
from topoplan.operate.plot.tree_layout import forest_positions
from topoplan.operate.plot.trees import draw_trees
from topoplan.plans.plan import Plan
from topoplan.reading.load import library
from topoplan.schedules.binary_trees import double_binary_tree
from topoplan.schedules.ring import ring_plan
from topoplan.units import parse_gpu_list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

LIBRARY = tuple(name for name in library() if not name.endswith("nvl72") and name not in CABLED)


@dataclass(frozen=True)
class Rates:
    """A row of the comparison figure."""

    gpus: tuple[int, ...]
    members: int
    trees: float
    bound: float
    ring: float
    rival: tuple[float, str]
    others: tuple[tuple[str, float | None], ...] = ()

    @property
    def schedules(self) -> tuple[tuple[str, float], ...]:
        return ((self.rival[1], self.rival[0]), *((name, rate) for name, rate in self.others if rate))

    @property
    def rival_ratio(self) -> float:
        return self.trees / self.rival[0]


def class_rows(count: int) -> list[Rates]:
    """Allocations of growing size with made-up rates, every third without an NVLink ring."""
    rows = []
    for number in range(count):
        size = 3 + 6 * number // count
        trees = 25.0 * (1 + number % 6)
        loop = 5.0 if number % 3 == 0 else trees
        kind = "pcie ring" if number % 3 == 0 else "nvlink ring"
        rows.append(Rates(tuple(range(8 - size, 8)), 1 + number % 4, trees, trees, loop / 2, (loop, kind)))
    return rows


def box(text: Text) -> Bbox:
    """The place of a text on the page, with the patch around it."""
    patch = text.get_bbox_patch()
    renderer = text.figure.canvas.get_renderer()  # type: ignore[union-attr]
    return text.get_window_extent(renderer) if patch is None else patch.get_window_extent(renderer)


def visible_texts(figure: Figure) -> list[Text]:
    """Every text that is drawn: titles, legends, labels in panels, and labels of axes and ticks in view."""
    figure.canvas.draw()
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title]
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                found += [axis.label, *(tick.label1 for tick in ticks)]
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        if legend is not None:
            found += [legend.get_title(), *legend.get_texts()]
    return [text for text in found if text.get_text().strip() and text.get_visible()]


def overlapping(texts: list[Text]) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than a hair."""
    boxes = [(text.get_text(), box(text)) for text in texts]
    return [
        (first, second)
        for (first, a), (second, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def check_readable(figure: Figure) -> None:
    """No two texts of a figure overlap, titles, notes and legend included, and none leaves the page."""
    texts, page = visible_texts(figure), figure.bbox
    assert overlapping(texts) == []
    outside = [
        text.get_text()
        for text in texts
        if (b := box(text)).x0 < page.x0 or b.y0 < page.y0 or b.x1 > page.x1 or b.y1 > page.y1
    ]
    assert outside == []


def panel_texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def servers(name: str, count: int, **network: Any) -> Topology:
    return topoplan.cluster([topoplan.Server(topoplan.load(name), count=count)], **network)


def with_bus_ids(machine: Topology) -> Topology:
    """The machine as a probe would see it: every GPU, switch and NIC has a bus id."""
    named = [
        replace(device, busid=f"0000:{number:02x}:00.0") if device.kind != "cpu" else device
        for number, device in enumerate(machine.devices)
    ]
    return replace(machine, devices=tuple(named))


def four_nodes() -> Topology:
    """Four NUMA nodes, each joined to the others but for one pair, a GPU with chip-to-chip links, NICs apart."""
    ends = [(f"cpu{i}", f"cpu{j}", "sys", 20.0) for i, j in combinations(range(4), 2) if (i, j) != (1, 2)]
    ends += [(f"gpu{i}", f"cpu{i}", channel, 50.0) for i in range(4) for channel in ("pcie", "c2c")]
    ends += [(f"gpu{i}", f"gpu{i + 1}", "nvlink", 100.0) for i in (0, 2)]
    ends += [(f"gpu{i}", f"cpu{i}", "nvlink", 100.0) for i in (0, 1)]
    ends += [("gpu3", "nic0", "network", 25.0), ("gpu2", "nic0", "network", 25.0)]
    kinds = {f"{kind}{i}": kind for kind in ("gpu", "cpu") for i in range(4)} | {"nic0": "nic"}
    links = tuple(Link(*pair, channel, rate, 2) for a, b, channel, rate in ends for pair in ((a, b), (b, a)))
    return Topology("four", tuple(Device(name, kind) for name, kind in kinds.items()), links)


PICTURES: dict[str, Callable[[], Topology]] = {
    **{name: partial(topoplan.load, name) for name in LIBRARY},
    "dgx-1v with bus ids": lambda: with_bus_ids(topoplan.load("dgx-1v")),
    "dgx-1v with a dead link": lambda: without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"]),
    "two dgx-1v": partial(servers, "dgx-1v", 2, nic_gbps=100),
    "rails": partial(servers, "dgx-h100", 2, nic_gbps=400, network="rail-optimised"),
    "fat tree": partial(servers, "dgx-a100", 4, nic_gbps=200, network="fat-tree", leaf_size=2),
    "shared NICs": partial(servers, "pcie-x8", 2, nic_gbps=100, nics=2, nic_access="direct"),
    "64 servers": partial(
        servers, "dgx-h100", 64, nic_gbps=400, network="rail-optimised", oversubscription=2
    ),
    "four nodes": four_nodes,
}
LISTED = {path.stem: partial(topoplan.load, path) for path in MATRICES}


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*PICTURES, *each(LISTED)])
def test_draws_a_machine_on_a_page_without_overlaps(name: str) -> None:
    """At most 14 by 20 inches; lines avoid the boxes of devices that they do not join, and the small texts."""
    figure = draw_topology((PICTURES | LISTED)[name]())
    check_readable(figure)
    width, height = figure.get_size_inches()
    assert (width <= 14, height <= 20) == (True, True)
    for axes in figure.axes:
        boxes = [box(text) for text in axes.texts if not text.get_text().startswith("×")]
        for line in axes.lines:
            corners = axes.transData.transform(line.get_xydata())
            steps = numpy.linspace(0, 1, 101)[:, None]
            points = numpy.vstack([first + (second - first) * steps for first, second in pairwise(corners)])
            touched = sum(bool(((points > b.min) & (points < b.max)).all(axis=1).any()) for b in boxes)
            # A line above CPUs that are all joined to each other touches none, its branches one each.
            assert touched == 2 if name in LIBRARY else touched <= 2
    if name in LIBRARY:
        check_panels(topoplan.load(name), {axes.get_title(loc="left"): axes for axes in figure.axes})


def check_panels(topology: Topology, panels: Mapping[str, Axes]) -> None:
    """Each panel names the devices on its channels; every NVLink bundle carries its number of links."""
    for title, nvlink in (("NVLink", True), ("PCIe", False)):
        shown = [wire for wire in wires(topology) if (wire.channel == "nvlink") == nvlink]
        assert (title in panels) == bool(shown)
        if shown:
            texts = panel_texts(panels[title])
            assert {end for wire in shown for end in wire.ends} <= set(texts)
            counts = sorted(f"×{wire.count}" for wire in shown if wire.count > 1)
            assert sorted(text for text in texts if text.startswith("×")) == counts
            assert len(panels[title].lines) == len(shown)


def test_texts_beside_devices_and_nics_of_two_devices() -> None:
    """Adapters go before bus ids, without the domain 0000; the NIC of two GPUs is one box, wired to both."""
    machine = with_bus_ids(topoplan.load("dgx-1v"))
    known = {"nic0": facts(adapter="mlx5_0")}
    named = tuple(replace(device, facts=known.get(device.name, ())) for device in machine.devices)
    texts = panel_texts(draw_topology(replace(machine, devices=named)).axes[1])
    assert {"00:00.0", "07:00.0", "mlx5_0"} <= set(texts)
    assert not any("0000:" in text for text in texts)
    figure = draw_topology(servers("dgx-1v", 2, nic_gbps=100))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == ["NVLink", "PCIe and NICs", "network"]
    texts = panel_texts(panels["PCIe and NICs"])
    assert texts.count("s0.nic0") == 1
    assert not any(text.endswith((".tx", ".rx")) for text in texts)
    assert sum(line.get_linestyle() == ":" for line in panels["PCIe and NICs"].lines) == 16


def test_warnings_stand_first_and_notes_are_few() -> None:
    machine = without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"])
    many = replace(machine, notes=tuple(f"note number {i}" for i in range(9)))
    texts = [text.get_text() for text in draw_topology(many).texts]
    assert texts[1] == "warning: gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s"
    assert texts[2:] == [*(f"note number {i}" for i in range(4)), "5 more notes: topoplan show prints all"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 6)), max_size=14))
@settings(max_examples=60, deadline=None)
def test_order_on_the_circle_is_never_worse_than_as_listed(wires: list[tuple[int, int, int]]) -> None:
    names = [f"gpu{i}" for i in range(10)]
    counts = {(names[a], names[b]): count for a, b, count in wires if a < b}
    order = circle_order(names, counts, radius=1.7)
    assert sorted(order) == sorted(names)
    assert covering(order, counts) <= covering(names, counts)


def covering(order: Sequence[str], counts: Mapping[tuple[str, str], int]) -> tuple[int, int]:
    """Pairs of a wire and a foreign box of 0.56 by 0.3 inches on it, by sampling; and crossings."""
    places = dict(zip(order, circle_places(len(order), 1.7), strict=True))
    number = {name: position for position, name in enumerate(order)}
    covered = 0
    for a, b in counts:
        (x, y), (u, v) = places[a], places[b]
        points = [(x + (u - x) * step / 400, y + (v - y) * step / 400) for step in range(401)]
        covered += sum(
            any(abs(p - x) < 0.28 and abs(q - y) < 0.15 for p, q in points)
            for name, (x, y) in places.items()
            if name not in (a, b)
        )
    chords = [sorted((number[a], number[b])) for a, b in counts]
    return covered, sum(a < c < b < d or c < a < d < b for (a, b), (c, d) in combinations(chords, 2))


def test_direction_of_unequal_bandwidth_is_in_the_legend() -> None:
    """A wire that is slower one way says both figures; a machine too large to draw says so."""
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))
    links = (Link("gpu0", "gpu1", "nvlink", 50.0, 2), Link("gpu1", "gpu0", "nvlink", 25.0))
    figure = draw_topology(Topology("lame", devices, links))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["NVLink ×2: 50 and 25 GB/s"]
    crowd = Topology("crowd", tuple(Device(f"gpu{i}", "gpu") for i in range(MAX_DEVICES + 1)), ())
    with pytest.raises(UsageError, match=r"at most 160 devices, got 161 of crowd"):
        draw_topology(crowd)


def test_push_and_pull_that_differ_are_in_the_legend_and_the_page() -> None:
    gpus = tuple(Device(f"gpu{number}", "gpu") for number in range(2))
    ends = (("gpu0", "gpu1"), ("gpu1", "gpu0"))
    machine = Topology("box", gpus, tuple(Link(*one, "pcie", 52, push=None, pull=52) for one in ends))
    legend = draw_topology(machine).legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["PCIe: 52 GB/s (push never ends, pull 52)"]
    assert "52 (push never ends, pull 52)" in machine_section(machine).content


@pytest.mark.sampled
@pytest.mark.parametrize(
    "plan",
    [
        partial(ring_plan, "dgx-1v", "broadcast"),
        partial(double_binary_tree, "dgx-2"),
        partial(ring_plan, "pcie-x8", "allgather"),
        partial(topoplan.plan, "v100x4"),
    ],
)
def test_draws_each_rank_once_in_each_panel(plan: Callable[[], Plan]) -> None:
    figure = draw_trees(plan())
    ranks = sorted(map(str, range(len(plan().ranks))))
    assert all(sorted(panel_texts(axes)) == ranks for axes in tree_panels(figure))
    maps = [axes for axes in figure.axes if axes not in tree_panels(figure)]
    assert set(plan().ranks) <= {text for axes in maps for text in panel_texts(axes)}
    check_readable(figure)


def tree_panels(figure: Figure) -> list[Axes]:
    """The panels of a figure of trees without those of its map."""
    return [axes for axes in figure.axes if "links of the trees drawn" not in axes.get_title(loc="left")]


@pytest.mark.parametrize("channels", ["auto", "pcie"])
def test_the_map_shows_the_links_of_each_tree_on_its_machine(channels: str) -> None:
    """Two trees over the eight GPUs of a DGX-1V: their edges in their colours, the other GPUs and links pale."""
    machine = topoplan.load("dgx-1v")
    plan = topoplan.plan(machine, gpus=[1, 4, 5, 7], channels=channels)
    figure = draw_trees(plan, machine=machine)
    check_readable(figure)
    (chart,) = (axes for axes in figure.axes if axes not in tree_panels(figure))
    colours = [{line.get_color() for line in axes.lines} for axes in tree_panels(figure)]
    assert all(len(colour) == 1 for colour in colours)
    drawn = [line.get_color() for line in chart.lines if line.get_color() != GREY]
    for number, shard in enumerate(plan.shards):
        routes = (pair for edge in shard.stages[-1].edges for pair in pairwise(edge.route))
        assert drawn.count(*colours[number]) == len({frozenset(pair) for pair in routes})
    ranks = {text.get_text() for text in chart.texts if text.get_color() == BLACK}
    assert ranks & set(machine.gpus) == {"gpu1", "gpu4", "gpu5", "gpu7"}
    assert set(machine.gpus) <= set(panel_texts(chart))


@pytest.mark.thorough
def test_a_machine_larger_than_a_page_and_many_trees_have_no_map() -> None:
    for plan in (
        topoplan.plan(servers("dgx-h100", 2, nic_gbps=400)),
        topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7], channels="all"),
    ):
        figure = draw_trees(plan)
        assert tree_panels(figure) == figure.axes
        check_readable(figure)


def test_lines_between_cpus_follow_their_rail() -> None:
    """One line with branches stands for all wires of four CPUs; a route over two of them passes no third."""
    machine = four_nodes()
    missing = (Link(a, b, "sys", 20.0, 2) for a, b in (("cpu1", "cpu2"), ("cpu2", "cpu1")))
    every = replace(machine, links=(*machine.links, *missing))
    plan = topoplan.plan(every, gpus=[1, 3], channels="pcie")
    figure = draw_trees(plan)
    (chart,) = (axes for axes in figure.axes if axes not in tree_panels(figure))
    rail = [line for line in chart.lines if line.get_color() != GREY and len(line.get_xdata()) == 4]
    assert len({line.get_color() for line in rail}) == plan.num_trees


def test_weights_of_all_panels_add_up_to_the_rate() -> None:
    """Shares in the titles, times the trees of a shape, sum to one and the GB/s to the plan's rate."""
    for plan in (ring_plan(topoplan.load("dgx-1v"), "broadcast"), topoplan.plan("dgx-1v")):
        shares, rates = Fraction(0), 0.0
        for axes in tree_panels(draw_trees(plan)):
            title = " ".join(axes.get_title(loc="left").split("\n"))
            shown = r"(?:(\d+) trees of this shape|tree \d+): fraction ([\d/]+)(?: and)? (\S+) GB/s"
            told = re.match(shown, title)
            assert told is not None
            many, share, rate = int(told[1] or 1), told[2], told[3]
            shares, rates = shares + many * Fraction(share), rates + many * float(rate)
        assert shares == 1
        assert math.isclose(rates, plan.rate, rel_tol=1e-3)


ALIKE = "16 trees of this shape: fraction 1/16 and"


@pytest.mark.parametrize(
    ("name", "options", "titles"),
    [
        ("dgx-2", {}, [f"{ALIKE} 5 GB/s each\nreduce, broadcast; roots gpu0-15"]),
        ("dgx-2", {"collective": "allgather"}, [f"{ALIKE} 10 GB/s each\nbroadcast; roots gpu0-15"]),
        (
            "dgx-1v",
            {"gpus": [1, 4, 5, 7]},
            [f"tree {i}: fraction 1/2\n25 GB/s\nreduce, broadcast" for i in (0, 1)],
        ),
    ],
)
def test_trees_of_one_shape_are_drawn_once(name: str, options: dict[str, Any], titles: list[str]) -> None:
    """With their number and their roots; a few trees are drawn each, since they differ in whom they join."""
    figure = draw_trees(topoplan.plan(name, **options))
    assert [axes.get_title(loc="left") for axes in tree_panels(figure)] == titles
    assert "not shown" not in figure.get_suptitle()


def test_draws_a_cluster_as_one_tree_and_names_servers_and_gpus() -> None:
    """A rank's place is found without a nested call for each rank of a ring."""
    children = {rank: [rank + 1] for rank in range(4999)}
    assert forest_positions([0], children) == {rank: (0.0, rank) for rank in range(5000)}
    figure = draw_trees(topoplan.plan(servers("dgx-a100", 4, nic_gbps=200, nics=8)))
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["32 trees of this shape"]
    assert "roots s0-3.gpu0-7" in figure.axes[0].get_title(loc="left")
    assert {"s0\n0", "s3\n7"} <= set(panel_texts(figure.axes[0]))
    check_readable(figure)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["v100x4", "the machine in the cellar " * 8 + "x" * 200], ids=["short", "long"]
)
def test_letters_have_nine_points_and_a_long_headline_is_broken(name: str) -> None:
    """At the natural size, on every figure: a talk shows them as they are; the name of a machine is anybody's."""
    machine = replace(with_bus_ids(topoplan.load("v100x4")), name=name)
    plan = topoplan.plan(machine)
    for figure in (
        draw_trees(plan),
        draw_comparison(class_rows(14), title=name),
        draw_sweep({"trees": sweep(plan, [1024, 1 << 20])}, title=name),
        draw_topology(machine),
        draw_bands({"all": {"trees": [(1, 2), (3, 4)]}}, (1024, 2048), label="ratio"),
    ):
        check_readable(figure)
        assert min(text.get_fontsize() for text in visible_texts(figure)) >= 9


def kept(draw: Callable[[], Figure], drawn: list[Figure]) -> Figure:
    drawn.append(draw())
    return drawn[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(3.3, 2.5), (12.0, 8.0)])
def test_a_figure_of_a_given_size_keeps_its_labels_apart(size: tuple[float, float], tmp_path: Path) -> None:
    """Letters shrink with the page and never grow, so what had room has it still; the page is as asked for."""
    plan = topoplan.plan("dgx-1v", gpus=[0, 1, 2, 3])
    for draw in (partial(draw_trees, plan), partial(draw_comparison, class_rows(14))):
        drawn: list[Figure] = []
        write_figure(partial(kept, draw, drawn), tmp_path / "f.png", Look(size=size, dpi=100))
        assert tuple(drawn[-1].get_size_inches()) == size
        check_readable(drawn[-1])
        header = (tmp_path / "f.png").read_bytes()[16:24]
        assert struct.unpack(">II", header) == tuple(round(100 * side) for side in size)


def test_refuses_a_figure_file_in_one_line(tmp_path: Path) -> None:
    for name, look, message in (
        ("f.png", Look(font="Nosuch"), "font 'Nosuch' is not installed"),
        ("f.png", Look(file_format="docx"), "'docx' is not a figure format"),
        ("f.png", Look(size=(90, 90), dpi=2400), "pixels is too large"),
        ("figure.docx", Look(), "figure.docx"),
        ("figure", Look(), "figure"),
        ("no-such-folder/figure.png", Look(), "no-such-folder/figure.png"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            write_figure(partial(draw_trees, topoplan.plan("v100x4")), tmp_path / name, look)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_writes_the_same_bytes_twice_without_a_date(kind: str, tmp_path: Path) -> None:
    """The suffix of the file or `file_format` names the format; no other file is left."""
    draw = partial(draw_trees, topoplan.plan("v100x4"))
    for name in ("one", "two"):
        write_figure(draw, tmp_path / name, Look(file_format=kind, font="serif"))
        save_figure(draw_topology(topoplan.load("v100x4")), tmp_path / f"{name}.{kind}")
    for first, second in (("one", "two"), (f"one.{kind}", f"two.{kind}")):
        assert (written := (tmp_path / first).read_bytes()) == (tmp_path / second).read_bytes()
        assert b"date" not in written.lower()
    assert len(list(tmp_path.iterdir())) == 4


def test_counts_the_trees_that_it_leaves_out() -> None:
    """A shape is drawn whole or left out: a ring has a panel for each of its two paths."""
    plan = ring_plan(topoplan.load("dgx-1v"), "allreduce")
    figure = draw_trees(plan, most=2)
    assert len(tree_panels(figure)) == 2
    assert "not shown" not in figure.get_suptitle()
    assert draw_trees(plan, most=1).axes == []
    packed = topoplan.plan("dgx-1v")
    figure = draw_trees(packed, most=7)
    assert len(tree_panels(figure)) == 7
    assert f"{packed.num_trees - 7} more of {packed.num_trees} trees are not shown" in figure.get_suptitle()
    machine = topoplan.load("dgx-1v")
    assert set(panel_texts(draw_trees(ring_plan(machine, gpus=[1, 4, 5, 7])).axes[0])) == {"1", "4", "5", "7"}
    alone = draw_trees(topoplan.plan(machine, gpus=[3]))
    assert alone.axes == []
    assert "nothing to move" in alone.get_suptitle()


@pytest.mark.sampled
@pytest.mark.parametrize("count", [2, 3, 14, 46])
def test_bars_have_a_group_for_each_class(count: int) -> None:
    """Two bars for each class, in the order of the table; of many those that differ most, and a dot for each of all."""
    rows = class_rows(count)
    figure = draw_comparison(rows, title="broadcast on dgx-1v")
    lower = figure.axes[-1]
    ordered = sorted(rows, key=lambda row: (len(row.gpus), -row.trees))
    shown = ordered
    if count > MOST_BARS:
        differing = [row for row in ordered if row.rival_ratio != 1]
        most = sorted(differing, key=lambda row: -row.rival_ratio)[:MOST_BARS]
        shown = [row for row in ordered if row in most]
        (dots,) = (marks for marks in figure.axes[0].collections if marks.get_label() == "trees")
        assert [place[1] for place in dots.get_offsets()] == [row.trees for row in ordered]
        assert f"differ: {len(shown)}" in " ".join(panel_texts(lower))
    bars = {container.get_label(): container for container in lower.containers}
    assert [bar.get_width() for bar in bars["trees"]] == [row.trees for row in shown]
    assert [bar.get_width() for bar in bars["best baseline"]] == [row.rival[0] for row in shown]
    names = [text.get_text().replace("\n", "") for text in lower.get_yticklabels()]
    assert [parse_gpu_list(name) for name in names] == [row.gpus for row in shown]
    assert figure.get_figwidth() == 8
    check_readable(figure)


def test_every_schedule_of_the_table_is_in_the_figure() -> None:
    """A bar for each row of one allocation, the relaying ring too; registered schedules are marks on classes."""
    row = compare("dgx-1v", gpus=[1, 4, 5, 7])
    mine = replace(row, others=(("mine", 12.5), ("absent", None)))
    axes = draw_comparison([mine], title="all_reduce on dgx-1v").axes[0]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["trees", *(name for name, _ in mine.schedules)]
    assert {"ring with relayed hops", "mine"} < {*names}
    assert [bar.get_width() for bar in axes.patches] == [row.trees, *(rate for _, rate in mine.schedules)]
    rows = [Rates((0, 1), 1, 40.0, 40.0, 5.0, (10.0, "nvlink ring"), (("mine", 12.5),))] * 2
    figure = draw_comparison(rows)
    assert "mine" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_equal_classes_have_dots_and_no_bars() -> None:
    counts = [8] * 300 + [14, 15, 16]
    rows = [Rates(tuple(range(count)), 1, 50.0, 50.0, 25.0, (50.0, "nccl tree")) for count in counts]
    figure = draw_comparison(rows)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["8", "14", "15", "16"]
    assert len(figure.axes) == 1
    check_readable(figure)


def test_names_the_baseline_of_each_class_beside_its_bar() -> None:
    kinds = ("nvlink ring", "pcie ring", "relay ring", "double binary tree", "nccl tree", "nvls", "another")
    rows = [Rates((0, i + 1), 1, 50.0, 50.0, 25.0, (25.0, kind)) for i, kind in enumerate(kinds)]
    texts = panel_texts(draw_comparison(rows).axes[0])
    assert [text for text in texts if text.startswith("25, ")] == [f"25, {kind}" for kind in kinds]
    assert texts.count("50, 2.00x") == len(kinds)


def test_comparison_is_with_the_best_baseline() -> None:
    """The line under the title counts members and gives the ratios over the best baseline; old rings are marks."""
    far = Rates((0, 1), 3, 40.0, 40.0, 5.0, (10.0, "relay ring"))
    figure = draw_comparison([far, Rates((0, 2), 1, 9.0, 9.0, 9.0, (9.0, "nvlink ring"))])
    texts = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    ratios = "trees / best baseline: 1 to 4, geometric mean 2, equal or below in 1"
    assert f"4 allocations in 2 classes; {ratios}" in texts
    marks = {marks.get_label(): marks.get_offsets() for marks in figure.axes[0].collections}
    assert [place[0] for place in marks["ring of NCCL before 2.8"]] == [5.0]
    assert [place[0] for place in marks["upper bound"]] == [40.0, 9.0]
    with pytest.raises(UsageError, match="compare at least one allocation"):
        draw_comparison([])


def test_sweep_draws_the_points_it_is_given() -> None:
    machine = topoplan.load("dgx-1v")
    sizes = [1 << power for power in range(10, 31)]
    plans = {"ring": ring_plan(machine), "double binary tree": double_binary_tree(machine)}
    curves = {name: sweep(plan, sizes) for name, plan in plans.items()}
    figure = draw_sweep(curves, title="allreduce on dgx-1v")
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == list(curves)
    for line, rows in zip(axes.lines, curves.values(), strict=True):
        assert list(line.get_xdata()) == sizes
        assert list(line.get_ydata()) == [row.busbw for row in rows]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("message size", "busbw, GB/s (algbw × 7/4)")
    check_readable(figure)
    with pytest.raises(UsageError, match="needs a size above zero bytes"):
        draw_sweep({"nothing": []})


def test_names_the_plans_that_are_fastest_somewhere_and_greys_the_others() -> None:
    """Of nine curves at most seven entries stand in the legend: the fastest of most sizes, and one for the rest."""
    rows = sweep(topoplan.plan("v100x4"), [1 << 10, 1 << 20, 1 << 30])

    def slower(number: int) -> list[SizeRow]:
        return [replace(row, busbw=row.busbw / (1 + abs(place - number))) for place, row in enumerate(rows)]

    figure = draw_sweep({f"plan {number}": slower(number) for number in range(9)})
    legend = figure.axes[0].get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["plan 0", "plan 1", "plan 2", "6 other schedules"]
    assert len(figure.axes[0].lines) == 9
    check_readable(figure)


def test_bands_have_medians_tenths_and_extremes() -> None:
    curves = [(float(i), 10.0 * i) for i in range(11)]
    panels = {"left": {"many": curves, "one": curves[:1]}, "right": {"one": curves[3:4]}}
    figure = draw_bands(panels, (1024, 4096), label="ratio")
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.lines] == [[5.0, 50.0], [0.0, 0.0]]
    edges = [sorted({y for _, y in band.get_paths()[0].vertices}) for band in left.collections[:2]]
    assert [(one[0], one[-1]) for one in edges] == [(0.0, 100.0), (1.0, 90.0)]
    assert list(right.lines[0].get_ydata()) == [3.0, 30.0]
    check_readable(figure)
