"""What the windows engine costs on a GPU: start-ups and rates, those that NCCL publishes or those that were measured.

NCCL chooses among its symmetric kernels, which read and write the peers' memory as the engine does, by a model of one
line (2.30.7, ``src/sym_kernels.cc``, ``queryModel_lsa``): a base time, and the bytes on a GPU's port over what so many
blocks move, which a peak limits. Its figures in GiB/s stand below in GB/s. It states no time of a flag. Its base of
kernels that send data and flag in packets covers a launch and one hop, its base of all others a launch and three, since
they begin and end with a barrier, and so both follow from the two:

    Hopper      launch + hop = 4.5 us    launch + 3 hop = 7.8 us     hop = 1.65 us, launch = 2.85 us
    Blackwell   launch + hop = 11 us     launch + 3 hop = 19.5 us    hop = 4.25 us, launch = 6.75 us

In the file, format ``topoplan.engine-costs/1``, stand the fields of `EngineCosts` by their names.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from topoplan.errors import TopologyError, UsageError
from topoplan.formats.topology_json import NUMBER, PRINTABLE, WHOLE, check_keys, decode_json
from topoplan.hosts.gpu_identity import compute_capability
from topoplan.topology import Topology, shown

FORMAT = "topoplan.engine-costs/1"

BLOCKS = 24
"""Blocks that the engine's kernel has at most."""

_GIB = 1.073741824
"""GB/s of a GiB/s."""

_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Start-ups and rates of the windows engine on one kind of GPU.

    Parameters
    ----------
    name : str
        The kind of GPU.
    source : str
        Where the figures come from.
    launch : float
        Seconds from the call until its kernel, the only one, does the first thing.
    hop : float
        Seconds from a store until the peer has seen the flag behind it; also how long a block waits for that.
    allreduce_rate, other_rate : float
        GB/s that one block of 512 threads moves into and out of slots, in an allreduce and in the other collectives.
    peak : float
        GB/s that a GPU sends at most, and receives at most, over all its links; these may have less.
    packet_factor : float
        What a byte in packets costs in bytes: 2 on the wire, and NCCL counts 9, "2X the bytes, plus some processing,
        plus no unrolling".
    fewest_blocks : int
        Fewer are not considered.

    Raises
    ------
    UsageError
        A figure is zero, negative or beyond all sense, or the engine cannot have so many blocks.
    """

    name: str
    source: str
    launch: float
    hop: float
    allreduce_rate: float
    other_rate: float
    peak: float
    packet_factor: float = 9.0
    fewest_blocks: int = 1

    def __post_init__(self) -> None:
        for key in ("launch", "hop", "allreduce_rate", "other_rate", "peak", "packet_factor"):
            value = getattr(self, key)
            if not 0 < value <= _LARGEST:
                raise UsageError(f"{key} {shown(value)} must be a number above zero, of {_LARGEST:g} at most")
        if not 1 <= self.fewest_blocks <= BLOCKS:
            raise UsageError(
                f"fewest_blocks {shown(self.fewest_blocks)} must be a whole number from 1 to {BLOCKS}"
            )

    def block_rate(self, collective: str) -> float:
        """Bytes per second that one block moves."""
        return (self.allreduce_rate if collective == "allreduce" else self.other_rate) * 1e9

    def to_json(self) -> str:
        """The file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


HOPPER = EngineCosts(
    name="Hopper",
    source="NCCL's model",
    launch=2.85e-6,
    hop=1.65e-6,
    allreduce_rate=65 * _GIB,
    other_rate=44 * _GIB,
    peak=320 * _GIB,
)

BLACKWELL = EngineCosts(
    name="Blackwell",
    source="NCCL's model",
    launch=6.75e-6,
    hop=4.25e-6,
    allreduce_rate=55 * _GIB,
    other_rate=55 * _GIB,
    peak=600 * _GIB,
)

BY_CAPABILITY = {90: HOPPER, 100: BLACKWELL}
"""The figures of GPUs from this compute capability on."""


def costs_of(topology: Topology) -> tuple[EngineCosts, str]:
    """The figures for the oldest of a machine's GPUs, and in one line what is assumed by taking them.

    For GPUs older than all that have figures, Hopper's are taken with all blocks that the engine may have.

    Examples
    --------
    >>> import topoplan
    >>> costs, words = costs_of(topoplan.load("dgx-a100"))
    >>> costs.fewest_blocks, words
    (24, 'no figures of one kernel over NVLink are known for A100: 24 blocks, and else those of Hopper are assumed')
    >>> costs_of(topoplan.load("dgx-b200"))[1]
    "windows engine: figures of Blackwell, from NCCL's model; --engine-costs takes measured ones"
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    known = {gpu.model: _capability(gpu.fact("sm"), gpu.model) for gpu in gpus}
    model, oldest = min(known.items(), key=lambda item: (item[1], item[0]))
    least = max((sm for sm in BY_CAPABILITY if sm <= oldest), default=None)
    if least is None:
        return replace(HOPPER, fewest_blocks=BLOCKS), (
            f"no figures of one kernel over NVLink are known for {model or 'a GPU without a name'}: "
            f"{BLOCKS} blocks, and else those of Hopper are assumed"
        )
    costs = BY_CAPABILITY[least]
    return costs, f"{words_of(costs)}; --engine-costs takes measured ones"


def _capability(stated: str, model: str) -> int:
    return int(stated) if stated.isdecimal() else compute_capability(model) or 0


def words_of(costs: EngineCosts) -> str:
    """The line that says whose figures were taken."""
    return f"windows engine: figures of {costs.name}, from {costs.source}"


def load_costs(path: str | os.PathLike[str]) -> EngineCosts:
    """Read a file of figures.

    Raises
    ------
    UsageError
        It cannot be read, or a key is unknown, missing, of a wrong type or out of range.
    """
    where = os.fspath(path)
    try:
        value = decode_json(Path(path).read_text(encoding="utf-8"), where)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}; give a file of engine costs") from None
    except TopologyError as error:
        raise UsageError(f"{error}; give a file of engine costs") from None
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; give a file of engine costs") from None
    known = value.get("format") if isinstance(value, dict) else None
    if known != FORMAT:
        raise UsageError(
            f"{where}: format {shown(known)} is not {FORMAT!r}; give a file of engine costs, such as "
            "python -m tests.gpu_report writes"
        )
    types = {"format": PRINTABLE, "name": PRINTABLE, "source": PRINTABLE, "fewest_blocks": WHOLE}
    names = [field.name for field in fields(EngineCosts)]
    keys = {name: types.get(name, NUMBER) for name in ("format", *names)}
    try:
        stated = check_keys(value, keys, tuple(names[:-2]), where)
        return EngineCosts(**{key: stated[key] for key in names if key in stated})  # type: ignore[arg-type]
    except TopologyError as error:
        raise UsageError(str(error)) from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
