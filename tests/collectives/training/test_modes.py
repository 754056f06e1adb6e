"""Synchronisation modes: clocks, mailboxes, late gradients, local steps with a proximal term, gossip."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Gossip, GradientSynchronizer
from collectives.peers import connections
from collectives.tables.numpy_arrays import NumpyArrays
from collectives.training.averaging import StaleAverager
from collectives.training.exchange_settings import LossScale, TopK
from collectives.training.mailbox import Mailbox
from collectives.training.modes import ASP, BSP, SSP, LocalSGD, Mode, Straggler, may_begin, mode_of
from collectives.training.report import Recorder
from tests.support.file_gather import FileGather
from tests.support.forking import forking
from tests.support.job_meeting import Meeting, as_threads
from topoplan.errors import BackendError, UsageError


def in_threads(size: int, work: Callable[[int, Mailbox], Any], *, timeout: float = 10.0) -> list[Any]:
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        with closing(Mailbox(meeting.gather(rank), rank=rank, size=size, timeout=timeout)) as box:
            return work(rank, box)

    return as_threads(size, run)


def test_strangers_and_false_ranks_keep_no_rank_from_the_rendezvous() -> None:
    """Connections that say something else or nothing, and ones with the key as ranks that are not awaited."""
    meeting, strangers = Meeting(3), list[socket.socket]()

    def gather(rank: int, text: str) -> list[str]:
        texts = meeting.gather(rank)(text)
        if rank == 2 and text.startswith("{"):  # which connects to nobody yet
            host, port, card = json.loads(json.loads(texts[1])["said"])
            for words in (b"GET / HTTP/1.0\r\n\r\n", b"", b"topoplan" + bytes(1 << 10)):
                strangers.append(socket.create_connection((host, port)))
                strangers[-1].sendall(words)
            while [one.name for one in threading.enumerate()].count("mail from 0") < 2:
                time.sleep(0.001)
            for number in (0, 1, 3, -1, True, 0.0, "0", None, [0] * 1000):
                one = socket.create_connection((host, port))
                one = connections.Connection.to(one, card, b"", {"type": "mail", "rank": number}, timeout=10)
                assert one.recv(1) == b"", f"closed, and not taken for rank {number}"
                one.close()
        return texts

    def run(rank: int) -> Any:
        box = Mailbox(lambda text: gather(rank, text), rank=rank, size=3, timeout=20)
        box.post("w", np.full(3, rank))
        sums = box.drain()["w"].tolist()
        box.close()
        return sums

    assert as_threads(3, run) == [[3] * 3, [2] * 3, [1] * 3]
    for one in strangers:
        one.close()


def stale(box: Mailbox, mode: SSP | ASP, scale: Callable[[], float] | None = None) -> StaleAverager:
    recorder = Recorder("test", ranks=box.size)
    return StaleAverager(box, NumpyArrays(), mode, recorder, LossScale(scale))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("told", [True, False])
def test_late_gradients_are_used_once_by_all_whatever_the_loss_scale(told: bool, dtype: str) -> None:
    size, steps = 3, 6
    draw = np.random.default_rng(3)
    gradients = draw.integers(-9, 10, (size, steps, 2, 5))
    wrong = {(1, 2): np.inf, (2, 0): np.nan} if told else {}

    def work(rank: int, box: Mailbox) -> list[Any]:
        scale = [2.0 ** (3 * rank) if told else 1.0]
        averager = stale(box, ASP(), (lambda: scale[0]) if told else None)
        used = np.zeros((2, 5))
        for step in range(steps):
            given = (gradients[rank, step] * scale[0]).astype(dtype)
            given[1, 3] = wrong.get((rank, step), given[1, 3])
            got = np.stack([averager.start(f"{key}", one.copy()).wait() for key, one in enumerate(given)])
            assert got.dtype == dtype
            now = scale[0]
            averager.end_step()
            assert np.isfinite(got).all() == ((rank, step) not in wrong)
            if np.isfinite(got).all():
                used += got.astype(np.float64) / now
            else:
                scale[0] /= 2
        for key, line in averager.finish().items():
            used[int(key)] += line
        return used.tolist()

    found = in_threads(size, work)
    total = sum(
        gradients[rank, step] for rank in range(size) for step in range(steps) if (rank, step) not in wrong
    )
    for one in found:
        np.testing.assert_allclose(one, total / size, atol=0.05 if dtype == "float16" else 1e-5)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 6), st.integers(0, 5), st.data())
def test_clocks_differ_by_the_bound_and_one_at_most_in_any_order(
    ranks: int, bound: int, data: st.DataObject
) -> None:
    clocks = [0] * ranks
    for _ in range(20):
        able = [
            rank
            for rank in range(len(clocks))
            if may_begin(clocks[rank], clocks[:rank] + clocks[rank + 1 :], bound)
        ]
        assert able
        clocks[data.draw(st.sampled_from(able))] += 1
        assert max(clocks) - min(clocks) <= bound + 1


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bsp", BSP()), ("SSP:3", SSP(3)), ("asp", ASP()), ("local:4", LocalSGD(4)), (None, BSP())],
)
def test_a_mode_has_a_name(name: str | None, mode: Mode) -> None:
    assert mode_of(name) == mode == mode_of(mode)


@pytest.mark.parametrize("name", ["ssp", "ssp:", "ssp:-1", "bsp:1", "local:x", "gossip", "", SSP, 2], ids=str)
def test_an_unknown_mode_is_refused_with_the_names_of_modes(name: object) -> None:
    with pytest.raises(UsageError, match=r"mode must be .*'bsp', 'ssp:2', 'asp', 'local:8'"):
        mode_of(name)


def test_modes_have_bounds() -> None:
    assert [mode.bound for mode in (BSP(), SSP(3), ASP(), LocalSGD(4))] == [0, 3, None, 3]
    assert [step for step in range(9) if LocalSGD(4).averages_after(step)] == [3, 7]
    for wrong in (lambda: SSP(-1), lambda: LocalSGD(0), lambda: SSP(1.5)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="must be a whole number"):
            wrong()
    with pytest.raises(UsageError, match=r"factor must be 1 or more, got 0.5"):
        Straggler(0, 0.5, 0, 1)


@pytest.mark.parametrize("mode", [SSP(0), SSP(2), ASP()], ids=str)
def test_every_gradient_is_used_once_by_every_rank_within_the_bound(mode: SSP | ASP) -> None:
    steps, size = 25, 3
    straggler = Straggler(rank=1, factor=3, first=5, last=12)

    def train(rank: int, box: Mailbox) -> tuple[Any, int]:
        exchange = stale(box, mode)
        used = {"a": np.zeros(7), "b": np.zeros((2, 3))}
        generator = np.random.default_rng(rank)
        for step in range(steps):
            straggler.hold_up(rank, step, 0.002)
            for key, total in used.items():
                gradient = generator.integers(-9, 10, total.shape).astype(np.float64) * size
                total += exchange.start(key, gradient).wait()
            exchange.end_step()
        for key, rest in exchange.finish().items():
            used[key] += rest
        return used, box.farthest

    results = in_threads(size, train)
    given = {"a": np.zeros(7), "b": np.zeros((2, 3))}
    for rank in range(size):
        generator = np.random.default_rng(rank)
        for _ in range(steps):
            for total in given.values():
                total += generator.integers(-9, 10, total.shape)
    for used, farthest in results:
        assert all(np.array_equal(used[key], given[key]) for key in given)
        if mode.bound is not None:
            assert farthest <= mode.bound


def test_a_slow_rank_is_sent_sums_instead_of_a_queue() -> None:
    """While rank 1 sleeps, what waits for it on rank 0 is one array for the key, however many were posted."""

    def work(rank: int, box: Mailbox) -> Any:
        if rank == 0:
            for _ in range(200):
                box.post("w", np.ones(1000))
            box.tick()
            most = max(sender.waiting for sender in box._senders.values())
            box.drain()
            return most
        total = np.zeros(1000)
        arrays = 0
        while box._clocks[0] < 1:
            time.sleep(0.05)
            arrived = box.take("w")
            if arrived is not None:
                total += arrived
                arrays += 1
        rest = box.drain().get("w", 0)
        return (total + rest)[0], arrays

    most, (total, arrays) = in_threads(2, work)
    assert most <= 1
    assert total == 200
    assert arrays < 200


def test_pulling_stops_no_rank_and_gives_the_newest_parameters() -> None:
    last = threading.Event()

    def work(rank: int, box: Mailbox) -> Any:
        if rank == 0:
            for step in range(50):
                box.publish({"w": np.full(3, float(step)), "v": np.array([step], np.float32)})
            last.set()
            return box.drain()
        first = box.pull(0)
        assert last.wait(10)
        newest = box.pull(0)
        box.drain()
        return first["w"].tolist(), newest["w"].tolist(), newest["v"].dtype, sorted(newest)

    _, told = in_threads(2, work)
    first, newest, dtype, keys = told
    assert 0 <= first[0] <= 49
    assert (newest, dtype, keys) == ([49.0] * 3, np.float32, ["v", "w"])


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        (lambda box: box.wait_to_begin(1), "waited 0.5 s for rank 1, whose clock stands at 0"),
        (lambda box: box.pull(1), "waited 0.5 s for the parameters of rank 1"),
    ],
    ids=["a step", "parameters"],
)
def test_a_stalled_rank_is_named_after_the_timeout(waits: Callable[[Mailbox], Any], message: str) -> None:
    ended = threading.Event()

    def work(rank: int, box: Mailbox) -> None:
        if rank == 0:
            box.tick()
            box.tick()
            try:
                waits(box)
            finally:
                ended.set()
        ended.wait(60)

    error, *_ = in_threads(2, work, timeout=0.5)
    assert isinstance(error, BackendError)
    assert (error.rank, error.peer) == (0, 1)
    assert message in str(error)


def test_late_sums_of_float16_are_divided_before_they_are_rounded() -> None:
    """Four ranks of 30000, a sum of 120000: all that a rank uses in three steps is 90000 in float16, too."""

    def work(rank: int, box: Mailbox) -> float:
        with pytest.raises(UsageError, match="gradients of int64"):
            stale(box, ASP()).start("w", np.arange(3))
        averager, total = stale(box, SSP(0)), 0.0
        for _ in range(3):
            total += float(averager.start("g", np.full(3, 30000, np.float16)).wait()[1])
            averager.end_step()
        return total + float(averager.finish().get("g", np.zeros(3))[1])

    np.testing.assert_allclose(in_threads(4, work), 90000, rtol=1e-3)


def goes_on(folder: Path, rank: int, met: Any, told: Connection) -> None:
    box = Mailbox(FileGather(folder, rank, 3), rank=rank, size=3, timeout=20)
    met.wait()
    try:
        while True:
            box.wait_to_begin(2)
            box.post("w", np.ones(1000))
            box.take("w")
            box.tick()
            time.sleep(0.005)
    except BackendError as error:
        told.send(str(error))


@pytest.mark.thorough
def test_survivors_name_a_killed_rank(tmp_path: Path) -> None:
    started = forking()
    met, pipes = started.Barrier(4), [started.Pipe(duplex=False) for _ in range(3)]
    ranks = [started.Process(target=goes_on, args=(tmp_path, rank, met, pipes[rank][1])) for rank in range(3)]
    try:
        for rank in ranks:
            rank.start()
        met.wait(60)
        time.sleep(0.2)
        ranks[1].kill()
        for rank in (0, 2):
            assert pipes[rank][0].poll(20)
            assert pipes[rank][0].recv().startswith(f"rank {rank}, peer 1, step ")
    finally:
        for one in ranks:
            one.kill()
            one.join()


# ---- local steps with a proximal term, and gossip, in plain loops

PLAN = topoplan.plan("v100x4")
SPEED = topoplan.neighbour_probabilities("v100x4")
RANKS = 4


def gradient(rank: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A quadratic with another minimum on each rank."""
    return (weights - (rank + 1)) * np.linspace(0.5, 1.5, weights.size)


def trained(
    mode: LocalSGD, steps: int, *, saved_at: int | None = None, scale: float | None = None
) -> list[list[np.ndarray[Any, Any]]]:
    """The weights of all ranks after each step of descent, in float64; gradients may have a loss scale."""
    weights, by = [np.zeros(6) for _ in range(RANKS)], scale or 1.0
    synchronizer = GradientSynchronizer(
        [[one] for one in weights], PLAN, backend="loopback", sync=mode, loss_scale=scale
    )
    seen = []
    for step in range(steps):
        given = [[gradient(rank, one) * by] for rank, one in enumerate(weights)]
        for one, (average,) in zip(weights, synchronizer.step(given), strict=True):
            one -= 0.1 * (average / by)
        synchronizer.after_step([[one] for one in weights])
        seen.append([one.copy() for one in weights])
        if step == saved_at:
            state = synchronizer.state_dict()
            synchronizer.close()
            other = [[np.full(6, 9.0)] for _ in weights]
            synchronizer = GradientSynchronizer(other, PLAN, backend="loopback", sync=mode)
            synchronizer.load_state_dict(state)
    synchronizer.close()
    return seen


def test_no_proximal_term_is_local_sgd_bit_for_bit() -> None:
    np.testing.assert_array_equal(trained(LocalSGD(3, proximal=0.0), 8), trained(LocalSGD(3), 8))
    assert (LocalSGD(3, proximal=0), f"{LocalSGD(3)}") == (LocalSGD(3), "LocalSGD(every=3)")


def test_the_proximal_term_follows_the_loss_scale() -> None:
    mode = LocalSGD(3, proximal=0.7)
    np.testing.assert_array_equal(trained(mode, 8, scale=1024.0), trained(mode, 8))


def test_the_proximal_term_is_the_difference_from_the_last_average() -> None:
    found = trained(LocalSGD(3, proximal=0.7), 8)
    weights = [np.zeros(6) for _ in range(RANKS)]
    anchors = [one.copy() for one in weights]
    for step in range(8):
        for rank, one in enumerate(weights):
            one -= 0.1 * (gradient(rank, one) + 0.7 * (one - anchors[rank]))
        if (step + 1) % 3 == 0:
            mean = np.mean(weights, axis=0)
            weights = [mean.copy() for _ in weights]
            anchors = [mean.copy() for _ in weights]
        np.testing.assert_allclose(found[step], weights, rtol=1e-12)


@pytest.mark.parametrize("saved_at", [3, 5])
def test_a_checkpoint_holds_the_last_average(saved_at: int) -> None:
    mode = LocalSGD(3, proximal=0.7)
    np.testing.assert_array_equal(trained(mode, 8, saved_at=saved_at), trained(mode, 8))


def test_refuses_a_proximal_term_that_does_not_fit() -> None:
    for wrong in (-0.1, float("inf"), float("nan"), True, "1"):
        with pytest.raises(UsageError, match="proximal must be 0 or more, got"):
            LocalSGD(4, proximal=wrong)  # type: ignore[arg-type]
    pulled = LocalSGD(2, proximal=1)
    with pytest.raises(UsageError, match="proximal needs float or complex parameters, got int64"):
        GradientSynchronizer([[np.zeros(3, np.int64)]] * RANKS, PLAN, backend="loopback", sync=pulled)
    parameters = [[np.zeros(3)] for _ in range(RANKS)]
    with GradientSynchronizer(parameters, PLAN, backend="loopback", sync=LocalSGD(2)) as plain:
        state = plain.state_dict()
    with (
        GradientSynchronizer(parameters, PLAN, backend="loopback", sync=pulled) as other,
        pytest.raises(UsageError, match="without the parameters of the last average"),
    ):
        other.load_state_dict(state)


def descended(seed: int, steps: int = 300) -> tuple[list[Any], list[Any], str]:
    """Parameters of four ranks before and after `finish`; each pulls towards a target of its own."""
    targets = np.random.default_rng(0).normal(size=(4, 7))
    weights = [[np.zeros(7), np.zeros((2, 0))] for _ in range(4)]
    mode = Gossip(SPEED, seed=seed)
    with GradientSynchronizer(weights, PLAN, backend="loopback", sync=mode) as synchronizer:
        for step in range(steps):
            gradients = [[mine[0] - target, mine[1]] for mine, target in zip(weights, targets, strict=True)]
            for mine, own in zip(weights, synchronizer.step(gradients), strict=True):
                mine[0] -= 0.5 / (1 + step / 10) * own[0]
            synchronizer.after_step(weights)
        before = [mine[0].copy() for mine in weights]
        synchronizer.finish(weights)
        how = synchronizer.recorder.exchanges()[0].how
    assert np.abs(np.mean(before, axis=0) - weights[0][0]).max() < 1e-12
    return before, [mine[0] for mine in weights], how


def test_gossip_converges_to_the_mean_and_repeats_bit_for_bit() -> None:
    best = np.random.default_rng(0).normal(size=(4, 7)).mean(axis=0)
    before, after, how = descended(1)
    assert how == "gossip"
    assert max(np.abs(one - best).max() for one in before) < 0.15
    assert len({one.tobytes() for one in before}) == 4
    assert len({one.tobytes() for one in after}) == 1
    again, *_ = descended(1)
    other, *_ = descended(2)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in before]
    assert [one.tobytes() for one in other] != [one.tobytes() for one in before]


def test_gossip_chooses_neighbours_by_their_probabilities() -> None:
    mode = Gossip([[0.5, 0.1, 0.4], [1, 0, 0], [0.25, 0.75, 0]], seed=3)
    found = np.bincount([mode.neighbour(0, step) for step in range(4000)], minlength=3) / 4000
    assert found == pytest.approx([0.5, 0.1, 0.4], abs=0.025)
    assert {mode.neighbour(1, step) for step in range(50)} == {0}


def test_gossip_refuses_what_does_not_fit() -> None:
    weights = [[np.zeros(3)] for _ in range(RANKS)]
    pair = Gossip([[0, 1], [1, 0]])
    with pytest.raises(UsageError, match=r"^Gossip\(2 ranks, .*\) must be for 4 ranks, got 2$"):
        GradientSynchronizer(weights, PLAN, backend="loopback", sync=pair)
    with pytest.raises(UsageError, match="seed must be a whole number of 0 or more, got -1"):
        Gossip(SPEED, seed=-1)
    with pytest.raises(
        UsageError, match="compression TopK needs steps that wait for all ranks, got sync Gossip"
    ):
        GradientSynchronizer(weights, PLAN, backend="loopback", sync=Gossip(SPEED), compression=TopK(0.1))
    with GradientSynchronizer(weights, PLAN, backend="loopback", sync=Gossip(SPEED)) as synchronizer:
        synchronizer.step(weights)
        with pytest.raises(UsageError, match=r"call after_step\(parameters\) in every step"):
            synchronizer.step(weights)
        synchronizer.after_step(weights)
        with pytest.raises(UsageError, match=r"parameters of its own after Gossip.*finish\(parameters\)"):
            synchronizer.finish()
    whole = [[np.zeros(3, np.int64)] for _ in range(4)]
    with GradientSynchronizer(whole, PLAN, backend="loopback", sync=Gossip(SPEED)) as synchronizer:
        synchronizer.step(whole)
        with pytest.raises(UsageError, match="parameters of int64 cannot be mixed"):
            synchronizer.after_step(whole)


@pytest.mark.thorough
def test_the_hook_refuses_gossip() -> None:
    torch = pytest.importorskip("torch.distributed")
    if torch.is_initialized():
        pytest.skip("a process group is open")
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=r"use collectives\.GradientSynchronizer$"):
        HookState(PLAN, sync=Gossip(SPEED))
