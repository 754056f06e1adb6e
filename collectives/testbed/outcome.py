"""What a test bed measured, beside what was predicted."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from collectives.testbed.heartbeats import RoundTrips


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A directed link: its devices, the bits per second it was shaped to, and those that arrived as payload."""

    source: str
    destination: str
    shaped: int
    measured: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A schedule at one size.

    Parameters
    ----------
    schedule : str
    nbytes : int
        Bytes of the buffer.
    line_seconds : float
        Size over rate: what the links take if none of the fullest ones ever rests.
    predicted : float
        Seconds by the event simulation of `topoplan simulate` (that of ``--trace``) on the machine of the test bed,
        with the same chunks; by its closed form where they are too many.
    runs : tuple of float
        Seconds of each run, from the agreed start to the last rank's end.
    wrong : int
        Wrong elements of all ranks and runs.
    headroom : float or None
        Part of its share of the links at which every connection was paced; None where none was.
    beats : RoundTrips or None
        Heartbeats beside the data, where there were any.
    """

    schedule: str
    nbytes: int
    line_seconds: float
    predicted: float
    runs: tuple[float, ...]
    wrong: int
    headroom: float | None = None
    beats: RoundTrips | None = None

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster a schedule is than its rival at one size, by the model and by the clock."""

    schedule: str
    rival: str
    nbytes: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a test bed showed.

    Parameters
    ----------
    scale : float
        Rate of a link over its bandwidth.
    bits_per_second : int
        All links together.
    links : tuple of LinkRate
    measurements : tuple of Measurement
        Schedule by schedule, sizes as given.
    rings : tuple of str
        Those of the schedules that are rings: the rivals of the others.
    """

    scale: float
    bits_per_second: int
    links: tuple[LinkRate, ...]
    measurements: tuple[Measurement, ...]
    rings: tuple[str, ...] = ()

    def gains(self) -> tuple[Gain, ...]:
        """How much faster every other schedule is than the ring, at each size; none without a ring."""
        free = [one for one in self.measurements if one.headroom is None]
        rings = {one.nbytes: one for one in free if one.schedule in self.rings}
        return tuple(
            Gain(
                schedule=one.schedule,
                rival=rings[one.nbytes].schedule,
                nbytes=one.nbytes,
                predicted=rings[one.nbytes].predicted / one.predicted,
                measured=rings[one.nbytes].seconds / one.seconds,
            )
            for one in free
            if one.nbytes in rings and one.schedule not in self.rings
        )

    def to_object(self) -> dict[str, object]:
        """A JSON object of everything above."""
        return {
            "scale": self.scale,
            "bits_per_second": self.bits_per_second,
            "links": [asdict(link) for link in self.links],
            "rows": [
                {**asdict(one), "runs": list(one.runs), "seconds": one.seconds} for one in self.measurements
            ],
            "gains": [asdict(gain) for gain in self.gains()],
        }
