"""The report: one page that is well formed, loads nothing, escapes what it is given, and says what the commands say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.model.times_by_size import sweep
from topoplan.operate.compare.comparison import attainable
from topoplan.operate.plot.markup import VOID, Curve, Markup, draw_curves, element, table
from topoplan.operate.plot.page import report_page, sizes_section
from topoplan.operate.plot.page_by_kind import report_by_kind
from topoplan.operate.plot.tree_animation import CHUNKS, lines_of, steps_of
from topoplan.schedules.ring import ring_plan

SIZES = (1 << 10, 1 << 20, 1 << 30)


@dataclass
class Page(HTMLParser):
    """What stands on a page: ids, targets of links, texts of elements by class and name, faults of its tags."""

    ids: Counter[str] = field(default_factory=Counter)
    targets: list[str] = field(default_factory=list)
    tags: Counter[str] = field(default_factory=Counter)
    open: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags[tag] += 1
        if len(named) < len(attrs):
            self.faults.append(f"{tag} has an attribute twice")
        self.ids.update([named["id"] or ""] if "id" in named else [])
        for key in ("href", "src", "action", "data", "poster", "xlink:href"):
            if key in named:
                self.targets.append(named[key] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open[-3:]):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@cache
def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def well_formed(text: str) -> Page:
    """The page, which is balanced, has every id once, links to nothing but its own ids, and loads nothing."""
    page = parsed(text)
    assert (page.faults, page.open) == ([], [])
    assert [name for name, number in page.ids.items() if number > 1] == []
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    assert all(target.startswith("#") for target in page.targets)
    assert not page.tags.keys() & {"link", "img", "iframe", "object", "embed", "base"}
    assert not any(word in text for word in ("http", "url(", "@import"))
    return page


@cache
def made(name: str) -> str:
    return report_page(MACHINES[name](), sizes=SIZES)


MACHINES: dict[str, Callable[[], Topology]] = {
    "v100x4": partial(topoplan.load, "v100x4"),
    "dgx-2": partial(topoplan.load, "dgx-2"),
    "4 x dgx-a100": lambda: topoplan.cluster([topoplan.Server("dgx-a100", count=4)], nic_gbps=200, nics=8),
    "broken dgx-1v": lambda: topoplan.without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MACHINES)
def test_a_page_is_well_formed_and_small(name: str) -> None:
    """Under 2 MB, and the same bytes twice; a dead link stands under health with what it costs."""
    page = well_formed(made(name))
    assert set(page.ids) >= {"machine", "health", "sets", "plan", "trees", "sizes", "tree-1"}
    assert len(made(name).encode()) < 2_000_000
    assert name != "v100x4" or report_page(MACHINES[name](), sizes=SIZES) == made(name)
    faults = [row[1:4] for row in page.rows if row and row[0] == "link missing"]
    if name == "broken dgx-1v":
        assert faults == [["gpu0-gpu3", "no NVLink", "2 NVLinks of 25 GB/s"]]
        assert "78.5714 GB/s now, 85.7143 GB/s without the faults" in page.text
    else:
        assert faults == []


@pytest.mark.thorough
def test_a_page_says_what_the_plan_says() -> None:
    text = parsed(made("dgx-2")).text
    assert "16 GPUs reach 80 GB/s, busbw 150 GB/s: provably optimal over NVLink" in text
    assert "the links out of all 16 GPUs carry 2400 GB/s together" in text
    assert "algbw is 80 GB/s, and from the certificate the upper bound is 80: they are equal: no" in text
    assert "16 trees of this shape: 1/16 of the buffer and 5 GB/s each, roots gpu0-15" in text
    assert "Healthy" in text


def test_times_are_those_of_the_model() -> None:
    """The table has the times of the plan, and of NCCL by its own model, as ``explain`` has them."""
    machine = topoplan.load("v100x4")
    rows = {row[0]: row for row in parsed(made("v100x4")).rows if row}
    heads = next(row for row in parsed(made("v100x4")).rows if row and row[0] == "size")
    for size, row in zip(("1KB", "1MB", "1GB"), sweep(topoplan.plan(machine), SIZES), strict=True):
        assert rows[size][1] == f"{row.seconds * 1e6:.1f}"
        assert float(rows[size][3]) == pytest.approx(row.busbw, rel=1e-3)
        own = attainable(machine).expected(row.nbytes)
        assert own is not None
        best = heads.index("NCCL's best: us")
        assert rows[size][best] == f"{own.seconds(row.nbytes) * 1e6:.1f}"
        assert rows[size][best + 2] == f"{own.algorithm} {own.protocol}"


def test_texts_of_a_file_are_escaped() -> None:
    evil = "</title><script>alert('1')</script>\x1b\"&"
    machine = replace(topoplan.load("v100x4").subset([0, 1]), name=evil, notes=(f"note {evil}",))
    text = report_page(machine, sizes=[1024])
    page = well_formed(text)
    assert page.tags["script"] == 1
    assert f"all_reduce on {evil}".replace("\x1b", "?") in page.text
    assert "\x1b" not in text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "sections"),
    [
        ({"gpus": [3]}, 5),
        ({"collective": "alltoall"}, 6),
        ({"collective": "reduce", "root": 2, "gpus": [0, 1, 2]}, 6),
        ({"channels": "all"}, 6),
    ],
    ids=str,
)
def test_other_requests_have_a_page(options: dict[str, object], sections: int) -> None:
    text = report_page(topoplan.load("v100x4"), sizes=[1 << 20], **options)  # type: ignore[arg-type]
    assert well_formed(text).tags["section"] == sections


def test_the_steps_of_trees() -> None:
    """One link is one step: a star goes up and down in two, a path of 8 ranks up and down in 14."""
    plan = topoplan.plan("dgx-2")
    (star,) = steps_of(plan)
    assert star.depth == 2
    assert lines_of(star, plan.ranks) == ["gpu1-15>gpu0 (added)", "gpu0>gpu1-15 (copied)"]
    cycle = ring_plan("dgx-1v", "allreduce")
    paths = steps_of(cycle)[0]
    assert paths.depth == 14
    assert all(line.count(">") == 1 for line in lines_of(paths, cycle.ranks))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["v100x4", "dgx-1v", "dgx-a100"])
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "allgather"])
def test_a_chunk_goes_on_after_it_has_come(name: str, collective: str) -> None:
    """Every hop runs after those that bring its chunk, each edge once, and ranks with a result get it last."""
    for one in steps_of(topoplan.plan(name, collective)):
        when = dict(zip(((hop.stage, hop.src, hop.dst) for hop in one.hops), one.steps, strict=True))
        assert len(when) == sum(len(stage.edges) for stage in one.shape.shard.stages)
        for stage, src, _ in when:
            before = [step for (other, _, dst), step in when.items() if dst == src and other <= stage]
            own = [step for (other, start, _), step in when.items() if start == src and other == stage]
            assert max(before, default=-1) < min(own)
        results = one.results()
        assert max(results.values()) == one.depth - 1
        ends = one.shape.shard.stages[-1]
        assert set(results) == ({ends.root} if ends.op == "reduce" else set(ends.depths()))


def test_a_curve_has_all_of_its_points() -> None:
    """A mark for each size, at the height of its logarithm; one size alone can be drawn too."""
    curves = [Curve("a", ((1 << 10, 1.0), (1 << 20, 20.0))), Curve("b", ((1 << 10, 20.0),))]
    drawn = draw_curves(curves, label="two")
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', drawn)]
    # The last one is that of the legend.
    bottom, top = 340.0 - 46.0, 16.0
    assert heights[:2] == pytest.approx([bottom, top], rel=1e-3)
    assert "b, 1KB: 20 GB/s" in drawn
    well_formed(draw_curves(curves[1:], label="one"))


def test_elements_are_balanced_and_escaped() -> None:
    assert element("a", "<&>", href='"x"') == '<a href="&quot;x&quot;">&lt;&amp;&gt;</a>'
    assert element("b", element("i", "x")) == "<b><i>x</i></b>"
    assert isinstance(element("br"), Markup)
    assert well_formed(table(("a", "b"), [])).rows == [["a", "b"]]
    section = sizes_section(topoplan.plan("v100x4"), {}, None, [1024])
    assert parsed(section.content).rows[0][:4] == ["size", "trees: us", "GB/s", "busbw"]


def test_the_command_writes_the_page(done: Done, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert done(f"report v100x4 -o {path} --sizes 1KB,1MB,1GB") == f"written: {path}\n"
    assert path.read_text(encoding="utf-8") == made("v100x4")


@pytest.mark.thorough
def test_a_gpu_that_is_taken_out_is_on_no_part_of_the_page(done: Done) -> None:
    page = well_formed(done("report v100x4 -o - --sizes 1MB,1MB --without-gpu 1"))
    assert "gpu1" not in page.text.replace("gpu1 is taken out", "").replace("taken out: gpu1", "")
    assert [word for word in page.words if word in ("GPUs", "0,2,3")][-2:] == ["GPUs", "0,2,3"]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PRESSES = """
<script>
addEventListener("load", () => {
  const figure = document.querySelector("figure.steps"), told = [];
  const look = () => told.push([figure.querySelector("output").textContent,
    figure.querySelectorAll(".chunk.on").length, figure.querySelectorAll(".rank.has").length].join("|"));
  look();
  for (let press = 0; press < 2; press++) { figure.querySelector("[data-do=next]").click(); look(); }
  for (const key of ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Home"]) {
    figure.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    look();
  }
  const list = document.createElement("p");
  list.id = "told";
  list.textContent = told.join("/");
  document.body.append(list);
});
</script></body>"""


@pytest.mark.slow
def test_trees_are_stepped_through_in_a_browser(tmp_path: Path) -> None:
    """Buttons and keys move chunks: up, then both ways, then down, and all ranks end with the result."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser on PATH, one of {', '.join(BROWSERS)}")
    path = tmp_path / "report.html"
    path.write_text(made("dgx-2").replace("</body>", PRESSES), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    told = re.search(r'<p id="told">(.*?)</p>', done.stdout)
    assert told is not None
    both = [f"step {step} of 5: chunk {step} up; chunk {step - 1} down|30|0" for step in range(2, CHUNKS)]
    assert told[1].split("/") == [
        "4 chunks, 5 steps|0|0",
        "step 1 of 5: chunk 1 up|15|0",
        *both,
        "step 4 of 5: chunk 4 up; chunk 3 down|30|1",
        "step 5 of 5: chunk 4 down|15|16",
        "done after 5 steps|0|16",
        "step 5 of 5: chunk 4 down|15|16",
        "4 chunks, 5 steps|0|0",
    ]


@pytest.mark.thorough
def test_the_page_of_a_large_cluster_says_what_its_kinds_cost() -> None:
    """Well formed, loads nothing; without the slow servers the rate is that of equal ones."""
    many = topoplan.cluster_by_kind([topoplan.Server("nvlink-x4", count=200, nics=1)], nic_gbps=100)
    slow = many.with_faults(slow_links={"s7.nic0-switch0": 1.0, "s90.nic0-switch0": 2.0})
    text_of_page = report_by_kind(slow, sizes=SIZES)
    page = well_formed(text_of_page)
    rows = {tuple(row[:2]): row for row in page.rows if len(row) == 4}
    without = topoplan.plan_by_kind(
        topoplan.cluster_by_kind([topoplan.Server("nvlink-x4", count=198, nics=1)], nic_gbps=100), "allreduce"
    )
    whole = topoplan.plan_by_kind(slow, "allreduce").rate
    assert rows["2", "all but the 198 of s0's kind"][2] == f"{without.rate:.6g}"
    assert rows["1", "s7"][3] == f"{2 * whole / whole:.3g}x"
    text = " ".join(page.words)
    assert f"800 GPUs of 200 servers reach {whole:.6g} GB/s" in text
    assert report_by_kind(slow, sizes=SIZES) == text_of_page
    with pytest.raises(UsageError, match="a size above zero"):
        report_by_kind(many, sizes=[0])
