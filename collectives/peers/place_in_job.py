"""The place of a process in its job, as a launcher tells it in the environment.

``RANK`` and ``WORLD_SIZE``, and where the ranks meet: ``TOPOPLAN_RENDEZVOUS`` (``host:port`` or ``unix:/path``), or
``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun and others set them. Where torchrun's own store listens at that port
(``TORCHELASTIC_USE_AGENT_STORE``) the next port is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.peers.address import Address
from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlaceInJob:
    """A rank, the number of ranks, and the address at which they meet."""

    rank: int
    size: int
    rendezvous: str


def place_in_job(environment: Mapping[str, str], backend: str) -> PlaceInJob:
    """The place of the process that has this environment.

    Parameters
    ----------
    environment : mapping
        Variables and values.
    backend : str
        That asks, for messages.

    Raises
    ------
    UsageError
        Names the variables that are missing, or the one whose value is no number.

    Examples
    --------
    >>> place_in_job({"RANK": "1", "WORLD_SIZE": "4", "TOPOPLAN_RENDEZVOUS": "unix:/tmp/here"}, "tcp")
    PlaceInJob(rank=1, size=4, rendezvous='unix:/tmp/here')
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environment.get(name)]
    if not environment.get("TOPOPLAN_RENDEZVOUS"):
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        missing += absent if len(absent) < 2 else ["TOPOPLAN_RENDEZVOUS (or MASTER_ADDR and MASTER_PORT)"]
    if missing:
        raise UsageError(
            f"the {backend} back end finds its place in environment variables, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the ranks with topoplan bench, torchrun or "
            "another launcher that sets them"
        )
    rank, size = (number_of(environment, name) for name in ("RANK", "WORLD_SIZE"))
    return PlaceInJob(rank, size, environment.get("TOPOPLAN_RENDEZVOUS") or master_of(environment))


def master_of(environment: Mapping[str, str]) -> str:
    """The address that ``MASTER_ADDR`` and ``MASTER_PORT`` give, or the next port where torchrun's store has that."""
    port = number_of(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1
    return str(Address(environment["MASTER_ADDR"], port))


def number_of(environment: Mapping[str, str], name: str) -> int:
    """The whole number that a variable holds; UsageError where it holds another text."""
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}; set it to a whole number")
    return int(text)
