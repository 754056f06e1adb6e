"""Call the commands from Python: the same bodies, and results with rows, a dict, a data frame and a figure.

Every function below parses its options as the command line does, runs the command of its name, and returns what the
command would print. So ``.rows`` are the rows of ``--csv`` and ``--json``, ``.to_dict()`` is the object of ``--json``,
and ``print(result)`` is the text. A machine is a `topoplan.Topology`, or what `topoplan.load` takes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from types import NoneType
from typing import TYPE_CHECKING, SupportsIndex, cast, overload

from topoplan.cli.arguments import OneLineParser, flag
from topoplan.cli.output import Answer, without_progress
from topoplan.cli.results import ExportedFiles, Result, Row
from topoplan.errors import UsageError
from topoplan.machine.topology import TopologyLike, as_topology
from topoplan.model.closed_form import Timeline
from topoplan.model.closed_form import simulate as simulate_one
from topoplan.plans.plan import Plans
from topoplan.units import check_type, parse_size

if TYPE_CHECKING:
    from fractions import Fraction

    from topoplan.plans.plan_by_kind import PlanByKind


_OPTION = re.compile(
    r"topoplan [a-z]+ [^;]*|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)"
    r"(?: (?P<value>[0-9]+(?:,[0-9]+)*|[0-9]+[KMGT]B|[A-Z]+|megatron|[a-z]+-[a-z]*[0-9]\w*)(?![\w-]))?"
)
"""An option, with a value that is a number, a list, a size or a name; a command line is matched as a whole, and stays
as it is.
"""

_PYTHON_NAMES = {"size": "nbytes", "chunk": "chunk_bytes", "format": "file_format"}
"""Parameters whose names are not those of their options."""

_SEQUENCES = ("gpus", "gpu_counts", "jobs", "free", "hosts")
"""Parameters that are lists."""


def compare(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    nbytes: int | str | None = None,
    all_allocations: bool = False,
    gpu_counts: Sequence[int] | None = None,
    without_each_server: bool = False,
    in_network: str | None = None,
) -> Result:
    """Compare packed trees with rings, with what NCCL does, and with schedules of `topoplan.register_schedule`.

    Parameters
    ----------
    topology, collective, gpus, root, channels, nbytes, in_network
        As for `topoplan.plan`.
    all_allocations : bool
        A row for each class of allocations of ``gpus`` (all by default) that are equal up to renaming.
    gpu_counts : sequence of int, optional
        With ``all_allocations``, numbers of GPUs of the allocations; all by default.
    without_each_server : bool
        On a cluster, the rate with all servers and without each of them.

    Returns
    -------
    Result
        Rows with ``gpus``, ``trees``, ``busbw``, ``bound``, ``ring``, ``relay``, ``nccl``, … in GB/s of algorithm
        bandwidth but for ``busbw``; None for a schedule that does not exist here. ``plot()`` draws bars.

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.plan`; options that do not go together.

    See Also
    --------
    recommend, topoplan.plan, topoplan.plan_by_size

    Examples
    --------
    >>> import topoplan
    >>> rows = topoplan.compare("v100x4", all_allocations=True).rows
    >>> [(row["gpus"], row["trees"], row["nccl"]) for row in rows if len(row["gpus"]) == 2]
    [([2, 3], 50.0, 50.0), ([1, 3], 25.0, 25.0)]
    """
    request = {"collective": collective, "gpus": gpus, "root": root, "channels": channels, "size": nbytes}
    which = {"all_allocations": all_allocations, "gpu_counts": gpu_counts, "in_network": in_network}
    which["without_each_server"] = without_each_server
    answer = _answer("compare", ["-"], {"topo": as_topology(topology)}, **request, **which)
    if without_each_server:
        return Result("compare", answer, lambda: _dicts(answer.rows))
    return Result("compare", answer, lambda: [_flat(row, "others") for row in _listed(answer, "rows")])


def recommend(
    topology: TopologyLike,
    count: int | None = None,
    collective: str = "all_reduce",
    *,
    jobs: Sequence[int] | None = None,
    free: Sequence[int] | None = None,
    in_network: str | None = None,
) -> Result:
    """Rank the sets of ``count`` GPUs of a machine, best first, or divide it among several jobs.

    Parameters
    ----------
    topology, collective, in_network
        As for `topoplan.plan`.
    count : int
        GPUs of the job.
    jobs : sequence of int
        In place of ``count``: GPUs of several jobs that run side by side.
    free : sequence of int, optional
        GPUs to choose from; all by default.

    Returns
    -------
    Result
        Rows with ``gpus``, ``rate`` (GB/s of algorithm bandwidth), ``busbw``, ``bound``, ``ring``, ``nccl``, ``class``
        (1 is best; sets of a class have equal links); of ``jobs`` a row for each job.

    Raises
    ------
    UsageError
        Neither or both of ``count`` and ``jobs``, or more GPUs than there are.

    See Also
    --------
    compare

    Examples
    --------
    >>> import topoplan
    >>> best = topoplan.recommend("dgx-1v", 4).rows[0]
    >>> best["gpus"], best["rate"]
    ([0, 1, 2, 3], 75.0)
    >>> [row["gpus"] for row in topoplan.recommend("dgx-1v", jobs=[4, 4]).rows]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    request = {"count": count, "collective": collective, "jobs": jobs, "free": free, "in_network": in_network}
    answer = _answer("recommend", ["-"], {"topo": as_topology(topology)}, **request)
    return Result("recommend", answer, lambda: _dicts(answer.rows))


def check(topology: TopologyLike | None = None, collective: str = "all_reduce") -> Result:
    """Diagnose a machine, and compute what each of its faults costs.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        The machine; this one, as `topoplan.probe` reads it, for None.
    collective : str
        Whose rates are computed beside those of an all_reduce.

    Returns
    -------
    Result
        A row for each fault: ``kind``, ``devices``, ``is``, ``should_be`` and ``cost``, the GB/s now, healthy, and with
        this fault alone. ``ok`` is False if a fault costs bandwidth or cannot be rated, as exit status 1;
        ``to_dict()["healthy"]`` if there is any fault.

    Raises
    ------
    ProbeError
        The driver of this machine does not answer.

    See Also
    --------
    diff, topoplan.load, topoplan.apply_nvlink_status

    Examples
    --------
    >>> import topoplan
    >>> topoplan.check("dgx-1v").ok
    True
    >>> broken = topoplan.check(topoplan.load("dgx-1v").remove_links(["gpu0-gpu3"]))
    >>> [(row["kind"], row["devices"]) for row in broken.rows]
    [('link missing', ['gpu0', 'gpu3'])]
    """
    machine = None if topology is None else as_topology(topology)
    answer = _answer("check", [], {"topo": machine}, collective=collective)
    return Result("check", answer, lambda: _listed(answer, "faults"))


def explain(
    log: str | PathLike[str],
    machine: TopologyLike | None = None,
    *,
    newer: str | PathLike[str] | None = None,
    gpus: Sequence[int] | None = None,
    collective: str | None = None,
    in_network: str | None = None,
) -> Result:
    """Compare a log of nccl-tests, ``topoplan bench`` or ``NCCL_DEBUG=INFO`` with what the machine can reach, or with
    a newer log.

    Parameters
    ----------
    log : str or path
        A file, or the text of the log.
    machine : Topology, or what `topoplan.load` takes
        The machine that ran.
    newer : str or path, optional
        In place of ``machine``, a second log: what changed since ``log``. The other parameters do not go with it.
    gpus : sequence of int, optional
        GPUs that ran, if the log does not say.
    collective : str, optional
        For logs that do not name their test.
    in_network : str, optional
        As for `topoplan.plan`; by default switches add and copy if they can.

    Returns
    -------
    Result
        A row for each row of the log: ``size`` in bytes, ``time`` in microseconds, ``algbw``, ``busbw``, and their
        parts of NCCL's best and of the upper bound. ``print(result)`` shows the verdict and what NCCL set up.
        With ``newer`` a row for each size of both logs: ``test``, ``size`` in bytes, ``old_time`` and ``new_time`` in
        microseconds, ``change`` of the time (0.1 is a tenth slower), ``old_busbw`` and ``new_busbw`` in GB/s, and
        ``old_choice`` and ``new_choice``, NCCL's algorithm and protocol if logged. ``to_dict()["setup"]`` lists what
        NCCL set up otherwise, such as channels and transports: ``what``, ``old``, ``new``.

    Raises
    ------
    UsageError
        A file cannot be read, holds no such log, or is of another number of GPUs; two logs have nothing in common.

    See Also
    --------
    check, topoplan.simulate

    Examples
    --------
    >>> import topoplan
    >>> text = '''# nThread 1 nGpus 4 minBytes 1073741824 maxBytes 1073741824
    ... #                                      out-of-place              in-place
    ... #  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
    ... 1073741824  268435456  float  sum  -1  24000  44.74  67.11  0  24100  44.55  66.83  0
    ... '''
    >>> row = topoplan.explain(text, "dgx-1v", gpus=[1, 4, 5, 7], collective="all_reduce").rows[0]
    >>> row["algbw"], round(row["of_best"], 2)
    (44.74, 0.89)
    >>> later = topoplan.explain(text, newer=text.replace("24000  44.74  67.11", "36000  29.83  44.74")).rows[0]
    >>> later["old_busbw"], later["new_busbw"], round(later["change"], 2)
    (67.11, 44.74, 0.5)
    """
    check_type("log", log, str, PathLike, remedy="give a file or its text")
    check_type("newer", newer, str, PathLike, NoneType, remedy="give a file or its text")
    logs = {"log": fspath(log), "newer": None if newer is None else fspath(newer)}
    for name, text in logs.items():
        if text is not None and text.strip() in ("", "-"):
            raise UsageError(
                f"{name} must be a file or the text of a log, got {text!r}; pass sys.stdin.read() for stdin"
            )
    # a text is read with the rates of the GPUs that the log names
    described = fspath(machine) if isinstance(machine, str | PathLike) else machine and as_topology(machine)
    request = {"gpus": gpus, "collective": collective, "in_network": in_network}
    answer = _answer("explain", ["-"], {**logs, "topo": described}, **request)
    return Result("explain", answer, lambda: _dicts(answer.rows))


@overload
def simulate(
    plan: Plans | PlanByKind,
    nbytes: int | str,
    *,
    chunk_bytes: int | str | None = None,
    late: Mapping[int, float] | None = None,
) -> Timeline: ...
@overload
def simulate(plan: Plans | TopologyLike, *, sizes: str | Sequence[int | str] | None = ...) -> Result: ...
def simulate(
    plan: Plans | PlanByKind | TopologyLike,
    nbytes: int | str | None = None,
    *,
    chunk_bytes: int | str | None = None,
    late: Mapping[int, float] | None = None,
    sizes: str | Sequence[int | str] | None = None,
) -> Timeline | Result:
    """Return the model time of a plan: for one size, or over many beside the baseline's.

    Parameters
    ----------
    plan : Plan, SizePlans or PlanByKind
        Plans by size are simulated with the plan for each size. Without ``nbytes`` also a machine, whose all_reduce on
        all GPUs is planned. The links of a plan by kind are those of its sample.
    nbytes : int or str
        Bytes of the user's buffer, or a text such as "64MB"; for all_gather and reduce_scatter of the full gathered
        one.
    chunk_bytes : int, str or None
        With ``nbytes``, the largest chunk; None selects the number of chunks.
    late : mapping of int to float, or None
        With ``nbytes``, the seconds by which some ranks come after the others. In a plan by kind the ranks of the same
        number on all equivalent servers come as late.
    sizes : str, sequence or None
        Without ``nbytes``: ``"1KB:1GB"`` (the default), which doubles from first to last, or a list of sizes.

    Returns
    -------
    Timeline
        With ``nbytes``: ``seconds``, ``algbw``, ``busbw``, ``latency_seconds``, ``link_bytes``, … (see
        `topoplan.model.closed_form.Timeline`).
    Result
        Else: a row for each schedule and size, with ``time`` in microseconds; ``plot()`` draws the curves.

    Raises
    ------
    UsageError
        A size is negative or not a size, ``chunk_bytes`` not above zero, or a late rank does not exist.
    PlanError
        The plan's trees or routes do not fit its machine.

    See Also
    --------
    topoplan.plan_by_size, explain

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan("dgx-2")
    >>> timeline = topoplan.simulate(plan, "1GB")
    >>> round(timeline.algbw), round(timeline.busbw)
    (80, 150)
    >>> [row["size"] for row in topoplan.simulate(plan, sizes=["1MB", "1GB"]).rows if row["schedule"] == "plan"]
    [1048576, 1073741824]
    """
    from topoplan.plans.plan_by_kind import PlanByKind

    if nbytes is not None:
        if sizes is not None:
            raise UsageError("sizes does not go with nbytes; leave one of them out")
        if isinstance(plan, PlanByKind):
            from topoplan.model.kind_dataflow import KindClock

            largest = None if chunk_bytes is None else parse_size(chunk_bytes)
            return KindClock(plan, late).time(parse_size(nbytes), largest)
        if not isinstance(plan, Plans):
            raise UsageError(
                "simulate(plan, nbytes) takes a plan, got a machine; make one with topoplan.plan"
            )
        return simulate_one(plan, nbytes, chunk_bytes=chunk_bytes, late=late)
    for name, given in (("chunk_bytes", chunk_bytes), ("late", late)):
        if given is not None:
            raise UsageError(f"{name} goes with one size; add nbytes, or leave {name} out")
    source = plan if isinstance(plan, (Plans, PlanByKind)) else as_topology(plan)
    answer = _answer("simulate", ["-"], {"topo": source}, sizes=sizes)
    return Result("simulate", answer, lambda: _dicts(answer.rows))


def export(
    source: Plans | TopologyLike,
    to: str,
    *,
    gpus: Sequence[int] | None = None,
    server: str | None = None,
    nbytes: int | str | None = None,
    max_blocks: int | None = None,
    chunks: int | None = None,
    chunk_bytes: int | str | None = None,
    protocol: str | None = None,
    runtime: str | None = None,
) -> ExportedFiles:
    """Write a plan, which is verified first, or a machine in the format of another program.

    Parameters
    ----------
    source : Plan, SizePlans, Topology, or what `topoplan.load` takes
    to : str
        The format, such as ``nccl-graph``, ``nccl-topo``, ``msccl-xml``, ``mscclpp`` or ``chakra``; ``topoplan export
        --help`` lists them.
    gpus, server
        For a machine: the allocation, and which server of a cluster.
    nbytes, max_blocks, chunks, chunk_bytes, protocol, runtime
        For a plan for an engine, as ``topoplan export`` takes them.

    Returns
    -------
    ExportedFiles
        ``str(result)`` is the text, ``save(path)`` writes it; ``notes`` say what the format leaves out and how the
        program reads the file.

    Raises
    ------
    UsageError
        The format is unknown, or does not hold such a plan or machine.
    PlanError
        The plan is wrong.

    See Also
    --------
    Plan.to_json, Topology.to_json, Topology.to_networkx

    Examples
    --------
    >>> import topoplan
    >>> topoplan.export("dgx-1v", "nccl-topo")
    <Result of export: a file of 6,701 characters>
    """
    if isinstance(source, Plans) and (gpus is not None or server is not None):
        raise UsageError("gpus and server are for a machine, and a plan has settled them; leave them out")
    from topoplan.cli.export import export_file

    exported_from = {"topo": source if isinstance(source, Plans) else as_topology(source)}
    part = {"gpus": gpus, "server": server, "size": nbytes, "max_blocks": max_blocks}
    engine = {"chunks": chunks, "chunk": chunk_bytes, "protocol": protocol, "runtime": runtime}
    check_type("to", to, str, remedy="give the name of a format, such as msccl-xml")
    options = _options("export", ["-", "--to", to], exported_from, **part, **engine)
    with _in_python():
        exported, notes = export_file(options)
    made = ExportedFiles(
        "export", Answer(file=lambda: exported.text, notes=(*notes, *exported.notes)), lambda: []
    )
    made.files = dict(exported.files)
    return made


def order(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    axes: Mapping[str, int | float | Fraction] | None = None,
    preset: str | None = None,
    file_format: str | None = None,
) -> Result:
    """Find the order of the ranks in which NCCL's rings and trees, or the axes of a mesh, are fastest.

    Parameters
    ----------
    topology, collective
        As for `topoplan.plan`.
    gpus : sequence of int, optional
        GPUs of the ranks in their present order; all by number by default.
    hosts : sequence of str, optional
        Names for the hosts of the machine.
    mesh : mapping of str to int, optional
        Axes and their extents, such as ``{"dp": 2, "tp": 8}``, the outermost first.
    axes : mapping, optional
        Weights: how fast the axes are to be in proportion, such as ``{"tp": 8, "dp": 1}``.
    preset : str, optional
        In place of ``axes``, the weights of a kind of training: ``megatron``.
    file_format : str, optional
        A file for a launcher, such as ``rankfile``, which ``save(path)`` writes.

    Returns
    -------
    Result
        A row for each rank in the best order: ``rank``, ``gpu``, ``host``, ``slot``. ``to_dict()`` has rates before and
        after.

    Raises
    ------
    UsageError
        A mesh of several axes without weights; an extent that does not fit the ranks.

    See Also
    --------
    topoplan.plan_mesh

    Examples
    --------
    >>> import topoplan
    >>> servers = topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100)
    >>> found = topoplan.order(servers, gpus=[0, 4, 1, 5, 2, 6, 3, 7])
    >>> [row["gpu"] for row in found.rows]
    [0, 3, 2, 1, 4, 7, 6, 5]
    """
    ranks = {"collective": collective, "gpus": gpus, "hosts": hosts, "format": file_format}
    shape = {"mesh": mesh, "axes": axes, "preset": preset}
    answer = _answer("order", ["-"], {"topo": as_topology(topology)}, **ranks, **shape)

    def rows() -> list[Row]:
        if answer.value is None:
            return []
        gpus = cast("list[int]", answer.value()["order"])
        return [
            {"rank": rank, "gpu": gpu, **place}
            for rank, (gpu, place) in enumerate(zip(gpus, _listed(answer, "ranks"), strict=True))
        ]

    return Result("order", answer, rows)


def diff(first: TopologyLike, second: TopologyLike) -> Result:
    """Compare two descriptions of a machine device by device, and find which differences change its upper bound.

    Returns
    -------
    Result
        A row for each difference: ``what``, ``names``, ``a``, ``b``, ``bound`` (GB/s of the first machine with it
        alone) and ``changes_bound``. ``ok`` says whether there are none.

    See Also
    --------
    check

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> found = topoplan.diff(machine, machine.degrade_links({"gpu0-gpu3": 25}))
    >>> [(row["what"], row["a"], row["b"], row["changes_bound"]) for row in found.rows]
    [('nvlink gpu-gpu', '50 GB/s', '25 GB/s', True)]
    """
    machines = {"topo": as_topology(first), "other": as_topology(second)}
    answer = _answer("diff", ["-", "-"], machines)
    return Result("diff", answer, lambda: _listed(answer, "differences"))


def report(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    sizes: str | Sequence[int | str] = "1KB:1GB",
    in_network: str | None = None,
) -> Result:
    """Make one HTML page: the machine, its health, which GPUs to take, the plan, its proof and trees, and times.

    Parameters
    ----------
    topology, collective, gpus, root, channels, in_network
        As for `topoplan.plan`.
    sizes : str or sequence
        Sizes of the times, as for `simulate`.

    Returns
    -------
    Result
        ``save("report.html")`` writes the page, ``str(result)`` is its text.

    See Also
    --------
    topoplan.plan, compare, check

    Examples
    --------
    >>> import topoplan
    >>> str(topoplan.report("v100x4"))[:15]
    '<!DOCTYPE html>'
    """
    request = {"collective": collective, "gpus": gpus, "root": root, "in_network": in_network}
    found = {"topo": as_topology(topology)}
    answer = _answer("report", ["-", "-o", "-"], found, channels=channels, sizes=sizes, **request)
    return Result("report", answer, lambda: [])


def _answer(command: str, places: Sequence[str], objects: Mapping[str, object], **given: object) -> Answer:
    """Return the answer of a command; parameters as `_options`."""
    from topoplan.cli.main import load_command

    options = _options(command, places, objects, **given)
    with _in_python(*objects.values()):
        return cast("Answer", load_command(command, {}).run(options))


def _options(
    command: str, places: Sequence[str], objects: Mapping[str, object], **given: object
) -> argparse.Namespace:
    """Return the options of a command.

    ``places`` are words for what the parser requires, and ``objects`` take their places. ``given`` are options under
    their names with underscores; None and False leave one out.
    """
    from topoplan.cli.main import declare_command

    parser = OneLineParser(prog=f"topoplan {command}")
    declare_command(command, {}, parser)
    words = [*places]
    for name, value in given.items():
        takes_value = parser._option_string_actions[flag(name)].nargs != 0
        _check_value(_PYTHON_NAMES.get(name, name), value, takes_value)
        if not takes_value:
            words += [flag(name)] if value else []
        elif value is not None:
            words.append(f"{flag(name)}={_word(value)}")
    with _in_python():
        options = parser.parse_args(words)
    for name, value in objects.items():
        setattr(options, name, value)
    return options


def _check_value(name: str, value: object, takes_value: bool) -> None:
    """Raise UsageError for a value that the command line would take for another: a number for a list, or a bool."""
    if isinstance(value, bool) == takes_value:
        raise UsageError(
            f"{name} must {'have a value' if takes_value else 'be True or False'}, got {value!r}"
        )
    if name not in _SEQUENCES or value is None or isinstance(value, str):
        return
    what = (
        "names" if name == "hosts" else "whole numbers" if name in ("gpu_counts", "jobs") else "GPU numbers"
    )
    if not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a sequence of {what}, got {value!r}; write [{value!r}]")
    known = isinstance(value, Sequence) and name != "hosts"
    if known and not all(isinstance(item, SupportsIndex) and item.__index__() >= 0 for item in value):
        raise UsageError(f"{name} must be a sequence of {what}, each 0 or more, got {value!r}")
    if known and not value:
        raise UsageError(f"{name} must be a sequence of one or more {what}, got {value!r}")


def _word(value: object) -> str:
    """Return a value as the command line takes it.

    >>> _word([7, 1]), _word({"tp": 8, "dp": 1}), _word("64MB")
    ('7,1', 'tp=8,dp=1', '64MB')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return (
        ",".join(map(str, value))
        if isinstance(value, Iterable) and not isinstance(value, str)
        else str(value)
    )


@contextmanager
def _in_python(*given: object) -> Iterator[None]:
    """Show no progress, and name options and their values in errors as Python does; texts of ``given`` stay."""
    try:
        with without_progress():
            yield
    except UsageError as error:
        message = re.sub(r"^argument (\S+):(?: size)?| *\(see topoplan \w+ --help\)$", r"\1", str(error))
        quoted = [re.escape(text) for text in given if isinstance(text, str) and len(text) < MOST_QUOTED]
        pattern = re.compile("|".join([*quoted, _OPTION.pattern]))
        raise UsageError(pattern.sub(_renamed, message)) from None


MOST_QUOTED = 1000
"""Letters of a text above which no error quotes it: that of a log, not the name of a file."""


def _renamed(found: re.Match[str]) -> str:
    """Return an option of a message as Python writes it, with its value if one follows; other text as it is."""
    if not found["name"]:
        return found[0]
    name = found["name"].replace("-", "_")
    name = _PYTHON_NAMES.get(name, name)
    value = found["value"]
    if value is None:
        return name
    if name in _SEQUENCES:
        return f"{name}=[{value.replace(',', ', ')}]"
    return f"{name}={value}" if value.isdecimal() else f'{name}="{value}"'


def _listed(answer: Answer, key: str) -> list[Row]:
    return [] if answer.value is None else cast("list[Row]", answer.value()[key])


def _dicts(rows: Callable[[], Sequence[Mapping[str, object]]] | None) -> list[Row]:
    return [dict(row) for row in rows()] if rows else []


def _flat(row: Row, key: str) -> Row:
    """Return a row with the items of an object under a key in place of the object."""
    return {name: value for name, value in row.items() if name != key} | cast("Row", row.get(key) or {})
