"""What a test bed is asked to do, as the process that does it reads it: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from collectives.testbed.commands import Commands
from collectives.testbed.heartbeats import Pulse
from collectives.testbed.link_rates import LinkUnderTest


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan to run.

    Parameters
    ----------
    name : str
    plan : str
        The plan file.
    wires : str
        What the tcp back end reads, ``topoplan.wires/1``.
    pace : float or None
        As `collectives.backends.tcp.backend.TcpBackend` takes it.
    """

    name: str
    plan: str
    wires: str
    pace: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A network, and the plans to run on it.

    Parameters
    ----------
    commands : Commands
    links : tuple of LinkUnderTest
        Links to measure before any plan runs; may be empty.
    ranks : tuple of str
        Namespace of each rank.
    schedules : tuple of Schedule
    sizes : tuple of int
        Bytes of the buffer.
    runs : int
        Timed runs of each schedule and size.
    chunk_bytes : int
    timeout : float
        Seconds that a rank waits for the next step.
    pulses : tuple of Pulse
        Wires that heartbeats go over meanwhile.
    drop : dict of str to tuple of str
        For tc in each namespace, after ``runs`` runs; empty where no link becomes slower.
    most_dropped : int
        Runs from then on, at most, until the ranks say that a link is slow.
    """

    commands: Commands
    links: tuple[LinkUnderTest, ...]
    ranks: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    sizes: tuple[int, ...]
    runs: int
    chunk_bytes: int
    timeout: float
    pulses: tuple[Pulse, ...] = ()
    drop: dict[str, tuple[str, ...]] = field(default_factory=dict)
    most_dropped: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `to_json` wrote.

        Examples
        --------
        >>> job = Job(Commands((), {}, {}), (), ("d0", "d1"), (), (1 << 20,), 1, 65536, 30.0)
        >>> Job.from_json(job.to_json()) == job
        True
        """
        given = json.loads(text)
        return cls(
            commands=Commands(
                tuple(given["commands"]["create"]),
                *(
                    {name: tuple(lines) for name, lines in given["commands"][part].items()}
                    for part in ("inside", "shape")
                ),
            ),
            links=tuple(LinkUnderTest(**link) for link in given["links"]),
            ranks=tuple(given["ranks"]),
            schedules=tuple(Schedule(**schedule) for schedule in given["schedules"]),
            sizes=tuple(given["sizes"]),
            runs=given["runs"],
            chunk_bytes=given["chunk_bytes"],
            timeout=given["timeout"],
            pulses=tuple(Pulse(**pulse) for pulse in given["pulses"]),
            drop={name: tuple(lines) for name, lines in given["drop"].items()},
            most_dropped=given["most_dropped"],
        )
