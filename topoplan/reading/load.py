"""Load a machine from a library name, a file, ``-`` for stdin, the text itself, or a networkx graph.

Files are recognised by content, never by extension: `topoplan.reading.registry` lists the formats, and imports a parser
when a text needs it. Slurm's topology.conf and topology.yaml state how nodes are joined, but not what a node is:
`load_network` parses them, and cluster JSON names them. Two texts add to the description of a machine, and are given as
``merge``: ``nvidia-smi topo -p2p`` and ``ibdev2netdev``.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import topoplan
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.routing import without_peer_access
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.reading.registry import FORMATS, FORMATS_IN_WORDS, SLURM, UNNAMED, Format

if TYPE_CHECKING:
    from topoplan.machine.cluster_by_kind import ClusterByKind
    from topoplan.machine.named_nodes import NodeNetwork
    from topoplan.reading.clusters import LoadMachine, LoadTree

_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}


def load(
    source: TopologyLike,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
    cable_gbps: float | None = None,
    merge: TopologyLike | None = None,
) -> Topology:
    """Return the machine that a name, a file, a text or a graph describes.

    Parameters
    ----------
    source : str, path, networkx.MultiDiGraph or Topology
        A name of the library (see `library`), a network by its parameters such as ``bcube:4,2`` or ``torus:3,3@10``
        (see `topoplan.reading.clusters`), a file, ``-`` for stdin, or the text of a description (it holds
        a line break or begins with ``{``, ``[`` or ``<``). A library name wins over a file of that name; write
        ``./name`` for the file. Or a ``MultiDiGraph`` of `Topology.to_networkx`; other graphs are read by
        `Topology.from_networkx`. A `Topology` is returned as it is.
    nvlink_gbps, pcie_gbps, socket_gbps : float, optional
        GB/s per direction of one NVLink, of one PCIe link and between CPUs: for nvidia-smi text, which states none, and
        in place of NCCL's for XML.
    cable_gbps : float, optional
        GB/s per direction of one cable of JACCL's files (default: 10, Thunderbolt 5).
    merge : as ``source``, optional
        Another description of the machine: NVLinks come from it, all else from ``source`` (see
        `topoplan.reading.pcie_tree`). ``nvlink_gbps`` then applies to it. Or the output of ``nvidia-smi topo -p2p`` or
        ``ibdev2netdev``, which adds peer access or leaves out NICs.

    Raises
    ------
    UsageError
        No such name or file, a file that cannot be read, or a bandwidth for a description that states its own.
    TopologyError
        The content is empty, binary, or not a valid machine; a file's message begins with its name.

    See Also
    --------
    topoplan.probe, topoplan.Topology.from_networkx, topoplan.cluster

    Examples
    --------
    >>> machine = load("dgx-2")
    >>> len(machine.gpus), machine.links[0].bandwidth
    (16, 150.0)
    >>> load("dgx-1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    topoplan.errors.UsageError: no machine 'dgx-1' in the library, and no such file; did you mean dgx-1v? ...
    """
    rates = {
        "nvlink_gbps": nvlink_gbps,
        "pcie_gbps": pcie_gbps,
        "socket_gbps": socket_gbps,
        "cable_gbps": cable_gbps,
    }
    if not isinstance(source, (str, os.PathLike)):
        from topoplan.machine.topology_json import object_of_graph

        machine = source if isinstance(source, Topology) else _checked(object_of_graph(source))
        added = None if merge is None else _addition(merge)
        of_merged = {} if merge is None or added else {"nvlink_gbps": None}
        _check_no_rates(rates | of_merged, f"a {type(source).__name__}")
        if merge is None:
            return machine
        if added:
            return added(machine)
        from topoplan.reading.pcie_tree import merge_nvlink

        return merge_nvlink(machine, load(merge, nvlink_gbps=nvlink_gbps))
    text, where, name, folder = _find(source)
    return load_text(text, where, name, folder=folder, single=False, merge=merge, **rates)


def _find(source: str | os.PathLike[str]) -> tuple[str, str, str, str]:
    """Return text, beginning of an error, name of the machine, and folder that paths in the text are relative to."""
    if isinstance(source, str):
        if source == "-":
            return read_text("-", "give a file"), "stdin", "stdin", ""
        if "\n" in source or source.lstrip().startswith(("{", "<", "[")):
            return source, "", "", ""
        if source in library():
            return (library_path() / f"{source}.json").read_text(encoding="utf-8"), source, source, ""
        if not os.path.exists(source):
            from topoplan.reading.clusters import regular_network

            if (made := regular_network(source)) is not None:
                return made.to_json(), source, source, ""
    path = os.fspath(source)
    if not os.path.exists(path):
        raise UsageError(_unknown(path))
    return read_text(path), path, Path(path).stem, os.path.dirname(path)


def load_text(
    text: str,
    where: str = "",
    name: str = "",
    *,
    folder: str = "",
    single: bool = False,
    merge: TopologyLike | None = None,
    **rates: float | None,
) -> Topology:
    """Return the machine that a text describes; parameters, rates among them, and errors are those of `load`.

    ``where`` begins an error, ``name`` is for a machine whose text has none, paths in cluster JSON are relative to
    ``folder``, and ``single`` refuses cluster JSON.
    """
    if merge is None:
        return _read_machine(text, where, name, rates, folder=folder, single=single)
    if where == "stdin" and merge == "-":
        raise UsageError("stdin holds one description; give --merge a file")
    if added := _addition(merge):
        return added(_read_machine(text, where, name, rates, folder=folder, single=single))
    from topoplan.reading.pcie_tree import gpu_bus_ids, merge_nvlink

    other = load(merge, nvlink_gbps=rates.pop("nvlink_gbps", None))
    topology = _read_machine(
        text, where, name, rates, folder=folder, single=single, merged=True, gpu_ids=gpu_bus_ids(other)
    )
    return merge_nvlink(topology, other)


def _read_machine(
    text: str,
    where: str,
    name: str,
    rates: Mapping[str, float | None],
    *,
    folder: str,
    single: bool,
    merged: bool = False,
    gpu_ids: Sequence[str] = (),
) -> Topology:
    """Return the machine of one description; ``merged`` with another one, ``gpu_ids`` are that one's bus ids."""
    try:
        if not (form := format_of(text)):
            raise TopologyError(f"the content is empty; give {FORMATS_IN_WORDS}")
        if form.key == "json":
            _check_no_rates(rates, "topology JSON")
            return _from_json(text, folder, single)
        topology = _machine_of(form, text, rates, xgmi_optional=merged, gpu_ids=gpu_ids, known=_amd_machines)
    except (TopologyError, UsageError) as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None
    topology = with_capable(topology)
    named = form.key == "nccl" and topology.name != UNNAMED
    return replace(topology, name=name) if name and not named else topology


def _machine_of(form: Format, text: str, rates: Mapping[str, float | None], **extras: object) -> Topology:
    """Return the machine of a text of another format than ours; refuse rates that its parser does not take."""
    if not form.parser:
        raise UsageError(
            f"it is the output of {form.printed_by}: {form.remedy}" if form.key not in SLURM else form.remedy
        )
    _check_no_rates(
        {rate: value for rate, value in rates.items() if rate not in form.rates},
        f"the output of {form.printed_by}",
        "does not take these bandwidths",
    )
    module, _, name = form.parser.partition(":")
    parse = cast("Callable[..., Topology]", getattr(import_module(f"topoplan.reading.{module}"), name))
    return parse(
        text,
        **{name: extras[name] for name in form.extras},
        **{rate: rates.get(rate) for rate in form.rates},
    )


def format_of(text: str) -> Format | None:
    """Return the format of a text; None if it is empty.

    >>> found = format_of("rocep1s0f0 port 1 ==> enp1s0f0np0 (Up)")
    >>> found.printed_by if found else ""
    'ibdev2netdev'
    """
    text = text.lstrip("\ufeff \t\r\n")
    return next(one for one in FORMATS if re.search(one.pattern, text)) if text else None


def form_of(text: str) -> str:
    """Return the key of a text's format; nothing for an empty text."""
    found = format_of(text)
    return found.key if found else ""


def _addition(merge: TopologyLike) -> Callable[[Topology], Topology] | None:
    """Return what applies a text that adds to a machine, peer access or the state of NICs; None for a machine."""
    if not isinstance(merge, str | os.PathLike) or merge == "-":
        return None
    if "\n" not in str(merge) and not os.path.isfile(merge):
        return None
    text, where, _, _ = _find(merge)
    form = form_of(text)
    if form == "ibdev2netdev":
        from topoplan.reading.rdma_ports import apply_ibdev2netdev as apply
    elif form == "topo -p2p":
        from topoplan.reading.nvidia_smi_topology import apply_access_table as apply
    else:
        return None

    def added(machine: Topology) -> Topology:
        try:
            return apply(machine, text)
        except (TopologyError, UsageError) as error:
            raise type(error)(f"{where}: {error}" if where else str(error)) from None

    return added


def _amd_machines() -> list[Topology]:
    return [
        load(name)
        for name in library()
        if '"model": "MI' in (library_path() / f"{name}.json").read_text(encoding="utf-8")
    ]


def load_network(source: str | os.PathLike[str], *, which: str = "") -> NodeNetwork | None:
    """Parse Slurm's topology.conf or topology.yaml, given as in `load`; None if the text is neither.

    ``which`` selects one of several topologies by its name. Errors are those of `load`.
    """
    text, where, name, _ = _find(source)
    if form_of(text) not in SLURM:
        return None
    from topoplan.reading.slurm import parse_slurm

    try:
        return parse_slurm(text, name=name, which=which)
    except (TopologyError, UsageError) as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _check_no_rates(
    rates: Mapping[str, float | None], what: str, why: str = "states its own bandwidths"
) -> None:
    """Refuse bandwidths that would have no effect."""
    given = [
        f"{rate} (--{rate.removesuffix('_gbps')}-bandwidth)"
        for rate, value in rates.items()
        if value is not None
    ]
    if given:
        raise UsageError(f"{what} {why}; leave out {' and '.join(given)}")


def library() -> tuple[str, ...]:
    """Return the sorted names of the machines that come with topoplan."""
    entries = (entry.name for entry in library_path().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in entries if name.endswith(".json")))


def library_path() -> Traversable:
    """Return the library's folder: package data in a wheel, ``topologies/`` beside the package in a checkout."""
    packaged = files(topoplan) / "topologies"
    if packaged.is_dir():
        return packaged
    checkout = Path(topoplan.__file__).resolve().parents[1] / "topologies"
    if checkout.is_dir():
        return checkout
    raise UsageError(f"the library of machines is not at {checkout}; install topoplan again")


def _unknown(path: str) -> str:
    from topoplan.reading.clusters import REGULAR_NETWORK_FORMS

    names = library()
    near = difflib.get_close_matches(path.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"no machine {path[:200]!r} in the library, and no such file; {hint}the library has {', '.join(names)}, "
        f"and networks by parameters are {', '.join(REGULAR_NETWORK_FORMS)}"
    )


def read_text(
    path: str, give: str = "give another file", *, decode: Callable[[bytes], str] | None = None
) -> str:
    """Return the text of a file, or of stdin for ``-``; ``give`` ends the message if it cannot be read.

    ``decode`` is `decode_text` if it is None; its TopologyError names the file.
    """
    where = "stdin" if path == "-" else path
    if path == "-" and sys.stdin is None:
        raise UsageError("stdin is closed; give a file")
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{where} cannot be read: {getattr(error, 'strerror', None) or error}; {give}"
        ) from None
    try:
        return (decode or decode_text)(content)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None


def decode_text(content: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with its mark; a TopologyError if it is binary."""
    mark = next((mark for mark in _BYTE_ORDER_MARKS if content.startswith(mark)), b"")
    try:
        text = content.decode(_BYTE_ORDER_MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise TopologyError(f"the content is binary, not text; give {FORMATS_IN_WORDS}")
    return text


def decode_log(content: bytes) -> str:
    """Return the text of a log, as `decode_text`, but with stray bytes replaced and runs of NUL removed.

    Processes that write at once leave cut characters, rotation and shared file systems leave NULs, and PowerShell may
    write UTF-16 without a mark. More than one byte in ten that belongs to no text is a TopologyError.

    >>> decode_log(b"a\\0\\0\\xffb, and many other letters"), decode_log("n1".encode("utf-16-le"))
    ('a\ufffdb, and many other letters', 'n1')
    """
    try:
        return decode_text(content)
    except TopologyError as error:
        for place, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            half = content[place::2]
            if half and half.count(0) > 0.9 * len(half):
                return content.decode(encoding, errors="replace").lstrip("\ufeff")
        text = content.replace(b"\0", b"").decode("utf-8", errors="replace")
        stray = sum(text.count(chr(code)) for code in (*range(7), 0xFFFD))
        if not text or stray > len(text) / 10:
            raise error from None
        return text


def _from_json(text: str, folder: str, single: bool) -> Topology:
    from topoplan.machine.topology_json import decode_json

    value = decode_json(text)
    if not _is_cluster(value):
        return _checked(value)
    from topoplan.reading.clusters import cluster_from_object

    if single:
        raise TopologyError("it is a cluster; a server of a cluster must be a single machine")
    return cluster_from_object(value, *_readers(folder))


def _is_cluster(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and str(value.get("format")).startswith("topoplan.cluster/")


def _readers(folder: str) -> tuple[LoadMachine, LoadTree]:
    """Return what reads the machines and the tree that a cluster file in a folder names."""

    def load_machine(name: str, nvlink_gbps: float | None, pcie_gbps: float | None) -> Topology:
        if name in library():
            return load(name, nvlink_gbps=nvlink_gbps, pcie_gbps=pcie_gbps)
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            raise UsageError(_unknown(name))
        return load_text(
            read_text(path), name, Path(path).stem, single=True, nvlink_gbps=nvlink_gbps, pcie_gbps=pcie_gbps
        )

    def load_tree(name: str) -> NodeNetwork:
        found = load_network(os.path.join(folder, name))
        if found is None:
            raise TopologyError(f"network: {name} is not a topology.conf or topology.yaml of Slurm")
        return found

    return load_machine, load_tree


def load_cluster_by_kind(source: str | os.PathLike[str]) -> ClusterByKind | None:
    """Return the cluster of a cluster file, or a torus, by kinds of servers; None for others, named nodes and helpers.

    ``source`` is a path, a name such as ``torus:100,100``, or the text of a file, as for `load`. Errors are those of
    `load`.
    """
    from topoplan.machine.topology_json import decode_json

    if isinstance(source, str) and not os.path.exists(source):
        from topoplan.reading.clusters import torus_by_kind

        if (made := torus_by_kind(source)) is not None:
            return made
    if source == "-" or (isinstance(source, str) and source in library()):
        return None
    # A pipe is read once, by `load`.
    if not os.path.isfile(source) and not str(source).lstrip().startswith("{"):
        return None
    text, where, _, folder = _find(source)
    if form_of(text) != "json" or '"topoplan.cluster/' not in text:
        return None
    try:
        value = decode_json(text)
        if not _is_cluster(value):
            return None
        from topoplan.reading.clusters import by_kind_from_object

        return by_kind_from_object(value, *_readers(folder))
    except (TopologyError, UsageError) as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _checked(value: object) -> Topology:
    """Return the machine of an object; refuse a switch without links, which have been forgotten."""
    from topoplan.machine.topology_json import topology_from_object

    topology = topology_from_object(value)
    linked = {end for link in topology.links for end in (link.src, link.dst)}
    for device in topology.devices:
        if device.kind in ("nvswitch", "switch") and device.name not in linked:
            raise TopologyError(
                f"{device.name} is a switch without ports: no link names it; add its links, or leave it out"
            )
    return without_peer_access(topology)
