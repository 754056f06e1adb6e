"""The commands as functions: they give what the command line gives, and take and refuse what Python users write."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import ROOT, Run
from tests.support.nccl_debug_logs import healthy, without_peers
from tests.support.question_logs import LOGS
from topoplan.cli.main import main
from topoplan.cli.results import Result
from topoplan.errors import UsageError
from topoplan.schedules.registry import COMPARED

LOG = next(iter(LOGS.values()))

CALLS: dict[str, Callable[[], Result]] = {
    "compare dgx-1v --gpus 1,4,5,7": lambda: topoplan.compare("dgx-1v", gpus=[1, 4, 5, 7]),
    "compare v100x4 --all-allocations --gpu-counts 3-4": lambda: topoplan.compare(
        "v100x4", all_allocations=True, gpu_counts=[3, 4]
    ),
    "recommend dgx-1v --count 4": lambda: topoplan.recommend("dgx-1v", 4),
    "recommend v100x4 --jobs 2,2": lambda: topoplan.recommend("v100x4", jobs=[2, 2]),
    "check v100x4": lambda: topoplan.check("v100x4"),
    "simulate v100x4 --sizes 1KB,64MB": lambda: topoplan.simulate("v100x4", sizes=[1024, "64MB"]),
    "order v100x4 --gpus 0,2,1,3": lambda: topoplan.order("v100x4", gpus=[0, 2, 1, 3]),
    "order v100x4 --mesh dp=2,tp=2 --axes dp=1,tp=4": lambda: topoplan.order(
        "v100x4", mesh={"dp": 2, "tp": 2}, axes={"dp": 1, "tp": 4}
    ),
    "explain docs/questions/logs/ring.log docs/questions/logs/tree.log": lambda: topoplan.explain(
        ROOT / "docs/questions/logs/ring.log", newer=ROOT / "docs/questions/logs/tree.log"
    ),
    "diff v100x4 dgx-1v": lambda: topoplan.diff("v100x4", "dgx-1v"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("line", CALLS)
def test_a_function_finds_what_its_command_prints(line: str, run: Run) -> None:
    """The rows have the keys of the CSV too."""
    found = CALLS[line]()
    status, out, _ = run(f"{line} --json")
    assert json.loads(json.dumps(found.to_dict())) == json.loads(out)
    assert found.ok == (status == 0)
    assert str(found)
    assert all(isinstance(row, dict) for row in found.rows)
    assert len(repr(found)) < 60
    assert len(found._repr_html_()) > 10
    if line.startswith(("recommend", "simulate", "explain")):
        printed = csv.DictReader(io.StringIO(run(f"{line} --csv")[1]))
        assert [list(row) for row in found.rows] == [list(row) for row in printed]


def test_a_log_is_a_file_or_its_text(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(LOG, encoding="utf-8")
    assert topoplan.explain(path, "dgx-h100").rows == topoplan.explain(LOG, "dgx-h100").rows != []
    with pytest.raises(UsageError, match=r"^the log holds no run of nccl-tests"):
        topoplan.explain("nothing\nat all\n", "dgx-1v")


def test_two_logs_say_what_changed_in_times_and_in_the_setup_of_nccl() -> None:
    """Channels and transports of NCCL's lines; logs without a common size are refused."""
    old, new = (f"{one.text()}{LOG}" for one in (healthy(), without_peers()))
    found = topoplan.explain(old, newer=new)
    setup = found.to_dict()["setup"]
    assert isinstance(setup, list)
    assert {"what": "channels", "old": "12", "new": "2"} in setup
    assert "transports" in [one["what"] for one in setup]
    assert {row["change"] for row in found.rows} == {0.0}
    assert len(found.rows) == len(topoplan.explain(LOG, "dgx-h100").rows)
    with pytest.raises(UsageError, match="no size in common"):
        topoplan.explain(LOG, newer=LOG.replace(" float ", " half "))


def test_files_are_those_of_the_commands(run: Run, plan_text: str, tmp_path: Path) -> None:
    plan = topoplan.Plan.from_json(plan_text)
    exported = topoplan.export(plan, "msccl-xml")
    path = tmp_path / "graph.xml"
    assert exported.save(path) == (str(path),)
    assert path.read_text() == run("export - --to msccl-xml", stdin=plan_text)[1] == str(exported)
    traces = topoplan.export(plan, "chakra", nbytes="1MB").save(tmp_path / "trace")
    assert [Path(name).name for name in traces] == [f"trace.{rank}.et" for rank in range(4)]
    page = topoplan.report("v100x4", sizes=["1MB"])
    (name,) = page.save(tmp_path / "page.html")
    assert Path(name).read_text(encoding="utf-8") == str(page)


def test_errors_name_the_arguments_of_python() -> None:
    graph = topoplan.plan("v100x4")
    for call, says in (
        (lambda: topoplan.recommend("dgx-1v"), r"the job has with count=4, .* with jobs=\[4, 2, 2\]"),
        (lambda: topoplan.recommend("dgx-1v", 0), r"^count must be a number of GPUs, got '0'$"),
        (lambda: topoplan.compare("dgx-1v", gpu_counts=[3]), "gpu_counts belongs to all_allocations"),
        (lambda: topoplan.export(graph, "nccl-graph"), "topoplan export TOPO --to nccl-graph"),
        (lambda: topoplan.check("v100x4").plot(), "check has no figure"),
        (lambda: topoplan.check("v100x4").save("x"), "check makes no file"),
        (lambda: topoplan.simulate("v100x4", "1MB"), "takes a plan, got a machine"),  # type: ignore[call-overload]
        (lambda: topoplan.simulate(graph, "1 mile"), "size '1 mile' is not a number"),
        (lambda: topoplan.simulate(graph, 1.5), "a size must be a whole number"),  # type: ignore[call-overload]
        (lambda: topoplan.export(graph, "msccl-xml", gpus=[0]), "a plan has settled them"),
        (lambda: topoplan.compare("dgx-1v", nbytes="64XB"), r"^nbytes '64XB' is not a number"),
        (lambda: topoplan.compare("dgx-1v", gpus=4), r"sequence of GPU numbers, got 4; write \[4\]"),  # type: ignore[arg-type]
        (lambda: topoplan.compare("dgx-1v", gpus=[-1, 2]), r"gpus must be .* 0 or more, got \[-1, 2\]"),
        (lambda: topoplan.recommend("dgx-1v", jobs=4), r"jobs must be .* got 4; write \[4\]"),  # type: ignore[arg-type]
        (lambda: topoplan.compare("dgx-1v", "broadcast", root=True), "root must have a value, got True"),
        (lambda: topoplan.simulate(graph, 1, sizes=[2]), "sizes does not go with nbytes"),  # type: ignore[call-overload]
        (lambda: topoplan.explain("-", "dgx-1v"), "must be a file or the text of a log, got '-'"),
        (lambda: topoplan.explain("--gpus 3", "dgx-1v"), "^--gpus 3 cannot be read"),
        (lambda: topoplan.explain(LOG, newer="-"), "^newer must be a file or the text of a log, got '-'"),
        (lambda: topoplan.explain(LOG, "dgx-1v", newer=LOG), "^machine does not go with a second log"),
        (lambda: topoplan.explain(LOG, newer=LOG, gpus=[0, 1]), "^gpus does not go with a second log"),
        (lambda: topoplan.explain(LOG), 'machine="F" with the output of nvidia-smi topo -m'),
        (lambda: topoplan.order("dgx-1v", mesh={"dp": 2, "tp": 4}), 'or preset="megatron"'),
    ):
        with pytest.raises(UsageError, match=says):
            call()


@pytest.mark.thorough
def test_removed_gpus_are_not_counted() -> None:
    """A DGX-1V without GPU 5 has 7 ranks, in texts, bounds, figures and pages."""
    part = topoplan.load("dgx-1v").remove_gpus([5])
    whole = topoplan.diff("dgx-1v", part).to_dict()["b"]
    assert isinstance(whole, dict)
    assert whole["gpus"] == 7
    assert "128.6" in str(topoplan.diff("dgx-1v", part))
    assert repr(part).startswith("<Topology dgx-1v, 7 GPUs")
    assert "8 GPUs" not in str(topoplan.report(part, sizes=["1MB"]))


def test_the_order_of_sizes_does_not_change_the_verdict() -> None:
    plan = topoplan.plan("dgx-1v")
    first, second = (str(topoplan.simulate(plan, sizes=sizes)) for sizes in ("1MB,64MB", "64MB,1MB"))
    assert first.splitlines()[0] == second.splitlines()[0]
    rows = topoplan.simulate(plan, sizes=["1MB"]).rows
    assert [row["schedule"] for row in rows] == ["plan", "nvlink ring", "NCCL's best"]


def test_rows_become_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    found = topoplan.recommend("v100x4", 2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        found.to_dataframe()
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = found.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert (list(frame), len(frame)) == (list(found.rows[0]), len(found.rows))


def test_figures_are_drawn_where_the_command_draws_one() -> None:
    pytest.importorskip("matplotlib")
    assert topoplan.compare("v100x4").plot().axes
    assert topoplan.simulate("v100x4", sizes=["1KB", "1MB"]).plot().axes


def test_functions_show_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("topoplan.cli.output.QUIET_SECONDS", 0.0)
    topoplan.compare("v100x4")
    assert shown.getvalue() == ""
    main(["compare", "v100x4"])
    assert shown.getvalue() != ""


@pytest.mark.thorough
def test_plans_by_size_have_the_rows_and_the_table_of_the_command(run: Run, tmp_path: Path) -> None:
    """Those of a file too, but for the next best schedule, which no file states."""
    made = topoplan.plan_by_size("v100x4", sizes="1KB:1MB")
    printed = run("plan v100x4 --sizes 1KB:1MB")[1].splitlines()
    assert str(made).splitlines() == [line for line in printed if not line.startswith("planned in")]
    assert made.rows == json.loads(run("plan v100x4 --sizes 1KB:1MB --json")[1])["points"]
    assert len(made.plot().axes) == 1
    path = tmp_path / "plans.json"
    path.write_text(made.to_json())
    read = topoplan.load_plan(path)
    assert isinstance(read, topoplan.SizePlans)
    assert read.rows == made.rows
    assert read.summary().splitlines()[:4] == made.summary().splitlines()[:4]


def test_a_registered_schedule_that_refuses_a_machine_is_a_note() -> None:
    """None in the rows, and the schedule's name in every message; a fault of its function is a warning."""

    def four(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):  # type: ignore[no-untyped-def]
        return topoplan.plan_from_trees(topology, collective, [[0, 1, 2, 3]], gpus=gpus, root=root)

    def crash(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):  # type: ignore[no-untyped-def]
        return {0: 0}[7]

    try:
        topoplan.register_schedule("four", four)
        topoplan.register_schedule("crash", crash)
        assert "trees        1 of height 3 (four)" in topoplan.plan("v100x4", schedule="four").summary()
        found = topoplan.compare("dgx-1v")
        assert (found.rows[0]["four"], found.rows[0]["crash"]) == (None, None)
        refusal = "schedule four: not for this machine: tree 0: it does not reach rank 4"
        assert any(note.startswith(refusal) for note in found.notes)
        assert found.notes[0] == "warning: schedule crash failed: KeyError: 7; correct its function"
        assert len(topoplan.recommend("v100x4", 2).rows) == 6
        with pytest.raises(UsageError, match="schedule four: tree 0: it does not reach rank 4"):
            topoplan.plan("dgx-1v", schedule="four")
    finally:
        topoplan.register_schedule("four", None)
        topoplan.register_schedule("crash", None)


def test_a_registered_schedule_is_planned_verified_and_compared() -> None:
    def chain(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):  # type: ignore[no-untyped-def]
        ranks = len(topoplan.load(topology).select(gpus))
        return topoplan.plan_from_trees(topology, collective, [list(range(ranks))], gpus=gpus, root=root)

    def wrong(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):  # type: ignore[no-untyped-def]
        return topoplan.plan("v100x4", "broadcast")

    try:
        topoplan.register_schedule("chain", wrong)
        with pytest.raises(UsageError, match=r"schedule chain made a wrong plan: .*; correct its function"):
            topoplan.plan("dgx-2", schedule="chain")
        topoplan.register_schedule("chain", chain)
        made = topoplan.plan("dgx-2", schedule="chain", gpus=[3, 1, 2])
        assert (made.ranks, made.num_trees) == (("gpu3", "gpu1", "gpu2"), 1)
        assert topoplan.compare("dgx-2", gpus=[3, 1, 2]).rows[0]["chain"] == made.algbw
        told = "order is for packed trees, got schedule 'chain'; leave order out"
        with pytest.raises(UsageError, match=told):
            topoplan.plan("dgx-2", schedule="chain", order="trees")
    finally:
        topoplan.register_schedule("chain", None)
    for name, make, says in (
        ("ring", chain, "topoplan's own"),
        ("trees", chain, "topoplan's own"),
        ("mine", 3, "must be a name and a function"),
        ("busbw", chain, "busbw is a column of compare; register the schedule under another name"),
        ("NCCL", chain, "a column of compare"),
        ("BML", chain, "a column of compare"),
    ):
        with pytest.raises(UsageError, match=says):
            topoplan.register_schedule(name, make)  # type: ignore[arg-type]
    row = topoplan.compare("v100x4").to_dict()["rows"][0]  # type: ignore[index]
    assert {*row, "busbw"} - {"others", "allocations"} <= COMPARED
    with pytest.raises(UsageError, match="schedule 'chain' is unknown"):
        topoplan.plan("dgx-2", schedule="chain")
    assert topoplan.plan("dgx-1v", schedule="ring").schedule == "nvlink ring"
