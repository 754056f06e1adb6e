"""What ``nvidia-smi nvlink -s`` and ``-R`` would print for a topology some of whose wires are dead or slow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.machine.topology import Topology
from topoplan.units import exact

Wire = tuple[str, str, int]  # two ends, the first a GPU, and which of the parallel wires between them
SPEED = Fraction("25.781")  # GB/s that the driver prints for a link of full speed


def wires_of(machine: Topology) -> list[Wire]:
    """Every NVLink of a machine once."""
    place = {gpu: i for i, gpu in enumerate(machine.gpus)}
    return [
        (link.src, link.dst, k)
        for link in machine.links
        if link.channel == "nvlink"
        and link.src in place
        and place[link.src] < place.get(link.dst, len(place))
        for k in range(link.count)
    ]


def ports_of(machine: Topology) -> dict[str, list[Wire]]:
    """The wires of each GPU in the order in which it numbers its links."""
    return {gpu: [wire for wire in wires_of(machine) if gpu in wire[:2]] for gpu in machine.gpus}


def bus_ids(machine: Topology) -> dict[str, str]:
    """Bus ids that ascend as the GPUs do; those of switches are further ones."""
    others = sorted({end for wire in wires_of(machine) for end in wire[:2]} - set(machine.gpus))
    return {
        name: f"{16 * (i // 6):04x}:{7 + 9 * i:02x}:00.0" for i, name in enumerate([*machine.gpus, *others])
    }


@dataclass(frozen=True, slots=True)
class Listings:
    """A machine whose wires are whole but for those named."""

    machine: Topology
    dead: Collection[Wire] = ()
    speeds: Mapping[Wire, Fraction] | None = None  # share of its speed that a slow wire keeps
    model: str = "NVIDIA GPU"
    links: int = 0  # links of each GPU; those beyond its wires lead nowhere

    def status(self, gpus: Sequence[int] | None = None) -> str:
        """``nvidia-smi nvlink -s`` of some GPUs or all."""
        return "\n".join(self._lines(gpus, self._speed)) + "\n"

    def remotes(self, gpus: Sequence[int] | None = None, *, renumbered: bool = False) -> str:
        """``nvidia-smi nvlink -R``; links that are up are numbered from 0 if ``renumbered``, as drivers do."""
        return "\n".join(self._lines(gpus, self._remote, renumbered=renumbered)) + "\n"

    def _lines(self, gpus, say, *, renumbered: bool = False) -> Iterator[str]:  # type: ignore[no-untyped-def]
        for number, (gpu, wires) in enumerate(ports_of(self.machine).items()):
            if gpus is not None and number not in gpus:
                continue
            yield f"GPU {number}: {self.model} (UUID: GPU-00000000-0000-0000-0000-{number:012d})"
            said = [(i, say(gpu, wire)) for i, wire in enumerate(wires)]
            said += [(i, "<inactive>") for i in range(len(wires), self.links)]
            if renumbered:
                said = list(enumerate(value for _, value in said if value != "<inactive>"))
            yield from (f"\t Link {i}: {value}" for i, value in said)

    def _speed(self, gpu: str, wire: Wire) -> str:
        share = (self.speeds or {}).get(wire, Fraction(1))
        return "<inactive>" if wire in self.dead else f"{float(SPEED * share):.9g} GB/s"

    def _remote(self, gpu: str, wire: Wire) -> str:
        if wire in self.dead:
            return "<inactive>"
        end = wire[1] if wire[0] == gpu else wire[0]
        ports = ports_of(self.machine).get(end, wires_of(self.machine))
        return f"Remote Device 0000{bus_ids(self.machine)[end].upper()}: Link {ports.index(wire)}"

    def damaged(self) -> Topology:
        """The machine as it should be read: each bundle with the wires that are left, at the sum of their speeds."""
        links = []
        for link in self.machine.links:
            if link.channel == "nvlink":
                ends = {link.src, link.dst}
                mine = [wire for wire in wires_of(self.machine) if set(wire[:2]) == ends]
                left = [wire for wire in mine if wire not in self.dead]
                if not left:
                    continue
                kept = sum((self.speeds or {}).get(wire, Fraction(1)) for wire in left) / len(mine)
                link = replace(link, count=len(left), bandwidth=float(exact(link.bandwidth) * kept))
            links.append(link)
        return replace(self.machine, links=tuple(links))
