"""Futures of torch for collectives: nobody who waits for one waits for ever."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from collectives.communicator.handle import Handle
from collectives.tables.numpy_arrays import NumpyArrays

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from collectives.torch.futures import JointWork, future_of  # noqa: E402
from collectives.torch.group_arguments import copy_lines  # noqa: E402


class _Ended(torch.distributed.Work):  # type: ignore[name-defined,misc]
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:  # type: ignore[name-defined]
        ended: torch.futures.Future[Any] = torch.futures.Future()  # type: ignore[name-defined]
        ended.set_result([torch.zeros(6, dtype=torch.uint8)])
        return ended


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_what_is_raised_while_a_result_is_handed_over_comes_out(error: type[BaseException]) -> None:
    """An error by the future; torch's futures do not take what ends the program, and would never end."""

    def hand_over() -> None:
        finish, cpu = Mock(side_effect=error), torch.device("cpu")
        future = future_of(Handle.of(None), None, device=cpu, arrays=NumpyArrays(), finish=finish)
        assert issubclass(error, Exception), "no future of what ends the program"
        future.wait()

    with pytest.raises(error):
        hand_over()


def test_a_joint_work_ends_for_all_threads_once_its_result_is_copied() -> None:
    """The first wait is still in `finish` when another thread waits and a third asks whether it has ended."""

    begun, release = threading.Event(), threading.Event()
    target = torch.zeros(1)

    def finish() -> None:
        begun.set()
        release.wait()
        target.fill_(7)

    def waited() -> None:
        work.wait()
        seen.append(target.item())

    def asked() -> None:
        while not work.is_completed():
            pass
        seen.append(target.item())

    seen: list[float] = []
    work = JointWork([_Ended()], finish)
    first = threading.Thread(target=waited)
    first.start()
    begun.wait()
    others = [threading.Thread(target=waited), threading.Thread(target=asked)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(0.05)
    assert not seen
    release.set()
    for thread in (first, *others):
        thread.join()
    assert seen == [7.0] * 3


def test_a_joint_work_that_is_only_asked_copies_its_result() -> None:

    target = torch.zeros(1)
    work = JointWork([_Ended()], lambda: copy_lines([target], [torch.full((target.numel(),), 7.0)]))
    assert work.is_completed()
    assert target.item() == 7


def test_a_joint_work_of_synchronous_calls_has_no_works_to_wait_for() -> None:
    """NCCL's group returns None for calls without async_op."""
    target = torch.zeros(1)
    work = JointWork([None], lambda: copy_lines([target], [torch.ones(1)]), tensors=[target])
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == [target]
    assert target.item() == 1


def test_a_joint_work_that_does_not_copy_raises_in_every_wait() -> None:

    work = JointWork([_Ended()], Mock(side_effect=ZeroDivisionError))
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()


def test_later_waits_order_their_stream_behind_the_copy_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins of streams, since a copy on a GPU is only queued when `finish` returns."""

    queued = Mock(**{"query.return_value": False})
    first, second = Mock(**{"record_event.return_value": queued}), Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(side_effect=[first, second, second]))
    work = JointWork([_Ended()], lambda: None, torch.device("cuda", 0))
    work.wait()
    work.wait()
    second.wait_event.assert_called_once_with(queued)
    assert not work.is_completed()
    queued.query.return_value = True
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    assert work.is_completed()


def test_a_joint_work_gives_the_tensors_of_its_caller_and_not_the_lines_that_were_exchanged() -> None:

    target = torch.zeros(2, 3)
    work = JointWork(
        [_Ended()], lambda: copy_lines([target], [torch.full((target.numel(),), 7.0)]), tensors=[target]
    )
    assert work.get_future().wait()[0] is target
    assert work.result()[0] is target
    assert target.tolist() == [[7.0] * 3] * 2


def test_the_future_of_a_joint_work_ends_in_the_thread_that_ends_the_work() -> None:
    """Gloo calls back in its own thread, before a wait for the work returns."""

    class Ending(torch.distributed.Work):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.future: torch.futures.Future[Any] = torch.futures.Future()  # type: ignore[name-defined]

        def wait(self, timeout: timedelta | None = None) -> bool:
            raise AssertionError("does not end here")

        def get_future(self) -> torch.futures.Future[Any]:  # type: ignore[name-defined]
            return self.future

    one, finished = Ending(), threading.Event()
    future = JointWork([one], finished.set, tensors=[]).get_future()
    one.future.set_result([])
    assert future.wait() == []
    assert finished.is_set()
