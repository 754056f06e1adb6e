"""Where the ranks of a part of a job meet, told over the whole job."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.peers.error_rounds import Gather, say_all
from collectives.peers.rendezvous import Rendezvous


def meeting_within(
    gather: Gather, members: Sequence[int], *, rank: int, local: str
) -> tuple[str, Rendezvous | None]:
    """The address at which the members of a rank's group meet, and what serves it on the first of them.

    Parameters
    ----------
    gather : callable
        Over all ranks of the job, which call this at once, each with its own group.
    members : sequence of int
        With this rank.
    rank : int
    local : str
        The address of this machine that other ranks reach.

    Raises
    ------
    UsageError
        The first of a group cannot listen; on all ranks.
    """
    places: list[Rendezvous] = []

    def told() -> str:
        if members[0] != rank:
            return ""
        places.append(Rendezvous(f"{local}:0", len(members), host=0, told=True).start())
        return places[0].address

    try:
        return say_all(gather, told)[members[0]], places[0] if places else None
    except BaseException:
        for place in places:
            place.close()
        raise
