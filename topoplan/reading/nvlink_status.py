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
from topoplan.machine.host_topology import bus_id
from topoplan.machine.topology import Device, Topology
from topoplan.units import exact

SPEEDS, REMOTES = "nvidia-smi nvlink -s", "nvidia-smi nvlink -R"

REMEDY = f"give the whole output of {SPEEDS} or {REMOTES}"

FarEnd = tuple[str, int | None]
"""Bus id of a far end, empty if it is hidden, and the number of the link there."""

State = float | FarEnd | None
"""State of a link in a listing: its GB/s, its far end, or None if it is down."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_GPU = re.compile(r"\s*GPU\s+(\d{1,6})\s*:(.*)")
_UUID = re.compile(r"(.*?)\(\s*UUID\s*:\s*([^()]*)\).*")
_LINK = re.compile(r"\s*Link\s+(\d{1,4})\s*:(.*)")
_NVML = re.compile(r".*?NVML\s*:\s*(.*)")
_SPEED = re.compile(r"(\S+)\s*GB/s", re.IGNORECASE)
_DOWN = re.compile(r"(Remote Device\s+)?<?\s*(inactive|n/a|disabled|down|off)\s*>?", re.IGNORECASE)
_REMOTE = re.compile(r"(?:Remote Device\s+)?(?=\S+:)(\S+\.\w)(?:\s*:\s*Link\s+(\S+))?", re.IGNORECASE)
_HIDDEN = re.compile(r"[fF:.]+(?:\.0)?")


@dataclass(slots=True)
class ListingSection:
    """The lines below one GPU line.

    ``model`` and ``uuid`` are empty if they are not printed in full. ``tables`` hold the state of each link by
    listing (`SPEEDS` or `REMOTES`). ``none_up``: the driver said that all links are inactive. ``supported`` is False
    if the driver said that the GPU has no NVLink.
    """

    number: int
    model: str
    uuid: str
    tables: dict[str, dict[int, State]] = field(default_factory=lambda: {SPEEDS: {}, REMOTES: {}})
    none_up: bool = False
    supported: bool = True


def read_sections(text: str) -> list[ListingSection]:
    """Return the sections of a text, in its order; raise a TopologyError for a line that cannot be placed."""
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
                f"line {number} ({quoted(line)}) precedes every GPU line such as 'GPU 0: …'; {REMEDY}"
            )
        if link:
            links.append((int(link[1]), link[2].strip()))
        elif answer:
            _read_answer(sections[-1], answer[1])
    _read_links(sections[-1:], links)
    return sections


def quoted(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _section(number: int, rest: str) -> ListingSection:
    known = _UUID.fullmatch(rest)
    model = known[1] if known else rest.split("NVML", 1)[0]
    uuid = known[2].strip() if known else ""
    return ListingSection(number, model.strip(), uuid if re.fullmatch(r"GPU-\S*\w", uuid) else "")


def _read_links(sections: list[ListingSection], links: list[tuple[int, str]]) -> None:
    """Enter the link lines below the GPU line of the last section."""
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
    """Return the listing and the state of each line; a line with only "inactive" belongs to the listing around it."""
    states = [_state(f"GPU {gpu}, link {index}", value) for index, value in links]
    listings = ["" if state is None else SPEEDS if isinstance(state, float) else REMOTES for state in states]
    latest = next((listing for listing in listings if listing), SPEEDS)
    for i, listing in enumerate(listings):
        latest = listings[i] = listing or latest
    # A link of speed 0 is down.
    return listings, [None if state == 0.0 else state for state in states]


def _state(where: str, value: str) -> State:
    speed, remote = _SPEED.fullmatch(value), _REMOTE.fullmatch(value)
    if _DOWN.fullmatch(value):
        return None
    if speed:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,9})?", speed[1]):
            raise TopologyError(f"{where}: speed must be a number of GB/s, got {quoted(speed[1])}; {REMEDY}")
        return float(speed[1])
    if not remote:
        raise TopologyError(
            f"{where}: {quoted(value)} is neither a speed such as 25.781 GB/s, nor <inactive>, nor a remote device; "
            f"{REMEDY}"
        )
    if remote[2] is not None and not re.fullmatch(r"\d{1,4}", remote[2]):
        raise TopologyError(f"{where}: remote link must be a number, got {quoted(remote[2])}; {REMEDY}")
    if _HIDDEN.fullmatch(remote[1]):
        # Printed for a switch that this system cannot see.
        return "", None
    try:
        return bus_id(remote[1]), None if remote[2] is None else int(remote[2])
    except TopologyError as error:
        raise TopologyError(f"{where}: remote device {error}; {REMEDY}") from None


def _read_answer(section: ListingSection, answer: str) -> None:
    """Enter the driver's message that stands in place of links."""
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
    """Yield every link of a listing in these sections, with its state."""
    for section in sections:
        yield from section.tables[listing].items()


_MATRIX = re.compile(r"(?m)^[^\w\n]*GPU\d+\s+(?:X|GPU\d+|NV\d+|SYS|NODE|PHB|PXB|PIX)\b")


@dataclass(frozen=True, slots=True)
class NvlinkState:
    """One NVLink of a GPU.

    ``speed`` is in GB/s per direction, None for a link that is down or without ``-s``. ``remote`` is the bus id of the
    far end (see `topoplan.machine.host_topology.bus_id`), empty if it is hidden or without ``-R``.
    """

    index: int
    active: bool
    speed: float | None = None
    remote: str = ""
    remote_link: int | None = None


@dataclass(frozen=True, slots=True)
class GpuNvlinks:
    """The NVLinks of one GPU, in ascending order of their numbers.

    ``total`` is the number of NVLinks that the GPU has, None if the listing may leave out inactive ones.
    """

    number: int
    model: str
    uuid: str
    links: tuple[NvlinkState, ...]
    total: int | None

    @property
    def active(self) -> tuple[NvlinkState, ...]:
        return tuple(link for link in self.links if link.active)


def parse_nvlink_status(text: str) -> tuple[GpuNvlinks, ...]:
    """Parse the output of ``nvidia-smi nvlink -s``, of ``nvidia-smi nvlink -R``, or both.

    The result is in ascending order of GPU numbers, without GPUs of which nothing is listed. A TopologyError names the
    GPU and the link of a line that cannot be parsed or contradicts another one.
    """
    sections = read_sections(text)
    if not sections:
        if _MATRIX.search(text):
            raise TopologyError(
                f"this is the matrix of nvidia-smi topo -m, which is a machine; for the overlay {REMEDY}"
            )
        raise TopologyError(f"this is not a listing of NVLinks (no line such as 'GPU 0: …'); {REMEDY}")
    numbers = sorted({section.number for section in sections})
    gpus = [_joined(number, [one for one in sections if one.number == number]) for number in numbers]
    listed = tuple(gpu for gpu in gpus if gpu is not None)
    if not listed:
        raise TopologyError(f"no NVLink is listed below the GPU lines; {REMEDY}")
    return listed


def _joined(number: int, sections: list[ListingSection]) -> GpuNvlinks | None:
    """Join the sections of one GPU; return None if they list nothing."""
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
    """Return the states of a GPU's links that all listings of one kind agree on."""
    table: dict[int, State] = {}
    for index, state in lines_of(sections, listing):
        if table.setdefault(index, state) != state:
            raise TopologyError(
                f"GPU {number}, link {index}: {_state_text(table[index])} in one listing, {_state_text(state)} in "
                "another; take the listings at one time"
            )
    return table


def _state_text(state: State) -> str:
    if state is None:
        return "inactive"
    return f"{state:g} GB/s" if isinstance(state, float) else f"to {state[0] or 'a hidden device'}"


def _links(number: int, speeds: Mapping[int, State], remotes: Mapping[int, State]) -> tuple[NvlinkState, ...]:
    """Combine speeds and far ends (see the head of this file)."""
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
    """Return the far ends by the link numbers of ``-s``."""
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
    """Return the product that a model text names, empty if none is recognised.

    >>> [product_name(text) for text in ("Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "GeForce RTX 3090", "GPU")]
    ['V100', 'H100', '3090', '']
    """
    match = _PRODUCT.search(model)
    return (match[1] or match[2]) if match else ""


def generation(model: str) -> GpuGeneration | None:
    """Return the generation of a model, None if it is not known."""
    capability = compute_capability(model)
    return None if capability is None else generation_of(capability)


def speed_shares(gpus: Sequence[GpuNvlinks]) -> dict[tuple[int, int], Fraction]:
    """Return each active link's share of its normal speed, at most 1, by GPU and link; 1 if no speed is stated.

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
    """Return a key that GPUs with equal links share."""
    return product_name(gpu.model) or gpu.model


MATCHING_REMEDY = "the listing is of another machine; give that of this one"


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU with the state of its NVLinks.

    ``wires`` count the topology's NVLinks by the device at the far end. ``up`` holds for each active link the bus id
    of its far end, empty if it is hidden, and the share of its normal speed. ``unwired`` counts links that the GPU
    lists beyond the topology's; none of them is up.
    """

    name: str
    wires: dict[str, int]
    up: tuple[tuple[str, Fraction], ...]
    unwired: int

    @property
    def dead(self) -> int:
        """Return the number of the topology's links that are down."""
        return sum(self.wires.values()) - len(self.up)

    @property
    def slow(self) -> tuple[Fraction, ...]:
        """Return the shares of the links that are up but slow."""
        return tuple(share for _, share in self.up if share < 1)


def match_gpus(topology: Topology, gpus: Sequence[GpuNvlinks]) -> tuple[ListedGpu, ...]:
    """Match the listed GPUs to those of the topology.

    A TopologyError names the GPU whose number, model, uuid or number of links contradicts the topology.
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
    """Return the NVLinks of a GPU by far end; raise if the two directions have different numbers of them."""
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
