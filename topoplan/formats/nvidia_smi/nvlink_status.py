"""What ``nvidia-smi nvlink -s`` and ``nvidia-smi nvlink -R`` list: each GPU's NVLinks, how fast, and where they lead.

One text may hold either listing or both, of one GPU or of all. ``-s`` lists every NVLink that a GPU has, with its
speed or ``<inactive>``. ``-R`` may leave out the inactive ones and number those that are up anew. So it is matched to
``-s`` by number where the numbers fit, and by order where it has as many lines as ``-s`` has links that are up.

Lines that begin with # and lines of other commands are skipped; a line that says something of a link and makes no
sense is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from topoplan.errors import TopologyError
from topoplan.hosts.host import bus_id

SPEEDS, REMOTES = "nvidia-smi nvlink -s", "nvidia-smi nvlink -R"

REMEDY = f"give the whole output of {SPEEDS} or {REMOTES}"

FarEnd = tuple[str, int | None]
"""Bus id of a far end, empty where it is hidden, and the number of the link there."""

State = float | FarEnd | None
"""What a listing says of a link: its GB/s, its far end, or that it is down."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_GPU = re.compile(r"\s*GPU\s+(\d{1,6})\s*:(.*)")
_UUID = re.compile(r"(.*?)\(\s*UUID\s*:\s*([^)]*)\).*")
_LINK = re.compile(r"\s*Link\s+(\d{1,4})\s*:\s*(.*?)\s*")
_NVML = re.compile(r".*?NVML\s*:\s*(.*)")
_SPEED = re.compile(r"(\S+)\s*GB/s", re.IGNORECASE)
_DOWN = re.compile(r"(Remote Device\s+)?<?\s*(inactive|n/a|disabled|down|off)\s*>?", re.IGNORECASE)
_REMOTE = re.compile(r"(?:Remote Device\s+)?(\S+:\S+?\.\w)(?:\s*:\s*Link\s+(\S+))?", re.IGNORECASE)
_HIDDEN = re.compile(r"[fF:.]+(?:\.0)?")


@dataclass(slots=True)
class Section:
    """The lines below one GPU line.

    Parameters
    ----------
    number : int
        Of the GPU.
    model, uuid : str
        As printed; empty where they are not, and where the uuid is not spelled out.
    tables : dict of str to dict of int to State
        By listing (`SPEEDS` or `REMOTES`), what it says of each link.
    none_up : bool
        The driver said that all links are inactive.
    supported : bool
        False where the driver said that the GPU has no NVLink.
    """

    number: int
    model: str
    uuid: str
    tables: dict[str, dict[int, State]] = field(default_factory=lambda: {SPEEDS: {}, REMOTES: {}})
    none_up: bool = False
    supported: bool = True


def read_sections(text: str) -> list[Section]:
    """The sections of a text, in its order.

    Raises
    ------
    TopologyError
        A line makes no sense, stands before any GPU line, or says something twice.

    Examples
    --------
    >>> section, = read_sections("GPU 3: V100\\n  Link 0: 25.781 GB/s\\n  Link 1: <inactive>")
    >>> section.tables[SPEEDS]
    {0: 25.781, 1: None}
    """
    sections: list[Section] = []
    links: list[tuple[int, str]] = []
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        line = _ESCAPE.sub("", raw)
        if line.lstrip().startswith("#"):
            continue
        heading, link, answer = _GPU.fullmatch(line), _LINK.fullmatch(line), _NVML.fullmatch(line)
        if heading:
            _read_links(sections[-1:], links)
            links = []
            sections.append(_section(int(heading[1]), heading[2]))
        elif (link or answer) and not sections:
            raise TopologyError(
                f"line {number} ({quoted(line)}) stands before any GPU line such as 'GPU 0: …'; {REMEDY}"
            )
        if link:
            links.append((int(link[1]), link[2]))
        elif answer:
            _read_answer(sections[-1], answer[1])
    _read_links(sections[-1:], links)
    return sections


def quoted(text: str) -> str:
    """A piece of input for a message."""
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _section(number: int, rest: str) -> Section:
    known = _UUID.fullmatch(rest)
    model = known[1] if known else rest.split("NVML", 1)[0]
    uuid = known[2].strip() if known else ""
    return Section(number, model.strip(), uuid if re.fullmatch(r"GPU-\S*\w", uuid) else "")


def _read_links(sections: list[Section], links: list[tuple[int, str]]) -> None:
    """Enter the link lines below the GPU line of the one section."""
    for section in sections:
        for (index, _), listing, state in zip(links, *_told(section.number, links), strict=True):
            if index in section.tables[listing]:
                raise TopologyError(
                    f"GPU {section.number}, link {index} is listed twice below one GPU line; {REMEDY}"
                )
            section.tables[listing][index] = state


def _told(gpu: int, links: list[tuple[int, str]]) -> tuple[list[str], list[State]]:
    """The listing and the state of each line; a line that only says inactive belongs to the listing around it."""
    states = [_state(f"GPU {gpu}, link {index}", value) for index, value in links]
    told = ["" if state is None else SPEEDS if isinstance(state, float) else REMOTES for state in states]
    latest = next((listing for listing in told if listing), SPEEDS)
    for i, listing in enumerate(told):
        latest = told[i] = listing or latest
    # A link of no speed is one that is down.
    return told, [None if state == 0.0 else state for state in states]


def _state(where: str, value: str) -> State:
    speed, remote = _SPEED.fullmatch(value), _REMOTE.fullmatch(value)
    if _DOWN.fullmatch(value):
        return None
    if speed:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,9})?", speed[1]):
            raise TopologyError(f"{where}: speed {quoted(speed[1])} is no number of GB/s; {REMEDY}")
        return float(speed[1])
    if not remote:
        raise TopologyError(
            f"{where}: {quoted(value)} is neither a speed such as 25.781 GB/s, nor <inactive>, nor a remote device; "
            f"{REMEDY}"
        )
    if remote[2] is not None and not re.fullmatch(r"\d{1,4}", remote[2]):
        raise TopologyError(f"{where}: remote link {quoted(remote[2])} is no number; {REMEDY}")
    if _HIDDEN.fullmatch(remote[1]):
        # What drivers print for a switch that this system cannot see.
        return "", None
    try:
        return bus_id(remote[1]), None if remote[2] is None else int(remote[2])
    except TopologyError as error:
        raise TopologyError(f"{where}: remote device {error}; {REMEDY}") from None


def _read_answer(section: Section, answer: str) -> None:
    """What the driver says in place of links."""
    if re.search("all links are inactive", answer, re.IGNORECASE):
        section.none_up = True
    elif re.search("not supported", answer, re.IGNORECASE):
        section.supported = False
    else:
        raise TopologyError(
            f"GPU {section.number}: the driver answered {quoted(answer)}; leave this GPU out of the listing, and take "
            "it out of the machine if it is dead"
        )


def lines_of(sections: list[Section], listing: str) -> Iterator[tuple[int, State]]:
    """Every link that a listing names in these sections, with what it says of it."""
    for section in sections:
        yield from section.tables[listing].items()


_MATRIX = re.compile(r"(?m)^[^\w\n]*GPU\d+\s+(?:X|GPU\d+|NV\d+|SYS|NODE|PHB|PXB|PIX)\b")


@dataclass(frozen=True, slots=True)
class NvlinkState:
    """One NVLink of a GPU.

    Parameters
    ----------
    index : int
        Its number on the GPU.
    active : bool
        It is up.
    speed : float or None
        GB/s per direction; None for a link that is down, and where no ``-s`` states it.
    remote : str
        Bus id of the far end (see `topoplan.hosts.host.bus_id`); empty where it is hidden or no ``-R`` states it.
    remote_link : int or None
        Number of the link at the far end.
    """

    index: int
    active: bool
    speed: float | None = None
    remote: str = ""
    remote_link: int | None = None


@dataclass(frozen=True, slots=True)
class GpuNvlinks:
    """The NVLinks of one GPU.

    Parameters
    ----------
    number : int
        Of the GPU, as nvidia-smi counts.
    model, uuid : str
        As printed; a uuid that is not spelled out is empty.
    links : tuple of NvlinkState
        In ascending order of their numbers.
    total : int or None
        NVLinks that the GPU has; None where those that are down may not be listed.
    """

    number: int
    model: str
    uuid: str
    links: tuple[NvlinkState, ...]
    total: int | None

    @property
    def active(self) -> tuple[NvlinkState, ...]:
        """The links that are up."""
        return tuple(link for link in self.links if link.active)


def parse_nvlink_status(text: str) -> tuple[GpuNvlinks, ...]:
    """Read listings of NVLinks.

    Parameters
    ----------
    text : str
        The output of ``nvidia-smi nvlink -s``, of ``nvidia-smi nvlink -R``, or both.

    Returns
    -------
    tuple of GpuNvlinks
        In ascending order of number; a GPU of which nothing is listed is left out.

    Raises
    ------
    TopologyError
        No GPU or no link is listed, a line makes no sense, or two lines contradict each other; the message names the
        GPU and the link.

    Examples
    --------
    >>> gpu, = parse_nvlink_status("GPU 3: Tesla V100 (UUID: GPU-1)\\n  Link 0: 25.781 GB/s\\n  Link 1: <inactive>")
    >>> gpu.number, gpu.model, gpu.total, [link.index for link in gpu.active], gpu.links[0].speed
    (3, 'Tesla V100', 2, [0], 25.781)
    """
    sections = read_sections(text)
    if not sections:
        if _MATRIX.search(text):
            raise TopologyError(
                f"this is the matrix of nvidia-smi topo -m, which is a machine; for the overlay {REMEDY}"
            )
        raise TopologyError(f"this is no listing of NVLinks (no line such as 'GPU 0: …'); {REMEDY}")
    numbers = sorted({section.number for section in sections})
    gpus = [_joined(number, [one for one in sections if one.number == number]) for number in numbers]
    listed = tuple(gpu for gpu in gpus if gpu is not None)
    if not listed:
        raise TopologyError(f"no NVLink is listed below the GPU lines; {REMEDY}")
    return listed


def _joined(number: int, sections: list[Section]) -> GpuNvlinks | None:
    """All that is said of one GPU; None if that is nothing."""
    model = _only(number, [section.model for section in sections])
    uuid = _only(number, [section.uuid for section in sections])
    speeds, remotes = _table(number, sections, SPEEDS), _table(number, sections, REMOTES)
    none_up = any(section.none_up for section in sections)
    unsupported = any(not section.supported for section in sections)
    states = [*speeds.values(), *remotes.values()]
    if (none_up or unsupported) and any(state is not None for state in states):
        raise TopologyError(
            f"GPU {number} has NVLinks that are up in one listing and none in another; take the listings at one time"
        )
    if states:
        return GpuNvlinks(number, model, uuid, _links(number, speeds, remotes), len(speeds) or None)
    return GpuNvlinks(number, model, uuid, (), 0 if unsupported else None) if none_up or unsupported else None


def _only(number: int, stated: list[str]) -> str:
    known = list(dict.fromkeys(text for text in stated if text))
    if len(known) > 1:
        raise TopologyError(
            f"GPU {number} is named twice, as {known[0]} and as {known[1]}; give listings of one machine"
        )
    return known[0] if known else ""


def _table(number: int, sections: list[Section], listing: str) -> dict[int, State]:
    """What all listings of one kind say of a GPU's links."""
    table: dict[int, State] = {}
    for index, state in lines_of(sections, listing):
        if table.setdefault(index, state) != state:
            raise TopologyError(
                f"GPU {number}, link {index}: {_said(table[index])} in one listing, {_said(state)} in another; "
                "take the listings at one time"
            )
    return table


def _said(state: State) -> str:
    if state is None:
        return "inactive"
    return f"{state:g} GB/s" if isinstance(state, float) else f"to {state[0] or 'a hidden device'}"


def _links(number: int, speeds: Mapping[int, State], remotes: Mapping[int, State]) -> tuple[NvlinkState, ...]:
    """Speeds and far ends side by side (see the head of this file)."""
    ends: Mapping[int, FarEnd] = {index: end for index, end in remotes.items() if isinstance(end, tuple)}
    if speeds:
        ends = _numbered_as_speeds(number, speeds, remotes, ends) if remotes else {}
    elif set(remotes) != set(range(len(remotes))):
        raise TopologyError(
            f"GPU {number}: {REMOTES} lists links {', '.join(map(str, sorted(remotes)))} and leaves out others; add "
            f"{SPEEDS}, which says whether they are down"
        )
    links = []
    for index, state in sorted((speeds or remotes).items()):
        speed = state if isinstance(state, float) else None
        links.append(NvlinkState(index, state is not None, speed, *ends.get(index, ("", None))))
    return tuple(links)


def _numbered_as_speeds(
    number: int, speeds: Mapping[int, State], remotes: Mapping[int, State], ends: Mapping[int, FarEnd]
) -> Mapping[int, FarEnd]:
    """The far ends by the link numbers of ``-s``."""
    up = [index for index, speed in sorted(speeds.items()) if speed is not None]
    if set(ends) == set(up) or (set(remotes) == set(speeds) and set(up) < set(ends)):
        return ends
    if len(ends) == len(remotes) == len(up):
        return dict(zip(up, (ends[index] for index in sorted(ends)), strict=True))
    raise TopologyError(
        f"GPU {number}: {SPEEDS} lists {len(up)} NVLinks that are up, {REMOTES} {len(ends)}; take both at one time"
    )
