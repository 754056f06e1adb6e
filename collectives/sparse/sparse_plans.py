"""The sparse plans of a communicator: which exchanges its machine has, and their model times.

Plans are made when they are first asked for, and kept: one for each exchange and each size of the entries.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any

from collectives.execution.execution import Execution
from collectives.sparse.round_runner import RoundRunner
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.plan import Plan
from topoplan.plans.verify import verify
from topoplan.schedules.lowest_tree import lowest_tree
from topoplan.schedules.one_hop import one_hop
from topoplan.schedules.sparse_plan import sparse_trees
from topoplan.schedules.sparse_servers import sparse_servers
from topoplan.simulation.model import simulate

KINDS = ("servers", "tree", "balanced")
"""Exchanges that have plans of their own."""

MOST_RANKS = 64
"""Ranks up to which trees on entries are looked for: every rank would be the root of a star to all others."""


class SparsePlans:
    """Plans on which entries move, for the machine of a communicator.

    Parameters
    ----------
    execution : Execution
    """

    def __init__(self, execution: Execution[Any]) -> None:
        self._execution = execution
        self._runners: dict[tuple[str, Fraction], RoundRunner[Any]] = {}
        self._seconds: dict[tuple[str, Fraction, int], float] = {}
        self._elements: dict[str, Plan] = {}
        self._absent: dict[str, str] = {}

    def possible(self, entries: Fraction) -> tuple[str, ...]:
        """The exchanges that have a plan on this machine: servers, tree, balanced; ``entries`` as in `runner`."""
        return tuple(name for name in KINDS if not self._missing(name, entries))

    def runner(self, exchange: str, entries: Fraction) -> RoundRunner[Any]:
        """The rounds of a verified sparse plan.

        Parameters
        ----------
        exchange : str
            servers, tree or balanced.
        entries : Fraction
            Bytes of entries for a byte of the gradient.

        Raises
        ------
        UsageError
            This machine has no such exchange.
        """
        missing = self._missing(exchange, entries)
        if missing:
            others = ", ".join(("dense", "pairs", *self.possible(entries)))
            raise UsageError(f"there is no exchange {exchange!r} here: {missing}; use {others}")
        return self._runners[exchange, entries]

    def seconds(self, exchange: str, entries: Fraction, nbytes: int) -> float:
        """Model time of an exchange for a gradient of so many bytes."""
        key = (exchange, entries, nbytes)
        if key not in self._seconds:
            self._seconds[key] = simulate(self.runner(exchange, entries).plan, nbytes=nbytes).seconds
        return self._seconds[key]

    @property
    def _channels(self) -> str:
        return "+".join(self._execution.channels)

    @cached_property
    def _servers(self) -> Servers:
        return Servers(Fabric(self._execution.topology, self._execution.channels))

    def _missing(self, exchange: str, entries: Fraction) -> str:
        """Why this machine does not have an exchange, found out once; empty where it does, and then it is planned."""
        if exchange not in self._absent:
            self._absent[exchange] = self._reason(exchange)
        if not self._absent[exchange] and (exchange, entries) not in self._runners:
            try:
                made = self._plan(exchange, entries)
            except RefusedError:
                raise
            except (InfeasibleError, UsageError):
                self._absent[exchange] = "the machine has no way for it"
            else:
                verify(made)
                self._runners[exchange, entries] = RoundRunner(self._execution, made)
        return self._absent[exchange]

    def _plan(self, exchange: str, entries: Fraction) -> Plan:
        if exchange != "servers":
            return sparse_trees(self._trees_of(exchange), entries=entries)
        topology, channels = self._execution.topology, self._channels
        return self._made(
            lambda: sparse_servers(topology, entries=entries, channels=channels), f"servers, {entries}"
        )

    def _made(self, make: Callable[[], Plan], about: str) -> Plan:
        """A plan that one rank makes for all."""
        made = self._execution.planned(make, collective="allreduce", about=f"plan of {about}")
        assert isinstance(made, Plan), "no plans by size"
        return made

    def _reason(self, exchange: str) -> str:
        """Why an exchange makes no sense here; empty where it does."""
        ranks, servers = self._execution.backend.size, len(self._servers.names)
        if ranks == 1:
            return "there is one rank"
        if exchange == "servers":
            return (
                ""
                if 1 < servers < ranks
                else f"it is for several servers with several ranks, not {servers} for {ranks}"
            )
        if len(self._execution.channels) > 1 and "network" not in self._execution.channels:
            return "the buffer is divided between channels"
        return "" if ranks <= MOST_RANKS else f"it is looked for up to {MOST_RANKS} ranks"

    def _trees_of(self, exchange: str) -> Plan:
        """The allreduce of elements whose trees carry the entries."""
        if exchange not in self._elements:
            topology, channels = self._execution.topology, self._channels
            if exchange == "tree":
                found = self._made(lambda: lowest_tree(topology, channels=channels), "one low tree")
            else:
                try:
                    found = self._made(lambda: one_hop(topology, channels=channels), "stars")
                except InfeasibleError:
                    found = self._execution.plan("allreduce", 1 << 30)
            self._elements[exchange] = found
        return self._elements[exchange]
