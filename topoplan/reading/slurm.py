"""Read Slurm's topology.conf, topology.yaml and hostlists.

::

    SwitchName=leaf1 Nodes=node[01-04]            BlockName=rack1 Nodes=node[01-18]
    SwitchName=leaf2 Nodes=node[05-08]            BlockName=rack2 Nodes=node[19-36]
    SwitchName=spine Switches=leaf[1-2]           BlockSizes=18

A topology.yaml holds several of these by name; one is taken. NVIDIA's topograph writes both files. ``scontrol show
topology`` prints the first with more keys (Level, BlockIndex, BlockSize), lists all nodes below a switch beside its
switches, and adds lines of aggregated blocks: a node is on the lowest switch that names it. LinkSpeed has no unit
(Slurm does not use it), and block sizes and aggregated blocks are for the scheduler; they are ignored with a note.

A hostlist is ``node[01-08,12],gpu-a``. A bracket holds numbers and ranges, with leading zeros if the names have them.
A name may have several brackets; the last one varies fastest.

YAML is composed by PyYAML; tags, aliases and repeated keys are refused with their line numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.named_nodes import DEEPEST, NodeNetwork
from topoplan.reading.load import form_of

MOST_HOSTS = 65_536
"""Largest number of names in one list: more is a typing error."""

LONGEST_NAME = 255
"""Characters of the longest name, as of a host in DNS."""

_NAME = re.compile(r"(?:[A-Za-z0-9._:/+-]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PARTS = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_ENDS_IN_DIGITS = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names of a hostlist, in its order; raise a TopologyError that quotes the part that is wrong.

    >>> expand_hostlist("node[08-10,12],login")
    ('node08', 'node09', 'node10', 'node12', 'login')
    >>> expand_hostlist("r[1-2]n[0-1]")
    ('r1n0', 'r1n1', 'r2n0', 'r2n1')
    """
    names: list[str] = []
    for word in _words(text):
        if not _NAME.fullmatch(word):
            raise TopologyError(
                f"{word[:60]!r} is not a list of names; write it as node[01-08,12] or node1,node2"
            )
        parts = _PARTS.findall(word)
        if sum(len(part) for part in parts if not part.startswith("[")) + 18 * word.count("[") > LONGEST_NAME:
            raise TopologyError(
                f"a name that begins with {word[:40]!r} has more than {LONGEST_NAME} characters; look at its commas"
            )
        choices = [
            _numbers(part, word, MOST_HOSTS - len(names)) if part[0] == "[" else [part] for part in parts
        ]
        if len(names) + prod(len(choice) for choice in choices) > MOST_HOSTS:
            raise _too_many(word)
        names += ["".join(parts) for parts in product(*choices)]
    return tuple(names)


def _words(text: str) -> list[str]:
    """Split a list at the commas outside of brackets."""
    whole = text.strip()
    words: list[str] = []
    start = depth = 0
    for found in re.finditer(r"[\[\],]", whole):
        depth += (found[0] == "[") - (found[0] == "]")
        if found[0] == "," and depth == 0:
            words.append(whole[start : found.start()].strip())
            start = found.end()
    if depth:
        raise TopologyError(f"{whole[:60]!r} has a bracket that is not closed; end it with ]")
    return [*words, whole[start:].strip()]


def _numbers(part: str, word: str, most: int) -> list[str]:
    """Return the numbers in a bracket, at most ``most``."""
    found: list[str] = []
    for piece in part[1:-1].split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise TopologyError(f"{word[:60]!r}: {piece[:30]!r} is not a number or a range such as 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise TopologyError(f"{word[:60]!r}: the range {piece[:40]} runs backwards")
        if len(found) + int(last) - int(first) >= most:
            raise _too_many(word)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _too_many(word: str) -> TopologyError:
    return TopologyError(f"{word[:60]!r} makes more than {MOST_HOSTS} names; look at its ranges")


def fold_hostlist(names: Sequence[str]) -> str:
    """Return a hostlist of the names in their order; runs of consecutive numbers become ranges.

    >>> fold_hostlist(["node08", "node09", "node10", "node03", "login"])
    'node[08-10,03],login'
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        match = _ENDS_IN_DIGITS.fullmatch(name)
        stem, digits = (match[1], match[2]) if match else (name, "")
        if groups and groups[-1][0] == stem and digits and groups[-1][1]:
            first, last = groups[-1][1][-1]
            if int(digits) == int(last) + 1 and digits == str(int(last) + 1).zfill(len(first)):
                groups[-1][1][-1] = (first, digits)
            else:
                groups[-1][1].append((digits, digits))
        else:
            groups.append((stem, [(digits, digits)] if digits else []))
    return ",".join(_written(stem, runs) for stem, runs in groups)


def _written(stem: str, runs: Sequence[tuple[str, str]]) -> str:
    if not runs:
        return stem
    parts = [first if first == last else f"{first}-{last}" for first, last in runs]
    return f"{stem}{parts[0]}" if len(runs) == 1 and "-" not in parts[0] else f"{stem}[{','.join(parts)}]"


def by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names as Slurm lists them: runs of digits by their value."""
    return tuple(
        (1, int(part), part) if part.isdigit() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", name)
    )


_DEEPEST = 50


def read_yaml(text: str) -> object:
    """Parse lists, mappings and strings; an empty value is None. A TopologyError names the line that is refused."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "topology.yaml needs PyYAML, which is not installed: pip install 'topoplan[yaml]'"
        ) from None
    try:
        root = yaml.compose(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise TopologyError(
            f"line {line}: the YAML cannot be parsed: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise TopologyError(f"the YAML cannot be parsed: {' '.join(str(error).split())}"[:200]) from None
    if root is None:
        raise TopologyError("the YAML is empty")
    seen: set[int] = set()

    def value_of(node: yaml.Node, depth: int) -> object:
        where = f"line {node.start_mark.line + 1}"
        if depth > _DEEPEST:
            raise TopologyError(f"{where}: lists and keys are nested more than {_DEEPEST} deep")
        if id(node) in seen:
            raise TopologyError(f"{where}: an alias repeats what an anchor names; write it out")
        seen.add(id(node))
        if not node.tag.endswith((":str", ":seq", ":map")):
            raise TopologyError(f"{where}: {node.tag[:60]} is a tag, and Slurm has none; write plain text")
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, object] = {}
            for key, value in node.value:
                name, line = value_of(key, depth + 1), key.start_mark.line + 1
                if not isinstance(name, str):
                    raise TopologyError(f"line {line}: a key must be a text; write it as in nodes: n1")
                if name in found:
                    raise TopologyError(f"line {line}: key {name[:60]} occurs twice; write it once")
                found[name] = value_of(value, depth + 1)
            return found
        return None if node.value == "" and not node.style else str(node.value)

    return value_of(root, 0)


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
"""Slurm's word for all its nodes; not the name of a node."""

NO_NODES = "(null)"
"""Printed by scontrol for a list without nodes."""

MOST_NAMES = 1 << 19
"""Largest number of names in one file: more is a typing error."""

LINK_SPEED = "LinkSpeed has no unit and is not used; --oversubscription says how wide uplinks are"

AGGREGATED = "aggregated blocks are for Slurm's scheduler and are not used"


@dataclass(frozen=True, slots=True)
class _TreePart:
    """A switch or a block as a line names it, with the lists below it."""

    name: str
    children: tuple[str, ...]
    nodes: tuple[str, ...]
    where: str


def parse_slurm(text: str, *, name: str = "", which: str = "") -> NodeNetwork:
    """Return the network that a topology file describes, its nodes in the order in which Slurm lists them.

    ``which`` selects one of several topologies by its name; if it is empty, the cluster's default or the first is
    taken. A TopologyError names the line or the switch that is wrong, a UsageError a topology that does not exist.
    """
    if form_of(text) == "topology.conf":
        if which:
            raise UsageError(
                f"topology {which!r} is not in a topology.conf, which holds one without a name; leave the name out"
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
    switches: list[_TreePart] = []
    blocks: list[_TreePart] = []
    notes: list[str] = []
    names = 0
    for number, line in _joined_lines(text):
        where = f"line {number}"
        given: dict[str, str] = {}
        written: dict[str, str] = {}
        for word in line.split():
            match = _PAIR.fullmatch(word)
            if match is None:
                raise TopologyError(f"{where}: {word[:60]!r} is not Key=value, such as Nodes=node[01-04]")
            if match[1].lower() in given:
                raise TopologyError(f"{where}: {match[1][:60]} occurs twice; write it once")
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
                raise TopologyError(
                    f"{where}: {written[key]} must be a whole number, got {given[key][:30]!r}"
                )
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


def _counted_names(names: int, part: _TreePart) -> int:
    """Return the number of names including those of ``part``; raise if it is above `MOST_NAMES`."""
    names += len(part.children) + len(part.nodes)
    if names > MOST_NAMES:
        raise TopologyError(f"{part.where}: the file makes more than {MOST_NAMES} names; look at its ranges")
    return names


def _joined_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines without comments; a backslash at the end of a line joins it to the next one."""
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
        raise TopologyError(f"line {first} ends with a backslash, but no line follows: the file has been cut")
    return found


def _part(name: str, children: str | None, nodes: str | None, where: str) -> _TreePart:
    if children is None and nodes is None:
        raise TopologyError(f"{where}: nothing is below {name[:60]}; give Nodes or Switches")
    if nodes is not None and nodes.strip().upper() == ALL_NODES:
        raise TopologyError(
            f"{where}: Nodes={nodes.strip()} stands for the nodes of slurm.conf, which are not known here; list them, "
            "as `scontrol show topology` does"
        )
    try:
        names = expand_hostlist(name)
        lists = [() if text in (None, NO_NODES) else expand_hostlist(text) for text in (children, nodes)]
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None
    if len(names) != 1:
        raise TopologyError(f"{where}: {name[:60]} names {len(names)} at once; give each a line of its own")
    return _TreePart(names[0], lists[0], lists[1], where)


def _check_sizes(sizes: Sequence[str], where: str) -> None:
    for size in sizes:
        if not re.fullmatch(r"[0-9]{1,6}", size.strip()) or not int(size):
            raise TopologyError(f"{where}: block size must be a whole number above 0, got {size[:30]!r}")


def _network(parts: Sequence[_TreePart], *, blocks: bool, notes: Sequence[str]) -> NodeNetwork:
    names = {part.name for part in parts}
    parents: dict[str, list[str]] = {}
    for part in parts:
        for child in part.children:
            if child not in names:
                raise TopologyError(
                    f"{part.where}: switch {child} below {part.name} is defined nowhere; add its line, or correct its "
                    "name"
                )
            parents.setdefault(child, []).append(part.name)
    above = [(part.name, parent) for part in parts for parent in parents.get(part.name, [""])]
    homes: dict[str, list[str]] = {}
    for part in parts:
        for node in part.nodes:
            homes.setdefault(node, []).append(part.name)
    nodes = [(node, home) for node, named in homes.items() for home in _lowest(named, parents)]
    return NodeNetwork("", tuple(above), tuple(nodes), blocks, tuple(dict.fromkeys(notes)))


def _lowest(named: Sequence[str], parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the switches of ``named`` that are not above another one of them."""
    if len(named) == 1:
        return list(named)
    higher: set[str] = set()
    for switch in named:
        path = [switch]
        while len(path) <= DEEPEST and (up := parents.get(path[-1])):
            path.append(up[0])
        higher.update(path[1:])
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
            f"topology {which!r} is not in the file; use one of {', '.join(name for name, _ in named)[:200]}"
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
    """Return a mapping with its keys in lower case and without underscores; unknown keys are refused."""
    if not isinstance(item, dict):
        raise TopologyError(f"{where}: {kind} has no keys below it; the file may have been cut")
    found = {str(key).lower().replace("_", ""): value for key, value in item.items()}
    for key in found:
        if key not in _YAML_KEYS[kind]:
            raise TopologyError(f"{where}: key {key[:60]} is unknown; use {', '.join(_YAML_KEYS[kind])}")
    return found
