"""Lines of ``nvidia-smi nvlink -s`` and ``-R``, read into sections: what stands below each GPU line.

Lines that begin with # and lines of other commands are skipped; a line that says something of a link and makes no
sense is refused. What several sections say of one GPU is put together in `topoplan.formats.nvidia_smi.nvlink_status`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
