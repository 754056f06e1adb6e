"""Model time of buffers in slices: answers by hand, bounds, and the slices that are chosen."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import topoplan
from tests.support.checkout import ROOT
from topoplan.model.dataflow import START_UP
from topoplan.model.window_engine import BLOCKS, ENOUGH, HOPPER
from topoplan.model.window_slices import MOST_SLICES, SlicedClock

MIB = 1 << 20
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce")


@cache
def clock(collective: str, gpus: int = 8, servers: int = 2) -> SlicedClock:
    """Return the clock of DGX H100 with a NIC of 50 GB/s for each GPU, behind PCIe of 48."""
    one = topoplan.Server(topoplan.load("dgx-h100"), list(range(gpus)), count=servers)
    plan = topoplan.plan(topoplan.cluster([one], nic_gbps=400, nics=gpus), collective)
    return SlicedClock(plan, tuple(rank // gpus for rank in range(gpus * servers)))


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_messages_of_a_slice_move_beside_those_kernels_that_read_others(slices: int) -> None:
    """One GPU on each of two servers: the first kernel has no step, and the second reads what has come."""
    nbytes = 64 * MIB
    part = nbytes / slices
    group = START_UP["network"] + part / 48e9
    read = part / HOPPER.block_rate("broadcast") / BLOCKS
    launch = HOPPER.launch
    # groups move without a break, and the last kernel reads the last of them
    wanted = launch + slices * group + launch + read
    found = clock("broadcast", 1).seconds(nbytes, slices, blocks=BLOCKS)
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_slices_overlap_and_no_more_than_that(collective: str) -> None:
    """Kernels alone, and messages alone, are lower bounds; without slices their times add up."""
    made = clock(collective)
    for nbytes in (MIB, 16 * MIB, 1024 * MIB):
        for slices in range(1, MOST_SLICES + 1):
            each = -(-nbytes // slices)
            kernels = slices * sum(made._kernel_seconds(one, each, BLOCKS, 128 << 10) for one in made._phases)
            groups = slices * sum(one.alpha + each * one.load for one in made._phases)
            found = made.seconds(nbytes, slices, blocks=BLOCKS)
            assert max(kernels, groups) * (1 - 1e-12) <= found <= (kernels + groups) * (1 + 1e-12)
            assert slices > 1 or found == pytest.approx(kernels + groups, rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_fewest_slices_within_a_small_part_of_the_fastest(collective: str) -> None:
    made = clock(collective)
    chosen = []
    for nbytes in (1, 1000, *(MIB << power for power in range(12))):
        seconds = [made.seconds(nbytes, slices) for slices in range(1, MOST_SLICES + 1)]
        chosen.append(made.slices(nbytes))
        assert np.isfinite(seconds).all()
        enough = [slices + 1 for slices, one in enumerate(seconds) if one <= min(seconds) * ENOUGH]
        assert chosen[-1] == enough[0]
    assert chosen[:4] == [1] * 4  # up to 2 MiB
    assert chosen == sorted(chosen)
    assert chosen[-1] >= 3


def test_the_page_on_the_engine_has_the_times_of_two_servers() -> None:
    """No outside figure exists; the NICs alone carry the messages of 1 GiB in 4.0 ms."""
    made = clock("allreduce")
    rows = []
    for size, nbytes in (
        ("16 MB", 16 * MIB),
        ("64 MB", 64 * MIB),
        ("256 MB", 256 * MIB),
        ("1 GB", 1024 * MIB),
    ):
        slices = made.slices(nbytes)
        without, found = (made.seconds(nbytes, count) * 1e3 for count in (1, slices))
        rows.append(f"| {size} | {slices} | {without:.2f} ms | {found:.2f} ms |\n")
    assert "".join(rows) in (ROOT / "docs/gpu-engine.md").read_text(encoding="utf-8")
