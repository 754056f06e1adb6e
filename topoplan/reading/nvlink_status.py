"""Read ``nvidia-smi nvlink -s`` and ``-R``, and match the listed GPUs to those of a topology.

One text may hold either listing or both, of one GPU or of all. ``-s`` lists every NVLink that a GPU has, with its
speed or ``<inactive>``. ``-R`` may leave out the inactive ones and number the others anew. It is matched to ``-s`` by
number if the numbers fit, and by order if it has as many lines as ``-s`` has links that are up. Lines that begin with
# and lines of other commands are skipped; a line about a link that cannot be parsed is refused.

GPU n of a listing is ``gpu<n>``, or the n-th GPU if GPUs have other names. A GPU may list more NVLinks than the
topology gives it: some are not wired, and ``nvidia-smi topo -m`` leaves out links that were down. It may not list
fewer, or have more that are up.

A driver prints the signalling rate (25.781 GB/s for a V100, 26.562 for an H100), topologies state nominal or
effective ones. So a link is slow if it is below the fastest of all listed links of this model, or below the nominal
rate of the generation if even the fastest is more than a tenth below that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.machine.hardware import MOST_LINKS, GpuGeneration, compute_capability, generation_of
from topoplan.machine.host import bus_id
from topoplan.machine.topology import Device, Topology
from topoplan.units import exact

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
class ListingSection:
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


def read_sections(text: str) -> list[ListingSection]:
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
    sections: list[ListingSection] = []
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


def _section(number: int, rest: str) -> ListingSection:
    known = _UUID.fullmatch(rest)
    model = known[1] if known else rest.split("NVML", 1)[0]
    uuid = known[2].strip() if known else ""
    return ListingSection(number, model.strip(), uuid if re.fullmatch(r"GPU-\S*\w", uuid) else "")


def _read_links(sections: list[ListingSection], links: list[tuple[int, str]]) -> None:
    """Enter the link lines below the GPU line of the one section."""
    for section in sections:
        for (index, _), listing, state in zip(
            links, *_listings_and_states(section.number, links), strict=True
        ):
            if index in section.tables[listing]:
                raise TopologyError(
                    f"GPU {section.number}, link {index} is listed twice below one GPU line; {REMEDY}"
                )
            section.tables[listing][index] = state


def _listings_and_states(gpu: int, links: list[tuple[int, str]]) -> tuple[list[str], list[State]]:
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


def _read_answer(section: ListingSection, answer: str) -> None:
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


def lines_of(sections: list[ListingSection], listing: str) -> Iterator[tuple[int, State]]:
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
        Bus id of the far end (see `topoplan.machine.host.bus_id`); empty where it is hidden or no ``-R`` states it.
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


def _joined(number: int, sections: list[ListingSection]) -> GpuNvlinks | None:
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


def _table(number: int, sections: list[ListingSection], listing: str) -> dict[int, State]:
    """What all listings of one kind say of a GPU's links."""
    table: dict[int, State] = {}
    for index, state in lines_of(sections, listing):
        if table.setdefault(index, state) != state:
            raise TopologyError(
                f"GPU {number}, link {index}: {_state_text(table[index])} in one listing, {_state_text(state)} in "
                "another; "
                "take the listings at one time"
            )
    return table


def _state_text(state: State) -> str:
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


SLOW_BELOW = Fraction(9, 10)
"""Share of the nominal rate below which all links of a listing are slow."""

_PRODUCT = re.compile(r"\b((?:GH|GB|MI|[PVAHBLTK])\d{1,4})[A-Z]?\b|\bRTX (\d{4})\b")


def product_name(model: str) -> str:
    """The product that a model text names, empty where none is recognised.

    Examples
    --------
    >>> [product_name(text) for text in ("Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "GeForce RTX 3090", "GPU")]
    ['V100', 'H100', '3090', '']
    """
    match = _PRODUCT.search(model)
    return (match[1] or match[2]) if match else ""


def generation(model: str) -> GpuGeneration | None:
    """Its generation, None where it is not known."""
    capability = compute_capability(model)
    return None if capability is None else generation_of(capability)


def speed_shares(gpus: Sequence[GpuNvlinks]) -> dict[tuple[int, int], Fraction]:
    """What share of its normal speed each link that is up runs at, at most 1, by GPU and link; 1 where none is stated.

    Examples
    --------
    >>> from topoplan.reading.nvlink_status import parse_nvlink_status
    >>> lines = ["GPU 0: Tesla V100-SXM2-32GB", "Link 0: 25.781 GB/s", "Link 1: 25.781 GB/s", "Link 2: 12.8905 GB/s"]
    >>> [str(share) for share in speed_shares(parse_nvlink_status("\\n".join(lines))).values()]
    ['1', '1', '1/2']
    """
    normal: dict[str, Fraction] = {}
    for gpu in gpus:
        speeds = [exact(link.speed) for link in gpu.active if link.speed is not None]
        normal[_link_class(gpu)] = max(normal.get(_link_class(gpu), Fraction(0)), *speeds, Fraction(0))
    for gpu in gpus:
        made = generation(gpu.model)
        if made and normal[_link_class(gpu)] < SLOW_BELOW * exact(made.nvlink):
            normal[_link_class(gpu)] = exact(made.nvlink)
    return {
        (gpu.number, link.index): Fraction(1)
        if link.speed is None
        else min(Fraction(1), exact(link.speed) / normal[_link_class(gpu)])
        for gpu in gpus
        for link in gpu.active
    }


def _link_class(gpu: GpuNvlinks) -> str:
    """What GPUs of equal links have in common."""
    return product_name(gpu.model) or gpu.model


MATCHING_REMEDY = "the listing is of another machine; give that of this one"


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU of which a listing says how its NVLinks are.

    Parameters
    ----------
    name : str
        Of the device.
    wires : dict of str to int
        NVLinks that the topology gives it, by device at the far end.
    up : tuple of (str, Fraction)
        For each link that is up, the bus id of its far end, empty if that is hidden, and the share of its normal
        speed at which it runs.
    unwired : int
        Links that the GPU lists beyond those that the topology gives it; none of them is up.
    """

    name: str
    wires: dict[str, int]
    up: tuple[tuple[str, Fraction], ...]
    unwired: int

    @property
    def dead(self) -> int:
        """Links that the topology has and that are down."""
        return sum(self.wires.values()) - len(self.up)

    @property
    def slow(self) -> tuple[Fraction, ...]:
        """Shares of the links that are up but slow."""
        return tuple(share for _, share in self.up if share < 1)


def match_gpus(topology: Topology, gpus: Sequence[GpuNvlinks]) -> tuple[ListedGpu, ...]:
    """The listed GPUs on the topology.

    Raises
    ------
    TopologyError
        The topology has several servers, or the two are of different machines: a number, model, uuid or number of
        links contradicts; the message names the GPU.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.reading.nvlink_status import parse_nvlink_status
    >>> lines = ["GPU 3: V100", *(f"Link {i}: {'<inactive>' if i > 3 else '25.781 GB/s'}" for i in range(6))]
    >>> gpu, = match_gpus(topoplan.load("dgx-1v"), parse_nvlink_status("\\n".join(lines)))
    >>> gpu.name, gpu.dead, gpu.wires
    ('gpu3', 2, {'gpu0': 2, 'gpu1': 1, 'gpu2': 2, 'gpu7': 1})
    """
    if len(topology.servers) > 1:
        raise TopologyError(
            f"{topology.name} has {len(topology.servers)} servers, and a listing of NVLinks is of one; put it on the "
            "machine of which they are made"
        )
    shares = speed_shares(gpus)
    listed = []
    for gpu in gpus:
        device = _device(topology, gpu.number)
        _check_identity(topology, gpu, device)
        wires = _wires(topology, device.name)
        _check_counts(topology, gpu, sum(wires.values()))
        up = tuple((link.remote, shares[gpu.number, link.index]) for link in gpu.active)
        unwired = 0 if gpu.total is None else gpu.total - sum(wires.values())
        listed.append(ListedGpu(device.name, wires, up, unwired))
    return tuple(listed)


def _device(topology: Topology, number: int) -> Device:
    names = topology.gpus
    numbered = all(re.fullmatch(r"gpu\d+", name) for name in names)
    if f"gpu{number}" in names:
        return topology.device(f"gpu{number}")
    if numbered or number >= len(names):
        known = f"{names[0]} to {names[-1]}" if names else "none"
        raise TopologyError(
            f"GPU {number} is in the listing, but the GPUs of {topology.name} are {known}; {MATCHING_REMEDY}"
        )
    return topology.device(names[number])


def _check_identity(topology: Topology, gpu: GpuNvlinks, device: Device) -> None:
    uuid = device.fact("uuid")
    if uuid and gpu.uuid and uuid.lower() != gpu.uuid.lower():
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.uuid} in the listing and {uuid} in {topology.name}; {MATCHING_REMEDY}"
        )
    listed, known = product_name(gpu.model), product_name(device.model)
    if listed and known and listed != known:
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.model!r} in the listing and {device.model!r} in {topology.name}; "
            f"{MATCHING_REMEDY}"
        )
    sm, made = device.fact("sm"), generation(gpu.model)
    other = generation_of(int(sm)) if re.fullmatch("[0-9]{1,3}", sm) else None
    if made and other and made != other:
        raise TopologyError(
            f"GPU {gpu.number} is {gpu.model!r} in the listing and has compute capability {sm} in {topology.name}; "
            f"{MATCHING_REMEDY}"
        )


def _check_counts(topology: Topology, gpu: GpuNvlinks, wired: int) -> None:
    number, up = gpu.number, len(gpu.active)
    made = generation(gpu.model)
    most = made.links if made else MOST_LINKS
    if len(gpu.links) > most:
        owner = f"a {product_name(gpu.model) or gpu.model}" if made else "no GPU"
        raise TopologyError(
            f"GPU {number} lists {len(gpu.links)} NVLinks, and {owner} has {'only' if made else 'more than'} {most}; "
            "give the output of nvidia-smi nvlink as it is"
        )
    if gpu.total is not None and gpu.total < wired:
        raise TopologyError(
            f"GPU {number} lists {gpu.total} NVLinks, and {topology.name} gives it {wired}; {MATCHING_REMEDY}"
        )
    if up > wired:
        raise TopologyError(
            f"GPU {number} lists {up} NVLinks that are up, and {topology.name} gives it {wired} (NVLinks to CPUs are "
            f"in no matrix); {MATCHING_REMEDY}"
        )


def _wires(topology: Topology, gpu: str) -> dict[str, int]:
    """NVLinks of a GPU by far end, as many in both directions."""
    out = {link.dst: link.count for link in topology.links if link.channel == "nvlink" and link.src == gpu}
    back = {link.src: link.count for link in topology.links if link.channel == "nvlink" and link.dst == gpu}
    for end in (*out, *back):
        forth, reverse = out.get(end, 0), back.get(end, 0)
        if forth != reverse:
            raise TopologyError(
                f"{topology.name} has {forth} NVLinks {gpu}->{end} and {reverse} {end}->{gpu}; listings are put on "
                "machines with as many in both directions"
            )
    return out
