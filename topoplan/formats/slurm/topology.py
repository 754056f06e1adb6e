"""Slurm's topology.conf and topology.yaml: which node hangs on which switch, or which nodes make a block.

::

    SwitchName=leaf1 Nodes=node[01-04]            BlockName=rack1 Nodes=node[01-18]
    SwitchName=leaf2 Nodes=node[05-08]            BlockName=rack2 Nodes=node[19-36]
    SwitchName=spine Switches=leaf[1-2]           BlockSizes=18

A topology.yaml holds several of these by name; one is taken. NVIDIA's topograph writes both files. ``scontrol show
topology`` prints the first with more keys (Level, BlockIndex, BlockSize), lists all nodes below a switch beside its
switches, and adds lines of aggregated blocks: a node is on the lowest switch that names it. LinkSpeed has no unit
(Slurm does not use it), and block sizes and aggregated blocks are for the scheduler, so none is taken over; a note says
so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.clusters.named_nodes import DEEPEST, NodeNetwork
from topoplan.errors import TopologyError, UsageError
from topoplan.formats.slurm.hostlist import by_number, expand
from topoplan.formats.slurm.yaml_subset import read_yaml

_CONF = re.compile(r"(?im)^[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock)[ \t]*=")
_YAML = re.compile(r"(?m)^(?:---[ \t]*\n)?[ \t]*-[ \t]+topology[ \t]*:")
_PAIR = re.compile(r"([A-Za-z]+)=(\S+)")
_NUMBER = re.compile(r"[0-9]{1,9}")

_CONF_KEYS = {
    "switchname": ("switches", "nodes", "linkspeed", "level"),
    "blockname": ("nodes", "blockindex", "blocksize"),
    "aggregatedblock": ("nodes", "blockindex", "blocksize"),
    "blocksizes": (),
}
_YAML_KEYS = {
    "topology": ("topology", "clusterdefault", "tree", "block", "flat"),
    "tree": ("switches",),
    "block": ("blocks", "blocksizes"),
    "switch": ("switch", "children", "nodes", "linkspeed"),
    "blocks": ("block", "nodes"),
}

ALL_NODES = "ALL"
"""What Slurm reads as all its nodes, and not as the name of one."""

NO_NODES = "(null)"
"""What scontrol prints for a list without a node."""

MOST_NAMES = 1 << 19
"""Most names in one file: more is a slip of the keyboard."""

LINK_SPEED = "LinkSpeed has no unit and is not used; --oversubscription says how wide uplinks are"

AGGREGATED = "aggregated blocks are for Slurm's scheduler and are not used"


@dataclass(frozen=True, slots=True)
class _Part:
    """A switch or a block as a line names it, with the lists below it."""

    name: str
    children: tuple[str, ...]
    nodes: tuple[str, ...]
    where: str


def is_slurm(text: str) -> bool:
    """Whether a text looks like one of the two files.

    Examples
    --------
    >>> is_slurm("# written by topograph\\nSwitchName=s1 Nodes=n[1-2]"), is_slurm("GPU0 GPU1")
    (True, False)
    """
    return bool(_CONF.search(text) or _YAML.search(text))


def parse_slurm(text: str, *, name: str = "", which: str = "") -> NodeNetwork:
    """The network that such a file describes, its nodes in the order in which Slurm lists them.

    Parameters
    ----------
    text : str
    name : str
        Of the network.
    which : str
        Of several topologies the one of this name; empty for the cluster's default, or the first.

    Raises
    ------
    TopologyError
        The text is no such file, or switches and nodes make no tree; says the line or the name.
    UsageError
        There is no topology of that name.

    Examples
    --------
    >>> found = parse_slurm("SwitchName=s1 Nodes=n[9-10]\\nSwitchName=s2 Nodes=n8\\nSwitchName=top Switches=s[1-2]")
    >>> found.switches, found.nodes
    ((('s1', 'top'), ('s2', 'top'), ('top', '')), (('n8', 's2'), ('n9', 's1'), ('n10', 's1')))
    """
    if _CONF.search(text):
        if which:
            raise UsageError(
                f"topology {which!r} is none of a topology.conf, which has one; leave the name out"
            )
        found = _from_conf(text)
    else:
        found = _from_yaml(text, which)
    return replace(
        found,
        name=name or "slurm",
        nodes=tuple(sorted(found.nodes, key=lambda pair: by_number(pair[0]))),
    )


def _from_conf(text: str) -> NodeNetwork:
    switches: list[_Part] = []
    blocks: list[_Part] = []
    notes: list[str] = []
    names = 0
    for number, line in _joined_lines(text):
        where = f"line {number}"
        given: dict[str, str] = {}
        written: dict[str, str] = {}
        for word in line.split():
            match = _PAIR.fullmatch(word)
            if match is None:
                raise TopologyError(f"{where}: {word[:60]!r} is no Key=value, such as Nodes=node[01-04]")
            if match[1].lower() in given:
                raise TopologyError(f"{where}: {match[1][:60]} stands there twice; write it once")
            given[match[1].lower()] = match[2]
            written[match[1].lower()] = match[1]
        kind = next(iter(given))
        if kind not in _CONF_KEYS:
            raise TopologyError(
                f"{where} begins with {written[kind][:60]}; a line begins with SwitchName, BlockName or BlockSizes"
            )
        for key in list(given)[1:]:
            if key not in _CONF_KEYS[kind]:
                raise TopologyError(
                    f"{where}: {written[key][:60]} does not belong to {written[kind]}; leave it out, or correct "
                    "its name"
                )
        if kind == "blocksizes":
            _check_sizes(given[kind].split(","), where)
            continue
        for key in ("level", "blockindex", "blocksize"):
            if key in given and not _NUMBER.fullmatch(given[key]):
                raise TopologyError(f"{where}: {written[key]} {given[key][:30]!r} is no whole number")
        if kind == "aggregatedblock":
            notes.append(AGGREGATED)
            continue
        if given.get("nodes") == NO_NODES and "switches" not in given:
            notes.append(f"{given[kind][:60]} has no nodes and is left out")
            continue
        part = _part(given[kind], given.get("switches"), given.get("nodes"), where)
        names = _counted_names(names, part)
        (switches if kind == "switchname" else blocks).append(part)
        if "linkspeed" in given:
            notes.append(LINK_SPEED)
    if switches and blocks:
        raise TopologyError(
            "switches and blocks stand in one topology.conf; Slurm reads one of them: give it alone"
        )
    return _network(switches or blocks, blocks=bool(blocks), notes=notes)


def _counted_names(names: int, part: _Part) -> int:
    """The number of names so far and of a part; too many are refused."""
    names += len(part.children) + len(part.nodes)
    if names > MOST_NAMES:
        raise TopologyError(f"{part.where}: the file makes more than {MOST_NAMES} names; look at its ranges")
    return names


def _joined_lines(text: str) -> list[tuple[int, str]]:
    """Lines without comments; one that ends with a backslash goes on in the next."""
    found: list[tuple[int, str]] = []
    begun: list[str] = []
    first = 0
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.split("#", 1)[0].rstrip()
        first = first if begun else number
        begun.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        if joined := " ".join(begun).strip():
            found.append((first, joined))
        begun = []
    if begun:
        raise TopologyError(f"line {first} goes on in a next one that is not there: the file has been cut")
    return found


def _part(name: str, children: str | None, nodes: str | None, where: str) -> _Part:
    if children is None and nodes is None:
        raise TopologyError(f"{where}: nothing is below {name[:60]}; give Nodes or Switches")
    if nodes is not None and nodes.strip().upper() == ALL_NODES:
        raise TopologyError(
            f"{where}: Nodes={nodes.strip()} stands for the nodes of slurm.conf, which are not known here; list them, "
            "as `scontrol show topology` does"
        )
    try:
        names = expand(name)
        lists = [() if text in (None, NO_NODES) else expand(text) for text in (children, nodes)]
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None
    if len(names) != 1:
        raise TopologyError(f"{where}: {name[:60]} names {len(names)} at once; give each a line of its own")
    return _Part(names[0], lists[0], lists[1], where)


def _check_sizes(sizes: Sequence[str], where: str) -> None:
    for size in sizes:
        if not re.fullmatch(r"[0-9]{1,6}", size.strip()) or not int(size):
            raise TopologyError(f"{where}: block size {size[:30]!r} is no whole number above zero")


def _network(parts: Sequence[_Part], *, blocks: bool, notes: Sequence[str]) -> NodeNetwork:
    names = {part.name for part in parts}
    above: list[tuple[str, str]] = []
    placed = {child for part in parts for child in part.children}
    for part in parts:
        for child in part.children:
            if child not in names:
                raise TopologyError(
                    f"{part.where}: switch {child} below {part.name} is defined nowhere; add its line, or correct its "
                    "name"
                )
    parents: dict[str, list[str]] = {}
    for part in parts:
        for child in part.children:
            parents.setdefault(child, []).append(part.name)
    for part in parts:
        above += [
            (part.name, parent) for parent in parents.get(part.name, [""] if part.name not in placed else [])
        ]
    homes: dict[str, list[str]] = {}
    for part in parts:
        for node in part.nodes:
            homes.setdefault(node, []).append(part.name)
    nodes = [(node, home) for node, named in homes.items() for home in _lowest(named, parents)]
    return NodeNetwork("", tuple(above), tuple(nodes), blocks, tuple(dict.fromkeys(notes)))


def _lowest(named: Sequence[str], parents: Mapping[str, Sequence[str]]) -> list[str]:
    """The switches that name a node without those that are above another one of them."""
    if len(named) == 1:
        return list(named)
    higher: set[str] = set()
    for switch in named:
        way = [switch]
        while len(way) <= DEEPEST and (up := parents.get(way[-1])):
            way.append(up[0])
        higher.update(way[1:])
    return [switch for switch in named if switch not in higher] or list(named)


def _from_yaml(text: str, which: str) -> NodeNetwork:
    value = read_yaml(text)
    if not isinstance(value, list):
        raise TopologyError("topology.yaml is a list of topologies, each beginning with - topology: NAME")
    found = [_keys(item, "topology", f"topology {number}") for number, item in enumerate(value)]
    named = [(str(one.get("topology")), one) for one in found]
    wanted = [one for one in named if one[0] == which] if which else named
    if not wanted:
        raise UsageError(
            f"topology {which!r} is none of the file's; use one of {', '.join(name for name, _ in named)[:200]}"
        )
    name, one = next(
        (pair for pair in wanted if str(pair[1].get("clusterdefault")).lower() == "true"), wanted[0]
    )
    where = f"topology {name[:60]}"
    kinds = [kind for kind in ("tree", "block", "flat") if kind in one]
    if len(kinds) != 1:
        raise TopologyError(
            f"{where} has {' and '.join(kinds) or 'no kind'}; it is one of tree, block and flat"
        )
    notes = [] if len(named) == 1 else [f"of {len(named)} topologies in the file {name} is taken"]
    if kinds[0] == "flat":
        raise TopologyError(
            f"{where} is flat and names no nodes; take another, or describe the cluster itself"
        )
    inner = _keys(one[kinds[0]], kinds[0], where)
    blocks = kinds[0] == "block"
    if blocks and "blocksizes" in inner:
        sizes = inner["blocksizes"]
        _check_sizes([str(size) for size in sizes] if isinstance(sizes, list) else [str(sizes)], where)
    listed = inner.get("blocks" if blocks else "switches")
    if not isinstance(listed, list) or not listed:
        raise TopologyError(
            f"{where} lists no {'blocks' if blocks else 'switches'}; the file may have been cut"
        )
    parts = []
    names = 0
    for number, item in enumerate(listed):
        keys = _keys(item, "blocks" if blocks else "switch", f"{where}: entry {number}")
        own = keys.get("block" if blocks else "switch")
        texts = [keys.get("children"), keys.get("nodes")]
        if not isinstance(own, str) or not all(text is None or isinstance(text, str) for text in texts):
            raise TopologyError(
                f"{where}: entry {number} needs a name, and its nodes or children as a text such as node[01-04]"
            )
        children, nodes = (text if isinstance(text, str) else None for text in texts)
        parts.append(_part(own, children, nodes, f"{where}: {own[:60]}"))
        names = _counted_names(names, parts[-1])
        notes += [LINK_SPEED] if "linkspeed" in keys else []
    return _network(parts, blocks=blocks, notes=notes)


def _keys(item: object, kind: str, where: str) -> Mapping[str, object]:
    """The keys of a mapping in lower case and without underscores; unknown ones are refused."""
    if not isinstance(item, dict):
        raise TopologyError(f"{where}: {kind} has no keys below it; the file may have been cut")
    found = {str(key).lower().replace("_", ""): value for key, value in item.items()}
    for key in found:
        if key not in _YAML_KEYS[kind]:
            raise TopologyError(f"{where}: key {key[:60]} is unknown; use {', '.join(_YAML_KEYS[kind])}")
    return found
