"""What ``nvidia-smi nvlink -s`` and ``nvidia-smi nvlink -R`` list: each GPU's NVLinks, how fast, and where they lead.

One text may hold either listing or both, of one GPU or of all. ``-s`` lists every NVLink that a GPU has, with its
speed or ``<inactive>``. ``-R`` may leave out the inactive ones and number those that are up anew. So it is matched to
``-s`` by number where the numbers fit, and by order where it has as many lines as ``-s`` has links that are up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.nvlink_lines import (
    REMEDY,
    REMOTES,
    SPEEDS,
    FarEnd,
    Section,
    State,
    lines_of,
    read_sections,
)

_MATRIX = re.compile(r"(?m)^\W*GPU\d+\s+(?:X|GPU\d+|NV\d+|SYS|NODE|PHB|PXB|PIX)\b")


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
