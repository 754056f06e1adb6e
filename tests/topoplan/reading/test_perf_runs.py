"""Logs of nccl-tests: every figure of an independent writer comes back, and nothing is lost without a word."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest

from tests.support.perf_logs import FACTORS, PerfLog
from tests.support.refusals import refused
from tests.topoplan.reading.test_debug_log import LABELS
from topoplan.errors import UsageError
from topoplan.reading.nccl.debug_log import parse_nccl_log
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import PROGRAMS

TWO = (("node1", range(8)), ("node2", range(8)))
LOGS = {
    "all_reduce": PerfLog(),
    "all_reduce of two hosts": PerfLog(hosts=TWO, start=60e-6),
    "all_reduce, older": PerfLog(newer=False, names_test=False),
    "all_reduce, four of eight": PerfLog(hosts=(("node1", (1, 4, 5, 7)),), rate=33),
    "all_gather": PerfLog("all_gather", rate=380),
    "reduce_scatter": PerfLog("reduce_scatter", rate=390),
    "broadcast": PerfLog("broadcast", root=3, rate=300),
    "reduce": PerfLog("reduce", rate=310),
    "alltoall": PerfLog("alltoall", hosts=TWO, rate=80),
    "sendrecv": PerfLog("sendrecv", rate=40),
    "gather": PerfLog("gather", rate=90),
    "hypercube": PerfLog("hypercube", rate=90),
    "unchecked": PerfLog(checked=False),
    "wrong": PerfLog(wrong={2048: 17}),
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_every_row_comes_back_in_both_places(log: PerfLog) -> None:
    """Times to the digits that were printed, and sizes, ranks and tests exactly."""
    (run,) = parse_perf_runs(log.text())
    factor = FACTORS.get(log.test, lambda n: 1.0)(log.ranks)
    assert [row.size for row in run.rows] == list(log.sizes)
    assert run.stated == log.ranks
    assert [(rank.host, rank.device) for rank in run.ranks] == [
        (host, device) for host, devices in log.hosts for device in devices
    ]
    assert run.program == (log.test if log.names_test else "")
    assert run.collective == (PROGRAMS.get(log.test, "") if log.names_test else "")
    for row in run.rows:
        for timing, share in ((row.out_of_place, 1), (row.in_place, log.in_place)):
            assert timing
            seconds = log.seconds(row.size) * share
            assert timing.seconds == pytest.approx(seconds, rel=5e-4)
            assert timing.algbw == pytest.approx(row.size / seconds / 1e9, abs=0.0051)
            assert timing.busbw == pytest.approx(factor * row.size / seconds / 1e9, abs=0.0051)
            assert timing.wrong == (log.wrong.get(row.size, 0) if log.checked else None)
    assert bool(run.warnings) == bool(log.wrong)


def test_several_runs_in_one_text_stay_apart() -> None:
    """One after another, whether or not they name their tests."""
    text = "".join(PerfLog(test).text() for test in ("all_reduce", "all_gather", "sendrecv"))
    assert [run.program for run in parse_perf_runs(text)] == ["all_reduce", "all_gather", "sendrecv"]
    older = "".join(
        f"$ mpirun -np 8 ./build/{test}_perf -b 8 -e 512M -f 4\n{PerfLog(test, names_test=False, newer=False).text()}"
        for test in ("all_reduce", "reduce_scatter")
    )
    assert [run.program for run in parse_perf_runs(older)] == ["all_reduce", "reduce_scatter"]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_launchers_put_before_a_line_is_left_out(label: str, end: str) -> None:
    """Labels, time stamps, colours, quotation marks and Windows' line ends."""
    log = PerfLog(sizes=[1 << 10, 1 << 20])
    text = end.join(label + line for line in log.text().splitlines())
    assert parse_perf_runs(text) == parse_perf_runs(log.text())


@pytest.mark.parametrize("test", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("newer", [True, False])
def test_marks_that_a_web_page_has_eaten_are_not_missed(test: str, newer: bool) -> None:
    """Without any #, and with arrows and blanks as HTML writes them."""
    log = PerfLog(test, newer=newer, names_test=newer)
    eaten = log.text().replace("#wrong", "@").replace("#", " ").replace("@", "#wrong")
    assert parse_perf_runs(eaten) == parse_perf_runs(log.text())
    assert parse_perf_runs(log.text().replace(" ", "\xa0")) == parse_perf_runs(log.text())
    stripped = "\n".join(line.strip() for line in eaten.splitlines())
    assert parse_perf_runs(stripped) == parse_perf_runs(log.text())


@pytest.mark.parametrize(
    ("before", "test", "program"),
    [
        # a folder's name, a listing of programs, a command of another test, and one that several fit
        ("mpirun -np 8 /opt/all_reduce_perf_runs/build/all_gather_perf -b 8", "all_gather", "all_gather"),
        ("$ ls build\nall_gather_perf  all_reduce_perf  alltoall_perf", "all_reduce", "all_reduce"),
        ("all_gather_perf\nreduce_perf\nall_reduce_perf\nsendrecv_perf", "reduce", "reduce"),
        ("./build/all_reduce_perf -b 8", "broadcast", ""),
        ("all_gather_perf alltoall_perf", "all_gather", ""),
        ("run 'all_reduce_perf_mpi'", "all_reduce", "all_reduce"),
    ],
)
def test_a_test_that_is_only_mentioned_must_fit_the_columns(before: str, test: str, program: str) -> None:
    """By the name of the program, never by that of a folder; else the log does not name its test."""
    log = PerfLog(test, names_test=False, newer=False)
    (run,) = parse_perf_runs(f"{before}\n{log.text()}")
    assert run.program == program
    assert bool(run.warnings) == (not program)


def test_rows_tell_into_how_many_parts_the_buffer_is_divided() -> None:
    """By size and count; of tests that do not divide it they tell nothing."""
    (divided,), (whole,) = (parse_perf_runs(PerfLog(test).text()) for test in ("all_gather", "all_reduce"))
    assert {row.parts for row in divided.rows} == {8, None}
    assert {row.parts for row in whole.rows} == {None}


def rccl(size: int, inside: int, **more: object) -> str:
    """A row as rccl-tests prints it in JSON."""
    row = {"#wrong": "0", "algBw": 1.0, "busBw": 1.5, "gpus": 4, "inPlace": inside, "name": "AllReduce"}
    row |= {"redop": "sum", "size": size, "time": size / 1000, "type": "float"}
    return json.dumps(row | more)


def test_json_lines_of_rccl_tests_are_runs() -> None:
    """Both places of a size are one row; another operation, type or test begins another run; a cut row is named."""
    lines = [rccl(1024, 0), rccl(1024, 1), rccl(4096, 0)]
    lines += [rccl(1024, 0, redop="max"), rccl(1024, 0, name="AllGather")]
    labelled = "starting\n" + "\n".join(f"0: {line}" for line in lines)
    for text in ("\n".join(lines), labelled, f"[{','.join(lines)}]"):
        first, second, third = parse_perf_runs(text)
        assert [(row.size, row.in_place is not None) for row in first.rows] == [(1024, True), (4096, False)]
        assert (first.collective, first.stated, first.warnings) == ("allreduce", 4, ())
        assert (second.rows[0].redop, third.collective) == ("max", "allgather")
    (cut,) = parse_perf_runs("\n".join([lines[0], lines[2][:60] + '"busBw"']))
    assert len(cut.rows) == 1
    assert "line 2: the row is cut" in cut.warnings[0]


PERF_JSON = {
    "version": 3,
    "args": ["/opt/broadcast_perf_runs/all_reduce_perf", "-J", "broadcast_perf.json"],
    "config": {
        "blocking": "false",
        "devices": [{"rank": r, "hostname": "n", "device": r, "device_hex": "0x07"} for r in range(2)],
    },
    "results": [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "sum",
            "root": "-1",
            "out_of_place": {"time": size / 1000, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": "N/A"},
            "in_place": {"time": size / 1000, "alg_bw": "nan", "bus_bw": "nan", "nwrong": "nan"},
        }
        for size in (1024, 4096, 16384)
    ],
}


def test_a_json_file_of_nccl_tests_that_was_cut_is_read_up_to_its_last_result() -> None:
    """Wherever it is cut, its brackets missing; several files may stand one behind another."""
    text = json.dumps(PERF_JSON, indent=2)
    (whole,) = parse_perf_runs(text)
    assert (whole.program, whole.stated) == ("all_reduce", 2)
    assert [row.size for row in whole.rows] == [1024, 4096, 16384]
    assert all("nan nan are not a time" in told for told in whole.warnings)
    starts = [text.index(f'"size": {size}') for size in (4096, 16384)]
    for end in range(starts[0], len(text) - 2, 7):
        (run,) = parse_perf_runs(text[:end])
        assert len(run.rows) >= (2 if end > starts[1] else 1)
        assert run.rows == whole.rows[: len(run.rows)]
        assert "without its summary" in run.warnings[-1]
    assert len(parse_perf_runs(text + "\n" + text)) == 2


@pytest.mark.parametrize("digits", ["9" * 5000, "1e999", "-5"])
def test_numbers_that_no_json_has_are_refused_in_one_line(digits: str) -> None:
    """Python reads no number of 5,000 digits, and infinity is no number of bytes."""
    text = json.dumps(PERF_JSON).replace("1024", digits, 1)
    with refused(UsageError) as error:
        parse_perf_runs(text)
    assert len(str(error.value)) < 200


LONG = {
    "letters": "a",
    "blanks": " ",
    "digits and blanks": "0 1 ",
    "colons": "a:1:",
    "brackets": "[",
    "objects": '{"a":',
    "quotes": '\\"',
    "labels": "[1,0]<stdout>:",
    "lines of NCCL": "h:1:2 [0] NCCL INFO ",
    "NCCL": "NCCL INFO ",
}


@pytest.mark.sampled
@pytest.mark.parametrize("piece", LONG.values(), ids=LONG)
@pytest.mark.parametrize(
    "lead", ["", "h:1:2 [0] NCCL INFO Channel 00/0 : 0 -> 1 via ", "# Rank 0 ", '{"results": ["']
)
def test_a_long_line_is_read_in_linear_time(lead: str, piece: str) -> None:
    """60 KB took half a minute; a reader that is quadratic would not end here."""
    text = lead + piece * (250_000 // len(piece)) + "!"
    with contextlib.suppress(UsageError):
        parse_perf_runs(text)
    parse_nccl_log(text)


def test_lines_of_nccl_between_the_rows_change_nothing() -> None:
    """NCCL_DEBUG=INFO prints into the same log."""
    text = PerfLog().text()
    spoken = text.replace("\n", "\nnode1:4242:4250 [3] NCCL INFO 8 GPUs on 1 node\n")
    ((run,), (plain,)) = map(parse_perf_runs, (spoken, text))
    assert [row.timing for row in run.rows] == [row.timing for row in plain.rows]


def test_columns_are_found_by_their_names() -> None:
    """A table without root, with an error in place of #wrong, and with a timestamp."""
    text = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 2048 step: 2(factor)
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
        1024           256   float     sum    10.00    0.10    0.10  0e+00     9.00    0.11    0.11  2e-07
# Out of bounds values : 0 OK
# nThread 1 nGpus 2 minBytes 1024 maxBytes 2048 step: 2(factor)
#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong timestamp
   2048  512  float  sum  -1  10.00  0.20  0.20  0  8.00  0.26  0.26  0 2026-01-02 03:04:05
# Out of bounds values : 0 OK
"""
    old, stamped = parse_perf_runs(text)
    assert (old.rows[0].root, old.rows[0].timing.wrong, old.warnings) == (None, None, ())
    assert stamped.rows[0].in_place
    assert (stamped.rows[0].in_place.seconds, stamped.warnings) == (8e-6, ())


def test_a_row_that_ran_in_place_only_has_no_time_out_of_place() -> None:
    log = PerfLog(sizes=[1 << 20])
    row = log.row(1 << 20)
    blank = row[:54] + " " * 34 + log.block(1 << 20, log.seconds(1 << 20))
    (run,) = parse_perf_runs(log.text().replace(row, blank))
    assert run.rows[0].out_of_place is None
    assert run.rows[0].timing.algbw == pytest.approx((1 << 20) / log.seconds(1 << 20) / 1e9, abs=0.006)
    assert run.warnings == ()


def test_a_row_that_is_cut_is_named() -> None:
    """With its line and size, whereever it is cut; so is a run without a summary."""
    log = PerfLog()
    lines = log.text().splitlines()
    last = next(place for place, line in enumerate(lines) if line.startswith("   536870912"))
    for kept in range(20, len(lines[last]) - 1):
        if len(lines[last][:kept].split()) == 13:
            break
        (run,) = parse_perf_runs("\n".join([*lines[:last], lines[last][:kept]]))
        assert len(run.rows) == 13
        assert f"line {last + 1}: the row of 512MB is cut" in run.warnings[0]
        assert "without its summary" in run.warnings[1]


ROW = "        4096  1024  float  sum"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("# Out of bounds values : 3 FAILED", "Out of bounds values : 3 FAILED"),
        ("# Avg bus bandwidth    : 12.5 FAILED", "Avg bus bandwidth : 12.5 FAILED"),
        ("node1: Test NCCL failure common.cu:958 'unhandled'", "the test failed: node1: Test NCCL"),
        ("node1: Test CUDA failure common.cu:892 'out of memory'", "'out of memory'"),
        (f"{ROW}  -1  nan  nan  nan  0  1.0  4.1  7.2  0", "nan nan nan are not a time"),
        (f"{ROW}  -1  0.00  inf  inf  0  1.0  4.1  7.2  0", "0.00 inf inf are not a time"),
        (ROW, "the row of 4KB is cut (4 of 13)"),
        (f"{ROW}  -1  1.0  4.1  7.2  5  1.0  4.1  7.2  0", "5 wrong elements"),
    ],
)
def test_what_is_amiss_leaves_a_warning(line: str, told: str) -> None:
    text = PerfLog(sizes=[1024, 2048]).text().replace("# Out of", f"{line}\n# Out of", 1)
    (run,) = parse_perf_runs(text)
    assert any(told in warning for warning in run.warnings), run.warnings
    assert {row.size for row in run.rows} >= {1024, 2048}


def test_another_text_has_no_run() -> None:
    for text in ("roses are red\n", "GPU0\tGPU1\n", "1 2 3\n4 5 6\n", "# a comment\n"):
        assert parse_perf_runs(text) == ()


def test_the_json_of_nccl_tests_is_the_same_run() -> None:
    log = PerfLog("reduce_scatter", sizes=[1 << 20, 1 << 24])
    (text,) = parse_perf_runs(log.text())
    found = {size: (log.seconds(size), size / log.seconds(size) / 1e9) for size in log.sizes}
    devices = [
        {"rank": number, "hostname": "node1", "device": number, "device_hex": rank.busid.removesuffix(".0")}
        for number, rank in enumerate(text.ranks)
    ]
    results = [
        {
            **{"size": size, "type": "float", "redop": "sum", "root": "    -1", "in_place": None},
            "out_of_place": {"time": seconds * 1e6, "alg_bw": rate, "bus_bw": rate * 7 / 8, "nwrong": 0.0},
        }
        for size, (seconds, rate) in found.items()
    ]
    value = {"version": 2, "args": ["./build/reduce_scatter_perf"], "devices": devices, "results": results}
    (run,) = parse_perf_runs(json.dumps({**value, "config": {"nthreads": 1}}))
    assert (run.collective, run.stated, run.warnings) == ("reduce_scatter", 8, ())
    places, printed = ([(one.host, one.device, one.busid) for one in each.ranks] for each in (run, text))
    assert places == printed
    rates, printed_rates = ([row.timing.algbw for row in each.rows] for each in (run, text))
    assert rates == pytest.approx(printed_rates, abs=0.006)


@pytest.mark.parametrize(
    "text", ['{"rows": [1], "ranks": ["gpu0"]}', '{"results": [{}], "config": {}}', '{"results": [']
)
def test_json_that_is_no_log_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="JSON"):
        parse_perf_runs(text)


@pytest.mark.parametrize("place", ["1048576 ", " 262144 ", " 0 "])
def test_numbers_that_no_log_has_cost_their_row_and_nothing_else(place: str) -> None:
    """400 digits in any column: a warning, and the other rows stay."""
    text = PerfLog(sizes=[1 << 10, 1 << 20, 1 << 30]).text()
    row = next(line for line in text.splitlines() if line.lstrip().startswith("1048576 "))
    (run,) = parse_perf_runs(text.replace(row, row.replace(place, f" {'9' * 400} ", 1)))
    assert [one.size for one in run.rows] == [1 << 10, 1 << 30]
    assert "25 digits or more" in run.warnings[0]


@pytest.mark.parametrize(
    ("spelled", "collective"),
    [("all_reduce", "allreduce"), ("allreduce", "allreduce"), ("all_to_all", "alltoall"), ("mine", "")],
)
def test_a_bench_names_its_collective_in_either_spelling(spelled: str, collective: str) -> None:
    text = f"""# {spelled} of 2 ranks, tcp, median of 5
#         size         count      type   redop         time    algbw    busbw   wrong
#          (B)    (elements)                           (us)   (GB/s)   (GB/s)
       1048576        262144   float32     sum       3960.5     0.26     0.46       0
"""
    (run,) = parse_perf_runs(text)
    assert run.collective == collective


def test_rows_of_a_bench_without_a_time_are_left_out() -> None:
    """A time of nothing or of no number would divide by zero."""
    row = {"schedule": "trees", "size": 4, "type": "float", "redop": "sum"}
    row |= {"algbw": 1, "busbw": 1, "wrong": 0}
    rows = [{**row, "time": time} for time in (0.0, float("nan"), 20.0)]
    value = {"collective": "allreduce", "ranks": ["gpu0", "gpu1"], "rows": rows}
    (run,) = parse_perf_runs(json.dumps(value))
    assert [one.timing.seconds for one in run.rows] == [pytest.approx(20e-6)]
    assert len(run.warnings) == 2


def test_a_writer_of_other_widths_is_read_alike() -> None:
    text = PerfLog().text()
    narrow = "\n".join(line if line.startswith("#") else " ".join(line.split()) for line in text.splitlines())
    (wide,), (tight,) = parse_perf_runs(text), parse_perf_runs(narrow)
    assert tight == replace(wide, rows=tight.rows)
    assert tight.rows == wide.rows
