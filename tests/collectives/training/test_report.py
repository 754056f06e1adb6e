"""What a person sees of training: records, the report's table, the picture."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.training.averaging import InStepAverager
from collectives.training.exchange_settings import ExchangeSettings, TopK
from collectives.training.modes import Straggler
from collectives.training.report import Recorder, StepRecord, register_recorder, report
from topoplan.errors import UsageError

PLAN = topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 5, 7])


def trained(how: ExchangeSettings, *, steps: int = 4) -> Recorder:
    recorder = Recorder("test", ranks=3)
    with Communicator(PLAN) as comm:
        exchange = InStepAverager(comm, how, recorder)
        for step in range(steps):
            big = [np.full(1000, rank + step, np.float32) for rank in range(3)]
            small = [np.full(10, rank, np.float32) for rank in range(3)]
            handles = [exchange.start("big", big), exchange.start("small", small)]
            with recorder.waiting():
                results = [handle.wait() for handle in handles]
            if how.top_k is None:
                assert results[0][2][0] == 1 + step
            recorder.end_step()
    return recorder


def test_a_report_counts_steps_bytes_and_exchanges_of_each_bucket() -> None:
    told = report(trained(ExchangeSettings()))
    assert (told.steps, told.ranks, told.nbytes) == (4, 3, 4 * (4000 + 40))
    assert [(row.key, row.nbytes, row.exchanges, row.density) for row in told.buckets] == [
        ("big", 4000, 4, 1.0),
        ("small", 40, 4, 1.0),
    ]
    row = told.buckets[0]
    assert (row.how, row.bound) == (PLAN.schedule, PLAN.bound)
    assert row.bandwidth == pytest.approx(4000 / row.seconds / 1e9)
    assert 0 < told.exchanging <= told.seconds
    assert 0 < told.waiting <= told.seconds
    lines = str(told).splitlines()
    assert lines[0].startswith("test on 3 ranks, 4 steps of ")
    assert lines[1].split() == ["bucket", "size", "sent", "plan", "exchanges", "time", "GB/s", "bound"]
    assert lines[0].endswith("; 16.2 KB of gradients, 16.2 KB sent per rank")
    assert lines[2].split()[:6] == ["big", "4.00", "KB", "100", "%", PLAN.schedule]


def test_the_density_and_exchange_of_sparse_gradients_are_recorded() -> None:
    recorder = trained(
        ExchangeSettings(compression=TopK(lambda step: 1 / 2 ** (step + 1), exchange="pairs")), steps=3
    )
    assert [one.density for one in recorder.exchanges() if one.key == "big"] == [0.5, 0.25, 0.125]
    assert {row.how for row in report(recorder).buckets} == {"pairs"}
    with pytest.raises(UsageError, match=r"density must be above 0 and at most 1, got 0\.0"):
        TopK(0.0)


def test_the_report_says_what_was_sent_and_which_buckets_were_of_the_first_step() -> None:
    """An entry is an index of 4 bytes and a value: a tenth of 1000 elements is a fifth of their bytes."""
    recorder = trained(ExchangeSettings(compression=TopK(0.1, exchange="pairs")), steps=2)
    told = report(recorder)
    assert [row.sent for row in told.buckets] == [0.2, 0.2]
    assert told.sent_bytes == told.nbytes / 5
    recorder = Recorder("one", ranks=2)
    for step, key in enumerate(["all", "front", "front"]):
        recorder.add(key, 1000, recorder.now() - 10, density=1.0, how="pairs", bound=1.0, step=step)
    rows = str(report(recorder)).splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["first step", "front"]
    assert [row.split()[-2] for row in rows] == ["-", "-"]


def test_long_compilation_is_logged_once_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import collectives.training.report as module

    times = iter([0.0, 1.0, 5.0, 5.5])
    monkeypatch.setattr(module, "compile_seconds", lambda: next(times))
    recorder = Recorder("test", ranks=3)
    with Communicator(PLAN) as comm:
        for _ in range(3):
            module.log_compilation(recorder, comm)
    assert [one.getMessage().partition(";")[0] for one in caplog.records] == [
        "compiling loops for this processor took 5.0 s, once per user"
    ]


def test_the_default_report_is_of_the_living_recorder_that_moved_most() -> None:
    quiet = register_recorder(Recorder("quiet", ranks=2))
    busy = register_recorder(Recorder("busy", ranks=2))
    quiet.add("a", 10, 0.0, density=1.0, how="trees", bound=1.0)
    busy.add("a", 10**9, 0.0, density=1.0, how="trees", bound=1.0)
    assert report().name == "busy"
    del busy
    gc.collect()
    assert report().name != "busy"


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    idle = Recorder("idle", ranks=2)
    assert str(report(idle)) == "idle on 2 ranks, 0 steps of 0 us: nothing has been exchanged yet"
    idle.end_step()
    told = report(idle)
    assert str(told).startswith("idle on 2 ranks, 1 steps of ")
    assert (told.nbytes, told.buckets, len(told.step_records)) == (0, (), 1)
    for one in (told, report(Recorder("new", ranks=2))):
        one.plot(tmp_path / "idle.png")
        assert (tmp_path / "idle.png").stat().st_size > 1000


@pytest.mark.thorough
def test_a_process_that_trains_nothing_has_an_empty_report() -> None:
    code = "import collectives; print(collectives.report())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "this process on 0 ranks, 0 steps of 0 us: nothing has been exchanged yet\n"


def test_the_picture_has_a_row_for_each_bucket_and_one_for_waiting(tmp_path: Path) -> None:
    told = report(trained(ExchangeSettings()))
    figure = told.plot(tmp_path / "steps.png", last=2)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "big (4.00 KB)",
        "small (40 B)",
        "the loop waits",
    ]
    assert len(axes.lines) == 2
    assert (tmp_path / "steps.png").stat().st_size > 1000
    with pytest.raises(UsageError, match="no figure format"):
        told.plot(tmp_path / "steps.nothing")


def test_only_the_last_records_are_kept() -> None:
    recorder = Recorder("long", ranks=2, most=5)
    for _ in range(9):
        recorder.add("a", 1, recorder.now(), density=1.0, how="trees", bound=1.0)
        recorder.end_step()
    assert (
        [one.step for one in recorder.exchanges()]
        == [one.step for one in recorder.steps()]
        == [4, 5, 6, 7, 8]
    )


def test_the_clock_model_stands_beside_the_measured_rate() -> None:
    """80 steps of 50 ms, 10 of them waited; one of three ranks is late by 60 ms in a quarter of them."""
    steps = tuple(StepRecord(n, n * 0.05, (n + 1) * 0.05, 0.01) for n in range(80))
    told = replace(report(Recorder("test", ranks=3)), steps=80, step_records=steps)
    slow = Straggler(rank=1, factor=3, first=20, last=40)
    assert told.predicted("bsp") == pytest.approx(20)
    assert told.predicted("bsp", slow, held=0.03) == pytest.approx(80 / (4 + 20 * 0.06))
    assert told.predicted("local:4", slow) < told.predicted("asp")
    with pytest.raises(UsageError, match=r"mode must be BSP.* got 'late'"):
        told.predicted("late")
    with pytest.raises(UsageError, match="needs a step that has ended"):
        report(Recorder("test", ranks=3)).predicted()
