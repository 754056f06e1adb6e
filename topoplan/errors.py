"""The exception tree of topoplan.

::

    TopoplanError
    ├── TopologyError (ValueError)    a machine description is wrong
    ├── UsageError (ValueError)       a request does not fit the machine (unknown name, bad GPU index)
    ├── InfeasibleError               no plan can exist; carries the cut that proves it
    ├── PlanError (ValueError)        a plan is wrong; names shard, stage and rank
    ├── ProbeError                    hardware or driver did not answer
    └── BackendError                  a running collective failed; names rank, peer and step
        └── RefusedError (UsageError) all ranks refused a collective before data moved; names the rank that differs

Every message is one line: what happened with the values, then what to do.
"""

from __future__ import annotations


class TopoplanError(Exception):
    """Base of every error that topoplan raises on purpose."""


class TopologyError(TopoplanError, ValueError):
    """A machine description is wrong: the message gives field, value and remedy."""


class UsageError(TopoplanError, ValueError):
    """A request does not fit: unknown machine, collective or option, GPU out of range."""


class InfeasibleError(TopoplanError):
    """No plan can exist on these links; ``cut`` names the devices on one side of a cut that no usable link leaves."""

    def __init__(self, message: str, *, cut: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cut = cut


class PlanError(TopoplanError, ValueError):
    """A plan is wrong.

    ``shard``, ``stage`` and ``rank`` are indices into the plan; None if the fault is not that local.
    """

    def __init__(
        self, message: str, *, shard: int | None = None, stage: int | None = None, rank: int | None = None
    ) -> None:
        where = ", ".join(
            f"{label} {value}"
            for label, value in (("shard", shard), ("stage", stage), ("rank", rank))
            if value is not None
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.fault = message
        self.shard = shard
        self.stage = stage
        self.rank = rank

    def within(self, shard: int, stage: int) -> PlanError:
        """Return the same fault with the shard and stage in which it was found."""
        return PlanError(self.fault, shard=shard, stage=stage, rank=self.rank)

    def under(self, heading: str) -> PlanError:
        """Return the same fault with the name of the plan in which it was found, for files of several plans."""
        error = PlanError(f"{heading}: {self}")
        error.shard, error.stage, error.rank = self.shard, self.stage, self.rank
        return error


class ProbeError(TopoplanError):
    """Hardware or driver did not answer: the message says what to install or to pass instead."""


class BackendError(TopoplanError):
    """A running collective failed.

    ``rank`` noticed, ``peer`` is the rank that it waited for or refused, ``step`` that of the transfer table; None if
    unknown.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, peer: int | None = None, step: int | None = None
    ) -> None:
        where = ", ".join(
            f"{label} {value}"
            for label, value in (("rank", rank), ("peer", peer), ("step", step))
            if value is not None
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.rank = rank
        self.peer = peer
        self.step = step


class RefusedError(BackendError, UsageError):
    """All ranks refused a collective before any data moved; the communicator stays usable.

    One rank called it with wrong arguments, or with arguments that differ from those of the other ranks. The message is
    the same on all ranks. ``peer`` is the rank that refused or differs, ``by_all`` says whether every rank refused, and
    ``next_call`` is the number that all ranks give to their next collective.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        by_all: bool = False,
        next_call: int = 0,
    ) -> None:
        super().__init__(message)  # without the place: the text is the same on all ranks
        self.rank = rank
        self.peer = peer
        self.by_all = by_all
        self.next_call = next_call
