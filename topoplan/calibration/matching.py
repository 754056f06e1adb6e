"""Which GPU of a topology each GPU that CUDA shows is.

CUDA numbers the GPUs that a process may see in an order of its own (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``).
Where the topology knows bus ids, they decide. Where it does not, the GPUs are taken in the order of their bus ids, as
``nvidia-smi`` counts them, and there must be as many as the topology has, or as are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topoplan.calibration.report import few
from topoplan.errors import UsageError
from topoplan.hosts.host import bus_id, bus_id_order, plain_bus_id
from topoplan.topology import Topology


@dataclass(frozen=True, slots=True)
class Seen:
    """A GPU of the topology that CUDA shows.

    Parameters
    ----------
    name : str
        Device name in the topology.
    ordinal : int
        Its number in CUDA.
    """

    name: str
    ordinal: int


def match_gpus(
    topology: Topology, gpus: Sequence[int] | None, bus_ids: Sequence[str]
) -> tuple[tuple[Seen, ...], tuple[str, ...]]:
    """The GPUs to measure, in the topology's order, and notes on how they were found.

    Parameters
    ----------
    topology : Topology
        Of one server.
    gpus : sequence of int or None
        GPU numbers in the topology; None for all that can be seen.
    bus_ids : sequence of str
        PCI bus ids of the GPUs that CUDA shows, in its order.

    Raises
    ------
    UsageError
        The topology has several servers or is of another machine; a GPU that is asked for cannot be seen; bus ids
        are needed, or do not tell GPUs apart.

    Examples
    --------
    >>> import topoplan
    >>> shown = [f"0000:{bus}:00.0" for bus in ("0a", "06", "07", "0b")]
    >>> seen, notes = match_gpus(topoplan.load("v100x4"), [0, 3], shown)
    >>> [(gpu.name, gpu.ordinal) for gpu in seen], notes
    ([('gpu0', 1), ('gpu3', 3)], ('v100x4 states no bus ids: GPUs taken in the order of those that CUDA gives',))
    """
    if len(topology.servers) > 1:
        raise UsageError(
            f"{topology.name} has {len(topology.servers)} servers, and one is measured at a time; give the topology "
            "of this server"
        )
    chosen = topology.select(gpus)
    shown = [bus_id(text) for text in bus_ids]
    shared = sorted({busid for busid in shown if shown.count(busid) > 1})
    if shared:
        raise UsageError(
            f"CUDA shows several GPUs at {few(shared)}, which are parts of one (MIG); measure whole GPUs"
        )
    known = {name: topology.device(name).busid for name in topology.gpus}
    if all(known.values()):
        return _by_bus_id(topology, chosen if gpus is not None else None, shown, known)
    names = topology.gpus
    in_order = sorted(range(len(shown)), key=lambda ordinal: bus_id_order(shown[ordinal]))
    if len(shown) == len(names):
        seen = tuple(Seen(names[gpu], in_order[gpu]) for gpu in chosen)
    elif gpus is not None and len(shown) == len(chosen):
        seen = tuple(Seen(names[gpu], ordinal) for gpu, ordinal in zip(chosen, in_order, strict=True))
    else:
        raise UsageError(
            f"CUDA shows {len(shown)} GPUs and {topology.name} has {len(names)} without bus ids, so which is which "
            "cannot be told; give what topoplan probe finds, or --gpus with those that CUDA shows"
        )
    return seen, (f"{topology.name} states no bus ids: GPUs taken in the order of those that CUDA gives",)


def _by_bus_id(
    topology: Topology, chosen: Sequence[int] | None, shown: Sequence[str], known: dict[str, str]
) -> tuple[tuple[Seen, ...], tuple[str, ...]]:
    ordinals = {busid: ordinal for ordinal, busid in enumerate(shown)}
    places = {name: plain_bus_id(busid) for name, busid in known.items()}
    if len(set(places.values())) < len(places):
        raise UsageError(f"{topology.name} has GPUs of equal bus ids; measure whole GPUs, each with its own")
    found = {name: ordinals[busid] for name, busid in places.items() if busid in ordinals}
    if not found:
        raise UsageError(
            f"{topology.name} is another machine: its GPUs sit at {few(places.values())}, and CUDA shows {few(shown)}; "
            "give the topology of this machine"
        )
    names = topology.gpus
    if chosen is not None:
        hidden = [names[gpu] for gpu in chosen if names[gpu] not in found]
        if hidden:
            raise UsageError(
                f"CUDA does not show {few(hidden)}; set CUDA_VISIBLE_DEVICES, or leave them out of --gpus"
            )
        return tuple(Seen(names[gpu], found[names[gpu]]) for gpu in chosen), ()
    hidden = [name for name in names if name not in found]
    foreign = [busid for busid in shown if busid not in places.values()]
    notes = []
    if hidden:
        notes.append(f"not measured, since CUDA does not show them: {few(hidden)}")
    if foreign:
        notes.append(f"not measured, since {topology.name} does not have them: GPUs at {few(foreign)}")
    return tuple(Seen(name, found[name]) for name in names if name in found), tuple(notes)
