"""Ranks that grow, and one that goes on after a failure in the same moment, end with the same ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers import agreement
from collectives.torch.parameter_residuals import ParameterNumbers
from collectives.torch.recovery import RecoveringExchange
from collectives.training.averaging import InStepAverager
from collectives.training.exchange_settings import ExchangeSettings
from collectives.training.report import Recorder
from tests.faults.recovery import plan_for
from tests.support.tcp_jobs import SECONDS, backends_in_threads
from topoplan.errors import BackendError, UsageError

STATE = b"what all have but one that comes"


class Job:
    """Four ranks, of which one is gone, and another process that knocks: rank 2 dies while the others let it in.

    Parameters
    ----------
    monkeypatch : MonkeyPatch
    told : int
        How many texts rank 2 says in `grow` before it dies, without rounds in which some rank still plans. What it has
        said last has come to all but rank 1, which hears of the death in its place.
    seat : int
        Which the newcomer wants.
    has : str
        What the newcomer has in common with the others, who have "this".
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, told: int, *, seat: int = 3, has: str = "this"
    ) -> None:
        self.seat, self.has = seat, has
        self.changes: list[tuple[Any, ...]] = []
        self.found: list[Any] = []
        self._door: list[str] = []
        self._opened, self._dead, self._over = (threading.Event() for _ in range(3))
        self.takes: Callable[[], object] = lambda: None
        self.failures: list[str] = []
        self._does: dict[int, Callable[[Callable[[], list[str]]], list[str]]] = {}
        self._counts = {1: itertools.count(1), 2: itertools.count(1)}
        plain = TcpBackend.gather_texts

        def gather(backend: TcpBackend, text: str) -> list[str]:
            does = self._does.get(threading.get_ident())
            return plain(backend, text) if does is None else does(lambda: plain(backend, text))

        monkeypatch.setattr(TcpBackend, "gather_texts", gather)
        monkeypatch.setattr(agreement, "BEAT_SECONDS", 0.001)  # as if the rank that plans were slow
        self._told = told

    def run(self) -> list[Any]:
        """What ranks 0 to 2 have in the end, and the newcomer."""
        thread = threading.Thread(target=self._newcomer, daemon=True)
        thread.start()
        found = backends_in_threads(4, self._rank)
        self._over.set()
        thread.join(SECONDS)
        assert self._dead.is_set()
        return [*found[:3], *self.found]

    def _newcomer(self) -> None:
        assert self._opened.wait(SECONDS)
        with Communicator.join(self._door[0], original_rank=self.seat, wait=SECONDS) as comm:
            try:
                self.found.append(self._grown(self._exchange(comm, has_it=False), self.has))
            except ZeroDivisionError as error:  # and the others hear of it when the communicator closes
                self.found.append(str(error))
            except UsageError as error:
                self.found.append(str(error))
                assert self._over.wait(SECONDS)

    def _rank(self, backend: TcpBackend, rank: int) -> Any:
        with Communicator(plan_for(4), backend) as comm:
            exchange = self._exchange(comm)
            if rank == 3:
                return None
            exchange.settle()
            if rank == 0:
                self._door.append(comm.join_token)
                self._opened.set()
                while comm._members.survivors("grow").join_requests == "[]":
                    self._dead.wait(0.01)
            comm._gather_texts("somebody knocks at rank 0")
            if rank:
                self._does[threading.get_ident()] = self._dies(comm) if rank == 2 else self._is_held_up
            return self._grown(exchange, "this")

    def _exchange(self, comm: Communicator, *, has_it: bool = True) -> RecoveringExchange:
        averager = InStepAverager(comm, ExchangeSettings(), Recorder("test", ranks=comm.size))
        changed = lambda *change: self.changes.append((comm.rank, *change[:3]))  # noqa: E731
        made = RecoveringExchange(averager, ParameterNumbers([]), changed, has_it=has_it)
        recover = made._recover

        def noted(error: BackendError) -> Any:
            self.failures.append(str(error))
            return recover(error)

        made._recover = noted  # type: ignore[method-assign]
        return made

    def _grown(self, exchange: RecoveringExchange, has: str) -> Any:
        taken: list[bytes] = []
        try:
            come = exchange.grow(has, lambda: STATE, lambda data: (self.takes(), taken.append(data)))
            exchange.settle()
        except BackendError as error:
            return str(error)
        return come, exchange._averager.communicator.original_ranks, taken

    def _dies(self, comm: Communicator) -> Callable[[Callable[[], list[str]]], list[str]]:
        def does(say: Callable[[], list[str]]) -> list[str]:
            found = say() if self._told else []
            if not still_planning(found) and next(self._counts[2]) >= self._told:
                comm.close()
                self._dead.set()
                raise BackendError("dies")
            return found

        return does

    def _is_held_up(self, say: Callable[[], list[str]]) -> list[str]:
        found = say()
        if not still_planning(found) and next(self._counts[1]) == self._told:
            assert self._dead.wait(SECONDS)
            raise BackendError("rank 2 has died", rank=1, peer=2)
        return found


def still_planning(texts: list[str]) -> bool:
    """Whether a round of texts is one of those that repeat until all ranks are ready, as many as the load makes."""
    return any('"busy"' in text for text in texts)


@pytest.mark.parametrize(
    ("told", "place"),
    [(1, 2), *(pytest.param(*one, marks=pytest.mark.thorough) for one in [(2, 2), (3, 2), (4, 2), (5, 3)])],
)
def test_ranks_that_grow_and_one_that_goes_on_without_another_agree(
    told: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who dies when all but one have ended `grow` is one of those that are counted in it."""
    zero, one, _, new = Job(monkeypatch, told).run()
    assert zero == one == ((place,), (0, 1, 3), [])
    assert new == ((place,), (0, 1, 3), [STATE])


@pytest.mark.parametrize("told", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_one_that_comes_with_something_else_is_left_out_by_all_also_where_another_dies(
    told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, _, new = Job(monkeypatch, told, has="that").run()
    assert zero == one == ((), (0, 1), [])
    assert new == "this rank has that, and the others this; make model and state the same"


def test_who_comes_in_place_of_one_that_dies_meanwhile_is_told_as_one_that_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 0, seat=2)
    zero, one, _, new = job.run()
    assert zero == one == ((2,), (0, 1, 2), [])
    assert new == ((2,), (0, 1, 2), [STATE])
    assert [change[1:] for change in job.changes if change[0] == 0] == [
        ((0, 1, 2, 3), (0, 1, 2), (3,)),
        ((0, 1, 2), (0, 1, 2), (2,)),
    ]


@pytest.mark.thorough
def test_what_one_that_comes_raises_the_others_hear_and_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 1)
    job.takes = lambda: 1 // 0
    zero, one, _, new = job.run()
    assert zero == one == ((), (0, 1), [])
    assert new == "integer division or modulo by zero"
    assert sum("growing: ZeroDivisionError: integer division" in text for text in job.failures) == 2
