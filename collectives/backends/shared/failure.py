"""What went wrong, as one rank tells it to the others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from topoplan.errors import BackendError


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a collective cannot go on.

    Parameters
    ----------
    rank : int
        Who noticed.
    peer : int
        Who failed.
    step : int
        The row of the transfer table that could not run; 0 where none had begun.
    text : str
    lost : bool
        Whether the peer has died or does not answer, so that MPI cannot be shut down in order.
    time : int
        Nanoseconds of the noticing host's steady clock.

    Examples
    --------
    >>> seen = Failure(2, 0, 17, "the peer died", True, 5)
    >>> Failure.unpack(seen.pack()) == seen, seen.error(2).args[0]
    (True, 'rank 2, peer 0, step 17: the peer died')
    >>> print(seen.error(3))
    rank 3, peer 0, step 17: rank 2 noticed: the peer died
    """

    LENGTH: ClassVar[int] = 768
    """Bytes of a packed failure."""

    rank: int
    peer: int
    step: int
    text: str
    lost: bool
    time: int

    def pack(self) -> bytes:
        """As `LENGTH` bytes of JSON; a long text is cut."""
        packed = json.dumps(asdict(self)).encode()
        if len(packed) > self.LENGTH:
            text = self.text.encode("ascii", "replace").decode()
            packed = json.dumps(asdict(replace(self, text=text[: self.LENGTH // 2 - 120]))).encode()
        return packed.ljust(self.LENGTH)

    @classmethod
    def unpack(cls, data: bytes) -> Failure:
        """Read what `pack` wrote."""
        return cls(**json.loads(data))

    def error(self, rank: int) -> BackendError:
        """The failure as an error of one rank, which may not have noticed by itself."""
        text = self.text if rank == self.rank else f"rank {self.rank} noticed: {self.text}"
        return BackendError(text, rank=rank, peer=self.peer, step=self.step)
