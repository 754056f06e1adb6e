"""Read what TOPO and PLAN.json on the command line name: a library machine, a file, or ``-`` for stdin."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from topoplan.cli.arguments import refuse_beside
from topoplan.cli.machine_options import (
    CLUSTER_OPTIONS,
    FAULT_OPTIONS,
    NETWORK_OPTIONS,
    RequestedMachine,
    apply_cluster_options,
    apply_faults,
    apply_overlay,
    faulty_by_kind,
    requested_by_kind,
    requested_size,
)
from topoplan.errors import Note, PlanError, TopologyError, UsageError
from topoplan.machine.cluster_by_kind import MOST_LISTED, ClusterByKind
from topoplan.machine.hardware import (
    BY_CAPABILITY,
    assumed_capability,
    compute_capability,
    generation_of,
    nvlink_counts,
    with_capable,
)
from topoplan.machine.topology import Topology
from topoplan.machine.topology_json import decode_json
from topoplan.machine.variants import with_in_network
from topoplan.plans.file_values import parse_object
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import parse_plan_file
from topoplan.plans.verify import verify_all
from topoplan.reading.load import decode_log, library, load, load_cluster_by_kind, load_text, read_text
from topoplan.reading.registry import ASSUMED, RATES
from topoplan.reading.slurm import expand_hostlist

if TYPE_CHECKING:
    from topoplan.plans.plan_by_kind import PlanByKind

_PLAN_FORMAT = re.compile(r'"format"\s*:\s*"topoplan\.plans?/')
_JOBS_FORMAT = re.compile(r'"format"\s*:\s*"topoplan\.jobs/')
DESCRIPTION_OPTIONS = (*RATES, "merge")
"""Options for what the description of a machine leaves open."""

MACHINE_OPTIONS = (
    *("gpus", "server", "collective", "root", "channels", "size", "in_network"),
    *DESCRIPTION_OPTIONS,
    *CLUSTER_OPTIONS,
    *FAULT_OPTIONS,
)
"""Options that a plan file settles; a command has some of them, None if they are not given."""

CHANNELS_BY_KIND = ("auto", "nvlink+network", "pcie+network")
"""Channels of plans by kind."""

MOST_LISTED_INSTEAD = 1024
"""GPUs of a cluster up to which listed plans are made without being asked: some minutes."""

MOST_READ = 16_384
"""GPUs of a cluster up to which commands list its devices: some seconds, and some gigabytes."""

BY_KIND_COMMANDS = "topoplan plan, compare, simulate and show take it by its kinds of servers"

_REMEDY = "give a plan file, made by topoplan plan TOPO -o F.json"


def read_machine(options: argparse.Namespace, topology: Topology | None = None) -> RequestedMachine:
    """Return the machine of TOPO with the options of clusters and faults; errors as `topoplan.load`.

    ``topology`` is that of TOPO if it has been read: stdin and pipes are read once.
    """
    if topology is None:
        refuse_unread(options)
        topology = read_topology(options)
    return apply_machine_options(options, topology)


def apply_machine_options(options: argparse.Namespace, topology: Topology) -> RequestedMachine:
    """Apply the options of clusters and faults to a machine."""
    refuse_unread(options, topology)
    gone = {gpu for numbers in options.without_gpu or () for gpu in numbers}
    gpus = getattr(options, "gpus", None)
    used = None if gpus is None else tuple(gpu for gpu in gpus if gpu not in gone)
    described = apply_overlay(options, topology)
    whole = with_capable(apply_cluster_options(options, described, gpus=used))
    which = getattr(options, "in_network", None)
    machine = apply_faults(options, whole if which is None else with_in_network(whole, which))
    return replace(machine, described=described)


def read_topology(options: argparse.Namespace) -> Topology:
    """Return the machine of TOPO without other options; errors as `topoplan.load`.

    The options keep it: stdin and pipes are read once.
    """
    found = _read_before(options)
    if found is None:
        _check_stdin(options)
        given = _load_options(options)
        found = printable_machine(load(options.topo, **given))
        options.read_before = options.topo, given, found
    return found


def _read_before(options: argparse.Namespace) -> Topology | None:
    """Return what `read_topology` has returned for the same TOPO and description options; None at first."""
    *asked, found = getattr(options, "read_before", (None, None, None))
    return found if asked == [options.topo, _load_options(options)] else None


def read_as_logged(options: argparse.Namespace, model: str) -> RequestedMachine:
    """Return the machine of TOPO, with the rates of the model that a log names in place of assumed ones.

    A text without models has rates that its number of NVLinks suggests, those of a B200 among them only on request. Its
    GPUs become the logged ones, unless they have more NVLinks than the model.
    """
    text = None
    if options.topo == "-":
        _check_stdin(options)
        text = read_text("-", "give a file")

    def read(**rates: float) -> RequestedMachine:
        asked = _load_options(options) | rates
        found = load(options.topo, **asked) if text is None else load_text(text, "stdin", "stdin", **asked)
        return apply_machine_options(options, printable_machine(found))

    machine = read()
    described = machine.described or machine.whole
    gpus = [described.device(gpu) for gpu in described.gpus]
    if not model or any(gpu.model or gpu.fact("sm") for gpu in gpus):
        return machine
    capability = compute_capability(model)
    made = None if capability is None else generation_of(capability)
    most = max(nvlink_counts(described).values(), default=0)
    assumed = {
        channel: getattr(made, channel)
        for note in described.notes
        if isinstance(note, Note) and note.kind == "assumed" and made is not None
        for channel in note.devices
    }
    if not assumed or made is None:
        return _with_models(machine, model)
    other = BY_CAPABILITY.get(assumed_capability(described) or 0)
    read_before = isinstance(options.topo, Topology)
    if made.links < most or (read_before and other is not None and other.nvlink != made.nvlink):
        return _with_models(machine, other.name if other else "")
    if read_before:
        return _with_models(machine, model)
    machine = _with_models(read(**{f"{channel}_gbps": rate for channel, rate in assumed.items()}), model)
    rate = f", NVLink {made.nvlink:g} GB/s per link" if "nvlink" in assumed else ""
    still = (
        Note(words.format(assumed[channel]), "assumed", (channel,))
        for channel, words in ASSUMED.items()
        if channel in assumed
    )
    notes = (*machine.whole.notes, f"GPU taken from the log: {model}{rate}", *still)
    return replace(machine, whole=replace(machine.whole, notes=notes))


def _with_models(machine: RequestedMachine, model: str) -> RequestedMachine:
    devices = (replace(one, model=model) if one.kind == "gpu" else one for one in machine.whole.devices)
    return replace(machine, whole=replace(machine.whole, devices=tuple(devices)))


def _check_stdin(options: argparse.Namespace) -> None:
    """Refuse to read stdin twice: the second input would be empty."""
    inputs = [options.topo, options.merge, *(getattr(options, "overlay", None) or ())]
    if inputs.count("-") > 1:
        raise UsageError("stdin is read once; give a file to all but one of TOPO, --merge and --overlay")


def _load_options(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in DESCRIPTION_OPTIONS}


def read_claimed_plan(path: str) -> Plans:
    """Return the plan or plans by size of a file, unverified; UsageError or PlanError if it cannot be read."""
    return parse_claimed_plan(read_plan_text(path), path)


def read_plan(path: str) -> Plans:
    """Return the verified plan of a file; errors as `read_claimed_plan`, and PlanError for a wrong plan."""
    return _verified(read_claimed_plan(path), path)


def read_plan_or_machine(options: argparse.Namespace) -> Plans | Topology:
    """Return the verified plan or the topology that ``PLAN.json|TOPO`` names, recognised by content.

    Options of a machine are not applied here, and refused beside a plan. A pipe is read once: a plan may come from
    stdin or from ``<(…)`` too.
    """
    _check_stdin(options)
    if isinstance(options.topo, Plans):
        verify_all(options.topo)
        return options.topo
    if isinstance(options.topo, Topology) or _read_before(options) is not None:
        return read_topology(options)
    path = Path(options.topo)
    if options.topo in library() or (options.topo != "-" and (path.is_dir() or not path.exists())):
        return read_topology(options)
    text = read_plan_text(options.topo)
    if is_plan(text):
        refuse_beside(options, "a plan file, which has settled it", dict.fromkeys(MACHINE_OPTIONS))
        return _verified(parse_claimed_plan(text, options.topo), options.topo)
    where = _place_words(options.topo)
    if _JOBS_FORMAT.search(text):
        raise UsageError(f"{where} is a file of jobs; topoplan simulate runs it under a --policy")
    refuse_unread(options)
    folder = "" if options.topo == "-" else str(path.parent)
    machine = load_text(text, where, Path(where).stem, folder=folder, **_load_options(options))
    return printable_machine(machine)


def is_plan(text: str) -> bool:
    """Return whether the text of a file is a plan."""
    return text.lstrip().startswith("{") and _PLAN_FORMAT.search(text) is not None


def parse_claimed_plan(text: str, path: str) -> Plans:
    """Parse the text of a file as `read_claimed_plan`."""
    where = _place_words(path)
    if not text.strip():
        raise UsageError(f"{where} is empty; {_REMEDY}")
    try:
        plan = parse_plan_file(text)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    return plan


def may_be_large(options: argparse.Namespace) -> bool:
    """Return whether TOPO may be a large cluster, or its plan: from options, or from a file."""
    if options.servers is not None or options.domain is not None:
        return True
    if not isinstance(options.topo, str):
        return not isinstance(options.topo, (Plans, Topology))
    return options.topo not in library() and Path(options.topo).is_file()


def large_cluster(options: argparse.Namespace, listed_only: Sequence[str]) -> ClusterByKind | None:
    """Return the cluster of TOPO if it has more than `MOST_LISTED` GPUs; None if one of the options needs its list."""
    listed = any(getattr(options, name) not in (None, False) for name in listed_only)
    of_machine = options.servers is not None or options.domain is not None
    if listed or (getattr(options, "channels", None) or "auto") not in CHANNELS_BY_KIND:
        return None
    if not of_machine and (not isinstance(options.topo, str) or options.topo in library()):
        return None
    if not of_machine and is_torus_name(options):
        return None
    return read_large(options, read_topology(options) if of_machine else None)


def read_large(options: argparse.Namespace, topology: Topology | None) -> ClusterByKind | None:
    """Return the cluster of more than `MOST_LISTED` GPUs, with its faults; None for another machine."""
    cluster = _from_file(options) if topology is None else requested_by_kind(options, topology)
    if cluster is None or cluster.size <= MOST_LISTED or cluster.servers < 2:
        return None
    return faulty_by_kind(options, cluster)


def requested_in_network(options: argparse.Namespace, cluster: ClusterByKind | None) -> ClusterByKind | None:
    """Return a large cluster with the switches of ``--in-network``, if it is given.

    None for one whose switches copy or add if it is listed: up to `MOST_LISTED_INSTEAD` GPUs.
    """
    which = options.in_network
    if cluster is None or (which is None and not cluster.merges):
        return cluster
    if cluster.size <= MOST_LISTED_INSTEAD:
        return None
    return cluster if which is None else cluster.with_in_network(which)


def _from_file(options: argparse.Namespace) -> ClusterByKind | None:
    given = (*DESCRIPTION_OPTIONS, *NETWORK_OPTIONS, "overlay")
    if any(getattr(options, name) is not None for name in given):
        return None
    return load_cluster_by_kind(options.topo)


def refuse_unread(options: argparse.Namespace, topology: Topology | None = None) -> None:
    """Raise UsageError for a cluster of more GPUs than `MOST_READ`, before its devices are listed.

    ``topology`` is that of TOPO, if it has been read. A torus of hosts has its own limit (`topoplan.reading.clusters`).
    """
    if topology is None and is_torus_name(options):
        return
    remedy = f"choose fewer servers; {BY_KIND_COMMANDS}"
    _refuse(_size_of_cluster(options, topology), MOST_READ, "a list of its devices", remedy)


def refuse_listing(options: argparse.Namespace, most: int, what: str, remedy: str) -> None:
    """Raise UsageError for a cluster of more than ``most`` GPUs, of which a command would list ``what``.

    The cluster is not listed for that. If GPUs are chosen (``--gpus``, ``--free``), their number counts.
    """
    name, size = _size_of_cluster(options)
    chosen = getattr(options, "gpus", None) or getattr(options, "free", None)
    _refuse((name, size if chosen is None else min(size, len(chosen))), most, what, remedy)


def _refuse(found: tuple[str, int], most: int, what: str, remedy: str) -> None:
    name, size = found
    if size > most:
        raise UsageError(
            f"a cluster must have at most {most:,} GPUs for {what}, got {size:,} ({name}); {remedy}"
        )


def _size_of_cluster(options: argparse.Namespace, topology: Topology | None = None) -> tuple[str, int]:
    """Return name and number of GPUs of the cluster of options or of a cluster file; ("", 0) for all else."""
    if options.servers is not None or options.domain is not None:
        return requested_size(options, read_topology(options) if topology is None else topology)
    if topology is not None or not isinstance(options.topo, str) or options.topo in library():
        return "", 0
    cluster = load_cluster_by_kind(options.topo)
    return ("", 0) if cluster is None else (cluster.name, cluster.size)


def is_torus_name(options: argparse.Namespace) -> bool:
    """Return whether TOPO is a name such as torus:100,100."""
    return isinstance(options.topo, str) and options.topo.startswith("torus:")


def server_number(cluster: ClusterByKind, name: str, option: str) -> int:
    """Return the number of the server that an option names; UsageError if the cluster has none of this name."""
    number, last = name.removeprefix("s"), cluster.servers - 1
    if name == number or not number.isdecimal() or int(number) > last:
        raise UsageError(f"{option} must name a server from s0 to s{last}, got {name[:40]!r}")
    return int(number)


def read_by_kind(text: str, path: str) -> PlanByKind | None:
    """Parse the plan of a cluster by kind; None for other files, PlanError for a wrong one."""
    if '"cluster"' not in text or not text.lstrip().startswith("{"):
        return None
    try:
        value = parse_object(text)
        if "cluster" not in value:
            return None
        from topoplan.plans.plan_by_kind import PlanByKind

        return PlanByKind.from_object(value)
    except PlanError as error:
        raise PlanError(f"{_place_words(path)}: {error}") from None


def _verified(plan: Plans, path: str) -> Plans:
    try:
        verify_all(plan)
    except PlanError as error:
        raise PlanError(
            f"{_place_words(path)}: wrong plan: {error}; make it again with topoplan plan"
        ) from None
    return plan


def _place_words(path: str) -> str:
    return "stdin" if path == "-" else path


def read_words(
    path: str, remedy: str, *, other: str = "", decode: Callable[[bytes], str] | None = None
) -> str:
    """Return the text of a file, or of stdin for ``-``; UsageError with a remedy, for a binary file ``other``."""
    try:
        return read_text(path, remedy, decode=decode)
    except TopologyError:
        raise UsageError(f"{_place_words(path)} is binary, not text; {other or remedy}") from None


def read_plan_text(path: str, remedy: str = _REMEDY) -> str:
    """Return the text of a file, or of stdin for ``-``, in UTF-8, or in UTF-16 with a byte order mark."""
    made = f"topoplan plan {path} -o F.json makes a plan"
    return read_words(path, made if path in library() else remedy, other="give another file")


def read_log(path: str) -> str:
    """Return the text of a log, or of stdin for ``-``; UsageError if it is unreadable, empty or binary.

    A text with a line break is the log itself.
    """
    if "\n" in path:
        return path
    text = read_words(path, "give the output of the test", decode=decode_log)
    if not text.strip():
        raise UsageError(f"{_place_words(path)} is empty; give the output of the test")
    return text


def read_demand(path: str) -> list[list[float]]:
    """Return the matrix of bytes in a file of a demand, ``{"bytes": [[...], ...]}``: row sends to column."""
    text = read_plan_text(path)
    value = _decoded(text, path)
    rows = value.get("bytes") if isinstance(value, dict) else None
    numbers = isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(amount, int | float) for amount in row) for row in rows
    )
    if not numbers or not isinstance(value, dict) or set(value) != {"bytes"}:
        raise UsageError(
            f'{_place_words(path)} must be a demand: give {{"bytes": [[0, 5], [7, 0]]}}, row sends to column'
        )
    return cast("list[list[float]]", rows)


def _decoded(text: str, path: str) -> object:
    try:
        return decode_json(text, _place_words(path))
    except TopologyError as error:
        raise UsageError(str(error)) from None


TREES_FORMAT = "topoplan.trees/1"


def read_trees(path: str) -> list[object]:
    """Return the trees of a file, ``{"format": "topoplan.trees/1", "trees": [...]}`` or the list alone.

    The items are checked by `topoplan.plan_from_trees`.
    """
    text = read_plan_text(path, "give a file of trees, as docs/file-formats.md has it")
    value = _decoded(text, path)
    if isinstance(value, dict):
        unknown = [key for key in value if key not in ("format", "trees")]
        if unknown:
            raise UsageError(
                f"{_place_words(path)}: key {unknown[0][:40]!r} is unknown; known are format and trees"
            )
        if value.get("format", TREES_FORMAT) != TREES_FORMAT:
            raise UsageError(
                f"{_place_words(path)}: format {value['format']!r} is not {TREES_FORMAT!r}"[:200]
            )
        value = value.get("trees")
    if not isinstance(value, list):
        raise UsageError(
            f'{_place_words(path)} holds no trees; give {{"trees": [[[0, 1], [1, 2]]]}}, edges [parent, child]'
        )
    return value


def printable_machine(topology: Topology) -> Topology:
    """Return the machine under a printable name: a file name may hold bytes that are not characters."""
    name = "".join(letter if letter.isprintable() else "?" for letter in topology.name)
    return topology if name == topology.name else replace(topology, name=name)


def host_names(text: str) -> tuple[str, ...]:
    """Return hosts from a list such as ``node[01-08,12]``, or from a file whose lines begin with one.

    A host on several lines, as of several ranks, counts once.

    >>> host_names("node[08-10],login")
    ('node08', 'node09', 'node10', 'login')
    """
    if not os.path.isfile(text):
        try:
            return expand_hostlist(text)
        except TopologyError as error:
            raise UsageError(f"--hosts: no such file, and {error}") from None
    lines = [line.split("#")[0].split() for line in read_text(text).splitlines()]
    try:
        found = tuple(dict.fromkeys(name for line in lines if line for name in expand_hostlist(line[0])))
    except TopologyError as error:
        raise TopologyError(f"{text}: {error}") from None
    if not found:
        raise UsageError(f"{text} names no host; write one on each line")
    return found
